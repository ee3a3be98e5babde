"""Arms side by side: the gate first, then rounds in which every arm runs once in a fresh process, A B C A B C ...

A difference is told as the ratio of paired samples with its 95 % interval (engine/statistics.py), beside the bytes a
token of both, so that a quantisation's win is not sold as a runtime's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.bench.arms import Arm
from engine.bench.clocks import snapshot
from engine.bench.gate import Gate, Reference, check
from engine.errors import BackendError, printable
from engine.files.strict_json import Record
from engine.machine.hardware import Bandwidth
from engine.statistics import ROUNDS, Comparison, compare, summarise

Launch = Callable[[Arm, dict[str, Any]], dict[str, Any]]
Watch = Callable[[str], None]


@dataclass
class Result:
    """One arm's outcome. state: "measured", "missing", "failed" (its process) or "wrong" (the gate). samples: decode
    tok/s by round; prefill: tok/s by round (none where the arm cannot say). place: whose memory it reads, "cpu" or
    "gpu"."""

    arm: Arm
    state: str = "measured"
    problem: str = ""
    gate: Gate | None = None
    device: str = ""
    place: str = "cpu"
    versions: dict[str, str] = field(default_factory=dict)
    bytes_per_token: float | None = None
    acceptance_length: float | None = None
    samples: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)

    def drop(self, state: str, problem: str) -> None:
        self.state, self.problem, self.samples, self.prefill = state, problem, [], []


@dataclass(frozen=True)
class Outcome:
    """base: the arm that the others are compared with (None: none was measured). rounds: those that ended. machine: its
    state before each round. peaks: "cpu" and "gpu" -> the bandwidth that 100 % MBU stands for there. stopped_of: the
    rounds that were asked for, where Ctrl-C came before their end; else 0."""

    results: list[Result]
    base: str | None
    rounds: int
    request: dict[str, Any]
    machine: list[dict[str, Any]]
    peaks: dict[str, Bandwidth] = field(default_factory=dict)
    stopped_of: int = 0

    def measured(self) -> list[Result]:
        return [result for result in self.results if result.state == "measured"]

    def comparison(self, result: Result) -> Comparison | None:
        """The base against this arm; None for the base itself, an arm that was not measured, or too few rounds."""
        base = next((other for other in self.results if other.arm.name == self.base), None)
        if base is None or result is base or result.state != "measured" or self.rounds < ROUNDS:
            return None
        return compare(base.samples, result.samples)


def run(
    arms: Sequence[Arm],
    request: dict[str, Any],
    rounds: int,
    launch: Launch,
    against: str | None = None,
    weights: Callable[[Arm], float | None] = lambda arm: None,
    watch: Watch = lambda text: None,
    tell: Watch = lambda text: None,
    answered: Watch = lambda text: None,
) -> Outcome:
    """request: prompt, tokens, threads, context, model, gguf (engine/bench/arms.py). against: the base arm; without it
    the first that was measured. weights: bytes a token of arms that do not count their own.
    watch: told what is about to run. tell: told each round's rates when it has ended, so that a killed run leaves them.
    answered: told every answer, what it took, and about how long the rest will.

    An arm that fails or answers wrongly is kept with its reason. Ctrl-C after the first round ends the comparison with
    the rounds that were complete. Raises BackendError where the reference itself fails.
    """
    results = [Result(arm, "missing" if arm.missing else "measured", arm.missing) for arm in arms]
    contestants = [result for result in results if result.state == "measured"]
    pace = _Pace(launch, watch)
    if contestants:
        reference = _reference(request, pace)
        answered(f"reference{pace}")
        for result in contestants:
            pace.what = "gate: "
            _gate(result, pace(result.arm, request), reference)
            answered(f"gate: {result.arm.name}: {result.gate or result.problem or 'not told its tokens'}{pace}")
    machine: list[dict[str, Any]] = []
    complete = 0
    try:
        while complete < rounds:
            machine.append(snapshot())
            pace.what = f"round {complete + 1} of {rounds}: "
            racing = [result for result in contestants if result.state == "measured"]
            for place, result in enumerate(racing, 1):
                _sample(result, pace(result.arm, request), request)
                left = pace.left(racing, place, rounds - complete - 1)
                answered(f"{pace.what}{_rate(result)}{pace}{left}")
            complete += 1
            if contestants:
                tell(f"round {complete} of {rounds}: {', '.join(map(_rate, sorted(contestants, key=_unmeasured)))}")
    except KeyboardInterrupt:
        if not complete:
            raise
        del machine[complete:]
        for result in contestants:
            del result.samples[complete:], result.prefill[complete:]
    for result in contestants:
        if result.bytes_per_token is None:
            result.bytes_per_token = weights(result.arm)
    measured = [result.arm.name for result in contestants if result.state == "measured"]
    base = against if against in measured else next(iter(measured), None)
    return Outcome(results, base, complete, request, machine, stopped_of=rounds if complete < rounds else 0)


class _Pace:
    """Launches, and keeps how long each arm's last process took."""

    def __init__(self, launch: Launch, watch: Watch) -> None:
        self.what = ""  # before the arm's name in what is watched
        self._launch, self._watch = launch, watch
        self._seconds: dict[str, float] = {}
        self._last = 0.0

    def __call__(self, arm: Arm, request: dict[str, Any]) -> dict[str, Any]:
        self._watch(f"{self.what}{arm.name}")
        started = time.perf_counter()
        answer = self._launch(arm, request)
        self._last = self._seconds[arm.name] = time.perf_counter() - started
        return answer

    def __str__(self) -> str:
        return f" ({self._last:.1f} s)"

    def left(self, racing: Sequence[Result], place: int, rounds: int) -> str:
        """What is to come after the first `place` of this round and in `rounds` more; "" at the end."""
        runs = [*racing[place:], *(list(racing) * rounds)]
        seconds = sum(self._seconds[result.arm.name] for result in runs if result.state == "measured")
        if not runs:
            return ""
        return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"


