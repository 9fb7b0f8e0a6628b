// CUDA unified memory, routing counters and slots of sglang-uvm-offload, behind a plain C ABI.
//
// Python loads this library with ctypes, so every call releases the GIL. It includes no torch headers, so a cold build
// takes seconds. Python validates all arguments; this file checks every CUDA return code. A function that can fail
// returns its cudaError_t and fills a uvm_failure with the call, the span, and the driver's description. It then clears
// the runtime's "last error", which the next reader (torch, after its next launch) would mistake for its own.
//
// Launches use cudaLaunchKernelExC instead of <<<>>>, because it returns its own error and a host compiler accepts it.
// The tests compile these same kernels for a CPU.

#include <cuda_runtime.h>

#include <climits>
#include <cstddef>
#include <cstdio>
#include <mutex>
#include <system_error>
#include <thread>

#define UVM_API extern "C" __attribute__((visibility("default")))

extern "C" {
struct uvm_span {
    size_t offset;
    size_t nbytes;
};

struct uvm_failure {
    int error;         // the cudaError_t
    int span;          // index of the span that failed, -1 if the call has none
    char call[40];     // the CUDA function
    char reason[216];  // the error's name and the driver's description
};

struct uvm_read_time {
    unsigned int first;  // cycles
    unsigned int later;  // cycles of the fastest read after it
};

struct uvm_copy {
    const char* from;
    char* to;
    size_t nbytes;
};

// The routing of one layer, to be counted.
struct uvm_counted {
    const void* ids;  // [rows][k], rows row_stride elements apart
    int rows;
    int row_stride;
    int layer;     // index into the counts
    int in_place;  // whether the layer reads its experts in place; if not, activations are not counted
};

// The slots that L layers share, all in VRAM. Each layer has up to W experts.
struct uvm_pool {
    int num_slots;
    int layers;            // L
    int width;             // W, a multiple of pool_chunk
    unsigned char* worth;  // [L][W] of each expert in a slot, as of its layer's last launch; not_held if in none
    int* slot_of;          // [L][W] the slot with a copy of the expert, plus one; 0 for none
    int* taken;            // [1] number of slots ever filled, which are the first ones
};

// One layer with slots and E experts.
struct uvm_slots {
    uvm_pool pool;
    int at;                      // index of the layer in the pool
    int first_slot;              // row of slot 0 in each of the layer's tensors
    int num_experts;             // E
    int width;                   // of counts
    unsigned* last;              // [E]
    unsigned* lately;            // [E]
    unsigned* long_;             // [E]
    int* classes;                // [2][E] class plus one after the last step and the one before; 0 for none yet
    int* fills;                  // [1 + 2 * max_fills] number of fills, then expert and slot of each
    unsigned* turn;              // [2] blocks arrived so far; launch whose fills are chosen, and number of fills
    const unsigned char* share;  // [E] how much of each expert is offloaded
    unsigned char* came;         // [E] whether the expert was brought for the last step that brought any
    unsigned long long* counts;  // [2 phases][slot_kinds][width]
};

// The routing of one layer in one step, and how its rows are computed.
struct uvm_routing {
    const void* ids;  // [rows][k] contiguous; ids that are not local experts are ignored
    int kind;         // of ids
    int rows;
    int k;
    int* order;   // [num_blocks * block_size] output of aligning at most max_aligned ids, or null
    int* blocks;  // [num_blocks] the expert of each block of rows, -1 for none
    int num_blocks;
    int* padded;     // [1] rows in computed blocks
    int num_padded;  // 2 if padded[1] receives the number of aligned blocks without an expert
    int block_size;
    int read_rows;             // rows that one zero-copy read of their expert serves
    int brings;                // whether the step brings experts into slots, so that misses fill none
    const long long* control;  // the counters' control words
    const int* requests;  // [1 + 2 * max_requests] for a prefill: number of requests that end in it, then [begin, end)
                          // rows of each
};

// A layer's per-expert tensors: row r of tensor i is at base[i] + r * nbytes[i]. Rows from first_slot on are slots.
struct uvm_rows {
    int count;
    unsigned copied;  // bit mask of the tensors whose rows a call copies
    char* base[16];
    size_t nbytes[16];
};

// One layer's view of the lookahead slots, which the policy does not use. Layers take turns having experts copied there
// ahead of their routing. All zeros without lookahead.
struct uvm_ahead {
    int rows;                   // ahead_rows
    int first;                  // the first of these slots
    unsigned* resolved;         // [1] the last step that resolved the layer
    int* came;                  // [ahead_rows + ahead_blocks] as of that step: the expert used from each row plus one,
                                // 0 for none; then the units that each block had copied
    unsigned long long* words;  // [ahead_words] shared by the layers that use the same slots (ahead_word)
    unsigned long long* gain;   // [gain_kinds] of the model
};

// A guess of the experts that a layer will use.
struct uvm_guess {
    const void* ids;  // [rows][k] in the model's numbering, likeliest of each row first
    int kind;         // of ids
    int rows;
    int k;
    int first_expert;  // the model's number of the layer's first local expert
    const long long* control;
};
}

// ---- constants that Python reads ------------------------------------------------------------------------------------

namespace {
enum place { place_device, place_host };
enum stream_use { moves, populating, stream_uses };
enum ids_kind { ids_int32, ids_int64, ids_packed };
constexpr int max_experts = 4096;
constexpr int max_devices = 64;
constexpr int timing_blocks = 64;
constexpr int timing_lines = 3;
constexpr int timing_stride = 1 << 10;  // reaches another cache line of the same page
constexpr int max_counted = 128;        // layers
constexpr int max_copies = 32;          // tensors of one layer
constexpr int max_readers = 16;         // CPU threads
constexpr int max_pieces = 1 << 14;     // pieces of one copy whose location can be passed
constexpr size_t copy_piece = 2 << 20;  // the driver's block size
constexpr int copy_threads = 256;
constexpr int copy_loads = 8;  // 16-byte loads in flight per thread
constexpr size_t copy_unit = (size_t)copy_threads * copy_loads * sizeof(uint4);
constexpr size_t copy_chunk = 4 * copy_unit;
constexpr unsigned int piece_chunks = copy_piece / copy_chunk;
constexpr int read_blocks = 264;  // two per SM of an H100
constexpr int max_rows = sizeof(uvm_rows::base) / sizeof(char*);
constexpr int max_slot_experts = 1024;  // of one layer
constexpr int max_pool_experts = 1 << 17;
constexpr int pool_chunk = sizeof(uint4);  // experts per load of worths
constexpr int max_fills = 64;
constexpr int max_requests = 256;
constexpr int max_aligned = 64;
constexpr int slot_blocks = 32;  // a power of two
constexpr int fills_bits = 7;    // bits of the number of fills
static_assert(max_fills < 1 << fills_bits, "they share a word with the number of the launch");
constexpr int ahead_rows = 2;    // experts copied ahead for one layer
constexpr int ahead_blocks = 8;  // thread blocks that copy them; units in flight when the layer is resolved delay it
constexpr int max_guesses = copy_threads;
}  // namespace

UVM_API int uvm_place_device() { return place_device; }
UVM_API int uvm_place_host() { return place_host; }
UVM_API int uvm_ids_int32() { return ids_int32; }
UVM_API int uvm_ids_int64() { return ids_int64; }
UVM_API int uvm_ids_packed() { return ids_packed; }
UVM_API int uvm_max_experts() { return max_experts; }
UVM_API int uvm_max_counted() { return max_counted; }
UVM_API int uvm_max_copies() { return max_copies; }
UVM_API int uvm_max_rows() { return max_rows; }
UVM_API int uvm_max_slot_experts() { return max_slot_experts; }
UVM_API int uvm_max_pool_experts() { return max_pool_experts; }
UVM_API int uvm_pool_chunk() { return pool_chunk; }
UVM_API int uvm_max_fills() { return max_fills; }
UVM_API int uvm_max_requests() { return max_requests; }
UVM_API int uvm_max_aligned() { return max_aligned; }
UVM_API int uvm_ahead_rows() { return ahead_rows; }
UVM_API int uvm_ahead_blocks() { return ahead_blocks; }
UVM_API int uvm_max_guesses() { return max_guesses; }
UVM_API int uvm_compiled_version() { return CUDART_VERSION; }

// ---- failures -------------------------------------------------------------------------------------------------------

namespace {
cudaError_t fail(uvm_failure* failure, const char* call, int span, cudaError_t error, const char* reason = nullptr) {
    failure->error = error;
    failure->span = span;
    snprintf(failure->call, sizeof failure->call, "%s", call);
    snprintf(failure->reason, sizeof failure->reason, "%s: %s", cudaGetErrorName(error),
             reason ? reason : cudaGetErrorString(error));
    cudaGetLastError();
    return error;
}

// Prefetch and advice have no graph node type. During capture they would break the graph or, worse, run once at capture
// and never at replay.
cudaError_t refuse_capture(uvm_failure* failure, cudaStream_t caller) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaError_t error = cudaStreamIsCapturing(caller, &status);
    if (error != cudaSuccess) return fail(failure, "cudaStreamIsCapturing", -1, error);
    if (status == cudaStreamCaptureStatusNone) return cudaSuccess;
    return fail(failure, "cudaStreamIsCapturing", -1, cudaErrorStreamCaptureUnsupported,
                "the calling stream is capturing a CUDA graph");
}

// Makes `device` current on the calling thread until the end of the scope.
class on_device {
  public:
    on_device(int device, uvm_failure* failure) {
        error = cudaGetDevice(&before_);
        if (error != cudaSuccess) {
            fail(failure, "cudaGetDevice", -1, error);
            return;
        }
        if (before_ == device) return;
        error = cudaSetDevice(device);
        if (error != cudaSuccess) fail(failure, "cudaSetDevice", -1, error);
        moved_ = error == cudaSuccess;
    }
    ~on_device() {
        if (moved_ && cudaSetDevice(before_) != cudaSuccess) cudaGetLastError();
    }
    on_device(const on_device&) = delete;
    on_device& operator=(const on_device&) = delete;

    cudaError_t error = cudaSuccess;

  private:
    int before_ = 0;
    bool moved_ = false;
};

// Until the end of the scope, lets the calling thread make calls that would otherwise invalidate another thread's
// capture in global mode, which torch uses.
class relaxed_capture {
  public:
    explicit relaxed_capture(uvm_failure* failure) {
        error = cudaThreadExchangeStreamCaptureMode(&mode_);
        if (error != cudaSuccess) fail(failure, "cudaThreadExchangeStreamCaptureMode", -1, error);
    }
    ~relaxed_capture() {
        if (error == cudaSuccess && cudaThreadExchangeStreamCaptureMode(&mode_) != cudaSuccess) cudaGetLastError();
    }
    relaxed_capture(const relaxed_capture&) = delete;
    relaxed_capture& operator=(const relaxed_capture&) = delete;

