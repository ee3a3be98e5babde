// The ring: one warp streams everything an SM will read, in order, through shared memory, and never stops at a hop.
//
//     slot 0        slot 1        ...           slot STAGES - 1
//     |unit|unit|.. |unit|unit|..               |
//
// A stage is up to STAGE_BYTES of whole units (of one phase, or KV blocks). full[slot] completes when its bytes have
// arrived, empty[slot] when every reader has let go of it. Both sides count stages alike, so nothing else is exchanged.
#pragma once
#include "shape.cuh"

#ifdef LANES_ARRIVE
// Each lane says that it has read, not the first one for all: racecheck does not see what orders a warp's lanes.
constexpr int RELEASES = 32;
#else
constexpr int RELEASES = 1;
#endif

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

#ifdef PROFILE
// Where the producer's time goes: waiting for room, waiting for the window, the rest.
struct ProducerClocks {
    enum { ROOM, IN_FLIGHT, ISSUE, FILLED, COUNT };
    long long total[COUNT] = {}, last = clock64();
    __device__ __forceinline__ void stamp(int slot) {
        const long long now = clock64();
        total[slot] += now - last;
        last = now;
    }
    __device__ __forceinline__ void stage() { total[FILLED]++; }
};
#else
struct ProducerClocks {
    enum { ROOM, IN_FLIGHT, ISSUE };
    __device__ __forceinline__ void stamp(int) {}
    __device__ __forceinline__ void stage() {}
};
#endif

struct Producer {
    RingBarriers& barriers;
    u8* slots;
    Cursor next, oldest;  // the stage to fill; the oldest one in flight
    int in_flight = 0, window = LAYER_WINDOW;  // stages
    ProducerClocks clocks;
    const u8* weights_end = nullptr;  // of this SM's stream
    const u8* next_stream = nullptr;  // what is read after it, if that is another one

    __device__ __forceinline__ Producer(RingBarriers& barriers, u8* slots) : barriers(barriers), slots(slots) {}

    // Streams `units` units from `source`; each will be released by `readers` warps.
    template <int UNITS_PER_STAGE, int UNIT_BYTES, bool WEIGHTS>
    __device__ __forceinline__ void stream(const u8* source, int units, int readers) {
        for (int u = 0; u < units; u += UNITS_PER_STAGE) {
            const int n = min(UNITS_PER_STAGE, units - u);
            clocks.stamp(ProducerClocks::ISSUE);
            barrier_wait(&barriers.empty[next.slot], next.parity ^ 1, WAIT_EMPTY);
            clocks.stamp(ProducerClocks::ROOM);
            // A bounded window keeps the queues of the memory system short: hops wait behind them otherwise.
            // What the ring cannot hold beside its phase's first stages is asked for while these are multiplied.
            const int most = WEIGHTS && u >= STAGES * UNITS_PER_STAGE ? larger(window, LATE_WINDOW) : window;
            while (in_flight >= most) drain_one();
            clocks.stamp(ProducerClocks::IN_FLIGHT);
            fill(source + size_t(u) * UNIT_BYTES, n * UNIT_BYTES, (EMPTY_ARRIVALS - n * readers) * RELEASES);
            if constexpr (L2_AHEAD > 0) {
                // Waiting in the L2 cache, they keep the memory busy without keeping hops waiting for the SM's door.
                const u8* const ahead = source + size_t(u) * UNIT_BYTES + L2_AHEAD;
                const bool inside = WEIGHTS ? ahead + n * UNIT_BYTES <= weights_end : L2_AHEAD / UNIT_BYTES + u + n <= units;
                if (threadIdx.x % 32 == 0 && inside) prefetch_to_l2(ahead, n * UNIT_BYTES);
#ifdef DRAFTER
                if (WEIGHTS && threadIdx.x % 32 == 0 && ahead >= weights_end && next_stream)
                    prefetch_to_l2(next_stream + (ahead - weights_end), n * UNIT_BYTES);
#endif
            }
            next.advance(1);
            in_flight++;
            clocks.stage();
        }
    }

    // Asks the L2 cache for the first L2_AHEAD of `bytes` bytes that will be streamed, each lane for a piece.
    __device__ __forceinline__ void ask(const u8* source, int bytes) const {
        constexpr int PIECE = 4096;
        static_assert(L2_AHEAD <= 32 * PIECE, "a warp asks at once");
        const int first = threadIdx.x % 32 * PIECE, end = min(bytes, L2_AHEAD);
        if (first < end) prefetch_to_l2(source + first, min(PIECE, end - first));
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
    if (threadIdx.x % 32 < RELEASES) barrier_arrive(&barriers.empty[slot]);
}
