// The decoder's arithmetic, written once over a vector type and compiled once per instruction set.
//
// The including isa_*.cpp defines, before including this file and inside an anonymous namespace (so that no copy
// compiled for one processor can be linked into another's table):
//
//     kLanes                      floats per vector, a divisor of 16; kParts = 16 / kLanes vectors hold a tile's rows
//     Vec, IntVec                 GCC/Clang vectors of kLanes floats and 32-bit integers
//     Vec half_to_float(const uint16_t*)              kLanes fp16 values
//     void float_to_half(const Vec&, uint16_t*)
//     float sum(Vec), float peak(Vec)                 over the lanes
//     void narrow(const IntVec*, int8_t*)             32 integers in [-128, 127] to bytes
//     void prefetch(const void*)
//     struct Int4, Int8           a block of 16 rows and 32 channels, ready to be multiplied:
//         struct Block; static void load(const uint8_t* block, Block*)
//         template <int kTokens> static void dot(const Block&, const int8_t* x, IntVec (*out)[kParts])
//             kTokens = 1..4; out[token][part] = sum over the channels of weight * (256 coarse + fine); x is 64 bytes per
//             token: the two digits of Activations::q, or where kWide the 16-bit values of Activations::wide
//         static void dot_one(const uint8_t* block, const int8_t* x, IntVec* out)    load and dot of a single token
//
// Results do not depend on how many tokens are processed together: each (weight row, token) pair goes through the same
// operations in the same order in every variant below.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "half.h"
#include "isa.h"

namespace flint {
namespace {

// Ahead of the weight stream. 1024 to 2048 are alike (5.5-5.7 ms a token), 512 and 4096 cost 5-15 %, none 12 %.
constexpr int kPrefetchBytes = 1536;

typedef float VecUnaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t BitVec __attribute__((vector_size(kLanes * 4)));

inline Vec load(const float* p) { return *reinterpret_cast<const VecUnaligned*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<VecUnaligned*>(p) = v; }
inline Vec splat(float value) { return Vec{} + value; }
inline Vec select(IntVec mask, Vec yes, Vec no) {
    return reinterpret_cast<Vec>((reinterpret_cast<IntVec>(yes) & mask) | (reinterpret_cast<IntVec>(no) & ~mask));
}
inline Vec larger(Vec a, Vec b) { return select(a > b, a, b); }
inline Vec smaller(Vec a, Vec b) { return select(a < b, a, b); }
inline Vec magnitude(Vec v) { return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(v) & 0x7fffffff); }

// Nearest integer of |v| < 2^22, ties to even, as a float and in the low bits of `bits`.
inline Vec round_even(Vec v, IntVec* bits) {
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23
    const Vec shifted = v + magic;
    *bits = reinterpret_cast<IntVec>(shifted) - 0x4b400000;
    return shifted - magic;
}

// e^v to 2 ulp; 0 below -87. Cody-Waite reduction by ln 2, then the degree 6 Taylor polynomial on |r| <= 0.347.
inline Vec exponential(Vec v) {
    const Vec clamped = larger(smaller(v, splat(88.0f)), splat(-87.0f));
    IntVec n;
    const Vec k = round_even(clamped * 1.44269504f, &n);
    const Vec r = (clamped - k * 0.693359375f) + k * 2.12194440e-4f;
    Vec p = splat(1.0f / 720);
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Vec scaled = reinterpret_cast<Vec>(reinterpret_cast<IntVec>(p) + (n << 23));
    return select(v < splat(-87.0f), Vec{}, scaled);
}

// ---------------------------------------------------------------------------------------------- matrix times tokens

constexpr int kDigits = 2 * kBlock;  // bytes of q, or of wide, per block and token
constexpr int kTokenGroup = 4;       // tokens that share the load of a weight vector

template <class Weights>
inline const int8_t* digits(const Activations& x) {
    return Weights::kWide ? reinterpret_cast<const int8_t*>(x.wide) : x.q;
}

// What a group's blocks share. Symmetric int4 is w = q * scale + minimum with minimum = -8 scale.
template <Format kFormat>
struct Header {
    Vec scale[kParts], minimum[kParts];

