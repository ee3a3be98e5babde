"""What users report about programs like this one: one regression test each."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from textual import events
from textual.color import Color
from textual.geometry import Offset
from textual.selection import Selection

from flint_tui import clipboard, themes
from flint_tui.app import FlintApp
from flint_tui.conversations import ConversationStore, Message
from flint_tui.screens.ask import AskYes
from flint_tui.text import document as documents
from flint_tui.text.blocks import layout
from flint_tui.text.document import Document
from flint_tui.widgets.entry import Entry
from flint_tui.widgets.roles import STYLES
from flint_tui.widgets.transcript import GUTTER, Transcript
from tests.flint_tui.command_line import flint
from tests.flint_tui.driving import ask, idle, running, screen_text, wait
from tests.flint_tui.fake_engine import ANSWER, FakeEngine

CODE = "Sure:\n\n```python\ndef f():\n    return 42\n```"
LONG = "\n\n".join(f"Paragraph {i} of a long reply." for i in range(80))


def conversation_of(messages: int) -> str:
    """A saved conversation; returns its id."""
    store = ConversationStore()
    conversation = store.create("fake", title="long")
    for i in range(messages):
        store.save(conversation.id, i, Message("assistant" if i % 2 else "user", f"{CODE}\n\nnumber {i}"))
    store.flush()
    store.close()
    return conversation.id


async def test_a_streamed_code_fence_stays_after_the_stream_ends() -> None:
    engine = FakeEngine(answers=[CODE], hold=True)
    async with running(engine) as (app, pilot, _):
        await ask(pilot, "code", finish=False)
        for _ in range(12):
            engine.release(1)
            await pilot.pause(0.01)
        await wait(pilot, lambda: "return 42" in screen_text(app))
        engine.release(100)
        await idle(pilot)
        assert "return 42" in screen_text(app)
        assert "def f():" in screen_text(app)
        assert "```" not in screen_text(app)


async def test_streaming_costs_the_same_after_a_long_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts blocks laid out while a reply streams: no time is measured."""
    counts = {}
    wanted = conversation_of(200)
    for name, resume in (("empty", None), ("long", wanted)):
        engine = FakeEngine(answers=[LONG], hold=True)
        async with running(engine, resume=resume) as (app, pilot, _):
            await ask(pilot, "go", finish=False)
            engine.release(10)
            await wait(pilot, lambda app=app: app.session.reply is not None and app.session.reply.text.count(" ") > 5)
            laid_out: list[object] = []

            def counting(block, width, laid_out=laid_out):
                laid_out.append(block)
                return layout(block, width)

            monkeypatch.setattr(documents, "layout", counting)
            entry = app.chat.reply_entry
            assert entry is not None
            for i in range(50):
                entry.document.append(f" word{i}")
                app.chat.transcript.changed(entry)
            counts[name] = len(laid_out)
            monkeypatch.setattr(documents, "layout", layout)
            engine.release(1000)
            await idle(pilot)
    assert counts["long"] == counts["empty"]


async def test_nothing_runs_while_idle() -> None:
    async with running() as (app, pilot, _):
        await ask(pilot, "a")
        await wait(pilot, lambda: not app.chat.drain_timer._active.is_set())
        timers = [t for node in app.chat.walk_children(with_self=True) for t in node._timers if t._active.is_set()]
        moving = [t for t in timers if t._interval < 1.0 and t is not app.chat._update_timer]
        assert moving == []
        assert not app.chat.composer.cursor_blink


async def test_typing_does_not_repaint_a_long_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(resume=conversation_of(200)) as (app, pilot, _):
        await pilot.press("x")
        painted: list[int] = []
        paint = Transcript.render_line
        monkeypatch.setattr(Transcript, "render_line", lambda self, y: painted.append(y) or paint(self, y))
        await pilot.press(*"hello")
        assert app.chat.composer.text == "xhello"
        assert painted == []


