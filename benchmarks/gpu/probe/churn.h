// Whether residents stay in VRAM through many re-selections on a full card: moved by experts' own bytes, whose edges
// split the driver's blocks, or by whole blocks.
#pragma once

#include <random>

#include "common.h"
#include "kernels.h"
#include "memory.h"
#include "moves.h"
#include "pressure.h"
#include "reader.h"

// The listed units of a range, in one launch: `gridDim.x` blocks a unit.
__global__ void __launch_bounds__(threads, 2)
    read_units(const char* start, const unsigned* units, size_t nbytes, unsigned* result) {
    const char* mine = start + units[blockIdx.y] * nbytes;
    publish(read_share<4>(reinterpret_cast<const uint4*>(mine), nbytes / 16, blockIdx.x, gridDim.x), result);
}

// The units of a range that move: experts of 1.5 or 1.75 MiB side by side, or the blocks of 2 MiB under such experts.
// Which expert a block serves makes no difference to the driver, so that one arm stands for both sizes.
class churned_range {
  public:
    churned_range(session& it, size_t total, size_t unit)
        : session_(it),
          unit_(unit),
          each_(static_cast<unsigned>(total / unit / 16)),
          range_(unit * each_ * 16, it.device),
          read_(it),
          list_(each_ * 16 * 4) {
        std::vector<unsigned> order(each_ * 16);
        for (unsigned i = 0; i < order.size(); i++) order[i] = i;
        std::shuffle(order.begin(), order.end(), random_);
        auto quarter = order.begin() + each_ * 4, half = order.begin() + each_ * 8;
        kept_.assign(order.begin(), quarter);
        resident_.assign(quarter, half);
        offloaded_.assign(half, order.end());
        range_.prefer(on_host());
        to_device(kept_);  // first: they were populated longest ago, which is what the driver evicts first
        to_device(resident_);
        to_host(offloaded_);
        fill_pattern(it, range_.start, range_.nbytes);
    }

    // Half of the residents that may go, for as many others. Demotions come first, as the product orders them.
    double swap_half() {
        std::shuffle(resident_.begin(), resident_.end(), random_);
        std::shuffle(offloaded_.begin(), offloaded_.end(), random_);
        const std::vector<unsigned> down(resident_.begin(), resident_.begin() + each_ * 2);
        const std::vector<unsigned> up(offloaded_.begin(), offloaded_.begin() + each_ * 2);
        std::copy(up.begin(), up.end(), resident_.begin());
        std::copy(down.begin(), down.end(), offloaded_.begin());
        return host_seconds([&] {
            to_host(down);
            to_device(up);
        });
    }

    std::vector<double> rates(const std::vector<unsigned>& units, int passes) {
        CHECK(cudaMemcpyAsync(list_.start(), units.data(), units.size() * 4, cudaMemcpyHostToDevice, session_.stream));
        CHECK(cudaStreamSynchronize(session_.stream));
        std::vector<double> found;
        for (int i = 0; i < passes; i++) {
            double ms = watch_.ms(session_.stream, [&] {
                read_units<<<dim3(16, static_cast<unsigned>(units.size())), threads, 0, session_.stream>>>(
                    range_.start, reinterpret_cast<const unsigned*>(list_.start()), unit_, read_.result());
                CHECK(cudaGetLastError());
            });
            found.push_back(gb_per_s(units.size() * unit_, ms / 1e3));
        }
        return found;
    }

    std::vector<const char*> kept_pages() const {
        std::vector<const char*> pages;
        for (unsigned unit : kept_) add_pages(pages, range_.start + unit * unit_, unit_, 64 * kib);
        return pages;
    }

    void check_bytes() {
        if (!session_.computes) return;
        read_.gb(range_.start, range_.nbytes, loads::plain_4, 8, expected_checksum(range_.nbytes));
    }

    size_t moved_bytes() const { return unit_ * each_ * 2; }
    const std::vector<unsigned>& kept() const { return kept_; }
    const std::vector<unsigned>& resident() const { return resident_; }
    const std::vector<unsigned>& offloaded() const { return offloaded_; }

