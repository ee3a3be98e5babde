"""The Textual app: settings, themes, the engine thread and the store around the chat screen."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

os.environ.setdefault("ESCDELAY", "25")  # ms until a lone Esc counts; Textual reads it once, and would wait 100

from textual import events
from textual.app import App
from textual.binding import BindingType
from textual.command import Provider
from textual.driver import Driver
from textual.filter import LineFilter, NoColor
from textual.geometry import Size
from textual.message import Message

from engine.errors import FlintError
from flint_tui import themes
from flint_tui.actions import ACTIONS, APP_ACTIONS, EXTRA_IDS
from flint_tui.conversations import Conversation, ConversationStore
from flint_tui.decode_thread import EngineThread, JobDone
from flint_tui.engine_door import ChatEngine, OpenEngine, TurnOptions
from flint_tui.fd_guard import FdGuard
from flint_tui.model_shelf import LocalShelf, PackJob, Shelf
from flint_tui.session import Session
from flint_tui.settings import Settings, SettingsError, load_keys

if TYPE_CHECKING:
    from engine.sampling import Sampling
    from flint_tui.options import ChatOptions

SWITCH_INTERVAL_S = 1e-5
LEAST = Size(16, 4)  # a smaller terminal shows a part of this: Textual cannot wrap text where padding leaves no cell
QUIT_WINDOW_S = 2.0  # a second Ctrl+C within it quits


def _actions() -> type[Provider]:
    from flint_tui.palette import ActionProvider

    return ActionProvider


class FlintApp(App[None]):
    """open_engine: runs in the engine thread; tests give one that opens a fake. sampling: the model's -> what to use.
    resume: a conversation's id or its beginning, "" for the newest; raises ConversationNotFound."""

    class NotSaved(Message):
        """A write to the store failed; posted by its thread."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    TITLE = "flint"
    CSS_PATH = "flint.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [action.binding() for action in APP_ACTIONS]
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {_actions}
    ESCAPE_TO_MINIMIZE = False

    def __init__(
        self,
        open_engine: OpenEngine,
        *,
        model: str | None = None,
        system: str = "",
        options: TurnOptions | None = None,
        sampling: Callable[[Sampling], Sampling] | None = None,
        resume: str | None = None,
        store: ConversationStore | None = None,
        shelf: Shelf | None = None,
        guard: FdGuard | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if os.environ.get("NO_COLOR") == "":
            del os.environ["NO_COLOR"]  # only a non-empty value counts; Textual looks at its presence
        problems: list[SettingsError] = []
        try:
            self.settings = Settings.load()
        except SettingsError as error:
            self.settings = Settings()
            problems.append(error)
        super().__init__()
        self.guard = guard or FdGuard()
        self.clock = clock
        self.copied = ""
        self.listening = threading.Event()  # once set, keys reach the composer; its driver waits for it
        self.shelf = shelf or LocalShelf()
        self.packing: PackJob | None = None
        self.engine_thread = EngineThread(open_engine)
        self.store = store or ConversationStore(on_error=lambda text: self.post_message(self.NotSaved(text)))
        self.session = Session(self.store, self.engine_thread, clock)
        self.session.system = system
        if options is not None:
            self.session.options = options
        self.sampling_for = sampling or (lambda default: default)
        self._model = model
        if resume is not None:
            self.session.open(self.store.find(resume))
        self._quit_asked = -QUIT_WINDOW_S
        self._jobs: dict[str, Callable[[JobDone], Any]] = {}
        for theme in (themes.DARK, themes.LIGHT):
            self.register_theme(theme)
        self.theme = themes.NO_COLOR_THEME if self.no_color else self._theme_name()
        keys, wrong = load_keys((*(action.id for action in ACTIONS), *EXTRA_IDS))
        self.set_keymap(keys)
        self._problems = [*problems, *wrong]

    def get_driver_class(self) -> type[Driver]:
        if sys.platform == "win32" or "TEXTUAL_DRIVER" in os.environ:
            return super().get_driver_class()
        from flint_tui.driver import TerminalDriver

        return TerminalDriver

    def _theme_name(self) -> str:
        return self.settings.theme if self.settings.theme in self.available_themes else themes.DARK.name

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return themes.ANSI_DEFAULTS if self.current_theme.ansi else themes.DEFAULTS

    def get_line_filters(self) -> list[LineFilter]:
        # NO_COLOR means the terminal's own two colours, which are readable by definition; emphasis stays.
        return [NoColor()] if self.no_color else list(super().get_line_filters())

    # -- life

    def on_resize(self, event: events.Resize) -> None:
        event.size = Size(max(event.size.width, LEAST.width), max(event.size.height, LEAST.height))

    def on_mount(self) -> None:
        from flint_tui.chat_screen import ChatScreen

        self.chat = ChatScreen(self.session)
        self.push_screen(self.chat)
        # After `fg` the terminal shows the shell's text: everything is painted again.
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))
        if not self.is_headless:
            with suppress(NotImplementedError, RuntimeError):  # where a loop takes no signals
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminated)
        for problem in self._problems:
            self.notify(f"{problem}\n{problem.hint}", title="Settings", severity="error", markup=False)
        self.call_after_refresh(self.load_model, self._model)

    def on_flint_app_not_saved(self, event: NotSaved) -> None:
        self.notify(event.text, severity="error", markup=False)

    def load_model(self, model: str | None) -> None:
        self.engine_thread.load(model)
        self.chat.watch_engine()

    def shut_down(self) -> None:
        """Stop decoding and write what is unsaved; called before the screen goes and again after."""
        self.engine_thread.cancel()
        if self.packing is not None:
            self.packing.cancel()

    def log_line(self, text: str) -> None:
        self.guard.add(text)

    def change_settings(self, settings: Settings) -> None:
        self.settings = settings
        settings.save()

    def job_done(self, outcome: JobDone) -> None:
        done = self._jobs.pop(outcome.name, None)
        if done is not None:
            done(outcome)

    def run_job(
        self, name: str, work: Callable[[ChatEngine, threading.Event], None], done: Callable[[JobDone], Any]
    ) -> None:
        """Run something that needs the engine to itself; `done` is called on the screen's side."""
        self._jobs[name] = done
        self.engine_thread.run(name, work)
        self.chat.watch_engine()

    @property
    def keys(self) -> dict[str, str]:
        """The user's own keys: action id -> keys."""
        return dict(self._keymap)

    async def action_perform(self, action: str) -> None:
        """Run an action of ACTIONS by its id."""
        namespace = self if any(a.id == action for a in APP_ACTIONS) else self.chat
        await self.run_action(action, namespace)

    def rename_conversation(self, conversation: Conversation, title: str) -> None:
        current = self.session.conversation
        if current is not None and current.id == conversation.id:
            self.session.rename(title)
        else:
            self.store.update(conversation.id, title=title)
        self.store.flush()

    def delete_conversation(self, conversation: Conversation) -> None:
        """Gone for good; if it is the open one, an empty conversation takes its place."""
        current = self.session.conversation
        if current is not None and current.id == conversation.id:
            if self.session.replying:
                self.notify("A reply is running: Esc stops it", severity="warning")
                return
            self.chat.action_new()
        self.store.delete(conversation.id)
        self.store.flush()

    def settle(self) -> None:
        """What there is now stays: full garbage collections leave it out. One over the whole app took 60-90 ms, with
        the interpreter's lock held, several times a minute: neither the decoder nor a key got through.

        Called while nothing is decoded. What went out of use since the last time is collected first: frozen, it would
        never be (a closed screen is a cycle)."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def open_conversation(self, conversation: Conversation) -> None:
        self.session.open(conversation)
        self.chat.show_conversation()
        self.settle()
        self.chat.show_state()
        self.chat.show_figures()

    def watch_theme(self, theme: str) -> None:
        """Keep the user's choice of theme."""
        if self.is_running and not self.no_color and theme != self.settings.theme:
            self.change_settings(replace(self.settings, theme=theme))

    # -- actions

    def action_interrupt(self) -> None:
        """Ctrl+C: copy what is selected, else stop the reply, else quit when pressed twice."""
        selected = self.screen.get_selected_text() or getattr(self.focused, "selected_text", "")
        if selected:
            self.chat.copy(selected)
            self.screen.clear_selection()
        elif self.session.replying:
            self.chat.action_stop()
        elif self.clock() - self._quit_asked < QUIT_WINDOW_S:
            self.action_quit_app()
        else:
            self._quit_asked = self.clock()
            self.notify("Press Ctrl+C again to quit", timeout=QUIT_WINDOW_S)

    def action_quit_app(self) -> None:
        self.shut_down()
        self.exit()

    async def action_quit(self) -> None:
        self.action_quit_app()

    def _terminated(self) -> None:
        """SIGTERM: the terminal is given back before the process ends."""
        self.shut_down()
        self.exit(return_code=128 + signal.SIGTERM)

    def action_suspend(self) -> None:
        self.action_suspend_process()

    def action_help(self) -> None:
        from flint_tui.screens.help import HelpScreen

        self.push_screen(HelpScreen())

    def action_themes(self) -> None:
        self.search_themes()

    def action_theme(self) -> None:
        names = [themes.DARK.name, themes.LIGHT.name, "ansi-dark", "ansi-light"]
        at = names.index(self.theme) if self.theme in names else -1
        self.theme = names[(at + 1) % len(names)]


