"""Levers of an MLP: gate and up in one launch, and layer after layer in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, c_int, c_uint32, c_void_p

import numpy as np

from kernels.cuda.experiments import formats
from kernels.cuda.experiments.launching import (
    BLOCKS_PER_SM,
    MOST_STAGES,
    PIPELINE_BYTES,
    TABLE_BYTES,
    staged,
    too_large,
)
from kernels.cuda.experiments.products import Products
from kernels.cuda.experiments.sweep import (
    FLOAT_TOLERANCE,
    Device,
    Fill,
    Launch,
    RowsArgument,
    Step,
    Variant,
    Weights,
    relative_error,
)


class StackArgument(Structure):
    """`Stack` of mlp.cu."""

    _fields_ = (
        *((name, c_void_p) for name in ("words", "scales", "input", "hidden", "inner", "arrived")),
        *((name, c_int) for name in ("layers", "hidden_size", "inner_size", "stages")),
        ("blocks", c_uint32),
        ("across", c_int),
    )


def fusion(device: Device, w: Weights) -> list[Variant]:
    """silu(gate x) * (up x) in three launches and in one."""
    lever, rows, channels = "gate/up fusion", w.size.inner, w.size.hidden
    p = Products(device, w, lever, rows, channels)
    pairs = p.count // 2
    gate, up = (device.put(np.zeros(rows, np.float32)) for _ in range(2))
    grid = min(-(-rows // 32), device.sms * BLOCKS_PER_SM)
    shared = TABLE_BYTES + staged(channels)

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
                Launch("gemv", "gate_up", min(-(-n // 16), limit), 256, first, TABLE_BYTES + staged(h)),
                Launch("gemv", "gemv_magic", min(-(-h // 32), limit), 256, second, TABLE_BYTES + staged(n)),
            ]
        return steps

    slot = max(16 * (h // 2 + h // 128 * 2), 4 * (n // 2 + n // 128 * 2))
    rest = PIPELINE_BYTES + staged(max(h, n)) + 2 * 8 * 4 * 4
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
            variants.append(too_large(lever, name, why, "layer", rest + 2 * slot, device))
        else:
            variants.append(variant(name, why, lambda layers, across=across: persistent(layers, across)))
    return variants


def _silu(v: np.ndarray) -> np.ndarray:
    return v / (1.0 + np.exp(-v))
