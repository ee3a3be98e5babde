// One block a multiprocessor streams its share through shared memory: the read alone, and int4 products behind it.
//
// Shared memory: the pipeline's barriers and slots, then x. 256 consumer threads, one producer warp behind them.
#include "int4.cuh"
#include "pipeline.cuh"

constexpr int CONSUMERS = 256, WARPS = CONSUMERS / 32, THREADS = CONSUMERS + 32;

__device__ __forceinline__ bool is_producer() { return threadIdx.x >= CONSUMERS; }

// out += the sum, modulo 2^32, of 16 * count bytes, by plain loads of 16 bytes.
extern "C" __global__ void __launch_bounds__(256) read_plain(const uint4* data, u64 count, u64 threads, u32* out) {
    u32 sum = 0;
    u64 i = u64(blockIdx.x) * 256 + threadIdx.x;
    for (; i + 3 * threads < count; i += 4 * threads) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = data[i + j * threads];
#pragma unroll
        for (int j = 0; j < 4; j++) sum += (v[j].x + v[j].y) + (v[j].z + v[j].w);
    }
    for (; i < count; i += threads) sum += (data[i].x + data[i].y) + (data[i].z + data[i].w);
    sum = __reduce_add_sync(ALL_LANES, sum);
    if (threadIdx.x % 32 == 0) atomicAdd(out, sum);
}

// The same through the pipeline, `item_bytes` a stage.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    read_ring(const u8* data, int items, int item_bytes, int stages, u32 blocks, u32* out) {
    Pipeline ring(dynamic_shared_memory(), stages, item_bytes);
    ring.initialise(1, WARPS);
    if (is_producer()) {
        for (int item = blockIdx.x; item < items; item += blocks)
            ring.fill([&](u8* to, u64* barrier) {
                copy_to_shared(to, data + u64(item) * item_bytes, item_bytes, barrier);
            });
        return;
    }
    u32 sum = 0;
    for (int item = blockIdx.x; item < items; item += blocks) {
        const u8* const at = ring.wait();
        for (int i = threadIdx.x * 16; i < item_bytes; i += CONSUMERS * 16) {
            const uint4 v = *reinterpret_cast<const uint4*>(at + i);
            sum += (v.x + v.y) + (v.z + v.w);
        }
        ring.release();
    }
    sum = __reduce_add_sync(ALL_LANES, sum);
    if (threadIdx.x % 32 == 0) atomicAdd(out, sum);
}

// y = W x: a stage is 16 rows and their scales, a warp takes two of the rows. rows: a multiple of 16.
extern "C" __global__ void __launch_bounds__(THREADS, 1) gemv_ring(const u32* words, const u16* scales, const float* x,
                                                                   float* y, int rows, int channels, int stages,
                                                                   u32 blocks) {
    constexpr int STAGE_ROWS = 16, ROWS = STAGE_ROWS / WARPS;
    const int value_bytes = STAGE_ROWS * channels / 2, scale_bytes = STAGE_ROWS * (channels / GROUP) * 2;
    u8* const memory = dynamic_shared_memory();
    Pipeline ring(memory, stages, value_bytes + scale_bytes);
    float* const staged = reinterpret_cast<float*>(ring.slots + stages * ring.slot_bytes);
    stage_x<4>(staged, x, channels, threadIdx.x, THREADS);
    ring.initialise(2, WARPS);
    if (is_producer()) {
        for (int row = blockIdx.x * STAGE_ROWS; row < rows; row += blocks * STAGE_ROWS)
            ring.fill([&](u8* to, u64* barrier) {
                copy_to_shared(to, reinterpret_cast<const u8*>(words + u64(row) * (channels / 8)), value_bytes,
                               barrier);
                copy_to_shared(to + value_bytes, reinterpret_cast<const u8*>(scales + u64(row) * (channels / GROUP)),
                               scale_bytes, barrier);
            });
        return;
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int row = blockIdx.x * STAGE_ROWS; row < rows; row += blocks * STAGE_ROWS) {
        const u8* const at = ring.wait();
        float sums[ROWS] = {};
        dot_rows<MAGIC, 4, ROWS>(sums, reinterpret_cast<const u32*>(at) + warp * ROWS * (channels / 8),
                                 reinterpret_cast<const u16*>(at + value_bytes) + warp * ROWS * (channels / GROUP),
                                 channels, 0, channels, staged, nullptr, lane);
        ring.release();
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float sum = warp_sum(sums[r]);
            if (lane == 0) y[row + warp * ROWS + r] = sum;
        }
    }
}
