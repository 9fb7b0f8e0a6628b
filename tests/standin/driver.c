/* The CUDA driver API, as far as torch, Triton and cuda-python ask it. */
#define _GNU_SOURCE
#include "device.h"
#include "standin.h"

#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CUDA_SUCCESS = 0, CUDA_ERROR_OUT_OF_MEMORY = 2, CUDA_ERROR_NO_DEVICE = 100 };

void standin_name_kernel(const void* stub, const char* name);
const char* standin_kernel_name(const void* stub);

/* The context of a GPU is an address that only tells which GPU's it is. */
#define CONTEXT_OF(device) ((void*)(0x9900L + (device)))

EXPORT int cuInit(unsigned flags) {
    return (int)standin_setting("STANDIN_CUINIT", standin_gpus() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE);
}

EXPORT int cuDriverGetVersion(int* version) {
    *version = standin_driver_version();
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceGetCount(int* count) {
    *count = standin_gpus();
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceGetName(char* name, int length, int device) {
    snprintf(name, length, "%s", standin_name());
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceGetPCIBusId(char* name, int length, int device) {
    snprintf(name, length, "0000:%02X:00.0", 0xAB + device);
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
    *value = standin_attribute(attribute);
    return CUDA_SUCCESS;
}

EXPORT int cuDeviceTotalMem_v2(size_t* nbytes, int device) {
    size_t free_bytes;
    standin_vram(&free_bytes, nbytes);
    return CUDA_SUCCESS;
}

EXPORT int cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
    standin_vram(free_bytes, total_bytes);
    return CUDA_SUCCESS;
}

/* The names by which cuda-python looks them up. */
EXPORT int cuDeviceTotalMem(size_t* nbytes, int device) { return cuDeviceTotalMem_v2(nbytes, device); }
EXPORT int cuMemGetInfo(size_t* free_bytes, size_t* total_bytes) { return cuMemGetInfo_v2(free_bytes, total_bytes); }

EXPORT int cuCtxGetCurrent(void** context) {
    *context = CONTEXT_OF(standin_current_gpu());
    return CUDA_SUCCESS;
}

EXPORT int cuCtxSetCurrent(void* context) {
    if (context) standin_use_gpu((long)context - (long)CONTEXT_OF(0));
    return CUDA_SUCCESS;
}

EXPORT int cuCtxGetDevice(int* device) {
    *device = standin_current_gpu();
    return CUDA_SUCCESS;
}

EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
    if (flags) *flags = 0;
    if (active) *active = standin_has_context();
    return CUDA_SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
    standin_begin_context();
    *context = CONTEXT_OF(device);
    return CUDA_SUCCESS;
}

EXPORT int cuGetErrorString(int error, const char** text) {
    *text = error == CUDA_ERROR_NO_DEVICE ? "no CUDA-capable device is detected" : "an error of the stand-in";
    return CUDA_SUCCESS;
}

EXPORT int cuGetErrorName(int error, const char** text) {
    *text = "CUDA_ERROR_OF_THE_STAND_IN";
    return CUDA_SUCCESS;
}

/* A GPU's number, as its identity. */
EXPORT int cuDeviceGetUuid(unsigned char uuid[16], int device) {
    memset(uuid, 0x5d, 16);
    uuid[15] = (unsigned char)device;
    return CUDA_SUCCESS;
}

/* ---- modules and kernels (Triton, whose kernels end with two scratch pointers: two arguments always exist) ---- */

static void* new_handle(void) { return calloc(1, 16); }

EXPORT int cuModuleLoadData(void** module, const void* image) {
    *module = new_handle();
    return CUDA_SUCCESS;
}

EXPORT int cuModuleLoadDataEx(void** module, const void* image, unsigned count, void* options, void* values) {
    *module = new_handle();
    return CUDA_SUCCESS;
}

EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
    *function = new_handle();
    standin_name_kernel(*function, strdup(name));
    return CUDA_SUCCESS;
}

EXPORT int cuLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned c, void* d, void* e,
                             unsigned f) {
    *library = new_handle();
    return CUDA_SUCCESS;
}

/* Libraries of one kernel, as DeepGEMM compiles them into FOLDER/NAME.HASH/kernel.cubin. */
EXPORT int cuLibraryLoadFromFile(void** library, const char* path, void* a, void* b, unsigned c, void* d, void* e,
                                 unsigned f) {
    const char *end = strrchr(path, '/'), *name = end;
    while (name && name > path && name[-1] != '/') name--;
    *library = new_handle();
    standin_name_kernel(*library, name ? strndup(name, end - name) : strdup(path));
    return CUDA_SUCCESS;
}

EXPORT int cuLibraryGetKernelCount(unsigned* count, void* library) {
    *count = 1;
    return CUDA_SUCCESS;
}

EXPORT int cuLibraryEnumerateKernels(void** kernels, unsigned count, void* library) {
    kernels[0] = library;
    return CUDA_SUCCESS;
}

EXPORT int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
    return cuModuleGetFunction(kernel, library, name);
}

EXPORT int cuKernelGetFunction(void** function, void* kernel) {
    *function = kernel;
    return CUDA_SUCCESS;
}

