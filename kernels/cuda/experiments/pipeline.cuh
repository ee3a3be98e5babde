// A pipeline of bulk copies: one warp fills stages in shared memory, the other warps empty them.
//
//     full[i]    completes when the copies of the item in slot i have arrived
//     empty[i]   completes when every warp that reads it has let go of it
//
// Item n lies in slot n % stages. Both sides count alike, so nothing else is exchanged. (The megakernel's ring, ring.cuh,
// with the number of stages as an argument.)
#pragma once
#include "../primitives.cuh"

struct Pipeline {
    static constexpr int MOST_STAGES = 16;
    static constexpr int BARRIER_BYTES = 2 * MOST_STAGES * 8;  // 256: slots stay aligned to 128

    u64* full;
    u64* empty;
    u8* slots;
    int stages, slot_bytes, slot = 0;
    u32 parity = 0;

    // memory: BARRIER_BYTES, then the slots.
    __device__ __forceinline__ Pipeline(u8* memory, int stages, int slot_bytes)
        : full(reinterpret_cast<u64*>(memory)), empty(full + MOST_STAGES), slots(memory + BARRIER_BYTES), stages(stages),
          slot_bytes(slot_bytes) {}

    // All threads of the block. copies: of an item; readers: warps that let go of it.
    __device__ __forceinline__ void initialise(int copies, int readers) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < stages; i++) {
                barrier_init(&full[i], copies * COPY_ARRIVALS);
                barrier_init(&empty[i], readers);
            }
            barriers_are_initialised();
        }
        __syncthreads();
    }

    __device__ __forceinline__ u8* data() const { return slots + slot * slot_bytes; }

    __device__ __forceinline__ void advance(int items = 1) {
        slot += items;
        while (slot >= stages) slot -= stages, parity ^= 1;
    }

    // Producer, whole warp: when the slot is free, `copy(target, barrier)` starts the item's copies.
    template <class Copy>
    __device__ __forceinline__ void fill(Copy copy) {
        barrier_wait(&empty[slot], parity ^ 1, WAIT_EMPTY);
        copy(data(), &full[slot]);
        advance();
    }

    // Consumers, every thread: the item of this slot.
    __device__ __forceinline__ const u8* wait() const {
        barrier_wait(&full[slot], parity, WAIT_FULL);
        return data();
    }

    // Consumers, whole warp: it needs this slot no more, and goes `items` on.
    __device__ __forceinline__ void release(int items = 1) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(&empty[slot]);
        advance(items);
    }
};
