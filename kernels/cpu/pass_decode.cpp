// The decode pass: 1 to 8 tokens, the weights streamed once. Five barriers a layer; norms and quantisation are cheaper
// done by every member for itself than shared through another barrier.
#include "pass_common.h"

namespace flint {

namespace {

constexpr size_t kLongStream = 256 << 10;  // from here on four streams beat one that is asked for ahead

// Shares the tiles of a phase. One token reads kStreams of them at a time where that makes long streams; several tokens
// are bound by arithmetic.
template <class Work>
void share_tiles(Member& member, int tokens, const Tiles& matrix, int tiles, Work&& work, Ahead ahead = Ahead()) {
    if (tokens == 1 && tiles * matrix.stride >= kLongStream * kStreams * member.count()) {
        member.share_runs<kStreams>(tiles, work, ahead);
    } else {
        member.share_runs<1>(tiles, work, ahead);
    }
}

// The part of this pass's query rows over one chunk of one KV head; whoever finishes a head's last chunk joins its
// parts, in the order of the chunks, so that the result does not depend on who was when.
class DecodeAttention {
  public:
    DecodeAttention(Model& model, int layer, int rows)
        : model_(model), layer_(layer), tokens_(rows), rows_(rows * model.group()),
          chunks_((model.position + rows - 1) / kChunk + 1) {}

    int tasks() const { return chunks_ * model_.shape.kv_heads; }

    void run(int task, Scratch& scratch) const {
        const int chunk = task / model_.shape.kv_heads, kv_head = task % model_.shape.kv_heads;
        const int head_dim = model_.shape.head_dim;
        uint16_t* keys = model_.keys(chunk, layer_, kv_head);
        uint16_t* values = model_.values(chunk, layer_, kv_head);
        append(chunk, kv_head, keys, values, scratch.query);
        prepare_queries(chunk, kv_head, scratch);
        model_.isa->attend(scratch.query, rows_, scratch.visible, head_dim, keys, values, scratch.scores,
                           part(chunk, kv_head));
        if (model_.parts_done[kv_head].fetch_add(1, std::memory_order_acq_rel) == chunks_ - 1) {
            model_.parts_done[kv_head].store(0, std::memory_order_relaxed);
            for (int c = 1; c < chunks_; ++c) model_.isa->merge(part(0, kv_head), part(c, kv_head), rows_, head_dim);
            finish_attention(model_, part(0, kv_head), rows_, 0, kv_head);
        }
    }

  private:
    Softmax part(int chunk, int kv_head) const {
        const size_t first = (static_cast<size_t>(kv_head) * model_.chunks() + chunk) * kFewTokens * model_.group();
        const Softmax& all = model_.parts;
        return {all.peak + first, all.mass + first, all.out + first * padded_head(model_.shape.head_dim)};
    }

    // Keys and values of the new tokens that belong in this chunk.
    void append(int chunk, int kv_head, uint16_t* keys, uint16_t* values, float* key) const {
        const int head_dim = model_.shape.head_dim;
        for (int token = 0; token < tokens_; ++token) {
            const int slot = model_.position + token - chunk * kChunk;
            if (slot < 0 || slot >= kChunk) continue;
            const float* row = model_.qkv + static_cast<size_t>(token) * model_.qkv_stride();
            const float* k = row + model_.q_size() + kv_head * head_dim;
            rotate_head(model_, k, model_.layers[layer_].k_norm, token, key);
            model_.isa->store_kv(key, k + model_.kv_size(), head_dim, slot, keys, values);
        }
    }

