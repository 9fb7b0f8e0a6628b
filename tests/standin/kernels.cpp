// The kernels of kernels/uvm_ops.cu, compiled for the host, for the stand-in to run at their launches.
#include "cuda_on_host.h"

#include "uvm_ops.cu"

#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <tuple>

namespace {
using bound_kernel = std::function<void()>;

// Copies the arguments' values, as a launch does.
template <typename... Parameters, size_t... I>
bound_kernel with_arguments(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
    std::tuple<Parameters...> values{*static_cast<Parameters*>(arguments[I])...};
    return [=] { std::apply(kernel, values); };
}

template <typename... Parameters>
bound_kernel with_arguments(void (*kernel)(Parameters...), void** arguments) {
    return with_arguments(kernel, arguments, std::index_sequence_for<Parameters...>());
}
}  // namespace

// A kernel with its arguments, or NULL for one that is not ours. Never freed: a graph may run it again.
extern "C" void* standin_bind(const char* name, void** arguments) {
    if (!strcmp(name, "uvm_count_routing_kernel"))
        return new bound_kernel(with_arguments(uvm_count_routing_kernel, arguments));
    if (!strcmp(name, "uvm_count_histogram_kernel"))
        return new bound_kernel(with_arguments(uvm_count_histogram_kernel, arguments));
    if (!strcmp(name, "uvm_begin_step_kernel"))
        return new bound_kernel(with_arguments(uvm_begin_step_kernel, arguments));
    if (!strcmp(name, "uvm_time_reads_kernel"))
        return new bound_kernel(with_arguments(uvm_time_reads_kernel, arguments));
    if (!strcmp(name, "uvm_copy_kernel")) return new bound_kernel(with_arguments(uvm_copy_kernel, arguments));
    if (!strcmp(name, "uvm_read_kernel")) return new bound_kernel(with_arguments(uvm_read_kernel, arguments));
    if (!strcmp(name, "uvm_bring_slots_kernel"))
        return new bound_kernel(with_arguments(uvm_bring_slots_kernel, arguments));
    if (!strcmp(name, "uvm_fill_slots_kernel"))
        return new bound_kernel(with_arguments(uvm_fill_slots_kernel, arguments));
    if (!strcmp(name, "uvm_choose_ahead_kernel"))
        return new bound_kernel(with_arguments(uvm_choose_ahead_kernel, arguments));
    if (!strcmp(name, "uvm_copy_ahead_kernel"))
        return new bound_kernel(with_arguments(uvm_copy_ahead_kernel, arguments));
    if (!strcmp(name, "uvm_resolve_slots_kernel"))
        return new bound_kernel(with_arguments(uvm_resolve_slots_kernel, arguments));
    return nullptr;
}

extern "C" void standin_run(void* kernel, unsigned blocks, unsigned threads) {
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> lock(one_at_a_time);
    blockDim = dim3(threads);
    gridDim = dim3(blocks);
    const char *first = getenv("STANDIN_FIRST_BLOCK"), *most = getenv("STANDIN_BLOCKS");
    for (unsigned block = 0; block < blocks && (!most || block < static_cast<unsigned>(atoi(most))); block++) {
        blockIdx = dim3((block + (first ? atoi(first) : 0)) % blocks);
        on_host::run_block([](void* bound) { (*static_cast<bound_kernel*>(bound))(); }, kernel, threads);
    }
}