  private:
    char* at(unsigned unit) const { return range_.start + unit * unit_; }
    void prefer(const std::vector<unsigned>& units, cudaMemLocation where) {
        for (unsigned unit : units) advise(at(unit), unit_, cudaMemAdviseSetPreferredLocation, where);
    }
    void bring(const std::vector<unsigned>& units, cudaMemLocation where) {
        for (unsigned unit : units) prefetch(at(unit), unit_, where, session_.stream);
        CHECK(cudaStreamSynchronize(session_.stream));
    }
    void to_device(const std::vector<unsigned>& units) {
        bring(units, on_device(session_.device));
        prefer(units, on_device(session_.device));
    }
    void to_host(const std::vector<unsigned>& units) {
        prefer(units, on_host());
        bring(units, on_host());
    }

    session& session_;
    size_t unit_;
    unsigned each_;  // a sixteenth of the units
    managed_range range_;
    reader read_;
    plain_memory list_;
    stopwatch watch_;
    std::mt19937 random_{11};
    std::vector<unsigned> kept_, resident_, offloaded_;
};

// Six re-selections on a full card, of an eighth of the experts each way. As many bytes are resident all the time, so
// whatever the kept residents lose, the driver has evicted. At most the residents, 1 GiB, can be evicted.
inline void measure_churn(session& it) {
    const size_t total = it.pick(2 * gib, 48 * mib);
    // A read over the link takes some two thresholds, with the TLB cold some more; a fault tens of microseconds.
    const unsigned far = 8 * learn_threshold(it, false).threshold;
    const struct {
        const char* moves;
        size_t unit;
    } arms[] = {{"1.5 MiB, by experts' own bytes", 1536 * kib},
                {"1.75 MiB, by experts' own bytes", 1792 * kib},
                {"by whole blocks of 2 MiB", block_bytes}};
    for (const auto& arm : arms) {
        if (it.late()) return;
        churned_range experts(it, total, arm.unit);
        two_looks look(it, experts.kept_pages());
        auto put = [&](const char* what, const char* unit, const std::vector<double>& values) {
            row line("churn");
            it.put(line.label("moves", arm.moves).label("figure", what), unit, values);
        };
        experts.rates(experts.kept(), 2);
        put("kept residents, before", "GB/s", experts.rates(experts.kept(), 4));
        {
            plain_pile plain;
            fill_card(it, plain, 256 * mib);
            put("free VRAM before", "MiB", {double(free_vram()) / mib});
            std::vector<double> took, rates, free_after;
            for (int round = 0; round < 6 && !it.late(); round++) {
                double seconds = experts.swap_half();
                took.push_back(seconds * 1e3);
                rates.push_back(gb_per_s(2 * experts.moved_bytes(), seconds));
                free_after.push_back(double(free_vram()) / mib);
            }
            put("one re-selection", "ms", took);
            put("one re-selection, both ways", "GB/s", rates);
            put("free VRAM after each re-selection", "MiB", free_after);
            two_looks::cycles seen = look.take();  // before any pass: a pass brings back what was evicted
            double back = 0;
            for (double cycles : seen.first) back += cycles > far;
            put("kept residents, pages that a first read brought back", "share", {back / seen.first.size()});
            put("kept residents, first read (0, 5, 50, 95, 100 %)", "cycles", quantiles(seen.first));
            put("kept residents, second read (likewise)", "cycles", quantiles(seen.second));
            put("kept residents, pass by pass", "GB/s", experts.rates(experts.kept(), 4));
            put("other residents, pass by pass", "GB/s", experts.rates(experts.resident(), 4));
            put("offloaded, pass by pass", "GB/s", experts.rates(experts.offloaded(), 2));
            put("kept residents, after all passes", "GB/s", experts.rates(experts.kept(), 2));
        }
        experts.check_bytes();
    }
}
