"""The canonical tensors of a model: names and shapes, in the order in which they are packed."""

from __future__ import annotations

from engine.config import ModelConfig


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape: (n,) for a norm, (n, k) = (out, in) for a matrix. engine/packed/model.py
    lists the names."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        layer = f"layers.{i}."
        shapes[layer + "attn_norm"] = (hidden,)
        shapes[layer + "q"] = (config.q_size, hidden)
        shapes[layer + "k"] = (config.kv_size, hidden)
        shapes[layer + "v"] = (config.kv_size, hidden)
        if config.qk_norm:
            shapes[layer + "q_norm"] = (head,)
            shapes[layer + "k_norm"] = (head,)
        shapes[layer + "o"] = (hidden, config.q_size)
        shapes[layer + "mlp_norm"] = (hidden,)
        shapes[layer + "gate"] = (inner, hidden)
        shapes[layer + "up"] = (inner, hidden)
        shapes[layer + "down"] = (hidden, inner)
    shapes["final_norm"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes
