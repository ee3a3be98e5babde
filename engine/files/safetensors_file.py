"""The safetensors container: a bounds-checked header over a memory map, and the header of a file to be written.

    |0 ... 7|8 ............ 8+h-1|8+h .......................|
    | h, u64| JSON, h bytes      | tensors, back to back     |

The safetensors library is not used because its numpy door copies every tensor and knows no bf16.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import CheckpointError
from engine.files.reading import open_regular
from engine.files.strict_json import Record, parse_object

# safetensors dtype -> numpy dtype; bf16 is held as uint16.
DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}
_ALIGNMENT = 64  # the data starts on a cache line
_MAX_HEADER = 8 << 20  # a header of a real model is under 1 MB; parsed JSON can take 30 times its text
_MAX_DIMS = 8


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. start: bytes from the beginning of the file. dtype: as in the header, e.g. "BF16"."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFile:
    """A memory-mapped safetensors file. `tensors` keeps the file's order; `array(name)` is a read-only view.

    Raises CheckpointError, naming file and tensor, for anything that is not a well-formed file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        self.tensors, self.metadata = _parse(self._map, str(path))

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def array(self, name: str) -> np.ndarray:
        """The stored tensor as a view of the map (a copy only where the file misaligns it)."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path}: missing tensor {name}")
        dtype = DTYPES.get(info.dtype)
        if dtype is None:
            raise CheckpointError(f"{self.path}: {name}: dtype {info.dtype} is not supported")
        flat = np.frombuffer(self._map, dtype=dtype, count=info.nbytes // dtype.itemsize, offset=info.start)
        array = flat.reshape(info.shape)
        return array if array.flags.aligned else array.copy()

    def release(self) -> None:
        """Drop the file's pages from this process's memory; they come back when touched."""
        release(self._map, 0, len(self._map))


def release(data: mmap.mmap, start: int, nbytes: int) -> None:
    """Give back the memory of a part of a map (it counts as this process's until then). No-op where unsupported."""
    if hasattr(mmap, "MADV_DONTNEED"):
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        data.madvise(mmap.MADV_DONTNEED, first, start + nbytes - first)


def map_file(path: Path) -> mmap.mmap:
    """A read-only memory map of a whole file; CheckpointError where it is missing, empty or unreadable."""
    try:
        with open_regular(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path}: the file is empty") from None


def header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data: length and JSON, padded. tensors: name -> (dtype, shape), in file order."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _parse(data: mmap.mmap, where: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    size = len(data)
    if size < 8:
        raise CheckpointError(f"{where}: too short for a safetensors file")
    length = int.from_bytes(data[:8], "little")
    if length > min(_MAX_HEADER, size - 8):
        raise CheckpointError(f"{where}: header of {length} bytes does not fit a file of {size} bytes")
    entries = parse_object(data[8 : 8 + length], where)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__: expected a map of text to text")
    base = 8 + length
    tensors = {name: _tensor_info(Record(value, f"{where}: {name}"), base, size) for name, value in entries.items()}
    _refuse_overlap(tensors, base, size, where)
    return tensors, metadata


def _tensor_info(record: Record, base: int, size: int) -> TensorInfo:
    dtype = record.text("dtype")
    shape = record.integers("shape")
    offsets = record.integers("data_offsets")
    record.finish()
    if len(shape) > _MAX_DIMS or any(not 0 <= extent < 1 << 48 for extent in shape):
        record.fail("shape", f"{list(shape)[:_MAX_DIMS]} is not a tensor shape")
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1] <= size - base:
        record.fail("data_offsets", f"{list(offsets)[:4]} lie outside the file")
    nbytes = offsets[1] - offsets[0]
    known = DTYPES.get(dtype)  # other dtypes may exist in a file as long as nobody reads them
    if known is not None and math.prod(shape) * known.itemsize != nbytes:
        record.fail("data_offsets", f"{nbytes} bytes for {dtype} {list(shape)}")
    return TensorInfo(dtype, shape, base + offsets[0], nbytes)


def _refuse_overlap(tensors: dict[str, TensorInfo], base: int, size: int, where: str) -> None:
    end = base
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if info.start != end:
            raise CheckpointError(f"{where}: {name}: overlaps another tensor or leaves a gap")
        end = info.start + info.nbytes
    if end != size:
        raise CheckpointError(f"{where}: the file is {size} bytes, its tensors end at {end}")
