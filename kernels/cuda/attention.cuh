// Split attention over the KV cache, for up to COLUMNS new tokens at once.
//
// The keys of a KV head lie in blocks of 16 positions; the new tokens' own keys form one more block, the tail, which
// never goes through the cache on its way here. Splits of equal length go to SMs (split s of KV head h: SM s * KV_HEADS +
// h); their number grows with the context. In an SM, the ring delivers the cached blocks, warp by warp. Queries are
// taken 8 rows at a time; each is two rows of the tensor-core tile, high and low part in bf16, so that scores carry 16
// bits of the query. The softmax runs on line, in base 2 (Milakov and Gimelshein, 2018; Dao et al., 2022).
#pragma once
#include "gemv.cuh"
#include "kv_layout.cuh"

static_assert(KV_BLOCK == 16, "one tile of the second product");

__device__ __forceinline__ int key_blocks(int position) { return (position + KV_BLOCK - 1) / KV_BLOCK + 1; }  // and the tail

// step: the position that the number of splits follows. It only grows: a split's part of a hop is either written in every
// layer, or was never.
__device__ __forceinline__ KeyShare key_share(int sm, int position, int step) {
    KeyShare share;
    const int all = key_blocks(position);
    share.splits = min(MAX_SPLITS, (key_blocks(step) + BLOCKS_PER_SPLIT - 1) / BLOCKS_PER_SPLIT);
    share.head = sm % KV_HEADS;
    share.split = sm / KV_HEADS;
    share.active = share.split < share.splits;
    share.first = all * share.split / share.splits;
    share.tail = share.split == share.splits - 1;
    share.blocks = (share.tail ? all - 1 : all * (share.split + 1) / share.splits) - share.first;
    return share;
}

__device__ __forceinline__ KeyShare key_share(int sm, int position) { return key_share(sm, position, position); }

// The arena's other use.
struct AttentionArena {
    static constexpr int QUERY_BYTES = 8 * HEAD_DIM * 2;  // 8 rows, one part, in the order of kv_layout.cuh's keys
    u8 queries[QUERY_BLOCKS][2][QUERY_BYTES];
    u8 tail[KV_BYTES];
    float sums[QUERY_BLOCKS * KEY_WARPS][PARTIAL_ROWS][HEAD_DIM + 8];  // 8 more: two rows share no bank
    float2 weights[QUERY_BLOCKS * KEY_WARPS][PARTIAL_ROWS];  // largest score, sum of exponentials
};
static_assert(sizeof(AttentionArena) <= ARENA_BYTES, "attention fits the arena");

// Rotary angles of the new positions (half-split convention, Su et al. 2021), in the float32 product that all
// implementations share; its reduction modulo 2 pi is done in double, where single precision would lose long contexts.
__device__ __forceinline__ void rotary_table(const Context& c, int position, const float* frequencies) {
    constexpr int HALF = HEAD_DIM / 2;
    for (int i = threadIdx.x; i < COLUMNS * HALF; i += CONSUMERS) {
        const int column = i / HALF, pair = i % HALF;
        const float angle = __fmul_rn(float(position + column), __ldg(frequencies + pair));
        const double turns = rint(double(angle) * 0.15915494309189535);
        const float within = float(fma(turns, -6.283185307179586, double(angle)));
        c.s.rope[column][pair] = __cosf(within);
        c.s.rope[column][HALF + pair] = __sinf(within);
    }
}

