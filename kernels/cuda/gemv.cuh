// The products: units of 16 rows from the ring times x, one unit a warp at a time, on the integer tensor cores.
//
// A unit is UNIT_BLOCKS blocks of 16 rows x 64 channels, then the scales of its groups. With g = lane / 4, t = lane % 4,
// a lane holds rows g and g + 8 of 16 channels of each block: 8t .. 8t + 7 of the first 32, and of the other 32.
//
//     int4:  | block 0: 32 lanes x 16 bytes | block 1 | ... | scales: group x g x {row g, row g + 8} fp16 | minima |
//            byte i of a lane: channel i of row g in the low nibble, of row g + 8 in the high nibble
//     int8:  a block is 32 lanes x 16 bytes of rows g, then 32 lanes x 16 bytes of rows g + 8
//     bf16:  a block is 4 x 32 lanes x 16 bytes: rows g (first 32 channels, the rest), then rows g + 8; no scales
//
// int4 needs two masks for eight weights: `w & 0x0f0f0f0f` and `w & 0xf0f0f0f0` are operands as they stand, the second
// 16 times too large, which the row's scale absorbs. (Shifting it down made the loop 43 clocks a unit instead of 34 on an
// H200; integer operations, not the tensor cores, are what runs out.)
#pragma once
#include "hop.cuh"

template <class P>
struct Products {
    float low[TOKEN_TILES], high[TOKEN_TILES];  // of token 4 * tile + t: row g, row g + 8
};

template <class P>
__device__ __forceinline__ Products<P> multiply(const Context& c, const u8* unit, u64* full, u32 parity, u32 x,
                                                int first_group, int first_sum) {
    const int g = c.lane / 4, t = c.lane % 4;
    uint4 xs[TOKEN_TILES][P::UNIT_BLOCKS * (P::X_BLOCK / 64)];
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
        for (int b = 0; b < P::UNIT_BLOCKS * (P::X_BLOCK / 64); b++)
            xs[n][b] = load_shared_if(x + n * 8 * P::X_STRIDE + b * 64, g < 2 * min(4, COLUMNS - 4 * n));
    barrier_wait(full, parity, WAIT_FULL);
    constexpr int LOADS = P::VALUE_BYTES / 512;
    uint4 w[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) w[i] = *reinterpret_cast<const uint4*>(unit + i * 512 + c.lane * 16);
    Products<P> out;
    if constexpr (P::FORMAT == BF16) {
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            float acc[2][4] = {};
#pragma unroll
            for (int b = 0; b < P::UNIT_BLOCKS; b++)
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    const uint4 a = w[b * 4 + u], d = w[b * 4 + 2 + u], v = xs[n][b * 2 + u];
                    mma_bf16(acc[0][0], acc[0][1], acc[0][2], acc[0][3], a.x, d.x, a.y, d.y, v.x, v.y);
                    mma_bf16(acc[1][0], acc[1][1], acc[1][2], acc[1][3], a.z, d.z, a.w, d.w, v.z, v.w);
                }
            out.low[n] = (acc[0][0] + acc[1][0]) + (acc[0][1] + acc[1][1]);
            out.high[n] = (acc[0][2] + acc[1][2]) + (acc[0][3] + acc[1][3]);
        }
    } else {
        constexpr int STEPS = P::GROUP / 32;  // products of 32 channels that share a scale
        constexpr int GROUPS_PER_X = P::X_GROUP / P::GROUP > 0 ? P::X_GROUP / P::GROUP : 1;
        u32 scales[P::UNIT_GROUPS], minima[P::UNIT_GROUPS];
#pragma unroll
        for (int i = 0; i < P::UNIT_GROUPS; i++) {
            scales[i] = *reinterpret_cast<const u32*>(unit + P::VALUE_BYTES + i * 32 + g * 4);
            if constexpr (P::FORMAT == INT4_ASYMMETRIC)
                minima[i] = *reinterpret_cast<const u32*>(unit + P::VALUE_BYTES + (P::UNIT_GROUPS + i) * 32 + g * 4);
        }
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            float low = 0.0f, high = 0.0f;
#pragma unroll
            for (int i = 0; i < P::UNIT_GROUPS; i++) {
                // int8 may have scale groups larger than x's: then x's first group of the pair must do for both.
                const float x_scale = c.s.x_scale[n * 4 + t][first_group + i / GROUPS_PER_X];
                int acc[4] = {0, 0, 0, 0}, sum = 0;
                if constexpr (P::IS_INT4) sum = c.s.x_sum[n * 4 + t][first_sum + i];
                if constexpr (P::FORMAT == INT4) acc[1] = sum, acc[3] = sum * 16;  // -8 times the sum of x
#pragma unroll
                for (int k = i * STEPS; k < (i + 1) * STEPS; k++) {
                    const uint4 v = xs[n][k / 2];
                    if constexpr (P::IS_INT4) {
                        const u32 a = k % 2 ? w[k / 2].z : w[k / 2].x, b = k % 2 ? w[k / 2].w : w[k / 2].y;
                        mma_u8(acc, a & 0x0f0f0f0fu, a & 0xf0f0f0f0u, b & 0x0f0f0f0fu, b & 0xf0f0f0f0u,
                               k % 2 ? v.z : v.x, k % 2 ? v.w : v.y);
                    } else {
                        const uint4 a = w[k / 2 * 2], b = w[k / 2 * 2 + 1];
                        mma_s8(acc, k % 2 ? a.z : a.x, k % 2 ? b.z : b.x, k % 2 ? a.w : a.y, k % 2 ? b.w : b.y,
                               k % 2 ? v.z : v.x, k % 2 ? v.w : v.y);
                    }
                }
                const float s0 = from_half(u16(scales[i])) * x_scale;
                const float s1 = from_half(u16(scales[i] >> 16)) * (x_scale * (P::IS_INT4 ? 0.0625f : 1.0f));
                low += float(acc[0] * 256 + acc[1]) * s0;
                high += float(acc[2] * 256 + acc[3]) * s1;
                if constexpr (P::FORMAT == INT4_ASYMMETRIC) {
                    const float x_sum = float(sum) * x_scale;
                    low += from_half(u16(minima[i])) * x_sum;
                    high += from_half(u16(minima[i] >> 16)) * x_sum;
                }
            }
            out.low[n] = low;
            out.high[n] = high;
        }
    }
    return out;
}

