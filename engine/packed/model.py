"""The packed format: what `flint pack` writes and every backend reads.

    <models_dir>/<name>/<variant>/     variant, e.g. "int4-g32", "int4-g128", "int8-g128", "bf16"
        manifest.json                  format version, ModelConfig, quantisation, source, licence, sha256 of every file
        weights.safetensors            the tensors below, memory-mapped
        tokenizer.json
        chat_template.jinja            optional
        request.json                   optional: the options that `flint pack` was given
        drafter.safetensors            optional, not in the manifest

Tensor names (i is the layer): embed, layers.i.attn_norm, layers.i.q, .k, .v, .q_norm, .k_norm, .o, .mlp_norm, .gate,
.up, .down, final_norm, and head where the embedding is not tied. Rows of q and k are in half-split (NEOX) RoPE
order. Norms are float32 [n]. A matrix is [N, K] (out, in), stored as

    int4   <name>.q      int32 [N, K/8]   eight consecutive k per word, k = 8j in the low nibble, values 0..15
    int8   <name>.q      int8  [N, K]
    bf16   <name>        bf16  [N, K]     (held here as uint16, numpy has no bf16)
           <name>.scale  fp16  [N, K/g]
           <name>.min    fp16  [N, K/g]   only asymmetric int4

    w = (q - 8) * scale                symmetric int4
    w = q * scale + min                asymmetric int4
    w = q * scale                      int8

Scales may be negative or zero, and int8 codes reach -128 (GGUF's do): kernels must not assume otherwise. Formats and
groups may differ from matrix to matrix. The file holds the tensors in the order above, a matrix's q, scale and min
side by side; its data starts on a 64-byte boundary, and so does every tensor whose predecessors' sizes allow it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path
from types import MappingProxyType

import numpy as np

from engine.config import ModelConfig
from engine.errors import CheckpointError, ModelNotFound
from engine.files.reading import FileMissing, read_file, read_text
from engine.files.safetensors_file import SafetensorsFile
from engine.packed.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    MAX_TEMPLATE_BYTES,
    TEMPLATE_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    Manifest,
)
from engine.packed.matrix import GROUPS, Matrix, Storage, all_finite
from engine.packed.tensors import tensor_shapes
from engine.packed.writer import restore_interrupted


class PackedModel:
    """A packed model, opened. Tensors are read-only views of a memory map, read from disk when touched."""

    def __init__(self, directory: Path, manifest: Manifest, weights: SafetensorsFile) -> None:
        self.directory = directory
        self.manifest = manifest
        self.config: ModelConfig = manifest.config
        self._weights = weights
        self._shapes = tensor_shapes(self.config)
        self._storage = _storage_of(weights, self._shapes)

    @classmethod
    def open(cls, directory: Path | str, verify: bool = False) -> PackedModel:
        """Open `<models_dir>/<name>/<variant>`; with verify, check every file's sha256 (0.1 s per 100 MB).

        Raises ModelNotFound where there is no packed model, CheckpointError (one line naming file and key) where
        something is malformed, truncated or changed.
        """
        directory = Path(directory)
        with contextlib.suppress(OSError):  # a folder that may not be written is read as it is
            restore_interrupted(directory)
        manifest = read_manifest(directory)
        for required in (WEIGHTS_NAME, TOKENIZER_NAME):
            if required not in manifest.files:
                raise CheckpointError(f"{directory / MANIFEST_NAME}: files: missing key {required}")
        for name, record in manifest.files.items():
            size = _size(directory / name)
            if size != record.bytes:
                raise _damaged(f"{directory / name}: {size} bytes, the manifest says {record.bytes}")
            if verify and _sha256(directory / name) != record.sha256:
                raise _damaged(f"{directory / name}: its sha256 is not the manifest's")
        return cls(directory, manifest, SafetensorsFile(directory / WEIGHTS_NAME))

    def names(self) -> list[str]:
        """Canonical names of norms and matrices, in file order."""
        return list(self._shapes)

    def matrix_names(self) -> list[str]:
        return list(self._storage)

    def storage(self, name: str) -> Storage:
        """How matrix `name` is stored; reads nothing."""
        return self._storage[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self._weights.tensors.values())

    def matrix(self, name: str) -> Matrix:
        """Matrix `name`. Reads its scales (they must be finite), not its values. KeyError for an unknown name."""
        storage = self._storage[name]
        n, k = self._shapes[name]
        q, *rest = (self._weights.array(part) for part in storage.parts(name, n, k))
        for array in rest:
            if not all_finite(array):
                raise _damaged(f"{self._weights.path}: {name}: a scale is not finite")
        scale, minimum = (*rest, None, None)[:2]
        return Matrix(name, storage.format, n, k, storage.group, q, scale, minimum)

    def vector(self, name: str) -> np.ndarray:
        """Norm weights, float32 [n], finite. KeyError for a name that is not a norm."""
        if len(self._shapes[name]) != 1:
            raise KeyError(name)
        vector = self._weights.array(name)
        if not all_finite(vector):
            raise _damaged(f"{self._weights.path}: {name}: a value is not finite")
        return vector

    def release(self) -> None:
        """Drop the weights' pages from this process's memory (a backend has its own copy); they come back when read."""
        self._weights.release()

    @property
    def tokenizer_path(self) -> Path:
        return self.directory / TOKENIZER_NAME

    @property
    def chat_template(self) -> str | None:
        """Source of the Jinja template, or None."""
        if TEMPLATE_NAME not in self.manifest.files:
            return None
        return read_text(self.directory / TEMPLATE_NAME, MAX_TEMPLATE_BYTES)


def read_manifest(directory: Path) -> Manifest:
    """Only the manifest of a packed model (for listings). Errors as in `PackedModel.open`."""
    path = directory / MANIFEST_NAME
    try:
        return Manifest.from_bytes(read_file(path, MAX_MANIFEST_BYTES), str(path))
    except FileMissing:
        raise ModelNotFound(
            f"{directory}: no packed model there", hint="`flint models list` shows what is packed"
        ) from None


def _storage_of(weights: SafetensorsFile, shapes: dict[str, tuple[int, ...]]) -> MappingProxyType[str, Storage]:
    """Each matrix's storage, read off the file's header; every tensor must be the one the config asks for."""
    storage: dict[str, Storage] = {}
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            expected[name] = ("F32", shape)
        else:
            storage[name] = _stored_as(weights, name, shape[1])
            expected |= storage[name].parts(name, *shape)
    for name, (dtype, shape) in expected.items():
        info = weights.tensors.get(name)
        if info is None:
            raise _damaged(f"{weights.path}: missing tensor {name}")
        if (info.dtype, info.shape) != (dtype, shape):
            raise _damaged(
                f"{weights.path}: {name}: {info.dtype} {list(info.shape)}, the config needs {dtype} {list(shape)}"
            )
    for name in weights.tensors:
        if name not in expected:
            raise _damaged(f"{weights.path}: unknown tensor {name}")
    return MappingProxyType(storage)


def _stored_as(weights: SafetensorsFile, name: str, k: int) -> Storage:
    if name in weights:
        return Storage("bf16")
    q, scale = weights.tensors.get(f"{name}.q"), weights.tensors.get(f"{name}.scale")
    if q is None or scale is None:
        raise _damaged(f"{weights.path}: missing tensor {name}")
    columns = scale.shape[-1] if scale.shape else 0
    group = k // columns if columns else 0
    if group not in GROUPS or k % group:
        raise _damaged(f"{weights.path}: {name}.scale: shape {list(scale.shape)} fits no group of {GROUPS}")
    if q.dtype == "I8":
        return Storage("int8", group)
    return Storage("int4", group, symmetric=f"{name}.min" not in weights)


def _size(path: Path) -> int:
    try:
        status = os.stat(path)
    except OSError as error:
        raise _damaged(f"{path}: cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode):
        raise _damaged(f"{path}: not a file")
    return status.st_size


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _damaged(f"{path}: cannot be read ({error.strerror})") from None


def _damaged(problem: str) -> CheckpointError:
    return CheckpointError(problem, hint="the packed model is damaged: pack it again with `flint pack --force`")
