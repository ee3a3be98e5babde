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

__device__ __forceinline__ KeyShare key_share(int sm, int position) {
    KeyShare share;
    const int all = (position + KV_BLOCK - 1) / KV_BLOCK + 1;  // and the tail
    const int each = max(BLOCKS_PER_SPLIT, (all + MAX_SPLITS - 1) / MAX_SPLITS);
    share.splits = (all + each - 1) / each;
    share.head = sm % KV_HEADS;
    share.split = sm / KV_HEADS;
    share.active = share.split < share.splits;
    share.first = share.split * each;
    share.tail = share.split == share.splits - 1;
    share.blocks = (share.tail ? all - 1 : share.first + each) - share.first;
    return share;
}

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
__device__ __forceinline__ void rotary_table(const Context& c, int position) {
    constexpr int HALF = HEAD_DIM / 2;
    for (int i = threadIdx.x; i < COLUMNS * HALF; i += CONSUMERS) {
        const int column = i / HALF, pair = i % HALF;
        const float angle = __fmul_rn(float(position + column), __ldg(c.p.inverse_frequencies + pair));
        const double turns = rint(double(angle) * 0.15915494309189535);
        const float within = float(fma(turns, -6.283185307179586, double(angle)));
        c.s.rope[column][pair] = __cosf(within);
        c.s.rope[column][HALF + pair] = __sinf(within);
    }
}

// Receives the rows of this KV head: queries, and with the tail the new keys and values. Turns them, keeps the queries
// and the tail in the arena and writes the new keys and values to the cache. A warp takes one row of HEAD_DIM.
__device__ __forceinline__ void receive_heads(const Context& c, const KeyShare& share, int layer, int position, u32 tag) {
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
        const float* const norm = QK_NORM && kind < 2 ? c.p.head_norms + (layer * 2 + kind) * HEAD_DIM : nullptr;
        u32 w[PAIRS][2];
        Watchdog watchdog;
        while (true) {
            bool ready = true;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                w[i][0] = load_word(words + c.lane + i * 32);
                w[i][1] = load_word(words + c.lane + i * 32 + HALF);
                ready &= fresh(w[i][0], tag) && fresh(w[i][1], tag);
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

// Scores, weights and the weighted values of 8 query rows, gathered over blocks by one warp. Lane (g, t) holds row g:
// values[n][e] is dimension (2t + e) * HEAD_DIM / 8 + n.
struct Gathered {
    float largest = NOTHING, sum = 0.0f;
    float values[HEAD_DIM / 8][2];
    __device__ __forceinline__ Gathered() {
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) values[n][0] = values[n][1] = 0.0f;
    }
};

// visible: how many of the block's positions row g may see; written: how many hold anything (both 16 unless MASKED).
template <bool MASKED>
__device__ __forceinline__ void attend(Gathered& a, const u8* block, const u8* queries, int visible, int written,
                                       int lane) {
    const int t = lane % 4;
    constexpr int LOADS = HEAD_DIM / 32;  // 16-byte pieces of one lane's share of a key
    float score[4];                       // positions 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float s[2][4] = {};
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const uint4 k = *reinterpret_cast<const uint4*>(block + half * 8 * HEAD_DIM * 2 + i * 512 + lane * 16);
            const uint4 h = *reinterpret_cast<const uint4*>(queries + i * 512 + lane * 16);
            const uint4 l = *reinterpret_cast<const uint4*>(queries + AttentionArena::QUERY_BYTES + i * 512 + lane * 16);
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
    // Weights too are high + low: rounding them to bf16 alone would cost as much precision as the cache does.
    const u32 p0 = to_bf16x2(weight[0], weight[1]), p1 = to_bf16x2(weight[2], weight[3]);
    const u32 r0 = to_bf16x2(weight[0] - from_bf16(p0 & 0xffff), weight[1] - __uint_as_float(p0 & 0xffff0000));
    const u32 r1 = to_bf16x2(weight[2] - from_bf16(p1 & 0xffff), weight[3] - __uint_as_float(p1 & 0xffff0000));
    const u8* const values = block + KV_BLOCK * HEAD_DIM * 2;
    // Rows 8 .. 15 of the tile are empty; four spare pairs of accumulators keep the products independent.
    float spare[4][2] = {};
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) {
        uint4 v = *reinterpret_cast<const uint4*>(values + i * 512 + lane * 16);
        if constexpr (MASKED) {  // what lies beyond the last position may be anything, NaN included
            const int last = written - 2 * t;
            const u32 low = last >= 2 ? 0xffffffffu : last == 1 ? 0xffffu : 0u;
            const u32 high = last >= 10 ? 0xffffffffu : last == 9 ? 0xffffu : 0u;
            v.x &= low, v.z &= low, v.y &= high, v.w &= high;
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float(&o)[2] = a.values[i * 2 + e];
            o[0] *= shrink, o[1] *= shrink;
            float(&z)[2] = spare[(i * 2 + e) % 4];
            mma_bf16(o[0], o[1], z[0], z[1], p0, 0u, p1, 0u, e ? v.z : v.x, e ? v.w : v.y);
            mma_bf16(o[0], o[1], z[0], z[1], r0, 0u, r1, 0u, e ? v.z : v.x, e ? v.w : v.y);
        }
    }
}

