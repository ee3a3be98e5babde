// The native library tested from C++, so that it also runs where Python does not: under sanitizers, and on an emulated
// Arm processor. Prints one line per check; the exit status counts failures.
//
//     cpu_selftest [kernels] [model] [stream] [fork]        which groups to run; none: all
#include <initializer_list>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "flint_cpu.h"
#include "half.h"

using namespace flint;

namespace {

int failures = 0;

void report(bool good, const char* what, double value, double limit) {
    printf("%s %s: %.3g (limit %.3g)\n", good ? "ok  " : "FAIL", what, value, limit);
    if (!good) ++failures;
}

struct Random {
    uint64_t state;
    uint32_t next() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return static_cast<uint32_t>(state >> 16);
    }
    float uniform() { return next() * (1.0f / 4294967296.0f) * 2 - 1; }
};

// Freed together at the end, so that a leak checker sees the library's leaks only.
struct Allocation {
    Allocation* next;
    max_align_t data;
};
Allocation* allocations = nullptr;

void* allocate(size_t bytes) {
    Allocation* a = static_cast<Allocation*>(calloc(1, sizeof(Allocation) + bytes));
    if (!a) abort();
    a->next = allocations;
    allocations = a;
    return &a->data;
}

// A random packed matrix and the weights it stands for.
struct TestMatrix {
    PackedMatrix packed;
    float* weights;  // [rows][cols]
};

TestMatrix random_matrix(Random& random, Format format, int rows, int cols, int group, bool extreme = false) {
    const size_t n = static_cast<size_t>(rows) * cols, scales = format == kBf16 ? 0 : n / group;
    const float size = 1.0f / sqrtf(static_cast<float>(cols));
    uint16_t* scale = static_cast<uint16_t*>(allocate(2 * scales + 2));
    uint16_t* minimum = static_cast<uint16_t*>(allocate(2 * scales + 2));
    uint8_t* q = static_cast<uint8_t*>(allocate(2 * n));
    float* weights = static_cast<float*>(allocate(sizeof(float) * n));
    for (size_t i = 0; i < scales; ++i) {
        scale[i] = to_half(random.uniform() * size * (format == kInt8 ? 0.01f : 0.2f));
        minimum[i] = to_half(-7.5f * from_half(scale[i]));
    }
    for (size_t i = 0; i < n; ++i) {
        const size_t s = format == kBf16 ? 0 : i / group;
        if (format == kBf16) {
            const uint16_t bits = static_cast<uint16_t>(bits_from_float(random.uniform() * size) >> 16);
            memcpy(q + 2 * i, &bits, 2);
            weights[i] = from_bf16(bits);
        } else if (format == kInt8) {
            const int value = extreme ? -128 : static_cast<int>(random.next() % 256) - 128;
            q[i] = static_cast<uint8_t>(value);
            weights[i] = value * from_half(scale[s]);
        } else {
            const int value = extreme ? 15 : static_cast<int>(random.next() % 16);
            q[i / 2] |= static_cast<uint8_t>(value << (i % 2 * 4));  // low nibble first, in words and in bytes alike
            weights[i] = format == kInt4Min ? value * from_half(scale[s]) + from_half(minimum[s])
                                            : (value - 8) * from_half(scale[s]);
        }
    }
    return {{format, rows, cols, format == kBf16 ? 0 : group, q, scale, minimum}, weights};
}

// Largest error of a product, relative to what its terms' sizes allow to be lost.
double product_error(const char* isa, const TestMatrix& matrix, const float* x, int rows) {
    const PackedMatrix& m = matrix.packed;
    float* out = static_cast<float*>(allocate(sizeof(float) * rows * m.rows));
    if (flint_matmul(isa, &m, x, rows, out)) return INFINITY;
    double worst = 0;
    for (int row = 0; row < rows; ++row) {
        for (int n = 0; n < m.rows; ++n) {
            double sum = 0, norm_w = 0, norm_x = 0;
            for (int k = 0; k < m.cols; ++k) {
                const double w = matrix.weights[static_cast<size_t>(n) * m.cols + k], v = x[row * m.cols + k];
                sum += w * v;
                norm_w += w * w;
                norm_x += v * v;
            }
            const double error = fabs(sum - out[row * m.rows + n]) / (sqrt(norm_w * norm_x) + 1e-30);
            if (!(error <= worst)) worst = error;
        }
    }
    return worst;
}

