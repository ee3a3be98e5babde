// AVX-512 with VNNI: 16 rows per vector, four products summed into each 32-bit lane by one instruction.
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "isa.h"

namespace flint {

bool supports_avx512_vnni();

namespace {

constexpr int kLanes = 16;
constexpr int kParts = kTileRows / kLanes;
typedef __m512 Vec;
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));

inline Vec half_to_float(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline void float_to_half(const Vec& v, uint16_t* p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }

inline float peak(Vec v) { return _mm512_reduce_max_ps(v); }

inline void narrow(const IntVec* v, int8_t* out) {
    for (int i = 0; i < 2; ++i) {
        const __m128i bytes = _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(v[i]));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * i), bytes);
    }
}

// Four bytes, or two 16-bit values, to all rows.
inline __m512i broadcast(const int8_t* x) {
    int32_t bytes;
    memcpy(&bytes, x, 4);
    return _mm512_set1_epi32(bytes);
}

struct Int4 {
    static constexpr bool kWide = false;
    struct Block {
        __m512i w[8];  // w[j]: channels 4 j .. 4 j + 3 of 16 rows, unsigned bytes
    };

    static inline void load(const uint8_t* block, Block* out) {
        const __m512i low = _mm512_set1_epi8(15);
        for (int j = 0; j < 4; ++j) {
            const __m512i pairs = _mm512_loadu_si512(block + 64 * j);
            out->w[j] = _mm512_and_si512(pairs, low);
            out->w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low);
        }
    }

    template <int kTokens>
    static inline void dot(const Block& block, const int8_t* x, IntVec (*out)[kParts]) {
        __m512i coarse[kTokens], fine[kTokens];
        for (int token = 0; token < kTokens; ++token) coarse[token] = fine[token] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
#pragma GCC unroll 4
            for (int token = 0; token < kTokens; ++token) {
                const int8_t* channels = x + token * 2 * kBlock + 4 * j;
                coarse[token] = _mm512_dpbusd_epi32(coarse[token], block.w[j], broadcast(channels));
                fine[token] = _mm512_dpbusd_epi32(fine[token], block.w[j], broadcast(channels + kBlock));
            }
        }
        for (int token = 0; token < kTokens; ++token) {
            out[token][0] = reinterpret_cast<IntVec>(_mm512_add_epi32(_mm512_slli_epi32(coarse[token], 8), fine[token]));
        }
    }

    static inline void dot_one(const uint8_t* block, const int8_t* x, IntVec* out) {
        Block unpacked;
        load(block, &unpacked);
        dot<1>(unpacked, x, reinterpret_cast<IntVec(*)[kParts]>(out));
    }
};

// 16-bit products: both digits at once, and no unsigned operand to correct for.
struct Int8 {
    static constexpr bool kWide = true;
    struct Block {
        __m512i w[16];  // w[2 j]: channels 4 j and 4 j + 2 of 16 rows in 16 bits, w[2 j + 1]: the odd ones
    };

    static inline void load(const uint8_t* block, Block* out) {
        for (int j = 0; j < 8; ++j) {
            const __m512i bytes = _mm512_loadu_si512(block + 64 * j);
            out->w[2 * j] = _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8);
            out->w[2 * j + 1] = _mm512_srai_epi16(bytes, 8);
        }
    }

    template <int kTokens>
    static inline void dot(const Block& block, const int8_t* x, IntVec (*out)[kParts]) {
        __m512i even[kTokens], odd[kTokens];
        for (int token = 0; token < kTokens; ++token) even[token] = odd[token] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
#pragma GCC unroll 4
            for (int token = 0; token < kTokens; ++token) {
                const int8_t* channels = x + token * 2 * kBlock + 8 * j;
                even[token] = _mm512_dpwssd_epi32(even[token], block.w[2 * j], broadcast(channels));
                odd[token] = _mm512_dpwssd_epi32(odd[token], block.w[2 * j + 1], broadcast(channels + 4));
            }
        }
        for (int token = 0; token < kTokens; ++token) {
            out[token][0] = reinterpret_cast<IntVec>(_mm512_add_epi32(even[token], odd[token]));
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
const Isa kAvx512 = make_isa("avx512", supports_avx512_vnni);
}
#endif
