"""How far a download or a pack has come, and how it is stopped: shared by whatever takes long before decoding."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine.errors import Cancelled

Stage = Literal["wait", "download", "verify", "unpack", "pack"]


@dataclass(frozen=True)
class Progress:
    """State of one stage. `done` and `total` count bytes over all of the stage's items; total is 0 while unknown.

    wait: another process is packing the same model. verify: digests are being checked.
    """

    stage: Stage
    item: str  # file or tensor at hand
    done: int = 0
    total: int = 0


Report = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """A Report for callers that do not listen."""


def check_cancelled(cancel: threading.Event | None) -> None:
    """Raise Cancelled once the event is set. Called between chunks of a few MB at most."""
    if cancel is not None and cancel.is_set():
        raise Cancelled("Cancelled; nothing that was packed before has changed", "run it again to continue")
