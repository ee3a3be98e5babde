"""The levers: which kernels are compared, how a sweep launches them, and why one should win."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Structure, c_int, c_uint32, c_uint64, c_void_p
from functools import cached_property

import numpy as np

from kernels.cuda.experiments import formats
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

BLOCKS_PER_SM = 4  # 256 threads of 64 registers: as many as fit
STAGE_BYTES = 16384  # of the bare read: 95 % of the peak on an H200, where 4 KB stages reached 87 %
DEPTHS = (2, 3, 4, 6, 8, 12)
MOST_STAGES = 16
TENSOR_WARPS = 8  # of ring_tensor.cu
PIPELINE_BYTES = 256  # of barriers, before the slots
TABLE_BYTES = 2048
CHUNK = 1024  # channels that a warp multiplies at once; x is staged in whole chunks
SPLITS = (2, 4, 8)
INACTIVE = (0.0, 0.25, 0.5)
BARRIERS = 2000
LINE_WORDS = 32
TREE_BLOCKS = 12


class StackArgument(Structure):
    """`Stack` of mlp.cu."""

    _fields_ = (
        *((name, c_void_p) for name in ("words", "scales", "input", "hidden", "inner", "arrived")),
        *((name, c_int) for name in ("layers", "hidden_size", "inner_size", "stages")),
        ("blocks", c_uint32),
        ("across", c_int),
    )


# --- the levers -------------------------------------------------------------------------------------------------------


def reads(device: Device, w: Weights) -> list[Variant]:
    """How fast memory can be streamed at all: the measured roof of everything else."""
    lever, out = "streaming read", device.put(np.zeros(1, np.uint32))
    items = w.nbytes // STAGE_BYTES
    nbytes = items * STAGE_BYTES

    def variant(name: str, why: str, launch: Launch, base: bool = False) -> Variant:
        def check() -> float:
            device.run([Fill(out, 0), launch])
            truth = int(device.read(w.words, np.uint32, 0, nbytes // 4).sum(dtype=np.uint64)) % 2**32
            return float(int(device.read(out, np.uint32)[0]) != truth)

        return Variant(lever, name, why, "pass", (launch,), 1, nbytes, check, 0.0, base)

    blocks = device.sms * 8
    arguments = (w.words.address, c_uint64(nbytes // 16), c_uint64(blocks * 256), out.address)
    variants = [
        variant(
            "16-byte loads, 8 blocks an SM",
            "many threads with four independent loads each cover the latency without any machinery",
            Launch("ring", "read_plain", blocks, 256, arguments),
            base=True,
        )
    ]
    for stages in DEPTHS:
        name = f"bulk copies, {stages} x {STAGE_BYTES // 1024} KB"
        in_flight = stages * STAGE_BYTES // 1024
        why = (
            f"{in_flight} KB an SM, less the stage that is being emptied; an H200's bandwidth x latency is about 40 KB"
        )
        shared = PIPELINE_BYTES + stages * STAGE_BYTES
        if shared > device.shared_bytes:
            variants.append(_too_large(lever, name, why, "pass", shared, device))
            continue
        given = (w.words.address, c_int(items), c_int(STAGE_BYTES), c_int(stages), c_uint32(device.sms), out.address)
        variants.append(variant(name, why, Launch("ring", "read_ring", device.sms, 288, given, shared)))
    return variants


class _Products:
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
        shared = TABLE_BYTES + _staged(self.channels)
        return [
            Launch("gemv", kernel, grid, 256, (self.argument(i), self.x.address, 0, self.y_at(i)), shared)
            for i in range(self.count)
        ]

    def ring(self, kernel: str, matrices: int) -> list[Step] | str:
        """Launches over `matrices` matrices each; why not, where two stages do not fit."""
        extra = _staged(self.channels) if kernel == "gemv_ring" else 2 * self.channels + 8 * (self.channels // 128)
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
    p = _Products(device, w, "int4 GEMV", 2 * w.size.inner, w.size.hidden)
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
    p = _Products(device, w, "tensor-core layout", 2 * w.size.inner, w.size.hidden)
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
    p = _Products(device, w, "split K", w.size.hidden, w.size.inner)
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
        shared = TABLE_BYTES + _staged(-(-p.channels // n) + CHUNK)
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
    dense = _Products(device, w, lever, rows, channels)
    variants = [
        dense.variant("row by row, all of x", "what skipping has to beat", dense.plain("gemv_magic"), base=True)
    ]
    groups = channels // formats.GROUP
    parts_count = min(5, groups)
    tickets = device.put(np.zeros(rows // 256, np.uint32))
    parts = device.put(np.zeros(parts_count * rows, np.float32))
    for share in INACTIVE:
        p = _Products(device, w, lever, rows, channels, share)
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


def fusion(device: Device, w: Weights) -> list[Variant]:
    """silu(gate x) * (up x) in three launches and in one."""
    lever, rows, channels = "gate/up fusion", w.size.inner, w.size.hidden
    p = _Products(device, w, lever, rows, channels)
    pairs = p.count // 2
    gate, up = (device.put(np.zeros(rows, np.float32)) for _ in range(2))
    grid = min(-(-rows // 32), device.sms * BLOCKS_PER_SM)
    shared = TABLE_BYTES + _staged(channels)

    def apart(i: int) -> list[Step]:
        both = [
            Launch("gemv", "gemv_magic", grid, 256, (p.argument(2 * i + j), p.x.address, 0, out.address), shared)
            for j, out in enumerate((gate, up))
        ]
        last = (gate.address, up.address, p.y_at(i), c_int(rows))
        return [*both, Launch("gemv", "silu_multiply", -(-rows // 256), 256, last)]

    def together(i: int) -> list[Step]:
        arguments = (p.argument(2 * i), p.argument(2 * i + 1), p.x.address, p.y_at(i))
        blocks = min(-(-rows // 16), device.sms * BLOCKS_PER_SM)
        return [Launch("gemv", "gate_up", blocks, 256, arguments, shared)]

    def variant(name: str, why: str, steps: list[Step], base: bool = False) -> Variant:
        def check() -> float:
            device.run([Fill(p.y, 0xFF), *steps])
            y = device.read(p.y, np.float32, 0, pairs * rows).reshape(pairs, rows)
            worst = 0.0
            for i in {0, pairs - 1}:
                g, u = (w.matrix(formats.from_rows, rows, channels, 2 * i + j) @ p.host_x.astype(float) for j in (0, 1))
                worst = max(worst, relative_error(y[i], _silu(g) * u))
            return worst if np.isfinite(y).all() else float("inf")

        return Variant(lever, name, why, "pair", tuple(steps), pairs, 2 * p.bytes, check, FLOAT_TOLERANCE, base)

    return [
        variant(
            "three launches",
            "two products and the activation, each with a launch of its own in the graph",
            [step for i in range(pairs) for step in apart(i)],
            base=True,
        ),
        variant(
            "one launch",
            "two launches and a round trip of both results less; the bytes are the same",
            [step for i in range(pairs) for step in together(i)],
        ),
    ]


def stacks(device: Device, w: Weights) -> list[Variant]:
    """All MLPs of the model one after the other, each needing the one before it."""
    lever, h, n = "MLP, layer after layer", w.size.hidden, w.size.inner
    host_x = np.random.default_rng(13).standard_normal(h).astype(np.float32)
    x = device.put(host_x)
    hidden, inner = device.put(np.zeros(2 * h, np.float32)), device.put(np.zeros(n, np.float32))
    arrived = device.put(np.zeros(1, np.uint32))
    layer_bytes = 3 * (formats.matrix_bytes(n, h) + 2 * formats.scale_count(n, h))

    def matrix(layer: int, which: int, rows: int, channels: int) -> RowsArgument:
        return RowsArgument(*w.at(rows, channels, 3 * layer + which), rows, channels)

    def launches(layers: int) -> list[Step]:
        steps: list[Step] = []
        for layer in range(layers):
            entering = x.address if layer == 0 else hidden.address + (layer + 1) % 2 * 4 * h
            leaving = hidden.address + layer % 2 * 4 * h
            first = (matrix(layer, 0, n, h), matrix(layer, 1, n, h), entering, inner.address)
            second = (matrix(layer, 2, h, n), inner.address, entering, leaving)
            limit = device.sms * BLOCKS_PER_SM
            steps += [
                Launch("gemv", "gate_up", min(-(-n // 16), limit), 256, first, TABLE_BYTES + _staged(h)),
                Launch("gemv", "gemv_magic", min(-(-h // 32), limit), 256, second, TABLE_BYTES + _staged(n)),
            ]
        return steps

    slot = max(16 * (h // 2 + h // 128 * 2), 4 * (n // 2 + n // 128 * 2))
    rest = PIPELINE_BYTES + _staged(max(h, n)) + 2 * 8 * 4 * 4
    stages = min(MOST_STAGES, (device.shared_bytes - rest) // slot)

    def persistent(layers: int, across: bool) -> list[Step]:
        given = StackArgument(
            w.words.address,
            w.scales.address,
            x.address,
            hidden.address,
            inner.address,
            arrived.address,
            layers,
            h,
            n,
            stages,
            device.sms,
            int(across),
        )
        shared = rest + stages * slot
        return [Fill(arrived, 0), Launch("mlp", "mlp_stack", device.sms, 288, (given,), shared, cooperative=True)]

    def variant(name: str, why: str, steps: Callable[[int], list[Step]], base: bool = False) -> Variant:
        def check() -> float:
            layers = min(3, w.size.layers)
            device.run([Fill(hidden, 0xFF), Fill(inner, 0xFF), *steps(layers)])
            out = device.read(hidden, np.float32, (layers - 1) % 2 * h, h)
            truth = host_x.astype(np.float64)
            for layer in range(layers):
                gate, up = (w.matrix(formats.from_rows, n, h, 3 * layer + j) @ truth for j in (0, 1))
                truth = truth + w.matrix(formats.from_rows, h, n, 3 * layer + 2) @ (_silu(gate) * up)
            return relative_error(out, truth)

        every = tuple(steps(w.size.layers))
        return Variant(lever, name, why, "layer", every, w.size.layers, layer_bytes, check, FLOAT_TOLERANCE, base)

    variants = [
        variant(
            "two launches a layer", "memory stands still from the last block's end to the next loads", launches, True
        )
    ]
    for across, name, why in (
        (False, "one kernel, copies stop at barriers", "no launches, but every barrier still empties the ring"),
        (
            True,
            "one kernel, copies run on",
            "the next weights are in shared memory when the barrier opens: its time is hidden",
        ),
    ):
        if stages < 2:
            variants.append(_too_large(lever, name, why, "layer", rest + 2 * slot, device))
        else:
            variants.append(variant(name, why, lambda layers, across=across: persistent(layers, across)))
    return variants


def barriers(device: Device, w: Weights) -> list[Variant]:
    """How long until every SM knows that all have come."""
    lever, blocks = "grid barrier", device.sms
    lines = 2 + -(-blocks // TREE_BLOCKS)
    words = device.put(np.zeros(max(lines * LINE_WORDS, blocks), np.uint32))
    notes, errors = device.put(np.zeros(2 * blocks, np.uint32)), device.put(np.zeros(1, np.uint32))

    def variant(kind: str, name: str, why: str, base: bool = False) -> Variant:
        def steps(count: int, checked: bool) -> list[Step]:
            given = (words.address, c_int(count), c_uint32(blocks), notes.address, errors.address if checked else 0)
            return [Fill(words, 0), Launch("barriers", f"barrier_{kind}", blocks, 256, given, 0, cooperative=True)]

        def check() -> float:
            device.run([Fill(errors, 0), Fill(notes, 0), *steps(50, checked=True)])
            passed = (device.read(notes, np.uint32) >= 49).all()
            return float(device.read(errors, np.uint32)[0]) if passed else float("inf")

        return Variant(lever, name, why, "barrier", tuple(steps(BARRIERS, False)), BARRIERS, 0, check, 0.0, base)

    return [
        variant(
            "cooperative_groups",
            "cooperative_groups",
            "an atomic that must return before it polls, between two fences",
            base=True,
        ),
        variant(
            "counter", "one counter, one poller", "an addition with release semantics needs no answer and no fence"
        ),
        variant(
            "every_warp_polls", "one counter, every warp polls", "polls queue at one address, in front of the arrivals"
        ),
        variant("flags", "a flag for each SM", f"arrivals do not queue, but every SM reads {blocks} words"),
        variant(
            "tree",
            f"a tree of {TREE_BLOCKS}",
            "shorter queues, but three trips through the L2 cache one after the other",
        ),
    ]


# In the order of their tables; a key is what --only names.
LEVERS: dict[str, Callable[[Device, Weights], list[Variant]]] = {
    "read": reads,
    "gemv": products,
    "tensor": tensor_cores,
    "split": splits,
    "sparsity": sparsity,
    "fusion": fusion,
    "mlp": stacks,
    "barrier": barriers,
}


def _staged(channels: int) -> int:
    """Bytes of x in shared memory, in whole chunks."""
    return 4 * -(-channels // CHUNK) * CHUNK


def _silu(v: np.ndarray) -> np.ndarray:
    return v / (1.0 + np.exp(-v))


def _too_large(lever: str, name: str, why: str, unit: str, shared: int, device: Device) -> Variant:
    missing = f"needs {shared:,} bytes of shared memory, a block may have {device.shared_bytes:,}"
    return Variant(lever, name, why, unit, missing=missing)