async def test_the_view_stays_put_while_reading_back() -> None:
    engine = FakeEngine(answers=[LONG], hold=True)
    async with running(engine, size=(100, 24)) as (app, pilot, _):
        await ask(pilot, "go", finish=False)
        engine.release(300)
        await wait(pilot, lambda: app.chat.transcript.max_scroll_y > 40)
        await pilot.press("pageup", "pageup")
        await wait(pilot, lambda: not app.chat.transcript.following)
        before = app.chat.transcript.scroll_offset.y
        shown = [line[:60] for line in screen_text(app).splitlines()[2:15]]  # without the scrollbar
        engine.release(1000)
        await idle(pilot)
        assert app.chat.transcript.scroll_offset.y == before
        assert [line[:60] for line in screen_text(app).splitlines()[2:15]] == shown
        await pilot.press("ctrl+end")
        assert "Paragraph 79" in screen_text(app)


async def test_ctrl_c_stops_a_reply_under_load_and_not_the_program() -> None:
    endless = FakeEngine(answers=["word " * 40_000], hold=True)
    async with running(endless) as (app, pilot, _):
        await ask(pilot, "go", finish=False)
        endless.release(30_000)  # so many at once that the screen is behind; the rest never come
        await wait(pilot, lambda: app.session.reply is not None and len(app.session.reply.text) > 1000)
        await pilot.press("ctrl+c")
        await idle(pilot)
        assert app.session.messages[-1].reason == "cancelled"
        assert app.is_running
        assert app.return_code is None


async def test_a_small_screen_scrolls_by_keyboard() -> None:
    async with running(FakeEngine(answers=[LONG]), size=(60, 20)) as (app, pilot, _):
        await ask(pilot, "go")
        assert "Paragraph 79" in screen_text(app)
        await pilot.press(*["pageup"] * 16)
        assert "go" in screen_text(app).splitlines()[2]


