// The megakernel's primitives on a CPU: all blocks of a grid run at once, each thread a fiber, so that SMs can wait for
// one another. Collective operations of a warp are exact about who takes part: a lane that never comes is a deadlock, and
// a deadlock ends the run with a report instead of hanging.
#pragma once
#define FLINT_EMULATED
#define __CUDA_ARCH__ 900
#define WATCHDOG_MS 0  // nobody waits for ever: see nanoseconds and run_grid
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;
constexpr u32 ALL_LANES = 0xffffffffu;

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Index { u32 x; };
inline Index threadIdx, blockIdx;

using std::max;
using std::min;
inline u64 max(u64 a, unsigned long b) { return a > b ? a : b; }

// ---- fibers

struct Fiber {
    ucontext_t context;
    jmp_buf resume;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    bool entered = false, done = false;
    static constexpr size_t STACK_BYTES = 1 << 16;
};
struct Meeting {  // of all lanes of a warp, or of the threads of a named barrier
    u32 arrived = 0, generation = 0;
};
struct Block {
    std::vector<Fiber> fibers;
    std::vector<Meeting> warps;
    std::vector<u64> values;  // what a lane brings to a collective
    Meeting named, cluster, groups[14];
    u8* shared;
};
inline std::vector<Block> blocks;
inline jmp_buf scheduler;
inline Block* block_now;
inline u32 thread_now, block_index_now;
inline u64 progress, emulated_failure;
inline u64 steps;  // of single warps: they go on for ever while a warp polls for what never comes
constexpr int LONG = 10000;  // rounds of the scheduler that no warp needs between two things that others see
inline u64 random_state = 1;

inline void yield() {
    Fiber& fiber = block_now->fibers[thread_now];
    if (!_setjmp(fiber.resume)) _longjmp(scheduler, 1);
}
inline void meet(Meeting& meeting, u32 count) {
    (count > 32 ? progress : steps)++;
    const u32 mine = meeting.generation;
    if (++meeting.arrived == count) {
        meeting.arrived = 0;
        meeting.generation++;
        return;
    }
    while (meeting.generation == mine) yield();
}
inline u32 lane_now() { return thread_now % 32; }
inline Meeting& warp_now() { return block_now->warps[thread_now / 32]; }
template <class T>
inline T exchange(T value, u32 from) {
    u64 bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    block_now->values[thread_now] = bits;
    meet(warp_now(), 32);
    bits = block_now->values[thread_now / 32 * 32 + from % 32];
    meet(warp_now(), 32);
    T out;
    std::memcpy(&out, &bits, sizeof(T));
    return out;
}
template <class T, class F>
inline T fold(T value, F f) {
    u64 bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    block_now->values[thread_now] = bits;
    meet(warp_now(), 32);
    T out{};
    for (u32 i = 0; i < 32; i++) {
        T other;
        std::memcpy(&other, &block_now->values[thread_now / 32 * 32 + i], sizeof(T));
        out = i ? f(out, other) : other;
    }
    meet(warp_now(), 32);
    return out;
}
template <class T> inline T __shfl_xor_sync(u32, T v, int o) { return exchange(v, lane_now() ^ o); }
template <class T> inline T __shfl_sync(u32, T v, int from) { return exchange(v, from); }
template <class T> inline T __shfl_up_sync(u32, T v, int o) { return exchange(v, lane_now() >= u32(o) ? lane_now() - o : lane_now()); }
inline bool __all_sync(u32, bool v) { return fold<u32>(v, [](u32 a, u32 b) { return a & b; }); }
inline u32 __ballot_sync(u32, bool v) { return fold<u32>(u32(v) << lane_now(), [](u32 a, u32 b) { return a | b; }); }
inline u32 __reduce_max_sync(u32, u32 v) { return fold<u32>(v, [](u32 a, u32 b) { return a > b ? a : b; }); }
inline int __reduce_add_sync(u32, int v) { return fold<int>(v, [](int a, int b) { return a + b; }); }
inline u32 __reduce_add_sync(u32, u32 v) { return fold<u32>(v, [](u32 a, u32 b) { return a + b; }); }
inline void __syncwarp() { meet(warp_now(), 32); }
template <int N> inline void sync_threads() { meet(block_now->named, N); }
template <int N> inline void sync_some(int group) { N == 32 ? __syncwarp() : meet(block_now->groups[group], N); }
inline void __threadfence() {}

// ---- arithmetic

