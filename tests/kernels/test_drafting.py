"""A learned drafter's cache, followed from outside of the loops. What it writes: test_draft_head_on_cpu.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.packed.matrix import Storage
from kernels.cuda.drafting import DraftCache, DraftHead
from kernels.cuda.kv_layout import cache_shape
from kernels.cuda.plan import DraftDims
from tests.synthetic import random_matrix

HIDDEN = 64


def test_tokens_whose_rows_cannot_be_written_are_not_followed():
    rng = np.random.default_rng(1)
    shapes = {"fc": (HIDDEN, 2 * HIDDEN), "k": (64, 2 * HIDDEN), "v": (64, 2 * HIDDEN)}
    matrices = {name: random_matrix(name, *shape, Storage("int8", 32), rng) for name, shape in shapes.items()}
    vectors = {name: np.ones(HIDDEN, np.float32) for name in ("embed_norm", "hidden_norm")}
    dims = DraftDims(128, 99, (1, 2), 2, 1, 64, 1e-5)
    head = DraftHead(dims, matrices, vectors, np.ones(32, np.float32), np.arange(99))
    full = False

    def embed(ids: torch.Tensor) -> torch.Tensor:
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ids[:, None].float().expand(-1, HIDDEN)

    def follow(tokens: list[int], start: int) -> None:
        features = torch.from_numpy(rng.normal(size=(len(tokens), HIDDEN)).astype(np.float32))
        cache.extend(tokens, start, {1: features, 2: features})

    layer = torch.zeros(cache_shape(1, 1, 64, 64), dtype=torch.bfloat16)[0]
    cache = DraftCache(head, embed, layer)
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
