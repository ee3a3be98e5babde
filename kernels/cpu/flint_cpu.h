// The library's C interface, as kernels/native.py loads it. One model has one caller at a time, except where said.
// Functions that return int return 0 on success, else one of kError*.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "model.h"
#include "sample.h"
#include "stream.h"
#include "tile.h"

#define FLINT_API extern "C" __attribute__((visibility("default")))

enum { kErrorArgument = 1, kErrorMemory = 2, kErrorBusy = 3 };

// Raised whenever a structure or a signature below changes; the loader refuses another number.
constexpr int kFlintAbi = 1;
FLINT_API int flint_abi();

// Name of the instruction set that `name` selects ("" or null: the best), or null if this processor lacks it.
FLINT_API const char* flint_isa(const char* name);

// Bytes of a matrix once tiled; 0 for a shape or format that cannot be tiled.
FLINT_API size_t flint_tiled_bytes(const flint::PackedMatrix* matrix);

// out [rows][matrix rows] = x [rows][matrix cols] times the matrix's transpose, through the decoder's own tiles, int8
// activations (exact ones for bf16) and kernels. For tests and microbenchmarks.
FLINT_API int flint_matmul(const char* isa, const flint::PackedMatrix* matrix, const float* x, int rows, float* out);

// A model without weights yet. weight_bytes: all that the calls below will need (matrices by flint_tiled_bytes, norms
// by 4 bytes a value, each rounded up to 64). inverse_frequency: [head_dim / 2]. Null: out of memory or bad argument.
FLINT_API flint::Model* flint_model_new(const flint::Shape* shape, const float* inverse_frequency, const char* isa,
                                        int threads, size_t weight_bytes);

// Tiles one layer, which must not be loaded yet. matrices: q, k, v, o, gate, up, down. norms: attention, mlp, q, k (the last two may be null). The
// sources may be released on return.
FLINT_API int flint_model_set_layer(flint::Model* model, int layer, const flint::PackedMatrix* matrices,
                                    const float* const* norms);

// The embedding, the head (null: tied to the embedding) and the final norm.
FLINT_API int flint_model_set_ends(flint::Model* model, const flint::PackedMatrix* embed,
                                   const flint::PackedMatrix* head, const float* final_norm);

FLINT_API void flint_model_free(flint::Model* model);

// Appends `count` tokens. logit_rows: 0, 1 (the last token's) or `count`; logits [logit_rows][vocab].
// features[i]: [count][hidden], the residual stream entering layer feature_layers[i].
FLINT_API int flint_model_step(flint::Model* model, const int32_t* tokens, int count, int logit_rows, float* logits,
                               int feature_count, const int32_t* feature_layers, float* const* features);

FLINT_API int flint_model_position(const flint::Model* model);
FLINT_API int flint_model_truncate(flint::Model* model, int position);
FLINT_API int flint_model_active_threads(const flint::Model* model);

// Starts decoding after history[history_count], whose last token is the first one fed. Null: bad argument, out of memory
// or threads, or another stream still runs. The model belongs to the stream until it has finished.
FLINT_API flint::Stream* flint_stream_start(flint::Model* model, const int32_t* history, int64_t history_count,
                                            const flint::SamplingOptions* options, int max_tokens,
                                            const int32_t* stop_ids, int stop_count);

// Waits for the first token (seen = 0), else for timeout_ns or the end; returns how many tokens there are, and the
// StreamState. Waiting costs the decoding thread nothing.
FLINT_API int flint_stream_wait(flint::Stream* stream, int seen, int64_t timeout_ns, int* state);
FLINT_API const int32_t* flint_stream_ids(const flint::Stream* stream);
FLINT_API const double* flint_stream_seconds(const flint::Stream* stream);
FLINT_API void flint_stream_cancel(flint::Stream* stream);  // from any thread; takes effect within one token
FLINT_API void flint_stream_free(flint::Stream* stream);    // cancels, waits for the thread

// Phase clocks: kPhases sums of nanoseconds since they were switched on, then the number of passes.
FLINT_API void flint_model_profile(flint::Model* model, int on, int64_t* out);

// Streaming-read bandwidth in bytes per second: best of `rounds` passes of `threads` threads over `bytes` of memory.
FLINT_API double flint_bandwidth(int threads, size_t bytes, int rounds, const char* isa);
