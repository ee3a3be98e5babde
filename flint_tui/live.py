"""Folds decoder events into the figures that the panels show, and keeps the last figures of both modes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from engine.events import Finished, Prefilled, PrefillProgress, Tokens
from engine.meter import Meter, Reading

if TYPE_CHECKING:
    from engine.sampling import Sampling

Mode = Literal["single", "speculative"]
Phase = Literal["idle", "prefill", "decode"]
NOTHING = Reading()
HISTORY = 60  # points of the sparkline


@dataclass(frozen=True)
class EngineFacts:
    """What does not change while an engine is open.

    identifier: what opens the same model again. peak_gb_s: the bandwidth that 100 % MBU stands for; peak_source: what
    that is. weight_bytes: read by every step. verify_width: tokens that one pass verifies at about the price of one
    (1: speculation never pays here). sampling: what the model recommends.
    """

    model: str
    backend: str
    context_size: int
    identifier: str = ""
    variant: str = ""
    weight_bytes: int = 0
    peak_gb_s: float | None = None
    peak_source: str = ""
    verify_width: int = 1
    gpu: bool = False
    sampling: Sampling | None = None


@dataclass(frozen=True)
class Figures:
    """A reply's figures up to now. live: the last second; total: the whole reply (its first token left out)."""

    mode: Mode = "single"
    phase: Phase = "idle"
    live: Reading = NOTHING
    total: Reading = NOTHING
    history: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_done: int = 0
    prefill_total: int = 0
    ttft_s: float | None = None
    prefill_s: float | None = None
    completion_tokens: int = 0

    @property
    def shown(self) -> Reading:
        """What the panels show: the last second while decoding, the whole reply afterwards."""
        return self.live if self.phase == "decode" else self.total

    @property
    def prefill_tok_s(self) -> float | None:
        seconds = self.prefill_s or self.ttft_s
        tokens = self.prompt_tokens - self.cached_tokens
        return tokens / seconds if seconds and tokens else None

    @property
    def context_used(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass
class Live:
    """Feed it events; read `figures`."""

    figures: Figures = field(default_factory=Figures)
    last: dict[Mode, Figures] = field(default_factory=dict)
    _meter: Meter = field(default_factory=Meter)
    _history: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def start(self, mode: Mode) -> None:
        self._meter = Meter()
        self._history.clear()
        self.figures = Figures(mode=mode, phase="prefill")

    def feed(self, event: PrefillProgress | Prefilled | Tokens | Finished) -> None:
        match event:
            case PrefillProgress(done, total):
                self._change(prefill_done=done, prefill_total=total)
            case Prefilled():
                self._change(
                    phase="decode",
                    prompt_tokens=event.tokens + event.cached,
                    cached_tokens=event.cached,
                    ttft_s=event.seconds,
                )
            case Tokens():
                self._meter.add(event)
                self._change(
                    live=self._meter.live,
                    total=self._meter.total,
                    completion_tokens=self.figures.completion_tokens + len(event.ids),
                )
            case Finished(_, usage):
                self._change(
                    phase="idle",
                    prompt_tokens=usage.prompt_tokens or self.figures.prompt_tokens,
                    prefill_s=usage.prefill_s or None,
                    ttft_s=usage.ttft_s or self.figures.ttft_s,
                )
                if self.figures.total.tokens:
                    self.last[self.figures.mode] = self.figures

    def sample(self) -> None:
        """Add a point to the sparkline: call it at a steady rate while decoding."""
        rate = self.figures.live.tok_s
        if self.figures.phase == "decode" and rate is not None:
            self._history.append(rate)
            self._change(history=tuple(self._history))

    def _change(self, **changes: object) -> None:
        self.figures = replace(self.figures, **changes)  # type: ignore[arg-type]


def merge(events: Sequence[Tokens]) -> list[Tokens]:
    """Consecutive decode events as one, so that a fast decoder costs the screen no more than a slow one.

    A reply's first token stays apart: it took no decode step, and would be counted as one.
    """
    first = [event for event in events if not event.steps]
    rest = [event for event in events if event.steps]
    if len(rest) < 2:
        return list(events)
    reading = Reading.of(rest)
    merged = Tokens(
        ids=tuple(i for event in rest for i in event.ids),
        text="".join(event.text for event in rest),
        seconds=reading.seconds,
        bytes=reading.bytes,
        steps=reading.steps,
        verify_steps=reading.verify_steps,
        accepted=reading.accepted,
        drafted=reading.drafted,
        position_drafted=reading.position_drafted,
        position_accepted=reading.position_accepted,
        draft_seconds=reading.draft_seconds,
    )
    return [*first, merged]
