from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.errors import BackendError, UsageError
from engine.sampling import Sampling, philox4x32, probabilities, sample, uniform
from tests.engine.sampling_cases import Case, cases, choose

INF = float("inf")
NAN = float("nan")


# Known answers of Random123 1.14.0 (kat_vectors, "philox 4x32 10")
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    assert philox4x32(counter, key) == answer  # type: ignore[arg-type]


def test_uniform_is_the_first_word_of_philox() -> None:
    seed = 0xA4093822_299F31D0
    word = philox4x32((7, 0, 0, 0), (0x299F31D0, 0xA4093822))[0]
    assert uniform(seed, 7) == (word + 0.5) / 2**32
    assert 0.0 < uniform(0, 0) < 1.0


def test_uniform_is_uniform() -> None:
    draws = np.array([uniform(42, n) for n in range(20000)])
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, 0.1 %


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_chosen_id(case: Case) -> None:
    before = case.logits.copy()
    assert sample(case.logits, case.sampling, case.history) == case.expected
    assert np.array_equal(case.logits, before), "the caller's logits were changed"


def test_the_cases_are_worth_their_name() -> None:
    assert len(cases()) > 100
    assert sum(case.expected != int(case.logits.argmax()) for case in cases()) > 40
    assert len({str(case) for case in cases()}) == len(cases())


@settings(max_examples=300, deadline=None)
@given(
    logits=hnp.arrays(np.float32, st.integers(1, 50), elements=st.integers(-20, 20).map(lambda i: np.float32(i / 4))),
    temperature=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    top_k=st.integers(0, 60),
    top_p=st.sampled_from([0.0, 0.123, 0.5, 0.987, 1.0]),
    min_p=st.sampled_from([0.0, 0.0321, 0.7, 1.0]),
    penalty=st.sampled_from([0.5, 1.0, 1.7]),
    data=st.data(),
)
def test_any_settings_agree_with_the_plain_definition(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, data: st.DataObject
) -> None:
    history = tuple(data.draw(st.lists(st.integers(0, len(logits) - 1), max_size=12)))
    sampling = Sampling(temperature, top_k, top_p, min_p, penalty, 5, seed=data.draw(st.integers(0, 2**64 - 1)))
    expected, margin = choose(logits, sampling, history)
    if margin > 1e-9:
        assert sample(logits, sampling, history) == expected
    distribution = probabilities(logits, sampling, history)
    assert distribution.dtype == np.float64
    assert distribution.shape == logits.shape
    assert distribution.sum() == pytest.approx(1.0, abs=1e-12)
    assert distribution[sample(logits, sampling, history)] > 0


def test_probabilities_are_what_is_drawn() -> None:
    logits = np.array([1.0, 2.0, 0.5, 3.0, -1.0, 2.5], np.float32)
    sampling = Sampling(temperature=0.9, top_k=5, top_p=0.97, min_p=0.02, seed=11)
    counts = np.zeros(6)
    for n in range(5000):
        counts[sample(logits, sampling, range(n))] += 1
    expected = probabilities(logits, sampling, []) * 5000
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 18.5  # 4 degrees of freedom, 0.1 %


def test_probabilities_by_hand() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))

    def kept(**options: float) -> list[float]:
        return probabilities(logits, Sampling(temperature=1.0, **options), []).round(6).tolist()  # type: ignore[arg-type]

    assert kept() == [0.1, 0.4, 0.2, 0.3]
    assert kept(top_k=2) == [0, 0.571429, 0, 0.428571]
    assert kept(top_p=0.65) == [0, 0.571429, 0, 0.428571]
    assert kept(top_p=0.75) == [0, 0.444444, 0.222222, 0.333333]
    assert kept(min_p=0.6) == [0, 0.571429, 0, 0.428571]
    # top_p counts what top_k kept: 0.4 of 0.7 is enough for 0.5, though it is not half of everything.
    assert kept(top_k=2, top_p=0.5) == [0, 1, 0, 0]
    assert probabilities(logits, Sampling(), []).tolist() == [0, 1, 0, 0]


def test_the_penalty_counts_an_id_once_and_forgets_beyond_the_window() -> None:
    logits = np.array([2.0, -2.0, 1.0], np.float32)
    sampling = Sampling(temperature=1.0, repeat_penalty=2.0, repeat_window=3)
    expected = np.exp([1.0, -4.0, 1.0])
    assert probabilities(logits, sampling, [0, 1, 1]) == pytest.approx(expected / expected.sum())
    assert probabilities(logits, sampling, [2, 0, 1, 1]) == pytest.approx(expected / expected.sum())
    assert sample(logits, Sampling(repeat_penalty=3.0), [0, 0]) == 2


def test_a_forbidden_token_is_never_drawn() -> None:
    logits = np.full(2000, -np.inf, np.float32)
    logits[[3, 700]] = 0.0
    drawn = {sample(logits, Sampling(temperature=1.0, seed=5), range(n)) for n in range(100)}
    assert drawn == {3, 700}


def test_the_same_seed_and_place_give_the_same_token() -> None:
    logits = np.zeros(1000, np.float32)
    sampling = Sampling(temperature=1.0, seed=9)
    assert [sample(logits, sampling, range(n)) for n in range(20)] == [
        sample(logits, sampling, range(n)) for n in range(20)
    ]
    assert len({sample(logits, sampling, range(n)) for n in range(20)}) > 15


@pytest.mark.parametrize(
    "options", [Sampling(), Sampling(temperature=1.0, top_k=3), Sampling(temperature=1.0, min_p=0.1)]
)
@pytest.mark.parametrize("values", [[1.0, NAN, 2.0], [NAN] * 3, [-INF] * 3, [1.0, INF, 2.0]])
def test_unusable_logits_are_a_backend_error(options: Sampling, values: list[float]) -> None:
    logits = np.array(values, np.float32)
    for function in (sample, probabilities):
        with pytest.raises(BackendError, match=r"^the model produced no usable logits \(largest: (nan|-?inf)\)$"):
            function(logits, options, [])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, NAN, INF]),
        ("top_k", [-1]),
        ("top_p", [-0.1, 1.1, NAN]),
        ("min_p", [-0.1, 1.1, NAN]),
        ("repeat_penalty", [0.0, -1.0, INF, NAN, 1e-320, 0.0099, 100.1, 1e308]),
        ("repeat_window", [-1]),
        ("seed", [-1, 2**64]),
    ],
)
def test_a_value_out_of_range_is_a_usage_error(name: str, values: list[float]) -> None:
    for value in values:
        with pytest.raises(UsageError) as caught:
            Sampling(**{name: value})  # type: ignore[arg-type]
        assert str(caught.value) == f"{name.replace('_', '-')} is {value}"
        assert caught.value.hint.startswith(f"{name.replace('_', '-')} must be ")


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e30, 1e300])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    distribution = probabilities(np.array([1.0, 3.0, 2.0], np.float32), Sampling(temperature=temperature), [])
    assert distribution.tolist() == ([0, 1, 0] if temperature < 1 else pytest.approx([1 / 3] * 3))
    assert math.isclose(distribution.sum(), 1.0)


@pytest.mark.parametrize("penalty", [0.01, 100.0])
def test_extreme_penalties_stay_finite_and_quiet(penalty: float) -> None:
    logits = np.array([1e4, -1e4, 2.0], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a user would see them on the terminal
        for temperature in (0.0, 1.0):
            assert math.isclose(
                probabilities(logits, Sampling(temperature, repeat_penalty=penalty), [0, 1, 2]).sum(), 1.0
            )
