// y = W x: tiles through the pipeline, multiplied on the integer tensor cores. What the megakernel's ring and inner loop
// are together, without its hops. A stage is one tile, read by one warp, so warps never wait for one another.
//
// stages: a multiple of WARPS, so that a slot is always the same warp's. Else a warp could look at a slot whose item
// before, another warp's, has not arrived (copies end in any order), and take that phase's parity for its own.
//
// Shared memory: the pipeline's barriers and slots, then x and its groups' scales.
#include "pipeline.cuh"
#include "tiles.cuh"

constexpr int WARPS = 8, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemv_ring_tensor(const u8* tiles, const u16* scales, const u8* x, const XGroup* of_x, float* y, int count,
                     int channels, int stages, u32 blocks) {
    const int groups = channels / GROUP, value_bytes = tile_bytes(channels), scale_bytes = TILE_ROWS * groups * 2;
    Pipeline ring(dynamic_shared_memory(), stages, value_bytes + scale_bytes);
    u8* const staged = ring.slots + stages * ring.slot_bytes;
    XGroup* const staged_groups = reinterpret_cast<XGroup*>(staged + 2 * channels);
    for (int i = threadIdx.x; i < channels / 8; i += THREADS)
        reinterpret_cast<uint4*>(staged)[i] = reinterpret_cast<const uint4*>(x)[i];
    for (int i = threadIdx.x; i < groups; i += THREADS) staged_groups[i] = of_x[i];
    ring.initialise(2, 1);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == WARPS) {
        for (int tile = blockIdx.x; tile < count; tile += blocks)
            ring.fill([&](u8* to, u64* barrier) {
                copy_to_shared(to, tiles + u64(tile) * value_bytes, value_bytes, barrier);
                copy_to_shared(to + value_bytes, reinterpret_cast<const u8*>(scales) + u64(tile) * scale_bytes,
                               scale_bytes, barrier);
            });
        return;
    }
    ring.advance(warp);
    for (int tile = blockIdx.x + warp * blocks; tile < count; tile += WARPS * blocks) {
        const u8* const at = ring.wait();
        TileSums sums;
#pragma unroll 2
        for (int group = 0; group < groups; group++)
            add_group<WEIGHTS_AS_ROWS>(sums, at + group * 2 * BLOCK_BYTES,
                                       reinterpret_cast<const u16*>(at + value_bytes), group, groups, staged,
                                       staged_groups[group], lane);
        ring.release(WARPS);
        store_rows<WEIGHTS_AS_ROWS>(sums, lane, [&](int row, float sum) { y[u64(tile) * TILE_ROWS + row] = sum; });
    }
}
