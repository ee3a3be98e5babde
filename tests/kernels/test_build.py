"""kernels/build.py: compiling without a GPU, and a cache that never serves what it was not made from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernels.build import (
    ARCHITECTURES,
    CUDA_DIRECTORY,
    CompileError,
    architecture,
    compile_cubin,
    parse_ptxas,
    sources_of,
)

SOURCE = """
#include "helper.cuh"
extern "C" __global__ void fill(int* out, int n) {
    __shared__ int staged[WIDTH];
    staged[threadIdx.x] = helper(n);
    __syncthreads();
    out[threadIdx.x] = staged[WIDTH - 1 - threadIdx.x];
}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "helper.cuh").write_text("__device__ int helper(int n) { return n + 1; }\n")
    path = tmp_path / "fill.cu"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture_without_a_gpu(source: Path, arch: str):
    cubin = compile_cubin(source, arch=arch, defines={"WIDTH": 32})
    assert cubin.code.startswith(b"\x7fELF")
    report = cubin.report("fill")
    assert report.entry
    assert report.registers > 0
    assert report.shared == 32 * 4
    assert report.spills == 0


@pytest.mark.parametrize("source", sorted(CUDA_DIRECTORY.rglob("*.cu*")), ids=lambda path: path.name)
def test_every_nvrtc_of_cuda_13_takes_the_sources(source: Path):
    """13.0 takes a lambda with an `auto` parameter for a host's function and refuses it; 13.5, used here, does not."""
    assert not re.search(r"\]\s*\([^()]*\bauto\b[^()]*\)", source.read_text())


def test_a_second_compilation_comes_from_the_cache(source: Path, tmp_path: Path):
    lines: list[str] = []

    def compile_once():
        return compile_cubin(
            source, arch="sm_90a", defines={"WIDTH": 32}, cache=tmp_path / "cache", progress=lines.append
        )

    first, second = compile_once(), compile_once()
    assert (first.from_cache, second.from_cache) == (False, True)
    assert second.code == first.code
    assert second.reports == first.reports
    assert lines == ["compiling fill for sm_90a (once)"]


@pytest.mark.parametrize(
    "change", ["header", "define", "arch", "options", "driver"], ids=lambda change: f"another {change}"
)
def test_the_cache_key_holds_whatever_the_code_depends_on(source: Path, tmp_path: Path, change: str):
    cache = tmp_path / "cache"
    compile_cubin(source, arch="sm_90a", defines={"WIDTH": 32}, cache=cache)
    if change == "header":
        (tmp_path / "helper.cuh").write_text("__device__ int helper(int n) { return n + 2; }\n")
    again = compile_cubin(
        source,
        arch="sm_80" if change == "arch" else "sm_90a",
        defines={"WIDTH": 64 if change == "define" else 32},
        options={"lineinfo": True} if change == "options" else None,
        driver_version=13010 if change == "driver" else 0,
        cache=cache,
    )
    assert not again.from_cache


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_cache_entry_is_compiled_again(source: Path, tmp_path: Path, damage: str):
    cache = tmp_path / "cache"
    first = compile_cubin(source, arch="sm_90a", defines={"WIDTH": 32}, cache=cache)
    (entry,) = cache.iterdir()
    content = entry.read_bytes()
    entry.write_bytes(
        {"truncated": content[:-100], "flipped": content[:-1] + bytes([content[-1] ^ 1]), "empty": b""}[damage]
    )
    again = compile_cubin(source, arch="sm_90a", defines={"WIDTH": 32}, cache=cache)
    assert not again.from_cache
    assert again.code == first.code
    assert compile_cubin(source, arch="sm_90a", defines={"WIDTH": 32}, cache=cache).from_cache


def test_a_cache_that_cannot_be_written_only_costs_time(source: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert compile_cubin(source, arch="sm_90a", defines={"WIDTH": 32}, cache=tmp_path / "file" / "below").code


def test_an_error_names_the_line_and_keeps_the_log(source: Path):
    source.write_text('extern "C" __global__ void broken() { undeclared = 1; }\n')
    with pytest.raises(CompileError, match=r"fill\.cu does not compile for sm_80: .*undeclared") as caught:
        compile_cubin(source, arch="sm_80")
    assert "fill.cu(1)" in caught.value.log


def test_includes_are_followed_through_headers(tmp_path: Path):
    (tmp_path / "a.cu").write_text('#include "b.cuh"\n#include <cuda_fp16.h>\n')
    (tmp_path / "b.cuh").write_text('  #  include "c.cuh"\n#include "b.cuh"\n#include "absent.cuh"\n')
    (tmp_path / "c.cuh").write_text("")
    assert [p.name for p in sources_of(tmp_path / "a.cu")] == ["a.cu", "b.cuh", "c.cuh"]


def test_spills_are_read_from_the_log():
    log = """
ptxas info    : Compiling entry function 'decode' for 'sm_90a'
ptxas info    : Function properties for decode
ptxas         .     816 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 96 registers, used 16 barriers, 816 bytes cumulative stack size, 1024 bytes smem, 360 bytes cmem[0]
ptxas info    : Function properties for _Z6helperPf
ptxas         .     0 bytes stack frame, 724 bytes spill stores, 776 bytes spill loads
"""
    decode, helper = parse_ptxas(log)
    assert decode.entry
    assert (decode.registers, decode.shared, decode.stack, decode.spills) == (96, 1024, 816, 28)
    assert not helper.entry
    assert helper.spills == 1500


def test_architecture_of_a_capability():
    assert [architecture(c) for c in ((8, 0), (8, 9), (9, 0), (12, 0))] == ["sm_80", "sm_89", "sm_90a", "sm_120a"]
