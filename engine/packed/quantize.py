"""Turns float32 weights into the packed format's int4, int8 and bf16, and back.

int4 scales are searched, not taken from the largest weight: every candidate scale gives a rounding of the group, the
best scale for that rounding is least squares in closed form, and the candidate with the least squared error wins
(the scheme of llama.cpp's `make_qx_quants`). The search runs over cache-sized chunks, on all cores.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from engine.errors import CheckpointError
from engine.packed.matrix import GROUPS, Matrix

# Candidate scales are extreme / t, where extreme is the group's weight of largest magnitude, with its sign (so that
# it may use the code -8). On Gaussian weights 8 values are within 0.4 % of the error of 32.
_SYMMETRIC_STEPS = np.linspace(7.4, 9.5, 8, dtype=np.float32)
# Candidate ranges are low * a .. high * b for a, b in these shares, each refined by as many rounds of rounding and
# least squares. Normalised error at group 128: 0.00855; equal shares only, 3 rounds: 0.00872; 9 x 9 shares: 0.00829.
_ASYMMETRIC_SHARES = (0.75, 0.875, 1.0)
_ASYMMETRIC_ROUNDS = 2

_CHUNK_WEIGHTS = 1 << 16  # 256 KiB of float32: small enough to stay in cache, large enough for numpy's overheads
_FP16_MAX = 65504.0
_FP16_TINY = 2.0**-25  # what rounds to 0: half of the smallest subnormal


def quantize_int4(
    w: np.ndarray, group: int, symmetric: bool, importance: np.ndarray | None = None, name: str = ""
) -> Matrix:
    """Int4 with one fp16 scale (and, asymmetric, one fp16 minimum) per `group` input channels.

    w: float32 [n, k], finite. importance: float32 [k], the weight of each input channel's squared error (E[x^2] of
    its activations). Raises CheckpointError when w is not finite or exceeds fp16's range, ValueError for a group that
    is not 32, 64 or 128 or does not divide k.
    """
    n, k = _check(w, group, name)
    channels = None
    if importance is not None:
        channels = np.asarray(importance, dtype=np.float32).reshape(k // group, group).T
    q = np.empty((n, k // 8), dtype=np.int32)
    scale = np.empty((n, k // group), dtype=np.float16)
    minimum = None if symmetric else np.empty((n, k // group), dtype=np.float16)

    def work(rows: slice) -> None:
        # One column per group: sums over a group then run along contiguous memory, twice as fast as along rows.
        groups = np.ascontiguousarray(w[rows].reshape(-1, group).T)
        weight = None if channels is None else np.tile(channels, w[rows].shape[0])
        if minimum is None:
            codes, scales = _symmetric(groups, weight)
        else:
            codes, scales, minima = _asymmetric(groups, weight)
            minimum[rows] = minima.reshape(-1, k // group)
        scale[rows] = scales.reshape(-1, k // group)
        q[rows] = pack_nibbles(np.ascontiguousarray(codes.T).reshape(-1, k))

    each_chunk(n, k, work)
    return Matrix(name, "int4", n, k, group, q, scale, minimum)


def quantize_int8(w: np.ndarray, group: int, name: str = "") -> Matrix:
    """Int8 in -127..127 with one fp16 scale, largest magnitude / 127, per `group` input channels.

    w: float32 [n, k]. Errors as in `quantize_int4`.
    """
    n, k = _check(w, group, name)
    q = np.empty((n, k), dtype=np.int8)
    scale = np.empty((n, k // group), dtype=np.float16)

    def work(rows: slice) -> None:
        blocks = w[rows].reshape(-1, group)
        scales = (np.abs(blocks).max(axis=1) / 127).astype(np.float16)
        codes = blocks * _reciprocal(scales)[:, None]
        np.rint(codes, out=codes)
        np.clip(codes, -127, 127, out=codes)
        q[rows] = codes.reshape(-1, k)
        scale[rows] = scales.reshape(-1, k // group)

    each_chunk(n, k, work)
    return Matrix(name, "int8", n, k, group, q, scale, None)


def quantize_bf16(w: np.ndarray, name: str = "") -> Matrix:
    """The bf16 matrix nearest to w, float32 [n, k]."""
    n, k = w.shape
    matrix = Matrix(name, "bf16", n, k, 0, to_bf16(w), None, None)
    if not matrix.is_finite():
        raise CheckpointError(f"{name or 'matrix'}: contains a value that is not finite, or too large for bf16")
    return matrix


def dequantize(matrix: Matrix) -> np.ndarray:
    """The matrix's values, float32 [n, k]; exactly the formulas of engine/packed/model.py in float32 arithmetic."""
    if matrix.format == "bf16":
        return from_bf16(matrix.q)
    assert matrix.scale is not None
    w = np.empty((matrix.n, matrix.k), dtype=np.float32)

    def work(rows: slice) -> None:
        codes = unpack_nibbles(matrix.q[rows]) if matrix.format == "int4" else matrix.q[rows]
        out = w[rows].reshape(-1, matrix.k // matrix.group, matrix.group)
        codes = codes.reshape(out.shape)
        scale = matrix.scale[rows, :, None].astype(np.float32)  # type: ignore[index]
        if matrix.format == "int4" and matrix.minimum is None:
            np.multiply(codes.view(np.int8) - np.int8(8), scale, out=out)
        else:
            np.multiply(codes, scale, out=out)
        if matrix.minimum is not None:
            out += matrix.minimum[rows, :, None].astype(np.float32)

    each_chunk(matrix.n, matrix.k, work)
    return w


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """uint8 [n, k] of values 0..15 -> int32 [n, k/8], eight consecutive k per word, low nibble first."""
    pairs = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return pairs.view("<i4")


def unpack_nibbles(words: np.ndarray) -> np.ndarray:
    """int32 [n, k/8] -> uint8 [n, k]; the inverse of `pack_nibbles`."""
    pairs = np.ascontiguousarray(words).view(np.uint8)
    codes = np.empty((pairs.shape[0], pairs.shape[1] * 2), dtype=np.uint8)
    np.bitwise_and(pairs, 15, out=codes[:, 0::2])
    np.right_shift(pairs, 4, out=codes[:, 1::2])
    return codes


def to_bf16(w: np.ndarray) -> np.ndarray:
    """float32 -> the nearest bf16 (ties to even) as uint16, same shape. NaN stays NaN."""
    bits = np.ascontiguousarray(w, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(w), np.uint16(0x7FC0), rounded)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """bf16 as uint16 -> float32, exactly; same shape."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _symmetric(w: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Groups float32 [group, b] -> codes uint8 [group, b] in 0..15, scale float16 [b]."""
    high, low = w.max(axis=0), w.min(axis=0)
    extreme = np.where(high >= -low, high, low)
    first_step = -_reciprocal(extreme)
    weighted = w if weight is None else w * weight
    best = np.full_like(extreme, -1.0)
    scale = np.zeros_like(extreme)
    q = np.empty_like(w)
    for t in _SYMMETRIC_STEPS:
        _round(w, first_step * t, -8, 7, q)
        wq = _dot(weighted, q)
        qq = _square(q, weight)
        fit = np.divide(wq, qq, out=np.zeros_like(wq), where=qq > 0)  # least squares; the error falls by fit * wq
        gain = fit * wq
        better = gain > best
        np.copyto(best, gain, where=better)
        np.copyto(scale, fit, where=better)
    half = scale.astype(np.float16)
    _round(w, _reciprocal(half), -8, 7, q)
    q += 8
    return q.astype(np.uint8), half


def _asymmetric(w: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups float32 [group, b] -> codes uint8 [group, b] in 0..15, scale float16 [b], minimum float16 [b]."""
    high, low = w.max(axis=0), w.min(axis=0)
    center = (high + low) / 2
    v = w - center  # centred, so that the sums below do not cancel
    half_range = (high - low) / 2
    weighted = v if weight is None else v * weight
    total = np.float32(w.shape[0]) if weight is None else weight.sum(axis=0)
    sum_w, sum_ww = weighted.sum(axis=0), _dot(weighted, v)
    best = np.full_like(low, np.inf)
    best_scale, best_offset = np.zeros_like(low), np.zeros_like(low)
    q = np.empty_like(w)
    for share_low, share_high in itertools.product(_ASYMMETRIC_SHARES, repeat=2):
        scale = half_range * np.float32((share_low + share_high) / 15)
        offset = half_range * np.float32(-share_low)
        for _ in range(_ASYMMETRIC_ROUNDS):
            np.subtract(v, offset, out=q)
            _round(q, _reciprocal(scale), 0, 15, q)
            sum_q, sum_qq, sum_wq = _sum(q, weight), _square(q, weight), _dot(weighted, q)
            # Least squares for w = scale q + offset. All codes equal: no slope, and the offset alone is the mean.
            determinant = total * sum_qq - sum_q * sum_q
            solvable = determinant > 1e-6 * total * sum_qq
            scale = np.divide(total * sum_wq - sum_q * sum_w, determinant, out=np.zeros_like(scale), where=solvable)
            offset = np.divide(sum_w - scale * sum_q, total, out=np.zeros_like(scale), where=total > 0)
            error = sum_ww - scale * sum_wq - offset * sum_w
            better = error < best
            np.copyto(best, error, where=better)
            np.copyto(best_scale, scale, where=better)
            np.copyto(best_offset, offset, where=better)
    half = best_scale.astype(np.float16)
    minimum = (best_offset + center).astype(np.float16)
    np.subtract(w, minimum.astype(np.float32), out=q)
    _round(q, _reciprocal(half), 0, 15, q)
    return q.astype(np.uint8), half, minimum


def _round(w: np.ndarray, inverse: np.ndarray, low: int, high: int, out: np.ndarray) -> None:
    """out = clip(round(w * inverse)), one inverse per column."""
    np.multiply(w, inverse, out=out)
    np.rint(out, out=out)
    np.clip(out, low, high, out=out)


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("ij,ij->j", a, b)


def _sum(q: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    return q.sum(axis=0) if weight is None else _dot(q, weight)


def _square(q: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    return _dot(q, q) if weight is None else _dot(q * weight, q)


def _reciprocal(scale: np.ndarray) -> np.ndarray:
    """1 / scale in float32, and 0 where the scale is, or as fp16 would be, 0."""
    scale = scale.astype(np.float32)
    return np.divide(1, scale, out=np.zeros_like(scale), where=np.abs(scale) > _FP16_TINY)


def _check(w: np.ndarray, group: int, name: str) -> tuple[int, int]:
    if w.ndim != 2 or w.dtype != np.float32:
        raise ValueError(f"expected a float32 matrix, got {w.dtype} {w.shape}")
    n, k = w.shape
    if group not in GROUPS or k % group:
        raise ValueError(f"group {group} is not one of {GROUPS} or does not divide {k}")
    low, high = (w.min(), w.max()) if w.size else (0.0, 0.0)
    if not (low >= -_FP16_MAX and high <= _FP16_MAX):  # also false for NaN
        raise CheckpointError(f"{name or 'matrix'}: contains a value that is not finite, or too large for fp16")
    return n, k


def each_chunk(n: int, k: int, work: Callable[[slice], None]) -> None:
    """Run `work` over slices of about _CHUNK_WEIGHTS weights, on every core (numpy's loops release the GIL)."""
    rows = max(1, _CHUNK_WEIGHTS // max(k, 1))

    def chunks() -> Iterator[slice]:
        return (slice(start, min(start + rows, n)) for start in range(0, n, rows))

    if n <= 4 * rows:
        for chunk in chunks():
            work(chunk)
        return
    with ThreadPoolExecutor(_cores()) as pool:
        for _ in pool.map(work, chunks()):
            pass


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1
