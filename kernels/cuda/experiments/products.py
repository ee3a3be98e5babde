"""Levers of one product y = W x: how weights are loaded, converted, laid out, split, and skipped."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int, c_uint32
from functools import cached_property

import numpy as np

from kernels.cuda.experiments import formats
from kernels.cuda.experiments.launching import (
    BLOCKS_PER_SM,
    CHUNK,
    MOST_STAGES,
    PIPELINE_BYTES,
    TABLE_BYTES,
    staged,
)
from kernels.cuda.experiments.sweep import (
    FIXED_POINT_TOLERANCE,
    FLOAT_TOLERANCE,
    Buffer,
    Device,
    Fill,
    Launch,
    Layout,
    RowsArgument,
    Step,
    Variant,
    Weights,
    relative_error,
)

TENSOR_WARPS = 8  # of ring_tensor.cu
SPLITS = (2, 4, 8)
INACTIVE = (0.0, 0.25, 0.5)


class Products:
    """Products of one shape: y = W x for every matrix of the buffer, and the check of any way to compute them."""

    def __init__(self, device: Device, w: Weights, lever: str, rows: int, channels: int, inactive: float = 0.0) -> None:
        self.device, self.w, self.lever, self.rows, self.channels = device, w, lever, rows, channels
        self.count = w.count(rows, channels)
        rng = np.random.default_rng(11)
        host = rng.standard_normal(channels).astype(np.float32)
        host[rng.permutation(channels)[: round(inactive * channels)]] = 0.0
        self.host_x, self.x = host, device.put(host)
        self.y = device.put(np.zeros(self.count * rows, np.float32))
        self._truths: dict[tuple[Layout, int], np.ndarray] = {}
        self.bytes = formats.matrix_bytes(rows, channels) + 2 * formats.scale_count(rows, channels)

    def y_at(self, index: int) -> int:
        return self.y.address + 4 * self.rows * index

    def argument(self, index: int) -> RowsArgument:
        return RowsArgument(*self.w.at(self.rows, self.channels, index), self.rows, self.channels)

    def variant(
        self,
        name: str,
        why: str,
        steps: Sequence[Step],
        layout: Layout = formats.from_rows,
        *,
        base: bool = False,
        nbytes: int = 0,
        tolerance: float = FLOAT_TOLERANCE,
    ) -> Variant:
        """steps: one sweep, which must write all of y."""

        def check() -> float:
            self.device.run([Fill(self.y, 0xFF), *steps])
            y = self.device.read(self.y, np.float32).reshape(self.count, self.rows)
            if not np.isfinite(y).all():
                return float("inf")
            return max(relative_error(y[i], self.truth(layout, i)) for i in {0, self.count // 2, self.count - 1})

        given = nbytes or self.bytes
        return Variant(self.lever, name, why, "matrix", tuple(steps), self.count, given, check, tolerance, base)

    def plain(self, kernel: str) -> list[Step]:
        """One launch a matrix of a kernel of gemv.cu."""
        rows_a_warp = 1 if kernel == "gemv_one_row" else 4
        grid = min(-(-self.rows // (8 * rows_a_warp)), self.device.sms * BLOCKS_PER_SM)
        shared = TABLE_BYTES + staged(self.channels)
        return [
            Launch("gemv", kernel, grid, 256, (self.argument(i), self.x.address, 0, self.y_at(i)), shared)
            for i in range(self.count)
        ]

    def ring(self, kernel: str, matrices: int) -> list[Step] | str:
        """Launches over `matrices` matrices each; why not, where two stages do not fit."""
        extra = staged(self.channels) if kernel == "gemv_ring" else 2 * self.channels + 8 * (self.channels // 128)
        slot = formats.TILE_ROWS * (self.channels // 2 + self.channels // 128 * 2)
        stages = min(MOST_STAGES, (self.device.shared_bytes - PIPELINE_BYTES - extra) // slot)
        fewest = 2 if kernel == "gemv_ring" else TENSOR_WARPS
        stages -= 0 if kernel == "gemv_ring" else stages % TENSOR_WARPS  # see ring_tensor.cu
        if stages < fewest:
            return f"{fewest} stages of {slot:,} bytes do not fit {self.device.shared_bytes:,} of shared memory"
        shared = PIPELINE_BYTES + stages * slot + extra
        tail = (c_int(self.channels), c_int(stages), c_uint32(self.device.sms))
        steps: list[Step] = []
        for i in range(0, self.count, matrices):
            rows = min(matrices, self.count - i) * self.rows
            words, scales = self.w.at(self.rows, self.channels, i)
            if kernel == "gemv_ring":
                arguments = (words, scales, self.x.address, self.y_at(i), c_int(rows), *tail)
                steps.append(Launch("ring", kernel, self.device.sms, 288, arguments, shared))
            else:
                x, of_x = self.fixed_point
                arguments = (
                    words,
                    scales,
                    x.address,
                    of_x.address,
                    self.y_at(i),
                    c_int(rows // formats.TILE_ROWS),
                    *tail,
                )
                steps.append(Launch("ring_tensor", kernel, self.device.sms, 288, arguments, shared))
        return steps

    @cached_property
    def fixed_point(self) -> tuple[Buffer, Buffer]:
        """x as 16-bit integers, and its groups."""
        parts, groups = formats.quantise_x(self.host_x)
        return self.device.put(parts), self.device.put(groups)

    def truth(self, layout: Layout, index: int) -> np.ndarray:
        if (layout, index) not in self._truths:
            weights = self.w.matrix(layout, self.rows, self.channels, index)
            self._truths[layout, index] = weights @ self.host_x.astype(np.float64)
        return self._truths[layout, index]

    def or_missing(self, name: str, why: str, steps: list[Step] | str, layout: Layout, tolerance: float) -> Variant:
        if isinstance(steps, str):
            return Variant(self.lever, name, why, "matrix", missing=steps)
        return self.variant(name, why, steps, layout, tolerance=tolerance)


def products(device: Device, w: Weights) -> list[Variant]:
    """One int4 matrix of gate and up times one vector, one launch a matrix where nothing else is said."""
    p = Products(device, w, "int4 GEMV", 2 * w.size.inner, w.size.hidden)
    rows, tiles = formats.from_rows, formats.from_tiles
    return [
        p.variant(
            "16-byte loads, 4 rows a warp",
            "wide loads, x shared by four rows; a conversion, a shift and a mask a weight remain",
            p.plain("gemv_plain"),
            base=True,
        ),
        p.variant(
            "4-byte loads",
            "four times the load instructions for the same bytes, and a quarter of them in flight",
            p.plain("gemv_4_bytes"),
        ),
        p.variant(
            "one row a warp",
            "every row reads x from shared memory anew: eight bytes of x for each byte of weights",
            p.plain("gemv_one_row"),
        ),
        p.variant(
            "nibble into the mantissa",
            "1 + q / 16 needs no integer-to-float conversion, which runs at a fraction of the rate of a multiply-add",
            p.plain("gemv_magic"),
        ),
        p.variant(
            "byte looked up in a table",
            "one 8-byte lookup for two weights, but random bytes meet in the same banks of shared memory",
            p.plain("gemv_table"),
        ),
        p.or_missing(
            "bulk-copy ring, a launch each",
            "the ring starts empty and drains at every launch",
            p.ring("gemv_ring", 1),
            rows,
            FLOAT_TOLERANCE,
        ),
        p.or_missing(
            "bulk-copy ring, one launch",
            "copies never stop; what is left is one block's arithmetic, x read anew for every two rows",
            p.ring("gemv_ring", p.count),
            rows,
            FLOAT_TOLERANCE,
        ),
        p.or_missing(
            "ring and int8 tensor cores, one launch",
            "two masks for eight weights and no conversion at all: what the megakernel does between its hops",
            p.ring("gemv_ring_tensor", p.count),
            tiles,
            FIXED_POINT_TOLERANCE,
        ),
    ]


def tensor_cores(device: Device, w: Weights) -> list[Variant]:
    """The same product on the tensor cores, with either operand as the one that has 16 rows."""
    p = Products(device, w, "tensor-core layout", 2 * w.size.inner, w.size.hidden)
    x, of_x = p.fixed_point

    def steps(kernel: str) -> list[Step]:
        return [
            Launch(
                "tensor",
                kernel,
                p.rows // formats.TILE_ROWS,
                128,
                (*w.at(p.rows, p.channels, i), x.address, of_x.address, p.y_at(i), c_int(p.channels)),
                4 * formats.TILE_ROWS * 4,
            )
            for i in range(p.count)
        ]

    return [
        p.variant("no tensor cores", "the plain product of the table above", p.plain("gemv_plain"), base=True),
        p.variant(
            "weights are the 16 rows",
            "a product takes 512 weights and two of its eight columns carry x: tensor cores have that to spare",
            steps("tensor_weights_as_rows"),
            formats.from_tiles,
            tolerance=FIXED_POINT_TOLERANCE,
        ),
        p.variant(
            "x is the 16 rows",
            "14 of 16 rows are empty and a product takes 256 weights: twice the instructions for the same bytes",
            steps("tensor_x_as_rows"),
            formats.from_tiles,
            tolerance=FIXED_POINT_TOLERANCE,
        ),
    ]


def splits(device: Device, w: Weights) -> list[Variant]:
    """`down` has few rows and many channels: can blocks share a row?"""
    p = Products(device, w, "split K", w.size.hidden, w.size.inner)
    batches = -(-p.rows // 32)
    tickets = device.put(np.zeros(batches, np.uint32))
    parts = device.put(np.zeros(max(SPLITS) * p.rows, np.float32))
    variants = [
        p.variant(
            "none",
            f"{batches} blocks of 32 rows for {device.sms} SMs",
            p.plain("gemv_magic"),
            base=True,
        )
    ]
    for n in SPLITS:
        why = f"{n} times the blocks, each with a part of x to stage; the last one adds up {n} sums a row"
        if n * CHUNK > -(-p.channels // CHUNK) * CHUNK:
            why_not = f"{p.channels:,} channels are fewer than {n} chunks of {CHUNK:,}"
            variants.append(Variant(p.lever, f"in {n}", why, "matrix", missing=why_not))
            continue
        shared = TABLE_BYTES + staged(-(-p.channels // n) + CHUNK)
        steps = [
            Launch(
                "gemv",
                "gemv_split",
                batches * n,
                256,
                (p.argument(i), p.x.address, p.y_at(i), parts.address, tickets.address, c_int(n)),
                shared,
            )
            for i in range(p.count)
        ]
        variants.append(p.variant(f"in {n}", why, steps))
    return variants


def sparsity(device: Device, w: Weights) -> list[Variant]:
    """What is saved where a part of x is exactly zero and the weights lie channel by channel."""
    lever, rows, channels = "activation sparsity", 2 * w.size.inner, w.size.hidden
    dense = Products(device, w, lever, rows, channels)
    variants = [
        dense.variant("row by row, all of x", "what skipping has to beat", dense.plain("gemv_magic"), base=True)
    ]
    groups = channels // formats.GROUP
    parts_count = min(5, groups)
    tickets = device.put(np.zeros(rows // 256, np.uint32))
    parts = device.put(np.zeros(parts_count * rows, np.float32))
    for share in INACTIVE:
        p = Products(device, w, lever, rows, channels, share)
        active = np.count_nonzero(p.host_x) / channels
        nbytes = round(active * formats.matrix_bytes(rows, channels)) + 2 * formats.scale_count(rows, channels)
        steps = [
            Launch(
                "columns",
                "gemv_columns",
                rows // 256 * parts_count,
                256,
                (p.argument(i), p.x.address, p.y_at(i), parts.address, tickets.address, c_int(parts_count)),
                8 * 256 * 4 + formats.GROUP * 4,
            )
            for i in range(p.count)
        ]
        why = (
            "the price of the layout: 4-byte loads, listing the channels, sums over warps and blocks"
            if share == 0.0
            else f"{1 - active:.0%} of the weights are not read; GB/s counts what is"
        )
        variants.append(p.variant(f"by channel, {share:.0%} zero", why, steps, formats.from_columns, nbytes=nbytes))
    return variants
