// A hop: how activations go from the SMs that made them to all SMs.
//
// An activation is a 32-bit word with one writer: the upper 24 bits of a float, and the epoch (layers since the launch,
// modulo 256) in the low 8 bits. Readers poll the words themselves, so a hop is one store and one load: no barrier, no
// flag, no fence. A buffer is rewritten once a layer, and nobody can write epoch e + 1 before every SM has read epoch e,
// because each SM's share of the phases in between waits for it.
//
// Received activations are staged for the integer tensor cores: in groups of X_GROUP channels, x = scale * (256 * high +
// low) with 8-bit high and low, that is 16-bit fixed point; each part is one column of the product. bf16 matrices get
// x = high + low in bf16.
#pragma once
#include "context.cuh"

constexpr u32 TAG_MASK = 0xff;
constexpr float FIXED_POINT = 32512.0f;  // 127 * 256: the high part stays within 8 bits after rounding

__device__ __forceinline__ u32 word(float value, u32 tag) {
    return ((__float_as_uint(value) + 0x80) & ~TAG_MASK) | (tag & TAG_MASK);
}

__device__ __forceinline__ float value_of(u32 w) { return __uint_as_float(w & ~TAG_MASK); }

__device__ __forceinline__ bool fresh(u32 w, u32 tag) {
#ifdef NO_WAIT
    return true;  // diagnostic: how long the work takes when nobody waits
#else
    return ((w ^ tag) & TAG_MASK) == 0;
#endif
}

template <int N>
__device__ __forceinline__ void load_lane_words(u32 (&w)[N], const u32* p) {
    if constexpr (N == 4) {
        const uint4 v = load_words4(p);
        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    } else {
        const uint2 v = load_words2(p);
        w[0] = v.x, w[1] = v.y;
    }
}

template <int N>
__device__ __forceinline__ void load_weights(float (&w)[N], const float* p) {
    if constexpr (N == 4) {
        const float4 v = __ldg(reinterpret_cast<const float4*>(p));
        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    } else {
        const float2 v = __ldg(reinterpret_cast<const float2*>(p));
        w[0] = v.x, w[1] = v.y;
    }
}

// Puts one group of one column into shared memory; v: the lane's consecutive channels of the group.
template <class P, int N>
__device__ __forceinline__ void put(const Context& c, const float (&v)[N], int column, int group) {
    static_assert(N * 32 == P::X_GROUP, "a warp stages a group");
    const int within = c.lane * N, k = within % 64, block = group * (P::X_GROUP / 64) + within / 64;
    // A block's 64 channels lie as 16-byte rows, one for each operand register of the product: four channels (two in
    // bf16) of each of the lanes t = 0 .. 3, which own channels 8t .. 8t + 7 of the first 32 and of the rest.
    const int t = k / 8 % 4, half = k / 32;
    u8* const high = c.arena + 2 * column * P::X_STRIDE + block * P::X_BLOCK + t * 4;
    if constexpr (P::FORMAT == BF16) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            u8* const at = high + (half * 4 + k % 8 / 2 + i / 2) * 16;
            const u32 h = to_bf16x2(v[i], v[i + 1]);
            const u32 l = to_bf16x2(v[i] - from_bf16(h & 0xffff), v[i + 1] - __uint_as_float(h & 0xffff0000));
            *reinterpret_cast<u32*>(at) = h;
            *reinterpret_cast<u32*>(at + P::X_STRIDE) = l;
        }
    } else {
        u8* const at = high + (half * 2 + k / 4 % 2) * 16 + k % 4;
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++) largest = fmaxf(largest, fabsf(v[i]));
        largest = __uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(largest)));
        const float to_fixed = largest > 0.0f ? __fdividef(FIXED_POINT, largest) : 0.0f;
        int fixed[N], sum = 0;
        u32 h = 0, l = 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            fixed[i] = __float2int_rn(v[i] * to_fixed);
            sum += fixed[i];
        }
        if constexpr (N == 4) {
            // (x + 128) >> 8 is bits 8..15 of x + 128; the low part x - 256 * high is the low byte of x, as a signed byte.
            const u32 a = __byte_perm(fixed[0] + 128, fixed[1] + 128, 0x0051), b = __byte_perm(fixed[2] + 128, fixed[3] + 128, 0x0051);
            h = __byte_perm(a, b, 0x5410);
            const u32 e = __byte_perm(fixed[0], fixed[1], 0x0040), f = __byte_perm(fixed[2], fixed[3], 0x0040);
            l = __byte_perm(e, f, 0x5410);
            *reinterpret_cast<u32*>(at) = h;
            *reinterpret_cast<u32*>(at + P::X_STRIDE) = l;
        } else {
            *reinterpret_cast<u16*>(at) = u16(__byte_perm(fixed[0] + 128, fixed[1] + 128, 0x0051));
            *reinterpret_cast<u16*>(at + P::X_STRIDE) = u16(__byte_perm(fixed[0], fixed[1], 0x0040));
        }
        constexpr int LANES = P::GROUP / N;  // lanes that share a scale group of the weights
        if constexpr (P::IS_INT4) {          // its zero point meets x as a sum
            if constexpr (LANES == 32) {
                sum = __reduce_add_sync(ALL_LANES, sum);
            } else {
#pragma unroll
                for (int o = LANES / 2; o; o >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, o);
            }
            if constexpr (P::FORMAT == INT4) sum *= -8;
        }
        if (c.lane % LANES == 0)
            c.s.x[column][group * (32 / LANES) + c.lane / LANES] = GroupOfX{largest * (1.0f / FIXED_POINT), sum};
    }
}

