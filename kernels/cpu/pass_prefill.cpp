// The prefill pass: 9 to 64 tokens. Each weight tile is unpacked once for all of them, attention works on tiles of
// queries with a running softmax, and what is done per token is shared among the members.
#include "pass_common.h"

namespace flint {

namespace {

void append_token(Model& model, int l, int row) {
    const Shape& shape = model.shape;
    const Layer& layer = model.layers[l];
    const int head_dim = shape.head_dim;
    float* q = model.qkv + static_cast<size_t>(row) * model.qkv_stride();
    float* k = q + model.q_size();
    const float* v = k + model.kv_size();
    for (int head = 0; head < shape.heads; ++head, q += head_dim) {
        rotate_head(model, q, layer.q_norm, row, q);
        for (int d = 0; d < head_dim; ++d) q[d] *= shape.attention_multiplier;
    }
    const int chunk = (model.position + row) / kChunk, slot = (model.position + row) % kChunk;
    for (int head = 0; head < shape.kv_heads; ++head, k += head_dim, v += head_dim) {
        rotate_head(model, k, layer.k_norm, row, k);
        model.isa->store_kv(k, v, head_dim, slot, model.keys(chunk, l, head), model.values(chunk, l, head));
    }
}

// Tokens [first, first + count) of one KV head's query group over all they see.
void attend_tile(Model& model, int l, int kv_head, int first, int count, Scratch& scratch) {
    const int head_dim = model.shape.head_dim, width = padded_head(head_dim), group = model.group();
    const int rows = count * group;
    for (int r = 0; r < rows; ++r) {
        const float* head = model.qkv + static_cast<size_t>(first + r / group) * model.qkv_stride() +
                            (kv_head * group + r % group) * head_dim;
        float* query = scratch.query + r * width;
        memcpy(query, head, head_dim * sizeof(float));
        for (int d = head_dim; d < width; ++d) query[d] = 0.0f;
    }
    const int chunks = (model.position + first + count - 1) / kChunk + 1;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        for (int r = 0; r < rows; ++r) {
            const int seen = model.position + first + r / group + 1 - chunk * kChunk;
            scratch.visible[r] = seen < kChunk ? seen : kChunk;
        }
        const Softmax& target = chunk == 0 ? scratch.running : scratch.part;
        model.isa->attend(scratch.query, rows, scratch.visible, head_dim, model.keys(chunk, l, kv_head),
                          model.values(chunk, l, kv_head), scratch.scores, target);
        if (chunk > 0) model.isa->merge(scratch.running, scratch.part, rows, head_dim);
    }
    finish_attention(model, scratch.running, rows, first, kv_head);
}

}  // namespace

void prefill_pass(const PassContext& pass, Member& member) {
    Model& model = pass.model;
    const Shape& shape = model.shape;
    const int rows = pass.request.rows;
    Scratch& scratch = model.members[member.id()];
    float* out = scratch.tile_out;
    PhaseClock clock(model, member);

    const auto quantize = [&](Activations x, const float* from, size_t stride, const float* norm, int n) {
        member.share(x.rows, [&](int row) { model.isa->quantize(from + row * stride, norm, shape.eps, n, &x, row); });
        return x;
    };
    const int tile_tokens = model.batch_query_tokens();
    const int query_tiles = (rows + tile_tokens - 1) / tile_tokens;

    for (int l = 0; l < shape.layers; ++l) {
        const Layer& layer = model.layers[l];
        if (member.leads()) copy_features(pass, l);

        Activations x = quantize(input_of(model.shared, rows, layer.q, layer.k, layer.v), model.x, shape.hidden,
                                 layer.attn_norm, shape.hidden);
        member.share(layer.q.tiles() + layer.k.tiles() + layer.v.tiles(),
                     [&](int tile) { qkv_tiles(model, layer, &tile, 1, x, out); });
        clock.charge(kPhaseQkv);

        member.share(rows, [&](int row) { append_token(model, l, row); });
        member.share(query_tiles * shape.kv_heads, [&](int task) {
            const int first = task / shape.kv_heads * tile_tokens;
            const int count = rows - first < tile_tokens ? rows - first : tile_tokens;
            attend_tile(model, l, task % shape.kv_heads, first, count, scratch);
        });
        clock.charge(kPhaseAttention);

        x = quantize(input_of(model.shared, rows, layer.o), model.attended, model.q_size(), nullptr, model.q_size());
        member.share(layer.o.tiles(), [&](int tile) { residual_tiles(model, layer.o, &tile, 1, x, out); });
        clock.charge(kPhaseOut);

        x = quantize(input_of(model.shared, rows, layer.gate, layer.up), model.x, shape.hidden, layer.mlp_norm,
                     shape.hidden);
        member.share(layer.gate.tiles(), [&](int tile) { gate_up_tiles(model, layer, &tile, 1, x, out); });
        clock.charge(kPhaseGateUp);

        x = quantize(input_of(model.shared, rows, layer.down), model.hidden, model.hidden_stride(), nullptr,
                     shape.intermediate);
        member.share(layer.down.tiles(), [&](int tile) { residual_tiles(model, layer.down, &tile, 1, x, out); });
        clock.charge(kPhaseDown);
    }
    if (member.leads()) copy_features(pass, shape.layers);

    const int wanted = pass.request.logit_rows;
    if (wanted > 0) {
        const float* last_rows = model.x + static_cast<size_t>(rows - wanted) * shape.hidden;
        const Activations x = quantize(input_of(model.shared, wanted, model.head), last_rows, shape.hidden,
                                       model.final_norm, shape.hidden);
        member.share(model.head.tiles(), [&](int tile) { head_tiles(pass, &tile, 1, x, out); });
        clock.charge(kPhaseHead);
    }
}

}  // namespace flint