def test_copied_is_only_said_when_it_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent: list[str] = []
    for variable in ("TMUX", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert not clipboard.copy("text", sent.append).startswith("Copied")
    assert sent == ["\x1b]52;c;dGV4dA==\x07"]
    assert "Nothing was copied" in clipboard.copy("text", None)
    assert "Too long" in clipboard.copy("x" * 100_000, sent.append)
    # A tool that works is believed, one that fails is not.
    for code, said in ((0, "Copied 4 characters"), (1, "Asked the terminal")):
        tool = tmp_path / "wl-copy"
        tool.write_text(f"#!/bin/sh\ncat > {tmp_path}/clipboard\nexit {code}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        assert clipboard.copy("text", sent.append).startswith(said)
        assert (tmp_path / "clipboard").read_text() == "text"


def test_osc_52_is_wrapped_for_tmux() -> None:
    assert clipboard.osc52("a", tmux=True) == "\x1bPtmux;\x1b\x1b]52;c;YQ==\x07\x1b\\"


async def test_no_color_is_the_terminals_own_two_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with running() as (app, pilot, _):
        await ask(pilot, "a")
        await pilot.press("ctrl+o")
        for strip in app.screen._compositor.render_strips():
            for segment in strip:
                if segment.style is not None:
                    assert segment.style.color is None or segment.style.color.is_default
                    assert segment.style.bgcolor is None or segment.style.bgcolor.is_default


async def test_an_empty_no_color_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    async with running() as (app, _pilot, _):
        assert not app.no_color
        assert app.theme == "flint-dark"


@pytest.mark.parametrize("theme", [themes.DARK, themes.LIGHT], ids=lambda theme: theme.name)
def test_everything_is_readable_on_dark_and_light(theme) -> None:
    """WCAG 2: contrast of 4.5 for text, on both backgrounds it is put on."""
    variables = {**theme.to_color_system().generate(), **theme.variables}
    foregrounds = (re.sub(r"\bon \S+", "", style) for style in STYLES.values())
    names = {name for style in foregrounds for name in re.findall(r"\$([\w-]+)", style)}
    for name in names - {"faint"}:  # rules and empty bars, not text
        colour = Color.parse(variables[name])
        for background in ("background", "surface"):
            contrast = contrast_ratio(colour, Color.parse(variables[background]))
            assert contrast >= 4.5, f"${name} on ${background}: {contrast:.2f}"


def contrast_ratio(a: Color, b: Color) -> float:
    def luminance(colour: Color) -> float:
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour.normalized]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


async def test_shift_enter_breaks_the_line_and_does_not_send() -> None:
    async with running() as (app, pilot, engine):
        await pilot.press("a", "shift+enter", "b", "ctrl+j", "c", "alt+enter", "d")
        assert app.chat.composer.text == "a\nb\nc\nd"
        assert engine.asked == []


async def test_vi_keys_move_through_the_transcript() -> None:
    async with running(FakeEngine(answers=[LONG])) as (app, pilot, _):
        await ask(pilot, "go")
        transcript = app.chat.transcript
        transcript.focus()
        end = transcript.scroll_offset.y
        await pilot.press("k", "k")
        await wait(pilot, lambda: transcript.scroll_offset.y == end - 2)
        await pilot.press("j")
        await wait(pilot, lambda: transcript.scroll_offset.y == end - 1)
        await pilot.press("g")
        await wait(pilot, lambda: transcript.scroll_offset.y == 0)
        await pilot.press("G")
        await wait(pilot, lambda: transcript.scroll_offset.y == end)
        await pilot.press("tab")
        assert app.focused is app.chat.composer


async def test_resuming_a_long_session_shows_its_end_at_once() -> None:
    async with running(resume=conversation_of(200)) as (app, _pilot, _):
        assert "number 199" in screen_text(app)
        assert len(app.chat.transcript.entries) == 200


def test_no_thread_keeps_the_process_alive_after_quitting() -> None:
    """Every thread of the app is a daemon; that a busy one is not waited for is tested on a terminal."""
    before = set(threading.enumerate())
    app = FlintApp(lambda model, say: FakeEngine())
    try:
        assert all(thread.daemon for thread in set(threading.enumerate()) - before)
    finally:
        app.engine_thread.close()
        app.store.close()


async def test_an_error_while_suspended_comes_back_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDITOR", "'unbalanced")
    async with running() as (app, pilot, _):
        entered: list[bool] = []

        @contextmanager
        def suspend() -> Iterator[None]:
            entered.append(True)
            yield
            entered.append(False)

        monkeypatch.setattr(app, "suspend", suspend)
        await pilot.press("ctrl+g")
        await wait(pilot, lambda: "No closing quotation" in screen_text(app))
        assert entered == []
        monkeypatch.setenv("EDITOR", "/nonexistent/editor")
        await pilot.press("ctrl+g")
        await wait(pilot, lambda: "/nonexistent/editor" in screen_text(app))
        assert entered == [True, False]  # whatever happened in between, the terminal was taken back


async def test_the_terminal_cursor_is_where_ime_text_belongs() -> None:
    async with running() as (app, pilot, _):
        await pilot.press(*"ab")
        composer = app.chat.composer
        await wait(pilot, lambda: app.cursor_position == composer.cursor_screen_offset)
        assert composer.region.contains(*app.cursor_position)
        assert app.cursor_position.x == composer.content_region.x + 2


async def test_square_brackets_are_text_everywhere() -> None:
    text = "[INST] a[/b] [red]x[/INST] [@click=app.quit]go[/]"
    async with running(FakeEngine(answers=[text], hold=True)) as (app, pilot, engine):
        await ask(pilot, f"prompt {text}", finish=False)
        await ask(pilot, f"queued {text}", finish=False)
        assert "queued [INST]" in screen_text(app)
        engine.release(1000)
        await idle(pilot)
        await wait(pilot, lambda: len(app.session.messages) == 4)
        await idle(pilot)
        shown = screen_text(app)
        assert f"prompt {text}" in shown
        assert shown.count(text) == 4
        app.push_screen(AskYes("[b]Delete", f"Delete {text}?"))
        await wait(pilot, lambda: "Delete [INST] a[/b]" in screen_text(app))


async def test_interrupting_ends_the_reply_only() -> None:
    engine = FakeEngine(hold=True)
    async with running(engine) as (app, pilot, _):
        for key in ("escape", "ctrl+c"):
            await ask(pilot, "a", finish=False)
            engine.release(2)
            await wait(pilot, lambda: app.session.reply is not None and app.session.reply.text != "")
            await pilot.press(key)
            await idle(pilot)
            assert app.is_running
        assert [m.reason for m in app.session.messages if m.role == "assistant"] == ["cancelled", "cancelled"]


async def test_pasted_lines_are_one_message() -> None:
    async with running() as (app, pilot, engine):
        app.post_message(events.Paste("one\r\ntwo\rthree\n\x1b[31mfour\n"))
        await wait(pilot, lambda: "four" in app.chat.composer.text)
        assert engine.asked == []
        await pilot.press("enter")
        await idle(pilot)
        assert [m.text for m in app.session.messages if m.role == "user"] == ["one\ntwo\nthree\nfour"]


def test_wrapped_cjk_text_is_copied_without_newlines() -> None:
    text = "日本語のテキストは、どこでも改行できますが、コピーした文字列に改行が入ってはいけません。" * 3
    transcript = Transcript(id="transcript")
    entry = Entry("assistant", Document(text))
    transcript.entries = [entry]
    entry.height(40)
    transcript._tops = [0, entry.height(40)]
    assert entry.height(40) > 4
    copied = transcript.get_selection(Selection(None, None))
    assert copied is not None
    assert copied[0] == text
    # A part: from the third character of the first line to the end of the second.
    lines = entry.document.lines(40)
    part = transcript.get_selection(Selection(Offset(GUTTER + 2, 1), Offset(GUTTER + 100, 2)))
    assert part is not None
    assert part[0] == text[2 : lines[1].end]


async def test_model_text_is_never_a_control_sequence() -> None:
    evil = "a\x1b[2Jb \x1b]0;title\x07c \x9b31md \x1bPq\x1b\\e\x00\x08 \u202efgh\u202c"
    async with running(FakeEngine(answers=[evil, evil[:3], evil[3:]])) as (app, pilot, _):
        for prompt in (evil, "two", "three"):
            await ask(pilot, prompt)
        for strip in app.screen._compositor.render_strips():
            for segment in strip:
                assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e]", segment.text), segment
        assert app.session.messages[1].text == "ab c 31md e fgh"


