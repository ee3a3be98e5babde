"""Small random Hugging Face folders for tests: written by transformers, or by hand for what it cannot write.

`write_hf_folder` writes a whole one, where a user begins to pack.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import Family, Llama3RopeScaling, ModelConfig
from engine.files.safetensors_file import header
from engine.packed.quantize import to_bf16
from engine.packed.tensors import tensor_shapes
from tests.synthetic import CHAT_TEMPLATE, byte_tokenizer, small_config

_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int32": "I32", "int64": "I64", "uint8": "U8"}
_MODULES = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def hf_module(name: str) -> str:
    """Canonical name -> the module's name in transformers."""
    *layer, part = name.split(".")
    return (f"model.layers.{layer[1]}." if layer else "") + _MODULES[part]


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model, in transformers 4's spelling."""
    value: dict[str, Any] = {
        "model_type": config.family,
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
        "sliding_window": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }
    if isinstance(config.rope_scaling, Llama3RopeScaling):
        value["rope_scaling"] = {"rope_type": "llama3", **vars(config.rope_scaling)}
    if config.family == "granite":
        for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"):
            value[key] = getattr(config, key)
    return value


def random_tensors(config: ModelConfig, dtype: str = "BF16", seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of the model under its transformers name; bf16 as uint16."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = (rng.standard_normal(shape) * 0.05).astype(np.float32)
        tensors[hf_module(name) + ".weight"] = {
            "BF16": to_bf16,
            "F16": lambda v: v.astype(np.float16),
            "F32": lambda v: v,
        }[dtype](values)
    return tensors


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    shards: Sequence[Mapping[str, np.ndarray]],
    weight_map: Mapping[str, str] | None = None,
) -> Path:
    """config.json and the tensors in one file, or in as many as there are shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        index = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = index if weight_map is None else dict(weight_map)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for name, shard in zip(names, shards, strict=True):
        (folder / name).write_bytes(safetensors_bytes(shard))
    return folder


def write_hf_folder(folder: Path, seed: int | None = 0, **overrides: Any) -> Path:
    """A llama of `small_config` with bf16 weights: normal with deviation K^-0.5, or zeros for seed None (at once)."""
    config = small_config("llama", rope_scaling=None, **overrides)
    rng = np.random.default_rng(seed)
    shapes = {f"{hf_module(name)}.weight": shape for name, shape in tensor_shapes(config).items()}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header({name: ("BF16", shape) for name, shape in shapes.items()}, {}))
        for shape in shapes.values():
            if seed is None:
                file.write(bytes(2 * math.prod(shape)))
            else:
                file.write(to_bf16(rng.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5).tobytes())
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


def safetensors_bytes(tensors: Mapping[str, np.ndarray]) -> bytes:
    layout = {name: (_DTYPES[array.dtype.name], array.shape) for name, array in tensors.items()}
    return header(layout, {"format": "pt"}) + b"".join(np.ascontiguousarray(a).tobytes() for a in tensors.values())


def transformers_model(family: Family, **overrides: Any) -> Any:
    """A small random model of transformers' own class for the family, float32."""
    import torch
    import transformers

    classes = {
        "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    values: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "tie_word_embeddings": family != "mistral",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    match family:
        case "granite":
            values |= {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 10.0}
            values |= {"attention_multiplier": 0.05}
        case "llama":
            scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            values["rope_parameters"] = {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
                **scaling,
            }
        case "mistral":
            values["sliding_window"] = None
        case "qwen3":
            values["head_dim"] = 32
    config_class, model_class = classes[family]
    torch.manual_seed(0)
    return model_class(config_class(**{**values, **overrides})).eval()
