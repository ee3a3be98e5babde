// Runs CUDA C++ kernels on the CPU, one block after another, each thread of a block a fiber: enough of CUDA for kernels
// made of plain loads, stores, barriers and warp shuffles. Slow and exact about who waits for whom: a barrier that not
// every thread reaches ends the program with a message instead of hanging.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static  // blocks run one at a time, so a block's shared memory may be a static variable

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

// A fiber is entered once through its ucontext and lives on from block to block; every later switch is a
// _setjmp/_longjmp pair, which unlike swapcontext makes no system call.
struct Fiber {
    ucontext_t context;
    jmp_buf resume;
    std::vector<char> stack = std::vector<char>(1 << 16);
    bool entered = false, done = false;
};

inline std::deque<Fiber> fibers;  // a deque: growing must not move a fiber that has been entered
inline jmp_buf scheduler;
inline unsigned running;
inline unsigned progress;  // counts arrivals and exits: a round of the scheduler without any is a deadlock
inline void (*call)(void**);
inline void** call_arguments;

inline void yield() {
    if (!_setjmp(fibers[running].resume)) _longjmp(scheduler, 1);
}

inline void body() {
    for (;;) {
        call(call_arguments);
        progress++;
        fibers[running].done = true;
        yield();
    }
}

inline void run_fiber(unsigned index) {
    Fiber& fiber = fibers[index];
    running = index;
    threadIdx = {index, 0, 0};
    if (_setjmp(scheduler)) return;
    if (fiber.entered) _longjmp(fiber.resume, 1);
    fiber.entered = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, body, 0);
    setcontext(&fiber.context);
}

struct Barrier {
    unsigned arrived = 0, generation = 0;
    void wait(unsigned count) {
        progress++;
        const unsigned mine = generation;
        if (++arrived == count) {
            arrived = 0;
            generation++;
            return;
        }
        while (generation == mine) yield();
    }
};

inline Barrier block_barrier;
inline std::vector<Barrier> warp_barriers;
inline std::vector<uint32_t> exchange;

inline void run_block(unsigned threads) {
    while (fibers.size() < threads) fibers.emplace_back();
    exchange.assign(threads, 0);
    warp_barriers.assign((threads + 31) / 32, Barrier{});
    block_barrier = Barrier{};
    for (unsigned i = 0; i < threads; i++) fibers[i].done = false;
    for (unsigned left = threads; left > 0;) {
        const unsigned before = progress;
        left = 0;
        for (unsigned i = 0; i < threads; i++) {
            if (fibers[i].done) continue;
            run_fiber(i);
            left += !fibers[i].done;
        }
        if (left > 0 && progress == before) {
            std::fprintf(stderr, "cuda_on_cpu: %u threads wait at a barrier that the others never reach\n", left);
            std::abort();
        }
    }
}

template <class... Arguments, size_t... I>
void apply(void (*kernel)(Arguments...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<Arguments*>(arguments[I])...);
}

template <auto KERNEL>
struct Entry;

template <class... Arguments, void (*KERNEL)(Arguments...)>
struct Entry<KERNEL> {
    static void invoke(void** arguments) { apply(KERNEL, arguments, std::index_sequence_for<Arguments...>{}); }
};

struct Named {
    const char* name;
    void (*invoke)(void**);
};

inline void launch(void (*invoke)(void**), dim3 grid, unsigned threads, void** arguments) {
    call = invoke;
    call_arguments = arguments;
    gridDim = grid;
    blockDim = {threads, 1, 1};
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                blockIdx = {x, y, z};
                run_block(threads);
            }
}

}  // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::block_barrier.wait(blockDim.x); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int offset) {
    static_assert(sizeof(T) == 4);
    const unsigned self = cuda_on_cpu::running;
    const unsigned warp_size = std::min(32u, blockDim.x - self / 32 * 32);
    std::memcpy(&cuda_on_cpu::exchange[self], &value, 4);
    cuda_on_cpu::warp_barriers[self / 32].wait(warp_size);
    T other;
    std::memcpy(&other, &cuda_on_cpu::exchange[self ^ offset], 4);
    cuda_on_cpu::warp_barriers[self / 32].wait(warp_size);
    return other;
}

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(4) ushort2 {
    unsigned short x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline ushort2 make_ushort2(unsigned short x, unsigned short y) { return {x, y}; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
#define __expf expf
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
