"""What the CPU's stand-ins (tests/kernels/cuda_on_cpu/sm.h) take for granted of the GPU's own instructions."""

from __future__ import annotations

from ctypes import c_int
from pathlib import Path

import torch

from kernels.build import CUDA_DIRECTORY, architecture, compile_cubin
from kernels.cuda.driver import Driver, Gpu, Module
from kernels.cuda.kv_layout import KV_LARGEST, as_cached

SOURCE = f"""
#include "{CUDA_DIRECTORY / "primitives.cuh"}"

extern "C" __global__ void halves(const float2* from, u32* rounded, u32* rest, float2* back, int count) {{
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= count) return;
    rounded[i] = to_half2(from[i].x, from[i].y);
    rest[i] = rest_of_half2(rounded[i], from[i].x, from[i].y);
    back[i] = from_half2(rounded[i]);
}}
"""


def test_halves_saturate_keep_nan_and_split(gpu: Gpu, tmp_path: Path):
    (tmp_path / "halves.cu").write_text(SOURCE)
    module = Module(Driver(), compile_cubin(tmp_path / "halves.cu", arch=architecture(gpu.capability)).code)
    ends = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 65504.0, 65519.0, 65520.0, -1e6, 3e38, 0.0])
    spread = torch.randn(4086, generator=torch.Generator().manual_seed(1)) * 2.0 ** torch.linspace(-30, 15, 4086)
    values = torch.cat((ends, spread)).cuda()
    count = len(values) // 2
    rounded, rest = torch.zeros(2, 2 * count, dtype=torch.float16, device="cuda")
    back = torch.zeros(2 * count, device="cuda")
    module.kernel("halves").launch(-(-count // 256), 256, [values, rounded, rest, back, c_int(count)])
    torch.cuda.synchronize()
    torch.testing.assert_close(rounded, as_cached(values), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back, rounded.float(), rtol=0, atol=0, equal_nan=True)
    assert rounded[:2].isnan().all()
    assert rest[:2].isnan().all()
    assert rounded[2:4].tolist() == rest[2:4].tolist() == [KV_LARGEST, -KV_LARGEST]
    held = values.abs() <= KV_LARGEST
    off = (rounded[held].double() + rest[held].double() - values[held].double()).abs()
    assert (off <= (values[held].double().abs() * 2**-22).clamp(min=2**-25)).all()
