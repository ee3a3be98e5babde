// What the kernel is launched with, and what the warps of one SM share.
#pragma once
#include "ring.cuh"

constexpr int PROFILE_SLOTS = 32;

enum Mode { STEP = 0, GREEDY = 1, SAMPLE = 2 };  // STEP: logits only, one pass; else a loop, speculative with COLUMNS > 1

struct SmTiles {  // one row per SM; mirrored by loading.py
    int first[PHASES];
    int count[PHASES];
    long long offset;       // bytes from `weights` to this SM's stream
    long long layer_bytes;  // of one layer in this stream
};

struct HostToken {  // one per produced token, in pinned memory
    u32 id;
    u32 step;  // 1 + index once the entry is complete; a speculative loop says more in both (speculate.cuh)
    u64 nanoseconds;
};

struct Parameters {  // mirrored by megakernel.py
    const u8* weights;
    const SmTiles* tiles;
    u32* scratch;  // zeroed before each launch
    u16* kv;       // layout in kv_layout.cuh
    const float* norms;       // [LAYERS][attention, mlp][HIDDEN], then the final one
    const float* head_norms;  // [LAYERS][q, k][HEAD_DIM]; null without QK_NORM
    const float* inverse_frequencies;
    const void* embed_q;
    const u16* embed_scale;
    const u16* embed_minimum;
    float* logits;            // [COLUMNS][VOCAB], or null
    float* features;          // [slot][COLUMNS][HIDDEN], or null
    const int* feature_slot;  // [LAYERS + 1]: slot or -1
    const int* stop_ids;
    const int* window_ids;  // the last window_count ids of the history, oldest first
    int* ids;               // [max_tokens] produced ids; several columns: the history (draw_index ids), then these
    HostToken* host_tokens;
    const u32* host_stop;
    u32* host_report;
    u32* host_started;  // [0] 1 once running, then u64 [1]: the clock at the start
    long long* profile;  // [SMS][PROFILE_SLOTS], or null
    u64* candidates;     // of several columns: [COLUMNS][SMS], then [COLUMNS] drawn ids; zeroed before each launch
    long long kv_layer_stride, kv_head_stride;  // elements
    u64 seed;
    int tokens[8];
    int columns, position, max_tokens, mode;
    int stop_count, window_count, window, draw_index, top_k;
    float temperature, top_p, min_p, repeat_penalty;
    int least_match, most_drafts;  // of speculation: tokens that an occurrence must have in common, drafts a step
    int forced_sixteenths;         // with FORCED_ACCEPTANCE: drafts taken as right in 16 steps
    int learned;                   // with DRAFTER: its head drafts where the history holds no occurrence
    const u8* draft_weights;       // as weights and tiles
    const SmTiles* draft_tiles;
    const float* draft_norms;      // [embedding, hidden, mlp, final][HIDDEN]
    const float* draft_frequencies;
    const int* draft_ids;          // [D_VOCAB]: the target's id of each draft id
};

constexpr int PADDED_TOKENS = TOKEN_TILES * 4;
template <class... P>
__device__ constexpr int most_groups() {
    int most = 0;
    ((most = larger(most, P::GROUPS)), ...);
    return most + 3 & ~3;
}
#ifdef DRAFTER
constexpr int MOST_GROUPS = most_groups<Qkv, Out, GateUp, Down, Head, DFc, DQkv, DOut, DGateUp, DDown, DHead>();
#else
constexpr int MOST_GROUPS = most_groups<Qkv, Out, GateUp, Down, Head>();
#endif

// What the products need to know of one scale group's channels of x.
struct GroupOfX {
    float scale;  // of the fixed-point x
    int zero;     // what the weights' zero point meets, see zero_of
};

// The sum of a group's fixed-point x as its zero point needs it: times -8 for symmetric int4.
template <class P>
__device__ __forceinline__ int zero_of(int sum) {
    return P::FORMAT == INT4 ? -8 * sum : sum;
}

// A KV head's split of the keys that an SM attends to; the same for all layers of a token (attention.cuh).
struct KeyShare {
    int splits;         // of every head
    int head, split;    // this SM's
    int first, blocks;  // cached blocks
    int tail, active;
};

constexpr int SQUARE_ITEMS = RANKS * ((HIDDEN / RANKS + 255) / 256);
static_assert(SQUARE_ITEMS <= 32, "a warp adds them up");
enum NormedPhase { NORM_QKV, NORM_GATE_UP, NORM_HEAD, NORMED_PHASES };

constexpr int MOST_MATCH = 32;  // tokens; longer matches of a draft's origin are not told apart

// The speculative loop's step (speculate.cuh), the same on every SM.
struct Step {
    int tokens[COLUMNS];  // the newest token, its drafts, then the newest again
    int drafted;          // or given, after the first
    int match;            // tokens that the history's end and the drafts' origin have in common
    int position;         // of the first
    int choice[COLUMNS];  // the target's token after each
    float top[COLUMNS];   // the largest logit there
    int produced, count;  // tokens and steps so far
};

#ifdef DRAFTER
enum DraftNorm { NORM_EMBEDDING, NORM_HIDDEN, NORM_MLP, NORM_FINAL };  // in the order of draft_norms

struct DraftState {
    SmTiles tiles;
    Cursor cursor;  // the consumers' place in the ring, while the drafter begins and when it ends
    u32 layers;     // likewise, run since the launch
    int kept, passes;  // tokens of the step just verified; how often the drafter runs after it
    int tokens[COLUMNS];  // drafts so far
    int target_ids[DHead::MOST_TILES * TILE_ROWS];  // of the owned rows of its head
    float embedding_factor[COLUMNS];
    float norm_weight[NORM_FINAL + 1][RESIDUAL_TILES * TILE_ROWS];  // of the owned rows
};
#endif

