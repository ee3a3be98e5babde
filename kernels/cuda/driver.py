"""The few CUDA driver calls that flint needs, through libcuda by ctypes.

Nothing but the driver itself is required, so asking what GPU there is costs no import of torch, and a kernel that is
already cached runs without NVRTC's Python packages. Contexts are the primary context of device 0, the one torch uses:
pointers and streams of torch are valid here.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any

MINIMUM_DRIVER = 13000  # cubins of NVRTC 13 load on any driver of CUDA 13 (580 and later)
MINIMUM_CAPABILITY = (8, 0)  # cp.async, bf16 tensor cores

OUT_OF_MEMORY = 2
NO_DEVICE = 100
COOPERATIVE_LAUNCH_TOO_LARGE = 720
LAUNCH_FAILED = 719

_ATTRIBUTE_SM_COUNT = 16
_ATTRIBUTE_MEMORY_CLOCK_KHZ = 36
_ATTRIBUTE_BUS_WIDTH_BITS = 37
_ATTRIBUTE_L2_BYTES = 38
_ATTRIBUTE_CAPABILITY_MAJOR = 75
_ATTRIBUTE_CAPABILITY_MINOR = 76
_ATTRIBUTE_COOPERATIVE_LAUNCH = 95
_ATTRIBUTE_SHARED_PER_BLOCK_OPTIN = 97
_FUNCTION_MAX_DYNAMIC_SHARED = 8
_HOST_ALLOC_DEVICEMAP = 2

_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDeviceTotalMem_v2": [POINTER(c_size_t), c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxSynchronize": [],
    "cuMemGetInfo_v2": [POINTER(c_size_t), POINTER(c_size_t)],
    "cuMemHostAlloc": [POINTER(c_void_p), c_size_t, c_uint],
    "cuMemHostGetDevicePointer_v2": [POINTER(c_void_p), c_void_p, c_uint],
    "cuMemFreeHost": [c_void_p],
    "cuModuleLoadData": [POINTER(c_void_p), c_char_p],
    "cuModuleUnload": [c_void_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": [POINTER(c_int), c_void_p, c_int, c_size_t],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p],
    "cuLaunchCooperativeKernel": [c_void_p, *[c_uint] * 7, c_void_p, c_void_p],
    "cuStreamQuery": [c_void_p],
}


class CudaError(RuntimeError):
    """A driver call failed. `code` is the CUresult, `name` its name, `call` the function."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.call, self.code, self.name = call, code, name


class NotResident(RuntimeError):
    """A cooperative launch whose blocks cannot all run at once; nothing was launched."""


class GpuUnavailable(RuntimeError):
    """There is no GPU that flint can use; `str(error)` says why in one line, `hint` what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Gpu:
    """What the driver says about device 0."""

    name: str
    capability: tuple[int, int]
    sm_count: int
    memory_bytes: int
    peak_bytes_per_second: float  # memory clock x bus width x 2 (double data rate); 0 where the driver hides the clock
    l2_bytes: int
    shared_per_block: int  # largest dynamic shared memory of a block, bytes
    cooperative_launch: bool
    driver_version: int  # CUDA version of the driver, 13000 for 13.0

    @property
    def clusters(self) -> bool:
        """Whether blocks can read and write one another's shared memory."""
        return self.capability >= (9, 0)


