"""What the chat shows: everything that the engine thread says goes to the transcript and the panels."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.screen import Screen

from engine.events import Finished, Note, Prefilled, PrefillProgress, Tokens
from flint_tui.actions import ACTIONS, slash_action
from flint_tui.decode_thread import JobDone, Loaded, LoadFailed, Loading, ReplyEvent
from flint_tui.give_way import give_way
from flint_tui.live import EngineFacts, merge
from flint_tui.painting import PatchCompositor
from flint_tui.session import Session, footer_of
from flint_tui.text import markdown
from flint_tui.text.document import Document
from flint_tui.text.safety import printable
from flint_tui.widgets.composer import Composer
from flint_tui.widgets.entry import Entry
from flint_tui.widgets.key_line import KeyLine
from flint_tui.widgets.live_strip import LiveStrip
from flint_tui.widgets.queue_line import QueueLine
from flint_tui.widgets.sidebar import Sidebar
from flint_tui.widgets.status_line import ModeToggle, StatusLine
from flint_tui.widgets.transcript import Transcript
from flint_tui.widgets.welcome import Welcome

if TYPE_CHECKING:
    from engine.sampling import Sampling
    from flint_tui.app import FlintApp

TICK_S = 1 / 30
DRAIN_S = 1 / 15  # between two updates of the screen
# Of a core's time, what may go into the screen while a reply runs: a decoder of 2,000 tok/s is a quarter slower while
# Python paints, as painting holds the interpreter's lock (tests/flint_tui/measure_app.py).
SCREEN_SHARE = 1 / 15
SLOWEST_S = 1 / 4  # but the screen is brought up to date this often on the slowest machine
PANELS_S = 1 / 4


class ChatView(Screen[None]):
    """Transcript, composer, status line, panels. What keys do is in chat_screen.py."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-flat"), (10, "-tiny"), (26, "-short"), (36, "-tall"), (40, "-high")]  # noqa: RUF012
    app: FlintApp  # type: ignore[assignment]

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._compositor = PatchCompositor()
        self.session = session
        self.facts: EngineFacts | None = None
        self.load_failure: LoadFailed | None = None  # why no model is open
        self._sampled: str | None = None  # the model that the sampling settings were made for
        self.engine_state = ""
        self.reply_entry: Entry | None = None
        self.editing: int | None = None  # index of the prompt that is being edited
        self._next_drain = 0.0  # perf_counter() before which the screen stays as it is
        self._next_panels = 0.0
        self._cpu = 0.0  # thread_time() at the last drain

    def compose(self) -> ComposeResult:
        yield StatusLine(id="status")
        with Horizontal(id="body"):
            with Vertical(id="talk"):
                yield Welcome(id="welcome")
                yield Transcript(id="transcript")
                yield LiveStrip(id="live-strip")
                yield QueueLine(id="queue")
                yield Composer(id="composer", placeholder="Ask anything. Enter sends, Ctrl+J starts a new line.")
            yield Sidebar(id="sidebar")
        yield KeyLine(id="keys")

    def on_mount(self) -> None:
        self.transcript = self.query_one(Transcript)
        self.composer = self.query_one(Composer)
        self.sidebar = self.query_one(Sidebar)
        self.strip = self.query_one(LiveStrip)
        self.status = self.query_one(StatusLine)
        self.queue_line = self.query_one(QueueLine)
        self.welcome = self.query_one(Welcome)
        self.queue_line.display = False
        self.composer.set_history(self.session.store.prompts())
        self.set_class(not self.app.settings.panels, "-no-panels")
        self.drain_timer = self.set_interval(TICK_S, self.drain, pause=True)
        keys = self.app.keys
        shown = [(keys.get(a.id, a.key), a.short, f"app.perform('{a.id}')") for a in ACTIONS if a.short]
        self.query_one(KeyLine).show_keys(shown)
        self.show_conversation()
        self.show_state()
        self.composer.focus()
        self.call_after_refresh(self.app.listening.set)

    def on_resize(self) -> None:
        # What is shown depends on the width: a line or panels, a bar or numbers.
        self.call_after_refresh(self.show_figures)
        self.call_after_refresh(self.show_queue)

    # -- what the engine thread says

    def watch_engine(self) -> None:
        """A job was given: look into the outbox until it is done. While nothing runs no timer does."""
        self._next_drain = 0.0
        self._cpu = time.thread_time()
        self.drain_timer.resume()

    def drain(self) -> None:
        """Show everything that happened since the last call, with one paint."""
        now = time.perf_counter()
        if now < self._next_drain:
            return
        # What the last drain and its painting cost says when the screen can afford the next one.
        cpu = time.thread_time()
        self._next_drain = now + max(DRAIN_S, min(SLOWEST_S, (cpu - self._cpu) / SCREEN_SHARE)) - TICK_S / 2
        self._cpu = cpu
        tokens: list[Tokens] = []
        for outcome in self.session.engine.drain():
            if isinstance(outcome, ReplyEvent) and isinstance(outcome.event, Tokens) and self._is_current(outcome):
                tokens.append(outcome.event)
                continue
            self._show_tokens(tokens)
            tokens = []
            match outcome:
                case Loading(text):
                    self.engine_state = text
                    self.show_state()
                case Loaded(facts):
                    self._loaded(facts)
                case LoadFailed(error, hint):
                    self.load_failure = outcome
                    self.engine_state = "no model"
                    self.facts = None
                    self.show_state()
                    self.show_error(error, hint)
                case JobDone():
                    self.app.job_done(outcome)
                case ReplyEvent() if self._is_current(outcome):
                    self._show_event(outcome)
                case ReplyEvent():
                    pass  # of a reply that was already given up
        give_way()
        self._show_tokens(tokens)
        if now >= self._next_panels:
            self._next_panels = now + PANELS_S - TICK_S / 2
            self.session.live.sample()
            self.show_figures()
        engine = self.session.engine
        if not engine.busy and engine.outbox.empty():  # in this order: what a job puts last is there before it ends
            self.drain_timer.pause()
            self.show_figures()

    def _is_current(self, outcome: ReplyEvent) -> bool:
        return self.session.reply is not None and outcome.reply == self.session.reply.number

    def _show_tokens(self, events: list[Tokens]) -> None:
        if not events:
            return
        merged = merge(events)
        for event in merged:
            self.session.live.feed(event)
        entry = self.reply_entry
        assert entry is not None
        speculative = any(any(event.draft_mask) for event in events)
        grown = [self.session.grow(event) for event in (events if speculative else merged)]
        give_way()
        if text := "".join(text for text, _ in grown):
            entry.document.append(text, [mark for _, marks in grown for mark in marks])
        entry.footer = ""
        self.transcript.changed(entry)

    def _show_event(self, outcome: ReplyEvent) -> None:
        entry = self.reply_entry
        match outcome.event:
            case PrefillProgress(done, total) as event:
                self.session.live.feed(event)
                if entry is not None:
                    entry.footer = f"reading the prompt · {done:,} of {total:,} tokens"
                    self.transcript.changed(entry)
            case Prefilled() as event:
                self.session.live.feed(event)
            case Note(text):
                self.app.log_line(text)
                self.notify(printable(text), markup=False)
            case Finished() as event:
                self._finish(event)
            case other:
                raise TypeError(f"unknown decoder event {type(other).__name__}")

    def _finish(self, event: Finished) -> None:
        self.session.live.feed(event)
        message, held = self.session.finish(event)
        entry, self.reply_entry = self.reply_entry, None
        if entry is not None:
            if held:
                entry.document.append(held)
            entry.document.close()
            entry.running = False
            entry.footer = footer_of(message) if message is not None else ""
            if message is None:
                self.transcript.drop(entry)
            else:
                entry.message = len(self.session.messages) - 1
                self.transcript.changed(entry)
        if event.reason == "error":
            self.show_error(event.error, event.hint)
        self.show_figures()
        self.show_state()
        if self.session.queue and event.reason in ("stop", "length"):
            self.send(self.session.queue.pop(0))
        else:
            self.take_back_queue()

    def _loaded(self, facts: EngineFacts) -> None:
        other_model = self._sampled != facts.identifier
        if other_model:
            self._sampled = facts.identifier
            self.session.options = replace(self.session.options, sampling=self._sampling(facts))
        self.facts, self.load_failure = facts, None
        self.engine_state = ""
        self.session.model = facts.model
        markdown.parser()  # importing it takes 40 ms, which the first reply is spared
        if other_model:  # facts also change after a reply, when the next may be under way
            self.app.settle()
        if self.session.options.mode == "speculative" and facts.verify_width < 2:
            self.session.options = replace(self.session.options, mode="single")
        self.show_state()
        self.show_figures()

    def _sampling(self, facts: EngineFacts) -> Sampling | None:
        """The model's own sampling, with what the command line asks for in its place."""
        return self.app.sampling_for(facts.sampling) if facts.sampling is not None else self.session.options.sampling

    # -- what the user says

    async def on_composer_submitted(self, event: Composer.Submitted) -> None:
        if action := slash_action(event.text):
            await self.app.action_perform(action)
            return
        if self.session.replying:
            self.session.queue.append(event.text)
            self.show_queue()
            return
        if self.editing is not None:
            self._replace_prompt(self.editing)
        self.send(event.text)

    def _replace_prompt(self, index: int) -> None:
        """Make room for the edited prompt; turns after its answer are kept in the conversation that was forked from."""
        session = self.session
        if len(session.messages) > index + 2:
            session.fork(index)
            self.notify("The turns after it are kept in the original conversation", timeout=4)
        else:
            session.truncate(index)
        self.show_conversation()

    def stop_editing(self) -> None:
        self.editing = None
        self.show_queue()

    def send(self, text: str) -> None:
        """Ask now."""
        text = printable(text)
        self.session.ask(text)
        self.show_welcome(False)
        entry = Entry("user", Document(text, plain=True), message=len(self.session.messages) - 1)
        self.transcript.add(entry)
        self.show_reply()

    def show_reply(self) -> None:
        """The reply that was just started gets its place."""
        document = Document(closed=False, tint=self.app.settings.tint)
        self.reply_entry = Entry("assistant", document, running=True)
        self.transcript.add(self.reply_entry)
        self.show_queue()
        self.show_state()
        self.watch_engine()

    def show_welcome(self, empty: bool) -> None:
        self.welcome.display = empty
        self.transcript.display = not empty

    def take_back_queue(self) -> None:
        """Nothing typed is lost or sent unasked: prompts that wait go back into the composer."""
        if self.session.queue:
            self.composer.take_back(self.session.queue)
            self.session.queue.clear()
        self.show_queue()

    def on_transcript_selected(self, event: Transcript.Selected) -> None:
        self.transcript.choose(None if self.transcript.cursor is event.entry else event.entry)

    # -- showing

    def show_conversation(self) -> None:
        """The session's messages, from their end."""
        entries = []
        for index, message in enumerate(self.session.messages):
            user = message.role == "user"
            document = Document(message.text, plain=user, tint=self.app.settings.tint, marks=message.marks)
            entries.append(Entry(message.role, document, "" if user else footer_of(message), message=index))
        self.reply_entry = None
        self.stop_editing()  # the prompt that was being edited may belong to another conversation
        self.show_welcome(not entries)
        self.transcript.replace_all(entries)

    def show_error(self, error: str, hint: str = "") -> None:
        text = f"{error}\n{hint}" if hint else error
        self.show_welcome(False)
        self.transcript.add(Entry("error", Document(printable(text), plain=True)))

    def show_state(self) -> None:
        session = self.session
        self.status.show_engine(self.facts, self.engine_state)
        pending = session.reply is not None and session.reply.mode != session.options.mode
        self.query_one(ModeToggle).show_mode(session.options.mode, pending)
        self.welcome.show_engine(self.facts, self.engine_state)

    def show_queue(self) -> None:
        self.queue_line.show_queue(self.session.queue, self.editing, self.size.width)

    def show_figures(self) -> None:
        facts = self.facts or EngineFacts("", "", 0)
        figures = self.session.live.figures
        if self.sidebar.display:
            self.sidebar.show_figures(facts, figures, self.session.live.last)
        if self.strip.display:
            self.strip.show_figures(facts, figures, self.strip.size.width)
        self.status.show_context(self.facts, figures, known=bool(figures.context_used) or not self.session.messages)
