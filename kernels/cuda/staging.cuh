// Staging: a hop's packets, or a token's embedding, become a phase's input x in shared memory.
//
// Staged for the integer tensor cores, x = unit * (256 * high + low) with 8-bit high and low, that is 16-bit fixed
// point; each part is one column of the product. bf16 matrices get x = high + low in bf16.
#pragma once
#include "hop.cuh"

// (column, 256 channels) pairs and how the warps share them: warp w takes one place in K, as many columns side by side as
// there are warps for.
template <class P>
struct Items {
    static constexpr int PER_COLUMN = (P::STAGED_K + ITEM - 1) / ITEM;
    static constexpr int ABREAST = larger(WARPS / PER_COLUMN, 1);                           // columns side by side
    static constexpr int ROUNDS = (PER_COLUMN + WARPS - 1) / WARPS * ((COLUMNS + ABREAST - 1) / ABREAST);  // of a warp
    static constexpr bool WHOLE = P::STAGED_K % ITEM == 0;
    static constexpr int AT_ONCE = ROUNDS <= STAGE_LOADS ? ROUNDS : 2;  // of a warp, polled and then staged
    static constexpr bool AHEAD = STAGE_AHEAD && AT_ONCE < ROUNDS;      // the next ones are under way meanwhile
    static constexpr bool FULL = PER_COLUMN == WARPS && ROUNDS % AT_ONCE == 0;   // every warp has as many each time
    int column, within;
    __device__ __forceinline__ explicit Items(int warp) : column(warp / PER_COLUMN), within(warp % PER_COLUMN) {
        if (PER_COLUMN < WARPS && warp >= ABREAST * PER_COLUMN) column = COLUMNS, within = PER_COLUMN;
    }
    __device__ __forceinline__ bool left() const { return column < COLUMNS && within < PER_COLUMN; }
    __device__ __forceinline__ void next() {
        column += ABREAST;
        if (PER_COLUMN > WARPS && column >= COLUMNS) column = 0, within += WARPS;
    }
    __device__ __forceinline__ bool inside(int lane) const { return WHOLE || within * ITEM + lane * PACKET < P::STAGED_K; }
};

// Where a lane's eight channels of an item lie: a block's 64 channels are 16-byte rows, one for each operand register of
// the product: four channels (two in bf16) of each of the lanes t = 0 .. 3, which own channels 8t .. 8t + 7 of each half.
template <class P>
__device__ __forceinline__ u8* staged(const Context& c, int column, int item) {
    const int block = item * (ITEM / 64) + c.lane / 8;
    return c.arena + 2 * column * P::X_STRIDE + block * P::X_BLOCK + c.lane / 4 % 2 * (P::X_BLOCK / 2) + c.lane % 4 * 4;
}

// The sum over LANES neighbouring lanes. Two or four sums over the whole warp, of which one counts, have a shorter chain
// than four or three shuffles.
template <int LANES>
__device__ __forceinline__ int group_sum(int v, int lane) {
    if constexpr (LANES >= 8) {
        int sum = 0;
#pragma unroll
        for (int first = 0; first < 32; first += LANES) {
            const bool mine = lane / LANES == first / LANES;
            const int found = __reduce_add_sync(ALL_LANES, mine ? v : 0);
            sum = mine ? found : sum;
        }
        return sum;
    } else {
#pragma unroll
        for (int o = LANES / 2; o; o >>= 1) v += __shfl_xor_sync(ALL_LANES, v, o);
        return v;
    }
}

// Whether a warp's x stays in registers for all of a phase's units. Two tiles of tokens in small groups are too many.
template <class P>
constexpr bool X_STAYS = P::SAME_K && (TOKEN_TILES == 1 || P::GROUP >= 64);

// Whether the sums of x's groups are a product with ones, in the warps that multiply. With several tokens they are too much
// for staging, where every SM waits for them (four: 847 -> 841 us a step on an H200; one 654 -> 661: there they are not).
template <class P>
constexpr bool SUMS_BY_PRODUCT = P::IS_INT4 && X_STAYS<P> && COLUMNS >= 4;