// How a phase's input is spread over the warps: items are (column, group) pairs, warp w takes w, w + WARPS, ...
template <class P>
struct Items {
    static constexpr int ALL = COLUMNS * P::X_GROUPS;
    static constexpr int ROUNDS = (ALL + WARPS - 1) / WARPS;
    static constexpr int AT_ONCE = ROUNDS < 4 ? ROUNDS : 4;  // loads in flight a warp
    static constexpr int LANE = P::X_GROUP / 32;             // channels of one lane
};

// Stages words [column][K] of one hop. With a norm weight, x is multiplied by it and the squares are summed: RMSNorm's
// scale itself is applied to the product, so that nobody waits for the sum. feature: where to copy x, or null.
template <class P, bool NORM>
__device__ __forceinline__ void stage_words(const Context& c, const u32* words, u32 tag, const float* norm, int piece,
                                            float* feature, Wait where) {
    using I = Items<P>;
#pragma unroll 1
    for (int round = 0; round < I::ROUNDS; round += I::AT_ONCE) {
        u32 w[I::AT_ONCE][I::LANE];
        float weight[I::AT_ONCE][I::LANE];
        const u32* source[I::AT_ONCE];
        int item[I::AT_ONCE];
#pragma unroll
        for (int i = 0; i < I::AT_ONCE; i++) {
            item[i] = c.warp + (round + i) * WARPS;
            const int safe = min(item[i], I::ALL - 1), column = safe / P::X_GROUPS, group = safe % P::X_GROUPS;
            const int k = group * P::X_GROUP + c.lane * I::LANE;
            source[i] = words + column * P::K + piece * P::STAGED_K + k;
            if constexpr (NORM) load_weights(weight[i], norm + k);
        }
        Watchdog watchdog;
        while (true) {
            bool ready = true;
#pragma unroll
            for (int i = 0; i < I::AT_ONCE; i++)
                if (i == 0 || item[i] < I::ALL) load_lane_words(w[i], source[i]);
#pragma unroll
            for (int i = 0; i < I::AT_ONCE; i++)
                if (i == 0 || item[i] < I::ALL)
#pragma unroll
                    for (int e = 0; e < I::LANE; e++) ready &= fresh(w[i][e], tag);
            if (__all_sync(ALL_LANES, ready)) break;
            watchdog.tick(where);
        }
#pragma unroll
        for (int i = 0; i < I::AT_ONCE; i++) {
            if (item[i] >= I::ALL) break;
            const int column = item[i] / P::X_GROUPS, group = item[i] % P::X_GROUPS;
            float v[I::LANE], squares = 0.0f;
#pragma unroll
            for (int e = 0; e < I::LANE; e++) {
                v[e] = value_of(w[i][e]);
                if constexpr (NORM) {
                    if (feature) feature[column * P::K + group * P::X_GROUP + c.lane * I::LANE + e] = v[e];
                    squares += v[e] * v[e];
                    v[e] *= weight[i][e];
                }
            }
            put<P>(c, v, column, group);
            if constexpr (NORM) {
                squares = warp_sum(squares);
                if (c.lane == 0) c.s.squares[column][group] = squares;
            }
        }
    }
}

// N (1, 2 or 4; k a multiple of N) consecutive channels of a token's embedding, from the matrix as it is packed.
template <int N>
__device__ __forceinline__ void embedding(const Parameters& p, int token, int k, float (&v)[N]) {
    const size_t at = size_t(token) * HIDDEN + k;
    if constexpr (EMBED_FORMAT == BF16) {
#pragma unroll
        for (int e = 0; e < N; e++) v[e] = from_bf16(__ldg(static_cast<const u16*>(p.embed_q) + at + e));
    } else {
        const size_t group = size_t(token) * (HIDDEN / EMBED_GROUP) + k / EMBED_GROUP;
        const float scale = from_half(__ldg(p.embed_scale + group));
        if constexpr (EMBED_FORMAT == INT8) {
#pragma unroll
            for (int e = 0; e < N; e++) v[e] = float(__ldg(static_cast<const signed char*>(p.embed_q) + at + e)) * scale;
        } else {
            const u32 word = __ldg(static_cast<const u32*>(p.embed_q) + at / 8) >> (k % 8 * 4);
            const float minimum = EMBED_FORMAT == INT4 ? -8.0f * scale : from_half(__ldg(p.embed_minimum + group));
#pragma unroll
            for (int e = 0; e < N; e++) v[e] = float(word >> (4 * e) & 15) * scale + minimum;
        }
    }
#pragma unroll
    for (int e = 0; e < N; e++) v[e] *= EMBEDDING_MULTIPLIER;
}

// Layer 0's input: every SM embeds the tokens itself.
template <class P>
__device__ __forceinline__ void stage_embedding(const Context& c, const int (&tokens)[COLUMNS], const float* norm,
                                                float* feature) {
    using I = Items<P>;
#pragma unroll 1
    for (int item = c.warp; item < I::ALL; item += WARPS) {
        const int column = item / P::X_GROUPS, group = item % P::X_GROUPS;
        int token = tokens[0];
#pragma unroll
        for (int i = 1; i < COLUMNS; i++)
            if (column == i) token = tokens[i];
        float v[I::LANE], weight[I::LANE], squares = 0.0f;
        load_weights(weight, norm + group * P::X_GROUP + c.lane * I::LANE);
        embedding(c.p, token, group * P::X_GROUP + c.lane * I::LANE, v);
#pragma unroll
        for (int e = 0; e < I::LANE; e++) {
            const int k = group * P::X_GROUP + c.lane * I::LANE + e;
            if (feature) feature[column * P::K + k] = v[e];
            squares += v[e] * v[e];
            v[e] *= weight[e];
        }
        put<P>(c, v, column, group);
        squares = warp_sum(squares);
        if (c.lane == 0) c.s.squares[column][group] = squares;
    }
}
