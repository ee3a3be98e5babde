"""What this machine is, and which backends will run on it: asked, not assumed, and every "no" with its reason."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import BackendError
from engine.files.disk import existing_parent
from engine.files.paths import cache_dir, models_dir
from engine.machine.hardware import Bandwidth, physical_memory, processor, streaming_bandwidth
from kernels.cpu.threads import cgroup_cpus, default_threads, physical_cores, usable_cpus

if TYPE_CHECKING:
    from kernels.cuda.driver import Gpu

# Those that a decoder's inner loops could use, as /proc/cpuinfo spells them (x86, then Arm).
FEATURES = (
    *("avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
CUDA_PACKAGES = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl")

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_CPUINFO = Path("/proc/cpuinfo")
_NVIDIA_VERSION = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Processor:
    """cores: physical ones that this process may use. cpu_limit: processors' worth of time that its control group
    allows. caches: of one core, name -> bytes. isas: the native library's instruction sets that run here, best first.
    """

    name: str
    cores: int
    threads: int
    cpu_limit: float | None
    features: tuple[str, ...]
    caches: dict[str, int]
    isas: tuple[str, ...]


@dataclass(frozen=True)
class BackendState:
    """Whether a backend will run here; detail says on what, or why not, and hint what to do about that."""

    name: str
    runs: bool
    detail: str
    hint: str = ""


@dataclass(frozen=True)
class Report:
    """Everything that `flint doctor` shows. memory_bytes: of RAM. gpu: None where there is none that flint can use, and
    gpu_problem says why. driver: the NVIDIA kernel driver's version. packages: name -> version, None where missing."""

    flint: str
    python: str
    system: str
    processor: Processor
    memory_bytes: int | None
    bandwidth: Bandwidth
    native_library: str | None
    native_problem: str
    gpu: Gpu | None
    gpu_problem: str
    gpu_bandwidth: Bandwidth | None
    driver: str | None
    packages: dict[str, str | None]
    backends: tuple[BackendState, ...]
    cache_dir: str
    cache_free_bytes: int
    models: int
    models_bytes: int

    @property
    def auto(self) -> str | None:
        """The backend that `--backend auto` takes."""
        return next((state.name for state in self.backends if state.runs), None)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "auto": self.auto}


def inspect(notify: Callable[[str], None] = lambda line: None) -> Report:
    """Ask everything. Takes a second or two: measures the memory where it was not yet, imports torch for a GPU.

    notify: called with one line before the native library is compiled, which takes longer.
    """
    from engine.machine.hardware import gpu_bandwidth
    from engine.packed.library import packed_models

    library, native_problem, isas = _native(notify)
    gpu, gpu_problem, gpu_hint = _gpu()
    models = packed_models()
    return Report(
        flint=_version("flint") or "not installed",
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=_processor(isas),
        memory_bytes=physical_memory(),
        bandwidth=streaming_bandwidth(),
        native_library=library,
        native_problem=native_problem,
        gpu=gpu,
        gpu_problem=gpu_problem,
        gpu_bandwidth=gpu_bandwidth(gpu) if gpu else None,
        driver=_driver_version(),
        packages={name: _version(name) for name in ("torch", *CUDA_PACKAGES)},
        backends=(_cuda_state(gpu, gpu_problem, gpu_hint), _cpu_state(isas, native_problem), _torch_state()),
        cache_dir=str(cache_dir()),
        cache_free_bytes=shutil.disk_usage(existing_parent(models_dir())).free,
        models=len(models),
        models_bytes=sum(entry.bytes for entry in models),
    )


# --- the processor ----------------------------------------------------------------------------------------------------


def _processor(isas: tuple[str, ...]) -> Processor:
    return Processor(
        name=processor(),
        cores=physical_cores(usable_cpus()),
        threads=default_threads(),
        cpu_limit=cgroup_cpus(),
        features=cpu_features(_CPUINFO),
        caches=cache_sizes(_CACHES),
        isas=isas,
    )


