/* Streams, events, capture and graphs. Work runs at once, in the calling thread; a capturing stream records it instead,
 * and a graph launch runs what was recorded. A stream joins a capture by waiting for an event that was recorded in it.
 * STANDIN_LATE makes streams late: their work waits until somebody waits for it, the last moment at which it may run.
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

struct node {
    struct node* next;
    work_fn work;
    void* state;
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
    struct graph* graph;  /* being captured, or NULL */
    struct queue waiting; /* work that has not run yet */
    uint64_t queued, done;
};

/* All work of a stream up to some moment. */
struct moment {
    struct stream* stream;
    uint64_t at;
};

struct event {
    struct graph* graph; /* that was being captured where it was recorded */
    struct moment recorded;
    bool asked;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t running = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static struct stream legacy;
static struct stream* streams = &legacy;
static int graphs_made;

static struct stream* of(void* handle) { return (uintptr_t)handle <= 2 ? &legacy : handle; }

bool standin_capturing(void* stream) { return of(stream)->graph != NULL; }

static void push(struct queue* queue, work_fn work, void* state) {
    struct node* node = calloc(1, sizeof *node);
    node->work = work;
    node->state = state;
    if (queue->last)
        queue->last->next = node;
    else
        queue->first = node;
    queue->last = node;
}

static void append(struct graph* graph, work_fn work, void* state) {
    pthread_mutex_lock(&lock);
    push(&graph->work, work, state);
    graph->count++;
    pthread_mutex_unlock(&lock);
}

static void* kept(const void* state, size_t nbytes) { return memcpy(malloc(nbytes), state, nbytes); }

/* ---- late streams ---- */

static bool late(struct stream* stream) {
    long long which = standin_setting("STANDIN_LATE", 0);
    return which == (stream == &legacy ? 1 : 2);
}

static void run_until(struct moment moment) {
    struct stream* stream = moment.stream;
    pthread_mutex_lock(&running);
    while (stream && stream->done < moment.at) {
        struct node* node = stream->waiting.first;
        stream->waiting.first = node->next;
        if (!node->next) stream->waiting.last = NULL;
        node->work(node->state);
        stream->done++;
        free(node->state);
        free(node);
    }
    pthread_mutex_unlock(&running);
}

static struct moment now(struct stream* stream) { return (struct moment){stream, stream->queued}; }

void standin_finish(void* stream) { run_until(now(of(stream))); }

void standin_finish_all(void) {
    for (struct stream* each = streams; each; each = each->next) run_until(now(each));
}

/* Runs the work or, on a late stream, keeps it with a copy of its state. */
static void submit(struct stream* stream, work_fn work, void* state, size_t state_bytes) {
    if (!late(stream)) {
        work(state);
        return;
    }
    pthread_mutex_lock(&running);
    push(&stream->waiting, work, kept(state, state_bytes));
    stream->queued++;
    pthread_mutex_unlock(&running);
}

static void run_wait(void* state) { run_until(*(struct moment*)state); }

void standin_enqueue(void* stream, const char* what, work_fn work, void* state, size_t state_bytes) {
    struct graph* graph = of(stream)->graph;
    if (!graph) {
        submit(of(stream), work, state, state_bytes);
        return;
    }
    append(graph, work, kept(state, state_bytes));
    standin_log(what, 0, "\"graph\": %d", graph->id);
}

/* ---- kernels: those of our library run on the host (STANDIN_KERNELS names the library), all others do nothing ---- */

struct bound_launch {
    void* kernel;
    unsigned blocks, threads;
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
}

void standin_launch(void* stream, const char* kernel, void** arguments, int shown, unsigned blocks, unsigned threads,
                    const char* call) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_kernels);
    struct graph* graph = of(stream)->graph;
    size_t words[2] = {0, 0};
    for (int i = 0; i < shown; i++) memcpy(&words[i], arguments[i], sizeof words[i]);
    standin_log(call, 0, "\"kernel\": \"%.200s\", \"stream\": \"%p\", \"graph\": %d, \"arguments\": [%zu, %zu]", kernel,
                stream, graph ? graph->id : 0, words[0], words[1]);
    /* Kernels read their arguments' values at the launch, and a graph keeps the values of the capture. */
    struct bound_launch launch = {bind_kernel ? bind_kernel(kernel, arguments) : NULL, blocks, threads};
    if (graph)
        append(graph, run_bound, kept(&launch, sizeof launch));
    else
        submit(of(stream), run_bound, &launch, sizeof launch);
}

