// All blocks of a cooperative launch wait for one another.
#pragma once
#include "../primitives.cuh"

#ifndef FLINT_EMULATED
// release: what this thread has seen and stored is seen by whoever acquires the value. bar.sync before it makes that true
// of the whole block's stores.
__device__ __forceinline__ void add_release(u32* p, u32 v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ u32 fetch_add(u32* p, u32 v) {  // acquires and releases
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}

__device__ __forceinline__ void store_release(u32* p, u32 v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ u32 load_acquire(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
#endif

// One thread: until *p, which only grows, has reached `value`.
__device__ __forceinline__ void wait_for(const u32* p, u32 value) {
    Watchdog watchdog;
    while (int(load_acquire(p) - value) < 0) watchdog.tick(WAIT_GO);
}