void test_kernels(const char* isa) {
    Random random{88172645463325252ull};
    const struct {
        Format format;
        int group;
        const char* name;
    } kinds[] = {{kInt4, 32, "int4 g32"},      {kInt4, 64, "int4 g64"},      {kInt4, 128, "int4 g128"},
                 {kInt4Min, 32, "int4-min g32"}, {kInt4Min, 128, "int4-min g128"}, {kInt8, 32, "int8 g32"},
                 {kInt8, 64, "int8 g64"},      {kBf16, 0, "bf16"}};
    for (const auto& kind : kinds) {
        for (int extreme = 0; extreme < 2; ++extreme) {
            const int cols = kind.format == kBf16 ? 200 : 384, rows = 37;
            const TestMatrix matrix = random_matrix(random, kind.format, rows, cols, kind.group ? kind.group : 32, extreme);
            double worst = 0;
            for (int tokens : {1, 2, 3, 4, 5, 8, 9, 23}) {
                float* x = static_cast<float*>(allocate(sizeof(float) * tokens * cols));
                for (int i = 0; i < tokens * cols; ++i) {
                    x[i] = extreme ? (i % 2 ? 1.0f : 0.999f) : random.uniform() * (i % 37 == 0 ? 40.0f : 1.0f);
                }
                const double error = product_error(isa, matrix, x, tokens);
                if (!(error <= worst)) worst = error;
            }
            char what[80];
            snprintf(what, sizeof what, "%s %s%s", isa, kind.name, extreme ? " extreme" : "");
            report(worst < 1e-4, what, worst, 1e-4);
        }
    }
}

constexpr int kContext = 200;

// Two layers with everything unusual: head_dim 24, three query heads per key head, q and k norms, granite's scalars,
// a format per matrix, sizes that fill neither a tile nor a block.
Model* small_model(const char* isa, int threads) {
    Random random{362436069};
    const Shape shape = {96, 2, 6, 2, 24, 160, 333, kContext, 1e-5f, 12.0f, 0.2f, 0.5f, 4.0f};
    float frequency[12];
    for (int i = 0; i < 12; ++i) frequency[i] = powf(10000.0f, -i / 12.0f);
    Model* model = flint_model_new(&shape, frequency, isa, threads, 4 << 20);
    if (!model) return nullptr;
    float norms[4][160];
    for (auto& norm : norms) {
        for (float& value : norm) value = 1.0f + 0.5f * random.uniform();
    }
    const float* const pointers[4] = {norms[0], norms[1], norms[2], norms[3]};
    int status = 0;
    for (int layer = 0; layer < 2; ++layer) {
        const PackedMatrix m[7] = {
            random_matrix(random, kInt4Min, 144, 96, 32).packed, random_matrix(random, kInt8, 48, 96, 32).packed,
            random_matrix(random, kBf16, 48, 96, 32).packed,     random_matrix(random, kBf16, 96, 144, 32).packed,
            random_matrix(random, kInt4, 160, 96, 32).packed,    random_matrix(random, kInt4Min, 160, 96, 32).packed,
            random_matrix(random, kInt8, 96, 160, 32).packed,
        };
        status |= flint_model_set_layer(model, layer, m, pointers);
    }
    const PackedMatrix embed = random_matrix(random, kInt8, 333, 96, 32).packed;
    const PackedMatrix head = random_matrix(random, kInt4, 333, 96, 32).packed;
    status |= flint_model_set_ends(model, &embed, &head, norms[0]);
    return status ? nullptr : model;
}

void token_ids(int32_t* ids, int count) {
    for (int i = 0; i < count; ++i) ids[i] = (i * 131 + 7) % 333;
}

// Feeds 150 tokens in pieces and returns all logits.
float* run(Model* model, const int* pieces, int count) {
    int32_t ids[150];
    token_ids(ids, 150);
    float* logits = static_cast<float*>(allocate(sizeof(float) * 150 * 333));
    int at = 0;
    for (int i = 0; i < count; ++i) {
        if (flint_model_step(model, ids + at, pieces[i], pieces[i], logits + at * 333, 0, nullptr, nullptr)) ++failures;
        at += pieces[i];
    }
    return logits;
}

