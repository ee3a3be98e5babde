// Reads eight consecutive weights of a row, in any stored format, as float32.
#pragma once

// One matrix [n, k] on the device, in the layout of engine/packed.py; mirrored by prefill.py's MatrixArgument.
struct Matrix {
    const void* q;           // int4: u32 [n, k/8], k = 8j in the low nibble; int8: s8 [n, k]; bf16: [n, k]
    const __half* scale;     // [n, k/group]; null for bf16
    const __half* minimum;   // [n, k/group]: asymmetric int4, else null
    int k;
    int bits;          // 4, 8 or 16
    int group_log2;    // group = 32, 64 or 128
    int reserved;
};

// Eight weights as they are stored, with their scale and minimum: loaded early, unpacked late.
struct Packed8 {
    uint4 q;  // int4 fills x; int8 x and y; bf16 all four
    float scale;
    float minimum;
};

__device__ __forceinline__ Packed8 load8(const Matrix& matrix, int row, int item) {
    const size_t at = size_t(row) * (matrix.k / 8) + item;
    Packed8 out = {make_uint4(0, 0, 0, 0), 1.0f, 0.0f};
    if (matrix.bits == 16) {
        out.q = static_cast<const uint4*>(matrix.q)[at];
        return out;
    }
    const size_t group = size_t(row) * (matrix.k >> matrix.group_log2) + ((item * 8) >> matrix.group_log2);
    out.scale = __half2float(matrix.scale[group]);
    if (matrix.minimum) out.minimum = __half2float(matrix.minimum[group]);
    if (matrix.bits == 4) {
        out.q.x = static_cast<const unsigned*>(matrix.q)[at];
    } else {
        const uint2 bytes = static_cast<const uint2*>(matrix.q)[at];
        out.q.x = bytes.x;
        out.q.y = bytes.y;
    }
    return out;
}

// An integer below 2^23 as float, by placing it in the mantissa of 2^23: full rate, where conversions run at a quarter.
__device__ __forceinline__ float to_float(unsigned q) { return __uint_as_float(0x4b000000u | q) - 8388608.0f; }

__device__ __forceinline__ void unpack8(const Matrix& matrix, const Packed8& packed, float (&value)[8]) {
    const unsigned word[4] = {packed.q.x, packed.q.y, packed.q.z, packed.q.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (matrix.bits == 4) {
            const float q = to_float((word[0] >> (4 * i)) & 15u);
            value[i] = matrix.minimum ? fmaf(q, packed.scale, packed.minimum) : (q - 8.0f) * packed.scale;
        } else if (matrix.bits == 8) {
            value[i] = float(static_cast<signed char>(word[i / 4] >> (8 * (i % 4)))) * packed.scale;
        } else {
            value[i] = __uint_as_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16);
        }
    }
}
