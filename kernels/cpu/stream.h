// Whole-loop decoding: a native thread feeds a token, samples, feeds the sample; a reader polls what it produced.
#pragma once

#include <atomic>
#include <pthread.h>
#include <stdint.h>
#include <sys/types.h>

#include "model.h"
#include "sample.h"

namespace flint {

enum StreamState : int {
    kStreamRunning = 0,
    kStreamFinished = 1,  // stop token, max_tokens, context full or cancelled
    kStreamBadLogits = 2,
    kStreamLost = 3,  // the process forked: the decoding thread lives in the parent
};

struct Stream {
    Model* model;
    Sampler sampler;
    int max_tokens;
    int32_t* stop_ids = nullptr;
    int stop_count = 0;
    int32_t* history = nullptr;  // [history_count + max_tokens]
    int64_t history_count = 0;

    // Written by the decoding thread up to `produced`, read by anyone below it.
    int32_t* ids = nullptr;     // [max_tokens]
    double* seconds = nullptr;  // [max_tokens] since the start
    std::atomic<uint32_t> produced{0};
    std::atomic<uint32_t> event{0};  // changes with the first token and at the end
    std::atomic<int> state{kStreamRunning};
    std::atomic<bool> cancelled{false};

    pthread_t thread;
    bool joinable = false;
    pid_t owner = 0;

    Stream(Model* model, const SamplingOptions& options, int max_tokens)
        : model(model), sampler(model->isa, model->shape.vocab, options), max_tokens(max_tokens) {}
    ~Stream();
};

}  // namespace flint
