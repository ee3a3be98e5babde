"""GGUF's quantised blocks: repacked into the packed format without touching a value, or dequantised.

Q4_0   18 bytes, 32 weights    |d fp16|16 bytes|            w = (q - 8) d      low nibbles: weights 0..15,
Q4_1   20 bytes, 32 weights    |d fp16|m fp16|16 bytes|     w = q d + m        high nibbles: weights 16..31
Q8_0   34 bytes, 32 weights    |d fp16|32 int8|             w = q d
Q4_K  144 bytes, 256 weights   |d fp16|dmin fp16|12 bytes: 8 x (sc, m), 6 bits each|128 bytes|
                               w = q (d sc) - (dmin m)      each 32 bytes: low nibbles, then high nibbles
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.checkpoint.gguf_file import BLOCKS
from engine.packed.matrix import Matrix, Storage
from engine.packed.quantize import each_chunk

# Types whose codes the packed format holds as they are. Q4_K's products d sc and dmin m are rounded to fp16.
STORAGE = {
    "Q4_0": Storage("int4", 32),
    "Q4_1": Storage("int4", 32, symmetric=False),
    "Q4_K": Storage("int4", 32, symmetric=False),
    "Q8_0": Storage("int8", 32),
    "BF16": Storage("bf16"),
}


def repack(name: str, type_name: str, rows: np.ndarray) -> Matrix:
    """Stored rows, uint8 [n, bytes], of a type in STORAGE -> the same matrix in the packed format."""
    storage = STORAGE[type_name]
    weights, size = BLOCKS[type_name]
    n, k = rows.shape[0], rows.shape[1] // size * weights
    if storage.format == "bf16":
        return Matrix(name, "bf16", n, k, 0, np.ascontiguousarray(rows).view("<u2"), None, None)
    q = np.empty((n, k // 2), np.uint8) if storage.format == "int4" else np.empty((n, k), np.uint8)
    scale = np.empty((n, k // 32), np.float16)
    minimum = None if storage.symmetric else np.empty((n, k // 32), np.float16)

    def work(chunk: slice) -> None:
        blocks = np.ascontiguousarray(rows[chunk]).reshape(-1, size)
        codes, scales, minima = _UNPACK[type_name](blocks)
        q[chunk] = codes.reshape(-1, q.shape[1])
        scale[chunk] = scales.reshape(-1, k // 32)
        if minimum is not None and minima is not None:
            minimum[chunk] = minima.reshape(-1, k // 32)

    each_chunk(n, k, work)
    values = q.view("<i4") if storage.format == "int4" else q.view(np.int8)
    return Matrix(name, storage.format, n, k, 32, values, scale, minimum)


def dequantize_rows(type_name: str, rows: np.ndarray) -> np.ndarray:
    """Stored rows, uint8 [n, bytes], of any type in BLOCKS -> float32 [n, k]."""
    match type_name:
        case "F32":
            return np.ascontiguousarray(rows).view("<f4")
        case "F16":
            return np.ascontiguousarray(rows).view("<f2").astype(np.float32)
    import gguf

    kind = gguf.GGMLQuantizationType[type_name]
    weights, size = BLOCKS[type_name]
    n, k = rows.shape[0], rows.shape[1] // size * weights
    values = np.empty((n, k), np.float32)

    def work(chunk: slice) -> None:
        with np.errstate(all="ignore"):  # corrupt scales overflow; the caller checks that all values are finite
            values[chunk] = gguf.dequantize(rows[chunk], kind)

    each_chunk(n, k, work)
    return values


_Blocks = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # codes uint8 [b, bytes], scales, minima


def _q4_0(blocks: np.ndarray) -> _Blocks:
    return _consecutive(blocks[:, 2:]), _halves(blocks, 0), None


def _q4_1(blocks: np.ndarray) -> _Blocks:
    return _consecutive(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: np.ndarray) -> _Blocks:
    return blocks[:, 2:], _halves(blocks, 0), None


def _q4_k(blocks: np.ndarray) -> _Blocks:
    d, dmin = (_halves(blocks, at).astype(np.float32)[:, None] for at in (0, 2))
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    sc = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    m = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    with np.errstate(over="ignore", invalid="ignore"):  # the caller refuses scales that are not finite
        scales, minima = (d * sc).astype(np.float16), (-dmin * m).astype(np.float16)
    low_then_high = blocks[:, 16:].reshape(-1, 4, 32)
    pairs = np.stack([low_then_high & 15, low_then_high >> 4], axis=2).reshape(-1, 128, 2)
    return pairs[:, :, 0] | (pairs[:, :, 1] << 4), scales, minima


_UNPACK: dict[str, Callable[[np.ndarray], _Blocks]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k}


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The fp16 at byte `at` of every block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")[:, 0]


def _consecutive(pairs: np.ndarray) -> np.ndarray:
    """uint8 [b, 16] holding (w[j], w[j+16]) in byte j -> uint8 [b, 16] holding (w[2j], w[2j+1]); low nibble first."""
    words = np.ascontiguousarray(pairs).view("<u2")  # w[2j], w[2j+16], w[2j+1], w[2j+17]
    out = np.empty(pairs.shape, np.uint8)
    out[:, :8] = (words & 0x0F) | ((words >> 4) & 0xF0)
    out[:, 8:] = ((words >> 4) & 0x0F) | ((words >> 8) & 0xF0)
    return out