// pairs: a lane's channels, two to a word, each half x + 32768 + 128: then its bytes are the high part and the low one, their
// top bits flipped.
template <class P>
__device__ __forceinline__ void store_fixed(const Context& c, const u32 (&pairs)[PACKET / 2], u32 exponent, bool inside,
                                            int column, int item) {
    u8* const at = staged<P>(c, column, item);
    int highs = 0, lows = 0;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const u32 high = __byte_perm(pairs[2 * e], pairs[2 * e + 1], 0x7531) ^ 0x80808080u;
        const u32 low = __byte_perm(pairs[2 * e], pairs[2 * e + 1], 0x6420) ^ 0x80808080u;
        if (inside) {
            *reinterpret_cast<u32*>(at + e * 16) = high;
            *reinterpret_cast<u32*>(at + e * 16 + P::X_STRIDE) = low;
        }
        highs = __dp4a(int(high), 0x01010101, highs);
        lows = __dp4a(int(low), 0x01010101, lows);
    }
    int sum = 0;
    constexpr int LANES = P::GROUP / PACKET;  // lanes that share a scale group of the weights
    if constexpr (P::IS_INT4 && !SUMS_BY_PRODUCT<P>) sum = zero_of<P>(group_sum<LANES>(256 * highs + lows, c.lane));
    if (inside && c.lane % LANES == 0)
        c.s.x[column][item * (ITEM / P::GROUP) + c.lane / LANES] = GroupOfX{unit_of(exponent), sum};
}

template <class P>
__device__ __forceinline__ void store_bf16(const Context& c, const float (&v)[PACKET], bool inside, int column, int item) {
    u8* const at = staged<P>(c, column, item);
    if (!inside) return;
#pragma unroll
    for (int i = 0; i < PACKET; i += 2) {
        const u32 h = to_bf16x2(v[i], v[i + 1]);
        const u32 l = to_bf16x2(v[i] - from_bf16(h & 0xffff), v[i + 1] - __uint_as_float(h & 0xffff0000));
        *reinterpret_cast<u32*>(at + i * 8) = h;
        *reinterpret_cast<u32*>(at + i * 8 + P::X_STRIDE) = l;
    }
}

// Puts an item of floats into shared memory, eight consecutive channels a lane; lanes that are not inside have none.
template <class P>
__device__ __forceinline__ void put_values(const Context& c, const float (&v)[PACKET], bool inside, int column, int item) {
    if constexpr (P::FORMAT == BF16) {
        store_bf16<P>(c, v, inside, column, item);
    } else {
        u32 largest = 0;
#pragma unroll
        for (int i = 0; i < PACKET; i++) largest = max(largest, __float_as_uint(fabsf(v[i])));
        const u32 exponent = exponent_for(__reduce_max_sync(ALL_LANES, inside ? largest : 0u));
        const float scale = units_in_one(exponent);
        u32 pairs[PACKET / 2];
#pragma unroll
        for (int i = 0; i < PACKET / 2; i++)
            pairs[i] = u32(__float2int_rn(v[2 * i] * scale) + 0x8080) | u32(__float2int_rn(v[2 * i + 1] * scale) + 0x8080) << 16;
        store_fixed<P>(c, pairs, exponent, inside, column, item);
    }
}

// The same, from packets.
template <class P>
__device__ __forceinline__ void put_packet(const Context& c, const uint4& packet, bool inside, int column, int item) {
    const u32 words[4] = {packet.x, packet.y, packet.z, packet.w};
    const u32 own = inside ? exponent_of(packet) : 0;
    if constexpr (P::FORMAT == BF16) {
        const float unit = unit_of(own);
        float v[PACKET];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[2 * i] = float(int(words[i] & MANTISSA) - 32768) * unit;
            v[2 * i + 1] = float(int(words[i] >> 16 & MANTISSA) - 32768) * unit;
        }
        store_bf16<P>(c, v, inside, column, item);
    } else {
        // Two mantissas are shifted at once, and what was 32768 comes to be again. Packets of less than an eighth of the
        // largest are rounded down to a step of its fixed point, 2^-15 of it: below what its own mantissas are rounded to.
        const u32 exponent = __reduce_max_sync(ALL_LANES, own), shift = min(exponent - own, 31u);
        const u32 mask = (MANTISSA >> shift) * BOTH, offset = 0x8080 * BOTH - (0x8000u >> shift) * BOTH;
        u32 pairs[PACKET / 2];
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = (words[i] >> shift & mask) + offset;
        store_fixed<P>(c, pairs, exponent, inside, column, item);
    }
}

