// The decode megakernel: one cooperative launch of one block per SM runs all layers, the head, the choice of the token
// and the loop over tokens. With COLUMNS > 1 it feeds several tokens at once and stops after their logits.
//
// One warp (the producer) streams this SM's weights and keys through the ring; the other 16 (the consumers) go through
// the phases of every layer, exchanging activations with the other SMs by hops:
//
//     x --stage--> q, k, v --hop--> attention (some SMs) --hop--> o + residual --hop--> gate, up --hop--> down + residual
//
// A phase's rows are spread over all SMs. The owner of a row of o owns it in down too, so the residual stream lives in
// shared memory, float32, each row in one place.
//
// Files: primitives (PTX), shape (numbers), ring (streaming), context (parameters), hop (exchange and staging), gemv
// (products), attention, sampling, head. The macros come from plan.py.
#include "head.cuh"

// Streams this SM's tiles of one phase; returns where the next phase's begin.
template <class P>
__device__ __forceinline__ const u8* stream_phase(Producer& producer, const SmTiles& tiles, const u8* source) {
    // Chunks and batches begin a new stage, as they do for the readers.
    constexpr int AT_ONCE = P::TILES_AT_ONCE;
    for (int chunk = 0; chunk < P::CHUNKS; chunk++)
        for (int left = tiles.count[P::INDEX]; left > 0; left -= AT_ONCE) {
            const int units = min(left, AT_ONCE) * P::UNITS;
            producer.stream<P::UNITS_PER_STAGE, P::UNIT_BYTES>(source, units, 1);
            source += size_t(units) * P::UNIT_BYTES;
        }
    return source;
}

__device__ __forceinline__ void produce(const Parameters& p, Shared& s, u8* slots) {
    const SmTiles& tiles = s.tiles;
    Producer producer(s.ring, slots);
    const u8* const stream = p.weights + tiles.offset;
    u32 go_parity = 0;
    for (int token = 0;; token++) {
        const int position = p.position + token;
        const KeyShare share = key_share(blockIdx.x, position);
        bool may_go_on = token == 0;
        // May run ahead of the choice of the token as far as the ring holds it all: if this was the last token, nobody
        // will make room.
        constexpr bool QKV_FITS = Qkv::MOST_STAGES <= STAGES, OUT_FITS = Qkv::MOST_STAGES + Out::MOST_STAGES <= STAGES;
        const auto await_token = [&] {
            if (may_go_on) return true;
            may_go_on = true;
            barrier_wait(&s.ring.go, go_parity, WAIT_GO);
            go_parity ^= 1;
            return *reinterpret_cast<volatile int*>(&s.stop) == 0;
        };
        const u8* source = stream;
        for (int layer = 0; layer < LAYERS; layer++) {
            if (layer == 1) producer.window = LAYER_WINDOW;
            if (!QKV_FITS && !await_token()) return producer.drain();
            source = stream_phase<Qkv>(producer, tiles, source);
            if (!OUT_FITS && !await_token()) return producer.drain();
            if (share.active) {
                if (!await_token()) return producer.drain();
                const u8* const keys = reinterpret_cast<const u8*>(
                    p.kv + layer * p.kv_layer_stride + share.head * p.kv_head_stride + size_t(share.first) * (KV_BYTES / 2));
                producer.stream<KV_PER_STAGE, KV_BYTES>(keys, share.blocks, QUERY_BLOCKS);
            }
            source = stream_phase<Out>(producer, tiles, source);
            if (!await_token()) return producer.drain();
            source = stream_phase<GateUp>(producer, tiles, source);
            source = stream_phase<Down>(producer, tiles, source);
            if (layer == 0 && blockIdx.x == 0 && threadIdx.x % 32 == 0 && p.mode != STEP)
                s.stop_asked = *reinterpret_cast<const volatile u32*>(p.host_stop);
        }
        // In the head there is no hop to disturb; at one stage in flight it took 38 us instead of 26 (H200, Granite-3B).
        producer.window = HEAD_WINDOW;
        stream_phase<Head>(producer, tiles, source);
        if (p.mode == STEP || token + 1 >= p.max_tokens) break;
    }
    // Every stage is consumed before the consumers end, but the last one's wait may still be pending here.
    producer.drain();
}

