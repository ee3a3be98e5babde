"""Compiles CUDA sources to cubins with NVRTC at first use, and keeps them.

No nvcc, no host compiler and no GPU are needed: NVRTC comes as a wheel (the `cuda` extra), and a cubin for any
architecture can be made anywhere. A cubin is cached under a name that digests everything it was made from: the source
and the headers it includes, defines, options, architecture, and the versions of NVRTC, its headers and the driver.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

CUDA_DIRECTORY = Path(__file__).parent / "cuda"

# What the ordinary test run compiles for: Ampere, Ada, Hopper, Blackwell (data centre and consumer).
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")

_CACHE_FORMAT = 1
_TOOLCHAIN = ("cuda-core", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


class CompileError(RuntimeError):
    """A source does not compile, or NVRTC is not installed. `log` is the compiler's output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True)
class KernelReport:
    """What ptxas says about one kernel or non-inlined function; all but `registers` in bytes (per thread or block)."""

    name: str  # mangled, unless extern "C"
    entry: bool  # a __global__ function
    registers: int  # per thread; 0 for a function that is not an entry
    shared: int  # static shared memory per block
    stack: int  # local memory per thread
    spill_stores: int
    spill_loads: int

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture, and what ptxas reported."""

    code: bytes
    arch: str
    reports: tuple[KernelReport, ...]
    from_cache: bool
    seconds: float  # spent compiling; 0 from the cache

    def report(self, name: str) -> KernelReport:
        """The report of the kernel called `name` (a part of the mangled name is enough if it is unique)."""
        found = [r for r in self.reports if r.name == name] or [r for r in self.reports if name in r.name]
        if len(found) != 1:
            raise KeyError(f"{len(found)} kernels match {name!r} among {[r.name for r in self.reports]}")
        return found[0]


def architecture(capability: tuple[int, int]) -> str:
    """The NVRTC architecture of a compute capability: sm_80, sm_89; sm_90a and later with their own instructions."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def compile_cubin(
    source: Path,
    *,
    arch: str,
    defines: Mapping[str, str | int] | None = None,
    options: Mapping[str, Any] | None = None,
    cache: Path | None = None,
    driver_version: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Cubin:
    """Compile `source` for `arch` ("sm_90a"), or take it from `cache`.

    defines: macros. options: further cuda.core.ProgramOptions fields, e.g. {"max_register_count": 128, "lineinfo":
    True}. cache: a directory, created if need be; None compiles always. driver_version: part of the key (a driver
    update recompiles). progress: called with one line, only when a compilation really starts.

    Raises CompileError.
    """
    defines, options = dict(defines or {}), dict(options or {})
    key = _digest(source, arch, defines, options, driver_version)
    entry = cache / f"{source.stem}-{arch}-{key[:32]}" if cache else None
    if entry and (cached := _read_entry(entry, arch)):
        return cached
    if progress:
        progress(f"compiling {source.stem} for {arch} (once)")
    started = time.perf_counter()
    code, log = _nvrtc(source, arch, defines, options)
    if not parse_ptxas(log) and not options.get("no_cache"):
        # NVRTC 13 keeps a cache of its own, and what comes from there comes without ptxas' report.
        with contextlib.suppress(CompileError):  # an older one does not know the option
            code, log = _nvrtc(source, arch, defines, options | {"no_cache": True})
    cubin = Cubin(code, arch, parse_ptxas(log), False, time.perf_counter() - started)
    if entry:
        _write_entry(entry, cubin)
    return cubin


def sources_of(source: Path) -> list[Path]:
    """`source` and every file it includes with quotes, directly or not, in the order of discovery."""
    found: list[Path] = []
    queue = [source.resolve()]
    while queue:
        path = queue.pop(0)
        if path in found:
            continue
        found.append(path)
        for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
            candidates = [path.parent / name, source.resolve().parent / name]
            queue += [c.resolve() for c in candidates if c.is_file()][:1]
    return found


