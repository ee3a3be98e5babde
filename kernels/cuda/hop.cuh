// A hop: how activations go from the SMs that made them to all SMs.
//
// Readers poll the activations themselves: what is written carries the epoch (layers since the launch) as a tag, so a hop
// is one store and one load, with no barrier, flag or fence. A buffer is rewritten once a layer, and nobody can write
// epoch e + 1 before every SM has read epoch e, because each SM's share of the phases in between waits for it.
//
// Few values travel as words: the upper 24 bits of a float and 8 bits of tag. Many travel as packets, because every SM
// reads all of them: eight channels that share an exponent, two to a word,
//
//     | 8192 + mantissa of channel 2p + 1 : 14 | bits 2p, 2p + 1 of the exponent : 2 | 8192 + that of 2p : 14 | tag : 2 |
//
// so that each of the four words says itself whether it has come. Half the bytes of words, and what a reader does with
// a value is integer arithmetic: a shift aligns two mantissas to the largest exponent of 256 channels.
#pragma once
#include "context.cuh"

struct Epoch {  // the tags of one layer; never zero, which is what memory holds that nobody has written yet
    u32 word, packet;
    __device__ __forceinline__ explicit Epoch(u32 layers) : word(1 + layers % 255), packet(1 + layers % 3) {}
};

// ---- words

constexpr u32 TAG_MASK = 0xff;

// NaN stays NaN: a GPU's own, 0x7fffffff, would be rounded to -0, and what broke elsewhere must show.
__device__ __forceinline__ u32 word(float value, Epoch epoch) {
    const u32 rounded = value == value ? __float_as_uint(value) + 0x80 : 0x7fc00000u;
    return (rounded & ~TAG_MASK) | epoch.word;
}

__device__ __forceinline__ float value_of(u32 w) { return __uint_as_float(w & ~TAG_MASK); }

__device__ __forceinline__ bool fresh(u32 w, Epoch epoch) {
#ifdef NO_WAIT
    return true;  // diagnostic: how long the work takes when nobody waits
#else
    return ((w ^ epoch.word) & TAG_MASK) == 0;
#endif
}

// ---- packets

constexpr int PACKET = 8;          // channels
constexpr int ITEM = PACKET * 32;  // channels that a warp stages at a time; they share the unit of fixed point
constexpr u32 MANTISSA = 0xfffcu, BOTH = 0x10001u;  // a mantissa's bits of its half of a word; times that, of both halves
constexpr u32 LEAST_EXPONENT = 21, NAN_EXPONENT = 255;  // below it, channels are zero

__device__ __forceinline__ bool fresh(const uint4& p, Epoch epoch) {
#ifdef NO_WAIT
    return true;
#else
    return (((p.x ^ epoch.packet) | (p.y ^ epoch.packet) | (p.z ^ epoch.packet) | (p.w ^ epoch.packet)) & 3) == 0;
#endif
}

__device__ __forceinline__ u32 exponent_of(const uint4& p) {
    const u32 bytes = __byte_perm(__byte_perm(p.x, p.y, 0x0062), __byte_perm(p.z, p.w, 0x0062), 0x5410);
    return __dp4a(bytes & 0x03030303u, 0x40100401u, 0u);  // times 1, 4, 16 and 64
}

// The exponent under which a largest magnitude (its bits, so that NaN is the largest of all) has a mantissa of at most
// 8159: as 16-bit fixed point, 4 * 8159 still rounds to a high part of 127.
__device__ __forceinline__ u32 exponent_for(u32 largest) {
    return __float_as_uint(__uint_as_float(largest) * (8192.0f / 8159.0f)) >> 23;
}

__device__ __forceinline__ float power_of_two(u32 exponent) { return __uint_as_float(exponent << 23); }

// What one step of 16-bit fixed point is worth.
__device__ __forceinline__ float unit_of(u32 exponent) {
    if (exponent == NAN_EXPONENT) return __uint_as_float(0x7fc00000u);  // what broke elsewhere must show
    return power_of_two(max(exponent, LEAST_EXPONENT) - 14);  // below it, of zeros
}
__device__ __forceinline__ float units_in_one(u32 exponent) {
    return exponent < LEAST_EXPONENT || exponent == NAN_EXPONENT ? 0.0f : power_of_two(268 - exponent);
}

__device__ __forceinline__ u32 word_of_packet(int even, int odd, u32 exponent, int nth, Epoch epoch) {
    return u32(odd + 8192) << 18 | (exponent >> (2 * nth) & 3) << 16 | u32(even + 8192) << 2 | epoch.packet;
}

// The bits of the largest magnitude among the eight channels of a packet, which lie in lanes STEP apart.
template <int STEP>
__device__ __forceinline__ u32 largest_of(float value) {
    u32 largest = __float_as_uint(fabsf(value));
#pragma unroll
    for (int o = STEP; o <= 4 * STEP; o <<= 1) largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, o));
    return largest;
}

// The same, where all lanes of a warp have one packet's channels: a reduction is shorter than three steps.
__device__ __forceinline__ u32 largest_of_warp(float value) {
    return __reduce_max_sync(ALL_LANES, __float_as_uint(fabsf(value)));
}

