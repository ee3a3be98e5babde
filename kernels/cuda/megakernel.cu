// The decode megakernel: one cooperative launch of one block per SM runs all layers, the head, the choice of the token
// and the loop over tokens. With COLUMNS > 1 it feeds several tokens at once: given ones, of which it leaves the logits,
// or, in a loop, the newest token and drafts of the next ones.
//
// One warp (the producer) streams this SM's weights and keys through the ring; the other 16 (the consumers) go through
// the phases of every layer, exchanging activations with the other SMs by hops:
//
//     x --stage--> q, k, v --hop--> attention (some SMs) --hop--> merged --hop--> o + residual --hop--> gate, up --hop-->
//     down + residual
//
// A phase's rows are spread over all SMs, or over pairs of them (clusters of two), each of which multiplies one half of K:
// then an SM stages half of the activations, and sends its sums of every second tile to the other's shared memory. The owner
// of a row of o owns it in down too, so the residual stream lives in shared memory, float32, each row in one place.
//
// Files: primitives (PTX), shape (numbers), ring (streaming), context (parameters), hop (exchange), staging, gemv
// (products), attention, merge, sampling, head, speculate, draft_head. The macros come from plan.py.
#include "draft_head.cuh"

__device__ __forceinline__ void produce(const Parameters& p, Shared& s, u8* slots) {
    const SmTiles& tiles = s.tiles;
    Producer producer(s.ring, slots);
    const u8* const stream = p.weights + tiles.offset;
    producer.weights_end = stream + LAYERS * tiles.layer_bytes + size_t(tiles.count[Head::INDEX]) * Head::TILE_BYTES;
#ifdef DRAFTER
    producer.next_stream = p.learned ? p.draft_weights + s.draft.tiles.offset : nullptr;
#endif
    const bool learned = DRAFTS && p.learned;
    u32 go_parity = 0;
    int last_position = 0;
    for (int token = 0;; token++) {
        int position = COLUMNS == 1 || token == 0 ? p.position + token : last_position;
        KeyShare share = key_share(blockIdx.x, position);
        const u8* keys = keys_of(p, 0, share);  // of the layer at hand
        bool may_go_on = token == 0 || learned;  // the drafter's part of the step has waited
        // May run ahead of the choice of the token as far as the ring holds it all: if this was the last token, nobody
        // will make room.
        constexpr bool QKV_FITS = Qkv::MOST_STAGES <= STAGES, OUT_FITS = Qkv::MOST_STAGES + Out::MOST_STAGES <= STAGES;
        const auto await_token = [&] {
            if (may_go_on) return true;
            may_go_on = true;
            barrier_wait(&s.ring.go, go_parity, WAIT_GO);
            go_parity ^= 1;
            if constexpr (COLUMNS > 1) {
                position = *reinterpret_cast<volatile int*>(&s.step.position);
                share = key_share(blockIdx.x, position);
                keys = keys_of(p, 0, share);  // no layer has passed
            }
            return *reinterpret_cast<volatile int*>(&s.stop) == 0;
        };
        const u8* source = stream;
        for (int layer = 0; layer < LAYERS; layer++) {
            if (layer == 1) producer.window = LAYER_WINDOW;
            if (!QKV_FITS && !await_token()) return producer.drain();
            source = stream_phase<Qkv>(producer, tiles, source);
            if (!OUT_FITS && !await_token()) return producer.drain();
            bool attends = share.active;
            if constexpr (COLUMNS > 1)  // how far the position moves is not known yet, but it is at most one block
                if (!may_go_on)
                    attends = key_share(blockIdx.x, position + 1).active || key_share(blockIdx.x, position + COLUMNS).active;
            if (attends) {
                if (!await_token()) return producer.drain();
                if (COLUMNS == 1 || share.active) stream_keys(producer, keys, share.blocks);
            }
            source = stream_phase<Out>(producer, tiles, source);
            if (!await_token()) return producer.drain();
            source = stream_phase<GateUp>(producer, tiles, source);
            keys += p.kv_layer_stride * sizeof(*p.kv);
            // The next layer's first keys come to the L2 cache while the phase before them streams.
            if (share.active && layer + 1 < LAYERS) producer.ask(keys, share.blocks * KV_BYTES);
            source = stream_phase<Down>(producer, tiles, source);
            if (layer == 0 && blockIdx.x == 0 && threadIdx.x % 32 == 0 && p.mode != STEP)
                s.stop_asked = *reinterpret_cast<const volatile u32*>(p.host_stop);
        }
        // In the head there is no hop to disturb; at one stage in flight it took 38 us instead of 26 (H200, Granite-3B).
        producer.window = HEAD_WINDOW;
        stream_phase<Head>(producer, tiles, source);
        if (p.mode == STEP || (COLUMNS == 1 && token + 1 >= p.max_tokens)) break;
        last_position = position;
#ifdef DRAFTER
        if (learned) {
            last_position = produce_drafts(producer, p, s, position, go_parity);
            if (*reinterpret_cast<volatile int*>(&s.stop)) break;
        }
#endif
    }
    // Every stage is consumed before the consumers end, but the last one's wait may still be pending here.
    producer.drain();
#ifdef PROFILE
    if (threadIdx.x % 32 == 0)
        for (int i = 0; i < ProducerClocks::COUNT; i++)
            p.profile[blockIdx.x * PROFILE_SLOTS + 26 + i] += producer.clocks.total[i];
#endif
}

