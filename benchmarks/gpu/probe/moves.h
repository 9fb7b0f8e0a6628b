// What it costs to move experts: prefetch, demotion, advice, and what a running graph suffers meanwhile.
#pragma once

#include <atomic>
#include <thread>

#include "bandwidth.h"
#include "common.h"
#include "kernels.h"
#include "memory.h"
#include "reader.h"
#include "stalls.h"

inline std::vector<piece> every(size_t nbytes, size_t step) {
    std::vector<piece> pieces;
    for (size_t at = 0; at + step <= nbytes; at += step) pieces.push_back({at, step});
    return pieces;
}

// Measurement 3. The calls go to a stream of their own; "busy": another stream runs kernels meanwhile; "queued": a
// kernel runs before them in their own stream.
inline void measure_prefetch(session& it) {
    const size_t total = it.pick(gib, 16 * mib);
    const long long spin_cycles = it.pick(100'000'000, 1000);  // about 50 ms
    cudaStream_t mover = nullptr, other = nullptr;
    CHECK(cudaStreamCreateWithFlags(&mover, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    managed_range range(total, it.device);
    range.prefer(on_host());
    range.bring(on_host(), mover);
    fill_pattern(it, range.start, total);
    for (size_t size : {2 * mib, 8 * mib, 16 * mib, 64 * mib}) {
        if (size > total) break;
        copy_engine(it, total, size, 5);
        std::vector<piece> pieces = every(total, size);
        for (const char* load : {"idle", "busy", "queued"}) {
            for (const char* how : {"single", "coalesced", "batch"}) {
                std::vector<double> rate[2], blocked[2];
                for (int i = 0; i < 5 && !it.late(); i++) {
                    for (bool to_device : {true, false}) {
                        cudaMemLocation where = to_device ? on_device(it.device) : on_host();
                        if (load[0] == 'b') spin<<<it.sms, threads, 0, other>>>(spin_cycles);
                        if (load[0] == 'q') spin<<<1, 32, 0, mover>>>(spin_cycles);
                        CHECK(cudaGetLastError());
                        double start = now();
                        if (how[0] == 's') {
                            for (const piece& p : pieces) prefetch(range.start + p.offset, p.nbytes, where, mover);
                        } else if (how[0] == 'c') {
                            prefetch(range.start, total, where, mover);
                        } else {
                            prefetch_batch(range.start, pieces, where, mover);
                        }
                        double issued = now();
                        CHECK(cudaStreamSynchronize(mover));
                        rate[to_device].push_back(gb_per_s(total, now() - start));
                        blocked[to_device].push_back((issued - start) * 1e3);
                        CHECK(cudaStreamSynchronize(other));
                    }
                }
                for (bool to_device : {true, false}) {
                    auto labelled = [&](const char* what) {
                        row line(what);
                        line.label("direction", to_device ? "to_device" : "to_host").label("calls", how);
                        return line.label("piece_mib", size / double(mib)).label("gpu", load);
                    };
                    row moved = labelled("prefetch"), held = labelled("prefetch_blocks_caller");
                    // Queued bytes wait for the kernel before them: only how long the caller is held is a measurement.
                    if (load[0] != 'q') it.put(moved, "GB/s", rate[to_device]);
                    it.put(held, "ms", blocked[to_device]);
                }
            }
        }
    }
    CHECK(cudaStreamDestroy(mover));
    CHECK(cudaStreamDestroy(other));
}

// The ways to hold residents that are compared.
enum class design { prefer_host, prefer_gpu, prefetch_first };

inline const char* name_of(design it) {
    const char* const names[] = {"prefer CPU for all, prefetch both ways", "prefer GPU for residents",
                                 "prefetch, then prefer GPU"};
    return names[static_cast<int>(it)];
}

inline void promote(session& it, design how, char* start, size_t nbytes, cudaStream_t stream) {
    if (how == design::prefer_gpu) advise(start, nbytes, cudaMemAdviseSetPreferredLocation, on_device(it.device));
    prefetch(start, nbytes, on_device(it.device), stream);
    if (how == design::prefetch_first) {
        CHECK(cudaStreamSynchronize(stream));
        advise(start, nbytes, cudaMemAdviseSetPreferredLocation, on_device(it.device));
    }
}

inline void demote(session& it, design how, char* start, size_t nbytes, cudaStream_t stream) {
    if (how == design::prefer_gpu || how == design::prefetch_first) {
        advise(start, nbytes, cudaMemAdviseSetPreferredLocation, on_host());
    }
    prefetch(start, nbytes, on_host(), stream);
}

// Measurement 4: each design's promotion and demotion of all experts, one after the other as the server would, and
// reads before and after, the first pass apart from the later ones.
inline void measure_demotion(session& it) {
    const size_t expert = it.pick(8 * mib, 2 * mib);
    const int experts = static_cast<int>(it.pick(64, 3));
    const size_t total = expert * experts;
    const unsigned expected = it.computes ? expected_checksum(total) : 0;
    reader read(it);
    for (design how : {design::prefer_host, design::prefer_gpu}) {
        managed_range range(total, it.device);
        range.prefer(on_host());
        range.bring(on_host(), it.stream);
        fill_pattern(it, range.start, total);
        std::vector<double> up, down, ratio, passes[2][2];
        std::vector<double> kept;
        for (int i = 0; i < 7 && !it.late(); i++) {
            for (bool promoting : {true, false}) {
                size_t before = free_vram();
                double seconds = host_seconds([&] {
                    for (int e = 0; e < experts; e++) {
                        (promoting ? promote : demote)(it, how, range.start + e * expert, expert, it.stream);
                    }
                    CHECK(cudaStreamSynchronize(it.stream));
                });
                (promoting ? up : down).push_back(seconds * 1e3);
                if (!promoting) kept.push_back((double(before) - double(free_vram())) / mib);
                for (int pass : {0, 1}) {
                    passes[promoting][pass].push_back(read.gb(range.start, total, loads::plain_4, 8, expected));
                }
            }
            ratio.push_back(up.back() > 0 ? down.back() / up.back() : 0);
        }
        auto put = [&](const char* what, const char* step, const char* unit, const std::vector<double>& values) {
            row line(what);
            line.label("design", name_of(how)).label("step", step).label("expert_mib", expert / double(mib));
            it.put(line.label("experts", experts), unit, values);
        };
        put("move", "promote", "ms", up);
        put("move", "demote", "ms", down);
        put("demote_over_promote", "demote", "ratio", ratio);
        put("vram_taken_by_demotion", "demote", "MiB", kept);
        put("read", "promoted, first pass", "GB/s", passes[1][0]);
        put("read", "promoted, second pass", "GB/s", passes[1][1]);
        put("read", "demoted, first pass", "GB/s", passes[0][0]);
        put("read", "demoted, second pass", "GB/s", passes[0][1]);
    }
}

// Measurement 5: a graph that reads resident experts and one offloaded one is replayed, one replay at a time, while an
// expert is promoted: from the thread that replays, or from another.
inline void measure_stall(session& it) {
    const size_t expert = it.pick(16 * mib, 2 * mib), resident = it.pick(512 * mib, 4 * mib);
    const int replays = static_cast<int>(it.pick(400, 12)), moment = replays / 4;
    reader read(it);
    cudaStream_t mover = nullptr;
    CHECK(cudaStreamCreateWithFlags(&mover, cudaStreamNonBlocking));
    for (design how : {design::prefer_host, design::prefer_gpu, design::prefetch_first}) {
        for (bool reads_it : {true, false}) {
            for (bool helper : {false, true}) {
                if (it.late()) break;
                managed_range range(resident + 2 * expert, it.device);
                range.prefer(on_host());
                range.bring(on_host(), it.stream);
                promote(it, how, range.start, resident, it.stream);
                CHECK(cudaStreamSynchronize(it.stream));
                char* moved = range.start + resident + (reads_it ? 0 : expert);
                cudaGraph_t graph = nullptr;
                cudaGraphExec_t executable = nullptr;
                CHECK(cudaStreamBeginCapture(it.stream, cudaStreamCaptureModeThreadLocal));
                read.launch(range.start, resident, loads::plain_4, 8, it.stream);
                read.launch(range.start + resident, expert, loads::plain_4, 8, it.stream);
                CHECK(cudaStreamEndCapture(it.stream, &graph));
                CHECK(cudaGraphInstantiate(&executable, graph, 0));
                std::vector<double> before, worst, lost, control, blocked, after;
                for (int repeat = 0; repeat < 5 && !it.late(); repeat++) {
                    std::vector<double> times;
                    double call_ms = 0;
                    int meanwhile = 0;
                    std::atomic<bool> called{false};
                    std::thread thread;
                    for (int i = 0; i < replays; i++) {
                        if (i == moment) {
                            auto work = [&] {
                                CHECK(cudaSetDevice(it.device));
                                call_ms = host_seconds([&] { promote(it, how, moved, expert, mover); }) * 1e3;
                                called = true;
                            };
                            if (helper)
                                thread = std::thread(work);
                            else
                                work();
                        }
                        if (i >= moment && (!called || cudaStreamQuery(mover) == cudaErrorNotReady)) meanwhile++;
                        // The wall clock: what the server's step suffers, with what the launch waits for.
                        times.push_back(host_seconds([&] {
                                            CHECK(cudaGraphLaunch(executable, it.stream));
                                            CHECK(cudaStreamSynchronize(it.stream));
                                        }) *
                                        1e3);
                    }
                    if (helper) thread.join();
                    CHECK(cudaStreamSynchronize(mover));
                    const stall seen = stall_of(times, moment, meanwhile);
                    before.push_back(seen.before);
                    after.push_back(seen.after);
                    worst.push_back(seen.slowest);
                    lost.push_back(seen.lost + (helper ? 0 : call_ms));
                    control.push_back(seen.control);
                    blocked.push_back(call_ms);
                    demote(it, how, moved, expert, mover);
                    CHECK(cudaStreamSynchronize(mover));
                }
                auto put = [&](const char* figure, const std::vector<double>& values) {
                    row line("stall");
                    line.label("design", name_of(how)).label("expert", reads_it ? "read by the graph" : "not read");
                    line.label("thread", helper ? "helper" : "scheduler").label("figure", figure);
                    it.put(line, "ms", values);
                };
                put("replay before", before);
                put("slowest replay", worst);
                put("time lost to one promotion", lost);
                put("time lost without one", control);
                put("promoting calls", blocked);
                put("replay after", after);
                CHECK(cudaGraphExecDestroy(executable));
                CHECK(cudaGraphDestroy(graph));
            }
        }
    }
    CHECK(cudaStreamDestroy(mover));
}

// Measurement 8: advice against the number of ranges, on pages in three states, and copies into unpopulated pages.
inline void measure_advice(session& it) {
    const size_t total = it.pick(gib, 8 * mib);
    for (const char* state : {"unpopulated", "on the host", "in VRAM"}) {
        for (size_t ranges : {1, 16, 256, 1024, 4096}) {
            size_t size = total / (2 * ranges) / (64 * kib) * (64 * kib);
            if (size == 0 || it.late()) break;
            std::vector<double> first, again, whole, fetch;
            for (int i = 0; i < 3; i++) {
                managed_range range(total, it.device);
                range.prefer(on_host());
                if (state[0] == 'o') range.bring(on_host(), it.stream);
                if (state[0] == 'i') range.bring(on_device(it.device), it.stream);
                auto each = [&](auto&& call) {
                    double seconds = host_seconds([&] {
                        for (size_t r = 0; r < ranges; r++) call(range.start + r * 2 * size);
                    });
                    return seconds * 1e6 / ranges;
                };
                auto to_gpu = [&](char* at) {
                    advise(at, size, cudaMemAdviseSetPreferredLocation, on_device(it.device));
                };
                auto to_host = [&](char* at) { advise(at, size, cudaMemAdviseSetPreferredLocation, on_host()); };
                first.push_back(each(to_gpu));
                again.push_back(each(to_host));
                whole.push_back(host_seconds([&] { range.prefer(on_device(it.device)); }) * 1e6);
                range.prefer(on_host());
                fetch.push_back(each([&](char* at) { prefetch(at, size, on_device(it.device), it.stream); }));
                CHECK(cudaStreamSynchronize(it.stream));
            }
            auto put = [&](const char* call, const std::vector<double>& values) {
                row line("advice");
                line.label("pages", state).label("ranges", ranges).label("range_kib", size / double(kib));
                it.put(line.label("call", call), "us a call", values);
            };
            put("prefer, first time", first);
            put("prefer, back", again);
            put("prefer, all at once", whole);
            put("prefetch", fetch);
        }
    }
    const size_t copied = it.pick(gib, 4 * mib);
    pinned_memory pinned(copied);
    fill_pattern(it, pinned.start(), copied);
    std::vector<char> pageable(copied, 1);
    for (bool populated : {false, true}) {
        for (const char* source : {"pinned", "pageable"}) {
            std::vector<double> rates, vram;
            for (int i = 0; i < 3 && !it.late(); i++) {
                managed_range range(copied, it.device);
                range.prefer(on_host());
                if (populated) range.bring(on_host(), it.stream);
                size_t before = free_vram();
                const char* from = source[1] == 'i' ? pinned.start() : pageable.data();
                double seconds = host_seconds([&] {
                    CHECK(cudaMemcpyAsync(range.start, from, copied, cudaMemcpyHostToDevice, it.stream));
                    CHECK(cudaStreamSynchronize(it.stream));
                });
                rates.push_back(gb_per_s(copied, seconds));
                vram.push_back((double(before) - double(free_vram())) / mib);
            }
            row rate("copy_into_managed"), taken("copy_into_managed");
            rate.label("source", source).label("pages", populated ? "populated" : "unpopulated");
            taken.label("source", source).label("pages", populated ? "populated" : "unpopulated");
            it.put(rate.label("figure", "rate"), "GB/s", rates);
            it.put(taken.label("figure", "VRAM taken"), "MiB", vram);
        }
    }
}
