// The products: units of 16 rows from the ring times x, one unit a warp at a time, on the integer tensor cores.
//
// A unit is UNIT_BLOCKS blocks of 16 rows x 64 channels, then the scales of its groups. With g = lane / 4, t = lane % 4,
// a lane holds rows g and g + 8 of 16 channels of each block: 8t .. 8t + 7 of the first 32, and of the other 32.
//
//     int4:  | block 0: 32 lanes x 16 bytes | block 1 | ... | scales: g x group x {row g, row g + 8} fp16 | minima |
//            byte i of a lane: channel i of row g in the low nibble, of row g + 8 in the high nibble. With H, half of an
//            even number of blocks, blocks p and p + H share their places, word by word of a lane:
//            | p: 0, p + H: 0, p: 2, p + H: 2 | in the place of block p, | p: 1, p + H: 1, p: 3, p + H: 3 | in that of p + H
//     int8:  a block is 32 lanes x 16 bytes of rows g, then 32 lanes x 16 bytes of rows g + 8
//     bf16:  a block is 4 x 32 lanes x 16 bytes: rows g (first 32 channels, the rest), then rows g + 8; no scales
//
// int4 needs two masks for eight weights: `w & 0x0f0f0f0f` and `w & 0xf0f0f0f0` are operands as they stand, the second
// 16 times too large, which the row's scale absorbs. (Shifting it down made the loop 43 clocks a unit instead of 34 on an
// H200; integer operations, not the tensor cores, are what runs out.)
#pragma once
#include "staging.cuh"

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

// For one token, whose parts are two of the product's eight columns, a lane's four words of int4 are an operand as they
// stand: where rows g + 8 would be, row g of block p + H meets x in columns 2 and 3. One product of the words as they are,
// one of their low nibbles: half the masks, and half of x. An even lane's columns then have to do with the groups of the
// unit's first half only, an odd one's with those of the second.
template <class P>
constexpr bool WHOLE_WORDS = COLUMNS == 1 && P::IS_INT4 && P::GROUP >= 64 && P::UNIT_GROUPS % 2 == 0;

// What one unit's channels of x are, in registers.
template <class P>
struct UnitInput {
    static constexpr int GROUPS = P::FORMAT == BF16 ? 1 : P::UNIT_GROUPS / (WHOLE_WORDS<P> ? 2 : 1);  // of a lane
    static constexpr int PIECES = P::UNIT_BLOCKS * (P::X_BLOCK / 64) / (WHOLE_WORDS<P> ? 2 : 1);
    uint4 x[TOKEN_TILES][PIECES];
    Words<2 * GROUPS> groups[TOKEN_TILES];

    // first_block: of x, where the unit with k = 0 begins.
    __device__ __forceinline__ void load(const Context& c, int first_block, int k) {
        const int t = WHOLE_WORDS<P> ? 0 : c.lane % 4, first_group = WHOLE_WORDS<P> ? c.lane % 2 * GROUPS : 0;
        const GroupOfX* const of_x =
            &c.s.x[t][first_block * 64 / P::GROUP + k * (P::UNIT_BLOCKS * 64 / P::GROUP) + first_group];
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            // The row of x that this lane names to load_matrices. Columns without a token repeat others: what they come to
            // is not looked at.
            u32 row = shared_address(c.arena) + (first_block + k * P::UNIT_BLOCKS) * P::X_BLOCK;
            if constexpr (WHOLE_WORDS<P>)  // for the words x and z of both blocks, then for y and w
                row += c.lane % 2 * P::X_STRIDE + c.lane / 2 % 2 * (PIECES * P::X_BLOCK) + c.lane / 8 % 2 * 32 +
                       c.lane / 16 * 16;
            else
                row += (n * 8 + c.lane % (2 * min(4, COLUMNS - 4 * n))) * P::X_STRIDE + c.lane / 8 * 16;
#pragma unroll
            for (int b = 0; b < PIECES; b++) x[n][b] = load_matrices(row + b * 64);
            if constexpr (P::FORMAT != BF16) groups[n].load(reinterpret_cast<const u8*>(of_x + n * 4 * MOST_GROUPS));
            if constexpr (SUMS_BY_PRODUCT<P>) sum_groups(n);
        }
    }

   private:
    __device__ __forceinline__ void sum_groups(int n) {
        constexpr u32 ONES = 0x01010101u;
        constexpr int STEPS = PIECES * 2 / GROUPS;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            int acc[4];
#pragma unroll
            for (int k = i * STEPS; k < (i + 1) * STEPS; k++) {
                const uint4 v = x[n][k / 2];
                mma_u8(acc, ONES, ONES, ONES, ONES, k % 2 ? v.z : v.x, k % 2 ? v.w : v.y, k == i * STEPS);
            }
            groups[n].w[2 * i + 1] = u32(zero_of<P>(acc[0] * 256 + acc[1]));
        }
    }
};

