// The products: units of 16 rows from the ring times x, one unit a warp at a time, on the integer tensor cores.
//
// A unit is UNIT_BLOCKS blocks of 16 rows x 64 channels, then the scales of its groups. With g = lane / 4, t = lane % 4,
// a lane holds rows g and g + 8 of 16 channels of each block: 8t .. 8t + 7 of the first 32, and of the other 32.
//
//     int4:  | block 0: 32 lanes x 16 bytes | block 1 | ... | scales: g x group x {row g, row g + 8} fp16 | minima |
//            byte i of a lane: channel i of row g in the low nibble, of row g + 8 in the high nibble
//     int8:  a block is 32 lanes x 16 bytes of rows g, then 32 lanes x 16 bytes of rows g + 8
//     bf16:  a block is 4 x 32 lanes x 16 bytes: rows g (first 32 channels, the rest), then rows g + 8; no scales
//
// int4 needs two masks for eight weights: `w & 0x0f0f0f0f` and `w & 0xf0f0f0f0` are operands as they stand, the second
// 16 times too large, which the row's scale absorbs. (Shifting it down made the loop 43 clocks a unit instead of 34 on an
// H200; integer operations, not the tensor cores, are what runs out.)
#pragma once
#include "hop.cuh"

template <int N>
struct Words {  // N consecutive 32-bit words of shared memory, in the widest loads that N allows
    u32 w[N];
    __device__ __forceinline__ void load(const u8* p) {
        if constexpr (N % 4 == 0) {
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                const uint4 v = *reinterpret_cast<const uint4*>(p + i * 4);
                w[i] = v.x, w[i + 1] = v.y, w[i + 2] = v.z, w[i + 3] = v.w;
            }
        } else if constexpr (N % 2 == 0) {
#pragma unroll
            for (int i = 0; i < N; i += 2) {
                const uint2 v = *reinterpret_cast<const uint2*>(p + i * 4);
                w[i] = v.x, w[i + 1] = v.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) w[i] = *reinterpret_cast<const u32*>(p + i * 4);
        }
    }
};

struct Products {
    float low[TOKEN_TILES], high[TOKEN_TILES];  // of token 4 * tile + t: row g, row g + 8
};

// One unit in registers, with what its scale groups need to know of x.
template <class P>
struct Operands {
    static constexpr int PIECES = P::UNIT_BLOCKS * (P::X_BLOCK / 64), LOADS = P::VALUE_BYTES / 512;
    static constexpr int GROUPS = P::UNIT_GROUPS > 0 ? P::UNIT_GROUPS : 1;
    static constexpr int STEPS = P::GROUP / 32;  // products of 32 channels that share a scale
    uint4 w[LOADS];
    Words<GROUPS> scales, minima;
    Words<2 * GROUPS> of_x[TOKEN_TILES];

