"""Speculation keeps the distribution: chi-square over many seeds on a small vocabulary.

The bound of each test is the chi-square quantile of 1 - 1e-6: with fixed seeds a test passes or fails for good, and a
wrong rule misses it by orders of magnitude (the last test shows that for one).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from engine.drafting import verify as verify_module
from engine.drafting.base import Draft
from engine.drafting.verify import verify
from engine.sampling import Sampling, probabilities, sample, uniform

VOCAB = 6
SEEDS = 3000
HISTORY = [0, 3, 3, 1]
SETTINGS = {
    "temperature": {"temperature": 1.3},
    "top_k": {"temperature": 1.0, "top_k": 4},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "all": {"temperature": 0.9, "top_k": 5, "top_p": 0.95, "min_p": 0.02, "repeat_penalty": 1.4, "repeat_window": 3},
}


_TABLE = np.random.default_rng(0).normal(0, 1.2, (VOCAB, VOCAB, VOCAB)).astype(np.float32)
_NOISE = np.random.default_rng(1).normal(0, 1, (VOCAB, VOCAB))


def target_logits(tokens: Sequence[int]) -> np.ndarray:
    """Fixed logits that depend on the last two tokens."""
    return _TABLE[tokens[-2], tokens[-1]]


def draft_distribution(tokens: Sequence[int]) -> np.ndarray:
    """A drafter's opinion: related to the target's, but not equal, with one token that it never drafts."""
    weights = np.exp(0.7 * target_logits(tokens) + _NOISE[tokens[-1]])
    weights[tokens[-1] % VOCAB] = 0
    return weights / weights.sum()


def exact(sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of `length` tokens, by the chain rule."""
    known = {(): 1.0}
    for _ in range(length):
        longer = {}
        for tokens, mass in known.items():
            p = probabilities(target_logits([*HISTORY, *tokens]), sampling, [*HISTORY, *tokens])
            longer |= {(*tokens, token): mass * p[token] for token in range(VOCAB) if p[token] > 0}
        known = longer
    return known