// Words from the other SM of a pair, its sums of the tiles that this one owns: [own tile][column][TILE_ROWS] by phase. A
// drafter's phases take the place of the model's.
template <class... P>
__device__ constexpr int most_own_tiles(int index) {
    int most = 0;
    ((most = P::SHARES > 1 && P::INDEX == index ? larger(most, P::MOST_OWN_TILES) : most), ...);
    return most;
}
#ifdef DRAFTER
__device__ constexpr int tiles_received(int index) {
    return most_own_tiles<Qkv, Out, GateUp, Down, Head, DFc, DQkv, DOut, DGateUp, DDown, DHead>(index);
}
#else
__device__ constexpr int tiles_received(int index) { return most_own_tiles<Qkv, Out, GateUp, Down, Head>(index); }
#endif
__device__ constexpr int received_before(int index) {  // words
    return index == 0 ? 0 : received_before(index - 1) + tiles_received(index - 1) * COLUMNS * TILE_ROWS;
}

struct Shared {
    RingBarriers ring;
    SmTiles tiles;
    alignas(16) GroupOfX x[PADDED_TOKENS][MOST_GROUPS];  // by the weights' scale groups
    KeyShare share;
    float squares[COLUMNS][SQUARE_ITEMS];  // of the embedding
    float factor[NORMED_PHASES][COLUMNS];  // RMSNorm's, of the input of these phases
    float norm_weight[2][RESIDUAL_TILES * TILE_ROWS];  // of the owned rows, for what reads them after o, after down
    float rope[COLUMNS][HEAD_DIM];  // cosines, then sines
    float residual[RESIDUAL_TILES * TILE_ROWS][COLUMNS];
    u64 best[WARPS * SIDE];
    u64 mass[WARPS];
    u64 histogram[256];
    u32 count[WARPS];
    int scratch[2];
    u32 profile[PROFILE_SLOTS];  // used with PROFILE
    float top;
    int token;
    int asked_to_end;  // by the host, before this token
    int stop;          // the producer, after it
    u32 stop_asked;
    Step step;
    u32 suffix[COLUMNS > 1 ? MOST_MATCH : 1];  // the last tokens of the history, the newest first
#ifdef DRAFTER
    DraftState draft;
#endif
    u32 received[received_before(PHASES) > 0 ? received_before(PHASES) : 1];
    u32 seen[SEEN_ROWS];  // how often the penalty's window holds each id of this SM's rows of the head
};

// The token of a column. The only one is in a register, several are in shared memory.
__device__ __forceinline__ int token_of(const Shared& s, int column, int only_token) {
    if constexpr (COLUMNS == 1)
        return only_token;
    else
        return s.step.tokens[column];
}

// Dynamic shared memory: the ring's slots, the arena (activations and sums; attention reuses it), then Shared.
static_assert(STAGES * STAGE_BYTES + ARENA_BYTES + sizeof(Shared) <= SHARED_BYTES, "plan.py counts shared memory");

// This SM's place among those of its cluster.
__device__ __forceinline__ int cluster_rank() { return RANKS > 1 ? blockIdx.x % RANKS : 0; }

// The rows whose residual this SM keeps: every RANKS-th of the tiles of o that its cluster has.
__device__ __forceinline__ int owned_rows(const SmTiles& tiles) {
    return (tiles.count[Out::INDEX] + RANKS - 1 - cluster_rank()) / RANKS * TILE_ROWS;
}
__device__ __forceinline__ int owned_row(const SmTiles& tiles, int i) {  // among all rows
    return (tiles.first[Out::INDEX] + i / TILE_ROWS * RANKS + cluster_rank()) * TILE_ROWS + i % TILE_ROWS;
}

__device__ __forceinline__ void sync_consumers() { sync_threads<CONSUMERS>(); }

struct Context {
    const Parameters& p;
    Shared& s;
    u8* slots;
    u8* arena;
    const SmTiles& tiles;
    Cursor cursor;  // the consumers' place in the ring
    const int sm = blockIdx.x, rank = cluster_rank();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // At the start of a phase: see opaque().
    __device__ __forceinline__ void forget() { warp = opaque(warp), lane = opaque(lane); }

    // Where a phase's sums lie: behind its x.
    template <class P>
    __device__ __forceinline__ float* part() const { return reinterpret_cast<float*>(arena + P::SUMS_AT); }
    __device__ __forceinline__ void sync() const { sync_consumers(); }
    // The copy of the hops' buffers that this SM reads.
    __device__ __forceinline__ const u32* copy() const {
#ifdef DRAFTER  // a pointer that lives through a step is spilled in its layers
        return p.scratch + opaque(sm) / RANKS % HOP_COPIES * HOP_COPY;
#else
        return p.scratch + sm / RANKS % HOP_COPIES * HOP_COPY;
#endif
    }
};

#ifdef PROFILE
// Adds the clocks since the last stamp to `slot`; first thread of the SM only, so the shares of one warp. In shared memory:
// in registers the sums would be spilled, and the profile be of another kernel.
struct Profile {
    u32* total;
    u32 last;
    __device__ __forceinline__ explicit Profile(u32* total) : total(total), last(u32(clock64())) {
        if (threadIdx.x == 0)
            for (int i = 0; i < PROFILE_SLOTS; i++) total[i] = 0;
    }
    __device__ __forceinline__ void stamp(int slot) {
        if (threadIdx.x != 0) return;
        const u32 now = u32(clock64());
        total[slot] += now - last;
        last = now;
    }
};
#else
struct Profile {
    __device__ __forceinline__ explicit Profile(u32*) {}
    __device__ __forceinline__ void stamp(int) {}
};
#endif
