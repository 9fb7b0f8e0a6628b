/* Streams, events, capture and graphs. Each stream has a queue of work, and the calling thread runs it: at once, as
 * late as possible (STANDIN_LATE), or at random moments (STANDIN_SHUFFLE). A capturing stream records its work instead,
 * and a graph launch is one piece of work that runs all that was recorded. A stream joins a capture by waiting for an
 * event that was recorded in it.
 */
#define _GNU_SOURCE
#include "standin.h"

/* The types only: streams, events and graphs here serve runtime and driver alike. */
#include <driver_types.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* All work of a stream up to some moment. Over from the start if there is no stream. */
struct moment {
    struct stream* stream;
    uint64_t at;
};

struct node {
    struct node* next;
    work_fn work; /* or NULL, for the wait of one stream for another */
    void* state;
    struct moment after; /* when the work may start */
};

struct queue {
    struct node *first, *last;
};

struct graph {
    int id;
    bool open, global; /* being captured */
    size_t count;
    struct queue work;
};

struct stream {
    struct stream* next;
    unsigned id;
    struct graph* graph;  /* being captured, or NULL */
    struct queue waiting; /* work that has not run yet */
    uint64_t queued, done;
    bool asked;
};

struct event {
    struct graph* graph; /* that was being captured where it was recorded */
    struct moment recorded;
    bool asked;
    double link_time;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Held while work runs, and while it is submitted or waited for and logged: the log has the order of the queues. */
static pthread_mutex_t running = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static struct stream legacy;
static struct stream* streams = &legacy;
static int graphs_made;

static struct stream* of(void* handle) { return (uintptr_t)handle <= 2 ? &legacy : handle; }

bool standin_capturing(void* stream) { return of(stream)->graph != NULL; }

static void push(struct queue* queue, struct node it) {
    struct node* node = malloc(sizeof *node);
    *node = it;
    if (queue->last)
        queue->last->next = node;
    else
        queue->first = node;
    queue->last = node;
}

static void append(struct graph* graph, work_fn work, void* state) {
    pthread_mutex_lock(&lock);
    push(&graph->work, (struct node){.work = work, .state = state});
    graph->count++;
    pthread_mutex_unlock(&lock);
}

static void* kept(const void* state, size_t nbytes) { return memcpy(malloc(nbytes), state, nbytes); }

/* ---- when queued work runs ---- */

static bool late(struct stream* stream) {
    long long which = standin_setting("STANDIN_LATE", 0);
    return which == (stream == &legacy ? 1 : 2);
}

static long long chosen_seed = -1;
static uint64_t drawn;

static long long seed(void) { return chosen_seed >= 0 ? chosen_seed : standin_setting("STANDIN_SHUFFLE", -1); }

static bool shuffled(void) { return seed() >= 0; }

/* splitmix64 */
static uint64_t mixed(uint64_t bits) {
    bits += 0x9e3779b97f4a7c15;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
    return bits ^ (bits >> 31);
}

/* A random number of the seed, below `below`: the next one, or one that the seed always has for `what`. */
static unsigned draw(unsigned below) { return mixed(mixed(seed()) + ++drawn) % below; }
static unsigned trait(unsigned what, unsigned below) { return mixed(~mixed(seed()) + what) % below; }

static bool is_over(struct moment moment) { return !moment.stream || moment.stream->done >= moment.at; }

/* The next work of the stream waits for another stream. */
static bool blocked(struct stream* stream) { return !is_over(stream->waiting.first->after); }

/* A stream that has work which may run. A seed has fast and slow streams: one may be far ahead of another. */
static struct stream* any_ready(void) {
    enum { PACES = 8 };
    struct stream* chosen = NULL;
    unsigned total = 0;
    for (struct stream* each = streams; each; each = each->next) {
        if (!each->waiting.first || blocked(each)) continue;
        unsigned weight = 1u << trait(each->id, PACES);
        total += weight;
        if (draw(total) < weight) chosen = each;
    }
    return chosen;
}

/* The stream whose next work has to run before the next work of `stream`, which has some, is over. */
static struct stream* needed(struct stream* stream) {
    while (blocked(stream)) stream = stream->waiting.first->after.stream;
    return stream;
}

static void run_next(struct stream* stream) {
    struct node* node = stream->waiting.first;
    stream->waiting.first = node->next;
    if (!node->next) stream->waiting.last = NULL;
    if (node->work) node->work(node->state);
    stream->done++;
    free(node->state);
    free(node);
}

static void run_until(struct moment moment) {
    pthread_mutex_lock(&running);
    while (!is_over(moment)) run_next(shuffled() ? any_ready() : needed(moment.stream));
    pthread_mutex_unlock(&running);
}

/* A random number of pieces of work, from none to many. How many is up to the seed: some seeds run nothing that nobody
 * waits for. */
static void run_some(void) {
    enum { ALWAYS = 8 };
    struct stream* ready;
    pthread_mutex_lock(&running);
    while (draw(ALWAYS) < trait(~0u, ALWAYS) && (ready = any_ready())) run_next(ready);
    pthread_mutex_unlock(&running);
}

static struct moment now(struct stream* stream) {
    pthread_mutex_lock(&running);
    struct moment moment = {stream, stream->queued};
    pthread_mutex_unlock(&running);
    return moment;
}

/* What the log names a stream: all handles of the default stream are one. */
static void* shown_stream(void* handle) { return of(handle) == &legacy ? NULL : handle; }

void standin_finish(void* stream) { run_until(now(of(stream))); }

void standin_finish_all(void) {
    for (struct stream* each = streams; each; each = each->next) run_until(now(each));
}

/* From now on the seed is `chosen`, or what STANDIN_SHUFFLE says if that is negative. All that was submitted before
 * runs.
 */
EXPORT void standin_shuffle(long long chosen) {
    pthread_mutex_lock(&running);
    standin_finish_all();
    chosen_seed = chosen;
    drawn = 0;
    if (standin_logs_order()) standin_log("standin_shuffle", 0, "\"seed\": %lld", chosen);
    pthread_mutex_unlock(&running);
}

/* Queues the work, whose state it takes over, and runs what is due. */
static void submit(struct stream* stream, struct node work) {
    pthread_mutex_lock(&running);
    push(&stream->waiting, work);
    stream->queued++;
    if (shuffled())
        run_some();
    else if (!late(stream))
        run_until(now(stream));
    pthread_mutex_unlock(&running);
}

static void submit_or_capture(struct stream* stream, work_fn work, void* state) {
    if (stream->graph)
        append(stream->graph, work, state);
    else
        submit(stream, (struct node){.work = work, .state = state});
}

void standin_enqueue(void* stream, const char* what, struct touched bytes, work_fn work, void* state,
                     size_t state_bytes) {
    struct graph* graph = of(stream)->graph;
    pthread_mutex_lock(&running);
    if (graph || standin_logs_order()) {
        standin_log(what, 0,
                    "\"graph\": %d, \"stream\": \"%p\", \"to\": %zu, \"from\": %zu, \"nbytes\": %zu, \"waits\": %s",
                    graph ? graph->id : 0, shown_stream(stream), (size_t)bytes.to, (size_t)bytes.from, bytes.nbytes,
                    bytes.waits ? "true" : "false");
    }
    submit_or_capture(of(stream), work, kept(state, state_bytes));
    pthread_mutex_unlock(&running);
}

/* ---- kernels: those of our library run on the host (STANDIN_KERNELS names the library), all others do nothing ---- */

struct bound_launch {
    void* kernel;
    unsigned blocks, threads;
    void* read; /* the second argument of a kernel that is not ours: weights, where it is a MoE's */
};

static void* (*bind_kernel)(const char*, void**);
static void (*run_kernel)(void*, unsigned, unsigned);

static void find_kernels(void) {
    const char* path = getenv("STANDIN_KERNELS");
    if (!path) return;
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "stand-in: %s\n", dlerror());
        abort();
    }
    bind_kernel = dlsym(library, "standin_bind");
    run_kernel = dlsym(library, "standin_run");
}

