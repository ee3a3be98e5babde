"""`flint bench spec`: known answers from synthetic seconds, and both modes on a scripted backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.bench.speculation import Pair, measure, result_json, results
from engine.drafting.evaluate import Acceptance
from engine.drafting.prompts import Prompt
from engine.loading import ReplyOptions
from engine.sampling import Sampling
from tests.fake_backend import FakeBackend, hashed_logits
from tests.fake_bench import fake_engine

GREEDY = ReplyOptions(drafter="ngram", sampling=Sampling(), max_tokens=40)


def pair(domain: str, tokens: int, single: list[float], speculative: list[float], equal: bool = True) -> Pair:
    return Pair(domain, tokens, equal, single, speculative, 0.1, [Acceptance(10, (10, 5), (5, 5))])


def test_rates_are_of_the_median_round_and_pool_by_time() -> None:
    pairs = [
        pair("chat", 101, [1.0, 9.0, 1.0], [0.5, 0.5, 7.0]),
        pair("code", 301, [2.0, 2.0, 2.0], [3.0, 3.0, 3.0], equal=False),
    ]
    chat, code, every = results(pairs)
    assert (chat.single, chat.speculative, chat.worst) == pytest.approx((100.0, 200.0, 2.0))
    assert (code.single, code.speculative, code.worst) == pytest.approx((150.0, 100.0, 2 / 3))
    assert (every.domain, every.prompts, every.equal, every.tokens) == ("total", 2, 1, 400)
    assert (every.single, every.speculative) == pytest.approx((400 / 3, 400 / 3.5))
    assert chat.comparison is None  # two prompts say nothing about the next one
    assert every.acceptance.length == pytest.approx(2.0)
    assert every.draft_share == pytest.approx(0.2 / (0.5 + 0.5 + 7 + 9))


def test_the_ratio_is_paired_by_prompt() -> None:
    pairs = [pair("all", 11, [float(i)], [i / 1.25]) for i in range(1, 8)]
    (row,) = results(pairs)
    assert row.comparison is not None
    assert (row.comparison.ratio, row.comparison.low, row.comparison.high) == pytest.approx((1.25,) * 3)
    assert row.comparison.verdict == "faster"
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


def test_an_answer_that_differs_is_told(tmp_path: Path) -> None:
    class Forgetful(FakeBackend):
        """Verifying changes the first row: what a broken M-token kernel would do."""

        def step(self, tokens: Sequence[int], **options):
            output = super().step(tokens, **options)
            if 1 < len(tokens) < 17 and len(output.logits) > 1:
                output.logits[0] = np.roll(output.logits[0], 1)
            return output

    engine = fake_engine(tmp_path, Forgetful(hashed_logits(259, repeats=0.9), context_size=2048, chunk=64))
    options = replace(GREEDY, draft_tokens=4)
    (measured,) = measure(engine, [Prompt("chat", "two two two two")], options, 1)
    assert not measured.equal


def test_short_replies_are_compared_and_not_timed(tmp_path: Path) -> None:
    engine = fake_engine(tmp_path, FakeBackend(context_size=2048, chunk=64))
    options = ReplyOptions(drafter="ngram", sampling=Sampling(), max_tokens=7)
    (measured,) = measure(engine, [Prompt("chat", "one")], options, 1)
    assert measured.equal
    assert not measured.timeable
