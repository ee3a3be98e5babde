// What a processor family implements: one table of functions per instruction set, chosen once at run time.
//
// The same source (ops.h) is compiled once per table with that table's compiler flags; only the vector primitives at
// the top of each isa_*.cpp differ. Everything here is a pure function of its arguments.
#pragma once

#include <stdint.h>

#include "tile.h"

namespace flint {

// Up to `rows` token vectors, quantised per block of 32 channels to two int8 digits, block by block so that one weight
// block meets all tokens in a row:
//
//     x = scale * (256 coarse + fine)        q[block][row] = | 32 coarse digits | 32 fine digits |
//
// One digit alone is what most engines use; on smollm2 it costs a KL divergence of 0.01 and 3 % of the logits' norm,
// mostly through the outlier channels of the attention input. Both digits leave 0.05 %, and while a pass waits for
// weights from memory the second dot product costs nothing.
struct Activations {
    int rows = 0;
    int8_t* q = nullptr;        // [blocks][rows][2][32]
    float* scale = nullptr;     // [blocks][rows]
    float* sum = nullptr;       // [blocks][rows], sum of x: what a weight's constant part multiplies
    int16_t* wide = nullptr;    // [blocks][rows][32], 256 coarse + fine, channels 0 2 1 3 of every four: for int8 weights
    float* exact = nullptr;     // [blocks][rows][32], x itself: for bf16 weights
};                              // (wide and exact are null where no matrix needs them)

constexpr int kStreams = 4;     // places that one thread reads weights from at a time

constexpr int kChunk = 64;      // positions per KV-cache chunk: the unit of attention work and of cache growth
constexpr int kPadHead = 16;    // head_dim is padded to a multiple of this in the cache

constexpr int padded_head(int head_dim) { return (head_dim + kPadHead - 1) / kPadHead * kPadHead; }

// One chunk of one KV head, both parts fp16:
//     keys    [kChunk / 16][padded head_dim][16 positions]   so that 16 scores accumulate side by side
//     values  [kChunk][padded head_dim]
constexpr size_t chunk_halves(int head_dim) { return static_cast<size_t>(kChunk) * padded_head(head_dim); }

// Attention of some query rows over some positions, not yet normalised: out = sum of exp(score - peak) * value.
struct Softmax {
    float* peak;  // [rows]
    float* mass;  // [rows], sum of exp(score - peak)
    float* out;   // [rows][padded head_dim]
};

struct Isa {
    const char* name;
    bool (*supported)();

    // out[tile][16] = 1 to kStreams tiles of one shape times the only activation row, read side by side. By format.
    void (*matvec[kFormats])(const uint8_t* const* tiles, int count, const Tiles& shape, const Activations& x,
                             float* out);

    // out[row][16] = 16 weight rows times each activation row. By format; the same bits as matvec.
    void (*matmul[kFormats])(const uint8_t* tile, const Tiles& shape, const Activations& x, float* out);

    // Quantises x[n] into row `row`; with `weight`, x is RMS-normalised first: x / sqrt(mean(x^2) + eps) * weight.
    void (*quantize)(const float* x, const float* weight, float eps, int n, Activations* out, int row);

    // x[n] = x / sqrt(mean(x^2) + eps) * weight, in place.
    void (*rms_norm)(float* x, const float* weight, float eps, int n);

    // x[head_dim] rotated in place: pairs (i, i + head_dim / 2) by the angle whose cosine and sine are given.
    void (*rope)(float* x, const float* cosine, const float* sine, int head_dim);

    // gate[n] = silu(gate) * up.
    void (*silu_multiply)(float* gate, const float* up, int n);

    // Key and value of one position (0 <= slot < kChunk) into a chunk.
    void (*store_kv)(const float* key, const float* value, int head_dim, int slot, uint16_t* keys, uint16_t* values);

    // query [rows][padded head_dim], already scaled; row r sees the first visible[r] positions of the chunk (may be
    // <= 0). scores: scratch [rows][kChunk]. Overwrites `out`.
    void (*attend)(const float* query, int rows, const int* visible, int head_dim, const uint16_t* keys,
                   const uint16_t* values, float* scores, const Softmax& out);

    // into = into and part together (both over the same rows).
    void (*merge)(const Softmax& into, const Softmax& part, int rows, int head_dim);

    // Lowest index of the largest of x[n]; -1 if one is not a number.
    int (*argmax)(const float* x, int n);

    // out[n] = exp((x - top) / temperature), in double.
    void (*weigh)(const float* x, int n, float top, double temperature, double* out);

    // Reads `bytes` (a multiple of 256) from each of kStreams places, side by side as matvec does, and returns a
    // checksum: a memory bandwidth probe.
    uint64_t (*read)(const uint8_t* const* streams, size_t bytes);
};

extern const Isa kPortable;
#if defined(__x86_64__)
extern const Isa kAvx2;
extern const Isa kAvx512;
#elif defined(__aarch64__)
extern const Isa kNeon;
#endif

// The best table this processor supports, or the one called `name` ("portable", "avx2", "avx512", "neon"); null if
// there is no such table here or the processor lacks its instructions.
const Isa* select_isa(const char* name);

}  // namespace flint
