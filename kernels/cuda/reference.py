"""The decoder in plain float32 torch, and random models for it: what the megakernel is checked against.

Nothing here is shared with the kernel: weights are dequantised, attention is written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.cuda.phases import KernelDims

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class RandomMatrix:
    """A matrix in the packed format (engine/packed/model.py), as tensors."""

    format: str
    n: int
    k: int
    group: int
    q: torch.Tensor
    scale: torch.Tensor | None = None
    minimum: torch.Tensor | None = None


def random_matrix(n: int, k: int, kind: str, group: int, generator: torch.Generator, gain: float = 1.0) -> RandomMatrix:
    """Weights of standard deviation gain / sqrt(k), in a format of phases.FORMAT_CODES."""
    device, spread = generator.device, gain * k**-0.5

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    if kind == "bf16":
        return RandomMatrix("bf16", n, k, 0, (normal(n, k) * spread).to(torch.bfloat16).view(torch.int16))
    unit = 36.0 if kind == "int8" else 2.6  # standard deviation of the stored integers
    scale = (spread / unit * (1 + 0.1 * normal(n, k // group))).to(torch.float16)
    if kind == "int8":
        return RandomMatrix("int8", n, k, group, (normal(n, k) * unit).round().clamp(-127, 127).to(torch.int8), scale)
    q = (8 + normal(n, k) * unit).round().clamp(0, 15).to(torch.int32).reshape(n, k // 8, 8)
    word = q[..., 0].clone()
    for i in range(1, 8):
        word |= q[..., i] << (4 * i)
    minimum = None
    if kind == "int4_asymmetric":
        minimum = (scale.float() * (-8 + normal(n, k // group))).to(torch.float16)
    return RandomMatrix("int4", n, k, group, word, scale, minimum)


def dequantised(m: Any) -> torch.Tensor:
    """float32 [n, k]."""
    if m.format == "bf16":
        return m.q.view(torch.bfloat16).float()
    if m.format == "int8":
        q = m.q.float()
    else:
        q = torch.stack([(m.q >> (4 * i)) & 15 for i in range(8)], -1).reshape(m.n, m.k).float()
        if m.minimum is None:
            q -= 8
    w = q.reshape(m.n, -1, m.group) * m.scale.float()[..., None]
    if m.minimum is not None:
        w += m.minimum.float()[..., None]
    return w.reshape(m.n, m.k)


@dataclass(frozen=True)
class RandomModel:
    dims: KernelDims
    matrices: dict[str, RandomMatrix]
    vectors: dict[str, Any]  # numpy float32
    inverse_frequencies: Any  # numpy float32


def random_model(
    dims: KernelDims, kind: str, group: int, *, seed: int = 0, head: tuple[str, int] | None = None, theta: float = 1e4
) -> RandomModel:
    """A model whose layers are stored as `kind`, `group` and whose embedding (and head) as `head`, on the GPU."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    d, head_format = dims, head or (kind, group)
    queries, keys = d.heads * d.head_dim, d.kv_heads * d.head_dim
    matrices: dict[str, RandomMatrix] = {}
    vectors: dict[str, Any] = {}

    def norm(n: int) -> Any:
        return (1 + 0.2 * torch.randn(n, generator=generator, device=DEVICE)).cpu().numpy()

    for i in range(d.layers):
        for name, n, k in (
            ("q", queries, d.hidden),
            ("k", keys, d.hidden),
            ("v", keys, d.hidden),
            ("o", d.hidden, queries),
            ("gate", d.intermediate, d.hidden),
            ("up", d.intermediate, d.hidden),
            ("down", d.hidden, d.intermediate),
        ):
            matrices[f"layers.{i}.{name}"] = random_matrix(n, k, kind, group, generator)
        vectors[f"layers.{i}.attn_norm"], vectors[f"layers.{i}.mlp_norm"] = norm(d.hidden), norm(d.hidden)
        if d.qk_norm:
            vectors[f"layers.{i}.q_norm"], vectors[f"layers.{i}.k_norm"] = norm(d.head_dim), norm(d.head_dim)
    vectors["final_norm"] = norm(d.hidden)
    matrices["embed"] = random_matrix(d.vocab, d.hidden, *head_format, generator)
    if not d.tied_head:
        matrices["head"] = random_matrix(d.vocab, d.hidden, *head_format, generator)
    frequencies = theta ** (-torch.arange(0, d.head_dim, 2, dtype=torch.float32) / d.head_dim)
    return RandomModel(dims, matrices, vectors, frequencies.numpy())


