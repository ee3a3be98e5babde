// Scalar fp16 and bf16 conversions in integer arithmetic, for code that must run on any processor.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the tile format is little endian"
#endif

namespace flint {

static inline float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t bits_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float from_bf16(uint16_t bits) { return float_from_bits(static_cast<uint32_t>(bits) << 16); }

// Shifts the exponent by multiplication, which also normalises subnormals; infinities and NaN are patched.
static inline float from_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
    const float value = float_from_bits(magnitude) * float_from_bits(0x77800000);  // 2^112
    const uint32_t bits = (half & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : bits_from_float(value);
    return float_from_bits(bits | sign);
}

static inline float load_half(const void* p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
    return from_half(bits);
}

// Round to nearest even; beyond 65504 saturates to infinity, as the hardware conversions do.
static inline uint16_t to_half(float value) {
    const uint32_t bits = bits_from_float(value);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // subnormal: adding 0.5 aligns the last kept bit with the float's last bit
        const float aligned = float_from_bits(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (bits_from_float(aligned) - 0x3f000000));
    }
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return static_cast<uint16_t>(sign | (rounded - 0x38000000) >> 13);
}

}  // namespace flint
