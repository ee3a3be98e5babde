"""The thread that owns the engine: it loads, decodes and measures, one job after the other.

The thread never touches the screen: it puts what happens into `outbox`, which the screen drains at its own pace.
Posting a message per token was measured to lag 7 s behind at 600 tok/s; a drained queue does not lag (0.04 s).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from engine.errors import FlintError
from engine.events import Event, Finished, Usage
from flint_tui.engine_door import ChatEngine, ChatTurn, OpenEngine, TurnOptions
from flint_tui.live import EngineFacts


@dataclass(frozen=True)
class Loading:
    """An engine is being opened, or compiles a kernel in the middle of a job; what is going on, in a few words."""

    text: str


@dataclass(frozen=True)
class Loaded:
    """An engine is open, its facts have changed, or what `Loading` told of in the middle of a job is over."""

    facts: EngineFacts


@dataclass(frozen=True)
class LoadFailed:
    """No model is open now. error: one line. hint: what to do."""

    error: str
    hint: str


@dataclass(frozen=True)
class ReplyEvent:
    """A decoder event of the reply with this number."""

    reply: int
    event: Event


@dataclass(frozen=True)
class JobDone:
    """A job that was run with `run` has ended. error: one line, "" if it went well."""

    name: str
    error: str = ""


Outcome = Loading | Loaded | LoadFailed | ReplyEvent | JobDone
Job = Callable[[], None]


class EngineThread:
    """Jobs in, outcomes out. `busy` is true from the moment a job is given until its last outcome was put."""

    def __init__(self, open_engine: OpenEngine) -> None:
        self.outbox: SimpleQueue[Outcome] = SimpleQueue()
        self.engine: ChatEngine | None = None
        self._open_engine = open_engine
        self._said = False  # something since the last Loaded
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._cancel = threading.Event()
        self._pending = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="flint-engine", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._pending > 0

    def load(self, model: str | None) -> None:
        """Open a model (None: the default). The one that is open is closed first, as both may not fit; if the new one
        cannot be opened, it is opened again."""

        def job() -> None:
            before = ""
            if self.engine is not None:
                before = self.engine.facts.identifier
                self.engine.close()
                self.engine = None
            self._open(model)
            if self.engine is None and before and before != model:
                self._open(before)

        self._give(job)

    def _open(self, model: str | None) -> None:
        self.outbox.put(Loading(f"loading {model}" if model else "loading"))
        try:
            self.engine = self._open_engine(model, self._say)
            self._loaded(self.engine)
        except Exception as error:  # whatever an engine raises must not end the app
            self.outbox.put(LoadFailed(_one_line(error), getattr(error, "hint", "")))

    def _say(self, text: str) -> None:
        self._said = True
        self.outbox.put(Loading(text))

    def _loaded(self, engine: ChatEngine) -> None:
        self._said = False
        self.outbox.put(Loaded(engine.facts))

    def _over(self) -> None:
        """What was said in the middle of a job has passed."""
        if self._said and self.engine is not None:
            self._loaded(self.engine)

    def reply(self, number: int, messages: Sequence[ChatTurn], options: TurnOptions) -> threading.Event:
        """Decode a reply; returns the event that cancels it."""
        cancel = self._cancel = threading.Event()

        def job() -> None:
            finished = False
            try:
                if self.engine is None:
                    raise FlintError("No model is open", "choose one with the model switcher")
                facts = self.engine.facts
                for event in self.engine.reply(messages, options, cancel):
                    self._over()
                    self.outbox.put(ReplyEvent(number, event))
                    finished = isinstance(event, Finished)
                if not finished:
                    raise FlintError("The decoder stopped without saying why")
                if self.engine.facts is not facts:
                    self._loaded(self.engine)
            except Exception as error:
                hint = getattr(error, "hint", "")
                self._over()
                failed = Finished("error", Usage(0, 0, 0, 0.0, 0.0, 0.0, 0, 0), _one_line(error), hint)
                self.outbox.put(ReplyEvent(number, failed))

        self._give(job)
        return cancel

    def run(self, name: str, work: Callable[[ChatEngine, threading.Event], None]) -> threading.Event:
        """Run anything else that needs the engine to itself (a benchmark); returns the event that cancels it."""
        cancel = self._cancel = threading.Event()

        def job() -> None:
            error = ""
            try:
                if self.engine is None:
                    raise FlintError("No model is open", "choose one with the model switcher")
                work(self.engine, cancel)
            except Exception as failure:
                error = _one_line(failure)
            self._over()
            self.outbox.put(JobDone(name, error))

        self._give(job)
        return cancel

    def drain(self) -> list[Outcome]:
        """Everything that happened since the last call."""
        outcomes: list[Outcome] = []
        try:
            while True:
                outcomes.append(self.outbox.get_nowait())
        except Empty:
            return outcomes

    def cancel(self) -> None:
        """Stop the running reply or benchmark."""
        self._cancel.set()

    def close(self, timeout: float = 0.3) -> bool:
        """Cancel, end the thread, close the engine. False when it is still busy (loading, or inside a long step)."""
        self._cancel.set()
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _give(self, job: Job) -> None:
        with self._lock:
            self._pending += 1
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._pending -= 1
        if self.engine is not None:
            self.engine.close()


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, FlintError) else f"{type(error).__name__}: {text}"
