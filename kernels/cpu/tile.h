// How weights lie in memory once loaded: tiles of 16 output rows, streamed front to back exactly once per pass.
//
// A matrix [rows, cols] is cut into tiles of 16 rows (the last one padded with zeros); a tile is a run of groups, one
// per quantisation group of 32, 64 or 128 input channels:
//
//     group = | 16 scales fp16 | 16 minima fp16 (kInt4Min only) | blocks of 32 channels ... |
//
// Blocks interleave the rows so that one SIMD load holds the same four channels of consecutive rows, which is what
// the 8-bit dot-product instructions consume (4 products summed into each 32-bit lane). r is the row, c = 0..3:
//
//     int4  256 bytes   byte 64 j + 4 r + c    low nibble: channel 4 j + c, high nibble: channel 16 + 4 j + c  (j = 0..3)
//     int8  512 bytes   byte 64 j + 4 r + c    channel 4 j + c                                                 (j = 0..7)
//     bf16 1024 bytes   value 32 j + 2 r + c   channel 2 j + c, c = 0..1; no scales                            (j = 0..15)
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace flint {

constexpr int kTileRows = 16;
constexpr int kBlock = 32;  // input channels per block, and per activation scale

enum Format : int {
    kInt4 = 0,     // w = (q - 8) * scale
    kInt4Min = 1,  // w = q * scale + min
    kInt8 = 2,     // w = q * scale
    kBf16 = 3,
    kFormats = 4,
};

constexpr int header_bytes(Format format) {
    return format == kInt4Min ? 4 * kTileRows : format == kBf16 ? 0 : 2 * kTileRows;
}

constexpr int block_bytes(Format format) {
    return (format == kBf16 ? 2 * kBlock : format == kInt8 ? kBlock : kBlock / 2) * kTileRows;
}

// A matrix in tiles. Gate and up lie tile by tile in turn, one stream, hence the stride.
struct Tiles {
    const uint8_t* data = nullptr;
    size_t stride = 0;  // bytes from one tile of this matrix to the next
    int rows = 0;
    int cols = 0;
    Format format = kInt4;
    int group_blocks = 1;  // blocks of 32 channels per quantisation group

    int tiles() const { return (rows + kTileRows - 1) / kTileRows; }
    int blocks() const { return (cols + kBlock - 1) / kBlock; }
    int groups() const { return (blocks() + group_blocks - 1) / group_blocks; }
    size_t tile_bytes() const {
        return static_cast<size_t>(groups()) * (header_bytes(format) + group_blocks * block_bytes(format));
    }
    const uint8_t* tile(int index) const { return data + index * stride; }
};

// A matrix in flint's packed format (engine/packed/model.py), as it arrives.
struct PackedMatrix {
    int32_t format;  // Format
    int32_t rows, cols, group;
    const void* q;
    const uint16_t* scale;
    const uint16_t* minimum;
};

// The shape of `packed` as tiles, still without memory; false if the shape is not one that tiles can hold.
bool plan_tiles(const PackedMatrix& packed, Tiles* out);

// Writes tile `index` of `packed` to `out` (tile_bytes bytes).
void pack_tile(const PackedMatrix& packed, const Tiles& tiles, int index, uint8_t* out);

// out[cols] = row `row`, dequantised: the embedding look-up.
void read_row(const Tiles& tiles, int row, float* out);

}  // namespace flint
