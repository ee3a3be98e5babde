// What it costs until every block knows that all have come: five ways. `number` counts a block's barriers from 1.
//
// Each arrival follows a synchronisation of the block and each opening precedes one, so that all stores of a block before
// a barrier are seen by all threads of every block behind it. words: zero at the launch, one cache line a purpose.
#include "grid_sync.cuh"

constexpr int THREADS = 256;
constexpr int LINE = 32;         // words in a cache line
constexpr int TREE_BLOCKS = 12;  // that share a counter: about the square root of the multiprocessors of large GPUs

// As cooperative groups' grid.sync() does it: block 0 adds what makes the sum reach 2^31, whose bit flips for all.
struct CooperativeGroups {
    static __device__ __forceinline__ void wait(u32* words, u32, u32 blocks) {
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            const u32 old = fetch_add(words, blockIdx.x == 0 ? 0x80000000u - (blocks - 1) : 1);
            Watchdog watchdog;
            while (((old ^ load_acquire(words)) & 0x80000000u) == 0) watchdog.tick(WAIT_GO);
            __threadfence();
        }
        __syncthreads();
    }
};

// One counter that only grows; one thread adds with release semantics and polls with acquire, without fences.
struct Counter {
    static __device__ __forceinline__ void wait(u32* words, u32 number, u32 blocks) {
        __syncthreads();
        if (threadIdx.x == 0) {
            add_release(words, 1);
            wait_for(words, number * blocks);
        }
        __syncthreads();
    }
};

// The same, but every warp polls instead of waiting for one that does.
struct EveryWarpPolls {
    static __device__ __forceinline__ void wait(u32* words, u32 number, u32 blocks) {
        __syncthreads();
        if (threadIdx.x == 0) add_release(words, 1);
        if (threadIdx.x % 32 == 0) wait_for(words, number * blocks);
        __syncwarp();
    }
};

// One word a block, written by it alone; one warp reads all of them.
struct Flags {
    static __device__ __forceinline__ void wait(u32* words, u32 number, u32 blocks) {
        __syncthreads();
        if (threadIdx.x == 0) store_release(&words[blockIdx.x], number);
        if (threadIdx.x < 32)
            for (u32 block = threadIdx.x; block < blocks; block += 32) wait_for(&words[block], number);
        __syncthreads();
    }
};

// Counters of a dozen blocks, and one over those: fewer additions queue at any one. The last to come opens for all.
struct Tree {
    static __device__ __forceinline__ void wait(u32* words, u32 number, u32 blocks) {
        u32* const go = words;
        u32* const root = words + LINE;
        u32* const mine = words + (2 + blockIdx.x / TREE_BLOCKS) * LINE;
        __syncthreads();
        if (threadIdx.x == 0) {
            const u32 groups = (blocks + TREE_BLOCKS - 1) / TREE_BLOCKS;
            const u32 first = blockIdx.x / TREE_BLOCKS * TREE_BLOCKS, size = min(u32(TREE_BLOCKS), blocks - first);
            const bool last_of_group = fetch_add(mine, 1) == number * size - 1;
            if (last_of_group && fetch_add(root, 1) == number * groups - 1)
                store_release(go, number);
            else
                wait_for(go, number);
        }
        __syncthreads();
    }
};

// `count` barriers. With `errors`: every block leaves a word before each, and counts its neighbour's words that it does
// not find behind it; two sets of words, because the neighbour may already be at the next barrier. notes [2][blocks].
template <class Barrier>
__device__ __forceinline__ void run(u32* words, int count, u32 blocks, u32* notes, u32* errors) {
    const u32 neighbour = (blockIdx.x + 1) % blocks;
    for (u32 number = 1; number <= u32(count); number++) {
        if (errors && threadIdx.x == THREADS - 1) store_word(&notes[number % 2 * blocks + blockIdx.x], number);
        Barrier::wait(words, number, blocks);
        if (errors && threadIdx.x == THREADS - 1 && load_word(&notes[number % 2 * blocks + neighbour]) != number)
            atomicAdd(errors, 1u);
    }
}

#define BARRIER_KERNEL(NAME, KIND)                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                   \
        NAME(u32* words, int count, u32 blocks, u32* notes, u32* errors) {                  \
        run<KIND>(words, count, blocks, notes, errors);                                     \
    }

BARRIER_KERNEL(barrier_cooperative_groups, CooperativeGroups)
BARRIER_KERNEL(barrier_counter, Counter)
BARRIER_KERNEL(barrier_every_warp_polls, EveryWarpPolls)
BARRIER_KERNEL(barrier_flags, Flags)
BARRIER_KERNEL(barrier_tree, Tree)
