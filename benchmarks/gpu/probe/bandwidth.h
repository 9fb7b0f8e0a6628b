// How fast a kernel reads host memory in place, what repeated reads cost, and what experts of odd sizes cost.
#pragma once

#include <memory>

#include "common.h"
#include "kernels.h"
#include "memory.h"
#include "reader.h"

// One stretch of memory of any kind, filled with the pattern, on the host where the kind is not plain.
class host_side {
  public:
    host_side(session& it, kind what, size_t nbytes) : nbytes(nbytes) {
        switch (what) {
            case kind::plain:
                plain_ = std::make_unique<plain_memory>(nbytes);
                start = plain_->start();
                break;
            case kind::pinned:
                pinned_ = std::make_unique<pinned_memory>(nbytes);
                start = pinned_->start();
                break;
            case kind::host_numa:
                numa_ = std::make_unique<host_numa_memory>(nbytes, it.device);
                refusal = numa_->refusal;
                if (!refusal.empty()) return;
                start = numa_->start();
                break;
            case kind::managed:
            case kind::managed_4k:
                managed_ = std::make_unique<managed_range>(nbytes, it.device);
                start = managed_->start;
                managed_->prefer(on_host());
                // Pages that are requested one at a time get host memory one at a time.
                size_t step = what == kind::managed_4k ? 4 * kib : nbytes;
                for (size_t at = 0; at < nbytes; at += step) prefetch(start + at, step, on_host(), it.stream);
                CHECK(cudaStreamSynchronize(it.stream));
                break;
        }
        fill_pattern(it, start, nbytes);
    }

    char* start = nullptr;
    size_t nbytes;
    std::string refusal;

  private:
    std::unique_ptr<plain_memory> plain_;
    std::unique_ptr<pinned_memory> pinned_;
    std::unique_ptr<managed_range> managed_;
    std::unique_ptr<host_numa_memory> numa_;
};

inline void note(session& it, const char* what, const char* name, const std::string& text) {
    row line(what);
    it.put(line.label("memory", name).label("reason", text), "", {});
}

struct best_way {
    loads how = loads::plain_4;
    int blocks_per_sm = 8;
    double gb = 0;
};

inline best_way read_all_ways(session& it, reader& read, const host_side& memory, kind what,
                              const std::vector<loads>& ways, int repeats) {
    best_way best;
    unsigned expected = it.computes ? expected_checksum(memory.nbytes) : 0;
    for (loads how : ways) {
        std::string problem;
        for (int blocks : {1, 2, 4, 8}) {
            if (it.late()) return best;
            std::vector<double> values;
            for (int i = -1; i < repeats && problem.empty(); i++) {
                double rate = read.gb(memory.start, memory.nbytes, how, blocks);
                problem = read.problem(expected);
                if (i >= 0) values.push_back(rate);
            }
            if (!problem.empty()) break;  // a copy that never lands takes seconds
            row line("zero_copy");
            line.label("memory", name_of(what)).label("gib", memory.nbytes / double(gib));
            it.put(line.label("load", name_of(how)).label("blocks_per_sm", blocks), "GB/s", values);
            if (median(values) > best.gb) best = {how, blocks, median(values)};
        }
        if (!problem.empty()) leave_out(it, how, name_of(what), problem);
    }
    return best;
}

// The copy engine between pinned host memory and plain VRAM, both ways, in copies of `piece` bytes.
inline void copy_engine(session& it, size_t nbytes, size_t piece, int repeats) {
    plain_memory device(nbytes);
    pinned_memory host(nbytes);
    fill_pattern(it, host.start(), nbytes);
    stopwatch watch;
    for (bool to_device : {true, false}) {
        std::vector<double> values;
        for (int i = -1; i < repeats; i++) {
            double ms = watch.ms(it.stream, [&] {
                for (size_t at = 0; at < nbytes; at += piece) {
                    CHECK(cudaMemcpyAsync((to_device ? device.start() : host.start()) + at,
                                          (to_device ? host.start() : device.start()) + at, piece,
                                          to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, it.stream));
                }
            });
            if (i >= 0) values.push_back(gb_per_s(nbytes, ms / 1e3));
        }
        row line("copy_engine");
        line.label("direction", to_device ? "to_device" : "to_host").label("piece_mib", piece / double(mib));
        it.put(line.label("gib", nbytes / double(gib)), "GB/s", values);
    }
}

