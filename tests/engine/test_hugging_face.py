"""Hugging Face folders: what transformers saves is read exactly; what is missing, doubled or foreign is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint import open_checkpoint
from engine.errors import CheckpointError, UnsupportedModel
from engine.packed.matrix import Storage
from engine.packed.quantize import dequantize, from_bf16
from engine.packed.tensors import tensor_shapes
from tests.hugging_face_folders import config_json, hf_module, random_tensors, transformers_model, write_folder
from tests.synthetic import small_config

SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@pytest.mark.parametrize("family", ["granite", "llama", "mistral", "qwen3"])
@pytest.mark.parametrize(("dtype", "shard"), [("float32", "5GB"), ("bfloat16", "50KB"), ("float16", "5GB")])
def test_what_transformers_saves_is_read_exactly(tmp_path: Path, family: Any, dtype: str, shard: str) -> None:
    import torch

    model = transformers_model(family)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "50KB")
    weights = model.state_dict()
    with open_checkpoint(tmp_path) as checkpoint:
        config = checkpoint.config
        assert config.family == family
        assert (config.hidden_size, config.num_layers, config.num_kv_heads) == (64, 2, 2)
        assert config.tie_word_embeddings == (family != "mistral")
        assert config.eos_token_ids == (2,)
        assert config.attention_multiplier == pytest.approx(model.model.layers[0].self_attn.scaling)
        assert checkpoint.directory == tmp_path
        assert checkpoint.format == f"safetensors {SHORT[dtype]}"
        for name in checkpoint.names():
            values = weights[hf_module(name) + ".weight"].float().numpy()
            assert np.array_equal(checkpoint.read_float(name), values), name
            assert not checkpoint.quantized(name)
            matrix = checkpoint.read_matrix(name)
            if dtype == "bfloat16" and values.ndim == 2:
                assert checkpoint.storage(name) == Storage("bf16")
                assert matrix is not None
                assert np.array_equal(dequantize(matrix), values)
            else:
                assert matrix is None
                assert checkpoint.storage(name) is None


def test_rows_can_be_read_in_parts(tmp_path: Path) -> None:
    config = small_config()
    tensors = random_tensors(config)
    with open_checkpoint(write_folder(tmp_path, config_json(config), [tensors])) as checkpoint:
        whole = from_bf16(tensors["model.layers.1.mlp.down_proj.weight"])
        assert np.array_equal(checkpoint.read_float("layers.1.down", slice(5, 9)), whole[5:9])


def test_generation_config_adds_its_stop_tokens(tmp_path: Path) -> None:
    config = small_config()
    write_folder(tmp_path, config_json(config), [random_tensors(config)])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2], "temperature": 0.6}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config.eos_token_ids == (2, 7)


def test_a_tied_model_may_carry_a_head_that_is_ignored(tmp_path: Path) -> None:
    config = small_config()
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    with open_checkpoint(write_folder(tmp_path, config_json(config), [tensors])) as checkpoint:
        assert "head" not in checkpoint.names()


def split(tensors: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    names = list(tensors)
    return [{n: tensors[n] for n in names[:7]}, {n: tensors[n] for n in names[7:]}]


@pytest.mark.parametrize(
    "shard", ["../model-00001-of-00002.safetensors", "/etc/passwd", "..", "a/b.safetensors", "x.bin"]
)
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, shard: str) -> None:
    config = small_config()
    shards = split(random_tensors(config))
    weight_map = dict.fromkeys(shards[1], "model-00002-of-00002.safetensors") | dict.fromkeys(shards[0], shard)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    write_folder(tmp_path / "m", config_json(config), shards, weight_map)
    with pytest.raises(CheckpointError, match="not a file name in this folder"):
        open_checkpoint(tmp_path / "m")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    config = small_config()
    write_folder(tmp_path, config_json(config), split(random_tensors(config)))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: no such file"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    config = small_config()
    shards = split(random_tensors(config))
    shards[1]["model.embed_tokens.weight"] = shards[0]["model.embed_tokens.weight"]
    weight_map = dict.fromkeys(shards[1], "model-00002-of-00002.safetensors")
    weight_map |= dict.fromkeys(shards[0], "model-00001-of-00002.safetensors")
    write_folder(tmp_path, config_json(config), shards, weight_map)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight: the index does not place it"):
        open_checkpoint(tmp_path)


def test_a_tensor_that_the_index_promises_must_be_there(tmp_path: Path) -> None:
    config = small_config()
    shards = split(random_tensors(config))
    lost = next(iter(shards[1]))
    weight_map = {name: f"model-0000{i + 1}-of-00002.safetensors" for i, shard in enumerate(shards) for name in shard}
    del shards[1][lost]
    write_folder(tmp_path, config_json(config), shards, weight_map)
    with pytest.raises(CheckpointError, match=f"missing tensor {lost}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "nonsense"])
def test_a_malformed_index_is_named(tmp_path: Path, index: str) -> None:
    write_folder(tmp_path, config_json(small_config()), [])
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", tensor_shapes(small_config("qwen3", num_layers=1)))
def test_any_missing_tensor_is_named_as_transformers_names_it(tmp_path: Path, name: str) -> None:
    config = small_config("qwen3", num_layers=1)
    tensors = random_tensors(config)
    del tensors[hf_module(name) + ".weight"]
    with pytest.raises(CheckpointError, match=f"missing tensor {hf_module(name)}.weight"):
        open_checkpoint(write_folder(tmp_path, config_json(config), [tensors]))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ("model.layers.0.self_attn.q_proj.bias", "a bias"),
        ("model.layers.0.self_attn.qkv_proj.weight", "a fused projection"),
        ("model.layers.0.mlp.gate_up_proj.weight", "a fused projection"),
        ("model.layers.0.mlp.experts.3.up_proj.weight", "mixture of experts"),
        ("model.layers.0.mamba.in_proj.weight", "an unknown tensor"),
        ("model.layers.0.self_attn.q_proj.qweight", "an unknown tensor"),
        ("visual.patch_embed.weight", "an unknown tensor"),
    ],
)
def test_tensors_that_flint_does_not_decode_are_named(tmp_path: Path, tensor: str, words: str) -> None:
    config = small_config()
    tensors = random_tensors(config)
    tensors[tensor] = np.ones(8, np.float32)
    with pytest.raises(UnsupportedModel, match=words) as error:
        open_checkpoint(write_folder(tmp_path, config_json(config), [tensors]))
    assert tensor in str(error.value)


def test_a_layer_or_a_norm_too_many_is_named(tmp_path: Path) -> None:
    config = small_config()
    for extra in ("model.layers.2.mlp.up_proj", "model.layers.0.self_attn.q_norm"):
        tensors = random_tensors(config) | {f"{extra}.weight": np.ones((128, 64), np.float32)}
        with pytest.raises(CheckpointError, match=f"{extra}: not a tensor of this llama model"):
            open_checkpoint(write_folder(tmp_path, config_json(config), [tensors]))


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    config = small_config()
    tensors = random_tensors(config)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight: shape \[64, 128\], the config needs \[128, 64\]"):
        open_checkpoint(write_folder(tmp_path, config_json(config), [tensors]))


def test_a_dtype_that_is_no_weight_is_named(tmp_path: Path) -> None:
    config = small_config()
    tensors = random_tensors(config)
    tensors["model.norm.weight"] = np.ones(64, np.int32)
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight: dtype I32"):
        open_checkpoint(write_folder(tmp_path, config_json(config), [tensors]))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_values_must_be_finite(tmp_path: Path, dtype: str) -> None:
    config = small_config()
    tensors = random_tensors(config, dtype)
    infinity = {"BF16": np.uint16(0x7F80), "F16": np.float16(np.inf), "F32": np.float32(np.nan)}[dtype]
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = infinity
    with open_checkpoint(write_folder(tmp_path, config_json(config), [tensors])) as checkpoint:
        with pytest.raises(CheckpointError, match=r"mlp\.up_proj: contains a value that is not finite"):
            checkpoint.read_float("layers.0.up")
        if dtype == "BF16":
            with pytest.raises(CheckpointError, match=r"mlp\.up_proj"):
                checkpoint.read_matrix("layers.0.up")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8"])
def test_other_quantisations_are_named(tmp_path: Path, method: str) -> None:
    config = small_config()
    value = {**config_json(config), "quantization_config": {"quant_method": method, "bits": 4}}
    with pytest.raises(UnsupportedModel, match=f"quantisation '{method}' is not supported"):
        open_checkpoint(write_folder(tmp_path, value, [random_tensors(config)]))


def test_folders_without_config_or_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"no config\.json") as error:
        open_checkpoint(tmp_path)
    assert ".gguf" in error.value.hint
    (tmp_path / "config.json").write_text(json.dumps(config_json(small_config())))
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)
