"""A learned drafter's cache, followed from outside of the loops. What it writes: test_draft_head_on_cpu.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.packed.matrix import Storage
from kernels.cuda.drafting import DraftCache, DraftHead
from kernels.cuda.kv_layout import KV_LARGEST, cache_shape, unpack_keys, unpack_values
from kernels.cuda.phases import DraftDims
from tests.synthetic import random_matrix

HIDDEN = 64


def small_head(rng: np.random.Generator, hidden_norm: float = 1.0) -> DraftHead:
    shapes = {"fc": (HIDDEN, 2 * HIDDEN), "k": (64, 2 * HIDDEN), "v": (64, 2 * HIDDEN)}
    matrices = {name: random_matrix(name, *shape, Storage("int8", 32), rng) for name, shape in shapes.items()}
    vectors = {"embed_norm": np.ones(HIDDEN, np.float32), "hidden_norm": np.full(HIDDEN, hidden_norm, np.float32)}
    dims = DraftDims(128, 99, (1, 2), 2, 1, 64, 1e-5)
    return DraftHead(dims, matrices, vectors, np.ones(32, np.float32), np.arange(99))


def test_tokens_whose_rows_cannot_be_written_are_not_followed():
    rng = np.random.default_rng(1)
    full = False

    def embed(ids: torch.Tensor) -> torch.Tensor:
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ids[:, None].float().expand(-1, HIDDEN)

    def follow(tokens: list[int], start: int) -> None:
        features = torch.from_numpy(rng.normal(size=(len(tokens), HIDDEN)).astype(np.float32))
        cache.extend(tokens, start, {1: features, 2: features})

    layer = torch.zeros(cache_shape(1, 1, 64, 64), dtype=torch.float16)[0]
    cache = DraftCache(small_head(rng), embed, layer)
    for known in (0, 3):
        if known:
            follow([1, 2, 3], 0)
        full = True
        with pytest.raises(torch.OutOfMemoryError):
            follow([4, 5, 6], known)
        assert cache.position == known
        full = False
    follow([4, 5], 3)
    assert cache.position == 5


def test_rows_are_saturated_and_nan_stays_nan():
    rng = np.random.default_rng(2)
    layer = torch.zeros(cache_shape(1, 1, 16, 64), dtype=torch.float16)[0]
    cache = DraftCache(small_head(rng, hidden_norm=1e6), lambda ids: torch.ones(len(ids), HIDDEN), layer)
    features = torch.from_numpy(rng.normal(size=(3, HIDDEN)).astype(np.float32))
    features[1] = torch.nan
    cache.extend([1, 2, 3], 0, {1: features, 2: features})
    cache.complete(4)
    for part, unpack in ((0, unpack_keys), (1, unpack_values)):
        rows = unpack(layer[:, :, part], 64)[0]
        assert rows[1].isnan().all()
        for row in rows[[0, 2]]:
            assert row.isfinite().all()
            assert (row.abs() == KV_LARGEST).sum() > 32
