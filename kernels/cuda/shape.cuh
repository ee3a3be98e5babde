// The model's and the GPU's numbers: macros from plan.py, what follows from them, and the assumptions they must meet.
#pragma once
#include "primitives.cuh"

constexpr int WARPS = CONSUMER_WARPS;
constexpr int CONSUMERS = WARPS * 32;
constexpr int THREADS = CONSUMERS + 128;  // and a warpgroup of which one warp keeps the ring full
// A block's pool of registers is what it was launched with, not the SM's 65536: asking for more would wait for ever.
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8, PRODUCER_REGISTERS = 32;
constexpr int CONSUMER_REGISTERS = (THREADS * LAUNCH_REGISTERS - 128 * PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;
constexpr int TILE_ROWS = 16;
constexpr int GROUP_HEADS = HEADS / KV_HEADS;  // query heads that share a KV head
constexpr int QKV_ROWS_TOTAL = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
constexpr int TOKEN_TILES = (COLUMNS + 3) / 4;  // a tensor-core tile has 8 columns: high and low parts of 4 tokens
constexpr int PART_UNIT = COLUMNS * TILE_ROWS + 8;  // floats of one unit's sums; 8 more spread 4 units over all banks

// How a warp's lanes share the sums of one tile: lane 4j + t has rows j and j + 8 of one column, and up to four columns
// lie side by side. Where there are fewer, several lanes have the same, and take turns at what there is to store.
constexpr int SIDE = COLUMNS < 4 ? COLUMNS : 4, REPLICAS = 4 / SIDE;
constexpr int TURNS = COLUMNS / SIDE;  // of a warp, for all columns of a tile

__device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

enum Format { INT4 = 0, INT4_ASYMMETRIC = 1, INT8 = 2, BF16 = 3 };

// One matrix phase; the members are documented in phases.py.
template <int FORMAT_, int K_, int SHARES_, int ROWS_, int GROUP_, int CHUNKS_, int PIECES_, int UNIT_BLOCKS_,
          int UNITS_PER_STAGE_, int BATCH_, int MOST_TILES_, int INDEX_>
struct Phase {
    static constexpr int SHARES = SHARES_;  // SMs that share K; an SM's own part of it is K
    static constexpr int FORMAT = FORMAT_, K = K_, ROWS = ROWS_, GROUP = GROUP_, CHUNKS = CHUNKS_;
    static constexpr int PIECES = PIECES_, UNIT_BLOCKS = UNIT_BLOCKS_, UNITS_PER_STAGE = UNITS_PER_STAGE_;
    static constexpr int BATCH = BATCH_, MOST_TILES = MOST_TILES_, INDEX = INDEX_;

    static constexpr bool IS_INT4 = FORMAT == INT4 || FORMAT == INT4_ASYMMETRIC;
    static constexpr int CHUNK_BLOCKS = K / 64 / CHUNKS;
    static constexpr int UNITS = CHUNK_BLOCKS / UNIT_BLOCKS;  // of one tile in one chunk
    // A warp takes every STRIDE-th unit. Where few warps are lost by it, all of a warp's units have the same place in K.
    static constexpr int WHOLE_ROUND = WARPS / UNITS * UNITS;
    static constexpr bool SAME_K = WHOLE_ROUND * 8 >= WARPS * 7;
    static constexpr int STRIDE = SAME_K ? WHOLE_ROUND : WARPS;
    static constexpr int BLOCK_BYTES = IS_INT4 ? 512 : FORMAT == INT8 ? 1024 : 2048;
    static constexpr int VALUE_BYTES = UNIT_BLOCKS * BLOCK_BYTES;
    static constexpr int UNIT_GROUPS = FORMAT == BF16 ? 0 : UNIT_BLOCKS * 64 / GROUP;
    static constexpr int UNIT_BYTES = VALUE_BYTES + UNIT_GROUPS * 32 * (FORMAT == INT4_ASYMMETRIC ? 2 : 1);
    static constexpr int TILE_BYTES = CHUNKS * UNITS * UNIT_BYTES;
    static constexpr int STAGED_K = K / PIECES;  // channels of x in shared memory at a time
    static constexpr int X_BLOCK = FORMAT == BF16 ? 128 : 64;  // bytes of 64 channels of one part of one token
    static constexpr int X_STRIDE = STAGED_K / 64 * X_BLOCK + 16;  // 16 more: 8 columns share no bank
    static constexpr int GROUPS = STAGED_K / GROUP;  // of the weights
    static constexpr int SUMS_AT = (2 * COLUMNS * X_STRIDE + 127) / 128 * 128;  // in the arena, behind x

    static constexpr int MOST_OWN_TILES = (MOST_TILES + SHARES - 1) / SHARES;  // whose sums this SM brings to an end
    static constexpr int TILES_AT_ONCE = BATCH < MOST_TILES ? BATCH : MOST_TILES;
    static constexpr int MOST_STAGES = CHUNKS * ((MOST_TILES + TILES_AT_ONCE - 1) / TILES_AT_ONCE) *
                                       ((TILES_AT_ONCE * UNITS + UNITS_PER_STAGE - 1) / UNITS_PER_STAGE);

    static_assert(K % (64 * CHUNKS) == 0 && CHUNK_BLOCKS % UNIT_BLOCKS == 0, "units must tile K");
    static_assert(FORMAT == BF16 || UNIT_BLOCKS * 64 % GROUP == 0, "a unit holds whole groups");
    static_assert(GROUP == 32 || GROUP == 64 || GROUP == 128, "scale groups");
    static_assert(SHARES == 1 || SHARES == RANKS, "the SMs of a cluster share tiles");
    static_assert(SHARES <= 2, "sums are exchanged with one partner");
    static_assert(BATCH % SHARES == 0 || BATCH >= MOST_TILES, "every batch begins with a tile of the first SM");
    static_assert(STAGED_K % 64 == 0 && STAGED_K % GROUP == 0, "x is staged in whole blocks and groups");
    static_assert(WARPS % UNITS_PER_STAGE == 0, "a round of all warps is whole stages");
    static_assert(UNITS_PER_STAGE * UNIT_BYTES <= STAGE_BYTES && UNIT_BYTES % 16 == 0, "bulk copies of 16 bytes");
    static_assert(CHUNKS == 1 || BATCH == MOST_TILES, "chunked phases are reduced in one batch");
    static_assert(PIECES == 1 || PIECES == CHUNKS, "x is staged whole, or chunk by chunk");
    static_assert(SUMS_AT + BATCH * CHUNKS * UNITS * PART_UNIT * 4 * (BATCH < MOST_TILES ? 2 : 1) <= ARENA_BYTES,
                  "x and sums fit the arena");
};

#define FLINT_PHASE(NAME, INDEX)                                                                                      \
    Phase<NAME##_FORMAT, NAME##_K, NAME##_SHARES, NAME##_ROWS, NAME##_GROUP, NAME##_CHUNKS, NAME##_PIECES,            \
          NAME##_UNIT_BLOCKS, NAME##_UNITS_PER_STAGE, NAME##_BATCH, NAME##_MOST_TILES, INDEX>
using Qkv = FLINT_PHASE(QKV, 0);
using Out = FLINT_PHASE(O, 1);
using GateUp = FLINT_PHASE(GATE_UP, 2);  // a tile: 8 rows of gate, then the same 8 of up
using Down = FLINT_PHASE(DOWN, 3);
using Head = FLINT_PHASE(HEAD, 4);
constexpr int PHASES = 5;
static_assert(Out::SHARES == RANKS && Down::SHARES == RANKS && Head::SHARES == 1, "the residual has one owner");
#ifdef DRAFTER
// A learned drafter's (draft_head.cuh), in a stream of its own. fc has the rows of the residual, and so its owners.
using DFc = FLINT_PHASE(D_FC, 1);
using DQkv = FLINT_PHASE(D_QKV, 0);  // K: a token's embedding, then the hidden state
using DOut = FLINT_PHASE(D_O, 1);
using DGateUp = FLINT_PHASE(D_GATE_UP, 2);
using DDown = FLINT_PHASE(D_DOWN, 3);
using DHead = FLINT_PHASE(D_HEAD, 4);
static_assert(DQkv::CHUNKS == 2 && DQkv::PIECES == 2, "its halves are staged one by one");
static_assert(DHead::MOST_TILES >= 1 && COLUMNS > 1, "drafts are for several columns");
#else
#define D_INTERMEDIATE 0
#define D_FEATURES -1
#endif

static_assert(HEAD_DIM % 64 == 0, "a lane owns whole 16-byte pieces of a key");
static_assert(HEADS % KV_HEADS == 0, "grouped-query attention");

// ---- attention

constexpr int QUERY_ROWS = GROUP_HEADS * COLUMNS;  // row = column * GROUP_HEADS + head in group
constexpr int QUERY_BLOCKS = (QUERY_ROWS + 7) / 8;
constexpr int VALUE_PARTS = HEAD_DIM / 64;  // warps that share the values of a block, 64 dimensions each: registers
constexpr int KEY_READERS = QUERY_BLOCKS * VALUE_PARTS;  // warps that read a block
// Warps that share the keys of one block of queries. A round of them fits the ring, as for weights (gemv.cuh).
constexpr int KEY_WARPS = smaller(WARPS / KEY_READERS, STAGES * KV_PER_STAGE);
constexpr int MANY_KEYS = 16;  // blocks of a split
constexpr int KV_BYTES = 2 * 16 * HEAD_DIM * 2;  // keys and values of 16 positions
static_assert(KV_PER_STAGE * KV_BYTES <= STAGE_BYTES, "KV blocks fit a stage");
static_assert(KEY_WARPS >= 1 && EMPTY_ARRIVALS >= KV_PER_STAGE * KEY_READERS && EMPTY_ARRIVALS >= WARPS, "arrivals");
static_assert(KV_HEADS * MAX_SPLITS <= SMS, "one SM per split");

// ---- hop buffers: words in global memory, one writer each; offsets in words from the scratch buffer's start. Packets
// (hop.cuh) take half a word a channel.

constexpr int HOP_HIDDEN = 0;                                           // packets [column][HIDDEN] entering a layer
constexpr int HOP_MIDDLE = HOP_HIDDEN + COLUMNS * HIDDEN / 2;           // packets [column][HIDDEN] after attention
constexpr int HOP_GATED = HOP_MIDDLE + COLUMNS * HIDDEN / 2;            // packets [column][INTERMEDIATE]
constexpr int MOST_INTERMEDIATE = INTERMEDIATE > D_INTERMEDIATE ? INTERMEDIATE : D_INTERMEDIATE;
constexpr int HOP_HIDDEN_SQUARES = HOP_GATED + COLUMNS * MOST_INTERMEDIATE / 2;          // words [column][HIDDEN / 16]
constexpr int HOP_MIDDLE_SQUARES = HOP_HIDDEN_SQUARES + COLUMNS * (HIDDEN / TILE_ROWS);  // words [column][HIDDEN / 16]
constexpr int HOP_MERGED = HOP_MIDDLE_SQUARES + COLUMNS * (HIDDEN / TILE_ROWS);  // packets [column][head][dim]
constexpr int HOP_DRAFT = HOP_MERGED + COLUMNS * HEADS * HEAD_DIM / 2;           // packets [column][HIDDEN], to its head
constexpr int HOP_FEATURES = HOP_DRAFT + (D_FEATURES > 0) * COLUMNS * HIDDEN / 2;  // packets [column][feature][HIDDEN]
constexpr int HOP_COPY_END = HOP_DRAFT + (D_FEATURES + 1) * COLUMNS * HIDDEN / 2;
// So far there are HOP_COPIES, so that not all SMs read the same lines of the L2 cache at the same time.
constexpr int HOP_COPY = HOP_COPY_END + 31 & ~31;
constexpr int HOP_ATTENTION = HOP_COPIES * HOP_COPY;  // packets [column][head][split][dim]
constexpr int HOP_QKV = HOP_ATTENTION + COLUMNS * HEADS * MAX_SPLITS * HEAD_DIM / 2;  // words [column][QKV_ROWS]
constexpr int HOP_WEIGHTS = HOP_QKV + COLUMNS * QKV_ROWS_TOTAL;             // words [column][head][split][max, sum]
constexpr int HOP_CANDIDATES = HOP_WEIGHTS + COLUMNS * HEADS * MAX_SPLITS * 2;  // [SM] of u64
constexpr int HOP_TOKEN = HOP_CANDIDATES + 2 * SMS;                             // u64
static_assert(HOP_COPIES == 1 || HOP_COPIES == 2 || HOP_COPIES == 4 || HOP_COPIES == 8, "publish");
static_assert(HIDDEN % 64 == 0 && INTERMEDIATE % 64 == 0, "packets are aligned to 16 bytes");
static_assert(HOP_CANDIDATES % 2 == 0 && HOP_WEIGHTS % 2 == 0, "aligned");