    cudaError_t error = cudaSuccess;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// ---- advice and prefetch across CUDA versions -----------------------------------------------------------------------
// CUDA 13 takes a cudaMemLocation (prefetch also takes flags). CUDA 12.2 to 12.9 take it in functions with the suffix
// _v2. Older versions take an int, with cudaCpuDeviceId (-1) for the host. In a cudaMemLocation, the host is a location
// *type*; cudaCpuDeviceId is not a valid id of a device-type location.

// The NUMA node of each device's host pages plus one; 0 for the node of the calling thread. Set before any range
// exists.
int host_nodes[max_devices];

#if CUDART_VERSION >= 12020
cudaMemLocation location(int place, int device) {
    cudaMemLocation result = {};
    result.type = place == place_host ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice;
    result.id = place == place_host ? 0 : device;
    if (place == place_host && host_nodes[device] > 0) {
        result.type = cudaMemLocationTypeHostNuma;
        result.id = host_nodes[device] - 1;
    }
    return result;
}
#else
int location(int place, int device) { return place == place_host ? cudaCpuDeviceId : device; }
#endif

cudaError_t advise(const void* start, size_t nbytes, cudaMemoryAdvise advice, int place, int device) {
#if CUDART_VERSION >= 12020 && CUDART_VERSION < 13000
    return cudaMemAdvise_v2(start, nbytes, advice, location(place, device));
#else
    return cudaMemAdvise(start, nbytes, advice, location(place, device));
#endif
}

cudaError_t prefetch(const void* start, size_t nbytes, int place, int device, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
    return cudaMemPrefetchAsync(start, nbytes, location(place, device), 0, stream);
#elif CUDART_VERSION >= 12020
    return cudaMemPrefetchAsync_v2(start, nbytes, location(place, device), 0, stream);
#else
    return cudaMemPrefetchAsync(start, nbytes, location(place, device), stream);
#endif
}

// Advises the spans, in order. On failure, `count` becomes the number of spans before the one that failed.
cudaError_t advise_all(uvm_failure* failure, char* address, const uvm_span* spans, int* count, int place, int device) {
    for (int i = 0; i < *count; i++) {
        cudaError_t error =
            advise(address + spans[i].offset, spans[i].nbytes, cudaMemAdviseSetPreferredLocation, place, device);
        if (error == cudaSuccess) continue;
        *count = i;
        return fail(failure, "cudaMemAdvise(SetPreferredLocation)", i, error);
    }
    return cudaSuccess;
}

// One non-blocking stream per device and use, for the life of the process. A prefetch on the caller's stream would
// delay the caller's kernels, and one on the legacy stream would wait for all kernels. Separate streams per use keep
// moves from waiting for another thread's populating.
cudaError_t prefetch_stream(uvm_failure* failure, int device, stream_use use, cudaStream_t* stream) {
    static std::mutex mutex;
    static cudaStream_t streams[stream_uses][max_devices];
    if (device < 0 || device >= max_devices) {
        return fail(failure, "cudaStreamCreateWithFlags", -1, cudaErrorInvalidDevice);
    }
    std::lock_guard<std::mutex> lock(mutex);
    cudaStream_t& kept = streams[use][device];
    if (!kept) {
        cudaError_t error = cudaStreamCreateWithFlags(&kept, cudaStreamNonBlocking);
        if (error != cudaSuccess) {
            kept = nullptr;
            return fail(failure, "cudaStreamCreateWithFlags", -1, error);
        }
    }
    *stream = kept;
    return cudaSuccess;
}

// Prefetches the spans in order and waits. If a call fails, later ones are skipped, but moves in flight still complete.
// `count` becomes the number of spans that have arrived.
cudaError_t prefetch_all(uvm_failure* failure, char* address, const uvm_span* spans, int* count, int place, int device,
                         cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    int moved = 0;
    while (moved < *count && error == cudaSuccess) {
        const uvm_span& span = spans[moved];
        error = prefetch(address + span.offset, span.nbytes, place, device, stream);
        if (error != cudaSuccess)
            fail(failure, "cudaMemPrefetchAsync", moved, error);
        else
            moved++;
    }
    cudaError_t arrived = cudaStreamSynchronize(stream);
    if (arrived != cudaSuccess && error == cudaSuccess) error = fail(failure, "cudaStreamSynchronize", -1, arrived);
    *count = arrived == cudaSuccess ? moved : 0;
    cudaGetLastError();
    return error;
}

// `programmatic`: on sm_90 and newer, the kernel may start before its predecessor ends.
cudaError_t launch(uvm_failure* failure, const void* kernel, const char* name, int blocks, int threads,
                   void** arguments, cudaStream_t stream, bool programmatic = false) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = programmatic;
    cudaError_t error = cudaLaunchKernelExC(&config, kernel, arguments);
    return error == cudaSuccess ? error : fail(failure, name, -1, error);
}

// In a programmatic launch, waits until the preceding kernel has ended and its writes are visible.
__device__ void await_earlier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start if it is launched programmatically.
__device__ void begin_later() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// The tests' host build defines its own read, whose latency depends on where the page is.
#ifndef UVM_READ_NOW
__device__ unsigned int read_now(const char* from) { return *(const volatile unsigned int*)from; }
#endif

// Cycles of one read. The store to shared memory waits for the load, and the clock read waits for the store. Without
// the store, the compiler would read the clock while the load is in flight.
__device__ unsigned int time_read(const char* from) {
    __shared__ volatile unsigned int arrived;
    const long long before = clock64();
    arrived = read_now(from);
    return (unsigned int)(clock64() - before);
}
}  // namespace

extern "C" __global__ void uvm_time_reads_kernel(const unsigned long long* addresses, int count, uvm_read_time* times) {
    for (int i = blockIdx.x; i < count; i += gridDim.x) {
        const char* from = (const char*)addresses[i];
        uvm_read_time time = {time_read(from), UINT_MAX};
        for (int line = 1; line <= timing_lines; line++) {
            const unsigned int took = time_read(from + line * timing_stride);
            if (took < time.later) time.later = took;
        }
        times[i] = time;
    }
}

