"""The KV cache's layout (drawn in kv_layout.cuh) as torch reshapes: what prefill writes and reads, and tests check.

Head dimensions are multiples of 64, because a lane loads eight dimensions of each rotary half at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

KV_BLOCK = 16  # positions
KV_LARGEST = 65504.0  # of a key's or value's magnitude: fp16's


def cache_shape(layers: int, kv_heads: int, positions: int, head_dim: int) -> tuple[int, int, int, int, int]:
    """[layers, kv_heads, blocks of 16 positions, 2 (keys, values), 16 * head_dim]"""
    return layers, kv_heads, -(-positions // KV_BLOCK), 2, KV_BLOCK * head_dim


def as_cached(rows: torch.Tensor) -> torch.Tensor:
    """Keys or values as the cache holds them: fp16, saturated; NaN stays NaN."""
    return rows.clamp(-KV_LARGEST, KV_LARGEST).half()


def pack_keys(keys: torch.Tensor) -> torch.Tensor:
    """[..., positions, head_dim] (positions a multiple of 16) -> [..., blocks, 16 * head_dim]."""
    *outer, positions, dim = keys.shape
    owned = dim // 8
    # position = (block, half8, g); dim = (rotary half, t, load, 8)
    x = keys.reshape(*outer, positions // 16, 2, 8, 2, 4, owned // 8, 8)
    n = len(outer)
    order = [*range(n), n, n + 1, n + 3, n + 5, n + 2, n + 4, n + 6]
    return x.permute(order).reshape(*outer, positions // 16, 16 * dim)


def unpack_keys(packed: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Inverse of `pack_keys`."""
    *outer, blocks, _ = packed.shape
    x = packed.reshape(*outer, blocks, 2, 2, head_dim // 64, 8, 4, 8)
    n = len(outer)
    order = [*range(n), n, n + 1, n + 4, n + 2, n + 5, n + 3, n + 6]
    return x.permute(order).reshape(*outer, blocks * 16, head_dim)


def pack_values(values: torch.Tensor) -> torch.Tensor:
    """[..., positions, head_dim] (positions a multiple of 16) -> [..., blocks, 16 * head_dim]."""
    *outer, positions, dim = values.shape
    # position = (block, half8, t, parity); dim = (g, load, 2)
    x = values.reshape(*outer, positions // 16, 2, 4, 2, 8, dim // 16, 2)
    n = len(outer)
    order = [*range(n), n, n + 5, n + 4, n + 2, n + 6, n + 1, n + 3]
    return x.permute(order).reshape(*outer, positions // 16, 16 * dim)


def unpack_values(packed: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Inverse of `pack_values`."""
    *outer, blocks, _ = packed.shape
    x = packed.reshape(*outer, blocks, head_dim // 16, 8, 4, 2, 2, 2)
    n = len(outer)
    order = [*range(n), n, n + 5, n + 3, n + 6, n + 2, n + 1, n + 4]
    return x.permute(order).reshape(*outer, blocks * 16, head_dim)
