"""The contract between the decoder and whatever runs the model.

M tokens are fed at the cache's end and come back as rows of logits: M = 1 is single pass, M = K+1 verifies a draft
of K tokens, a long M is prefill. Arrays cross this border as numpy float32, so that a backend without torch stays
without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from engine.config import ModelConfig
from engine.sampling import Sampling


@dataclass(frozen=True)
class ByteLedger:
    """Bytes that one step moves through memory, by what they are; padding, scales and minima included.

    `weights` maps a kind of tensor ("embed", "q", "k", "v", "o", "gate", "up", "down", "head", "norm") to the bytes
    read of it over all layers, scales included. A step of M tokens reads every weight once, whatever M is.
    """

    weights: dict[str, int]
    kv_read: int
    kv_written: int

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def total(self) -> int:
        """Bytes read and written by the step."""
        return self.weight_bytes + self.kv_read + self.kv_written


@dataclass(frozen=True)
class StepOutput:
    """What one step returns.

    logits: float32 [M, vocab] for `logits="all"`, [1, vocab] for "last" (scaled by 1 / logits_scaling).
    features: layer index -> float32 [M, hidden], the residual stream *entering* that layer (index num_layers: the
        residual stream before the final norm). Only the layers that were asked for.
    """

    logits: np.ndarray
    features: dict[int, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class LoopStep:
    """One step of a speculative loop: tokens it brought, drafts it verified, and how many of these were right.

    evidence: what the drafts were based on, as in drafting.base.Draft.
    """

    tokens: int
    drafted: int
    accepted: int
    evidence: int


@dataclass(frozen=True)
class TokenBatch:
    """Tokens that a whole-loop backend produced since the last batch.

    ids: token ids in order. seconds: for each, the backend's clock at its completion, in seconds since the start of
    the stream. error: one line, set in the last batch when the backend failed (then the stream ends). steps: of a
    speculative loop, the steps that brought the ids, all of them whole; else empty, as each token is a step.
    """

    ids: list[int]
    seconds: list[float]
    error: str = ""
    steps: Sequence[LoopStep] = ()


class TokenStream(Protocol):
    """A running whole-loop decode. Iterate to receive tokens; the iterator ends after a stop token (which is yielded),
    after `max_tokens`, when the KV cache is full, or after `cancel`. Afterwards `backend.position` counts the tokens
    whose keys and values are in the cache: every yielded token but the last."""

    def __iter__(self) -> Iterator[TokenBatch]: ...

    def cancel(self) -> None:
        """Stop within one token, or one step of several. Idempotent, callable from any thread."""
        ...


class Backend(Protocol):
    """One opened model with one KV cache. Not thread-safe: one caller at a time (`TokenStream.cancel` excepted)."""

    name: str  # "cpu", "cuda" or "torch"
    description: str  # for the status line, e.g. "cpu AVX2, 2 threads"
    config: ModelConfig
    context_size: int  # most positions the KV cache may ever hold
    verify_width: int  # largest M that one pass serves at about the price of M = 1 (1: speculation never pays)

    @property
    def position(self) -> int:
        """Tokens now in the KV cache."""
        ...

    def step(
        self, tokens: Sequence[int], *, logits: Literal["all", "last"] = "all", features: Sequence[int] = ()
    ) -> StepOutput:
        """Feed M >= 1 tokens at `position`; the cache grows by M.

        Raises ContextOverflow when position + M > context_size, ValueError for an id outside the vocabulary,
        BackendError when the device fails.
        """
        ...

    def prefill_chunk(self) -> int:
        """Tokens that a caller should feed per `step` in prefill, so that cancelling stays prompt."""
        ...

    def truncate(self, position: int) -> None:
        """Forget the cache from `position` on (0 <= position <= self.position; else ValueError)."""
        ...

    def ledger(self, tokens: int, position: int) -> ByteLedger:
        """The bytes of one step of M = `tokens` starting at `position`."""
        ...

    def close(self) -> None:
        """Release threads and memory. Idempotent; any later call raises BackendError."""
        ...


@runtime_checkable
class WholeLoop(Protocol):
    """A backend that also decodes many tokens per call, with sampling inside and no Python between two tokens."""

    def stream(
        self,
        token: int,
        *,
        sampling: Sampling,
        max_tokens: int,
        stop_ids: frozenset[int],
        history: Sequence[int],
    ) -> TokenStream:
        """Feed `token` at `position`, sample, feed the sample, and so on.

        history: every token of the conversation up to and including `token` (for the repeat penalty; its length is
        also the index of the first draw, so that step-by-step decoding with the same seed gives the same tokens).
        Yields at most max_tokens tokens.
        """
        ...


@runtime_checkable
class SpeculativeLoop(WholeLoop, Protocol):
    """A whole-loop backend that also drafts, by prompt lookup in the history, and verifies inside its loop. It may hold
    a learned head, too, that drafts where the lookup finds too little.

    loop_widths: tokens that a step may be made for, above 1, ascending; () where none fits the device. head_widths:
    those of them at which the held head can draft; () where none is held.
    """

    loop_widths: tuple[int, ...]
    head_widths: tuple[int, ...]

    def head_bytes(self, passes: int) -> int:
        """Bytes of its weights that the held head reads after a step, to draft `passes` tokens."""
        ...

    def can_speculate(self, sampling: Sampling) -> bool:
        """Whether `stream_speculative` can choose tokens this way."""
        ...

    def stream_speculative(
        self,
        token: int,
        *,
        sampling: Sampling,
        max_tokens: int,
        stop_ids: frozenset[int],
        history: Sequence[int],
        width: int,
        most_drafts: int | None = None,
        least_match: int = 1,
        learned: bool = False,
    ) -> TokenStream:
        """`WholeLoop.stream`, the same tokens, in steps that verify up to most_drafts (None: width - 1) drafts each.

        width: one of `loop_widths`; a step costs what that many tokens cost, drafted or not. `history` is what drafts
        are looked up in, where at least least_match tokens of its end occur again. learned: the held head drafts where
        they do not (width: one of `head_widths`); its steps have evidence 0.
        """
        ...
