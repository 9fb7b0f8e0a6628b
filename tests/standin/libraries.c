/* The libraries above CUDA whose answers torch or SGLang reads: cuBLAS, cuDNN, NCCL, NVML. */
#define _GNU_SOURCE
#include "device.h"
#include "standin.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int new_handle(void** handle) {
    *handle = calloc(1, 64);
    return 0;
}

/* The stream that a cuBLAS handle works on, in its first word. */
static int library_launch(void* stream, const char* name) {
    standin_launch(stream, name, NULL, 0, 1, 1, "library");
    return 0;
}

EXPORT int cublasCreate_v2(void** handle) { return new_handle(handle); }
EXPORT int cublasLtCreate(void** handle) { return new_handle(handle); }

EXPORT int cublasSetStream_v2(void** handle, void* stream) {
    *handle = stream;
    return 0;
}

EXPORT int cublasGetStream_v2(void** handle, void** stream) {
    *stream = *handle;
    return 0;
}

EXPORT int cublasGetMathMode(void* handle, int* mode) {
    *mode = 0;
    return 0;
}

EXPORT int cublasGetVersion_v2(void* handle, int* version) {
    *version = 130100;
    return 0;
}

EXPORT size_t cublasLtGetVersion(void) { return 130100; }
EXPORT size_t cublasLtGetCudartVersion(void) { return 13000; }

EXPORT int cublasLtMatmulAlgoGetHeuristic(void* handle, void* operation, void* a, void* b, void* c, void* d,
                                          void* preference, int requested, void* results, int* count) {
    enum { HEURISTIC_RESULT_BYTES = 96 };
    memset(results, 0, HEURISTIC_RESULT_BYTES);
    *count = 1;
    return 0;
}

EXPORT int cublasLtMatmul(void* handle, void* operation, void* alpha, void* a, void* al, void* b, void* bl, void* beta,
                          void* c, void* cl, void* d, void* dl, void* algorithm, void* workspace, size_t nbytes,
                          void* stream) {
    return library_launch(stream, "cublasLtMatmul");
}

EXPORT int cublasGemmEx(void** handle) { return library_launch(*handle, "cublasGemmEx"); }
EXPORT int cublasSgemm_v2(void** handle) { return library_launch(*handle, "cublasSgemm"); }
EXPORT int cublasGemmStridedBatchedEx(void** handle) { return library_launch(*handle, "cublasGemmStridedBatchedEx"); }

EXPORT size_t cudnnGetVersion(void) { return 92400; }

EXPORT int ncclGetVersion(int* version) {
    *version = 23007;
    return 0;
}

EXPORT int ncclGetUniqueId(void* id) {
    memset(id, 1, 128);
    return 0;
}

EXPORT int ncclCommInitRank(void** communicator) { return new_handle(communicator); }
EXPORT int ncclCommInitRankConfig(void** communicator) { return new_handle(communicator); }
EXPORT int ncclMemAlloc(void** address, size_t nbytes) { return cudaMalloc(address, nbytes); }
EXPORT int ncclMemFree(void* address) { return cudaFree(address); }
EXPORT const char* ncclGetErrorString(int error) { return "no error"; }
EXPORT const char* ncclGetLastError(void* communicator) { return ""; }

EXPORT int nvmlInit_v2(void) { return 0; }
EXPORT int nvmlShutdown(void) { return 0; }

EXPORT int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = (unsigned)standin_setting("STANDIN_GPUS", 1); /* it does not look at CUDA_VISIBLE_DEVICES */
    return 0;
}

EXPORT int nvmlDeviceGetName(void* device, char* name, unsigned length) {
    snprintf(name, length, "%s", standin_name());
    return 0;
}

/* torch asks these when an allocation fails. */
EXPORT int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, void* processes) {
    *count = 0;
    return 0;
}
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void* device, unsigned link, unsigned* type) { return 3; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* device, unsigned link, void* info) { return 3; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) {
    *version = standin_driver_version();
    return 0;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) { return new_handle(device); }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) { return new_handle(device); }

/* STANDIN_CONFIDENTIAL=1: confidential computing is on. */
EXPORT int nvmlSystemGetConfComputeState(unsigned* state) {
    memset(state, 0, 3 * sizeof *state); /* environment, ccFeature, devToolsMode */
    state[1] = (unsigned)standin_setting("STANDIN_CONFIDENTIAL", 0);
    return 0;
}
