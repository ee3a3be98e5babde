"""The decode kernel's ring where copies end late and in any order (sm.h): nothing is read before it has come."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.kernels.test_megakernel_on_cpu as on_cpu
from kernels.cuda.check import Case, plan_of
from kernels.cuda.phases import KernelDims
from kernels.cuda.reference import Reference

DIMS = replace(on_cpu.small(256, 4, 2, 64, 512, layers=1), vocab=8000)  # a head of many stages
STAGES, ROUND = 5, 2  # a warp reads every second stage of the head
SEEDS = (1, 2, 5, 7, 11)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to run the kernel on the CPU"),
]


def errors(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    dims: KernelDims,
    tuning: dict[str, int],
    turn: int,
    forced: dict[str, int] | None = None,
) -> list[float]:
    """Relative error of a step's logits by seed; infinite where any is NaN. turn: stages of a round of the warps, of
    any phase. forced: constants in spite of what the plan says."""

    def planned(*arguments: Any) -> Any:
        plan = plan_of(*arguments[:5], tuning=tuning, clusters=False)
        assert {rounds(plan, phase) for phase in ("QKV", "O", "GATE_UP", "DOWN", "HEAD")} == {turn}
        plan.constants.update({name: str(value) for name, value in (forced or {}).items()})
        return plan

    monkeypatch.setattr(on_cpu, "plan_of", planned)
    gpu = on_cpu.EmulatedGpu(folder, dims, Case(dims, "int4", 128), 1, 3)
    expected, found = Reference(gpu.model, 64).step([7], 0)[0], []
    for seed in SEEDS:
        p, logits = gpu._parameters(), np.full((1, dims.vocab), np.nan, np.float32)
        p.logits, p.tokens[0] = logits.ctypes.data, 7
        p.columns, p.position, p.max_tokens = 1, 0, 1
        assert gpu._run(ctypes.byref(p), ctypes.c_uint64(seed)) == 0, "deadlock"
        error = float((torch.from_numpy(logits) - expected).norm() / expected.norm())
        found.append(error if np.isfinite(error) else float("inf"))
    return found


def rounds(plan: Any, phase: str) -> int:
    return int(plan.constants["CONSUMER_WARPS"]) // int(plan.constants[f"{phase}_UNITS_PER_STAGE"])


# (shape, tuning, stages of a round, what the plan must not say): a head of many stages; and a ring of just one round,
# whose phases have more stages than that, in rounds of a warp less.
LONG_HEAD = (DIMS, {"STAGES": STAGES}, ROUND, {"HEAD_WINDOW": STAGES - ROUND + 1})
FULL_RING = (
    replace(on_cpu.small(896, 14, 2, 64, 896, layers=1), vocab=256),
    {"STAGES": 4, "STAGE_BYTES": 4352, "HEAD_WINDOW": 1},
    4,
    {"LATE_WINDOW": 3},
)


@pytest.mark.parametrize("case", [LONG_HEAD, FULL_RING], ids=["long head", "full ring"])
def test_the_plans_windows_wait_for_every_copy(case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dims, tuning, turn, _ = case
    assert max(errors(tmp_path, monkeypatch, dims, tuning, turn)) < 3e-3


def test_one_stage_more_in_flight_reads_what_has_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The bound is sharp, and the test above could fail."""
    assert max(errors(tmp_path, monkeypatch, *LONG_HEAD)) > 3e-3


def test_two_stages_more_in_flight_than_a_full_ring_bears_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Here, a warp that reads too early also lets go of what others wait for."""
    with pytest.raises(AssertionError, match="deadlock"):
        errors(tmp_path, monkeypatch, *FULL_RING)
