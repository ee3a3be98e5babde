"""An EAGLE-3 head: one transformer block that drafts the next tokens from several layers of the target.

At position t the block sees emb(token[t+1]) and a feature of position t, and predicts token[t+2]. The feature is
fc(target layers' residual streams) where the target has been, and the block's own output where it has not
(EAGLE-3, Li et al. 2025, arXiv 2503.01840). Its head covers a reduced vocabulary: draft id i is target id d2t[i].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.backends.torch_reference import rms_norm, rotate


@dataclass(frozen=True)
class EagleConfig:
    """Shape of a head. `feature_layers`: the target's residual stream entering these layers is concatenated."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    draft_vocab_size: int
    target_vocab_size: int
    feature_layers: tuple[int, ...]
    rms_norm_eps: float
    rope_theta: float


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high features: the inputs of layers 2, L/2 and L-3 (EAGLE-3's choice)."""
    return tuple(sorted(min(max(layer, 0), num_layers) for layer in (2, num_layers // 2, num_layers - 3)))  # type: ignore[return-value]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class EagleHead(nn.Module):
    """The block and its head. Parameters are named as in flint's drafter files."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        h, eps = config.hidden_size, config.rms_norm_eps
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.fc = linear(h * len(config.feature_layers), h)
        self.embed_norm, self.hidden_norm = RMSNorm(h, eps), RMSNorm(h, eps)
        self.q, self.k, self.v = linear(2 * h, q_size), linear(2 * h, kv_size), linear(2 * h, kv_size)
        self.o = linear(q_size, h)
        self.mlp_norm, self.final_norm = RMSNorm(h, eps), RMSNorm(h, eps)
        self.gate, self.up = linear(h, config.intermediate_size), linear(h, config.intermediate_size)
        self.down = linear(config.intermediate_size, h)
        self.head = linear(h, config.draft_vocab_size)
        self.d2t: Tensor
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size))
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._inverse: Tensor
        self.register_buffer("_inverse", config.rope_theta**-exponents, persistent=False)

    def fuse(self, features: list[Tensor]) -> Tensor:
        """The target's residual streams, each [B, T, hidden], -> the block's feature [B, T, hidden]."""
        return self.fc(torch.cat(features, dim=-1))

    def project(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both rotated to positions int64 [T]) and values, each [B, heads, T, head_dim]."""
        joined = torch.cat((self.embed_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        q, k, v = (
            proj(joined).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for proj in (self.q, self.k, self.v)
        )
        angles = positions[:, None].float() * self._inverse
        cos, sin = angles.cos(), angles.sin()
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of the block: hidden [B, T, hidden] plus the attention's output [B, heads, T, d] and the MLP."""
        hidden = hidden + self.o(attended.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> logits over the draft vocabulary [..., draft_vocab]."""
        return self.head(self.final_norm(hidden))

    def rollout(
        self,
        features: list[Tensor],
        embedded: Tensor,
        depth: int,
        project: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None,
        finish: Callable[..., Tensor] | None = None,
    ) -> Iterator[Tensor]:
        """Training-time test: yields, for draft position i = 0..depth-1, a hidden state [B, T, hidden] whose logits at
        index t < T-1-i predict token[t+2+i]; later rows have no token to read and mean nothing. (They are kept: shapes
        that do not change with i are aligned, and compiled once.)

        features: target layers, each [B, T, hidden]; embedded: the target's embeddings of the same tokens,
        [B, T, hidden]. At draft position i, index t's context is the true features up to t and its own predictions
        for t+1..t+i: keys of draft position j > 0 are visible to the same index only (the diagonal). True tokens
        stand for the drafted ones, which is what happens exactly as long as every draft was accepted.
        project, finish: `self.project` and `self.finish`, compiled or as they are.
        """
        project, finish = project or self.project, finish or self.finish
        hidden = self.fuse(features)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        index = torch.arange(hidden.shape[1], device=hidden.device)
        for i in range(min(depth, hidden.shape[1] - 1)):
            q, k, v = project(shifted(embedded, 1 + i), hidden, index + i)
            keys, values = [*keys, k], [*values, v]
            hidden = finish(hidden, chain_attention(q, keys, values))
            yield hidden


def shifted(x: Tensor, by: int) -> Tensor:
    """x [B, T, ...] moved `by` rows to the front of T, or -`by` to the back; zeros take the room."""
    room = torch.zeros_like(x[:, : abs(by)])
    return torch.cat((x[:, by:], room) if by > 0 else (room, x[:, :by]), dim=1)


def chain_attention(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Attention of q [B, heads, T, d] over keys[0], causally, and over each further key at its own index only.

    keys, values: [B, kv_heads, T, d] each. Query heads that share a key head are consecutive. The further keys cost a
    dot product a row, where a mask over all of them would cost a matrix each.
    """
    rows = q.shape[2]
    grouped = q.unflatten(1, (keys[0].shape[1], -1)) * q.shape[-1] ** -0.5  # [B, kv_heads, group, T, d]
    scores = (grouped.flatten(2, 3) @ keys[0].transpose(-1, -2)).unflatten(2, (-1, rows)).float()
    scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    own = [(grouped * k.unsqueeze(2)).float().sum(-1, keepdim=True) for k in keys[1:]]
    # One softmax over all, without joining them: a matrix with a few more columns would be copied, and misaligned.
    top = scores.amax(-1, keepdim=True)
    for score in own:
        top = torch.maximum(top, score)
    top = top.detach()
    weights, own = (scores - top).exp(), [(score - top).exp() for score in own]
    total = weights.sum(-1, keepdim=True)
    for weight in own:
        total = total + weight
    mixed = ((weights / total).to(values[0].dtype).flatten(2, 3) @ values[0]).unflatten(2, (-1, rows))
    for weight, v in zip(own, values[1:], strict=True):
        mixed = mixed + (weight / total).to(v.dtype) * v.unsqueeze(2)
    return mixed.flatten(1, 2)
