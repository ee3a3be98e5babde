// A model in memory: tiles, norms, the KV cache and the scratch space of one step.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "isa.h"
#include "team.h"
#include "tile.h"

namespace flint {

constexpr int kFewTokens = 8;     // up to here a pass is a decode step: one weight stream, everything else redundant
constexpr int kBatchTokens = 64;  // tokens per prefill pass

// Mirrors the ctypes structure in kernels/native.py. Sizes count elements.
struct Shape {
    int32_t hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, context;
    float eps, embedding_multiplier, attention_multiplier, residual_multiplier, logits_scaling;
};

struct Layer {
    Tiles q, k, v, o, gate, up, down;
    const float* attn_norm = nullptr;
    const float* mlp_norm = nullptr;
    const float* q_norm = nullptr;  // with k_norm: RMS norm of every head before RoPE; else null
    const float* k_norm = nullptr;
};

// Anonymous memory reserved in one piece and given out front to back; pages arrive when they are first written.
class Arena {
  public:
    Arena() = default;
    ~Arena();
    Arena(const Arena&) = delete;
    bool reserve(size_t bytes, bool huge_pages);
    void* take(size_t bytes);  // null when the reservation is used up
    size_t used() const { return used_; }

  private:
    uint8_t* base_ = nullptr;
    uint8_t* map_ = nullptr;
    size_t map_bytes_ = 0, bytes_ = 0, used_ = 0;
};

// Where time goes: nanoseconds of member 0 per kind of phase, its waits included.
enum Phase { kPhaseQkv, kPhaseAttention, kPhaseOut, kPhaseGateUp, kPhaseDown, kPhaseHead, kPhaseSample, kPhases };

struct Scratch {
    Activations x;                // this member's quantised input, kFewTokens rows
    float* tile_out;              // [2][kBatchTokens][kTileRows]
    float* query;                 // [attention rows][padded head_dim]
    float* scores;                // [attention rows][kChunk]
    Softmax running, part;        // [attention rows]
    int* visible;                 // [attention rows]
};

struct Model {
    Model(const Shape& shape, const Isa* isa, int threads) : shape(shape), isa(isa), team(threads) {}
    ~Model();

    Shape shape;
    const Isa* isa;
    Team team;

    Arena weights;
    Layer* layers = nullptr;
    int layers_loaded = 0;
    Tiles embed, head;
    const float* final_norm = nullptr;
    float* inverse_frequency = nullptr;  // [head_dim / 2]

    // KV cache: [chunk of kChunk positions][layer][kv head]{keys, values}; chunks are touched as they fill.
    Arena cache;
    uint16_t* kv = nullptr;
    int position = 0;

    // Scratch of one pass.
    Arena scratch;
    float* x = nullptr;           // [kBatchTokens][hidden] residual stream
    float* qkv = nullptr;         // [kBatchTokens][qkv_stride] query heads, key heads, value heads
    float* attended = nullptr;    // [kBatchTokens][heads * head_dim]
    float* hidden = nullptr;      // [kBatchTokens][intermediate, padded to tiles]
    float* cosine = nullptr;      // [kBatchTokens][head_dim / 2]
    float* sine = nullptr;
    float* logits = nullptr;      // [vocab] of the whole-loop path
    Activations shared;           // quantised input of a prefill pass
    Softmax parts;                // [kv head][chunk][rows] partial attention of a decode pass
    std::atomic<int>* parts_done = nullptr;  // [kv head]
    Scratch* members = nullptr;

    std::atomic<bool> streaming{false};  // a stream owns the model

    bool profile = false;
    int64_t phase_ns[kPhases] = {};
    int64_t profiled_passes = 0;

    int q_size() const { return shape.heads * shape.head_dim; }
    int kv_size() const { return shape.kv_heads * shape.head_dim; }
    int group() const { return shape.heads / shape.kv_heads; }
    int qkv_stride() const { return q_size() + 2 * kv_size(); }
    int hidden_stride() const { return (shape.intermediate + kTileRows - 1) / kTileRows * kTileRows; }
    int chunks() const { return (shape.context + kChunk - 1) / kChunk; }
    int batch_query_tokens() const;  // tokens whose queries share one attention task in prefill
    int attention_rows() const;      // most query rows in one attention task

    uint16_t* keys(int chunk, int layer, int kv_head) const {
        const size_t slot = (static_cast<size_t>(chunk) * shape.layers + layer) * shape.kv_heads + kv_head;
        return kv + slot * 2 * chunk_halves(shape.head_dim);
    }
    uint16_t* values(int chunk, int layer, int kv_head) const {
        return keys(chunk, layer, kv_head) + chunk_halves(shape.head_dim);
    }

    bool ready() const { return final_norm && layers_loaded == shape.layers; }
    bool allocate();  // cache and scratch; false when memory is refused
};

}  // namespace flint
