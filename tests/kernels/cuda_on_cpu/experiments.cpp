// One source of kernels/cuda/experiments as a CPU library: SOURCE is its path, KERNELS a list KERNEL(name) KERNEL(name) ...
// `launch` runs all blocks at once (sm.h), so that grid barriers and pipelines work as on a GPU.
inline unsigned threads_in_block;
#define THREADS_IN_BLOCK threads_in_block
#include "sm.h"

inline Index gridDim;

// What the experiments add to primitives.cuh.
inline void add_release(u32* p, u32 v) { progress++, *p += v; }
inline u32 fetch_add(u32* p, u32 v) { progress++; const u32 old = *p; *p += v; return old; }
inline void store_release(u32* p, u32 v) { store_word(p, v); }
inline u32 load_acquire(const u32* p) { return load_word(p); }
inline void mma_x_rows(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const WarpOperands o = gather(a0, a1, a2, a3, b0, b1);
    const int g = lane_now() / 4, t = lane_now() % 4;
    for (int i = 0; i < 4; i++) {
        const int row = g + (i / 2) * 8, column = 2 * t + i % 2;
        for (int k = 0; k < 32; k++) {
            const u32 a = o.w[row % 8 * 4 + k % 16 / 4][(k / 16) * 2 + row / 8], b = o.w[column * 4 + k % 16 / 4][4 + k / 16];
            c[i] += int(int8_t(a >> (k % 4 * 8) & 255)) * int(b >> (k % 4 * 8) & 255);
        }
    }
}

#include SOURCE

#include <tuple>
#include <utility>

static void** arguments;

template <class... A, size_t... I>
void apply(void (*kernel)(A...), std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<A>*>(arguments[I])...);
}
template <auto KERNEL_>
struct Entry;
template <class... A, void (*KERNEL_)(A...)>
struct Entry<KERNEL_> {
    static void invoke() { apply(KERNEL_, std::index_sequence_for<A...>{}); }
};

struct Named {
    const char* name;
    void (*invoke)();
};
#define KERNEL(NAME) {#NAME, Entry<NAME>::invoke},
static const Named kernels[] = {KERNELS};

// 0; 1: deadlock (told on stderr); 2: no kernel of that name.
extern "C" int launch(const char* name, unsigned grid, unsigned threads, size_t shared, u64 order, void** given) {
    for (const Named& kernel : kernels)
        if (!std::strcmp(kernel.name, name)) {
            arguments = given;
            threads_in_block = threads;
            gridDim = {grid};
            return run_grid(grid, threads, shared, order, kernel.invoke);
        }
    return 2;
}
