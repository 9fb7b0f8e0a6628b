/* The CUDA runtime: devices, memory, kernels. */
#define _GNU_SOURCE
#include "device.h"
#include "standin.h"

#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread int last_error;

/* The runtime remembers the last error of a thread until someone asks. */
static int remembered(int error) {
    if (error) last_error = error;
    return error;
}

EXPORT cudaError_t cudaGetLastError(void) {
    int error = last_error;
    last_error = 0;
    return error ? error : standin_injected("cudaGetLastError");
}

EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }

EXPORT const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "cudaSuccess";
        case cudaErrorInvalidValue:
            return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation:
            return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidDevice:
            return "cudaErrorInvalidDevice";
        case cudaErrorIllegalAddress:
            return "cudaErrorIllegalAddress";
        case cudaErrorStreamCaptureUnsupported:
            return "cudaErrorStreamCaptureUnsupported";
        case cudaErrorLaunchFailure:
            return "cudaErrorLaunchFailure";
        case cudaErrorNotSupported:
            return "cudaErrorNotSupported";
        default:
            return "cudaErrorOfTheStandIn";
    }
}

EXPORT const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "no error";
        case cudaErrorInvalidValue:
            return "invalid argument";
        case cudaErrorMemoryAllocation:
            return "out of memory";
        case cudaErrorInvalidDevice:
            return "invalid device ordinal";
        case cudaErrorIllegalAddress:
            return "an illegal memory access was encountered";
        case cudaErrorStreamCaptureUnsupported:
            return "operation not permitted when stream is capturing";
        case cudaErrorLaunchFailure:
            return "unspecified launch failure";
        case cudaErrorNotSupported:
            return "operation not supported";
        default:
            return "an error of the stand-in";
    }
}

/* ---- devices ---- */

int standin_driver_version(void) { return (int)standin_setting("STANDIN_DRIVER", 13000); }

int standin_attribute(int attribute) {
    char name[40];
    snprintf(name, sizeof name, "STANDIN_ATTRIBUTE_%d", attribute);
    long long asked = standin_setting(name, -1);
    if (asked >= 0) return (int)asked;
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock:
        case cudaDevAttrMaxBlockDimX:
        case cudaDevAttrMaxBlockDimY:
            return 1024;
        case cudaDevAttrMaxBlockDimZ:
            return 64;
        case cudaDevAttrMaxGridDimX:
            return 2147483647;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ:
            return 65535;
        case cudaDevAttrMaxSharedMemoryPerBlock:
            return 49152;
        case cudaDevAttrWarpSize:
            return 32;
        case cudaDevAttrMaxRegistersPerBlock:
        case cudaDevAttrMaxRegistersPerMultiprocessor:
            return DEVICE_REGISTERS;
        case cudaDevAttrMultiProcessorCount:
            return DEVICE_SMS;
        case cudaDevAttrMaxThreadsPerMultiProcessor:
            return 2048;
        case cudaDevAttrMaxBlocksPerMultiprocessor:
            return 32;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            return DEVICE_SHARED_MEMORY_SM;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            return DEVICE_SHARED_MEMORY_OPTIN;
        case cudaDevAttrReservedSharedMemoryPerBlock:
            return 1024;
        case cudaDevAttrComputeCapabilityMajor:
            return DEVICE_MAJOR;
        case cudaDevAttrComputeCapabilityMinor:
            return DEVICE_MINOR;
        case cudaDevAttrL2CacheSize:
            return DEVICE_L2;
        case cudaDevAttrClockRate:
            return 1980000;
        case cudaDevAttrMemoryClockRate:
            return 3201000;
        case cudaDevAttrGlobalMemoryBusWidth:
            return 6144;
        case cudaDevAttrPciBusId:
        case cudaDevAttrPciDeviceId:
        case cudaDevAttrPciDomainId:
        case cudaDevAttrIntegrated:
            return 0;
        default:
            return 1;
    }
}

const char* standin_name(void) {
    const char* name = getenv("STANDIN_NAME");
    return name && *name ? name : "NVIDIA H200";
}