// One unit's weights in registers.
template <class P>
struct Operands {
    using Input = UnitInput<P>;
    static constexpr int LOADS = P::VALUE_BYTES / 512, GROUPS = Input::GROUPS, PIECES = Input::PIECES;
    static constexpr int STEPS = P::GROUP / 32;  // products of 32 channels that share a scale
    uint4 w[LOADS];
    Words<GROUPS> scales, minima;

    // Word i of a lane's four of an int4 block.
    __device__ __forceinline__ u32 word_of(int block, int i) const {
        constexpr int H = P::UNIT_BLOCKS / 2;
        if constexpr (P::UNIT_BLOCKS % 2 == 1) return component(w[block], i);
        return component(w[block % H + i % 2 * H], i / 2 * 2 + block / H);
    }

    __device__ __forceinline__ void load(const u8* unit, int lane) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) w[i] = *reinterpret_cast<const uint4*>(unit + i * 512 + lane * 16);
        if constexpr (P::FORMAT != BF16) {
            const int first_group = WHOLE_WORDS<P> ? lane % 2 * GROUPS : 0;
            const u8* const at = unit + P::VALUE_BYTES + (lane / 4 * P::UNIT_GROUPS + first_group) * 4;
            scales.load(at);
            if constexpr (P::FORMAT == INT4_ASYMMETRIC) minima.load(at + P::UNIT_GROUPS * 32);
        }
    }

    __device__ __forceinline__ Products multiply(const Input& input, int lane) const {
        Products out;
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++) {
            if constexpr (P::FORMAT == BF16)
                multiply_bf16(input.x[n], out.low[n], out.high[n]);
            else if constexpr (WHOLE_WORDS<P>)
                multiply_words(input.x[n], input.groups[n], out.low[n], out.high[n], lane);
            else
                multiply_integers(input.x[n], input.groups[n], out.low[n], out.high[n]);
        }
        return out;
    }

   private:
    __device__ __forceinline__ static u32 component(const uint4& v, int i) {
        return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
    }

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

    // Adds one group's share of row g to low, of row g + 8 to high. low_sum, high_sum: their fixed-point sums, the second
    // 16 times too large for int4.
    __device__ __forceinline__ void add_group(int i, const Words<2 * GROUPS>& groups, int low_sum, int high_sum, float& low,
                                              float& high) const {
        const float x_scale = __uint_as_float(groups.w[2 * i]);
        const int sum = int(groups.w[2 * i + 1]);
        const int zero = P::FORMAT == INT4 ? sum : 0;  // -8 times the sum of x
        low += float(low_sum + zero) * (from_half(u16(scales.w[i])) * x_scale);
        high += float(high_sum + zero * 16) *
                (from_half(u16(scales.w[i] >> 16)) * (x_scale * (P::IS_INT4 ? 0.0625f : 1.0f)));
        if constexpr (P::FORMAT == INT4_ASYMMETRIC) {
            const float x_sum = float(sum) * x_scale;
            low += from_half(u16(minima.w[i])) * x_sum;
            high += from_half(u16(minima.w[i] >> 16)) * x_sum;
        }
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
                    const u32 a = word_of(k / 2, k % 2 * 2), b = word_of(k / 2, k % 2 * 2 + 1);
                    mma_u8(acc, a & 0x0f0f0f0fu, a & 0xf0f0f0f0u, b & 0x0f0f0f0fu, b & 0xf0f0f0f0u, b0, b1,
                           k == i * STEPS);
                } else {
                    const uint4 a = w[k / 2 * 2], b = w[k / 2 * 2 + 1];
                    mma_s8(acc, k % 2 ? a.z : a.x, k % 2 ? b.z : b.x, k % 2 ? a.w : a.y, k % 2 ? b.w : b.y, b0, b1,
                           k == i * STEPS);
                }
            }
            add_group(i, groups, acc[0] * 256 + acc[1], acc[2] * 256 + acc[3], low, high);
        }
    }

    // Even lanes have the unit's first half (columns 0, 1), odd ones its second (columns 2, 3).
    __device__ __forceinline__ void multiply_words(const uint4 (&xs)[PIECES], const Words<2 * GROUPS>& groups, float& low,
                                                   float& high, int lane) const {
        low = high = 0.0f;
        const bool other = lane & 1;
        constexpr u32 LOW = 0x0f0f0f0fu;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            int all[4], nibbles[4];
#pragma unroll
            for (int q = i * (PIECES / GROUPS); q < (i + 1) * (PIECES / GROUPS); q++) {
                const uint4 a = w[q], b = w[q + PIECES], v = xs[q];
                const bool first = q == i * (PIECES / GROUPS);
                mma_u8(all, a.x, a.y, a.z, a.w, v.x, v.y, first);
                mma_u8(nibbles, a.x & LOW, a.y & LOW, a.z & LOW, a.w & LOW, v.x, v.y, first);
                mma_u8(all, b.x, b.y, b.z, b.w, v.z, v.w, false);
                mma_u8(nibbles, b.x & LOW, b.y & LOW, b.z & LOW, b.w & LOW, v.z, v.w, false);
            }
            const int of_low = other ? nibbles[2] * 256 + nibbles[3] : nibbles[0] * 256 + nibbles[1];
            const int of_both = other ? all[2] * 256 + all[3] : all[0] * 256 + all[1];
            add_group(i, groups, of_low, of_both - of_low, low, high);
        }
        low += __shfl_xor_sync(ALL_LANES, low, 1);
        high += __shfl_xor_sync(ALL_LANES, high, 1);
    }
};

