"""The door to the decode megakernel: weights in, tokens out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class KernelDims:
    """The shape and scalars of a model (engine.config.ModelConfig's, without what a kernel does not need)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rms_norm_eps: float
    qk_norm: bool
    tied_head: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float


class StoredMatrix(Protocol):
    """A weight matrix [n, k] as engine/packed.py stores it."""

    format: Any  # "int4", "int8" or "bf16"
    n: int
    k: int
    group: int
    q: Any
    scale: Any
    minimum: Any


@dataclass(frozen=True)
class DeviceSampling:
    """engine.sampling.Sampling's fields, for the device."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_window: int = 64
    seed: int = 0


class KernelStopped(RuntimeError):
    """The kernel stopped answering or failed; the CUDA context may be unusable from here on."""


class TokenRing:
    """A running whole-loop decode: tokens arrive in pinned memory while the kernel goes on."""

    def poll(self) -> tuple[list[int], list[float]]:
        """Ids that arrived since the last call, and for each the seconds from the kernel's start to its completion.

        Never blocks. Raises KernelStopped.
        """
        raise NotImplementedError

    @property
    def done(self) -> bool:
        """True once the kernel has ended (a last `poll` may still return tokens)."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Ask the kernel to stop within one token. Idempotent, callable from any thread."""
        raise NotImplementedError


class Megakernel:
    """One model on one GPU, with its KV cache.

    dims: the shape. matrices: by packed name ("embed", "layers.0.q", ..., "head" unless tied). vectors: float32 norms by
    packed name. inverse_frequencies: float32 [head_dim / 2]. context_size: positions of the KV cache. columns: the
    largest M of `step`, up to 8.
    """

    kv_cache: torch.Tensor  # bf16, shape and order in kv_layout.py; prefill writes it

    def __init__(
        self,
        dims: KernelDims,
        matrices: Mapping[str, StoredMatrix],
        vectors: Mapping[str, np.ndarray],
        inverse_frequencies: np.ndarray,
        context_size: int,
        *,
        columns: int = 8,
        cubin_cache: Path | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes that one step reads of each kind of tensor (as in engine's ByteLedger), padding included."""
        raise NotImplementedError

    def step(
        self, tokens: Sequence[int], position: int, *, all_logits: bool = True, features: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Feed M = len(tokens) <= columns tokens at `position`.

        Returns device float32 logits [M, vocab] (or [1, vocab], the last row's) and, for each layer index in
        `features`, the residual stream entering it, float32 [M, hidden]. Enqueued on torch's current stream.
        """
        raise NotImplementedError

    def stream(
        self,
        token: int,
        position: int,
        sampling: DeviceSampling,
        max_tokens: int,
        stop_ids: Sequence[int],
        history: Sequence[int],
    ) -> TokenRing:
        """Feed `token` at `position`, sample, feed the sample, and so on, up to `max_tokens` tokens.

        history: every token up to and including `token`; its length is the index of the first draw.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release the device memory. Idempotent."""
        raise NotImplementedError
