"""A learned drafter for the decode kernel's loop: what it is made of, and its keys and values of the prompt, in torch.

The head's row for position t joins the target's features at t with the embedding of token t + 1, so rows trail the
tokens by one (engine/drafting/eagle.py says more). The kernel writes the rows of what it decodes itself; those of what
was fed outside of a loop are written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernels.cuda.kv_layout import KV_BLOCK, as_cached, pack_keys, pack_values, unpack_keys, unpack_values
from kernels.cuda.loading import on_device
from kernels.cuda.phases import DraftDims, StoredMatrix

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DraftHead:
    """matrices: "fc", "q", "k", "v", "o", "gate", "up", "down", "head"; vectors: "embed_norm", "hidden_norm",
    "mlp_norm", "final_norm", float32; inverse_frequencies: float32 [head_dim / 2]; target_ids: int32 [vocab], the
    target's id of each of the drafter's. Arrays in host memory or tensors."""

    dims: DraftDims
    matrices: Mapping[str, StoredMatrix]
    vectors: Mapping[str, Any]
    inverse_frequencies: Any
    target_ids: Any


class DraftCache:
    """The drafter's layer of the KV cache, followed from outside of the loops."""

    def __init__(self, head: DraftHead, embed: Callable[[Tensor], Tensor], cache: Tensor) -> None:
        """embed: ids int64 [n] -> the target's embeddings as its layer 0 receives them, float32 [n, hidden]. cache: the
        drafter's layer, fp16, in the order of kv_layout.py; its device is where the work is done."""
        import torch

        device = cache.device
        self._dims, self._embed, self._cache = head.dims, embed, cache
        self._fc, self._k, self._v = (dequantised(head.matrices[name], device) for name in ("fc", "k", "v"))
        self._norms = [torch.as_tensor(head.vectors[name], device=device) for name in ("embed_norm", "hidden_norm")]
        self._frequencies = torch.as_tensor(head.inverse_frequencies, device=device)
        self._rows = 0  # written
        self._waiting: Tensor | None = None  # the hidden state [1, hidden] of the row after them, if it is known

    @property
    def position(self) -> int:
        """Tokens that it has followed the target through."""
        return self._rows + (self._waiting is not None)

    def extend(self, tokens: Sequence[int], start: int, features: Mapping[int, Tensor]) -> None:
        """The target took `tokens` in at `start`; features: by layer, float32 [len(tokens), hidden]. Tokens that do not
        follow on `position` are left out: whoever opens a loop looks at it."""
        import torch

        if start != self.position:
            return
        with torch.inference_mode():
            hidden = torch.cat([features[layer] for layer in self._dims.feature_layers], -1) @ self._fc.T
            if self._waiting is not None:
                hidden = torch.cat((self._waiting, hidden))
            self._write(hidden[:-1], tokens if len(hidden) > len(tokens) else tokens[1:])
            self._waiting = hidden[-1:].clone()  # last: where writing fails, these tokens have not been followed

    def complete(self, token: int) -> None:
        """`token` will be fed next, in a loop: writes the row that waits for it."""
        import torch

        if self._waiting is not None:
            with torch.inference_mode():
                waiting, self._waiting = self._waiting, None
                self._write(waiting, [token])

    def truncate(self, position: int) -> None:
        """Keep the rows of the first `position` tokens. The last of them still knows the token that came next before:
        that may cost a draft, never a token of the target's."""
        if position <= self._rows:
            self._rows, self._waiting = position, None

    def took(self, position: int) -> None:
        """A loop has written the rows of all tokens before `position`."""
        self._rows, self._waiting = position, None

    def _write(self, hidden: Tensor, following: Sequence[int]) -> None:
        """Rows `_rows` .., whose hidden states and next tokens these are."""
        import torch

        count = len(hidden)
        if not count:
            return
        d, device = self._dims, hidden.device
        embedded = self._embed(torch.tensor(list(following), dtype=torch.int64, device=device))
        joined = torch.cat([self._norm(x, w) for x, w in zip((embedded, hidden), self._norms, strict=True)], -1)
        keys, values = ((joined @ w.T).unflatten(-1, (d.kv_heads, -1)).transpose(0, 1) for w in (self._k, self._v))
        rows = torch.arange(self._rows, self._rows + count, device=device)
        angles = (rows[:, None].float() * self._frequencies).double()
        cosine, sine = angles.cos().float(), angles.sin().float()
        a, b = keys.chunk(2, -1)
        keys = torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)
        first, last = self._rows // KV_BLOCK, -(-(self._rows + count) // KV_BLOCK)
        inside = slice(self._rows - first * KV_BLOCK, self._rows - first * KV_BLOCK + count)
        for index, new, pack, unpack in (
            (0, keys, pack_keys, unpack_keys),
            (1, values, pack_values, unpack_values),
        ):
            blocks = self._cache[:, first:last, index]
            plain = unpack(blocks, d.head_dim).clone()
            plain[:, inside] = as_cached(new)
            blocks.copy_(pack(plain))
        self._rows += count

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        import torch

        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._dims.rms_norm_eps) * weight


def dequantised(m: StoredMatrix, device: Any) -> Tensor:
    """float32 [n, k] of a packed matrix (engine/packed/model.py), on `device`."""
    return dequantised_rows(m.format, m.group, *on_device(m, device))


def dequantised_rows(kind: str, group: int, q: Any, scale: Any, minimum: Any) -> Tensor:
    """float32 [n, k] of packed rows on the device; kind: "int4", "int8" or "bf16"."""
    import torch

    if kind == "bf16":
        return q.view(torch.bfloat16).float()
    if kind == "int8":
        x = q.float()
    else:
        x = torch.stack([q >> shift & 15 for shift in range(0, 32, 4)], -1).flatten(1).float()
        if minimum is None:
            x -= 8
    x = x.unflatten(1, (-1, group)) * scale.view(torch.float16).float()[..., None]
    if minimum is not None:
        x += minimum.view(torch.float16).float()[..., None]
    return x.flatten(1)