inline u32 __float_as_uint(float f) { u32 b; std::memcpy(&b, &f, 4); return b; }
inline float __uint_as_float(u32 b) { float f; std::memcpy(&f, &b, 4); return f; }
inline int __float2int_rn(float f) { return int(std::nearbyint(f)); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __expf(float x) { return std::exp(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float exp2_fast(float x) { return std::exp2(x); }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int __ffs(u32 v) { return __builtin_ffs(int(v)); }
inline int __clz(u32 v) { return v ? __builtin_clz(v) : 32; }
inline u64 __umul64hi(u64 a, u64 b) { return u64((unsigned __int128)a * b >> 64); }
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) c += int(int8_t(a >> i)) * int(int8_t(b >> i));
    return c;
}
inline u32 __dp4a(u32 a, u32 b, u32 c) {
    for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
    return c;
}
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
    const u64 both = u64(b) << 32 | a;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= u32(both >> (selector >> (4 * i) & 7) * 8 & 255) << (8 * i);
    return out;
}
inline float from_half(u16 bits) { _Float16 h; std::memcpy(&h, &bits, 2); return float(h); }
inline u32 bf16_bits(float f) {
    const u32 b = __float_as_uint(f);
    return std::isnan(f) ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
inline u32 to_bf16x2(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline u32 half_bits(float f) {
    const _Float16 h = f > 65504.0f ? 65504.0f : f < -65504.0f ? -65504.0f : f;
    u16 bits;
    std::memcpy(&bits, &h, 2);
    return bits;
}
inline u32 to_half2(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
inline float2 from_half2(u32 bits) { return {from_half(u16(bits)), from_half(u16(bits >> 16))}; }
inline int opaque(int v) { return v; }
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T atomicAdd(T* p, T v) { const T old = *p; *p += v; return old; }

struct WarpOperands { u32 w[32][6]; };
inline WarpOperands gather(u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    WarpOperands out;
    const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
    for (int i = 0; i < 6; i += 2) {
        block_now->values[thread_now] = mine[i] | u64(mine[i + 1]) << 32;
        meet(warp_now(), 32);
        for (u32 l = 0; l < 32; l++) {
            const u64 v = block_now->values[thread_now / 32 * 32 + l];
            out.w[l][i] = u32(v), out.w[l][i + 1] = u32(v >> 32);
        }
        meet(warp_now(), 32);
    }
    return out;
}
template <bool SIGNED_A>
inline void mma_8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, bool first) {
    const WarpOperands o = gather(a0, a1, a2, a3, b0, b1);
    const int g = lane_now() / 4, t = lane_now() % 4;
    for (int i = 0; i < 4; i++) {
        const int row = g + (i / 2) * 8, column = 2 * t + i % 2;
        int sum = first ? 0 : c[i];
        for (int k = 0; k < 32; k++) {
            const u32 aw = o.w[row % 8 * 4 + k % 16 / 4][(k / 16) * 2 + row / 8], bw = o.w[column * 4 + k % 16 / 4][4 + k / 16];
            const u32 ab = aw >> (k % 4 * 8) & 255, bb = bw >> (k % 4 * 8) & 255;
            sum += (SIGNED_A ? int(int8_t(ab)) : int(ab)) * int(int8_t(bb));
        }
        c[i] = sum;
    }
}
inline void mma_u8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, bool first) { mma_8<false>(c, a0, a1, a2, a3, b0, b1, first); }
inline void mma_s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, bool first) { mma_8<true>(c, a0, a1, a2, a3, b0, b1, first); }
template <class F>
inline void mma_16(float& c0, float& c1, float& c2, float& c3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, F value) {
    const WarpOperands o = gather(a0, a1, a2, a3, b0, b1);
    const int g = lane_now() / 4, t = lane_now() % 4;
    float* const c[4] = {&c0, &c1, &c2, &c3};
    for (int i = 0; i < 4; i++) {
        const int row = g + (i / 2) * 8, column = 2 * t + i % 2;
        float sum = *c[i];
        for (int k = 0; k < 16; k++) {
            const u32 aw = o.w[row % 8 * 4 + k % 8 / 2][(k / 8) * 2 + row / 8], bw = o.w[column * 4 + k % 8 / 2][4 + k / 8];
            sum += value(u16(aw >> k % 2 * 16)) * value(u16(bw >> k % 2 * 16));
        }
        *c[i] = sum;
    }
}
inline void mma_bf16(float& c0, float& c1, float& c2, float& c3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_16(c0, c1, c2, c3, a0, a1, a2, a3, b0, b1, [](u16 bits) { return __uint_as_float(u32(bits) << 16); });
}
inline void mma_f16(float& c0, float& c1, float& c2, float& c3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_16(c0, c1, c2, c3, a0, a1, a2, a3, b0, b1, [](u16 bits) { return from_half(bits); });
}

// ---- shared memory: an address is an offset into the block's

