"""The shape of a model: what a backend must know to decode it.

One frozen dataclass for the dense families granite, llama, mistral and qwen3. engine/checkpoint reads it from a Hugging
Face config.json or from GGUF metadata, and refuses with one line what flint cannot decode.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from engine.errors import CheckpointError
from engine.files.strict_json import Record

Family = Literal["granite", "llama", "mistral", "qwen3"]


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3's frequency-dependent RoPE scaling (Hugging Face: rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class RopeDivisors:
    """RoPE scaling given as numbers: frequency i is divided by divisors[i] (GGUF: the tensor rope_freqs.weight)."""

    divisors: tuple[float, ...]  # head_dim / 2 of them


# The largest value that any real model is near; beyond it a header is corrupt, not a model.
_LIMITS = {
    "hidden_size": 1 << 17,
    "num_layers": 1 << 10,
    "num_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "intermediate_size": 1 << 19,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 30,
}
_POSITIVE = (
    "rms_norm_eps",
    "rope_theta",
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and scalars of one decoder-only transformer. All sizes count elements, not bytes.

        x = embedding_multiplier * embed[token]
        each layer:
            n = rmsnorm(x, attn_norm);  q, k, v = Q n, K n, V n, split into heads of head_dim
            q, k = rope(q), rope(k)     with qk_norm: of rmsnorm(q, q_norm), rmsnorm(k, k_norm), head by head
            a = softmax(attention_multiplier * q k^T, causal) v, query head h reading kv head
                h // (num_heads / num_kv_heads)
            x += residual_multiplier * O a
            n = rmsnorm(x, mlp_norm)
            x += residual_multiplier * DOWN (silu(GATE n) * UP n)
        logits = HEAD rmsnorm(x, final_norm) / logits_scaling     (HEAD is embed when tie_word_embeddings)

    rmsnorm(x, w) = w * x / sqrt(mean(x^2) + rms_norm_eps). rope is the half-split (NEOX) form: component i of a head
    pairs with i + head_dim/2 and turns by position * rope_inverse_frequencies()[i]. embedding_multiplier,
    residual_multiplier and logits_scaling are 1 and attention_multiplier is head_dim^-0.5 unless granite says other.

    Raises CheckpointError when a value cannot belong to any model.
    """

    family: Family
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | RopeDivisors | None
    tie_word_embeddings: bool
    qk_norm: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def build(cls, where: str, **values: Any) -> ModelConfig:
        """The constructor for values that were read from `where`, which its errors then name."""
        try:
            return cls(**values)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None

    def __post_init__(self) -> None:
        if self.family not in get_args(Family):
            raise CheckpointError(f"family: {self.family!r} is not one of {', '.join(get_args(Family))}")
        for name, limit in _LIMITS.items():
            if not 1 <= getattr(self, name) <= limit:
                _refuse(name, f"{getattr(self, name)} is not between 1 and {limit}")
        for name in _POSITIVE:
            if not _plausible(getattr(self, name)):
                _refuse(name, f"{getattr(self, name)} is not a plausible positive number")
        if self.num_heads % self.num_kv_heads:
            _refuse("num_kv_heads", f"{self.num_kv_heads} does not divide {self.num_heads} heads")
        if self.head_dim % 2:
            _refuse("head_dim", f"{self.head_dim} is odd")
        for token in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token < self.vocab_size:
                _refuse("token id", f"{token} is outside the vocabulary of {self.vocab_size}")
        _check_scaling(self.rope_scaling, self.head_dim)

    @property
    def q_size(self) -> int:
        """Rows of the query projection: num_heads * head_dim (differs from hidden_size in qwen3)."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key (and of the value) projection: num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim

    def rope_inverse_frequencies(self) -> np.ndarray:
        """Radians per position, float32 [head_dim / 2], scaling applied.

        theta^(-2i/head_dim) (Su et al. 2021), computed in float64. Llama 3 scaling (Meta's reference code, the same
        in transformers' `_compute_llama3_parameters`): wavelengths beyond original/low_freq_factor are stretched by
        `factor`, those below original/high_freq_factor are kept, and those between are blended.
        """
        base = self.rope_theta ** (-np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim)
        match self.rope_scaling:
            case RopeDivisors(divisors):
                base = base / np.asarray(divisors)
            case Llama3RopeScaling(factor, low, high, original):
                turns = original * base / (2 * math.pi)
                keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
                base = base * (keep + (1 - keep) / factor)
        return base.astype(np.float32)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back to an equal config."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str = "model config") -> ModelConfig:
        """Read what `to_json` wrote. Raises CheckpointError naming the missing, unknown or mistyped key."""
        record = Record(dict(value) if isinstance(value, Mapping) else value, where)
        config = cls.build(
            where,
            family=record.text("family"),
            hidden_size=record.integer("hidden_size"),
            num_layers=record.integer("num_layers"),
            num_heads=record.integer("num_heads"),
            num_kv_heads=record.integer("num_kv_heads"),
            head_dim=record.integer("head_dim"),
            intermediate_size=record.integer("intermediate_size"),
            vocab_size=record.integer("vocab_size"),
            max_position_embeddings=record.integer("max_position_embeddings"),
            rms_norm_eps=record.number("rms_norm_eps"),
            rope_theta=record.number("rope_theta"),
            rope_scaling=_scaling_from_json(record.optional_record("rope_scaling")),
            tie_word_embeddings=record.boolean("tie_word_embeddings"),
            qk_norm=record.boolean("qk_norm"),
            embedding_multiplier=record.number("embedding_multiplier"),
            attention_multiplier=record.number("attention_multiplier"),
            residual_multiplier=record.number("residual_multiplier"),
            logits_scaling=record.number("logits_scaling"),
            bos_token_id=record.optional_integer("bos_token_id"),
            eos_token_ids=record.integers("eos_token_ids"),
        )
        record.finish()
        return config


def _refuse(name: str, problem: str) -> None:
    raise CheckpointError(f"{name}: {problem}")


def _plausible(number: float) -> bool:
    """Far inside float32's range, so that no product of a few of them leaves it; false for NaN."""
    return 1e-12 <= number <= 1e12


def _check_scaling(scaling: Llama3RopeScaling | RopeDivisors | None, head_dim: int) -> None:
    match scaling:
        case RopeDivisors(divisors):
            if len(divisors) != head_dim // 2:
                _refuse("rope_scaling", f"{len(divisors)} divisors for {head_dim // 2} frequencies")
            if not all(map(_plausible, divisors)):
                _refuse("rope_scaling", "a divisor is not a plausible positive number")
        case Llama3RopeScaling(factor, low, high, original):
            if not (all(map(_plausible, (factor, low, high, original))) and factor >= 1 and low < high):
                _refuse("rope_scaling", "llama3 scaling needs factor >= 1, 0 < low_freq_factor < high_freq_factor")


def _scaling_from_json(record: Record | None) -> Llama3RopeScaling | RopeDivisors | None:
    if record is None:
        return None
    if "divisors" in record.remaining():
        scaling = RopeDivisors(record.numbers("divisors"))
    else:
        scaling = Llama3RopeScaling(
            factor=record.number("factor"),
            low_freq_factor=record.number("low_freq_factor"),
            high_freq_factor=record.number("high_freq_factor"),
            original_max_position_embeddings=record.integer("original_max_position_embeddings"),
        )
    record.finish()
    return scaling
