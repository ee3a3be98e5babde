// AVX2: 8 rows per vector. Unsigned nibbles times signed activations cannot saturate in 16 bits:
// 8 pair sums of at most 2 * 15 * 127 make 30480 < 32768, so a whole block is summed before it is widened once.
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "isa.h"

namespace flint {

bool supports_avx2();

namespace {

constexpr int kLanes = 8;
constexpr int kFewRows = 8;
typedef __m256 Vec;
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));

inline Vec half_to_float(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline void float_to_half(const Vec& v, uint16_t* p) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// Four bytes, or two 16-bit values, to all rows.
inline __m256i broadcast(const int8_t* x) {
    int32_t bytes;
    memcpy(&bytes, x, 4);
    return _mm256_set1_epi32(bytes);
}

inline __m256i load_rows(const uint8_t* block, int j, int part) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 64 * j + 32 * part));
}

struct Int4 {
    static constexpr bool kWide = false;
    struct Block {
        __m256i w[8];  // w[j]: channels 4 j .. 4 j + 3 of 8 rows, one byte each
    };

    static inline Block load(const uint8_t* block, int part) {
        const __m256i low = _mm256_set1_epi8(15);
        Block out;
        for (int j = 0; j < 4; ++j) {
            const __m256i pairs = load_rows(block, j, part);
            out.w[j] = _mm256_and_si256(pairs, low);
            out.w[j + 4] = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), low);
        }
        return out;
    }

    // The 16-bit sums of one digit: two per row.
    static inline __m256i digit(const Block& block, const int8_t* x) {
        __m256i a = _mm256_maddubs_epi16(block.w[0], broadcast(x));
        __m256i b = _mm256_maddubs_epi16(block.w[1], broadcast(x + 4));
#pragma GCC unroll 3
        for (int j = 2; j < 8; j += 2) {
            a = _mm256_add_epi16(a, _mm256_maddubs_epi16(block.w[j], broadcast(x + 4 * j)));
            b = _mm256_add_epi16(b, _mm256_maddubs_epi16(block.w[j + 1], broadcast(x + 4 * j + 4)));
        }
        return _mm256_add_epi16(a, b);
    }

    static inline IntVec dot(const Block& block, const int8_t* x) {
        const __m256i coarse = _mm256_madd_epi16(digit(block, x), _mm256_set1_epi16(256));
        const __m256i fine = _mm256_madd_epi16(digit(block, x + kBlock), _mm256_set1_epi16(1));
        return reinterpret_cast<IntVec>(_mm256_add_epi32(coarse, fine));
    }
};

// 16-bit products: both digits at once, and no 8-bit product sum that could saturate.
struct Int8 {
    static constexpr bool kWide = true;
    struct Block {
        __m256i w[8];
    };

    static inline Block load(const uint8_t* block, int part) {
        Block out;
        for (int j = 0; j < 8; ++j) out.w[j] = load_rows(block, j, part);
        return out;
    }

    static inline IntVec dot(const Block& block, const int8_t* x) {
        __m256i even = _mm256_setzero_si256(), odd = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const __m256i w = block.w[j];
            const __m256i channels02 = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8), channels13 = _mm256_srai_epi16(w, 8);
            even = _mm256_add_epi32(even, _mm256_madd_epi16(channels02, broadcast(x + 8 * j)));
            odd = _mm256_add_epi32(odd, _mm256_madd_epi16(channels13, broadcast(x + 8 * j + 4)));
        }
        return reinterpret_cast<IntVec>(_mm256_add_epi32(even, odd));
    }
};

}  // namespace
}  // namespace flint

#include "ops.h"

namespace flint {
const Isa kAvx2 = make_isa("avx2", supports_avx2);
}
#endif