// This SM's part of one layer's attention, published as HEAD_DIM normalised sums, a maximum and a sum per query row.
__device__ __forceinline__ void attention(Context& c, Profile& profile, int layer, int position, u32 tag) {
    if (!c.s.share.active) return;
    c.forget();
    const KeyShare& share = c.s.share;
    AttentionArena& arena = *reinterpret_cast<AttentionArena*>(c.arena);
    c.sync();  // the arena may still hold sums that are being reduced
    receive_heads(c, share, layer, position, tag);
    profile.stamp(4);
    c.sync();
    c.forget();
    const int query_block = c.warp % QUERY_BLOCKS, key_warp = c.warp / QUERY_BLOCKS;
    const int mine = query_block * KEY_WARPS + key_warp;
    if (key_warp < KEY_WARPS) {
        const u8* const queries = arena.queries[query_block][0];
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
                attend<false>(gathered, block, queries, KV_BLOCK, KV_BLOCK, c.lane);
            else
                attend<true>(gathered, block, queries, visible, written, c.lane);
            if (b < blocks) {
                release(c.s.ring, at.slot);
                at.advance((b + KEY_WARPS) / KV_PER_STAGE - b / KV_PER_STAGE);
            }
        }
        gathered.sum += __shfl_xor_sync(ALL_LANES, gathered.sum, 1);
        gathered.sum += __shfl_xor_sync(ALL_LANES, gathered.sum, 2);
        const int g = c.lane / 4, t = c.lane % 4;
        if (g < PARTIAL_ROWS) {
            if (t == 0) arena.weights[mine][g] = make_float2(gathered.largest, gathered.sum);
            float* const sums = arena.sums[mine][g];
#pragma unroll
            for (int e = 0; e < 2; e++)
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; n += 8) {
                    const auto four = [&](int m) {
                        return make_float4(gathered.values[m][e], gathered.values[m + 1][e], gathered.values[m + 2][e],
                                           gathered.values[m + 3][e]);
                    };
                    // Half of the lanes store their two pieces in the other order, so that they meet in no bank.
                    const bool swap = t >= 2;
                    const float4 first = four(n), second = four(n + 4);
                    const int at = (2 * t + e) * (HEAD_DIM / 8) + n;
                    *reinterpret_cast<float4*>(sums + at + (swap ? 4 : 0)) = swap ? second : first;
                    *reinterpret_cast<float4*>(sums + at + (swap ? 0 : 4)) = swap ? first : second;
                }
        }
    }
    c.cursor.advance((share.blocks + KV_PER_STAGE - 1) / KV_PER_STAGE);
    c.sync();
    profile.stamp(5);
    c.forget();
    // One warp merges 32 dimensions of one row over the warps that had keys.
    const int parts = min(KEY_WARPS, share.blocks + int(share.tail));
    constexpr int SLICES = HEAD_DIM / 32;
    for (int item = c.warp; item < QUERY_ROWS * SLICES; item += WARPS) {
        const int row = item / SLICES, d = item % SLICES * 32 + c.lane;
        const int first = row / 8 * KEY_WARPS, g = row % 8;
        const float2 own = c.lane < parts ? arena.weights[first + c.lane][g] : make_float2(NOTHING, 0.0f);
        // The published maximum must be exact, so it is one that a word can hold.
        const float largest = value_of(__float_as_uint(warp_max(own.x)));
        const float factor = own.y > 0.0f ? exp2_fast(own.x - largest) : 0.0f;
        const float sum = warp_sum(factor * own.y);
        float value = 0.0f;
#pragma unroll 4
        for (int w = 0; w < parts; w++) value += __shfl_sync(ALL_LANES, factor, w) * arena.sums[first + w][g][d];
        const int column = row / GROUP_HEADS, head = share.head * GROUP_HEADS + row % GROUP_HEADS;
        const int at = (column * HEADS + head) * MAX_SPLITS + share.split;
        store_word(c.p.scratch + HOP_ATTENTION + at * HEAD_DIM + d, word(sum > 0.0f ? value / sum : 0.0f, tag));
        if (item % SLICES == SLICES - 1 && c.lane < 2)
            store_word(c.p.scratch + HOP_WEIGHTS + at * 2 + c.lane, word(c.lane ? sum : largest, tag));
    }
    c.sync();  // the arena belongs to the next phase's activations
    profile.stamp(6);
}

// Stages the input of the output projection: the splits' partial results, weighted and summed.
template <class P>
__device__ __forceinline__ void stage_attention(const Context& c, int splits, u32 tag) {
    using I = Items<P>;
    constexpr int LANE = I::LANE, AT_ONCE = 4;
    static_assert(MAX_SPLITS <= 16 && 16 * LANE <= HEAD_DIM, "16 lanes share a head, and hold its splits' weights");
    const bool wanted = c.lane % 16 < splits;
    // Two items at once, where a warp has two, made the phase slower (H200: 983 against 944 us a token).
#pragma unroll 1
    for (int item = c.warp; item < I::ALL; item += WARPS) {
        const int column = item / P::X_GROUPS, group = item % P::X_GROUPS, k = group * P::X_GROUP + c.lane * LANE;
        const int at = (column * HEADS + k / HEAD_DIM) * MAX_SPLITS;
        // Lane l polls the weight of split l % 16 of its own head: few bytes, because the wait is long.
        const u32* const weights = c.p.scratch + HOP_WEIGHTS + (at + c.lane % 16) * 2;
        uint2 weight;
        Watchdog watchdog;
        while (true) {
            weight = load_words2(weights);
            if (__all_sync(ALL_LANES, !wanted || (fresh(weight.x, tag) && fresh(weight.y, tag)))) break;
            watchdog.tick(WAIT_ATTENTION);
        }
        const u32* const values = c.p.scratch + HOP_ATTENTION + at * HEAD_DIM + k % HEAD_DIM;
        float factor = 0.0f, v[LANE] = {};
#pragma unroll 1
        for (int s = 0; s < splits; s += AT_ONCE) {
            u32 w[AT_ONCE][LANE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) load_lane_words(w[i], values + min(s + i, splits - 1) * HEAD_DIM);
            if (s == 0) {  // while the values are on their way
                const float sum = value_of(weight.y), own = wanted && sum > 0.0f ? value_of(weight.x) : NOTHING;
                float largest = own;
#pragma unroll
                for (int o = 8; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, o));
                factor = own == NOTHING ? 0.0f : exp2_fast(own - largest) * sum;
                float all = factor;
#pragma unroll
                for (int o = 8; o; o >>= 1) all += __shfl_xor_sync(ALL_LANES, all, o);
                factor = __fdividef(factor, all);
            }
            while (true) {
                bool ready = true;
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
                    for (int e = 0; e < LANE; e++) ready &= fresh(w[i][e], tag);
                if (__all_sync(ALL_LANES, ready)) break;
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) load_lane_words(w[i], values + min(s + i, splits - 1) * HEAD_DIM);
                watchdog.tick(WAIT_ATTENTION);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const float f = __shfl_sync(ALL_LANES, factor, (c.lane & 16) + min(s + i, 15));
#pragma unroll
                for (int e = 0; e < LANE; e++)
                    if (s + i < splits) v[e] += f * value_of(w[i][e]);
            }
        }
        put<P>(c, v, column, group);
    }
}