double largest_difference(const float* a, const float* b, int n) {
    double worst = 0;
    for (int i = 0; i < n; ++i) {
        const double difference = fabs(static_cast<double>(a[i]) - b[i]);
        if (!(difference <= worst)) worst = difference;
    }
    return worst;
}

void test_model(const char* isa, const float* expected) {
    const int whole[] = {150}, mixed[] = {1, 2, 3, 5, 8, 9, 1, 64, 40, 7, 10};
    for (int threads : {1, 2, 3, 5}) {
        Model* model = small_model(isa, threads);
        if (!model) {
            report(false, "model", threads, 0);
            continue;
        }
        float* a = run(model, whole, 1);
        if (flint_model_truncate(model, 0)) ++failures;
        float* b = run(model, mixed, 11);
        char what[80];
        snprintf(what, sizeof what, "%s, %d threads: pieces against a whole", isa, threads);
        const double difference = largest_difference(a, b, 150 * 333);
        report(difference == 0, what, difference, 0);
        snprintf(what, sizeof what, "%s, %d threads: against portable", isa, threads);
        const double from_portable = largest_difference(a, expected, 150 * 333);
        report(from_portable < 2e-3, what, from_portable, 2e-3);
        flint_model_free(model);
    }
}

void test_stream(const char* isa) {
    Model* model = small_model(isa, 3);
    int32_t history[20];
    token_ids(history, 20);
    if (flint_model_step(model, history, 19, 0, nullptr, 0, nullptr, nullptr)) ++failures;
    const SamplingOptions options = {0.8, 0.95, 0.01, 1.1f, 40, 64, 1234};
    const int32_t stop = -1;
    for (int turn = 0; turn < 2; ++turn) {  // to the end of the context, then cancelled in the middle
        Stream* stream = flint_stream_start(model, history, 20, &options, 1000, &stop, 1);
        int state = 0, produced = 0;
        while (state == kStreamRunning) {
            produced = flint_stream_wait(stream, produced, 1000000, &state);
            if (turn == 1 && produced > 5) flint_stream_cancel(stream);
        }
        const bool good = turn == 0 ? produced == kContext - 19 : produced > 5 && produced <= kContext - 19;
        report(good && state == kStreamFinished, turn ? "stream, cancelled" : "stream, to the context's end", produced,
               kContext - 19);
        const int position = flint_model_position(model);
        report(position == 19 + produced, "stream position", position, 19 + produced);
        flint_stream_free(stream);
        if (flint_model_truncate(model, 19)) ++failures;
    }
    flint_model_free(model);
}

void test_fork(const char* isa) {
    Model* model = small_model(isa, 3);
    const int whole[] = {150};
    float* before = run(model, whole, 1);
    const pid_t child = fork();
    if (child == 0) {
        failures = 0;
        if (flint_model_truncate(model, 0)) ++failures;
        const float* after = run(model, whole, 1);
        _exit(failures || largest_difference(before, after, 150 * 333) != 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    report(status == 0, "a forked child decodes", status, 0);
    if (flint_model_truncate(model, 0)) ++failures;
    const float* after = run(model, whole, 1);
    report(largest_difference(before, after, 150 * 333) == 0, "and so does its parent", 0, 0);
    flint_model_free(model);
}

}  // namespace

int main(int argc, char** argv) {
    const auto wanted = [&](const char* group) {
        for (int i = 1; i < argc; ++i) {
            if (!strcmp(argv[i], group)) return true;
        }
        return argc == 1;
    };
    const int whole[] = {150};
    Model* portable = small_model("portable", 1);
    const float* expected = run(portable, whole, 1);
    flint_model_free(portable);
    for (const char* isa : {"portable", "avx2", "avx512", "neon"}) {
        if (!flint_isa(isa)) continue;
        if (wanted("kernels")) test_kernels(isa);
        if (wanted("model")) test_model(isa, expected);
        if (wanted("stream")) test_stream(isa);
        if (wanted("fork")) test_fork(isa);
    }
    while (allocations) {
        Allocation* const next = allocations->next;
        free(allocations);
        allocations = next;
    }
    printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