inline u32 shared_address(const void* p) { return u32(static_cast<const u8*>(p) - block_now->shared); }
inline u8* dynamic_shared_memory() { return block_now->shared; }
inline u8* kept_in_register(u8* shared) { return shared; }
inline uint4 load_matrices(u32 row) {
    block_now->values[thread_now] = row;
    meet(warp_now(), 32);
    u32 out[4];
    for (int m = 0; m < 4; m++)
        std::memcpy(&out[m], block_now->shared + block_now->values[thread_now / 32 * 32 + m * 8 + lane_now() / 4] + lane_now() % 4 * 4, 4);
    meet(warp_now(), 32);
    return {out[0], out[1], out[2], out[3]};
}

// Pairs of blocks: an address there is a pointer, and a word arrives at once.
inline void sync_cluster() { meet(blocks[block_index_now / 2 * 2].cluster, 2 * THREADS_IN_BLOCK); }
inline u32* address_in(int rank, const u32* p) {
    Block& there = blocks[block_index_now / 2 * 2 + rank];
    return reinterpret_cast<u32*>(there.shared + (reinterpret_cast<const u8*>(p) - block_now->shared));
}
inline void store_words2_there(u32* p, uint2 v) { progress++; p[0] = v.x, p[1] = v.y; }
inline uint2 load_words2_here(const u32* p) { yield(); return {p[0], p[1]}; }

// An mbarrier: | parity of the phase : 1 | expected : 15 | missing arrivals : 16 | missing bytes : 32 |
struct EmulatedBarrier { u32 parity : 1, expected : 15, missing : 16; int bytes; };
static_assert(sizeof(EmulatedBarrier) == 8);
inline void settle(EmulatedBarrier& b) {
    progress++;
    if (b.missing == 0 && b.bytes == 0) b.parity ^= 1, b.missing = b.expected;
}
inline void barrier_init(u64* p, u32 arrivals) { *reinterpret_cast<EmulatedBarrier*>(p) = {0, arrivals, arrivals, 0}; }
inline void barrier_arrive_many(u64* p, u32 arrivals) {
    EmulatedBarrier& b = *reinterpret_cast<EmulatedBarrier*>(p);
    if (arrivals > b.missing) {  // a GPU ends the launch with CUDA_ERROR_LAUNCH_FAILED
        std::fprintf(stderr, "too many arrivals at a barrier\n");
        emulated_failure++;
        for (;;) yield();
    }
    b.missing -= arrivals;
    settle(b);
}
inline void barrier_arrive(u64* p) { barrier_arrive_many(p, 1); }
inline bool barrier_passed(u64* p, u32 parity) {
    const bool passed = reinterpret_cast<EmulatedBarrier*>(p)->parity != (parity & 1);
    if (!passed) yield();
    return passed;
}
inline void barriers_are_initialised() {}
constexpr int COPY_ARRIVALS = 1;

// Copies under way. As on a GPU they end in any order, where fibers take turns by a seed (else at once): a late one when
// nothing else can go on, or after LATE turns of warps (those that poll never stand still).
struct Copy { u8* target; const u8* source; u32 bytes; EmulatedBarrier* barrier; u64 due; };
constexpr u64 LATE = 20000;
inline u64 turns;
inline std::vector<Copy> copies;
inline u64 random_bits() { return (random_state = random_state * 6364136223846793005ull + 1442695040888963407ull) >> 32; }
inline void end_copy(size_t i) {
    const Copy c = copies[i];
    copies[i] = copies.back();
    copies.pop_back();
    std::memcpy(c.target, c.source, c.bytes);
    c.barrier->bytes -= int(c.bytes);
    settle(*c.barrier);
}
inline void copy_to_shared(u8* target, const u8* source, u32 bytes, u64* barrier) {
    if (lane_now() == 0) {
        if (bytes % 16 || (target - block_now->shared) % 16 || reinterpret_cast<uintptr_t>(source) % 16) {
            std::fprintf(stderr, "a bulk copy is not aligned to 16 bytes\n");
            std::abort();
        }
        EmulatedBarrier* const b = reinterpret_cast<EmulatedBarrier*>(barrier);
        std::memset(target, 0xff, bytes);  // whoever reads before the end sees NaN
        b->bytes += int(bytes);
        copies.push_back({target, source, bytes, b, turns + (random_state && random_bits() % 4 == 0 ? LATE : 0)});
        barrier_arrive(barrier);
        if (!random_state) end_copy(copies.size() - 1);
    }
    __syncwarp();
}
inline void fence_for_copies() {}
inline void prefetch_to_l2(const u8*, u32) {}
template <int N> inline void give_registers() {}
template <int N> inline void take_registers() {}
inline void __syncthreads() { meet(block_now->named, THREADS_IN_BLOCK); }

