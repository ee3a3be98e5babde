// A learned drafter inside the loop: an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), one more layer with a head over a
// vocabulary of its own, that runs after every step on what the step has just computed.
//
//     the step, at positions p ..:  fed     newest  draft 1  draft 2 | the features: the residual streams that enter
//                                   choice     a       b        c    | some of the target's layers, one hop for all
//
//     pass 0, rows p, p + 1, ..:    fc(features of the column) and the embedding of the column's choice: keys and values of
//                                   every kept token; the last kept column's logits give the first draft
//     pass i, one row further:      the last pass' output in place of the features, and the last draft
//
// All passes run over all columns, in the machinery of a layer: from pass 1 on, the row that counts is column 0, and the
// other columns hold what nobody looks at. Their keys lie beyond it, where later passes write. A pass' largest logit is
// agreed on by all SMs; that orders the keys it wrote before the next pass' fetch of them, as it does between steps.
//
// Hops: fc and each pass count as a layer in the epochs, so the target's buffers serve here, too. Nobody is overtaken
// from pass to pass, as every SM has a share of the head and of gate and up (phases.py sees to it).
#pragma once
#include "speculate.cuh"

// Streams this SM's tiles of one phase; returns where the next phase's begin.
template <class P>
__device__ __forceinline__ const u8* stream_phase(Producer& producer, const SmTiles& tiles, const u8* source) {
    // Chunks and batches begin a new stage, as they do for the readers.
    constexpr int AT_ONCE = P::TILES_AT_ONCE;
    for (int chunk = 0; chunk < P::CHUNKS; chunk++)
        for (int left = tiles.count[P::INDEX]; left > 0; left -= AT_ONCE) {
            const int units = min(left, AT_ONCE) * P::UNITS;
            producer.stream<P::UNITS_PER_STAGE, P::UNIT_BYTES, true>(source, units, 1);
            source += size_t(units) * P::UNIT_BYTES;
        }
    return source;
}

// The cached keys and values of an SM's share in one layer.
__device__ __forceinline__ const u8* keys_of(const Parameters& p, int layer, const KeyShare& share) {
    return reinterpret_cast<const u8*>(p.kv + layer * p.kv_layer_stride + share.head * p.kv_head_stride +
                                       size_t(share.first) * (KV_BYTES / 2));
}

// Where keys are many, the SMs that attend to them are those that all others wait for: no hop is under way that a second
// stage in flight would keep waiting (at 32,000 positions 1,296 us a token instead of 1,382 on an H200; four 1,312. With
// four columns the products are slower than the keys, and it only does harm: 1,719 instead of 1,674).
__device__ __forceinline__ void stream_keys(Producer& producer, const u8* keys, int blocks) {
    const int window = producer.window;
    if (blocks > MANY_KEYS) producer.window = KEYS_WINDOW;
    producer.stream<KV_PER_STAGE, KV_BYTES, false>(keys, blocks, KEY_READERS);
    producer.window = window;
}

#ifndef DRAFTER
constexpr bool DRAFTS = false;
__device__ __forceinline__ void publish_feature(const Context&, int, int, Place, float2) {}
#else
constexpr bool DRAFTS = true;

// Where all SMs' best drafts meet: behind the candidates of the columns, and the drawn ids.
__device__ __forceinline__ u64* draft_candidates(const Parameters& p) { return p.candidates + COLUMNS * (SMS + 1); }

// ---- the producer

// Streams what the drafter reads after a step at `position`; returns the next step's.
__device__ __forceinline__ int produce_drafts(Producer& producer, const Parameters& p, Shared& s, int position,
                                              u32& go_parity) {
    const SmTiles& tiles = s.draft.tiles;
    const u8* const end = producer.weights_end;
    const u8* const begin = p.draft_weights + tiles.offset;
    producer.weights_end = begin + tiles.layer_bytes + size_t(tiles.count[DHead::INDEX]) * DHead::TILE_BYTES;
    producer.next_stream = p.weights + s.tiles.offset;
    producer.window = LAYER_WINDOW;
    const auto await_go = [&] {
        barrier_wait(&s.ring.go, go_parity, WAIT_GO);
        go_parity ^= 1;
    };
    const u8* const layer = stream_phase<DFc>(producer, tiles, begin);
    int next = 0, passes = 1;
    for (int pass = 0; pass < passes; pass++) {
        producer.window = LAYER_WINDOW;
        const u8* source = stream_phase<DQkv>(producer, tiles, layer);
        if (pass > 0) await_go();  // for the last pass' keys; pass 0 reads older ones
        const KeyShare share = key_share(blockIdx.x, pass == 0 ? position : next + pass - 1, position);
        if (share.active) stream_keys(producer, keys_of(p, LAYERS, share), share.blocks);
        source = stream_phase<DOut>(producer, tiles, source);
        source = stream_phase<DGateUp>(producer, tiles, source);
        source = stream_phase<DDown>(producer, tiles, source);
        if (pass == 0) {  // what was kept of the step
            await_go();
            next = *reinterpret_cast<volatile int*>(&s.step.position);
            passes = *reinterpret_cast<volatile int*>(&s.draft.passes);
        }
        producer.window = HEAD_WINDOW;
        stream_phase<DHead>(producer, tiles, source);
    }
    producer.weights_end = end;
    producer.next_stream = begin;
    return next;
}

