// Lets a host compiler compile kernels/uvm_ops.cu and run its kernels: one fiber a CUDA thread, switched at barriers.
// Threads of a block run one after the other from barrier to barrier, so a missing __syncthreads shows as a wrong
// result.
#pragma once

#include <cuda_runtime.h>
#include <ucontext.h>

#include <vector>

#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)

inline dim3 blockIdx, blockDim, gridDim;
inline uint3 threadIdx;

namespace on_host {
inline ucontext_t scheduler;
inline std::vector<ucontext_t> fibers;
inline unsigned running;
inline std::vector<char> done;

inline void run_block(void (*body)(void*), void* state, unsigned threads) {
    static void (*current_body)(void*);
    static void* current_state;
    constexpr size_t stack_bytes = 32 << 10;
    static std::vector<char> stacks;
    current_body = body;
    current_state = state;
    stacks.resize(threads * stack_bytes);
    fibers.resize(threads);
    done.assign(threads, 0);
    for (unsigned i = 0; i < threads; i++) {
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = stacks.data() + i * stack_bytes;
        fibers[i].uc_stack.ss_size = stack_bytes;
        fibers[i].uc_link = &scheduler;
        makecontext(
            &fibers[i],
            +[] {
                current_body(current_state);
                done[running] = 1;
            },
            0);
    }
    for (bool again = true; again;) {
        again = false;
        for (unsigned i = 0; i < threads; i++) {
            if (done[i]) continue;
            running = i;
            threadIdx = {i, 0, 0};
            swapcontext(&scheduler, &fibers[i]);
            again |= !done[i];
        }
    }
}
}  // namespace on_host

inline void __syncthreads() { swapcontext(&on_host::fibers[on_host::running], &on_host::scheduler); }

inline int __syncthreads_or(int predicate) {
    static int any;
    any |= predicate != 0;
    __syncthreads();
    const int result = any;
    __syncthreads();
    any = 0;
    __syncthreads();
    return result;
}

inline void __threadfence() {}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

template <typename T>
T atomicAdd(T* address, T value) {
    T before = *address;
    *address += value;
    return before;
}

template <typename T>
T atomicMin(T* address, T value) {
    T before = *address;
    if (value < before) *address = value;
    return before;
}

// A clock that only reads advance: by what the GPU would take where the page is. The stand-in knows.
#define UVM_READ_NOW
extern "C" unsigned standin_read_cycles(const void* from);

namespace on_host {
inline long long cycles;
}

inline long long clock64() { return on_host::cycles; }

inline unsigned read_now(const char* from) {
    on_host::cycles += standin_read_cycles(from);
    return *reinterpret_cast<const volatile unsigned*>(from);
}