EXPORT int cuFuncGetAttribute(int* value, int attribute, void* function) {
    enum { MAX_THREADS_PER_BLOCK = 0 };
    *value = attribute == MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

struct launch_config { /* CUlaunchConfig */
    unsigned grid[3], block[3], shared;
    void* stream;
};

EXPORT int cuLaunchKernelEx(const struct launch_config* it, void* function, void** arguments, void** extra) {
    standin_launch(it->stream, standin_kernel_name(function), arguments, 2, it->grid[0] * it->grid[1] * it->grid[2],
                   it->block[0] * it->block[1] * it->block[2], "cuLaunchKernel");
    return CUDA_SUCCESS;
}

EXPORT int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void* stream, void** arguments, void** extra) {
    standin_launch(stream, standin_kernel_name(function), arguments, 2, gx * gy * gz, bx * by * bz, "cuLaunchKernel");
    return CUDA_SUCCESS;
}

/* `outer`: the size of the last dimension, in rows of the last but one. */
EXPORT int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, const void* address, const uint64_t* sizes) {
    standin_log("cuTensorMapEncodeTiled", 0, "\"address\": %zu, \"rank\": %u, \"inner\": %zu, \"outer\": %zu",
                (size_t)address, rank, (size_t)sizes[0], (size_t)sizes[rank - 1]);
    return CUDA_SUCCESS;
}

EXPORT int cuOccupancyMaxActiveClusters(int* clusters, void* function, void* config) {
    *clusters = 1;
    return CUDA_SUCCESS;
}

/* ---- memory ---- */

EXPORT int cuPointerGetAttribute(void* data, int attribute, uintptr_t address) {
    enum { MEMORY_TYPE = 2, DEVICE_POINTER = 3, IS_MANAGED = 8, TYPE_DEVICE = 2 };
    switch (attribute) {
        case MEMORY_TYPE:
            *(unsigned*)data = TYPE_DEVICE;
            break;
        case DEVICE_POINTER:
            *(uintptr_t*)data = address;
            break;
        case IS_MANAGED:
            *(unsigned*)data = standin_kind((void*)address) == KIND_MANAGED;
            break;
        default:
            *(uint64_t*)data = 0;
    }
    return CUDA_SUCCESS;
}

/* Managed memory, in the numbers that both APIs share, by the names under which cuda-python looks them up. */

EXPORT int cuMemAllocManaged(void** address, size_t nbytes, unsigned flags) {
    return cudaMallocManaged(address, nbytes, flags);
}

EXPORT int cuMemAdvise(void* start, size_t nbytes, int advice, struct cudaMemLocation location) {
    return cudaMemAdvise(start, nbytes, advice, location);
}

EXPORT int cuMemPrefetchAsync(void* start, size_t nbytes, struct cudaMemLocation location, unsigned flags,
                              void* stream) {
    return cudaMemPrefetchAsync(start, nbytes, location, flags, stream);
}

EXPORT int cuMemRangeGetAttribute(void* data, size_t data_bytes, int attribute, void* start, size_t nbytes) {
    return cudaMemRangeGetAttribute(data, data_bytes, attribute, start, nbytes);
}

EXPORT int cuMemAlloc(void** address, size_t nbytes) { return cudaMalloc(address, nbytes); }

EXPORT int cuMemFree(void* address) { return cudaFree(address); }

/* STANDIN_CORRUPT changes a byte of each copy on the device. */
EXPORT int cuMemcpyDtoD(void* to, const void* from, size_t nbytes) {
    cudaMemcpy(to, from, nbytes, cudaMemcpyDefault);
    if (standin_setting("STANDIN_CORRUPT", 0)) ((char*)to)[nbytes / 2] ^= 1;
    return CUDA_SUCCESS;
}

EXPORT int cuMemcpyDtoDAsync(void* to, const void* from, size_t nbytes, void* stream) {
    return cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDefault, stream);
}

EXPORT int cuMemcpyDtoH(void* to, const void* from, size_t nbytes) {
    return cudaMemcpy(to, from, nbytes, cudaMemcpyDefault);
}

EXPORT int cuMemGetAllocationGranularity(size_t* granularity, void* properties, int option) {
    *granularity = 2 << 20;
    return CUDA_SUCCESS;
}

/* Addresses apart from memory, as torch_memory_saver gives memory up and has it back. What is mapped counts as used
 * VRAM, also where it is asked for on a NUMA node. */

EXPORT int cuMemCreate(unsigned long long* handle, size_t nbytes, const void* properties, unsigned long long flags) {
    static atomic_ullong handles;
    *handle = ++handles;
    return CUDA_SUCCESS;
}

EXPORT int cuMemAddressReserve(void** address, size_t nbytes, size_t alignment, void* wanted,
                               unsigned long long flags) {
    *address = standin_take(nbytes, KIND_DEVICE);
    if (!*address) return CUDA_ERROR_OUT_OF_MEMORY;
    standin_hold(*address, nbytes, false);
    return CUDA_SUCCESS;
}

EXPORT int cuMemMap(void* address, size_t nbytes, size_t offset, unsigned long long handle, unsigned long long flags) {
    standin_hold(address, nbytes, true);
    standin_log("cuMemMap", CUDA_SUCCESS, "\"address\": %zu, \"nbytes\": %zu", (size_t)address, nbytes);
    return CUDA_SUCCESS;
}

EXPORT int cuMemUnmap(void* address, size_t nbytes) {
    standin_hold(address, nbytes, false);
    standin_log("cuMemUnmap", CUDA_SUCCESS, "\"address\": %zu, \"nbytes\": %zu", (size_t)address, nbytes);
    return CUDA_SUCCESS;
}

EXPORT int cuMemAddressFree(void* address, size_t nbytes) {
    standin_hold(address, nbytes, true);
    standin_give(address);
    return CUDA_SUCCESS;
}
