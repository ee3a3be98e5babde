"""`flint bench spec`: known answers from synthetic seconds, and both modes on a scripted backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.bench.speculation import NEAR_TIE, Pair, gap, measure, pair_json, result_json, results
from engine.drafting.evaluate import Acceptance
from engine.drafting.prompts import Prompt
from engine.loading import ReplyOptions
from engine.sampling import Sampling
from tests.fake_backend import FakeBackend, hashed_logits
from tests.fake_bench import fake_engine

GREEDY = ReplyOptions(drafter="ngram", sampling=Sampling(), max_tokens=40)


def pair(domain: str, tokens: int, single: list[float], speculative: list[float], equal: bool = True) -> Pair:
    gap = None if equal else 0.01
    return Pair(domain, tokens, equal, gap, single, speculative, 0.1, [Acceptance(10, (10, 5), (5, 5))])


def test_rates_are_of_the_median_round_and_pool_by_time() -> None:
    pairs = [
        pair("chat", 101, [1.0, 9.0, 1.0], [0.5, 0.5, 7.0]),
        pair("code", 301, [2.0, 2.0, 2.0], [3.0, 3.0, 3.0], equal=False),
    ]
    rows = results(pairs)
    assert [row.domain for row in rows] == ["chat", "code", "total"]
    chat, code, every = (row.timing for row in rows)
    assert chat is not None
    assert code is not None
    assert every is not None
    assert (chat.single, chat.speculative, chat.worst) == pytest.approx((100.0, 200.0, 2.0))
    assert (code.single, code.speculative, code.worst) == pytest.approx((150.0, 100.0, 2 / 3))
    assert (every.prompts, every.tokens) == (2, 400)
    assert (every.single, every.speculative) == pytest.approx((400 / 3, 400 / 3.5))
    assert chat.comparison is None  # two prompts say nothing about the next one
    assert every.acceptance.length == pytest.approx(2.0)
    assert every.draft_share == pytest.approx(0.2 / (0.5 + 0.5 + 7 + 9))


def test_answers_are_counted_whether_or_not_they_can_be_timed() -> None:
    def parted(gap: float | None, tokens: int = 4) -> Pair:
        return Pair("chat", tokens, gap is None, gap)

    (row,) = results([parted(None), parted(NEAR_TIE / 2), parted(NEAR_TIE), parted(math.inf), Pair("chat", 4, False)])
    assert row.timing is None
    told = result_json(row)
    assert [told[name] for name in ("prompts", "equal", "near_ties", "different")] == [5, 1, 1, 3]
    assert (row.answers.largest_gap, told["largest_gap"]) == (
        math.inf,
        None,
    )  # one ended, the other went on
    (row,) = results([parted(None), parted(0.003), parted(0.001)])
    assert (row.answers.different, row.answers.largest_gap) == (0, 0.003)
    assert results([parted(None)])[0].answers.largest_gap is None


def test_the_ratio_is_paired_by_prompt() -> None:
    pairs = [pair("all", 11, [float(i)], [i / 1.25]) for i in range(1, 8)]
    (row,) = results(pairs)
    assert row.timing is not None
    seen = row.timing.comparison
    assert seen is not None
    assert (seen.ratio, seen.low, seen.high) == pytest.approx((1.25,) * 3)
    assert seen.verdict == "faster"
    told = result_json(row)
    assert told["ratio"] == pytest.approx(1.25)
    assert told["interval_95"] == pytest.approx([1.25, 1.25])


def test_both_modes_answer_every_prompt_in_every_round(tmp_path: Path) -> None:
    engine = fake_engine(tmp_path, FakeBackend(hashed_logits(259, repeats=0.9), context_size=2048, chunk=64))
    prompts = [Prompt("chat", "one"), Prompt("code", "two two two two")]
    seen: list[tuple[int, int]] = []
    pairs = measure(engine, prompts, GREEDY, 2, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [pair.domain for pair in pairs] == ["chat", "code"]
    for measured in pairs:
        assert measured.equal
        assert len(measured.single) == len(measured.speculative) == len(measured.acceptance) == 2
        assert measured.tokens == 40
    assert sum(counts.steps for measured in pairs for counts in measured.acceptance) > 0


class Rounding(FakeBackend):
    """At every token the second likeliest is `apart` logits behind, and steps of a few tokens take it for the first."""

    def __init__(self, apart: float) -> None:
        likely = hashed_logits(259, repeats=0.9)

        def logits(tokens: Sequence[int]) -> np.ndarray:
            row = likely(tokens)
            second, first = np.argsort(row)[-2:]
            row[second] = row[first] - apart
            return row

        super().__init__(logits, context_size=2048, chunk=64)

    def step(self, tokens: Sequence[int], **options):
        output = super().step(tokens, **options)
        if 1 < len(tokens) < 17 and len(output.logits) > 1:
            for row in output.logits:
                second, first = np.argsort(row)[-2:]
                row[[first, second]] = row[[second, first]]
        return output


@pytest.mark.parametrize(("apart", "near_tie"), [(0.01, True), (0.5, False)], ids=["a near tie", "a real difference"])
def test_answers_that_part_are_measured_there(tmp_path: Path, apart: float, near_tie: bool) -> None:
    engine = fake_engine(tmp_path, Rounding(apart))
    prompts = [Prompt("chat", "two two two two"), Prompt("chat", "one one one one")]
    pairs = measure(engine, prompts, replace(GREEDY, draft_tokens=4), 2)
    assert len(pairs[0].single) == 2
    for measured in pairs:
        assert not measured.equal
        assert measured.gap == pytest.approx(apart, abs=1e-5)
        assert measured.near_tie == near_tie
        assert pair_json(measured)["gap"] == measured.gap
    (row,) = results(pairs)
    assert (row.answers.near_ties, row.answers.different) == ((2, 0) if near_tie else (0, 2))


def test_the_gap_is_seen_from_the_likeliest_of_all(tmp_path: Path) -> None:
    """Two wrong tokens that are near each other are no near tie."""
    row = np.zeros(259, np.float32)
    row[[5, 6, 7]] = 9.0, 1.0, 1.001
    engine = fake_engine(tmp_path, FakeBackend(lambda tokens: row, context_size=64, chunk=4))
    prompt = list(range(10, 20))
    assert gap(engine, prompt, (5, 5, 6, 5), (5, 5, 7, 5)) == pytest.approx(8.0)
    backend = engine.backend
    assert isinstance(backend, FakeBackend)
    assert backend.widths == [4, 4, 1, 1, 1, 1]  # the prompt in chunks, its last token and what is shared one by one
    assert backend.position == 0
    assert gap(engine, prompt, (5, 5), (5, 5, 6)) == math.inf


def test_drawn_replies_may_differ(tmp_path: Path) -> None:
    engine = fake_engine(tmp_path, Rounding(0.5))
    options = replace(GREEDY, sampling=Sampling(temperature=1.0), draft_tokens=4)
    (measured,) = measure(engine, [Prompt("chat", "two two two two")], options, 1)
    assert (measured.equal, measured.gap) == (False, None)


def test_short_replies_are_compared_and_not_timed(tmp_path: Path) -> None:
    engine = fake_engine(tmp_path, FakeBackend(context_size=2048, chunk=64))
    options = ReplyOptions(drafter="ngram", sampling=Sampling(), max_tokens=7)
    (measured,) = measure(engine, [Prompt("chat", "one")], options, 1)
    assert measured.equal
    assert not measured.timeable
