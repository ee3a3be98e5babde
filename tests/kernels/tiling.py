"""The decode kernel's tiles in numpy, written from the drawing in gemv.cuh: what re-tiling must give, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from engine.packed.matrix import Matrix
from kernels.cuda.phases import Drafting, KernelDims, Phase, Split, phases_of, split_tiles
from kernels.cuda.tiles import TiledWeights


def tiled(dims: KernelDims, matrices: Mapping[str, Matrix], sms: int = 5, shares: int = 1) -> TiledWeights:
    """All matrices of a model, as the kernel streams them on a GPU of `sms` multiprocessors; gaps are 0xee."""
    phases = phases_of(dims, matrices, shares)
    split = split_tiles(phases, dims.layers, sms)
    return _tiled(phases, split, dims.layers, lambda name, layer: phase_rows(name, layer, dims, matrices))


def draft_tiled(drafting: Drafting, matrices: Mapping[str, Any]) -> TiledWeights:
    """The same of a learned drafter's matrices."""
    parts = {"qkv": "q k v", "gate_up": "gate up"}

    def rows(name: str, layer: int) -> dict[str, np.ndarray]:
        return _joined(name, [matrices[part] for part in parts.get(name, name).split()])

    return _tiled(drafting.phases, drafting.split, 1, rows)


def _tiled(
    phases: Mapping[str, Phase], split: Split, layers: int, rows_of: Callable[[str, int], dict[str, np.ndarray]]
) -> TiledWeights:
    weights = TiledWeights(torch.empty(0), phases, split, layers)
    data = np.full(split.total_bytes, 0xEE, dtype=np.uint8)
    for name, phase in phases.items():
        places = weights.places(name)
        for layer in range(1 if name == "head" else layers):
            rows = rows_of(name, layer)
            for tile, (offset, layer_stride, chunk_stride, share_stride) in enumerate(places):
                units = tile_units(rows, tile, phase)
                stretches = list(np.ndindex(phase.shares, phase.chunks))  # in the order of K
                if phase.apart:
                    stretches = [(share, chunk) for chunk, share in np.ndindex(phase.chunks, phase.shares)]
                for nth, (share, chunk) in enumerate(stretches):
                    piece = b"".join(units[nth * phase.units : (nth + 1) * phase.units])
                    at = offset + layer * layer_stride + chunk * chunk_stride + share * share_stride
                    assert (data[at : at + len(piece)] == 0xEE).all(), "two tiles in one place"
                    data[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
    return TiledWeights(torch.from_numpy(data), phases, split, layers)


def phase_rows(name: str, layer: int, dims: KernelDims, matrices: Mapping[str, Matrix]) -> dict[str, np.ndarray]:
    """A phase's rows in the order of its tiles, padded with zero rows to whole tiles: codes [rows, k] as unsigned
    integers of 8 bits (4 used) or 16, scale and minimum [rows, k / group]."""
    if name == "head":
        parts = [matrices["embed" if dims.tied_head else "head"]]
    else:
        members = {"qkv": "q k v", "o": "o", "gate_up": "gate up", "down": "down"}[name].split()
        parts = [matrices[f"layers.{layer}.{member}"] for member in members]
    return _joined(name, parts)


def _joined(name: str, parts: Sequence[Matrix]) -> dict[str, np.ndarray]:
    columns = {"codes": [codes(p) for p in parts]}
    for field in ("scale", "minimum"):
        if getattr(parts[0], field) is not None:
            columns[field] = [getattr(p, field) for p in parts]
    if name == "gate_up":  # eight rows of gate, then the same eight of up
        joined = {
            field: np.stack([a.reshape(-1, 8, a.shape[1]) for a in pair], axis=1).reshape(-1, pair[0].shape[1])
            for field, pair in columns.items()
        }
    else:
        joined = {field: np.concatenate(arrays) for field, arrays in columns.items()}
    missing = -len(joined["codes"]) % 16
    return {field: np.pad(a, ((0, missing), (0, 0))) for field, a in joined.items()}


def codes(matrix: Matrix) -> np.ndarray:
    if matrix.format == "int4":
        shifts = np.arange(0, 32, 4, dtype=np.uint32)
        return ((matrix.q.view(np.uint32)[:, :, None] >> shifts) & 15).astype(np.uint8).reshape(matrix.n, matrix.k)
    return matrix.q.view(np.uint8 if matrix.format == "int8" else np.uint16)


def tile_units(rows: Mapping[str, np.ndarray], tile: int, phase: Phase) -> list[bytes]:
    """The units of one tile in the order of K."""
    mine = {field: array[tile * 16 : tile * 16 + 16] for field, array in rows.items()}
    width, found = phase.unit_blocks * 64, []
    for first in range(0, phase.k, width):
        values = mine["codes"][:, first : first + width]
        # [row half, g, block, half of the channels, t, 8 channels]
        lanes = values.reshape(2, 8, phase.unit_blocks, 2, 4, 8)
        if phase.format.startswith("int4"):
            # block, g, t, half, channel: low nibbles of row g, high nibbles of row g + 8
            both = lanes.transpose(0, 2, 1, 4, 3, 5)
            words = np.ascontiguousarray(both[0] | both[1] << 4).reshape(phase.unit_blocks, 32, 16).view(np.uint32)
            if phase.unit_blocks % 2 == 0:  # blocks p and p + H share their places, word by word
                p, h = np.split(words, 2)
                even, odd = (np.stack([p[..., i], h[..., i], p[..., i + 2], h[..., i + 2]], -1) for i in (0, 1))
                words = np.concatenate([even, odd])
            unit = words.tobytes()
        elif phase.format == "int8":
            unit = lanes.transpose(2, 0, 1, 4, 3, 5).tobytes()  # block, row half, g, t, half, channel
        else:
            unit = lanes.transpose(2, 0, 3, 1, 4, 5).tobytes()  # block, row half, half, g, t, channel
        for field in ("scale", "minimum"):
            if field in mine:
                groups = mine[field][:, first // phase.group : (first + width) // phase.group]
                unit += groups.reshape(2, 8, -1).transpose(1, 2, 0).tobytes()  # g, group, row half
        found.append(unit)
    assert {len(unit) for unit in found} == {phase.unit_bytes}
    return found