// One warp's units of a call to multiply_tiles: every STRIDE-th.
template <class P>
struct Walk {
    static constexpr int K_STEP = P::STRIDE % P::UNITS;
    static_assert((WARPS + P::UNITS_PER_STAGE - 1) / P::UNITS_PER_STAGE <= STAGES, "the ring holds one round of the warps");
    Cursor at;
    u32 in_stage;
    int unit, k;

    __device__ __forceinline__ explicit Walk(const Context& c) : at(c.cursor), unit(c.warp), k(c.warp % P::UNITS) {
        at.advance(c.warp / P::UNITS_PER_STAGE);
        in_stage = c.warp % P::UNITS_PER_STAGE;
    }
    __device__ __forceinline__ const u8* await(const Context& c) const {
        barrier_wait(&c.s.ring.full[at.slot], at.parity, WAIT_FULL);
        return c.slots + at.slot * STAGE_BYTES + in_stage * P::UNIT_BYTES;
    }
    __device__ __forceinline__ void next() {
        unit += P::STRIDE;
        if constexpr (K_STEP > 0) k = k + K_STEP >= P::UNITS ? k + K_STEP - P::UNITS : k + K_STEP;
        const u32 behind = in_stage + P::STRIDE;
        in_stage = behind % P::UNITS_PER_STAGE;
        at.slot += int(behind / P::UNITS_PER_STAGE);
        if (at.slot >= STAGES) at.slot -= STAGES, at.parity ^= 1;
    }
};

