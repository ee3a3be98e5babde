"""EAGLE-3 checkpoints as others publish them: their key names and vocabulary maps."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from engine.drafting.checkpoint import load_drafter
from engine.errors import DrafterError
from engine.packed.model import PackedModel
from tests.engine.drafting.test_eagle import HIDDEN, small_head
from tests.synthetic import small_config, write_random_packed

NAMES = {
    "fc": "fc.weight",
    "embed_norm": "{block}.input_layernorm.weight",
    "hidden_norm": "{block}.hidden_norm.weight",
    "mlp_norm": "{block}.post_attention_layernorm.weight",
    "q": "{block}.self_attn.q_proj.weight",
    "k": "{block}.self_attn.k_proj.weight",
    "v": "{block}.self_attn.v_proj.weight",
    "o": "{block}.self_attn.o_proj.weight",
    "gate": "{block}.mlp.gate_proj.weight",
    "up": "{block}.mlp.up_proj.weight",
    "down": "{block}.mlp.down_proj.weight",
    "final_norm": "norm.weight",
    "head": "lm_head.weight",
}


@pytest.fixture
def model(tmp_path) -> PackedModel:
    config = small_config("llama", hidden_size=HIDDEN, num_layers=6, head_dim=8)
    return PackedModel.open(write_random_packed(tmp_path / "model", config))


def publish(directory, vocab_size, *, block="midlayer", prefix="", config=None, extra=None, drop=()):
    """Write the small test head as a public checkpoint; returns the head."""
    head = small_head()
    tensors = {
        prefix + NAMES[name.removesuffix(".weight")].format(block=block): value.detach().clone()
        for name, value in head.named_parameters()
        if name.removesuffix(".weight") not in drop
    }
    tensors["d2t"] = head.d2t - torch.arange(len(head.d2t))
    tensors["t2d"] = torch.isin(torch.arange(vocab_size), head.d2t)
    directory.mkdir()
    save_file(tensors | (extra or {}), directory / "model.safetensors")
    values = {
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    }
    (directory / "config.json").write_text(json.dumps(values | (config or {})))
    return head


@pytest.mark.parametrize(("block", "prefix"), [("midlayer", ""), ("layers.0", ""), ("layers.0", "model.")])
def test_both_spellings_load(model, tmp_path, block, prefix):
    head = publish(tmp_path / "eagle", model.config.vocab_size, block=block, prefix=prefix)
    loaded = load_drafter(tmp_path / "eagle", model)
    assert (loaded.d2t == head.d2t).all()
    assert loaded.config.feature_layers == (2, 3, 3)
    for ours, theirs in zip(head.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_configs_feature_layers_win(model, tmp_path):
    publish(
        tmp_path / "eagle",
        model.config.vocab_size,
        config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}},
    )
    assert load_drafter(tmp_path / "eagle", model).config.feature_layers == (1, 2, 5)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"extra": {"layers.1.mlp.weight": torch.zeros(1)}}, "tensors that an EAGLE-3 head does not"),
        ({"drop": ("fc",)}, "lacks fc"),
        ({"config": {"hidden_size": "many"}}, "config.json"),
        ({"config": {"vocab_size": 99}}, "vocabulary 99"),
        ({"config": {"intermediate_size": 64}}, "wrong shape"),
        ({"config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 50]}}, "which the model lacks"),
        ({"config": {"eagle_config": 3}}, "config.json"),
    ],
)
def test_what_does_not_fit_is_one_line(model, tmp_path, changes, complaint):
    publish(tmp_path / "eagle", model.config.vocab_size, **changes)
    with pytest.raises(DrafterError, match=complaint) as raised:
        load_drafter(tmp_path / "eagle", model)
    assert "\n" not in str(raised.value)


def test_a_checkpoint_without_a_config_is_refused(model, tmp_path):
    publish(tmp_path / "eagle", model.config.vocab_size)
    (tmp_path / "eagle" / "config.json").unlink()
    with pytest.raises(DrafterError, match=r"config\.json"):
        load_drafter(tmp_path / "eagle", model)