// Publishes eight channels that lie in lanes STEP apart: channel i in the lane whose bits of STEP, 2 STEP and 4 STEP are i.
// All lanes take part; `packet` is the lane's own. Each lane stores to STORES copies, every APART-th. largest: see
// largest_of.
template <int STEP, int STORES, int APART>
__device__ __forceinline__ void publish(u32* packet, float value, u32 largest, Epoch epoch, int lane, bool store) {
    const u32 exponent = exponent_for(largest);
    const int mantissa = __float2int_rn(value * (0.25f * units_in_one(exponent)));
    const int next = __shfl_xor_sync(ALL_LANES, mantissa, STEP);
    const int channel = lane / STEP % PACKET;
    const u32 w = word_of_packet(mantissa, next, exponent, channel / 2, epoch);
    if (store && channel % 2 == 0)
#pragma unroll
        for (int i = 0; i < STORES; i++) store_word(packet + i * APART * HOP_COPY + channel / 2, w);
}

// The same, of eight channels of one lane.
__device__ __forceinline__ uint4 packet_of(const float (&v)[PACKET], Epoch epoch) {
    u32 largest = 0, words[4];
#pragma unroll
    for (int i = 0; i < PACKET; i++) largest = max(largest, __float_as_uint(fabsf(v[i])));
    const u32 exponent = exponent_for(largest);
    const float scale = 0.25f * units_in_one(exponent);
#pragma unroll
    for (int i = 0; i < 4; i++)
        words[i] = word_of_packet(__float2int_rn(v[2 * i] * scale), __float2int_rn(v[2 * i + 1] * scale), exponent, i,
                                  epoch);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// The same, of eight channels of two neighbouring lanes, the even one's first.
__device__ __forceinline__ void publish4(u32* packet, const float (&v)[4], Epoch epoch, int lane, bool store) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) largest = max(largest, __float_as_uint(fabsf(v[i])));
    const u32 exponent = exponent_for(max(largest, __shfl_xor_sync(ALL_LANES, largest, 1)));
    const float scale = 0.25f * units_in_one(exponent);
    u32 words[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        words[i] = word_of_packet(__float2int_rn(v[2 * i] * scale), __float2int_rn(v[2 * i + 1] * scale), exponent,
                                  lane % 2 * 2 + i, epoch);
    if (store) store_words2(packet + lane % 2 * 2, make_uint2(words[0], words[1]));
}

// A lane's column of a tile's sums, and its number among the REPLICAS lanes that have it (shape.cuh).
struct Place {
    int column, replica;
};

// Publishes a tile's 16 rows as two packets in all copies; x: rows j and j + 8.
__device__ __forceinline__ void publish_rows(u32* packets, float2 x, Epoch epoch, int lane, int replica) {
    if constexpr (REPLICAS == 1) {
        publish<4, HOP_COPIES, 1>(packets, x.x, largest_of<4>(x.x), epoch, lane, true);
        publish<4, HOP_COPIES, 1>(packets + PACKET / 2, x.y, largest_of<4>(x.y), epoch, lane, true);
    } else {
        constexpr int APART = larger(REPLICAS / 2, 1), STORES = larger(HOP_COPIES / APART, 1);
        const int upper = replica & 1, copy = replica >> 1;  // lanes that store different copies
        u32* const packet = packets + upper * (PACKET / 2) + copy * HOP_COPY;
        const float value = upper ? x.y : x.x;
        u32 largest;
        if constexpr (COLUMNS == 1) {
            const u32 lower = largest_of_warp(x.x), higher = largest_of_warp(x.y);
            largest = upper ? higher : lower;
        } else {
            largest = largest_of<4>(value);
        }
        publish<4, STORES, APART>(packet, value, largest, epoch, lane, copy < HOP_COPIES);
    }
}

// Publishes eight channels of gate and up, row j's, as SwiGLU in all copies (Shazeer, 2020).
__device__ __forceinline__ void publish_gated(u32* packet, float gate, float up, Epoch epoch, int lane, int replica) {
    const float gated = __fdividef(gate, 1.0f + __expf(-gate)) * up;
    constexpr int STORES = larger(HOP_COPIES / REPLICAS, 1);
    u32* const target = packet + replica * HOP_COPY;
    const u32 largest = COLUMNS == 1 ? largest_of_warp(gated) : largest_of<4>(gated);
    publish<4, STORES, REPLICAS>(target, gated, largest, epoch, lane, replica < HOP_COPIES);
}

// Rows j and j + 8 of a tile of queries, keys or values, as words.
__device__ __forceinline__ void store_heads(u32* hop, int tile, Place place, float2 x, Epoch epoch, int lane) {
    u32* const rows = hop + HOP_QKV + place.column * QKV_ROWS_TOTAL + tile * TILE_ROWS + lane / 4;
#pragma unroll
    for (int upper = 0; upper < 2; upper++)
        if (place.replica == upper % REPLICAS) store_word(rows + upper * 8, word(upper ? x.y : x.x, epoch));
}

// Publishes the sum of the squares of those rows, a word a column, in all copies.
__device__ __forceinline__ void publish_square(u32* squares, float2 x, Epoch epoch, int lane, int replica) {
    float square = x.x * x.x + x.y * x.y;
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) square += __shfl_xor_sync(ALL_LANES, square, o);
    if (lane / 4 < HOP_COPIES && replica == 0) store_word(squares + lane / 4 * HOP_COPY, word(square, epoch));
}