def _rate(result: Result) -> str:
    """Of the last round."""
    return f"{result.arm.name} " + (f"{result.samples[-1]:.2f} tok/s" if result.samples else result.state.upper())


def _unmeasured(result: Result) -> bool:
    return not result.samples


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    arms = []
    for result in outcome.results:
        summary = summarise(result.samples) if result.samples else None
        comparison = outcome.comparison(result)
        arms.append(
            {
                "arm": result.arm.name,
                "state": result.state,
                "problem": result.problem or None,
                "note": result.arm.note or None,
                "device": result.device or None,
                "place": result.place,
                "versions": result.versions,
                "gate": asdict(result.gate) if result.gate else None,
                "avg_ts": summary.mean if summary else None,
                "stddev_ts": summary.sd if summary else None,
                "median_ts": summary.median if summary else None,
                "samples_ts": result.samples,
                "prefill_samples_ts": result.prefill,
                "bytes_per_token": result.bytes_per_token,
                "acceptance_length": result.acceptance_length,
                "base_over_this": comparison.ratio if comparison else None,
                "interval_95": [comparison.low, comparison.high] if comparison else None,
                "verdict_on_base": comparison.verdict if comparison else None,
                "claimable": comparison.claimable if comparison else None,
            }
        )
    request = {key: value for key, value in outcome.request.items() if key not in ("prompt", "model", "gguf")}
    return {
        "base": outcome.base,
        "rounds": outcome.rounds,
        "stopped_of": outcome.stopped_of or None,
        "prompt_tokens": len(outcome.request["prompt"]),
        **request,
        "arms": arms,
        "peaks": {place: asdict(peak) for place, peak in outcome.peaks.items()},
        "machine": outcome.machine,
    }


def outcome_from_json(value: dict[str, Any], where: str) -> Outcome:
    """What `outcome_json` wrote, its statistics left to be computed again. Raises CheckpointError."""
    record = Record(value, where)
    rounds, prompt = record.integer("rounds"), record.integer("prompt_tokens")
    entries = record.take("arms")
    if not isinstance(entries, list) or not 0 <= prompt <= 1 << 24:
        record.fail("arms", "expected a list")
    results = [_result_from_json(Record(entry, f"{where}: arms"), rounds) for entry in entries]
    base = record.take("base")
    if base is not None and base not in [result.arm.name for result in results if result.state == "measured"]:
        record.fail("base", "no arm of that name was measured")
    peaks = record.record("peaks")
    known = {place: _peak_from_json(peaks.record(place)) for place in peaks.remaining() if place in ("cpu", "gpu")}
    asked = record.optional_integer("stopped_of") if "stopped_of" in record.remaining() else None
    if asked is not None and not rounds < asked <= 1000:
        record.fail("stopped_of", "expected more rounds than ended")
    return Outcome(results, base, rounds, {"prompt": [0] * prompt}, [], known, asked or 0)


