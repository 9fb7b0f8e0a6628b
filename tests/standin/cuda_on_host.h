// Lets a host compiler compile kernels/uvm_ops.cu and run its kernels: one fiber a CUDA thread, switched at barriers.
// Threads of a block run one after the other from barrier to barrier, so a missing __syncthreads shows as a wrong
// result.
#pragma once

#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <vector>

#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)

inline dim3 blockIdx, blockDim, gridDim;
inline uint3 threadIdx;

namespace on_host {
inline jmp_buf scheduler;
inline unsigned running;
inline std::vector<char> done;
inline void (*body)(void*);
inline void* state;

// Where a CUDA thread goes on, and its stack. It lives on from block to block, and is switched to by longjmp:
// swapcontext would make two system calls each time.
struct fiber {
    static constexpr size_t stack_bytes = 32 << 10;
    jmp_buf here;
    ucontext_t started, parked;
    std::unique_ptr<char[]> stack{new char[stack_bytes]};
};
inline std::vector<std::unique_ptr<fiber>> fibers;

__attribute__((noinline)) inline void go(jmp_buf& from, jmp_buf& to) {
    if (_setjmp(from) == 0) _longjmp(to, 1);
}

inline void run_fiber() {
    const unsigned self = running;
    if (_setjmp(fibers[self]->here) == 0) swapcontext(&fibers[self]->started, &fibers[self]->parked);
    for (;;) {
        body(state);
        done[self] = 1;
        go(fibers[self]->here, scheduler);
    }
}

inline void add_fiber() {
    running = static_cast<unsigned>(fibers.size());
    fibers.push_back(std::make_unique<fiber>());
    fiber& made = *fibers.back();
    getcontext(&made.started);
    made.started.uc_stack.ss_sp = made.stack.get();
    made.started.uc_stack.ss_size = fiber::stack_bytes;
    makecontext(&made.started, run_fiber, 0);
    swapcontext(&made.parked, &made.started);
}

inline void run_block(void (*block_body)(void*), void* block_state, unsigned threads) {
    while (fibers.size() < threads) add_fiber();
    body = block_body;
    state = block_state;
    done.assign(threads, 0);
    for (bool again = true; again;) {
        again = false;
        for (unsigned i = 0; i < threads; i++) {
            if (done[i]) continue;
            running = i;
            threadIdx = {i, 0, 0};
            go(scheduler, fibers[i]->here);
            again |= !done[i];
        }
    }
}
}  // namespace on_host

inline void __syncthreads() { on_host::go(on_host::fibers[on_host::running]->here, on_host::scheduler); }

inline void __threadfence() {}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }

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
