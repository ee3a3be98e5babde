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

inline Vec half_to_float(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline void float_to_half(const Vec& v, uint16_t* p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

inline __m512i four_channels(const int8_t* x) {
    int32_t bytes;
    memcpy(&bytes, x, 4);
    return _mm512_set1_epi32(bytes);
}

struct Int4 {
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

    static inline Vec dot(const Block& block, const int8_t* x) {
        __m512i a = _mm512_setzero_si512(), b = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int j = 0; j < 8; j += 2) {
            a = _mm512_dpbusd_epi32(a, block.w[j], four_channels(x + 4 * j));
            b = _mm512_dpbusd_epi32(b, block.w[j + 1], four_channels(x + 4 * j + 4));
        }
        return _mm512_cvtepi32_ps(_mm512_add_epi32(a, b));
    }
};

// dpbusd wants unsigned weights: w + 128, and 128 * sum(x) taken off again (four more instructions for the sum).
struct Int8 {
    struct Block {
        __m512i w[8];
    };

    static inline Block load(const uint8_t* block, int) {
        Block out;
        for (int j = 0; j < 8; ++j) {
            out.w[j] = _mm512_xor_si512(_mm512_loadu_si512(block + 64 * j), _mm512_set1_epi8(-128));
        }
        return out;
    }

    static inline Vec dot(const Block& block, const int8_t* x) {
        const __m512i offset = _mm512_set1_epi8(-128);  // as unsigned: 128
        __m512i a = _mm512_setzero_si512(), b = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const __m512i channels = four_channels(x + 4 * j);
            a = _mm512_dpbusd_epi32(a, block.w[j], channels);
            b = _mm512_dpbusd_epi32(b, offset, channels);
        }
        return _mm512_cvtepi32_ps(_mm512_sub_epi32(a, b));
    }
};

}  // namespace
}  // namespace flint

#include "ops.h"

namespace flint {
const Isa kAvx512 = make_isa("avx512", supports_avx512_vnni);
}
#endif
