// What member 0 does before a pass, and the choice between the two kinds of pass.
#include "pass.h"

#include <math.h>

#include "pass_common.h"

namespace flint {

namespace {

// Angles in float32 as the reference implementations take them, their cosines and sines in double.
void prepare_rope(Model& model, int rows) {
    const int half = model.shape.head_dim / 2;
    for (int row = 0; row < rows; ++row) {
        for (int i = 0; i < half; ++i) {
            const double angle = static_cast<float>(model.position + row) * model.inverse_frequency[i];
            model.cosine[row * half + i] = static_cast<float>(cos(angle));
            model.sine[row * half + i] = static_cast<float>(sin(angle));
        }
    }
}

void embed_token(Model& model, int32_t token, int row) {
    float* x = model.x + static_cast<size_t>(row) * model.shape.hidden;
    read_row(model.embed, token, x);
    if (model.shape.embedding_multiplier != 1.0f) {
        for (int i = 0; i < model.shape.hidden; ++i) x[i] *= model.shape.embedding_multiplier;
    }
}

void pass_job(void* context, Member& member) {
    const PassContext& pass = *static_cast<PassContext*>(context);
    const PassRequest& request = pass.request;
    if (request.rows <= kFewTokens) {
        decode_pass(pass, member);
    } else {
        member.share(request.rows, [&](int row) { embed_token(pass.model, request.tokens[row], row); });
        prefill_pass(pass, member);
    }
}

}  // namespace

void run_pass(Model& model, const PassRequest& request) {
    prepare_rope(model, request.rows);
    if (request.rows <= kFewTokens) {
        for (int row = 0; row < request.rows; ++row) embed_token(model, request.tokens[row], row);
    }
    PassContext context{model, request};
    model.team.run(pass_job, &context, /*steady=*/true);
    model.position += request.rows;
    if (model.profile) ++model.profiled_passes;
}

}  // namespace flint
