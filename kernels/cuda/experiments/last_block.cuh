// The end of a split sum: whoever comes last adds the parts up, always in the same order (no floating-point atomics).
#pragma once
#include "../primitives.cuh"

// y[i] = sum over p of parts[p][i], for begin <= i < end, by the last of `count` blocks that call this with the same
// ticket (zero before, zero after). All threads of the block call it, after storing their parts.
__device__ __forceinline__ void add_parts(float* y, const float* parts, int stride, int count, int begin, int end,
                                          u32* ticket, int threads) {
    u32* const is_last = reinterpret_cast<u32*>(dynamic_shared_memory());
    __threadfence();
    __syncthreads();  // also: nobody uses the shared memory any more
    if (threadIdx.x == 0) {
        const bool last = atomicAdd(ticket, 1u) == u32(count - 1);
        if (last) *ticket = 0;
        *is_last = last;
    }
    __syncthreads();
    if (!*is_last) return;
    __threadfence();
    for (int i = begin + int(threadIdx.x); i < end; i += threads) {
        float sum = 0.0f;
        for (int p = 0; p < count; p++)
            sum += __uint_as_float(load_word(reinterpret_cast<const u32*>(parts) + size_t(p) * stride + i));
        y[i] = sum;
    }
}