inline void look_at_pages(session& it, const host_side& memory, kind what) {
    if (what != kind::managed && what != kind::managed_4k && what != kind::pinned) return;
    size_t looked = std::min(memory.nbytes, it.pick(256 * mib, 4 * mib));
    host_pages pages = look_at_host_pages(memory.start, looked);
    row whole("host_pages");
    whole.label("memory", name_of(what)).label("figure", "blocks of 2 MiB that are one stretch");
    it.put(whole, "share", {pages.whole_blocks});
    row run("host_pages");
    run.label("memory", name_of(what)).label("figure", "mean contiguous stretch");
    it.put(run, "KiB", {pages.mean_run_kib});
}

// Measurement 1.
inline void measure_bandwidth(session& it) {
    reader read(it);
    std::vector<loads> ways = working_loads(it);
    copy_engine(it, it.pick(gib, 4 * mib), it.pick(64 * mib, 2 * mib), 7);
    for (kind what : {kind::managed, kind::pinned, kind::host_numa, kind::managed_4k, kind::plain}) {
        best_way best;
        for (size_t size : {it.pick(gib, 4 * mib), it.pick(10 * gib, 6 * mib), it.pick(24 * gib, 8 * mib)}) {
            bool first = best.gb == 0;
            if (it.late()) return;
            if (!first && (what == kind::managed_4k || what == kind::plain)) break;
            host_side memory(it, what, size);
            if (!memory.refusal.empty()) {
                note(it, "unavailable", name_of(what), memory.refusal);
                break;
            }
            if (first) {
                best = read_all_ways(it, read, memory, what, ways, 5);
                look_at_pages(it, memory, what);
                continue;
            }
            std::vector<double> values;
            for (int i = 0; i < 3; i++) values.push_back(read.gb(memory.start, size, best.how, best.blocks_per_sm));
            row line("zero_copy");
            line.label("memory", name_of(what)).label("gib", size / double(gib)).label("load", name_of(best.how));
            it.put(line.label("blocks_per_sm", best.blocks_per_sm), "GB/s", values);
        }
    }
}

// The link's two ceilings only, for a section that compares itself with them. Of managed memory alone: pinned memory
// and that of a NUMA node were read as fast on an H200 (within 1 %), and each takes 4 s.
inline void measure_link(session& it) {
    reader read(it);
    std::vector<loads> ways = working_loads(it);
    copy_engine(it, it.pick(gib, 4 * mib), it.pick(64 * mib, 2 * mib), 5);
    host_side memory(it, kind::managed, it.pick(gib, 4 * mib));
    if (memory.refusal.empty())
        read_all_ways(it, read, memory, kind::managed, ways, 3);
    else
        note(it, "unavailable", name_of(kind::managed), memory.refusal);
}

// Measurement 2: the time of N readers of one range over that of one reader. 1: the link carries the bytes once; N:
// once a reader.
inline void measure_amplification(session& it) {
    reader read(it);
    stopwatch watch;
    for (kind what : {kind::managed, kind::pinned, kind::plain}) {
        for (size_t size : {it.pick(mib, mib), it.pick(32 * mib, 2 * mib)}) {
            host_side memory(it, what, size);
            for (bool side_by_side : {true, false}) {
                double once = 0;
                for (unsigned readers : {1u, 2u, 4u, 8u, 16u, 32u}) {
                    if (it.late()) return;
                    // One slice a reader's block, so that the number of loads in flight grows with the readers only.
                    unsigned slices = std::max(1u, unsigned(it.sms * 8) / 32);
                    std::vector<double> values;
                    for (int i = -1; i < 7; i++) {
                        double ms = watch.ms(it.stream, [&] {
                            read_repeatedly<4><<<slices * readers, threads, 0, it.stream>>>(
                                reinterpret_cast<const uint4*>(memory.start), size / 16, readers, side_by_side,
                                read.result());
                            CHECK(cudaGetLastError());
                        });
                        if (i >= 0) values.push_back(ms);
                    }
                    if (readers == 1) once = median(values);
                    std::vector<double> over = values;
                    for (double& value : over) value = once > 0 ? value / once : 0;
                    row line("readers");
                    line.label("memory", name_of(what)).label("mib", size / double(mib)).label("readers", readers);
                    it.put(line.label("order", side_by_side ? "side by side" : "one after the other"), "x one reader",
                           over);
                    row bytes("readers_rate");
                    bytes.label("memory", name_of(what)).label("mib", size / double(mib)).label("readers", readers);
                    std::vector<double> rates;
                    for (double ms : values) rates.push_back(gb_per_s(size * readers, ms / 1e3));
                    it.put(bytes.label("order", side_by_side ? "side by side" : "one after the other"), "GB/s", rates);
                }
            }
        }
    }
}

