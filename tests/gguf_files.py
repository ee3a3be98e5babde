"""Small random GGUF files for tests, written by the gguf library as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.config import ModelConfig, RopeDivisors
from engine.packed.tensors import tensor_shapes
from tests.synthetic import CHAT_TEMPLATE, SPECIAL_TOKENS, byte_level_alphabet

# Byte offsets of the fp16 scales in a block; the rest of a block may be any bytes.
_SCALES_AT = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
_NAMES = {
    "embed": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Canonical name -> GGUF tensor name."""
    *layer, part = name.split(".")
    return (f"blk.{layer[1]}." if layer else "") + _NAMES[part] + ".weight"


def random_rows(type_name: str, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """n rows of k weights as stored: uint8 [n, bytes], random codes, finite scales of either sign."""
    match type_name:
        case "F32":
            return rng.standard_normal((n, k)).astype(np.float32).view(np.uint8)
        case "F16":
            return rng.standard_normal((n, k)).astype(np.float16).view(np.uint8)
        case "BF16":
            return (
                (rng.standard_normal((n, k)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
            )
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    blocks = rng.integers(0, 256, (n, k // weights, size), dtype=np.uint8)
    for at in _SCALES_AT[type_name]:
        scales = (rng.standard_normal((n, k // weights)) * 0.01).astype(np.float16)
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(n, -1)


def write_gguf(
    path: Path,
    config: ModelConfig,
    type_of: str | Callable[[str], str] = "Q4_0",
    *,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    leave_out: tuple[str, ...] = (),
) -> dict[str, np.ndarray]:
    """Write a random model; returns what a reader must find: canonical name -> float32, by `gguf.dequantize`.

    type_of: of every matrix, or by canonical name. metadata: further keys, or others' values. extra: further F32
    tensors by GGUF name. leave_out: canonical names not to write.
    """
    rng = np.random.default_rng(seed)
    arch = "llama" if config.family == "mistral" else config.family
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**_metadata(config, arch), **(metadata or {})}.items():
        _add(writer, key, value)
    expected: dict[str, np.ndarray] = {}
    for name, shape in tensor_shapes(config).items():
        kind = "F32" if len(shape) == 1 else type_of if isinstance(type_of, str) else type_of(name)
        rows = random_rows(kind, shape[0] if len(shape) == 2 else 1, shape[-1], rng)
        ggml_type = gguf.GGMLQuantizationType[kind]
        expected[name] = gguf.dequantize(rows, ggml_type).reshape(shape)
        heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(name.rpartition(".")[2])
        if heads and arch in ("llama", "granite"):
            rows = _permute(rows, heads)
        if name not in leave_out:
            stored = rows if len(shape) == 2 else rows.view(np.float32)[0]
            writer.add_tensor(gguf_name(name), stored, raw_dtype=ggml_type)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array.astype(np.float32))
    if isinstance(config.rope_scaling, RopeDivisors):
        writer.add_tensor("rope_freqs.weight", np.array(config.rope_scaling.divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row order of llama.cpp's `LlamaModel.permute` (convert_hf_to_gguf.py)."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _metadata(config: ModelConfig, arch: str) -> dict[str, Any]:
    tokens = [*SPECIAL_TOKENS, *byte_level_alphabet(), "he", "ll"]
    tokens += [f"<|unused_{i}|>" for i in range(len(tokens), config.vocab_size)]
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_theta,
        "vocab_size": config.vocab_size,
    }
    if config.family == "granite":
        values |= {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier}
        values |= {"residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling}
    return {
        **{f"{arch}.{key}": value for key, value in values.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens[: config.vocab_size],
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens[: config.vocab_size]],
        "tokenizer.ggml.merges": ["h e", "l l"],
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_ids[0] if config.eos_token_ids else None,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
