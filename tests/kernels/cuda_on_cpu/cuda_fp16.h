#pragma once
#include "cuda_on_cpu.h"

struct __half {
    _Float16 value;
};
struct alignas(4) __half2 {
    __half x, y;
};
inline float __half2float(__half h) { return float(h.value); }
inline __half __float2half_rn(float f) { return {_Float16(f)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