static void run_bound(void* state) {
    struct bound_launch* launch = state;
    if (launch->kernel) run_kernel(launch->kernel, launch->blocks, launch->threads);
    if (launch->read) standin_read(launch->read, SIZE_MAX / 2);
}

void standin_launch(void* stream, const char* kernel, void** arguments, int shown, unsigned blocks, unsigned threads,
                    const char* call) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_kernels);
    struct graph* graph = of(stream)->graph;
    size_t words[2] = {0, 0};
    for (int i = 0; i < shown; i++) memcpy(&words[i], arguments[i], sizeof words[i]);
    /* Kernels read their arguments' values at the launch, and a graph keeps the values of the capture. */
    struct bound_launch launch = {bind_kernel ? bind_kernel(kernel, arguments) : NULL, blocks, threads,
                                  (void*)words[1]};
    if (launch.kernel) standin_link_kernel(kernel, arguments);
    pthread_mutex_lock(&running);
    standin_log(call, 0,
                "\"kernel\": \"%.200s\", \"stream\": \"%p\", \"graph\": %d, \"blocks\": %u, \"arguments\": [%zu, %zu]",
                kernel, shown_stream(stream), graph ? graph->id : 0, blocks, words[0], words[1]);
    submit_or_capture(of(stream), run_bound, kept(&launch, sizeof launch));
    pthread_mutex_unlock(&running);
}