def cpu_features(cpuinfo: Path) -> tuple[str, ...]:
    """Those of FEATURES that the first processor has; empty where the system does not say."""
    with suppress(OSError):
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, values = line.partition(":")
            if name.strip() in ("flags", "Features"):
                present = set(values.split())
                return tuple(feature for feature in FEATURES if feature in present)
    return ()


def cache_sizes(folder: Path) -> dict[str, int]:
    """Data and unified caches of one core: "L1d" -> bytes."""
    sizes: dict[str, int] = {}
    for index in sorted(folder.glob("index*")):
        with suppress(OSError, ValueError):
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            unit = {"K": 1 << 10, "M": 1 << 20}.get(size[-1:], 1)
            if kind in ("Data", "Unified"):
                sizes[f"L{level}{'d' if kind == 'Data' else ''}"] = int(size.rstrip("KM")) * unit
    return sizes


def _native(notify: Callable[[str], None]) -> tuple[str | None, str, tuple[str, ...]]:
    """The native library's file (built now if need be), or why there is none, and its instruction sets."""
    from engine.backends import cpu
    from kernels import native

    native.announce_build(cache_dir() / "kernels", notify)
    try:
        library = cpu.native_library()
        native.isa(library)  # refuses a FLINT_CPU_PATH that is not here
        return str(library._name), "", tuple(native.isas(library))
    except native.LibraryMissing as error:
        return None, str(error), ()


# --- the GPU ----------------------------------------------------------------------------------------------------------


def _gpu() -> tuple[Gpu | None, str, str]:
    from engine.backends.cuda import find_gpu

    try:
        return find_gpu(), "", ""
    except BackendError as error:
        return None, str(error), error.hint


def _driver_version() -> str | None:
    """Of the kernel module, for instance "580.95.05"; only Linux says."""
    with suppress(OSError):
        match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", _NVIDIA_VERSION.read_text(errors="replace"))
        return match[1] if match else None
    return None


def _cuda_state(gpu: Gpu | None, problem: str, hint: str) -> BackendState:
    if gpu is None:
        return BackendState("cuda", False, problem, hint)
    missing = _missing(("torch",)) or _missing(CUDA_PACKAGES)
    if missing and missing != "torch" and _compiles(gpu):
        missing = None  # what pip does not know of is there, from a CUDA toolkit for instance
    if missing:
        what = "torch" if missing == "torch" else "'flint[cuda]'"
        return BackendState("cuda", False, f"{missing} is not installed", f"Run: pip install {what}")
    import torch

    if not torch.cuda.is_available():
        hint = "Install a CUDA build of torch (https://pytorch.org/get-started)."
        return BackendState("cuda", False, f"torch {torch.__version__} cannot use {gpu.name}", hint)
    return BackendState("cuda", True, f"megakernel on {gpu.name}")


def _compiles(gpu: Gpu) -> bool:
    """Whether the kernels' toolchain is complete: the smallest of them, compiled (seconds) or taken from the cache."""
    from kernels.build import CUDA_DIRECTORY, CompileError, architecture, compile_cubin

    try:
        compile_cubin(
            CUDA_DIRECTORY / "retile.cu",
            arch=architecture(gpu.capability),
            cache=cache_dir() / "kernels",
            driver_version=gpu.driver_version,
        )
    except (CompileError, OSError):
        return False
    return True


# --- the other backends -----------------------------------------------------------------------------------------------


def _cpu_state(isas: tuple[str, ...], problem: str) -> BackendState:
    if problem:
        return BackendState("cpu", False, problem, "Install a C++ compiler; until then --backend torch serves.")
    threads = default_threads()
    return BackendState("cpu", True, f"native decoder, {isas[0]}, {threads} thread{'s' if threads > 1 else ''}")


def _torch_state() -> BackendState:
    if _missing(("torch",)):
        return BackendState("torch", False, "torch is not installed", "Run: pip install torch")
    return BackendState("torch", True, f"torch {_version('torch')}, the float32 reference; slow")


def _missing(packages: tuple[str, ...]) -> str | None:
    """The first of them that is not installed."""
    return next((name for name in packages if _version(name) is None), None)


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None