// RMSNorm's factor from the mean square (Zhang and Sennrich, 2019).
__device__ __forceinline__ float inverse_rms(float squares) { return rsqrtf(squares * (1.0f / HIDDEN) + RMS_EPS); }

// A warp's units have the same place in K, and what it stages is there, too: only those warps wait for one another.
template <class P>
constexpr bool BY_SLICE = P::SAME_K && P::CHUNKS == 1 && P::PIECES == 1 && P::UNIT_BLOCKS * 64 == ITEM;

template <class P>
__device__ __forceinline__ void sync_staged(const Context& c) {
    if constexpr (BY_SLICE<P>) {
        static_assert(Items<P>::PER_COLUMN == P::UNITS && Items<P>::ABREAST * P::UNITS == P::STRIDE, "the same warps");
        if (c.warp < P::STRIDE) sync_some<32 * Items<P>::ABREAST>(c.warp % P::UNITS);
    } else {
        c.sync();
    }
}

constexpr int SQUARES = (HIDDEN / TILE_ROWS + 31) / 32;  // words of squares of one lane and column

// N columns' words of squares, of [column][HIDDEN / 16].
template <int N>
__device__ __forceinline__ void load_squares(u32 (&w)[N][SQUARES], const u32* words, int lane) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < SQUARES; i++)
            w[n][i] = load_word(words + n * (HIDDEN / TILE_ROWS) + min(lane + 32 * i, HIDDEN / TILE_ROWS - 1));
}

// What load_squares has loaded becomes RMSNorm's factors of N columns; what has not come is waited for.
template <int N>
__device__ __forceinline__ void receive_norms(u32 (&w)[N][SQUARES], const u32* words, float* factors, Epoch epoch, int lane,
                                              Wait where) {
    Watchdog watchdog;
    while (true) {
        bool ready = true;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < SQUARES; i++) ready &= fresh(w[n][i], epoch);
        if (__all_sync(ALL_LANES, ready)) break;
        load_squares(w, words, lane);
        watchdog.tick(where);
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < SQUARES; i++)
            if (lane + 32 * i < HIDDEN / TILE_ROWS) sum += value_of(w[n][i]);
        sum = warp_sum(sum);
        if (lane == 0) factors[n] = inverse_rms(sum);
    }
}