    void prepare_queries(int chunk, int kv_head, Scratch& scratch) const {
        const int head_dim = model_.shape.head_dim, width = padded_head(head_dim), group = model_.group();
        for (int r = 0; r < rows_; ++r) {
            const int token = r / group;
            const int seen = model_.position + token + 1 - chunk * kChunk;
            scratch.visible[r] = seen < kChunk ? seen : kChunk;
            float* query = scratch.query + r * width;
            const float* head = model_.qkv + static_cast<size_t>(token) * model_.qkv_stride() +
                                (kv_head * group + r % group) * head_dim;
            rotate_head(model_, head, model_.layers[layer_].q_norm, token, query);
            for (int d = 0; d < head_dim; ++d) query[d] *= model_.shape.attention_multiplier;
            for (int d = head_dim; d < width; ++d) query[d] = 0.0f;
        }
    }

    Model& model_;
    const int layer_, tokens_, rows_, chunks_;
};

}  // namespace

void decode_pass(const PassContext& pass, Member& member) {
    Model& model = pass.model;
    const Shape& shape = model.shape;
    const int rows = pass.request.rows;
    Scratch& scratch = model.members[member.id()];
    float* out = scratch.tile_out;
    PhaseClock clock(model, member);

    const auto quantize = [&](Activations x, const float* from, size_t stride, const float* norm, int n) {
        for (int row = 0; row < x.rows; ++row) model.isa->quantize(from + row * stride, norm, shape.eps, n, &x, row);
        return x;
    };

    for (int l = 0; l < shape.layers; ++l) {
        const Layer& layer = model.layers[l];
        if (member.leads()) copy_features(pass, l);

        Activations x = quantize(input_of(scratch.x, rows, layer.q, layer.k, layer.v), model.x, shape.hidden,
                                 layer.attn_norm, shape.hidden);
        share_tiles(member, rows, layer.q, layer.q.tiles() + layer.k.tiles() + layer.v.tiles(),
                    [&](const int* tiles, int n) { qkv_tiles(model, layer, tiles, n, x, out); },
                    ahead_of(layer.o, member));
        clock.charge(kPhaseQkv);

        const DecodeAttention attention(model, l, rows);
        member.share(attention.tasks(), [&](int task) { attention.run(task, scratch); },
                     ahead_of(layer.o, member));
        clock.charge(kPhaseAttention);

        x = quantize(input_of(scratch.x, rows, layer.o), model.attended, model.q_size(), nullptr, model.q_size());
        share_tiles(member, rows, layer.o, layer.o.tiles(),
                    [&](const int* tiles, int n) { residual_tiles(model, layer.o, tiles, n, x, out); },
                    ahead_of(layer.gate, member));
        clock.charge(kPhaseOut);

        x = quantize(input_of(scratch.x, rows, layer.gate, layer.up), model.x, shape.hidden, layer.mlp_norm,
                     shape.hidden);
        share_tiles(member, rows, layer.gate, layer.gate.tiles(),
                    [&](const int* tiles, int n) { gate_up_tiles(model, layer, tiles, n, x, out); },
                    ahead_of(layer.down, member));
        clock.charge(kPhaseGateUp);

        x = quantize(input_of(scratch.x, rows, layer.down), model.hidden, model.hidden_stride(), nullptr,
                     shape.intermediate);
        share_tiles(member, rows, layer.down, layer.down.tiles(),
                    [&](const int* tiles, int n) { residual_tiles(model, layer.down, tiles, n, x, out); },
                    l + 1 < shape.layers ? ahead_of_qkv(model, model.layers[l + 1], member)
                                         : ahead_of(model.head, member));
        clock.charge(kPhaseDown);
    }
    if (member.leads()) copy_features(pass, shape.layers);

    const int wanted = pass.request.logit_rows;
    if (wanted > 0) {
        const float* last_rows = model.x + static_cast<size_t>(rows - wanted) * shape.hidden;
        const Activations x = quantize(input_of(scratch.x, wanted, model.head), last_rows, shape.hidden,
                                       model.final_norm, shape.hidden);
        share_tiles(member, wanted, model.head, model.head.tiles(),
                    [&](const int* tiles, int n) { head_tiles(pass, tiles, n, x, out); });
        clock.charge(kPhaseHead);
    }
}

}  // namespace flint
