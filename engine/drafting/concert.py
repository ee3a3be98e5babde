"""Two drafters in concert: prompt lookup where it matches long, the EAGLE head everywhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.drafting.base import Draft, Drafter
from engine.sampling import Sampling

LONG_MATCH = 4  # tokens in common from which on prompt lookup is to be trusted more than the head


class Concert:
    """Implements Drafter. `lookup` speaks when its match is at least `long_match` tokens, `learned` otherwise."""

    name = "auto"

    def __init__(self, lookup: Drafter, learned: Drafter, long_match: int = LONG_MATCH) -> None:
        self.lookup, self.learned, self.long_match = lookup, learned, long_match
        self.feature_layers = learned.feature_layers
        self.max_draft = max(lookup.max_draft, learned.max_draft)

    @property
    def position(self) -> int:
        return self.learned.position

    def extend(self, tokens: Sequence[int], features: Mapping[int, np.ndarray]) -> None:
        self.lookup.extend(tokens, {})
        self.learned.extend(tokens, features)

    def truncate(self, position: int) -> None:
        self.lookup.truncate(position)
        self.learned.truncate(position)

    def propose(self, token: int, count: int, sampling: Sampling) -> Draft:
        draft = self.lookup.propose(token, count, sampling)
        if len(draft.ids) and draft.evidence >= self.long_match:
            return draft
        return self.learned.propose(token, count, sampling)
