// Managed memory on each NUMA node of the machine: what is accepted, where the pages lie, how fast they are read.
#pragma once

#include <sys/syscall.h>

#include <fstream>
#include <map>

#include "common.h"
#include "kernels.h"
#include "memory.h"
#include "reader.h"

// The nodes that have memory. None where the machine does not say.
inline std::vector<int> memory_nodes() {
    std::vector<int> nodes;
    for (int node = 0; node < 1024; node++) {
        std::ifstream file("/sys/devices/system/node/node" + std::to_string(node) + "/meminfo");
        std::string word;
        double total = 0;
        while (file >> word && word != "MemTotal:") {
        }
        if (file >> total && total > 0) nodes.push_back(node);
    }
    return nodes;
}

// How many pages lie on each node, by one page of each 64 KiB. A negative node is the kernel's error for that page;
// {-1: all} where it refuses to say. The CPU reads each page first, so that it is in this process's page table.
inline std::map<int, size_t> nodes_of_pages(char* start, size_t nbytes) {
    std::vector<void*> pages;
    unsigned sum = 0;
    for (size_t at = 0; at < nbytes; at += 64 * kib) {
        sum += *reinterpret_cast<const volatile unsigned char*>(start + at);
        pages.push_back(start + at);
    }
    (void)sum;
    std::vector<int> where(pages.size(), -1);
    // Without nodes to move to, the call moves nothing and answers where each page is.
    bool told = syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, where.data(), 0) == 0;
    std::map<int, size_t> counts;
    for (int node : where) counts[told ? node : -1]++;
    return counts;
}

// Where the driver remembers that a range belongs, and where it was last sent.
struct attribute {
    const char* name;
    cudaMemRangeAttribute which;
};
constexpr attribute attributes[] = {
    {"preferred location, type", cudaMemRangeAttributePreferredLocationType},
    {"preferred location, id", cudaMemRangeAttributePreferredLocationId},
    {"last prefetch, type", cudaMemRangeAttributeLastPrefetchLocationType},
    {"last prefetch, id", cudaMemRangeAttributeLastPrefetchLocationId},
};

inline void measure_numa(session& it) {
    const size_t total = it.pick(gib, 4 * mib);
    const unsigned expected = it.computes ? expected_checksum(total) : 0;
    int nearest = -1;
    CHECK(cudaDeviceGetAttribute(&nearest, cudaDevAttrHostNumaId, it.device));
    row gpu("gpu_node");
    it.put(gpu, "node", {double(nearest)});
    reader read(it);
    struct place {
        std::string name;
        cudaMemLocation where;
    };
    std::vector<place> places = {{"host, no node named", on_host()}};
    for (int node : memory_nodes()) {
        places.push_back({"node " + std::to_string(node), {cudaMemLocationTypeHostNuma, node}});
    }
    for (const place& asked : places) {
        if (it.late()) return;
        managed_range range(total, it.device);
        auto labelled = [&](const char* what, const char* figure) {
            row line(what);
            return line.label("prefers", asked.name).label("figure", figure);
        };
        auto try_call = [&](const char* call, cudaError_t error) {
            cudaGetLastError();  // a refusal is a figure here, and no error of the next launch
            row line = labelled("numa", call);
            if (error != cudaSuccess) line.label("reason", cudaGetErrorName(error));
            it.put(line, "bool", {error == cudaSuccess ? 1.0 : 0.0});
        };
        try_call("advice accepted", cudaMemAdvise(range.start, total, cudaMemAdviseSetPreferredLocation, asked.where));
        try_call("prefetch accepted", cudaMemPrefetchAsync(range.start, total, asked.where, 0, it.stream));
        CHECK(cudaStreamSynchronize(it.stream));
        fill_pattern(it, range.start, total);
        for (const attribute& each : attributes) {
            int answer = 0;
            cudaError_t error = cudaMemRangeGetAttribute(&answer, sizeof answer, each.which, range.start, total);
            cudaGetLastError();
            row line = labelled("numa_attribute", each.name);
            if (error != cudaSuccess) line.label("reason", cudaGetErrorName(error));
            it.put(line, "", error == cudaSuccess ? std::vector<double>{double(answer)} : std::vector<double>{});
        }
        std::vector<double> rates;
        for (int i = -1; i < 5; i++) {
            double rate = read.gb(range.start, total, loads::plain_4, 8, expected);
            if (i >= 0) rates.push_back(rate);
        }
        row zero_copy = labelled("numa", "zero-copy");
        it.put(zero_copy, "GB/s", rates);
        // Last: the CPU's reads would bring pages to the host that were not there.
        for (auto [node, pages] : nodes_of_pages(range.start, total)) {
            row line("numa_pages");
            line.label("prefers", asked.name).label("node", node);
            it.put(line, "share", {double(pages) / (total / (64 * kib))});
        }
    }
}
