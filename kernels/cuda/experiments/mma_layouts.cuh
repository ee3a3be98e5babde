// The one tensor-core product that the megakernel does without: signed x as the 16-row operand, unsigned weights as the
// columns.
#pragma once
#include "../primitives.cuh"

#ifndef FLINT_EMULATED
// c [16 rows x 8 columns] += a [16 x 32], signed, * b [32 x 8], unsigned; lanes as in mma_u8.
__device__ __forceinline__ void mma_x_rows(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif
