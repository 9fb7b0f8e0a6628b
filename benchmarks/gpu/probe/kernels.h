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

// Bulk copies (the tensor memory accelerator, without a tensor map): one thread asks for `bulk_bytes` at a time,
// `bulk_stages` are in flight a block, and an mbarrier says when one has landed. `count` is a multiple of the bytes of
// a bulk.
constexpr unsigned bulk_bytes = 8 << 10;
constexpr unsigned bulk_stages = 4;

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

// Bulk copies came with sm_90. Before it this reads nothing, so that its checksum is wrong and it is left out.
__global__ void read_bulk(const uint4* start, size_t count, unsigned* result) {
#if __CUDA_ARCH__ >= 900
    __shared__ alignas(128) uint4 buffer[bulk_stages][bulk_bytes / 16];
    __shared__ alignas(8) unsigned long long barriers[bulk_stages];
    const size_t bulks = count * 16 / bulk_bytes;
    auto barrier = [&](size_t stage) { return static_cast<unsigned>(__cvta_generic_to_shared(&barriers[stage])); };
    if (threadIdx.x == 0) {
        for (unsigned i = 0; i < bulk_stages; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier(i)));
        }
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    auto fetch = [&](size_t round) {
        size_t bulk = blockIdx.x + round * gridDim.x;
        if (threadIdx.x != 0 || bulk >= bulks) return;
        unsigned stage = round % bulk_stages;
        unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(buffer[stage]));
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier(stage)), "r"(bulk_bytes)
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
            "l"(start + bulk * (bulk_bytes / 16)), "r"(bulk_bytes), "r"(barrier(stage))
            : "memory");
    };
    unsigned seen = 0;
    for (unsigned i = 0; i < bulk_stages; i++) fetch(i);
    for (size_t round = 0; blockIdx.x + round * gridDim.x < bulks; round++) {
        unsigned stage = round % bulk_stages;
        if (!__syncthreads_and(landed(barrier(stage), round / bulk_stages % 2))) break;
        for (unsigned i = threadIdx.x; i < bulk_bytes / 16; i += blockDim.x) seen ^= fold(buffer[stage][i]);
        __syncthreads();  // everyone has read the stage before it is filled again
        fetch(round + bulk_stages);
    }
    publish(seen, result);
#endif
}

// Cycles that one dependent read of each page takes: a page in VRAM answers in under a microsecond, one in host memory
// after a round trip over the link.
__global__ void time_reads(const char* start, size_t pages, size_t page_bytes, size_t offset, unsigned* cycles,
                           unsigned* result) {
    unsigned seen = 0;
    for (size_t page = blockIdx.x; page < pages; page += gridDim.x) {
        const char* from = start + page * page_bytes + offset;
        long long before = clock64();
        unsigned value;
        asm volatile("ld.global.cv.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
        seen ^= value;
        asm volatile("" ::"r"(seen) : "memory");
        cycles[page] = static_cast<unsigned>(clock64() - before);
    }
    atomicXor(result, seen);
}

// Keeps every multiprocessor busy for about `cycles`.
__global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {
    }
}

// ---- launches ----

enum class loads { plain_1, plain_4, plain_8, cp_async, bulk };

inline const char* name_of(loads it) {
    const char* const names[] = {"plain x1", "plain x4", "plain x8", "cp.async x8", "bulk 4 x 8 KiB"};
    return names[static_cast<int>(it)];
}

class reader {
  public:
    explicit reader(session& it) : session_(it), result_(4096) {}