// ---- the consumers

// The owner of a row hands it over to fc, where it is of one of the layers that the drafter reads. at: the layer that the
// residual stream enters.
__device__ __forceinline__ void publish_feature(const Context& c, int at, int tile, Place place, float2 x) {
    constexpr int LAYERS_READ[] = {D_FEATURE_LAYERS};
    int feature = -1;
#pragma unroll
    for (int i = 0; i < D_FEATURES; i++)
        if (at == LAYERS_READ[i]) feature = i;
    if (feature < 0 || !c.p.learned) return;
    const int row = (c.tiles.first[Out::INDEX] + tile) * TILE_ROWS;
    publish_rows(c.p.scratch + HOP_FEATURES + ((place.column * D_FEATURES + feature) * HIDDEN + row) / 2, x,
                 Epoch(c.s.step.count), c.lane, place.replica);
}

// One half of qkv's input: as long as the hidden state, with a norm of its own.
using DQkvHalf = Phase<DQkv::FORMAT, HIDDEN / RANKS, RANKS, DQkv::ROWS, DQkv::GROUP, 1, 1, DQkv::UNIT_BLOCKS,
                       DQkv::UNITS_PER_STAGE, DQkv::BATCH, DQkv::MOST_TILES, DQkv::INDEX>;
static_assert(DQkvHalf::UNITS == DQkv::UNITS && DQkvHalf::UNIT_BYTES == DQkv::UNIT_BYTES, "halves of one matrix");

struct DraftPass {
    Context& c;
    Profile& profile;
    const int pass;
    const u32 layers;  // as in run_layer: of the last layer, fc or pass
    static constexpr int SLOT = 28;  // of the profile: not told

    __device__ __forceinline__ DraftState& state() const { return c.s.draft; }
    __device__ __forceinline__ u32* hop() const { return c.p.scratch; }

    // The column to read from the last pass or step, which becomes column 0.
    __device__ __forceinline__ int real_column() const { return pass == 0 ? state().kept - 1 : 0; }
    // The first column's row.
    __device__ __forceinline__ int position() const {
        return c.s.step.position + (pass == 0 ? -state().kept : pass - 1);
    }

    __device__ __forceinline__ void begin() const {
        Shared& s = c.s;
        if (pass == 1 && state().kept > 1)
            for (int i = threadIdx.x; i < owned_rows(c.tiles); i += CONSUMERS)
                s.residual[i][0] = s.residual[i][state().kept - 1];
        rotary_table(c, position(), c.p.draft_frequencies);
        if (threadIdx.x == 0) s.share = key_share(c.sm, position(), s.step.position - state().kept);
        c.sync();
    }

    // Publishes a tile's rows, times the weights of the norm that reads them.
    __device__ __forceinline__ void publish_tile(int packets, int tile, int column, float2 x, DraftNorm norm, Epoch epoch,
                                                 int replica) const {
        const int channel = (c.tiles.first[DOut::INDEX] + tile) * TILE_ROWS;
        const float* const weights = state().norm_weight[norm] + tile / RANKS * TILE_ROWS + c.lane / 4;
        publish_rows(hop() + packets + (column * HIDDEN + channel) / 2, make_float2(x.x * weights[0], x.y * weights[8]),
                     epoch, c.lane, replica);
    }
    __device__ __forceinline__ void publish_norm(int squares, int tile, int column, float2 x, Epoch epoch,
                                                 int replica) const {
        publish_square(hop() + squares + column * (HIDDEN / TILE_ROWS) + c.tiles.first[DOut::INDEX] + tile, x, epoch, c.lane,
                       replica);
    }
    __device__ __forceinline__ float& residual(int tile, int column, int upper) const {
        return c.s.residual[tile / RANKS * TILE_ROWS + c.lane / 4 + upper * 8][column];
    }
    // The residual and what is added to it. Before keep(): the other lanes of the column read it, too.
    __device__ __forceinline__ float2 added(int tile, int column, float2 sums) const {
        return make_float2(residual(tile, column, 0) + sums.x, residual(tile, column, 1) + sums.y);
    }
    __device__ __forceinline__ void keep(int tile, Place place, float2 x) const {
        __syncwarp();
        if (place.replica == 0) residual(tile, place.column, 0) = x.x, residual(tile, place.column, 1) = x.y;
    }

