"""An engine that replays a script: what the app's tests, snapshots and measurements decode with."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.events import Event, Finished, Prefilled, PrefillProgress, Tokens, Usage
from engine.sampling import Sampling
from flint_tui.engine_door import ChatTurn, TurnOptions
from flint_tui.live import EngineFacts

FACTS = EngineFacts(
    model="smollm2-135m-instruct",
    backend="fake, 2 threads",
    context_size=2048,
    weight_bytes=80_000_000,
    peak_gb_s=25.0,
    peak_source="measured streaming read",
    verify_width=5,
    sampling=Sampling(),
)
WEIGHT_BYTES = 80_000_000
KV_BYTES = 4_000_000
ANSWER = "The capital of France is **Paris**.\n\nIt lies on the *Seine*, and has been the capital since 987."


def pieces(text: str) -> list[str]:
    """Something like tokens: a word with the space before it."""
    return re.findall(r"\s*\S+|\s+$", text)


def usage(tokens: int, seconds: float, prompt: int, steps: int, accepted: int = 0, drafted: int = 0) -> Usage:
    moved = steps * (WEIGHT_BYTES + KV_BYTES)
    verify_steps = drafted // 2
    return Usage(prompt, tokens, 0, 0.05, 0.048, seconds, steps, moved, verify_steps, accepted, drafted)


@dataclass
class FakeEngine:
    """Replies with `answers` in turn. step_s: seconds a decode step says it took. pause_s: how long it really sleeps.

    hold: tokens are released only as `release` is called, so that a test decides when decoding goes on.
    fail_after: raise after so many tokens.
    """

    answers: list[str] = field(default_factory=lambda: [ANSWER])
    step_s: float = 0.005
    pause_s: float = 0.0
    hold: bool = False
    fail_after: int | None = None
    facts: EngineFacts = FACTS
    asked: list[tuple[list[ChatTurn], TurnOptions]] = field(default_factory=list)
    closed: bool = False
    _texts: dict[int, str] = field(default_factory=dict)
    _permits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def release(self, tokens: int) -> None:
        self._permits.release(tokens)

    def piece(self, token_id: int) -> str:
        return self._texts[token_id]

    def close(self) -> None:
        self.closed = True

    def _wait(self, cancel: threading.Event) -> bool:
        """Wait for the next step's turn; True when cancelled."""
        if self.hold:
            while not self._permits.acquire(timeout=0.005):
                if cancel.is_set():
                    return True
        elif self.pause_s:
            time.sleep(self.pause_s)
        return cancel.is_set()

    def reply(self, messages: Sequence[ChatTurn], options: TurnOptions, cancel: threading.Event) -> Iterator[Event]:
        self.asked.append((list(messages), options))
        words = pieces(self.answers[(len(self.asked) - 1) % len(self.answers)])
        ids = [len(self._texts) + i for i in range(len(words))]
        self._texts.update(zip(ids, words, strict=True))
        prompt = sum(len(pieces(message["content"])) for message in messages) + 8
        yield PrefillProgress(prompt, prompt)
        yield Prefilled(prompt, 0, 0.05)
        width = 3 if options.mode == "speculative" else 1
        done, steps, accepted, drafted_total, seconds = 0, 0, 0, 0, 0.0
        while done < len(words):
            if self._wait(cancel):
                yield Finished("cancelled", usage(done, seconds, prompt, steps, accepted, drafted_total))
                return
            if self.fail_after is not None and done >= self.fail_after:
                raise RuntimeError("the device\nfell over")
            first = done == 0
            count = 1 if first else min(width, len(words) - done)
            chunk = slice(done, done + count)
            drafted = 0 if first or width == 1 else 2
            mask = () if not drafted else tuple(i < count - 1 for i in range(count))
            yield Tokens(
                tuple(ids[chunk]),
                "".join(words[chunk]),
                0.0 if first else self.step_s,
                0 if first else WEIGHT_BYTES + KV_BYTES,
                steps=0 if first else 1,
                verify_steps=int(drafted > 0),
                drafted=drafted,
                accepted=count - 1 if drafted else 0,
                position_drafted=(1, 1) if drafted else (),
                position_accepted=(int(count > 1), int(count > 2)) if drafted else (),
                draft_mask=mask,
            )
            done += count
            steps += 0 if first else 1
            drafted_total += drafted
            accepted += count - 1 if drafted else 0
            seconds += 0.0 if first else self.step_s
        yield Finished("stop", usage(done, seconds, prompt, steps, accepted, drafted_total))