class Driver:
    """libcuda, loaded and initialised. `library` stands in for it in tests."""

    def __init__(self, library: Any = None) -> None:
        self.library = library if library is not None else _load_library()
        if library is None:
            for name, arguments in _SIGNATURES.items():
                getattr(self.library, name).argtypes = arguments
        self._context: c_void_p | None = None
        self._thread = threading.local()
        code = self.library.cuInit(0)
        if code == NO_DEVICE:
            raise GpuUnavailable("the NVIDIA driver sees no GPU", "use --backend cpu")
        if code:
            name = self.error_name(code)
            raise GpuUnavailable(f"the NVIDIA driver does not start: {name}", "try nvidia-smi, or use --backend cpu")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a driver function; raises CudaError unless it returns CUDA_SUCCESS."""
        code = getattr(self.library, name)(*arguments)
        if code:
            raise CudaError(name, code, self.error_name(code))

    def query(self, name: str, *arguments: Any) -> int:
        """Call a driver function and return its CUresult (for cuStreamQuery: 600 is not ready)."""
        return getattr(self.library, name)(*arguments)

    def gpu(self) -> Gpu:
        """Device 0, checked: raises GpuUnavailable where the driver or the GPU is too old."""
        version, count, device = c_int(), c_int(), c_int()
        self.call("cuDriverGetVersion", byref(version))
        if version.value < MINIMUM_DRIVER:
            raise GpuUnavailable(
                f"the NVIDIA driver is too old: it supports CUDA {_dotted(version.value)}, "
                f"flint's kernels need {_dotted(MINIMUM_DRIVER)}",
                "install driver 580 or newer, or use --backend cpu",
            )
        self.call("cuDeviceGetCount", byref(count))
        if count.value == 0:
            raise GpuUnavailable("the NVIDIA driver sees no GPU", "check CUDA_VISIBLE_DEVICES, or use --backend cpu")
        self.call("cuDeviceGet", byref(device), 0)
        name, memory = ctypes.create_string_buffer(256), c_size_t()
        self.call("cuDeviceGetName", name, 256, device)
        self.call("cuDeviceTotalMem_v2", byref(memory), device)

        def attribute(which: int) -> int:
            value = c_int()
            self.call("cuDeviceGetAttribute", byref(value), which, device)
            return value.value

        gpu = Gpu(
            name=name.value.decode(errors="replace"),
            capability=(attribute(_ATTRIBUTE_CAPABILITY_MAJOR), attribute(_ATTRIBUTE_CAPABILITY_MINOR)),
            sm_count=attribute(_ATTRIBUTE_SM_COUNT),
            memory_bytes=memory.value,
            peak_bytes_per_second=attribute(_ATTRIBUTE_MEMORY_CLOCK_KHZ)
            * 1e3
            * attribute(_ATTRIBUTE_BUS_WIDTH_BITS)
            / 8
            * 2,
            l2_bytes=attribute(_ATTRIBUTE_L2_BYTES),
            shared_per_block=attribute(_ATTRIBUTE_SHARED_PER_BLOCK_OPTIN),
            cooperative_launch=bool(attribute(_ATTRIBUTE_COOPERATIVE_LAUNCH)),
            driver_version=version.value,
        )
        if gpu.capability < MINIMUM_CAPABILITY:
            raise GpuUnavailable(
                f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}; flint needs 8.0 (Ampere)",
                "use --backend cpu",
            )
        return gpu

    def use_device(self) -> None:
        """Make device 0's primary context current in the calling thread (a new thread has none)."""
        if getattr(self._thread, "ready", False):
            return
        if self._context is None:
            context = c_void_p()
            self.call("cuDevicePrimaryCtxRetain", byref(context), 0)
            self._context = context
        self.call("cuCtxSetCurrent", self._context)
        self._thread.ready = True

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of device memory."""
        self.use_device()
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def synchronize(self) -> None:
        """Wait for all work of the context; raises CudaError for a kernel that failed."""
        self.use_device()
        self.call("cuCtxSynchronize")

    def error_name(self, code: int) -> str:
        text = c_char_p()
        self.library.cuGetErrorName(code, byref(text))
        return text.value.decode() if text.value else "unknown error"


class MappedMemory:
    """Pinned host memory that kernels read and write through `device` while the host does through `view`."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        driver.use_device()
        self._driver, self.nbytes = driver, nbytes
        self._host, device = c_void_p(), c_void_p()
        driver.call("cuMemHostAlloc", byref(self._host), nbytes, _HOST_ALLOC_DEVICEMAP)
        driver.call("cuMemHostGetDevicePointer_v2", byref(device), self._host, 0)
        self.device = device.value or 0
        ctypes.memset(self._host, 0, nbytes)
        self.view = memoryview((ctypes.c_uint8 * nbytes).from_address(self._host.value or 0)).cast("B")

    def close(self) -> None:
        """Free it; numpy arrays over `view` must not be used afterwards, and no kernel may still run on it."""
        if self._host.value:
            self._driver.use_device()
            self._driver.call("cuMemFreeHost", self._host)
            self._host = c_void_p()


class Module:
    """A loaded cubin."""

    def __init__(self, driver: Driver, code: bytes) -> None:
        driver.use_device()
        self._driver, self._handle = driver, c_void_p()
        driver.call("cuModuleLoadData", byref(self._handle), code)

    def use_device(self) -> None:
        """`Driver.use_device`, for whoever enqueues bound launches."""
        self._driver.use_device()

    def kernel(self, name: str) -> Kernel:
        """The kernel of that (extern "C") name."""
        function = c_void_p()
        self._driver.use_device()
        self._driver.call("cuModuleGetFunction", byref(function), self._handle, name.encode())
        return Kernel(self._driver, function, name, self)


