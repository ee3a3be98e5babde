"""Writes a packed model: streaming, tensor by tensor, and all or nothing.

Everything goes to a temporary directory beside the target, is fsynced, and is renamed into place by `commit`. A writer
that dies before that leaves nothing that loads and does not touch what was there; what it leaves,
`engine.packed.library.clear_leftovers` removes.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.files.disk import disk_errors
from engine.files.safetensors_file import DTYPES, header
from engine.packed.manifest import (
    MANIFEST_NAME,
    WEIGHTS_NAME,
    FileRecord,
    Manifest,
    Quantization,
    Source,
    check_file_name,
)
from engine.packed.matrix import Matrix, Storage, all_finite
from engine.packed.tensors import tensor_shapes

_REPLACE_TRIES = 100
_WRITE_BYTES = 8 << 20  # per write call: large enough for full disk speed, small enough for a prompt progress bar


class PackedWriter:
    """Use as a context manager; without `commit` nothing is left behind.

        with PackedWriter(directory, config, storage) as writer:
            for name in writer.names:                       # canonical order
                writer.add_matrix(matrix) or writer.add_vector(name, values)
            writer.add_file("tokenizer.json", data)
            writer.commit(name=..., variant=..., ...)

    storage: how each matrix will be stored (all names with two dimensions in `tensor_shapes(config)`), needed before
    the first tensor because the file's header comes first. An existing directory is replaced only by `commit`.
    Raises DiskFull when the disk is, CheckpointError for a config without a stop token.
    """

    def __init__(self, directory: Path | str, config: ModelConfig, storage: Mapping[str, Storage]) -> None:
        if not config.eos_token_ids:
            raise CheckpointError(
                "the model names no end-of-text token, so replies would never end",
                hint="add eos_token_id to config.json or generation_config.json (GGUF: tokenizer.ggml.eos_token_id)",
            )
        self.directory = Path(directory)
        self.config = config
        self.storage = dict(storage)
        self._shapes = tensor_shapes(config)
        self.names = list(self._shapes)
        self._tensors = self._plan()
        self._head = header(self._tensors, {"format": "flint"})
        self._left = list(reversed(self.names))
        self._files: dict[str, FileRecord] = {}
        self._digest = hashlib.sha256()
        self._written = 0
        self._weights: BinaryIO | None = None
        self._temporary: Path | None = None

    def __enter__(self) -> PackedWriter:
        with self._disk_errors():
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            restore_interrupted(self.directory)
            self._temporary = Path(
                tempfile.mkdtemp(prefix=f".{self.directory.name}.partial-", dir=self.directory.parent)
            )
            self._weights = (self._temporary / WEIGHTS_NAME).open("wb", buffering=0)
            self._write(memoryview(self._head))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._weights is not None:
            self._weights.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def add_matrix(self, matrix: Matrix) -> None:
        """Append the next matrix; it must be stored as planned, with finite scales."""
        shape = self._next(matrix.name)
        if (matrix.n, matrix.k) != shape or matrix.storage != self.storage[matrix.name]:
            raise ValueError(f"{matrix.name}: {matrix.storage} [{matrix.n}, {matrix.k}] is not what was planned")
        if not matrix.is_finite():
            raise CheckpointError(f"{matrix.name}: contains a value that is not finite")
        for (part, (dtype, part_shape)), array in zip(
            matrix.storage.parts(matrix.name, *shape).items(), matrix.arrays(), strict=True
        ):
            self._append(part, dtype, part_shape, array)

    def add_vector(self, name: str, values: np.ndarray) -> None:
        """Append the next norm, float32 [n], finite."""
        shape = self._next(name)
        if not all_finite(values):
            raise CheckpointError(f"{name}: contains a value that is not finite")
        self._append(name, "F32", shape, values)

    def add_file(self, name: str, data: bytes) -> None:
        """Another file of the directory, such as tokenizer.json."""
        check_file_name(name, "packed model")
        assert self._temporary is not None, "use the writer as a context manager"
        with self._disk_errors(), (self._temporary / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._files[name] = FileRecord(len(data), hashlib.sha256(data).hexdigest())

    def commit(self, *, name: str, variant: str, quantization: Quantization, source: Source, license: str) -> Path:
        """Finish the files, write the manifest and rename the directory into place; returns the directory."""
        if self._left:
            raise ValueError(f"{self._left[-1]} was never added")
        assert self._temporary is not None, "use the writer as a context manager"
        assert self._weights is not None
        with self._disk_errors():
            os.fsync(self._weights.fileno())
            self._weights.close()
            self._files[WEIGHTS_NAME] = FileRecord(self._written, self._digest.hexdigest())
            manifest = Manifest(
                name=name,
                variant=variant,
                created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                flint=_flint_version(),
                config=self.config,
                quantization=quantization,
                source=source,
                license=license,
                files=dict(sorted(self._files.items())),
            )
            with (self._temporary / MANIFEST_NAME).open("wb") as file:
                file.write(manifest.to_bytes())
                file.flush()
                os.fsync(file.fileno())
            os.chmod(self._temporary, 0o755)  # mkdtemp makes it private
            _fsync_directory(self._temporary)
            _replace(self._temporary, self.directory)
        self._temporary = None
        return self.directory

    def _plan(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        matrices = {name for name, shape in self._shapes.items() if len(shape) == 2}
        if set(self.storage) != matrices:
            raise ValueError(f"storage must name every matrix: {sorted(matrices ^ set(self.storage))[:3]}")
        for name, shape in self._shapes.items():
            tensors |= self.storage[name].parts(name, *shape) if len(shape) == 2 else {name: ("F32", shape)}
        return tensors

    def _disk_errors(self) -> AbstractContextManager[None]:
        return disk_errors(self.directory, f"{self.directory} was being written")

    def _next(self, name: str) -> tuple[int, ...]:
        if not self._left or self._left[-1] != name:
            raise ValueError(f"{name} added out of order; next is {self._left[-1] if self._left else 'nothing'}")
        self._left.pop()
        return self._shapes[name]

    def _append(self, part: str, dtype: str, shape: tuple[int, ...], array: np.ndarray) -> None:
        if array.dtype != DTYPES[dtype] or array.shape != shape:
            raise ValueError(f"{part}: {array.dtype} {array.shape}, expected {dtype} {shape}")
        with self._disk_errors():
            self._write(np.ascontiguousarray(array).data.cast("B"))

    def _write(self, data: memoryview) -> None:
        assert self._weights is not None, "use the writer as a context manager"
        for start in range(0, len(data), _WRITE_BYTES):
            piece = data[start : start + _WRITE_BYTES]
            self._digest.update(piece)
            while piece:
                piece = piece[self._weights.write(piece) :]
        self._written += len(data)


def restore_interrupted(directory: Path) -> None:
    """Undo a replacement that was killed between its two renames: the previous directory comes back."""
    previous = _previous(directory)
    if previous.is_dir():
        if directory.exists():
            shutil.rmtree(previous, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # another process has restored it, or put a new one there
                os.rename(previous, directory)


def _replace(new: Path, target: Path) -> None:
    """Rename `new` to `target`. A directory that is not empty cannot be renamed over: the old one steps aside first.

    Another writer, or a reader that restores the old one, may come between any two steps: the step that then fails
    leaves nothing half done, and all begins again.
    """
    previous = _previous(target)
    for tries_left in reversed(range(_REPLACE_TRIES)):
        try:
            if target.exists():
                shutil.rmtree(previous, ignore_errors=True)
                os.rename(target, previous)
            os.rename(new, target)
            break
        except OSError:
            restore_interrupted(target)
            if not tries_left:
                raise
    _fsync_directory(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _previous(directory: Path) -> Path:
    return directory.parent / f".{directory.name}.previous"


def _fsync_directory(directory: Path) -> None:
    if os.name == "nt":
        return  # directories cannot be opened there
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flint_version() -> str:
    try:
        return version("flint")
    except PackageNotFoundError:
        return "0"