async def test_chats_are_saved_while_they_stream() -> None:
    now = [0.0]
    engine = FakeEngine(answers=[LONG], hold=True)
    async with running(engine, clock=lambda: now[0]) as (app, pilot, _):
        await ask(pilot, "go", finish=False)
        engine.release(20)
        await wait(pilot, lambda: app.session.reply is not None and app.session.reply.text.count(" ") >= 15)
        now[0] += 1.0
        engine.release(1)
        await wait(pilot, lambda: app.session.reply is not None and app.session.reply.saved_at == 1.0)
        app.store.flush()
        saved = app.store.messages(app.store.find().id)
        assert app.session.reply is not None
        assert saved[1].text == app.session.reply.text
        await pilot.press("escape")
        await idle(pilot)


@pytest.mark.parametrize("arguments", [["chat", "--help"], ["--help"]])
def test_help_without_a_terminal_is_plain_text(arguments: list[str]) -> None:
    """Nothing takes over a screen that is not there: no control sequences, no mouse modes left behind."""
    done = subprocess.run(
        [sys.executable, "-m", "flint_tui.cli", *arguments], stdin=subprocess.DEVNULL, capture_output=True
    )
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("group", [[], ["eval"], ["draft"]])
def test_a_command_alone_prints_its_help_and_has_not_failed(group: list[str]) -> None:
    alone = flint(*group)
    assert (alone.code, alone.stderr) == (0, "")
    assert "Usage: " in alone.stdout
    assert alone.stdout == flint(*group, "--help").stdout


def test_piped_input_never_opens_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal `flint chat` reads its prompt from stdin, once, and answers on stdout."""
    import io

    from typer.testing import CliRunner

    import flint_tui.app
    from flint_tui.cli import app as cli

    answered: list[object] = []
    monkeypatch.setattr(flint_tui.app, "run_app", lambda options: pytest.fail("the screen was opened"))
    monkeypatch.setattr("flint_tui.one_shot.answer", lambda options: answered.append(options) or 0)
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert CliRunner().invoke(cli, ["chat"], input="from a pipe").exit_code == 0
    assert len(answered) == 1


async def test_the_last_answer_is_there_after_an_export(tmp_path: Path) -> None:
    from flint_tui.export import export

    async with running() as (app, pilot, _):
        await ask(pilot, "a")
        assert app.session.conversation is not None
        said = export(app.session.conversation, app.session.messages, str(tmp_path / "nowhere" / "x.md"))
        assert "No such file" in said
        export(app.session.conversation, app.session.messages, str(tmp_path / "x.md"))
        assert ANSWER in (tmp_path / "x.md").read_text()
