// Reads by the tensor memory accelerator (sm_90 and later): bulk copies of consecutive bytes, and of boxes of a tensor
// map, as Triton's and DeepGEMM's kernels read weights. Before sm_90 the kernels read nothing, so that their checksum
// is wrong and they are left out.
#pragma once

#include "common.h"
#include "kernels.h"
#include "memory.h"

// One thread asks for `bulk_bytes` at a time, `bulk_stages` are in flight a block, and an mbarrier says when one has
// landed.
constexpr unsigned bulk_bytes = 8 << 10;
constexpr unsigned bulk_stages = 4;

// A tensor map sees a range as rows of 2 KiB (the FP8 weights of 2048 inputs), read in boxes of 64 rows by 128 bytes:
// the most that swizzled shared memory takes, and what those kernels use.
constexpr unsigned row_bytes = 2 << 10;
constexpr unsigned box_width = 128, box_rows = bulk_bytes / box_width;
constexpr unsigned boxes_side_by_side = row_bytes / box_width;

inline size_t boxes_of(size_t nbytes) { return (nbytes / row_bytes + box_rows - 1) / box_rows * boxes_side_by_side; }

// False where nothing lands for a second or two: a wrong answer is reported, a kernel that never ends is not.
__device__ inline bool landed(unsigned barrier, unsigned parity) {
    constexpr long long patience = 4'000'000'000;  // cycles
    long long start = clock64();
    unsigned done = 0;
    while (!done && clock64() - start < patience) {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    }
    return done;
}

// The XOR of this block's share of `bulks`. copy(bulk, to, barrier) asks for the bytes of one.
template <typename Copy>
__device__ unsigned read_in_bulk(size_t bulks, Copy copy) {
    unsigned seen = 0;
#if __CUDA_ARCH__ >= 900
    // 1 KiB: the period of the swizzle. A bulk copy asks for 16 bytes, a box for 128.
    __shared__ alignas(1024) uint4 buffer[bulk_stages][bulk_bytes / 16];
    __shared__ alignas(8) unsigned long long barriers[bulk_stages];
    auto barrier = [&](size_t stage) { return static_cast<unsigned>(__cvta_generic_to_shared(&barriers[stage])); };
    if (threadIdx.x == 0) {
        for (unsigned i = 0; i < bulk_stages; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier(i)) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    auto fetch = [&](size_t round) {
        size_t bulk = blockIdx.x + round * gridDim.x;
        if (threadIdx.x != 0 || bulk >= bulks) return;
        unsigned stage = round % bulk_stages;
        unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(buffer[stage]));
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier(stage)), "r"(bulk_bytes)
                     : "memory");
        copy(bulk, to, barrier(stage));
    };
    for (unsigned i = 0; i < bulk_stages; i++) fetch(i);
    for (size_t round = 0; blockIdx.x + round * gridDim.x < bulks; round++) {
        unsigned stage = round % bulk_stages;
        if (!__syncthreads_and(landed(barrier(stage), round / bulk_stages % 2))) break;
        for (unsigned i = threadIdx.x; i < bulk_bytes / 16; i += blockDim.x) seen ^= fold(buffer[stage][i]);
        __syncthreads();  // everyone has read the stage before it is filled again
        fetch(round + bulk_stages);
    }
#endif
    return seen;
}

// `count` is a multiple of the bytes of a bulk.
__global__ void read_bulk(const uint4* start, size_t count, unsigned* result) {
    publish(
        read_in_bulk(
            count * 16 / bulk_bytes,
            [=](size_t bulk, unsigned to, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
                asm volatile(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                    "l"(start + bulk * (bulk_bytes / 16)), "r"(bulk_bytes), "r"(barrier)
                    : "memory");
#endif
            }),
        result);
}

// Boxes side by side come first. What a box has beyond the last row lands as zeros, and counts as landed.
__global__ void read_boxes(const __grid_constant__ CUtensorMap map, size_t boxes, unsigned* result) {
    const CUtensorMap* at = &map;  // a copy of the map, in a lambda, would not be where the copy engine looks for it
    publish(read_in_bulk(boxes,
                         [=](size_t box, unsigned to, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
                             int x = static_cast<int>(box % boxes_side_by_side * box_width);
                             int y = static_cast<int>(box / boxes_side_by_side * box_rows);
                             asm volatile(
                                 "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                                 "l"(at), "r"(x), "r"(y), "r"(barrier)
                                 : "memory");
#endif
                         }),
            result);
}

// The map of a range whose bytes are a multiple of `row_bytes`. Where the driver refuses it, `refusal` says why.
struct tensor_map {
    tensor_map(const char* start, size_t nbytes, CUtensorMapL2promotion promotion) {
        static const auto encode = driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
        const cuuint64_t sizes[] = {row_bytes, nbytes / row_bytes}, strides[] = {row_bytes};
        const cuuint32_t box[] = {box_width, box_rows}, steps[] = {1, 1};
        CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<char*>(start), sizes, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (result != CUDA_SUCCESS) refusal = "cuTensorMapEncodeTiled returned " + std::to_string(result);
    }

    CUtensorMap map = {};
    std::string refusal;
};
