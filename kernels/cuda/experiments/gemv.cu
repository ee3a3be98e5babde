// y = W x with plain loads: what the width of a load, the rows a warp shares x among, and the way from nibble to float
// are worth; K split over blocks; gate and up in one kernel.
#include "int4.cuh"
#include "last_block.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

struct Rows {  // one matrix
    const u32* words;
    const u16* scales;
    int rows, channels;

    __device__ __forceinline__ const u32* row(int r) const { return words + size_t(r) * (channels / 8); }
    __device__ __forceinline__ const u16* scale(int r) const { return scales + size_t(r) * (channels / GROUP); }
};

// Dynamic shared memory: the table (2 KB), then x in whole chunks. A block takes every gridDim.x-th batch of rows, so
// that x is staged once for many rows. rows must be a multiple of ROWS.
template <Dequantise HOW, int WORDS, int ROWS>
__device__ __forceinline__ void gemv(const Rows& w, const float* x, const float* add, float* y) {
    float2* const table = reinterpret_cast<float2*>(dynamic_shared_memory());
    float* const staged = reinterpret_cast<float*>(table + 256);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (HOW == TABLE) fill_table(table, threadIdx.x, THREADS);
    stage_x<WORDS>(staged, x, w.channels, threadIdx.x, THREADS);
    __syncthreads();
    for (int row = (blockIdx.x * WARPS + warp) * ROWS; row < w.rows; row += gridDim.x * WARPS * ROWS) {
        float sums[ROWS] = {};
        dot_rows<HOW, WORDS, ROWS>(sums, w.row(row), w.scale(row), w.channels, 0, w.channels, staged, table, lane);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float sum = warp_sum(sums[r]);
            if (lane == 0) y[row + r] = add ? add[row + r] + sum : sum;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gemv_4_bytes(Rows w, const float* x, const float* add, float* y) {
    gemv<CONVERT, 1, 4>(w, x, add, y);
}

extern "C" __global__ void __launch_bounds__(THREADS) gemv_plain(Rows w, const float* x, const float* add, float* y) {
    gemv<CONVERT, 4, 4>(w, x, add, y);
}

extern "C" __global__ void __launch_bounds__(THREADS) gemv_one_row(Rows w, const float* x, const float* add, float* y) {
    gemv<CONVERT, 4, 1>(w, x, add, y);
}

extern "C" __global__ void __launch_bounds__(THREADS) gemv_magic(Rows w, const float* x, const float* add, float* y) {
    gemv<MAGIC, 4, 4>(w, x, add, y);
}

extern "C" __global__ void __launch_bounds__(THREADS) gemv_table(Rows w, const float* x, const float* add, float* y) {
    gemv<TABLE, 4, 4>(w, x, add, y);
}

// Split K: block b * splits + s multiplies rows of batch b by the s-th part of the channels (whole chunks); the last of
// a batch's blocks to come adds the parts up in their order. parts [splits][rows]; tickets: zero, and zero again after.
extern "C" __global__ void __launch_bounds__(THREADS)
    gemv_split(Rows w, const float* x, float* y, float* parts, u32* tickets, int splits) {
    constexpr int ROWS = 4, CHUNK = LaneX<4>::CHUNK;
    float* const staged = reinterpret_cast<float*>(dynamic_shared_memory()) + 512;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, batch = blockIdx.x / splits;
    const int split = blockIdx.x % splits, chunks = (w.channels + CHUNK - 1) / CHUNK;
    const int first = chunks * split / splits * CHUNK, last = min(w.channels, chunks * (split + 1) / splits * CHUNK);
    stage_x<4>(staged, x + first, last - first, threadIdx.x, THREADS);
    __syncthreads();
    const int row = (batch * WARPS + warp) * ROWS;
    if (row < w.rows) {
        float sums[ROWS] = {};
        // x was staged from `first` on, so its chunks count from there.
        dot_rows<MAGIC, 4, ROWS>(sums, w.row(row), w.scale(row), w.channels, first, last, staged - first, nullptr,
                                 lane);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float sum = warp_sum(sums[r]);
            if (lane == 0) parts[size_t(split) * w.rows + row + r] = sum;
        }
    }
    const int begin = batch * WARPS * ROWS;
    add_parts(y, parts, w.rows, splits, begin, min(w.rows, begin + WARPS * ROWS), &tickets[batch], THREADS);
}

__device__ __forceinline__ float silu(float v) { return v / (1.0f + __expf(-v)); }

extern "C" __global__ void __launch_bounds__(THREADS)
    silu_multiply(const float* gate, const float* up, float* out, int n) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) out[i] = silu(gate[i]) * up[i];
}

// out = silu(gate x) * (up x): both products of a row by the same warp, x staged once.
extern "C" __global__ void __launch_bounds__(THREADS) gate_up(Rows gate, Rows up, const float* x, float* out) {
    constexpr int ROWS = 2;
    float* const staged = reinterpret_cast<float*>(dynamic_shared_memory()) + 512;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    stage_x<4>(staged, x, gate.channels, threadIdx.x, THREADS);
    __syncthreads();
    for (int row = (blockIdx.x * WARPS + warp) * ROWS; row < gate.rows; row += gridDim.x * WARPS * ROWS) {
        float g[ROWS] = {}, u[ROWS] = {};
        const int k = gate.channels;
        dot_rows<MAGIC, 4, ROWS>(g, gate.row(row), gate.scale(row), k, 0, k, staged, nullptr, lane);
        dot_rows<MAGIC, 4, ROWS>(u, up.row(row), up.scale(row), k, 0, k, staged, nullptr, lane);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float a = warp_sum(g[r]), b = warp_sum(u[r]);
            if (lane == 0) out[row + r] = silu(a) * b;
        }
    }
}
