"""The truth that every other backend is tested against: a dense decoder in eager torch, written to be read.

Weights are dequantised once, at load; arithmetic is float32 (or bfloat16 where memory asks for it). One layer is

    x += residual_multiplier * attention(rms_norm(x))
    x += residual_multiplier * mlp(rms_norm(x))

with grouped-query attention under half-split rotary positions (Su et al. 2021; Ainslie et al. 2023) and the gated MLP
down(silu(gate(x)) * up(x)) (Shazeer 2020). Granite's four scalars come from ModelConfig; they are 1, and the
attention's 1/sqrt(head_dim), in the other families.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.base import ByteLedger, StepOutput
from engine.config import ModelConfig
from engine.errors import BackendError, ContextOverflow, DeviceOutOfMemory
from engine.meter import step_ledger
from engine.packed.model import PackedModel
from engine.packed.quantize import dequantize

FIRST_CAPACITY = 256  # positions; then it doubles, so that a long conversation is copied log2 times
CHUNK_SCORE_BYTES = 64 << 20  # one layer's attention scores in a chunk of the prefill
MAX_CHUNK = 256


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] scaled to unit mean square over n, in float32 (Zhang & Sennrich 2019), times weight [n]."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split RoPE of x [heads, M, head_dim] by the angles' cos, sin [M, head_dim / 2]."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class KVCache:
    """Keys and values [layers, kv_heads, capacity, head_dim] of one conversation; grows geometrically up to a limit."""

    def __init__(self, config: ModelConfig, limit: int, dtype: torch.dtype, device: torch.device) -> None:
        self.limit = limit
        self.position = 0
        shape = (config.num_layers, config.num_kv_heads, min(FIRST_CAPACITY, limit), config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    def reserve(self, positions: int) -> None:
        """Make room for that many positions."""
        capacity = self.keys.shape[2]
        if positions <= capacity:
            return
        capacity = min(max(positions, 2 * capacity), self.limit)
        self.keys, self.values = self._grown(self.keys, capacity), self._grown(self.values, capacity)

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        new = old.new_empty((*old.shape[:2], capacity, old.shape[3]))
        new[:, :, : self.position] = old[:, :, : self.position]
        return new


class TorchReference:
    """One model in torch. Rows of a step differ from the same tokens fed one at a time by rounding only."""

    name = "torch"
    # Chosen, not measured: as in the native decoder, whose passes up to this width read the weights once.
    verify_width = 8

    def __init__(
        self,
        config: ModelConfig,
        tensor: Callable[[str], Tensor],
        *,
        context_size: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        """`tensor(name)` returns a float tensor by its canonical name (engine/packed/model.py): matrices [out, in]."""
        self.config = config
        self.context_size = context_size
        self.device = torch.device(device)
        self.dtype = dtype
        self.description = f"torch {str(dtype).removeprefix('torch.')} on {device}, {torch.get_num_threads()} threads"

        def matrix(name: str) -> Tensor:
            return tensor(name).to(self.device, dtype)

        def vector(name: str) -> Tensor:
            return tensor(name).to(self.device, torch.float32)

        try:
            self._embed = matrix("embed")
            self._head = self._embed if config.tie_word_embeddings else matrix("head")
            self._final_norm = vector("final_norm")
            norms = ["attn_norm", "mlp_norm"] + (["q_norm", "k_norm"] if config.qk_norm else [])
            self._layers = [
                {name: matrix(f"layers.{i}.{name}") for name in ("q", "k", "v", "o", "gate", "up", "down")}
                | {name: vector(f"layers.{i}.{name}") for name in norms}
                for i in range(config.num_layers)
            ]
            self._cache: KVCache | None = KVCache(config, context_size, dtype, self.device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise _translated(error, config, dtype) from error
        self._inverse_frequencies = torch.from_numpy(config.rope_inverse_frequencies()).to(self.device)
        self._weight_bytes = self._ledger_of_weights()

    @classmethod
    def from_packed(
        cls,
        model: PackedModel,
        *,
        context_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> TorchReference:
        """Open a packed model, dequantising every matrix. context_size: None takes the model's own."""
        return cls(
            model.config,
            lambda name: torch.from_numpy(
                np.array(model.vector(name)) if name.endswith("norm") else dequantize(model.matrix(name))
            ),
            context_size=context_size or model.config.max_position_embeddings,
            dtype=dtype,
            device=device,
        )

    @property
    def position(self) -> int:
        return self._open_cache().position

    def step(
        self, tokens: Sequence[int], *, logits: Literal["all", "last"] = "all", features: Sequence[int] = ()
    ) -> StepOutput:
        cache = self._open_cache()
        start, end = cache.position, cache.position + len(tokens)
        if not tokens:
            raise ValueError("a step needs at least one token")
        if min(tokens) < 0 or max(tokens) >= self.config.vocab_size:
            raise ValueError(f"token ids must be in 0..{self.config.vocab_size - 1}")
        if end > self.context_size:
            raise ContextOverflow(f"{end} tokens do not fit the context of {self.context_size}")
        try:
            with torch.inference_mode():
                cache.reserve(end)
                output = self._forward(tokens, start, logits, features)
        except RuntimeError as error:
            raise _translated(error, self.config, self.dtype) from error
        cache.position = end
        return output

    def prefill_chunk(self) -> int:
        row = 4 * self.config.num_heads * (self.position + MAX_CHUNK)
        return max(1, min(MAX_CHUNK, CHUNK_SCORE_BYTES // row))

    def truncate(self, position: int) -> None:
        if not 0 <= position <= self.position:
            raise ValueError(f"cannot truncate to {position}: the cache holds {self.position} tokens")
        self._open_cache().position = position

    def ledger(self, tokens: int, position: int) -> ByteLedger:
        return step_ledger(self.config, self._weight_bytes, tokens, position, kv_element_bytes=self.dtype.itemsize)

    def close(self) -> None:
        self._cache = None
        self._layers = []
        self._embed = self._head = torch.empty(0)

    # --- the model ------------------------------------------------------------------------------------------------

    def _forward(
        self, tokens: Sequence[int], start: int, logits: Literal["all", "last"], features: Sequence[int]
    ) -> StepOutput:
        config = self.config
        positions = torch.arange(start, start + len(tokens), device=self.device)
        angles = positions[:, None].float() * self._inverse_frequencies
        rotation = angles.cos(), angles.sin()
        # Token m sees everything up to its own position; a single token sees the whole cache.
        seen = torch.arange(start + len(tokens), device=self.device) <= positions[:, None] if len(tokens) > 1 else None

        x = F.embedding(torch.tensor(tokens, device=self.device), self._embed) * config.embedding_multiplier
        taken: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in features:
                taken[index] = x
            normed = rms_norm(x, layer["attn_norm"], config.rms_norm_eps)
            x = x + config.residual_multiplier * self._attention(index, layer, normed, rotation, seen, start)
            normed = rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
            gated = F.silu(F.linear(normed, layer["gate"])) * F.linear(normed, layer["up"])
            x = x + config.residual_multiplier * F.linear(gated, layer["down"])
        if config.num_layers in features:
            taken[config.num_layers] = x

        x = x[-1:] if logits == "last" else x
        x = rms_norm(x, self._final_norm, config.rms_norm_eps)
        scaled = F.linear(x, self._head).float() / config.logits_scaling
        return StepOutput(scaled.cpu().numpy(), {i: t.float().cpu().numpy() for i, t in taken.items()})

    def _attention(
        self,
        index: int,
        layer: dict[str, Tensor],
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        seen: Tensor | None,
        start: int,
    ) -> Tensor:
        """softmax(q k^T * attention_multiplier) v, projected; x [M, hidden]; seen: bool [M, start + M] or None."""
        config, cache = self.config, self._open_cache()
        end = start + x.shape[0]

        def heads(name: str) -> Tensor:
            return F.linear(x, layer[name]).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)

        q, k, v = heads("q"), heads("k"), heads("v")  # [heads, M, head_dim]
        if config.qk_norm:
            q = rms_norm(q, layer["q_norm"], config.rms_norm_eps)
            k = rms_norm(k, layer["k_norm"], config.rms_norm_eps)
        cache.keys[index, :, start:end] = rotate(k, *rotation)
        cache.values[index, :, start:end] = v
        keys, values = cache.keys[index, :, :end], cache.values[index, :, :end]

        # Query heads that share a key head are consecutive: [kv_heads, group, M, head_dim].
        q = rotate(q, *rotation).unflatten(0, (config.num_kv_heads, -1))
        scores = (q.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, q.shape[1:3]).float()
        scores = scores * config.attention_multiplier
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-1).to(values.dtype)
        mixed = (weights.flatten(1, 2) @ values).unflatten(1, q.shape[1:3])
        return F.linear(mixed.flatten(0, 1).transpose(0, 1).flatten(1), layer["o"])

    # --- bookkeeping ----------------------------------------------------------------------------------------------

    def _open_cache(self) -> KVCache:
        if self._cache is None:
            raise BackendError("the torch backend is closed")
        return self._cache

    def _ledger_of_weights(self) -> dict[str, int]:
        sums = {"embed": self._embed.nbytes, "head": self._head.nbytes, "norm": self._final_norm.nbytes}
        for layer in self._layers:
            for name, tensor in layer.items():
                kind = "norm" if name.endswith("norm") else name
                sums[kind] = sums.get(kind, 0) + tensor.nbytes
        return sums


def _translated(error: RuntimeError, config: ModelConfig, dtype: torch.dtype) -> BackendError:
    """torch's failure as one line; memory that ran out names the sizes."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
        return BackendError(f"torch failed: {text}")
    per_layer = config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    weights = (config.num_layers * per_layer + embeddings) * dtype.itemsize
    kv = 2 * config.num_layers * config.kv_size * dtype.itemsize
    return DeviceOutOfMemory(
        f"Out of memory: the torch backend holds {weights / 1e9:.2f} GB of {dtype} weights "
        f"and {kv / 1024:.0f} KiB of KV cache a token",
        "Use --backend cpu, which keeps weights packed, a smaller model, or a smaller --ctx.",
    )
