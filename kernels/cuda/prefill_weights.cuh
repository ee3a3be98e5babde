// Reads weights as float32 or fp16: rows of the embedding as packed (engine/packed/model.py), and whole matrices out of the
// tiles that the decode kernel streams (gemv.cuh draws them).
#pragma once

enum WeightFormat { WEIGHT_INT4 = 0, WEIGHT_INT4_ASYMMETRIC = 1, WEIGHT_INT8 = 2, WEIGHT_BF16 = 3 };  // phases.py's codes

// Eight fp16 numbers. Memory is touched through load16 and store16 only: copies of an aligned struct, most of
// all one of __half2, became 32-bit loads and stores, and dequantisation ran at 0.9 TB/s on an H200.
struct Half8 {
    unsigned word[4];
};

template <class T>
__device__ __forceinline__ T load16(const void* from) {
    const uint4 v = *static_cast<const uint4*>(from);
    return {{v.x, v.y, v.z, v.w}};
}

template <class T>
__device__ __forceinline__ void store16(void* to, const T& value) {
    *static_cast<uint4*>(to) = make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
}

__device__ __forceinline__ unsigned pack_halves(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

__device__ __forceinline__ float2 unpack_halves(unsigned word) {
    __half2 pair;
    *reinterpret_cast<unsigned*>(&pair) = word;
    return __half22float2(pair);
}

__device__ __forceinline__ Half8 to_half8(const float (&value)[8]) {
    Half8 out;
#pragma unroll
    for (int i = 0; i < 4; i++) out.word[i] = pack_halves(value[2 * i], value[2 * i + 1]);
    return out;
}

// An integer below 2^23 as float, by placing it in the mantissa of 2^23: full rate, where conversions run at a quarter.
__device__ __forceinline__ float to_float(unsigned q) { return __uint_as_float(0x4b000000u | q) - 8388608.0f; }

__device__ __forceinline__ float signed_byte(unsigned word, int i) {
    return to_float((word >> (8 * i) & 255u) ^ 128u) - 128.0f;
}

__device__ __forceinline__ float bf16_of(unsigned word, int i) {
    return __uint_as_float(i ? word & 0xffff0000u : word << 16);
}

__device__ __forceinline__ float half_of(unsigned word, int i) {
    const float2 both = unpack_halves(word);
    return i ? both.y : both.x;
}

// ---- rows as packed

// One matrix [n, k] as engine/packed/model.py stores it; mirrored by prefill.py.
struct PackedRows {
    const void* q;          // int4: u32 [n, k/8], k = 8j in the low nibble; int8: s8 [n, k]; bf16: [n, k]
    const __half* scale;    // [n, k/group]; null for bf16
    const __half* minimum;  // [n, k/group]: asymmetric int4, else null
    int k;
    int format;  // WeightFormat
    int group;   // 32, 64 or 128; 0 for bf16
    int reserved;
};

// Eight consecutive weights of a row.
__device__ __forceinline__ void load8(const PackedRows& matrix, int row, int item, float (&value)[8]) {
    const size_t at = size_t(row) * (matrix.k / 8) + item;
    if (matrix.format == WEIGHT_BF16) {
        const uint4 q = static_cast<const uint4*>(matrix.q)[at];
        const unsigned word[4] = {q.x, q.y, q.z, q.w};
        for (int i = 0; i < 8; i++) value[i] = bf16_of(word[i / 2], i % 2);
        return;
    }
    const size_t group = size_t(row) * (matrix.k / matrix.group) + item * 8 / matrix.group;
    const float scale = __half2float(matrix.scale[group]);
    if (matrix.format == WEIGHT_INT8) {
        const uint2 q = static_cast<const uint2*>(matrix.q)[at];
        for (int i = 0; i < 8; i++) value[i] = signed_byte(i < 4 ? q.x : q.y, i % 4) * scale;
        return;
    }
    const float zero = matrix.minimum ? 0.0f : 8.0f;
    const float minimum = matrix.minimum ? __half2float(matrix.minimum[group]) : 0.0f;
    const unsigned q = static_cast<const unsigned*>(matrix.q)[at];
    for (int i = 0; i < 8; i++) value[i] = fmaf(to_float(q >> (4 * i) & 15u) - zero, scale, minimum);
}

// ---- tiles

struct TilePlace {  // bytes
    long long offset;        // of the tile's first chunk in layer 0
    long long layer_stride;  // to the same tile of the next layer
    long long chunk_stride;  // to the next chunk of an SM's part of K
    long long share_stride;  // to the next SM's part
};

// One phase's matrices, tile by tile: 16 rows over all of K; mirrored by prefill.py.
struct Tiles {
    const unsigned char* data;
    const TilePlace* place;
    int k;
    int format;        // WeightFormat
    int group_log2;    // of 32, 64 or 128 channels; 0 for bf16
    int chunks;        // of one SM's part of K
    int chunk_blocks;  // blocks of 64 channels in one chunk
    int unit_blocks;   // and in one unit
    int unit_bytes;
    // Rows g and g + 8 of tile t (g < 8) are rows t * rows_per_tile + g and high_row + t * rows_per_tile + g of the
    // matrix: 16 and 8, or 8 and the number of gate's rows where a tile holds 8 rows of gate, then 8 of up.
    int rows_per_tile;
    int high_row;
};

// A unit of up to 2 KB, as a warp dequantises it. With g = lane / 4, t = lane % 4, a lane has of each block of 16 rows x
// 64 channels: rows g and g + 8, channels 8t .. 8t + 7 of the first 32 and of the other 32.
template <int FORMAT>
struct LaneUnit {
    static constexpr int LOADS = FORMAT == WEIGHT_BF16 ? 4 : FORMAT == WEIGHT_INT8 ? 2 : 1;  // of 16 bytes, a block
    static constexpr int MOST_BLOCKS = 4 / LOADS;
    uint4 q[MOST_BLOCKS][LOADS];
    unsigned scale[MOST_BLOCKS][2], minimum[MOST_BLOCKS][2];  // of half a block's channels: {row g, row g + 8} fp16

    __device__ __forceinline__ void load(const Tiles& tiles, const unsigned char* unit, int lane) {
        const int groups = tiles.unit_blocks * 64 >> tiles.group_log2;
        const unsigned* const scales =  // [g][group], then as many minima
            reinterpret_cast<const unsigned*>(unit + tiles.unit_blocks * LOADS * 512) + lane / 4 * groups;
#pragma unroll
        for (int b = 0; b < MOST_BLOCKS; b++) {
            if (b >= tiles.unit_blocks) break;
#pragma unroll
            for (int i = 0; i < LOADS; i++)
                q[b][i] = *reinterpret_cast<const uint4*>(unit + (b * LOADS + i) * 512 + lane * 16);
#pragma unroll
            for (int half = 0; half < 2 && FORMAT != WEIGHT_BF16; half++) {
                const int group = (b * 64 + half * 32) >> tiles.group_log2;
                scale[b][half] = scales[group];
                if (FORMAT == WEIGHT_INT4_ASYMMETRIC) minimum[b][half] = scales[8 * groups + group];
            }
        }
        if (FORMAT == WEIGHT_INT4 || FORMAT == WEIGHT_INT4_ASYMMETRIC) {
            if (tiles.unit_blocks == 2) {
                separate(q[0][0], q[1 % MOST_BLOCKS][0]);
            } else if (tiles.unit_blocks == 4) {
                separate(q[0][0], q[2 % MOST_BLOCKS][0]);
                separate(q[1 % MOST_BLOCKS][0], q[3 % MOST_BLOCKS][0]);
            }
        }
    }

    // Two int4 blocks that share their places, word by word.
    __device__ __forceinline__ static void separate(uint4& a, uint4& b) {
        const uint4 first = make_uint4(a.x, b.x, a.z, b.z), second = make_uint4(a.y, b.y, a.w, b.w);
        a = first, b = second;
    }

    // Eight channels of block b: of its first or other `half`, of row g or (high) row g + 8.
    __device__ __forceinline__ Half8 weights(int b, int half, int high) const {
        float value[8];
        if (FORMAT == WEIGHT_BF16) {
            const uint4 v = q[b][(high * 2 + half) % LOADS];
            const unsigned word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 8; i++) value[i] = bf16_of(word[i / 2], i % 2);
            return to_half8(value);
        }
        const uint4 v = q[b][high % LOADS];
        const unsigned word[2] = {half ? v.z : v.x, half ? v.w : v.y};
        const float s = half_of(scale[b][half], high);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (FORMAT == WEIGHT_INT8) {
                value[i] = signed_byte(word[i / 4], i % 4) * s;
            } else {
                const float code = to_float(word[i / 4] >> (8 * (i % 4) + 4 * high) & 15u);
                value[i] = FORMAT == WEIGHT_INT4 ? (code - 8.0f) * s : fmaf(code, s, half_of(minimum[b][half], high));
            }
        }
        return to_half8(value);
    }
};

