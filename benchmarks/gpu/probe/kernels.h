// Kernels that read memory in different ways. Each returns the XOR of all words it read, so that a read that did not
// happen, or read something else, shows.
#pragma once

#include "common.h"
#include "memory.h"

constexpr int threads = 256;

__host__ __device__ inline unsigned pattern(size_t word, unsigned seed) {
    return static_cast<unsigned>(word) * 2654435761u + seed + static_cast<unsigned>(word >> 32);
}

__global__ void fill(unsigned* start, size_t words, unsigned seed) {
    size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < words; i += step) {
        start[i] = pattern(i, seed);
    }
}

__device__ inline uint4 load(const uint4* from) {
    uint4 value;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from));
    return value;
}

__device__ inline unsigned fold(uint4 it) { return it.x ^ it.y ^ it.z ^ it.w; }

__device__ inline void publish(unsigned seen, unsigned* result) {
    for (int half = 16; half; half /= 2) seen ^= __shfl_xor_sync(0xffffffffu, seen, half);
    if (threadIdx.x % 32 == 0) atomicXor(result, seen);
}

// Worker t of `workers` reads chunks t, t + workers, ... of `unroll` 16-byte loads a thread. Loads of a whole chunk
// have no conditions between them, so that the compiler issues all of them before it uses the first.
template <int unroll>
__device__ unsigned read_share(const uint4* start, size_t count, size_t worker, size_t workers) {
    unsigned seen = 0;
    constexpr size_t chunk = static_cast<size_t>(threads) * unroll;
    size_t first = worker * chunk;
    for (; first + chunk <= count; first += workers * chunk) {
        const uint4* from = start + first + threadIdx.x;
        uint4 values[unroll];
#pragma unroll
        for (int i = 0; i < unroll; i++) values[i] = load(from + i * threads);
#pragma unroll
        for (int i = 0; i < unroll; i++) seen ^= fold(values[i]);
    }
    for (size_t at = first + threadIdx.x; at < count && at < first + chunk; at += threads) {
        seen ^= fold(load(start + at));
    }
    return seen;
}

template <int unroll>
__global__ void __launch_bounds__(threads, 2) read_plain(const uint4* start, size_t count, unsigned* result) {
    publish(read_share<unroll>(start, count, blockIdx.x, gridDim.x), result);
}

// `readers` groups of blocks read all of the range each. Side by side: the groups' blocks for one slice are neighbours
// in the launch order, so that they ask for the same bytes at about the same time; else one group comes after the
// other.
template <int unroll>
__global__ void __launch_bounds__(threads, 2)
    read_repeatedly(const uint4* start, size_t count, unsigned readers, bool side_by_side, unsigned* result) {
    unsigned slices = gridDim.x / readers;
    unsigned slice = side_by_side ? blockIdx.x / readers : blockIdx.x % slices;
    publish(read_share<unroll>(start, count, slice, slices), result);
}

// Asynchronous copies of 16 bytes a thread into shared memory, `stages` of them in flight.
template <int stages>
__global__ void read_cp_async(const uint4* start, size_t count, unsigned* result) {
    __shared__ uint4 buffer[stages][threads];
    size_t chunk = blockDim.x, step = gridDim.x * chunk;
    size_t mine = blockIdx.x * chunk + threadIdx.x;
    auto fetch = [&](size_t round) {
        size_t at = mine + round * step;
        if (at < count) {
            unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(&buffer[round % stages][threadIdx.x]));
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(start + at) : "memory");
        }
        asm volatile("cp.async.commit_group;");
    };
    unsigned seen = 0;
    for (int i = 0; i < stages - 1; i++) fetch(i);
    for (size_t round = 0; mine + round * step < count; round++) {
        fetch(round + stages - 1);
        asm volatile("cp.async.wait_group %0;" ::"n"(stages - 1) : "memory");
        seen ^= fold(buffer[round % stages][threadIdx.x]);
    }
    asm volatile("cp.async.wait_group 0;");
    publish(seen, result);
}

// Cycles of one read. The store to shared memory waits for the word, and the clock for the store; without it the
// compiler may look at the clock while the read is under way.
__device__ inline unsigned time_read(const char* from) {
    __shared__ volatile unsigned arrived;
    long long before = clock64();
    unsigned value;
    asm volatile("ld.global.cv.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    arrived = value;
    return static_cast<unsigned>(clock64() - before);
}

// Cycles of one read of each page: a page in VRAM answers in under a microsecond, one in host memory after a round trip
// over the link.
__global__ void time_reads(const char* start, size_t pages, size_t page_bytes, size_t offset, unsigned* cycles) {
    for (size_t page = blockIdx.x; page < pages; page += gridDim.x) {
        cycles[page] = time_read(start + page * page_bytes + offset);
    }
}

// Cycles of a first read at each address, which brings a page back that was evicted and warms the TLB, and of a second
// one, of another line of the same page, which shows where the page is then.
__global__ void time_two_reads(const char* const* at, size_t count, unsigned* first, unsigned* second) {
    constexpr size_t next_line = 512;
    for (size_t i = blockIdx.x; i < count; i += gridDim.x) {
        first[i] = time_read(at[i]);
        second[i] = time_read(at[i] + next_line);
    }
}

// Keeps every multiprocessor busy for about `cycles`.
__global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {
    }
}
