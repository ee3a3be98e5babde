"""One weight matrix as the packed format stores it (the format itself is described in engine/packed/model.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

MatrixFormat = Literal["int4", "int8", "bf16"]
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Storage:
    """How one matrix is stored, without its values. symmetric has a meaning for int4 only."""

    format: MatrixFormat
    group: int = 0  # 32, 64 or 128; 0 for bf16
    symmetric: bool = True

    def __str__(self) -> str:
        asymmetric = "-asym" if self.format == "int4" and not self.symmetric else ""
        return f"{self.format}-g{self.group}{asymmetric}" if self.group else self.format

    def parts(self, name: str, n: int, k: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensors of weights.safetensors that hold the matrix: name -> (safetensors dtype, shape)."""
        if self.format == "bf16":
            return {name: ("BF16", (n, k))}
        if self.group not in GROUPS or k % self.group:
            raise ValueError(f"{name}: group {self.group} is not one of {GROUPS} or does not divide {k}")
        q = ("I32", (n, k // 8)) if self.format == "int4" else ("I8", (n, k))
        parts: dict[str, tuple[str, tuple[int, ...]]] = {f"{name}.q": q, f"{name}.scale": ("F16", (n, k // self.group))}
        if self.format == "int4" and not self.symmetric:
            parts[f"{name}.min"] = ("F16", (n, k // self.group))
        return parts


@dataclass(frozen=True)
class Matrix:
    """One weight matrix [n, k] (rows: outputs) in its stored form; arrays are usually views of a memory map."""

    name: str
    format: MatrixFormat
    n: int
    k: int
    group: int  # 32, 64 or 128 input channels per scale; 0 for bf16
    q: np.ndarray  # int4: int32 [n, k/8]; int8: int8 [n, k]; bf16: uint16 [n, k]
    scale: np.ndarray | None  # float16 [n, k/group]
    minimum: np.ndarray | None  # float16 [n, k/group], asymmetric int4 only

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and minima."""
        return self.q.nbytes + sum(a.nbytes for a in (self.scale, self.minimum) if a is not None)

    @property
    def storage(self) -> Storage:
        return Storage(self.format, self.group, symmetric=self.minimum is None)

    def arrays(self) -> list[np.ndarray]:
        """Values, scales, minima: what is stored, in file order."""
        return [a for a in (self.q, self.scale, self.minimum) if a is not None]

    def is_finite(self) -> bool:
        """Whether every scale and minimum, or every bf16 value, is finite (codes are by nature)."""
        return all(map(all_finite, self.arrays()[1:] if self.group else [self.q]))

    def rows(self, ids: Sequence[int]) -> Matrix:
        """The matrix of these rows, in their order: a copy."""
        index = np.asarray(ids, dtype=np.int64)
        taken = [None if a is None else a[index] for a in (self.q, self.scale, self.minimum)]
        return replace(self, n=len(index), q=taken[0], scale=taken[1], minimum=taken[2])


def all_finite(values: np.ndarray) -> bool:
    """Whether no float32, float16, or bf16 (as uint16) value is infinite or NaN.

    16-bit values by their exponent bits: np.isfinite takes four times as long on float16, and knows no bf16.
    """
    match values.dtype.name:
        case "float16":
            exponent = np.uint16(0x7C00)
        case "uint16":
            exponent = np.uint16(0x7F80)
        case _:
            return bool(np.isfinite(values).all())
    return not ((values.view(np.uint16) & exponent) == exponent).any()