def chi_square(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> tuple[float, float]:
    """The statistic and its bound; cells that expect fewer than 5 are pooled."""
    total = sum(counts.values())
    assert counts.keys() <= expected.keys(), "a token that the target gives no probability"
    statistic, cells, rest_seen, rest_wanted = 0.0, 0, 0, 0.0
    for outcome, p in expected.items():
        if total * p < 5:
            rest_seen, rest_wanted = rest_seen + counts[outcome], rest_wanted + total * p
        else:
            statistic, cells = statistic + (counts[outcome] - total * p) ** 2 / (total * p), cells + 1
    if rest_wanted >= 5:
        statistic, cells = statistic + (rest_seen - rest_wanted) ** 2 / rest_wanted, cells + 1
    k = cells - 1
    # Wilson & Hilferty 1931: (X / k)^(1/3) is nearly normal; 4.75 standard deviations are 1 - 1e-6.
    return statistic, k * (1 - 2 / (9 * k) + 4.75 * math.sqrt(2 / (9 * k))) ** 3


def continuation(sampling: Sampling, make_draft, length: int) -> tuple[int, ...]:
    """`length` tokens, in as many verify steps as it takes."""
    tokens: list[int] = []
    while len(tokens) < length:
        history = [*HISTORY, *tokens]
        draft = make_draft(history, sampling.seed)
        logits = np.stack([target_logits(history + list(draft.ids[:i])) for i in range(len(draft.ids) + 1)])
        verified = verify(logits, draft, sampling, history, frozenset())
        assert history == [*HISTORY, *tokens, *verified.tokens]
        tokens += verified.tokens
    return tuple(tokens[:length])


def sampled_draft(history: list[int], seed: int) -> Draft:
    """Two tokens drawn from the drafter's own distribution."""
    ids: list[int] = []
    rows = []
    for index in range(2):
        rows.append(draft_distribution([*history, *ids]))
        u = uniform(seed + 10**9, 2 * len(history) + index)
        ids.append(int(np.searchsorted(np.cumsum(rows[-1]), u * rows[-1].sum(), side="right")))
    return Draft(ids, np.stack(rows))


def fixed_draft(history: list[int], seed: int) -> Draft:
    """Two tokens that depend on the conversation alone."""
    return Draft([(history[-1] + 1) % VOCAB, (history[-1] + 3) % VOCAB])


@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_drawn_from_a_distribution_keep_the_target_s(name):
    counts = Counter(continuation(Sampling(**SETTINGS[name], seed=seed), sampled_draft, 2) for seed in range(SEEDS))
    statistic, bound = chi_square(counts, exact(Sampling(**SETTINGS[name]), 2))
    assert statistic < bound


@pytest.mark.parametrize("name", ["top_p", "all"])
def test_deterministic_drafts_keep_the_target_s_distribution(name):
    counts = Counter(continuation(Sampling(**SETTINGS[name], seed=seed), fixed_draft, 2) for seed in range(SEEDS))
    statistic, bound = chi_square(counts, exact(Sampling(**SETTINGS[name]), 2))
    assert statistic < bound


@pytest.mark.parametrize("name", SETTINGS)
def test_deterministic_drafts_keep_even_the_tokens(name):
    for seed in range(100):
        sampling = Sampling(**SETTINGS[name], seed=seed)
        plain = list(HISTORY)
        for _ in range(6):
            plain.append(sample(target_logits(plain), sampling, plain))
        assert continuation(sampling, fixed_draft, 6) == tuple(plain[len(HISTORY) :])


def test_greedy_keeps_the_tokens_of_any_draft():
    plain = list(HISTORY)
    for _ in range(8):
        plain.append(int(target_logits(plain).argmax()))
    for seed in range(50):
        assert continuation(Sampling(seed=seed), sampled_draft, 8) == tuple(plain[len(HISTORY) :])


def test_a_distribution_close_to_the_target_s_is_mostly_accepted():
    """The rule accepts sum(min(p, q)) of the drafts; taking only exact coincidences would accept far fewer."""
    sampling = Sampling(temperature=1.0)
    accepted, wanted = 0, 0.0
    for seed in range(2000):
        draft = sampled_draft(list(HISTORY), seed)
        assert draft.distributions is not None
        logits = np.stack([target_logits([*HISTORY, *draft.ids[:i]]) for i in range(3)])
        accepted += verify(logits, draft, Sampling(temperature=1.0, seed=seed), list(HISTORY), frozenset()).accepted > 0
        wanted += float(np.minimum(probabilities(logits[0], sampling, HISTORY), draft.distributions[0]).sum())
    assert accepted == pytest.approx(wanted, abs=4 * math.sqrt(2000 * 0.25))


def test_a_stop_token_ends_the_verified_tokens():
    logits = np.full((4, VOCAB), -5, np.float32)
    logits[range(4), [1, 2, 3, 4]] = 5
    verified = verify(logits, Draft([1, 2, 3]), Sampling(), [0], frozenset({2}))
    assert (verified.tokens, verified.accepted, verified.tested) == ([1, 2], 2, 2)
    verified = verify(logits, Draft([1, 0, 3]), Sampling(), [0], frozenset())
    assert (verified.tokens, verified.accepted, verified.tested) == ([1, 2], 1, 2)
    verified = verify(logits, Draft([1, 2, 3]), Sampling(), [0], frozenset())
    assert (verified.tokens, verified.accepted, verified.tested) == ([1, 2, 3, 4], 3, 3)


def test_the_test_can_fail(monkeypatch):
    """Accepting with the draw that also chooses the replacement is a known mistake; the bound catches it."""
    monkeypatch.setattr(verify_module, "ACCEPT_STREAM", 0)
    counts = Counter(
        continuation(Sampling(**SETTINGS["temperature"], seed=seed), sampled_draft, 2) for seed in range(SEEDS)
    )
    statistic, bound = chi_square(counts, exact(Sampling(**SETTINGS["temperature"]), 2))
    assert statistic > 2 * bound
