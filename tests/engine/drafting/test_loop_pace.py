"""When a loop that drafts and verifies on the device is left, and for what."""

from __future__ import annotations

import pytest

from engine.backends.base import LoopStep
from engine.drafting.draft_length import DraftLength
from engine.drafting.loop_pace import SETTLED_STEPS, SWITCH_STEPS, LoopPace, compared, width_for

WIDTHS = (2, 4, 8)
SINGLE = 0.01
RIGHT, WRONG, NOTHING = LoopStep(4, 3, 3, 5), LoopStep(1, 3, 0, 5), LoopStep(1, 0, 0, 0)


@pytest.fixture
def policy() -> DraftLength:
    policy = DraftLength(8, 15)
    policy.begin_reply()
    for width in (1, *WIDTHS):
        policy.record_step(width, SINGLE * (1 + 0.3 * (width - 1)))
    return policy


def test_the_narrowest_width_that_holds_the_drafts():
    assert [width_for(drafts, WIDTHS) for drafts in (0, 1, 2, 3, 4, 7, 8, 15)] == [2, 2, 4, 4, 8, 8, 8, 8]


def test_positions_that_were_compared():
    assert [compared(step) for step in (RIGHT, WRONG, NOTHING)] == [3, 1, 0]
    assert compared(LoopStep(3, 3, 2, 1)) == 3  # two accepted, the third was not
    assert compared(LoopStep(2, 3, 2, 1)) == 2  # the second accepted one was a stop token


@pytest.mark.parametrize("step", [WRONG, NOTHING], ids=["wrong drafts", "no drafts"])
def test_a_loop_may_lose_the_price_of_leaving_it(policy: DraftLength, step: LoopStep):
    pace = LoopPace(policy, 4, WIDTHS)
    for _ in range(SETTLED_STEPS // 2):
        pace.record(RIGHT, 1.9 * SINGLE)
    assert pace.best_width == 4
    lost = 0
    while pace.best_width != 1:
        pace.record(step, 1.9 * SINGLE)
        lost += 1
    assert 0.9 * (lost - 1) <= SWITCH_STEPS <= 0.9 * lost + 1e-9  # what was won before does not count


def test_a_wider_loop_is_thought_of_when_all_drafts_hold(policy: DraftLength):
    pace = LoopPace(policy, 2, WIDTHS)
    for count in range(SETTLED_STEPS + 10):
        assert pace.best_width == 2 or count >= SETTLED_STEPS
        pace.record(LoopStep(2, 1, 1, 9), 1.3 * SINGLE)
    assert pace.best_width == 4  # what lies beyond is still a guess
    widest = LoopPace(policy, 8, WIDTHS)
    for _ in range(SETTLED_STEPS + 10):
        widest.record(LoopStep(8, 7, 7, 9), 3.1 * SINGLE)
    assert widest.best_width == 8


def test_drafts_that_fail_call_for_no_wider_loop(policy: DraftLength):
    pace = LoopPace(policy, 2, WIDTHS)
    for _ in range(SETTLED_STEPS + 10):
        pace.record(LoopStep(1, 1, 0, 9), 1.3 * SINGLE)
        assert pace.best_width in (1, 2)


def test_the_policy_learns_from_a_loop(policy: DraftLength):
    pace = LoopPace(policy, 4, WIDTHS)
    for _ in range(30):
        pace.record(WRONG, 1.9 * SINGLE)
    assert policy.cost(4) == pytest.approx(1.9 * SINGLE)
    assert policy.estimate(WRONG.evidence) == 0
    assert policy.estimate(1 << 6) > 0  # another class
