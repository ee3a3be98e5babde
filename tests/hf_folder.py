"""Writes small Hugging Face checkpoints with random weights, for tests that begin where a user does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import ModelConfig
from engine.quantize import to_bf16
from engine.safetensors_file import header
from engine.tensors import tensor_shapes
from tests.synthetic import CHAT_TEMPLATE, byte_tokenizer, small_config

_MODULES = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def write_hf_folder(folder: Path, seed: int | None = 0, **overrides: Any) -> Path:
    """A llama of `small_config` with bf16 weights: normal with deviation K^-0.5, or zeros for seed None."""
    config = small_config("llama", rope_scaling=None, **overrides)
    rng = np.random.default_rng(seed)
    shapes = {_hf_name(name): shape for name, shape in tensor_shapes(config).items()}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header({name: ("BF16", shape) for name, shape in shapes.items()}, {}))
        for shape in shapes.values():
            if seed is None:
                file.write(bytes(2 * math.prod(shape)))
            else:
                file.write(to_bf16(rng.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5).tobytes())
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a llama-family ModelConfig."""
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


def _hf_name(name: str) -> str:
    *layer, last = name.split(".")
    prefix = f"model.{'.'.join(layer)}." if layer else ""
    return f"{prefix}{_MODULES[last]}.weight"
