"""What an experiment is made of: a device, random weights on it, and variants with their launches and their check.

A variant's sweep touches every byte of one large random buffer once, as a decoder touches its weights once a token, so
that nothing comes from the L2 cache. Whoever runs a variant calls `check` first, then times `steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Structure, c_int, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kernels.cuda.experiments import formats

# Relative error in the 2-norm against float64 numpy.
FLOAT_TOLERANCE = 2e-5  # sums of up to 8192 products in float32
FIXED_POINT_TOLERANCE = 1e-4  # x rounded to 16 bits within its group


class Buffer(Protocol):
    """Memory of the device."""

    @property
    def address(self) -> int: ...


@dataclass(frozen=True)
class Launch:
    """One kernel. arguments: addresses (int), and ctypes values for everything else."""

    source: str
    kernel: str
    grid: int
    threads: int
    arguments: tuple[Any, ...]
    shared: int = 0
    cooperative: bool = False


@dataclass(frozen=True)
class Fill:
    """Every byte of `buffer` becomes `byte`."""

    buffer: Buffer
    byte: int


Step = Launch | Fill
Layout = Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]  # as formats.from_rows


class Device(Protocol):
    """Where the kernels run, and the owner of every buffer. shared_bytes: the most dynamic shared memory of a block."""

    sms: int
    shared_bytes: int

    def random(self, nbytes: int, seed: int) -> Buffer: ...
    def put(self, array: np.ndarray) -> Buffer: ...
    def read(self, buffer: Buffer, dtype: Any, start: int = 0, count: int = -1) -> np.ndarray:
        """`count` elements (-1: the rest) from the `start`-th on."""
        ...

    def run(self, steps: Sequence[Step]) -> None:
        """One after the other, until all have ended."""
        ...

    def timer(self, steps: Sequence[Step]) -> Callable[[], float]:
        """Calling it runs the steps once and returns the seconds they took on the device."""
        ...


@dataclass(frozen=True)
class Size:
    """A model's MLP: `layers` times gate and up [inner, hidden] and down [hidden, inner]."""

    hidden: int = 2560
    inner: int = 8192
    layers: int = 40

    def problem(self) -> str:
        """Why the kernels cannot take this size; "" where they can."""
        if self.hidden % formats.GROUP:
            return f"hidden {self.hidden} is not a multiple of {formats.GROUP}"
        if self.inner % 512:  # two rows' scales of `down` are a whole number of 16 bytes
            return f"inner {self.inner} is not a multiple of 512"
        return ""

    @property
    def total_bytes(self) -> int:
        return 3 * self.layers * formats.matrix_bytes(self.inner, self.hidden)


@dataclass(frozen=True)
class Variant:
    """units: of work in a sweep (`unit` names one); bytes: that one unit must read, 0 where bytes are not the point.
    why: one sentence. missing: why it cannot run on this device ("" where it can). base: what the lever's other
    variants are compared with."""

    lever: str
    name: str
    why: str
    unit: str
    steps: tuple[Step, ...] = ()
    units: int = 1
    bytes: int = 0
    check: Callable[[], float] = lambda: 0.0
    tolerance: float = FLOAT_TOLERANCE
    base: bool = False
    missing: str = ""


class Weights:
    """One buffer of random words and one of scales, cut into matrices of any shape, in any layout."""

    def __init__(self, device: Device, size: Size, seed: int = 7) -> None:
        self.device, self.size, self.nbytes = device, size, size.total_bytes
        self.words = device.random(self.nbytes, seed)
        count = formats.scale_count(3 * size.layers * size.inner, size.hidden)
        # Such that a product of a vector of about 1 is about 1: nibbles around 8 have a standard deviation of 4.6.
        typical = 1 / (4.6 * size.hidden**0.5)
        scales = np.random.default_rng(seed).uniform(0.5 * typical, 1.5 * typical, count)
        self.scales = device.put(scales.astype(np.float16))

    def count(self, rows: int, channels: int) -> int:
        return self.nbytes // formats.matrix_bytes(rows, channels)

    def at(self, rows: int, channels: int, index: int) -> tuple[int, int]:
        """The addresses of words and scales of matrix `index` of those of this shape."""
        words = self.words.address + index * formats.matrix_bytes(rows, channels)
        return words, self.scales.address + 2 * index * formats.scale_count(rows, channels)

    def matrix(self, layout: Layout, rows: int, channels: int, index: int) -> np.ndarray:
        """The same matrix as numpy sees it, float32."""
        n, s = formats.matrix_bytes(rows, channels) // 4, formats.scale_count(rows, channels)
        words = self.device.read(self.words, np.uint32, index * n, n)
        return layout(words, self.device.read(self.scales, np.float16, index * s, s), rows, channels)


class RowsArgument(Structure):
    """`Rows` and `Columns` of the kernels."""

    _fields_ = (("words", c_void_p), ("scales", c_void_p), ("rows", c_int), ("channels", c_int))


def relative_error(out: np.ndarray, truth: np.ndarray) -> float:
    """In the 2-norm; anything not finite, such as what nobody wrote, is infinite."""
    error = float(np.linalg.norm(out - truth) / np.linalg.norm(truth))
    return error if np.isfinite(error) else float("inf")
