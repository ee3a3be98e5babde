"""A model's weights onto the GPU: matrices cut into tiles and dealt to the SMs' streams; norms and RoPE beside them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.build import CUDA_DIRECTORY, architecture, compile_cubin
from kernels.cuda.driver import Driver, Kernel, Module
from kernels.cuda.phases import PHASES, TILE_ROWS, Drafting, KernelDims, Phase, Split, StoredMatrix
from kernels.cuda.plan import L2_AHEAD
from kernels.cuda.tiles import TiledWeights

if TYPE_CHECKING:
    import torch

    from kernels.cuda.drafting import DraftHead

DRAFT_NORMS = ("embed_norm", "hidden_norm", "mlp_norm", "final_norm")
_POINTER = ctypes.c_uint64


class SmTiles(ctypes.Structure):
    """struct SmTiles of context.cuh."""

    _fields_ = [
        ("first", ctypes.c_int32 * len(PHASES)),
        ("count", ctypes.c_int32 * len(PHASES)),
        ("offset", ctypes.c_int64),
        ("layer_bytes", ctypes.c_int64),
    ]


class _Source(ctypes.Structure):
    """struct Source of retile.cu."""

    _fields_ = [("q", _POINTER), ("scale", _POINTER), ("minimum", _POINTER)]


class _Retile(ctypes.Structure):
    """struct Retile of retile.cu."""

    _fields_ = [
        ("low", _Source),
        ("high", _Source),
        *[(name, ctypes.c_int32) for name in ("low_row", "high_row", "rows_per_tile", "rows", "k", "group", "bits")],
        *[(name, ctypes.c_int32) for name in ("chunks", "shares", "apart", "units", "unit_blocks", "unit_bytes")],
        ("reserved", ctypes.c_int32),
        *[(name, _POINTER) for name in ("target", "offset", "chunk_stride", "share_stride")],
    ]


@dataclass(frozen=True)
class DeviceWeights:
    """What the kernel reads of a model, on the device.

    sm_tiles: SmTiles [SMs] as bytes. norms: float32, [layers][attention, mlp][hidden], then the final one. head_norms:
    float32 [layers][q, k][head_dim], None without. frequencies: float32 [head_dim / 2]. embedding: values, scales and
    minima as packed.
    """

    tiled: TiledWeights
    sm_tiles: torch.Tensor
    norms: torch.Tensor
    head_norms: torch.Tensor | None
    frequencies: torch.Tensor
    embedding: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
    retile: Kernel  # what cut them, for a drafter that comes later


def load_weights(
    dims: KernelDims,
    matrices: Mapping[str, StoredMatrix],
    vectors: Mapping[str, Any],
    frequencies: Any,
    phases: Mapping[str, Phase],
    split: Split,
    driver: Driver,
    device: torch.device,
    cubin_cache: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> DeviceWeights:
    """Matrices, vectors and frequencies as Megakernel takes them. Raises CompileError, CudaError."""
    import torch

    gpu = driver.gpu()
    cubin = compile_cubin(
        CUDA_DIRECTORY / "retile.cu",
        arch=architecture(gpu.capability),
        cache=cubin_cache,
        driver_version=gpu.driver_version,
        progress=progress,
    )
    kernel = Module(driver, cubin.code).kernel("retile")
    tiled = _empty_tiles(phases, split, dims.layers, device)
    retile = _Retiler(kernel, tiled, device)
    for layer in range(dims.layers):
        name, first = f"layers.{layer}.", 0
        for part in ("q", "k", "v"):
            retile("qkv", layer, matrices[name + part], first=first)
            first += matrices[name + part].n // TILE_ROWS
        retile("o", layer, matrices[name + "o"])
        retile("gate_up", layer, matrices[name + "gate"], matrices[name + "up"])
        retile("down", layer, matrices[name + "down"])
    embedding = on_device(matrices["embed"], device)
    retile("head", 0, matrices["embed" if dims.tied_head else "head"])

    def table(names: tuple[str, ...], *last: str) -> torch.Tensor:
        """The layers' vectors of these names, one after the other."""
        wanted = [*(f"layers.{i}.{name}" for i in range(dims.layers) for name in names), *last]
        rows = [np.asarray(vectors[name], dtype=np.float32) for name in wanted]
        return torch.from_numpy(np.concatenate(rows)).to(device)

    return DeviceWeights(
        tiled,
        _sm_tiles(split, device),
        table(("attn_norm", "mlp_norm"), "final_norm"),
        table(("q_norm", "k_norm")) if dims.qk_norm else None,
        torch.from_numpy(np.asarray(frequencies, dtype=np.float32)).to(device),
        embedding,
        kernel,
    )


@dataclass(frozen=True)
class DeviceDrafter:
    """What the kernel reads of a learned drafter, on the device.

    norms: float32 [embedding, hidden, mlp, final][hidden]. target_ids: int32 [draft vocabulary]."""

    tiled: TiledWeights
    sm_tiles: torch.Tensor
    norms: torch.Tensor
    frequencies: torch.Tensor
    target_ids: torch.Tensor