class Reference:
    """The model, eager. `keys` and `values` are float32 [layers, kv_heads, capacity, head_dim] on the GPU."""

    def __init__(self, model: RandomModel, capacity: int, *, cache_dtype: torch.dtype = torch.float16) -> None:
        """cache_dtype: what keys and values are rounded to (fp16 is the kernel's cache; float32 rounds nothing)."""
        dims, vectors, frequencies = model.dims, model.vectors, model.inverse_frequencies
        self.dims, self._matrices, self._cache_dtype = dims, model.matrices, cache_dtype
        self._vectors = {name: torch.as_tensor(v, device=DEVICE) for name, v in vectors.items()}
        self._frequencies = torch.as_tensor(frequencies, device=DEVICE)
        shape = (dims.layers, dims.kv_heads, capacity, dims.head_dim)
        self.keys, self.values = (torch.zeros(shape, device=DEVICE) for _ in range(2))

    def _times(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ dequantised(self._matrices[name]).T

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.dims.rms_norm_eps) * self._vectors[name]

    def _cached(self, rows: torch.Tensor) -> torch.Tensor:  # [m, kv_heads, head_dim] -> [kv_heads, m, head_dim]
        most = torch.finfo(self._cache_dtype).max
        return rows.clamp(-most, most).to(self._cache_dtype).float().transpose(0, 1)

    def step(self, tokens: Sequence[int], position: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits [M, vocab] and the residual stream entering every layer and the final norm."""
        d, m = self.dims, len(tokens)
        embed = self._matrices["embed"]
        ids = torch.tensor(list(tokens), device=DEVICE)
        parts = (None if a is None else a[ids] for a in (embed.scale, embed.minimum))
        picked = RandomMatrix(embed.format, m, embed.k, embed.group, embed.q[ids], *parts)
        x = dequantised(picked) * d.embedding_multiplier
        where = torch.arange(position, position + m, device=DEVICE, dtype=torch.float32)
        angle = where[:, None] * self._frequencies
        cosine, sine = angle.double().cos().float(), angle.double().sin().float()

        def rotated(v: torch.Tensor) -> torch.Tensor:  # [m, heads, head_dim]
            a, b = v.chunk(2, -1)
            c, s = cosine[:, None], sine[:, None]
            return torch.cat((a * c - b * s, b * c + a * s), -1)

        entering = []
        for i in range(d.layers):
            entering.append(x)
            n = f"layers.{i}."
            h = self._norm(n + "attn_norm", x)
            q, k, v = (self._times(n + p, h).reshape(m, -1, d.head_dim) for p in "qkv")
            if d.qk_norm:
                q, k = self._norm(n + "q_norm", q), self._norm(n + "k_norm", k)
            q, k = rotated(q), rotated(k)
            self.keys[i, :, position : position + m] = self._cached(k)
            self.values[i, :, position : position + m] = self._cached(v)
            keys = self.keys[i, :, : position + m].repeat_interleave(d.heads // d.kv_heads, 0)
            values = self.values[i, :, : position + m].repeat_interleave(d.heads // d.kv_heads, 0)
            score = torch.einsum("mhd,htd->hmt", q, keys) * d.attention_multiplier
            visible = torch.arange(position + m, device=DEVICE) <= where[:, None]
            score = score.masked_fill(~visible, float("-inf")).softmax(-1)
            a = torch.einsum("hmt,htd->mhd", score, values).reshape(m, -1)
            x = x + d.residual_multiplier * self._times(n + "o", a)
            h = self._norm(n + "mlp_norm", x)
            gated = torch.nn.functional.silu(self._times(n + "gate", h)) * self._times(n + "up", h)
            x = x + d.residual_multiplier * self._times(n + "down", gated)
        entering.append(x)
        head = "embed" if d.tied_head else "head"
        return self._times(head, self._norm("final_norm", x)) / d.logits_scaling, entering


def uniform(seed: int, n: int) -> float:
    """(r + 0.5) / 2^32 with r the first word of Philox4x32-10 of counter n (Salmon et al., SC 2011)."""
    word = 0xFFFFFFFF
    c, k = [n & word, 0, 0, 0], [seed & word, seed >> 32]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & word, (a >> 32) ^ c[3] ^ k[1], a & word]
        k = [(k[0] + 0x9E3779B9) & word, (k[1] + 0xBB67AE85) & word]
    return (c[0] + 0.5) / 2**32


def draw(logits: torch.Tensor, sampling: Any, history: Sequence[int]) -> tuple[int, float]:
    """The id that `sampling` (a megakernel.DeviceSampling) chooses after `history`, and how close a call it was.

    The least distance of what decided it tells rounding from error: to the next id, in units of the whole probability
    (greedy: of logits), and to those sets of candidates from which another id would be chosen: with another one at the
    end, in logits, or with one more or less, of the probability (top-p) or of the largest one (min-p).
    """
    z = logits.double().cpu().clone()
    if sampling.repeat_penalty != 1.0:
        seen = torch.tensor(sorted(set(history[-sampling.repeat_window :])))
        z[seen] = torch.where(z[seen] > 0, z[seen] / sampling.repeat_penalty, z[seen] * sampling.repeat_penalty)
    if sampling.temperature == 0:
        best = z.topk(2).values
        return int(z.argmax()), float(best[0] - best[1])
    order = torch.argsort(-z, stable=True)  # descending, the lower id first
    u = torch.tensor(uniform(sampling.seed, len(history)), dtype=torch.float64)

    def choose(swapped: str = "", p: int = 0, least: int = 0) -> tuple[int, float, float]:
        """The id, u's distance to an edge of an id, and the gap of the border that was moved, where one was.

        swapped: of "k" or "p", whose last candidate and the first one dropped change places. p, least: so many more
        candidates within top-p, within min-p.
        """
        keep, gap = order[: sampling.top_k or None], 0.0
        if swapped == "k" and len(keep) < len(order):
            gap = float(z[keep[-1]] - z[order[len(keep)]])
            keep = torch.cat((keep[:-1], order[len(keep), None]))
        weight = torch.exp((z[keep] - z.max()) / sampling.temperature)
        if sampling.top_p < 1:
            running = weight.cumsum(0)
            most = int(torch.searchsorted(running, sampling.top_p * running[-1])) + 1
            count = min(max(most + p, 1), len(keep))
            if p:
                gap = float((running[min(most, count) - 1] / running[-1] - sampling.top_p).abs())
            inside = torch.arange(count)
            if swapped == "p" and count < len(keep):
                gap, inside[-1] = float(z[keep[count - 1]] - z[keep[count]]), count
            keep, weight = keep[inside], weight[inside]
        if sampling.min_p > 0:
            most = int((weight >= sampling.min_p).sum())
            count = min(max(most + least, 1), len(keep))
            if least:
                gap = float((weight[max(most, count) - 1] - sampling.min_p).abs())
            keep, weight = keep[:count], weight[:count]
        keep, position = keep.sort()
        running = weight[position].cumsum(0) / weight.sum()
        i = min(int(torch.searchsorted(running, u, right=True)), len(keep) - 1)
        edges = torch.cat((torch.zeros(1, dtype=torch.float64), running))
        return int(keep[i]), float((edges - u).abs().min()), gap

    chosen, distance, _ = choose()
    moved = [choose("k"), choose("p"), choose(p=1), choose(p=-1), choose(least=1), choose(least=-1)]
    return chosen, min([distance, *(gap for other, _, gap in moved if other != chosen)])