// Where the residual stream entering layer `at` (LAYERS: leaving the last one) is to be copied to, or null.
__device__ __forceinline__ float* feature_of(const Parameters& p, int at) {
    if (!p.features) return nullptr;
    const int slot = __ldg(p.feature_slot + at);
    return slot < 0 ? nullptr : p.features + size_t(slot) * COLUMNS * HIDDEN;
}

// layers: run since the launch, this one included. token: the only one, see token_of.
__device__ __forceinline__ void run_layer(Context& c, Profile& profile, int layer, int position, u32 layers,
                                          int token) {
    u32* const hop = c.p.scratch;
    const u32* const mine = c.copy();
    const Epoch epoch(layers);
    const float* const norms = c.p.norms + size_t(layer) * 2 * HIDDEN;
    float(*const factors)[COLUMNS] = c.s.factor;
    const auto nothing = [] {};

    run_phase<Qkv>(
        c, profile, 0, epoch,
        [&] {
            if (layer == 0) norm_of_embedding(c, factors[NORM_QKV]);
        },
        [&](int) {
            if (layer == 0)
                stage_embedding<Qkv>(c, c.p.norms, [&](int column) { return token_of(c.s, column, token); });
            else
                stage_packets<Qkv, true>(c, mine + HOP_HIDDEN, mine + HOP_HIDDEN_SQUARES, factors[NORM_QKV],
                                         Epoch(layers - 1), 0, WAIT_HIDDEN);
        },
        [&](int tile, Place place, float2 sums) {
            const float factor = factors[NORM_QKV][place.column];
            store_heads(hop, c.tiles.first[Qkv::INDEX] + tile, place, make_float2(sums.x * factor, sums.y * factor), epoch,
                        c.lane);
        });

    attention(c, profile, layer, position, epoch);

    // The owner of a row adds to its residual and publishes the sum, times the weight of the norm that reads it next.
    const auto fetch_norm_weights = [&](int which) {
        const float* const source = norms + (which + 1) * HIDDEN;
        for (int i = CONSUMERS - 1 - threadIdx.x; i < owned_rows(c.tiles); i += CONSUMERS)
            c.s.norm_weight[which][i] = __ldg(source + owned_row(c.tiles, i));
    };
    const auto add = [&](int tile, Place place, float2 sums, int which, int packets, int squares, float* feature) {
        const int row = tile / RANKS * TILE_ROWS + c.lane / 4, column = place.column;  // among the owned ones
        const int tile_in_all = c.tiles.first[Out::INDEX] + tile;
        float &low = c.s.residual[row][column], &high = c.s.residual[row + 8][column];
        const float2 x = make_float2(low + RESIDUAL_MULTIPLIER * sums.x, high + RESIDUAL_MULTIPLIER * sums.y);
        const float* const weights = c.s.norm_weight[which] + row;
        publish_rows(hop + packets + (column * HIDDEN + tile_in_all * TILE_ROWS) / 2,
                     make_float2(x.x * weights[0], x.y * weights[8]), epoch, c.lane, place.replica);
        publish_square(hop + squares + column * (HIDDEN / TILE_ROWS) + tile_in_all, x, epoch, c.lane, place.replica);
        __syncwarp();  // the other lanes of this column have read the residual
        if (place.replica == 0) {
            low = x.x, high = x.y;
            if (feature) {
                float* const rows = feature + column * HIDDEN + tile_in_all * TILE_ROWS + c.lane / 4;
                rows[0] = x.x, rows[8] = x.y;
            }
        }
        return x;
    };

    merge_splits(c, epoch);

    run_phase<Out>(
        c, profile, 8, epoch, nothing,
        [&](int) {
            fetch_norm_weights(0);
            stage_packets<Out, false>(c, mine + HOP_MERGED, nullptr, nullptr, epoch, 0, WAIT_ATTENTION);
        },
        [&](int tile, Place place, float2 sums) {
            add(tile, place, sums, 0, HOP_MIDDLE, HOP_MIDDLE_SQUARES, nullptr);
        });

    run_phase<GateUp>(
        c, profile, 12, epoch, nothing,
        [&](int) {
            stage_packets<GateUp, true>(c, mine + HOP_MIDDLE, mine + HOP_MIDDLE_SQUARES, factors[NORM_GATE_UP], epoch, 0,
                                        WAIT_HIDDEN);
        },
        [&](int tile, Place place, float2 sums) {
            const float factor = factors[NORM_GATE_UP][place.column];
            const int channel = (c.tiles.first[GateUp::INDEX] + tile) * PACKET;
            publish_gated(hop + HOP_GATED + (place.column * INTERMEDIATE + channel) / 2, sums.x * factor, sums.y * factor,
                          epoch, c.lane, place.replica);
        });

    run_phase<Down>(
        c, profile, 16, epoch, nothing,
        [&](int piece) {
            if (piece == 0) fetch_norm_weights(1);
            stage_packets<Down, false>(c, mine + HOP_GATED, nullptr, nullptr, epoch, piece, WAIT_HIDDEN);
        },
        [&](int tile, Place place, float2 sums) {
            const float2 x = add(tile, place, sums, 1, HOP_HIDDEN, HOP_HIDDEN_SQUARES, feature_of(c.p, layer + 1));
            publish_feature(c, layer + 1, tile, place, x);
        });
}

