// The megakernel as a CPU library, compiled for one plan (macros of plan.py): `run` is one cooperative launch.
#define THREADS_IN_BLOCK (CONSUMER_WARPS * 32 + 128)
#include "sm.h"

#include "../../../kernels/cuda/megakernel.cu"

static Parameters parameters;

// A float's bits as the word that travels, and what is read of it.
extern "C" unsigned word_and_back(unsigned bits, unsigned layers) {
    return __float_as_uint(value_of(word(__uint_as_float(bits), Epoch(layers))));
}

// How the warps share what they stage of down's input.
extern "C" void staging_of_down(int (&found)[4]) {
    using I = Items<Down>;
    found[0] = I::ROUNDS, found[1] = I::AT_ONCE, found[2] = I::FULL, found[3] = I::WHOLE;
}

extern "C" int run(const Parameters* p, unsigned long long order) {
    parameters = *p;
    return run_grid(SMS, THREADS, SHARED_BYTES, order, [] { megakernel(parameters); });
}
