"""How the comparison with llama.cpp keeps other processes out of its figures, and what it prints."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from engine.bench import cpu_peers


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Processors that others use during run after run; a run takes one second, the last share stays."""
    shares: list[float] = []
    spent = itertools.accumulate(itertools.chain((0.0,), shares_then_last(shares)))
    monkeypatch.setattr(cpu_peers, "STAT", Path(__file__))  # a file that exists on any system
    monkeypatch.setattr(cpu_peers, "others_seconds", lambda: next(spent))
    clock = itertools.count()
    monkeypatch.setattr(cpu_peers.time, "monotonic", lambda: float(next(clock)))
    return shares


def shares_then_last(shares: list[float]) -> Any:
    """Each share counts between the two readings of a run, and nothing between two runs."""
    i = 0
    while True:
        yield shares[min(i, len(shares) - 1)]
        yield 0.0
        i += 1


def test_a_disturbed_run_is_repeated_until_others_are_quiet(load: list[float]) -> None:
    load += [1.2, 0.4, 0.05, 0.0]
    runs = itertools.count(1)
    assert cpu_peers.in_quiet(lambda: {"run": next(runs)}, 0.1) == {"run": 3, "others": pytest.approx(0.05)}


def test_it_gives_up_and_says_what_others_used(load: list[float]) -> None:
    load += [0.7]
    runs = itertools.count(1)
    answer = cpu_peers.in_quiet(lambda: {"run": next(runs)}, 0.1)
    assert answer == {"run": cpu_peers.ATTEMPTS, "others": pytest.approx(0.7)}


def test_without_a_limit_one_run_is_enough(load: list[float]) -> None:
    load += [0.7]
    assert cpu_peers.in_quiet(dict, None) == {"others": pytest.approx(0.7)}


def test_the_report_names_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    ours = {
        "ids": [1] * 129,
        "decode_s": 0.5,
        "ttft_s": 0.025,
        "prefill_s": 0.4,
        "decode_bytes": 12.8e9,
        "bandwidth_gb_s": [30.0, 32.0],
        "step_s": {"1": 0.004, "2": 0.005, "4": 0.006, "8": 0.01},
        "chat_memory": 140e6,
        "peak_memory": 150e6,
        "weight_bytes": 100e6,
        "others": 0.1,
    }
    theirs = {"ids": [1] * 129, "decode_s": 1.0, "ttft_s": 0.1, "prefill_s": 1.6, "others": 0.2}
    cpu_peers.report([{"flint": ours, "llama.cpp": theirs}] * 5)
    printed = capsys.readouterr().out
    for figure in (
        "decode, tok/s: flint 256.0 (256.0 to 256.0); llama.cpp 128.0",
        "ratio 100.0% faster (x2.000",
        "prompt of 512, tok/s: flint 1280.0",
        "M = 4 against M = 1: 1.50",
        "MBU 0.80 (0.80 to 0.80)",
        "peak memory after 165 tokens: 1.40",
        "peak memory after a prompt of 512: 1.50",
        "processors that others used: 0.15 (0.10 to 0.20)",
    ):
        assert figure in printed
