"""The prefill's kernels, run on the CPU, and the whole prefill over them against torch_reference."""

from __future__ import annotations

from ctypes import c_float, c_int, c_longlong
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.backends.cuda import kernel_dims
from engine.backends.torch_reference import TorchReference, rms_norm, rotate
from engine.config import Family, ModelConfig
from engine.packed.matrix import Matrix, Storage
from engine.packed.model import PackedModel
from engine.packed.quantize import dequantize
from engine.packed.tensors import tensor_shapes
from kernels.build import ARCHITECTURES, compile_cubin
from kernels.cuda import phases as cutting
from kernels.cuda.driver import Driver, Module
from kernels.cuda.kv_layout import KV_LARGEST, cache_shape, pack_keys, pack_values
from kernels.cuda.phases import format_of
from kernels.cuda.prefill import HEAD_DIMS, SOURCE, EmbeddingTable, Prefill, _PhaseWeights, scratch_weights
from tests.fake_cuda import FakeLibcuda, emulator
from tests.kernels.tiling import tiled
from tests.synthetic import random_matrix, small_config, write_random_packed


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_without_spills(arch: str):
    cubin = compile_cubin(SOURCE, arch=arch)
    copies = {f"{copy}_cache_{dim}" for copy in ("read", "write") for dim in HEAD_DIMS}
    assert {r.name for r in cubin.reports} == {"dequantise", "embed", "add_and_norm", "rotate", "gate", *copies}
    assert all(r.spills == 0 and r.stack == 0 for r in cubin.reports)
    assert all(r.registers <= 64 for r in cubin.reports)  # four blocks of 256 threads fit an SM


@pytest.fixture(scope="session")
def module() -> Module:
    launch = emulator()
    if launch is None:
        pytest.skip("no g++ to run the kernels on the CPU")
    return Module(Driver(FakeLibcuda(launch=launch)), b"")


STORAGES = [
    Storage("int4", 32),
    Storage("int4", 64, symmetric=False),
    Storage("int4", 128),
    Storage("int8", 32),
    Storage("int8", 128),
    Storage("bf16"),
]


def table_of(matrix: Matrix) -> EmbeddingTable:
    def copied(array: np.ndarray | None) -> Tensor | None:
        return None if array is None else torch.from_numpy(np.array(array).view(SIGNED[array.dtype.itemsize]))

    q = copied(matrix.q)
    assert q is not None
    return EmbeddingTable(format_of(matrix), matrix.group, q, copied(matrix.scale), copied(matrix.minimum))


SIGNED = {1: np.int8, 2: np.int16, 4: np.int32}


