"""The GGUF container (versions 2 and 3, little endian): metadata and tensor table, bounds-checked over a memory map.

    |"GGUF"|version u32|tensors u64|pairs u64| pairs ... | tensor table ... | padding | tensor data |

    pair   = key string, type u32, value          string = length u64, UTF-8 bytes
    array  = element type u32, count u64, elements
    tensor = name string, dims u32, dim u64 x dims (innermost first), type u32, offset u64 (from the data's start)

Written from the specification (ggml/docs/gguf.md) because gguf's own reader takes 2 s for a file of 100 MB.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from engine.errors import CheckpointError, UnsupportedModel
from engine.files.safetensors_file import map_file, release

# Block layout of the types that flint reads: (weights per block, bytes per block).
BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K"}
_TYPES |= {12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 30: "BF16"}

# Sanity limits; a real model has about 30 pairs, 400 tensors, 300,000 merges and 10 MB of metadata. Python objects
# take up to six times the metadata's bytes.
_MAX_PAIRS = 1 << 12
_MAX_TENSORS = 1 << 15
_MAX_ELEMENTS = 1 << 22
_MAX_METADATA = 64 << 20
_MAX_KEY = 1 << 10
_MAX_DIMS = 4

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """shape: (n,) or (n, k), outermost first. start: bytes from the beginning of the file."""

    type: str  # a key of BLOCKS
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GgufFile:
    """A memory-mapped GGUF file: `metadata` (text, numbers, booleans, lists) and `tensors`.

    Raises CheckpointError naming file and key for anything malformed, UnsupportedModel for a tensor type that flint
    does not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap = map_file(path)
        cursor = _Cursor(self._map, str(path))
        if cursor.take(4) != b"GGUF":
            cursor.fail("not a GGUF file")
        version = cursor.u32()
        if version not in (2, 3):
            raise UnsupportedModel(f"{path}: GGUF version {version} is not supported (2 and 3 are)")
        tensor_count, pair_count = cursor.u64(), cursor.u64()
        if pair_count > _MAX_PAIRS or tensor_count > _MAX_TENSORS:
            cursor.fail(f"header claims {tensor_count} tensors and {pair_count} metadata keys")
        self.metadata = _read_metadata(cursor, pair_count)
        self.tensors = _read_tensors(cursor, tensor_count, self.metadata)

    def rows(self, name: str) -> np.ndarray:
        """The stored bytes, uint8 [n, bytes of one row] (a vector is one row), a view of the map."""
        tensor = self.tensors[name]
        data = np.frombuffer(self._map, dtype=np.uint8, count=tensor.nbytes, offset=tensor.start)
        return data.reshape(tensor.shape[0] if len(tensor.shape) == 2 else 1, -1)

    def release(self, name: str) -> None:
        """Drop the tensor's pages from this process's memory; they come back when touched."""
        tensor = self.tensors[name]
        release(self._map, tensor.start, tensor.nbytes)


class _Cursor:
    """A position in the header; every read checks that it stays inside."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self.data = data
        self.end = min(len(data), _MAX_METADATA)
        self.where = where
        self.position = 0

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {problem}")

    def advance(self, count: int) -> int:
        start = self.position
        if count > self.end - start:
            self.fail(f"truncated or corrupt: {count} bytes wanted at byte {start}")
        self.position = start + count
        return start

    def take(self, count: int) -> bytes:
        start = self.advance(count)
        return self.data[start : start + count]

    def u32(self) -> int:
        return _U32.unpack_from(self.data, self.advance(4))[0]

    def u64(self) -> int:
        return _U64.unpack_from(self.data, self.advance(8))[0]

    def text(self, limit: int = _MAX_METADATA) -> str:
        length = self.u64()
        if length > limit:
            self.fail(f"truncated or corrupt: a text of {length} bytes at byte {self.position}")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"text before byte {self.position} is not UTF-8")

    def scalar(self, kind: int) -> Any:
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        start = self.advance(count * dtype.itemsize)
        if kind == _BOOL:
            raw = self.data[start : start + count]
            if raw.strip(b"\0\1"):
                self.fail(f"a boolean before byte {self.position} is neither 0 nor 1")
            return [byte == 1 for byte in raw]
        return np.frombuffer(self.data, dtype=dtype, count=count, offset=start).tolist()

    def texts(self, count: int) -> list[str]:
        # The hot loop of opening a file (49,152 tokens and as many merges): locals, and no call per element.
        data, end, position = self.data, self.end, self.position
        unpack = _U64.unpack_from
        texts = []
        for _ in range(count):
            start = position + 8
            if start > end:
                self.fail(f"truncated or corrupt: a text list runs past byte {end}")
            position = start + unpack(data, position)[0]
            if position > end:
                self.fail(f"truncated or corrupt: a text list runs past byte {end}")
            texts.append(data[start:position])
        self.position = position
        try:
            return [text.decode("utf-8") for text in texts]
        except UnicodeDecodeError:
            self.fail(f"a text list before byte {position} is not UTF-8")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text(_MAX_KEY)
        if key in metadata:
            cursor.fail(f"duplicate key {key}")
        metadata[key] = _read_value(cursor, key, cursor.u32())
    return metadata


def _read_value(cursor: _Cursor, key: str, kind: int) -> Any:
    if kind == _STRING:
        return cursor.text()
    if kind in _SCALARS:
        return cursor.scalar(kind)
    if kind != _ARRAY:
        cursor.fail(f"{key}: unknown value type {kind}")
    element, count = cursor.u32(), cursor.u64()
    if count > _MAX_ELEMENTS:
        cursor.fail(f"{key}: a list of {count} elements")
    if element == _STRING:
        return cursor.texts(count)
    if element not in _SCALARS:  # nested arrays exist in the format, but not in models
        cursor.fail(f"{key}: a list of value type {element}")
    return cursor.numbers(element, count)


def _read_tensors(cursor: _Cursor, count: int, metadata: dict[str, Any]) -> dict[str, GgufTensor]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment: {alignment!r} is not a power of two from 8 up")
    table: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.text(_MAX_KEY)
        dims = cursor.u32()
        if not 1 <= dims <= _MAX_DIMS:
            cursor.fail(f"{name}: {dims} dimensions")
        shape = tuple(reversed([cursor.u64() for _ in range(dims)]))
        if name in table:
            cursor.fail(f"duplicate tensor {name}")
        table[name] = (shape, cursor.u32(), cursor.u64())
    base = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, (shape, kind, offset) in table.items():
        if offset % alignment:
            cursor.fail(f"{name}: offset {offset} is not a multiple of {alignment}")
        type_name = _TYPES.get(kind)
        if type_name is None:
            raise UnsupportedModel(f"{cursor.where}: {name}: {_type_name(kind)} is not supported ({', '.join(BLOCKS)})")
        weights, size = BLOCKS[type_name]
        if not all(shape) or shape[-1] % weights:
            cursor.fail(f"{name}: shape {list(shape)} does not fit blocks of {weights}")
        nbytes = math.prod(shape) // weights * size
        if base + offset + nbytes > len(cursor.data):
            cursor.fail(f"{name}: truncated: ends at byte {base + offset + nbytes} of {len(cursor.data)}")
        tensors[name] = GgufTensor(type_name, shape, base + offset, nbytes)
    _refuse_overlap(cursor, tensors)
    return tensors


def _refuse_overlap(cursor: _Cursor, tensors: dict[str, GgufTensor]) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        if tensor.start < end:
            cursor.fail(f"{name}: overlaps another tensor")
        end = tensor.start + tensor.nbytes


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"tensor type {kind}"