// Receives the rows of this KV head: queries, and with the tail the new keys and values. Turns them, keeps the queries
// and the tail in the arena and writes the new keys and values to the cache. A warp takes one row of HEAD_DIM.
__device__ __forceinline__ void receive_heads(const Context& c, const KeyShare& share, int layer, int position, Epoch epoch) {
    constexpr int HALF = HEAD_DIM / 2, PAIRS = HALF / 32;
    AttentionArena& arena = *reinterpret_cast<AttentionArena*>(c.arena);
    u16* const cache = c.p.kv + layer * c.p.kv_layer_stride + share.head * c.p.kv_head_stride;
    const int rows = QUERY_ROWS + (share.tail ? 2 * COLUMNS : 0);
    for (int row = c.warp; row < rows; row += WARPS) {
        const int kind = row < QUERY_ROWS ? 0 : row < QUERY_ROWS + COLUMNS ? 1 : 2;  // query, key, value
        const int column = kind == 0 ? row / GROUP_HEADS : (row - QUERY_ROWS) % COLUMNS;
        const int source = kind == 0 ? (share.head * GROUP_HEADS + row % GROUP_HEADS) * HEAD_DIM
                                     : (HEADS + (kind - 1) * KV_HEADS + share.head) * HEAD_DIM;
        const u32* const words = c.p.scratch + HOP_QKV + column * QKV_ROWS_TOTAL + source;
        const float* const norm = QK_NORM && kind < 2 && layer < LAYERS ? c.p.head_norms + (layer * 2 + kind) * HEAD_DIM : nullptr;
        u32 w[PAIRS][2];
        Watchdog watchdog;
        while (true) {
            bool ready = true;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                w[i][0] = load_word(words + c.lane + i * 32);
                w[i][1] = load_word(words + c.lane + i * 32 + HALF);
                ready &= fresh(w[i][0], epoch) && fresh(w[i][1], epoch);
            }
            if (__all_sync(ALL_LANES, ready)) break;
            watchdog.tick(WAIT_QKV);
        }
        float v[PAIRS][2], scale = 1.0f;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) v[i][0] = value_of(w[i][0]), v[i][1] = value_of(w[i][1]);
        if (norm) {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) squares += v[i][0] * v[i][0] + v[i][1] * v[i][1];
            scale = rsqrtf(warp_sum(squares) * (1.0f / HEAD_DIM) + RMS_EPS);
        }
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int d = c.lane + i * 32;
            float a = v[i][0], b = v[i][1];
            if (norm) a *= scale * __ldg(norm + d), b *= scale * __ldg(norm + d + HALF);
            if (kind < 2) {
                const float cosine = c.s.rope[column][d], sine = c.s.rope[column][HALF + d];
                const float turned = a * cosine - b * sine;
                b = b * cosine + a * sine;
                a = turned;
            }
            if (kind == 0) {
                a *= ATTENTION_MULTIPLIER * LOG2_E, b *= ATTENTION_MULTIPLIER * LOG2_E;
                const u32 high = to_bf16x2(a, b);
                const u32 low = to_bf16x2(a - from_bf16(high & 0xffff), b - __uint_as_float(high & 0xffff0000));
                u16* const h = reinterpret_cast<u16*>(arena.queries[row / 8][0]);
                u16* const l = reinterpret_cast<u16*>(arena.queries[row / 8][1]);
                const int at = key_offset<HEAD_DIM>(row % 8, d), at_half = key_offset<HEAD_DIM>(row % 8, d + HALF);
                h[at] = u16(high), h[at_half] = u16(high >> 16);
                l[at] = u16(low), l[at_half] = u16(low >> 16);
            } else {
                const u32 both = to_bf16x2(a, b);
                u16* const tail = reinterpret_cast<u16*>(arena.tail);
                const int at = kind == 1 ? key_offset<HEAD_DIM>(column, d) : value_offset<HEAD_DIM>(column, d);
                const int at_half =
                    kind == 1 ? key_offset<HEAD_DIM>(column, d + HALF) : value_offset<HEAD_DIM>(column, d + HALF);
                tail[at] = u16(both), tail[at_half] = u16(both >> 16);
                if (column < c.p.columns) {
                    const int p = position + column, in = p % KV_BLOCK;
                    u16* const block = cache + size_t(p / KV_BLOCK) * (KV_BYTES / 2);
                    block[kind == 1 ? key_offset<HEAD_DIM>(in, d) : value_offset<HEAD_DIM>(in, d)] = u16(both);
                    block[kind == 1 ? key_offset<HEAD_DIM>(in, d + HALF) : value_offset<HEAD_DIM>(in, d + HALF)] =
                        u16(both >> 16);
                }
            }
        }
    }
}

