"""Checkpoint tensors to packed tensors: which storage each matrix gets, and the conversion, a few rows at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from engine.checkpoint import Checkpoint
from engine.errors import UnsupportedModel
from engine.packed.manifest import Quantization
from engine.packed.matrix import GROUPS, Matrix, Storage
from engine.packed.quantize import quantize_bf16, quantize_int4, quantize_int8

_CHUNK_WEIGHTS = 4 << 20  # 16 MB of float32 at a time, whatever the tensor's size


def plan_storage(
    checkpoint: Checkpoint,
    bits: int | None = None,
    group: int | None = None,
    symmetric: bool | None = None,
    embed_bits: int | None = None,
) -> dict[str, Storage]:
    """How each matrix will be stored, by name.

    bits: 4, 8 or 16 for every matrix. None keeps what a quantised checkpoint holds: int4 and int8 codes as they are,
    other quantised types (Q5_K, Q6_K, ...) as int8 in groups of 32; floating-point matrices become int4. embed_bits:
    the same for embed and head (default: as bits). group: 32, 64 or 128; None keeps the checkpoint's where its codes
    are kept, else 128. Where it does not divide a matrix's K, the largest smaller one that does is taken. symmetric:
    int4 without or with minima; None keeps the checkpoint's where its codes are kept, else symmetric.
    """
    plan: dict[str, Storage] = {}
    for name in checkpoint.names():
        shape = checkpoint.shape(name)
        if len(shape) == 2:
            wanted = embed_bits or bits if name in ("embed", "head") else bits
            plan[name] = _choose(checkpoint, name, shape[1], wanted, group, symmetric)
    return plan


def convert(
    checkpoint: Checkpoint,
    name: str,
    storage: Storage,
    importance: np.ndarray | None = None,
    after_rows: Callable[[int], None] = lambda rows: None,
) -> Matrix:
    """Matrix `name` in the given storage: the checkpoint's own codes where they are that, else quantised.

    importance: float32 [k], see `quantize_int4`. after_rows: called while quantising with the number of rows done; may
    raise to stop. Holds the result and some 100 MB, whatever the matrix's size.
    """
    if checkpoint.storage(name) == storage:
        matrix = checkpoint.read_matrix(name)
        assert matrix is not None, "storage() promised a matrix"
        return matrix
    n, k = checkpoint.shape(name)
    step = max(1, _CHUNK_WEIGHTS // k)
    parts = [np.empty(shape, _NUMPY[dtype]) for dtype, shape in storage.parts(name, n, k).values()]
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        piece = _quantize(checkpoint.read_float(name, rows), storage, importance, name)
        for whole, array in zip(parts, piece.arrays(), strict=True):
            whole[rows] = array
        after_rows(rows.stop)
    q, scale, minimum = (*parts, None, None)[:3]
    assert q is not None
    return Matrix(name, storage.format, n, k, storage.group, q, scale, minimum)


def describe(checkpoint: Checkpoint, plan: Mapping[str, Storage]) -> Quantization:
    """The plan in a few words, for the manifest: what most weights are stored as, and the embedding."""
    weights: Counter[Storage] = Counter()
    for name, storage in plan.items():
        if name not in ("embed", "head"):
            n, k = checkpoint.shape(name)
            weights[storage] += n * k
    body, embed = weights.most_common(1)[0][0], plan["embed"]
    return Quantization(
        format=body.format,
        group=body.group,
        symmetric=body.symmetric,
        embed_format=embed.format,
        embed_group=embed.group,
        lossless=all(checkpoint.storage(name) == storage and checkpoint.exact(name) for name, storage in plan.items()),
    )


_NUMPY = {"I32": np.int32, "I8": np.int8, "BF16": np.uint16, "F16": np.float16}


def _choose(
    checkpoint: Checkpoint, name: str, k: int, bits: int | None, group: int | None, symmetric: bool | None
) -> Storage:
    own = checkpoint.storage(name)
    if own is not None and _acceptable(own, bits, group, symmetric):
        return own
    quantised = own is None and checkpoint.quantized(name)
    match bits or (8 if quantised else 4):
        case 16:
            return Storage("bf16")
        case 8:
            return Storage("int8", _group(name, k, group or (32 if quantised else 128)))
        case 4:
            return Storage("int4", _group(name, k, group or 128), symmetric is not False)
        case other:
            raise ValueError(f"bits must be 4, 8 or 16, not {other}")


def _acceptable(own: Storage, bits: int | None, group: int | None, symmetric: bool | None) -> bool:
    if own.format == "bf16":
        return bits == 16
    if group is not None and own.group != group:
        return False
    if own.format == "int4" and symmetric not in (None, own.symmetric):
        return False
    return bits is None or own.format == f"int{bits}"


def _group(name: str, k: int, wanted: int) -> int:
    fitting = [g for g in GROUPS if g <= wanted and k % g == 0]
    if not fitting:
        raise UnsupportedModel(
            f"{name}: {k} input channels are not a multiple of {GROUPS[0]}", hint="pack with --bits 16"
        )
    return max(fitting)


def _quantize(w: np.ndarray, storage: Storage, importance: np.ndarray | None, name: str) -> Matrix:
    match storage.format:
        case "int4":
            return quantize_int4(w, storage.group, storage.symmetric, importance, name)
        case "int8":
            return quantize_int8(w, storage.group, name)
        case "bf16":
            return quantize_bf16(w, name)