int standin_gpus(void) {
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    return visible && !*visible ? 0 : standin_setting("STANDIN_GPUS", 1);
}

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
    *count = standin_gpus();
    return *count ? cudaSuccess : cudaErrorNoDevice;
}

static __thread int current;
static atomic_bool has_context;

int standin_current_gpu(void) { return current; }
void standin_begin_context(void) { has_context = true; }
bool standin_has_context(void) { return has_context; }
void standin_use_gpu(int gpu) {
    current = gpu;
    standin_begin_context();
}

EXPORT cudaError_t cudaGetDevice(int* device) {
    *device = current;
    return 0;
}

EXPORT cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= standin_gpus()) return remembered(cudaErrorInvalidDevice);
    standin_use_gpu(device);
    return 0;
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
    *version = standin_driver_version();
    return 0;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return 0;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
    *value = standin_attribute(attribute);
    return 0;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
    snprintf(text, length, "0000:00:00.0");
    return 0;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* it, int device) {
    size_t free_bytes, total_bytes;
    standin_vram(&free_bytes, &total_bytes);
    memset(it, 0, sizeof *it);
    snprintf(it->name, sizeof it->name, "%s", standin_name());
    it->totalGlobalMem = total_bytes;
    it->major = standin_attribute(cudaDevAttrComputeCapabilityMajor);
    it->minor = standin_attribute(cudaDevAttrComputeCapabilityMinor);
    it->multiProcessorCount = DEVICE_SMS;
    it->warpSize = 32;
    it->maxThreadsPerBlock = it->maxThreadsDim[0] = it->maxThreadsDim[1] = 1024;
    it->maxThreadsDim[2] = 64;
    it->maxGridSize[0] = 2147483647;
    it->maxGridSize[1] = it->maxGridSize[2] = 65535;
    it->maxThreadsPerMultiProcessor = 2048;
    it->maxBlocksPerMultiProcessor = 32;
    it->regsPerBlock = it->regsPerMultiprocessor = DEVICE_REGISTERS;
    it->sharedMemPerBlock = 49152;
    it->sharedMemPerMultiprocessor = DEVICE_SHARED_MEMORY_SM;
    it->sharedMemPerBlockOptin = DEVICE_SHARED_MEMORY_OPTIN;
    it->reservedSharedMemPerBlock = 1024;
    it->l2CacheSize = DEVICE_L2;
    it->memoryBusWidth = 6144;
    it->textureAlignment = 512;
    it->managedMemory = it->unifiedAddressing = it->cooperativeLaunch = 1;
    it->concurrentManagedAccess = standin_attribute(cudaDevAttrConcurrentManagedAccess);
    return 0;
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* it, const void* function) {
    memset(it, 0, sizeof *it);
    it->maxThreadsPerBlock = 1024;
    it->numRegs = 64;
    it->binaryVersion = it->ptxVersion = 90;
    it->maxDynamicSharedSizeBytes = DEVICE_SHARED_MEMORY_OPTIN;
    return 0;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* f, int threads,
                                                                 size_t shared) {
    *blocks = 2;
    return 0;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* f, int threads,
                                                                          size_t shared, unsigned flags) {
    *blocks = 2;
    return 0;
}

/* ---- plain memory ---- */

static int take(void** address, size_t nbytes, enum kind kind) {
    *address = kind == KIND_DEVICE && !standin_make_room(nbytes) ? NULL : standin_take(nbytes, kind);
    return remembered(*address ? 0 : cudaErrorMemoryAllocation);
}

EXPORT cudaError_t cudaMalloc(void** address, size_t nbytes) {
    int result = standin_injected("cudaMalloc");
    if (result == 0) result = take(address, nbytes, KIND_DEVICE);
    standin_log("cudaMalloc", result, "\"address\": %zu, \"nbytes\": %zu", result ? 0 : (size_t)*address, nbytes);
    return remembered(result);
}

EXPORT cudaError_t cudaMallocAsync(void** address, size_t nbytes, cudaStream_t s) {
    return cudaMalloc(address, nbytes);
}

