"""How good a drafter is: acceptance length and per-position rates, with confidence intervals.

Two ways that must agree. *True context* runs the head over finished text in one pass and then walks the text as a
live loop would. *Live* is the decoder itself, drafting and verifying (engine/decoder.py); its counts come from the
Tokens events. Acceptance length = 1 + accepted / verify steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.drafting.batched_target import BatchedTarget
from engine.drafting.eagle_head import EagleHead


@dataclass(frozen=True)
class Acceptance:
    """Counts of one sequence: verify steps, drafts tested and accepted at each position (ints, [K])."""

    steps: int
    tested: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def length(self) -> float:
        return 1 + sum(self.accepted) / self.steps if self.steps else float("nan")


@dataclass(frozen=True)
class Summary:
    """Acceptance over many sequences: pooled length, its bootstrap 95 % interval over sequences, and the rate at each
    position (accepted / tested there)."""

    length: float
    low: float
    high: float
    per_position: tuple[float, ...]
    steps: int
    sequences: int


def summarise(rows: list[Acceptance], seed: int = 0, resamples: int = 2000) -> Summary:
    """Pool sequences. Resamples whole sequences: steps of one reply are not independent."""
    rows = [row for row in rows if row.steps]
    if not rows:
        return Summary(float("nan"), float("nan"), float("nan"), (), 0, 0)
    steps = np.array([row.steps for row in rows], dtype=np.float64)
    accepted = np.array([sum(row.accepted) for row in rows], dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(rows), (resamples, len(rows)))
    lengths = 1 + accepted[picks].sum(1) / steps[picks].sum(1)
    low, high = np.percentile(lengths, [2.5, 97.5])
    width = max(len(row.tested) for row in rows)
    tested = np.zeros(width)
    taken = np.zeros(width)
    for row in rows:
        tested[: len(row.tested)] += row.tested
        taken[: len(row.accepted)] += row.accepted
    rates = tuple(float(a / t) if t else 0.0 for a, t in zip(taken, tested, strict=True))
    return Summary(1 + accepted.sum() / steps.sum(), float(low), float(high), rates, int(steps.sum()), len(rows))


@torch.inference_mode()
def accepted_lengths(head: EagleHead, target: BatchedTarget, tokens: Tensor, depth: int) -> np.ndarray:
    """int64 [B, T] tokens -> int64 [B, T]: at index t, how many leading drafts are the text's own next tokens.

    Entry t is what a live step would accept whose newest verified token is t + 1 (feature up to t). The text must be
    the target's greedy choice for this to be acceptance.
    """
    _, features = target.forward(tokens, head.config.feature_layers)
    embedded = target.embed(tokens).float()
    alive = torch.ones_like(tokens, dtype=torch.bool)
    count = torch.zeros_like(tokens)
    for i, state in enumerate(head.rollout([f.float() for f in features], embedded, depth)):
        drafted = head.d2t[head.logits(state).argmax(-1)]
        rows = tokens.shape[1] - 2 - i
        if rows <= 0:
            break
        hit = torch.zeros_like(alive)
        hit[:, :rows] = drafted[:, :rows] == tokens[:, 2 + i : 2 + i + rows]
        alive &= hit
        count += alive
    return count.cpu().numpy()


def walk(lengths: np.ndarray, start: int, end: int, depth: int) -> Acceptance:
    """Step through one sequence as a live loop does. lengths int [T] of `accepted_lengths`; start: index of the first
    reply token (which the prefill yields); end: one past the reply's last token."""
    steps = 0
    tested, accepted = [0] * depth, [0] * depth
    newest = start
    while newest < end - 1:
        taken = min(int(lengths[newest - 1]), end - 1 - newest)
        possible = min(depth, end - 1 - newest)
        for position in range(min(taken + 1, possible)):
            tested[position] += 1
            accepted[position] += position < taken
        steps += 1
        newest += taken + 1
    return Acceptance(steps, tuple(tested), tuple(accepted))


def true_context(
    head: EagleHead, target: BatchedTarget, tokens: np.ndarray, replies: np.ndarray, depth: int, batch: int = 32
) -> list[Acceptance]:
    """Acceptance over greedy conversations (tokens uint32, replies bool, both [n, T]); one row a sequence."""
    rows: list[Acceptance] = []
    for first in range(0, len(tokens), batch):
        block = torch.from_numpy(tokens[first : first + batch].astype(np.int64)).to(target.device)
        lengths = accepted_lengths(head, target, block, depth)
        for row, mask in zip(lengths, replies[first : first + batch], strict=True):
            edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
            parts = [walk(row, int(a), int(b), depth) for a, b in zip(edges[::2], edges[1::2], strict=True) if a > 0]
            rows.append(
                Acceptance(
                    sum(p.steps for p in parts),
                    tuple(int(x) for x in np.sum([p.tested for p in parts] or [[0] * depth], axis=0)),
                    tuple(int(x) for x in np.sum([p.accepted for p in parts] or [[0] * depth], axis=0)),
                )
            )
    return rows
