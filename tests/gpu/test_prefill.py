"""The prefill on the GPU against torch_reference: every family, format and shape, and the cache that it writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.backends.cuda import kernel_dims
from engine.packed.matrix import Storage
from kernels.build import architecture, compile_cubin
from kernels.cuda.driver import Driver, Gpu, Module
from kernels.cuda.megakernel import Megakernel
from kernels.cuda.phases import format_of
from kernels.cuda.prefill import SOURCE, EmbeddingTable, Prefill
from tests.gpu.models import SHAPES, RandomModel, adopt_cache, config_of, plain_cache, relative_error
from tests.synthetic import small_config

TOLERANCE = 3e-3  # relative; operands, keys and values round to fp16, 2^-12 each


@pytest.fixture(scope="session")
def module(gpu: Gpu) -> Module:
    return Module(Driver(), compile_cubin(SOURCE, arch=architecture(gpu.capability)).code)


def opened(model: RandomModel, module: Module, positions: int) -> tuple[Prefill, torch.Tensor]:
    """A prefill over the megakernel's tiles, and a cache full of NaN."""
    dims, matrices = kernel_dims(model.config), {name: model.matrix(name) for name in model.matrix_names()}
    vectors = {name: model.vector(name) for name in model.names() if name not in matrices}
    frequencies = model.config.rope_inverse_frequencies()
    megakernel = Megakernel(dims, matrices, vectors, frequencies, positions)
    cache = torch.full_like(megakernel.kv_cache, torch.nan)
    table = EmbeddingTable(format_of(matrices["embed"]), matrices["embed"].group, *megakernel.embedding)
    on_gpu = {name: torch.from_numpy(vector).cuda() for name, vector in vectors.items()}
    return Prefill(dims, megakernel.tiled_weights, table, on_gpu, torch.from_numpy(frequencies).cuda(), module), cache


def random_tokens(count: int, vocab: int) -> list[int]:
    return np.random.default_rng(1).integers(0, vocab, count).tolist()


def check(model: RandomModel, module: Module, first: int, second: int, record) -> None:
    """Two chunks: logits and features against the reference, and the cache against the reference's own."""
    config, count = model.config, first + second
    tokens = random_tokens(count, config.vocab_size)
    wanted = [0, 1, config.num_layers]
    reference = model.reference(count)
    prefill, cache = opened(model, module, count)
    errors = {}
    for start, end in ((0, first), (first, count)):
        expected = reference.step(tokens[start:end], features=wanted)
        output = prefill.run(tokens[start:end], start, cache, logits="all", features=wanted)
        assert output.logits is not None
        errors[f"logits at {start}"] = relative_error(output.logits, expected.logits)
        for layer in wanted:
            errors[f"x{layer} at {start}"] = relative_error(output.features[layer], expected.features[layer])
        distance = adopt_cache(reference, cache)
        assert distance < TOLERANCE, f"the cache after {end} tokens is {distance:.1e} off"
    rest = plain_cache(cache, config, -(-count // 16) * 16)
    assert not any(part[:, :, count:].nan_to_num(1).any() for part in rest), "the last block's rest must be zeros"
    record("worst_error", max(errors.values()))
    bad = {name: f"{error:.1e}" for name, error in errors.items() if not error < TOLERANCE}
    assert not bad, f"relative errors over {TOLERANCE}: {bad}"


@pytest.mark.parametrize("family", ["granite", "llama", "mistral", "qwen3"])
@pytest.mark.parametrize("dim", [64, 128])
def test_families(module: Module, family, dim: int, record_property):
    config = small_config(family, hidden_size=384, num_layers=3, head_dim=dim, intermediate_size=640, vocab_size=2001)
    check(RandomModel(config, Storage("int4", 64), seed=2), module, 301, 77, record_property)


@pytest.mark.parametrize(
    "storage",
    [
        Storage("int4", 32),
        Storage("int4", 64, symmetric=False),
        Storage("int4", 128),
        Storage("int8", 64),
        Storage("bf16"),
    ],
    ids=str,
)
def test_formats(module: Module, storage: Storage, record_property):
    config = small_config("llama", hidden_size=256, head_dim=64, intermediate_size=512)
    check(RandomModel(config, storage, seed=3), module, 40, 9, record_property)


@pytest.mark.parametrize("shape", SHAPES)
def test_real_shapes_two_layers_deep(module: Module, shape: str, record_property):
    storage = Storage("int4", 32, symmetric=False) if shape.startswith("smollm2") else Storage("int4", 128)
    head = {"embed": Storage("int8", 32)} if shape.startswith("smollm2") else {}
    model = RandomModel(config_of(shape, layers=2, vocab=8192), storage, overrides=head, seed=4)
    check(model, module, 130, 35, record_property)


def test_granite_3b_at_full_depth(module: Module, record_property):
    check(RandomModel(config_of("granite-3b"), seed=5), module, 256, 40, record_property)


def test_last_row_repeatability_and_chunking(module: Module):
    model = RandomModel(small_config("qwen3", hidden_size=512, head_dim=128, vocab_size=5003), seed=6)
    tokens = random_tokens(200, 5003)
    prefill, cache = opened(model, module, 200)
    every = prefill.run(tokens, 0, cache, logits="all").logits
    kept = cache.clone()
    again = prefill.run(tokens, 0, cache, logits="all").logits
    last = prefill.run(tokens, 0, cache, logits="last").logits
    assert every is not None
    assert again is not None
    assert last is not None
    assert torch.equal(every, again), "the same chunk twice must be bitwise equal"
    assert torch.equal(cache.nan_to_num(7), kept.nan_to_num(7))
    assert relative_error(last, every[-1:]) < 1e-5
    for start, end in ((0, 1), (1, 18), (18, 200)):
        last = prefill.run(tokens[start:end], start, cache, logits="last").logits
    assert last is not None
    assert relative_error(last, every[-1:]) < 2 * TOLERANCE