static int give(const char* call, void* address) {
    enum kind kind = address ? standin_kind(address) : KIND_NONE;
    if (address) standin_finish_all();
    int result = standin_injected(call);
    if (result == 0 && !standin_give(address)) result = cudaErrorInvalidValue;
    standin_log(call, result, "\"address\": %zu, \"managed\": %s, \"live_managed_bytes\": %zu", (size_t)address,
                kind == KIND_MANAGED ? "true" : "false", standin_managed_bytes());
    return remembered(result);
}

EXPORT cudaError_t cudaFree(void* address) { return give("cudaFree", address); }
EXPORT cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) { return give("cudaFreeAsync", address); }

EXPORT cudaError_t cudaHostAlloc(void** address, size_t nbytes, unsigned flags) {
    int result = standin_injected("cudaHostAlloc");
    return remembered(result ? result : take(address, nbytes, KIND_HOST));
}
EXPORT cudaError_t cudaMallocHost(void** address, size_t nbytes) { return cudaHostAlloc(address, nbytes, 0); }
EXPORT cudaError_t cudaFreeHost(void* address) {
    if (address) standin_finish_all();
    return standin_give(address) ? 0 : cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
    *device = host;
    return 0;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* it, const void* address) {
    memset(it, 0, sizeof *it);
    enum kind kind = standin_kind(address);
    it->type = kind == KIND_MANAGED  ? cudaMemoryTypeManaged
               : kind == KIND_DEVICE ? cudaMemoryTypeDevice
               : kind == KIND_HOST   ? cudaMemoryTypeHost
                                     : cudaMemoryTypeUnregistered;
    it->devicePointer = kind == KIND_NONE ? NULL : (void*)address;
    it->hostPointer = (void*)address;
    return 0;
}

EXPORT cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    standin_vram(free_bytes, total_bytes);
    return remembered(standin_injected("cudaMemGetInfo"));
}

EXPORT cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
    *address = standin_take(4096, KIND_DEVICE);
    return 0;
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
    *pool = (cudaMemPool_t)0x100;
    return 0;
}

EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void* value) {
    memset(value, 0, 8);
    return 0;
}

/* ---- copies ---- */

struct copy {
    char* to;
    const char* from;
    size_t to_pitch, from_pitch, width, height;
};

static void run_copy(void* state) {
    struct copy* it = state;
    for (size_t row = 0; row < it->height; row++) {
        standin_read(it->from + row * it->from_pitch, it->width);
        memmove(it->to + row * it->to_pitch, it->from + row * it->from_pitch, it->width);
    }
}

static bool on_device(const void* address) {
    enum kind kind = standin_kind(address);
    return kind == KIND_DEVICE || kind == KIND_MANAGED;
}

static void enqueue_copy(void* stream, const char* call, struct copy it, bool waits) {
    struct touched bytes = {it.to, it.from, it.width * it.height, waits};
    standin_enqueue(stream, call, bytes, run_copy, &it, sizeof it);
}

/* The caller waits for a copy to pageable memory. From pageable memory, CUDA promises only that the source was read. */
static cudaError_t copy(void* stream, struct copy it) {
    int result = standin_injected("cudaMemcpyAsync");
    if (result) return remembered(result);
    bool from_pageable = standin_kind(it.from) == KIND_NONE, to_pageable = standin_kind(it.to) == KIND_NONE;
    if (on_device(it.to)) standin_link_copy(it.from, it.width * it.height);
    enqueue_copy(stream, "cudaMemcpyAsync", it, to_pageable);
    if (from_pageable || to_pageable) standin_finish(stream);
    return 0;
}

/* CUDA promises less for copies within the device and from pageable memory. */
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, enum cudaMemcpyKind kind) {
    int result = standin_injected("cudaMemcpy");
    if (result) return remembered(result);
    bool waits = !on_device(to) || standin_kind(from) == KIND_HOST;
    enqueue_copy(NULL, "cudaMemcpy", (struct copy){to, from, 0, 0, nbytes, 1}, waits);
    standin_finish(NULL);
    return 0;
}

EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, enum cudaMemcpyKind k,
                                   cudaStream_t stream) {
    return copy(stream, (struct copy){to, from, 0, 0, nbytes, 1});
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int a, const void* from, int b, size_t nbytes, cudaStream_t stream) {
    return copy(stream, (struct copy){to, from, 0, 0, nbytes, 1});
}

EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                     size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(stream, (struct copy){to, from, to_pitch, from_pitch, width, height});
}

struct fill {
    void* to;
    int value;
    size_t nbytes;
};

static void run_fill(void* state) {
    struct fill* it = state;
    memset(it->to, it->value, it->nbytes);
}

static cudaError_t fill(const char* call, struct fill it, void* stream) {
    int result = standin_injected(call);
    if (result) return remembered(result);
    standin_enqueue(stream, call, (struct touched){it.to, NULL, it.nbytes}, run_fill, &it, sizeof it);
    return 0;
}

EXPORT cudaError_t cudaMemset(void* to, int value, size_t nbytes) {
    cudaError_t result = fill("cudaMemset", (struct fill){to, value, nbytes}, NULL);
    standin_finish(NULL);
    return result;
}

EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t nbytes, cudaStream_t stream) {
    return fill("cudaMemsetAsync", (struct fill){to, value, nbytes}, stream);
}

/* ---- managed memory ---- */

EXPORT cudaError_t cudaMallocManaged(void** address, size_t nbytes, unsigned flags) {
    int result = standin_injected("cudaMallocManaged");
    if (result == 0) result = take(address, nbytes, KIND_MANAGED);
    standin_log("cudaMallocManaged", result,
                "\"address\": %zu, \"nbytes\": %zu, \"flags\": %u, \"live_managed_bytes\": %zu",
                result ? 0 : (size_t)*address, nbytes, flags, standin_managed_bytes());
    return remembered(result);
}

static const char* location_name(struct cudaMemLocation location) {
    static __thread char node[24];
    if (location.type == cudaMemLocationTypeHost) return "host";
    if (location.type == cudaMemLocationTypeHostNuma) {
        snprintf(node, sizeof node, "node %d", location.id);
        return node;
    }
    return location.type == cudaMemLocationTypeDevice ? "device" : "other";
}

/* What the real runtime refuses: bytes that are not one managed range, a device-type location that names no device
 * (cudaCpuDeviceId is -1), and a NUMA node that is not there (STANDIN_NODES, none if not set). */
static int check(const void* start, size_t nbytes, struct cudaMemLocation location) {
    if (!standin_is_managed(start, nbytes)) return cudaErrorInvalidValue;
    if (location.type == cudaMemLocationTypeHost) return 0;
    if (location.type == cudaMemLocationTypeHostNuma) {
        bool there = location.id >= 0 && location.id < standin_setting("STANDIN_NODES", 0);
        return there ? 0 : cudaErrorInvalidValue;
    }
    bool gpu = location.type == cudaMemLocationTypeDevice && location.id >= 0 && location.id < standin_gpus();
    return gpu ? 0 : cudaErrorInvalidDevice;
}

static enum place place_of(struct cudaMemLocation location) {
    if (location.type == cudaMemLocationTypeHostNuma) return PLACE_NODE;
    return location.type == cudaMemLocationTypeHost ? PLACE_HOST : PLACE_DEVICE;
}

EXPORT cudaError_t cudaMemAdvise(const void* start, size_t nbytes, enum cudaMemoryAdvise advice,
                                 struct cudaMemLocation location) {
    static const char* const names[] = {"",
                                        "SetReadMostly",
                                        "UnsetReadMostly",
                                        "SetPreferredLocation",
                                        "UnsetPreferredLocation",
                                        "SetAccessedBy",
                                        "UnsetAccessedBy"};
    int result = standin_injected("cudaMemAdvise");
    if (result == 0) result = check(start, nbytes, location);
    if (result == 0 && (advice < 1 || advice > 6)) result = cudaErrorInvalidValue;
    bool access = advice == cudaMemAdviseSetAccessedBy || advice == cudaMemAdviseUnsetAccessedBy;
    if (result == 0 && access && place_of(location) == PLACE_NODE) result = cudaErrorInvalidValue;
    if (result == 0 && advice == cudaMemAdviseSetPreferredLocation) standin_prefer(start, nbytes, place_of(location));
    if (result == 0 && advice == cudaMemAdviseUnsetPreferredLocation) standin_prefer(start, nbytes, PLACE_NONE);
    standin_log("cudaMemAdvise", result, "\"address\": %zu, \"nbytes\": %zu, \"advice\": \"%s\", \"location\": \"%s\"",
                (size_t)start, nbytes, advice >= 1 && advice <= 6 ? names[advice] : "?", location_name(location));
    return remembered(result);
}