// Puts future host pages of `device` on a NUMA node, or with -1 on the calling thread's node.
UVM_API void uvm_use_host_node(int device, int node) {
    if (device >= 0 && device < max_devices) host_nodes[device] = node + 1;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

// Reserves nbytes at a multiple of `align` and advises AccessedBy the device for all of them. The GPU then has pages
// mapped wherever they are, and moving an expert takes one advice and one prefetch per span. `base` is the argument for
// uvm_free. If the driver's address is not aligned, the range is reallocated with room for alignment; untouched address
// space costs no memory.
UVM_API int uvm_allocate(int device, size_t nbytes, size_t align, cudaStream_t caller, void** base, void** address,
                         uvm_failure* failure) {
    on_device guard(device, failure);
    if (guard.error != cudaSuccess) return guard.error;
    cudaError_t error = refuse_capture(failure, caller);
    if (error != cudaSuccess) return error;
    void* start = nullptr;
    error = cudaMallocManaged(&start, nbytes, cudaMemAttachGlobal);
    if (error != cudaSuccess) return fail(failure, "cudaMallocManaged", -1, error);
    if ((size_t)start % align) {
        error = cudaFree(start);
        if (error != cudaSuccess) return fail(failure, "cudaFree", -1, error);
        error = cudaMallocManaged(&start, nbytes + align, cudaMemAttachGlobal);
        if (error != cudaSuccess) return fail(failure, "cudaMallocManaged", -1, error);
    }
    char* aligned = (char*)(((size_t)start + align - 1) / align * align);
    error = advise(aligned, nbytes, cudaMemAdviseSetAccessedBy, place_device, device);
    if (error != cudaSuccess) {
        fail(failure, "cudaMemAdvise(SetAccessedBy)", -1, error);
        if (cudaFree(start) != cudaSuccess) cudaGetLastError();
        return error;
    }
    *base = start;
    *address = aligned;
    return cudaSuccess;
}

// Called when the last tensor is freed, perhaps while a stream is capturing a graph. Relaxed mode keeps the calling
// thread's capture valid.
UVM_API int uvm_free(int device, void* base, uvm_failure* failure) {
    on_device guard(device, failure);
    if (guard.error != cudaSuccess) return guard.error;
    relaxed_capture relaxed(failure);
    if (relaxed.error != cudaSuccess) return relaxed.error;
    cudaError_t error = cudaFree(base);
    return error == cudaSuccess ? error : fail(failure, "cudaFree", -1, error);
}

// Makes `place` the preferred location of the spans, moves them there, and returns when they have arrived. The order of
// calls keeps what a running step reads mapped for the GPU, except for blocks being moved. According to the open kernel
// modules, a span within one block is unmapped while that block is copied; a longer span is unmapped from its first
// copy until the driver's second pass maps it. So the caller moves few bytes at a time. To the GPU: prefetch, wait,
// advise. Advice to prefer the GPU immediately unmaps pages in host RAM, so kernels fault until the prefetch reaches
// the page (measured for 16 MiB: at least 0.04 ms lost, 0.004 in this order). To the host: advise, prefetch, wait.
// Pages that arrive in host RAM while they prefer the GPU are not mapped for it, and the GPU's reads would migrate them
// back. If a call fails, later calls are skipped, but moves in flight still complete. The first failure is reported.
UVM_API int uvm_place(int device, char* address, const uvm_span* spans, int count, int place, cudaStream_t caller,
                      uvm_failure* failure) {
    on_device guard(device, failure);
    if (guard.error != cudaSuccess) return guard.error;
    cudaError_t error = refuse_capture(failure, caller);
    if (error != cudaSuccess) return error;
    relaxed_capture relaxed(failure);
    if (relaxed.error != cudaSuccess) return relaxed.error;
    cudaStream_t stream = nullptr;
    error = prefetch_stream(failure, device, moves, &stream);
    if (error != cudaSuccess) return error;
    if (place == place_host) {
        error = advise_all(failure, address, spans, &count, place, device);
        if (error != cudaSuccess) return error;
    }
    error = prefetch_all(failure, address, spans, &count, place, device, stream);
    if (place == place_device) {
        uvm_failure advice;
        cudaError_t advised = advise_all(&advice, address, spans, &count, place, device);
        if (advised != cudaSuccess && error == cudaSuccess) {
            *failure = advice;
            error = advised;
        }
    }
    return error;
}

// Makes the host the preferred location of the bytes without moving them. Bytes written before uvm_populate go to host
// pages.
UVM_API int uvm_prefer_host(int device, char* address, size_t nbytes, cudaStream_t caller, uvm_failure* failure) {
    on_device guard(device, failure);
    if (guard.error != cudaSuccess) return guard.error;
    cudaError_t error = refuse_capture(failure, caller);
    if (error != cudaSuccess) return error;
    relaxed_capture relaxed(failure);
    if (relaxed.error != cudaSuccess) return relaxed.error;
    const uvm_span all = {0, nbytes};
    int count = 1;
    return advise_all(failure, address, &all, &count, place_host, device);
}

namespace {
// Reads a byte of every `step`-th block of the spans, from block `first` on. Reading is safe while others write.
void read_by_cpu(const char* address, const uvm_span* spans, int count, int first, int step) {
    int block = 0;
    for (int i = 0; i < count; i++) {
        for (size_t at = 0; at < spans[i].nbytes; at += copy_piece) {
            if (block++ % step == first) (void)*(const volatile char*)(address + spans[i].offset + at);
        }
    }
}

// Reads a byte of every block with `readers` threads, which make no CUDA calls.
void read_by_threads(const char* address, const uvm_span* spans, int count, int readers) {
    std::thread others[max_readers];
    for (int i = 1; i < readers; i++) {
        try {
            others[i] = std::thread(read_by_cpu, address, spans, count, i, readers);
        } catch (const std::system_error&) {  // out of threads
            read_by_cpu(address, spans, count, i, readers);
        }
    }
    read_by_cpu(address, spans, count, 0, readers);
    for (std::thread& each : others) {
        if (each.joinable()) each.join();
    }
}
}  // namespace

// Populates the unpopulated part of the spans in host RAM and returns when it is there. The spans must prefer the host.
// The calling thread launches no kernels, so it has no stream that could be capturing.
// The CPU's first read of a block populates all of it with zeros, in the largest pages that host RAM has, on the
// block's preferred NUMA node, and maps it for the GPU (open kernel modules, 580.95.05:
// `uvm_perf_prefetch_prenotify_fault_migrations` of uvm_perf_prefetch.c; `block_populate_pages_cpu`,
// `block_select_node_residency` and `block_service_finish_map_accessed_by` of uvm_va_block.c). A read takes no lock of
// the driver's library, and the address space lock only shared. The prefetch then populates what is still missing, in
// blocks that were written before or under a driver with other rules. Enough host RAM must be free: without it, a
// prefetch fails, but a read is retried by the kernel or gets a process killed.
UVM_API int uvm_populate(int device, char* address, const uvm_span* spans, int count, int readers,
                         uvm_failure* failure) {
    on_device guard(device, failure);
    if (guard.error != cudaSuccess) return guard.error;
    relaxed_capture relaxed(failure);
    if (relaxed.error != cudaSuccess) return relaxed.error;
    if (readers < 0 || readers > max_readers) return fail(failure, "uvm_populate", -1, cudaErrorInvalidValue);
    cudaStream_t stream = nullptr;
    cudaError_t error = prefetch_stream(failure, device, populating, &stream);
    if (error != cudaSuccess) return error;
    if (readers > 0) read_by_threads(address, spans, count, readers);
    return prefetch_all(failure, address, spans, &count, place_host, device, stream);
}

// Times one read at each of `count` addresses, then `timing_lines` more on the same page. Returns when all are done.
// The GPU accesses both arrays in place, so pinned memory is enough.
UVM_API int uvm_time_reads(int device, const unsigned long long* addresses, int count, uvm_read_time* times,
                           uvm_failure* failure) {
    on_device guard(device, failure);
    if (guard.error != cudaSuccess) return guard.error;
    relaxed_capture relaxed(failure);
    if (relaxed.error != cudaSuccess) return relaxed.error;
    if (count <= 0) return fail(failure, "uvm_time_reads", -1, cudaErrorInvalidValue);
    cudaStream_t stream = nullptr;
    cudaError_t error = prefetch_stream(failure, device, moves, &stream);
    if (error != cudaSuccess) return error;
    void* arguments[] = {&addresses, &count, &times};
    // One thread per block, because a warp waits for its slowest read. Few blocks, so that steps hardly slow down.
    int blocks = count < timing_blocks ? count : timing_blocks;
    error = launch(failure, (const void*)uvm_time_reads_kernel, "uvm_time_reads", blocks, 1, arguments, stream);
    if (error != cudaSuccess) return error;
    error = cudaStreamSynchronize(stream);
    return error == cudaSuccess ? error : fail(failure, "cudaStreamSynchronize", -1, error);
}

UVM_API int uvm_memory_info(int device, size_t* free_bytes, size_t* total_bytes, uvm_failure* failure) {
    on_device guard(device, failure);
    if (guard.error != cudaSuccess) return guard.error;
    cudaError_t error = cudaMemGetInfo(free_bytes, total_bytes);
    return error == cudaSuccess ? error : fail(failure, "cudaMemGetInfo", -1, error);
}

UVM_API int uvm_versions(int* runtime, int* driver, uvm_failure* failure) {
    cudaError_t error = cudaRuntimeGetVersion(runtime);
    if (error != cudaSuccess) return fail(failure, "cudaRuntimeGetVersion", -1, error);
    error = cudaDriverGetVersion(driver);
    return error == cudaSuccess ? error : fail(failure, "cudaDriverGetVersion", -1, error);
}

// ---- copies of a layer's experts into plain VRAM --------------------------------------------------------------------
// A kernel copies, not the copy engine: on an H200 beside a memory-bound kernel, 16 blocks copy at 51 GB/s over the
// link and cudaMemcpyAsync at 26 to 31 (benchmarks/results/2026-11-26-nvidia-h200/stream.json). A kernel also reads
// each byte wherever it is, so experts may move meanwhile.
//
// Separate blocks copy what is in VRAM. The same 16 copied it at 130 to 210 GB/s beside a MoE kernel, so with a mostly
// resident layer they were not available for the link.

namespace {
struct layer_copies {
    uvm_copy part[max_copies];
    unsigned int pieces[max_copies];        // running total over the parts
    unsigned int in_vram[max_pieces / 32];  // one bit per piece
    unsigned int near;                      // pieces in VRAM
    int count;
};

__device__ void copy_bytes(const char* from, char* to, size_t nbytes) {
    const uint4* source = (const uint4*)from;
    uint4* target = (uint4*)to;
    const size_t words = nbytes / sizeof(uint4);
    size_t at = threadIdx.x;
    for (; at + (copy_loads - 1) * (size_t)copy_threads < words; at += copy_loads * (size_t)copy_threads) {
        uint4 values[copy_loads];
#pragma unroll
        for (int i = 0; i < copy_loads; i++) values[i] = source[at + i * copy_threads];
#pragma unroll
        for (int i = 0; i < copy_loads; i++) target[at + i * copy_threads] = values[i];
    }
    for (; at < words; at += copy_threads) target[at] = source[at];
    for (size_t i = words * sizeof(uint4) + threadIdx.x; i < nbytes; i += copy_threads) to[i] = from[i];
}

__device__ void copy_row(const char* from, char* to, size_t nbytes) {
    if (((size_t)from | (size_t)to) % sizeof(uint4) == 0) return copy_bytes(from, to, nbytes);
    for (size_t i = threadIdx.x; i < nbytes; i += copy_threads) to[i] = from[i];
}

// State of a search for successive pieces of one kind.
struct piece_search {
    bool in_vram;
    int word;             // where the last one was found
    unsigned int passed;  // pieces of this kind in earlier words
};

// The index of the piece with `before` pieces of its kind before it.
__device__ unsigned int find_piece(const layer_copies& copies, piece_search& search, unsigned int before) {
    for (; search.word < max_pieces / 32; search.word++) {
        unsigned int bits = search.in_vram ? copies.in_vram[search.word] : ~copies.in_vram[search.word];
        const unsigned int here = __popc(bits);
        if (before < search.passed + here) {
            for (before -= search.passed; before; before--) bits &= bits - 1;
            return search.word * 32 + __ffs(bits) - 1;
        }
        search.passed += here;
    }
    return max_pieces + before - search.passed;  // pieces with unknown location
}
}  // namespace

// Blocks claim one chunk at a time. The first `link_blocks` copy what is behind the link, to keep it busy, and then
// help with VRAM. The others copy what is in VRAM. A stale map of what is in VRAM costs time, never correctness.
extern "C" __global__ void __launch_bounds__(copy_threads, 2)
    uvm_copy_kernel(layer_copies copies, int link_blocks, unsigned int* claimed) {
    __shared__ unsigned int claim, found;
    const unsigned int total = copies.pieces[copies.count - 1], near = copies.near, far = total - near;
    bool link = (int)blockIdx.x < link_blocks;
    piece_search search = {!link, 0, 0};
    for (;;) {
        const unsigned int end = piece_chunks * (link ? far : near);
        if (threadIdx.x == 0) {
            claim = atomicAdd(&claimed[link ? 0 : 1], 1u);
            if (claim < end) found = find_piece(copies, search, claim / piece_chunks);
        }
        __syncthreads();
        const unsigned int mine = claim, piece = found;
        __syncthreads();
        if (mine >= end) {
            if (!link) return;
            link = false;
            search = {true, 0, 0};
            continue;
        }
        int i = 0;
        while (copies.pieces[i] <= piece) i++;
        const uvm_copy& part = copies.part[i];
        const size_t offset = (piece - (i ? copies.pieces[i - 1] : 0)) * copy_piece + mine % piece_chunks * copy_chunk;
        if (offset >= part.nbytes) continue;
        const size_t left = part.nbytes - offset, nbytes = left < copy_chunk ? left : copy_chunk;
        copy_bytes(part.from + offset, part.to + offset, nbytes);
    }
}

// Copies `count` tensors in stream order, with up to `link_blocks` blocks for what is behind the link and up to
// `vram_blocks` for what is in VRAM. `in_vram` has one bit per 2 MiB of each tensor, `known` bits in total; the rest
// counts as behind the link. `claimed`: two words of VRAM that no other copy in flight uses. Fails while the caller's
// stream is capturing, because a graph would copy at each replay.
UVM_API int uvm_copy_layer(int device, const uvm_copy* parts, int count, const unsigned char* in_vram, int known,
                           int link_blocks, int vram_blocks, unsigned int* claimed, cudaStream_t caller,
                           cudaStream_t stream, uvm_failure* failure) {
    on_device guard(device, failure);
    if (guard.error != cudaSuccess) return guard.error;
    cudaError_t error = refuse_capture(failure, caller);
    if (error != cudaSuccess) return error;
    layer_copies copies = {};
    size_t total = 0;
    bool valid = count > 0 && count <= max_copies && link_blocks > 0 && vram_blocks > 0;
    for (int i = 0; valid && i < count; i++) {
        const uvm_copy& part = parts[i];
        valid = part.nbytes > 0 && ((size_t)part.from | (size_t)part.to) % sizeof(uint4) == 0;
        total += (part.nbytes + copy_piece - 1) / copy_piece;
        valid = valid && total < INT_MAX / piece_chunks;
        copies.part[i] = part;
        copies.pieces[i] = (unsigned int)total;
    }
    if (!valid) return fail(failure, "uvm_copy_layer", -1, cudaErrorInvalidValue);
    copies.count = count;
    for (size_t i = 0; i < total && i < max_pieces && (int)i < known; i++) {
        const unsigned int bit = in_vram[i / 8] >> i % 8 & 1;
        copies.in_vram[i / 32] |= bit << i % 32;
        copies.near += bit;
    }
    error = cudaMemsetAsync(claimed, 0, 2 * sizeof *claimed, stream);
    if (error != cudaSuccess) return fail(failure, "cudaMemsetAsync", -1, error);
    const unsigned int far = (unsigned int)total - copies.near, near = copies.near;
    if ((unsigned int)link_blocks > far * piece_chunks) link_blocks = (int)(far * piece_chunks);
    if ((unsigned int)vram_blocks > near * piece_chunks) vram_blocks = (int)(near * piece_chunks);
    void* arguments[] = {&copies, &link_blocks, &claimed};
    return launch(failure, (const void*)uvm_copy_kernel, "uvm_copy_layer", link_blocks + vram_blocks, copy_threads,
                  arguments, stream);
}

// ---- reads in place, to measure the link ----------------------------------------------------------------------------

// Reads `count` pieces of `nbytes` wherever they are, like MoE kernels: plain 16-byte loads by blocks on all SMs. A
// store depends on all loads, so that the compiler keeps them.
extern "C" __global__ void __launch_bounds__(copy_threads, 2)
    uvm_read_kernel(const unsigned long long* pieces, int count, size_t nbytes, unsigned* sink) {
    const size_t words = nbytes / sizeof(uint4), unit = (size_t)copy_threads * copy_loads;
    const size_t units = (words + unit - 1) / unit, total = units * count;
    unsigned seen = 0;
    for (size_t at = blockIdx.x; at < total; at += gridDim.x) {
        const uint4* from = (const uint4*)pieces[at / units];
        const size_t first = at % units * unit + threadIdx.x;
        uint4 values[copy_loads];
#pragma unroll
        for (int i = 0; i < copy_loads; i++) {
            const size_t word = first + i * copy_threads;
            values[i] = word < words ? from[word] : uint4{};
        }
#pragma unroll
        for (int i = 0; i < copy_loads; i++) seen ^= values[i].x ^ values[i].y ^ values[i].z ^ values[i].w;
    }
    if (seen == 1) *sink = seen;
}

// Runs in stream order. `pieces` (in VRAM or pinned) are addresses. They and `nbytes` are multiples of 16. `sink` is a
// word of VRAM.
UVM_API int uvm_read_pieces(const unsigned long long* pieces, int count, size_t nbytes, unsigned* sink,
                            cudaStream_t stream, uvm_failure* failure) {
    if (count <= 0 || nbytes == 0 || nbytes % sizeof(uint4)) {
        return fail(failure, "uvm_read_pieces", -1, cudaErrorInvalidValue);
    }
    void* arguments[] = {&pieces, &count, &nbytes, &sink};
    return launch(failure, (const void*)uvm_read_kernel, "uvm_read_pieces", read_blocks, copy_threads, arguments,
                  stream);
}

// ---- routing counters -----------------------------------------------------------------------------------------------
// control[0]: valid rows of this step (0 for a dummy or capture run, in which nothing counts). control[1]: phase, 0 for
// prefill, 1 for decode. counts per layer: [2 phases][2 kinds: routed tokens, activations][num_experts]. Several
// streams may add to one array. in_place is passed by value, so a graph keeps the captured value, which is 1: graphs
// read in place.

namespace {
struct counted_layers {
    uvm_counted layer[max_counted];
};

__device__ long long read_id(const void* ids, int kind, long long at) {
    if (kind == ids_int64) return static_cast<const long long*>(ids)[at];
    int value = static_cast<const int*>(ids)[at];
    return kind == ids_packed ? value >> 16 : value;
}

__device__ void add(unsigned long long* counts, int num_experts, long long phase, int in_place, int expert,
                    unsigned int tokens) {
    unsigned long long* routed = counts + phase * 2 * num_experts;
    atomicAdd(&routed[expert], (unsigned long long)tokens);
    if (in_place) atomicAdd(&routed[num_experts + expert], 1ULL);
}
}  // namespace

// One block per layer: its bins fit in shared memory, and the activated experts are known once all rows are binned.
extern "C" __global__ void uvm_count_routing_kernel(counted_layers layers, int kind, int k, int first_expert,
                                                    int num_experts, const long long* control,
                                                    unsigned long long* counts) {
    __shared__ unsigned int bins[max_experts];
    const uvm_counted& layer = layers.layer[blockIdx.x];
    counts += (size_t)layer.layer * 4 * num_experts;
    const long long valid = control[0];
    const long long phase = control[1];
    if (valid <= 0) return;
    for (int expert = threadIdx.x; expert < num_experts; expert += blockDim.x) bins[expert] = 0;
    __syncthreads();
    const int end = (valid < layer.rows ? (int)valid : layer.rows) * k;
    for (int i = threadIdx.x; i < end; i += blockDim.x) {
        const int row = i / k;
        const long long at = (long long)row * layer.row_stride + (i - row * k);
        const long long expert = read_id(layer.ids, kind, at) - first_expert;
        if (expert >= 0 && expert < num_experts) atomicAdd(&bins[expert], 1u);
    }
    __syncthreads();
    for (int expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
        if (bins[expert]) add(counts, num_experts, phase, layer.in_place, expert, bins[expert]);
    }
}

extern "C" __global__ void uvm_count_histogram_kernel(const int* histogram, int length, int num_experts, int in_place,
                                                      const long long* control, unsigned long long* counts) {
    if (control[0] <= 0) return;
    const int expert = blockIdx.x * blockDim.x + threadIdx.x;
    if (expert < length && histogram[expert] > 0) {
        add(counts, num_experts, control[1], in_place, expert, (unsigned int)histogram[expert]);
    }
}

namespace {
int block_size(long long work) { return work >= 1024 ? 1024 : (int)(work + 31) / 32 * 32; }
}  // namespace

// Counts the routing of `count` layers in one step, whose ids are of one kind with k per row. One launch without
// allocation or synchronisation, so a graph may capture it. Ids outside [first_expert, first_expert + num_experts) (-1,
// other ranks' experts) do not count, nor do rows at or beyond control[0].
UVM_API int uvm_count_routing(const uvm_counted* layers, int count, int kind, int k, int first_expert, int num_experts,
                              const long long* control, unsigned long long* counts, cudaStream_t stream,
                              uvm_failure* failure) {
    bool valid = count > 0 && count <= max_counted && k > 0 && num_experts > 0 && num_experts <= max_experts;
    counted_layers counted = {};
    long long work = num_experts;
    for (int i = 0; valid && i < count; i++) {
        const uvm_counted& layer = counted.layer[i] = layers[i];
        valid = layer.rows > 0 && layer.rows <= INT_MAX / k && layer.layer >= 0;
        if ((long long)layer.rows * k > work) work = (long long)layer.rows * k;
    }
    if (!valid) return fail(failure, "uvm_count_routing", -1, cudaErrorInvalidValue);
    void* arguments[] = {&counted, &kind, &k, &first_expert, &num_experts, &control, &counts};
    return launch(failure, (const void*)uvm_count_routing_kernel, "uvm_count_routing", count, block_size(work),
                  arguments, stream);
}

// Counts a histogram of tokens per expert instead (for the first `length` experts; the others got none), for runners
// that expose no ids.
UVM_API int uvm_count_histogram(const int* histogram, int length, int num_experts, int in_place,
                                const long long* control, unsigned long long* counts, cudaStream_t stream,
                                uvm_failure* failure) {
    if (length <= 0 || length > num_experts || num_experts > max_experts) {
        return fail(failure, "uvm_count_histogram", -1, cudaErrorInvalidValue);
    }
    void* arguments[] = {&histogram, &length, &num_experts, &in_place, &control, &counts};
    return launch(failure, (const void*)uvm_count_histogram_kernel, "uvm_count_histogram", (length + 255) / 256, 256,
                  arguments, stream);
}

// ---- slots: rows in VRAM that layers share, filled by the misses of the current step --------------------------------
// Implements sglang_uvm_offload/policy/slot_policy.py bit for bit. All sums are of integers, so their order does not
// matter.

namespace {
enum slot_kind { slot_tokens, slot_hits, slot_fills, slot_brought, slot_kinds };
constexpr int ages = 24, lately_bits = 4, long_bits = 16;
constexpr int classes = ages * lately_bits * long_bits;
constexpr int rate_bits = 20, lately_shift = 4, long_shift = 11, least_shift = 2;
constexpr unsigned use = 16, max_events = 1 << 16;
constexpr int value_bits = 16, whole = 16;
constexpr int worth_bits = 3;
constexpr unsigned not_held = 255;  // larger than any worth
constexpr int tail = 64;

// Words written by a lookahead launch while its layer may be resolved concurrently. The upper half of each word is the
// launch's number, which tells a reader which words belong together.
enum ahead_word { ahead_at, ahead_step, ahead_expert, ahead_done = ahead_expert + ahead_rows };
constexpr int ahead_words = ahead_done + ahead_blocks;
enum gain_kind {
    gain_misses,   // misses of layers with lookahead
    gain_brought,  // experts copied ahead, at least in part
    gain_right,    // copied experts that the layer then missed
    gain_used,     // their units, which fills need not copy
    gain_cut,      // upper bound of the units in flight when a layer was resolved
    gain_used_then,
    gain_cut_then,
    gain_rest,  // launches that still have to pause
    gain_kinds
};
constexpr unsigned gain_window = 1 << 12, gain_pause = 1 << 16;

struct slot_table {
    unsigned step;
    unsigned events[classes];
    unsigned uses[classes];
    unsigned values[classes];  // for the current step, from the counts of earlier steps
};

__device__ int floor_log2(unsigned x) { return 31 - __clz(x | 1); }

__device__ int half_octaves(unsigned x) {
    const int octave = floor_log2(x);
    return 2 * octave + (octave ? x >> (octave - 1) & 1 : 0);
}

__device__ int clamp(int x, int least, int most) { return x < least ? least : x > most ? most : x; }

__device__ int class_of(unsigned since, bool ever, unsigned lately, unsigned long_rate) {
    const int age = ever ? clamp(half_octaves(since + 1), 0, ages - 1) : ages - 1;
    const int a = clamp(floor_log2(lately) - (rate_bits - lately_bits), 0, lately_bits - 1);
    const int b = clamp(half_octaves(long_rate) - (2 * rate_bits - long_bits), 0, long_bits - 1);
    return (age * lately_bits + a) * long_bits + b;
}

__device__ unsigned worth_of(unsigned value) {
    const int octave = floor_log2(value + 1);
    return (octave << worth_bits) + (((value + 1) << worth_bits >> octave) & ((1 << worth_bits) - 1));
}

// The choices of one launch. The first block to arrive decides for all, whatever order they run in.
struct slot_choice {
    unsigned class_values[classes];         // from the table
    unsigned tokens[max_slot_experts];      // tokens of each expert in this step
    unsigned distance[max_slot_experts];    // distance of each expert in a prefill, and its
    unsigned rates[max_slot_experts];       // rate, as in policy.slot_policy.Tails
    int slot_of[max_slot_experts];          // slot of each expert plus one, as in the pool
    unsigned misses[max_slot_experts];      // keys, unordered: the largest is filled first
    unsigned char worth[max_slot_experts];  // worth of each expert, in a slot or not
    int num_misses;
    int bucket[max_aligned];       // for each (row, expert) pair to align: the expert plus one, 0 for none
    int bucket_rows[max_aligned];  // stored at the bucket's first pair
    int fill[max_slot_experts];    // experts to fill, in order
    int evict[max_slot_experts];   // places of the victims in the pool, in order
    int found[copy_threads];
    int num_found;   // over all threads and rounds
    unsigned least;  // over all threads
    unsigned long long words[ahead_words];
    unsigned came[ahead_rows];  // units copied of each lookahead row
    bool missed[ahead_rows];    // whether the row's expert is a miss
    int fills;
};

// One expert's state, plus what a step reads of it.
struct slot_expert {
    unsigned last, lately, long_rate, share;
    int now, before;  // the layer's two classes
    int slot;         // slot_of
};
constexpr int experts_each = max_slot_experts / copy_threads, classes_each = classes / copy_threads;
static_assert(max_slot_experts % copy_threads == 0 && classes % copy_threads == 0, "each thread has as many");

// What a thread of the deciding block reads. The reads do not depend on each other: each dependent read costs a round
// trip to the L2 cache, or to VRAM if a step's experts have evicted the cache (reads in a row took 7 to 10 us a layer).
// The first block reads before it knows whether it decides. If another block decides, and writes meanwhile, the values
// are not used.
struct slot_inputs {
    slot_expert experts[experts_each];
    long long valid, phase, id;  // control, and this thread's first expert id
    int padded, block;           // this thread's first block of rows
    unsigned long long word;     // this thread's word of uvm_ahead.words
    int taken;
    unsigned now;
};

// Reads what no kernel writes between the last resolve of this layer and this one.
__device__ void read_state(const uvm_slots& layer, const slot_table* table, slot_inputs& inputs, slot_choice& choice) {
    const int thread = threadIdx.x;
#pragma unroll
    for (int i = 0; i < experts_each; i++) {
        const int expert = thread + i * copy_threads;
        if (expert >= layer.num_experts) break;
        inputs.experts[i] = {layer.last[expert],  layer.lately[expert],  layer.long_[expert],
                             layer.share[expert], layer.classes[expert], layer.classes[layer.num_experts + expert]};
    }
    unsigned values[classes_each];
#pragma unroll
    for (int i = 0; i < classes_each; i++) values[i] = table->values[thread + i * copy_threads];
#pragma unroll
    for (int i = 0; i < classes_each; i++) choice.class_values[thread + i * copy_threads] = values[i];
}

// Reads what earlier kernels of the step write.
__device__ void read_step(const uvm_slots& layer, const slot_table* table, const uvm_routing& step,
                          const uvm_ahead& ahead, slot_inputs& inputs) {
    const int thread = threadIdx.x;
    const int* slot_of = layer.pool.slot_of + layer.at * layer.pool.width;
    inputs.valid = step.control[0];
    inputs.phase = step.control[1];
    inputs.taken = *layer.pool.taken;
    inputs.now = table->step;
    inputs.id = thread < step.rows * step.k ? read_id(step.ids, step.kind, thread) : -1;
    const volatile unsigned long long* words = ahead.words;
    inputs.word = ahead.rows && thread < ahead_words ? words[thread] : 0;
    inputs.padded = step.order ? 0 : *step.padded;
    inputs.block = !step.order && thread < step.num_blocks ? step.blocks[thread] : -1;
#pragma unroll
    for (int i = 0; i < experts_each; i++) {
        const int expert = thread + i * copy_threads;
        if (expert >= layer.num_experts) break;
        inputs.experts[i].slot = slot_of[expert];
    }
}

// Reclassifies an expert and returns its value.
__device__ unsigned value_of(slot_expert& it, unsigned now, const slot_choice& choice) {
    const int found = class_of(now - it.last, it.last != 0, it.lately, it.long_rate);
    it.now = found + 1;
    return choice.class_values[found] * it.share / whole;
}

// Counts a decode step for one expert and returns its value.
__device__ unsigned observe(slot_expert& it, slot_table* table, unsigned now, bool used, const slot_choice& choice) {
    const int before = it.before - 1;
    if (before >= 0) {
        atomicAdd(&table->events[before], 1u);
        if (used || (it.last && it.last + 1 >= now)) atomicAdd(&table->uses[before], use);
    }
    if (used) it.last = now;
    const int shift = clamp(floor_log2(now + 1), least_shift, long_shift);
    it.lately = it.lately - (it.lately >> lately_shift) + (used ? 1u << (rate_bits - lately_shift) : 0);
    it.long_rate = it.long_rate - (it.long_rate >> shift) + (used ? 1u << (rate_bits - shift) : 0);
    it.before = it.now;
    return value_of(it, now, choice);
}

// Counts the tails of a prefill for one expert and returns its value.
__device__ unsigned expect(slot_expert& it, unsigned now, unsigned distance, unsigned rate, const slot_choice& choice) {
    if (distance < tail) {
        const unsigned last = now > distance ? now - distance : 1;
        if (it.last < last) it.last = last;
    }
    if (rate > 1u << rate_bits) rate = 1u << rate_bits;
    if (it.lately < rate) it.lately = rate;
    it.before = 0;  // otherwise the tails would count as uses
    return value_of(it, now, choice);
}

__device__ void write_expert(const uvm_slots& layer, int expert, const slot_expert& it) {
    layer.last[expert] = it.last;
    layer.lately[expert] = it.lately;
    layer.long_[expert] = it.long_rate;
    layer.classes[expert] = it.now;
    layer.classes[layer.num_experts + expert] = it.before;
}

// Reads how the last tokens of a prefill's requests use each expert.
__device__ void read_tails(const uvm_slots& layer, const uvm_routing& step, int rows, slot_choice& choice) {
    __shared__ unsigned weights[tail];
    if (threadIdx.x == 0) {
        unsigned weight = 1u << (rate_bits - lately_shift);
        for (int back = 0; back < tail; back++, weight -= weight >> lately_shift) weights[back] = weight;
    }
    for (int expert = threadIdx.x; expert < layer.num_experts; expert += blockDim.x) {
        choice.distance[expert] = tail;
        choice.rates[expert] = 0;
    }
    __syncthreads();
    const int requests = step.requests[0] < max_requests ? step.requests[0] : max_requests;
    for (int i = threadIdx.x; i < requests * tail; i += blockDim.x) {
        const int request = i / tail, back = i % tail;
        const int begin = step.requests[1 + 2 * request], end = step.requests[2 + 2 * request];
        const int row = (end < rows ? end : rows) - 1 - back;
        if (row < begin) continue;
        for (int k = 0; k < step.k; k++) {
            const long long expert = read_id(step.ids, step.kind, (long long)row * step.k + k);
            if (expert < 0 || expert >= layer.num_experts) continue;
            atomicMin(&choice.distance[expert], (unsigned)back);
            atomicAdd(&choice.rates[expert], weights[back]);
        }
    }
    __syncthreads();
}

// The sort key of a miss. Experts that would be read in place more than once come first. Values are below 1 << 21.
// Equal values are ordered by ascending id.
__device__ unsigned miss_key(unsigned value, int expert, bool read_again) {
    return ((read_again ? 1u << 21 : 0) + value) * max_slot_experts + (max_slot_experts - 1 - expert);
}

// The worth below which a victim gives up its slot to a miss.
__device__ unsigned admission(const slot_choice& choice, int expert, int read_rows) {
    return choice.tokens[expert] > (unsigned)read_rows ? not_held - 1 : choice.worth[expert];
}

// Sorts the misses by counting the keys before each, and keeps the first ones. All keys differ.
__device__ void rank_misses(slot_choice& choice, int most) {
    for (int i = threadIdx.x; i < choice.num_misses; i += copy_threads) {
        const unsigned key = choice.misses[i];
        int rank = 0;
        for (int other = 0; other < choice.num_misses; other++) rank += choice.misses[other] > key;
        if (rank < most) choice.fill[rank] = max_slot_experts - 1 - (int)(key % max_slot_experts);
    }
}

// One thread's part of a search through the pool: chunks `begin` to `end` in eviction order, which starts at the layer
// itself and goes backwards layer by layer. All threads together cover the pool.
struct pool_run {
    const uint4* worth;
    int layers, layer_chunks, at, begin, end;
    int kept[2] = {-1, -1};  // layers whose experts are no victims

    __device__ pool_run(const uvm_slots& layer)
        : worth((const uint4*)layer.pool.worth),
          layers(layer.pool.layers),
          layer_chunks(layer.pool.width / pool_chunk),
          at(layer.at) {
        const int chunks = layers * layer_chunks, each = (chunks + copy_threads - 1) / copy_threads;
        begin = threadIdx.x * each;
        end = begin + each < chunks ? begin + each : chunks;
    }

    // Protects the experts of the layer itself and of another one (-1 for none) from eviction.
    __device__ void keeps(int other) {
        kept[0] = at;
        kept[1] = other;
    }

    __device__ uint4 chunk(int place) const {
        const int layer = place / layer_chunks;
        const uint4 nothing = {~0u, ~0u, ~0u, ~0u};
        return layer == kept[0] || layer == kept[1] ? nothing : worth[place];
    }

    // The place of the `nth` chunk.
    __device__ int place(int nth) const {
        const int layer = at - nth / layer_chunks;
        return (layer < 0 ? layer + layers : layer) * layer_chunks + nth % layer_chunks;
    }
};

__device__ unsigned byte_of(const uint4& chunk, int i) {
    const unsigned words[] = {chunk.x, chunk.y, chunk.z, chunk.w};
    return words[i / 4] >> i % 4 * 8 & 255;
}

// The smallest worth in the run that is at least `from`.
__device__ unsigned least_worth(const pool_run& run, unsigned from) {
    unsigned least = not_held;
#pragma unroll 4
    for (int nth = run.begin; nth < run.end; nth++) {
        const uint4 chunk = run.chunk(run.place(nth));
#pragma unroll
        for (int i = 0; i < pool_chunk; i++) {
            const unsigned worth = byte_of(chunk, i);
            if (worth >= from && worth < least) least = worth;
        }
    }
    return least;
}

// Counts the experts with this worth in the run, up to `most`. Writes their places unless `places` is null.
__device__ int find_worth(const pool_run& run, unsigned worth, int most, int* places) {
    int count = 0;
    for (int nth = run.begin; nth < run.end && count < most; nth++) {
        const int place = run.place(nth);
        const uint4 chunk = run.chunk(place);
#pragma unroll
        for (int i = 0; i < pool_chunk; i++) {
            if (byte_of(chunk, i) != worth || count >= most) continue;
            if (places) places[count] = place * pool_chunk + i;
            count++;
        }
    }
    return count;
}

// Hides the experts in slots that this step reads, so that the search for victims skips them; or shows them again.
__device__ void hide_what_is_read(const uvm_slots& layer, slot_choice& choice, bool hide) {
    unsigned char* worth = layer.pool.worth + layer.at * layer.pool.width;
    for (int expert = threadIdx.x; expert < layer.num_experts; expert += copy_threads) {
        if (choice.tokens[expert] && choice.slot_of[expert]) worth[expert] = hide ? not_held : choice.worth[expert];
    }
}

// Chooses victims for the misses from `first` to `end` in choice.fill: those with the least worth first, until no miss
// is worth more or none is left. `read_rows` is that of uvm_routing; with 0, misses need not be worth more. All threads
// take the victims of one worth per round. Returns the number of victims.
__device__ int take_victims(const pool_run& run, slot_choice& choice, int first, int end, int read_rows) {
    int taken = 0, wanted = end - first;
    for (unsigned mine = least_worth(run, 0);;) {
        if (mine < choice.least) atomicMin(&choice.least, mine);  // few threads pass this test
        __syncthreads();
        const unsigned least = choice.least;
        while (read_rows && wanted > taken && admission(choice, choice.fill[first + wanted - 1], read_rows) <= least)
            wanted--;
        if (wanted == taken || least == not_held) return taken;
        const int found = mine == least ? find_worth(run, least, wanted - taken, nullptr) : 0;
        choice.found[threadIdx.x] = found;
        if (found) atomicAdd(&choice.num_found, found);
        __syncthreads();
        const int all = choice.num_found;
        if (threadIdx.x == 0) choice.least = not_held;
        if (found) {
            int before = taken;
            for (int other = 0; other < (int)threadIdx.x && before < wanted; other++) before += choice.found[other];
            find_worth(run, least, wanted - before, choice.evict + before);
            mine = least_worth(run, least + 1);
        }
        __syncthreads();
        if (all >= wanted) return wanted;
        taken = all;
    }
}

// Takes the slot from the expert at this place in the pool. Returns the slot plus one.
__device__ int evict(const uvm_slots& layer, slot_choice& choice, int place) {
    const int slot = layer.pool.slot_of[place], expert = place - layer.at * layer.pool.width;
    layer.pool.slot_of[place] = 0;
    layer.pool.worth[place] = not_held;
    if (expert >= 0 && expert < layer.num_experts) choice.slot_of[expert] = 0;
    return slot;
}

// Gives slots to the first `fills` of choice.fill: `unused` slots from `taken` on, then the victims'. Writes them to
// `noted` and counts them.
__device__ void take_slots(const uvm_slots& layer, slot_choice& choice, int taken, int unused, int fills, int* noted,
                           unsigned long long* counts) {
    const int own = layer.at * layer.pool.width;
    for (int i = threadIdx.x; i < fills; i += copy_threads) {
        const int expert = choice.fill[i];
        const int slot = i < unused ? taken + i : evict(layer, choice, choice.evict[i - unused]) - 1;
        layer.pool.slot_of[own + expert] = choice.slot_of[expert] = slot + 1;
        layer.pool.worth[own + expert] = choice.worth[expert];
        noted[1 + 2 * i] = expert;
        noted[2 + 2 * i] = slot;
        counts[expert]++;
    }
    if (threadIdx.x == 0) *layer.pool.taken = taken + unused;
}

// The copy units of a tensor's row; below, of one row of all tensors.
__device__ unsigned units_of(size_t nbytes) { return (unsigned)((nbytes + copy_unit - 1) / copy_unit); }

__device__ unsigned row_units(const uvm_rows& tensors) {
    unsigned units = 0;
    for (int i = 0; i < tensors.count; i++) units += units_of(tensors.nbytes[i]);
    return units;
}

// Whether a unit of the lookahead rows has been copied. `done` counts the units of each block.
__device__ bool has_come(unsigned unit, const volatile int* done) {
    return unit / ahead_blocks < (unsigned)done[unit % ahead_blocks];
}

// Stops the blocks that copy ahead for the layer, and reads what they copied for this step.
__device__ void find_ahead(const uvm_slots& layer, const uvm_ahead& ahead, const slot_inputs& inputs,
                           slot_choice& choice) {
    const int word = threadIdx.x;
    if (word == 0) *(volatile unsigned*)ahead.resolved = inputs.now;
    if (word < ahead_words) choice.words[word] = inputs.word;
    if (word < ahead_rows) choice.came[word] = choice.missed[word] = 0;
    __threadfence();  // what was copied is read after this
    __syncthreads();
    const unsigned long long launch = choice.words[ahead_at] >> 32 << 32;
    const bool ours = choice.words[ahead_at] == (launch | (unsigned)layer.at);
    const bool now = choice.words[ahead_step] == (launch | inputs.now);
    __syncthreads();
    if (word < ahead_words && !(ours && now && inputs.word - launch <= ~0u)) choice.words[word] = 0;
    if (word < ahead_words) choice.words[word] &= ~0u;
    __syncthreads();
}

// A miss that was copied ahead and gets no slot is computed from its lookahead slot, after a fill of the missing units.
// Appends such fills to the first `fills`. Returns the total number of fills.
__device__ int use_ahead(const uvm_slots& layer, const uvm_rows& tensors, const uvm_ahead& ahead,
                         const slot_inputs& inputs, slot_choice& choice, int fills) {
    const unsigned units = row_units(tensors);
    const unsigned long long *experts = &choice.words[ahead_expert], *done = &choice.words[ahead_done];
    for (unsigned unit = threadIdx.x; unit < ahead_rows * units; unit += copy_threads) {
        if (unit / ahead_blocks < done[unit % ahead_blocks]) atomicAdd(&choice.came[unit / units], 1u);
    }
    for (int i = threadIdx.x; i < choice.num_misses; i += copy_threads) {
        for (int row = 0; row < ahead_rows; row++) {
            if (max_slot_experts - choice.misses[i] % max_slot_experts == experts[row]) choice.missed[row] = true;
        }
    }
    if (threadIdx.x < ahead_blocks) ahead.came[ahead_rows + threadIdx.x] = (int)done[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned brought = 0, right = 0, used = 0, cut = 0;
        for (int row = 0; row < ahead_rows; row++) {
            const int expert = (int)experts[row] - 1;
            const unsigned came = choice.came[row];
            if (expert >= 0 && came < units) cut = ahead_blocks;
            brought += came > 0;
            const bool has_slot = expert >= 0 && choice.slot_of[expert];
            const bool uses = came > 0 && choice.missed[row] && (has_slot || fills < max_fills);
            ahead.came[row] = uses ? expert + 1 : 0;
            if (!uses) continue;
            right++;
            used += came;
            if (has_slot) continue;
            choice.slot_of[expert] = ahead.first + row + 1;
            layer.fills[1 + 2 * fills] = expert;
            layer.fills[2 + 2 * fills++] = ahead.first + row;
        }
        const unsigned misses = inputs.phase == 1 ? choice.num_misses : 0;
        const unsigned gain[] = {misses, brought, right, used, cut};
        for (int i = 0; i <= gain_cut; i++)
            atomicAdd(&ahead.gain[i], (unsigned long long)gain[i]);  // does not wait for the result
        choice.fills = fills;
    }
    __syncthreads();
    return choice.fills;
}

// Chooses and counts this step's fills, and updates the pool. Free slots go first. Returns the number of fills.
__device__ int choose_fills(const uvm_slots& layer, slot_choice& choice, int taken, int read_rows,
                            unsigned long long* counts) {
    const int left = layer.pool.num_slots - taken;
    const int most = choice.num_misses < max_fills ? choice.num_misses : max_fills;
    const int unused = left < most ? left : most;
    int fills = unused;
    rank_misses(choice, most);
    if (unused < most) hide_what_is_read(layer, choice, true);
    __syncthreads();
    if (unused < most) {
        fills += take_victims(pool_run(layer), choice, unused, most, read_rows);
        hide_what_is_read(layer, choice, false);
        __syncthreads();
    }
    take_slots(layer, choice, taken, unused, fills, layer.fills, counts);
    __syncthreads();
    return fills;
}

// Releases the other blocks of the launch. They read the fills, if any, after reading their number.
__device__ void publish(const uvm_slots& layer, unsigned launch, int fills) {
    if (threadIdx.x != 0) return;
    layer.fills[0] = fills;
    if (fills)
        __threadfence();  // after a barrier, so it covers what the other threads wrote (PTX ISA, causality order)
    *(volatile unsigned*)&layer.turn[1] = launch << fills_bits | fills;
}

// Run by one block for all: counts the step and chooses the fills. Returns their number.
__device__ int resolve(const uvm_slots& layer, const uvm_rows& tensors, slot_table* table, const uvm_routing& step,
                       const uvm_ahead& ahead, slot_inputs& inputs, slot_choice& choice) {
    if (ahead.rows) find_ahead(layer, ahead, inputs, choice);
    const bool decode = inputs.phase == 1;
    unsigned long long* counts = layer.counts + inputs.phase * slot_kinds * layer.width;
    const int rows = inputs.valid < step.rows ? (int)inputs.valid : step.rows;
    for (int i = threadIdx.x; i < rows * step.k; i += copy_threads) {
        const long long expert = i < copy_threads ? inputs.id : read_id(step.ids, step.kind, i);
        if (expert >= 0 && expert < layer.num_experts) atomicAdd(&choice.tokens[expert], 1u);
    }
    if (!decode) read_tails(layer, step, rows, choice);
    __syncthreads();
    unsigned char* worth = layer.pool.worth + layer.at * layer.pool.width;
#pragma unroll
    for (int i = 0; i < experts_each; i++) {
        const int expert = threadIdx.x + i * copy_threads;
        if (expert >= layer.num_experts) break;
        slot_expert& it = inputs.experts[i];
        const unsigned tokens = choice.tokens[expert];
        if (tokens && it.slot && !(step.brings && layer.came[expert])) {
            atomicAdd(&counts[slot_tokens * layer.width + expert], (unsigned long long)tokens);
            if (!step.brings) atomicAdd(&counts[slot_hits * layer.width + expert], 1ULL);
        }
        const bool used = decode ? tokens != 0 : choice.distance[expert] < tail;
        const bool read_again = tokens > (unsigned)step.read_rows;
        const bool miss = (used || read_again) && !it.slot && it.share && !step.brings;
        const unsigned value = decode ? observe(it, table, inputs.now, used, choice)
                                      : expect(it, inputs.now, choice.distance[expert], choice.rates[expert], choice);
        write_expert(layer, expert, it);
        choice.slot_of[expert] = it.slot;
        choice.worth[expert] = worth_of(value);
        worth[expert] = it.slot ? choice.worth[expert] : not_held;
        if (miss) choice.misses[atomicAdd(&choice.num_misses, 1)] = miss_key(value, expert, read_again);
    }
    __syncthreads();
    int fills = 0;
    if (choice.num_misses)
        fills = choose_fills(layer, choice, inputs.taken, step.read_rows, counts + slot_fills * layer.width);
    return ahead.rows ? use_ahead(layer, tensors, ahead, inputs, choice, fills) : fills;
}

// The tensor row from which an expert is computed.
__device__ int row_of(const uvm_slots& layer, const slot_choice& choice, int expert) {
    const int slot = expert >= 0 && expert < layer.num_experts ? choice.slot_of[expert] - 1 : -1;
    return slot < 0 ? expert : layer.first_slot + slot;
}

// Redirects blocks of rows to their experts' slots.
__device__ void redirect(const uvm_slots& layer, const uvm_routing& step, const slot_inputs& inputs,
                         const slot_choice& choice) {
    const int computed = inputs.padded / step.block_size;
    const int count = computed < step.num_blocks ? computed : step.num_blocks;
    for (int i = threadIdx.x; i < count; i += copy_threads) {
        const int expert = i < copy_threads ? inputs.block : step.blocks[i];
        const int row = row_of(layer, choice, expert);
        if (row != expert) step.blocks[i] = row;
    }
}

// Makes an aligner's lists, already redirected: (row, expert) pairs grouped by expert in ascending order, -1 first,
// each group padded to whole blocks with the number of pairs. They match SGLang's aligner for few ids
// (moe_align_small_numel) bit for bit, which also leaves entries after the last block untouched.
__device__ void align(const uvm_slots& layer, const uvm_routing& step, const slot_inputs& inputs, slot_choice& choice) {
    const int pairs = step.rows * step.k, mine = threadIdx.x, bucket = (int)inputs.id + 1;
    if (mine < pairs) choice.bucket[mine] = bucket;
    __syncthreads();
    int alike = 0, before = 0;
    for (int i = 0; mine < pairs && i < pairs; i++) {
        alike += choice.bucket[i] == bucket;
        before += choice.bucket[i] == bucket && i < mine;
    }
    const int rows = before ? 0 : (alike + step.block_size - 1) / step.block_size * step.block_size;
    if (mine < pairs) choice.bucket_rows[mine] = rows;
    __syncthreads();
    int begin = 0, total = 0, inactive = 0;
    for (int i = 0; i < pairs; i++) {
        const int in_bucket = choice.bucket_rows[i];
        total += in_bucket;
        begin += choice.bucket[i] < bucket ? in_bucket : 0;
        inactive += choice.bucket[i] ? 0 : in_bucket;
    }
    for (int row = mine; row < total; row += copy_threads) step.order[row] = pairs;
    __syncthreads();
    if (mine < pairs) {
        step.order[begin + before] = mine;
        const int from = row_of(layer, choice, bucket - 1);
        for (int row = begin; row < begin + rows; row += step.block_size) step.blocks[row / step.block_size] = from;
    }
    if (mine == 0) {
        step.padded[0] = total;
        if (step.num_padded > 1) step.padded[1] = inactive / step.block_size;
    }
}

// Copies the chosen experts into their slots, one unit of a row at a time, round-robin over the blocks. Units copied
// ahead are already in place or are copied within VRAM. Blocks that copy ahead may still finish units that they had
// begun, with the same bytes.
__device__ void fill_slots(const uvm_rows& tensors, int first_slot, const volatile int* chosen, int fills,
                           const uvm_ahead& ahead, unsigned first, unsigned blocks) {
    const volatile int* done = ahead.came + ahead_rows;
    const unsigned row = ahead.rows ? row_units(tensors) : 0;
    unsigned unit = first;  // relative to the current tensor's first unit
    for (int fill = 0; fill < fills; fill++) {
        const int expert = chosen[1 + 2 * fill], slot = chosen[2 + 2 * fill];
        int came = ahead.rows;
        while (--came >= 0 && ((const volatile int*)ahead.came)[came] != expert + 1);
        unsigned before = came * row;  // lookahead units before the tensor's
        for (int i = 0; i < tensors.count; i++) {
            const size_t nbytes = tensors.nbytes[i];
            const unsigned units = units_of(nbytes);
            for (; (tensors.copied >> i & 1) && unit < units; unit += blocks) {
                const bool there = came >= 0 && has_come(before + unit, done);
                if (there && slot == ahead.first + came) continue;
                const size_t offset = unit * copy_unit, left = nbytes - offset;
                const size_t from = there ? first_slot + ahead.first + came : expert, to = first_slot + slot;
                copy_row(tensors.base[i] + from * nbytes + offset, tensors.base[i] + to * nbytes + offset,
                         left < copy_unit ? left : copy_unit);
            }
            if (tensors.copied >> i & 1) unit -= units;
            before += units;
        }
    }
}
}  // namespace

// One launch per layer. The first block to arrive decides and the others wait for it, so no block waits for one that
// has not started. The launch bound of one block per SM keeps early reads in registers.
//
// In a programmatic launch, a block may start before the preceding kernel has ended, and the next kernel's blocks
// before this one's end (CUDA Programming Guide, Programmatic Dependent Launch). Before await_earlier, nothing is
// written, and only read_state reads what other kernels write.
extern "C" __global__ void __launch_bounds__(copy_threads, 1)
    uvm_resolve_slots_kernel(uvm_slots layer, uvm_rows tensors, slot_table* table, uvm_routing step, uvm_ahead ahead) {
    __shared__ slot_choice choice;
    __shared__ unsigned arrived, published;
    slot_inputs inputs;
    const bool first = blockIdx.x == 0;  // usually arrives first
    if (first) read_state(layer, table, inputs, choice);
    for (int expert = threadIdx.x; expert < layer.num_experts; expert += copy_threads)
        choice.tokens[expert] = choice.slot_of[expert] = 0;
    if (threadIdx.x == 0) {
        choice.num_misses = choice.num_found = 0;
        choice.least = not_held;
    }
    await_earlier();
    begin_later();
    const unsigned taken = threadIdx.x == 0 ? atomicAdd(&layer.turn[0], 1u) : 0;
    if (first) read_step(layer, table, step, ahead, inputs);
    if (threadIdx.x == 0) arrived = taken;
    __syncthreads();
    const unsigned launch = arrived / slot_blocks + 1;
    const unsigned place = arrived % slot_blocks;
    int fills = 0;
    if (place == 0) {
        if (!first) {
            read_state(layer, table, inputs, choice);
            read_step(layer, table, step, ahead, inputs);
        }
        if (inputs.valid > 0) fills = resolve(layer, tensors, table, step, ahead, inputs, choice);
        publish(layer, launch, fills);  // even without fills, so that a later launch does not find its own number here
        if (step.order)
            align(layer, step, inputs, choice);
        else if (inputs.valid > 0)
            redirect(layer, step, inputs, choice);
    } else {
        if (threadIdx.x == 0) {
            unsigned told;
            do told = *(const volatile unsigned*)&layer.turn[1];
            while ((told ^ launch << fills_bits) >> fills_bits);
            __threadfence();
            published = told & ((1u << fills_bits) - 1);
        }
        __syncthreads();
        fills = published;
    }
    fill_slots(tensors, layer.first_slot, layer.fills, fills, ahead, place, slot_blocks);
}

// One block chooses slots for all offloaded experts of a layer, without copying them, as in SlotPolicy.bring. The
// pool's layer `beside` keeps its slots. `brought`: [1 + 2 * max_slot_experts], in the format of uvm_slots.fills.
extern "C" __global__ void __launch_bounds__(copy_threads, 1)
    uvm_bring_slots_kernel(uvm_slots layer, const slot_table* table, int beside, const long long* control,
                           int* brought) {
    __shared__ slot_choice choice;
    const int own = layer.at * layer.pool.width, taken = *layer.pool.taken;
    for (int i = threadIdx.x; i < classes; i += copy_threads) choice.class_values[i] = table->values[i];
    if (threadIdx.x == 0) {
        choice.num_misses = choice.num_found = 0;
        choice.least = not_held;
        brought[0] = 0;
    }
    __syncthreads();
    if (control[0] <= 0) return;
    for (int expert = threadIdx.x; expert < layer.num_experts; expert += copy_threads) {
        slot_expert it = {layer.last[expert],
                          layer.lately[expert],
                          layer.long_[expert],
                          layer.share[expert],
                          0,
                          0,
                          layer.pool.slot_of[own + expert]};
        const unsigned value = value_of(it, table->step, choice);
        choice.slot_of[expert] = it.slot;
        choice.worth[expert] = worth_of(value);
        const bool miss = it.share && !it.slot;
        if (miss) choice.misses[atomicAdd(&choice.num_misses, 1)] = miss_key(value, expert, false);
        layer.came[expert] = miss;
    }
    __syncthreads();
    const int left = layer.pool.num_slots - taken, misses = choice.num_misses;
    const int unused = left < misses ? left : misses;
    rank_misses(choice, misses);
    __syncthreads();
    int fills = unused;
    if (unused < misses) {
        pool_run run(layer);
        run.keeps(beside);
        fills += take_victims(run, choice, unused, misses, 0);
    }
    unsigned long long* counts = layer.counts + control[1] * slot_kinds * layer.width;
    take_slots(layer, choice, taken, unused, fills, brought, counts + slot_brought * layer.width);
    if (threadIdx.x == 0) brought[0] = fills;
}

// Copies chosen experts into their slots with few blocks, which read over the link beside concurrent compute.
extern "C" __global__ void __launch_bounds__(copy_threads, 2)
    uvm_fill_slots_kernel(uvm_rows tensors, int first_slot, const int* chosen, uvm_ahead ahead) {
    fill_slots(tensors, first_slot, chosen, chosen[0], ahead, blockIdx.x, gridDim.x);
}

namespace {
// Whether to look ahead. Pauses after a window in which lookahead saved less than it delayed fills.
__device__ bool pays(unsigned long long* gain) {
    const unsigned long long used = gain[gain_used] - gain[gain_used_then], cut = gain[gain_cut] - gain[gain_cut_then];
    if (used + cut >= gain_window) {
        gain[gain_used_then] += used;
        gain[gain_cut_then] += cut;
        gain[gain_rest] = used < cut ? gain_pause : 0;
    }
    if (gain[gain_rest] == 0) return true;
    gain[gain_rest]--;
    return false;
}
}  // namespace

// Chooses which experts of a layer to copy ahead: the likeliest guesses over all rows that would be misses. This begins
// a lookahead launch, in whose words nothing is copied yet.
extern "C" __global__ void __launch_bounds__(max_guesses, 1)
    uvm_choose_ahead_kernel(uvm_slots layer, const slot_table* table, uvm_guess guess, uvm_ahead ahead) {
    __shared__ int missed[max_guesses];
    const int nth = threadIdx.x, row = nth % guess.rows, guesses = guess.rows * guess.k;
    long long id = -1;
    if (nth < guesses && row < guess.control[0])
        id = read_id(guess.ids, guess.kind, (long long)row * guess.k + nth / guess.rows) - guess.first_expert;
    const bool known = id >= 0 && id < layer.num_experts;
    const bool held = known && (layer.pool.slot_of[layer.at * layer.pool.width + id] || !layer.share[id]);
    missed[nth] = known && !held ? (int)id + 1 : 0;
    __syncthreads();
    if (nth != 0) return;
    const unsigned now = table->step;
    const bool looks = pays(ahead.gain) && guess.control[0] > 0 && guess.control[1] == 1;
    int chosen[ahead_rows] = {}, count = 0;
    for (int i = 0; looks && i < guesses && count < ahead_rows; i++) {
        bool again = !missed[i];
        for (int other = 0; other < count; other++) again = again || chosen[other] == missed[i];
        if (!again) chosen[count++] = missed[i];
    }
    const unsigned long long launch = ((ahead.words[ahead_at] >> 32) + 1) << 32;
    volatile unsigned long long* words = ahead.words;
    words[ahead_at] = launch | (unsigned)layer.at;
    words[ahead_step] = launch | now;
    for (int i = 0; i < ahead_rows; i++) words[ahead_expert + i] = launch | (unsigned)chosen[i];
    for (int i = 0; i < ahead_blocks; i++) words[ahead_done + i] = launch;
}

// Copies the chosen experts, one unit at a time, until the layer is resolved. Runs `ahead_blocks` blocks after
// uvm_choose_ahead_kernel.
extern "C" __global__ void __launch_bounds__(copy_threads, 2)
    uvm_copy_ahead_kernel(uvm_rows tensors, int first_slot, uvm_ahead ahead) {
    __shared__ bool stop;
    const unsigned long long launch = ahead.words[ahead_at] >> 32 << 32;
    const unsigned step = (unsigned)ahead.words[ahead_step], units = row_units(tensors);
    volatile unsigned long long* done = &ahead.words[ahead_done + blockIdx.x];
    unsigned copied = 0;
    for (unsigned unit = blockIdx.x; unit < ahead_rows * units; unit += ahead_blocks) {
        const unsigned row = unit / units;
        const size_t expert = (unsigned)ahead.words[ahead_expert + row], to = first_slot + ahead.first + row;
        if (threadIdx.x == 0) stop = *(const volatile unsigned*)ahead.resolved == step;
        __syncthreads();
        if (expert == 0 || stop) return;
        int i = 0;
        unsigned at = unit % units;
        for (; at >= units_of(tensors.nbytes[i]); i++) at -= units_of(tensors.nbytes[i]);
        const size_t nbytes = tensors.nbytes[i], offset = at * copy_unit, left = nbytes - offset;
        copy_row(tensors.base[i] + (expert - 1) * nbytes + offset, tensors.base[i] + to * nbytes + offset,
                 left < copy_unit ? left : copy_unit);
        __syncthreads();
        if (threadIdx.x != 0) continue;
        __threadfence();  // after a barrier, so it covers what the other threads copied
        *done = launch | ++copied;
    }
}

// Sets a step's control words. With a table, also begins the step for the slots: halves large counts and computes the
// step's values from the counts of earlier steps.
extern "C" __global__ void uvm_begin_step_kernel(long long* control, long long valid, long long phase,
                                                 slot_table* table) {
    for (int i = threadIdx.x; table && i < classes; i += blockDim.x) {
        const int halve = table->events[i] >= max_events;
        table->events[i] >>= halve;
        table->uses[i] >>= halve;
        table->values[i] = (unsigned)(((unsigned long long)table->uses[i] << value_bits) / table->events[i]);
    }
    if (threadIdx.x != 0) return;
    control[0] = valid;
    control[1] = phase;
    if (table) table->step++;
}

UVM_API int uvm_slot_classes() { return classes; }
UVM_API int uvm_ahead_words() { return ahead_words; }
UVM_API int uvm_gain_kinds() { return gain_kinds; }

// Sets the next step's valid rows and phase in stream order, and begins it for the slots of `table` (null for none).
// Fails during capture, because a graph would set the captured values at each replay.
UVM_API int uvm_begin_step(long long* control, long long valid, long long phase, slot_table* table, cudaStream_t stream,
                           uvm_failure* failure) {
    if (valid < 0 || phase < 0 || phase > 1) return fail(failure, "uvm_begin_step", -1, cudaErrorInvalidValue);
    cudaError_t error = refuse_capture(failure, stream);
    if (error != cudaSuccess) return error;
    void* arguments[] = {&control, &valid, &phase, &table};
    return launch(failure, (const void*)uvm_begin_step_kernel, "uvm_begin_step", 1, copy_threads, arguments, stream);
}

namespace {
bool valid_slots(const uvm_slots& layer, const uvm_rows& tensors) {
    const uvm_pool& pool = layer.pool;
    bool valid = layer.num_experts > 0 && layer.num_experts <= max_slot_experts && layer.num_experts <= pool.width;
    valid = valid && pool.width % pool_chunk == 0 && pool.layers > 0 && pool.layers <= max_pool_experts / pool.width;
    valid = valid && layer.at >= 0 && layer.at < pool.layers && pool.num_slots >= 0;
    return valid && tensors.count > 0 && tensors.count <= max_rows;
}

bool valid_ahead(const uvm_ahead& ahead) { return ahead.rows == 0 || ahead.rows == ahead_rows; }
}  // namespace

// Resolves one layer of a step: counts, fills the rows of `tensors`, and makes or rewrites the lists. One launch
// without allocation or synchronisation, so a graph may capture it. With `programmatic`, the kernel may start before
// its predecessor ends. Not allowed if the predecessor resolves the same layer or begins a step.
UVM_API int uvm_resolve_slots(const uvm_slots* layer, const uvm_rows* tensors, slot_table* table,
                              const uvm_routing* step, const uvm_ahead* ahead, int programmatic, cudaStream_t stream,
                              uvm_failure* failure) {
    bool valid = valid_slots(*layer, *tensors) && valid_ahead(*ahead) && step->rows > 0 && step->k > 0 &&
                 step->rows <= INT_MAX / step->k;
    valid = valid && step->block_size > 0 && step->read_rows > 0;
    valid = valid && (!step->order || (long long)step->rows * step->k <= max_aligned);
    if (!valid) return fail(failure, "uvm_resolve_slots", -1, cudaErrorInvalidValue);
    uvm_slots slots = *layer;
    uvm_rows parts = *tensors;
    uvm_routing routing = *step;
    uvm_ahead before = *ahead;
    void* arguments[] = {&slots, &parts, &table, &routing, &before};
    return launch(failure, (const void*)uvm_resolve_slots_kernel, "uvm_resolve_slots", slot_blocks, copy_threads,
                  arguments, stream, programmatic);
}

// Chooses slots for the offloaded experts of a layer. Fails during capture, because a graph would bring them at each
// replay.
UVM_API int uvm_bring_slots(const uvm_slots* layer, const uvm_rows* tensors, const slot_table* table, int beside,
                            const long long* control, int* brought, cudaStream_t stream, uvm_failure* failure) {
    cudaError_t error = refuse_capture(failure, stream);
    if (error != cudaSuccess) return error;
    if (!valid_slots(*layer, *tensors)) return fail(failure, "uvm_bring_slots", -1, cudaErrorInvalidValue);
    uvm_slots slots = *layer;
    void* arguments[] = {&slots, &table, &beside, &control, &brought};
    return launch(failure, (const void*)uvm_bring_slots_kernel, "uvm_bring_slots", 1, copy_threads, arguments, stream);
}

// Copies rows of the experts that uvm_bring_slots or uvm_resolve_slots chose, with `blocks` blocks. The caller orders
// it after that call. `ahead` is that of uvm_resolve_slots, all zeros for uvm_bring_slots.
UVM_API int uvm_fill_slots(int device, const uvm_rows* tensors, int first_slot, const int* chosen,
                           const uvm_ahead* ahead, int blocks, cudaStream_t stream, uvm_failure* failure) {
    on_device guard(device, failure);
    if (guard.error != cudaSuccess) return guard.error;
    if (tensors->count <= 0 || tensors->count > max_rows || blocks <= 0 || !valid_ahead(*ahead)) {
        return fail(failure, "uvm_fill_slots", -1, cudaErrorInvalidValue);
    }
    uvm_rows parts = *tensors;
    uvm_ahead before = *ahead;
    void* arguments[] = {&parts, &first_slot, &chosen, &before};
    return launch(failure, (const void*)uvm_fill_slots_kernel, "uvm_fill_slots", blocks, copy_threads, arguments,
                  stream);
}

// Copies experts of a layer ahead of its routing, in stream order, until uvm_resolve_slots resolves it in this step.
// The caller does not order that call after this one, and calls this for the next layer with the same lookahead slots
// only after this layer has been computed. A graph may capture it. Takes at most max_guesses ids.
UVM_API int uvm_look_ahead(int device, const uvm_slots* layer, const uvm_rows* tensors, const slot_table* table,
                           const uvm_guess* guess, const uvm_ahead* ahead, cudaStream_t stream, uvm_failure* failure) {
    on_device guard(device, failure);
    if (guard.error != cudaSuccess) return guard.error;
    bool valid = valid_slots(*layer, *tensors) && ahead->rows == ahead_rows && guess->rows > 0 && guess->k > 0;
    valid = valid && guess->rows <= max_guesses / guess->k;
    if (!valid) return fail(failure, "uvm_look_ahead", -1, cudaErrorInvalidValue);
    uvm_slots slots = *layer;
    uvm_rows parts = *tensors;
    uvm_guess guessed = *guess;
    uvm_ahead rows = *ahead;
    void* choosing[] = {&slots, &table, &guessed, &rows};
    cudaError_t error =
        launch(failure, (const void*)uvm_choose_ahead_kernel, "uvm_look_ahead", 1, max_guesses, choosing, stream);
    if (error != cudaSuccess) return error;
    int first_slot = layer->first_slot;
    void* copying[] = {&parts, &first_slot, &rows};
    return launch(failure, (const void*)uvm_copy_ahead_kernel, "uvm_look_ahead", ahead_blocks, copy_threads, copying,
                  stream);
}
