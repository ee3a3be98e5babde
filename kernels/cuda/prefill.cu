// What the GPU prefill does between two matrix products: dequantisation, embedding, norms, rotary positions, the KV
// cache's writes and the gated activation. The products themselves are cuBLAS and flash attention, called by prefill.py.
//
// The residual stream x is float32 [M, hidden]. Operands of products are fp16, not bf16: three more bits of mantissa
// keep a deep model's logits eight times closer to float32. fp16's smaller range is met by scaling each row of the gated
// activation, the one operand that no norm bounds, by a power of two. Attention reads one layer's keys and values at a
// time from a plain buffer [kv_heads, positions, dim]; the decoder's cache keeps the same fp16 bits, in its own order.
//
// Every kernel has 256 threads a block and compiles once for all models: shapes are arguments.

#include <cuda_fp16.h>

#include "kv_layout.cuh"
#include "prefill_weights.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int GATED_EXPONENT = 14;  // a row of the gated activation is scaled to a largest magnitude in [2^13, 2^14)

__device__ __forceinline__ float warp_sum(float value) {
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
    for (int offset = 16; offset > 0; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
    return value;
}

// `value` (>= 0) summed or maximised over the block; every thread gets the result. Once per kernel: `partial` is not
// protected for reuse.
template <float (*OVER_WARP)(float)>
__device__ __forceinline__ float over_block(float value, float* partial) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    value = OVER_WARP(value);
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    return OVER_WARP(lane < WARPS ? partial[lane] : 0.0f);
}

// out [rows, k] fp16 = the dequantised rows of tiles first_tile .. first_tile + count - 1 of `layer`, one warp a unit.
// Grid ceil(count * units of a tile / 8).
extern "C" __global__ void __launch_bounds__(THREADS)
    dequantise(const __grid_constant__ Tiles tiles, int layer, int first_tile, int count, int rows, __half* out) {
    const int item = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int units = tiles.k / 64 / tiles.unit_blocks;
    if (item >= count * units) return;
    const int tile = first_tile + item / units, unit = item % units;
    switch (tiles.format) {
        case WEIGHT_INT4:
            return dequantise_unit<WEIGHT_INT4>(tiles, layer, tile, unit, first_tile, rows, out, lane);
        case WEIGHT_INT4_ASYMMETRIC:
            return dequantise_unit<WEIGHT_INT4_ASYMMETRIC>(tiles, layer, tile, unit, first_tile, rows, out, lane);
        case WEIGHT_INT8:
            return dequantise_unit<WEIGHT_INT8>(tiles, layer, tile, unit, first_tile, rows, out, lane);
        case WEIGHT_BF16:
            return dequantise_unit<WEIGHT_BF16>(tiles, layer, tile, unit, first_tile, rows, out, lane);
    }
}

// x [M, hidden] = multiplier * the embedding's row of each token. Grid M.
extern "C" __global__ void __launch_bounds__(THREADS)
    embed(PackedRows table, const int* tokens, float multiplier, float* x) {
    for (int item = threadIdx.x; item < table.k / 8; item += THREADS) {
        float value[8];
        load8(table, tokens[blockIdx.x], item, value);
        for (int i = 0; i < 8; i++) x[size_t(blockIdx.x) * table.k + item * 8 + i] = multiplier * value[i];
    }
}

