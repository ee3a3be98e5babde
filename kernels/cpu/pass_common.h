// Steps that the decode pass and the prefill pass share.
#pragma once

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

// Start loading what this member reads first in the next phase, while it waits for the others.
inline void prefetch_share(const Tiles& matrix, const Member& member) {
    const uint8_t* p = matrix.tile(static_cast<int>(static_cast<int64_t>(matrix.tiles()) * member.id() / member.count()));
    for (int i = 0; i < 4096; i += 64) __builtin_prefetch(p + i);
}

// tile_out [rows][16] -> the columns [16 * tile, ...) of target, those beyond `columns` dropped.
inline void store_tile(const float* tile_out, int rows, int tile, int columns, float* target, size_t stride) {
    const int first = tile * kTileRows;
    const int width = columns - first < kTileRows ? columns - first : kTileRows;
    for (int row = 0; row < rows; ++row) {
        memcpy(target + row * stride + first, tile_out + row * kTileRows, width * sizeof(float));
    }
}

inline void add_tile(const float* tile_out, int rows, int tile, int columns, float factor, float* target, size_t stride) {
    const int first = tile * kTileRows;
    const int width = columns - first < kTileRows ? columns - first : kTileRows;
    for (int row = 0; row < rows; ++row) {
        float* to = target + row * stride + first;
        for (int i = 0; i < width; ++i) to[i] += factor * tile_out[row * kTileRows + i];
    }
}

// Tile `tile` of q, k and v counted through: rows of the projection into qkv.
inline void qkv_tile(Model& model, const Layer& layer, int tile, const Activations& x, float* tile_out) {
    const Tiles* matrix = &layer.q;
    float* target = model.qkv;
    if (tile >= matrix->tiles()) {
        tile -= matrix->tiles();
        target += model.q_size();
        matrix = &layer.k;
        if (tile >= matrix->tiles()) {
            tile -= matrix->tiles();
            target += model.kv_size();
            matrix = &layer.v;
        }
    }
    multiply(model, *matrix, tile, x, tile_out);
    store_tile(tile_out, x.rows, tile, matrix->rows, target, model.qkv_stride());
}

inline void gate_up_tile(Model& model, const Layer& layer, int tile, const Activations& x, float* tile_out) {
    float* gate = tile_out;
    float* up = tile_out + kBatchTokens * kTileRows;
    multiply(model, layer.gate, tile, x, gate);
    multiply(model, layer.up, tile, x, up);
    model.isa->silu_multiply(gate, up, x.rows * kTileRows);
    store_tile(gate, x.rows, tile, model.hidden_stride(), model.hidden, model.hidden_stride());
}

inline void residual_tile(Model& model, const Tiles& matrix, int tile, const Activations& x, float* tile_out) {
    multiply(model, matrix, tile, x, tile_out);
    add_tile(tile_out, x.rows, tile, matrix.rows, model.shape.residual_multiplier, model.x, model.shape.hidden);
}

inline void head_tile(const PassContext& pass, int tile, const Activations& x, float* tile_out) {
    Model& model = pass.model;
    multiply(model, model.head, tile, x, tile_out);
    const float scaling = 1.0f / model.shape.logits_scaling;
    if (scaling != 1.0f) {
        for (int i = 0; i < x.rows * kTileRows; ++i) tile_out[i] *= scaling;
    }
    store_tile(tile_out, x.rows, tile, model.shape.vocab, pass.request.logits, model.shape.vocab);
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
