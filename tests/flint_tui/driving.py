"""Drives the app in tests: everything waits for a condition, nothing sleeps for a while and hopes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from textual.pilot import Pilot

from flint_tui.app import FlintApp
from tests.flint_tui.fake_engine import FakeEngine

DEADLINE_S = 60.0  # only a failure takes so long


async def wait(pilot: Pilot, condition: Callable[[], Any], what: str = "") -> None:
    """Let the app run until the condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"never happened: {what or condition}")
        await pilot.pause(0.005)
    await pilot.pause()


async def ask(pilot: Pilot, text: str, *, finish: bool = True) -> None:
    """Type a prompt (as a paste would) and send it."""
    app = pilot.app
    assert isinstance(app, FlintApp)
    app.chat.composer.put(text)
    await pilot.press("enter")
    if finish:
        await idle(pilot)


async def idle(pilot: Pilot) -> None:
    """Wait until no reply runs and everything has been drained."""
    app = pilot.app
    assert isinstance(app, FlintApp)
    await wait(pilot, lambda: not app.session.replying and not app.engine_thread.busy, "the reply ends")
    await wait(pilot, app.engine_thread.outbox.empty, "the outbox is drained")


@asynccontextmanager
async def running(
    engine: FakeEngine | None = None, size: tuple[int, int] = (120, 36), **options: Any
) -> AsyncIterator[tuple[FlintApp, Pilot, FakeEngine]]:
    """The app with a fake engine that has been loaded."""
    engine = engine or FakeEngine()
    app = FlintApp(lambda model, say: engine, **options)
    try:
        async with app.run_test(size=size, notifications=True) as pilot:
            await wait(pilot, lambda: hasattr(app, "chat") and app.chat.facts is not None, "the engine is loaded")
            await idle(pilot)
            yield app, pilot, engine
    finally:
        app.engine_thread.close(5.0)
        app.store.close()


def screen_text(app: FlintApp) -> str:
    """What the terminal shows, line by line."""
    width, height = app.size
    lines = [[" "] * width for _ in range(height)]
    for y, strip in enumerate(app.screen._compositor.render_strips()):
        lines[y] = list("".join(segment.text for segment in strip if not segment.control))
    return "\n".join("".join(line).rstrip() for line in lines)
