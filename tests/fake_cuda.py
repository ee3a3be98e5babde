"""A libcuda without a GPU: answers as told, fails on demand, and can run plain kernels on the CPU.

`FakeLibcuda` stands where kernels.cuda.driver.Driver expects the loaded library. `emulator()` compiles the kernels for
the CPU (tests/kernels/cuda_on_cpu) once per run, with g++.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SUCCESS = 0
NAMES = {2: "CUDA_ERROR_OUT_OF_MEMORY", 100: "CUDA_ERROR_NO_DEVICE", 719: "CUDA_ERROR_LAUNCH_FAILED"}
NAMES |= {720: "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", 804: "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"}

LIBRARY_FLAGS = ["-fPIC", "-shared", "-fno-strict-aliasing"]
if sys.platform == "linux":  # else emulators loaded into one process would share their inline and template variables
    LIBRARY_FLAGS.append("-fno-gnu-unique")

Launch = Callable[[str, tuple[int, int, int], int, Any], int]  # kernel, grid, threads, void** -> CUresult


class FakeLibcuda:
    """One device, by default an H200 with driver 13.0. `fail` maps a function's name to the CUresult it returns."""

    def __init__(
        self,
        *,
        version: int = 13000,
        devices: int = 1,
        capability: tuple[int, int] = (9, 0),
        sm_count: int = 132,
        memory: tuple[int, int] = (140 << 30, 141 << 30),
        blocks_per_sm: int = 1,
        fail: dict[str, int] | None = None,
        launch: Launch | None = None,
    ) -> None:
        self.version, self.devices, self.memory, self.blocks_per_sm = version, devices, memory, blocks_per_sm
        self.attributes = {16: sm_count, 36: 3201000, 37: 6016, 38: 60 << 20, 75: capability[0], 76: capability[1]}
        self.attributes |= {95: 1, 97: 232448}
        self.fail = dict(fail or {})
        self.launch = launch
        self.calls: list[str] = []
        self._kernels: list[str] = []
        self._pinned: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.fail:
                return self.fail[name]
            return getattr(self, f"_{name}", lambda *_: SUCCESS)(*arguments)

        return call

    def _cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = self.version
        return SUCCESS

    def _cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = self.devices
        return SUCCESS

    def _cuDeviceGetName(self, buffer: Any, size: int, device: Any) -> int:
        buffer.value = b"NVIDIA H200"
        return SUCCESS

    def _cuDeviceTotalMem_v2(self, out: Any, device: Any) -> int:
        out._obj.value = self.memory[1]
        return SUCCESS

    def _cuDeviceGetAttribute(self, out: Any, which: int, device: Any) -> int:
        out._obj.value = self.attributes[which]
        return SUCCESS

    def _cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        free._obj.value, total._obj.value = self.memory
        return SUCCESS

    def _cuGetErrorName(self, code: int, out: Any) -> int:
        out._obj.value = NAMES.get(code, "CUDA_ERROR_UNKNOWN").encode()
        return SUCCESS

    def _cuMemHostAlloc(self, out: Any, size: int, flags: int) -> int:
        memory = ctypes.create_string_buffer(size)
        out._obj.value = ctypes.addressof(memory)
        self._pinned[ctypes.addressof(memory)] = memory
        return SUCCESS

    def _cuMemHostGetDevicePointer_v2(self, out: Any, host: Any, flags: int) -> int:
        out._obj.value = host.value
        return SUCCESS

    def _cuModuleGetFunction(self, out: Any, module: Any, name: bytes) -> int:
        self._kernels.append(name.decode())
        out._obj.value = len(self._kernels)
        return SUCCESS

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(self, out: Any, kernel: Any, threads: int, shared: int) -> int:
        out._obj.value = self.blocks_per_sm
        return SUCCESS

    def _cuLaunchKernel(self, kernel: Any, *rest: Any) -> int:
        x, y, z, threads = (size.value for size in rest[:4])
        parameters = rest[8]  # after block y, block z, shared memory, stream
        return self.launch(self._kernels[kernel.value - 1], (x, y, z), threads, parameters) if self.launch else SUCCESS

    def _cuLaunchCooperativeKernel(self, *arguments: Any) -> int:
        return self._cuLaunchKernel(*arguments)


@functools.cache
def emulator() -> Launch | None:
    """Launches the kernels of cuda_on_cpu/kernels.cpp on the CPU; None where there is no g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    here = Path(__file__).parent / "kernels" / "cuda_on_cpu"
    built = Path(tempfile.mkdtemp(prefix="flint-cuda-on-cpu-")) / "kernels.so"
    flags = ["-std=c++17", "-O2", *LIBRARY_FLAGS, "-Wno-unknown-pragmas", f"-I{here}"]
    subprocess.run([compiler, *flags, str(here / "kernels.cpp"), "-o", str(built)], check=True)
    library = ctypes.CDLL(str(built))

    def launch(name: str, grid: tuple[int, int, int], threads: int, parameters: Any) -> int:
        return library.launch(name.encode(), *grid, threads, parameters)

    return launch
