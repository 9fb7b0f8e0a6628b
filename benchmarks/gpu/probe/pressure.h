// What memory moves cost in VRAM and host RAM, what evicts residents, and how to notice.
#pragma once

#include <cstring>
#include <fstream>
#include <memory>
#include <random>

#include "bandwidth.h"
#include "common.h"
#include "kernels.h"
#include "memory.h"
#include "moves.h"
#include "reader.h"

// Measurement 6: how the free VRAM that the driver reports follows populating, promoting and demoting.
inline void measure_accounting(session& it) {
    const size_t total = it.pick(4 * gib, 8 * mib), step = it.pick(16 * mib, mib);
    for (int repeat = 0; repeat < 3 && !it.late(); repeat++) {
        double start = double(free_vram());
        auto put = [&](const char* what, double expected) {
            row line("vram_taken");
            line.label("after", what).label("repeat", repeat).label("expected_mib", expected / mib);
            it.put(line, "MiB", {(start - double(free_vram())) / mib});
        };
        {
            managed_range range(total, it.device);
            put("allocate", 0);
            range.prefer(on_host());
            put("advise", 0);
            prefetch(range.start + total / 2, total / 2, on_host(), it.stream);
            CHECK(cudaStreamSynchronize(it.stream));
            put("populate half on the host", 0);
            std::vector<double> steps;
            for (size_t at = 0; at < total / 8; at += step) {
                prefetch(range.start + at, step, on_device(it.device), it.stream);
                CHECK(cudaStreamSynchronize(it.stream));
                steps.push_back((start - double(free_vram())) / mib);
            }
            row each("vram_taken_by_steps");
            it.put(each.label("repeat", repeat).label("step_mib", step / double(mib)), "MiB", steps);
            prefetch(range.start, total / 2, on_device(it.device), it.stream);
            CHECK(cudaStreamSynchronize(it.stream));
            put("populate half in VRAM", total / 2);
            prefetch(range.start + total / 2, total / 4, on_device(it.device), it.stream);
            CHECK(cudaStreamSynchronize(it.stream));
            put("promote a quarter", total / 4 * 3);
            prefetch(range.start, total / 2, on_host(), it.stream);
            CHECK(cudaStreamSynchronize(it.stream));
            put("demote half", total / 4 * 3);  // a demoted block keeps its VRAM until something needs it
            prefetch(range.start, total / 2, on_device(it.device), it.stream);
            CHECK(cudaStreamSynchronize(it.stream));
            put("promote it again", total / 4 * 3);
        }
        put("free", 0);
    }
}

// The cycles of one read of each 2 MiB block, as the residency check takes them.
class residency_check {
  public:
    residency_check(session& it, const char* start, size_t nbytes)
        : session_(it), start_(start), blocks_(nbytes / block_bytes), cycles_(blocks_ * 4) {}

    std::vector<unsigned> cycles() {
        CHECK(cudaMemsetAsync(cycles_.start(), 0, blocks_ * 4, session_.stream));
        offset_ = (offset_ + 4096) % block_bytes;  // another cache line each time
        time_reads<<<session_.sms, 1, 0, session_.stream>>>(start_, blocks_, block_bytes, offset_,
                                                            reinterpret_cast<unsigned*>(cycles_.start()));
        CHECK(cudaGetLastError());
        std::vector<unsigned> seen(blocks_);
        CHECK(cudaMemcpyAsync(seen.data(), cycles_.start(), blocks_ * 4, cudaMemcpyDeviceToHost, session_.stream));
        CHECK(cudaStreamSynchronize(session_.stream));
        return seen;
    }

    size_t away(unsigned threshold) {
        size_t count = 0;
        // The first read of a block after an allocation misses the TLB, and takes as long as one over the link.
        cycles();
        for (unsigned each : cycles()) count += each > threshold;
        return count;
    }
    size_t blocks() const { return blocks_; }

  private:
    session& session_;
    const char* start_;
    size_t blocks_, offset_ = 0;
    plain_memory cycles_;
};

// Two reads of each address, in one launch.
class two_looks {
  public:
    two_looks(session& it, const std::vector<const char*>& at)
        : session_(it), count_(at.size()), at_(count_ * sizeof at[0]), cycles_(count_ * 8) {
        CHECK(cudaMemcpyAsync(at_.start(), at.data(), count_ * sizeof at[0], cudaMemcpyHostToDevice, it.stream));
        CHECK(cudaMemsetAsync(cycles_.start(), 0, count_ * 8, it.stream));
        CHECK(cudaStreamSynchronize(it.stream));
    }

