// What a running graph reads, and how long it takes, while the expert that it reads by bulk copies or through tensor
// maps moves.
#pragma once

#include <atomic>
#include <thread>

#include "common.h"
#include "kernels.h"
#include "memory.h"
#include "moves.h"
#include "reader.h"
#include "stalls.h"

// A graph that reads a range, and leaves the checksum in host memory.
class checked_graph {
  public:
    checked_graph(session& it, reader& read, const managed_range& range, loads how) : stream_(it.stream), seen_(4096) {
        cudaGraph_t graph = nullptr;
        CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
        read.clear();
        read.launch(range.start, range.nbytes, how, 8, stream_);
        CHECK(cudaMemcpyAsync(seen_.start(), read.result(), 4, cudaMemcpyDeviceToHost, stream_));
        CHECK(cudaStreamEndCapture(stream_, &graph));
        CHECK(cudaGraphInstantiate(&executable_, graph, 0));
        CHECK(cudaGraphDestroy(graph));
    }
    ~checked_graph() { CHECK(cudaGraphExecDestroy(executable_)); }
    checked_graph(const checked_graph&) = delete;
    checked_graph& operator=(const checked_graph&) = delete;

    // Milliseconds on the wall clock: what a server's step suffers, with what the launch waits for.
    double replay() {
        return host_seconds([&] {
                   CHECK(cudaGraphLaunch(executable_, stream_));
                   CHECK(cudaStreamSynchronize(stream_));
               }) *
               1e3;
    }
    unsigned seen() const { return *reinterpret_cast<const volatile unsigned*>(seen_.start()); }

  private:
    cudaStream_t stream_;
    cudaGraphExec_t executable_ = nullptr;
    pinned_memory seen_;
};

// Between any two of these, every line, page and box has another XOR. Under 1 and 2 most boxes have the same.
constexpr unsigned seeds[] = {0x2265b1f5, 0x91b7584a, 0xd8f16adf, 0xcd613e30};

// What the moves of one expert did to the replays around them.
struct moves_seen {
    std::vector<double> before, slowest, lost, control, move, beside, after;
    double replays = 0, wrong = 0;
};

// One move by a helper thread while the graph is replayed, in the product's order of calls.
inline void replay_around_move(session& it, checked_graph& graph, bool promoting, char* expert, size_t nbytes,
                               cudaStream_t mover, unsigned expected, moves_seen& all) {
    const int replays = 32, moment = replays / 4;
    std::vector<double> times;
    std::atomic<bool> moved{false};
    double move_ms = 0;
    int beside = 0;
    std::thread helper;
    for (int i = 0; i < replays; i++) {
        if (i == moment) {
            helper = std::thread([&] {
                CHECK(cudaSetDevice(it.device));
                move_ms = host_seconds([&] {
                              (promoting ? promote : demote)(it, design::prefetch_first, expert, nbytes, mover);
                              CHECK(cudaStreamSynchronize(mover));
                          }) *
                          1e3;
                moved = true;
            });
        }
        if (i >= moment && !moved) beside++;
        times.push_back(graph.replay());
        all.replays++;
        if (it.computes && graph.seen() != expected) all.wrong++;
    }
    helper.join();
    const stall seen = stall_of(times, moment, beside);
    all.before.push_back(seen.before);
    all.after.push_back(seen.after);
    all.slowest.push_back(seen.slowest);
    all.lost.push_back(seen.lost);
    all.control.push_back(seen.control);
    all.move.push_back(move_ms);
    all.beside.push_back(beside);
}

// Measurement 5 for the kernels of the default path: are the bytes right that they read of pages on their way? Before
// each move the expert is written anew where it is, so that a page that was left behind shows. A fault that ends the
// context ends this part with the CUDA error, after the rows of the arms before it.
inline void measure_stall_tma(session& it) {
    const size_t expert = it.pick(16 * mib, 2 * mib), resident = it.pick(512 * mib, 4 * mib);
    const int moves = static_cast<int>(it.pick(50, 2));
    const double enough_wrong = 20;  // a copy that never lands takes seconds
    reader read(it);
    cudaStream_t mover = nullptr;
    CHECK(cudaStreamCreateWithFlags(&mover, cudaStreamNonBlocking));
    managed_range range(resident + expert, it.device);
    char* moved = range.start + resident;
    range.prefer(on_host());
    range.bring(on_host(), it.stream);
    promote(it, design::prefetch_first, range.start, resident, it.stream);
    fill_pattern(it, range.start, resident);
    std::vector<unsigned> expected;
    for (unsigned seed : seeds) {
        expected.push_back(it.computes ? expected_checksum(resident) ^ expected_checksum(expert, seed) : 0);
    }
    for (loads how : {loads::plain_4, loads::bulk, loads::tma_128, loads::tma_256}) {
        fill_pattern(it, moved, expert, seeds[3]);
        read.ms(range.start, range.nbytes, how);
        std::string problem = read.problem(expected[3]);
        if (!problem.empty()) {
            leave_out(it, how, "managed", problem);
            continue;
        }
        checked_graph graph(it, read, range, how);
        moves_seen seen[2];
        for (int i = 0; i < 2 * moves && !it.late(); i++) {
            const bool promoting = i % 2 == 0;
            fill_pattern(it, moved, expert, seeds[i % 4]);
            replay_around_move(it, graph, promoting, moved, expert, mover, expected[i % 4], seen[promoting]);
            if (seen[promoting].wrong >= enough_wrong) break;
        }
        demote(it, design::prefetch_first, moved, expert, mover);
        CHECK(cudaStreamSynchronize(mover));
        for (bool promoting : {true, false}) {
            const moves_seen& all = seen[promoting];
            if (all.replays == 0) continue;
            auto put = [&](const char* figure, const char* unit, const std::vector<double>& values) {
                row line("stall_tma");
                line.label("load", name_of(how)).label("move", promoting ? "promotion" : "demotion");
                it.put(line.label("figure", figure), unit, values);
            };
            put("replay before", "ms", all.before);
            put("slowest replay", "ms", all.slowest);
            put("time lost to one move", "ms", all.lost);
            put("time lost without a move", "ms", all.control);
            put("the move", "ms", all.move);
            put("replay after", "ms", all.after);
            put("replays begun beside one move", "replays", all.beside);
            put("replays", "replays", {all.replays});
            put("replays that read other bytes", "replays", {all.wrong});
        }
    }
    CHECK(cudaStreamDestroy(mover));
}
