"""Re-tiling, run on the CPU, gives the bytes that are drawn: what the decode kernel streams and prefill reads."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.backends.cuda import kernel_dims
from engine.packed.matrix import Storage
from engine.packed.tensors import tensor_shapes
from kernels.cuda import phases as cutting
from kernels.cuda.check import Stored
from kernels.cuda.drafting import DraftHead
from kernels.cuda.driver import Driver, Module
from kernels.cuda.loading import DRAFT_NORMS, load_drafter, load_weights
from tests.fake_cuda import FakeLibcuda, emulator
from tests.kernels.tiling import draft_tiled, tiled
from tests.synthetic import random_matrix, small_config

SMS = 5
PAIRED_SMS = 6
STORAGES = [
    Storage("int4", 32),
    Storage("int4", 64, symmetric=False),
    Storage("int4", 128),
    Storage("int8", 64),
    Storage("bf16"),
]


@pytest.mark.parametrize(
    ("storage", "shares", "hidden", "inner"),
    # K in two or three chunks: 33 blocks of one SM's 66 or, with a smaller CHUNK_K, 2 of its 6.
    [(storage, 1, 384, 4224) for storage in STORAGES] + [(storage, 2, 256, 768) for storage in STORAGES],
    ids=lambda value: str(value),
)
def test_retile(storage: Storage, shares: int, hidden: int, inner: int, monkeypatch: pytest.MonkeyPatch):
    launch = emulator()
    if launch is None:
        pytest.skip("no g++ to run the kernels on the CPU")
    if shares > 1:
        monkeypatch.setattr(cutting, "CHUNK_K", 256)
    sms = PAIRED_SMS if shares > 1 else SMS
    config = small_config(
        "mistral", hidden_size=hidden, head_dim=64, intermediate_size=inner, vocab_size=52, num_layers=2
    )
    rng = np.random.default_rng(0)
    matrices = {
        name: random_matrix(name, *shape, storage, rng)
        for name, shape in tensor_shapes(config).items()
        if len(shape) == 2
    }
    vectors = {name: np.ones(shape) for name, shape in tensor_shapes(config).items() if len(shape) == 1}
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)

    # On the CPU, with a driver that runs retile.cu in fibers.
    dims = kernel_dims(config)
    phases = cutting.phases_of(dims, matrices, shares)
    assert (phases["down"].shares, phases["down"].chunks > 1) == (shares, True)
    split = cutting.split_tiles(phases, dims.layers, sms)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(0xEE))
    driver, cpu = Driver(FakeLibcuda(sm_count=sms, launch=launch)), torch.device("cpu")
    loaded = load_weights(dims, matrices, vectors, config.rope_inverse_frequencies(), phases, split, driver, cpu)
    assert np.array_equal(loaded.tiled.data.numpy(), tiled(dims, matrices, sms, shares).data.numpy())


@pytest.mark.parametrize(("sms", "shares"), [(3, 1), (4, 2)])
def test_retile_of_a_drafter(sms: int, shares: int, monkeypatch: pytest.MonkeyPatch):
    launch = emulator()
    if launch is None:
        pytest.skip("no g++ to run the kernels on the CPU")
    monkeypatch.setattr(cutting, "CHUNK_K", 256)  # fc's input in two chunks of a pair's half, three of the whole
    config = small_config("llama", hidden_size=384, head_dim=64, num_heads=6, num_kv_heads=2, num_layers=2)
    dims, rng = kernel_dims(config), np.random.default_rng(1)
    draft = cutting.DraftDims(256, 107, (1, 2), 6, 2, 64, dims.rms_norm_eps)
    shapes = {"fc": (384, 768), "q": (384, 768), "k": (128, 768), "v": (128, 768), "o": (384, 384)}
    shapes |= {"gate": (256, 384), "up": (256, 384), "down": (384, 256), "head": (107, 384)}
    stored = {"head": Storage("int4", 32, symmetric=False), "o": Storage("bf16")}
    matrices = {n: random_matrix(n, *shape, stored.get(n, Storage("int8", 32)), rng) for n, shape in shapes.items()}
    vectors = {name: np.full(384, i, np.float32) for i, name in enumerate(DRAFT_NORMS)}
    head = DraftHead(draft, matrices, vectors, np.ones(32, np.float32), np.arange(107))
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(0xEE))
    drafting = cutting.plan_drafter(dims, draft, matrices, sms, shares)
    cut = {name: (phase.chunks, phase.shares, phase.apart) for name, phase in drafting.phases.items()}
    assert (cut["qkv"], cut["head"]) == ((2, shares, True), (1, 1, False))
    assert cut["fc"] == (4 - shares, shares, False)
    kernel = Module(Driver(FakeLibcuda(sm_count=sms, launch=launch)), b"").kernel("retile")
    loaded = load_drafter(head, drafting, kernel, torch.device("cpu"))
    assert np.array_equal(loaded.tiled.data.numpy(), draft_tiled(drafting, matrices).data.numpy())
    assert loaded.norms.reshape(4, 384)[:, 0].tolist() == [0, 1, 2, 3]
    tiles = np.frombuffer(loaded.sm_tiles.numpy().tobytes(), np.int32)
    assert tiles[:10].tolist() == [*drafting.split.first[0], *drafting.split.count[0]]


def test_drafters_that_the_kernel_does_not_run():
    dims = kernel_dims(small_config("llama", hidden_size=384, head_dim=64, num_heads=6, num_kv_heads=2, num_layers=2))
    good = cutting.DraftDims(256, 107, (1, 2), 6, 2, 64, dims.rms_norm_eps)
    shapes = {"fc": (384, 768), "q": (384, 768), "k": (128, 768), "v": (128, 768), "o": (384, 384)}
    shapes |= {"gate": (256, 384), "up": (256, 384), "down": (384, 256), "head": (107, 384)}
    matrices = {name: Stored("int8", 32, *shape) for name, shape in shapes.items()}
    assert cutting.plan_drafter(dims, good, matrices, 7).split.count[0] == [5, 3, 5, 3, 1]
    for bad, sms, words in (
        (replace(good, heads=4), 3, "heads .* and epsilon"),
        (replace(good, rms_norm_eps=1e-3), 3, "heads .* and epsilon"),
        (replace(good, feature_layers=(0, 2)), 3, r"at layers \(0, 2\)"),
        (replace(good, feature_layers=(2, 2)), 3, r"at layers \(2, 2\)"),
        (replace(good, feature_layers=(1,)), 3, "fc has 768 input channels"),
        (good, 8, "107 tokens and 256 channels on 8"),
    ):
        with pytest.raises(cutting.Unsupported, match=words):
            cutting.plan_drafter(dims, bad, matrices, sms)
