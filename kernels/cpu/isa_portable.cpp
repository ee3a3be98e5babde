// Any processor: plain C++ that mirrors the layout, and the baseline that the other tables are tested against.
#include <stdint.h>
#include <string.h>

#include "half.h"
#include "isa.h"

namespace flint {
namespace {

constexpr int kLanes = 4;
constexpr int kParts = kTileRows / kLanes;
typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));

inline Vec half_to_float(const uint16_t* p) { return Vec{from_half(p[0]), from_half(p[1]), from_half(p[2]), from_half(p[3])}; }

inline void float_to_half(const Vec& v, uint16_t* p) {
    for (int lane = 0; lane < kLanes; ++lane) p[lane] = to_half(v[lane]);
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }

inline float sum(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }

inline float peak(Vec v) {
    const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
}

inline void narrow(const IntVec* v, int8_t* out) {
    for (int i = 0; i < kBlock; ++i) out[i] = static_cast<int8_t>(v[i / kLanes][i % kLanes]);
}

struct Bytes {
    static constexpr bool kWide = false;
    struct Block {
        int8_t w[kBlock][kTileRows];  // [channel][row]
    };

    template <int kTokens>
    static void dot(const Block& block, const int8_t* x, IntVec (*out)[kParts]) {
        for (int token = 0; token < kTokens; ++token, x += 2 * kBlock) {
            int32_t total[kTileRows] = {};
            for (int k = 0; k < kBlock; ++k) {
                const int32_t value = 256 * x[k] + x[kBlock + k];
                for (int r = 0; r < kTileRows; ++r) total[r] += block.w[k][r] * value;
            }
            memcpy(out[token], total, sizeof total);
        }
    }
};

struct Int4 : Bytes {
    static void load(const uint8_t* block, Block* out) {
        for (int k = 0; k < kBlock; ++k) {
            for (int r = 0; r < kTileRows; ++r) {
                const uint8_t byte = block[64 * (k % 16 / 4) + 4 * r + k % 4];
                out->w[k][r] = static_cast<int8_t>(k < 16 ? byte & 15 : byte >> 4);
            }
        }
    }

    static void dot_one(const uint8_t* block, const int8_t* x, IntVec* out) {
        Block unpacked;
        load(block, &unpacked);
        dot<1>(unpacked, x, reinterpret_cast<IntVec(*)[kParts]>(out));
    }
};

struct Int8 : Bytes {
    static void load(const uint8_t* block, Block* out) {
        for (int k = 0; k < kBlock; ++k) {
            for (int r = 0; r < kTileRows; ++r) out->w[k][r] = static_cast<int8_t>(block[64 * (k / 4) + 4 * r + k % 4]);
        }
    }

    static void dot_one(const uint8_t* block, const int8_t* x, IntVec* out) {
        Block unpacked;
        load(block, &unpacked);
        dot<1>(unpacked, x, reinterpret_cast<IntVec(*)[kParts]>(out));
    }
};

bool always() { return true; }

}  // namespace
}  // namespace flint

#include "ops.h"

namespace flint {
const Isa kPortable = make_isa("portable", always);
}