    inline void load(const uint8_t* header) {
        const uint16_t* half = reinterpret_cast<const uint16_t*>(header);
        for (int part = 0; part < kParts; ++part) {
            scale[part] = half_to_float(half + part * kLanes);
            if (kFormat == kInt4Min) minimum[part] = half_to_float(half + kTileRows + part * kLanes);
            if (kFormat == kInt4) minimum[part] = scale[part] * -8.0f;
        }
    }

    inline Vec add(Vec total, IntVec dot, int part, float x_scale, float x_sum) const {
        total += __builtin_convertvector(dot, Vec) * (scale[part] * x_scale);
        if (kFormat != kInt8) total += minimum[part] * x_sum;
        return total;
    }
};

template <int kBytes>
inline void prefetch_ahead(const uint8_t* p) {
    for (int i = 0; i < kBytes; i += 64) prefetch(p + kPrefetchBytes + i);
}

// One token and kTiles tiles, in step. Reading several places at once keeps more of memory's banks and of the
// prefetchers' slots busy than one stream does (21 GB/s become 27 on two Zen 3 cores), once the streams are long: asking
// ahead in software then only takes slots away from the hardware. A short stream needs to be asked for.
template <class Weights, Format kFormat, int kTiles>
void matvec_tiles(const uint8_t* const* tiles, const Tiles& shape, const Activations& x, float* out) {
    Vec total[kTiles][kParts] = {};
    Header<kFormat> header[kTiles];
    const uint8_t* p[kTiles];
    for (int s = 0; s < kTiles; ++s) p[s] = tiles[s];
    const int8_t* q = digits<Weights>(x);
    const int blocks = shape.blocks();
    for (int b = 0, left = 0; b < blocks; ++b, --left, q += kDigits) {
        const bool new_group = left == 0;
        if (new_group) left = shape.group_blocks;
#pragma GCC unroll 4
        for (int s = 0; s < kTiles; ++s) {
            if (new_group) {
                header[s].load(p[s]);
                p[s] += header_bytes(kFormat);
            }
            if (kTiles == 1) prefetch_ahead<block_bytes(kFormat)>(p[s]);
            IntVec dot[kParts];
            Weights::dot_one(p[s], q, dot);
            p[s] += block_bytes(kFormat);
            for (int part = 0; part < kParts; ++part) {
                total[s][part] = header[s].add(total[s][part], dot[part], part, x.scale[b], x.sum[b]);
            }
        }
    }
    for (int s = 0; s < kTiles; ++s) {
        for (int part = 0; part < kParts; ++part) store(out + s * kTileRows + part * kLanes, total[s][part]);
    }
}

template <class Weights, Format kFormat>
void matvec(const uint8_t* const* tiles, int count, const Tiles& shape, const Activations& x, float* out) {
    if (count == kStreams) return matvec_tiles<Weights, kFormat, kStreams>(tiles, shape, x, out);
    for (int i = 0; i < count; ++i) matvec_tiles<Weights, kFormat, 1>(tiles + i, shape, x, out + i * kTileRows);
}

// kTokens tokens meet a block; their running sums are in `out`.
template <class Weights, Format kFormat, int kTokens>
inline void add_tokens(const typename Weights::Block& block, const Header<kFormat>& header, const int8_t* q,
                       const float* x_scale, const float* x_sum, float* out) {
    IntVec dot[kTokens][kParts];
    Weights::template dot<kTokens>(block, q, dot);
    for (int token = 0; token < kTokens; ++token) {
        for (int part = 0; part < kParts; ++part) {
            float* total = out + token * kTileRows + part * kLanes;
            store(total, header.add(load(total), dot[token][part], part, x_scale[token], x_sum[token]));
        }
    }
}

// Each weight block is unpacked once and meets all tokens, four at a time.
template <class Weights, Format kFormat>
void matmul_many(const uint8_t* p, const Tiles& shape, const Activations& x, float* out) {
    const int rows = x.rows;
    memset(out, 0, sizeof(float) * rows * kTileRows);
    Header<kFormat> header;
    typename Weights::Block block;
    const int8_t* q = digits<Weights>(x);
    const float* x_scale = x.scale;
    const float* x_sum = x.sum;
    const int blocks = shape.blocks();
    for (int b = 0, left = 0; b < blocks; ++b, --left) {
        if (left == 0) {
            header.load(p);
            p += header_bytes(kFormat);
            left = shape.group_blocks;
        }
        prefetch_ahead<block_bytes(kFormat)>(p);
        Weights::load(p, &block);
        p += block_bytes(kFormat);
        int row = 0;
        for (; row + kTokenGroup <= rows; row += kTokenGroup) {
            add_tokens<Weights, kFormat, kTokenGroup>(block, header, q + row * kDigits, x_scale + row, x_sum + row,
                                                      out + row * kTileRows);
        }
        const int8_t* rest = q + row * kDigits;
        float* rest_out = out + row * kTileRows;
        switch (rows - row) {
            case 3: add_tokens<Weights, kFormat, 3>(block, header, rest, x_scale + row, x_sum + row, rest_out); break;
            case 2: add_tokens<Weights, kFormat, 2>(block, header, rest, x_scale + row, x_sum + row, rest_out); break;
            case 1: add_tokens<Weights, kFormat, 1>(block, header, rest, x_scale + row, x_sum + row, rest_out); break;
            default: break;
        }
        q += rows * kDigits;
        x_scale += rows;
        x_sum += rows;
    }
}

template <class Weights, Format kFormat>
void matmul(const uint8_t* tile, const Tiles& shape, const Activations& x, float* out) {
    if (x.rows == 1) {
        matvec_tiles<Weights, kFormat, 1>(&tile, shape, x, out);
    } else {
        matmul_many<Weights, kFormat>(tile, shape, x, out);
    }
}

// bf16 weights times exact activations. Even and odd channels accumulate apart: a 32-bit lane holds one of each, and
// two chains per vector hide the latency of the multiply-add.
template <int kRows>
void matmul_bf16_rows(const uint8_t* p, const Tiles& shape, const Activations& x, int first, float* out) {
    Vec even[kRows][kParts] = {}, odd[kRows][kParts] = {};
    const int blocks = shape.blocks();
    for (int b = 0; b < blocks; ++b) {
        const float* values = x.exact + (static_cast<size_t>(b) * x.rows + first) * kBlock;
        prefetch_ahead<block_bytes(kBf16)>(p);
        for (int pair = 0; pair < kBlock / 2; ++pair, p += 4 * kTileRows) {
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) {
                BitVec bits;
                memcpy(&bits, p + part * kLanes * 4, sizeof bits);
                const Vec low = reinterpret_cast<Vec>(bits << 16), high = reinterpret_cast<Vec>(bits & 0xffff0000u);
#pragma GCC unroll 4
                for (int row = 0; row < kRows; ++row) {
                    even[row][part] += low * values[row * kBlock + 2 * pair];
                    odd[row][part] += high * values[row * kBlock + 2 * pair + 1];
                }
            }
        }
    }
    for (int row = 0; row < kRows; ++row) {
        for (int part = 0; part < kParts; ++part) {
            store(out + (first + row) * kTileRows + part * kLanes, even[row][part] + odd[row][part]);
        }
    }
}