def _peak_from_json(record: Record) -> Bandwidth:
    gb_s, source = record.number("gb_s"), printable(record.text("source"))
    return Bandwidth(gb_s, source) if 0 < gb_s < 1e9 else record.fail("gb_s", "out of range")


def _result_from_json(record: Record, rounds: int) -> Result:
    def words(key: str) -> str:
        value = record.take(key)
        return (
            "" if value is None else printable(value) if isinstance(value, str) else record.fail(key, "expected text")
        )

    def figure(key: str) -> float | None:
        value = record.take(key)
        if value is None:
            return None
        (number,) = Record({key: [value]}, record.where).numbers(key)
        return number if 0 < number < 1e15 else record.fail(key, "out of range")

    state = words("state")
    samples, prefill = record.numbers("samples_ts"), record.numbers("prefill_samples_ts")
    if state not in ("measured", "missing", "failed", "wrong"):
        record.fail("state", "unknown")
    if len(samples) != (rounds if state == "measured" else 0) or not 1 <= rounds <= 1000:
        record.fail("samples_ts", f"{len(samples)} samples of {rounds} rounds")
    if not all(0 < sample < 1e9 for sample in (*samples, *prefill)):
        record.fail("samples_ts", "a rate is out of range")
    gate = record.optional_record("gate")
    return Result(
        Arm(words("arm"), (), gated=gate is not None, note=words("note")),
        state,
        words("problem"),
        gate=gate and _gate_from_json(gate),
        device=words("device"),
        place=words("place"),
        bytes_per_token=figure("bytes_per_token"),
        acceptance_length=figure("acceptance_length"),
        samples=list(samples),
        prefill=list(prefill),
    )


def _gate_from_json(record: Record) -> Gate:
    tie = record.take("tie")
    return Gate(
        record.boolean("passed"),
        record.integer("agreed"),
        record.integer("total"),
        None if tie is None else Record({"tie": tie}, record.where).number("tie"),
        printable(record.text("problem")),
    )


def _reference(request: dict[str, Any], launch: Launch) -> Reference:
    answer = launch(Arm("reference"), request)
    try:
        return Reference(tuple(answer["ids"]), tuple(answer["margins"]), tuple(answer["runners_up"]))
    except KeyError:
        why = answer.get("error") or answer.get("missing") or "it gave no tokens"
        raise BackendError(f"The reference failed, so nothing can be checked: {why}") from None


def _gate(result: Result, answer: dict[str, Any], reference: Reference) -> None:
    if _problem(result, answer):
        return
    result.device = str(answer.get("device", ""))
    result.place = "gpu" if answer.get("gpu") else "cpu"
    result.versions = dict(answer.get("versions", {}))
    if not result.arm.gated:
        return
    result.gate = check(answer.get("ids", []), reference)
    if not result.gate.passed:
        result.drop("wrong", result.gate.problem)


def _sample(result: Result, answer: dict[str, Any], request: dict[str, Any]) -> None:
    if _problem(result, answer):
        return
    decode, prefill = answer.get("decode_s"), answer.get("prefill_s")
    if not decode or decode <= 0:
        result.drop("failed", "it gave no time")
        return
    result.samples.append((request["tokens"] - 1) / decode)
    if prefill:
        result.prefill.append(len(request["prompt"]) / prefill)
    result.bytes_per_token = answer.get("bytes_per_token")
    result.acceptance_length = answer.get("acceptance_length")


def _problem(result: Result, answer: dict[str, Any]) -> bool:
    for key, state in (("missing", "missing"), ("error", "failed")):
        if key in answer:
            result.drop(state, str(answer[key]))
            return True
    return False
