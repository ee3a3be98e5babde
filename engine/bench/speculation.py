"""Single pass against speculation on the same prompts: whether the answers are equal, and which is faster by how much.

Both modes answer every prompt in every round, in alternating order, in one process: what drifts, drifts for both. Only
decoding is timed (the first token belongs to the prefill; both find the prompt in the cache).

Passes of different widths round differently, so at a near tie two right answers part and are different texts from there
on. Where greedy answers differ, the backend is asked what its single steps make of the first token that does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from engine.drafting.evaluate import Acceptance, Summary, summarise
from engine.drafting.live import Answered, answer
from engine.drafting.prompts import Prompt
from engine.loading import Engine, ReplyOptions
from engine.statistics import ROUNDS, Comparison, compare

DEPTH = 16  # draft positions counted
SHORTEST = 8  # tokens; the rate of a shorter reply is mostly the clock's grain
# Logits. One backend with the same weights: only the order of its sums differs, by some 5e-3 at worst on an H200.
NEAR_TIE = 2e-2

Watch = Callable[[int, int], None]


@dataclass
class Pair:
    """One prompt's answers. equal: in every round. gap: the largest of its rounds (see `gap`; None where no greedy
    answers differed). single, speculative: decode seconds by round."""

    domain: str
    tokens: int = 0
    equal: bool = True
    gap: float | None = None
    single: list[float] = field(default_factory=list)
    speculative: list[float] = field(default_factory=list)
    draft_s: float = 0.0  # of the speculative seconds, all rounds together
    acceptance: list[Acceptance] = field(default_factory=list)

    def rate(self, seconds: list[float]) -> float:
        """tok/s of the median round; the first token is not decoded."""
        return (self.tokens - 1) / median(seconds)

    @property
    def timeable(self) -> bool:
        return self.tokens >= SHORTEST

    @property
    def near_tie(self) -> bool:
        return self.gap is not None and self.gap < NEAR_TIE

    @property
    def ratio(self) -> float:
        return self.rate(self.speculative) / self.rate(self.single)


@dataclass(frozen=True)
class Answers:
    """How many prompts were answered alike. different: those that are neither equal nor a near tie. largest_gap: in
    logits, near ties included; None where no greedy answers differ."""

    prompts: int
    equal: int
    near_ties: int
    largest_gap: float | None

    @property
    def different(self) -> int:
        return self.prompts - self.equal - self.near_ties


@dataclass(frozen=True)
class Timing:
    """Prompts with replies long enough to be timed. single, speculative: tokens / seconds, in tok/s. comparison: paired
    by prompt (None below five). worst: the prompt on which speculation does worst. draft_share: of the speculative
    seconds."""

    prompts: int
    tokens: int
    single: float
    speculative: float
    comparison: Comparison | None
    worst: float
    acceptance: Summary
    draft_share: float


@dataclass(frozen=True)
class DomainResult:
    """Prompts of one kind together. timing: None where every reply was too short."""

    domain: str
    answers: Answers
    timing: Timing | None


def measure(
    engine: Engine,
    prompts: Sequence[Prompt],
    options: ReplyOptions,
    rounds: int,
    watch: Watch = lambda done, total: None,
) -> list[Pair]:
    """Answer every prompt in both modes, `rounds` times. options: of the speculative mode. Raises BackendError."""
    pairs = [Pair(prompt.domain) for prompt in prompts]
    greedy = (options.sampling or engine.default_sampling).greedy
    done = 0
    for turn in range(rounds):
        for number, (prompt, pair) in enumerate(zip(prompts, pairs, strict=True)):
            first = (turn + number) % 2
            # Both modes must find the prompt in the cache: a prefill and a single step round differently.
            list(answer(engine, [prompt], replace(options, mode="single", max_tokens=1), DEPTH))
            answers: dict[str, Answered] = {}
            for mode in ("single", "speculative")[:: -1 if first else 1]:
                (answers[mode],) = answer(engine, [prompt], replace(options, mode=mode), DEPTH)  # type: ignore[arg-type]
            single, speculative = answers["single"], answers["speculative"]
            pair.tokens = len(single.reply)
            if single.reply != speculative.reply:
                pair.equal = False
                if greedy:
                    pair.gap = max(pair.gap or 0.0, gap(engine, single.prompt, single.reply, speculative.reply))
            pair.single.append(single.decode_s)
            # Where the texts differ (sampling, or a near tie), compare the time of as many tokens.
            scale = max(1, pair.tokens - 1) / max(1, len(speculative.reply) - 1)
            pair.speculative.append(speculative.decode_s * scale)
            pair.draft_s += speculative.draft_s * scale
            pair.acceptance.append(speculative.acceptance)
            done += 1
            watch(done, rounds * len(prompts))
    return pairs


def gap(engine: Engine, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> float:
    """Two greedy replies part: by single steps over what they share, how many logits the less likely of their next
    tokens is below the likeliest token of all. Infinite where one reply ends and the other goes on.

    The cache is empty afterwards.
    """
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if shared is None:
        return math.inf
    backend, decoder = engine.backend, engine.decoder
    decoder.truncate(0)
    head, chunk = prompt[:-1], backend.prefill_chunk()
    for start in range(0, len(head), chunk):
        backend.step(head[start : start + chunk], logits="last")
    *between, last = (prompt[-1], *one[:shared])
    for token in between:
        backend.step((token,), logits="last")
    row = backend.step((last,), logits="last").logits[0]
    decoder.truncate(0)
    return float(row.max() - min(row[one[shared]], row[other[shared]]))


def results(pairs: Sequence[Pair]) -> list[DomainResult]:
    """By domain, in order of appearance, and "total" where there are several."""
    domains = list(dict.fromkeys(pair.domain for pair in pairs))
    rows = [_result(domain, [pair for pair in pairs if pair.domain == domain]) for domain in domains]
    return [*rows, _result("total", pairs)] if len(domains) > 1 else rows


def result_json(row: DomainResult) -> dict[str, Any]:
    """The row as stable JSON names; figures of time are null where nothing could be timed."""
    answers, timing = row.answers, row.timing
    seen = timing.comparison if timing else None
    told = {
        "domain": row.domain,
        "prompts": answers.prompts,
        "equal": answers.equal,
        "near_ties": answers.near_ties,
        "different": answers.different,
        "largest_gap": finite(answers.largest_gap),
        "timed": timing.prompts if timing else 0,
    }
    return told | {
        "tokens": timing.tokens if timing else 0,
        "single_tok_s": timing.single if timing else None,
        "speculative_tok_s": timing.speculative if timing else None,
        "ratio": seen.ratio if seen else None,
        "interval_95": [seen.low, seen.high] if seen else None,
        "worst_ratio": timing.worst if timing else None,
        "acceptance_length": timing.acceptance.length if timing and timing.acceptance.steps else None,
        "accepted_per_position": list(timing.acceptance.per_position) if timing else [],
        "verify_steps": timing.acceptance.steps if timing else 0,
        "draft_share": timing.draft_share if timing else None,
    }


def pair_json(pair: Pair) -> dict[str, Any]:
    """One prompt's samples."""
    return {
        "domain": pair.domain,
        "tokens": pair.tokens,
        "equal": pair.equal,
        "near_tie": pair.near_tie,
        "gap": finite(pair.gap),
        "single": pair.single,
        "speculative": pair.speculative,
        "draft_s": pair.draft_s,
    }


