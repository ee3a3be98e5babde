// y = W x on the integer tensor cores with plain loads, the two operands either way round: same bytes, same x.
#include "tiles.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;  // of one tile: four warps share its groups of channels

template <Layout LAYOUT>
__device__ __forceinline__ void gemv(const u8* tiles, const u16* scales, const u8* x, const XGroup* of_x, float* y,
                                     int channels) {
    float* const parts = reinterpret_cast<float*>(dynamic_shared_memory());  // [WARPS][TILE_ROWS]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, groups = channels / GROUP;
    const u8* const tile = tiles + size_t(blockIdx.x) * tile_bytes(channels);
    scales += size_t(blockIdx.x) * TILE_ROWS * groups;
    TileSums sums;
#pragma unroll 4
    for (int group = warp; group < groups; group += WARPS)
        add_group<LAYOUT>(sums, tile + group * 2 * BLOCK_BYTES, scales, group, groups, x, of_x[group], lane);
    store_rows<LAYOUT>(sums, lane, [&](int row, float sum) { parts[warp * TILE_ROWS + row] = sum; });
    __syncthreads();
    if (threadIdx.x < TILE_ROWS) {
        float sum = 0.0f;
        for (int i = 0; i < WARPS; i++) sum += parts[i * TILE_ROWS + threadIdx.x];
        y[blockIdx.x * TILE_ROWS + threadIdx.x] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    tensor_weights_as_rows(const u8* tiles, const u16* scales, const u8* x, const XGroup* of_x, float* y, int channels) {
    gemv<WEIGHTS_AS_ROWS>(tiles, scales, x, of_x, y, channels);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    tensor_x_as_rows(const u8* tiles, const u16* scales, const u8* x, const XGroup* of_x, float* y, int channels) {
    gemv<X_AS_ROWS>(tiles, scales, x, of_x, y, channels);
}
