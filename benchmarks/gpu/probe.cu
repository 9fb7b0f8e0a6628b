// The probe: what CUDA unified memory does and costs on one GPU, measurement by measurement.
//
//     probe MEASUREMENT ROWS_FILE SECONDS [--small]
//
// appends one JSON line a figure, with every repeat, to ROWS_FILE, and starts nothing more once SECONDS are over. The
// first line says whether kernels compute here: over a stand-in driver they do not, and nothing is a measurement. Any
// failing CUDA call ends the program with status 1 and the call on stderr.

#include <cstring>

#include "probe/bandwidth.h"
#include "probe/churn.h"
#include "probe/common.h"
#include "probe/copies.h"
#include "probe/kernels.h"
#include "probe/moves.h"
#include "probe/numa.h"
#include "probe/populate.h"
#include "probe/pressure.h"
#include "probe/reach.h"
#include "probe/reader.h"
#include "probe/stall_tma.h"
#include "probe/sustained.h"

namespace {
struct measurement {
    const char* name;
    void (*run)(session&);
};

constexpr measurement measurements[] = {
    {"link", measure_link},
    {"bandwidth", measure_bandwidth},
    {"reach", measure_reach},
    {"amplification", measure_amplification},
    {"copies", measure_copies},
    {"prefetch", measure_prefetch},
    {"demotion", measure_demotion},
    {"stall", measure_stall},
    {"accounting", measure_accounting},
    {"eviction", measure_eviction},
    {"advice", measure_advice},
    {"host_memory", measure_host_memory},
    {"populate", measure_populate},
    {"residency", measure_residency},
    {"alignment", measure_alignment},
    {"swap", measure_swap},
    {"churn", measure_churn},
    {"stall_tma", measure_stall_tma},
    {"sustained", measure_sustained},
    {"numa", measure_numa},
};
}  // namespace

int main(int count, char** words) {
    bool small = count == 5 && !strcmp(words[4], "--small");
    if (count != 4 && !small) fail("usage: probe MEASUREMENT ROWS_FILE SECONDS [--small]");
    for (const measurement& each : measurements) {
        if (strcmp(each.name, words[1])) continue;
        session it;
        it.small = small;
        it.deadline = now() + atof(words[3]);
        it.rows = fopen(words[2], "a");
        if (!it.rows) fail(std::string("cannot write ") + words[2]);
        CHECK(cudaGetDevice(&it.device));
        CHECK(cudaDeviceGetAttribute(&it.sms, cudaDevAttrMultiProcessorCount, it.device));
        CHECK(cudaStreamCreateWithFlags(&it.stream, cudaStreamNonBlocking));
        it.computes = kernels_compute(it);
        row computes("computes");
        it.put(computes, "bool", {it.computes ? 1.0 : 0.0});
        each.run(it);
        bool late = it.late();
        row finished("finished");
        it.put(finished, "bool", {late ? 0.0 : 1.0});
        CHECK(cudaStreamDestroy(it.stream));
        return fclose(it.rows) == 0 ? 0 : 1;
    }
    fail(std::string("no measurement is called ") + words[1]);
}
