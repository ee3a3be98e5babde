"""Decides which draft tokens the target accepts, so that drafting never changes what is generated.

A deterministic draft is accepted while the target's own draw, with the draw's own random number, falls on it. That is
the speculative-sampling rule for a one-point draft distribution (accept with probability p(draft), else draw from the
rest), and because the draws are those of single pass, so are the tokens: with a seed as much as greedily.

A draft drawn from a distribution q is accepted with probability min(1, p/q), else the token is drawn from (p - q)+
(Leviathan et al. 2023; Chen et al. 2023): the same distribution as single pass, but not the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.drafting.base import Draft
from engine.sampling import Sampling, probabilities, sample, uniform

ACCEPT_STREAM = 0x9E3779B97F4A7C15  # sets the accepting draws apart from those that choose a token


@dataclass(frozen=True)
class Verified:
    """tokens: the accepted draft tokens, then the target's own (left out after a stop token). accepted: how many of
    them are draft tokens. tested: draft positions that were compared, the rejected one included."""

    tokens: list[int]
    accepted: int
    tested: int


def verify(
    logits: np.ndarray, draft: Draft, sampling: Sampling, history: list[int], stop_ids: frozenset[int]
) -> Verified:
    """logits: float32 [len(draft.ids) + 1, vocab], row i after draft token i - 1. history: every token before the
    draft; the verified tokens are appended to it."""
    tokens: list[int] = []

    def append(token: int) -> None:
        tokens.append(token)
        history.append(token)

    for position, guess in enumerate(draft.ids):
        append(_choose(logits[position], position, draft, sampling, history))
        if tokens[-1] != guess:
            return Verified(tokens, position, position + 1)
        if guess in stop_ids:
            return Verified(tokens, position + 1, position + 1)
    append(sample(logits[len(draft.ids)], sampling, history))
    return Verified(tokens, len(draft.ids), len(draft.ids))


def _choose(logits: np.ndarray, position: int, draft: Draft, sampling: Sampling, history: list[int]) -> int:
    """The target's token at a draft position; equal to the guess where that is accepted."""
    if sampling.greedy or draft.distributions is None:
        return sample(logits, sampling, history)
    guess = draft.ids[position]
    p = probabilities(logits, sampling, history)
    q = draft.distributions[position]
    if uniform(sampling.seed ^ ACCEPT_STREAM, len(history)) * q[guess] < p[guess]:
        return guess
    remainder = np.maximum(p - q, 0.0)
    remainder[guess] = 0.0  # rejected, so p < q there; rounding must not bring it back
    if not remainder.any():
        return sample(logits, sampling, history)
    walked = np.cumsum(remainder)
    return int(np.searchsorted(walked, uniform(sampling.seed, len(history)) * walked[-1], side="right"))
