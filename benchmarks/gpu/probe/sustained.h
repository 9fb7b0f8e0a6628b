// What a graph suffers that reads experts which move all the time, by how much moves in one call.
#pragma once

#include <atomic>
#include <thread>

#include "common.h"
#include "memory.h"
#include "moves.h"
#include "reader.h"
#include "stall_tma.h"

// The value that a share of the others is below.
inline double quantile(std::vector<double> values, double share) {
    if (values.empty()) return 0;
    std::sort(values.begin(), values.end());
    return values[std::min(values.size() - 1, static_cast<size_t>(share * values.size()))];
}

// A helper thread promotes and demotes all of the experts, piece by piece, each waited for and in the product's order
// of calls, while the graph is replayed. Each piece is moved before the next one, so longer pieces have more blocks
// unmapped.
inline void measure_sustained(session& it) {
    const size_t moving = it.pick(128 * mib, 8 * mib), resident = it.pick(512 * mib, 4 * mib);
    const double seconds = it.pick(1500, 50) / 1e3;
    reader read(it);
    cudaStream_t mover = nullptr;
    CHECK(cudaStreamCreateWithFlags(&mover, cudaStreamNonBlocking));
    managed_range range(resident + moving, it.device);
    range.prefer(on_host());
    range.bring(on_host(), it.stream);
    promote(it, design::prefetch_first, range.start, resident, it.stream);
    fill_pattern(it, range.start, range.nbytes);
    const unsigned expected = it.computes ? expected_checksum(range.nbytes) : 0;
    char* const first = range.start + resident;
    for (loads how : {loads::plain_4, loads::tma_128}) {
        read.ms(range.start, range.nbytes, how);
        const std::string problem = read.problem(expected);
        if (!problem.empty()) {
            leave_out(it, how, "managed", problem);
            continue;
        }
        checked_graph graph(it, read, range, how);
        for (size_t piece : {size_t{0}, 2 * mib, it.pick(16 * mib, 4 * mib), moving}) {
            for (bool kept : {false, true}) {
                if (piece != 0 && kept) continue;  // without moves: all where they are, first in host RAM, then in VRAM
                if (it.late()) break;
                if (kept) promote(it, design::prefetch_first, first, moving, mover);
                CHECK(cudaStreamSynchronize(mover));
                std::atomic<bool> over{false};
                double moved = 0;
                std::thread helper([&] {
                    CHECK(cudaSetDevice(it.device));
                    for (bool promoting = true; piece != 0 && !over; promoting = !promoting) {
                        for (size_t at = 0; at < moving && !over; at += piece) {
                            (promoting ? promote : demote)(it, design::prefetch_first, first + at, piece, mover);
                            CHECK(cudaStreamSynchronize(mover));
                            moved += static_cast<double>(piece);
                        }
                    }
                });
                std::vector<double> times;
                double wrong = 0;
                const double began = now();
                while (now() - began < seconds) {
                    times.push_back(graph.replay());
                    if (it.computes && graph.seen() != expected) wrong++;
                }
                over = true;
                helper.join();
                const double took = now() - began;
                demote(it, design::prefetch_first, first, moving, mover);
                CHECK(cudaStreamSynchronize(mover));
                auto put = [&](const char* figure, const char* unit, double value) {
                    row line("sustained");
                    line.label("load", name_of(how)).label("piece_mib", piece / double(mib));
                    line.label("moves", piece != 0 ? "all the time" : kept ? "none, in VRAM" : "none, in host RAM");
                    it.put(line.label("figure", figure), unit, {value});
                };
                put("replay, p50", "ms", quantile(times, 0.5));
                put("replay, p99", "ms", quantile(times, 0.99));
                put("replay, slowest", "ms", quantile(times, 1));
                put("moved", "GB/s", moved / took / 1e9);
                put("replays", "replays", static_cast<double>(times.size()));
                put("replays that read other bytes", "replays", wrong);
            }
        }
    }
    CHECK(cudaStreamDestroy(mover));
}
