// Penalty, temperature, top-k, top-p, min-p and the draw.
#include "sample.h"

#include <algorithm>
#include <math.h>
#include <stdlib.h>
#include <string.h>

namespace flint {

namespace {

// Rank of a logit among the kept: larger first, the lower id first among equals.
struct Candidate {
    float logit;
    int32_t id;
};

bool ranks_before(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

constexpr int kBuckets = 1100;  // binary exponents of weights in (0, 1], the smallest subnormal included

// 0 for weights in (1/2, 1], 1 for (1/4, 1/2], ...: a weight's place among powers of two.
int bucket_of(double weight) {
    int exponent;
    const double mantissa = frexp(weight, &exponent);  // weight = mantissa * 2^exponent, 0.5 <= mantissa < 1
    return mantissa == 0.5 ? 1 - exponent : -exponent;
}

}  // namespace

double philox_uniform(uint64_t seed, uint32_t n) {
    uint32_t c[4] = {n, 0, 0, 0};
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = static_cast<uint64_t>(c[0]) * 0xD2511F53u, b = static_cast<uint64_t>(c[2]) * 0xCD9E8D57u;
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(b),
                                  static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(a)};
        memcpy(c, next, sizeof c);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (c[0] + 0.5) * 0x1p-32;
}

Sampler::Sampler(const Isa* isa, int vocab, const SamplingOptions& options)
    : isa_(isa), vocab_(vocab), options_(options) {
    weights_ = static_cast<double*>(malloc(sizeof(double) * vocab));
    ids_ = static_cast<int32_t*>(malloc(sizeof(Candidate) * vocab));  // also holds candidates while they are ranked
    stamps_ = static_cast<uint32_t*>(calloc(vocab, sizeof(uint32_t)));
}

Sampler::~Sampler() {
    free(weights_);
    free(ids_);
    free(stamps_);
}

void Sampler::penalise(float* logits, const int32_t* history, int64_t count) {
    if (options_.repeat_penalty == 1.0f) return;
    ++stamp_;
    const int64_t first = count > options_.repeat_window ? count - options_.repeat_window : 0;
    for (int64_t i = first; i < count; ++i) {
        const int32_t id = history[i];
        if (id < 0 || id >= vocab_ || stamps_[id] == stamp_) continue;
        stamps_[id] = stamp_;
        logits[id] = logits[id] > 0 ? logits[id] / options_.repeat_penalty : logits[id] * options_.repeat_penalty;
    }
}

// A heap of the k best so far, the worst on top: nearly every logit is turned away by one comparison.
int Sampler::keep_top_k(const float* logits) {
    Candidate* const heap = reinterpret_cast<Candidate*>(ids_);
    const int k = options_.top_k;
    for (int id = 0; id < k; ++id) heap[id] = {logits[id], id};
    std::make_heap(heap, heap + k, ranks_before);
    for (int id = k; id < vocab_; ++id) {
        if (!(logits[id] > heap[0].logit)) continue;
        std::pop_heap(heap, heap + k, ranks_before);
        heap[k - 1] = {logits[id], id};
        std::push_heap(heap, heap + k, ranks_before);
    }
    std::sort(heap, heap + k, [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    for (int i = 0; i < k; ++i) ids_[i] = heap[i].id;
    return k;
}

// Mass by powers of two first: only the weights in the one bucket that crosses top_p need sorting.
int Sampler::keep_top_p(int count) {
    double mass[kBuckets] = {}, total = 0.0;
    for (int i = 0; i < count; ++i) {
        total += weights_[i];
        if (weights_[i] > 0.0) mass[bucket_of(weights_[i])] += weights_[i];
    }
    const double wanted = options_.top_p * total;
    double running = 0.0;
    int border = 0;
    while (border < kBuckets - 1 && running + mass[border] < wanted) running += mass[border++];

    int32_t* const positions = static_cast<int32_t*>(malloc(sizeof(int32_t) * count));
    if (!positions) return count;
    int candidates = 0;
    for (int i = 0; i < count; ++i) {
        if (weights_[i] > 0.0 && bucket_of(weights_[i]) == border) positions[candidates++] = i;
    }
    const double* const w = weights_;
    std::sort(positions, positions + candidates, [w](int32_t a, int32_t b) { return w[a] > w[b] || (w[a] == w[b] && a < b); });
    int taken = 0;
    while (taken < candidates) {
        running += w[positions[taken++]];
        if (running >= wanted) break;
    }
    for (int i = taken; i < candidates; ++i) weights_[positions[i]] = 0.0;
    free(positions);

    int kept = 0;
    for (int i = 0; i < count; ++i) {
        if (weights_[i] == 0.0 || bucket_of(weights_[i]) > border) continue;
        ids_[kept] = ids_[i];
        weights_[kept++] = weights_[i];
    }
    return kept;
}

int Sampler::draw(int count, double u) const {
    double total = 0.0;
    for (int i = 0; i < count; ++i) total += weights_[i];
    const double target = u * total;
    double running = 0.0;
    int last = 0;
    for (int i = 0; i < count; ++i) {
        if (weights_[i] == 0.0) continue;
        running += weights_[i];
        last = i;
        if (running > target) break;
    }
    return last;
}

int Sampler::choose(float* logits, const int32_t* history, int64_t count) {
    penalise(logits, history, count);
    const int best = isa_->argmax(logits, vocab_);
    if (best < 0) return -1;
    const float top = logits[best];
    if (!(top > -INFINITY && top < INFINITY)) return -1;
    if (options_.temperature == 0.0) return best;

    int kept = vocab_;
    if (options_.top_k > 0 && options_.top_k < vocab_) {
        kept = keep_top_k(logits);
        for (int i = 0; i < kept; ++i) weights_[i] = exp((static_cast<double>(logits[ids_[i]]) - top) / options_.temperature);
    } else {
        isa_->weigh(logits, vocab_, top, options_.temperature, weights_);
        for (int i = 0; i < kept; ++i) ids_[i] = i;
    }
    if (options_.top_p < 1.0) kept = keep_top_p(kept);
    if (options_.min_p > 0.0) {
        int survivors = 0;
        for (int i = 0; i < kept; ++i) {
            if (weights_[i] < options_.min_p) continue;
            ids_[survivors] = ids_[i];
            weights_[survivors++] = weights_[i];
        }
        kept = survivors;
    }
    return ids_[draw(kept, philox_uniform(options_.seed, static_cast<uint32_t>(count)))];
}

}  // namespace flint