// Where a unit's sums of rows j and j + 8 of a column lie in `part`: the columns of a tile's lanes share no bank.
__device__ __forceinline__ int in_part(int column, int j) { return column * TILE_ROWS + (j ^ (column & 2) * 2) * 2; }

// Multiplies `tiles` tiles of one chunk, whose units start at the cursor, and leaves every unit's sums in `part`:
// [chunk][tile][unit][PART_UNIT], rows of a token together. x holds the chunk from its block `first_block` on.
template <class P>
__device__ __forceinline__ void multiply_tiles(Context& c, int tiles, int chunk, int first_block, float* part) {
    const int units = tiles * P::UNITS, t = c.lane % 4;
    if (c.warp < min(units, P::STRIDE)) {
        Walk<P> walk(c);
        float* out = part + (chunk * units + c.warp) * PART_UNIT + in_part(t, c.lane / 4);
        UnitInput<P> input;
        if constexpr (X_STAYS<P>) input.load(c, first_block, walk.k);
#pragma unroll 1
        while (walk.unit < units) {
            Operands<P> operands;
            operands.load(walk.await(c), c.lane);
            if constexpr (!X_STAYS<P>) input.load(c, first_block, walk.k);
            const Products sums = operands.multiply(input, c.lane);
            release(c.s.ring, walk.at.slot);
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; n++)
                if (t < min(4, COLUMNS - 4 * n))
                    *reinterpret_cast<float2*>(out + n * 4 * TILE_ROWS) = make_float2(sums.low[n], sums.high[n]);
            out += P::STRIDE * PART_UNIT;
            walk.next();
        }
    }
    c.cursor.advance((units + P::UNITS_PER_STAGE - 1) / P::UNITS_PER_STAGE);
}

// Sums over all units of one tile and of the lane's column: rows j (x) and j + 8 (y). Fixed order.
template <class P>
__device__ __forceinline__ float2 tile_sums(const float* part, int tiles, int tile, Place place, int lane) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int chunk = 0; chunk < P::CHUNKS; chunk++) {
        const float* const at = part + ((chunk * tiles + tile) * P::UNITS + place.replica) * PART_UNIT +
                                in_part(place.column, lane / 4);
#pragma unroll
        for (int i = 0; i < P::UNITS; i += REPLICAS)
            if (P::UNITS % REPLICAS == 0 || i + place.replica < P::UNITS) {
                const float2 unit = *reinterpret_cast<const float2*>(at + i * PART_UNIT);
                sum.x += unit.x, sum.y += unit.y;
            }
    }
#pragma unroll
    for (int o = SIDE; o < 4; o <<= 1) {
        sum.x += __shfl_xor_sync(ALL_LANES, sum.x, o);
        sum.y += __shfl_xor_sync(ALL_LANES, sum.y, o);
    }
    return sum;
}

// One tile's sums: away to the other SM of the pair, or, with what it has sent, to `finish`.
template <class P, class Finish>
__device__ __forceinline__ void exchange(const Context& c, int tile, Place place, float2 sums, bool own, Epoch epoch,
                                         Finish finish) {
    u32* const words = c.s.received + received_before(P::INDEX) + (tile / 2 * COLUMNS + place.column) * TILE_ROWS +
                       c.lane / 4 * 2;
    if (!own) {
        if (place.replica == 0)
            store_words2_there(address_in(c.rank ^ 1, words), make_uint2(word(sums.x, epoch), word(sums.y, epoch)));
        return;
    }
    Watchdog watchdog;
    uint2 w;
    while (true) {
        w = load_words2_here(words);
        if (__all_sync(ALL_LANES, fresh(w.x, epoch) && fresh(w.y, epoch))) break;
        watchdog.tick(WAIT_PAIR);
    }
    finish(tile, place, make_float2(sums.x + value_of(w.x), sums.y + value_of(w.y)));
}

