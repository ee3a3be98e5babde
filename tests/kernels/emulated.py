"""The experiments' GPU without a GPU: their CudaDevice over a libcuda that runs kernels on the CPU."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kernels.cuda.driver import Driver
from kernels.cuda.experiments.gpu import FOLDER, SOURCES, CudaDevice
from kernels.cuda.experiments.sweep import Step
from tests.fake_cuda import LIBRARY_FLAGS, SUCCESS, FakeLibcuda

HERE = Path(__file__).parent / "cuda_on_cpu"
DEADLOCK = 719  # CUDA_ERROR_LAUNCH_FAILED


def kernels_of(source: str) -> list[str]:
    """The names of a source's kernels."""
    text = (FOLDER / f"{source}.cu").read_text(encoding="utf-8")
    named = re.findall(r"extern \"C\" __global__ void __launch_bounds__\([^)]*\)\s+(\w+)\(", text)
    return [name for name in named if name != "NAME"] + re.findall(r"^BARRIER_KERNEL\((\w+)", text, re.MULTILINE)


@functools.cache
def libraries() -> dict[str, Any]:
    """Each kernel's `launch`, all sources compiled once per run with g++; empty where there is none."""
    compiler = shutil.which("g++")
    if compiler is None:
        return {}
    folder = Path(tempfile.mkdtemp(prefix="flint-experiments-"))

    def build(source: str) -> Any:
        kernels = "".join(f"KERNEL({name})" for name in kernels_of(source))
        flags = ["-std=c++17", "-O1", *LIBRARY_FLAGS, "-w", f"-I{HERE}"]
        defines = [f'-DSOURCE="{FOLDER / source}.cu"', f"-DKERNELS={kernels}"]
        library = folder / f"{source}.so"
        subprocess.run([compiler, *flags, *defines, str(HERE / "experiments.cpp"), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library)).launch

    with ThreadPoolExecutor() as pool:
        built = dict(zip(SOURCES, pool.map(build, SOURCES), strict=True))
    return {name: built[source] for source in SOURCES for name in kernels_of(source)}


class EmulatedLibcuda(FakeLibcuda):
    """order: seed of the order in which fibers take turns."""

    order = 0

    def _cuLaunchKernel(self, kernel: Any, *rest: Any) -> int:
        grid, threads, shared = rest[0].value, rest[3].value, rest[6].value
        name = self._kernels[kernel.value - 1]
        launch, order = libraries()[name], ctypes.c_uint64(self.order)
        failed = launch(name.encode(), grid, threads, ctypes.c_size_t(shared), order, rest[8])
        return DEADLOCK if failed else SUCCESS


class EmulatedDevice(CudaDevice):
    """Runs steps on the CPU; times none: `clock` gives the seconds of each timed sweep."""

    def __init__(
        self,
        sms: int = 3,
        shared_bytes: int = 160_000,
        clock: Callable[[Sequence[Step]], float] = lambda steps: 1e-3,
        order: int = 0,
        l2_bytes: int = 64 << 10,
    ) -> None:
        library = EmulatedLibcuda(sm_count=sms)
        library.attributes[97] = shared_bytes
        library.attributes[38] = l2_bytes
        library.order = order
        self.library = library
        super().__init__(driver=Driver(library), place="cpu")
        self.timed: list[Sequence[Step]] = []
        self._clock = clock

    def _compile(self, source: str) -> bytes:
        return b""

    def timer(self, steps: Sequence[Step]) -> Callable[[], float]:
        def once() -> float:
            self.timed.append(steps)
            return self._clock(steps)

        return once
