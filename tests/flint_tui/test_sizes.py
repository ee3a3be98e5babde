"""Every screen at every size of terminal, down to one cell: a resize may pass through any of them."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot

from tests.flint_tui.driving import ask, running, screen_text, wait

WIDTHS = (1, 7, 20, 38, 99, 120)
HEIGHTS = (1, 5, 9, 26)


async def every_size(pilot: Pilot) -> None:
    for height in HEIGHTS:
        for width in WIDTHS:
            await pilot.resize_terminal(width, height)


@pytest.mark.parametrize("said", [False, True], ids=["empty", "after a reply"])
async def test_the_chat(said: bool) -> None:
    async with running() as (app, pilot, _):
        if said:
            await ask(pilot, "hello")
        await every_size(pilot)
        await pilot.resize_terminal(120, 36)
        await pilot.press("z")
        await wait(pilot, lambda: " z" in screen_text(app), "typing goes on")


@pytest.mark.parametrize("key", ["f1", "f2", "f3", "f4", "f9", "ctrl+o", "ctrl+l", "ctrl+p", "alt+r", "ctrl+s"])
async def test_what_opens_over_it(key: str) -> None:
    async with running() as (app, pilot, _):
        await ask(pilot, "hello")
        chat = app.screen
        await pilot.press(key)
        await wait(pilot, lambda: app.screen is not chat, "it opens")
        await every_size(pilot)
        await pilot.press("escape")
        await wait(pilot, lambda: app.screen is chat, "it closes")


async def test_twenty_by_five_shows_what_is_said_and_what_is_typed() -> None:
    async with running(size=(20, 5)) as (app, pilot, _):
        await ask(pilot, "hello")
        await pilot.press(*"abc")
        text = screen_text(app)
        assert "Seine" in text or "987" in text
        assert "abc" in text


async def test_no_figure_under_a_reply_is_cut_short() -> None:
    """At 60 columns "4.33 tok/step" ended as "4.33 tok/s"."""
    async with running(size=(60, 20)) as (app, pilot, _):
        await pilot.press("ctrl+t")
        await ask(pilot, "hello")
        lines = [line.strip() for line in screen_text(app).splitlines()]
        first = next(i for i, line in enumerate(lines) if "first token" in line)
        assert lines[first + 1] == "2.83 tok/step · speculative"
        await pilot.resize_terminal(30, 20)
        await wait(pilot, lambda: "…" in screen_text(app), "the rest is marked as left out")