// x += alpha * row_scale * y (y [M, n] float32, or null: x as it is; row_scale [M] or null: 1), then
// out [M, n] fp16 = x / rms(x) * weight. Grid M; n a multiple of 4.
extern "C" __global__ void __launch_bounds__(THREADS) add_and_norm(
    float* x, const float* y, const float* row_scale, float alpha, const float* weight, float eps, __half* out, int n) {
    __shared__ float partial[WARPS];
    const size_t row = blockIdx.x;
    float4* const xs = reinterpret_cast<float4*>(x + row * n);
    const float4* const ys = reinterpret_cast<const float4*>(y + row * n);
    const float scale = alpha * (row_scale ? row_scale[row] : 1.0f);
    float squares = 0.0f;
    for (int i = threadIdx.x; i < n / 4; i += THREADS) {
        float4 v = xs[i];
        if (y) {
            const float4 add = ys[i];
            v = make_float4(v.x + scale * add.x, v.y + scale * add.y, v.z + scale * add.z, v.w + scale * add.w);
            xs[i] = v;
        }
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float inverse = rsqrtf(over_block<warp_sum>(squares, partial) / n + eps);
    for (int i = threadIdx.x; i < n / 4; i += THREADS) {
        const float4 v = xs[i], w = reinterpret_cast<const float4*>(weight)[i];
        reinterpret_cast<uint2*>(out + row * n)[i] = make_uint2(pack_halves(v.x * inverse * w.x, v.y * inverse * w.y),
                                                                pack_halves(v.z * inverse * w.z, v.w * inverse * w.w));
    }
}

__device__ __forceinline__ __half saturated_half(float v) {  // comparisons, because fminf and fmaxf drop a NaN
    return __float2half_rn(v > KV_LARGEST ? KV_LARGEST : v < -KV_LARGEST ? -KV_LARGEST : v);
}

// One warp per token and head of qkv [M, (heads + 2 * kv_heads) * dim] float32: RMSNorm over the head where its weight
// is given (queries and keys of qwen3), rotation by the half-split convention (cosine, sine [M, dim / 2] float32), then
// queries to q [M, heads, dim] fp16, keys and values to positions start .. start + M - 1 of [kv_heads, positions, dim], all
// saturated as kv_layout.cuh says. Grid (M, ceil((heads + 2 * kv_heads) / 8)).
extern "C" __global__ void __launch_bounds__(THREADS)
    rotate(const float* qkv, const float* cosine, const float* sine, const float* q_norm, const float* k_norm, float eps,
           __half* q, __half* keys, __half* values, int heads, int kv_heads, int dim, int start, int positions) {
    const int token = blockIdx.x, head = blockIdx.y * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (head >= heads + 2 * kv_heads) return;
    const int half_dim = dim / 2;
    const float* const in = qkv + (size_t(token) * (heads + 2 * kv_heads) + head) * dim;
    const bool is_query = head < heads, is_value = head >= heads + kv_heads;
    const float* const norm = is_query ? q_norm : is_value ? nullptr : k_norm;

    float inverse = 1.0f;
    if (norm) {
        float squares = 0.0f;
        for (int i = lane; i < dim; i += 32) squares += in[i] * in[i];
        inverse = rsqrtf(warp_sum(squares) / dim + eps);
    }
    __half* out;
    if (is_query)
        out = q + (size_t(token) * heads + head) * dim;
    else if (is_value)
        out = values + (size_t(head - heads - kv_heads) * positions + start + token) * dim;
    else
        out = keys + (size_t(head - heads) * positions + start + token) * dim;
    for (int i = lane; i < half_dim; i += 32) {
        float low = in[i] * inverse, high = in[i + half_dim] * inverse;
        if (norm) low *= norm[i], high *= norm[i + half_dim];
        if (!is_value) {
            const float c = cosine[size_t(token) * half_dim + i], s = sine[size_t(token) * half_dim + i];
            const float turned = low * c - high * s;
            high = high * c + low * s;
            low = turned;
        }
        out[i] = saturated_half(low);
        out[i + half_dim] = saturated_half(high);
    }
}

// One half of each word: what two positions have of two dimensions, turned.
__device__ __forceinline__ unsigned lower_halves(unsigned a, unsigned b) { return (a & 0xffffu) | b << 16; }
__device__ __forceinline__ unsigned upper_halves(unsigned a, unsigned b) { return a >> 16 | (b & 0xffff0000u); }

// Copies positions between the decoder's cache (kv_layout.cuh) and the plain keys, values [kv_heads, positions, dim] of
// one layer. A thread moves one 16-byte unit of keys and one of values, so the cache's side is always coalesced.
// `cache`: the layer's first block; `head_units`: a head's units there. TO_CACHE writes whole blocks from first_block
// on, zeros at `end` and after; else positions below `end` are read. Grid (blocks, kv_heads).
template <int HEAD_DIM, bool TO_CACHE>
__device__ __forceinline__ void copy_block(
    uint4* cache, long long head_units, __half* keys, __half* values, int first_block, int end, int positions) {
    constexpr int UNITS = KV_BLOCK * HEAD_DIM / 8, OWNED = HEAD_DIM / 8;  // units of keys, and as many of values
    const int first = (first_block + blockIdx.x) * KV_BLOCK;
    uint4* const packed = cache + blockIdx.y * head_units + size_t(first / KV_BLOCK) * 2 * UNITS;
    const size_t plain = (size_t(blockIdx.y) * positions + first) * HEAD_DIM;
    for (int unit = threadIdx.x; unit < UNITS; unit += THREADS) {
        {  // eight dimensions of one position
            const int position = unit / OWNED, dim = unit % OWNED * 8;
            uint4* const there = packed + key_offset<HEAD_DIM>(position, dim) / 8;
            __half* const here = keys + plain + position * HEAD_DIM + dim;
            const bool present = first + position < end;
            if (TO_CACHE)
                store16(there, present ? load16<Half8>(here) : Half8{});
            else if (present)
                store16(here, load16<Half8>(there));
        }
        {  // a pair of dimensions of positions 2t, 2t + 1, 2t + 8, 2t + 9, one dimension after the other
            const int t = unit % 4, dim = unit / 4 % 8 * OWNED + unit / 32 * 2;
            uint4* const there = packed + value_offset<HEAD_DIM>(2 * t, dim) / 8;
            unsigned pair[4] = {};  // of dimensions, by position
            if (!TO_CACHE) {
                const Half8 moved = load16<Half8>(there);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    pair[i] = i % 2 ? upper_halves(moved.word[i / 2], moved.word[2 + i / 2])
                                    : lower_halves(moved.word[i / 2], moved.word[2 + i / 2]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int position = 2 * t + i % 2 + i / 2 * 8;
                if (first + position >= end) continue;
                unsigned* const here = reinterpret_cast<unsigned*>(values + plain + position * HEAD_DIM + dim);
                if (TO_CACHE)
                    pair[i] = *here;
                else
                    *here = pair[i];
            }
            if (!TO_CACHE) continue;
            store16(there, Half8{{lower_halves(pair[0], pair[1]), lower_halves(pair[2], pair[3]),
                                  upper_halves(pair[0], pair[1]), upper_halves(pair[2], pair[3])}});
        }
    }
}

#define COPY_KERNELS(HEAD_DIM)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) write_cache_##HEAD_DIM(                                    \
        uint4* cache, long long head_units, __half* keys, __half* values, int first_block, int end, int positions) {\
        copy_block<HEAD_DIM, true>(cache, head_units, keys, values, first_block, end, positions);                    \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) read_cache_##HEAD_DIM(                                     \
        uint4* cache, long long head_units, __half* keys, __half* values, int first_block, int end, int positions) {\
        copy_block<HEAD_DIM, false>(cache, head_units, keys, values, first_block, end, positions);                   \
    }
