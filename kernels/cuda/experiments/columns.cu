// y = W x with the weights of one channel side by side, so that a channel whose x is zero need not be read at all.
//
//     words   [channels][rows / 8]        eight consecutive rows a word, the first in the lowest nibble
//     scales  [channels / 128][rows]      fp16
//
// A block takes 256 rows (one word a lane) and every `splits`-th group of channels; its warps share out a group's 128
// channels, 16 each. Each warp first lists its channels that count, then loads eight of them at a time: a branch for
// each channel would wait for one load after the other.
#include "int4.cuh"
#include "last_block.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int BLOCK_ROWS = 32 * 8;
constexpr int WARP_CHANNELS = GROUP / WARPS;  // of a group
constexpr int IN_FLIGHT = 8;
static_assert(WARP_CHANNELS <= 32, "one ballot finds what a warp has to read of a group");

struct Columns {
    const u32* words;
    const u16* scales;
    int rows, channels;
};

// sums[i] += (nibble i - 8) * x of the warp's channels from `first` on; `list` is the warp's, for channels that count.
__device__ __forceinline__ void add_channels(float (&sums)[8], const Columns& w, const float* x, int first, int word,
                                             int* list, int lane) {
    const bool counts = lane < WARP_CHANNELS && x[first + lane] != 0.0f;
    const u32 all = __ballot_sync(ALL_LANES, counts);
    if (counts) list[__popc(all & ((1u << lane) - 1))] = first + lane;
    __syncwarp();
    const int n = __popc(all);
    for (int i = 0; i < n; i += IN_FLIGHT) {
        u32 q[IN_FLIGHT];
        float v[IN_FLIGHT];
#pragma unroll
        for (int j = 0; j < IN_FLIGHT; j++) {
            const int k = list[min(i + j, n - 1)];
            q[j] = w.words[size_t(k) * (w.rows / 8) + word];
            v[j] = i + j < n ? x[k] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < IN_FLIGHT; j++)
#pragma unroll
            for (int r = 0; r < 8; r++) sums[r] += float(int(q[j] >> (4 * r) & 15) - ZERO) * v[j];
    }
    __syncwarp();  // before the next group's list
}

// Block b * splits + s: rows from 256 * b on, groups s, s + splits, ... parts [splits][rows]; tickets [rows / 256], zero
// before and after.
extern "C" __global__ void __launch_bounds__(THREADS)
    gemv_columns(Columns w, const float* x, float* y, float* parts, u32* tickets, int splits) {
    float* const by_warp = reinterpret_cast<float*>(dynamic_shared_memory());  // [WARPS][BLOCK_ROWS]
    int* const lists = reinterpret_cast<int*>(by_warp + WARPS * BLOCK_ROWS);   // [WARPS][WARP_CHANNELS]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int batch = blockIdx.x / splits, split = blockIdx.x % splits;
    const int word = batch * 32 + lane, row = batch * BLOCK_ROWS;
    float total[8] = {};
    for (int group = split; group < w.channels / GROUP; group += splits) {
        const int first = group * GROUP + warp * WARP_CHANNELS;
        float sums[8] = {};
        add_channels(sums, w, x, first, word, lists + warp * WARP_CHANNELS, lane);
        const uint4 scales = *reinterpret_cast<const uint4*>(w.scales + size_t(group) * w.rows + word * 8);
        const u32 pairs[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
        for (int r = 0; r < 8; r++) total[r] += from_half(u16(pairs[r / 2] >> (r % 2 * 16))) * sums[r];
    }
#pragma unroll
    for (int r = 0; r < 8; r++) by_warp[warp * BLOCK_ROWS + lane * 8 + r] = total[r];
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < WARPS; i++) sum += by_warp[i * BLOCK_ROWS + threadIdx.x];
    parts[size_t(split) * w.rows + row + threadIdx.x] = sum;
    add_parts(y, parts, w.rows, splits, row, row + BLOCK_ROWS, &tickets[batch], THREADS);
}