// Scores, weights and 64 dimensions of the weighted values of 8 query rows, gathered over blocks by one warp. Lane (g, t)
// holds row g: values[n][e] is dimension (2t + e) * HEAD_DIM / 8 + 8 * part + n, values[n][2 + e] what the low parts of
// the weights add to it.
struct Gathered {
    float largest = NOTHING, sum = 0.0f;
    float values[8][4];
    __device__ __forceinline__ Gathered() {
#pragma unroll
        for (int n = 0; n < 8; n++) values[n][0] = values[n][1] = values[n][2] = values[n][3] = 0.0f;
    }
};

// A lane's share of 8 query rows. Held over all blocks where registers allow: reading it again is half of what a block
// costs of shared memory's bandwidth.
struct Queries {
    static constexpr int LOADS = HEAD_DIM / 32;  // 16-byte pieces of one lane's share of a row
    static constexpr bool HELD = HEAD_DIM <= 64;
    uint4 high[HELD ? LOADS : 1], low[HELD ? LOADS : 1];
    const u8* at;
    __device__ __forceinline__ Queries(const u8* queries, int lane) : at(queries + lane * 16) {
        if constexpr (HELD)
#pragma unroll
            for (int i = 0; i < LOADS; i++) high[i] = read(i, 0), low[i] = read(i, 1);
    }
    __device__ __forceinline__ uint4 read(int i, int part) const {
        return *reinterpret_cast<const uint4*>(at + part * AttentionArena::QUERY_BYTES + i * 512);
    }
    __device__ __forceinline__ uint4 get_high(int i) const { return HELD ? high[HELD ? i : 0] : read(i, 0); }
    __device__ __forceinline__ uint4 get_low(int i) const { return HELD ? low[HELD ? i : 0] : read(i, 1); }
};

// visible: how many of the block's positions row g may see; written: how many hold anything (both 16 unless MASKED).
template <bool MASKED>
__device__ __forceinline__ void attend(Gathered& a, const u8* block, const Queries& queries, int visible, int written,
                                       int part, int lane) {
    const int t = lane % 4;
    constexpr int LOADS = Queries::LOADS;
    float score[4];                       // positions 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float s[2][4] = {};
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const uint4 k = *reinterpret_cast<const uint4*>(block + half * 8 * HEAD_DIM * 2 + i * 512 + lane * 16);
            const uint4 h = queries.get_high(i), l = queries.get_low(i);
            mma_bf16(s[0][0], s[0][1], s[0][2], s[0][3], h.x, l.x, h.y, l.y, k.x, k.y);
            mma_bf16(s[1][0], s[1][1], s[1][2], s[1][3], h.z, l.z, h.w, l.w, k.z, k.w);
        }
        score[half * 2] = (s[0][0] + s[1][0]) + (s[0][2] + s[1][2]);
        score[half * 2 + 1] = (s[0][1] + s[1][1]) + (s[0][3] + s[1][3]);
    }
    if constexpr (MASKED) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i / 2 * 8 + 2 * t + i % 2 >= visible) score[i] = NOTHING;
    }
    float largest = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
    largest = fmaxf(largest, a.largest);
    const float shrink = exp2_fast(a.largest - largest);
    a.largest = largest;
    // A row that sees nothing yet has largest = NOTHING: its weights would be 1, so they are cut off by hand.
    float weight[4];