def parse_ptxas(log: str) -> tuple[KernelReport, ...]:
    """The per-function figures in the output of `ptxas -v`."""
    reports: dict[str, dict[str, Any]] = {}
    entries: set[str] = set()
    name = ""
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '([^']+)'", line):
            entries.add(match[1])
        elif match := re.search(r"Function properties for (\S+)", line):
            name = match[1]
            reports[name] = {"registers": 0, "shared": 0, "stack": 0, "spill_stores": 0, "spill_loads": 0}
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            if name:
                reports[name] |= dict(
                    zip(("stack", "spill_stores", "spill_loads"), map(int, match.groups()), strict=True)
                )
        elif (match := re.search(r"Used (\d+) registers", line)) and name:
            reports[name]["registers"] = int(match[1])
            if shared := re.search(r"(\d+) bytes smem", line):
                reports[name]["shared"] = int(shared[1])
    return tuple(KernelReport(name=n, entry=n in entries, **figures) for n, figures in reports.items())


def _digest(
    source: Path, arch: str, defines: Mapping[str, str | int], options: Mapping[str, Any], driver_version: int
) -> str:
    digest = hashlib.sha256()
    facts = [_CACHE_FORMAT, arch, driver_version, [_version(p) for p in _TOOLCHAIN], sorted(defines.items())]
    digest.update(repr((facts, sorted(options.items()))).encode())
    for path in sources_of(source):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str:
    # Package metadata, not nvrtcVersion(): a cache hit then imports nothing (cuda.core takes 0.5 s).
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _nvrtc(source: Path, arch: str, defines: Mapping[str, str | int], options: Mapping[str, Any]) -> tuple[bytes, str]:
    try:
        from cuda.core import Program, ProgramOptions  # pyright: ignore[reportAttributeAccessIssue]
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError as error:
        raise CompileError(f"NVRTC is not installed ({error})") from error
    include: list[str] = [str(source.parent)]
    for component in ("cudart", "cccl"):
        try:
            include += filter(None, [find_nvidia_header_directory(component)])
        except Exception:  # an older pathfinder raises for a component it does not know; NVRTC then names the header
            continue
    log = io.StringIO()
    # -v is how parse_ptxas learns registers and spills.
    ptxas = ["-v", *_as_list(options.get("ptxas_options"))]
    fields = {k: v for k, v in options.items() if k != "ptxas_options"}
    try:
        program = Program(
            source.read_text(encoding="utf-8"),
            "c++",
            ProgramOptions(
                name=source.name,
                arch=arch,
                std="c++17",
                include_path=include,
                define_macro=[(name, str(value)) for name, value in defines.items()] or None,
                ptxas_options=ptxas,
                **fields,
            ),
        )
        code = program.compile("cubin", logs=log).code
    except Exception as error:  # NVRTC's own error class moved between releases of cuda-core
        text = f"{log.getvalue()}\n{error}".strip()
        first = next((line for line in text.splitlines() if "error" in line), str(error).splitlines()[0])
        raise CompileError(f"{source.name} does not compile for {arch}: {first.strip()}", text) from error
    return bytes(code), log.getvalue()


def _as_list(value: str | Sequence[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _read_entry(entry: Path, arch: str) -> Cubin | None:
    try:
        header, code = entry.read_bytes().split(b"\n", 1)
        fields = json.loads(header)
        if fields["sha256"] != hashlib.sha256(code).hexdigest():
            return None
        reports = tuple(KernelReport(**r) for r in fields["reports"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent, truncated or foreign: compile again and overwrite it
    return Cubin(code, arch, reports, True, 0.0)


def _write_entry(entry: Path, cubin: Cubin) -> None:
    """One line of JSON (digest, reports), then the cubin; renamed into place, so that a reader sees all or nothing."""
    header = {"sha256": hashlib.sha256(cubin.code).hexdigest(), "reports": [asdict(r) for r in cubin.reports]}
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=entry.parent, delete=False) as file:
            file.write(json.dumps(header).encode() + b"\n" + cubin.code)
        os.replace(file.name, entry)
    except OSError:
        pass  # a read-only or full cache only costs the next start its compilation
