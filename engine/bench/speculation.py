"""Single pass against speculation on the same prompts: whether the answers are equal, and which is faster by how much.

Both modes answer every prompt in every round, in alternating order, in one process: what drifts, drifts for both. Only
decoding is timed (the first token belongs to the prefill; both find the prompt in the cache).
"""

from __future__ import annotations

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

Watch = Callable[[int, int], None]


@dataclass
class Pair:
    """One prompt's answers. single, speculative: decode seconds by round."""

    domain: str
    tokens: int = 0
    equal: bool = True
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
    def ratio(self) -> float:
        return self.rate(self.speculative) / self.rate(self.single)


@dataclass(frozen=True)
class DomainResult:
    """Prompts of one kind together. single, speculative: tokens / seconds, in tok/s. comparison: paired by prompt (None
    below five). worst: the prompt on which speculation does worst. draft_share: of the speculative seconds."""

    domain: str
    prompts: int
    equal: int
    tokens: int
    single: float
    speculative: float
    comparison: Comparison | None
    worst: float
    acceptance: Summary
    draft_share: float


def measure(
    engine: Engine,
    prompts: Sequence[Prompt],
    options: ReplyOptions,
    rounds: int,
    watch: Watch = lambda done, total: None,
) -> list[Pair]:
    """Answer every prompt in both modes, `rounds` times. options: of the speculative mode. Raises BackendError."""
    pairs = [Pair(prompt.domain) for prompt in prompts]
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
            pair.equal &= single.reply == speculative.reply
            pair.single.append(single.decode_s)
            # Where the texts differ (sampling, or a near tie), compare the time of as many tokens.
            scale = max(1, pair.tokens - 1) / max(1, len(speculative.reply) - 1)
            pair.speculative.append(speculative.decode_s * scale)
            pair.draft_s += speculative.draft_s * scale
            pair.acceptance.append(speculative.acceptance)
            done += 1
            watch(done, rounds * len(prompts))
    return pairs


def results(pairs: Sequence[Pair]) -> list[DomainResult]:
    """By domain, in order of appearance, and "total" where there are several."""
    domains = list(dict.fromkeys(pair.domain for pair in pairs))
    rows = [_result(domain, [pair for pair in pairs if pair.domain == domain]) for domain in domains]
    return [*rows, _result("total", pairs)] if len(domains) > 1 else rows


def result_json(row: DomainResult) -> dict[str, Any]:
    """The row as stable JSON names."""
    return {
        "domain": row.domain,
        "prompts": row.prompts,
        "equal": row.equal,
        "tokens": row.tokens,
        "single_tok_s": row.single,
        "speculative_tok_s": row.speculative,
        "ratio": row.comparison.ratio if row.comparison else None,
        "interval_95": [row.comparison.low, row.comparison.high] if row.comparison else None,
        "worst_ratio": row.worst,
        "acceptance_length": row.acceptance.length if row.acceptance.steps else None,
        "accepted_per_position": list(row.acceptance.per_position),
        "verify_steps": row.acceptance.steps,
        "draft_share": row.draft_share,
    }


def _result(domain: str, pairs: Sequence[Pair]) -> DomainResult:
    single = [pair.rate(pair.single) for pair in pairs]
    speculative = [pair.rate(pair.speculative) for pair in pairs]
    decoded = sum(pair.tokens - 1 for pair in pairs)
    return DomainResult(
        domain=domain,
        prompts=len(pairs),
        equal=sum(pair.equal for pair in pairs),
        tokens=decoded,
        single=decoded / sum(median(pair.single) for pair in pairs),
        speculative=decoded / sum(median(pair.speculative) for pair in pairs),
        comparison=compare(speculative, single) if len(pairs) >= ROUNDS else None,
        worst=min(pair.ratio for pair in pairs),
        acceptance=summarise([counts for pair in pairs for counts in pair.acceptance]),
        draft_share=sum(pair.draft_s for pair in pairs) / sum(sum(pair.speculative) for pair in pairs),
    )
