"""What every checkpoint reader offers: the canonical tensors of engine/packed/tensors.py, one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from engine.config import ModelConfig
from engine.packed.matrix import Matrix, Storage
from engine.packed.tensors import tensor_shapes


class Checkpoint(ABC):
    """An opened checkpoint; a context manager. Tensors come in canonical names, shapes and RoPE order.

    Every read raises CheckpointError, naming file and tensor, where the values cannot be those of a model.
    """

    config: ModelConfig
    metadata: Mapping[str, Any]  # GGUF key/values; empty for other formats
    directory: Path | None  # the Hugging Face folder; None for a GGUF
    format: str  # for people, e.g. "gguf Q4_1" or "safetensors bf16"

    def names(self) -> list[str]:
        """All canonical names, in order."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """(n,) of a norm, (n, k) of a matrix. KeyError for an unknown name."""
        return self._shapes[name]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return tensor_shapes(self.config)

    @abstractmethod
    def storage(self, name: str) -> Storage | None:
        """How `read_matrix` would return the matrix; None where it would return None. Reads no values."""

    @abstractmethod
    def exact(self, name: str) -> bool:
        """Whether `read_matrix` keeps every value. Where it does not, codes are kept and scales rounded to fp16."""

    @abstractmethod
    def quantized(self, name: str) -> bool:
        """Whether the matrix is stored with fewer than 16 bits a weight."""

    @abstractmethod
    def read_matrix(self, name: str) -> Matrix | None:
        """The matrix in the packed format, where the checkpoint's own codes fit it; else None."""

    @abstractmethod
    def read_float(self, name: str, rows: slice | None = None) -> np.ndarray:
        """The values as float32: a norm [n], or a matrix [n, k] or some of its rows."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files. Arrays already read stay valid."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
