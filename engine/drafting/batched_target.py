"""The target model over many sequences at once, in torch: what harvesting and training a drafter need.

Separate from torch_reference, which is one sequence and the truth; this one trades its clarity for batches, bf16 and
a static cache that a CUDA graph can replay. A test holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.torch_reference import rms_norm, rotate
from engine.config import ModelConfig
from engine.packed.model import PackedModel
from engine.packed.quantize import dequantize


def load_float_weights(model: PackedModel, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of a packed model, dequantised: matrices in `dtype`, norm vectors in float32."""
    weights: dict[str, Tensor] = {}
    for name in model.names():
        if name.endswith("norm"):
            weights[name] = torch.from_numpy(model.vector(name).copy()).to(device)
        else:
            weights[name] = torch.from_numpy(dequantize(model.matrix(name))).to(device, dtype)
    return weights


class StaticCache:
    """Keys and values [layers, B, kv_heads, length, head_dim] of a batch whose sequences share their positions."""

    def __init__(self, config: ModelConfig, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.num_layers, batch, config.num_kv_heads, length, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.length = length


class BatchedTarget:
    """A packed model in `dtype` on `device`. Stateless: the cache is the caller's."""

    def __init__(self, model: PackedModel, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32):
        self.config = model.config
        self.device = torch.device(device)
        self.dtype = dtype
        self.weights = load_float_weights(model, self.device, dtype)
        self.head = self.weights.get("head", self.weights["embed"])
        self._inverse = torch.from_numpy(self.config.rope_inverse_frequencies()).to(self.device)

    def embed(self, ids: Tensor) -> Tensor:
        """ids int64 [...] -> the residual stream entering layer 0, [..., hidden]."""
        return F.embedding(ids, self.weights["embed"]) * self.config.embedding_multiplier

    def logits(self, hidden: Tensor) -> Tensor:
        """The residual stream after the last layer [..., hidden] -> logits [..., vocab]."""
        normed = rms_norm(hidden, self.weights["final_norm"], self.config.rms_norm_eps)
        return F.linear(normed, self.head) / self.config.logits_scaling

    def forward(self, ids: Tensor, features: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Whole sequences, causal. ids int64 [B, T] -> the last residual stream [B, T, hidden] and, in the order of
        `features`, the residual stream entering each of those layers."""
        positions = torch.arange(ids.shape[1], device=self.device)
        return self._layers(ids, positions, None, features)

    def decode(self, ids: Tensor, position: Tensor, cache: StaticCache, reach: int | None = None) -> Tensor:
        """One token for each sequence. ids int64 [B], position int64 [1] (shared) -> residual stream [B, hidden].

        Attends to the cache's first `reach` positions (default: all) under a mask, so that shapes do not change with
        the position and a CUDA graph can replay it.
        """
        hidden, _ = self._layers(ids[:, None], position, cache, (), reach)
        return hidden[:, 0]

    def _layers(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: StaticCache | None,
        features: Sequence[int],
        reach: int | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        config, weights = self.config, self.weights
        angles = positions[:, None].float() * self._inverse
        cos, sin = angles.cos(), angles.sin()
        beyond = None
        if cache is not None:
            reach = reach or cache.length
            beyond = torch.arange(reach, device=self.device) > positions
        x = self.embed(ids)
        taken: dict[int, Tensor] = {}
        for layer in range(config.num_layers):
            if layer in features:
                taken[layer] = x
            prefix = f"layers.{layer}."
            normed = rms_norm(x, weights[prefix + "attn_norm"], config.rms_norm_eps)
            q, k, v = (
                F.linear(normed, weights[prefix + name]).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
                for name in "qkv"
            )
            if config.qk_norm:
                q = rms_norm(q, weights[prefix + "q_norm"], config.rms_norm_eps)
                k = rms_norm(k, weights[prefix + "k_norm"], config.rms_norm_eps)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            scale = config.attention_multiplier
            if cache is None or beyond is None:
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            else:
                k = cache.keys[layer].index_copy_(2, positions, k)[:, :, :reach]
                v = cache.values[layer].index_copy_(2, positions, v)[:, :, :reach]
                attended = _attend(q, k, v, beyond, scale)
            x = x + config.residual_multiplier * F.linear(attended.transpose(1, 2).flatten(2), weights[prefix + "o"])
            normed = rms_norm(x, weights[prefix + "mlp_norm"], config.rms_norm_eps)
            gated = F.silu(F.linear(normed, weights[prefix + "gate"])) * F.linear(normed, weights[prefix + "up"])
            x = x + config.residual_multiplier * F.linear(gated, weights[prefix + "down"])
        if config.num_layers in features:
            taken[config.num_layers] = x
        return x, [taken[layer] for layer in features]


def _attend(q: Tensor, k: Tensor, v: Tensor, beyond: Tensor, scale: float) -> Tensor:
    """One query a sequence, [B, heads, 1, d], over k, v [B, kv_heads, reach, d] except where `beyond` [reach]. Reads
    every key once: torch's masked attention would first copy them for each of the heads that share them."""
    grouped = q.view(q.shape[0], k.shape[1], -1, q.shape[-1])
    scores = (grouped @ k.transpose(-1, -2)).float() * scale
    weights = scores.masked_fill(beyond, -torch.inf).softmax(-1).to(v.dtype)
    return (weights @ v).view_as(q)
