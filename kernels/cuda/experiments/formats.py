"""Random bytes as int4 weights, read three ways; activations as the integer tensor cores want them. Numpy only.

The layouts are drawn in int4.cuh, columns.cu and tiles.cuh. Any bytes are valid weights in each of them, so one random
buffer serves every experiment.
"""

from __future__ import annotations

import numpy as np

GROUP = 128  # channels that share a scale
TILE_ROWS = 16
BLOCK_CHANNELS = 64
FIXED_POINT = 32512  # 127 * 256: the high byte stays within 8 bits after rounding


def matrix_bytes(rows: int, channels: int) -> int:
    return rows * channels // 2


def scale_count(rows: int, channels: int) -> int:
    return rows * channels // GROUP


def from_rows(words: np.ndarray, scales: np.ndarray, rows: int, channels: int) -> np.ndarray:
    """float32 [rows, channels] of uint32 [rows][channels / 8] and float16 [rows][channels / 128]."""
    return (_nibbles(words).reshape(rows, channels) - 8) * _by_row(scales, rows, channels)


def from_columns(words: np.ndarray, scales: np.ndarray, rows: int, channels: int) -> np.ndarray:
    """float32 [rows, channels] of uint32 [channels][rows / 8] and float16 [channels / 128][rows]."""
    scale = np.repeat(scales.reshape(channels // GROUP, rows).astype(np.float32), GROUP, axis=0)
    return ((_nibbles(words).reshape(channels, rows) - 8) * scale).T


def from_tiles(words: np.ndarray, scales: np.ndarray, rows: int, channels: int) -> np.ndarray:
    """float32 [rows, channels] of tiles of 16 rows; scales as in from_rows."""
    # [tile, block, g, t, half, i]: byte 8 * half + i of lane 4 * g + t
    lanes = words.view(np.uint8).reshape(rows // TILE_ROWS, channels // BLOCK_CHANNELS, 8, 4, 2, 8)
    pairs = np.stack([lanes & 15, lanes >> 4])  # row g, row g + 8
    # -> [tile, pair, g, block, half, t, i], since a channel is 64 * block + 32 * half + 8 * t + i
    q = pairs.transpose(1, 0, 3, 2, 5, 4, 6).reshape(rows, channels).astype(np.float32)
    return (q - 8) * _by_row(scales, rows, channels)


def quantise_x(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 [blocks, 2, 64], the high and low parts of x in 16 bits, and the groups as 8 bytes {float32, int32} each."""
    groups = x.reshape(-1, GROUP)
    scale = (np.maximum(np.abs(groups).max(axis=1), 1e-30) / FIXED_POINT).astype(np.float32)
    fixed = np.rint(groups / scale[:, None]).astype(np.int32)
    high = (fixed + 128) >> 8
    parts = np.stack([high, fixed - 256 * high]).astype(np.int8)  # [2, groups, 128]
    blocks = parts.reshape(2, -1, BLOCK_CHANNELS).transpose(1, 0, 2)
    of_x = np.empty((len(scale), 2), np.int32)
    of_x[:, 0], of_x[:, 1] = scale.view(np.int32), -8 * fixed.sum(axis=1)
    return np.ascontiguousarray(blocks), of_x


def _nibbles(words: np.ndarray) -> np.ndarray:
    """float32: the eight nibbles of each word, lowest first."""
    low_high = words.view(np.uint8)[..., None] >> np.array([0, 4], np.uint8)
    return (low_high & 15).astype(np.float32)


def _by_row(scales: np.ndarray, rows: int, channels: int) -> np.ndarray:
    return np.repeat(scales.reshape(rows, channels // GROUP).astype(np.float32), GROUP, axis=1)
