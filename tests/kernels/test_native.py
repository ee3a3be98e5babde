"""The native CPU library: kernels against numpy, how it is found and built, and its C++ test in other places."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.backends.cpu import _packed, native_library
from engine.packed.matrix import Storage
from engine.packed.quantize import dequantize
from kernels import native
from kernels.cpu import compile as compiler
from tests.synthetic import random_matrix

SELFTEST = Path(__file__).parent / "cpu_selftest.cpp"
STORAGES = [
    Storage("int4", 32),
    Storage("int4", 64),
    Storage("int4", 128),
    Storage("int4", 32, symmetric=False),
    Storage("int4", 128, symmetric=False),
    Storage("int8", 32),
    Storage("int8", 128),
    Storage("bf16"),
]
# Activations keep 15 bits and a sign per 32 channels; the rest is float32 summation. Of |w| * |x|.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return native_library()


def product(library: ctypes.CDLL, isa: str, matrix, x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty((x.shape[0], matrix.n), np.float32)
    status = library.flint_matmul(isa.encode(), _packed(matrix), x.ctypes.data, x.shape[0], out.ctypes.data)
    assert status == 0
    return out


def every_isa() -> list[str]:
    return native.isas(native_library())


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_products_match_numpy_on_every_instruction_set(library: ctypes.CDLL, storage: Storage) -> None:
    rng = np.random.default_rng(7)
    k = 384 if storage.group else 200  # bf16: K fills no whole block
    matrix = random_matrix("m", 53, k, storage, rng)  # 53 rows fill no whole tile
    w = dequantize(matrix).astype(np.float64)
    for tokens in (1, 2, 3, 4, 7, 8, 9, 33):
        x = rng.standard_normal((tokens, k)) * rng.choice([1, 1, 1, 30], k)  # a quarter of the channels are outliers
        x[0, :32] = 0  # a block without any signal
        expected = x.astype(np.float32).astype(np.float64) @ w.T
        size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(w, axis=1)[None]
        for isa in every_isa():
            error = np.abs(product(library, isa, matrix, x) - expected) / size
            assert error.max() < TOLERANCE, f"{isa}, {tokens} tokens: {error.max():.2e} of {TOLERANCE}"


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_a_token_s_product_does_not_depend_on_its_company(library: ctypes.CDLL, storage: Storage) -> None:
    rng = np.random.default_rng(8)
    matrix = random_matrix("m", 32, 256, storage, rng)
    x = rng.standard_normal((23, 256))
    for isa in every_isa():
        together = product(library, isa, matrix, x)
        alone = np.concatenate([product(library, isa, matrix, row[None]) for row in x])
        np.testing.assert_array_equal(together, alone)


def test_a_shape_that_tiles_cannot_hold_is_refused(library: ctypes.CDLL) -> None:
    matrix = random_matrix("m", 16, 64, Storage("int4", 32), np.random.default_rng(0))
    bad = _packed(matrix)
    bad.group = 48
    assert library.flint_tiled_bytes(bad) == 0
    assert library.flint_matmul(b"", bad, None, 1, None) == 1
    assert library.flint_tiled_bytes(_packed(matrix)) == 64 * (16 // 2) + 2 * 16 * 2  # nibbles, then fp16 scales


def test_an_unknown_instruction_set_is_an_error(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLINT_CPU_PATH", "mmx")
    with pytest.raises(native.LibraryMissing, match="FLINT_CPU_PATH=mmx"):
        native.isa(library)
    monkeypatch.setenv("FLINT_CPU_PATH", "portable")
    assert native.isa(library) == "portable"


def test_streaming_bandwidth_is_a_plausible_figure() -> None:
    assert 0.1 < native.streaming_bandwidth(1, None if _installed() else _cache()) < 10_000


def test_without_a_compiler_or_a_library_the_reason_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_loaded", None)
    monkeypatch.setattr(compiler, "library_name", lambda: "libflint_cpu-absent.so")
    with pytest.raises(native.LibraryMissing, match="not built at installation"):
        native.load()
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(native.LibraryMissing, match="no C\\+\\+ compiler"):
        native.load(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_build_is_foreseen_where_there_is_no_library_and_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_loaded", None)
    monkeypatch.setattr(compiler, "library_name", lambda: "libflint_cpu-absent.so")
    monkeypatch.setattr(compiler, "find_compiler", lambda: ["c++"])
    assert native.must_build(tmp_path)
    monkeypatch.setattr(compiler, "find_compiler", lambda: None)
    assert not native.must_build(tmp_path)
    monkeypatch.setattr(compiler, "find_compiler", lambda: ["c++"])
    (tmp_path / "libflint_cpu-absent.so").touch()
    assert not native.must_build(tmp_path)


def test_a_failing_compiler_is_reported_by_its_first_error(tmp_path: Path) -> None:
    script = tmp_path / "cxx"
    script.write_text("#!/bin/sh\necho 'x.cpp:1:1: error: no such thing' >&2\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(compiler.NoCompiler, match="error: no such thing"):
        compiler.compile_library(tmp_path / "lib.so", [str(script)])
    assert not (tmp_path / "lib.so").exists()


def test_a_library_that_cannot_be_loaded_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_loaded", None)
    monkeypatch.setattr(compiler, "library_name", lambda: "broken.so")
    (tmp_path / "broken.so").write_bytes(b"not a library")
    with pytest.raises(native.LibraryMissing, match="cannot be loaded"):
        native.load(tmp_path)


def test_the_library_needs_no_cpp_runtime(library: ctypes.CDLL) -> None:
    if sys.platform != "linux" or not shutil.which("readelf"):
        pytest.skip("needs readelf")
    listing = subprocess.run(["readelf", "-d", library._name], capture_output=True, text=True, check=True).stdout
    needed = [line for line in listing.splitlines() if "NEEDED" in line]
    assert needed
    assert not [line for line in needed if "stdc++" in line or "gcc_s" in line]


def _installed() -> bool:
    return (compiler.DIRECTORY / compiler.library_name()).exists()


def _cache() -> Path:
    from engine.files.paths import cache_dir

    return cache_dir() / "kernels"


# --- the C++ test, elsewhere ------------------------------------------------------------------------------------------


def selftest(tmp_path: Path, runner: list[str], groups: list[str], env: dict[str, str] | None = None, **build) -> str:
    program = tmp_path / "selftest"
    try:
        compiler.compile_program(SELFTEST, program, **build)
    except compiler.NoCompiler as reason:
        pytest.skip(f"cannot be built here: {reason}")
    command = [*runner, str(program), *groups]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | (env or {}), timeout=280)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


@pytest.mark.slow
def test_address_and_undefined_behaviour_sanitizers_find_nothing(tmp_path: Path) -> None:
    output = selftest(
        tmp_path, [], [], flags=("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    )
    assert "0 failures" in output


@pytest.mark.slow
def test_thread_sanitizer_finds_nothing(tmp_path: Path) -> None:
    # Forking a threaded program is not something the sanitizer follows.
    output = selftest(tmp_path, [], ["model", "stream"], flags=("-O1", "-g", "-fsanitize=thread"))
    assert "0 failures" in output


@pytest.mark.slow
def test_the_neon_path_on_an_emulated_processor(tmp_path: Path) -> None:
    cross, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if not cross or not emulator:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user")
    output = selftest(
        tmp_path, [emulator], ["kernels", "model", "stream"], compiler=[cross], arch="aarch64", flags=("-static",)
    )
    assert "ok   neon int4 g32" in output
    assert "ok   neon, 3 threads: pieces against a whole" in output