/* ---- streams ---- */

static int new_stream(void** handle) {
    struct stream* stream = calloc(1, sizeof *stream);
    pthread_mutex_lock(&lock);
    stream->id = streams->id + 1;
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    *handle = stream;
    return 0;
}

EXPORT int cudaStreamCreate(void** stream) { return new_stream(stream); }
EXPORT int cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
    int result = standin_injected("cudaStreamCreateWithPriority");
    return result ? result : new_stream(stream);
}
EXPORT int cuStreamCreate(void** stream, unsigned flags) { return new_stream(stream); }
EXPORT int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) { return new_stream(stream); }

EXPORT int cudaStreamCreateWithFlags(void** stream, unsigned flags) {
    int result = standin_injected("cudaStreamCreateWithFlags");
    if (result == 0) new_stream(stream);
    standin_log("cudaStreamCreateWithFlags", result, "\"flags\": %u, \"stream\": \"%p\"", flags,
                result ? NULL : *stream);
    return result;
}

EXPORT int cudaStreamGetPriority(void* stream, int* priority) {
    *priority = 0;
    return 0;
}

EXPORT int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return 0;
}

/* A thread in global mode may not wait while any thread captures in global mode; in relaxed mode it may. */
static __thread int capture_mode = cudaStreamCaptureModeGlobal;
static int global_captures;
static bool wait_breaks_capture(void) { return global_captures > 0 && capture_mode == cudaStreamCaptureModeGlobal; }

EXPORT int cudaStreamSynchronize(void* stream) {
    int result = standin_injected("cudaStreamSynchronize");
    if (result == 0 && (standin_capturing(stream) || wait_breaks_capture())) result = cudaErrorStreamCaptureUnsupported;
    pthread_mutex_lock(&running);
    standin_finish(stream);
    standin_log("cudaStreamSynchronize", result, "\"stream\": \"%p\"", shown_stream(stream));
    pthread_mutex_unlock(&running);
    return result;
}

EXPORT int cuStreamSynchronize(void* stream) { return cudaStreamSynchronize(stream); }

EXPORT int cudaDeviceSynchronize(void) {
    int result = standin_injected("cudaDeviceSynchronize");
    pthread_mutex_lock(&running);
    standin_finish_all();
    standin_log("cudaDeviceSynchronize", result, NULL);
    pthread_mutex_unlock(&running);
    return result;
}

EXPORT int cuCtxSynchronize(void) { return cudaDeviceSynchronize(); }

/* Late work is not ready when it is first asked for; whoever asks again is not kept waiting. Shuffled work may be ready
 * at any time, and is at some time. */
static bool is_ready(struct moment moment, bool* asked) {
    if (shuffled()) run_some();
    bool ready = is_over(moment) || (shuffled() ? draw(4) == 0 : *asked);
    *asked = !ready;
    if (ready) run_until(moment);
    return ready;
}

EXPORT int cudaStreamQuery(void* stream) {
    pthread_mutex_lock(&running);
    int result = is_ready(now(of(stream)), &of(stream)->asked) ? 0 : cudaErrorNotReady;
    if (standin_logs_order()) standin_log("cudaStreamQuery", result, "\"stream\": \"%p\"", shown_stream(stream));
    pthread_mutex_unlock(&running);
    return result;
}

EXPORT int cuStreamQuery(void* stream) { return cudaStreamQuery(stream); }

/* Functions of the host run in the calling thread: they may want what that thread holds. */
EXPORT int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
    struct graph* graph = of(stream)->graph;
    if (graph) {
        append(graph, function, data);
        return 0;
    }
    standin_finish(stream);
    function(data);
    return 0;
}

