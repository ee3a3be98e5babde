"""engine/bench/levers.py on an emulated GPU: what is timed, what is refused, and the figures of known samples."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from engine.bench.levers import Outcome, Row, chosen, measure, outcome_json, run
from engine.errors import BackendError, DeviceOutOfMemory, UsageError
from engine.machine.hardware import Bandwidth
from kernels.build import CompileError
from kernels.cuda.experiments.levers import LEVERS
from kernels.cuda.experiments.sweep import Fill, Size, Variant
from tests.kernels.emulated import EmulatedDevice, libraries

SIZE = Size(hidden=256, inner=512, layers=2)
needs_compiler = pytest.mark.skipif(not libraries(), reason="no g++ to run the kernels on the CPU")


class ScriptedDevice(EmulatedDevice):
    """Sweeps take the seconds of their first step's byte, so that a variant's clock is known."""

    def __init__(self) -> None:
        super().__init__(clock=lambda steps: steps[0].byte * 1e-6)  # pyright: ignore[reportAttributeAccessIssue]


def variant(device: EmulatedDevice, name: str, microseconds: int, **fields) -> Variant:
    steps = (Fill(device.put(np.zeros(1, np.uint32)), microseconds),)
    return replace(Variant("lever", name, "because", "matrix", steps, units=10, bytes=1000), **fields)


def test_variants_take_turns_after_warm_ups_and_seconds_are_for_one_unit() -> None:
    device = ScriptedDevice()
    a, b = variant(device, "a", 20, base=True), variant(device, "b", 10)
    rows = measure([a, b], device, rounds=5)
    assert device.timed == [a.steps, b.steps] * 7
    assert [row.samples for row in rows] == [pytest.approx((2e-6,) * 5), pytest.approx((1e-6,) * 5)]
    assert rows[1].gb_s == pytest.approx(1.0)
    outcome = Outcome("GPU", SIZE, 5, Bandwidth(4.0, "datasheet"), tuple(rows), {})
    comparison = outcome.comparison(rows[1])
    assert comparison is not None
    assert (comparison.ratio, comparison.verdict) == (pytest.approx(2.0), "faster")
    assert outcome.comparison(rows[0]) is None
    (first, second) = outcome_json(outcome)["rows"]
    assert (second["of_peak"], second["of_read"], second["speed"]) == (pytest.approx(0.25), None, pytest.approx(2.0))
    assert (first["base"], first["speed"]) == (True, None)


def test_a_wrong_variant_is_not_timed_and_a_missing_one_is_told() -> None:
    device = ScriptedDevice()

    def refused() -> float:
        raise CompileError("broken.cu does not compile for sm_90a: error")

    rows = measure(
        [
            variant(device, "right", 9, base=True, check=lambda: 1e-6),
            variant(device, "wrong", 1, check=lambda: 1e-3),
            variant(device, "unwritten", 1, check=lambda: float("inf")),
            variant(device, "absent", 1, missing="needs more shared memory"),
            variant(device, "broken", 1, check=refused),
        ],
        device,
        rounds=1,
    )
    assert [bool(row.samples) for row in rows] == [True, False, False, False, False]
    assert rows[1].problem == "wrong: error 1.0e-03 where 2e-05 is allowed"
    assert rows[3].problem == "needs more shared memory"
    assert rows[4].problem == "does not compile: broken.cu does not compile for sm_90a: error"
    outcome = Outcome("GPU", SIZE, 1, None, tuple(rows), {})
    assert not outcome.complete
    json.dumps(outcome_json(outcome), allow_nan=False)
    assert replace(outcome, rows=tuple(row for row in rows if row.name in ("right", "absent"))).complete


def test_the_measured_read_is_the_fastest_one() -> None:
    def row(name: str, lever: str, seconds: float) -> Row:
        return Row(lever, name, "", "pass", 10**9, False, 0.0, (seconds,))

    rows = (row("slow", "streaming read", 1.0), row("fast", "streaming read", 0.5), row("other", "int4 GEMV", 0.1))
    assert Outcome("GPU", SIZE, 1, None, rows, {}).read == Bandwidth(2.0, "fast")


@needs_compiler
def test_every_lever_is_measured_through_the_driver() -> None:
    device = EmulatedDevice()
    outcome = run(device, SIZE, 5, chosen(None))
    assert [row.problem for row in outcome.rows if row.error is not None and row.problem] == []
    assert outcome.complete
    assert len({row.lever for row in outcome.rows}) == len(LEVERS)
    assert outcome.read is not None
    assert outcome.peak is not None
    assert outcome.peak.source == "datasheet of the H200 SXM"
    timed = [row for row in outcome.rows if row.samples]
    assert all(len(row.samples) == 5 for row in timed)
    assert len(timed) > 25
    json.dumps(outcome_json(outcome), allow_nan=False)


def test_what_is_refused() -> None:
    device = EmulatedDevice()
    with pytest.raises(UsageError, match="inner 768 is not a multiple of 512"):
        run(device, Size(256, 768, 2), 1, ["read"])
    device = EmulatedDevice(l2_bytes=60 << 20)
    with pytest.raises(UsageError, match="less than 4 times the L2 cache"):
        run(device, SIZE, 1, ["read"])
    device = EmulatedDevice()
    device.library.memory = (100_000, 200_000)
    with pytest.raises(
        DeviceOutOfMemory, match=r"of weights with what goes with them do not fit .* on the NVIDIA H200"
    ):
        run(device, SIZE, 1, ["read"])
    with pytest.raises(UsageError, match="No lever named 'gemm'"):
        chosen("gemv,gemm")
    assert chosen("mlp,gemv") == ["read", "gemv", "mlp"]


def test_a_failing_gpu_is_one_error() -> None:
    device = EmulatedDevice()
    device.library.fail["cuLaunchKernel"] = 719
    with pytest.raises(BackendError, match="read: the GPU reports cuLaunchKernel: CUDA_ERROR_LAUNCH_FAILED"):
        run(device, SIZE, 1, ["read"])
