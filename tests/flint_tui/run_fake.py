"""Runs the real app on a real terminal with a paced fake engine: for the terminal tests and for measure_app.py.

    python -m tests.flint_tui.run_fake '{"rate": 600, "tokens": 3000}'

Options: rate (tokens per second, 0 as fast as it goes), tokens per reply, words (the script), prefill_s and load_s
(native work that does not look at the cancel flag), packing (a model can be packed, which never ends), noise (write to
descriptors 1 and 2 as a C library would), buggy (F1 raises), model (no fake, but this packed model on the CPU, greedy),
resume, log (a file that gets one JSON object a line: what
happened, and when on the system's monotonic clock).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import flint_tui
from engine.events import Event, Finished, Prefilled, Tokens, Usage
from engine.progress import Progress
from flint_tui.engine_door import ChatEngine, ChatTurn, TurnOptions, opener
from flint_tui.model_shelf import Model
from flint_tui.options import ChatOptions
from tests.flint_tui.fake_engine import FACTS

WORDS = ("flint", " strikes", " steel", ",", " a", " spark", " falls", " on", " tinder", ".\n\n")


class PacedEngine:
    """A decoder whose every step is native work of 1 / rate seconds with the interpreter's lock released.

    It does not catch up: a step that starts late ends late, so whatever the screen costs the decoder is seen.
    """

    facts = replace(FACTS, backend="paced fake", context_size=1 << 20)

    def __init__(self, options: dict[str, Any], log: Any) -> None:
        self.rate = options.get("rate", 200)
        self.tokens = options.get("tokens", 1 << 20)
        self.prefill_s = options.get("prefill_s", 0.0)
        self.noise = options.get("noise", False)
        self.words = tuple(options.get("words", WORDS))
        self.log = log

    def reply(self, messages: Sequence[ChatTurn], options: TurnOptions, cancel: threading.Event) -> Iterator[Event]:
        started = time.monotonic()
        time.sleep(self.prefill_s)
        yield Prefilled(8, 0, max(self.prefill_s, 1e-3))
        step = 1 / self.rate if self.rate else 0.0
        done = 0
        first = last = time.monotonic()
        while done < self.tokens and not cancel.is_set():
            if step:
                time.sleep(step)
            now = time.monotonic()
            if self.noise and done % 50 == 0:
                os.write(1, b"native noise on 1\n")
                os.write(2, b"native noise on 2\n")
            yield Tokens((done,), self.words[done % len(self.words)], now - last, 84_000_000, steps=int(done > 0))
            last = now
            done += 1
            if done % 20 == 0:
                self.log("progress", tokens=done)
        reason = "cancelled" if cancel.is_set() else "stop"
        self.log("reply", started=started, first=first, last=last, tokens=done, reason=reason)
        yield Finished(reason, Usage(8, done, 0, 0.001, 0.001, last - first, max(0, done - 1), done * 84_000_000))

    def piece(self, token_id: int) -> str:
        return self.words[token_id % len(self.words)]

    def close(self) -> None:
        pass


class TimedEngine:
    """A real engine that decodes `tokens` tokens greedily, and logs when the first and the last came."""

    def __init__(self, options: dict[str, Any], log: Any) -> None:
        self._engine = opener(ChatOptions(backend="cpu"))(options["model"], lambda text: None)
        self.facts = self._engine.facts
        self.piece = self._engine.piece
        self.close = self._engine.close
        self.tokens = options.get("tokens")
        self.log = log

    def reply(self, messages: Sequence[ChatTurn], options: TurnOptions, cancel: threading.Event) -> Iterator[Event]:
        assert self.facts.sampling is not None
        greedy = replace(self.facts.sampling, temperature=0.0)
        times: list[float] = []
        for event in self._engine.reply(messages, replace(options, sampling=greedy, max_tokens=self.tokens), cancel):
            if isinstance(event, Tokens):
                times += [time.monotonic()] * len(event.ids)
            yield event
        self.log("reply", first=times[0], last=times[-1], tokens=len(times), reason="stop")


class EndlessShelf:
    """One model whose packing does not look at the cancel flag."""

    def models(self) -> list[Model]:
        return [Model("endless", "endless", "3 B", 6_000_000_000, False)]

    def pack(self, identifier: str, report: Callable[[Progress], None], cancel: threading.Event) -> str:
        report(Progress("download", "file", 1, 2))
        time.sleep(600)
        return identifier


def main() -> int:
    options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    file = open(options["log"], "a", encoding="utf-8") if "log" in options else None  # noqa: SIM115

    def log(what: str, **values: Any) -> None:
        if file is not None:
            file.write(json.dumps({"what": what, "at": time.monotonic(), **values}) + "\n")
            file.flush()

    def open_engine(model: str | None, say: Any) -> ChatEngine:
        time.sleep(options.get("load_s", 0.0))
        engine = TimedEngine(options, log) if "model" in options else PacedEngine(options, log)
        log("loaded")
        return engine

    from flint_tui.app import FlintApp, run

    class BuggyApp(FlintApp):
        CSS_PATH = Path(flint_tui.__file__).parent / "flint.tcss"

        def action_help(self) -> None:
            raise RuntimeError("a bug in the app")

    shelf = EndlessShelf() if options.get("packing") else None
    kind = BuggyApp if options.get("buggy") else FlintApp
    code = run(kind(open_engine, resume=options.get("resume"), shelf=shelf))
    log("ended")
    return code


if __name__ == "__main__":
    sys.exit(main())