// Stages one hop's packets [column][K / 8]. With NORM, squares are words [column][HIDDEN / 16] of the same hop, and
// RMSNorm's factors come to factors[column]. The norm's weights are in the packets already, and its factor meets the
// products, so that nobody waits for the sum.
template <class P, bool NORM>
__device__ __forceinline__ void stage_packets(const Context& c, const u32* packets, const u32* squares, float* factors,
                                              Epoch epoch, int piece, Wait where) {
    using I = Items<P>;
    // The last warp has all norms where it has nothing else to do (four tokens: 867 -> 847 us a step on an H200); otherwise
    // the last warps, which have the least to stage, have one each.
    constexpr bool IDLE = BY_SLICE<P> && P::STRIDE < WARPS;
    if constexpr (NORM && IDLE) {
        if (c.warp == WARPS - 1)
#pragma unroll 1
            for (int column = 0; column < COLUMNS; column += SIDE) {
                u32 square[SIDE][SQUARES];
                const u32* const words = squares + column * (HIDDEN / TILE_ROWS);
                load_squares(square, words, c.lane);
                receive_norms(square, words, factors + column, epoch, c.lane, where);
            }
    }
    const int norm_column = NORM && !IDLE ? WARPS - 1 - c.warp : COLUMNS;
    const u32* const norm_words = squares + norm_column * (HIDDEN / TILE_ROWS);
    u32 square[1][SQUARES];
    if (norm_column < COLUMNS) load_squares(square, norm_words, c.lane);
    // Every instruction from here to the last store is on the chain from SM to SM.
    const u32* const part_of_x = packets + (P::SHARES > 1 ? c.rank * (P::K / 2) : 0) + piece * (P::STAGED_K / 2);
    const auto source = [&](const I& item) {
        const u32 k = item.within * ITEM + c.lane * PACKET;
        return part_of_x + item.column * (P::K * P::SHARES / 2) + (I::WHOLE ? k : min(k, u32(P::STAGED_K - PACKET))) / 2;
    };
    constexpr int AT_ONCE = I::AT_ONCE;
    const auto load = [&](uint4(&w)[AT_ONCE], I at) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++, at.next())
            if (i == 0 || I::FULL || at.left()) w[i] = load_words4(source(at));
    };
    I item(c.warp);
    if (item.left()) {
        uint4 w[AT_ONCE], next[AT_ONCE];
        load(w, item);
#pragma unroll 1
        while (true) {
            Watchdog watchdog;
            while (true) {
                bool ready = true;
                I at = item;
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++, at.next())
                    ready &= (i > 0 && !I::FULL && !at.left()) || fresh(w[i], epoch);
                if (__all_sync(ALL_LANES, ready)) break;
                load(w, item);
                watchdog.tick(where);
            }
            I behind = item;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) behind.next();
            if (I::AHEAD && behind.left()) load(next, behind);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++, item.next())
                if (i == 0 || I::FULL || item.left())
                    put_packet<P>(c, w[i], item.inside(c.lane), item.column, item.within);
            if (AT_ONCE == I::ROUNDS || !item.left()) break;
            if constexpr (I::AHEAD) {
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) w[i] = next[i];
            } else {
                load(w, item);
            }
        }
    }
    if constexpr (BY_SLICE<P>) sync_staged<P>(c);
    if (norm_column < COLUMNS) receive_norms(square, norm_words, factors + norm_column, epoch, c.lane, where);
    if constexpr (!BY_SLICE<P>) sync_staged<P>(c);
}

// N (1, 2, 4 or 8; k a multiple of N) consecutive channels of a token's embedding, from the matrix as it is packed.
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

// Layer 0's input: every SM embeds the tokens itself, token_at(column). norm: its weights. The squares of each item come to
// c.s.squares.
template <class P, class TokenAt>
__device__ __forceinline__ void stage_embedding(const Context& c, const float* norm, TokenAt token_at) {
    using I = Items<P>;
#pragma unroll 1
    for (int item = c.warp; item < P::SHARES * I::PER_COLUMN * COLUMNS; item += WARPS) {
        const int column = item / (P::SHARES * I::PER_COLUMN), nth = item % (P::SHARES * I::PER_COLUMN);
        const int share = nth / I::PER_COLUMN, within = nth % I::PER_COLUMN, in_share = within * ITEM + c.lane * PACKET;
        const int k = share * P::K + in_share;
        const bool inside = in_share < P::K;
        float v[PACKET] = {}, squares = 0.0f;
        if (inside) embedding(c.p, token_at(column), k, v);
#pragma unroll
        for (int e = 0; e < PACKET; e++) {
            squares += v[e] * v[e];
            if (inside) v[e] *= __ldg(norm + k + e);
        }
        if (P::SHARES == 1 || share == c.rank) put_values<P>(c, v, inside, column, within);
        squares = warp_sum(squares);
        if (c.lane == 0) c.s.squares[column][nth] = squares;
    }
    c.sync();
}

// What stage_packets does with the squares that it receives, for those of stage_embedding; when every warp has staged.
__device__ __forceinline__ void norm_of_embedding(const Context& c, float* factors) {
    const int column = WARPS - 1 - c.warp;
    if (column >= COLUMNS) return;
    const float sum = warp_sum(c.lane < SQUARE_ITEMS ? c.s.squares[column][c.lane] : 0.0f);
    if (c.lane == 0) factors[column] = inverse_rms(sum);
}
