// How fast offloaded bytes come into a buffer in plain VRAM: by the copy engine, or by a kernel of few blocks.
#pragma once

#include "bandwidth.h"
#include "common.h"
#include "kernels.h"
#include "memory.h"
#include "moves.h"
#include "reader.h"

// Each block copies units of 32 KiB, eight loads of 16 bytes a thread in flight.
constexpr int copy_unroll = 8;

__global__ void __launch_bounds__(threads, 2) copy_units(const uint4* from, uint4* to, size_t count) {
    constexpr size_t unit = static_cast<size_t>(threads) * copy_unroll;
    for (size_t first = blockIdx.x * unit; first + unit <= count; first += gridDim.x * unit) {
        uint4 values[copy_unroll];
#pragma unroll
        for (int i = 0; i < copy_unroll; i++) values[i] = load(from + first + threadIdx.x + i * threads);
#pragma unroll
        for (int i = 0; i < copy_unroll; i++) to[first + threadIdx.x + i * threads] = values[i];
    }
}

// As the project's kernel, for other numbers of blocks: they claim chunks of 128 KiB, in an order in which chunks in
// VRAM and chunks behind the link mix. `chunks` is a power of two, `stride` odd.
__global__ void __launch_bounds__(threads, 2)
    copy_claimed(const uint4* from, uint4* to, unsigned chunks, unsigned stride, unsigned* claimed) {
    constexpr size_t unit = static_cast<size_t>(threads) * copy_unroll, chunk = 4 * unit;
    __shared__ unsigned claim;
    for (;;) {
        if (threadIdx.x == 0) claim = atomicAdd(claimed, 1u);
        __syncthreads();
        const unsigned mine = claim;
        __syncthreads();
        if (mine >= chunks) return;
        const size_t first = (mine * stride & (chunks - 1)) * chunk;
        for (size_t at = first; at < first + chunk; at += unit) {
            uint4 values[copy_unroll];
#pragma unroll
            for (int i = 0; i < copy_unroll; i++) values[i] = load(from + at + threadIdx.x + i * threads);
#pragma unroll
            for (int i = 0; i < copy_unroll; i++) to[at + threadIdx.x + i * threads] = values[i];
        }
    }
}

// From managed memory that prefers the CPU, from the same with every second stretch of 3 MiB resident, and from pinned
// memory. "busy": another stream reads VRAM meanwhile, as a memory-bound layer does; its time beside the copies, over
// its time alone, is what the copies cost it.
inline void measure_copies(session& it) {
    const size_t total = it.pick(gib, 16 * mib), other_bytes = it.pick(2 * gib, 4 * mib), stretch = 3 * mib;
    const int other_reads = static_cast<int>(it.pick(40, 2));
    const unsigned expected = it.computes ? expected_checksum(total) : 0;
    cudaStream_t copier = nullptr;
    CHECK(cudaStreamCreateWithFlags(&copier, cudaStreamNonBlocking));
    reader read(it), beside(it);
    plain_memory buffer(total), other(other_bytes), claimed(block_bytes);
    fill_pattern(it, other.start(), other_bytes);
    stopwatch watch, copy_watch;
    auto work = [&] {
        for (int i = 0; i < other_reads; i++) beside.launch(other.start(), other_bytes, loads::plain_4, 8, it.stream);
    };
    watch.ms(it.stream, work);
    const double alone = watch.ms(it.stream, work);

    auto measure = [&](const char* source, const char* from) {
        auto one = [&](const std::string& way, auto&& copy) {
            for (const char* gpu : {"idle", "busy"}) {
                if (it.late()) return;
                std::vector<double> rates, held, slower;
                for (int i = -1; i < 5; i++) {
                    CHECK(cudaMemsetAsync(buffer.start(), 0, total, it.stream));
                    CHECK(cudaStreamSynchronize(it.stream));
                    double issued = 0;
                    const bool busy = gpu[0] == 'b';
                    if (busy) watch.launch(it.stream, work);
                    double copied = copy_watch.ms(copier, [&] { issued = host_seconds(copy); });
                    double took = busy ? watch.wait() : 0;
                    if (i < 0) continue;
                    rates.push_back(gb_per_s(total, copied / 1e3));
                    held.push_back(issued * 1e3);
                    slower.push_back(alone > 0 ? took / alone : 0);
                }
                read.gb(buffer.start(), total, loads::plain_4, 8, expected);
                auto put = [&](const char* what, const char* unit, const std::vector<double>& values) {
                    row line(what);
                    it.put(line.label("source", source).label("way", way).label("gpu", gpu), unit, values);
                };
                put("copies", "GB/s", rates);
                if (gpu[0] == 'i') put("copies_hold_caller", "ms", held);
                if (gpu[0] == 'b') put("copies_slow_others", "x the time alone", slower);
            }
        };
        // Told no direction, the driver takes managed memory for pageable memory.
        for (size_t size : {768 * kib, 1536 * kib, 3 * mib, 16 * mib, total}) {
            std::string pieces = size == total ? "one call" : std::to_string(size / kib) + " KiB a call";
            one("copy engine, device to device, " + pieces, [&] {
                for (size_t at = 0; at < total; at += size) {
                    CHECK(cudaMemcpyAsync(buffer.start() + at, from + at, std::min(size, total - at),
                                          cudaMemcpyDeviceToDevice, copier));
                }
            });
        }
        for (int blocks : {4, 8, 16, 32, 64, 128, it.sms * 2}) {
            one("kernel, " + std::to_string(blocks) + " blocks", [&] {
                copy_units<<<blocks, threads, 0, copier>>>(reinterpret_cast<const uint4*>(from),
                                                           reinterpret_cast<uint4*>(buffer.start()), total / 16);
                CHECK(cudaGetLastError());
            });
        }
        for (int blocks : {8, 16, 24, 32}) {
            one("kernel that claims chunks, " + std::to_string(blocks) + " blocks", [&] {
                const unsigned chunks = static_cast<unsigned>(total / (128 * kib));
                auto* next = reinterpret_cast<unsigned*>(claimed.start());
                CHECK(cudaMemsetAsync(next, 0, sizeof *next, copier));
                copy_claimed<<<blocks, threads, 0, copier>>>(reinterpret_cast<const uint4*>(from),
                                                             reinterpret_cast<uint4*>(buffer.start()), chunks,
                                                             chunks * 5 / 8 | 1, next);
                CHECK(cudaGetLastError());
            });
        }
    };
    {
        managed_range range(total, it.device);
        range.prefer(on_host());
        range.bring(on_host(), it.stream);
        fill_pattern(it, range.start, total);
        measure("managed", range.start);
        for (size_t at = 0; at < total; at += 2 * stretch) {
            promote(it, design::prefer_gpu, range.start + at, std::min(stretch, total - at), it.stream);
        }
        CHECK(cudaStreamSynchronize(it.stream));
        measure("managed, half resident", range.start);
    }
    pinned_memory pinned(total);
    fill_pattern(it, pinned.start(), total);
    measure("pinned", pinned.start());
    CHECK(cudaStreamDestroy(copier));
}