    // The step's features, joined, become the hidden state that the first pass begins with.
    __device__ __forceinline__ void fuse() const {
        run_phase<DFc>(
            c, profile, SLOT, Epoch(layers), [] {},
            [&](int piece) {
                stage_packets<DFc, false>(c, c.copy() + HOP_FEATURES, nullptr, nullptr, Epoch(c.s.step.count - 1), piece,
                                          WAIT_HIDDEN);
            },
            [&](int tile, Place place, float2 x) {
                publish_tile(HOP_HIDDEN, tile, place.column, x, NORM_HIDDEN, Epoch(layers), place.replica);
                publish_norm(HOP_HIDDEN_SQUARES, tile, place.column, x, Epoch(layers), place.replica);
                keep(tile, place, x);
            });
    }

    // The embedding's half is staged and multiplied first: it waits for nobody.
    __device__ __forceinline__ void qkv(float* factors, Epoch entering, Epoch epoch) const {
        c.forget();
        const int tiles = c.tiles.count[DQkv::INDEX];
        if (tiles == 0) return;
        float* const part = c.part<DQkv>();
        float* const second = part + tiles * DQkv::UNITS * PART_UNIT;
        stage_embedding<DQkvHalf>(c, c.p.draft_norms + NORM_EMBEDDING * HIDDEN, [&](int column) {
            return pass == 0 ? c.s.step.choice[min(column, state().kept - 1)] : state().tokens[pass - 1];
        });
        c.forget();
        multiply_tiles<DQkvHalf>(c, tiles, 0, 0, part);
        norm_of_embedding(c, state().embedding_factor);
        c.sync();
        c.forget();
        stage_packets<DQkvHalf, true>(c, c.copy() + HOP_HIDDEN, c.copy() + HOP_HIDDEN_SQUARES, factors, entering, 0,
                                      WAIT_HIDDEN);
        c.forget();
        multiply_tiles<DQkvHalf>(c, tiles, 0, 0, second);
        c.sync();
        c.forget();
        const auto sums = [&](int tile, Place place) {
            const float2 e = tile_sums<DQkvHalf>(part, tiles, tile, place, c.lane);
            const float2 h = tile_sums<DQkvHalf>(second, tiles, tile, place, c.lane);
            const float of_e = state().embedding_factor[place.column], of_h = factors[place.column];
            return make_float2(e.x * of_e + h.x * of_h, e.y * of_e + h.y * of_h);
        };
        finish_tiles<DQkvHalf>(c, 0, tiles, epoch, sums, [&](int tile, Place place, float2 x) {
            const int tile_in_all = c.tiles.first[DQkv::INDEX] + tile;
            // 1 / sqrt(HEAD_DIM), over what attention() multiplies by
            if (tile_in_all * TILE_ROWS < HEADS * HEAD_DIM) x.x *= D_QUERY_SCALE, x.y *= D_QUERY_SCALE;
            store_heads(hop(), tile_in_all, place, x, epoch, c.lane);
        });
        c.sync();  // as at the end of run_phase
    }

