"""The correctness gate: no arm is timed before its greedy tokens are those of the float32 reference.

Arms round differently, so where the reference's two likeliest tokens nearly tie an arm may take the other one. From
there on the texts are different texts, and nothing more can be compared: how far the gate looked is part of its word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Logits. An arm with 8-bit activations errs by about 0.15 a logit (a KL of 1e-2 to float32), so a difference of two by
# about 0.2: this is some 2.5 times that.
NEAR_TIE = 0.5


@dataclass(frozen=True)
class Reference:
    """Greedy tokens of the reference. margins: its first logit less its second at each; runners_up: the second's id."""

    ids: tuple[int, ...]
    margins: tuple[float, ...]
    runners_up: tuple[int, ...]


@dataclass(frozen=True)
class Gate:
    """agreed: tokens equal to the reference's. tie: the reference's margin where the arm then took the runner-up (None:
    it never differed, or differed wrongly)."""

    passed: bool
    agreed: int
    total: int
    tie: float | None = None
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        if self.tie is None:
            return f"all {self.total} tokens of the reference"
        return f"{self.agreed} of {self.total} tokens, then a near tie ({self.tie:.2f} logits)"


def check(ids: Sequence[int], reference: Reference) -> Gate:
    """Compare an arm's greedy tokens with the reference's."""
    total = len(reference.ids)
    if len(ids) != total:
        return Gate(False, 0, total, problem=f"{len(ids)} tokens where {total} were asked for")
    agreed = next((i for i in range(total) if ids[i] != reference.ids[i]), total)
    if agreed == total:
        return Gate(True, total, total)
    margin, took_second = reference.margins[agreed], ids[agreed] == reference.runners_up[agreed]
    if margin <= NEAR_TIE and took_second:
        return Gate(True, agreed, total, tie=margin)
    other = "the runner-up" if took_second else "neither of the two likeliest"
    problem = f"wrong token after {agreed} of {total}: {other}, {margin:.2f} logits from the first"
    return Gate(False, agreed, total, problem=problem)
