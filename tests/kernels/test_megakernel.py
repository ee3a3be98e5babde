"""The decode megakernel compiles for every architecture without a GPU, and its plan fits every GPU's shared memory."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.cuda import kernel_dims
from engine.config import ModelConfig
from engine.packed.matrix import Storage
from engine.packed.tensors import tensor_shapes
from kernels.build import CUDA_DIRECTORY, compile_cubin
from kernels.cuda.check import Stored
from kernels.cuda.phases import (
    DraftDims,
    Drafting,
    KernelDims,
    Unsupported,
    draft_matrix_sizes,
    phases_of,
    plan_drafter,
    shares_of,
    split_tiles,
)
from kernels.cuda.plan import Plan, make_plan
from tests.gpu.models import SHAPES, config_of

# SMs and the largest dynamic shared memory of a block (CUDA programming guide, compute capabilities): A100, RTX 3090,
# RTX 4090, H200, B200, RTX 5090.
GPUS = {
    "sm_80": (108, 166912),
    "sm_86": (82, 101376),
    "sm_89": (128, 101376),
    "sm_90a": (132, 232448),
    "sm_100a": (148, 232448),
    "sm_120a": (170, 101376),
}
WITHOUT_CLUSTERS = ("sm_80", "sm_86", "sm_89")
OFTEN = ("sm_90a", "sm_100a", "sm_120a")  # seconds each; the rest is slow
# Only Hopper and data-centre Blackwell can move registers between warps (setmaxnreg); elsewhere more words spill, but
# none in the inner loop.
MOST_SPILLS = {"sm_90a": 64, "sm_100a": 64}
# 99 KB of shared memory hold one column of smollm2: the plan refuses two, and the backend then verifies one by one.
ONE_COLUMN_ONLY = {"sm_86", "sm_89", "sm_120a"}


def plan_for(
    config: ModelConfig, arch: str, columns: int, storage: Storage, head: Storage, drafter: bool = False
) -> Plan:
    matrices: dict[str, Any] = {}
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 2:
            kind = head if name in ("embed", "head") else storage
            n, k = shape
            minimum = None if kind.symmetric else ()
            matrices[name] = SimpleNamespace(format=kind.format, n=n, k=k, group=kind.group, minimum=minimum)
    dims, (sms, shared) = kernel_dims(config), GPUS[arch]
    shares = shares_of(dims, matrices, sms, arch not in WITHOUT_CLUSTERS)
    phases = phases_of(dims, matrices, shares)
    split, drafting = split_tiles(phases, dims.layers, sms), drafter_for(dims, sms, shares) if drafter else None
    return make_plan(dims, phases, split, sms, shared, columns, matrices["embed"], None, drafting)


def drafter_for(dims: KernelDims, sms: int, shares: int) -> Drafting:
    """A head of the model's proportions, stored as the shipped one."""
    layers = (2, dims.layers // 2, dims.layers - 3)
    draft = DraftDims(dims.intermediate, 16384, layers, dims.heads, dims.kv_heads, dims.head_dim, dims.rms_norm_eps)
    matrices = {
        name: Stored("int4_asymmetric" if name == "head" else "int8", 32, *size)
        for name, size in draft_matrix_sizes(dims, draft).items()
    }
    return plan_drafter(dims, draft, matrices, sms, shares)


@pytest.mark.parametrize(
    ("arch", "columns"),
    [pytest.param(a, 1, marks=() if a in OFTEN else pytest.mark.slow) for a in GPUS]
    + [pytest.param(a, 2, marks=pytest.mark.slow) for a in GPUS if a not in ONE_COLUMN_ONLY],
)
def test_smollm2s_kernel_compiles(arch: str, columns: int, record_property):
    plan = plan_for(config_of("smollm2-135m"), arch, columns, Storage("int4", 32, symmetric=False), Storage("int8", 32))
    cubin = compile_cubin(CUDA_DIRECTORY / "megakernel.cu", arch=arch, defines=plan.constants)
    report = cubin.report("megakernel")
    record_property("registers", report.registers)
    record_property("spills", report.spills)
    print(f"{arch}: {report.registers} registers, {report.spills} bytes of spills")
    assert report.registers * plan.threads <= 65536  # one block to an SM
    assert report.spills <= MOST_SPILLS.get(arch, 640)


@pytest.mark.parametrize("arch", sorted(ONE_COLUMN_ONLY))
def test_a_ring_too_short_for_the_warps_is_refused_by_the_plan(arch: str):
    with pytest.raises(Unsupported, match="shared memory"):
        plan_for(config_of("smollm2-135m"), arch, 2, Storage("int4", 32, symmetric=False), Storage("int8", 32))


@pytest.mark.parametrize(
    "columns", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_smollm2s_kernel_compiles_with_a_drafter(columns: int, record_property):
    storage, head = Storage("int4", 32, symmetric=False), Storage("int8", 32)
    plan = plan_for(config_of("smollm2-135m"), "sm_90a", columns, storage, head, drafter=True)
    cubin = compile_cubin(CUDA_DIRECTORY / "megakernel.cu", arch="sm_90a", defines=plan.constants)
    main, draft = cubin.report("megakernel"), cubin.report("_Z5draft")
    for part, report in (("layers", main), ("drafter", draft)):
        record_property(part, report.spills)
        print(f"{columns} columns, {part}: {report.spills} bytes of spills")
    # NVRTC 13: 4, 4 and 56 in the layers, none in their inner loops.
    assert main.spills <= {2: 16, 4: 64, 8: 64}[columns]
    assert draft.spills <= 320


@pytest.mark.parametrize("drafter", [False, True], ids=["", "drafter"])
@pytest.mark.parametrize("columns", [1, 2, 4, 8])
@pytest.mark.parametrize("arch", GPUS)
def test_what_a_slot_held_before_has_come_when_a_warp_looks_at_it(arch: str, columns: int, drafter: bool):
    """A warp knows that the stage one round before its own has come; `window` may be in flight beside that one."""
    if drafter and columns == 1:
        pytest.skip("a drafter is for several columns")
    planned = 0
    for shape, storage in product(SHAPES, (Storage("int4", 128), Storage("int8", 32), Storage("bf16"))):
        try:
            plan = plan_for(config_of(shape), arch, columns, storage, storage, drafter)
        except Unsupported:
            continue
        planned += 1
        stages, warps = int(plan.constants["STAGES"]), int(plan.constants["CONSUMER_WARPS"])
        names = [name for name in plan.constants if name.endswith("_UNITS_PER_STAGE")]
        assert len(names) == (11 if drafter else 5)
        turns = {name: warps // int(plan.constants[name]) for name in names}
        dims, blocks = plan.dims, int(plan.constants["KV_PER_STAGE"])
        readers = -(-dims.heads // dims.kv_heads * columns // 8) * (dims.head_dim // 64)
        turns["keys"] = -(-min(warps // readers, stages * blocks) // blocks)  # KEY_WARPS of shape.cuh
        for name, turn in turns.items():
            assert turn <= stages, (shape, storage, name)
            # The head is streamed while the last layer is multiplied, keys are while queries are.
            for window in ("LAYER_WINDOW", "HEAD_WINDOW", "LATE_WINDOW", "KEYS_WINDOW"):
                flying = int(plan.constants[window])
                assert flying >= 1, (shape, storage, window)
                assert flying == 1 or turn + flying <= stages, (shape, storage, name, window)
    assert planned or arch not in ("sm_90a", "sm_100a")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "arch", "columns", "most"),  # NVRTC 13.5 spills 0, 28, 8, 36 and 92 bytes
    [
        ("granite-3b", "sm_90a", 1, 16),
        ("granite-3b", "sm_100a", 1, 128),
        ("qwen3-1.7b", "sm_90a", 1, 16),  # heads of 128
        ("llama-3.2-3b", "sm_90a", 1, 64),  # the same, and units whose place in K changes
        ("granite-3b", "sm_90a", 8, 128),  # two tiles of tokens stay in registers, and it is faster so
    ],
)
def test_larger_models_kernels_compile(shape: str, arch: str, columns: int, most: int, record_property):
    int4 = Storage("int4", 128)
    plan = plan_for(config_of(shape), arch, columns, int4, int4)
    cubin = compile_cubin(CUDA_DIRECTORY / "megakernel.cu", arch=arch, defines=plan.constants)
    spills = cubin.report("megakernel").spills
    record_property("spills", spills)
    print(f"{shape}, {arch}, {columns} columns: {spills} bytes of spills")
    assert spills <= most
