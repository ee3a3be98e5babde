// A stack of gated MLPs in one persistent kernel: hidden += down(silu(gate hidden) * (up hidden)), layer after layer,
// with two grid barriers each. A producer warp streams the weights; with `across`, it does not stop at the barriers, so
// that the next weights are already in shared memory when the barrier opens. Without it, it stops as a kernel boundary
// would.
//
// Shared memory: the pipeline, x (the larger of hidden and inner, in whole chunks), two buffers of partial sums.
#include "grid_sync.cuh"
#include "int4.cuh"
#include "pipeline.cuh"

constexpr int WARPS = 8, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
constexpr int PAIRS = 8;      // rows of gate and of up in a stage: one of each a warp
constexpr int DOWN_ROWS = 4;  // rows of down in a stage: all warps share each row, a part of the channels each
constexpr int COPIES = 4;     // that fill a stage, in both phases
constexpr int CHUNK = LaneX<4>::CHUNK;

// weights: of each layer gate, up, down, [rows][channels / 8] each, and their scales in the same order.
struct Stack {
    const u32* words;
    const u16* scales;
    const float* input;  // [hidden], of layer 0
    float* hidden;       // [2][hidden]: layer l writes half l % 2, the next one reads it
    float* inner;        // [inner]
    u32* arrived;        // zero at the launch
    int layers, hidden_size, inner_size, stages;
    u32 blocks;
    int across;

    __device__ __forceinline__ u64 matrix() const { return u64(hidden_size) * inner_size; }
    __device__ __forceinline__ const u32* words_of(int layer, int which) const {
        return words + (u64(layer) * 3 + which) * (matrix() / 8);
    }
    __device__ __forceinline__ const u16* scales_of(int layer, int which) const {
        return scales + (u64(layer) * 3 + which) * (matrix() / GROUP);
    }
};

// `count` rows of a matrix from `row` on, words then scales, as two of a stage's copies. Returns the end of the words.
__device__ __forceinline__ void copy_rows(u8* words_to, u8* scales_to, const u32* words, const u16* scales, int channels,
                                          int row, int count, u64* barrier) {
    copy_to_shared(words_to, reinterpret_cast<const u8*>(words + u64(row) * (channels / 8)), count * channels / 2,
                   barrier);
    copy_to_shared(scales_to, reinterpret_cast<const u8*>(scales + u64(row) * (channels / GROUP)),
                   count * (channels / GROUP) * 2, barrier);
}

__device__ __forceinline__ void produce(const Stack& s, Pipeline& ring) {
    u32 barriers = 0;
    const int lane = threadIdx.x % 32, h = s.hidden_size, n = s.inner_size;
    const auto stop = [&] {
        barriers++;
        if (s.across) return;
        if (lane == 0) wait_for(s.arrived, barriers * s.blocks);
        __syncwarp();
    };
    for (int layer = 0; layer < s.layers; layer++) {
        for (int row = blockIdx.x * PAIRS; row < n; row += s.blocks * PAIRS)
            ring.fill([&](u8* to, u64* barrier) {  // gate words, up words, gate scales, up scales
                u8* const scales = to + 2 * PAIRS * h / 2;
                for (int which = 0; which < 2; which++)
                    copy_rows(to + which * (PAIRS * h / 2), scales + which * (PAIRS * (h / GROUP) * 2),
                              s.words_of(layer, which), s.scales_of(layer, which), h, row, PAIRS, barrier);
            });
        stop();
        for (int row = blockIdx.x * DOWN_ROWS; row < h; row += s.blocks * DOWN_ROWS)
            ring.fill([&](u8* to, u64* barrier) {  // in two halves, so that this stage is four copies, too
                constexpr int HALF = DOWN_ROWS / 2;
                u8* const scales = to + DOWN_ROWS * n / 2;
                for (int half = 0; half < 2; half++)
                    copy_rows(to + half * (HALF * n / 2), scales + half * (HALF * (n / GROUP) * 2), s.words_of(layer, 2),
                              s.scales_of(layer, 2), n, row + half * HALF, HALF, barrier);
            });
        stop();
    }
}

// What other blocks stored before the last barrier, into shared memory.
__device__ __forceinline__ void receive(float* x, const float* from, int channels) {
    for (int k = threadIdx.x * 4; k < channels; k += CONSUMERS * 4)
        *reinterpret_cast<uint4*>(x + LaneX<4>::place(k)) = load_words4(reinterpret_cast<const u32*>(from + k));
    sync_threads<CONSUMERS>();
}