def finite(gap: float | None) -> float | None:
    """JSON has no infinity: null, beside a count of `different`."""
    return None if gap is None or math.isinf(gap) else gap


def _result(domain: str, pairs: Sequence[Pair]) -> DomainResult:
    answers = Answers(
        prompts=len(pairs),
        equal=sum(pair.equal for pair in pairs),
        near_ties=sum(pair.near_tie for pair in pairs),
        largest_gap=max((pair.gap for pair in pairs if pair.gap is not None), default=None),
    )
    return DomainResult(domain, answers, _timing([pair for pair in pairs if pair.timeable]))


def _timing(pairs: Sequence[Pair]) -> Timing | None:
    if not pairs:
        return None
    single = [pair.rate(pair.single) for pair in pairs]
    speculative = [pair.rate(pair.speculative) for pair in pairs]
    decoded = sum(pair.tokens - 1 for pair in pairs)
    return Timing(
        prompts=len(pairs),
        tokens=decoded,
        single=decoded / sum(median(pair.single) for pair in pairs),
        speculative=decoded / sum(median(pair.speculative) for pair in pairs),
        comparison=compare(speculative, single) if len(pairs) >= ROUNDS else None,
        worst=min(pair.ratio for pair in pairs),
        acceptance=summarise([counts for pair in pairs for counts in pair.acceptance]),
        draft_share=sum(pair.draft_s for pair in pairs) / sum(sum(pair.speculative) for pair in pairs),
    )