// Every second of `experts`, in one launch: `slices` blocks an expert.
__global__ void __launch_bounds__(threads, 2) read_every_second(const char* start, size_t nbytes, unsigned* result) {
    const char* mine = start + blockIdx.y * 2 * nbytes;
    publish(read_share<4>(reinterpret_cast<const uint4*>(mine), nbytes / 16, blockIdx.x, gridDim.x), result);
}

// Experts side by side, every second one resident. The sizes are those of one rank of eight (GLM-5, DeepSeek-V3: 1.5
// to 3.5 MiB a tensor) and of a whole GLM-4.5-Air. Read before and after moves back and forth, which split the driver's
// blocks where experts end inside them.
inline void measure_alignment(session& it) {
    const size_t total = it.pick(gib, 16 * mib);
    for (size_t expert : {1536 * kib, 1792 * kib, 3 * mib, 3584 * kib, 5632 * kib}) {
        if (it.late()) return;
        const int experts = static_cast<int>(total / expert / 2 * 2);
        const size_t half = expert * (experts / 2);
        reader read(it);
        double before = double(free_vram());
        managed_range range(expert * experts, it.device);
        auto label = [&](row& line) -> row& { return line.label("expert_mib", expert / double(mib)); };
        auto move = [&](int parity, cudaMemLocation where) {
            double start = now();
            for (int e = parity; e < experts; e += 2) {
                advise(range.start + e * expert, expert, cudaMemAdviseSetPreferredLocation, where);
            }
            for (int e = parity; e < experts; e += 2) {
                prefetch(range.start + e * expert, expert, where, it.stream);
            }
            CHECK(cudaStreamSynchronize(it.stream));
            return gb_per_s(half, now() - start);
        };
        auto put_reads = [&](int parity, const char* state) {
            stopwatch watch;
            std::vector<double> values;
            for (int i = -1; i < 5; i++) {
                double ms = watch.ms(it.stream, [&] {
                    read_every_second<<<dim3(16, experts / 2), threads, 0, it.stream>>>(range.start + parity * expert,
                                                                                        expert, read.result());
                    CHECK(cudaGetLastError());
                });
                if (i >= 0) values.push_back(gb_per_s(half, ms / 1e3));
            }
            row line("aligned_read");
            it.put(label(line).label("experts", state), "GB/s", values);
        };
        move(1, on_host());
        move(0, on_device(it.device));
        fill_pattern(it, range.start, expert * experts);
        row taken("vram_over_residents");
        it.put(label(taken), "ratio", {(before - double(free_vram())) / half});
        put_reads(0, "resident");
        put_reads(1, "offloaded");
        std::vector<double> up, down;
        for (int i = 0; i < 5; i++) {
            down.push_back(move(0, on_host()));
            up.push_back(move(0, on_device(it.device)));
        }
        row to_device("aligned_move"), to_host("aligned_move");
        it.put(label(to_device).label("direction", "to_device"), "GB/s", up);
        it.put(label(to_host).label("direction", "to_host"), "GB/s", down);
        put_reads(0, "resident, after the moves");
        put_reads(1, "offloaded, after the moves");
        host_pages pages = look_at_host_pages(range.start + expert, expert / 4096 * 4096);
        row host("host_pages");
        label(host).label("memory", "managed").label("figure", "mean contiguous stretch of one offloaded expert");
        it.put(host, "KiB", {pages.mean_run_kib});
    }
}
