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
constexpr int kFewRows = 8;
typedef __m512 Vec;
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));

inline Vec half_to_float(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline void float_to_half(const Vec& v, uint16_t* p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

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

    static inline Block load(const uint8_t* block, int) {
        const __m512i low = _mm512_set1_epi8(15);
        Block out;
        for (int j = 0; j < 4; ++j) {
            const __m512i pairs = _mm512_loadu_si512(block + 64 * j);
            out.w[j] = _mm512_and_si512(pairs, low);
            out.w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low);
        }
        return out;
    }

    static inline IntVec dot(const Block& block, const int8_t* x) {
        __m512i coarse = _mm512_setzero_si512(), fine = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            coarse = _mm512_dpbusd_epi32(coarse, block.w[j], broadcast(x + 4 * j));
            fine = _mm512_dpbusd_epi32(fine, block.w[j], broadcast(x + kBlock + 4 * j));
        }
        return reinterpret_cast<IntVec>(_mm512_add_epi32(_mm512_slli_epi32(coarse, 8), fine));
    }
};

// 16-bit products: both digits at once, and no unsigned operand to correct for.
struct Int8 {
    static constexpr bool kWide = true;
    struct Block {
        __m512i w[8];
    };

    static inline Block load(const uint8_t* block, int) {
        Block out;
        for (int j = 0; j < 8; ++j) out.w[j] = _mm512_loadu_si512(block + 64 * j);
        return out;
    }

    static inline IntVec dot(const Block& block, const int8_t* x) {
        __m512i even = _mm512_setzero_si512(), odd = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const __m512i w = block.w[j];
            const __m512i channels02 = _mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8), channels13 = _mm512_srai_epi16(w, 8);
            even = _mm512_dpwssd_epi32(even, channels02, broadcast(x + 8 * j));
            odd = _mm512_dpwssd_epi32(odd, channels13, broadcast(x + 8 * j + 4));
        }
        return reinterpret_cast<IntVec>(_mm512_add_epi32(even, odd));
    }
};

}  // namespace
}  // namespace flint

#include "ops.h"

namespace flint {
const Isa kAvx512 = make_isa("avx512", supports_avx512_vnni);
}
#endif
