"""ModelConfig from GGUF metadata (key names: ggml/docs/gguf.md and llama.cpp's llama-arch.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from engine.config import Family, ModelConfig, RopeDivisors
from engine.errors import CheckpointError, UnsupportedModel

# GGUF calls mistral "llama": the two differ in nothing that matters here.
FAMILIES: dict[str, Family] = {"llama": "llama", "granite": "granite", "qwen3": "qwen3"}

# Tokens that end a reply whatever the metadata's eos says, as in llama.cpp: GGUF has room for one eos only, so
# Llama 3's <|eom_id|> or Qwen's <|endoftext|> would otherwise be lost.
_END_TEXTS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>"})
_CONTROL = 3  # tokenizer.ggml.token_type of a special token


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    tied: bool = True,
    vocab_size: int | None = None,
    rope_divisors: tuple[float, ...] | None = None,
    where: str = "GGUF metadata",
) -> ModelConfig:
    """What metadata does not hold comes from the tensors: tied (no output.weight), vocab_size (rows of the embedding;
    default: the number of tokens), rope_divisors (rope_freqs.weight).

    Raises UnsupportedModel for what flint does not decode, CheckpointError for a missing or mistyped key.
    """
    keys = _Keys(metadata, where)
    arch = keys.text("general.architecture")
    family = FAMILIES.get(arch)
    if family is None:
        raise UnsupportedModel(f"{where}: architecture {arch!r} is not supported ({', '.join(FAMILIES)} are)")
    keys.prefix = f"{arch}."
    context = keys.integer("context_length")
    hidden = keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads if heads else 0)
    _refuse_what_is_not_decoded(keys, context, head_dim)
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    granite = family == "granite"
    return ModelConfig.build(
        where,
        family=family,
        hidden_size=hidden,
        num_layers=keys.integer("block_count"),
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=keys.integer("feed_forward_length"),
        vocab_size=vocab_size or keys.integer("vocab_size", len(tokens)),
        max_position_embeddings=context,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("rope.freq_base", 10000.0),
        rope_scaling=RopeDivisors(rope_divisors) if rope_divisors else None,
        tie_word_embeddings=tied,
        qk_norm=family == "qwen3",
        embedding_multiplier=keys.number("embedding_scale", 1.0) if granite else 1.0,
        attention_multiplier=(keys.number("attention.scale", 0.0) if granite else 0.0) or (head_dim or 1) ** -0.5,
        residual_multiplier=keys.number("residual_scale", 1.0) if granite else 1.0,
        logits_scaling=keys.number("logit_scale", 1.0) if granite else 1.0,
        bos_token_id=_token_id(metadata, "bos", where),
        eos_token_ids=_end_tokens(metadata, where),
    )


def _refuse_what_is_not_decoded(keys: _Keys, context: int, head_dim: int) -> None:
    if keys.integer("expert_count", 0):
        keys.unsupported("expert_count", "mixture of experts")
    window = keys.integer("attention.sliding_window", 0)
    if 0 < window < context:
        keys.unsupported("attention.sliding_window", f"a sliding window of {window} tokens")
    scaling = keys.text("rope.scaling.type", "none")
    if scaling != "none" and not (scaling == "linear" and keys.number("rope.scaling.factor", 1.0) == 1.0):
        keys.unsupported("rope.scaling.type", f"RoPE scaling {scaling!r}")
    if keys.number("rope.scale_linear", 1.0) != 1.0:
        keys.unsupported("rope.scale_linear", "linear RoPE scaling")
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        keys.unsupported("rope.dimension_count", "RoPE over a part of the head")
    if keys.integer("attention.value_length", head_dim) != head_dim:
        keys.unsupported("attention.value_length", "values and keys of different sizes")


def _token_id(metadata: Mapping[str, Any], kind: str, where: str) -> int | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    value = metadata.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise CheckpointError(f"{where}: {key}: expected an integer")
    return value


def _end_tokens(metadata: Mapping[str, Any], where: str) -> tuple[int, ...]:
    named = (_token_id(metadata, kind, where) for kind in ("eos", "eot", "eom"))
    found = [token for token in named if token is not None]
    tokens, types = (metadata.get(f"tokenizer.ggml.{key}", []) for key in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(types, list):
        pairs = zip(tokens, types, strict=False)
        found += [i for i, (text, kind) in enumerate(pairs) if kind == _CONTROL and text in _END_TEXTS]
    return tuple(dict.fromkeys(found))


class _Keys:
    """Typed access to the architecture's metadata keys."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata = metadata
        self.where = where
        self.prefix = ""

    def unsupported(self, key: str, what: str) -> NoReturn:
        raise UnsupportedModel(f"{self.where}: {self.prefix}{key}: {what} is not supported")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            self._mistyped(key, "text")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, list) and value:  # one number per layer
            if any(item != value[0] for item in value):
                self.unsupported(key, "a value that differs between layers")
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool):
            self._mistyped(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self._mistyped(key, "a number")
        # GGUF holds these as float32; the shortest decimal is what the model's config.json said (1e-05, not 9.99e-06).
        with np.errstate(over="ignore"):  # a float64 beyond float32: refused as implausible
            single = np.float32(value)
        return float(str(single)) if float(single) == value else float(value)

    def _value(self, key: str, default: Any) -> Any:
        value = self.metadata.get(self.prefix + key, default)
        if value is None:
            raise CheckpointError(f"{self.where}: missing key {self.prefix}{key}")
        return value

    def _mistyped(self, key: str, expected: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {self.prefix}{key}: expected {expected}")
