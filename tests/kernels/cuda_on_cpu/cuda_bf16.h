#pragma once
#include "cuda_on_cpu.h"

struct __nv_bfloat16 {
    uint16_t bits;
};
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
    const unsigned bits = __float_as_uint(f);
    if (std::isnan(f)) return {0x7fff};
    return {uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
inline float __bfloat162float(__nv_bfloat16 b) { return __uint_as_float(unsigned(b.bits) << 16); }
