"""ModelConfig: read from config.json and GGUF metadata, refused where flint cannot decode, kept through JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.gguf_config import config_from_gguf
from engine.checkpoint.hf_config import config_from_hf
from engine.config import Llama3RopeScaling, ModelConfig, RopeDivisors
from engine.errors import CheckpointError, UnsupportedModel
from tests.synthetic import small_config

GRANITE = {
    "model_type": "granite",
    "hidden_size": 2560,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 100352,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "embedding_multiplier": 12,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 10,
    "tie_word_embeddings": True,
    "bos_token_id": 100257,
    "eos_token_id": 100257,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
MISTRAL = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
GGUF_GRANITE = {
    "general.architecture": "granite",
    "granite.block_count": 40,
    "granite.context_length": 131072,
    "granite.embedding_length": 2560,
    "granite.feed_forward_length": 8192,
    "granite.attention.head_count": 40,
    "granite.attention.head_count_kv": 8,
    "granite.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "granite.rope.dimension_count": 64,
    "granite.rope.freq_base": 10000000.0,
    "granite.vocab_size": 100352,
    "granite.attention.scale": 0.015625,
    "granite.embedding_scale": 12.0,
    "granite.residual_scale": float(np.float32(0.22)),
    "granite.logit_scale": 10.0,
    "tokenizer.ggml.bos_token_id": 100257,
    "tokenizer.ggml.eos_token_id": 100257,
}


def test_granite_from_config_json() -> None:
    config = config_from_hf(GRANITE)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (2560, 40, 40, 8)
    assert (config.head_dim, config.q_size, config.kv_size) == (64, 2560, 512)
    assert (config.embedding_multiplier, config.attention_multiplier) == (12.0, 0.015625)
    assert (config.residual_multiplier, config.logits_scaling) == (0.22, 10.0)
    assert config.eos_token_ids == (100257,)
    assert config.tie_word_embeddings
    assert not config.qk_norm


def test_gguf_metadata_gives_the_same_granite_as_config_json() -> None:
    assert config_from_gguf(GGUF_GRANITE) == config_from_hf(GRANITE)


def test_llama_from_config_json() -> None:
    config = config_from_hf(LLAMA)
    assert config.rope_scaling == Llama3RopeScaling(32.0, 1.0, 4.0, 8192)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.attention_multiplier == 64**-0.5
    assert (config.embedding_multiplier, config.residual_multiplier, config.logits_scaling) == (1.0, 1.0, 1.0)


def test_transformers_5_spelling_of_rope_is_the_same_model() -> None:
    new = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": 500000.0, **LLAMA["rope_scaling"]}
    assert config_from_hf(new) == config_from_hf(LLAMA)


def test_mistral_from_config_json() -> None:
    config = config_from_hf(MISTRAL)
    assert (config.head_dim, config.rope_theta, config.tie_word_embeddings) == (128, 1e6, False)


def test_qwen3_has_head_norms_and_its_own_query_width() -> None:
    config = config_from_hf(QWEN3)
    assert config.qk_norm
    assert (config.q_size, config.hidden_size) == (2048, 1024)


def test_stop_tokens_of_both_files_are_merged_in_order_without_repeats() -> None:
    config = config_from_hf(QWEN3, {"eos_token_id": [151645, 151643]})
    assert config.eos_token_ids == (151645, 151643)


def test_a_config_without_eos_reads_as_having_none() -> None:
    assert config_from_hf({**MISTRAL, "eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (GRANITE, {"model_type": "granitemoehybrid"}, "'granitemoehybrid'"),
        (GRANITE, {"attention_bias": True}, "attention_bias = True"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias = True"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        (LLAMA, {"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        (MISTRAL, {"sliding_window": 4096}, "sliding_window = 4096"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        (MISTRAL, {"num_local_experts": 8}, "num_local_experts = 8"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_flint_cannot_decode_is_named(base: dict[str, Any], change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match="not supported") as error:
        config_from_hf({**base, **change})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_mistral_v01_without_a_window_key_has_the_class_default_window() -> None:
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        config_from_hf({key: value for key, value in MISTRAL.items() if key != "sliding_window"})


def test_a_window_that_covers_the_context_does_not_matter() -> None:
    assert config_from_hf({**MISTRAL, "sliding_window": 32768}).max_position_embeddings == 32768


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"hidden_size": "2048"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_hidden_layers": 10**30}, "num_layers"),
        ({"num_key_value_heads": 7}, "num_kv_heads"),
        ({"head_dim": 63}, "head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"eos_token_id": 999999}, "token id"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 32.0}}, "low_freq_factor"),
        ({"rope_scaling": {**LLAMA["rope_scaling"], "factor": 0.0}}, "rope_scaling"),
        ({"rope_scaling": "llama3"}, "rope_parameters"),
    ],
)
def test_malformed_config_json_names_the_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        config_from_hf({**LLAMA, **change})


def test_gguf_architecture_that_flint_cannot_decode_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="'granitemoe'"):
        config_from_gguf({**GGUF_GRANITE, "general.architecture": "granitemoe"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"granite.expert_count": 32}, "mixture of experts"),
        ({"granite.attention.sliding_window": 4096}, "sliding window"),
        ({"granite.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"granite.rope.dimension_count": 32}, "part of the head"),
        ({"granite.attention.head_count_kv": [8, 4]}, "differs between layers"),
    ],
)
def test_gguf_features_that_flint_cannot_decode_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        config_from_gguf({**GGUF_GRANITE, **change})


def test_missing_or_mistyped_gguf_keys_are_named() -> None:
    for key in ("granite.block_count", "granite.attention.layer_norm_rms_epsilon"):
        with pytest.raises(CheckpointError, match=key):
            config_from_gguf({k: v for k, v in GGUF_GRANITE.items() if k != key})
        with pytest.raises(CheckpointError, match=key):
            config_from_gguf({**GGUF_GRANITE, key: "ten"})


def test_gguf_stop_tokens_include_every_special_end_token() -> None:
    metadata = {
        **GGUF_GRANITE,
        "tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|endoftext|>", "<|eot_id|>"],
        "tokenizer.ggml.token_type": [1, 3, 1, 3],  # the third is ordinary text
        "tokenizer.ggml.eos_token_id": 3,
    }
    assert config_from_gguf(metadata, vocab_size=100352).eos_token_ids == (3, 1)


@pytest.mark.parametrize("family", ["granite", "llama", "mistral", "qwen3"])
def test_json_round_trip(family: Any) -> None:
    config = small_config(family)
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert ModelConfig.from_json(config.to_json()) == config


def test_json_round_trip_of_divisors() -> None:
    config = small_config(rope_scaling=RopeDivisors((1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0)))
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_json_with_unknown_missing_or_mistyped_keys_is_refused_by_name() -> None:
    good = small_config().to_json()
    for key in good:
        with pytest.raises(CheckpointError, match=f"missing key {key}"):
            ModelConfig.from_json({k: v for k, v in good.items() if k != key})
        with pytest.raises(CheckpointError, match=key):
            ModelConfig.from_json({**good, key: {"not": "this"}})
    with pytest.raises(CheckpointError, match="unknown key surprise"):
        ModelConfig.from_json({**good, "surprise": 1})


@pytest.mark.parametrize("scaled", [False, True])
def test_rope_frequencies_equal_transformers(scaled: bool) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = config_from_hf(LLAMA if scaled else {**LLAMA, "rope_scaling": None})
    rope = dict(LLAMA["rope_scaling"]) if scaled else {"rope_type": "default"}
    shape: dict[str, Any] = {"hidden_size": 2048, "num_attention_heads": 32, "max_position_embeddings": 131072}
    oracle = LlamaRotaryEmbedding(LlamaConfig(**shape, rope_parameters={"rope_theta": 500000.0, **rope})).inv_freq
    ours = config.rope_inverse_frequencies()
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, oracle.numpy(), rtol=3e-7)  # 2 ulp: the oracle takes its power in float32


def test_divisors_give_the_same_frequencies_as_the_parameters_they_came_from() -> None:
    """llama.cpp's converter turns llama3 scaling into one divisor per frequency; both spellings must agree."""
    config = config_from_hf(LLAMA)
    plain = dataclasses.replace(config, rope_scaling=None).rope_inverse_frequencies()
    divisors = (plain / config.rope_inverse_frequencies()).astype(np.float32)
    assert divisors.min() == 1.0
    assert divisors.max() == 32.0
    from_gguf = dataclasses.replace(config, rope_scaling=RopeDivisors(tuple(divisors.tolist())))
    np.testing.assert_allclose(from_gguf.rope_inverse_frequencies(), config.rope_inverse_frequencies(), rtol=2e-7)


def test_divisors_must_fit_the_head() -> None:
    with pytest.raises(CheckpointError, match="rope_scaling"):
        small_config(rope_scaling=RopeDivisors((1.0, 2.0)))
    with pytest.raises(CheckpointError, match="rope_scaling"):
        small_config(rope_scaling=RopeDivisors((0.0,) * 8))