EXPORT cudaError_t cudaMemPrefetchAsync(const void* start, size_t nbytes, struct cudaMemLocation location,
                                        unsigned flags, cudaStream_t stream) {
    int result = standin_injected("cudaMemPrefetchAsync");
    if (result == 0) result = check(start, nbytes, location);
    if (result == 0 && flags != 0) result = cudaErrorInvalidValue;
    if (result == 0 && standin_capturing(stream)) result = cudaErrorStreamCaptureUnsupported;
    if (result == 0 && !standin_move(start, nbytes, place_of(location))) result = cudaErrorMemoryAllocation;
    standin_log("cudaMemPrefetchAsync", result,
                "\"address\": %zu, \"nbytes\": %zu, \"location\": \"%s\", \"stream\": \"%p\"", (size_t)start, nbytes,
                location_name(location), (void*)stream);
    return remembered(result);
}

/* On a GPU two of its answers err (see Memory.in_vram), so nothing may ask. */
EXPORT cudaError_t cudaMemRangeGetAttribute(void* data, size_t data_bytes, enum cudaMemRangeAttribute attribute,
                                            const void* start, size_t nbytes) {
    standin_log("cudaMemRangeGetAttribute", cudaErrorNotSupported, "\"address\": %zu, \"nbytes\": %zu", (size_t)start,
                nbytes);
    return remembered(cudaErrorNotSupported);
}

/* ---- kernels: the code that nvcc generates registers host stubs by address and the kernels' names ---- */

enum { MAX_KERNELS = 1 << 17 };
static struct {
    const void* stub;
    const char* name;
} kernels[MAX_KERNELS];

static size_t slot(const void* stub) {
    size_t at = ((uintptr_t)stub >> 4) % MAX_KERNELS;
    while (kernels[at].stub && kernels[at].stub != stub) at = (at + 1) % MAX_KERNELS;
    return at;
}

void standin_name_kernel(const void* stub, const char* name) {
    size_t at = slot(stub);
    kernels[at].stub = stub;
    kernels[at].name = name;
}

const char* standin_kernel_name(const void* stub) {
    const char* name = kernels[slot(stub)].name;
    return name ? name : "?";
}

EXPORT void** __cudaRegisterFatBinary(void* binary) {
    static void* handle[4];
    return handle;
}

EXPORT char __cudaInitModule(void** handle) { return 1; }
EXPORT void __cudaRegisterFunction(void** handle, const char* stub, char* device, const char* name, int limit,
                                   void* tid, void* bid, void* block, void* grid, int* warps) {
    standin_name_kernel(stub, name);
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
    *kernel = (cudaKernel_t)stub;
    return 0;
}

static int launch(const char* call, const void* stub, dim3 grid, dim3 block, void** arguments, void* stream) {
    int result = standin_injected("cudaLaunchKernel");
    if (result) return remembered(result);
    standin_launch(stream, standin_kernel_name(stub), arguments, 0, grid.x * grid.y * grid.z,
                   block.x * block.y * block.z, call);
    return 0;
}

EXPORT cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** arguments, size_t s,
                                    cudaStream_t stream) {
    return launch("cudaLaunchKernel", stub, grid, block, arguments, stream);
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t s,
                                      cudaStream_t stream) {
    return launch("cudaLaunchKernel", kernel, grid, block, arguments, stream);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* stub, void** arguments) {
    return launch("cudaLaunchKernel", stub, config->gridDim, config->blockDim, arguments, config->stream);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* stub, dim3 grid, dim3 block, void** arguments, size_t shared,
                                               cudaStream_t stream) {
    return launch("cudaLaunchKernel", stub, grid, block, arguments, stream);
}

/* <<<...>>> pushes its configuration, calls the stub, and the stub pops it. */
static __thread struct {
    dim3 grid, block;
    size_t shared;
    void* stream;
} pushed;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *(void**)stream = pushed.stream;
    return 0;
}
