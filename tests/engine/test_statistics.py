from __future__ import annotations

import math

import numpy as np
import pytest

from engine.statistics import Comparison, compare, percentile, summarise


def test_a_summary_by_hand() -> None:
    summary = summarise([4.0, 1.0, 3.0, 2.0])
    assert (summary.count, summary.mean, summary.median, summary.low, summary.high) == (4, 2.5, 2.5, 1.0, 4.0)
    assert summary.sd == pytest.approx(math.sqrt(5 / 3))
    assert summarise([7.0]).sd == 0.0
    assert summarise([1.0, 2.0, 30.0]).median == 2.0


def test_percentiles_by_hand() -> None:
    assert [percentile([10.0, 20.0, 30.0], q) for q in (0, 25, 50, 99, 100)] == pytest.approx([10, 15, 20, 29.8, 30])


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [math.inf]])
def test_bad_samples(samples: list[float]) -> None:
    for function in (summarise, lambda values: percentile(values, 50)):
        with pytest.raises(ValueError, match=r"no samples|not finite"):
            function(samples)


def test_a_constant_ratio_has_no_spread_however_the_machine_drifts() -> None:
    machine = np.array([100, 35, 80, 120, 60, 20, 90, 110.0])
    result = compare(1.3 * machine, machine)
    assert (result.ratio, result.low, result.high) == pytest.approx((1.3, 1.3, 1.3))
    assert result.verdict == "faster"
    assert compare(machine, 1.3 * machine).verdict == "slower"
    assert compare(machine, machine) == Comparison(8, 1.0, 1.0, 1.0, "equal")


@pytest.mark.parametrize(
    ("ratio", "noise", "verdict"),
    [
        (1.50, 0.05, "faster"),
        (1.08, 0.01, "faster"),
        (1.04, 0.001, "equal"),  # beyond doubt, and too small to matter
        (0.97, 0.005, "equal"),
        (0.80, 0.05, "slower"),
        (1.20, 0.60, "undecided"),  # large, and not certain
        (1.00, 0.30, "undecided"),
        (1.049, 0.02, "undecided"),  # certainly above 1, perhaps above 1.05
    ],
)
def test_verdicts(ratio: float, noise: float, verdict: str) -> None:
    rng = np.random.default_rng(3)
    errors = rng.standard_normal(12)
    errors = (errors - errors.mean()) / errors.std()  # so that the samples have exactly this ratio and noise
    machine = rng.uniform(50, 150, 12)
    result = compare(machine * ratio * np.exp(noise * errors), machine)
    assert result.ratio == pytest.approx(ratio)
    assert result.verdict == verdict
    expected = 1.96 * noise / math.sqrt(12)
    assert math.log(result.high / result.low) / 2 == pytest.approx(expected, rel=0.15)


def test_turning_the_comparison_round_turns_the_interval() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.uniform(90, 130, 10), rng.uniform(80, 120, 10)
    there, back = compare(a, b), compare(b, a)
    assert back.ratio == pytest.approx(1 / there.ratio)
    assert (back.low, back.high) == pytest.approx((1 / there.high, 1 / there.low))


def test_the_same_samples_give_the_same_interval() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.uniform(90, 110, 9), rng.uniform(90, 110, 9)
    assert compare(a, b) == compare(a, b)
    assert compare(a, b).low != compare(a, b, seed=1).low


@pytest.mark.parametrize(("rounds", "share"), [(5, 0.83), (10, 0.90), (30, 0.94)])
def test_how_many_intervals_hold_the_truth(rounds: int, share: float) -> None:
    """The figures of compare's docstring: 200 synthetic comparisons whose true ratio is 1.1."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        machine = rng.uniform(50, 150, rounds)
        result = compare(machine * 1.1 * np.exp(0.1 * rng.standard_normal(rounds)), machine)
        held += result.low <= 1.1 <= result.high
    assert held / 200 == pytest.approx(share, abs=0.04)


def test_what_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="5 and 6 samples do not make pairs"):
        compare([1.0] * 5, [1.0] * 6)
    with pytest.raises(ValueError, match="a comparison needs 5 rounds, not 4"):
        compare([1.0] * 4, [1.0] * 4)
    with pytest.raises(ValueError, match="a rate is not positive"):
        compare([1.0, 1.0, 0.0, 1.0, 1.0], [1.0] * 5)


def test_a_claim_needs_ten_rounds() -> None:
    assert not compare([2.0] * 9, [1.0] * 9).claimable
    assert compare([2.0] * 10, [1.0] * 10).claimable


def test_a_comparison_in_words() -> None:
    words = "x1.200, 95 % interval 1.100 to 1.300, 10 rounds"
    assert str(Comparison(10, 1.2, 1.1, 1.3, "faster")) == f"20.0% faster ({words})"
    assert str(Comparison(10, 1.2, 1.1, 1.3, "undecided")) == f"undecided ({words})"
    assert str(Comparison(5, 0.99, 0.97, 1.01, "equal")).startswith("equal within 5% (x0.990")
