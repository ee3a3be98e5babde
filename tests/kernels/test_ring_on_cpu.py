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
from kernels.cuda.reference import Reference

DIMS = replace(on_cpu.small(256, 4, 2, 64, 512, layers=1), vocab=4000)  # a head of many stages
STAGES, ROUND = 5, 2  # a warp reads every second stage of the head
SEEDS = (1, 2, 5, 7, 11)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to run the kernel on the CPU"),
]


def errors(folder: Path, monkeypatch: pytest.MonkeyPatch, window: int | None = None) -> list[float]:
    """Relative error of a step's logits by seed; infinite where any is NaN. window: in spite of what the plan says."""

    def planned(*arguments: Any) -> Any:
        plan = plan_of(*arguments[:5], tuning={"STAGES": STAGES})
        assert round_of_head(plan) == ROUND
        if window is not None:
            plan.constants["HEAD_WINDOW"] = str(window)
        return plan

    monkeypatch.setattr(on_cpu, "plan_of", planned)
    gpu = on_cpu.EmulatedGpu(folder, DIMS, Case(DIMS, "int4", 128), 1, 3)
    expected, found = Reference(gpu.model, 64).step([7], 0)[0], []
    for seed in SEEDS:
        p, logits = gpu._parameters(), np.full((1, DIMS.vocab), np.nan, np.float32)
        p.logits, p.tokens[0] = logits.ctypes.data, 7
        p.columns, p.position, p.max_tokens = 1, 0, 1
        assert gpu._run(ctypes.byref(p), ctypes.c_uint64(seed)) == 0, "deadlock"
        error = float((torch.from_numpy(logits) - expected).norm() / expected.norm())
        found.append(error if np.isfinite(error) else float("inf"))
    return found


def round_of_head(plan: Any) -> int:
    return int(plan.constants["CONSUMER_WARPS"]) // int(plan.constants["HEAD_UNITS_PER_STAGE"])


def test_the_plans_window_waits_for_every_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert max(errors(tmp_path, monkeypatch)) < 3e-3


def test_one_stage_more_in_flight_reads_what_has_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The bound is sharp, and the test above could fail."""
    assert max(errors(tmp_path, monkeypatch, window=STAGES - ROUND + 1)) > 3e-3
