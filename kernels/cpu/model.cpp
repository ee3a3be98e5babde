// Memory of a model: reservations, and the layout of the scratch space.
#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

namespace flint {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kAlign = 64;
constexpr int kQueryRows = 48;  // query rows that keep scores, queries and one chunk of keys in L2

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

template <class T>
T* take(Arena& arena, size_t count) {
    return static_cast<T*>(arena.take(count * sizeof(T)));
}

Activations take_activations(Arena& arena, int max_columns, int rows) {
    const size_t slots = static_cast<size_t>((max_columns + kBlock - 1) / kBlock) * rows;
    Activations out;
    out.rows = rows;
    out.q = take<int8_t>(arena, slots * 2 * kBlock);
    out.scale = take<float>(arena, slots);
    out.sum = take<float>(arena, slots);
    out.wide = take<int16_t>(arena, slots * kBlock);
    out.exact = take<float>(arena, slots * kBlock);
    return out;
}

Softmax take_softmax(Arena& arena, size_t rows, int head_dim) {
    return {take<float>(arena, rows), take<float>(arena, rows), take<float>(arena, rows * padded_head(head_dim))};
}

// Run twice: on an empty arena it only adds up the bytes.
void lay_out(Model& model, Arena& arena) {
    const Shape& shape = model.shape;
    const size_t batch = kBatchTokens;
    const int half = shape.head_dim / 2, width = padded_head(shape.head_dim);
    int widest = shape.hidden > shape.intermediate ? shape.hidden : shape.intermediate;
    if (model.q_size() > widest) widest = model.q_size();

    model.x = take<float>(arena, batch * shape.hidden);
    model.qkv = take<float>(arena, batch * model.qkv_stride());
    model.attended = take<float>(arena, batch * model.q_size());
    model.hidden = take<float>(arena, batch * model.hidden_stride());
    model.cosine = take<float>(arena, batch * half);
    model.sine = take<float>(arena, batch * half);
    model.logits = take<float>(arena, shape.vocab);
    model.shared = take_activations(arena, widest, kBatchTokens);
    model.parts_done = take<std::atomic<int>>(arena, shape.kv_heads);
    const size_t parts = static_cast<size_t>(shape.kv_heads) * model.chunks() * kFewTokens * model.group();
    model.parts = take_softmax(arena, parts, shape.head_dim);
    const int rows = model.attention_rows();
    for (int i = 0; i < model.team.size(); ++i) {
        Scratch& scratch = model.members[i];
        scratch.x = take_activations(arena, widest, kFewTokens);
        scratch.tile_out = take<float>(arena, 2 * batch * kTileRows);
        scratch.query = take<float>(arena, static_cast<size_t>(rows) * width);
        scratch.scores = take<float>(arena, static_cast<size_t>(rows) * kChunk);
        scratch.running = take_softmax(arena, rows, shape.head_dim);
        scratch.part = take_softmax(arena, rows, shape.head_dim);
        scratch.visible = take<int>(arena, rows);
    }
}

}  // namespace

bool Arena::reserve(size_t bytes, bool huge_pages) {
    bytes_ = bytes;
    map_bytes_ = bytes + kHugePage;
    void* map = mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return false;
    map_ = static_cast<uint8_t*>(map);
    base_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<size_t>(map), kHugePage));
    used_ = 0;
#if defined(MADV_HUGEPAGE)
    // Advice: where it is refused, small pages serve. The last piece would waste most of a huge page.
    if (huge_pages) madvise(base_, bytes_ / kHugePage * kHugePage, MADV_HUGEPAGE);
#else
    (void)huge_pages;
#endif
    return true;
}

void* Arena::take(size_t bytes) {
    const size_t at = used_;
    used_ = round_up(used_ + bytes, kAlign);
    return base_ && used_ <= bytes_ ? base_ + at : nullptr;
}

Arena::~Arena() {
    if (map_) munmap(map_, map_bytes_);
}

int Model::batch_query_tokens() const { return group() >= kQueryRows ? 1 : kQueryRows / group(); }

int Model::attention_rows() const {
    const int decode = kFewTokens * group(), prefill = batch_query_tokens() * group();
    return decode > prefill ? decode : prefill;
}

bool Model::allocate() {
    layers = static_cast<Layer*>(malloc(sizeof(Layer) * shape.layers));
    members = static_cast<Scratch*>(calloc(team.size(), sizeof(Scratch)));
    inverse_frequency = static_cast<float*>(malloc(sizeof(float) * (shape.head_dim / 2)));
    if (!layers || !members || !inverse_frequency) return false;
    for (int i = 0; i < shape.layers; ++i) layers[i] = Layer();
    const size_t slots = static_cast<size_t>(chunks()) * shape.layers * shape.kv_heads;
    if (!cache.reserve(slots * 2 * chunk_halves(shape.head_dim) * sizeof(uint16_t), true)) return false;
    kv = static_cast<uint16_t*>(cache.take(slots * 2 * chunk_halves(shape.head_dim) * sizeof(uint16_t)));
    Arena measure;
    lay_out(*this, measure);
    if (!scratch.reserve(measure.used(), false)) return false;
    lay_out(*this, scratch);
    return true;
}

Model::~Model() {
    team.stop();
    free(layers);
    free(members);
    free(inverse_frequency);
}

}  // namespace flint
