// What a move costs a graph that is replayed meanwhile, one replay after the other.
#pragma once

#include <algorithm>
#include <vector>

#include "common.h"

// Milliseconds, but for `meanwhile`.
struct stall {
    double before;   // a replay before the move, the median
    double slowest;  // of the replays from the move on
    double after;    // a replay once it is over, the median
    double lost;     // by the replays that began while it was under way, against the slower of `before` and `after`
    double control;  // the same of as many replays before it
    int meanwhile;   // the replays that began while it was under way
};

// `times` are those of all replays: `moment` before the move, then `meanwhile` beside it, then the others. What a
// replay gains counts as well as what it loses, so that noise alone has no sum. A replay that reads the expert over the
// link takes longer than one that reads it in VRAM, before a promotion and after a demotion: nothing is lost up to
// that.
inline stall stall_of(const std::vector<double>& times, int moment, int meanwhile) {
    const int half = moment / 2, late = std::max(1, static_cast<int>(times.size()) / 4);
    stall it = {};
    it.before = median({times.begin() + 1, times.begin() + half});
    it.after = median({times.end() - late, times.end()});
    it.slowest = *std::max_element(times.begin() + moment, times.end());
    it.meanwhile = meanwhile;
    // The replay during which it ended began beside it, or is the first after a call that held this thread.
    const int window = std::min(std::max(1, meanwhile), static_cast<int>(times.size()) - moment);
    for (int i = 0; i < window; i++) it.lost += times[moment + i] - std::max(it.before, it.after);
    const int controls = std::min(window, half);
    for (int i = 0; i < controls; i++) it.control += times[moment - 1 - i] - it.before;
    it.control *= static_cast<double>(window) / controls;
    return it;
}
