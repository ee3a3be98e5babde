// Copies a matrix from the packed format (engine/packed/model.py) to the tiles and units of gemv.cuh. Runs once, at load.
//
// A tile's first 8 rows come from `low`, its last 8 from `high`: two halves of one matrix, or gate and up.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;

struct Source {  // one matrix [*, k]; mirrored by loading.py
    const void* q;
    const u16* scale;
    const u16* minimum;
};

struct Retile {  // mirrored by loading.py
    Source low, high;
    int low_row, high_row;  // row of the source that is row 0 (8) of the first tile
    int rows_per_tile;      // of each source
    int rows;               // beyond these the tile is zero
    int k, group;           // group 0: no scales
    int bits;               // 4, 8 or 16
    int chunks, shares;  // pieces of an SM's part of K; SMs that have parts
    int apart;           // each chunk is shared, not the whole of K
    int units, unit_blocks, unit_bytes, reserved;  // units: of one SM's part of one chunk
    u8* target;
    const long long* offset;        // [tiles] of this call, bytes
    const long long* chunk_stride;  // [tiles]
    const long long* share_stride;  // [tiles]
};

__device__ __forceinline__ u32 spread(u32 nibbles) {  // four nibbles to four bytes
    nibbles = (nibbles | nibbles << 8) & 0x00ff00ffu;
    return (nibbles | nibbles << 4) & 0x0f0f0f0fu;
}

// Grid (tiles, units along K), any block size.
extern "C" __global__ void retile(const __grid_constant__ Retile r) {
    const int tile = blockIdx.x, unit = blockIdx.y % r.units, stretch = blockIdx.y / r.units;
    const int chunk = r.apart ? stretch / r.shares : stretch % r.chunks;
    const int share = r.apart ? stretch % r.shares : stretch / r.chunks;
    u8* const out = r.target + r.offset[tile] + chunk * r.chunk_stride[tile] + share * r.share_stride[tile] +
                    (long long)unit * r.unit_bytes;
    const int first_block = blockIdx.y * r.unit_blocks;
    const int block_bytes = r.bits * 128;  // 16 x 64 values
    for (int i = threadIdx.x; i < r.unit_blocks * block_bytes / 4; i += blockDim.x) {
        const int within = i % (block_bytes / 4), half = r.unit_blocks / 2;
        const int piece = within / 128, lane = within % 128 / 4;  // 32 lanes x 4 words
        int block = i / (block_bytes / 4), word = within % 4;
        if (r.bits == 4 && r.unit_blocks % 2 == 0) {  // two blocks share their places, word by word
            const int odd = block / half, second = word % 2;
            block = block % half + second * half, word = word / 2 * 2 + odd;
        }
        const int g = lane / 4, t = lane % 4, base = (first_block + block) * 64;
        const auto row_of = [&](bool high) { return (high ? r.high_row : r.low_row) + tile * r.rows_per_tile + g; };
        u32 value = 0;
        if (r.bits == 4) {
            const int k = base + word / 2 * 32 + t * 8 + word % 2 * 4;
            for (int h = 0; h < 2; h++) {
                const int row = row_of(h);
                if (row >= r.rows) continue;
                const u32 w = static_cast<const u32*>((h ? r.high : r.low).q)[(size_t(row) * r.k + k) / 8];
                value |= spread(w >> (k % 8 * 4) & 0xffff) << (h * 4);
            }
        } else {
            // int8: piece = rows g, rows g + 8; a word is 4 channels. bf16: piece = 2 * (rows) + (half of the block).
            const bool high = r.bits == 8 ? piece : piece / 2;
            const int k = r.bits == 8 ? base + word / 2 * 32 + t * 8 + word % 2 * 4
                                      : base + piece % 2 * 32 + t * 8 + word * 2;
            const int row = row_of(high);
            if (row < r.rows)
                value = *reinterpret_cast<const u32*>(static_cast<const u8*>((high ? r.high : r.low).q) +
                                                      (size_t(row) * r.k + k) * (r.bits / 8));
        }
        reinterpret_cast<u32*>(out)[i] = value;
    }
    if (!r.group) return;
    const int groups = r.unit_blocks * 64 / r.group;
    u16* const scales = reinterpret_cast<u16*>(out + r.unit_blocks * block_bytes);
    for (int i = threadIdx.x; i < groups * 16; i += blockDim.x) {
        const int g = i / (2 * groups), group = i / 2 % groups, h = i % 2;
        const Source& s = h ? r.high : r.low;
        const int row = (h ? r.high_row : r.low_row) + tile * r.rows_per_tile + g;
        const size_t at = size_t(row) * (r.k / r.group) + first_block * 64 / r.group + group;
        scales[i] = row < r.rows ? s.scale[at] : u16(0);
        if (s.minimum) scales[groups * 16 + i] = row < r.rows ? s.minimum[at] : u16(0);
    }
}