def load_drafter(head: DraftHead, drafting: Drafting, retile_kernel: Kernel, device: torch.device) -> DeviceDrafter:
    """A drafter's weights onto the GPU."""
    import torch

    matrices = head.matrices
    tiled = _empty_tiles(drafting.phases, drafting.split, 1, device)
    retile = _Retiler(retile_kernel, tiled, device)
    first = 0
    for part in ("q", "k", "v"):
        retile("qkv", 0, matrices[part], first=first)
        first += matrices[part].n // TILE_ROWS
    retile("gate_up", 0, matrices["gate"], matrices["up"])
    for name in ("fc", "o", "down", "head"):
        retile(name, 0, matrices[name])
    norms = [np.asarray(head.vectors[name], dtype=np.float32) for name in DRAFT_NORMS]
    return DeviceDrafter(
        tiled,
        _sm_tiles(drafting.split, device),
        torch.from_numpy(np.concatenate(norms)).to(device),
        torch.from_numpy(np.asarray(head.inverse_frequencies, dtype=np.float32)).to(device),
        torch.from_numpy(np.asarray(head.target_ids, dtype=np.int32)).to(device),
    )


def _empty_tiles(phases: Mapping[str, Phase], split: Split, layers: int, device: torch.device) -> TiledWeights:
    import torch

    # The kernel prefetches some way beyond a stream's end.
    room = torch.empty(split.total_bytes + 2 * L2_AHEAD, dtype=torch.uint8, device=device)
    return TiledWeights(room[: split.total_bytes], phases, split, layers)


def sm_tiles_of(split: Split) -> ctypes.Array[SmTiles]:
    """The table that tells each SM which tiles are its own."""
    table = (SmTiles * len(split.count))()
    for entry, first, count, offset, layer_bytes in zip(
        table, split.first, split.count, split.offset, split.layer_bytes, strict=True
    ):
        entry.first[:], entry.count[:] = first, count
        entry.offset, entry.layer_bytes = offset, layer_bytes
    return table


def _sm_tiles(split: Split, device: torch.device) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(sm_tiles_of(split)), dtype=torch.uint8).to(device)


class _Retiler:
    """Copies matrices into the streams of the SMs that own their tiles."""

    def __init__(self, kernel: Kernel, tiled: TiledWeights, device: torch.device) -> None:
        self._kernel, self._tiled, self._device = kernel, tiled, device
        self._places = {name: tiled.places(name) for name in tiled.phases}

    def __call__(
        self, phase: str, layer: int, matrix: StoredMatrix, high: StoredMatrix | None = None, *, first: int = 0
    ) -> None:
        """The tiles of `phase` from tile `first` on. high: up, whose rows share tiles with those of `matrix`, gate."""
        import torch

        low = on_device(matrix, self._device)
        sources = low, low if high is None else on_device(high, self._device)
        cut = self._tiled.phases[phase]
        tiles = -(-matrix.n // (TILE_ROWS if high is None else TILE_ROWS // 2))
        offset, layer_stride, *strides = self._places[phase][first : first + tiles].T
        positions = torch.from_numpy(np.stack([offset + layer * layer_stride, *strides])).to(self._device)
        r = _Retile()
        for target, tensors in zip((r.low, r.high), sources, strict=True):
            target.q, target.scale, target.minimum = (0 if t is None else t.data_ptr() for t in tensors)
        r.low_row, r.high_row, r.rows_per_tile = (0, 8, 16) if high is None else (0, 0, 8)
        r.rows, r.k, r.group = matrix.n, matrix.k, matrix.group or 0
        r.bits = {"int4": 4, "int8": 8, "bf16": 16}[str(matrix.format)]
        r.chunks, r.shares, r.apart = cut.chunks, cut.shares, int(cut.apart)
        r.units, r.unit_blocks, r.unit_bytes = cut.units, cut.unit_blocks, cut.unit_bytes
        r.target = self._tiled.data.data_ptr()
        r.offset, r.chunk_stride, r.share_stride = (row.data_ptr() for row in positions)
        stream = torch.cuda.current_stream()
        self._kernel.launch((tiles, cut.shares * cut.chunks * cut.units, 1), 128, [r], stream=stream.cuda_stream)
        stream.synchronize()  # the staging tensors are freed on return


def on_device(matrix: StoredMatrix, device: torch.device) -> tuple[Any, Any, Any]:
    """Values, scales and minima as packed; what is there already stays where it is."""
    import torch

    def move(array: Any) -> Any:
        if array is None:
            return None
        if isinstance(array, torch.Tensor):
            return array.to(device).contiguous()
        array = np.ascontiguousarray(array)
        if not array.flags.writeable:
            array = array.copy()  # torch warns about memory maps
        view = {2: np.int16, 1: np.int8, 4: np.int32}[array.dtype.itemsize]
        return torch.from_numpy(array.view(view)).to(device)

    return move(matrix.q), move(matrix.scale), move(matrix.minimum)
