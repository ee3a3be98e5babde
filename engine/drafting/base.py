"""The contract between the decoder and whatever guesses the next tokens.

A drafter follows the target's KV cache: `extend` hands it every token that entered the cache, `truncate` takes back
what left it, and `propose` asks what comes after one more token that is not in the cache yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.sampling import Sampling


@dataclass(frozen=True)
class Draft:
    """A guess at the next tokens.

    ids: at most as many as were asked for, possibly none.
    distributions: float64 [len(ids), vocab], the distribution that each id was drawn from, given the ids before it;
        None where ids are a deterministic function of the conversation.
    evidence: a small non-negative number that classes drafts by how far they can be trusted (for prompt lookup the
        length of the match); acceptance is measured for each class apart.
    """

    ids: Sequence[int]
    distributions: np.ndarray | None = None
    evidence: int = 0


class Drafter(Protocol):
    """Guesses tokens of one conversation. Not thread-safe. A failure raises DrafterError: decoding goes on without."""

    name: str  # "ngram" or "eagle"
    feature_layers: tuple[int, ...]  # the target's residual streams that `extend` needs; () for none
    max_draft: int  # the most ids that `propose` can return

    @property
    def position(self) -> int:
        """Tokens that the drafter has been extended with: its own cache. The decoder keeps it at most at the
        target's position, and equal to it when it calls `propose`."""
        ...

    def extend(self, tokens: Sequence[int], features: Mapping[int, np.ndarray]) -> None:
        """`tokens` entered the target's cache at `position`.

        features: for each of `feature_layers`, float32 [len(tokens), hidden], the residual stream entering that
        layer at those tokens.
        """
        ...

    def truncate(self, position: int) -> None:
        """Forget everything from `position` on (0 <= position <= self.position; else ValueError)."""
        ...

    def propose(self, token: int, count: int, sampling: Sampling) -> Draft:
        """Guess up to `count` >= 1 tokens that follow the known ones and then `token` (chosen, not in the cache)."""
        ...
