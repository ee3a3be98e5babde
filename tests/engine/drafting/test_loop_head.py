"""A learned head for the GPU's loop: the file's own values, and what the decoder makes of it."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch

from engine.drafting.checkpoint import draft_head, load_drafter, save_drafter, target_fingerprint
from engine.drafting.eagle_head import EagleConfig, EagleHead
from engine.drafting.loop_head import NO_LOOKUP, LoopHead
from engine.packed.matrix import Matrix
from engine.packed.model import PackedModel
from engine.packed.quantize import dequantize
from engine.sampling import Sampling
from tests.engine.drafting.test_public_checkpoints import publish
from tests.synthetic import small_config, write_random_packed


@pytest.fixture
def model(tmp_path) -> PackedModel:
    config = small_config("llama", hidden_size=64, num_layers=6, head_dim=16)
    return PackedModel.open(write_random_packed(tmp_path / "model", config))


@pytest.mark.parametrize("head_bits", [8, 4])
def test_flint_s_own_file_keeps_its_values(model, tmp_path, head_bits: int):
    torch.manual_seed(0)
    config = EagleConfig(64, 4, 2, 16, 96, 51, model.config.vocab_size, (1, 3, 6), 1e-5, 5000.0)
    head, path = EagleHead(config), tmp_path / "drafter.safetensors"
    head.d2t.copy_(torch.arange(51) * 3)
    save_drafter(path, head, target_fingerprint(model), head_bits)
    loaded, held = load_drafter(path, model), draft_head(path, model)
    assert {name: m.format for name, m in held.matrices.items()} == {
        name: "int4" if name == "head" and head_bits == 4 else "int8"
        for name in ("fc", "q", "k", "v", "o", "gate", "up", "down", "head")
    }
    for name, parameter in loaded.named_parameters():
        name = name.removesuffix(".weight")
        stored = held.vectors[name] if parameter.ndim == 1 else dequantize(cast(Matrix, held.matrices[name]))
        assert np.array_equal(stored, parameter.numpy())
    assert held.target_ids.tolist() == list(range(0, 153, 3))
    assert held.target_ids.dtype == np.int32
    assert np.allclose(held.inverse_frequencies, 5000.0 ** -(np.arange(0, 16, 2) / 16))
    dims = held.dims
    assert (dims.intermediate, dims.vocab, dims.feature_layers) == (96, 51, (1, 3, 6))
    assert (dims.heads, dims.kv_heads, dims.head_dim, dims.rms_norm_eps) == (4, 2, 16, 1e-5)


def test_a_public_head_is_stored_anew(tmp_path):
    small = PackedModel.open(
        write_random_packed(tmp_path / "small", small_config("llama", hidden_size=32, num_layers=6, head_dim=8))
    )
    head = publish(tmp_path / "eagle", small.config.vocab_size)
    held = draft_head(tmp_path / "eagle", small)
    assert {name: m.format for name, m in held.matrices.items() if m.format != "int8"} == {"down": "bf16"}  # K is 48
    for name, parameter in head.named_parameters():
        name = name.removesuffix(".weight")
        if parameter.ndim == 2 and name != "down":
            values = parameter.detach().numpy()
            assert abs(dequantize(cast(Matrix, held.matrices[name])) - values).max() < abs(values).max() / 127


def test_widths_and_words():
    auto, eagle = LoopHead("auto", (2, 4, 8), lookup=True), LoopHead("eagle", (2,), lookup=False)
    assert (auto.least_match, eagle.least_match) == (4, NO_LOOKUP)
    assert [auto.width(drafts) for drafts in (None, 1, 2, 3, 4, 7, 15)] == [4, 2, 4, 4, 8, 8, 8]
    assert eagle.width(None) == eagle.width(7) == 2
    assert (auto.max_draft, auto.propose(3, 4, Sampling()).ids) == (7, ())
