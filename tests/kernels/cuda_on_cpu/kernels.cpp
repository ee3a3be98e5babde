// The plain kernels of kernels/cuda as a CPU library: `launch(name, grid, threads, arguments)` runs one of them.
#include <algorithm>

#include "cuda_on_cpu.h"

using std::max;
using std::min;

#include "../../../kernels/cuda/prefill.cu"
#include "../../../kernels/cuda/retile.cu"

using cuda_on_cpu::Entry;
static const cuda_on_cpu::Named KERNELS[] = {
    {"dequantise", Entry<dequantise>::invoke},
    {"embed", Entry<embed>::invoke},
    {"add_and_norm", Entry<add_and_norm>::invoke},
    {"rotate", Entry<rotate>::invoke},
    {"write_cache_64", Entry<write_cache_64>::invoke},
    {"write_cache_128", Entry<write_cache_128>::invoke},
    {"read_cache_64", Entry<read_cache_64>::invoke},
    {"read_cache_128", Entry<read_cache_128>::invoke},
    {"gate", Entry<gate>::invoke},
    {"retile", Entry<retile>::invoke},
};

extern "C" int launch(const char* name, unsigned x, unsigned y, unsigned z, unsigned threads, void** arguments) {
    for (const auto& kernel : KERNELS)
        if (!std::strcmp(kernel.name, name)) {
            cuda_on_cpu::launch(kernel.invoke, {x, y, z}, threads, arguments);
            return 0;
        }
    return 1;
}