COPY_KERNELS(64)
COPY_KERNELS(128)
COPY_KERNELS(256)

__device__ __forceinline__ void gated8(const __half* gate, const __half* up, float (&out)[8]) {
    const Half8 gates = load16<Half8>(gate), ups = load16<Half8>(up);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 g = unpack_halves(gates.word[i]), u = unpack_halves(ups.word[i]);
        out[2 * i] = g.x / (1.0f + __expf(-g.x)) * u.x;
        out[2 * i + 1] = g.y / (1.0f + __expf(-g.y)) * u.y;
    }
}

// out [M, inner] fp16 = silu(gate) * up / row_scale, with gate and up the two halves of a row of gate_up [M, 2 * inner];
// row_scale [M] float32 is the power of two that the consumer multiplies back. Grid M; inner a multiple of 8.
extern "C" __global__ void __launch_bounds__(THREADS)
    gate(const __half* gate_up, __half* out, float* row_scale, int inner) {
    __shared__ float partial[WARPS];
    const size_t row = blockIdx.x;
    const __half* const gates = gate_up + row * 2 * inner;
    float value[8], largest = 0.0f;
    for (int i = threadIdx.x * 8; i < inner; i += THREADS * 8) {
        gated8(gates + i, gates + inner + i, value);
#pragma unroll
        for (int j = 0; j < 8; j++) largest = fmaxf(largest, fabsf(value[j]));
    }
    largest = over_block<warp_max>(largest, partial);
    int exponent;
    frexpf(fmaxf(largest, 1e-30f), &exponent);  // the floor keeps 2^-exponent finite in a row of zeros
    const float shrink = ldexpf(1.0f, GATED_EXPONENT - exponent);
    for (int i = threadIdx.x * 8; i < inner; i += THREADS * 8) {  // the row is 2 * inner halves: it stays in the L1 cache
        gated8(gates + i, gates + inner + i, value);
#pragma unroll
        for (int j = 0; j < 8; j++) value[j] *= shrink;
        store16(out + row * inner + i, to_half8(value));
    }
    if (threadIdx.x == 0) row_scale[row] = ldexpf(1.0f, exponent - GATED_EXPONENT);
}
