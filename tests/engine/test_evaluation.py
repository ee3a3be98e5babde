"""Perplexity and KL divergence, against sums by hand over every token's whole context."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.errors import BackendError, UsageError
from engine.evaluation import Window, divergences, perplexity, plan_windows, require_backend
from tests.fake_backend import FakeBackend, hashed_logits

TOKENS = [int(t) for t in np.random.default_rng(4).integers(3, 259, 40)]


@pytest.mark.parametrize(
    ("count", "window", "stride"), [(40, 16, 8), (40, 16, 1), (40, 64, 32), (17, 16, 15), (2, 2, 1)]
)
def test_every_token_but_the_first_is_scored_once(count: int, window: int, stride: int) -> None:
    windows = plan_windows(count, window, stride)
    scored = [i for w in windows for i in range(w.scored, w.end)]
    assert scored == list(range(1, count))
    assert all(w.end - w.start <= window and w.start < w.scored for w in windows)
    # Every token after the first window has at least window - stride tokens of context.
    assert all(w.scored - w.start >= window - stride for w in windows[1:])


def test_the_picture_of_the_docstring() -> None:
    assert plan_windows(10, 6, 3) == [Window(0, 1, 6), Window(3, 6, 9), Window(4, 9, 10)]


def test_settings_that_cannot_be() -> None:
    for window, stride in ((8, 8), (8, 0), (8, 9)):
        with pytest.raises(UsageError, match="--stride"):
            plan_windows(20, window, stride)
    with pytest.raises(UsageError, match="fewer than 2 tokens"):
        plan_windows(1, 8, 4)


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    return row - np.log(np.exp(row).sum())


def contexts(windows: list[Window]) -> list[tuple[list[int], int]]:
    """What each scored token is predicted from, and the token."""
    return [(TOKENS[w.start : i], TOKENS[i]) for w in windows for i in range(w.scored, w.end)]


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_perplexity_is_the_mean_over_each_tokens_own_context(chunk: int) -> None:
    logits = hashed_logits(259)
    windows = plan_windows(len(TOKENS), 12, 5)
    losses = [-log_softmax(logits(context))[token] for context, token in contexts(windows)]
    result = perplexity(FakeBackend(logits, chunk=chunk), TOKENS, windows)
    assert result.tokens == 39
    assert result.nll == pytest.approx(np.mean(losses))
    assert result.perplexity == pytest.approx(math.exp(np.mean(losses)))
    assert result.error == pytest.approx(np.std(losses, ddof=1) / math.sqrt(39))


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary() -> None:
    backend = FakeBackend(lambda tokens: np.zeros(259, np.float32))
    result = perplexity(backend, TOKENS, plan_windows(len(TOKENS), 16, 8))
    assert result.perplexity == pytest.approx(259)
    assert result.error == pytest.approx(0, abs=1e-12)


def test_a_backend_does_not_diverge_from_itself() -> None:
    windows = plan_windows(len(TOKENS), 16, 8)
    (result,) = divergences(FakeBackend(), [FakeBackend(chunk=16)], TOKENS, windows)
    assert (result.mean, result.largest, result.same_top) == (0.0, 0.0, 1.0)
    assert result.reference == result.tested


def test_divergence_by_hand() -> None:
    sharp = hashed_logits(259)

    def blunt(tokens):
        return sharp(tokens) * np.float32(0.8)

    windows = plan_windows(len(TOKENS), 16, 8)
    by_hand = []
    for context, _ in contexts(windows):
        p, q = log_softmax(sharp(context)), log_softmax(blunt(context))
        by_hand.append((np.exp(p) * (p - q)).sum())
    one, other = divergences(FakeBackend(sharp), [FakeBackend(blunt), FakeBackend(sharp)], TOKENS, windows)
    assert one.mean == pytest.approx(np.mean(by_hand))
    assert one.median == pytest.approx(np.median(by_hand))
    assert one.largest == pytest.approx(max(by_hand))
    assert one.same_top == 1.0  # scaling moves no maximum
    assert one.tested.nll != one.reference.nll
    assert other.mean == 0.0


def test_a_logit_that_is_no_number_is_an_error_not_a_figure() -> None:
    backend = FakeBackend(lambda tokens: np.full(259, np.nan, np.float32))
    with pytest.raises(BackendError, match="not finite"):
        perplexity(backend, TOKENS, plan_windows(len(TOKENS), 16, 8))


def test_only_the_backend_under_test_is_evaluated() -> None:
    backend = FakeBackend()
    assert require_backend(backend, "fake") is backend
    assert require_backend(backend, "auto") is backend
    with pytest.raises(BackendError, match="fake was opened where cuda was to be evaluated"):
        require_backend(backend, "cuda")
