// Split attention over the KV cache, for up to COLUMNS new tokens at once.
//
// The keys of a KV head lie in blocks of 16 positions; the new tokens' own keys form one more block, the tail, which
// never goes through the cache on its way here. Splits of equal length go to SMs (split s of KV head h: SM s * KV_HEADS +
// h); their number grows with the context. In an SM, the ring delivers the cached blocks, warp by warp. Queries are
// taken 8 rows at a time; each is two rows of the tensor-core tile, high and low part in fp16, so that scores carry 22
// bits of the query. The softmax runs on line, in base 2 (Milakov and Gimelshein, 2018; Dao et al., 2022). merge.cuh
// has what follows.
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
    float sums[KEY_WARPS][QUERY_ROWS][HEAD_DIM + 8];  // 8 more: two rows share no bank
    float2 weights[KEY_WARPS][QUERY_ROWS];  // largest score, sum of exponentials
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

// Lanes that share a row of queries, keys, values or sums, four dimensions each, and rows that a warp has at once.
constexpr int ROW_LANES = HEAD_DIM < 128 ? HEAD_DIM / 4 : 32, ROWS_AT_ONCE = 32 / ROW_LANES;
constexpr int ROW_STEPS = HEAD_DIM / 4 / ROW_LANES;

template <class F>
__device__ __forceinline__ float over_row(float v, F f) {  // all lanes of a row get f over their values
#pragma unroll
    for (int o = ROW_LANES / 2; o; o >>= 1) v = f(v, __shfl_xor_sync(ALL_LANES, v, o));
    return v;
}