#pragma unroll
    for (int i = 0; i < 4; i++) weight[i] = MASKED && score[i] == NOTHING ? 0.0f : exp2_fast(score[i] - largest);
    a.sum = a.sum * shrink + ((weight[0] + weight[1]) + (weight[2] + weight[3]));
    // Weights too are high + low, rows g and g + 8 of the tile: bf16 alone would cost as much precision as the cache does.
    const u32 p0 = to_bf16x2(weight[0], weight[1]), p1 = to_bf16x2(weight[2], weight[3]);
    const u32 r0 = to_bf16x2(weight[0] - from_bf16(p0 & 0xffff), weight[1] - __uint_as_float(p0 & 0xffff0000));
    const u32 r1 = to_bf16x2(weight[2] - from_bf16(p1 & 0xffff), weight[3] - __uint_as_float(p1 & 0xffff0000));
    const u8* const values = block + KV_BLOCK * HEAD_DIM * 2 + part * (4 * 512);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 v = *reinterpret_cast<const uint4*>(values + i * 512 + lane * 16);
        if constexpr (MASKED) {  // what lies beyond the last position may be anything, NaN included
            const int last = written - 2 * t;
            const u32 low = last >= 2 ? 0xffffffffu : last == 1 ? 0xffffu : 0u;
            const u32 high = last >= 10 ? 0xffffffffu : last == 9 ? 0xffffu : 0u;
            v.x &= low, v.z &= low, v.y &= high, v.w &= high;
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float(&o)[4] = a.values[i * 2 + e];
            o[0] *= shrink, o[1] *= shrink, o[2] *= shrink, o[3] *= shrink;
            mma_bf16(o[0], o[1], o[2], o[3], p0, r0, p1, r1, e ? v.z : v.x, e ? v.w : v.y);
        }
    }
}

// This SM's part of one layer's attention, published as HEAD_DIM sums, a maximum and a sum of weights per query row.
__device__ __forceinline__ void attention(Context& c, Profile& profile, int layer, int position, Epoch epoch) {
    if (!c.s.share.active) return;
    c.forget();
    const KeyShare& share = c.s.share;
    AttentionArena& arena = *reinterpret_cast<AttentionArena*>(c.arena);
    c.sync();  // the arena may still hold sums that are being reduced
    receive_heads(c, share, layer, position, epoch);
    profile.stamp(4);
    c.sync();
    c.forget();
    const int query_block = c.warp % QUERY_BLOCKS, part = c.warp / QUERY_BLOCKS % VALUE_PARTS;
    const int key_warp = c.warp / KEY_READERS;
    const int mine = query_block * KEY_WARPS + key_warp;
    if (key_warp < KEY_WARPS) {
        const Queries queries(arena.queries[query_block][0], c.lane);
        const int row = query_block * 8 + c.lane / 4;
        Gathered gathered;
        Cursor at = c.cursor;
        at.advance(key_warp / KV_PER_STAGE);
        const int blocks = share.blocks;
        const int all = blocks + share.tail;  // the tail comes last
#pragma unroll 1
        for (int b = key_warp; b < all; b += KEY_WARPS) {
            const u8* block = arena.tail;
            int visible = min(row / GROUP_HEADS, COLUMNS - 1) + 1, written = COLUMNS;
            if (b < blocks) {
                barrier_wait(&c.s.ring.full[at.slot], at.parity, WAIT_FULL);
                block = c.slots + at.slot * STAGE_BYTES + b % KV_PER_STAGE * KV_BYTES;
                visible = written = min(position - (share.first + b) * KV_BLOCK, KV_BLOCK);
            }
            if (written == KV_BLOCK)
                attend<false>(gathered, block, queries, KV_BLOCK, KV_BLOCK, part, c.lane);
            else
                attend<true>(gathered, block, queries, visible, written, part, c.lane);
            if (b < blocks) {
                release(c.s.ring, at.slot);
                at.advance((b + KEY_WARPS) / KV_PER_STAGE - b / KV_PER_STAGE);
            }
        }
        gathered.sum += __shfl_xor_sync(ALL_LANES, gathered.sum, 1);
        gathered.sum += __shfl_xor_sync(ALL_LANES, gathered.sum, 2);
        const int g = c.lane / 4, t = c.lane % 4;
        if (g < PARTIAL_ROWS) {
            if (t == 0 && part == 0) arena.weights[mine][g] = make_float2(gathered.largest, gathered.sum);
            float* const sums = arena.sums[mine][g];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const auto sum = [&](int n) { return gathered.values[n][e] + gathered.values[n][2 + e]; };
                const float4 first = make_float4(sum(0), sum(1), sum(2), sum(3));
                const float4 second = make_float4(sum(4), sum(5), sum(6), sum(7));
                // Half of the lanes store their two pieces in the other order, so that they meet in no bank.
                const bool swap = t >= 2;
                float* const to = sums + (2 * t + e) * (HEAD_DIM / 8) + part * 8;
                *reinterpret_cast<float4*>(to + (swap ? 4 : 0)) = swap ? second : first;
                *reinterpret_cast<float4*>(to + (swap ? 0 : 4)) = swap ? first : second;
            }
        }
    }
    c.cursor.advance((share.blocks + KV_PER_STAGE - 1) / KV_PER_STAGE);
    c.sync();
    profile.stamp(5);
    c.forget();
    // One warp merges one row over the warps that had keys.
    const int parts = min(KEY_WARPS, share.blocks + int(share.tail));
    for (int row = c.warp; row < QUERY_ROWS; row += WARPS) {
        const int first = row / 8 * KEY_WARPS, g = row % 8;
        const float2 own = c.lane < parts ? arena.weights[first + c.lane][g] : make_float2(NOTHING, 0.0f);
        // The published maximum must be exact, so it is one that a word can hold.
        const float largest = value_of(__float_as_uint(warp_max(own.x)));
        const float factor = own.y > 0.0f ? exp2_fast(own.x - largest) : 0.0f;
        const float sum = warp_sum(factor * own.y);
        const int column = row / GROUP_HEADS, head = share.head * GROUP_HEADS + row % GROUP_HEADS;
        const int at = (column * HEADS + head) * MAX_SPLITS + share.split;
        // Before the values, so that their readers have the splits' shares by the time the values come.
        if (c.lane < 2) store_word(c.p.scratch + HOP_WEIGHTS + at * 2 + c.lane, word(c.lane ? sum : largest, epoch));
        float value[HEAD_DIM / 32] = {};
#pragma unroll 4
        for (int w = 0; w < parts; w++) {
            const float f = __shfl_sync(ALL_LANES, factor, w);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 32; i++) value[i] += f * arena.sums[first + w][g][i * 32 + c.lane];
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++) {
            u32* const packets = c.p.scratch + HOP_ATTENTION + (at * HEAD_DIM + i * 32 + c.lane - c.lane % PACKET) / 2;
            publish<1>(packets, value[i], epoch, c.lane, true);
        }
    }
    c.sync();  // the arena belongs to the next phase's activations
    profile.stamp(6);
}

