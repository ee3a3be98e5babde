"""Counts what decoding moves and how fast: the byte ledger of a step, and the running figures behind the panels.

MBU (memory-bandwidth utilisation) = bytes of weights and KV cache moved / time / peak bandwidth. Decode only: the
first token belongs to the prefill and is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.events import Tokens

if TYPE_CHECKING:  # the screen's first paint adds up readings, and does without numpy
    from engine.backends.base import ByteLedger
    from engine.config import ModelConfig
    from engine.packed.model import PackedModel


def tensor_kind(name: str) -> str:
    """The ledger's line for a tensor: "layers.7.gate" -> "gate"; every norm -> "norm"."""
    kind = name.rsplit(".", 1)[-1]
    return "norm" if kind.endswith("norm") else kind


def packed_weight_bytes(model: PackedModel) -> dict[str, int]:
    """Stored bytes by kind (values, scales and minima), as `step_ledger` takes them."""
    sizes: dict[str, int] = {}
    for name in model.names():
        kind = tensor_kind(name)
        size = model.vector(name).nbytes if kind == "norm" else model.matrix(name).nbytes
        sizes[kind] = sizes.get(kind, 0) + size
    return sizes


def step_ledger(
    config: ModelConfig, weights: Mapping[str, int], tokens: int, position: int, *, kv_element_bytes: int
) -> ByteLedger:
    """The bytes of one step of `tokens` tokens that starts at `position`.

    weights: bytes by kind. The step reads each kind once, whole, but of "embed" only the rows of its tokens; where
    the embedding is tied, the head reads it whole ("head" need not be listed).
    kv_element_bytes: bytes of one stored key or value element.
    """
    from engine.backends.base import ByteLedger

    read = dict(weights)
    table = read["embed"]
    read["embed"] = table // config.vocab_size * tokens
    if config.tie_word_embeddings:
        read.setdefault("head", table)
    per_position = 2 * config.num_layers * config.kv_size * kv_element_bytes
    return ByteLedger(weights=read, kv_read=per_position * (position + tokens), kv_written=per_position * tokens)


@dataclass(frozen=True)
class Reading:
    """Sums over some decode steps, and the rates that follow from them (None where nothing was counted)."""

    tokens: int = 0
    seconds: float = 0.0
    bytes: int = 0
    steps: int = 0
    verify_steps: int = 0
    accepted: int = 0
    drafted: int = 0
    position_drafted: tuple[int, ...] = ()
    position_accepted: tuple[int, ...] = ()
    draft_seconds: float = 0.0

    @classmethod
    def of(cls, events: Iterable[Tokens]) -> Reading:
        """The sum of decode steps; events without a step (a reply's first token) are skipped."""
        tokens = bytes_moved = steps = verify_steps = accepted = drafted = 0
        seconds = draft_seconds = 0.0
        position_drafted: list[int] = []
        position_accepted: list[int] = []
        for event in events:  # one loop: the screen adds up a hundred events a frame
            if not event.steps:
                continue
            tokens += len(event.ids)
            seconds += event.seconds
            bytes_moved += event.bytes
            steps += event.steps
            verify_steps += event.verify_steps
            accepted += event.accepted
            drafted += event.drafted
            draft_seconds += event.draft_seconds
            if event.position_drafted:
                _add_by_position(position_drafted, event.position_drafted)
                _add_by_position(position_accepted, event.position_accepted)
        return cls(
            tokens, seconds, bytes_moved, steps, verify_steps, accepted, drafted,
            tuple(position_drafted), tuple(position_accepted), draft_seconds,
        )  # fmt: skip

    def __add__(self, other: Reading) -> Reading:
        return Reading(
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
            bytes=self.bytes + other.bytes,
            steps=self.steps + other.steps,
            verify_steps=self.verify_steps + other.verify_steps,
            accepted=self.accepted + other.accepted,
            drafted=self.drafted + other.drafted,
            position_drafted=_sum_by_position((self.position_drafted, other.position_drafted)),
            position_accepted=_sum_by_position((self.position_accepted, other.position_accepted)),
            draft_seconds=self.draft_seconds + other.draft_seconds,
        )

    @property
    def tok_s(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def bytes_per_token(self) -> float | None:
        return self.bytes / self.tokens if self.tokens else None

    @property
    def bandwidth_gb_s(self) -> float | None:
        """GB/s (1e9 bytes) of weights and KV cache."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else None

    def mbu(self, peak_gb_s: float) -> float | None:
        """Share of `peak_gb_s` that was used, 0..1 (above 1 only where a cache served what the ledger counts)."""
        bandwidth = self.bandwidth_gb_s
        return None if bandwidth is None else bandwidth / peak_gb_s

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / verify steps; None when no draft was verified."""
        return 1 + self.accepted / self.verify_steps if self.verify_steps else None

    @property
    def accepted_per_position(self) -> tuple[float, ...]:
        """By draft position: accepted / tested there."""
        return tuple(a / d for a, d in zip(self.position_accepted, self.position_drafted, strict=True))


class Meter:
    """Adds up the decode steps of a reply. The decoder's clock counts, not the reader's: when an event is read, or
    drawn, changes nothing."""

    def __init__(self, window_s: float = 1.0) -> None:
        self.window_s = window_s
        self.total = Reading()
        self._recent: deque[Tokens] = deque()
        self._recent_s = 0.0

    def add(self, event: Tokens) -> None:
        self.total += Reading.of((event,))
        self._recent.append(event)
        self._recent_s += event.seconds
        while len(self._recent) > 1 and self._recent_s - self._recent[0].seconds >= self.window_s - 1e-9:
            self._recent_s -= self._recent.popleft().seconds

    @property
    def live(self) -> Reading:
        """The last events that together span the window (fewer at the start of a reply)."""
        return Reading.of(self._recent)


def _add_by_position(sums: list[int], counts: tuple[int, ...]) -> None:
    sums.extend([0] * (len(counts) - len(sums)))
    for position, count in enumerate(counts):
        sums[position] += count


def _sum_by_position(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    sums: list[int] = []
    for row in counts:
        _add_by_position(sums, row)
    return tuple(sums)
