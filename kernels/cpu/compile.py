"""Compiles the C++ library with whatever compiler there is; used by setup.py and by the loader.

Standard library only, no import of the rest of flint: setup.py runs it before anything is installed. Nearly every start
only asks for the library's name, so what compiling needs is imported where it is used.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path

DIRECTORY = Path(__file__).parent

# Compiled for every processor of the architecture; the tables in _ISA_FLAGS for those that have the instructions.
_SOURCES = (
    "api.cpp",
    "bandwidth.cpp",
    "isa.cpp",
    "isa_portable.cpp",
    "model.cpp",
    "pass.cpp",
    "pass_decode.cpp",
    "pass_prefill.cpp",
    "sample.cpp",
    "stream.cpp",
    "team.cpp",
    "tile.cpp",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
_ISA_FLAGS = {
    "x86_64": {"isa_avx2.cpp": _AVX2, "isa_avx512.cpp": _AVX512},
    "aarch64": {"isa_neon.cpp": ("-march=armv8.2-a+dotprod",)},
}
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fvisibility=hidden",
)


class NoCompiler(Exception):
    """There is no C++ compiler, or it does not build the library; the message is for a person."""


def find_compiler() -> list[str] | None:
    """$CXX, else c++, g++ or clang++ from PATH, as an argument list."""
    import shlex
    import shutil

    given = shlex.split(os.environ.get("CXX", ""))
    if given:
        return given if shutil.which(given[0]) else None
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    return None


def architecture() -> str:
    """The processor family of _ISA_FLAGS, or whatever else this is (then only portable code is compiled)."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def source_digest() -> str:
    """Digest of every source, header and of this file."""
    digest = hashlib.sha256()
    for path in sorted([*DIRECTORY.glob("*.cpp"), *DIRECTORY.glob("*.h"), Path(__file__)]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def library_name() -> str:
    """File name of the library made from the present sources: a stale one is never loaded."""
    return f"libflint_cpu-{architecture()}-{source_digest()}.so"


def compile_library(output: Path, compiler: list[str] | None = None) -> None:
    """Build the shared library as `output`, replacing it in one step.

    compiler: argument list (default: find_compiler()). Raises NoCompiler with the compiler's first complaint.
    """
    # as-needed: nothing here uses the C++ run-time library, so it does not become a dependency.
    needed = ["-Wl,--as-needed"] if sys.platform == "linux" else []
    _build(output, [], [*needed, "-shared"], compiler, (), architecture())


def compile_program(
    main: Path, output: Path, compiler: list[str] | None = None, flags: tuple[str, ...] = (), arch: str = ""
) -> None:
    """Build `main` and the library's sources as one executable, for tests.

    flags: appended to every command, e.g. a sanitizer. arch: of the target, when cross-compiling.
    """
    _build(output, [main], [], compiler, (f"-I{DIRECTORY}", *flags), arch or architecture())


def _build(
    output: Path, extra: list[Path], link: list[str], compiler: list[str] | None, flags: tuple[str, ...], arch: str
) -> None:
    import tempfile
    from concurrent.futures import ThreadPoolExecutor

    compiler = compiler or find_compiler()
    if compiler is None:
        raise NoCompiler("no C++ compiler ($CXX, c++, g++ or clang++)")
    if sys.platform == "win32":
        raise NoCompiler("Windows is not supported by the native library")
    sources = {DIRECTORY / name: () for name in _SOURCES} | dict.fromkeys(extra, ())
    sources |= {DIRECTORY / name: isa for name, isa in _ISA_FLAGS.get(arch, {}).items()}
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".compile-") as scratch:
        objects = {source: str(Path(scratch, source.name).with_suffix(".o")) for source in sources}

        def compile_one(source: Path) -> None:
            _run([*compiler, *_FLAGS, *sources[source], *flags, "-c", str(source), "-o", objects[source]])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, sorted(sources, reverse=True)))
        result = str(Path(scratch, "result"))
        _run([*compiler, *link, *objects.values(), *flags, "-o", result, "-lpthread", "-lm"])
        os.replace(result, output)


def _run(command: list[str]) -> None:
    import subprocess

    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NoCompiler(f"{command[0]} cannot be run ({error.strerror})") from None
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines() or ["?"]
        raise NoCompiler(f"{command[0]} failed: {lines[0]}")