// Brings `tiles` tiles to an end, whose first is `first`. sums(tile, place): an SM's own, as tile_sums returns them; the
// tile counts from `first`. Those of tiles that the other SM of the pair owns go to its shared memory.
template <class P, class Sums, class Finish>
__device__ __forceinline__ void finish_tiles(Context& c, int first, int tiles, Epoch epoch, Sums sums, Finish finish) {
    static_assert(WARPS % TURNS == 0, "a warp's columns are always the same");
    const Place place{c.warp % TURNS * SIDE + c.lane % SIDE, c.lane % 4 / SIDE};
    const int others = P::SHARES > 1 ? (tiles + c.rank) / 2 : 0;  // tiles of the other SM; they go first
    for (int item = c.warp; item < tiles * TURNS; item += WARPS) {
        const int nth = item / TURNS;
        if constexpr (P::SHARES == 1) {
            finish(first + nth, place, sums(nth, place));
        } else {
            const bool own = nth >= others;
            const int tile = own ? 2 * (nth - others) + c.rank : 2 * nth + 1 - c.rank;
            exchange<P>(c, first + tile, place, sums(tile, place), own, epoch, finish);
        }
    }
}

// A whole phase: `stage(piece)` puts x into shared memory for the warps that read it, the tiles are multiplied, and
// `finish(tile, place, sums)` is called by one warp for each own tile, as often as its columns need, with the lane's sums
// as tile_sums returns them. `meanwhile` is called by every warp when its share is multiplied. An SM without tiles does
// not even look at the input: whoever reads a hop's buffer must publish something that its next writers wait for, or it
// might be overtaken. (With two SMs to a tile, the one that has none of its own to publish has sent its sums to the
// other.)
template <class P, class Meanwhile, class Stage, class Finish>
__device__ __forceinline__ void run_phase(Context& c, Profile& profile, int slot, Epoch epoch, Meanwhile meanwhile,
                                          Stage stage, Finish finish) {
    c.forget();
    const int tiles = c.tiles.count[P::INDEX];
    if (tiles == 0) return;
    float* const part = c.part<P>();
    if constexpr (P::BATCH >= P::MOST_TILES) {
        constexpr int CHUNKS_PER_PIECE = P::CHUNKS / P::PIECES;
#pragma unroll 1
        for (int piece = 0; piece < P::PIECES; piece++) {
            stage(piece);
            profile.stamp(slot);
#pragma unroll 1
            for (int i = 0; i < CHUNKS_PER_PIECE; i++) {
                if (i > 0) c.sync();  // from one chunk to the next a warp may step further than the ring reaches
                multiply_tiles<P>(c, tiles, piece * CHUNKS_PER_PIECE + i, i * P::CHUNK_BLOCKS, part);
            }
            profile.stamp(slot + 2);
            meanwhile();
            c.sync();
        }
        const auto sums = [&](int tile, Place place) { return tile_sums<P>(part, tiles, tile, place, c.lane); };
        finish_tiles<P>(c, 0, tiles, epoch, sums, finish);
    } else {
        constexpr int BUFFER = P::BATCH * P::UNITS * PART_UNIT;
        stage(0);
        profile.stamp(slot);
        meanwhile();
        // Two buffers of sums: while some warps finish a batch, the others multiply the next one.
#pragma unroll 1
        for (int first = 0, batch = 0; first < tiles; first += P::BATCH, batch ^= 1) {
            const int n = min(P::BATCH, tiles - first);
            multiply_tiles<P>(c, n, 0, 0, part + batch * BUFFER);
            c.sync();
            const float* const done = part + batch * BUFFER;
            const auto sums = [&](int tile, Place place) { return tile_sums<P>(done, n, tile, place, c.lane); };
            finish_tiles<P>(c, first, n, epoch, sums, finish);
        }
    }
    c.sync();  // sums have been read: what comes next may use the arena as it likes
    profile.stamp(slot + 3);
}