    // groups: of the unit's first scale group, token t.
    __device__ __forceinline__ void load(const u8* unit, const GroupOfX* groups, int lane) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) w[i] = *reinterpret_cast<const uint4*>(unit + i * 512 + lane * 16);
        if constexpr (P::FORMAT != BF16) {
            const u8* const at = unit + P::VALUE_BYTES + lane / 4 * GROUPS * 4;
            scales.load(at);
            if constexpr (P::FORMAT == INT4_ASYMMETRIC) minima.load(at + GROUPS * 32);
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++)
                of_x[n].load(reinterpret_cast<const u8*>(groups + n * 4 * MOST_GROUPS));
        }
    }

    // x: by token tile, the address of the row of x that this lane names to load_matrices; x_offset: of the unit in it.
    __device__ __forceinline__ Products multiply(const u32 (&x)[TOKEN_TILES], u32 x_offset) const {
        Products out;
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            uint4 xs[PIECES];
#pragma unroll
            for (int b = 0; b < PIECES; b++) xs[b] = load_matrices(x[n] + x_offset + b * 64);
            if constexpr (P::FORMAT == BF16)
                multiply_bf16(xs, out.low[n], out.high[n]);
            else
                multiply_integers(xs, of_x[n], out.low[n], out.high[n]);
        }
        return out;
    }

   private:
    __device__ __forceinline__ void multiply_bf16(const uint4 (&xs)[PIECES], float& low, float& high) const {
        float acc[2][4] = {};
#pragma unroll
        for (int b = 0; b < P::UNIT_BLOCKS; b++)
#pragma unroll
            for (int u = 0; u < 2; u++) {
                const uint4 a = w[b * 4 + u], d = w[b * 4 + 2 + u], v = xs[b * 2 + u];
                mma_bf16(acc[0][0], acc[0][1], acc[0][2], acc[0][3], a.x, d.x, a.y, d.y, v.x, v.y);
                mma_bf16(acc[1][0], acc[1][1], acc[1][2], acc[1][3], a.z, d.z, a.w, d.w, v.z, v.w);
            }
        low = (acc[0][0] + acc[1][0]) + (acc[0][1] + acc[1][1]);
        high = (acc[0][2] + acc[1][2]) + (acc[0][3] + acc[1][3]);
    }

    __device__ __forceinline__ void multiply_integers(const uint4 (&xs)[PIECES], const Words<2 * GROUPS>& groups, float& low,
                                                      float& high) const {
        low = high = 0.0f;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            int acc[4];
#pragma unroll
            for (int k = i * STEPS; k < (i + 1) * STEPS; k++) {
                const uint4 v = xs[k / 2];
                const u32 b0 = k % 2 ? v.z : v.x, b1 = k % 2 ? v.w : v.y;
                if constexpr (P::IS_INT4) {
                    const u32 a = k % 2 ? w[k / 2].z : w[k / 2].x, b = k % 2 ? w[k / 2].w : w[k / 2].y;
                    mma_u8(acc, a & 0x0f0f0f0fu, a & 0xf0f0f0f0u, b & 0x0f0f0f0fu, b & 0xf0f0f0f0u, b0, b1,
                           k == i * STEPS);
                } else {
                    const uint4 a = w[k / 2 * 2], b = w[k / 2 * 2 + 1];
                    mma_s8(acc, k % 2 ? a.z : a.x, k % 2 ? b.z : b.x, k % 2 ? a.w : a.y, k % 2 ? b.w : b.y, b0, b1,
                           k == i * STEPS);
                }
            }
            const float x_scale = __uint_as_float(groups.w[2 * i]);
            const int sum = int(groups.w[2 * i + 1]), zero = P::FORMAT == INT4 ? sum : 0;  // -8 times the sum of x
            low += float(acc[0] * 256 + acc[1] + zero) * (from_half(u16(scales.w[i])) * x_scale);
            high += float(acc[2] * 256 + acc[3] + zero * 16) *
                    (from_half(u16(scales.w[i] >> 16)) * (x_scale * (P::IS_INT4 ? 0.0625f : 1.0f)));
            if constexpr (P::FORMAT == INT4_ASYMMETRIC) {
                const float x_sum = float(sum) * x_scale;
                low += from_half(u16(minima.w[i])) * x_sum;
                high += from_half(u16(minima.w[i] >> 16)) * x_sum;
            }
        }
    }
};

// One warp's units of a call to multiply_tiles, one after the other.
template <class P>
struct Walk {
    static constexpr int STEP = WARPS / P::UNITS_PER_STAGE, K_STEP = WARPS % P::UNITS;
    static_assert(STEP <= STAGES, "the ring holds one round of the warps");
    const u8* in_stage;
    const GroupOfX* groups;
    u32 x[TOKEN_TILES];
    Cursor at;
    int unit, units, k;

    __device__ __forceinline__ void load(const Context& c, Operands<P>& operands) const {
        barrier_wait(&c.s.ring.full[at.slot], at.parity, WAIT_FULL);
        operands.load(in_stage + at.slot * STAGE_BYTES, groups + k * (P::UNIT_BLOCKS * 64 / P::GROUP), c.lane);
    }
    __device__ __forceinline__ void next() {
        unit += WARPS;
        if constexpr (K_STEP > 0) k = k + K_STEP >= P::UNITS ? k + K_STEP - P::UNITS : k + K_STEP;
        at.slot += STEP;
        if (at.slot >= STAGES) at.slot -= STAGES, at.parity ^= 1;
    }
};

