// How fast a kernel reads what lies far apart in host memory, as the experts of a decode step do: one translation
// serves 2 MiB at most, and the GPU keeps only so many. Also while the CPU uses the host's memory.
#pragma once

#include <atomic>
#include <memory>
#include <random>
#include <thread>

#include "common.h"
#include "kernels.h"
#include "memory.h"
#include "reader.h"

// Other blocks read each region, so that many are read at the same time.
__global__ void __launch_bounds__(threads, 2)
    read_regions(const char* start, const unsigned* blocks, int regions, size_t count, unsigned* result) {
    unsigned seen = 0;
    for (int i = 0; i < regions; i++) {
        const uint4* from = reinterpret_cast<const uint4*>(start + blocks[i] * block_bytes);
        seen ^= read_share<4>(from, count, (blockIdx.x + 101 * i) % gridDim.x, gridDim.x);
    }
    publish(seen, result);
}

// All cores copy memory to memory until the end of the scope.
class busy_host {
  public:
    explicit busy_host(size_t nbytes) {
        for (unsigned i = 0; i < std::thread::hardware_concurrency(); i++) {
            threads_.emplace_back([this, nbytes] {
                std::vector<char> from(nbytes, 1), to(nbytes);
                while (!over_) {
                    std::copy(from.begin(), from.end(), to.begin());
                    copied_ += nbytes;
                }
            });
        }
    }
    ~busy_host() {
        over_ = true;
        for (std::thread& each : threads_) each.join();
    }
    busy_host(const busy_host&) = delete;
    busy_host& operator=(const busy_host&) = delete;

    double copied() const { return static_cast<double>(copied_); }

  private:
    std::atomic<bool> over_{false};
    std::atomic<size_t> copied_{0};
    std::vector<std::thread> threads_;
};

// The XOR of the pattern's words in the first regions.
inline unsigned checksum_of(const std::vector<unsigned>& places, int regions, size_t nbytes) {
    unsigned seen = 0;
    for (int i = 0; i < regions; i++) {
        const size_t first = places[i] * (block_bytes / 4);
        for (size_t word = first; word < first + nbytes / 4; word++) seen ^= pattern(word, 1);
    }
    return seen;
}

// 264 regions: the missed experts of a step of 75 layers, some 3 or 4 a layer.
inline void measure_reach(session& it) {
    const int regions = static_cast<int>(it.pick(264, 4)), repeats = 9;
    const size_t nbytes = it.pick(3 * mib / 2, mib);
    reader read(it);
    plain_memory offsets(regions * sizeof(unsigned));
    for (size_t total : {it.pick(gib, 8 * mib), it.pick(6 * gib, 16 * mib), it.pick(24 * gib, 32 * mib)}) {
        if (it.late()) return;
        managed_range range(total, it.device);
        range.prefer(on_host());
        range.bring(on_host(), it.stream);
        fill_pattern(it, range.start, total);
        std::vector<unsigned> places(total / block_bytes);
        for (size_t i = 0; i < places.size(); i++) places[i] = static_cast<unsigned>(i);
        std::mt19937 random(1);
        for (const char* order : {"neighbours", "far apart"}) {
            if (order[0] == 'f') std::shuffle(places.begin(), places.end(), random);
            CHECK(cudaMemcpy(offsets.start(), places.data(), regions * sizeof(unsigned), cudaMemcpyHostToDevice));
            const unsigned expected = it.computes ? checksum_of(places, regions, nbytes) : 0;
            for (bool busy : {false, true}) {
                if (it.late()) return;
                std::unique_ptr<busy_host> host;
                if (busy) host = std::make_unique<busy_host>(it.pick(64 * mib, mib));
                std::vector<double> rates;
                stopwatch watch;
                const double copied = busy ? host->copied() : 0, began = now();
                for (int i = -1; i < repeats; i++) {
                    read.clear();
                    const double ms = watch.ms(it.stream, [&] {
                        read_regions<<<it.sms * 8, threads, 0, it.stream>>>(
                            range.start, reinterpret_cast<const unsigned*>(offsets.start()), regions, nbytes / 16,
                            read.result());
                        CHECK(cudaGetLastError());
                    });
                    if (it.computes && read.checksum() != expected) fail("reach: read other bytes than were written");
                    if (i >= 0) rates.push_back(gb_per_s(regions * nbytes, ms / 1e3));
                }
                auto labelled = [&](const char* what) {
                    row line(what);
                    line.label("gib", total / double(gib)).label("regions", regions).label("order", order);
                    return line.label("cpu", busy ? "copies on all cores" : "idle");
                };
                row line = labelled("reach");
                it.put(line, "GB/s", rates);
                if (busy) {
                    row copies = labelled("reach_host_copies");
                    it.put(copies, "GB/s", {(host->copied() - copied) / (now() - began) / 1e9});
                }
            }
        }
    }
}
