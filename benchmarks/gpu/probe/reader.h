// Launches of the reading kernels, their checksums, and which of them give the right answer here.
#pragma once

#include "bulk.h"
#include "common.h"
#include "kernels.h"
#include "memory.h"

// Tensor maps: Triton lets the L2 fetch 128 bytes at a time, DeepGEMM 256.
enum class loads { plain_1, plain_4, plain_8, cp_async, bulk, tma_128, tma_256 };

inline const char* name_of(loads it) {
    const char* const names[] = {"plain x1",
                                 "plain x4",
                                 "plain x8",
                                 "cp.async x8",
                                 "bulk 4 x 8 KiB",
                                 "TMA 4 x 8 KiB, L2 128 B",
                                 "TMA 4 x 8 KiB, L2 256 B"};
    return names[static_cast<int>(it)];
}

class reader {
  public:
    explicit reader(session& it) : session_(it), result_(4096) {}

    void launch(const char* start, size_t nbytes, loads how, int blocks_per_sm, cudaStream_t stream) {
        const uint4* from = reinterpret_cast<const uint4*>(start);
        size_t count = nbytes / 16;
        int blocks = session_.sms * blocks_per_sm;
        switch (how) {
            case loads::plain_1:
                read_plain<1><<<blocks, threads, 0, stream>>>(from, count, result());
                break;
            case loads::plain_4:
                read_plain<4><<<blocks, threads, 0, stream>>>(from, count, result());
                break;
            case loads::plain_8:
                read_plain<8><<<blocks, threads, 0, stream>>>(from, count, result());
                break;
            case loads::cp_async:
                read_cp_async<8><<<blocks, threads, 0, stream>>>(from, count, result());
                break;
            case loads::bulk:
                read_bulk<<<blocks, threads, 0, stream>>>(from, count, result());
                break;
            case loads::tma_128:
                launch_boxes(start, nbytes, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, blocks, stream);
                break;
            case loads::tma_256:
                launch_boxes(start, nbytes, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, blocks, stream);
                break;
        }
        CHECK(cudaGetLastError());
    }

    // Milliseconds of one read of the range, with the words checked against `expected` (0: not known).
    double ms(const char* start, size_t nbytes, loads how = loads::plain_4, int blocks_per_sm = 8,
              unsigned expected = 0) {
        clear();
        refusal_.clear();
        double elapsed =
            watch_.ms(session_.stream, [&] { launch(start, nbytes, how, blocks_per_sm, session_.stream); });
        seen_ = checksum();
        if (expected && !problem(expected).empty()) fail(std::string(name_of(how)) + ": " + problem(expected));
        return elapsed;
    }

    double gb(const char* start, size_t nbytes, loads how = loads::plain_4, int blocks_per_sm = 8,
              unsigned expected = 0) {
        return gb_per_s(nbytes, ms(start, nbytes, how, blocks_per_sm, expected) / 1e3);
    }

    // What was wrong with the last timed read, or nothing.
    std::string problem(unsigned expected) const {
        if (!refusal_.empty()) return refusal_;
        return session_.computes && seen_ != expected ? "read other bytes than were written" : "";
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
    void launch_boxes(const char* start, size_t nbytes, CUtensorMapL2promotion promotion, int blocks,
                      cudaStream_t stream) {
        tensor_map of(start, nbytes, promotion);
        refusal_ = of.refusal;
        if (refusal_.empty()) read_boxes<<<blocks, threads, 0, stream>>>(of.map, boxes_of(nbytes), result());
    }

    session& session_;
    plain_memory result_;
    stopwatch watch_;
    unsigned seen_ = 0;
    std::string refusal_;
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

// A way to read that is refused here, or reads other bytes.
inline void leave_out(session& it, loads how, const char* memory, const std::string& reason) {
    row line("load_left_out");
    it.put(line.label("load", name_of(how)).label("memory", memory).label("reason", reason), "", {});
}

// The ways to read that give the right answer on this machine. One that does not is left out, and the result file says
// so.
inline std::vector<loads> working_loads(session& it) {
    plain_memory memory(mib);
    reader read(it);
    fill_pattern(it, memory.start(), mib);
    std::vector<loads> right;
    for (loads how : {loads::plain_1, loads::plain_4, loads::plain_8, loads::cp_async, loads::bulk, loads::tma_128,
                      loads::tma_256}) {
        read.ms(memory.start(), mib, how);
        std::string problem = read.problem(expected_checksum(mib));
        if (problem.empty()) {
            right.push_back(how);
        } else {
            leave_out(it, how, "plain", problem);
        }
        row line("load_is_right");
        it.put(line.label("load", name_of(how)), "bool", {problem.empty() ? 1.0 : 0.0});
    }
    return right;
}