def run(app: FlintApp) -> int:
    """Run the app on the terminal with descriptors 1 and 2 guarded; returns the exit code.

    Raises FlintError where the user left with no model open, because it could not be.
    """
    # A decoder that comes back from native code waits for the interpreter for at most this long, and the 50 us by which
    # Linux is late, while the screen paints: with 0.1 ms a step of 0.58 ms took 0.79, with this 0.69.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with app.guard.active():
        app.run()
    idle = app.engine_thread.close()
    app.store.close()
    if not idle and app._exception is None:
        # A model is still being loaded, or a step is running: the terminal is restored and everything is saved, so
        # nobody has to wait for native code to notice.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(app.return_code or 0)
    if app._exception is not None:
        raise app._exception  # the command line says it in one line; what Textual printed of it went to the log
    failure = app.chat.load_failure if hasattr(app, "chat") else None
    if failure is not None and not app.return_code:
        raise FlintError(failure.error, failure.hint)  # nobody could chat: the screen said so, and is gone
    return app.return_code or 0


def run_app(options: ChatOptions) -> int:
    """Run the chat until the user leaves; returns the exit code."""
    from flint_tui.engine_door import opener, turn_options

    return run(
        FlintApp(
            opener(options),
            model=options.model,
            system=options.system or "",
            options=turn_options(options),
            sampling=options.sampling,
            resume=options.resume,
        )
    )
