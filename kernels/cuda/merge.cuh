// Merging the splits of attention: rows of queries whose keys were dealt to several SMs become one again. One warp somewhere
// merges a row and publishes it, so that all SMs read one result instead of sixteen parts. (A hop less, each reader merging
// what it reads, was slower even for one token: 683 us instead of 660 with 13 splits, 677 with eight.)
#pragma once
#include "attention.cuh"

// A packet's field as a float, in steps of the packet's unit. What the packet holds is its value + 2^15, and with 2^23 a
// float's mantissa: cheaper than the conversion.
__device__ __forceinline__ float field(u32 mantissas, int half) {
    return __uint_as_float(__byte_perm(mantissas, 0x4b000000u, half ? 0x7432 : 0x7410)) - 8421376.0f;
}

// Adds factor times a packet's channels to v.
__device__ __forceinline__ void add_packet(float (&v)[PACKET], const uint4& packet, float factor) {
    const float g = factor * unit_of(exponent_of(packet));
    const u32 words[4] = {packet.x, packet.y, packet.z, packet.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const u32 mantissas = words[e] & MANTISSA * BOTH;
        v[2 * e] += g * field(mantissas, 0);
        v[2 * e + 1] += g * field(mantissas, 1);
    }
}

// Merges the splits' parts of some query rows, a warp a row, and publishes them: what the output projection reads. Which SM
// merges which rows is no matter; those that attend to no keys come first.
__device__ __forceinline__ void merge_splits(const Context& c, Epoch epoch) {
    constexpr int LANES = HEAD_DIM / PACKET, ABREAST = 32 / LANES;  // lanes of one split; splits side by side in a warp
    constexpr int ROUNDS = (MAX_SPLITS + ABREAST - 1) / ABREAST, AT_ONCE = ROUNDS < 4 ? ROUNDS : 4;
    static_assert(MAX_SPLITS <= 32 && LANES <= 32, "a lane holds a split's weight");
    const int splits = c.s.share.splits, abreast = c.lane / LANES, piece = c.lane % LANES;
#pragma unroll 1
    for (int row = SMS - 1 - c.sm + (WARPS - 1 - c.warp) * SMS; row < COLUMNS * HEADS; row += WARPS * SMS) {
        const u32* const weights = c.p.scratch + HOP_WEIGHTS + (row * MAX_SPLITS + min(c.lane, splits - 1)) * 2;
        const u32* const packets = c.p.scratch + HOP_ATTENTION + row * MAX_SPLITS * (HEAD_DIM / 2) + piece * (PACKET / 2);
        uint4 w[AT_ONCE];
        const auto load = [&](int first) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                w[i] = load_words4(packets + min(first + i * ABREAST + abreast, splits - 1) * (HEAD_DIM / 2));
        };
        uint2 weight;
        Watchdog watchdog;
        while (true) {
            weight = load_words2(weights);
            load(0);
            bool ready = fresh(weight.x, epoch) && fresh(weight.y, epoch);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) ready &= fresh(w[i], epoch);
            if (__all_sync(ALL_LANES, ready)) break;
            watchdog.tick(WAIT_SPLITS);
        }
        // What each split's values are to be multiplied by: 2^(its maximum - the largest), over all splits' sums of weights.
        const float sum = c.lane < splits ? value_of(weight.y) : 0.0f;
        const float largest = warp_max(sum > 0.0f ? value_of(weight.x) : NOTHING);
        float factor = sum > 0.0f ? exp2_fast(value_of(weight.x) - largest) : 0.0f;
        factor = __fdividef(factor, warp_sum(factor * sum));
        float v[PACKET] = {};
#pragma unroll 1
        for (int first = 0; first < splits; first += AT_ONCE * ABREAST) {
            if (first > 0) {
                while (true) {
                    load(first);
                    bool ready = true;
#pragma unroll
                    for (int i = 0; i < AT_ONCE; i++) ready &= fresh(w[i], epoch);
                    if (__all_sync(ALL_LANES, ready)) break;
                    watchdog.tick(WAIT_SPLITS);
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int split = first + i * ABREAST + abreast;
                const float f = __shfl_sync(ALL_LANES, factor, split & 31);
                add_packet(v, w[i], split < splits ? f : 0.0f);
            }
        }
#pragma unroll
        for (int o = LANES; o < 32; o <<= 1)
#pragma unroll
            for (int e = 0; e < PACKET; e++) v[e] += __shfl_xor_sync(ALL_LANES, v[e], o);
        u32* const merged = c.p.scratch + HOP_MERGED + (row * HEAD_DIM + piece * PACKET) / 2;
        const uint4 packet = packet_of(v, epoch);
        for (int copy = abreast; copy < HOP_COPIES; copy += ABREAST) store_words4(merged + copy * HOP_COPY, packet);
    }
}
