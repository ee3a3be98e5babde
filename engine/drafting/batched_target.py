"""The target model over many sequences at once, in torch: what harvesting and training a drafter need.

Separate from torch_reference, which is one sequence and the truth; this one trades its clarity for batches, bf16 and
a static cache that a CUDA graph can replay. A test holds the two together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.torch_reference import rms_norm, rotate
from engine.config import ModelConfig
from engine.drafting import compiling
from engine.errors import DeviceOutOfMemory
from engine.files.disk import human_bytes
from engine.machine.hardware import physical_memory
from engine.packed.model import PackedModel
from engine.packed.quantize import dequantize

CACHE_SHARE = 0.6  # of RAM, for keys and values


class Layer(NamedTuple):
    """One layer's weights: matrices that read the same input are one. q_norm and k_norm: None where there are none."""

    attn_norm: Tensor
    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


def load_float_weights(model: PackedModel, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of a packed model, dequantised: matrices in `dtype`, norm vectors in float32."""
    weights: dict[str, Tensor] = {}
    for name in model.names():
        if name.endswith("norm"):
            weights[name] = torch.from_numpy(model.vector(name).copy()).to(device)
        else:
            weights[name] = torch.from_numpy(dequantize(model.matrix(name))).to(device, dtype)
    return weights


def _joined(weights: dict[str, Tensor], prefix: str, names: str | tuple[str, ...]) -> Tensor:
    """The matrices below one another; `weights` keeps them as views of it."""
    parts = [weights[prefix + name] for name in names]
    whole = torch.cat(parts)
    for name, part in zip(names, whole.split([len(p) for p in parts]), strict=True):
        weights[prefix + name] = part
    return whole


class StaticCache:
    """Keys and values [layers, B, kv_heads, length, head_dim] of a batch whose sequences share their positions.

    Raises DeviceOutOfMemory, naming a batch that fits."""

    def __init__(self, config: ModelConfig, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.num_layers, batch, config.num_kv_heads, length, config.head_dim)
        _check_room(2 * math.prod(shape) * dtype.itemsize, batch, length, device)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.length = length


def _check_room(size: int, batch: int, length: int, device: torch.device) -> None:
    """RAM is given out before it is there, and who then uses too much is killed; a GPU says no itself."""
    memory = physical_memory() if device.type == "cpu" else None
    if memory is not None and size > CACHE_SHARE * memory:
        raise DeviceOutOfMemory(
            f"Keys and values of {batch} sequences of {length} tokens take {human_bytes(size)}, "
            f"this machine has {human_bytes(memory)} of memory",
            f"{int(batch * CACHE_SHARE * memory / size)} sequences fit",
        )


class BatchedTarget:
    """A packed model in `dtype` on `device`. Stateless: the cache is the caller's.

    compiled: let torch fuse what stands between the matrix products; without it a small model's time on a GPU goes
    into reading and writing activations.
    """

    def __init__(
        self,
        model: PackedModel,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
    ) -> None:
        self.config = model.config
        self.device = torch.device(device)
        self.dtype = dtype
        self.weights = load_float_weights(model, self.device, dtype)
        self.head = self.weights.get("head", self.weights["embed"])
        self._inverse = torch.from_numpy(self.config.rope_inverse_frequencies()).to(self.device)
        self._stack = [self._layer(f"layers.{i}.") for i in range(self.config.num_layers)]
        self.compiled = compiled
        self._before, self._after, self._attend = (
            compiling.compiled(f, compiled) for f in (before_attention, after_attention, attend_cached)
        )

    def _layer(self, prefix: str) -> Layer:
        weights = self.weights
        qkv, gate_up = _joined(weights, prefix, "qkv"), _joined(weights, prefix, ("gate", "up"))
        q_norm, k_norm = weights.get(prefix + "q_norm"), weights.get(prefix + "k_norm")
        attn_norm, mlp_norm = weights[prefix + "attn_norm"], weights[prefix + "mlp_norm"]
        return Layer(attn_norm, qkv, q_norm, k_norm, weights[prefix + "o"], mlp_norm, gate_up, weights[prefix + "down"])

    def embed(self, ids: Tensor) -> Tensor:
        """ids int64 [...] -> the residual stream entering layer 0, [..., hidden]."""
        return F.embedding(ids, self.weights["embed"]) * self.config.embedding_multiplier

    def logits(self, hidden: Tensor) -> Tensor:
        """The residual stream after the last layer [..., hidden] -> logits [..., vocab]."""
        normed = rms_norm(hidden, self.weights["final_norm"], self.config.rms_norm_eps)
        logits = F.linear(normed, self.head)
        return logits if self.config.logits_scaling == 1 else logits / self.config.logits_scaling

    def forward(self, ids: Tensor, features: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Whole sequences, causal. ids int64 [B, T] -> the last residual stream [B, T, hidden] and, in the order of
        `features`, the residual stream entering each of those layers."""
        scale = self.config.attention_multiplier

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

        positions = torch.arange(ids.shape[1], device=self.device)
        return self._layers(ids, positions[:, None], attend, features)

    def decode(self, ids: Tensor, positions: Tensor, cache: StaticCache) -> Tensor:
        """One token for each sequence, at a position of its own. ids, positions int64 [B] -> residual stream
        [B, hidden].

        Attends to the whole cache under a mask, so that shapes do not change with the positions and a CUDA graph can
        replay it. A sequence begins anew at position 0: what the cache holds beyond the position is not seen.
        """
        rows = torch.arange(len(ids), device=self.device)
        beyond = (torch.arange(cache.length, device=self.device) > positions[:, None])[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            keys[rows, :, positions], values[rows, :, positions] = k[:, :, 0], v[:, :, 0]
            return self._attend(q, keys, values, beyond, self.config.attention_multiplier)

        hidden, _ = self._layers(ids[:, None], positions[:, None, None, None], attend, ())
        return hidden[:, 0]

    def _layers(
        self, ids: Tensor, positions: Tensor, attend: Callable[..., Tensor], features: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """positions: int64, broadcast over [B, heads, T, head_dim / 2]."""
        angles = positions.float() * self._inverse
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(ids)
        taken: dict[int, Tensor] = {}
        for number, layer in enumerate(self._stack):
            if number in features:
                taken[number] = x
            q, k, v = self._before(self.config, layer, x, cos, sin)
            x = self._after(self.config, layer, x, attend(number, q, k, v))
        if len(self._stack) in features:
            taken[len(self._stack)] = x
        return x, [taken[layer] for layer in features]


def before_attention(
    config: ModelConfig, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual stream [B, T, hidden] -> rotated queries and keys, and values, each [B, heads, T, head_dim]."""
    normed = rms_norm(x, layer.attn_norm, config.rms_norm_eps)
    heads = F.linear(normed, layer.qkv).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
    q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, config.rms_norm_eps), rms_norm(k, layer.k_norm, config.rms_norm_eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def after_attention(config: ModelConfig, layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
    """Adds the attention's output [B, heads, T, head_dim] and the MLP to the residual stream."""
    x = x + config.residual_multiplier * F.linear(attended.transpose(1, 2).flatten(2), layer.o)
    gate, up = F.linear(rms_norm(x, layer.mlp_norm, config.rms_norm_eps), layer.gate_up).chunk(2, dim=-1)
    return x + config.residual_multiplier * F.linear(F.silu(gate) * up, layer.down)


def attend_cached(q: Tensor, k: Tensor, v: Tensor, beyond: Tensor, scale: float) -> Tensor:
    """One query a sequence, [B, heads, 1, d], over k, v [B, kv_heads, length, d] except where `beyond` (bool,
    [B, 1, 1, length]). Reads every key once: torch's masked attention would first copy them for each of the heads
    that share them."""
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    scores = (grouped @ k.transpose(-1, -2)).float() * scale
    weights = scores.masked_fill(beyond, -torch.inf).softmax(-1).to(v.dtype)
    return (weights @ v).reshape(q.shape)