EXPORT int cudaStreamAddCallback(void* stream, void (*function)(void*, int, void*), void* data, unsigned flags) {
    standin_finish(stream);
    function(stream, 0, data);
    return 0;
}

/* ---- events ---- */

static int new_event(void** event) {
    int result = standin_injected("cudaEventCreate");
    if (result) return result;
    *event = calloc(1, sizeof(struct event));
    return 0;
}

static void log_event(const char* call, int result, void* event, void* stream) {
    struct graph* graph = of(stream)->graph;
    if (!standin_logs_order()) return;
    standin_log(call, result, "\"event\": \"%p\", \"stream\": \"%p\", \"graph\": %d", event, shown_stream(stream),
                graph ? graph->id : 0);
}

static int record(void* event, void* stream) {
    int result = standin_injected("cudaEventRecord");
    if (result) return result;
    pthread_mutex_lock(&running);
    *(struct event*)event = (struct event){of(stream)->graph, now(of(stream)), false, standin_link_time()};
    log_event("cudaEventRecord", 0, event, stream);
    if (shuffled()) run_some();
    pthread_mutex_unlock(&running);
    return 0;
}

static int wait_event(void* stream, void* handle) {
    struct event* event = handle;
    struct graph* graph = event->graph;
    int result = standin_injected("cudaStreamWaitEvent");
    if (result) return result;
    pthread_mutex_lock(&running);
    if (graph && graph->open && !of(stream)->graph) of(stream)->graph = graph;
    log_event("cudaStreamWaitEvent", 0, event, stream);
    if (!graph) submit(of(stream), (struct node){.after = event->recorded});
    pthread_mutex_unlock(&running);
    return 0;
}

static int synchronize_event(void* handle) {
    struct event* event = handle;
    int result = standin_injected("cudaEventSynchronize");
    if (result == 0 && wait_breaks_capture()) result = cudaErrorStreamCaptureUnsupported;
    pthread_mutex_lock(&running);
    if (result == 0) run_until(event->recorded);
    standin_log("cudaEventSynchronize", result, "\"event\": \"%p\"", handle);
    pthread_mutex_unlock(&running);
    return result;
}

static int query_event(void* handle) {
    struct event* event = handle;
    int injected = standin_injected("cudaEventQuery");
    if (injected) return injected;
    pthread_mutex_lock(&running);
    int result = is_ready(event->recorded, &event->asked) ? 0 : cudaErrorNotReady;
    if (standin_logs_order()) standin_log("cudaEventQuery", result, "\"event\": \"%p\"", handle);
    pthread_mutex_unlock(&running);
    return result;
}

EXPORT int cudaEventCreate(void** event) { return new_event(event); }
EXPORT int cudaEventCreateWithFlags(void** event, unsigned flags) { return new_event(event); }
EXPORT int cuEventCreate(void** event, unsigned flags) { return new_event(event); }
EXPORT int cudaEventRecord(void* event, void* stream) { return record(event, stream); }
EXPORT int cudaEventRecordWithFlags(void* event, void* stream, unsigned flags) { return record(event, stream); }
EXPORT int cuEventRecord(void* event, void* stream) { return record(event, stream); }
EXPORT int cudaEventSynchronize(void* event) { return synchronize_event(event); }
EXPORT int cuEventSynchronize(void* event) { return synchronize_event(event); }
EXPORT int cudaEventQuery(void* event) { return query_event(event); }
EXPORT int cuEventQuery(void* event) { return query_event(event); }
EXPORT int cudaStreamWaitEvent(void* stream, void* event, unsigned flags) { return wait_event(stream, event); }
EXPORT int cuStreamWaitEvent(void* stream, void* event, unsigned flags) { return wait_event(stream, event); }

EXPORT int cudaEventElapsedTime(float* milliseconds, void* start, void* end) {
    *milliseconds = standin_link_elapsed(((struct event*)start)->link_time, ((struct event*)end)->link_time);
    return 0;
}

/* ---- capture ---- */

EXPORT int cudaStreamIsCapturing(void* stream, int* status) {
    int result = standin_injected("cudaStreamIsCapturing");
    *status = standin_capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return result;
}

EXPORT int cuStreamIsCapturing(void* stream, int* status) {
    *status = standin_capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return 0;
}

