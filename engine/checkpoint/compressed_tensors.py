"""compressed-tensors `pack-quantized` int4: the packed format's own layout under other names.

<module>.weight_packed      int32 [N, K/8]     eight consecutive k per word, low nibble first, values q = 0..15
<module>.weight_scale       [N, K/g] or [N, 1]
<module>.weight_zero_point  int32 [N/8, K/g]   asymmetric only: eight consecutive rows per word, z = 0..15
<module>.weight_shape       int64 [2]          (N, K)
<module>.weight_g_idx       int32 [K]          optional: the group of each input channel

w = (q - 8) * scale    or    w = (q - z) * scale
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from engine.errors import CheckpointError, UnsupportedModel
from engine.packed.matrix import GROUPS, Matrix, Storage, all_finite
from engine.packed.quantize import from_bf16, unpack_nibbles

SUFFIXES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

Find = Callable[[str], np.ndarray | None]  # suffix -> stored array (bf16 as uint16), None where it is absent


def check_quantization(config: Mapping[str, Any], where: str) -> bool:
    """Whether config.json announces pack-quantized int4 weights; False where it announces no quantisation.

    Raises UnsupportedModel naming any other quantisation.
    """
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return False
    if not isinstance(quantization, Mapping):
        raise CheckpointError(f"{where}: quantization_config: expected an object")
    method = quantization.get("quant_method", "compressed-tensors")
    if method != "compressed-tensors":
        raise UnsupportedModel(f"{where}: quantisation {method!r} is not supported (compressed-tensors int4 is)")
    for key in ("kv_cache_scheme", "transform_config"):
        if quantization.get(key):
            raise UnsupportedModel(f"{where}: quantization_config: {key} is not supported")
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{where}: quantization_config: missing key config_groups")
    for name, group in groups.items():
        _check_group(group, quantization.get("format"), f"{where}: quantization_config: {name}")
    return True


def _check_group(group: Any, default_format: Any, where: str) -> None:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{where}: weights: expected an object")
    layout = group.get("format") or default_format
    if layout != "pack-quantized":
        raise UnsupportedModel(f"{where}: format {layout!r} is not supported (pack-quantized is)")
    if weights.get("num_bits") != 4 or weights.get("type", "int") != "int":
        raise UnsupportedModel(
            f"{where}: {weights.get('num_bits')}-bit {weights.get('type', 'int')} weights are not supported (4-bit int)"
        )
    if group.get("input_activations"):
        raise UnsupportedModel(f"{where}: quantised activations are not supported (weight-only is)")


class PackedWeight:
    """One packed weight, opened: layout checked, scales read, codes left where they are.

    storage: the packed format's equivalent, None where groups are not consecutive channels. exact: whether scales
    (and minima) are fp16 values, so that nothing is rounded.
    """

    def __init__(self, find: Find, n: int, k: int, where: str) -> None:
        self._name, self._n, self._k = where, n, k
        self._q = self._array(find, "weight_packed", "<i4", (n, k // 8) if k % 8 == 0 else None)
        shape = find("weight_shape")
        if shape is not None and shape.reshape(-1).tolist() != [n, k]:
            raise CheckpointError(f"{where}.weight_shape: {shape.reshape(-1).tolist()[:4]}, the config needs {[n, k]}")
        scale = _as_float(find("weight_scale"), f"{where}.weight_scale")
        if scale.ndim != 2 or scale.shape[0] != n or not scale.shape[1] or k % scale.shape[1]:
            raise CheckpointError(f"{where}.weight_scale: shape {list(scale.shape)} does not fit [{n}, {k}]")
        self._scale = scale
        self._zero = self._zero_points(find)
        self._g_idx = self._group_index(find)
        self.storage = self._storage()
        self.exact = all(np.array_equal(half.astype(np.float32), exact) for half, exact in self._halves())

    def matrix(self, name: str) -> Matrix:
        """In the packed format (storage is not None): the same codes, scales as fp16."""
        assert self.storage is not None
        # Per-channel scales, and groups that are larger than the format's, are repeated for each of its groups.
        repeat = self._k // self.storage.group // self._scale.shape[1]
        scale, *minima = (np.repeat(half, repeat, axis=1) for half, _ in self._halves())
        minimum = minima[0] if minima else None
        return Matrix(name, "int4", self._n, self._k, self.storage.group, self._q, scale, minimum)

    def values(self, rows: slice) -> np.ndarray:
        """float32 [rows, k]."""
        codes = unpack_nibbles(self._q[rows]).astype(np.float32)
        zero = np.float32(8) if self._zero is None else self._zero[rows][:, self._g_idx]
        with np.errstate(over="ignore"):  # whoever takes the values refuses those that are not finite
            return (codes - zero) * self._scale[rows][:, self._g_idx]

    def _halves(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(fp16, float32) of the scales, and of the minima where there are zero points."""
        with np.errstate(over="ignore"):  # whoever takes the matrix refuses scales that are not finite
            exact = [self._scale] if self._zero is None else [self._scale, -self._zero * self._scale]
            return [(values.astype(np.float16), values) for values in exact]

    def _zero_points(self, find: Find) -> np.ndarray | None:
        if find("weight_zero_point") is None:
            return None
        groups = self._scale.shape[1]
        packed = self._array(find, "weight_zero_point", "<i4", (-(-self._n // 8), groups))
        return unpack_nibbles(packed.T)[:, : self._n].T.astype(np.float32)

    def _group_index(self, find: Find) -> np.ndarray:
        groups = self._scale.shape[1]
        consecutive = np.arange(self._k) // (self._k // groups)
        index = find("weight_g_idx")
        if index is None or (index.dtype == np.int32 and (index == -1).all()):
            return consecutive
        if index.shape != (self._k,) or index.dtype.kind != "i" or index.min() < 0 or index.max() >= groups:
            raise CheckpointError(f"{self._name}.weight_g_idx: not a group of {groups} for each of {self._k} channels")
        return index.astype(np.intp)

    def _storage(self) -> Storage | None:
        size = self._k // self._scale.shape[1]
        fitting = [group for group in GROUPS if size % group == 0]
        consecutive = np.array_equal(self._g_idx, np.arange(self._k) // size)
        return Storage("int4", max(fitting), self._zero is None) if fitting and consecutive else None

    def _array(self, find: Find, suffix: str, dtype: str, shape: tuple[int, ...] | None) -> np.ndarray:
        array = find(suffix)
        if array is None:
            raise CheckpointError(f"{self._name}.{suffix}: missing tensor")
        if array.dtype != np.dtype(dtype) or array.shape != shape:
            raise CheckpointError(f"{self._name}.{suffix}: {array.dtype} {list(array.shape)} does not fit the config")
        return array


def _as_float(array: np.ndarray | None, where: str) -> np.ndarray:
    if array is None:
        raise CheckpointError(f"{where}: missing tensor")
    if array.dtype != np.uint16 and array.dtype.kind != "f":
        raise CheckpointError(f"{where}: expected floating-point scales")
    values = from_bf16(array) if array.dtype == np.uint16 else array.astype(np.float32)
    if not all_finite(values):
        raise CheckpointError(f"{where}: contains a value that is not finite")
    return values
