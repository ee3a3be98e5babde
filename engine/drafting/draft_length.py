"""Chooses how many draft tokens are worth verifying, from what acceptance and verify steps are measured to be.

A step that verifies K drafts costs c(K+1) and brings 1 + a1 + a1 a2 + ... tokens; single pass brings one for c(1).
K maximises tokens per second, 0 where single pass wins. What is not measured yet starts from an optimistic guess, and
an account bounds what that may cost: time lost to verifying stays under a small share of the time decoded.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SAMPLES = 9  # the median of the last few steps of a width: one preempted step in a shared machine decides nothing
GAIN_WANTED = 1.03  # below it a difference is noise
LOSS_SHARE = 0.01  # of the time decoded, that losing verify steps may cost
LOSS_STEPS = 2.0  # and, at the start of a reply, that many single steps
ROW_COST = 0.05  # of a single step, for each further row, until measured
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.6, 2.0
MEMORY = 0.98  # per verified draft: the last 50 count
PROBE_AFTER = 24  # declined drafts of a class before one is tried again; doubles with every vain try
PROBE_LIMIT = 1024
PROBE_REPLIES = 3  # the last one of them tries a loop again that did not pay; a reply says little of the next
REFRESH_AFTER = 128  # verify steps in a row before a single one is measured again
CHEAP_DRAFT = 0.01  # of a single step: below it, a draft is always asked for


class _Acceptance:
    """Accepted / tested by draft position, for one class of drafts, with the old fading away."""

    def __init__(self, positions: int) -> None:
        self._accepted = [PRIOR_ACCEPTANCE * PRIOR_WEIGHT] * positions
        self._tested = [PRIOR_WEIGHT] * positions
        self.declined = 0
        self.probe_after = PROBE_AFTER

    def rate(self, position: int) -> float:
        return self._accepted[position] / self._tested[position]

    def record(self, tested: int, accepted: int) -> None:
        for position in range(tested):
            self._accepted[position] = MEMORY * self._accepted[position] + (position < accepted)
            self._tested[position] = MEMORY * self._tested[position] + 1


class DraftLength:
    """The policy of one backend and drafter, kept from reply to reply. Not thread-safe."""

    def __init__(self, verify_width: int, max_draft: int) -> None:
        self.max_draft = max_draft
        self._verify_width = max(1, verify_width)
        self._steps: dict[int, deque[float]] = {}
        self._costs: dict[int, float] = {}  # medians of _steps
        self._draft_seconds = 0.0  # for one proposed token, fading mean
        self._classes: dict[int, _Acceptance] = {}
        self._overall = _Acceptance(max_draft)
        self._account = 0.0  # seconds won (or lost) by verify steps against single pass
        self._decoded = 0.0
        self._paused_for = 0
        self._since_single = 0
        self._first_tested = self._first_accepted = 0  # first drafts of verify steps, ever

    # --- what happened --------------------------------------------------------------------------------------------

    def begin_reply(self) -> None:
        """What was won in one reply does not pay for losing in another."""
        self._account = self._decoded = 0.0
        self._paused_for = 0

    def record_step(self, width: int, seconds: float) -> None:
        """A step of `width` tokens took `seconds`, sampling included."""
        samples = self._steps.setdefault(width, deque(maxlen=SAMPLES))
        samples.append(seconds)
        self._costs[width] = median(samples)
        self._decoded += seconds
        self._since_single = 0 if width == 1 else self._since_single + 1

    def record_draft(self, ids: int, seconds: float) -> None:
        """Proposing `ids` tokens took `seconds`."""
        self._account -= seconds
        each = seconds / max(1, ids)
        self._draft_seconds += (each - self._draft_seconds) * (0.1 if self._draft_seconds else 1.0)

    def record_following(self, seconds: float) -> None:
        """Handing tokens and features over to the drafter took `seconds`."""
        self._account -= seconds

    def record_verified(self, evidence: int, tested: int, accepted: int, seconds: float) -> None:
        """A verify step took `seconds` beside the drafting: of `tested` drafts, `accepted` held."""
        for acceptance in (self._class(evidence), self._overall):
            acceptance.record(tested, accepted)
            if accepted:
                acceptance.probe_after = PROBE_AFTER
        self._first_tested += tested > 0
        self._first_accepted += accepted > 0
        self._account += (1 + accepted) * self.cost(1) - seconds

    # --- what to do -----------------------------------------------------------------------------------------------

    def cost(self, width: int) -> float:
        """Seconds of a step of `width` tokens: measured, else scaled from the nearest width that was."""
        if width in self._costs:
            return self._costs[width]
        if not self._costs:
            return self._prior(width)
        nearest = min(self._costs, key=lambda known: (abs(known - width), known))
        return self._costs[nearest] * self._prior(width) / self._prior(nearest)

    def ask(self) -> int:
        """How many tokens to ask the drafter for; 0: not worth the drafter's time now."""
        if 1 not in self._costs or self._since_single > REFRESH_AFTER:
            return 0  # a single step is what verifying is compared with
        if self._draft_seconds < CHEAP_DRAFT * self.cost(1):
            return self.max_draft
        return self._decide(self._overall, self.max_draft, self._draft_seconds)

    def choose(self, evidence: int, available: int) -> int:
        """How many of `available` drafted tokens (drafting is paid for) to verify; 0: single pass."""
        return self._decide(self._class(evidence), min(available, self.max_draft), 0.0)

    def estimate(self, evidence: int) -> int:
        """How many drafts of a class are best verified in a step; 0: none. A look, not a decision."""
        return self._best(self._class(evidence), self.max_draft, 0.0)

    def pays_in_loop(self, width: int) -> bool:
        """Whether a loop whose every step drafts for `width` tokens pays with learned drafts like the last ones."""
        acceptance = self._class(0)
        expected = reached = 1.0
        for position in range(min(width - 1, self.max_draft)):
            reached *= acceptance.rate(position)
            expected += reached
        return expected * self.cost(1) > GAIN_WANTED * self.cost(width)

    def opens_loop(self, width: int) -> bool:
        """Whether to begin a reply in such a loop: where it pays, and now and then where it did not."""
        acceptance = self._class(0)
        acceptance.declined = 0 if self.pays_in_loop(width) else (acceptance.declined + 1) % PROBE_REPLIES
        return acceptance.declined == 0

    @property
    def paused(self) -> bool:
        """Drafts have been declined, one after the other, for a while, or have cost too much altogether."""
        return self._paused_for >= PROBE_AFTER or not self._solvent

    def why_paused(self) -> str:
        """What was measured of that behind a pause, for one line to the user; what was only assumed is left out."""
        known = [] if self._solvent else [f"{-self._account * 1e3:.0f} ms lost in this reply"]
        if self._first_tested:
            known.append(f"{self._first_accepted} of {self._first_tested} first draft tokens accepted")
        else:
            known.append("no draft has been verified yet")
        if {1, 2} <= self._costs.keys():
            known.append(f"a verify step of two costs {self._costs[2] / self._costs[1]:.2f}x a single one")
        return "; ".join(known)

    def _decide(self, acceptance: _Acceptance, available: int, draft_seconds: float) -> int:
        if available < 1:
            return 0
        best = self._best(acceptance, available, draft_seconds)
        if best and self._solvent:
            self._paused_for = 0
            acceptance.declined = 0
            return best
        self._paused_for += 1
        acceptance.declined += 1
        if self._solvent and acceptance.declined >= acceptance.probe_after:
            acceptance.declined = 0
            acceptance.probe_after = min(2 * acceptance.probe_after, PROBE_LIMIT)
            return min(available, 2)
        return 0

    def _best(self, acceptance: _Acceptance, available: int, draft_seconds: float) -> int:
        best, best_rate = 0, GAIN_WANTED / self.cost(1)
        expected = reached = 1.0
        for count in range(1, available + 1):
            reached *= acceptance.rate(count - 1)
            expected += reached
            rate = expected / (self.cost(count + 1) + count * draft_seconds)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    @property
    def _solvent(self) -> bool:
        return self._account > -(LOSS_SHARE * self._decoded + LOSS_STEPS * self.cost(1))

    def _prior(self, width: int) -> float:
        """A step's cost relative to M = 1 where nothing is measured: flat up to the backend's verify width."""
        passes = -(-width // self._verify_width)
        return passes * (1 + ROW_COST * (min(width, self._verify_width) - 1))

    def _class(self, evidence: int) -> _Acceptance:
        """Drafts whose evidence has the same binary order of magnitude count together."""
        return self._classes.setdefault(evidence.bit_length(), _Acceptance(self.max_draft))
