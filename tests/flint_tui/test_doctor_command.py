"""`flint doctor`: what a person reads, JSON, and the exit code."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from engine.machine import capabilities as machine
from engine.machine.capabilities import BackendState, Processor, Report
from engine.machine.hardware import Bandwidth
from flint_tui.cli import app
from kernels.cuda.driver import Gpu

PLAIN = Report(
    flint="0.1.0",
    python="3.11.7",
    system="Linux 6.1 x86_64",
    processor=Processor("Some CPU", 8, 8, 4.0, ("avx2", "fma"), {"L1d": 32 << 10, "L3": 32 << 20}, ("avx2",)),
    memory_bytes=24 << 30,
    bandwidth=Bandwidth(29.76, "measured streaming read, 8 threads"),
    native_library="/cache/lib.so",
    native_problem="",
    gpu=None,
    gpu_problem="No GPU for the cuda backend: no NVIDIA driver is installed",
    gpu_bandwidth=None,
    driver=None,
    packages={"torch": "2.13.0", "nvidia-cuda-nvrtc": None, "cuda-core": "1.2.2"},
    backends=(
        BackendState("cuda", False, "No GPU for the cuda backend: [bold]x", "Use --backend cpu."),
        BackendState("cpu", True, "native decoder, avx2, 8 threads"),
        BackendState("torch", True, "torch 2.13.0, the float32 reference; slow"),
    ),
    cache_dir="/cache",
    cache_free_bytes=10**11,
    models=2,
    models_bytes=198_000_000,
)
H200 = Gpu("NVIDIA H200", (9, 0), 132, 141 << 30, 4.8e12, 50 << 20, 232_448, True, 13010)
ON_GPU = dataclasses.replace(
    PLAIN,
    gpu=H200,
    gpu_bandwidth=Bandwidth(4800, "driver"),
    driver="580.95.05",
    backends=(BackendState("cuda", True, "megakernel on NVIDIA H200"), *PLAIN.backends[1:]),
)
NOTHING = dataclasses.replace(PLAIN, backends=tuple(dataclasses.replace(s, runs=False) for s in PLAIN.backends))


def run(report: Report, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(machine, "inspect", lambda notify: report)
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["doctor", *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run(PLAIN, monkeypatch)
    assert code == 0
    assert lines(text) == [
        "flint 0.1.0 · Python 3.11.7 · Linux 6.1 x86_64",
        "processor Some CPU · 8 cores · 8 threads used · limited to 4 CPUs · avx2 fma · L1d 32 KiB, L3 32 MiB",
        "memory 24 GiB · 29.8 GB/s (measured streaming read, 8 threads)",
        "native library /cache/lib.so",
        "GPU none",
        "CUDA NVRTC not installed · cuda-core 1.2.2 · torch 2.13.0",
        "models 2 packed, 198 MB · /cache (100 GB free)",
        "no cuda No GPU for the cuda backend: [bold]x",
        "Use --backend cpu.",
        "runs cpu native decoder, avx2, 8 threads",
        "runs torch torch 2.13.0, the float32 reference; slow",
        "--backend auto takes cpu.",
    ]


def test_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = run(ON_GPU, monkeypatch)
    assert (
        "GPU NVIDIA H200 · compute capability 9.0 · 132 SMs · 141 GiB · L2 50 MiB · "
        "4,800 GB/s (driver: memory clock x bus width)"
    ) in lines(text)
    assert "CUDA driver 580.95.05 · CUDA 13.1 · NVRTC not installed · cuda-core 1.2.2 · torch 2.13.0" in lines(text)
    assert lines(text)[-1] == "--backend auto takes cuda."


def test_a_machine_where_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = run(dataclasses.replace(NOTHING, native_library=None, native_problem="no compiler"), monkeypatch)
    assert code == 1
    assert "native library none: no compiler" in lines(text)
    assert lines(text)[-1] == "No backend will run here."


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = run(ON_GPU, monkeypatch, "--json")
    found = json.loads(text)
    assert found["auto"] == "cuda"
    assert found["gpu"]["name"] == "NVIDIA H200"
    assert found["bandwidth"] == {"gb_s": 29.76, "source": "measured streaming read, 8 threads"}
    assert [state["runs"] for state in found["backends"]] == [True, True, True]


def test_a_narrow_terminal_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "inspect", lambda notify: PLAIN)
    monkeypatch.setenv("COLUMNS", "50")
    text = CliRunner().invoke(app, ["doctor"]).stdout
    assert max(map(len, text.splitlines())) <= 50
    assert "measured streaming read, 8 threads" in " ".join(lines(text))
