"""How the app looks, at three sizes, dark, light and without colour. Look at the pictures before accepting a change:

python -m pytest tests/flint_tui/test_snapshots.py --snapshot-update
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import pytest
from textual.pilot import Pilot

from flint_tui.app import FlintApp
from flint_tui.model_shelf import Model
from flint_tui.screens.conversations import ConversationsScreen
from flint_tui.settings import Settings
from tests.flint_tui.driving import ask, idle, wait
from tests.flint_tui.fake_engine import FakeEngine

ANSWER = """A **flint** is a hard form of quartz. Struck on steel it throws sparks:

1. Hold the *flint* still.
2. Strike it with `steel`.
   - Keep the tinder close.

| stone | hardness |
|-------|---------:|
| flint |        7 |
| chalk |        1 |

```python
def strike(flint: Stone, steel: Stone) -> Spark:
    return Spark(heat=flint.edge * steel.speed)  # hot
```

> No spark without a strike. 火打石で火をおこす。
"""
HISTORY = tuple(180 + 40 * ((i * 7) % 11) / 10 for i in range(48))
SIZES = ("60x20", "80x24", "120x36")


class Shelf:
    def models(self) -> list[Model]:
        return [
            Model(
                "smollm2-135m-instruct/int4-g32", "smollm2-135m-instruct", "int4-g32", 96_600_000, True, "Apache-2.0"
            ),
            Model("granite-4.1-3b", "granite-4.1-3b", "3.4 B parameters", 6_800_000_000, False, "Apache-2.0"),
        ]

    def pack(self, identifier: str, report: object, cancel: object) -> str:
        raise AssertionError("nothing is packed in a picture")


@pytest.fixture
def snap(snap_compare) -> Callable[..., bool]:
    """snap_compare, of a screen that has come to rest: on a slow machine it may still be laid out, or blink."""

    def compare(app: FlintApp, size: str, run_before: Callable[[Pilot], Awaitable[None]]) -> bool:
        async def at_rest(pilot: Pilot) -> None:
            await run_before(pilot)
            await rest(pilot)

        return snap_compare(app, terminal_size=tuple(map(int, size.split("x"))), run_before=at_rest)

    return compare


async def rest(pilot: Pilot) -> None:
    """Until three pictures in a row are alike, cursors shown."""
    for widget in pilot.app.screen.query("Input, TextArea"):
        widget.cursor_blink = False  # type: ignore[attr-defined]
    pictures: list[str] = []
    while len(pictures) < 3 or len(set(pictures[-3:])) > 1:
        assert len(pictures) < 1000, "the screen never comes to rest"
        await pilot.pause(0.01)
        pictures.append(pilot.app.export_screenshot(simplify=True))


@pytest.fixture
def make_app() -> Iterator[Callable[..., FlintApp]]:
    apps: list[FlintApp] = []

    def make(theme: str = "dark", *, hold: bool = False, tint: bool = False, second: str = "Yes.") -> FlintApp:
        name = "" if theme == "none" else f"flint-{theme}"
        Settings(theme=name, tint=tint).save()
        engine = FakeEngine(answers=[ANSWER, second], hold=hold)
        app = FlintApp(lambda model, say: engine, shelf=Shelf(), clock=lambda: 0.0)
        apps.append(app)
        return app

    yield make
    for app in apps:
        app.engine_thread.close(5.0)
        app.store.close()


async def loaded(pilot: Pilot) -> FlintApp:
    app = pilot.app
    assert isinstance(app, FlintApp)
    await wait(pilot, lambda: hasattr(app, "chat") and app.chat.facts is not None)
    await idle(pilot)
    return app


def freeze(app: FlintApp) -> None:
    """A sparkline that does not depend on when the timer fired."""
    app.session.live.figures = replace(app.session.live.figures, history=HISTORY)
    app.chat.show_figures()


async def conversation(pilot: Pilot) -> None:
    app = await loaded(pilot)
    await ask(pilot, "What is a flint?")
    await pilot.press("ctrl+t")
    await ask(pilot, "And what does one do with it?\nIn two lines.")
    freeze(app)


def scene(*keys: str, before: Callable[[FlintApp], None] | None = None) -> Callable[[Pilot], Awaitable[None]]:
    """After one answered prompt, press keys."""

    async def run(pilot: Pilot) -> None:
        app = await loaded(pilot)
        await ask(pilot, "What is a flint?")
        freeze(app)
        if before is not None:
            before(app)
        await rest(pilot)  # a screen below a dialog is laid out no more
        for key in keys:
            await pilot.press(key)

    return run


@pytest.mark.parametrize("theme", ["dark", "light", "none"])
@pytest.mark.parametrize("size", SIZES)
def test_conversation(snap, make_app, monkeypatch: pytest.MonkeyPatch, size: str, theme: str) -> None:
    if theme == "none":
        monkeypatch.setenv("NO_COLOR", "1")
    assert snap(make_app(theme), size, conversation)


@pytest.mark.parametrize("size", SIZES)
def test_welcome(snap, make_app, size: str) -> None:
    assert snap(make_app(), size, loaded)


def test_a_streaming_code_fence(snap, make_app) -> None:
    async def stream(pilot: Pilot) -> None:
        app = await loaded(pilot)
        await ask(pilot, "What is a flint?", finish=False)
        engine = app.engine_thread.engine
        assert isinstance(engine, FakeEngine)
        engine.release(60)
        await wait(pilot, lambda: app.session.reply is not None and "return" in app.session.reply.text)
        await wait(pilot, app.engine_thread.outbox.empty)
        app.chat.drain_timer.pause()
        await pilot.pause()
        freeze(app)

    assert snap(make_app(hold=True), "120x36", stream)


def test_tinted_draft_tokens(snap, make_app) -> None:
    async def tinted(pilot: Pilot) -> None:
        app = await loaded(pilot)
        await pilot.press("ctrl+t")
        await ask(pilot, "What is a flint?")
        freeze(app)

    assert snap(make_app(tint=True), "120x36", tinted)


def test_help(snap, make_app, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flint_tui.screens.help.keys_path", lambda: "~/.config/flint/keys.toml")
    assert snap(make_app(), "100x34", scene("f1"))


def test_sampling(snap, make_app) -> None:
    def fixed(app: FlintApp) -> None:
        app.session.options = replace(app.session.options, fixed_seed=False)

    assert snap(make_app(), "80x24", scene("f3", before=fixed))


def test_models(snap, make_app) -> None:
    assert snap(make_app(), "120x36", scene("f2"))


def test_conversations(snap, make_app, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flint_tui.screens.conversations.age", lambda seconds: "2 h")
    assert snap(make_app(), "80x24", scene("ctrl+o"))
    assert ConversationsScreen.title_text == "Conversations"


def test_an_error(snap, make_app) -> None:
    def fail(app: FlintApp) -> None:
        app.chat.show_error("The GPU fell off the bus", "start it again, or use --backend cpu")

    assert snap(make_app(), "80x24", scene(before=fail))


@pytest.mark.parametrize("size", ["60x20", "120x36"])
def test_bench(snap, make_app, size: str) -> None:
    async def bench(pilot: Pilot) -> None:
        from flint_tui.screens.bench import BenchScreen

        app = await loaded(pilot)
        await pilot.press("f9", "r")
        screen = app.screen
        assert isinstance(screen, BenchScreen)
        await wait(pilot, lambda: not screen.running)

    assert snap(make_app(second=ANSWER), size, bench)
