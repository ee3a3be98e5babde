// The PTX that C++ has no words for: memory barriers in shared memory, bulk copies, tensor-core products, tagged loads.
// All of it is here, so that the tests can put a CPU's versions in its place (tests/kernels/cuda_on_cpu/sm.h).
#pragma once

#ifndef FLINT_EMULATED

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;

constexpr u32 ALL_LANES = 0xffffffffu;

// ---- watchdog: a wait that lasts too long ends the kernel with an error instead of hanging the GPU

#ifndef WATCHDOG_MS
#define WATCHDOG_MS 2000
#endif

__device__ u32* stalled_report;  // mapped host memory: which wait gave up
__device__ u32 gave_up;

__device__ __forceinline__ u64 nanoseconds() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__device__ __noinline__ void give_up(int where) {
    // The first to give up tells most; the others waited for it.
    if (stalled_report && !atomicExch(&gave_up, 1u))
        *reinterpret_cast<volatile u32*>(stalled_report) = u32(where) | (blockIdx.x << 8) | 0x80000000u;
    __threadfence_system();
    __trap();
}

// Behind give_up, and never reached: for ptxas nothing lives on here, so the call costs the waits around it no registers
// (with four columns, smollm2's kernel spilled 72 bytes, Granite-3B's 124; now 4). One column had spilled next to nothing.
__device__ __forceinline__ void nothing_follows() {
#if defined(COLUMNS) && COLUMNS > 1
    asm volatile("exit;");
#endif
}

// ---- shared-memory barriers and copies into shared memory

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ bool barrier_passed(u64* barrier, u32 parity) {
    u32 done;
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
#endif
    return done;
}

// Counts `arrivals` arrivals at once; they must not be the last ones of the phase.
__device__ __forceinline__ void barrier_arrive_many(u64* barrier, u32 arrivals) {
    asm volatile("{\n.reg .b64 s;\nmbarrier.arrive.noComplete.shared.b64 s, [%0], %1;\n}" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}

__device__ __forceinline__ void barriers_are_initialised() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
constexpr int COPY_ARRIVALS = 1;  // the copy engine counts bytes
#else
constexpr int COPY_ARRIVALS = 32;  // each lane's cp.async arrives
#endif

// One warp copies `bytes` (a multiple of 16) from global to shared memory; `barrier` completes COPY_ARRIVALS later.
__device__ __forceinline__ void copy_to_shared(u8* target, const u8* source, u32 bytes, u64* barrier) {
    const int lane = threadIdx.x % 32;
#ifdef NO_COPY  // diagnostic: how long the work takes on bytes that are there
    for (int i = lane; i < COPY_ARRIVALS; i += 32) barrier_arrive(barrier);
#elif __CUDA_ARCH__ >= 900
    constexpr u64 EVICT_FIRST = 0x12F0000000000000ull;  // read once a token: leave the L2 cache to the hops
    if (lane == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
                "r"(shared_address(target)),
            "l"(source), "r"(bytes), "r"(shared_address(barrier)), "l"(EVICT_FIRST)
            : "memory");
    }
    __syncwarp();
#else
    for (u32 i = lane * 16; i < bytes; i += 32 * 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target) + i), "l"(source + i)
                     : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// One thread asks for `bytes` (a multiple of 16) to be brought to the L2 cache.
__device__ __forceinline__ void prefetch_to_l2(const u8* source, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
#endif
}

// What other SMs stored, and this thread has seen, may be read by copy_to_shared.
__device__ __forceinline__ void fence_for_copies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

template <int THREADS_IN_BARRIER>
__device__ __forceinline__ void sync_threads() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS_IN_BARRIER) : "memory");
}

// Of several groups of that many threads; group: below 14.
template <int THREADS_IN_GROUP>
__device__ __forceinline__ void sync_some(int group) {
    if constexpr (THREADS_IN_GROUP == 32)
        __syncwarp();
    else
        asm volatile("bar.sync %0, %1;" ::"r"(group + 2), "n"(THREADS_IN_GROUP) : "memory");
}

__device__ __forceinline__ u8* dynamic_shared_memory() {
    extern __shared__ __align__(128) u8 memory[];
    return memory;
}

// The same address, which the compiler now keeps in a register. One that it knows it asks a special register for, wherever
// it is used, often where SMs wait (in the megakernel twenty times a layer). It still sees that this is shared memory.
__device__ __forceinline__ u8* kept_in_register(u8* shared) {
    u32 address = shared_address(shared);
    asm volatile("" : "+r"(address));
    return static_cast<u8*>(__cvta_shared_to_generic(address));
}

// ---- registers: the producer's warpgroup leaves most of its share to the consumers

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define FLINT_MOVES_REGISTERS 1
#endif

