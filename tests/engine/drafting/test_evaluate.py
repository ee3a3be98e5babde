"""Counts and intervals with known answers."""

from __future__ import annotations

import numpy as np
import pytest

from engine.drafting.evaluate import Acceptance, summarise, walk


def test_walk_counts_steps_and_positions():
    # Reply tokens at 3..9. Newest 3 accepts 2 of 4, newest 6 none, newest 7 all that is left.
    lengths = np.zeros(12, np.int64)
    lengths[2], lengths[5], lengths[6] = 2, 0, 4
    assert walk(lengths, 3, 10, 4) == Acceptance(3, (3, 2, 1, 0), (2, 2, 0, 0))


def test_walk_with_nothing_accepted_is_one_step_a_token():
    result = walk(np.zeros(20, np.int64), 4, 12, 3)
    assert result.steps == 7
    assert result.length == 1.0
    assert result.tested[0] == 7


def test_a_reply_of_one_token_needs_no_step():
    assert walk(np.zeros(4, np.int64), 2, 3, 4).steps == 0


def test_summary_pools_tokens_not_sequences():
    rows = [Acceptance(10, (10, 5), (5, 5)), Acceptance(30, (30, 0), (0, 0)), Acceptance(0, (0, 0), (0, 0))]
    summary = summarise(rows)
    assert summary.length == pytest.approx(1 + 10 / 40)
    assert summary.per_position == pytest.approx((5 / 40, 1.0))
    assert (summary.steps, summary.sequences) == (40, 2)
    assert summary.low == pytest.approx(1.0)
    assert summary.high == pytest.approx(2.0)


def test_interval_covers_the_truth_about_95_times_in_100():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        rows = []
        for _ in range(40):
            steps = int(rng.integers(20, 60))
            accepted = int(rng.binomial(steps, 0.6))
            rows.append(Acceptance(steps, (steps,), (accepted,)))
        summary = summarise(rows, seed=trial, resamples=400)
        hits += summary.low <= 1.6 <= summary.high
    assert 180 <= hits <= 198