// Multiplies `tiles` tiles of one chunk, whose units start at the cursor, and leaves every unit's sums in `part`:
// [tile][chunk][unit][PART_UNIT], rows of a token together.
template <class P>
__device__ __forceinline__ void multiply_tiles(Context& c, int tiles, int chunk, float* part) {
    const int units = tiles * P::UNITS, g = c.lane / 4, t = c.lane % 4;
    constexpr int STEP = WARPS / P::UNITS_PER_STAGE;
    static_assert(STEP <= STAGES, "the ring holds one round of the warps");
    const int chunk_in_piece = P::PIECES == 1 ? chunk : 0;
    const u32 x = shared_address(c.arena) + g * P::X_STRIDE + t * 16 + chunk_in_piece * P::CHUNK_BLOCKS * P::X_BLOCK;
    Cursor at = c.cursor;
    at.advance(c.warp / P::UNITS_PER_STAGE);
    const int in_stage = c.warp % P::UNITS_PER_STAGE * P::UNIT_BYTES;
#pragma unroll 1
    for (int u = c.warp; u < units; u += WARPS) {
        const int tile = u / P::UNITS, k = u % P::UNITS, block = k * P::UNIT_BLOCKS;
        const Products<P> sums = multiply<P>(
            c, c.slots + at.slot * STAGE_BYTES + in_stage, &c.s.ring.full[at.slot], at.parity, x + block * P::X_BLOCK,
            (chunk_in_piece * P::CHUNK_BLOCKS + block) * 64 / P::X_GROUP,
            (chunk_in_piece * P::CHUNK_BLOCKS + block) * 64 / P::GROUP);
        release(c.s.ring, at.slot);
        float* const out = part + ((tile * P::CHUNKS + chunk) * P::UNITS + k) * PART_UNIT;
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++)
            if (t < min(4, COLUMNS - 4 * n)) {
                out[(n * 4 + t) * TILE_ROWS + g] = sums.low[n];
                out[(n * 4 + t) * TILE_ROWS + g + 8] = sums.high[n];
            }
        at.advance(STEP);
    }
    c.cursor.advance((units + P::UNITS_PER_STAGE - 1) / P::UNITS_PER_STAGE);
}

