"""ModelConfig from a Hugging Face config.json (transformers 4 and 5 spellings) and generation_config.json.

Values that a file leaves out have the defaults of transformers' config classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn, get_args

from engine.config import Family, Llama3RopeScaling, ModelConfig
from engine.errors import CheckpointError, UnsupportedModel

# Keys that select a computation flint does not do, and the values that leave it out.
_MUST_BE = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "num_local_experts": (0, None),
    "num_experts": (0, None),
    "n_routed_experts": (0, None),
}
_MISTRAL_WINDOW = 4096  # MistralConfig's sliding_window where config.json does not say
_QWEN3_HEAD_DIM = 128


def config_from_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """The model that config.json describes; stop tokens are those of both files.

    Raises UnsupportedModel (one line naming what flint does not decode) or CheckpointError (missing or mistyped key).
    """
    keys = _Keys(config, where)
    family = keys.value("model_type")
    if family not in get_args(Family):
        raise UnsupportedModel(
            f"{where}: model type {family!r} is not supported ({', '.join(get_args(Family))} are)",
            hint="flint decodes dense models only: no mixture of experts, no state-space or hybrid layers",
        )
    context = keys.integer("max_position_embeddings")
    _refuse_what_is_not_decoded(keys, family, context)
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    own_head_dim = _QWEN3_HEAD_DIM if family == "qwen3" else (hidden // heads if heads else 0)
    head_dim = keys.integer("head_dim", own_head_dim)
    theta, scaling = _rope(keys)
    granite = family == "granite"
    ends = [*keys.tokens("eos_token_id"), *_Keys(generation or {}, "generation_config.json").tokens("eos_token_id")]
    return ModelConfig.build(
        where,
        family=family,
        hidden_size=hidden,
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=keys.integer("num_key_value_heads", heads if family in ("llama", "granite") else None),
        head_dim=head_dim,
        intermediate_size=keys.integer("intermediate_size"),
        vocab_size=keys.integer("vocab_size"),
        max_position_embeddings=context,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=keys.boolean("tie_word_embeddings", False),
        qk_norm=family == "qwen3",
        embedding_multiplier=keys.number("embedding_multiplier", 1.0) if granite else 1.0,
        attention_multiplier=keys.number("attention_multiplier", 1.0) if granite else (head_dim or 1) ** -0.5,
        residual_multiplier=keys.number("residual_multiplier", 1.0) if granite else 1.0,
        logits_scaling=keys.number("logits_scaling", 1.0) if granite else 1.0,
        bos_token_id=next(iter(keys.tokens("bos_token_id")), None),
        eos_token_ids=tuple(dict.fromkeys(ends)),
    )


def _refuse_what_is_not_decoded(keys: _Keys, family: str, context: int) -> None:
    for key, allowed in _MUST_BE.items():
        value = keys.config.get(key, allowed[0])
        if value not in allowed:
            keys.unsupported(f"{key} = {value!r}")
    window = keys.config.get("sliding_window", _MISTRAL_WINDOW) if family == "mistral" else None
    if window is not None and keys.integer("sliding_window", _MISTRAL_WINDOW) < context:
        keys.unsupported(f"sliding_window = {window!r} below the context of {context} tokens")
    kinds = keys.config.get("layer_types")
    if isinstance(kinds, list):
        for kind in kinds:
            if kind != "full_attention":
                keys.unsupported(f"a layer of type {kind!r}")


def _rope(keys: _Keys) -> tuple[float, Llama3RopeScaling | None]:
    """theta and scaling: `rope_theta` and `rope_scaling` (transformers 4), or both in `rope_parameters` (5)."""
    theta = keys.number("rope_theta", 10000.0)
    value = keys.config.get("rope_parameters") or keys.config.get("rope_scaling")
    if value is None:
        return theta, None
    if not isinstance(value, Mapping):
        keys.mistyped("rope_parameters", "an object")
    rope = _Keys(value, f"{keys.where}: rope_parameters")
    theta = rope.number("rope_theta", theta)
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        rope.unsupported("RoPE over a part of the head")
    match rope.config.get("rope_type", rope.config.get("type", "default")):
        case "default":
            return theta, None
        case "llama3":
            return theta, Llama3RopeScaling(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
            )
        case kind:
            rope.unsupported(f"RoPE scaling {kind!r}")


class _Keys:
    """Typed access to a JSON object; null counts as absent, as it does in transformers."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def unsupported(self, what: str) -> NoReturn:
        raise UnsupportedModel(f"{self.where}: {what} is not supported")

    def mistyped(self, key: str, expected: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {key}: expected {expected}")

    def value(self, key: str, default: Any = None) -> Any:
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.where}: missing key {key}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            self.mistyped(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e300:
            self.mistyped(key, "a number")
        return float(value) if math.isfinite(value) else self.mistyped(key, "a finite number")

    def boolean(self, key: str, default: bool) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            self.mistyped(key, "true or false")
        return value

    def tokens(self, key: str) -> list[int]:
        """One token id, a list of them, or none."""
        value = self.config.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
            self.mistyped(key, "token ids")
        return values
