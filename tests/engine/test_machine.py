from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends import cpu, cuda
from engine.errors import BackendError
from engine.machine import capabilities as machine
from engine.machine.capabilities import BackendState, cache_sizes, cpu_features, inspect
from engine.machine.hardware import Bandwidth
from kernels import native
from kernels.cpu import compile as compiler
from kernels.cuda.driver import Gpu

H200 = Gpu("NVIDIA H200", (9, 0), 132, 150_000_000_000, 4.8e12, 52_428_800, 232_448, True, 13010)


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "streaming_bandwidth", lambda: Bandwidth(20.0, "measured streaming read, 2 threads"))


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_gpu() -> Gpu:
        raise BackendError("No GPU for the cuda backend: no NVIDIA driver is installed", "Use --backend cpu.")

    monkeypatch.setattr(cuda, "find_gpu", find_gpu)


def with_gpu(monkeypatch: pytest.MonkeyPatch, torch_can_use_it: bool = True) -> None:
    torch = SimpleNamespace(__version__="2.13", cuda=SimpleNamespace(is_available=lambda: torch_can_use_it))
    monkeypatch.setattr(cuda, "find_gpu", lambda: H200)
    monkeypatch.setitem(sys.modules, "torch", torch)


def with_library(monkeypatch: pytest.MonkeyPatch, problem: str = "") -> None:
    class Library:
        _name = "/somewhere/libflint_cpu.so"

    def load() -> Any:
        if problem:
            raise native.LibraryMissing(problem)
        return Library()

    monkeypatch.setattr(cpu, "native_library", load)
    monkeypatch.setattr(native, "isa", lambda library: "avx2")
    monkeypatch.setattr(native, "isas", lambda library: ["avx2", "portable"])
    monkeypatch.setattr(machine, "default_threads", lambda: 2)


def with_versions(monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...] = ()) -> None:
    monkeypatch.setattr(machine, "_version", lambda package: None if package in missing else "1.2.3")


def states() -> dict[str, BackendState]:
    return {state.name: state for state in inspect().backends}


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    with_library(monkeypatch)
    report = inspect()
    assert report.auto == "cpu"
    assert [(state.name, state.runs) for state in report.backends] == [("cuda", False), ("cpu", True), ("torch", True)]
    cuda_state, cpu_state, _ = report.backends
    assert cuda_state.detail == "No GPU for the cuda backend: no NVIDIA driver is installed"
    assert cuda_state.hint == "Use --backend cpu."
    assert cpu_state.detail == "native decoder, avx2, 2 threads"
    assert report.native_library == "/somewhere/libflint_cpu.so"
    assert report.processor.isas == ("avx2", "portable")


def test_the_real_machine_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "native_library", native.load)  # an installed library, or none: nothing is compiled
    report = inspect()
    assert report.processor.cores >= 1
    assert report.processor.name
    assert bool(report.native_library) != bool(report.native_problem)
    assert report.cache_free_bytes > 0
    assert json.loads(json.dumps(report.to_json()))["auto"] == report.auto


def test_without_a_native_library_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    with_library(monkeypatch, "the native library could not be built: no C++ compiler was found")
    report = inspect()
    assert report.auto == "torch"
    assert report.native_library is None
    state = states()["cpu"]
    assert not state.runs
    assert state.detail == "the native library could not be built: no C++ compiler was found"
    assert "C++ compiler" in state.hint


def test_compiling_is_announced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_gpu(monkeypatch)
    with_library(monkeypatch)
    told: list[str] = []
    monkeypatch.setattr(native, "_loaded", None)
    monkeypatch.setattr(compiler, "DIRECTORY", tmp_path)
    monkeypatch.setattr(compiler, "find_compiler", lambda: ["c++"])
    inspect(told.append)
    assert told == ["compiling the native decoder, once per version"]
    (tmp_path / compiler.library_name()).touch()
    inspect(told.append)
    assert len(told) == 1


def test_a_gpu_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch)
    with_library(monkeypatch)
    with_versions(monkeypatch)
    report = inspect()
    assert report.auto == "cuda"
    assert report.backends[0] == BackendState("cuda", True, "megakernel on NVIDIA H200")
    assert report.gpu_bandwidth is not None
    assert report.gpu_bandwidth.gb_s == pytest.approx(4800)
    assert report.to_json()["gpu"]["sm_count"] == 132


@pytest.mark.parametrize(
    ("missing", "available", "detail", "hint"),
    [
        (("torch",), True, "torch is not installed", "Run: pip install torch"),
        (("nvidia-cuda-nvrtc",), True, "nvidia-cuda-nvrtc is not installed", "Run: pip install 'flint[cuda]'"),
        (
            (),
            False,
            "torch 2.13 cannot use NVIDIA H200",
            "Install a CUDA build of torch (https://pytorch.org/get-started).",
        ),
    ],
)
def test_a_gpu_that_cannot_be_used(
    missing: tuple[str, ...], available: bool, detail: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, available)
    with_library(monkeypatch)
    with_versions(monkeypatch, missing)
    monkeypatch.setattr(machine, "_compiles", lambda gpu: False)
    state = states()["cuda"]
    assert not state.runs
    assert state.detail.startswith(detail)
    assert state.hint == hint


def test_headers_that_pip_does_not_know_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CUDA toolkit brings them, too: what counts is whether a kernel compiles, and here one does."""
    with_gpu(monkeypatch)
    with_library(monkeypatch)
    with_versions(monkeypatch, ("nvidia-cuda-cccl",))
    monkeypatch.setattr(machine, "cache_dir", lambda: tmp_path)
    assert states()["cuda"] == BackendState("cuda", True, "megakernel on NVIDIA H200")


def test_features_are_those_that_matter(tmp_path: Path) -> None:
    x86, arm = tmp_path / "x86", tmp_path / "arm"
    x86.write_text("processor\t: 0\nflags\t\t: fpu vme avx2 avx fma avx512_vnni\n\nprocessor : 1\nflags : sse\n")
    arm.write_text("processor\t: 0\nFeatures\t: fp asimd i8mm asimddp\n")
    assert cpu_features(x86) == ("avx", "fma", "avx2", "avx512_vnni")
    assert cpu_features(arm) == ("asimd", "asimddp", "i8mm")
    assert cpu_features(tmp_path / "none") == ()


def test_cache_sizes(tmp_path: Path) -> None:
    for index, values in enumerate((("1", "Data", "32K"), ("1", "Instruction", "32K"), ("2", "Unified", "1M"), ("3",))):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, value in zip(("level", "type", "size"), values, strict=False):
            (folder / name).write_text(value + "\n")
    assert cache_sizes(tmp_path) == {"L1d": 32 << 10, "L2": 1 << 20}
    assert cache_sizes(tmp_path / "none") == {}


def test_the_driver_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\nGCC version: 12.2.0\n"
    )
    monkeypatch.setattr(machine, "_NVIDIA_VERSION", file)
    assert machine._driver_version() == "580.95.05"
    monkeypatch.setattr(machine, "_NVIDIA_VERSION", tmp_path / "none")
    assert machine._driver_version() is None


def test_no_torch_is_imported_without_a_gpu() -> None:
    code = (
        "import sys; from engine.machine import capabilities as machine\n"
        "from engine.machine.hardware import Bandwidth; from kernels import native\n"
        "from engine.backends import cpu; cpu.native_library = native.load  # nothing is compiled\n"
        "machine.streaming_bandwidth = lambda: Bandwidth(1.0, 'x')\n"
        "report = machine.inspect(); assert report.gpu or 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent.parent)