// Sums of one tile and column over all units: lanes 4j .. 4j + 3 all get rows j (x) and j + 8 (y). Fixed order.
template <class P>
__device__ __forceinline__ float2 tile_sums(const float* part, int tile, int column, int lane) {
    const int j = lane / 4, quarter = lane % 4;
    constexpr int ALL = P::CHUNKS * P::UNITS;
    const float* const at = part + tile * ALL * PART_UNIT + column * TILE_ROWS + j;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < (ALL + 3) / 4; i++) {
        const int unit = i * 4 + quarter;
        if (ALL % 4 == 0 || unit < ALL) {
            sum.x += at[unit * PART_UNIT];
            sum.y += at[unit * PART_UNIT + 8];
        }
    }
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) {
        sum.x += __shfl_xor_sync(ALL_LANES, sum.x, o);
        sum.y += __shfl_xor_sync(ALL_LANES, sum.y, o);
    }
    return sum;
}

// RMSNorm's factor of one column from the squares that staging left (Zhang and Sennrich, 2019).
__device__ __forceinline__ float inverse_rms(const Context& c, int column) {
    constexpr int GROUPS = HIDDEN / Qkv::X_GROUP;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < (GROUPS + 3) / 4; i++)
        if (i * 4 + c.lane % 4 < GROUPS) sum += c.s.squares[column][i * 4 + c.lane % 4];
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    return rsqrtf(sum * (1.0f / HIDDEN) + RMS_EPS);
}

// A whole phase: `stage(piece)` puts x into shared memory, the tiles are multiplied, and `finish(tile, column, sums)` is
// called by one warp for each tile and column, with the rows' sums as tile_sums returns them.
template <class P, class Stage, class Finish>
__device__ __forceinline__ void run_phase(Context& c, Profile& profile, int slot, Stage stage, Finish finish) {
    c.forget();
    const int tiles = c.tiles.count[P::INDEX];
    float* part = c.part();
    if constexpr (P::BATCH >= P::MOST_TILES) {
        constexpr int CHUNKS_PER_PIECE = P::CHUNKS / P::PIECES;
#pragma unroll 1
        for (int piece = 0; piece < P::PIECES; piece++) {
            stage(piece);
            profile.stamp(slot);
            c.sync();
            profile.stamp(slot + 1);
            c.forget();
#pragma unroll 1
            for (int i = 0; i < CHUNKS_PER_PIECE; i++)
                multiply_tiles<P>(c, tiles, piece * CHUNKS_PER_PIECE + i, part);
            profile.stamp(slot + 2);
            c.sync();
            c.forget();
        }
        for (int item = c.warp; item < tiles * COLUMNS; item += WARPS)
            finish(item / COLUMNS, item % COLUMNS, tile_sums<P>(part, item / COLUMNS, item % COLUMNS, c.lane));
    } else {
        constexpr int BUFFER = P::BATCH * P::UNITS * PART_UNIT;
        stage(0);
        profile.stamp(slot);
        c.sync();
        profile.stamp(slot + 1);
        // Two buffers of sums: while some warps finish a batch, the others multiply the next one.
#pragma unroll 1
        for (int first = 0, batch = 0; first < tiles; first += P::BATCH, batch ^= 1) {
            const int n = min(P::BATCH, tiles - first);
            multiply_tiles<P>(c, n, 0, part + batch * BUFFER);
            c.sync();
            for (int item = c.warp; item < n * COLUMNS; item += WARPS)
                finish(first + item / COLUMNS, item % COLUMNS,
                       tile_sums<P>(part + batch * BUFFER, item / COLUMNS, item % COLUMNS, c.lane));
        }
    }
    profile.stamp(slot + 3);
}