__device__ __forceinline__ void run_layer(Context& c, Profile& profile, int layer, int position, u32 tag,
                                          const int (&tokens)[COLUMNS]) {
    u32* const hop = c.p.scratch;
    const float* const norms = c.p.norms + size_t(layer) * 2 * HIDDEN;
    // The layer's input is copied out by an SM that reads it: those with the highest numbers have tiles of qkv.
    const auto feature_of = [&](int at) -> float* {
        if (!c.p.features || c.sm != SMS - 1) return nullptr;
        const int slot = __ldg(c.p.feature_slot + at);
        return slot < 0 ? nullptr : c.p.features + size_t(slot) * COLUMNS * HIDDEN;
    };

    float scale = 0.0f;  // RMSNorm's, of the first column: computed while other warps still multiply
    const auto find_scale = [&] { scale = inverse_rms(c, 0); };
    const auto nothing = [] {};

    run_phase<Qkv>(
        c, profile, 0, find_scale,
        [&](int) {
            if (layer == 0)
                stage_embedding<Qkv>(c, tokens, norms, feature_of(0));
            else
                stage_words<Qkv, true>(c, hop + HOP_HIDDEN, tag - 1, norms, 0, feature_of(layer), WAIT_HIDDEN);
        },
        [&](int tile, int column, float2 sums) {
            const float factor = COLUMNS == 1 ? scale : inverse_rms(c, column);
            const int quarter = c.lane & 3, j = c.lane / 4;
            if (quarter < 2)
                store_word(hop + HOP_QKV + column * QKV_ROWS_TOTAL + (c.tiles.first[Qkv::INDEX] + tile) * TILE_ROWS + j +
                               quarter * 8,
                           word((quarter ? sums.y : sums.x) * factor, tag));
        });

    attention(c, profile, layer, position, tag);

    // The owner of a row adds to its residual and publishes the sum.
    const auto add = [&](int tile, int column, float2 sums, int target, int first) {
        const int quarter = c.lane & 3, j = c.lane / 4;
        if (quarter >= 2) return;
        const int row = tile * TILE_ROWS + j + quarter * 8;
        const float x = c.s.residual[row][column] + RESIDUAL_MULTIPLIER * (quarter ? sums.y : sums.x);
        c.s.residual[row][column] = x;
        store_word(hop + target + column * HIDDEN + first * TILE_ROWS + row, word(x, tag));
    };

    run_phase<Out>(
        c, profile, 8, nothing, [&](int) { stage_attention<Out>(c, c.s.share.splits, tag); },
        [&](int tile, int column, float2 sums) { add(tile, column, sums, HOP_MIDDLE, c.tiles.first[Out::INDEX]); });

    run_phase<GateUp>(
        c, profile, 12, find_scale,
        [&](int) { stage_words<GateUp, true>(c, hop + HOP_MIDDLE, tag, norms + HIDDEN, 0, nullptr, WAIT_HIDDEN); },
        [&](int tile, int column, float2 sums) {
            const float factor = COLUMNS == 1 ? scale : inverse_rms(c, column);
            const float gate = sums.x * factor, up = sums.y * factor;
            if (c.lane % 4 == 0)
                store_word(hop + HOP_GATED + column * INTERMEDIATE + (c.tiles.first[GateUp::INDEX] + tile) * 8 + c.lane / 4,
                           word(__fdividef(gate, 1.0f + __expf(-gate)) * up, tag));
        });

    run_phase<Down>(
        c, profile, 16, nothing,
        [&](int piece) { stage_words<Down, false>(c, hop + HOP_GATED, tag, nullptr, piece, nullptr, WAIT_HIDDEN); },
        [&](int tile, int column, float2 sums) { add(tile, column, sums, HOP_HIDDEN, c.tiles.first[Down::INDEX]); });
}

__device__ __forceinline__ void consume(Context& c) {
    const Parameters& p = c.p;
    Profile profile;
    int tokens[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) tokens[i] = p.tokens[i];
    if (p.mode != STEP && p.repeat_penalty != 1.0f) Window::open(c);
    u32 tag = 0;
    for (int index = 0;; index++) {
        const int position = p.position + index;
        const int rows = c.tiles.count[Out::INDEX] * TILE_ROWS;
        for (int i = threadIdx.x; i < rows * COLUMNS; i += CONSUMERS) {
            int token = tokens[0];
#pragma unroll
            for (int column = 1; column < COLUMNS; column++)
                if (i % COLUMNS == column) token = tokens[column];
            float x[1];
            embedding(p, token, c.tiles.first[Out::INDEX] * TILE_ROWS + i / COLUMNS, x);
            c.s.residual[i / COLUMNS][i % COLUMNS] = x[0];
        }
        rotary_table(c, position);
        if (threadIdx.x == 0) c.s.share = key_share(c.sm, position);
        c.sync();
#pragma unroll 1
        for (int layer = 0; layer < LAYERS; layer++) run_layer(c, profile, layer, position, ++tag, tokens);
        float* feature = nullptr;
        if (p.features && c.sm == 0 && __ldg(p.feature_slot + LAYERS) >= 0)
            feature = p.features + size_t(__ldg(p.feature_slot + LAYERS)) * COLUMNS * HIDDEN;
        const u64 best = run_head(c, profile, tag, p.norms + size_t(LAYERS) * 2 * HIDDEN, feature);
        if (p.mode == STEP) break;
        if constexpr (COLUMNS == 1) {
            bool last;
            tokens[0] = choose(c, profile, best, index, last);
            if (last) break;
        } else {
            break;
        }
    }
#ifdef PROFILE
    if (threadIdx.x == 0)
        for (int i = 0; i < PROFILE_SLOTS; i++) p.profile[c.sm * PROFILE_SLOTS + i] = profile.total[i];
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) megakernel(const __grid_constant__ Parameters p) {
    u8* const slots = dynamic_shared_memory();
    u8* const arena = slots + STAGES * STAGE_BYTES;
    Shared& s = *reinterpret_cast<Shared*>(arena + ARENA_BYTES);
    if (threadIdx.x == 0) {
        s.tiles = p.tiles[blockIdx.x];
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.ring.full[i], COPY_ARRIVALS);
            barrier_init(&s.ring.empty[i], EMPTY_ARRIVALS);
        }
        barrier_init(&s.ring.go, 1);
        s.stop = 0;
        s.stop_asked = 0;
        if (blockIdx.x == 0) {
            stalled_report = p.host_report;
            gave_up = 0;
        }
        barriers_are_initialised();
        if (blockIdx.x == 0 && p.host_started) {
            reinterpret_cast<volatile u64*>(p.host_started)[1] = nanoseconds();
            *reinterpret_cast<volatile u32*>(p.host_started) = 1;
        }
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x < CONSUMERS + 32) produce(p, s, slots);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        Context c{p, s, slots, arena, s.tiles, Cursor{}};
        consume(c);
    }
}