// Receives the rows of this KV head: queries, and with the tail the new keys and values. Turns them, keeps the queries
// and the tail in the arena and writes the new keys and values to the cache.
__device__ __forceinline__ void receive_heads(const Context& c, const KeyShare& share, int layer, int position,
                                              Epoch epoch) {
    constexpr int HALF = HEAD_DIM / 2;
    AttentionArena& arena = *reinterpret_cast<AttentionArena*>(c.arena);
    u16* const cache = c.p.kv + layer * c.p.kv_layer_stride + share.head * c.p.kv_head_stride;
    const int rows = QUERY_ROWS + (share.tail ? 2 * COLUMNS : 0), own = c.lane % ROW_LANES;
    // 0: a query, 1: a key, 2: a value
    const auto kind_of = [](int row) { return row < QUERY_ROWS ? 0 : row < QUERY_ROWS + COLUMNS ? 1 : 2; };
    const auto column_of = [](int row) { return row < QUERY_ROWS ? row / GROUP_HEADS : (row - QUERY_ROWS) % COLUMNS; };
    // A lane has two consecutive dimensions of each rotary half.
    uint2 w[ROW_STEPS][2];
    const auto load = [&](int row) {
        row = min(row, rows - 1);
        const int kind = kind_of(row);
        const int source = kind == 0 ? (share.head * GROUP_HEADS + row % GROUP_HEADS) * HEAD_DIM
                                     : (HEADS + (kind - 1) * KV_HEADS + share.head) * HEAD_DIM;
        const u32* const words = c.p.scratch + HOP_QKV + column_of(row) * QKV_ROWS_TOTAL + source + own * 2;
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++) {
            w[i][0] = load_words2(words + i * 64);
            w[i][1] = load_words2(words + i * 64 + HALF);
        }
    };
    const int first = c.warp * ROWS_AT_ONCE + c.lane / ROW_LANES;
    constexpr int STEP = WARPS * ROWS_AT_ONCE;
    if (c.warp * ROWS_AT_ONCE < rows) load(first);
    for (int row = first; row - c.lane / ROW_LANES < rows; row += STEP) {
        const int kind = kind_of(row), column = column_of(row);
        const bool inside = row < rows;
        const bool normed = QK_NORM && kind < 2 && layer < LAYERS;
        const float* const norm = normed ? c.p.head_norms + (layer * 2 + kind) * HEAD_DIM : nullptr;
        Watchdog watchdog;
        while (true) {
            bool ready = true;
#pragma unroll
            for (int i = 0; i < ROW_STEPS; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) ready &= fresh(w[i][half].x, epoch) && fresh(w[i][half].y, epoch);
            if (__all_sync(ALL_LANES, ready)) break;
            load(row);
            watchdog.tick(WAIT_QKV);
        }
        float v[ROW_STEPS][2][2], squares = 0.0f;
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                v[i][half][0] = value_of(w[i][half].x), v[i][half][1] = value_of(w[i][half].y);
                squares += v[i][half][0] * v[i][half][0] + v[i][half][1] * v[i][half][1];
            }
        if (row - c.lane / ROW_LANES + STEP < rows) load(row + STEP);  // on its way while this one is turned
        float scale = 1.0f;
        if constexpr (QK_NORM)
            scale = rsqrtf(over_row(squares, [](float a, float b) { return a + b; }) * (1.0f / HEAD_DIM) + RMS_EPS);
        if (!inside) continue;
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++) {
            const int d = own * 2 + i * 64;
            float a[2], b[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                a[e] = v[i][0][e], b[e] = v[i][1][e];
                if (norm) a[e] *= scale * __ldg(norm + d + e), b[e] *= scale * __ldg(norm + d + e + HALF);
                if (kind < 2) {
                    const float cosine = c.s.rope[column][d + e], sine = c.s.rope[column][HALF + d + e];
                    const float turned = a[e] * cosine - b[e] * sine;
                    b[e] = b[e] * cosine + a[e] * sine;
                    a[e] = turned;
                }
                if (kind == 0) a[e] *= ATTENTION_MULTIPLIER * LOG2_E, b[e] *= ATTENTION_MULTIPLIER * LOG2_E;
            }
            // Saturated, a query's two parts at twice fp16's largest. Of a small one they lose up to 2^-25, and a score up
            // to that times the sum of its key's magnitudes: 1e-5 for 64 of 5. As the softmax looks at differences of
            // scores, not at ratios, small queries need no scale of their own.
            const u32 first_half = to_half2(a[0], a[1]), other_half = to_half2(b[0], b[1]);
            if (kind == 0) {
                u8* const high = arena.queries[row / 8][0];
                u8* const low = arena.queries[row / 8][1];
                const int at = 2 * key_offset<HEAD_DIM>(row % 8, d), at_half = 2 * key_offset<HEAD_DIM>(row % 8, d + HALF);
                *reinterpret_cast<u32*>(high + at) = first_half, *reinterpret_cast<u32*>(high + at_half) = other_half;
                *reinterpret_cast<u32*>(low + at) = rest_of_half2(first_half, a[0], a[1]);
                *reinterpret_cast<u32*>(low + at_half) = rest_of_half2(other_half, b[0], b[1]);
            } else {
                const int at_position = position + column, in = at_position % KV_BLOCK;
                u16* const block = cache + size_t(at_position / KV_BLOCK) * (KV_BYTES / 2);
                const auto store = [&](u16* to, int in_block) {
                    if (kind == 1) {
                        *reinterpret_cast<u32*>(to + key_offset<HEAD_DIM>(in_block, d)) = first_half;
                        *reinterpret_cast<u32*>(to + key_offset<HEAD_DIM>(in_block, d + HALF)) = other_half;
                        return;
                    }
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        to[value_offset<HEAD_DIM>(in_block, d + e)] = u16(first_half >> (16 * e));
                        to[value_offset<HEAD_DIM>(in_block, d + e + HALF)] = u16(other_half >> (16 * e));
                    }
                };
                store(reinterpret_cast<u16*>(arena.tail), column);
                if (column < c.p.columns) store(block, in);
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
            mma_f16(s[0][0], s[0][1], s[0][2], s[0][3], h.x, l.x, h.y, l.y, k.x, k.y);
            mma_f16(s[1][0], s[1][1], s[1][2], s[1][3], h.z, l.z, h.w, l.w, k.z, k.w);
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
    // Weights too are high + low, rows g and g + 8 of the tile: fp16 alone would cost as much precision as the cache does.
    // Those below 2^-25 of the largest so far count in the sum only: of what one warp gathers, n * 2^-25 at most.
    const u32 p0 = to_half2(weight[0], weight[1]), p1 = to_half2(weight[2], weight[3]);
    const u32 r0 = rest_of_half2(p0, weight[0], weight[1]), r1 = rest_of_half2(p1, weight[2], weight[3]);
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
            mma_f16(o[0], o[1], o[2], o[3], p0, r0, p1, r1, e ? v.z : v.x, e ? v.w : v.y);
        }
    }
}