// Unit `unit` of a tile into out [rows, k] fp16, whose row 0 is the first row of first_tile; rows beyond are left out.
template <int FORMAT>
__device__ __forceinline__ void dequantise_unit(const Tiles& tiles, int layer, int tile, int unit, int first_tile,
                                                int rows, __half* out, int lane) {
    const TilePlace place = tiles.place[tile];
    const int chunk_units = tiles.chunk_blocks / tiles.unit_blocks, chunk = unit / chunk_units;
    LaneUnit<FORMAT> loaded;
    loaded.load(tiles,
                tiles.data + place.offset + layer * place.layer_stride + chunk % tiles.chunks * place.chunk_stride +
                    chunk / tiles.chunks * place.share_stride + size_t(unit % chunk_units) * tiles.unit_bytes,
                lane);
    const int row = (tile - first_tile) * tiles.rows_per_tile + lane / 4;
    __half* const target = out + size_t(row) * tiles.k + unit * tiles.unit_blocks * 64 + lane % 4 * 8;
#pragma unroll
    for (int b = 0; b < LaneUnit<FORMAT>::MOST_BLOCKS; b++) {
        if (b >= tiles.unit_blocks) break;
#pragma unroll
        for (int high = 0; high < 2; high++) {
            if (row + high * tiles.high_row >= rows) continue;
#pragma unroll
            for (int half = 0; half < 2; half++)
                store16(target + size_t(high * tiles.high_row) * tiles.k + b * 64 + half * 32,
                        loaded.weights(b, half, high));
        }
    }
}
