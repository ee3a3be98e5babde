"""What is sent to the terminal for a change must give the same picture as painting the whole screen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from textual.geometry import Region
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input
from textual.widgets._toast import Toast

from flint_tui.app import FlintApp
from flint_tui.give_way import give_way
from flint_tui.painting import PatchCompositor, PatchUpdate, _around
from tests.flint_tui.driving import ask, idle, running, wait
from tests.flint_tui.fake_engine import FakeEngine

ANSWER = "Some *words*, 火打石で火をおこす, and `code`:\n\n```python\nfor i in range(3):\n    print(i)\n```\n\n" * 6


class Terminal:
    """The cells that a terminal shows after the updates it was sent."""

    def __init__(self, app: FlintApp) -> None:
        self.app = app
        self.cells: list[list[str]] = []
        self.partial = 0

    def full(self) -> list[list[str]]:
        return [cells(strip) for strip in self.app.screen._compositor.render_strips()]

    def show(self, update: object) -> None:
        if isinstance(update, PatchUpdate):
            self.partial += 1
            for x, y, strips in update.patches:
                for row, strip in enumerate(strips, y):
                    found = cells(strip)
                    self.cells[row][x : x + len(found)] = found
        elif update is not None:
            self.cells = self.full()


def unpainted(screen: Screen) -> bool:
    """Whether anything has changed that is still to be sent. A widget marks itself, then tells the screen."""
    return bool(
        screen._dirty_widgets
        or screen._compositor._dirty_regions
        or any(
            widget._layout_required
            or widget._scroll_required
            or widget._repaint_required
            or not widget._message_queue.empty()
            for widget in (screen, *screen.walk_children(Widget))
        )
    )


async def assert_whole(pilot, terminal: Terminal, step: int) -> None:
    """Timers change widgets at any moment: nothing may come between seeing that all is sent and comparing."""
    while unpainted(pilot.app.screen):
        await pilot.pause(0.005)
    assert terminal.cells == terminal.full(), step


def cells(strip) -> list[str]:
    """A character and its style for each cell; the second cell of a wide character is empty."""
    found = []
    for text, style, _ in strip:
        look = str(style.without_color) + str(style.color) + str(style.bgcolor) if style else ""
        for character in text:
            found += [character + look] + [""] * (cell_len(character) - 1)
    return found


@pytest.fixture
def terminals(monkeypatch) -> dict[FlintApp, Terminal]:
    """The terminal of each app that paints."""
    found: dict[FlintApp, Terminal] = {}
    display = FlintApp._display

    def show(app: FlintApp, screen, update) -> None:
        found.setdefault(app, Terminal(app)).show(update)
        display(app, screen, update)

    monkeypatch.setattr(FlintApp, "_display", show)
    return found


@pytest.mark.parametrize("size", [(120, 36), (80, 24), (60, 20)])
@pytest.mark.parametrize("no_color", [False, True])
async def test_patches_give_the_whole_picture(terminals, monkeypatch, size, no_color) -> None:
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    engine = FakeEngine(answers=[ANSWER], hold=True)
    async with running(engine, size=size) as (app, pilot, _):
        app.chat.composer.put("go")
        await pilot.press("enter")
        await wait(pilot, lambda: app.session.replying)
        terminal = terminals[app]
        for step in range(12):
            engine.release(9)
            if step == 4:
                app.notify("a note in front of the text", timeout=60)
            if step == 6:
                await pilot.press("pageup")
            if step == 8:
                await pilot.press("ctrl+t")
            await pilot.pause(0.1)
            await assert_whole(pilot, terminal, step)
        assert terminal.partial > 10
        engine.release(1000)
        await idle(pilot)


async def test_a_dialog_in_front_is_not_painted_over(terminals) -> None:
    engine = FakeEngine(answers=[ANSWER], hold=True)
    async with running(engine) as (app, pilot, _):
        app.chat.composer.put("go")
        await pilot.press("enter")
        await wait(pilot, lambda: app.session.replying)
        await pilot.press("ctrl+p")
        await wait(pilot, lambda: app.screen.query(Input))
        for step in range(4):
            engine.release(9)
            await pilot.pause(0.1)
            await assert_whole(pilot, terminals[app], step)
        engine.release(1000)
        await pilot.press("escape")
        await idle(pilot)


@pytest.mark.parametrize("shift", ["", "x"])  # a wide character begins at an even column, or at an odd one
async def test_wide_characters_come_back_whole_from_behind_a_note(terminals, shift) -> None:
    wide = "\n\n".join([shift + "火" * 25] * 12)
    async with running(FakeEngine(answers=[wide]), size=(60, 20)) as (app, pilot, _):
        await ask(pilot, "go")
        app.notify("a note that stays", timeout=60)
        app.notify("a note in front of the text, which is some lines long\n" * 3, timeout=60)
        await wait(pilot, lambda: len(app.screen.query(Toast)) == 2)
        app.screen.query(Toast).last()._expire()
        await wait(pilot, lambda: len(app.screen.query(Toast)) == 1)
        await assert_whole(pilot, terminals[app], 0)


async def test_an_unchanged_scrollbar_is_not_painted(terminals) -> None:
    """The thumb of a long conversation stands still while a reply grows."""
    engine = FakeEngine(answers=["Words of a line.\n\n" * 400, "One more line.\n\n" * 30], pause_s=0)
    async with running(engine) as (app, pilot, _):
        app.chat.composer.put("go")
        await pilot.press("enter")
        await idle(pilot)
        engine.hold = True
        app.chat.composer.put("go on")
        await pilot.press("enter")
        await wait(pilot, lambda: app.session.replying)
        await pilot.pause(0.2)
        bar, painted = app.chat.transcript.vertical_scrollbar, []
        render_lines = bar.render_lines
        bar.render_lines = lambda crop: painted.append(crop) or render_lines(crop)  # type: ignore[method-assign]
        lines = app.chat.transcript.line_count
        engine.release(30)
        await wait(pilot, lambda: app.chat.transcript.line_count > lines + 10)
        assert not painted
        assert bar.position >= app.chat.transcript.max_scroll_y - 1
        assert app.chat.transcript.following
        engine.release(1000)
        await idle(pilot)


def test_around_covers_the_rest_once() -> None:
    outer, inner = Region(2, 3, 20, 10), Region(5, 4, 6, 7)
    pieces = [piece for piece in (*_around(outer, inner), inner) if piece]
    seen = [(x, y) for piece in pieces for y in piece.line_range for x in range(piece.x, piece.right)]
    assert len(seen) == len(set(seen)) == outer.area
    assert isinstance(PatchCompositor().render_partial_update(), type(None))


def test_a_long_frame_pauses_and_a_short_one_does_not(monkeypatch) -> None:
    pauses: list[float] = []
    clock = iter((10.0, 10.0, 10.0001, 10.0002, 10.0005, 10.0005, 10.0006))
    monkeypatch.setattr("flint_tui.give_way._since", 0.0)
    monkeypatch.setattr(
        "flint_tui.give_way.time", SimpleNamespace(sleep=pauses.append, perf_counter=lambda: next(clock))
    )
    for _ in range(5):
        give_way()
    assert pauses == [0, 0]  # at once, and half a millisecond later