static int capture_info(void* stream, int* status, unsigned long long* id, void** graph, const void** dependencies,
                        size_t* count) {
    struct graph* capturing = of(stream)->graph;
    *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = capturing ? capturing->id : 0;
    if (graph) *graph = capturing;
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
    return 0;
}

EXPORT int cudaStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id, void** graph,
                                    const void** dependencies, const void** edges, size_t* count) {
    return capture_info(stream, status, id, graph, dependencies, count);
}

EXPORT int cuStreamGetCaptureInfo_v3(void* stream, int* status, unsigned long long* id, void** graph,
                                     const void** dependencies, const void** edges, size_t* count) {
    return capture_info(stream, status, id, graph, dependencies, count);
}

EXPORT int cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void** graph,
                                     const void** dependencies, size_t* count) {
    return capture_info(stream, status, id, graph, dependencies, count);
}

EXPORT int cudaThreadExchangeStreamCaptureMode(int* mode) {
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return standin_injected("cudaThreadExchangeStreamCaptureMode");
}

EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) { return cudaThreadExchangeStreamCaptureMode(mode); }

EXPORT int cudaStreamBeginCapture(void* stream, int mode) {
    if (of(stream) == &legacy) return cudaErrorStreamCaptureUnsupported;
    struct graph* graph = calloc(1, sizeof *graph);
    graph->id = __sync_add_and_fetch(&graphs_made, 1);
    graph->open = true;
    graph->global = mode == cudaStreamCaptureModeGlobal;
    if (graph->global) __sync_add_and_fetch(&global_captures, 1);
    of(stream)->graph = graph;
    standin_log("cudaStreamBeginCapture", 0, "\"graph\": %d, \"stream\": \"%p\"", graph->id, stream);
    return 0;
}

EXPORT int cudaStreamEndCapture(void* stream, void** handle) {
    struct graph* graph = of(stream)->graph;
    *handle = graph;
    if (!graph) return cudaErrorIllegalState;
    graph->open = false;
    if (graph->global) __sync_sub_and_fetch(&global_captures, 1);
    pthread_mutex_lock(&lock);
    for (struct stream* each = streams; each; each = each->next) {
        if (each->graph == graph) each->graph = NULL;
    }
    pthread_mutex_unlock(&lock);
    standin_log("cudaStreamEndCapture", 0, "\"graph\": %d, \"nodes\": %zu", graph->id, graph->count);
    return 0;
}

/* ---- graphs: the executable graph is the graph itself; nothing is destroyed, as handles are few ---- */

EXPORT int cudaGraphCreate(void** handle, unsigned flags) {
    struct graph* graph = calloc(1, sizeof *graph);
    graph->id = __sync_add_and_fetch(&graphs_made, 1);
    *handle = graph;
    return 0;
}

EXPORT int cudaGraphInstantiate(void** executable, void* graph, unsigned long long flags) {
    *executable = graph;
    return 0;
}

EXPORT int cudaGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long flags) {
    *executable = graph;
    return 0;
}

EXPORT int cudaGraphInstantiateWithParams(void** executable, void* graph, void* parameters) {
    *executable = graph;
    return 0;
}

EXPORT int cudaGraphGetNodes(void* handle, void** nodes, size_t* count) {
    struct graph* graph = handle;
    size_t room = nodes ? *count : 0;
    *count = graph->count;
    size_t i = 0;
    for (struct node* node = graph->work.first; node && i < room; node = node->next) nodes[i++] = node;
    return 0;
}

EXPORT int cudaGraphNodeGetDependencies(void* node, void** dependencies, void* edges, size_t* count) {
    *count = 0;
    return 0;
}

static void run_graph(void* state) {
    struct graph* graph = *(struct graph**)state;
    for (struct node* node = graph->work.first; node; node = node->next) {
        if (node->work) node->work(node->state);
    }
}

EXPORT int cudaGraphLaunch(void* executable, void* stream) {
    struct graph* graph = executable;
    int result = standin_injected("cudaGraphLaunch");
    if (result) return result;
    pthread_mutex_lock(&running);
    standin_log("cudaGraphLaunch", 0, "\"graph\": %d, \"nodes\": %zu, \"stream\": \"%p\"", graph->id, graph->count,
                shown_stream(stream));
    submit(of(stream), (struct node){.work = run_graph, .state = kept(&graph, sizeof graph)});
    pthread_mutex_unlock(&running);
    return 0;
}
