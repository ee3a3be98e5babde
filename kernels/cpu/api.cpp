// The C interface: argument checks, and nothing else of interest.
#include <new>
#include <stdlib.h>
#include <string.h>

#include "flint_cpu.h"
#include "pass.h"

using namespace flint;

namespace {

size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

struct PackJob {
    const PackedMatrix* packed;
    const Tiles* tiles;
    uint8_t* out;
};

void pack_job(void* context, Member& member) {
    const PackJob& job = *static_cast<PackJob*>(context);
    member.share(job.tiles->tiles(), [&](int tile) {
        pack_tile(*job.packed, *job.tiles, tile, job.out + tile * job.tiles->stride);
    });
}

void pack(Model& model, const PackedMatrix& packed, Tiles* tiles, uint8_t* out) {
    tiles->data = out;
    PackJob job{&packed, tiles, out};
    model.team.run(pack_job, &job);
}

// One matrix into memory of its own.
int place(Model& model, const PackedMatrix& packed, int rows, int cols, Tiles* tiles) {
    if (packed.rows != rows || packed.cols != cols || !plan_tiles(packed, tiles)) return kErrorArgument;
    void* memory = model.weights.take(tiles->tile_bytes() * tiles->tiles());
    if (!memory) return kErrorMemory;
    pack(model, packed, tiles, static_cast<uint8_t*>(memory));
    return 0;
}

// Gate and up tile by tile in turn: a tile of each makes a tile of the hidden activation.
int place_pair(Model& model, const PackedMatrix* packed, int rows, int cols, Tiles* gate, Tiles* up) {
    Tiles* const both[2] = {gate, up};
    for (int i = 0; i < 2; ++i) {
        if (packed[i].rows != rows || packed[i].cols != cols || !plan_tiles(packed[i], both[i])) return kErrorArgument;
    }
    const size_t gate_bytes = gate->tile_bytes();
    gate->stride = up->stride = gate_bytes + up->tile_bytes();
    uint8_t* memory = static_cast<uint8_t*>(model.weights.take(gate->stride * gate->tiles()));
    if (!memory) return kErrorMemory;
    pack(model, packed[0], gate, memory);
    pack(model, packed[1], up, memory + gate_bytes);
    return 0;
}

int place_norm(Model& model, const float* norm, int n, const float** out) {
    *out = nullptr;
    if (!norm) return 0;
    void* memory = model.weights.take(sizeof(float) * n);
    if (!memory) return kErrorMemory;
    memcpy(memory, norm, sizeof(float) * n);
    *out = static_cast<const float*>(memory);
    return 0;
}

}  // namespace

int flint_abi() { return kFlintAbi; }

const char* flint_isa(const char* name) {
    const Isa* isa = select_isa(name);
    return isa ? isa->name : nullptr;
}

size_t flint_tiled_bytes(const PackedMatrix* matrix) {
    Tiles tiles;
    return plan_tiles(*matrix, &tiles) ? padded(tiles.tile_bytes() * tiles.tiles()) : 0;
}

int flint_matmul(const char* isa_name, const PackedMatrix* matrix, const float* x, int rows, float* out) {
    const Isa* isa = select_isa(isa_name);
    Tiles tiles;
    if (!isa || rows < 1 || !plan_tiles(*matrix, &tiles)) return kErrorArgument;
    const size_t slots = static_cast<size_t>(tiles.blocks()) * rows;
    uint8_t* const tile = static_cast<uint8_t*>(malloc(tiles.tile_bytes()));
    float* const floats = static_cast<float*>(malloc(sizeof(float) * (slots * (2 + 2 * kBlock) + rows * kTileRows)));
    int8_t* const q = static_cast<int8_t*>(malloc(slots * 2 * kBlock));
    if (tile && floats && q) {
        float* const exact = floats + 2 * slots;
        int16_t* const wide = reinterpret_cast<int16_t*>(exact + slots * kBlock);
        Activations a{rows, q, floats, floats + slots, wide, exact};
        float* const tile_out = exact + slots * 2 * kBlock;
        for (int row = 0; row < rows; ++row) {
            isa->quantize(x + static_cast<size_t>(row) * tiles.cols, nullptr, 0.0f, tiles.cols, &a, row);
        }
        for (int i = 0; i < tiles.tiles(); ++i) {
            pack_tile(*matrix, tiles, i, tile);
            isa->matmul[tiles.format](tile, tiles, a, tile_out);
            const int width = tiles.rows - i * kTileRows < kTileRows ? tiles.rows - i * kTileRows : kTileRows;
            for (int row = 0; row < rows; ++row) {
                memcpy(out + static_cast<size_t>(row) * tiles.rows + i * kTileRows, tile_out + row * kTileRows,
                       width * sizeof(float));
            }
        }
    }
    const int status = tile && floats && q ? 0 : kErrorMemory;
    free(tile);
    free(floats);
    free(q);
    return status;
}

