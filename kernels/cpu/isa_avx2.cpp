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
constexpr int kParts = kTileRows / kLanes;
typedef __m256 Vec;
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));

inline Vec half_to_float(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline void float_to_half(const Vec& v, uint16_t* p) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

inline float sum(Vec v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline float peak(Vec v) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

inline void narrow(const IntVec* v, int8_t* out) {
    const __m256i* wide = reinterpret_cast<const __m256i*>(v);
    const __m256i low = _mm256_packs_epi32(wide[0], wide[1]), high = _mm256_packs_epi32(wide[2], wide[3]);
    // Packing works within 128-bit halves: 32-bit pieces come out as 0 2 4 6 1 3 5 7.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
}

// Four bytes, or two 16-bit values, to all rows.
inline __m256i broadcast(const int8_t* x) {
    int32_t bytes;
    memcpy(&bytes, x, 4);
    return _mm256_set1_epi32(bytes);
}

inline __m256i load_rows(const uint8_t* block, int j, int part) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 64 * j + 32 * part));
}

// total += v. Plain additions of integers are reassociated by gcc into trees whose leaves all wait in spilled registers.
inline void add16(__m256i& total, __m256i v) { __asm__("vpaddw %1, %0, %0" : "+x"(total) : "x"(v)); }
inline void add32(__m256i& total, __m256i v) { __asm__("vpaddd %1, %0, %0" : "+x"(total) : "x"(v)); }

inline IntVec ints(__m256i v) { return reinterpret_cast<IntVec>(v); }

struct Int4 {
    static constexpr bool kWide = false;
    struct Block {
        __m256i w[8][kParts];  // w[j]: channels 4 j .. 4 j + 3 of 8 rows, one byte each
    };

    static inline __m256i low(__m256i pairs) { return _mm256_and_si256(pairs, _mm256_set1_epi8(15)); }
    static inline __m256i high(__m256i pairs) { return low(_mm256_srli_epi16(pairs, 4)); }

    static inline void load(const uint8_t* block, Block* out) {
        for (int j = 0; j < 4; ++j) {
            for (int part = 0; part < kParts; ++part) {
                const __m256i pairs = load_rows(block, j, part);
                out->w[j][part] = low(pairs);
                out->w[j + 4][part] = high(pairs);
            }
        }
    }

    // out (+)= factor * the sums of one digit.
    template <int kTokens, bool kAdd>
    static inline void dot_digit(const Block& block, const int8_t* x, __m256i factor, IntVec (*out)[kParts]) {
        // A pointer that gcc cannot see through: it would keep one digit's weights for the other, in spilled registers.
        const __m256i(*w)[kParts] = block.w;
        __asm__("" : "+r"(w) : "m"(block));
        __m256i total[kTokens][kParts] = {};
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const __m256i rows0 = w[j][0], rows1 = w[j][1];
#pragma GCC unroll 4
            for (int token = 0; token < kTokens; ++token) {
                const __m256i channels = broadcast(x + token * 2 * kBlock + 4 * j);
                add16(total[token][0], _mm256_maddubs_epi16(rows0, channels));
                add16(total[token][1], _mm256_maddubs_epi16(rows1, channels));
            }
        }
        for (int token = 0; token < kTokens; ++token) {
            for (int part = 0; part < kParts; ++part) {
                const IntVec sums = ints(_mm256_madd_epi16(total[token][part], factor));
                out[token][part] = kAdd ? out[token][part] + sums : sums;
            }
        }
    }

    template <int kTokens>
    static inline void dot(const Block& block, const int8_t* x, IntVec (*out)[kParts]) {
        dot_digit<kTokens, false>(block, x, _mm256_set1_epi16(256), out);
        dot_digit<kTokens, true>(block, x + kBlock, _mm256_set1_epi16(1), out);
    }

    static inline void dot_one(const uint8_t* block, const int8_t* x, IntVec* out) {
        __m256i coarse[kParts] = {}, fine[kParts] = {};
        const auto add = [&](__m256i rows0, __m256i rows1, const int8_t* channels) {
            const __m256i c = broadcast(channels), f = broadcast(channels + kBlock);
            add16(coarse[0], _mm256_maddubs_epi16(rows0, c));
            add16(coarse[1], _mm256_maddubs_epi16(rows1, c));
            add16(fine[0], _mm256_maddubs_epi16(rows0, f));
            add16(fine[1], _mm256_maddubs_epi16(rows1, f));
        };
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const __m256i pairs0 = load_rows(block, j, 0), pairs1 = load_rows(block, j, 1);
            add(low(pairs0), low(pairs1), x + 4 * j);
            add(high(pairs0), high(pairs1), x + 16 + 4 * j);
        }
        const __m256i high_digit = _mm256_set1_epi16(256), low_digit = _mm256_set1_epi16(1);
        for (int part = 0; part < kParts; ++part) {
            out[part] = ints(_mm256_madd_epi16(coarse[part], high_digit)) + ints(_mm256_madd_epi16(fine[part], low_digit));
        }
    }
};

// 16-bit products: both digits at once, and no 8-bit product sum that could saturate.
struct Int8 {
    static constexpr bool kWide = true;
    struct Block {
        __m256i w[16][kParts];  // w[2 j]: channels 4 j and 4 j + 2 of 8 rows in 16 bits, w[2 j + 1]: the odd ones
    };

    static inline __m256i even(__m256i bytes) { return _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8); }
    static inline __m256i odd(__m256i bytes) { return _mm256_srai_epi16(bytes, 8); }

    static inline void load(const uint8_t* block, Block* out) {
        for (int j = 0; j < 8; ++j) {
            for (int part = 0; part < kParts; ++part) {
                const __m256i bytes = load_rows(block, j, part);
                out->w[2 * j][part] = even(bytes);
                out->w[2 * j + 1][part] = odd(bytes);
            }
        }
    }

    template <int kTokens>
    static inline void dot(const Block& block, const int8_t* x, IntVec (*out)[kParts]) {
        __m256i total[kTokens][kParts] = {};
#pragma GCC unroll 1
        for (int j = 0; j < 16; ++j) {
#pragma GCC unroll 4
            for (int token = 0; token < kTokens; ++token) {
                const __m256i channels = broadcast(x + token * 2 * kBlock + 4 * j);
#pragma GCC unroll 2
                for (int part = 0; part < kParts; ++part) {
                    add32(total[token][part], _mm256_madd_epi16(block.w[j][part], channels));
                }
            }
        }
        for (int token = 0; token < kTokens; ++token) {
            for (int part = 0; part < kParts; ++part) out[token][part] = ints(total[token][part]);
        }
    }

    static inline void dot_one(const uint8_t* block, const int8_t* x, IntVec* out) {
        __m256i total[2][kParts] = {};
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const __m256i a = broadcast(x + 8 * j), b = broadcast(x + 8 * j + 4);
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
                const __m256i bytes = load_rows(block, j, part);
                add32(total[0][part], _mm256_madd_epi16(even(bytes), a));
                add32(total[1][part], _mm256_madd_epi16(odd(bytes), b));
            }
        }
        for (int part = 0; part < kParts; ++part) out[part] = ints(_mm256_add_epi32(total[0][part], total[1][part]));
    }
};

}  // namespace
}  // namespace flint

#include "ops.h"

namespace flint {
const Isa kAvx2 = make_isa("avx2", supports_avx2);
}
#endif
