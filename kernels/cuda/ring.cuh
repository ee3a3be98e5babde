// The ring: one warp streams everything an SM will read, in order, through shared memory, and never stops at a hop.
//
//     slot 0        slot 1        ...           slot STAGES - 1
//     |unit|unit|.. |unit|unit|..               |
//
// A stage is up to STAGE_BYTES of whole units (of one phase, or KV blocks). full[slot] completes when its bytes have
// arrived, empty[slot] when every reader has let go of it. Both sides count stages alike, so nothing else is exchanged.
#pragma once
#include "shape.cuh"

struct RingBarriers {
    u64 full[STAGES];
    u64 empty[STAGES];
    u64 go;  // completes once a token: the next token may be read
};

// A place in the endless sequence of stages.
struct Cursor {
    int slot = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance(int stages) {
        slot += stages;
        while (slot >= STAGES) {
            slot -= STAGES;
            parity ^= 1;
        }
    }
};

struct Producer {
    RingBarriers& barriers;
    u8* slots;
    Cursor next, oldest;  // the stage to fill; the oldest one in flight
    int in_flight = 0, window = LAYER_WINDOW;

    __device__ __forceinline__ Producer(RingBarriers& barriers, u8* slots) : barriers(barriers), slots(slots) {}

    // Streams `units` units from `source`; each will be released by `readers` warps.
    template <int UNITS_PER_STAGE, int UNIT_BYTES>
    __device__ __forceinline__ void stream(const u8* source, int units, int readers) {
        for (int u = 0; u < units; u += UNITS_PER_STAGE) {
            const int n = min(UNITS_PER_STAGE, units - u);
            barrier_wait(&barriers.empty[next.slot], next.parity ^ 1, WAIT_EMPTY);
            // A bounded window keeps the queues of the memory system short: hops wait behind them otherwise.
            while (in_flight >= window) drain_one();
            fill(source + size_t(u) * UNIT_BYTES, n * UNIT_BYTES, EMPTY_ARRIVALS - n * readers);
            next.advance(1);
            in_flight++;
        }
    }

    __device__ __forceinline__ void drain_one() {
        barrier_wait(&barriers.full[oldest.slot], oldest.parity, WAIT_WINDOW);
        oldest.advance(1);
        in_flight--;
    }

    // A block must not end while copies into its shared memory are under way.
    __device__ __forceinline__ void drain() {
        while (in_flight) drain_one();
    }

   private:
    __device__ __forceinline__ void fill(const u8* source, u32 bytes, u32 absent_readers) {
        if (threadIdx.x % 32 == 0 && absent_readers) barrier_arrive_many(&barriers.empty[next.slot], absent_readers);
        copy_to_shared(slots + next.slot * STAGE_BYTES, source, bytes, &barriers.full[next.slot]);
    }
};

__device__ __forceinline__ void release(RingBarriers& barriers, int slot) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&barriers.empty[slot]);
}