// Multiplies `tiles` tiles of one chunk, whose units start at the cursor, and leaves every unit's sums in `part`:
// [chunk][tile][unit][PART_UNIT], rows of a token together. x holds the chunk from its block `first_block` on.
template <class P>
__device__ __forceinline__ void multiply_tiles(Context& c, int tiles, int chunk, int first_block, float* part) {
    const int units = tiles * P::UNITS, t = c.lane % 4;
    if (c.warp < units) {
        Walk<P> walk;
        walk.in_stage = c.slots + c.warp % P::UNITS_PER_STAGE * P::UNIT_BYTES;
        walk.groups = &c.s.x[t][first_block * 64 / P::GROUP];
        // Columns without a token repeat others: what they come to is not looked at.
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++)
            walk.x[n] = shared_address(c.arena) + (n * 8 + c.lane % (2 * min(4, COLUMNS - 4 * n))) * P::X_STRIDE +
                        c.lane / 8 * 16 + first_block * P::X_BLOCK;
        walk.at = c.cursor;
        walk.at.advance(c.warp / P::UNITS_PER_STAGE);
        walk.unit = c.warp;
        walk.units = units;
        walk.k = c.warp % P::UNITS;
        float* out = part + (chunk * units + c.warp) * PART_UNIT + t * TILE_ROWS + c.lane / 4;
        // Holding two units in registers, to load one while the other is multiplied, spilled 750 bytes.
#pragma unroll 1
        while (walk.unit < units) {
            Operands<P> operands;
            walk.load(c, operands);
            const Products sums = operands.multiply(walk.x, walk.k * (P::UNIT_BLOCKS * P::X_BLOCK));
            release(c.s.ring, walk.at.slot);
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++)
                if (t < min(4, COLUMNS - 4 * n)) {
                    out[n * 4 * TILE_ROWS] = sums.low[n];
                    out[n * 4 * TILE_ROWS + 8] = sums.high[n];
                }
            out += WARPS * PART_UNIT;
            walk.next();
        }
    }
    c.cursor.advance((units + P::UNITS_PER_STAGE - 1) / P::UNITS_PER_STAGE);
}

// Sums of one tile and column over all units: lanes 4j .. 4j + 3 all get rows j (x) and j + 8 (y). Fixed order.
template <class P>
__device__ __forceinline__ float2 tile_sums(const float* part, int tiles, int tile, int column, int lane) {
    const int j = lane / 4, quarter = lane % 4;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int chunk = 0; chunk < P::CHUNKS; chunk++) {
        const float* const at =
            part + ((chunk * tiles + tile) * P::UNITS + quarter) * PART_UNIT + column * TILE_ROWS + j;
#pragma unroll
        for (int i = 0; i < P::UNITS; i += 4)
            if (P::UNITS % 4 == 0 || i + quarter < P::UNITS) {
                sum.x += at[i * PART_UNIT];
                sum.y += at[i * PART_UNIT + 8];
            }
    }
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) {
        sum.x += __shfl_xor_sync(ALL_LANES, sum.x, o);
        sum.y += __shfl_xor_sync(ALL_LANES, sum.y, o);
    }
    return sum;
}

// A whole phase: `stage(piece)` puts x into shared memory, the tiles are multiplied, and `finish(tile, column, sums)` is
// called by one warp for each tile and column, with the rows' sums as tile_sums returns them. `meanwhile` is called by
// every warp when its share is multiplied. An SM without tiles does
// not even look at the input: whoever reads a hop's buffer must publish something that its next writers wait for, or it
// might be overtaken.
template <class P, class Meanwhile, class Stage, class Finish>
__device__ __forceinline__ void run_phase(Context& c, Profile& profile, int slot, Meanwhile meanwhile, Stage stage,
                                          Finish finish) {
    c.forget();
    const int tiles = c.tiles.count[P::INDEX];
    if (tiles == 0) return;
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
                multiply_tiles<P>(c, tiles, piece * CHUNKS_PER_PIECE + i, i * P::CHUNK_BLOCKS, part);
            profile.stamp(slot + 2);
            meanwhile();
            c.sync();
            c.forget();
        }
        for (int item = c.warp; item < tiles * COLUMNS; item += WARPS)
            finish(item / COLUMNS, item % COLUMNS, tile_sums<P>(part, tiles, item / COLUMNS, item % COLUMNS, c.lane));
    } else {
        constexpr int BUFFER = P::BATCH * P::UNITS * PART_UNIT;
        stage(0);
        profile.stamp(slot);
        c.sync();
        profile.stamp(slot + 1);
        meanwhile();
        // Two buffers of sums: while some warps finish a batch, the others multiply the next one.
#pragma unroll 1
        for (int first = 0, batch = 0; first < tiles; first += P::BATCH, batch ^= 1) {
            const int n = min(P::BATCH, tiles - first);
            multiply_tiles<P>(c, n, 0, 0, part + batch * BUFFER);
            c.sync();
            for (int item = c.warp; item < n * COLUMNS; item += WARPS)
                finish(first + item / COLUMNS, item % COLUMNS,
                       tile_sums<P>(part + batch * BUFFER, n, item / COLUMNS, item % COLUMNS, c.lane));
        }
    }
    profile.stamp(slot + 3);
}
