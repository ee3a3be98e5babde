// Arm with the dot-product extension: 4 rows per vector, four products summed into each 32-bit lane.
#if defined(__aarch64__)
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "isa.h"

namespace flint {

bool supports_dot_product();

namespace {

constexpr int kLanes = 4;
constexpr int kParts = kTileRows / kLanes;
typedef float32x4_t Vec;
typedef int32x4_t IntVec;

inline Vec half_to_float(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

inline void float_to_half(const Vec& v, uint16_t* p) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }

inline void prefetch(const void* p) { __builtin_prefetch(p); }

inline float sum(Vec v) { return vaddvq_f32(v); }

inline float peak(Vec v) { return vmaxvq_f32(v); }

inline void narrow(const IntVec* v, int8_t* out) {
    for (int i = 0; i < 8; i += 4) {
        const int16x8_t low = vcombine_s16(vmovn_s32(v[i]), vmovn_s32(v[i + 1]));
        const int16x8_t high = vcombine_s16(vmovn_s32(v[i + 2]), vmovn_s32(v[i + 3]));
        vst1q_s8(out + 4 * i, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
    }
}

// Eight groups of four channels against 32 digits; the lane number must be a constant.
inline IntVec dot_digits(const int8x16_t* w, const int8_t* x) {
    const int8x16_t first = vld1q_s8(x), second = vld1q_s8(x + 16);
    int32x4_t a = vdupq_n_s32(0), b = vdupq_n_s32(0);
    a = vdotq_laneq_s32(a, w[0], first, 0);
    b = vdotq_laneq_s32(b, w[1], first, 1);
    a = vdotq_laneq_s32(a, w[2], first, 2);
    b = vdotq_laneq_s32(b, w[3], first, 3);
    a = vdotq_laneq_s32(a, w[4], second, 0);
    b = vdotq_laneq_s32(b, w[5], second, 1);
    a = vdotq_laneq_s32(a, w[6], second, 2);
    b = vdotq_laneq_s32(b, w[7], second, 3);
    return vaddq_s32(a, b);
}

// Four rows at a time: their eight weight vectors stay in registers for all tokens.
struct Signed {
    static constexpr bool kWide = false;
    struct Block {
        int8x16_t w[kParts][8];  // w[part][j]: channels 4 j .. 4 j + 3 of 4 rows
    };

    template <int kTokens>
    static inline void dot(const Block& block, const int8_t* x, IntVec (*out)[kParts]) {
        for (int part = 0; part < kParts; ++part) {
            for (int token = 0; token < kTokens; ++token) {
                const int8_t* digits = x + token * 2 * kBlock;
                const IntVec coarse = dot_digits(block.w[part], digits);
                out[token][part] = vaddq_s32(vshlq_n_s32(coarse, 8), dot_digits(block.w[part], digits + kBlock));
            }
        }
    }
};

struct Int4 : Signed {
    static inline void load(const uint8_t* block, Block* out) {
        for (int part = 0; part < kParts; ++part) {
            for (int j = 0; j < 4; ++j) {
                const uint8x16_t pairs = vld1q_u8(block + 64 * j + 16 * part);
                out->w[part][j] = vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15)));
                out->w[part][j + 4] = vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4));
            }
        }
    }

    static inline void dot_one(const uint8_t* block, const int8_t* x, IntVec* out) {
        Block unpacked;
        load(block, &unpacked);
        dot<1>(unpacked, x, reinterpret_cast<IntVec(*)[kParts]>(out));
    }
};

struct Int8 : Signed {
    static inline void load(const uint8_t* block, Block* out) {
        for (int part = 0; part < kParts; ++part) {
            for (int j = 0; j < 8; ++j) out->w[part][j] = vreinterpretq_s8_u8(vld1q_u8(block + 64 * j + 16 * part));
        }
    }

    static inline void dot_one(const uint8_t* block, const int8_t* x, IntVec* out) {
        Block unpacked;
        load(block, &unpacked);
        dot<1>(unpacked, x, reinterpret_cast<IntVec(*)[kParts]>(out));
    }
};

}  // namespace
}  // namespace flint

#include "ops.h"

namespace flint {
const Isa kNeon = make_isa("neon", supports_dot_product);
}
#endif
