// The megakernel as a CPU library, compiled for one plan (macros of plan.py): `run` is one cooperative launch.
#define THREADS_IN_BLOCK (CONSUMER_WARPS * 32 + 128)
#include "sm.h"

#include "../../../kernels/cuda/megakernel.cu"

static Parameters parameters;

extern "C" int run(const Parameters* p, unsigned long long order) {
    parameters = *p;
    return run_grid(SMS, THREADS, SHARED_BYTES, order, [] { megakernel(parameters); });
}