    struct cycles {
        std::vector<double> first, second;
    };
    cycles take() {
        unsigned* all = reinterpret_cast<unsigned*>(cycles_.start());
        time_two_reads<<<session_.sms, 1, 0, session_.stream>>>(reinterpret_cast<const char* const*>(at_.start()),
                                                                count_, all, all + count_);
        CHECK(cudaGetLastError());
        std::vector<unsigned> seen(count_ * 2);
        CHECK(cudaMemcpyAsync(seen.data(), all, count_ * 8, cudaMemcpyDeviceToHost, session_.stream));
        CHECK(cudaStreamSynchronize(session_.stream));
        return {{seen.begin(), seen.begin() + count_}, {seen.begin() + count_, seen.end()}};
    }

  private:
    session& session_;
    size_t count_;
    plain_memory at_, cycles_;
};

// The start of every page of so many bytes.
inline void add_pages(std::vector<const char*>& pages, const char* start, size_t nbytes, size_t page_bytes) {
    for (size_t at = 0; at < nbytes; at += page_bytes) pages.push_back(start + at);
}

inline std::vector<double> quantiles(std::vector<double> values) {
    if (values.empty()) return {};
    std::sort(values.begin(), values.end());
    std::vector<double> picked;
    for (double q : {0.0, 0.05, 0.5, 0.95, 1.0}) picked.push_back(values[size_t(q * (values.size() - 1))]);
    return picked;
}

struct separation {
    unsigned threshold;
    double right;
};

// Half of the blocks resident, chosen at random: is the latency of one read enough to tell them apart?
inline separation learn_threshold(session& it, bool report) {
    const size_t total = it.pick(2 * gib, 16 * mib), blocks = total / block_bytes;
    managed_range range(total, it.device);
    range.prefer(on_host());
    range.bring(on_host(), it.stream);
    residency_check watch(it, range.start, total);
    std::mt19937 random(7);
    std::vector<double> right, cost, all_near, all_far;
    unsigned threshold = 0;
    for (int repeat = 0; repeat < 5; repeat++) {
        std::vector<bool> resident(blocks);
        for (size_t b = 0; b < blocks; b++) {
            resident[b] = random() % 2;
            prefetch(range.start + b * block_bytes, block_bytes, resident[b] ? on_device(it.device) : on_host(),
                     it.stream);
        }
        CHECK(cudaStreamSynchronize(it.stream));
        watch.cycles();
        std::vector<unsigned> seen;
        cost.push_back(host_seconds([&] { seen = watch.cycles(); }) * 1e6);
        std::vector<double> near, far;
        for (size_t b = 0; b < blocks; b++) (resident[b] ? near : far).push_back(seen[b]);
        // Geometric mean of the two medians, learnt from the first placement and judged on the others.
        if (repeat == 0) threshold = static_cast<unsigned>(__builtin_sqrt(median(near) * median(far)));
        size_t hits = 0;
        for (size_t b = 0; b < blocks; b++) hits += (seen[b] > threshold) != resident[b];
        if (repeat > 0) right.push_back(double(hits) / blocks);
        all_near.insert(all_near.end(), near.begin(), near.end());
        all_far.insert(all_far.end(), far.begin(), far.end());
    }
    if (report) {
        row a("read_latency"), b("read_latency"), c("residency_check"), d("residency_check");
        it.put(a.label("blocks", "resident").label("quantiles", "0, 5, 50, 95, 100 %"), "cycles", quantiles(all_near));
        it.put(b.label("blocks", "offloaded").label("quantiles", "0, 5, 50, 95, 100 %"), "cycles", quantiles(all_far));
        it.put(c.label("figure", "told right").label("blocks", blocks), "share", right);
        it.put(d.label("figure", "one check").label("blocks", blocks), "us", cost);
    }
    return {threshold, median(right)};
}

inline void measure_residency(session& it) { learn_threshold(it, true); }

// Plain allocations, freed together.
class plain_pile {
  public:
    plain_pile() = default;
    ~plain_pile() {
        for (void* start : starts_) CHECK(cudaFree(start));
    }
    plain_pile(const plain_pile&) = delete;
    plain_pile& operator=(const plain_pile&) = delete;

    // False if the card is full.
    bool take(size_t nbytes) {
        void* start = nullptr;
        cudaError_t error = cudaMalloc(&start, nbytes);
        if (error == cudaErrorMemoryAllocation) {
            cudaGetLastError();  // full: no error of the next launch
            return false;
        }
        CHECK(error);
        starts_.push_back(start);
        taken += nbytes;
        return true;
    }

    size_t taken = 0;

  private:
    std::vector<void*> starts_;
};