// A packet's field as a float, in steps of the packet's unit. The mantissa of 2^23 + (field + 2^15) is the field with its
// top bit flipped: cheaper than the conversion, which runs at a quarter of the rate.
__device__ __forceinline__ float field(u32 flipped, int half) {
    return __uint_as_float(__byte_perm(flipped, 0x4b000000u, half ? 0x7432 : 0x7410)) - 8421376.0f;
}

// Stages the input of the output projection: the splits' partial results, weighted and summed.
template <class P>
struct AttentionInput {
    using I = Items<P>;
    static constexpr int LANES = HEAD_DIM / PACKET;          // that share a head
    static constexpr int OWN = LANES < 16 ? 16 / LANES : 1;  // splits whose weights a lane holds: l % LANES + i * LANES
    static constexpr int AT_ONCE = 4;                        // splits
    static_assert(MAX_SPLITS <= 16 && LANES <= 32, "a head's lanes hold its splits' weights");

    const Context& c;
    const int splits;
    const Epoch epoch;
    const u32 *weights, *packets;  // of the lane's head and channels in the item at hand
    uint2 weight[OWN];
    uint4 w[AT_ONCE];

    __device__ __forceinline__ AttentionInput(const Context& c, int splits, Epoch epoch)
        : c(c), splits(splits), epoch(epoch) {}