__device__ __forceinline__ void grid_barrier(const Stack& s, u32 number) {
    sync_threads<CONSUMERS>();
    if (threadIdx.x == 0) {
        add_release(s.arrived, 1);
        wait_for(s.arrived, number * s.blocks);
    }
    sync_threads<CONSUMERS>();
}

__device__ __forceinline__ void multiply_gate_up(const Stack& s, Pipeline& ring, const float* x) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, h = s.hidden_size;
    for (int row = blockIdx.x * PAIRS; row < s.inner_size; row += s.blocks * PAIRS) {
        const u8* const at = ring.wait();
        float sums[2] = {};
        dot_rows<MAGIC, 4, 2>(sums, reinterpret_cast<const u32*>(at) + warp * (h / 8),
                              reinterpret_cast<const u16*>(at + 2 * PAIRS * h / 2) + warp * (h / GROUP), h, 0, h, x,
                              nullptr, lane, PAIRS);
        ring.release();
        const float gate = warp_sum(sums[0]), up = warp_sum(sums[1]);
        if (lane == 0) s.inner[row + warp] = gate / (1.0f + __expf(-gate)) * up;
    }
}

// parts: two buffers [WARPS][DOWN_ROWS], so that one synchronisation a stage is enough.
__device__ __forceinline__ void multiply_down(const Stack& s, Pipeline& ring, const float* x, float* parts,
                                              const float* hidden, float* next) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = s.inner_size;
    const int chunks = (n + CHUNK - 1) / CHUNK;
    const int first = chunks * warp / WARPS * CHUNK, last = min(n, chunks * (warp + 1) / WARPS * CHUNK);
    for (int row = blockIdx.x * DOWN_ROWS, turn = 0; row < s.hidden_size; row += s.blocks * DOWN_ROWS, turn ^= 1) {
        const u8* const at = ring.wait();
        float sums[DOWN_ROWS] = {};
        dot_rows<MAGIC, 4, DOWN_ROWS>(sums, reinterpret_cast<const u32*>(at),
                                      reinterpret_cast<const u16*>(at + DOWN_ROWS * n / 2), n, first, last, x, nullptr,
                                      lane);
        ring.release();
        float* const mine = parts + turn * WARPS * DOWN_ROWS;
#pragma unroll
        for (int r = 0; r < DOWN_ROWS; r++) {
            const float sum = warp_sum(sums[r]);
            if (lane == 0) mine[warp * DOWN_ROWS + r] = sum;
        }
        sync_threads<CONSUMERS>();
        if (threadIdx.x < DOWN_ROWS) {
            float sum = __uint_as_float(load_word(reinterpret_cast<const u32*>(hidden) + row + threadIdx.x));
            for (int w = 0; w < WARPS; w++) sum += mine[w * DOWN_ROWS + threadIdx.x];
            next[row + threadIdx.x] = sum;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mlp_stack(const __grid_constant__ Stack s) {
    const int slot_bytes = max(2 * PAIRS * (s.hidden_size / 2 + s.hidden_size / GROUP * 2),
                               DOWN_ROWS * (s.inner_size / 2 + s.inner_size / GROUP * 2));
    Pipeline ring(dynamic_shared_memory(), s.stages, slot_bytes);
    float* const x = reinterpret_cast<float*>(ring.slots + s.stages * slot_bytes);
    float* const parts = x + (max(s.hidden_size, s.inner_size) + CHUNK - 1) / CHUNK * CHUNK;
    ring.initialise(COPIES, WARPS);
    if (threadIdx.x >= CONSUMERS) return produce(s, ring);
    for (int layer = 0; layer < s.layers; layer++) {
        float* const next = s.hidden + layer % 2 * s.hidden_size;
        const float* const hidden = layer ? s.hidden + (layer + 1) % 2 * s.hidden_size : s.input;
        receive(x, hidden, s.hidden_size);
        multiply_gate_up(s, ring, x);
        grid_barrier(s, 2 * layer + 1);
        receive(x, s.inner, s.inner_size);
        multiply_down(s, ring, x, parts, hidden, next);
        grid_barrier(s, 2 * layer + 2);
    }
}