void matmul_bf16(const uint8_t* tile, const Tiles& shape, const Activations& x, float* out) {
    int row = 0;
    for (; row + 2 <= x.rows; row += 2) matmul_bf16_rows<2>(tile, shape, x, row, out);
    if (row < x.rows) matmul_bf16_rows<1>(tile, shape, x, row, out);
}

void matvec_bf16(const uint8_t* const* tiles, int count, const Tiles& shape, const Activations& x, float* out) {
    for (int s = 0; s < count; ++s) matmul_bf16(tiles[s], shape, x, out + s * kTileRows);
}

// ----------------------------------------------------------------------------------------------- norm, RoPE, SwiGLU

// 1 / sqrt(mean(x^2) + eps); n must be a multiple of 8, the tail beyond whole vectors is summed in scalars.
inline float rms_factor(const float* x, float eps, int n) {
    Vec squares{};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < n; ++i) total += x[i] * x[i];
    return 1.0f / sqrtf(total / n + eps);
}

void rms_norm(float* x, const float* weight, float eps, int n) {
    const float factor = rms_factor(x, eps, n);
    for (int i = 0; i < n; ++i) x[i] = x[i] * factor * weight[i];
}

// One block of 32 values into its slot, both digits.
inline void quantize_block(const float* x, Activations* out, size_t slot) {
    constexpr int kSteps = kBlock / kLanes;
    Vec v[kSteps];
    Vec largest{}, total{};
    for (int i = 0; i < kSteps; ++i) {
        v[i] = load(x + i * kLanes);
        largest = larger(largest, magnitude(v[i]));
    }
    const float amax = peak(largest);
    const float inverse = amax > 0.0f ? 127.0f / amax : 0.0f;
    const float scale = amax * (1.0f / (127 * 256));
    IntVec coarse[kSteps], fine[kSteps];
    for (int i = 0; i < kSteps; ++i) {
        const Vec scaled = v[i] * inverse;
        const Vec whole = round_even(scaled, &coarse[i]);
        // The rest is within half a step, so at most 128 in size, where 127 has to do.
        const Vec rest = round_even(larger(smaller((scaled - whole) * 256.0f, splat(127.0f)), splat(-127.0f)), &fine[i]);
        total += whole * 256.0f + rest;
    }
    int8_t* q = out->q + slot * kDigits;
    narrow(coarse, q);
    narrow(fine, q + kBlock);
    if (out->wide) {
        int16_t* wide = out->wide + slot * kBlock;
        for (int i = 0; i < kBlock; i += 4) {
            wide[i] = 256 * q[i] + q[kBlock + i];
            wide[i + 1] = 256 * q[i + 2] + q[kBlock + i + 2];
            wide[i + 2] = 256 * q[i + 1] + q[kBlock + i + 1];
            wide[i + 3] = 256 * q[i + 3] + q[kBlock + i + 3];
        }
    }
    out->scale[slot] = scale;
    out->sum[slot] = scale * sum(total);
    if (out->exact) memcpy(out->exact + slot * kBlock, x, kBlock * sizeof(float));
}