def random_matrices(config: ModelConfig, storage: Storage, seed: int) -> dict[str, Matrix]:
    rng = np.random.default_rng(seed)
    shapes = {name: shape for name, shape in tensor_shapes(config).items() if len(shape) == 2}
    return {name: random_matrix(name, *shape, storage, rng) for name, shape in shapes.items()}


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_dequantise_reads_the_decoders_tiles(
    module: Module, storage: Storage, shares: int, monkeypatch: pytest.MonkeyPatch
):
    # `down` lies in chunks, where two SMs share it, too; six blocks (of hidden) make units of three in int4.
    hidden, inner = (384, 4224) if shares == 1 else (768, 1536)
    if shares > 1:
        monkeypatch.setattr(cutting, "CHUNK_K", 512)
    config = small_config(
        "llama", hidden_size=hidden, head_dim=64, intermediate_size=inner, vocab_size=52, num_layers=2
    )
    dims, matrices = kernel_dims(config), random_matrices(config, storage, seed=1)
    weights = tiled(dims, matrices, 6 if shares > 1 else 5, shares)
    scratch = torch.empty(scratch_weights(dims), dtype=torch.float16)
    parts = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
    assert weights.phases["down"].chunks > 1
    assert weights.phases["down"].shares == shares
    for name, members in parts.items():
        scratch.fill_(torch.nan)
        phase = _PhaseWeights(module.kernel("dequantise"), weights, name, scratch)
        phase.launch.values[1].value = 1
        phase.launch.launch(0)
        expected = np.concatenate([dequantize(matrices[f"layers.1.{member}"]) for member in members])
        assert torch.equal(phase.transposed.t(), torch.from_numpy(expected).half()), name
    scratch.fill_(torch.nan)
    _PhaseWeights(module.kernel("dequantise"), weights, "head", scratch).bind(1, 3, 36).launch(0)
    expected = torch.from_numpy(dequantize(matrices["embed"])).half()
    assert torch.equal(scratch[: 36 * hidden].view(36, hidden), expected[16:52])
    assert scratch[36 * hidden :].isnan().all()


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_embed(module: Module, storage: Storage):
    matrix = random_matrix("embed", 10, 256, storage, np.random.default_rng(1))
    tokens = torch.tensor([9, 0, 4, 4], dtype=torch.int32)
    table, x = table_of(matrix), torch.full((4, 256), torch.nan)
    module.kernel("embed").launch(4, 256, [table.rows(256), tokens, c_float(12.0), x])
    torch.testing.assert_close(x, 12 * torch.from_numpy(dequantize(matrix))[tokens.long()], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("n", [64, 1188])  # less than, and not a multiple of, what the block covers at once
@pytest.mark.parametrize("with_scale", [False, True])
def test_add_and_norm(module: Module, n: int, with_scale: bool):
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(3, n, generator=generator), 5 * torch.randn(3, n, generator=generator)
    weight, scale = torch.rand(n, generator=generator), torch.tensor([0.25, 1.0, 4.0])
    expected = x + 0.22 * y * (scale[:, None] if with_scale else 1)
    out = torch.full((3, n), torch.nan, dtype=torch.float16)
    arguments = [x, y, scale if with_scale else None, c_float(0.22), weight, c_float(1e-5), out, c_int(n)]
    module.kernel("add_and_norm").launch(3, 256, arguments)
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(out.float(), rms_norm(expected, weight, 1e-5), rtol=1e-3, atol=1e-6)


def test_add_and_norm_without_an_update_leaves_x_alone(module: Module):
    x = torch.randn(2, 64)
    before, out = x.clone(), torch.empty(2, 64, dtype=torch.float16)
    module.kernel("add_and_norm").launch(
        2, 256, [x, None, None, c_float(9.0), torch.ones(64), c_float(1e-5), out, c_int(64)]
    )
    assert torch.equal(x, before)
    torch.testing.assert_close(out.float(), rms_norm(before, torch.ones(64), 1e-5), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_rotate(module: Module, dim: int, with_norm: bool):
    heads, kv_heads, tokens, start, positions = 5, 2, 3, 4, 9
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=generator)
    angles = torch.rand(tokens, dim // 2, generator=generator) * 6
    q_norm, k_norm = torch.rand(2, dim, generator=generator) + 0.5
    q = torch.full((tokens, heads, dim), torch.nan, dtype=torch.float16)
    keys, values = torch.full((2, kv_heads, positions, dim), torch.nan, dtype=torch.float16)
    norms = (q_norm, k_norm) if with_norm else (None, None)
    sizes = [c_int(v) for v in (heads, kv_heads, dim, start, positions)]
    arguments = [qkv, angles.cos(), angles.sin(), *norms, c_float(1e-6), q, keys, values, *sizes]
    module.kernel("rotate").launch((tokens, 2, 1), 256, arguments)

    split = qkv.view(tokens, heads + 2 * kv_heads, dim).transpose(0, 1).split([heads, kv_heads, kv_heads])
    expected_q, expected_k, expected_v = split
    if with_norm:
        expected_q, expected_k = rms_norm(expected_q, q_norm, 1e-6), rms_norm(expected_k, k_norm, 1e-6)
    expected_q, expected_k = (rotate(t, angles.cos(), angles.sin()) for t in (expected_q, expected_k))
    written = slice(start, start + tokens)
    one_unit = 2**-10  # of fp16, relative; the absolute part is for sums that cancel
    torch.testing.assert_close(q.float().transpose(0, 1), expected_q, rtol=one_unit, atol=1e-5)
    torch.testing.assert_close(keys[:, written].float(), expected_k, rtol=one_unit, atol=1e-5)
    assert torch.equal(values[:, written], expected_v.half())
    for untouched in (keys[:, :start], keys[:, start + tokens :], values[:, :start], values[:, start + tokens :]):
        assert untouched.isnan().all()


def test_rotate_saturates_what_fp16_cannot_hold_and_keeps_nan(module: Module):
    dim = 64
    qkv = torch.zeros(3, dim)  # a query, a key, a value
    qkv[:, :5] = torch.tensor([1e5, -1e5, 65519.0, 3e38, torch.nan])
    qkv[2, 5] = torch.inf  # not of those that are turned: infinity times the sine of zero is NaN
    q, keys, values = torch.full((3, 1, 1, dim), 7.0, dtype=torch.float16)
    sizes = [c_int(v) for v in (1, 1, dim, 0, 1)]
    turns = torch.ones(1, dim // 2), torch.zeros(1, dim // 2)  # of position 0
    arguments = [qkv, *turns, None, None, c_float(1e-6), q, keys, values, *sizes]
    module.kernel("rotate").launch((1, 1, 1), 256, arguments)
    for rows in (q, keys, values):
        assert rows[0, 0, :4].tolist() == [KV_LARGEST, -KV_LARGEST, KV_LARGEST, KV_LARGEST]
        assert rows[0, 0, 4].isnan()
    assert values[0, 0, 5:].tolist() == [KV_LARGEST] + [0.0] * (dim - 6)


@pytest.mark.parametrize("dim", [64, 128])
def test_the_cache_is_written_in_the_decoders_layout_and_read_back(module: Module, dim: int):
    kv_heads, blocks, start, end = 2, 4, 21, 43  # from the middle of the second block to the middle of the third
    cache = torch.full(cache_shape(1, kv_heads, blocks * 16, dim), torch.nan, dtype=torch.float16)[0]
    plain = torch.randn(2, kv_heads, end, dim).half()
    plain[:, :, 22:24, 3:5] = 65504.0
    units = c_longlong(cache.stride(0) // 8)

    def copy(name: str, first_block: int, end_block: int, end: int, keys: Tensor, values: Tensor) -> None:
        sizes = [c_int(v) for v in (first_block, end, keys.shape[1])]
        grid = (end_block - first_block, kv_heads, 1)
        module.kernel(f"{name}_{dim}").launch(grid, 256, [cache, units, keys, values, *sizes])

    copy("write_cache", start // 16, 3, end, *plain)
    padded = torch.zeros(2, kv_heads, 48, dim).half()
    padded[:, :, :end] = plain
    assert torch.equal(cache[:, 1:3, 0], pack_keys(padded[0])[:, 1:3])
    assert torch.equal(cache[:, 1:3, 1], pack_values(padded[1])[:, 1:3])
    assert cache[:, [0, 3]].isnan().all()
    broken = plain.clone()
    broken[:, 0, 40, 7] = torch.nan
    copy("write_cache", start // 16, 3, end, *broken)
    assert cache[:, 1:3].isnan().sum() == 2
    copy("write_cache", start // 16, 3, end, *plain)

    copy("write_cache", 0, 1, end, *plain)
    back = torch.full_like(plain, torch.nan)
    copy("read_cache", 0, 3, end - 2, *back)
    assert torch.equal(back[:, :, : end - 2], plain[:, :, : end - 2])
    assert back[:, :, end - 2 :].isnan().all()


def test_gate_keeps_rows_of_any_magnitude(module: Module):
    inner = 2056
    generator = torch.Generator().manual_seed(4)
    magnitude = torch.tensor([[1e-3], [1.0], [200.0], [0.0]])
    gate_up = (torch.randn(4, 2 * inner, generator=generator) * magnitude).half()
    out, scale = torch.full((4, inner), torch.nan, dtype=torch.float16), torch.full((4,), torch.nan)
    module.kernel("gate").launch(4, 256, [gate_up, out, scale, c_int(inner)])
    g, u = gate_up.float().chunk(2, dim=1)
    expected = torch.nn.functional.silu(g) * u
    largest = expected.abs().amax(dim=1, keepdim=True)
    assert ((out.float() * scale[:, None] - expected).abs() <= largest * 2**-12 + expected.abs() * 2**-11).all()
    assert (out[:3].abs().amax(dim=1) >= 2**13).all()
    assert (out.abs() <= 2**14).all()
    assert (expected[2].abs() > 65504 / 8).any()  # the third row would not have been far from fp16's limit


class CpuPrefill(Prefill):
    """cuBLAS's part done by torch on the CPU, with the same rounding of operands and results."""

    def _matmul(self, x: Tensor, weights: Tensor, out: Tensor) -> None:
        out.copy_(x.float() @ weights.float())


def opened(directory: Path, module: Module) -> tuple[CpuPrefill, Tensor]:
    """A prefill over a packed model, and a poisoned cache of 48 positions."""
    model = PackedModel.open(directory)
    config, dims = model.config, kernel_dims(model.config)
    matrices = {name: model.matrix(name) for name in model.matrix_names()}
    vectors = {n: torch.from_numpy(np.array(model.vector(n))) for n in model.names() if n not in matrices}
    frequencies = torch.from_numpy(config.rope_inverse_frequencies())
    shape = cache_shape(config.num_layers, config.num_kv_heads, 48, config.head_dim)
    cache = torch.full(shape, torch.nan, dtype=torch.float16)
    table = table_of(matrices["embed"])
    return CpuPrefill(dims, tiled(dims, matrices), table, vectors, frequencies, module), cache


def relative_error(value: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(value - truth) / np.linalg.norm(truth))


@pytest.mark.parametrize(
    ("family", "bits", "symmetric"),
    [("granite", 4, True), ("llama", 4, False), ("mistral", 8, True), ("qwen3", 4, True), ("llama", 16, True)],
)
def test_chunks_agree_with_the_reference(tmp_path: Path, module: Module, family: Family, bits: int, symmetric: bool):
    config = small_config(family, head_dim=64)
    directory = write_random_packed(tmp_path / "m", config, bits=bits, symmetric=symmetric, seed=5)
    prefill, cache = opened(directory, module)
    tokens = np.random.default_rng(6).integers(0, config.vocab_size, 24).tolist()
    truth = TorchReference.from_packed(PackedModel.open(directory)).step(tokens, features=[0, 1, 2])

    first = prefill.run(tokens[:17], 0, cache, logits="none", features=[1])
    second = prefill.run(tokens[17:], 17, cache, logits="all", features=[0, 1, 2])
    assert first.logits is None
    assert second.logits is not None
    # fp16 operands, keys and values: 2^-12 of rounding each.
    assert relative_error(first.features[1].numpy(), truth.features[1][:17]) < 1.5e-3
    for layer, expected in truth.features.items():
        assert relative_error(second.features[layer].numpy(), expected[17:]) < 2e-3
    assert relative_error(second.logits.numpy(), truth.logits[17:]) < 2.5e-3


def test_last_logits_are_the_last_row_of_all(tmp_path: Path, module: Module):
    directory = write_random_packed(tmp_path / "m", small_config("qwen3", vocab_size=1001, head_dim=128), seed=7)
    prefill, cache = opened(directory, module)
    tokens = list(range(7))
    every = prefill.run(tokens, 0, cache, logits="all").logits
    last = prefill.run(tokens, 0, cache, logits="last").logits
    assert every is not None
    assert last is not None
    assert last.shape == (1, 1001)
    torch.testing.assert_close(last[0], every[-1], rtol=1e-5, atol=1e-5)