Model* flint_model_new(const Shape* shape, const float* inverse_frequency, const char* isa_name, int threads,
                       size_t weight_bytes) {
    const Shape& s = *shape;
    const Isa* isa = select_isa(isa_name);
    if (!isa || s.hidden < 1 || s.layers < 1 || s.kv_heads < 1 || s.heads < 1 || s.heads % s.kv_heads ||
        s.head_dim < 8 || s.head_dim % 8 || s.intermediate < 1 || s.vocab < 1 || s.context < 1 || threads < 1) {
        return nullptr;
    }
    void* memory = nullptr;
    if (posix_memalign(&memory, kCacheLine, sizeof(Model))) return nullptr;
    Model* model = new (memory) Model(s, isa, threads);
    if (!model->weights.reserve(weight_bytes, true) || !model->allocate()) {
        flint_model_free(model);
        return nullptr;
    }
    memcpy(model->inverse_frequency, inverse_frequency, sizeof(float) * (s.head_dim / 2));
    return model;
}

int flint_model_set_layer(Model* model, int index, const PackedMatrix* m, const float* const* norms) {
    if (index < 0 || index >= model->shape.layers || !norms[0] || !norms[1]) return kErrorArgument;
    Layer& layer = model->layers[index];
    if (layer.attn_norm) return kErrorArgument;
    const Shape& s = model->shape;
    const int q = model->q_size(), kv = model->kv_size();
    int status = place(*model, m[0], q, s.hidden, &layer.q);
    if (!status) status = place(*model, m[1], kv, s.hidden, &layer.k);
    if (!status) status = place(*model, m[2], kv, s.hidden, &layer.v);
    if (!status) status = place(*model, m[3], s.hidden, q, &layer.o);
    if (!status) status = place_pair(*model, m + 4, s.intermediate, s.hidden, &layer.gate, &layer.up);
    if (!status) status = place(*model, m[6], s.hidden, s.intermediate, &layer.down);
    if (!status) status = place_norm(*model, norms[1], s.hidden, &layer.mlp_norm);
    if (!status) status = place_norm(*model, norms[2], s.head_dim, &layer.q_norm);
    if (!status) status = place_norm(*model, norms[3], s.head_dim, &layer.k_norm);
    if (!status) status = place_norm(*model, norms[0], s.hidden, &layer.attn_norm);
    if (!status) ++model->layers_loaded;
    return status;
}

int flint_model_set_ends(Model* model, const PackedMatrix* embed, const PackedMatrix* head, const float* final_norm) {
    const Shape& s = model->shape;
    int status = place(*model, *embed, s.vocab, s.hidden, &model->embed);
    if (!status && head) status = place(*model, *head, s.vocab, s.hidden, &model->head);
    if (!head) model->head = model->embed;
    if (!status) status = place_norm(*model, final_norm, s.hidden, &model->final_norm);
    return status;
}

void flint_model_free(Model* model) {
    if (!model) return;
    model->~Model();
    free(model);
}

int flint_model_step(Model* model, const int32_t* tokens, int count, int logit_rows, float* logits, int feature_count,
                     const int32_t* feature_layers, float* const* features) {
    if (model->streaming.load()) return kErrorBusy;
    if (count < 1 || model->position + count > model->shape.context || !model->ready()) return kErrorArgument;
    if (logit_rows != 0 && logit_rows != 1 && logit_rows != count) return kErrorArgument;
    for (int i = 0; i < count; ++i) {
        if (tokens[i] < 0 || tokens[i] >= model->shape.vocab) return kErrorArgument;
    }
    constexpr int kMaxFeatures = 16;
    if (feature_count > kMaxFeatures) return kErrorArgument;
    for (int done = 0; done < count;) {
        const int rows = count - done < kBatchTokens ? count - done : kBatchTokens;
        const bool last = done + rows == count;
        const int wanted = logit_rows == count ? rows : last ? logit_rows : 0;
        float* rows_logits = logits + (logit_rows == count ? static_cast<size_t>(done) * model->shape.vocab : 0);
        float* rows_features[kMaxFeatures];
        for (int i = 0; i < feature_count; ++i) {
            rows_features[i] = features[i] + static_cast<size_t>(done) * model->shape.hidden;
        }
        run_pass(*model, {tokens + done, rows, wanted, rows_logits, feature_count, feature_layers, rows_features});
        done += rows;
    }
    return 0;
}

int flint_model_position(const Model* model) { return model->position; }

int flint_model_truncate(Model* model, int position) {
    if (model->streaming.load()) return kErrorBusy;
    if (position < 0 || position > model->position) return kErrorArgument;
    model->position = position;
    return 0;
}

int flint_model_active_threads(const Model* model) { return model->team.active(); }

void flint_model_profile(Model* model, int on, int64_t* out) {
    for (int i = 0; i < kPhases; ++i) {
        out[i] = model->phase_ns[i];
        if (on) model->phase_ns[i] = 0;
    }
    out[kPhases] = model->profiled_passes;
    if (on) model->profiled_passes = 0;
    model->profile = on != 0;
}