void quantize(const float* x, const float* weight, float eps, int n, Activations* out, int row) {
    const float factor = weight ? rms_factor(x, eps, n) : 1.0f;
    const int blocks = (n + kBlock - 1) / kBlock;
    for (int b = 0; b < blocks; ++b) {
        float block[kBlock];
        const float* source = x + b * kBlock;
        const int width = n - b * kBlock < kBlock ? n - b * kBlock : kBlock;
        if (weight) {
            const float* w = weight + b * kBlock;
            int i = 0;
            for (; i + kLanes <= width; i += kLanes) store(block + i, load(source + i) * factor * load(w + i));
            for (; i < width; ++i) block[i] = source[i] * factor * w[i];
        } else {
            memcpy(block, source, width * sizeof(float));
        }
        for (int i = width; i < kBlock; ++i) block[i] = 0.0f;
        quantize_block(block, out, static_cast<size_t>(b) * out->rows + row);
    }
}

void rope(float* x, const float* cosine, const float* sine, int head_dim) {
    const int half = head_dim / 2;
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Vec a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] - b * sine[i];
        x[half + i] = b * cosine[i] + a * sine[i];
    }
}

void silu_multiply(float* gate, const float* up, int n) {  // n is a multiple of 16: a tile
    for (int i = 0; i < n; i += kLanes) {
        const Vec g = load(gate + i);
        store(gate + i, g / (1.0f + exponential(-g)) * load(up + i));
    }
}

// --------------------------------------------------------------------------------------------------------- attention

void store_kv(const float* key, const float* value, int head_dim, int slot, uint16_t* keys, uint16_t* values) {
    const int width = padded_head(head_dim);
    uint16_t* column = keys + static_cast<size_t>(slot / 16) * width * 16 + slot % 16;
    uint16_t* row = values + static_cast<size_t>(slot) * width;
    for (int i = 0; i < width; i += kLanes) {
        Vec k{}, v{};
        for (int lane = 0; lane < kLanes; ++lane) {
            k[lane] = i + lane < head_dim ? key[i + lane] : 0.0f;
            v[lane] = i + lane < head_dim ? value[i + lane] : 0.0f;
        }
        uint16_t half[kLanes];
        float_to_half(k, half);
        for (int lane = 0; lane < kLanes; ++lane) column[static_cast<size_t>(i + lane) * 16] = half[lane];
        float_to_half(v, row + i);
    }
}

