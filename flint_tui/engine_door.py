"""The one place where the app touches the engine: what it asks for, and the real engine behind it.

Tests put a fake behind the same protocol.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.events import Event
from engine.sampling import Sampling
from flint_tui.live import EngineFacts, Mode

ChatTurn = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": ...}: what chat templates take


@dataclass(frozen=True)
class TurnOptions:
    """How the next reply is decoded."""

    mode: Mode = "single"
    drafter: str = "auto"
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None


class ChatEngine(Protocol):
    """An opened model. Only the engine thread calls it, but for `piece`."""

    facts: EngineFacts

    def reply(self, messages: Sequence[ChatTurn], options: TurnOptions, cancel: threading.Event) -> Iterator[Event]:
        """Decode one reply; ends with Finished. Never slower than one step after `cancel` is set."""
        ...

    def piece(self, token_id: int) -> str:
        """The text of one token, for tinting."""
        ...

    def close(self) -> None: ...