    void launch(const char* start, size_t nbytes, loads how, int blocks_per_sm, cudaStream_t stream) {
        const uint4* from = reinterpret_cast<const uint4*>(start);
        unsigned* result = reinterpret_cast<unsigned*>(result_.start());
        size_t count = nbytes / 16;
        int blocks = session_.sms * blocks_per_sm;
        switch (how) {
            case loads::plain_1:
                read_plain<1><<<blocks, threads, 0, stream>>>(from, count, result);
                break;
            case loads::plain_4:
                read_plain<4><<<blocks, threads, 0, stream>>>(from, count, result);
                break;
            case loads::plain_8:
                read_plain<8><<<blocks, threads, 0, stream>>>(from, count, result);
                break;
            case loads::cp_async:
                read_cp_async<8><<<blocks, threads, 0, stream>>>(from, count, result);
                break;
            case loads::bulk:
                read_bulk<<<blocks, threads, 0, stream>>>(from, count, result);
                break;
        }
        CHECK(cudaGetLastError());
    }

    // Milliseconds of one read of the range, with the words checked against `expected` (0: not known).
    double ms(const char* start, size_t nbytes, loads how = loads::plain_4, int blocks_per_sm = 8,
              unsigned expected = 0) {
        clear();
        double elapsed =
            watch_.ms(session_.stream, [&] { launch(start, nbytes, how, blocks_per_sm, session_.stream); });
        unsigned seen = checksum();
        if (session_.computes && expected && seen != expected) {
            fail(std::string(name_of(how)) + " read other bytes than were written");
        }
        return elapsed;
    }

    double gb(const char* start, size_t nbytes, loads how = loads::plain_4, int blocks_per_sm = 8,
              unsigned expected = 0) {
        return gb_per_s(nbytes, ms(start, nbytes, how, blocks_per_sm, expected) / 1e3);
    }

    void clear() { CHECK(cudaMemsetAsync(result_.start(), 0, 4, session_.stream)); }
    unsigned* result() const { return reinterpret_cast<unsigned*>(result_.start()); }

    unsigned checksum() {
        unsigned seen = 0;
        CHECK(cudaMemcpyAsync(&seen, result_.start(), 4, cudaMemcpyDeviceToHost, session_.stream));
        CHECK(cudaStreamSynchronize(session_.stream));
        return seen;
    }

  private:
    session& session_;
    plain_memory result_;
    stopwatch watch_;
};

inline void fill_pattern(session& it, char* start, size_t nbytes, unsigned seed = 1) {
    fill<<<it.sms * 8, threads, 0, it.stream>>>(reinterpret_cast<unsigned*>(start), nbytes / 4, seed);
    CHECK(cudaGetLastError());
    CHECK(cudaStreamSynchronize(it.stream));
}

// The XOR of the pattern's words, as a read from plain memory of the first bytes would find it.
inline unsigned expected_checksum(size_t nbytes, unsigned seed = 1) {
    unsigned seen = 0;
    for (size_t i = 0; i < nbytes / 4; i++) seen ^= pattern(i, seed);
    return seen;
}

// Whether kernels run here at all: a stand-in driver accepts launches and runs nothing.
inline bool kernels_compute(session& it) {
    plain_memory memory(mib);
    reader read(it);
    CHECK(cudaMemsetAsync(memory.start(), 0, mib, it.stream));
    fill_pattern(it, memory.start(), mib);
    it.computes = false;
    read.ms(memory.start(), mib, loads::plain_4);
    return read.checksum() == expected_checksum(mib);
}

// The ways to read that give the right answer on this machine. One that does not is left out, and the result file says
// so.
inline std::vector<loads> working_loads(session& it) {
    const std::vector<loads> all = {loads::plain_1, loads::plain_4, loads::plain_8, loads::cp_async, loads::bulk};
    if (!it.computes) return all;
    plain_memory memory(mib);
    reader read(it);
    fill_pattern(it, memory.start(), mib);
    it.computes = false;  // so that a wrong answer does not end the program
    std::vector<loads> right;
    for (loads how : all) {
        read.ms(memory.start(), mib, how);
        bool same = read.checksum() == expected_checksum(mib);
        if (same) right.push_back(how);
        row line("load_is_right");
        it.put(line.label("load", name_of(how)), "bool", {same ? 1.0 : 0.0});
    }
    it.computes = true;
    return right;
}
