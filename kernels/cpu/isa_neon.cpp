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
constexpr int kFewRows = 8;
typedef float32x4_t Vec;
typedef int32x4_t IntVec;

inline Vec half_to_float(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

inline void float_to_half(const Vec& v, uint16_t* p) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }

inline void prefetch(const void* p) { __builtin_prefetch(p); }

// Eight groups of four channels against the 32 activations; the lane number must be a constant.
inline IntVec dot_block(const int8x16_t* w, const int8_t* x) {
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

struct Int4 {
    static constexpr bool kWide = false;
    struct Block {
        int8x16_t w[8];  // w[j]: channels 4 j .. 4 j + 3 of 4 rows
    };

    static inline Block load(const uint8_t* block, int part) {
        Block out;
        for (int j = 0; j < 4; ++j) {
            const uint8x16_t pairs = vld1q_u8(block + 64 * j + 16 * part);
            out.w[j] = vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15)));
            out.w[j + 4] = vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4));
        }
        return out;
    }

    static inline IntVec dot(const Block& block, const int8_t* x) {
        return vaddq_s32(vshlq_n_s32(dot_block(block.w, x), 8), dot_block(block.w, x + kBlock));
    }
};

struct Int8 : Int4 {
    static inline Block load(const uint8_t* block, int part) {
        Block out;
        for (int j = 0; j < 8; ++j) out.w[j] = vreinterpretq_s8_u8(vld1q_u8(block + 64 * j + 16 * part));
        return out;
    }
};

}  // namespace
}  // namespace flint

#include "ops.h"

namespace flint {
const Isa kNeon = make_isa("neon", supports_dot_product);
}
#endif
