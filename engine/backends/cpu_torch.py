"""The fallback where the native library could not be built: torch's own CPU operators, weights kept packed.

The model is TorchReference's; only its weights differ. An int4 matrix is multiplied by torch's int4pack operator, which
takes a scale and a zero point per group, so nothing is requantised. An int8 matrix becomes two int4 ones, the digits
of its codes to base 16, which loses nothing either and keeps it at about a byte a weight. bf16 matrices are held in
float32: torch has no product of float32 activations and bf16 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.torch_reference import TorchReference
from engine.packed.matrix import Matrix
from engine.packed.model import PackedModel
from engine.packed.quantize import dequantize, unpack_nibbles

ROWS = 16  # torch packs rows in multiples of this


class PackedPlane:
    """codes [n, k] in 0..15 with (codes - 8) * scale + zero per group, ready for torch's int4pack product."""

    def __init__(self, codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, group: int) -> None:
        n, _ = codes.shape
        padding = -n % ROWS
        codes = np.pad(codes, ((0, padding), (0, 0)))
        scales_and_zeros = np.pad(np.stack((scale, zero), axis=-1), ((0, padding), (0, 0), (0, 0)))
        self.rows = n
        self.group = group
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(codes.astype(np.int32)), 1)
        # [k / group, n, 2], float32 as the activations are
        self.scales = torch.from_numpy(np.ascontiguousarray(scales_and_zeros.transpose(1, 0, 2), np.float32))

    def multiply(self, x: Tensor) -> Tensor:
        """x [m, k] -> [m, n]."""
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, self.group, self.scales)[:, : self.rows]

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes


class PackedWeight:
    """An int4 or int8 matrix [n, k] that F.linear and F.embedding accept in a weight's place."""

    def __init__(self, matrix: Matrix) -> None:
        assert matrix.scale is not None
        self._matrix = matrix  # rows are looked up in the packed file itself
        scale = matrix.scale.astype(np.float32)
        if matrix.format == "int4":
            # q * scale + minimum = (q - 8) * scale + (minimum + 8 * scale); symmetric: the zero point is 0
            zero = np.zeros_like(scale) if matrix.minimum is None else matrix.minimum + 8 * scale
            self.planes = [PackedPlane(unpack_nibbles(matrix.q), scale, zero, matrix.group)]
        else:
            # q * scale = (high - 8) * 16 scale + low * scale with high = floor(q / 16) + 8
            codes = matrix.q.astype(np.int16)
            self.planes = [
                PackedPlane((codes >> 4) + 8, 16 * scale, np.zeros_like(scale), matrix.group),
                PackedPlane(codes & 15, scale, 8 * scale, matrix.group),
            ]

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    def to(self, *_: Any) -> PackedWeight:
        """As a tensor's: already where and what it should be."""
        return self

    def linear(self, x: Tensor) -> Tensor:
        first, *rest = (plane.multiply(x) for plane in self.planes)
        return sum(rest, start=first)

    def rows(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(dequantize(self._matrix.rows(ids.tolist())))

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, arguments: Any, options: Any = None) -> Any:
        match function, arguments:
            case F.linear, (x, PackedWeight() as weight):
                return weight.linear(x)
            case F.embedding, (ids, PackedWeight() as weight):
                return weight.rows(ids)
        return NotImplemented


class CpuTorch(TorchReference):
    """TorchReference with packed weights, float32 activations and a float32 KV cache."""

    @classmethod
    def open(cls, model: PackedModel, *, context_size: int | None = None) -> CpuTorch:
        """Pack every int4 and int8 matrix anew for torch (seconds for a model of 100 MB)."""

        def tensor(name: str) -> Any:
            if name.endswith("norm"):
                return torch.from_numpy(np.array(model.vector(name)))
            matrix = model.matrix(name)
            packed = PackedWeight(matrix) if matrix.format != "bf16" else torch.from_numpy(dequantize(matrix))
            if name != "embed":  # whose rows are still read from the file
                model.release()
            return packed

        context = context_size or model.config.max_position_embeddings
        backend = cls(model.config, cast(Callable[[str], Tensor], tensor), context_size=context)
        backend.description = f"torch int4 on cpu, {torch.get_num_threads()} threads (no native decoder)"
        return backend
