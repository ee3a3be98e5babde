// Choosing the next token, step for step as engine/sampling.py's Sampling describes it, so that the same seed gives the
// same tokens on every backend.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "isa.h"

namespace flint {

// Mirrors the ctypes structure in kernels/native.py.
struct SamplingOptions {
    double temperature;  // 0: greedy
    double top_p, min_p;
    float repeat_penalty;
    int32_t top_k, repeat_window;
    uint64_t seed;
};

class Sampler {
  public:
    Sampler(const Isa* isa, int vocab, const SamplingOptions& options);
    ~Sampler();
    Sampler(const Sampler&) = delete;
    bool ready() const { return weights_ && ids_ && stamps_; }  // false: out of memory

    // The id that follows history[count]; changes logits[vocab]. -1: no finite logit, or a NaN.
    int choose(float* logits, const int32_t* history, int64_t count);

  private:
    void penalise(float* logits, const int32_t* history, int64_t count);
    int keep_top_k(const float* logits);   // fills ids_, ascending; returns how many
    int keep_top_p(int count);             // thins ids_ and weights_
    int draw(int count, double u) const;   // a position in weights_

    const Isa* isa_;
    const int vocab_;
    const SamplingOptions options_;
    double* weights_ = nullptr;    // [vocab] of the kept ids, the largest is 1
    int32_t* ids_ = nullptr;       // [vocab] kept ids, ascending
    uint32_t* stamps_ = nullptr;   // [vocab] the call that last penalised the id
    uint32_t stamp_ = 0;
};

// Uniform in (0, 1): Philox4x32-10 with counter (n, 0, 0, 0) and key `seed` (Salmon et al., SC 2011).
double philox_uniform(uint64_t seed, uint32_t n);

}  // namespace flint