// c[kRows][16] = sum over k < depth of a[row][k] * b[k][0..16), a in float, b in fp16 with `b_stride` halves per k.
template <int kRows>
inline void multiply_16(const float* a, int a_stride, const uint16_t* b, int b_stride, int depth, float* c, int c_stride) {
    Vec total[kRows][kParts] = {};
    for (int k = 0; k < depth; ++k, b += b_stride) {
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
            const Vec column = half_to_float(b + part * kLanes);
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row) total[row][part] += column * a[row * a_stride + k];
        }
    }
    for (int row = 0; row < kRows; ++row) {
        for (int part = 0; part < kParts; ++part) store(c + row * c_stride + part * kLanes, total[row][part]);
    }
}

inline void multiply_rows(int rows, const float* a, int a_stride, const uint16_t* b, int b_stride, int depth, float* c,
                          int c_stride) {
    // Four rows: eight AVX2 accumulators are just enough to hide the multiply-add's latency, and gcc spills with six rows.
    for (; rows >= 4; rows -= 4, a += 4 * a_stride, c += 4 * c_stride) {
        multiply_16<4>(a, a_stride, b, b_stride, depth, c, c_stride);
    }
    switch (rows) {
        case 3: return multiply_16<3>(a, a_stride, b, b_stride, depth, c, c_stride);
        case 2: return multiply_16<2>(a, a_stride, b, b_stride, depth, c, c_stride);
        case 1: return multiply_16<1>(a, a_stride, b, b_stride, depth, c, c_stride);
        default: return;
    }
}

void attend(const float* query, int rows, const int* visible, int head_dim, const uint16_t* keys,
            const uint16_t* values, float* scores, const Softmax& out) {
    const int width = padded_head(head_dim);
    int positions = 0;
    for (int row = 0; row < rows; ++row) positions = visible[row] > positions ? visible[row] : positions;
    for (int p = 0; p < positions; p += 16) {
        multiply_rows(rows, query, width, keys + static_cast<size_t>(p) * width, 16, head_dim, scores + p, kChunk);
    }
    const Vec lowest = splat(-1e30f);
    Vec index{};
    for (int lane = 0; lane < kLanes; ++lane) index[lane] = static_cast<float>(lane);
    for (int row = 0; row < rows; ++row) {
        float* score = scores + row * kChunk;
        const Vec limit = splat(static_cast<float>(visible[row]));
        Vec largest = lowest;
        for (int p = 0; p < positions; p += kLanes) {
            const Vec seen = select(index + static_cast<float>(p) < limit, load(score + p), lowest);
            largest = larger(largest, seen);
        }
        const float top = peak(largest);
        Vec mass{};
        for (int p = 0; p < positions; p += kLanes) {
            const Vec weight =
                select(index + static_cast<float>(p) < limit, exponential(load(score + p) - top), Vec{});
            store(score + p, weight);
            mass += weight;
        }
        out.peak[row] = top;
        out.mass[row] = sum(mass);
    }
    for (int d = 0; d < width; d += 16) {
        multiply_rows(rows, scores, kChunk, values + d, width, positions, out.out + d, width);
    }
}

void merge(const Softmax& into, const Softmax& part, int rows, int head_dim) {
    const int width = padded_head(head_dim);
    for (int row = 0; row < rows; ++row) {
        const float top = into.peak[row] > part.peak[row] ? into.peak[row] : part.peak[row];
        const float old_factor = exponential(splat(into.peak[row] - top))[0];
        const float new_factor = exponential(splat(part.peak[row] - top))[0];
        float* a = into.out + row * width;
        const float* b = part.out + row * width;
        for (int i = 0; i < width; i += kLanes) {
            Vec both = load(a + i) * old_factor;
            both += load(b + i) * new_factor;
            store(a + i, both);
        }
        into.mass[row] = into.mass[row] * old_factor + part.mass[row] * new_factor;
        into.peak[row] = top;
    }
}

