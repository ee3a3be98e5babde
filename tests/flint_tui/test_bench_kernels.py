"""`flint bench kernels`: its tables and JSON on an emulated GPU, and what it says where there is none."""

from __future__ import annotations

import json

import pytest

from kernels.cuda.driver import GpuUnavailable
from tests.flint_tui.command_line import flint
from tests.kernels.emulated import EmulatedDevice, libraries

SMALL = ("--hidden", "256", "--inner", "512", "--layers", "2", "--rounds", "5")
needs_compiler = pytest.mark.skipif(not libraries(), reason="no g++ to run the kernels on the CPU")


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*arguments, **named):
        raise GpuUnavailable("no NVIDIA driver is installed", "use --backend cpu")

    monkeypatch.setattr("kernels.cuda.experiments.gpu.Driver", absent)
    result = flint("bench", "kernels")
    assert (result.code, result.stdout) == (1, "")
    assert result.error == "flint bench kernels needs an NVIDIA GPU: no NVIDIA driver is installed"
    assert result.hint == ""


def test_torch_must_see_the_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr("kernels.cuda.experiments.gpu.CudaDevice", lambda *arguments: EmulatedDevice())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a CUDA build of torch" in flint("bench", "kernels").error


@needs_compiler
def test_tables_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    device = EmulatedDevice(clock=lambda steps: 1e-5 * len(steps))
    monkeypatch.setattr("engine.bench.levers.open_device", lambda progress: device)
    result = flint("bench", "kernels", *SMALL, "--only", "gemv,barrier")
    assert result.code == 0, result.stderr
    text = result.stdout
    assert "NVIDIA H200" in text
    assert "peak: 4,800 GB/s, datasheet of the H200 SXM" in text
    assert "activation sparsity" not in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for expected in ("streaming read, each pass", "int4 GEMV, each matrix", "grid barrier, each barrier", "base"):
        assert expected in text
    out = json.loads(flint("bench", "kernels", *SMALL, "--only", "fusion", "--json").stdout)
    assert (out["bench"], out["gpu"], out["rounds"], out["hidden"]) == ("kernels", "NVIDIA H200", 5, 256)
    apart, together = (row for row in out["rows"] if row["lever"] == "gate/up fusion")
    assert len(apart["samples_s"]) == 5
    assert together["speed"] == pytest.approx(3.0)  # a third of the launches, by this test's clock


@needs_compiler
def test_a_wrong_kernel_is_told_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice()
    monkeypatch.setattr("engine.bench.levers.open_device", lambda progress: device)
    monkeypatch.setattr("kernels.cuda.experiments.mlps.relative_error", lambda out, truth: 0.5)
    result = flint("bench", "kernels", *SMALL, "--only", "fusion")
    assert result.code == 1
    assert "one launch: wrong: error 5.0e-01" in result.stdout


def test_bad_options_are_usage_errors() -> None:
    assert flint("bench", "kernels", "--only", "everything").code == 2
