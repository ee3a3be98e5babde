"""The torch fallback: packed weights give the reference's numbers, and it is what opens without a native library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import loading
from engine.backends.cpu_torch import CpuTorch, PackedWeight
from engine.backends.torch_reference import TorchReference
from engine.config import Family
from engine.packed.matrix import Storage
from engine.packed.model import PackedModel
from engine.packed.quantize import dequantize
from kernels import native
from tests.synthetic import random_matrix, small_config, write_random_packed

TOLERANCE = 1e-5  # both are float32; the order of sums differs


@pytest.mark.parametrize(
    "storage",
    [
        Storage("int4", 32),
        Storage("int4", 128),
        Storage("int4", 64, symmetric=False),
        Storage("int8", 32),
        Storage("int8", 128),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [16, 37])  # torch packs sixteen rows at a time
def test_a_packed_product_loses_nothing(storage: Storage, rows: int) -> None:
    rng = np.random.default_rng(3)
    matrix = random_matrix("m", rows, 256, storage, rng)
    if storage.format == "int8":
        matrix.q[0, :2] = (-128, 127)
    weight, exact = PackedWeight(matrix), dequantize(matrix)
    for tokens in (1, 3, 40):
        x = rng.standard_normal((tokens, 256)).astype(np.float32)
        found = torch.nn.functional.linear(torch.from_numpy(x), weight).numpy()  # type: ignore[arg-type]
        assert found.shape == (tokens, rows)
        np.testing.assert_allclose(found, x @ exact.T, atol=TOLERANCE * np.abs(x @ exact.T).max())
    ids = torch.tensor([0, rows - 1, 0])
    np.testing.assert_array_equal(torch.nn.functional.embedding(ids, weight).numpy(), exact[ids])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kinds", [{"bits": 4}, {"bits": 4, "symmetric": False, "embed_bits": 8}, {"bits": 16}], ids=str
)
@pytest.mark.parametrize("family", ["granite", "llama", "mistral", "qwen3"])
def test_logits_match_the_reference(tmp_path: Path, family: Family, kinds: dict[str, Any]) -> None:
    model = PackedModel.open(write_random_packed(tmp_path / "m", small_config(family), **kinds))
    ids = np.random.default_rng(0).integers(0, 320, 50).tolist()
    backend, reference = CpuTorch.open(model), TorchReference.from_packed(model)
    for piece in (ids[:40], ids[40:41], ids[41:]):
        found, wanted = backend.step(piece).logits, reference.step(piece).logits
        assert np.abs(found - wanted).max() < TOLERANCE * 10 * np.abs(wanted).max()
    assert backend.position == 50
    if kinds["bits"] == 4:
        assert backend.ledger(1, 0).weights["gate"] < 0.35 * reference.ledger(1, 0).weights["gate"]


def test_it_opens_where_there_is_no_native_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise native.LibraryMissing("no C++ compiler")

    monkeypatch.setattr(native, "load", missing)
    monkeypatch.setattr(loading, "_gpu", lambda: None)
    model = PackedModel.open(write_random_packed(tmp_path / "m"))
    said: list[str] = []
    backend = loading.open_backend(model, "auto", 1, None, said.append)
    assert isinstance(backend, CpuTorch)
    assert backend.description == "torch int4 on cpu, 1 threads (no native decoder)"
    assert len(said) == 1
    assert "no C++ compiler" in said[0]
    backend.step([1, 2])
    backend.close()
