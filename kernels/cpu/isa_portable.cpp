// Any processor: plain C++ that mirrors the layout, and the baseline that the other tables are tested against.
#include <stdint.h>
#include <string.h>

#include "half.h"
#include "isa.h"

namespace flint {
namespace {

constexpr int kLanes = 4;
constexpr int kFewRows = 0;  // unrolled scalar code compiles for a minute and gains nothing
typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));

inline Vec half_to_float(const uint16_t* p) { return Vec{from_half(p[0]), from_half(p[1]), from_half(p[2]), from_half(p[3])}; }

inline void float_to_half(const Vec& v, uint16_t* p) {
    for (int lane = 0; lane < kLanes; ++lane) p[lane] = to_half(v[lane]);
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }

struct Int4 {
    static constexpr bool kWide = false;
    struct Block {
        int8_t w[kBlock][kLanes];  // [channel][row]
    };

    static inline Block load(const uint8_t* block, int part) {
        Block out;
        for (int k = 0; k < kBlock; ++k) {
            for (int r = 0; r < kLanes; ++r) {
                const uint8_t byte = block[64 * (k % 16 / 4) + 4 * (part * kLanes + r) + k % 4];
                out.w[k][r] = static_cast<int8_t>(k < 16 ? byte & 15 : byte >> 4);
            }
        }
        return out;
    }

    static inline IntVec dot(const Block& block, const int8_t* x) {
        int32_t total[kLanes] = {};
        for (int k = 0; k < kBlock; ++k) {
            for (int r = 0; r < kLanes; ++r) total[r] += block.w[k][r] * (256 * x[k] + x[kBlock + k]);
        }
        return IntVec{total[0], total[1], total[2], total[3]};
    }
};

struct Int8 : Int4 {
    static inline Block load(const uint8_t* block, int part) {
        Block out;
        for (int k = 0; k < kBlock; ++k) {
            for (int r = 0; r < kLanes; ++r) {
                out.w[k][r] = static_cast<int8_t>(block[64 * (k / 4) + 4 * (part * kLanes + r) + k % 4]);
            }
        }
        return out;
    }
};

bool always() { return true; }

}  // namespace
}  // namespace flint

#include "ops.h"

namespace flint {
const Isa kPortable = make_isa("portable", always);
}