/* ---- streams ---- */

static int new_stream(void** handle) {
    struct stream* stream = calloc(1, sizeof *stream);
    pthread_mutex_lock(&lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    *handle = stream;
    return 0;
}

EXPORT int cudaStreamCreate(void** stream) { return new_stream(stream); }
EXPORT int cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority) { return new_stream(stream); }
EXPORT int cuStreamCreate(void** stream, unsigned flags) { return new_stream(stream); }
EXPORT int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) { return new_stream(stream); }

EXPORT int cudaStreamCreateWithFlags(void** stream, unsigned flags) {
    int result = standin_injected("cudaStreamCreateWithFlags");
    if (result == 0) new_stream(stream);
    standin_log("cudaStreamCreateWithFlags", result, "\"flags\": %u, \"stream\": \"%p\"", flags,
                result ? NULL : *stream);
    return result;
}

/* Handles stay valid: a stream is a few bytes. */
EXPORT int cudaStreamDestroy(void* stream) { return 0; }

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
    standin_finish(stream);
    standin_log("cudaStreamSynchronize", result, "\"stream\": \"%p\"", stream);
    return result;
}

EXPORT int cudaDeviceSynchronize(void) {
    standin_finish_all();
    standin_log("cudaDeviceSynchronize", 0, NULL);
    return 0;
}

EXPORT int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
    struct graph* graph = of(stream)->graph;
    if (graph)
        append(graph, function, data);
    else
        function(data);
    return 0;
}

EXPORT int cudaStreamAddCallback(void* stream, void (*function)(void*, int, void*), void* data, unsigned flags) {
    function(stream, 0, data);
    return 0;
}

/* ---- events ---- */

static int new_event(void** event) {
    *event = calloc(1, sizeof(struct event));
    return 0;
}

static int record(void* handle, void* stream) {
    *(struct event*)handle = (struct event){of(stream)->graph, now(of(stream)), false};
    return 0;
}

static int wait_event(void* stream, void* handle) {
    struct event* event = handle;
    struct graph* graph = event->graph;
    if (graph && graph->open && !of(stream)->graph) of(stream)->graph = graph;
    if (!graph) submit(of(stream), run_wait, &event->recorded, sizeof event->recorded);
    return 0;
}

static int synchronize_event(void* event) {
    int result = wait_breaks_capture() ? cudaErrorStreamCaptureUnsupported : 0;
    standin_log("cudaEventSynchronize", result, NULL);
    if (result) return result;
    run_until(((struct event*)event)->recorded);
    return 0;
}

/* Late work is not ready when it is first asked for; whoever asks again is not kept waiting. */
static int query_event(void* handle) {
    struct event* event = handle;
    struct moment moment = event->recorded;
    if (!moment.stream || moment.stream->done >= moment.at) return 0;
    if (!event->asked) {
        event->asked = true;
        return cudaErrorNotReady;
    }
    run_until(moment);
    return 0;
}

EXPORT int cudaEventCreate(void** event) { return new_event(event); }
EXPORT int cudaEventCreateWithFlags(void** event, unsigned flags) { return new_event(event); }
EXPORT int cuEventCreate(void** event, unsigned flags) { return new_event(event); }
EXPORT int cudaEventDestroy(void* event) { return 0; }
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
    *milliseconds = 1;
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

/* ---- graphs: the executable graph is the graph itself; graphs are few and live as long as the process ---- */

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

EXPORT int cudaGraphDestroy(void* graph) { return 0; }
EXPORT int cudaGraphExecDestroy(void* executable) { return 0; }

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
    standin_log("cudaGraphLaunch", 0, "\"graph\": %d, \"nodes\": %zu", graph->id, graph->count);
    submit(of(stream), run_graph, &graph, sizeof graph);
    return 0;
}