// Before the first layer: this SM's rows of the tokens' embeddings, and what depends on their position. Out of line: what
// the compiler hoists out of it would be spilled in the layers.
__device__ __noinline__ void begin_pass(const Parameters* p, Shared* s, int position, int only_token) {
    Context c{*p, *s, nullptr, nullptr, s->tiles, Cursor{}};
    const int rows = owned_rows(c.tiles);
    float* const feature = feature_of(*p, 0);
    for (int i = threadIdx.x; i < rows * COLUMNS; i += CONSUMERS) {
        const int row = i / COLUMNS, column = i % COLUMNS;
        const int in_all = owned_row(c.tiles, row);
        float x[1];
        embedding(*p, token_of(*s, column, only_token), in_all, x);
        s->residual[row][column] = x[0];
        if (feature) feature[column * HIDDEN + in_all] = x[0];
    }
    rotary_table(c, position, p->inverse_frequencies);
    if (threadIdx.x == 0) s->share = key_share(c.sm, position);
    c.sync();
}

__device__ __forceinline__ void consume(Context& c) {
    const Parameters& p = c.p;
    Profile profile(c.s.profile);
    u32 layers = 0;
    if constexpr (COLUMNS == 1) {
        int token = p.tokens[0];
        if (p.mode != STEP && p.repeat_penalty != 1.0f) Window::open(c);
        for (int index = 0;; index++) {
            const int position = p.position + index;
            begin_pass(&p, &c.s, position, token);
#pragma unroll 1
            for (int layer = 0; layer < LAYERS; layer++) run_layer(c, profile, layer, position, ++layers, token);
            const u64 best = run_head(c, profile, layers);
            if (p.mode == STEP) break;
            bool last;
            token = choose(c, profile, best, index, last);
            if (last) break;
        }
    } else {
        // Tokens and position stay in shared memory: registers that live through all layers would be spilled.
        begin_steps(&p, &c.s);
        while (true) {
            begin_pass(&p, &c.s, c.s.step.position, 0);
#pragma unroll 1
            for (int layer = 0; layer < LAYERS; layer++) run_layer(c, profile, layer, c.s.step.position, ++layers, 0);
            const u64 best = run_head(c, profile, layers);
            if (p.mode == STEP) break;
            const bool last = end_step(&p, &c.s, best);
#ifdef DRAFTER
            if (p.learned) {
                if (threadIdx.x == 0) c.s.draft.cursor = c.cursor, c.s.draft.layers = layers;
                draft(&p, &c.s, profile);
                c.cursor = c.s.draft.cursor, layers = c.s.draft.layers;
                c.warp = threadIdx.x / 32, c.lane = threadIdx.x % 32;
            }
#endif
            profile.stamp(25);
            if (last) break;
        }
    }
#ifdef PROFILE
    if (threadIdx.x == 0)
        for (int i = 0; i < 26; i++) p.profile[c.sm * PROFILE_SLOTS + i] += profile.total[i];
#endif
}

#if RANKS > 1
#define FLINT_CLUSTER __cluster_dims__(RANKS, 1, 1)
#else
#define FLINT_CLUSTER
#endif

extern "C" __global__ void FLINT_CLUSTER __launch_bounds__(THREADS, 1) megakernel(const __grid_constant__ Parameters p) {
    // With a drafter there is no register for it: SmolLM2's kernel of four columns spilled 96 bytes instead of 16.
    u8* const slots = DRAFTS ? dynamic_shared_memory() : kept_in_register(dynamic_shared_memory());
    u8* const arena = slots + STAGES * STAGE_BYTES;
    Shared& s = *reinterpret_cast<Shared*>(arena + ARENA_BYTES);
    if (threadIdx.x == 0) {
        s.tiles = p.tiles[blockIdx.x];
#ifdef DRAFTER
        if (p.learned) s.draft.tiles = p.draft_tiles[blockIdx.x];
#endif
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.ring.full[i], COPY_ARRIVALS);
            barrier_init(&s.ring.empty[i], EMPTY_ARRIVALS * RELEASES);
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
    if constexpr (RANKS > 1) {
        for (int i = threadIdx.x; i < received_before(PHASES); i += THREADS) s.received[i] = 0;
        sync_cluster();
    } else {
        __syncthreads();
    }
    if (threadIdx.x >= CONSUMERS) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x < CONSUMERS + 32) produce(p, s, slots);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        Context c{p, s, slots, arena, s.tiles, Cursor{}};
        consume(c);
    }
}
