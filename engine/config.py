"""The shape of a model: what a backend must know to decode it.

One frozen dataclass for the dense families granite, llama, mistral and qwen3. `from_hf` reads a Hugging Face
config.json, `from_gguf` reads GGUF metadata; anything that flint cannot decode is refused with one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["granite", "llama", "mistral", "qwen3"]


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3's frequency-dependent RoPE scaling (Hugging Face: rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and scalars of one decoder-only transformer. All sizes count elements, not bytes.

    A layer is: x += residual_multiplier * o(attention(rope(q_norm(q(n)))), ...) with n = rmsnorm(x), then
    x += residual_multiplier * down(silu(gate(n)) * up(n)). Granite's four scalars are 1 (and attention_multiplier
    1/sqrt(head_dim)) for the other families.
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
    rope_scaling: Llama3RopeScaling | None
    tie_word_embeddings: bool
    qk_norm: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        """Rows of the query projection: num_heads * head_dim (differs from hidden_size in qwen3)."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key (and of the value) projection: num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim
