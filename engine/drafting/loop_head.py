"""A learned head that drafts inside the backend's loop: nothing of it runs on the host.

`flint` treats it as a drafter like the others, but it is never asked: the decoder opens the loop with it, and goes over
to prompt lookup where that loop does not pay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.drafting.base import Draft
from engine.drafting.concert import LONG_MATCH
from engine.sampling import Sampling

NO_LOOKUP = 1 << 10  # tokens in common that no lookup finds
BEST_WIDTH = 4  # of the loop: a pass of the drafter costs as much as a layer, and every further draft holds less often


class LoopHead:
    """Implements Drafter for the decoder's account of steps and acceptance; its cache is the backend's own."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, name: str, widths: Sequence[int], lookup: bool) -> None:
        """name: "auto" or "eagle". widths: of the backend's loops that hold it. lookup: whether prompt lookup drafts in
        concert with it, where it matches long."""
        self.name, self.widths = name, tuple(widths)
        self.least_match = LONG_MATCH if lookup else NO_LOOKUP
        self.max_draft = max(widths) - 1
        self.position = 0  # the decoder hands it no tokens
        self.compared_bytes = 0  # that a single step read when it was measured, which the loop is compared with

    def width(self, drafts: int | None) -> int:
        """Of the loop to open; drafts: how many are wanted, where that is fixed."""
        wanted = BEST_WIDTH if drafts is None else drafts + 1
        return next((width for width in self.widths if width >= wanted), self.widths[-1])

    def extend(self, tokens: Sequence[int], features: Mapping[int, np.ndarray]) -> None:
        pass

    def truncate(self, position: int) -> None:
        pass

    def propose(self, token: int, count: int, sampling: Sampling) -> Draft:
        return Draft(())
