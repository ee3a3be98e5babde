"""Re-tiling, run on the CPU, gives the bytes that are drawn: what the decode kernel streams and prefill reads."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.backends.cuda import kernel_dims
from engine.packed.matrix import Storage
from engine.packed.tensors import tensor_shapes
from kernels.cuda import plan
from kernels.cuda.driver import Driver
from kernels.cuda.loading import load_weights
from tests.fake_cuda import FakeLibcuda, emulator
from tests.kernels.tiling import tiled
from tests.synthetic import random_matrix, small_config

SMS = 5


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
def test_retile(storage: Storage, monkeypatch: pytest.MonkeyPatch):
    launch = emulator()
    if launch is None:
        pytest.skip("no g++ to run the kernels on the CPU")
    config = small_config("mistral", hidden_size=384, head_dim=64, intermediate_size=4224, vocab_size=52, num_layers=2)
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
    phases = plan.phases_of(dims, matrices)
    split = plan.split_tiles(phases, dims.layers, SMS)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(0xEE))
    driver, cpu = Driver(FakeLibcuda(sm_count=SMS, launch=launch)), torch.device("cpu")
    loaded = load_weights(dims, matrices, vectors, config.rope_inverse_frequencies(), phases, split, driver, cpu)
    assert np.array_equal(loaded.tiled.data.numpy(), tiled(dims, matrices, SMS).data.numpy())