template <int COUNT>
__device__ __forceinline__ void give_registers() {
#ifdef FLINT_MOVES_REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

template <int COUNT>
__device__ __forceinline__ void take_registers() {
#ifdef FLINT_MOVES_REGISTERS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

// ---- shared memory of the other SMs of a cluster

// All threads of all blocks of the cluster.
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Where block `rank` of the cluster has what this one has at p.
__device__ __forceinline__ u32 address_in(int rank, const void* p) {
    u32 there = shared_address(p);
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(there), "r"(rank));
#endif
    return there;
}

__device__ __forceinline__ void store_words2_there(u32 address, uint2 v) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.relaxed.cluster.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
#endif
}

__device__ __forceinline__ uint2 load_words2_here(const u32* p) {
    uint2 v;
    asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared_address(p)) : "memory");
    return v;
}

// ---- memory of other SMs: relaxed loads and stores that never touch the L1 cache

__device__ __forceinline__ uint4 load_words4(const u32* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint2 load_words2(const u32* p) {
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ u32 load_word(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ u64 load_word64(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ void store_word(u32* p, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void store_words2(u32* p, uint2 v) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void store_words4(u32* p, uint4 v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// 16 bytes to the host's memory, in one transaction.
__device__ __forceinline__ void store_for_host(void* p, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ void store_word64(u64* p, u64 v) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// ---- arithmetic

__device__ __forceinline__ float from_half(u16 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
}

__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// Two floats rounded to fp16, `low` in the lower half. Beyond +-65504 they become that, infinity included; NaN stays NaN
// (so the PTX manual says of satfinite). One instruction on sm_80 and later, as without it.
__device__ __forceinline__ u32 to_half2(float low, float high) {
    u32 r;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float2 from_half2(u32 bits) {
    float2 f;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(f.x), "=f"(f.y)
        : "r"(bits));
    return f;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The same value, but unknown to the compiler: what is computed from it is not hoisted out of the layer loop, where it
// would only be spilled.
__device__ __forceinline__ int opaque(int v) {
    asm volatile("" : "+r"(v));
    return v;
}

// c [16 rows x 8 columns] += a [16 x 32] * b [32 x 8]. Lane (g, t) holds a: row g and row g + 8 of k = 4t .. 4t+3, then the
// same of k + 16; b: column g of the same k; c: columns 2t, 2t + 1 of row g, then of row g + 8.
// `first`: c starts from zero instead.
__device__ __forceinline__ void mma_u8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, bool first) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(first ? 0 : c[0]), "r"(first ? 0 : c[1]),
          "r"(first ? 0 : c[2]), "r"(first ? 0 : c[3]));
}

__device__ __forceinline__ void mma_s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, bool first) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(first ? 0 : c[0]), "r"(first ? 0 : c[1]),
          "r"(first ? 0 : c[2]), "r"(first ? 0 : c[3]));
}

__device__ __forceinline__ void mma_bf16(float& c0, float& c1, float& c2, float& c3, u32 a0, u32 a1, u32 a2, u32 a3,
                                         u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_f16(float& c0, float& c1, float& c2, float& c3, u32 a0, u32 a1, u32 a2, u32 a3,
                                        u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8 x 16-byte matrices: lane l names row l % 8 of matrix l / 8 and receives bytes 4 (l % 4) .. of row l / 4 of each.
__device__ __forceinline__ uint4 load_matrices(u32 row) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(row)
                 : "memory");
    return v;
}

#endif  // FLINT_EMULATED

// ---- what follows from them

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float NOTHING = -1e30f;  // a maximum over nothing

enum Wait {
    WAIT_FULL = 1,
    WAIT_EMPTY,
    WAIT_WINDOW,
    WAIT_GO,
    WAIT_HIDDEN,
    WAIT_QKV,
    WAIT_ATTENTION,
    WAIT_TOKEN,
    WAIT_PAIR,
    WAIT_SPLITS
};

struct Watchdog {
    u32 tries = 0;
    u64 since = 0;
    __device__ __forceinline__ void tick(int where) {
        if (++tries & 127) return;
        const u64 now = nanoseconds();
        if (!since) since = now;
        if (now - since > WATCHDOG_MS * 1000000ull) {
            give_up(where);
            nothing_follows();
        }
    }
};

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity, int where) {
    if (barrier_passed(barrier, parity)) return;
    Watchdog watchdog;
    while (!barrier_passed(barrier, parity)) watchdog.tick(where);
}

__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }

// What `rounded` = to_half2(low, high) leaves of both, in fp16 again: together 22 bits, or 2^-25 where that is more.
__device__ __forceinline__ u32 rest_of_half2(u32 rounded, float low, float high) {
    const float2 taken = from_half2(rounded);
    return to_half2(low - taken.x, high - taken.y);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(ALL_LANES, v, o);
    return v;
}

// A float as an integer of the same order (NaN apart), for integer reductions.
__device__ __forceinline__ u32 ordered(float v) {
    const u32 b = __float_as_uint(v);
    return b ^ (u32(int(b) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float from_ordered(u32 o) {
    return __uint_as_float(o ^ ((o & 0x80000000u) ? 0x80000000u : 0xffffffffu));
}

__device__ __forceinline__ float warp_max(float v) { return from_ordered(__reduce_max_sync(ALL_LANES, ordered(v))); }
