// The decoding thread, and its reader's side.
#include "stream.h"

#include <new>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "flint_cpu.h"
#include "pass.h"

namespace flint {

namespace {

void announce(Stream& stream) {
    stream.event.fetch_add(1, std::memory_order_release);
    unpark_all(&stream.event);
}

bool stops(const Stream& stream, int32_t id) {
    for (int i = 0; i < stream.stop_count; ++i) {
        if (stream.stop_ids[i] == id) return true;
    }
    return false;
}

StreamState decode(Stream& stream) {
    Model& model = *stream.model;
    const int64_t begin = now_ns();
    int32_t token = stream.history[stream.history_count - 1];
    for (int n = 0; n < stream.max_tokens; ++n) {
        if (stream.cancelled.load(std::memory_order_relaxed) || model.position >= model.shape.context) break;
        run_pass(model, {&token, 1, 1, model.logits, 0, nullptr, nullptr});
        const int64_t decoded = now_ns();
        token = stream.sampler.choose(model.logits, stream.history, stream.history_count);
        if (token < 0) return kStreamBadLogits;
        const int64_t chosen = now_ns();
        if (model.profile) model.phase_ns[kPhaseSample] += chosen - decoded;
        stream.history[stream.history_count++] = token;
        stream.ids[n] = token;
        stream.seconds[n] = 1e-9 * (chosen - begin);
        stream.produced.store(n + 1, std::memory_order_release);
        if (n == 0) announce(stream);
        if (stops(stream, token)) break;
    }
    return kStreamFinished;
}

void* decode_main(void* argument) {
    Stream& stream = *static_cast<Stream*>(argument);
    const StreamState state = decode(stream);
    stream.model->streaming.store(false, std::memory_order_release);
    stream.state.store(state, std::memory_order_release);
    announce(stream);
    return nullptr;
}

int32_t* copy_ids(const int32_t* source, int64_t count, int64_t room) {
    int32_t* out = static_cast<int32_t*>(malloc(sizeof(int32_t) * (room > 0 ? room : 1)));
    if (out && count > 0) memcpy(out, source, sizeof(int32_t) * count);
    return out;
}

}  // namespace

Stream::~Stream() {
    if (joinable && owner == getpid()) {
        cancelled.store(true, std::memory_order_relaxed);
        pthread_join(thread, nullptr);
    }
    free(stop_ids);
    free(history);
    free(ids);
    free(seconds);
}

}  // namespace flint

using namespace flint;

Stream* flint_stream_start(Model* model, const int32_t* history, int64_t history_count, const SamplingOptions* options,
                           int max_tokens, const int32_t* stop_ids, int stop_count) {
    if (history_count < 1 || max_tokens < 1 || !model->ready()) return nullptr;
    const int32_t first = history[history_count - 1];
    if (first < 0 || first >= model->shape.vocab || model->streaming.load()) return nullptr;
    const int room = model->shape.context - model->position;
    if (max_tokens > room) max_tokens = room;  // one position is filled per token
    void* memory = malloc(sizeof(Stream));
    if (!memory) return nullptr;
    Stream* stream = new (memory) Stream(model, *options, max_tokens);
    stream->stop_ids = copy_ids(stop_ids, stop_count, stop_count);
    stream->stop_count = stop_count;
    stream->history = copy_ids(history, history_count, history_count + max_tokens);
    stream->history_count = history_count;
    stream->ids = copy_ids(nullptr, 0, max_tokens);
    stream->seconds = static_cast<double*>(malloc(sizeof(double) * (max_tokens > 0 ? max_tokens : 1)));
    stream->owner = getpid();
    if (stream->stop_ids && stream->history && stream->ids && stream->seconds && stream->sampler.ready()) {
        model->streaming.store(true);
        stream->joinable = pthread_create(&stream->thread, nullptr, decode_main, stream) == 0;
        if (!stream->joinable) model->streaming.store(false);
    }
    if (!stream->joinable) {
        flint_stream_free(stream);
        return nullptr;
    }
    return stream;
}

int flint_stream_wait(Stream* stream, int seen, int64_t timeout_ns, int* state) {
    const int64_t deadline = now_ns() + timeout_ns;
    for (;;) {
        const uint32_t event = stream->event.load(std::memory_order_acquire);
        *state = stream->owner == getpid() ? stream->state.load(std::memory_order_acquire) : kStreamLost;
        const int produced = static_cast<int>(stream->produced.load(std::memory_order_acquire));
        const int64_t left = deadline - now_ns();
        if (*state != kStreamRunning || (seen == 0 && produced > 0) || left <= 0) return produced;
        park(&stream->event, event, left);
    }
}

const int32_t* flint_stream_ids(const Stream* stream) { return stream->ids; }

const double* flint_stream_seconds(const Stream* stream) { return stream->seconds; }

void flint_stream_cancel(Stream* stream) { stream->cancelled.store(true, std::memory_order_relaxed); }

void flint_stream_free(Stream* stream) {
    if (!stream) return;
    stream->~Stream();
    free(stream);
}
