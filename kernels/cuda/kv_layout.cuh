// Where the KV cache keeps one element. Shared by the decode megakernel and by prefill.
#pragma once

// A cache holds, for each layer and KV head, blocks of 16 positions; a block is its keys, then its values, fp16:
//
//     [layer][kv head][block of 16 positions][ keys 16 x HEAD_DIM | values 16 x HEAD_DIM ]
//
// Inside a block, elements lie in the order in which the 32 lanes of a warp load them (16 bytes = 8 elements a lane and
// load) as operands of mma.m16n8k16, so that a load is one conflict-free 512-byte row of shared memory and a block is
// one contiguous bulk copy. With g = lane / 4, t = lane % 4:
//
//     keys:   two halves of 8 positions; load i of a half gives lane (g, t) position g and eight consecutive
//             dimensions. A lane owns HEAD_DIM / 8 dimensions of each rotary half, so pairs (d, d + HEAD_DIM / 2) meet.
//     values: load i gives lane (g, t) dimensions g * HEAD_DIM / 8 + {2i, 2i + 1} of positions 2t, 2t+1, 2t+8, 2t+9.
//
// fp16, not bf16, which takes as many bytes and rounds eight times as coarsely (RESULTS.md says what that cost). What is
// beyond its range is saturated, by whoever writes; NaN stays NaN, so that faults show.
constexpr int KV_BLOCK = 16;  // positions
constexpr float KV_LARGEST = 65504.0f;

template <int DIM>
__device__ __forceinline__ int key_offset(int position, int dim) {  // elements from the block's start
    constexpr int HALF = DIM / 2, OWNED = DIM / 8;
    const int half = dim / HALF, within = dim % HALF, lane_t = within / OWNED, owned = within % OWNED;
    const int load = half * (OWNED / 8) + owned / 8, lane = position % 8 * 4 + lane_t;
    return position / 8 * (8 * DIM) + (load * 32 + lane) * 8 + owned % 8;
}

template <int DIM>
__device__ __forceinline__ int value_offset(int position, int dim) {  // elements from the block's start
    constexpr int OWNED = DIM / 8;
    const int lane = dim / OWNED * 4 + position % 8 / 2, owned = dim % OWNED;
    return KV_BLOCK * DIM + (owned / 2 * 32 + lane) * 8 + owned % 2 * 4 + position / 8 * 2 + position % 2;
}
