"""What quantisation costs: perplexity on a text, and the KL divergence of a packed model to another one.

The text is cut into windows that overlap; a window's first tokens are context, and only what no earlier window scored
is scored, so that every token counts once:

    tokens    0 1 2 3 4 5 6 7 8 9
    window 1  c s s s s s             window 6, stride 3
    window 2        c c c s s s       c: context, s: scored
    window 3              c c c s
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.backends.base import Backend
from engine.errors import BackendError, UsageError

WINDOW, STRIDE = 1024, 512
_CHUNK = 128  # rows of logits at a time: 50 MB with 100k tokens in the vocabulary

Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class Window:
    """tokens[start:end] are fed, tokens[scored:end] are scored."""

    start: int
    scored: int
    end: int


@dataclass(frozen=True)
class Perplexity:
    """tokens: scored ones. nll: mean negative log-likelihood of a token, nats. error: standard error of that mean."""

    tokens: int
    nll: float
    error: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)

    @property
    def perplexity_error(self) -> float:
        """One standard error, to first order."""
        return self.perplexity * self.error


@dataclass(frozen=True)
class Divergence:
    """KL(reference || tested) of the next token's distribution, nats: mean over the scored tokens, its standard error,
    median, 99th percentile, largest. same_top: share of tokens at which both find the same one likeliest."""

    mean: float
    error: float
    median: float
    p99: float
    largest: float
    same_top: float
    reference: Perplexity
    tested: Perplexity


def plan_windows(count: int, window: int, stride: int) -> list[Window]:
    """Windows over `count` tokens; the first token of all has no context and is not scored. Raises UsageError."""
    if not 1 <= stride < window:
        raise UsageError(f"--stride {stride} must be at least 1 and less than --window {window}")
    if count < 2:
        raise UsageError("The text has fewer than 2 tokens", "There is nothing to score.")
    windows = [Window(0, 1, min(window, count))]
    while windows[-1].end < count:
        scored = windows[-1].end
        end = min(scored + stride, count)
        windows.append(Window(max(0, end - window), scored, end))
    return windows


def perplexity(
    backend: Backend, tokens: Sequence[int], windows: Sequence[Window], watch: Watch = lambda *_: None
) -> Perplexity:
    """Perplexity of the scored tokens. Raises BackendError for logits that are not finite."""
    losses = []
    for done, window in enumerate(windows):
        watch(done, len(windows))
        for targets, logits in _scored(backend, tokens, window):
            losses.append(_losses(_log_softmax(logits), targets))
    watch(len(windows), len(windows))
    return _perplexity(np.concatenate(losses))


def divergences(
    reference: Backend,
    tested: Sequence[Backend],
    tokens: Sequence[int],
    windows: Sequence[Window],
    watch: Watch = lambda *_: None,
) -> list[Divergence]:
    """Of each tested backend from the reference, which is run once for all of them, chunk by chunk."""
    losses: list[list[np.ndarray]] = [[] for _ in range(len(tested) + 1)]
    kl: list[list[np.ndarray]] = [[] for _ in tested]
    same: list[list[np.ndarray]] = [[] for _ in tested]
    for done, window in enumerate(windows):
        watch(done, len(windows))
        streams = [_scored(backend, tokens, window) for backend in (reference, *tested)]
        for parts in zip(*streams, strict=True):
            targets = parts[0][0]
            true = _log_softmax(parts[0][1])
            probabilities = np.exp(true)
            losses[0].append(_losses(true, targets))
            for i, (_, logits) in enumerate(parts[1:]):
                other = _log_softmax(logits)
                losses[i + 1].append(_losses(other, targets))
                # Never below 0 but by rounding.
                kl[i].append(np.maximum((probabilities * (true - other)).sum(axis=1), 0.0))
                same[i].append(true.argmax(axis=1) == other.argmax(axis=1))
    watch(len(windows), len(windows))
    scores = [_perplexity(np.concatenate(parts)) for parts in losses]
    return [
        _divergence(np.concatenate(kl[i]), np.concatenate(same[i]), scores[0], scores[i + 1])
        for i in range(len(tested))
    ]


def require_backend(backend: Backend, wanted: str) -> Backend:
    """The backend, if it is the one that was to be tested: a figure of another one would say nothing. "auto" takes any.

    Raises BackendError.
    """
    if wanted not in ("auto", backend.name):
        raise BackendError(f"{backend.name} was opened where {wanted} was to be evaluated")
    return backend


def _scored(backend: Backend, tokens: Sequence[int], window: Window) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids [m], the logits float32 [m, vocab] that predict them), in order, for the window's scored tokens."""
    backend.truncate(0)
    chunk = max(1, min(_CHUNK, backend.prefill_chunk()))
    context = window.scored - 1  # the last token fed before the first one whose prediction counts
    position = window.start
    while position < context:  # context alone: its logits are not needed
        end = min(position + chunk, context)
        backend.step(tokens[position:end], logits="last")
        position = end
    while position < window.end - 1:
        end = min(position + chunk, window.end - 1)
        logits = backend.step(tokens[position:end], logits="all").logits
        if not np.isfinite(logits).all():
            raise BackendError(f"{backend.description} gave a logit that is not finite")
        yield np.asarray(tokens[position + 1 : end + 1]), logits
        position = end


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 [m, vocab]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _losses(log_probabilities: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return -log_probabilities[np.arange(len(targets)), targets]


def _perplexity(losses: np.ndarray) -> Perplexity:
    return Perplexity(len(losses), float(losses.mean()), _standard_error(losses))


def _divergence(kl: np.ndarray, same: np.ndarray, reference: Perplexity, tested: Perplexity) -> Divergence:
    median, p99 = np.percentile(kl, [50, 99]).tolist()
    return Divergence(
        mean=float(kl.mean()),
        error=_standard_error(kl),
        median=median,
        p99=p99,
        largest=float(kl.max()),
        same_top=float(same.mean()),
        reference=reference,
        tested=tested,
    )


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0