int argmax(const float* x, int n) {
    Vec best = splat(-INFINITY);
    IntVec where{}, index{}, ordered = ~IntVec{};
    for (int lane = 0; lane < kLanes; ++lane) index[lane] = lane;
    int i = 0;
    for (; i + kLanes <= n; i += kLanes, index += kLanes) {
        const Vec v = load(x + i);
        const IntVec better = v > best;
        ordered &= v == v;
        best = select(better, v, best);
        where = (index & better) | (where & ~better);
    }
    int winner = 0;
    float top = -INFINITY;
    for (int lane = 0; lane < kLanes; ++lane) {
        if (!ordered[lane]) return -1;
        if (best[lane] > top || (best[lane] == top && where[lane] < winner)) {
            top = best[lane];
            winner = where[lane];
        }
    }
    for (; i < n; ++i) {
        if (x[i] != x[i]) return -1;
        if (x[i] > top) {
            top = x[i];
            winner = i;
        }
    }
    return winner;
}

// e^v to about 1 ulp of double for v <= 0: reduction by ln 2 in two parts, Taylor polynomial of degree 13 on |r| <= 0.35.
void weigh(const float* x, int n, float top, double temperature, double* out) {
    constexpr int kWide = kLanes / 2;
    typedef double Wide __attribute__((vector_size(kWide * 8)));
    typedef int64_t WideInt __attribute__((vector_size(kWide * 8)));
    constexpr double kInverseFactorials[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                             1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0};
    int i = 0;
    for (; i + kWide <= n; i += kWide) {
        Wide v;
        for (int lane = 0; lane < kWide; ++lane) v[lane] = x[i + lane];
        v = (v - static_cast<double>(top)) / temperature;
        const WideInt tiny = v < -708.0;
        v = reinterpret_cast<Wide>(reinterpret_cast<WideInt>(v) & ~tiny);
        const Wide shifted = v * 1.4426950408889634 + 6755399441055744.0;  // 1.5 * 2^52
        const WideInt exponent = reinterpret_cast<WideInt>(shifted) - 0x4338000000000000;
        const Wide k = shifted - 6755399441055744.0;
        const Wide r = (v - k * 0x1.62e42fefa3800p-1) - k * 0x1.ef35793c76730p-45;
        Wide p = Wide{} + kInverseFactorials[0];
        for (int term = 1; term < 14; ++term) p = p * r + kInverseFactorials[term];
        const WideInt bits = (reinterpret_cast<WideInt>(p) + (exponent << 52)) & ~tiny;
        memcpy(out + i, &bits, sizeof bits);
    }
    for (; i < n; ++i) out[i] = exp((static_cast<double>(x[i]) - top) / temperature);
}

uint64_t read(const uint8_t* const* streams, size_t bytes) {
    IntVec total[kStreams] = {};
    for (size_t at = 0; at < bytes; at += 256) {
        for (int s = 0; s < kStreams; ++s) {
            for (int i = 0; i < 256; i += kLanes * 4) {
                IntVec v;
                memcpy(&v, streams[s] + at + i, sizeof v);
                total[s] ^= v;
            }
        }
    }
    total[0] ^= total[1] ^ total[2] ^ total[3];
    uint64_t result = 0;
    for (int lane = 0; lane < kLanes; ++lane) result = result * 31 + static_cast<uint32_t>(total[0][lane]);
    return result;
}

constexpr Isa make_isa(const char* name, bool (*supported)()) {
    return Isa{
        name,     supported,
        {matvec<Int4, kInt4>, matvec<Int4, kInt4Min>, matvec<Int8, kInt8>, matvec_bf16},
        {matmul<Int4, kInt4>, matmul<Int4, kInt4Min>, matmul<Int8, kInt8>, matmul_bf16},
        quantize, rms_norm,  rope, silu_multiply, store_kv, attend, merge, argmax, weigh, read,
    };
}

}  // namespace
}  // namespace flint