// Fills the card up to `leave` bytes.
inline void fill_card(session& it, plain_pile& plain, size_t leave) {
    while (free_vram() > 2 * gib && !it.late() && plain.take(gib)) {
    }
    while (free_vram() > leave && !it.late() && plain.take(64 * mib)) {
    }
}

// Every block's cycles, in the blocks' order: what tells a resident from one that was evicted is read off these.
inline void put_look(session& it, design how, const two_looks::cycles& all, size_t residents, size_t known) {
    const struct {
        const char* name;
        size_t first, count;
    } memories[] = {
        {"residents", 0, residents}, {"prefers the host", residents, known}, {"plain VRAM", residents + known, known}};
    for (const auto& memory : memories) {
        for (const auto& [name, cycles] : {std::pair{"first", &all.first}, std::pair{"second", &all.second}}) {
            row line("look");
            line.label("design", name_of(how)).label("memory", memory.name).label("read", name);
            auto from = cycles->begin() + memory.first;
            it.put(line, "cycles", {from, from + memory.count});
        }
    }
}

// Measurement 7: residents of two designs, and plain allocations that grow until they evict. The residents are small
// beside the card, and what is evicted is bounded.
inline void measure_eviction(session& it) {
    const size_t residents = it.pick(gib, 16 * mib), coarse = it.pick(gib, gib), fine = 64 * mib;
    const size_t leave = it.pick(4 * gib, 4 * gib), evict_at_most = residents / 4;
    const unsigned threshold = learn_threshold(it, false).threshold;
    reader read(it);
    // Beside the residents, the look reads memory whose place is known.
    const size_t known = it.pick(64 * mib, 4 * mib);
    host_side offloaded(it, kind::managed, known), vram(it, kind::plain, known);
    size_t plain_at_eviction = 0;
    for (design how : {design::prefer_host, design::prefer_gpu}) {
        managed_range range(residents, it.device);
        range.prefer(on_host());
        promote(it, how, range.start, residents, it.stream);
        CHECK(cudaStreamSynchronize(it.stream));
        fill_pattern(it, range.start, residents);
        residency_check watch(it, range.start, residents);
        std::vector<const char*> pages;
        add_pages(pages, range.start, residents, block_bytes);
        add_pages(pages, offloaded.start, known, block_bytes);
        add_pages(pages, vram.start, known, block_bytes);
        two_looks look(it, pages);
        auto put = [&](const char* what, const char* unit, const std::vector<double>& values) {
            row line("eviction");
            it.put(line.label("design", name_of(how)).label("figure", what), unit, values);
        };
        auto passes = [&](int count) {
            std::vector<double> rates;
            for (int i = 0; i < count; i++) rates.push_back(read.gb(range.start, residents));
            return rates;
        };
        passes(2);
        put("read, before", "GB/s", passes(5));
        auto plain = std::make_unique<plain_pile>();
        size_t free_at_first = 0, away = 0;
        while (free_vram() > leave && !it.late() && plain->take(coarse)) {
        }
        if (how == design::prefer_host) {
            while (away * block_bytes < evict_at_most && !it.late()) {
                size_t before = free_vram();
                if (!plain->take(fine)) break;
                away = watch.away(threshold);
                if (away && !free_at_first) {
                    free_at_first = before;
                    put("free VRAM before the allocation that evicted first", "MiB", {double(before) / mib});
                }
            }
            plain_at_eviction = plain->taken;
            put("residents evicted, by the latency check", "MiB", {double(away * block_bytes) / mib});
        } else {
            // A latency check would bring evicted pages back here: the same plain bytes as before, and no look.
            while (plain->taken < plain_at_eviction && !it.late() && plain->take(fine)) {
            }
        }
        put("plain allocations", "MiB", {double(plain->taken) / mib});
        put("free VRAM under pressure", "MiB", {double(free_vram()) / mib});
        put("read, under pressure, pass by pass", "GB/s", passes(4));
        put_look(it, how, look.take(), residents / block_bytes, known / block_bytes);
        plain.reset();
        put("read, pressure gone, pass by pass", "GB/s", passes(4));
        double cure = host_seconds([&] {
            promote(it, how, range.start, residents, it.stream);
            CHECK(cudaStreamSynchronize(it.stream));
        });
        put("prefetching all residents again", "ms", {cure * 1e3});
        put("read, after prefetching again", "GB/s", passes(4));
    }
}