// This SM's part of one layer's attention, published as HEAD_DIM sums, a maximum and a sum of weights per query row.
__device__ __forceinline__ void attention(Context& c, Profile& profile, int layer, int position, Epoch epoch) {
    if (!c.s.share.active) return;
    c.forget();
    const KeyShare& share = c.s.share;
    AttentionArena& arena = *reinterpret_cast<AttentionArena*>(c.arena);
    receive_heads(c, share, layer, position, epoch);
    profile.stamp(4);
    c.sync();
    c.forget();
    const int query_block = c.warp % QUERY_BLOCKS, part = c.warp / QUERY_BLOCKS % VALUE_PARTS;
    const int key_warp = c.warp / KEY_READERS;
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
        const int t = c.lane % 4;
        if (row < QUERY_ROWS) {
            if (t == 0 && part == 0) arena.weights[key_warp][row] = make_float2(gathered.largest, gathered.sum);
            float* const sums = arena.sums[key_warp][row];
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
    // The lanes of a row merge it over the warps that had keys.
    const int parts = min(KEY_WARPS, share.blocks + int(share.tail)), own_lane = c.lane % ROW_LANES;
    static_assert(KEY_WARPS <= ROW_LANES, "a lane holds a warp's weight");
    for (int first_row = c.warp * ROWS_AT_ONCE; first_row < QUERY_ROWS; first_row += WARPS * ROWS_AT_ONCE) {
        const bool inside = first_row + c.lane / ROW_LANES < QUERY_ROWS;
        const int row = min(first_row + c.lane / ROW_LANES, QUERY_ROWS - 1);
        const float2 own = own_lane < parts ? arena.weights[own_lane][row] : make_float2(NOTHING, 0.0f);
        // The published maximum must be exact, so it is one that a word can hold.
        const float top = over_row(own.x, [](float a, float b) { return fmaxf(a, b); });
        const float largest = value_of(__float_as_uint(top));
        const float factor = own.y > 0.0f ? exp2_fast(own.x - largest) : 0.0f;
        const float sum = over_row(factor * own.y, [](float a, float b) { return a + b; });
        const int column = row / GROUP_HEADS, head = share.head * GROUP_HEADS + row % GROUP_HEADS;
        const int at = (column * HEADS + head) * MAX_SPLITS + share.split;
        if (inside && own_lane == 0)
            store_words2(c.p.scratch + HOP_WEIGHTS + at * 2, make_uint2(word(largest, epoch), word(sum, epoch)));
        float value[ROW_STEPS][4] = {};
#pragma unroll 4
        for (int w = 0; w < parts; w++) {
            const float f = __shfl_sync(ALL_LANES, factor, c.lane / ROW_LANES * ROW_LANES + w);
#pragma unroll
            for (int i = 0; i < ROW_STEPS; i++) {
                const float4 v = *reinterpret_cast<const float4*>(&arena.sums[w][row][(i * ROW_LANES + own_lane) * 4]);
                value[i][0] += f * v.x, value[i][1] += f * v.y, value[i][2] += f * v.z, value[i][3] += f * v.w;
            }
        }
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++) {
            const int dim = (i * ROW_LANES + own_lane) * 4;
            u32* const packet = c.p.scratch + HOP_ATTENTION + (at * HEAD_DIM + dim - dim % PACKET) / 2;
            publish4(packet, value[i], epoch, c.lane, inside);
        }
    }
    c.sync();  // the arena belongs to the next phase's activations
    profile.stamp(6);
}