// ---- memory of other SMs; a load that may be polled lets the others run

inline u32 load_word(const u32* p) { yield(); return *p; }
inline uint2 load_words2(const u32* p) { yield(); return {p[0], p[1]}; }
inline uint4 load_words4(const u32* p) { yield(); return {p[0], p[1], p[2], p[3]}; }
inline u64 load_word64(const u64* p) { yield(); return *p; }
inline void store_word(u32* p, u32 v) { progress++; *p = v; }
inline void store_words2(u32* p, uint2 v) { progress++; p[0] = v.x, p[1] = v.y; }
inline void store_words4(u32* p, uint4 v) { progress++; p[0] = v.x, p[1] = v.y, p[2] = v.z, p[3] = v.w; }
inline void store_word64(u64* p, u64 v) { progress++; *p = v; }
inline void store_for_host(void* p, u32 a, u32 b, u32 c, u32 d) {
    u32* const w = static_cast<u32*>(p);
    w[0] = a, w[1] = b, w[2] = c, w[3] = d;
}
inline u64 rounds;
inline u64 nanoseconds() { return 1 + rounds; }
inline u32* stalled_report;
inline u32 gave_up;
inline void give_up(int where) {
    if (lane_now() == 0) std::fprintf(stderr, "block %u warp %u gives up wait %d\n", blockIdx.x, thread_now / 32, where);
    emulated_failure++;
    for (;;) yield();
}

inline void nothing_follows() {}

// ---- launch

inline void (*entry)();
inline void fiber_body() {
    entry();
    progress++;
    block_now->fibers[thread_now].done = true;
    yield();
}

// Runs `grid` blocks; order: seed of the order in which fibers take turns (0: round robin). Returns 0, or 1 on deadlock.
inline int run_grid(u32 grid, u32 threads, size_t shared_bytes, u64 order, void (*kernel)()) {
    entry = kernel;
    random_state = order;
    blocks.clear();
    blocks.resize(grid);
    std::vector<std::unique_ptr<u8[]>> memory;
    for (Block& block : blocks) {
        block.fibers.resize(threads);
        block.warps.resize(threads / 32);
        block.values.resize(threads);
        memory.emplace_back(new u8[shared_bytes + 128]);
        std::memset(memory.back().get(), 0xff, shared_bytes + 128);  // NaN: what is read before it is written shows
        block.shared = reinterpret_cast<u8*>((reinterpret_cast<uintptr_t>(memory.back().get()) + 127) & ~uintptr_t(127));
    }
    copies.clear();
    u64 seen = 0, seen_steps = 0;
    for (int idle = 0, alone = 0; idle < 1000;) {
        bool left = false;
        for (u32 i = 0; i < grid * threads; i++) {
            u32 pick = i;
            if (order) {  // whole warps take turns at random; inside a warp the order does not matter
                const u64 bits = random_bits();
                turns += i % 32 == 0;
                if (i % 32 == 0 && !copies.empty() && bits % 8 == 0) {
                    const size_t copy = random_bits() % copies.size();
                    if (copies[copy].due <= turns || idle > 2) end_copy(copy);
                }
                if (i % 32 == 0 && random_bits() >> 30 == 0) {
                    left |= !blocks[pick / threads].fibers[pick % threads].done;
                    i += 31;
                    continue;
                }
            }
            Block& block = blocks[pick / threads];
            Fiber& fiber = block.fibers[pick % threads];
            if (fiber.done) continue;
            left = true;
            block_now = &block;
            thread_now = pick % threads;
            threadIdx.x = thread_now;
            blockIdx.x = block_index_now = pick / threads;
            if (_setjmp(scheduler)) continue;
            if (fiber.entered) _longjmp(fiber.resume, 1);
            fiber.entered = true;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = Fiber::STACK_BYTES;
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, fiber_body, 0);
            setcontext(&fiber.context);
        }
        if (!left) return 0;
        alone = progress == seen ? alone + 1 : 0;
        idle = alone && steps == seen_steps ? idle + 1 : 0;
        rounds += idle > 300 || alone > LONG;
        seen = progress, seen_steps = steps;
    }
    for (u32 b = 0; b < grid; b++) {
        u32 done = 0;
        for (Fiber& f : blocks[b].fibers) done += f.done;
        std::fprintf(stderr, "block %u: %u threads ended, %u at the barrier; warps meeting:", b, done, blocks[b].named.arrived);
        for (Meeting& m : blocks[b].warps) std::fprintf(stderr, " %u", m.arrived);
        std::fprintf(stderr, "\n");
    }
    return 1;
}
