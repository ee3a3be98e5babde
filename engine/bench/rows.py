"""llama-bench-like rows: prefill and decode of a fixed number of tokens at a depth, with every sample kept.

    pp512 @ d1024   512 prompt tokens, with 1,024 in the cache before them; tok/s over the prefill
    tg128           128 generated tokens; tok/s over the steps after the first token, which belongs to the prefill

Included: sampling (greedy) and detokenising, since a chat needs both. Not included: loading, tokenising, the screen.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.bench.workload import prompt_ids
from engine.decoder import DecodeOptions
from engine.errors import BackendError, Cancelled, UsageError
from engine.events import Finished, Tokens, Usage
from engine.loading import Engine
from engine.sampling import Sampling
from engine.statistics import Summary, percentile, summarise

Kind = Literal["pp", "tg"]
GREEDY = Sampling(temperature=0.0)
WARM_UP_TOKENS = 8
_COUNT = re.compile(r"[1-9][0-9]{0,6}")


@dataclass(frozen=True)
class Case:
    """`tokens` of prefill (pp) or decode (tg) with `depth` tokens in the cache before them."""

    kind: Kind
    tokens: int
    depth: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def positions(self) -> int:
        """Of the KV cache, at the end."""
        return self.depth + self.tokens + 2


@dataclass(frozen=True)
class Row:
    """One test's outcome. samples: tok/s of each repetition; seconds: of the same. bytes_per_token and gb_s: means over
    the repetitions, by the ledger; of a prefill None, since its bytes per token say nothing (arithmetic is its limit).
    latencies: (p50, p99) seconds a step, of events that gather steps until 10 ms are full.
    """

    test: Case
    mode: str
    samples: tuple[float, ...]
    seconds: tuple[float, ...]
    bytes_per_token: float | None = None
    gb_s: float | None = None
    latencies: tuple[float, float] | None = None
    acceptance_length: float | None = None

    @property
    def summary(self) -> Summary:
        return summarise(self.samples)


def parse_counts(text: str, option: str, zero: bool = False) -> tuple[int, ...]:
    """ "512" or "128,512" -> numbers. Raises UsageError."""
    counts = []
    for part in text.split(","):
        if not (_COUNT.fullmatch(part) or (zero and part == "0")):
            raise UsageError(f"{option} {text[:60]!r} is not a number or a list of numbers such as 128,512")
        counts.append(int(part))
    return tuple(dict.fromkeys(counts))


def plan(prompts: Sequence[int], generated: Sequence[int], depths: Sequence[int]) -> list[Case]:
    """All tests, depth by depth, prefill first; a prompt or generation of 0 tokens is none."""
    counts: dict[Kind, Sequence[int]] = {"pp": prompts, "tg": generated}
    tests = [Case(kind, n, depth) for depth in depths for kind, ns in counts.items() for n in ns if n]
    if not tests:
        raise UsageError("There is nothing to measure", "Give -p or -n a number above 0.")
    return tests


def run(
    engine: Engine,
    tests: Sequence[Case],
    repetitions: int,
    mode: Literal["single", "speculative"] = "single",
    drafter: str = "auto",
    cancel: threading.Event | None = None,
    watch: Callable[[str], None] = lambda text: None,
) -> Iterator[Row]:
    """Measure each test `repetitions` times after a warm-up. Raises BackendError, Cancelled, UsageError."""
    longest = max(tests, key=lambda test: test.positions)
    if longest.positions > engine.backend.context_size:
        raise UsageError(
            f"{longest.name} needs {longest.positions} positions, the context has {engine.backend.context_size}",
            "Measure fewer tokens, or a smaller depth.",
        )
    bench = _Bench(engine, mode, drafter, cancel or threading.Event())
    watch("warm-up")
    bench.measure(Case("tg", WARM_UP_TOKENS))
    for test in tests:
        watch(test.name)
        yield _row(test, mode, [bench.measure(test) for _ in range(repetitions)])


@dataclass(frozen=True)
class _Sample:
    usage: Usage
    latencies: tuple[float, ...]  # seconds a step, event by event


class _Bench:
    def __init__(self, engine: Engine, mode: str, drafter: str, cancel: threading.Event) -> None:
        self.engine, self.cancel = engine, cancel
        self.drafter, self.fallback = engine.drafters(drafter) if mode == "speculative" else (None, None)

    def measure(self, test: Case) -> _Sample:
        """One repetition. The depth is brought into the cache first, and kept from one repetition to the next."""
        prefill = test.kind == "pp"
        length = test.depth + (test.tokens if prefill else 1)
        prompt = prompt_ids(self.engine.tokenizer, length)
        if test.depth and self.engine.decoder.cached[: test.depth] != prompt[: test.depth]:
            self._decode(prompt[: test.depth], 1)
        self.engine.decoder.truncate(test.depth)
        return self._decode(prompt, 1 if prefill else test.tokens + 1)

    def _decode(self, prompt: list[int], max_tokens: int) -> _Sample:
        options = DecodeOptions(GREEDY, max_tokens, stop_ids=frozenset(), drafter=self.drafter, fallback=self.fallback)
        latencies: list[float] = []
        for event in self.engine.decoder.generate(prompt, options, self.cancel):
            match event:
                case Tokens() if event.steps:
                    latencies.append(event.seconds / event.steps)
                case Finished():
                    if event.reason == "error":
                        raise BackendError(event.error, event.hint)
                    if event.reason == "cancelled":
                        raise Cancelled("The benchmark was stopped")
                    return _Sample(event.usage, tuple(latencies))
                case _:
                    pass
        raise BackendError("The decoder stopped without saying why")


def _row(test: Case, mode: str, samples: Sequence[_Sample]) -> Row:
    usages = [sample.usage for sample in samples]
    if test.kind == "pp":
        rates = [usage.prefill_tok_s for usage in usages]
        seconds = [usage.prefill_s for usage in usages]
    else:
        rates = [usage.decode_tok_s for usage in usages]
        seconds = [usage.decode_s for usage in usages]
    if None in rates:
        raise BackendError(f"{test.name} took no measurable time")
    known = tuple(rate for rate in rates if rate is not None)
    if test.kind == "pp":
        return Row(test, mode, known, tuple(seconds))
    steps = [latency for sample in samples for latency in sample.latencies]
    verified = sum(usage.verify_steps for usage in usages)
    moved = sum(usage.decode_bytes for usage in usages)
    return Row(
        test,
        mode,
        known,
        tuple(seconds),
        bytes_per_token=moved / sum(usage.completion_tokens - 1 for usage in usages),
        gb_s=moved / sum(seconds) / 1e9,
        latencies=(percentile(steps, 50), percentile(steps, 99)),
        acceptance_length=1 + sum(usage.accepted for usage in usages) / verified if verified else None,
    )