class Kernel:
    """A kernel ready to launch."""

    def __init__(self, driver: Driver, function: c_void_p, name: str, module: Module) -> None:
        self.driver, self.function, self.name = driver, function, name
        self._module = module  # keeps the code alive

    def allow_shared(self, nbytes: int) -> None:
        """Allow dynamic shared memory above 48 KB, up to Gpu.shared_per_block less the kernel's static part."""
        self.driver.use_device()
        self.driver.call("cuFuncSetAttribute", self.function, _FUNCTION_MAX_DYNAMIC_SHARED, nbytes)

    def blocks_per_sm(self, threads: int, shared: int = 0) -> int:
        """How many blocks of that size can be resident on one SM; 0 when none fits."""
        blocks = c_int()
        self.driver.use_device()
        self.driver.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", byref(blocks), self.function, threads, shared)
        return blocks.value

    def launch(
        self,
        grid: int | tuple[int, int, int],
        block: int | tuple[int, int, int],
        arguments: Sequence[Any],
        *,
        shared: int = 0,
        stream: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Enqueue on `stream` (a cudaStream_t as int, e.g. torch's `.cuda_stream`).

        arguments: torch tensors, Python ints and None (null) are pointers; every other value must be a ctypes scalar or
        Structure of exactly the parameter's type (a float has no one size, so it is refused). cooperative: all blocks
        run at once or none does; raises NotResident.
        """
        self.driver.use_device()
        bound = self.bind(grid, block, arguments, shared=shared, cooperative=cooperative)
        try:
            bound.launch(stream)
        except CudaError as error:
            if error.code != COOPERATIVE_LAUNCH_TOO_LARGE:
                raise
            blocks, threads = (math.prod(_three(size)) for size in (grid, block))
            fitting = self.blocks_per_sm(threads, shared)
            raise NotResident(
                f"{blocks} blocks of {threads} threads and {shared} bytes of shared memory cannot be resident at once "
                f"({fitting} fit a multiprocessor)"
            ) from error

    def bind(
        self,
        grid: int | tuple[int, int, int],
        block: int | tuple[int, int, int],
        arguments: Sequence[Any],
        *,
        shared: int = 0,
        cooperative: bool = False,
    ) -> BoundLaunch:
        """A launch prepared once and enqueued many times; arguments as `launch` takes them."""
        return BoundLaunch(self, (*_three(grid), *_three(block), shared), arguments, cooperative)


class BoundLaunch:
    """A kernel with its shape and arguments. `values` are the arguments as ctypes objects: change one's `.value`, or a
    Structure's fields, and the next launch uses it. Tensors are held as bare pointers: keep them alive."""

    def __init__(self, kernel: Kernel, shape: tuple[int, ...], arguments: Sequence[Any], cooperative: bool) -> None:
        self.kernel = kernel
        self.values = [_argument(a) for a in arguments]
        self._name = "cuLaunchCooperativeKernel" if cooperative else "cuLaunchKernel"
        self._call = getattr(kernel.driver.library, self._name)
        self._head = (kernel.function, *(c_uint(size) for size in shape))
        parameters = (c_void_p * len(self.values))(*[ctypes.addressof(v) for v in self.values])
        self._tail = (parameters,) if cooperative else (parameters, None)

    def launch(self, stream: int) -> None:
        """Enqueue; the calling thread must have the context (Driver.use_device)."""
        code = self._call(*self._head, stream or None, *self._tail)
        if code:
            raise CudaError(self._name, code, self.kernel.driver.error_name(code))


def _argument(value: Any) -> Any:
    if value is None or isinstance(value, int):
        return c_void_p(value)
    if isinstance(value, (ctypes._SimpleCData, ctypes.Structure)):
        return value
    if hasattr(value, "data_ptr"):
        return c_void_p(value.data_ptr())
    raise TypeError(f"a kernel argument must be a tensor, a pointer or a ctypes value, not {type(value).__name__}")


def _three(size: int | tuple[int, int, int]) -> tuple[int, int, int]:
    return (size, 1, 1) if isinstance(size, int) else size


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def driver_or_exit() -> Driver:
    """For a program that measures: the driver; where its GPU cannot be used, the program ends here, in one line."""
    try:
        driver = Driver()
        driver.gpu()
    except (CudaError, GpuUnavailable) as error:
        raise SystemExit(f"this runs on an NVIDIA GPU only: {error}") from error
    return driver


def _load_library() -> Any:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError:
        hint = "use --backend cpu"
        if os.path.exists("/proc/driver/nvidia/version"):
            hint = f"the kernel module is loaded, but {name} is not on the library path; or use --backend cpu"
        raise GpuUnavailable("no NVIDIA driver is installed", hint) from None