// A re-selection on a full card: every second resident is demoted, as many others are promoted, and little more VRAM is
// free than the driver's batch. Does the driver reuse the demoted experts' VRAM, or evict residents? Experts of whole
// blocks, and experts that share blocks.
inline void measure_swap(session& it) {
    const size_t total = it.pick(2 * gib, 32 * mib), leave = 256 * mib;
    for (size_t expert : {8 * mib, 1536 * kib}) {
        const unsigned experts = static_cast<unsigned>(total / expert / 4 * 4), half = experts / 2;
        managed_range range(expert * experts, it.device);
        reader read(it);
        auto put = [&](const char* what, const char* unit, const std::vector<double>& values) {
            row line("swap");
            it.put(line.label("expert_mib", expert / double(mib)).label("figure", what), unit, values);
        };
        auto passes = [&](unsigned first) {  // of every second expert from there, half of a half
            stopwatch watch;
            std::vector<double> rates;
            for (int i = 0; i < 4; i++) {
                double ms = watch.ms(it.stream, [&] {
                    read_every_second<<<dim3(16, half / 2), threads, 0, it.stream>>>(range.start + first * expert,
                                                                                     expert, read.result());
                    CHECK(cudaGetLastError());
                });
                rates.push_back(gb_per_s(expert * (half / 2), ms / 1e3));
            }
            return rates;
        };
        range.prefer(on_host());
        promote(it, design::prefer_gpu, range.start, expert * half, it.stream);
        prefetch(range.start + expert * half, expert * half, on_host(), it.stream);
        CHECK(cudaStreamSynchronize(it.stream));
        fill_pattern(it, range.start, expert * experts);
        put("kept residents, before", "GB/s", passes(0));
        {
            plain_pile plain;
            fill_card(it, plain, leave);
            put("free VRAM before", "MiB", {double(free_vram()) / mib});
            double seconds = host_seconds([&] {
                for (unsigned e = 1; e < half; e += 2) {
                    demote(it, design::prefer_gpu, range.start + e * expert, expert, it.stream);
                }
                for (unsigned e = half + 1; e < experts; e += 2) {
                    promote(it, design::prefer_gpu, range.start + e * expert, expert, it.stream);
                }
                CHECK(cudaStreamSynchronize(it.stream));
            });
            put("the re-selection", "ms", {seconds * 1e3});
            put("free VRAM after", "MiB", {double(free_vram()) / mib});
            put("kept residents, pass by pass", "GB/s", passes(0));
            put("promoted, pass by pass", "GB/s", passes(half + 1));
            put("demoted, pass by pass", "GB/s", passes(1));
        }
        if (!it.computes) continue;
        read.gb(range.start, expert * experts, loads::plain_4, 8, expected_checksum(expert * experts));
    }
}

// ---- host memory ----

inline double status_kib(const char* path, const char* key) {
    std::ifstream file(path);
    std::string word;
    while (file >> word) {
        double value;
        if (word == key && file >> value) return value;
    }
    return -1;
}

inline double cgroup_bytes() {
    for (const char* path : {"/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes"}) {
        std::ifstream file(path);
        double value;
        if (file >> value) return value;
    }
    return -1;
}

// Measurement 9: what this process, its cgroup and the machine say about host memory along an expert's life; -1: the
// machine does not say.
inline void measure_host_memory(session& it) {
    const size_t total = it.pick(4 * gib, 8 * mib);
    for (bool host_first : {true, false}) {
        double available = status_kib("/proc/meminfo", "MemAvailable:");
        double rss = status_kib("/proc/self/status", "VmRSS:");
        double group = cgroup_bytes();
        auto put = [&](const char* after) {
            auto one = [&](const char* figure, double value) {
                row line("host_memory");
                line.label("flow",
                           host_first ? "written on the host, then promoted" : "prefetched to VRAM before written");
                it.put(line.label("after", after).label("figure", figure), "MiB", {value});
            };
            one("taken, by MemAvailable", (available - status_kib("/proc/meminfo", "MemAvailable:")) / 1024);
            one("resident set grew", (status_kib("/proc/self/status", "VmRSS:") - rss) / 1024);
            one("cgroup grew", group < 0 ? -1 : (cgroup_bytes() - group) / mib);
            one("locked", status_kib("/proc/self/status", "VmLck:") / 1024);
        };
        {
            managed_range range(total, it.device);
            range.prefer(on_host());
            put("allocate");
            range.bring(host_first ? on_host() : on_device(it.device), it.stream);
            put("prefetch");
            fill_pattern(it, range.start, total);
            put("write by the GPU");
            if (host_first) {
                range.bring(on_device(it.device), it.stream);
                put("promote");
            }
            range.bring(on_host(), it.stream);
            put("demote");
            range.bring(on_device(it.device), it.stream);
            put("promote again");
        }
        put("free");
    }
}
