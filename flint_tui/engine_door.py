"""The one place where the app touches the engine: what it asks for, and the real engine behind it.

Tests put a fake behind the same protocol.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from engine.events import Event, Finished
from engine.progress import Progress
from flint_tui.live import EngineFacts, Mode

if TYPE_CHECKING:
    from engine.loading import Engine
    from engine.sampling import Sampling
    from flint_tui.options import ChatOptions

ChatTurn = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": ...}: what chat templates take


@dataclass(frozen=True)
class TurnOptions:
    """How the next reply is decoded. sampling: None until a model is open, which brings its own. fixed_seed: keep the
    sampling's seed; else every reply draws a new one."""

    mode: Mode = "single"
    drafter: str = "auto"
    sampling: Sampling | None = None
    fixed_seed: bool = False
    max_tokens: int | None = None


class ChatEngine(Protocol):
    """An opened model. Only the engine thread calls it, but for `piece`."""

    facts: EngineFacts  # may be replaced after a reply

    def reply(self, messages: Sequence[ChatTurn], options: TurnOptions, cancel: threading.Event) -> Iterator[Event]:
        """Decode one reply; ends with Finished. Never slower than one step after `cancel` is set."""
        ...

    def piece(self, token_id: int) -> str:
        """The text of one token, for tinting."""
        ...

    def close(self) -> None: ...


Say = Callable[[str], None]  # told in a few words what loading is doing
OpenEngine = Callable[[str | None, Say], ChatEngine]


class OpenedEngine:
    """The real engine."""

    def __init__(self, engine: Engine) -> None:
        manifest = engine.model.manifest
        backend = engine.backend
        peak = engine.bandwidth()
        self._engine = engine
        self._pieces: dict[int, str] = {}
        self.facts = EngineFacts(
            model=engine.name,
            variant=manifest.variant,
            identifier=f"{manifest.name}/{manifest.variant}",
            backend=backend.description,
            context_size=backend.context_size,
            weight_bytes=backend.ledger(1, 0).weight_bytes,
            peak_gb_s=peak.gb_s if peak else None,
            peak_source=peak.source if peak else "",
            verify_width=backend.verify_width,
            gpu=backend.name == "cuda",
            sampling=engine.default_sampling,
        )

    def reply(self, messages: Sequence[ChatTurn], options: TurnOptions, cancel: threading.Event) -> Iterator[Event]:
        from engine.loading import ReplyOptions

        wanted = ReplyOptions(options.mode, options.drafter, options.sampling, options.max_tokens)
        for event in self._engine.reply(messages, wanted, cancel):
            yield event
            if isinstance(event, Finished) and event.reason != "cancelled":
                self._look_at_peak(event.usage.bandwidth_gb_s)

    def _look_at_peak(self, seen_gb_s: float | None) -> None:
        """Decoding that reads faster than the measured peak says that the peak was measured badly: once more."""
        if seen_gb_s and self.facts.peak_gb_s and seen_gb_s > self.facts.peak_gb_s:
            peak = self._engine.bandwidth(seen_gb_s)
            if peak is not None:
                self.facts = replace(self.facts, peak_gb_s=peak.gb_s, peak_source=peak.source)

    def piece(self, token_id: int) -> str:
        text = self._pieces.get(token_id)
        if text is None:
            text = self._pieces[token_id] = self._engine.tokenizer.decode([token_id])
        return text

    def close(self) -> None:
        self._engine.close()


def opener(options: ChatOptions) -> OpenEngine:
    """Opens models as `flint chat` was asked to: on that backend, with so many threads and so much context."""

    def open_model(model: str | None, say: Say) -> ChatEngine:
        from engine.loading import open_engine

        told = ""

        def report(progress: Progress) -> None:
            nonlocal told
            share = f" {progress.done / progress.total:.0%}" if progress.total else ""
            text = f"{progress.stage}ing{share}" if progress.stage != "verify" else f"verifying{share}"
            if text != told:
                told = text
                say(text)

        return OpenedEngine(
            open_engine(model, options.backend, options.threads, options.context, notify=say, progress=report)
        )

    return open_model


def turn_options(options: ChatOptions) -> TurnOptions:
    """What was asked for on the command line; the model's own sampling joins when it is open."""
    return TurnOptions(
        mode=options.mode,
        drafter=options.drafter,
        fixed_seed=options.seed is not None,
        max_tokens=options.max_tokens,
    )
