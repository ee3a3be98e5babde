// int4 in tiles of 16 rows, as the tensor cores want it, and x as 16-bit integers.
//
//     tile    16 rows:  | block of 64 channels | block | ...
//     block   512 bytes, 16 a lane. With g = lane / 4, t = lane % 4, byte i < 8 of a lane is channel 8t + i, byte i >= 8
//             is channel 32 + 8t + i - 8; row g in the low nibble, row g + 8 in the high one
//     scales  [rows][channels / 128]      fp16, as in int4.cuh
//     x       [blocks][high, low][64] signed bytes: x = (256 * high + low) * scale of its group
//     groups  [channels / 128] {scale of x, -8 * sum of (256 * high + low)}
#pragma once
#include "mma_layouts.cuh"

constexpr int GROUP = 128;
constexpr int TILE_ROWS = 16;
constexpr int BLOCK_BYTES = 512;

struct XGroup {
    float scale;
    int zero;  // what the nibbles' offset of 8 adds up to
};

__device__ __forceinline__ int tile_bytes(int channels) { return channels / 64 * BLOCK_BYTES; }

// X_AS_ROWS: the row of the tile that value i of a lane belongs to.
__device__ __forceinline__ int row_of(int i, int t) { return 2 * t + i % 2 + i / 2 * 8; }

struct TileSums {  // a lane's rows, in the layout's order: see store_rows
    float value[4] = {};
};

// Which of the two operands of a tensor-core product has 16 rows. m16n8k32: a [16 x 32] times b [32 x 8].
enum Layout {
    WEIGHTS_AS_ROWS,  // 16 rows of weights times the 8 columns {high, low, repeats}: one product for 32 channels
    X_AS_ROWS,        // the 16 rows {high, low, 14 of nothing} times 8 columns of weights: two for 32 channels
};

// sums += one group of 128 channels (two blocks) of a tile, by one warp. `blocks`: the group's first, in global or shared
// memory; `scales`: the tile's.
template <Layout LAYOUT>
__device__ __forceinline__ void add_group(TileSums& sums, const u8* blocks, const u16* scales, int group, int groups,
                                          const u8* x, const XGroup& of_x, int lane) {
    constexpr u32 LOW = 0x0f0f0f0fu, HIGH = 0xf0f0f0f0u;
    const int g = lane / 4, t = lane % 4;
    int acc[2][4] = {};
#pragma unroll
    for (int b = 0; b < 2; b++) {
        const uint4 w = *reinterpret_cast<const uint4*>(blocks + b * BLOCK_BYTES + lane * 16);
        const u8* const mine = x + (group * 2 + b) * 128 + g % 2 * 64 + t * 8;
        const uint2 first = *reinterpret_cast<const uint2*>(mine), second = *reinterpret_cast<const uint2*>(mine + 32);
        if constexpr (LAYOUT == WEIGHTS_AS_ROWS) {
            // Masks only: rows g + 8 stay 16 times too large.
            mma_u8(acc[0], w.x & LOW, w.x & HIGH, w.y & LOW, w.y & HIGH, first.x, first.y, false);
            mma_u8(acc[0], w.z & LOW, w.z & HIGH, w.w & LOW, w.w & HIGH, second.x, second.y, false);
        } else {
            const bool real = g < 2;  // rows 2 .. 15 of x do not exist
            const u32 a0 = real ? first.x : 0, a2 = real ? first.y : 0;
            const u32 later_a0 = real ? second.x : 0, later_a2 = real ? second.y : 0;
            mma_x_rows(acc[0], a0, 0, a2, 0, w.x & LOW, w.y & LOW);
            mma_x_rows(acc[1], a0, 0, a2, 0, w.x & HIGH, w.y & HIGH);
            mma_x_rows(acc[0], later_a0, 0, later_a2, 0, w.z & LOW, w.w & LOW);
            mma_x_rows(acc[1], later_a0, 0, later_a2, 0, w.z & HIGH, w.w & HIGH);
        }
    }
    if constexpr (LAYOUT == WEIGHTS_AS_ROWS) {
        sums.value[0] += float(acc[0][0] * 256 + acc[0][1] + of_x.zero) *
                         (from_half(scales[g * groups + group]) * of_x.scale);
        sums.value[1] += float(acc[0][2] * 256 + acc[0][3] + of_x.zero * 16) *
                         (from_half(scales[(g + 8) * groups + group]) * (of_x.scale * 0.0625f));
    } else {
// Row 0 of the product, with 256 times x's high parts, is in the lanes of g == 0, row 1 in those of g == 1.
        const int weight = g == 0 ? 256 : 1, zero = g == 0 ? of_x.zero : 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = row_of(i, t), times = i / 2 ? 16 : 1;
            sums.value[i] += float(acc[i / 2][i % 2] * weight + zero * times) *
                             (from_half(scales[row * groups + group]) * (of_x.scale / times));
        }
    }
}

// Calls store(row of the tile, its sum) once for each of the 16 rows.
template <Layout LAYOUT, class Store>
__device__ __forceinline__ void store_rows(const TileSums& sums, int lane, Store store) {
    const int g = lane / 4, t = lane % 4;
    if constexpr (LAYOUT == WEIGHTS_AS_ROWS) {
        if (t == 0) store(g, sums.value[0]), store(g + 8, sums.value[1]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float sum = sums.value[i] + __shfl_sync(ALL_LANES, sums.value[i], lane + 4);
            if (g == 0) store(row_of(i, t), sum);
        }
    }
}
