"""Everything that opens over the chat."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.widgets import Input, OptionList, TextArea

from engine.errors import Cancelled, DiskFull
from engine.progress import Progress
from flint_tui.actions import ACTIONS, key_name
from flint_tui.app import FlintApp
from flint_tui.bench_quick import BenchStore
from flint_tui.model_shelf import Model
from flint_tui.screens.bench import BenchScreen
from flint_tui.screens.conversations import ConversationsScreen
from flint_tui.screens.help import HelpScreen
from flint_tui.screens.log import LogScreen
from flint_tui.screens.models import ModelsScreen
from flint_tui.screens.sampling import SamplingScreen
from tests.flint_tui.driving import ask, idle, running, screen_text, wait
from tests.flint_tui.fake_engine import FakeEngine


async def test_help_lists_every_action_with_its_key() -> None:
    async with running(size=(100, 80)) as (app, pilot, _):
        await pilot.press("f1")
        await wait(pilot, lambda: isinstance(app.screen, HelpScreen))
        text = screen_text(app)
        for action in ACTIONS:
            assert action.title in text
            assert key_name(action.key) in text
        await pilot.press("escape")
        await wait(pilot, lambda: app.screen is app.chat)


async def test_the_palette_finds_and_runs_any_action() -> None:
    async with running() as (app, pilot, _):
        await pilot.press("ctrl+p")
        await wait(pilot, lambda: app.screen is not app.chat)
        await pilot.press(*"speculative")
        await wait(pilot, lambda: "Switch between single pass" in screen_text(app))
        await pilot.press("enter")
        await wait(pilot, lambda: app.session.options.mode == "speculative")


async def test_every_action_has_a_method_and_a_key_of_its_own() -> None:
    keys = [key.strip() for action in ACTIONS for key in action.key.split(",")]
    assert len(keys) == len(set(keys))
    async with running() as (app, _pilot, _):
        for action in ACTIONS:
            assert hasattr(app, f"action_{action.id}") or hasattr(app.chat, f"action_{action.id}"), action.id


async def test_sampling_is_changed_and_used() -> None:
    async with running() as (app, pilot, engine):
        await pilot.press("f3")
        await wait(pilot, lambda: isinstance(app.screen, SamplingScreen))
        for name, value in (("temperature", "0.7"), ("top_k", "40"), ("seed", "7"), ("max_tokens", "64")):
            app.screen.query_one(f"#{name}", Input).value = value
        await pilot.press("enter")
        await wait(pilot, lambda: app.screen is app.chat)
        await ask(pilot, "a")
        options = engine.asked[0][1]
        assert options.sampling is not None
        assert (options.sampling.temperature, options.sampling.top_k, options.sampling.seed) == (0.7, 40, 7)
        assert options.max_tokens == 64


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [("temperature", "hot", "must be a number"), ("top_p", "1.5", "between 0 and 1"), ("max_tokens", "0", "1 or more")],
)
async def test_sampling_out_of_range_is_refused_in_place(name: str, value: str, problem: str) -> None:
    async with running() as (app, pilot, _):
        before = app.session.options
        await pilot.press("f3")
        await wait(pilot, lambda: isinstance(app.screen, SamplingScreen))
        app.screen.query_one(f"#{name}", Input).value = value
        await pilot.press("enter")
        await wait(pilot, lambda: problem in screen_text(app))
        await pilot.press("escape")
        await wait(pilot, lambda: app.screen is app.chat)
        assert app.session.options == before


async def test_the_system_prompt_goes_to_the_model_and_is_kept() -> None:
    async with running() as (app, pilot, engine):
        await ask(pilot, "a")
        await pilot.press("f4")
        await wait(pilot, lambda: app.screen is not app.chat)
        app.screen.query_one(TextArea).text = "Be brief.\nBe kind."
        await pilot.press("ctrl+s")
        await wait(pilot, lambda: app.screen is app.chat)
        await ask(pilot, "b")
        assert engine.asked[1][0][0] == {"role": "system", "content": "Be brief.\nBe kind."}
        app.store.flush()
        assert app.store.find().system == "Be brief.\nBe kind."


async def test_conversations_are_found_opened_renamed_and_deleted() -> None:
    async with running(FakeEngine(answers=["about apples", "about pears"])) as (app, pilot, _):
        await ask(pilot, "first question")
        await pilot.press("ctrl+n")
        assert app.session.messages == []
        await ask(pilot, "second question")
        app.store.flush()
        await pilot.press("ctrl+o")
        await wait(pilot, lambda: isinstance(app.screen, ConversationsScreen))
        screen = app.screen
        assert isinstance(screen, ConversationsScreen)
        assert [c.title for c in screen.found] == ["second question", "first question"]
        await pilot.press(*"APPLES")
        await wait(pilot, lambda: [c.title for c in screen.found] == ["first question"])
        await pilot.press("ctrl+r")
        await wait(pilot, lambda: app.screen is not screen)
        app.screen.query_one(Input).value = "fruit"
        await pilot.press("enter")
        await wait(pilot, lambda: app.screen is screen and [c.title for c in screen.found] == ["fruit"])
        await pilot.press("enter")
        await wait(pilot, lambda: app.screen is app.chat)
        assert [m.text for m in app.session.messages] == ["first question", "about apples"]
        assert "about apples" in screen_text(app)

        await pilot.press("ctrl+o")
        await wait(pilot, lambda: isinstance(app.screen, ConversationsScreen))
        await pilot.press("ctrl+d")
        await wait(pilot, lambda: "cannot be undone" in screen_text(app))
        await pilot.press("n")
        await wait(pilot, lambda: isinstance(app.screen, ConversationsScreen))
        assert len(app.store.search()) == 2
        await pilot.press("ctrl+d")
        await wait(pilot, lambda: "cannot be undone" in screen_text(app))
        await pilot.press("y")
        await wait(pilot, lambda: len(app.store.search()) == 1)


async def test_rename_delete_and_fork_from_the_chat() -> None:
    async with running() as (app, pilot, _):
        await ask(pilot, "a")
        await ask(pilot, "b")
        await pilot.press("alt+r")
        await wait(pilot, lambda: app.screen is not app.chat)
        app.screen.query_one(Input).value = "named"
        await pilot.press("enter")
        await wait(pilot, lambda: app.screen is app.chat)
        await pilot.press("alt+up", "alt+up", "alt+up", "alt+f")  # fork after the first answer
        await wait(pilot, lambda: len(app.session.messages) == 2)
        titles = [c.title for c in app.store.search()]
        assert titles == ["named (fork)", "named"]
        await pilot.press("alt+delete")
        await wait(pilot, lambda: app.screen is not app.chat)
        await pilot.press("y")
        await wait(pilot, lambda: [c.title for c in app.store.search()] == ["named"])
        assert app.session.messages == []


async def test_resume_opens_the_conversation_at_its_end() -> None:
    async with running() as (app, pilot, _):
        await ask(pilot, "remember me")
        app.store.flush()
        wanted = app.store.find().id
    async with running(resume=wanted[:6]) as (app, pilot, engine):
        assert "remember me" in screen_text(app)
        assert app.chat.transcript.following
        await ask(pilot, "go on")
        assert len(engine.asked[0][0]) == 3
        app.store.flush()
        assert len(app.store.messages(wanted)) == 4


async def test_export_to_markdown_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with running(FakeEngine(answers=["an *answer*"])) as (app, pilot, _):
        await ask(pilot, "a question")
        for name in ("out.md", "out.json", "out.md"):
            await pilot.press("ctrl+s")
            await wait(pilot, lambda: app.screen is not app.chat)
            app.screen.query_one(Input).value = name
            await pilot.press("enter")
            await wait(pilot, lambda: app.screen is app.chat)
        assert (
            (tmp_path / "out.md")
            .read_text()
            .endswith("## You\n\na question\n\n## smollm2-135m-instruct\n\nan *answer*\n")
        )
        assert [m["text"] for m in json.loads((tmp_path / "out.json").read_text())["messages"]] == [
            "a question",
            "an *answer*",
        ]
        await wait(pilot, lambda: "nothing was written" in screen_text(app))


class FakeShelf:
    """Two models; packing waits for `go`, then does what `outcome` says."""

    def __init__(self) -> None:
        self.rows = [
            Model("small/int4", "small", "int4-g32", 90_000_000, True),
            Model("big", "big", "3 B", 6_000_000_000, False),
        ]
        self.go = threading.Event()
        self.outcome: Exception | None = None

    def models(self) -> list[Model]:
        return list(self.rows)

    def pack(self, identifier: str, report: Callable[[Progress], None], cancel: threading.Event) -> str:
        report(Progress("download", "model.safetensors", 1_500_000_000, 6_000_000_000))
        while not self.go.wait(0.005):
            if cancel.is_set():
                raise Cancelled("Cancelled")
        if self.outcome is not None:
            raise self.outcome
        self.rows = [Model("big/int4", "big", "int4-g128", 1_700_000_000, True), self.rows[0]]
        return "big/int4"


async def test_the_help_s_words_stay_beside_their_keys() -> None:
    async with running(size=(60, 20)) as (app, pilot, _):
        await pilot.press("f1")
        await wait(pilot, lambda: isinstance(app.screen, HelpScreen))
        rows = screen_text(app).splitlines()
        first = next(y for y, row in enumerate(rows) if "Send; while a reply runs," in row)
        assert rows[first + 1].index("queue") == rows[first].index("Send;")


async def open_models(app: FlintApp, pilot) -> ModelsScreen:
    await pilot.press("f2")
    await wait(pilot, lambda: isinstance(app.screen, ModelsScreen))
    assert isinstance(app.screen, ModelsScreen)
    return app.screen


async def test_a_model_is_packed_inside_the_app_and_opened() -> None:
    shelf = FakeShelf()
    opened: list[str | None] = []
    engine = FakeEngine()

    def open_engine(model: str | None, say: object) -> FakeEngine:
        opened.append(model)
        return engine

    app = FlintApp(open_engine, shelf=shelf)
    try:
        async with app.run_test(size=(120, 36), notifications=True) as pilot:
            await wait(pilot, lambda: app.chat.facts is not None)
            await open_models(app, pilot)
            assert "90.0 MB" in screen_text(app)
            assert "6.00 GB to download" in screen_text(app)
            await pilot.press("down", "enter")
            await wait(pilot, lambda: "1.50 GB of 6.00 GB" in screen_text(app))
            await pilot.press("escape")  # packing goes on behind the chat
            await open_models(app, pilot)
            await wait(pilot, lambda: "downloading" in screen_text(app))
            shelf.go.set()
            await wait(pilot, lambda: "big is packed" in screen_text(app))
            await pilot.press("enter")
            await wait(pilot, lambda: opened == [None, "big/int4"])
            await idle(pilot)
    finally:
        app.engine_thread.close(5.0)
        app.store.close()


async def test_a_narrow_screen_says_how_much_enter_would_download() -> None:
    async with running(shelf=FakeShelf(), size=(60, 20)) as (app, pilot, _):
        await open_models(app, pilot)
        assert "6.00 GB to download" in screen_text(app)


async def test_packing_can_be_cancelled_and_a_failure_is_one_line() -> None:
    shelf = FakeShelf()
    async with running(shelf=shelf) as (app, pilot, _):
        await open_models(app, pilot)
        await pilot.press("down", "enter")
        await wait(pilot, lambda: "downloading" in screen_text(app))
        await pilot.press("ctrl+x")
        await wait(pilot, lambda: "cancelled" in screen_text(app))
        shelf.outcome = DiskFull("4.3 GB are missing on /home", "free some, or set FLINT_CACHE_DIR")
        shelf.go.set()
        await pilot.press("enter")
        await wait(pilot, lambda: "4.3 GB are missing on /home" in screen_text(app))
        assert "FLINT_CACHE_DIR" in screen_text(app)


async def test_the_bench_measures_keeps_and_exports(tmp_path: Path) -> None:
    engine = FakeEngine(answers=["one two three four five six seven eight nine ten"])
    async with running(engine, size=(120, 40)) as (app, pilot, _):
        await pilot.press("f9")
        await wait(pilot, lambda: isinstance(app.screen, BenchScreen))
        screen = app.screen
        assert isinstance(screen, BenchScreen)
        await pilot.press("r")
        await wait(pilot, lambda: not screen.running)
        text = screen_text(app)
        assert "prefill" in text
        assert "single pass" in text
        assert "speculative" in text
        assert "tok/step" in text
        assert "Roofline" in text
        kept = BenchStore().all()
        assert len(kept) == 1
        rows = {row.test.split()[0]: row for row in kept[0].rows}
        assert rows["single"].mean == pytest.approx(200.0)
        assert rows["single"].mbu == pytest.approx(84e6 * 200 / 25e9)
        await pilot.press("e")
        await wait(pilot, lambda: app.screen is not screen)
        app.screen.query_one(Input).value = str(tmp_path / "bench.csv")
        await pilot.press("enter")
        await wait(pilot, lambda: (tmp_path / "bench.csv").exists())
        assert len((tmp_path / "bench.csv").read_text().splitlines()) == 4
        await pilot.press("escape")
        await wait(pilot, lambda: app.screen is app.chat)


async def test_escape_stops_a_running_bench_and_nothing_is_kept() -> None:
    engine = FakeEngine(hold=True)
    async with running(engine) as (app, pilot, _):
        await pilot.press("f9")
        await wait(pilot, lambda: isinstance(app.screen, BenchScreen))
        screen = app.screen
        assert isinstance(screen, BenchScreen)
        await pilot.press("r")
        await wait(pilot, lambda: len(engine.asked) == 1)
        await pilot.press("escape")
        await wait(pilot, lambda: not screen.running)
        assert "nothing was kept" in screen_text(app)
        assert BenchStore().all() == []


async def test_the_log_shows_what_was_caught() -> None:
    async with running() as (app, pilot, _):
        app.log_line("a library said \x1b[31mthis\x1b[0m")
        await pilot.press("ctrl+l")
        await wait(pilot, lambda: isinstance(app.screen, LogScreen))
        await wait(pilot, lambda: "a library said this" in screen_text(app))
        app.log_line("and later that")
        await wait(pilot, lambda: "and later that" in screen_text(app))


async def test_a_model_list_that_is_empty_is_no_error() -> None:
    shelf = FakeShelf()
    shelf.rows = []
    async with running(shelf=shelf) as (app, pilot, _):
        await open_models(app, pilot)
        assert app.screen.query_one(OptionList).option_count == 0
        await pilot.press("enter", "escape")
        await wait(pilot, lambda: app.screen is app.chat)
