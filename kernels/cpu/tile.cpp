// Packing rows into tiles, and reading a row back out of them.
#include "tile.h"

#include <string.h>

#include "half.h"

namespace flint {

namespace {

// The eight nibbles of `word` as the eight bytes of the result, low nibble first.
uint64_t spread_nibbles(uint32_t word) {
    uint64_t x = word;
    x = (x | x << 16) & 0x0000ffff0000ffffull;
    x = (x | x << 8) & 0x00ff00ff00ff00ffull;
    return (x | x << 4) & 0x0f0f0f0f0f0f0f0full;
}

// One row's 32 channels of an int4 block: words = 4 packed words.
void put_int4(const uint32_t* words, uint8_t* block, int r) {
    const uint64_t first = spread_nibbles(words[0]) | spread_nibbles(words[2]) << 4;
    const uint64_t second = spread_nibbles(words[1]) | spread_nibbles(words[3]) << 4;
    uint8_t bytes[16];
    memcpy(bytes, &first, 8);
    memcpy(bytes + 8, &second, 8);
    for (int j = 0; j < 4; ++j) memcpy(block + 64 * j + 4 * r, bytes + 4 * j, 4);
}

}  // namespace

bool plan_tiles(const PackedMatrix& packed, Tiles* out) {
    if (packed.format < 0 || packed.format >= kFormats || packed.rows <= 0 || packed.cols <= 0) return false;
    out->format = static_cast<Format>(packed.format);
    out->rows = packed.rows;
    out->cols = packed.cols;
    out->group_blocks = 1;
    if (out->format != kBf16) {
        if (packed.group != 32 && packed.group != 64 && packed.group != 128) return false;
        if (packed.cols % packed.group != 0) return false;
        out->group_blocks = packed.group / kBlock;
    }
    out->stride = out->tile_bytes();
    return true;
}

void pack_tile(const PackedMatrix& packed, const Tiles& tiles, int index, uint8_t* out) {
    const Format format = tiles.format;
    const int first_row = index * kTileRows;
    const int rows = tiles.rows - first_row < kTileRows ? tiles.rows - first_row : kTileRows;
    const int groups = tiles.groups();
    const size_t cols = tiles.cols;
    memset(out, 0, tiles.tile_bytes());
    for (int g = 0; g < groups; ++g) {
        if (format != kBf16) {
            for (int r = 0; r < rows; ++r) {
                const size_t at = static_cast<size_t>(first_row + r) * groups + g;
                memcpy(out + 2 * r, packed.scale + at, 2);
                if (format == kInt4Min) memcpy(out + 2 * kTileRows + 2 * r, packed.minimum + at, 2);
            }
        }
        out += header_bytes(format);
        for (int b = 0; b < tiles.group_blocks; ++b, out += block_bytes(format)) {
            const size_t k = static_cast<size_t>(g * tiles.group_blocks + b) * kBlock;
            for (int r = 0; r < rows; ++r) {
                const size_t at = (first_row + r) * cols + k;
                if (format == kInt8) {
                    const uint8_t* row = static_cast<const uint8_t*>(packed.q) + at;
                    for (int j = 0; j < 8; ++j) memcpy(out + 64 * j + 4 * r, row + 4 * j, 4);
                } else if (format == kBf16) {
                    const uint16_t* row = static_cast<const uint16_t*>(packed.q) + at;
                    const int n = cols - k < kBlock ? static_cast<int>(cols - k) : kBlock;
                    for (int i = 0; i < n; ++i) memcpy(out + 64 * (i / 2) + 4 * r + 2 * (i % 2), row + i, 2);
                } else {
                    uint32_t words[4];
                    memcpy(words, static_cast<const uint8_t*>(packed.q) + at / 2, sizeof words);
                    put_int4(words, out, r);
                }
            }
        }
    }
}

void read_row(const Tiles& tiles, int row, float* out) {
    const Format format = tiles.format;
    const int r = row % kTileRows;
    const uint8_t* p = tiles.tile(row / kTileRows);
    for (int g = 0, k = 0; g < tiles.groups(); ++g) {
        float scale = 1.0f, minimum = 0.0f;
        if (format != kBf16) {
            scale = load_half(p + 2 * r);
            minimum = format == kInt4Min ? load_half(p + 2 * kTileRows + 2 * r) : format == kInt4 ? -8.0f * scale : 0.0f;
        }
        p += header_bytes(format);
        for (int b = 0; b < tiles.group_blocks; ++b, p += block_bytes(format)) {
            for (int i = 0; i < kBlock && k < tiles.cols; ++i, ++k) {
                if (format == kBf16) {
                    uint16_t bits;
                    memcpy(&bits, p + 64 * (i / 2) + 4 * r + 2 * (i % 2), 2);
                    out[k] = from_bf16(bits);
                } else if (format == kInt8) {
                    out[k] = static_cast<int8_t>(p[64 * (i / 4) + 4 * r + i % 4]) * scale;
                } else {
                    const uint8_t byte = p[64 * (i % 16 / 4) + 4 * r + i % 4];
                    out[k] = (i < 16 ? byte & 15 : byte >> 4) * scale + minimum;
                }
            }
        }
    }
}

}  // namespace flint
