// Steps that the decode pass and the prefill pass share.
#pragma once

#include <initializer_list>
#include <string.h>

#include "pass.h"

namespace flint {

struct PassContext {
    Model& model;
    const PassRequest& request;
};

// Adds the time since the last call to one kind of phase.
class PhaseClock {
  public:
    PhaseClock(Model& model, const Member& member) : model_(model), on_(model.profile && member.leads()) {
        if (on_) last_ = now_ns();
    }
    void charge(Phase phase) {
        if (!on_) return;
        const int64_t now = now_ns();
        model_.phase_ns[phase] += now - last_;
        last_ = now;
    }

  private:
    Model& model_;
    const bool on_;
    int64_t last_ = 0;
};

// `storage` as the input of `rows` tokens to these matrices, in the forms that their formats need.
template <class... Matrices>
inline Activations input_of(const Activations& storage, int rows, const Matrices&... matrices) {
    Activations view = storage;
    view.rows = rows;
    if (!((matrices.format == kInt8) || ...)) view.wide = nullptr;
    if (!((matrices.format == kBf16) || ...)) view.exact = nullptr;
    return view;
}

inline void multiply(const Model& model, const Tiles& matrix, int tile, const Activations& x, float* out) {
    model.isa->matmul[matrix.format](matrix.tile(tile), matrix, x, out);
}

constexpr size_t kAheadBytes = 32 << 10;  // of 512 KB or more of L2

// The start of this member's share of a matrix.
inline Ahead ahead_of(const Tiles& matrix, const Member& member) {
    return {matrix.tile(member.first_item(matrix.tiles())), kAheadBytes};
}

// tile_out [rows][16] -> the columns [16 * tile, ...) of target, those beyond `columns` dropped. A whole tile, nearly
// always, is copied or added with a length that the compiler knows.
inline void store_tile(const float* tile_out, int rows, int tile, int columns, float* target, size_t stride) {
    const int first = tile * kTileRows;
    const int width = columns - first < kTileRows ? columns - first : kTileRows;
    for (int row = 0; row < rows; ++row, tile_out += kTileRows) {
        float* const to = target + row * stride + first;
        if (width == kTileRows) {
            memcpy(to, tile_out, kTileRows * sizeof(float));
        } else {
            memcpy(to, tile_out, width * sizeof(float));
        }
    }
}

inline void add_tile(const float* tile_out, int rows, int tile, int columns, float factor, float* target, size_t stride) {
    const int first = tile * kTileRows;
    const int width = columns - first < kTileRows ? columns - first : kTileRows;
    for (int row = 0; row < rows; ++row, tile_out += kTileRows) {
        float* const to = target + row * stride + first;
        if (width == kTileRows) {
            for (int i = 0; i < kTileRows; ++i) to[i] += factor * tile_out[i];
        } else {
            for (int i = 0; i < width; ++i) to[i] += factor * tile_out[i];
        }
    }
}

// A tile of a matrix, and where its 16 outputs belong.
struct Place {
    const Tiles* matrix;
    int tile;
    float* target;  // of the whole matrix's outputs
};

// Tile `tile` of q, k and v counted through.
inline Place qkv_place(const Model& model, const Layer& layer, int tile) {
    float* target = model.qkv;
    const Tiles* matrix = &layer.q;
    for (const Tiles* next : {&layer.k, &layer.v}) {
        if (tile < matrix->tiles()) break;
        tile -= matrix->tiles();
        target += matrix->rows;
        matrix = next;
    }
    return {matrix, tile, target};
}

// Tile after tile, or side by side where there is one token and the formats agree; tile_out [count][rows][16].
inline void multiply_places(const Model& model, const Place* places, int count, const Activations& x, float* tile_out) {
    if (count == 1) return multiply(model, *places->matrix, places->tile, x, tile_out);
    bool alike = x.rows == 1;
    const uint8_t* tiles[kStreams];
    for (int i = 0; i < count; ++i) {
        const Tiles& matrix = *places[i].matrix;
        tiles[i] = matrix.tile(places[i].tile);
        alike = alike && matrix.format == places[0].matrix->format && matrix.group_blocks == places[0].matrix->group_blocks;
    }
    if (alike) return model.isa->matvec[places[0].matrix->format](tiles, count, *places[0].matrix, x, tile_out);
    for (int i = 0; i < count; ++i) {
        multiply(model, *places[i].matrix, places[i].tile, x, tile_out + i * x.rows * kTileRows);
    }
}

inline void qkv_tiles(Model& model, const Layer& layer, const int* tiles, int count, const Activations& x,
                      float* tile_out) {
    Place places[kStreams];
    for (int i = 0; i < count; ++i) places[i] = qkv_place(model, layer, tiles[i]);
    multiply_places(model, places, count, x, tile_out);
    for (int i = 0; i < count; ++i) {
        store_tile(tile_out + i * x.rows * kTileRows, x.rows, places[i].tile, places[i].matrix->rows, places[i].target,
                   model.qkv_stride());
    }
}

inline Ahead ahead_of_qkv(const Model& model, const Layer& layer, const Member& member) {
    const int items = layer.q.tiles() + layer.k.tiles() + layer.v.tiles();
    const Place place = qkv_place(model, layer, member.first_item(items));
    return {place.matrix->tile(place.tile), kAheadBytes};
}

// Hidden tiles, each from a gate tile and the up tile that follows it in memory.
inline void gate_up_tiles(Model& model, const Layer& layer, const int* tiles, int count, const Activations& x,
                          float* tile_out) {
    const int values = count * x.rows * kTileRows;
    float* const gate = tile_out;
    float* const up = tile_out + values;
    Place gates[kStreams], ups[kStreams];
    for (int i = 0; i < count; ++i) {
        gates[i] = {&layer.gate, tiles[i], nullptr};
        ups[i] = {&layer.up, tiles[i], nullptr};
    }
    multiply_places(model, gates, count, x, gate);
    multiply_places(model, ups, count, x, up);
    model.isa->silu_multiply(gate, up, values);
    for (int i = 0; i < count; ++i) {
        store_tile(gate + i * x.rows * kTileRows, x.rows, tiles[i], model.hidden_stride(), model.hidden,
                   model.hidden_stride());
    }
}

inline void residual_tiles(Model& model, const Tiles& matrix, const int* tiles, int count, const Activations& x,
                           float* tile_out) {
    Place places[kStreams];
    for (int i = 0; i < count; ++i) places[i] = {&matrix, tiles[i], nullptr};
    multiply_places(model, places, count, x, tile_out);
    for (int i = 0; i < count; ++i) {
        add_tile(tile_out + i * x.rows * kTileRows, x.rows, tiles[i], matrix.rows, model.shape.residual_multiplier,
                 model.x, model.shape.hidden);
    }
}

inline void head_tiles(const PassContext& pass, const int* tiles, int count, const Activations& x, float* tile_out) {
    Model& model = pass.model;
    Place places[kStreams];
    for (int i = 0; i < count; ++i) places[i] = {&model.head, tiles[i], nullptr};
    multiply_places(model, places, count, x, tile_out);
    const float scaling = 1.0f / model.shape.logits_scaling;
    if (scaling != 1.0f) {
        for (int i = 0; i < count * x.rows * kTileRows; ++i) tile_out[i] *= scaling;
    }
    for (int i = 0; i < count; ++i) {
        store_tile(tile_out + i * x.rows * kTileRows, x.rows, tiles[i], model.shape.vocab, pass.request.logits,
                   model.shape.vocab);
    }
}

// A head of q or k of token `row`, normalised (qwen3) and rotated, into `out` [head_dim].
inline void rotate_head(const Model& model, const float* head, const float* norm, int row, float* out) {
    const int head_dim = model.shape.head_dim;
    if (out != head) memcpy(out, head, head_dim * sizeof(float));
    if (norm) model.isa->rms_norm(out, norm, model.shape.eps, head_dim);
    model.isa->rope(out, model.cosine + row * (head_dim / 2), model.sine + row * (head_dim / 2), head_dim);
}

inline void copy_features(const PassContext& pass, int layer) {
    const PassRequest& request = pass.request;
    for (int i = 0; i < request.feature_count; ++i) {
        if (request.feature_layers[i] != layer) continue;
        memcpy(request.features[i], pass.model.x, sizeof(float) * request.rows * pass.model.shape.hidden);
    }
}

// out / mass of query rows (token first + r / group, head of kv_head r % group) into `attended`.
inline void finish_attention(Model& model, const Softmax& softmax, int rows, int first_token, int kv_head) {
    const int group = model.group(), head_dim = model.shape.head_dim, width = padded_head(head_dim);
    for (int r = 0; r < rows; ++r) {
        float* out = model.attended + static_cast<size_t>(first_token + r / group) * model.q_size() +
                     (kv_head * group + r % group) * head_dim;
        const float factor = 1.0f / softmax.mass[r];
        for (int d = 0; d < head_dim; ++d) out[d] = softmax.out[r * width + d] * factor;
    }
}

void decode_pass(const PassContext& pass, Member& member);
void prefill_pass(const PassContext& pass, Member& member);

}  // namespace flint
