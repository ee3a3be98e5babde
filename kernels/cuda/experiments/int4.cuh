// int4 rows as checkpoints keep them, and one warp's dot products with them.
//
//     words   [rows][channels / 8]     eight consecutive channels a word, the first in the lowest nibble
//     scales  [rows][channels / 128]   fp16; a weight is (nibble - 8) * scale
//
// x lies in shared memory in the order in which lanes use it: a lane holds WORDS * 8 consecutive channels of a chunk of
// 32 lanes, and reads them four at a time, so quads are stored [chunk][quad][lane] and no two lanes share a bank.
#pragma once
#include "../primitives.cuh"

constexpr int GROUP = 128;  // channels that share a scale
constexpr int ZERO = 8;     // the nibble that means 0

enum Dequantise {
    CONVERT,  // one integer-to-float conversion a weight
    MAGIC,    // the nibble as the top of a mantissa: 1 + q / 16, without a conversion
    TABLE,    // a byte looks up both its weights in shared memory
};

template <int WORDS>
struct LaneX {  // the channels of one chunk that a lane multiplies
    static constexpr int CHUNK = 32 * 8 * WORDS;
    float4 quad[2 * WORDS];
    float sum;

    // Where channel k lies in shared memory, in floats.
    static __device__ __forceinline__ int place(int k) {
        const int in_lane = k % (8 * WORDS);
        return k / CHUNK * CHUNK + in_lane / 4 * 128 + k / (8 * WORDS) % 32 * 4 + k % 4;
    }

    __device__ __forceinline__ void load(const float* x, int chunk, int lane) {
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * WORDS; i++) {
            quad[i] = reinterpret_cast<const float4*>(x + chunk * CHUNK)[i * 32 + lane];
            sum += (quad[i].x + quad[i].y) + (quad[i].z + quad[i].w);
        }
    }
};

// Every thread of the block; `x` in global memory, room for whole chunks in shared memory.
template <int WORDS>
__device__ __forceinline__ void stage_x(float* shared, const float* x, int channels, int thread, int threads) {
    for (int k = thread * 4; k < channels; k += threads * 4)
        *reinterpret_cast<float4*>(shared + LaneX<WORDS>::place(k)) = *reinterpret_cast<const float4*>(x + k);
}

__device__ __forceinline__ void fill_table(float2* table, int thread, int threads) {
    for (int byte = thread; byte < 256; byte += threads) table[byte] = make_float2(float(byte & 15), float(byte >> 4));
}

// The sum of nibble * x over one word; MAGIC leaves (sum + 16 * sum of x) / 16, see `dot`.
template <Dequantise HOW>
__device__ __forceinline__ float dot_word(u32 word, const float4& low, const float4& high, const float2* table) {
    const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float sum = 0.0f;
    if constexpr (HOW == TABLE) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 q = table[word >> (8 * i) & 255];
            sum += q.x * x[2 * i] + q.y * x[2 * i + 1];
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            // 19: the nibble lands in the top four bits of the 23-bit mantissa.
            const u32 moved = i < 5 ? word << (19 - 4 * i) : word >> (4 * i - 19);
            const float q = HOW == MAGIC ? __uint_as_float((moved & 0x00780000u) | 0x3f800000u)
                                         : float(word >> (4 * i) & 15);
            sum += q * x[i];
        }
    }
    return sum;
}

// One lane's part of (nibble - 8) * x over its WORDS words.
template <Dequantise HOW, int WORDS>
__device__ __forceinline__ float dot(const u32 (&words)[WORDS], const LaneX<WORDS>& x, const float2* table) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WORDS; i++) sum += dot_word<HOW>(words[i], x.quad[2 * i], x.quad[2 * i + 1], table);
    return HOW == MAGIC ? 16.0f * (sum - x.sum) - ZERO * x.sum : sum - ZERO * x.sum;
}

template <int WORDS>
__device__ __forceinline__ void load_lane(u32 (&words)[WORDS], const u32* at) {
    if constexpr (WORDS == 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(at);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else {
        static_assert(WORDS == 1, "a lane loads 4 or 16 bytes");
        words[0] = *at;
    }
}

// One warp: sums[r] += this lane's part of row r times x, over channels [first, last), for ROWS rows of `row_words`
// words and their scales. `words` and `scales` point to the first row, in global or shared memory; the next one is
// `stride` rows on.
template <Dequantise HOW, int WORDS, int ROWS>
__device__ __forceinline__ void dot_rows(float (&sums)[ROWS], const u32* words, const u16* scales, int channels,
                                         int first, int last, const float* x, const float2* table, int lane,
                                         int stride = 1) {
    constexpr int CHUNK = LaneX<WORDS>::CHUNK;
#pragma unroll 1
    for (int chunk = first / CHUNK; chunk * CHUNK < last; chunk++) {
        const int k = chunk * CHUNK + lane * 8 * WORDS;
        if (k < first || k >= last) continue;
        u32 q[ROWS][WORDS];
        float scale[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) load_lane(q[r], words + size_t(r) * stride * (channels / 8) + k / 8);
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            scale[r] = from_half(scales[size_t(r) * stride * (channels / GROUP) + k / GROUP]);
        LaneX<WORDS> mine;
        mine.load(x, chunk, lane);
#pragma unroll
        for (int r = 0; r < ROWS; r++) sums[r] += scale[r] * dot<HOW>(q[r], mine, table);
    }
}
