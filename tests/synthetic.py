"""Small random models for tests: any family, any storage, in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import Family, Llama3RopeScaling, ModelConfig
from engine.packed.manifest import Quantization, Source
from engine.packed.matrix import GROUPS, Matrix, Storage
from engine.packed.quantize import pack_nibbles, quantize_bf16
from engine.packed.tensors import tensor_shapes
from engine.packed.writer import PackedWriter

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2; then the 256 bytes


def small_config(family: Family = "llama", **overrides: Any) -> ModelConfig:
    """Two layers, hidden 64, four heads on two kv heads, 320 tokens; each family with what sets it apart."""
    values: dict[str, Any] = {
        "family": family,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "qk_norm": False,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
    }
    match family:
        case "granite":
            values |= {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 10.0}
            values |= {"attention_multiplier": 0.05}
        case "llama":
            values |= {"rope_scaling": Llama3RopeScaling(8.0, 1.0, 4.0, 64)}
        case "mistral":
            values |= {"tie_word_embeddings": False, "rope_theta": 1e6}
        case "qwen3":
            values |= {"qk_norm": True, "head_dim": 32, "rms_norm_eps": 1e-6}
    values |= overrides
    values.setdefault("attention_multiplier", values["head_dim"] ** -0.5)
    return ModelConfig(**values)


def write_random_packed(
    directory: Path | str,
    config: ModelConfig | None = None,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    embed_bits: int | None = None,
    seed: int = 0,
    name: str = "random",
    storage: Mapping[str, Storage] | None = None,
) -> Path:
    """Write a packed model with random weights; returns its directory.

    bits: 4, 8 or 16 for every matrix; embed_bits: of embed and head (default: as bits). storage overrides single
    matrices. Where group does not divide a matrix's K, the largest allowed one that does is taken. Weights have a
    standard deviation of about K^-0.5, so activations neither vanish nor explode; codes use their whole range. The
    tokenizer is byte-level: SPECIAL_TOKENS, then one token per byte (needs vocab_size >= 259).
    """
    config = config or small_config()
    rng = np.random.default_rng(seed)
    plan: dict[str, Storage] = {}
    for tensor, shape in tensor_shapes(config).items():
        if len(shape) == 2:
            width = embed_bits if embed_bits and tensor in ("embed", "head") else bits
            plan[tensor] = (storage or {}).get(tensor) or _storage(width, group, symmetric, shape[1])
    with PackedWriter(directory, config, plan) as writer:
        for tensor, shape in tensor_shapes(config).items():
            if len(shape) == 2:
                writer.add_matrix(random_matrix(tensor, shape[0], shape[1], plan[tensor], rng))
            else:
                writer.add_vector(tensor, rng.uniform(0.5, 1.5, shape).astype(np.float32))
        writer.add_file("tokenizer.json", json.dumps(byte_tokenizer()).encode())
        writer.add_file("chat_template.jinja", CHAT_TEMPLATE.encode())
        body, embed = plan["layers.0.q"], plan["embed"]
        return writer.commit(
            name=name,
            variant=str(body),
            quantization=Quantization(body.format, body.group, body.symmetric, embed.format, embed.group, False),
            source=Source("random", str(seed), "random", ""),
            license="none",
        )


def random_matrix(name: str, n: int, k: int, storage: Storage, rng: np.random.Generator) -> Matrix:
    """A matrix of uniformly random codes and scales of either sign, standard deviation about k^-0.5."""
    deviation = k**-0.5
    if storage.format == "bf16":
        return quantize_bf16((rng.standard_normal((n, k)) * deviation).astype(np.float32), name)
    levels = {"int4": 16, "int8": 256}[storage.format]
    step = deviation * 12**0.5 / levels
    shape = (n, k // storage.group)
    scale = (step * rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape)).astype(np.float16)
    if storage.format == "int8":
        return Matrix(name, "int8", n, k, storage.group, rng.integers(-128, 128, (n, k), dtype=np.int8), scale, None)
    q = pack_nibbles(rng.integers(0, 16, (n, k), dtype=np.uint8))
    minimum = None if storage.symmetric else (-7.5 * scale.astype(np.float32)).astype(np.float16)
    return Matrix(name, "int4", n, k, storage.group, q, scale, minimum)


def byte_tokenizer() -> dict[str, Any]:
    """A tokenizer.json with no merges: every byte of the text is a token."""
    alphabet = byte_level_alphabet()
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for i, token in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocab, "merges": []},
    }


def byte_level_alphabet() -> list[str]:
    """GPT-2's printable character for each byte 0..255 (`bytes_to_unicode` of its encoder.py)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _storage(bits: int, group: int, symmetric: bool, k: int) -> Storage:
    if bits == 16:
        return Storage("bf16")
    group = max(g for g in GROUPS if g <= group and k % g == 0)
    return Storage("int4", group, symmetric) if bits == 4 else Storage("int8", group)
