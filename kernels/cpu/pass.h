// One pass: M tokens through every layer, at the cache's end.
#pragma once

#include <stdint.h>

#include "model.h"

namespace flint {

struct PassRequest {
    const int32_t* tokens;
    int rows;                   // 1 .. kBatchTokens
    int logit_rows;             // 0, 1 (the last token's) or `rows`
    float* logits;              // [logit_rows][vocab]
    int feature_count;
    const int32_t* feature_layers;  // residual stream entering this layer; `layers`: before the final norm
    float* const* features;         // per requested layer: [rows][hidden]
};

// Appends `rows` positions to the cache. Results are bitwise the same for any number of threads and however the tokens
// are split into passes.
void run_pass(Model& model, const PassRequest& request);

}  // namespace flint