    __device__ __forceinline__ void go_to(int item) {
        const int k = min(item % I::PER_COLUMN * ITEM + c.lane * PACKET, P::K - PACKET);
        const int at = (item / I::PER_COLUMN * HEADS + k / HEAD_DIM) * MAX_SPLITS;
        weights = c.p.scratch + HOP_WEIGHTS + at * 2;
        packets = c.p.scratch + HOP_ATTENTION + (at * HEAD_DIM + k % HEAD_DIM) / 2;
    }
    __device__ __forceinline__ void load_weights() {
#pragma unroll
        for (int i = 0; i < OWN; i++)
            if (i * LANES < splits) weight[i] = load_words2(weights + min(c.lane % LANES + i * LANES, splits - 1) * 2);
    }
    __device__ __forceinline__ void load_packets(int first) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) w[i] = load_words4(packets + min(first + i, splits - 1) * (HEAD_DIM / 2));
    }
    __device__ __forceinline__ void await_weights() {
        Watchdog watchdog;
        while (true) {
            bool ready = true;
#pragma unroll
            for (int i = 0; i < OWN; i++)
                if (i * LANES < splits) ready &= fresh(weight[i].x, epoch) && fresh(weight[i].y, epoch);
            if (__all_sync(ALL_LANES, ready)) return;
            load_weights();
            watchdog.tick(WAIT_ATTENTION);
        }
    }
    __device__ __forceinline__ void await_packets(int first) {
        Watchdog watchdog;
        while (true) {
            bool ready = true;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) ready &= fresh(w[i], epoch);
            if (__all_sync(ALL_LANES, ready)) return;
            load_packets(first);
            watchdog.tick(WAIT_ATTENTION);
        }
    }
    // What each split's values are to be multiplied by: 2^(its maximum - the largest), over all splits' sums of weights.
    __device__ __forceinline__ void factors(float (&factor)[OWN]) const {
        float largest = NOTHING, all = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const bool has = c.lane % LANES + i * LANES < splits && value_of(weight[i].y) > 0.0f;
            factor[i] = has ? value_of(weight[i].x) : NOTHING;
            largest = fmaxf(largest, factor[i]);
        }
#pragma unroll
        for (int o = LANES / 2; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, o));
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            factor[i] = factor[i] == NOTHING ? 0.0f : exp2_fast(factor[i] - largest);
            all += factor[i] > 0.0f ? factor[i] * value_of(weight[i].y) : 0.0f;
        }
#pragma unroll
        for (int o = LANES / 2; o; o >>= 1) all += __shfl_xor_sync(ALL_LANES, all, o);
#pragma unroll
        for (int i = 0; i < OWN; i++) factor[i] = __fdividef(factor[i], all);
    }
    __device__ __forceinline__ void add(float (&v)[PACKET], const float (&factor)[OWN], int first) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int split = first + i, from = c.lane / LANES * LANES + split % LANES;
            const float f = __shfl_sync(ALL_LANES, OWN > 1 && split >= LANES ? factor[OWN - 1] : factor[0], from);
            if (split >= splits) continue;
            const float g = f * unit_of(exponent_of(w[i]));
            const u32 words[4] = {w[i].x, w[i].y, w[i].z, w[i].w};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const u32 flipped = (words[e] & MANTISSAS) ^ 0x80008000u;
                v[2 * e] += g * field(flipped, 0);
                v[2 * e + 1] += g * field(flipped, 1);
            }
        }
    }
    __device__ __forceinline__ void stage() {
        if (c.warp >= I::ALL) return;
        go_to(c.warp);
        load_weights();  // few bytes to poll, because the wait is long
        await_weights();
        load_packets(0);
#pragma unroll 1
        for (int item = c.warp; item < I::ALL; item += WARPS) {
            const bool more = I::ROUNDS > 1 && item + WARPS < I::ALL;
            float factor[OWN], v[PACKET] = {};
            factors(factor);  // while the values are on their way
            await_packets(0);
            add(v, factor, 0);
#pragma unroll 1
            for (int s = AT_ONCE; s < splits; s += AT_ONCE) {
                load_packets(s);
                await_packets(s);
                add(v, factor, s);
            }
            if (more) {  // on their way while this item is put
                go_to(item + WARPS);
                load_weights();
                load_packets(0);
            }
            const int within = item % I::PER_COLUMN;
            put_values<P>(c, v, within * ITEM + c.lane * PACKET < P::K, item / I::PER_COLUMN, within);
            if (more) await_weights();
        }
    }
};
