"""The policy over simulated clocks: no wall-clock time is read here."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.drafting.draft_length import DraftLength


def simulate(
    cost: Callable[[int], float],
    acceptance: Callable[[int, int], float],
    tokens: int = 2000,
    *,
    evidence: Callable[[random.Random], int] = lambda rng: 4,
    draft_seconds: float = 0.0,
    policy: DraftLength | None = None,
    verify_width: int = 8,
) -> tuple[float, list[int]]:
    """Decode `tokens` tokens; acceptance(evidence, position). Returns the speed relative to single pass and the draft
    length of every step."""
    rng = random.Random(0)
    policy = policy or DraftLength(verify_width, 7)
    policy.begin_reply()
    seconds, done, lengths = 0.0, 0, []
    while done < tokens:
        asked = policy.ask()
        count = 0
        quality = evidence(rng)
        if asked:
            policy.record_draft(asked, draft_seconds * asked)
            seconds += draft_seconds * asked
            count = policy.choose(quality, asked)
        step = cost(count + 1)
        policy.record_step(count + 1, step)
        seconds += step
        accepted = 0
        while accepted < count and rng.random() < acceptance(quality, accepted):
            accepted += 1
        if count:
            policy.record_verified(quality, min(accepted + 1, count), accepted, step)
        done += 1 + accepted
        lengths.append(count)
    return done * cost(1) / seconds, lengths


def flat(width: int) -> float:
    return 0.01 * (1 + 0.03 * (width - 1))


def proportional(width: int) -> float:
    return 0.01 * width


def test_good_drafts_and_flat_verify_steps_use_the_whole_width():
    speed, lengths = simulate(flat, lambda evidence, position: 0.95)
    assert max(lengths[-20:]) == 7
    assert speed > 4


def test_the_best_length_for_the_measured_cost_is_found():
    """Three rows ride along, the fourth doubles the price: K = 2 is best at 0.8."""
    speed, lengths = simulate(lambda width: 0.01 if width <= 3 else 0.03, lambda evidence, position: 0.8)
    assert max(set(lengths[-200:]), key=lengths[-200:].count) == 2
    assert speed == pytest.approx(1 + 0.8 + 0.64, rel=0.1)


@pytest.mark.parametrize("rate", [0.0, 0.05])
@pytest.mark.parametrize("cost", [flat, proportional], ids=["flat", "proportional"])
@pytest.mark.parametrize("tokens", [200, 3000])
def test_hopeless_drafts_cost_under_three_percent(rate, cost, tokens):
    speed, _ = simulate(cost, lambda evidence, position: rate, tokens)
    assert speed > 0.97


def test_a_backend_whose_rows_cost_full_price_is_left_alone():
    speed, _ = simulate(proportional, lambda evidence, position: 0.9, verify_width=1)
    assert speed > 0.97


def test_classes_of_drafts_are_judged_apart():
    """Short matches are noise, long ones nearly always right."""
    speed, _ = simulate(
        lambda width: 0.01 * (1 + 0.15 * (width - 1)),
        lambda evidence, position: 0.95 if evidence >= 8 else 0.05,
        evidence=lambda rng: 16 if rng.random() < 0.5 else 2,
    )
    assert speed > 1.4


def test_a_change_for_the_better_is_noticed():
    policy = DraftLength(8, 7)
    slow, _ = simulate(flat, lambda evidence, position: 0.0, policy=policy)
    assert policy.paused
    fast, _ = simulate(flat, lambda evidence, position: 0.95, policy=policy)
    assert slow > 0.97
    assert fast > 2
    assert not policy.paused


def test_a_change_for_the_worse_is_noticed():
    policy = DraftLength(8, 7)
    simulate(flat, lambda evidence, position: 0.95, policy=policy)
    speed, _ = simulate(flat, lambda evidence, position: 0.0, policy=policy)
    assert speed > 0.97


def test_an_expensive_drafter_is_not_even_asked_when_it_loses():
    policy = DraftLength(8, 7)
    speed, _ = simulate(flat, lambda evidence, position: 0.1, draft_seconds=0.005, policy=policy)
    assert speed > 0.97
    assert policy.paused
    assert "no draft has been verified yet" in policy.why_paused()


def test_the_figures_behind_a_pause_are_measured_ones():
    policy = DraftLength(8, 7)
    policy.record_step(1, 0.01)
    policy.record_draft(1, 0.263)
    assert policy.paused
    assert policy.why_paused() == "263 ms lost in this reply; no draft has been verified yet"
    policy.record_step(2, 0.012)
    policy.record_verified(0, 1, 0, 0.012)
    policy.record_verified(0, 2, 1, 0.012)
    policy.record_verified(0, 2, 2, 0.012)
    assert policy.why_paused().endswith(
        "; 2 of 3 first draft tokens accepted; a verify step of two costs 1.20x a single one"
    )


def test_an_expensive_drafter_that_pays_is_used():
    speed, _ = simulate(flat, lambda evidence, position: 0.9, draft_seconds=0.001)
    assert speed > 1.8


def test_one_preempted_step_changes_nothing():
    policy = DraftLength(8, 7)
    for _ in range(9):
        policy.record_step(1, 0.01)
    policy.record_step(1, 1.0)
    assert policy.cost(1) == 0.01


def test_a_width_never_measured_is_scaled_from_the_nearest():
    policy = DraftLength(4, 7)
    policy.record_step(1, 0.01)
    assert 0.01 < policy.cost(4) < 0.013
    assert policy.cost(5) > 0.02  # a second pass
    policy.record_step(4, 0.03)
    assert policy.cost(3) == pytest.approx(0.03, rel=0.1)


def test_nothing_is_drafted_before_a_single_step_is_known():
    policy = DraftLength(8, 7)
    assert policy.ask() == 0
    policy.record_step(1, 0.01)
    assert policy.ask() == 7