    // From the fused or the last pass' hidden state, epoch layers - 1, to the next one. Returns this thread's best draft.
    __device__ __forceinline__ u64 run() const {
        const Epoch epoch(layers);
        float(*const factors)[COLUMNS] = c.s.factor;
        const auto nothing = [] {};
        qkv(factors[NORM_QKV], Epoch(layers - 1), epoch);
        attention(c, profile, LAYERS, position(), epoch);
        merge_splits(c, epoch);
        run_phase<DOut>(
            c, profile, SLOT, epoch, nothing,
            [&](int) {
                stage_packets<DOut, false>(c, c.copy() + HOP_MERGED, nullptr, nullptr, epoch, 0, WAIT_ATTENTION);
            },
            [&](int tile, Place place, float2 sums) {
                const float2 x = added(tile, place.column, sums);
                publish_tile(HOP_MIDDLE, tile, place.column, x, NORM_MLP, epoch, place.replica);
                publish_norm(HOP_MIDDLE_SQUARES, tile, place.column, x, epoch, place.replica);
                keep(tile, place, x);
            });
        run_phase<DGateUp>(
            c, profile, SLOT, epoch, nothing,
            [&](int) {
                stage_packets<DGateUp, true>(c, c.copy() + HOP_MIDDLE, c.copy() + HOP_MIDDLE_SQUARES,
                                             factors[NORM_GATE_UP], epoch, 0, WAIT_HIDDEN);
            },
            [&](int tile, Place place, float2 sums) {
                const float factor = factors[NORM_GATE_UP][place.column];
                const int channel = (c.tiles.first[DGateUp::INDEX] + tile) * PACKET;
                publish_gated(hop() + HOP_GATED + (place.column * D_INTERMEDIATE + channel) / 2, sums.x * factor,
                              sums.y * factor, epoch, c.lane, place.replica);
            });
        const int real = real_column();
        run_phase<DDown>(
            c, profile, SLOT, epoch, nothing,
            [&](int piece) {
                stage_packets<DDown, false>(c, c.copy() + HOP_GATED, nullptr, nullptr, epoch, piece, WAIT_HIDDEN);
            },
            [&](int tile, Place place, float2 sums) {
                // The column that counts comes first from here on; the others follow in turn.
                const int to = place.column >= real ? place.column - real : place.column - real + COLUMNS;
                const float2 x = added(tile, place.column, sums);
                publish_tile(HOP_DRAFT, tile, to, x, NORM_FINAL, epoch, place.replica);
                publish_tile(HOP_HIDDEN, tile, to, x, NORM_HIDDEN, epoch, place.replica);
                publish_norm(HOP_HIDDEN_SQUARES, tile, to, x, epoch, place.replica);
                keep(tile, place, x);
            });
        u64 best = 0;
        run_phase<DHead>(
            c, profile, SLOT, epoch, nothing,
            [&](int) {
                stage_packets<DHead, true>(c, c.copy() + HOP_DRAFT, c.copy() + HOP_HIDDEN_SQUARES, factors[NORM_HEAD], epoch,
                                           0, WAIT_HIDDEN);
            },
            [&](int tile, Place place, float2 sums) {
#pragma unroll
                for (int upper = 0; upper < 2; upper++) {
                    const int row = tile * TILE_ROWS + c.lane / 4 + upper * 8;
                    if (place.column != 0 || c.tiles.first[DHead::INDEX] * TILE_ROWS + row >= D_VOCAB) continue;
                    const u64 mine = candidate((upper ? sums.y : sums.x) * factors[NORM_HEAD][0], state().target_ids[row]);
                    best = mine > best ? mine : best;
                }
            });
        return best;
    }

    // All SMs agree on the draft.
    __device__ __forceinline__ void choose(u64 best) const {
        best = warp_largest(best);
        if (c.lane == 0) c.s.best[c.warp] = best;
        c.sync();
        if (c.warp == 0) {
            best = warp_largest(c.lane < WARPS ? c.s.best[c.lane] : 0);
            const Largest all = largest_of_all(draft_candidates(c.p), best, layers & CANDIDATE_TAG, false);
            if (c.lane == 0) {
                state().tokens[pass] = candidate_id(all.word);
                // Also after the last pass: nobody waits before the next step's pass 0 fetches the keys of this one's.
                fence_for_copies();
                if (pass + 1 < state().passes) barrier_arrive(&c.s.ring.go);
            }
        }
        c.sync();
    }
};

// After a step: the drafter catches up with it and, unless the lookup has drafted, drafts the next one. Out of line, and
// what lives on travels in shared memory: what a call leaves in registers is spilled in the layers.
__device__ __noinline__ void draft(const Parameters* p, Shared* s, Profile profile) {
    sync_consumers();
    u8* const slots = dynamic_shared_memory();
    Context c{*p, *s, slots, slots + STAGES * STAGE_BYTES, s->draft.tiles, s->draft.cursor};
    const int passes = s->draft.passes;
    u32 layers = s->draft.layers + 1;
#pragma unroll 1
    for (int pass = 0; pass < passes; pass++) {
        const DraftPass before{c, profile, pass, layers};
        before.begin();
        if (pass == 0) before.fuse();
        layers++;
        const DraftPass now{c, profile, pass, layers};
        now.choose(now.run());
    }
    // What a pass hands to the head is written in no other layer, so from step to step its tag must change, too: one of
    // three (hop.cuh). Where the layers in between, fc and a pass would bring back the same, one is skipped.
    if constexpr ((LAYERS + 2) % 3 == 0) layers++;
    const int count = Speculation{*p, *s}.most_drafts();
    if (!s->stop && s->step.drafted == 0 && count > 0) {
        if (int(threadIdx.x) < count) s->step.tokens[1 + threadIdx.x] = s->draft.tokens[threadIdx.x];
        c.sync();
        if (threadIdx.x == 0) s->step.drafted = count, s->step.match = 0;
    }
    if (threadIdx.x == 0) s->draft.cursor = c.cursor, s->draft.layers = layers;
    c.sync();
}
#endif
