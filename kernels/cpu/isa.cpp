// Which instruction sets this processor has.
#include "isa.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace flint {

#if defined(__x86_64__)
namespace {

struct Cpuid {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    explicit Cpuid(unsigned leaf) { __get_cpuid_count(leaf, 0, &eax, &ebx, &ecx, &edx); }
};

// The register states that the operating system saves on a context switch (XCR0); 0 without XSAVE.
unsigned saved_states() {
    if (!(Cpuid(1).ecx & bit_OSXSAVE)) return 0;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

bool all(unsigned value, unsigned bits) { return (value & bits) == bits; }

}  // namespace

// Raw CPUID and not __builtin_cpu_supports, which needs the compiler's own runtime library.
bool supports_avx2() {
    return all(saved_states(), 0x6) && all(Cpuid(1).ecx, bit_FMA | bit_F16C | bit_AVX) && all(Cpuid(7).ebx, bit_AVX2);
}

bool supports_avx512_vnni() {
    return supports_avx2() && all(saved_states(), 0xe6) &&
           all(Cpuid(7).ebx, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ) &&
           all(Cpuid(7).ecx, bit_AVX512VNNI);
}
#elif defined(__aarch64__)
bool supports_dot_product() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & (1ul << 20);  // HWCAP_ASIMDDP
#else
    return true;  // every Apple Arm processor
#endif
}
#endif

const Isa* select_isa(const char* name) {
    const Isa* const tables[] = {
#if defined(__x86_64__)
        &kAvx512, &kAvx2,
#elif defined(__aarch64__)
        &kNeon,
#endif
        &kPortable,
    };
    for (const Isa* isa : tables) {
        if (name && *name ? !strcmp(name, isa->name) && isa->supported() : isa->supported()) return isa;
    }
    return nullptr;
}

}  // namespace flint
