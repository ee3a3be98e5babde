"""Decides how long to stay in a loop that drafts and verifies on the device, and in one of which width.

Every step of such a loop costs what its width costs, drafts or not: it wins while the text repeats itself and loses
after. What a step won or lost against single pass goes into an account; once that has fallen by the price of leaving,
the loop is left (the ski-rental rule: at most twice what the best choice in hindsight would have cost).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.backends.base import LoopStep
from engine.drafting.draft_length import DraftLength

SWITCH_SECONDS = 0.001  # from the stop flag to the next loop's first step: the host's look into the ring, and a launch
SWITCH_STEPS = 4.0  # single steps; the price where these are slow
HEAD_PATIENCE = 3.0  # prices that a loop with a learned head may lose: left, it is not begun again in the reply
SETTLED_STEPS = 16  # before a wider loop is thought of


def width_for(drafts: int, widths: Sequence[int]) -> int:
    """The narrowest of the ascending `widths` that holds the drafts and the token before them; else the widest."""
    return next((width for width in widths if width > drafts), widths[-1])


class LoopPace:
    """One loop under way; what it shows about drafts and steps goes to the policy."""

    def __init__(self, policy: DraftLength, width: int, widths: Sequence[int], patience: float = 1.0) -> None:
        """patience: how often the price of leaving may be lost before the loop is left."""
        self._policy, self._width, self._widths = policy, width, widths
        self._single = policy.cost(1)
        self._price = patience * max(SWITCH_SECONDS, SWITCH_STEPS * self._single)
        self._account = self._best = 0.0
        self._steps = self._evidence = 0

    def record(self, step: LoopStep, seconds: float) -> None:
        """A step took `seconds`."""
        self._steps += 1
        self._account += step.tokens * self._single - seconds
        self._best = max(self._best, self._account)
        self._policy.record_step(self._width, seconds)
        self._policy.record_verified(step.evidence, compared(step), step.accepted, seconds)
        if step.drafted:
            self._evidence = step.evidence

    @property
    def best_width(self) -> int:
        """What the next steps should be made for: 1, single pass, once the loop has lost the price of leaving since it
        stood best; a wider loop where that promises more for drafts like the last ones; else this one."""
        if self._best - self._account >= self._price:
            return 1
        if self._steps < SETTLED_STEPS:
            return self._width
        return max(self._width, width_for(self._policy.estimate(self._evidence), self._widths))


def compared(step: LoopStep) -> int:
    """Draft positions that were compared: those accepted, and one more if the target's own token came instead."""
    return min(step.drafted, step.tokens)
