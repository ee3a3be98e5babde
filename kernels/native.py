"""The door to kernels/cpu: finds, or builds, the shared library and loads it by ctypes.

The library is looked for beside its sources (an installation, or a checkout after `pip install -e .`), then in a cache
directory; with a compiler at hand it is built there. Its file name carries a digest of the sources, so that a stale
library is never loaded. FLINT_CPU_PATH forces an instruction set: portable, avx2, avx512 or neon.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path

from kernels.cpu import compile as compiler

ABI = 1
PHASES = ("qkv", "attention", "out", "gate_up", "down", "head", "sample")
FORMATS = {"int4": 0, "int4-min": 1, "int8": 2, "bf16": 3}
STREAM_RUNNING = 0
STREAM_ERRORS = {2: "the model produced no finite logits", 3: "the stream belongs to the process that forked this one"}
ERRORS = {1: "bad argument", 2: "out of memory", 3: "a stream is still running"}

_BANDWIDTH_BYTES = 256 << 20  # well beyond any last-level cache but the largest servers'
_BANDWIDTH_ROUNDS = 12


class LibraryMissing(Exception):
    """No native library for this machine; the message is one line for a person."""


class PackedMatrix(ctypes.Structure):
    """A matrix in the packed format, by pointers that the caller keeps alive (kernels/cpu/tile.h)."""

    _fields_ = (
        ("format", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("group", c_int32),
        ("q", c_void_p),
        ("scale", c_void_p),
        ("minimum", c_void_p),
    )


class Shape(ctypes.Structure):
    """Sizes and scalars of a model (kernels/cpu/model.h)."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "context")
        ),
        *(
            (name, c_float)
            for name in ("eps", "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
        ),
    )


class SamplingOptions(ctypes.Structure):
    """How the whole loop samples (kernels/cpu/sample.h)."""

    _fields_ = (
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("repeat_penalty", c_float),
        ("top_k", c_int32),
        ("repeat_window", c_int32),
        ("seed", c_uint64),
    )


_SIGNATURES = {
    "flint_abi": (c_int, ()),
    "flint_isa": (c_char_p, (c_char_p,)),
    "flint_tiled_bytes": (c_size_t, (POINTER(PackedMatrix),)),
    "flint_matmul": (c_int, (c_char_p, POINTER(PackedMatrix), c_void_p, c_int, c_void_p)),
    "flint_model_new": (c_void_p, (POINTER(Shape), c_void_p, c_char_p, c_int, c_size_t)),
    "flint_model_set_layer": (c_int, (c_void_p, c_int, POINTER(PackedMatrix), POINTER(c_void_p))),
    "flint_model_set_ends": (c_int, (c_void_p, POINTER(PackedMatrix), POINTER(PackedMatrix), c_void_p)),
    "flint_model_free": (None, (c_void_p,)),
    "flint_model_step": (
        c_int,
        (c_void_p, c_void_p, c_int, c_int, c_void_p, c_int, POINTER(c_int32), POINTER(c_void_p)),
    ),
    "flint_model_position": (c_int, (c_void_p,)),
    "flint_model_truncate": (c_int, (c_void_p, c_int)),
    "flint_model_active_threads": (c_int, (c_void_p,)),
    "flint_model_profile": (None, (c_void_p, c_int, POINTER(c_int64))),
    "flint_stream_start": (
        c_void_p,
        (c_void_p, c_void_p, c_int64, POINTER(SamplingOptions), c_int, c_void_p, c_int),
    ),
    "flint_stream_wait": (c_int, (c_void_p, c_int, c_int64, POINTER(c_int))),
    "flint_stream_ids": (POINTER(c_int32), (c_void_p,)),
    "flint_stream_seconds": (POINTER(c_double), (c_void_p,)),
    "flint_stream_cancel": (None, (c_void_p,)),
    "flint_stream_free": (None, (c_void_p,)),
    "flint_bandwidth": (c_double, (c_int, c_size_t, c_int, c_char_p)),
}

_lock = threading.Lock()
_loaded: ctypes.CDLL | LibraryMissing | None = None


def load(cache: Path | None = None) -> ctypes.CDLL:
    """The library, with argument types set; loaded once per process.

    cache: where to look for, and build, a library that was not installed; None: only an installed one serves. Every
    call releases the GIL. Raises LibraryMissing where there is none and none can be built.
    """
    global _loaded
    with _lock:
        if _loaded is None or (isinstance(_loaded, LibraryMissing) and cache is not None):
            try:
                _loaded = _declare(_find(cache))
            except LibraryMissing as error:
                _loaded = error
        if isinstance(_loaded, LibraryMissing):
            raise _loaded
        return _loaded


def must_build(cache: Path) -> bool:
    """Whether `load(cache)` would compile the library: there is none yet, and a compiler is at hand."""
    if isinstance(_loaded, ctypes.CDLL):
        return False
    name = compiler.library_name()
    return not any((place / name).exists() for place in (compiler.DIRECTORY, cache)) and bool(compiler.find_compiler())


def announce_build(cache: Path, notify: Callable[[str], None]) -> None:
    """Say so, in one line, where `load(cache)` will compile: that takes up to a minute on a small machine."""
    if must_build(cache):
        notify("compiling the native decoder, once per version")


def isa(library: ctypes.CDLL) -> str:
    """The instruction set in use: FLINT_CPU_PATH, else the best this processor has.

    Raises LibraryMissing when FLINT_CPU_PATH names one that is not here.
    """
    wanted = os.environ.get("FLINT_CPU_PATH", "")
    found = library.flint_isa(wanted.encode())
    if not found:
        raise LibraryMissing(f"FLINT_CPU_PATH={wanted}: this processor or library has no such instruction set")
    return found.decode()


def isas(library: ctypes.CDLL) -> list[str]:
    """Every instruction set of the library that this processor can run."""
    return [name for name in ("avx512", "avx2", "neon", "portable") if library.flint_isa(name.encode())]


def streaming_bandwidth(threads: int, cache: Path | None = None) -> float:
    """Measured streaming-read bandwidth in GB/s (1e9 bytes): `threads` threads, huge pages, 256 MiB, best of 12 passes.

    Takes about 0.3 s. Raises LibraryMissing.
    """
    library = load(cache)
    bytes_per_second = library.flint_bandwidth(threads, _BANDWIDTH_BYTES, _BANDWIDTH_ROUNDS, isa(library).encode())
    return bytes_per_second / 1e9


def _find(cache: Path | None) -> Path:
    name = compiler.library_name()
    installed = compiler.DIRECTORY / name
    if installed.exists():
        return installed
    if cache is None:
        raise LibraryMissing("the native library was not built at installation")
    built = cache / name
    if not built.exists():
        try:
            compiler.compile_library(built)
        except (compiler.NoCompiler, OSError) as error:
            raise LibraryMissing(f"the native library could not be built: {error}") from None
    return built


def _declare(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise LibraryMissing(f"{path.name} cannot be loaded: {error}") from None
    if library.flint_abi() != ABI:
        raise LibraryMissing(f"{path.name} has another interface than this flint")
    return library
