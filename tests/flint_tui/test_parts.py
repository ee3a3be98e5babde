"""The app's parts without the app: figures, settings, guard, bench, GPU, sampling of the session."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import BackendError
from engine.events import Prefilled, Tokens
from engine.files.paths import config_dir
from flint_tui import gpu_watch
from flint_tui.actions import ACTIONS
from flint_tui.app import FlintApp
from flint_tui.bench_quick import BenchProgress, BenchResult, BenchRow, BenchStore, export_text, quick_bench
from flint_tui.decode_thread import EngineThread, JobDone, Loaded, LoadFailed, ReplyEvent
from flint_tui.engine_door import TurnOptions
from flint_tui.live import Live, merge
from flint_tui.settings import Settings, SettingsError, _is_key, load_keys
from flint_tui.widgets import glyphs
from flint_tui.widgets.gpu_panel import rows
from tests.flint_tui.driving import running, wait
from tests.flint_tui.fake_engine import FACTS, FakeEngine

STEP = Tokens((1,), "a", 0.01, 100)


# -- figures


def test_live_figures_leave_the_first_token_out() -> None:
    live = Live()
    live.start("single")
    live.feed(Prefilled(10, 5, 0.5))
    live.feed(Tokens((0,), "x", 0.0, 0, steps=0))
    for _ in range(10):
        live.feed(STEP)
    figures = live.figures
    assert figures.total.tok_s == pytest.approx(100)
    assert figures.completion_tokens == 11
    assert figures.context_used == 26
    assert figures.prefill_tok_s == pytest.approx(20)


def test_merging_events_changes_no_figure() -> None:
    first = Tokens((0,), "x", 0.0, 0, steps=0)
    draft = Tokens((1, 2, 3), "abc", 0.02, 300, 1, 1, 2, 4, (1, 1, 1, 1), (1, 1, 0, 0), draft_seconds=0.001)
    events = [first, draft, STEP, draft]
    one, many = Live(), Live()
    for event in events:
        one.feed(event)
    for event in merge(events):
        many.feed(event)
    assert len(merge(events)) == 2
    assert one.figures.total == many.figures.total
    assert one.figures.completion_tokens == many.figures.completion_tokens
    assert "".join(e.text for e in merge(events)) == "xabcaabc"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.1234, "0.12"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (12345.0, "12,345")],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert glyphs.number(value) == text


def test_bars_and_sparklines_have_their_width() -> None:
    for share in (-1.0, 0.0, 0.01, 0.5, 0.999, 1.0, 7.0):
        assert glyphs.bar(share, 20).cell_length == 20
        assert glyphs.line_bar(share, 20).cell_length == 20
    lines = glyphs.sparkline([0.0, 1.0, 2.0, 4.0], 10)
    assert [len(line) for line in lines] == [10, 10]
    assert lines == ["         █", "       ▄██"]
    assert glyphs.sparkline([], 5, rows=1) == ["     "]
    assert [len(row) for row in glyphs.big("1,234".replace(",", ""))] == [15, 15, 15]


# -- settings


def test_settings_come_back() -> None:
    Settings(theme="nord", panels=False, tint=True).save()
    assert Settings.load() == Settings("nord", False, True)


def test_settings_that_cannot_be_kept_are_no_failure() -> None:
    config_dir().parent.mkdir(parents=True, exist_ok=True)
    config_dir().write_text("a file, where the folder should be")
    Settings(theme="nord").save()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "settings.json"),
        ("[]", "an object"),
        ('{"colour": 1}', "unknown setting 'colour'"),
        ('{"tint": 1}', "tint must be a bool"),
    ],
)
def test_a_bad_settings_file_names_the_key_and_the_app_starts(text: str, problem: str) -> None:
    config_dir().mkdir(parents=True)
    (config_dir() / "settings.json").write_text(text)
    with pytest.raises(SettingsError, match=problem):
        Settings.load()


def write_keys(text: str) -> None:
    config_dir().mkdir(parents=True, exist_ok=True)
    (config_dir() / "keys.toml").write_text(text)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('fly = "x"', "unknown action 'fly'"),
        ("stop = 1", "stop must name its keys in a string"),
        ('stop = "ctrl+foldr"', "stop: there is no key 'ctrl+foldr'"),
        ('stop = "control+s"', "stop: there is no key 'control+s'"),
        ('stop = "f5, F6"', "stop: there is no key 'F6'"),
        ('stop = "f5,"', "stop: there is no key ''"),
        ("stop = f5", "line 3 is not understood: stop = f5"),
        ('copy = "f10"', "copy is set twice"),
        ('stop = "f7, f10"', "f10 is set for copy and for stop"),
        ('[other]\nstop = "f5"', "other: expected one table, [keys]"),
    ],
)
def test_a_bad_line_costs_that_key_alone_and_is_named(line: str, problem: str) -> None:
    write_keys(f'[keys]\ncopy = "f10"\n{line}\n')
    keys, problems = load_keys(("stop", "copy"))
    assert keys == {"copy": "f10"}
    assert [str(told).split("keys.toml: ")[1] for told in problems] == [problem]


def test_lines_after_a_bad_one_count() -> None:
    write_keys('[keys]  # mine\nstop = "f5\n\n# copy = "f11"\ncopy = "f10"\n')
    keys, problems = load_keys(("stop", "copy"))
    assert keys == {"copy": "f10"}
    assert [str(told).split("keys.toml: ")[1] for told in problems] == ['line 2 is not understood: stop = "f5']


def test_a_file_full_of_errors_is_told_in_a_few_lines() -> None:
    write_keys('[keys]\nstop = "f5"\n' + "nonsense\n" * 3000)
    keys, problems = load_keys(("stop",))
    assert keys == {"stop": "f5"}
    assert len(problems) == 6
    assert str(problems[-1]).endswith("keys.toml: 2995 more like these")


def test_a_dotted_action_needs_no_quotes_and_a_byte_order_mark_is_none_of_the_text() -> None:
    write_keys('\ufeff[keys]\ncomposer.newline = "f5"\n')
    assert load_keys(("composer.newline",)) == ({"composer.newline": "f5"}, [])


def test_a_pipe_in_the_place_of_a_settings_file_is_told_not_waited_for() -> None:
    config_dir().mkdir(parents=True, exist_ok=True)
    for name in ("keys.toml", "settings.json"):
        os.mkfifo(config_dir() / name)
    _, (problem,) = load_keys(("stop",))
    assert str(problem).endswith("keys.toml: not a file")
    with pytest.raises(SettingsError, match=r"settings.json: not a file"):
        Settings.load()


def test_settings_nested_without_end_are_one_line() -> None:
    config_dir().mkdir(parents=True, exist_ok=True)
    (config_dir() / "settings.json").write_text("[" * 60_000)
    with pytest.raises(SettingsError):
        Settings.load()


@pytest.mark.parametrize("text", ["[keys", "keys = 1", "\xff", "a = " + "[" * 60_000, "x" * 70_000])
def test_a_key_file_of_nothing_but_errors_is_told(text: str) -> None:
    config_dir().mkdir(parents=True, exist_ok=True)
    (config_dir() / "keys.toml").write_bytes(text.encode("latin-1"))
    keys, problems = load_keys(("stop",))
    assert keys == {}
    assert len(problems) == 1
    assert "keys.toml" in str(problems[0])


@pytest.mark.parametrize(
    "key", ["s", "ctrl+s", "alt+delete", "shift+f5", "question_mark", "?", "ctrl+ö", "+", "f20,pageup"]
)
def test_any_key_that_a_terminal_sends_can_be_named(key: str) -> None:
    write_keys(f'[keys]\nstop = "{key}"')
    assert load_keys(("stop",)) == ({"stop": key}, [])


def test_every_default_key_can_be_named() -> None:
    for action in ACTIONS:
        assert all(_is_key(name) for name in action.key.split(",")), action


async def test_keys_can_be_changed_and_problems_are_shown() -> None:
    config_dir().mkdir(parents=True)
    (config_dir() / "keys.toml").write_text(
        '[keys]\ntoggle_mode = "ctrl+k"\n"composer.submit" = "ctrl+r"\n"composer.newline" = "enter"\nfly = "f5"\n'
    )
    (config_dir() / "settings.json").write_text('{"colour": 1}')
    async with running() as (app, pilot, engine):
        assert any("unknown setting" in n.message for n in app._notifications)
        assert any("unknown action 'fly'" in n.message for n in app._notifications)
        await pilot.press("ctrl+k")
        assert app.session.options.mode == "speculative"
        await pilot.press("a", "enter", "b")
        assert app.chat.composer.text == "a\nb"
        await pilot.press("ctrl+r")
        await wait(pilot, lambda: len(engine.asked) == 1)


async def test_what_was_set_aside_from_collections_is_collected_once_it_is_out_of_use() -> None:
    """A closed dialog is a cycle: frozen for good, every dialog would stay in memory."""

    class Cycle:
        def __init__(self) -> None:
            self.me = self

    async with running() as (app, _, _):
        cycle = Cycle()
        alive = weakref.ref(cycle)
        app.settle()
        frozen = gc.get_freeze_count()
        assert frozen > 10_000
        del cycle
        app.settle()
        assert alive() is None
        assert gc.get_freeze_count() < frozen * 1.2
    gc.unfreeze()


async def test_a_conversation_that_cannot_be_saved_is_told_and_the_chat_goes_on() -> None:
    from tests.flint_tui.driving import ask

    async with running() as (app, pilot, _):
        await ask(pilot, "a")
        app.store.flush()
        assert app.session.conversation is not None
        app.store.delete(app.session.conversation.id)  # as another instance might
        await ask(pilot, "b")
        app.store.flush()
        await wait(pilot, lambda: any("could not be saved" in n.message for n in app._notifications))
        await ask(pilot, "c")
        assert len(app.session.messages) == 6


async def test_the_theme_is_switched_by_key_and_kept() -> None:
    async with running() as (app, pilot, _):
        await pilot.press("f12")
        assert app.theme == "flint-light"
        await wait(pilot, lambda: Settings.load().theme == "flint-light")
        for _ in range(3):
            await pilot.press("f12")
        assert app.theme == "flint-dark"


# -- the engine thread


def test_the_engine_thread_reports_what_goes_wrong_and_lives() -> None:
    def explode(model: str | None, say: object) -> FakeEngine:
        raise ValueError("bad\nnews")

    thread = EngineThread(explode)
    thread.load(None)
    thread.reply(1, [], TurnOptions())
    thread.run("bench", lambda engine, cancel: None)
    assert thread.close(10.0)
    outcomes = thread.drain()
    failed = next(o for o in outcomes if isinstance(o, LoadFailed))
    assert failed.error == "ValueError: bad news"
    reply = next(o for o in outcomes if isinstance(o, ReplyEvent))
    assert "No model is open" in str(reply.event)
    job = next(o for o in outcomes if isinstance(o, JobDone))
    assert "No model is open" in job.error


def test_a_new_model_closes_the_old_one() -> None:
    engines: list[FakeEngine] = []

    def open_engine(model: str | None, say: object) -> FakeEngine:
        engines.append(FakeEngine())
        return engines[-1]

    thread = EngineThread(open_engine)
    thread.load(None)
    thread.load("other")
    assert thread.close(10.0)
    assert [engine.closed for engine in engines] == [True, True]
    assert sum(isinstance(o, Loaded) for o in thread.drain()) == 2


def test_what_is_compiled_in_a_reply_is_told_until_the_reply_goes_on() -> None:
    class Compiling(FakeEngine):
        def reply(self, messages, options, cancel):
            tell("compiling megakernel (once)")
            yield from super().reply(messages, options, cancel)

    def open_engine(model: str | None, say: Callable[[str], None]) -> FakeEngine:
        nonlocal tell
        tell = say
        say("packing")
        return Compiling()

    tell: Callable[[str], None] = print
    thread = EngineThread(open_engine)
    thread.load(None)
    thread.reply(1, [], TurnOptions())
    thread.run("bench", lambda engine, cancel: tell("compiling another (once)"))
    assert thread.close(10.0)
    outcomes = [type(o).__name__ for o in thread.drain()]
    told = [name for name, before in zip(outcomes, ["", *outcomes], strict=False) if name != before]
    assert told == ["Loading", "Loaded", "Loading", "Loaded", "ReplyEvent", "Loading", "Loaded", "JobDone"]


# -- bench


def test_the_quick_bench_counts_what_the_engine_says() -> None:
    engine = FakeEngine(answers=["w" + " w" * 39], step_s=0.004)
    events = list(quick_bench(engine, threading.Event()))
    rows = {row.test.split()[0]: row for row in events if isinstance(row, BenchRow)}
    assert rows["single"].mean == pytest.approx(250)
    assert rows["single"].deviation == pytest.approx(0)
    assert rows["single"].bytes_per_token == pytest.approx(84e6)
    assert rows["single"].gb_s == pytest.approx(84e6 * 250 / 1e9)
    assert rows["single"].mbu == pytest.approx(84e6 * 250 / 25e9)
    assert rows["speculative"].mean == pytest.approx(750)
    assert rows["speculative"].acceptance_length == pytest.approx(3.0)
    assert rows["prefill"].mean > 0
    last = events[-1]
    assert isinstance(last, BenchProgress)
    assert last.done == last.total
    modes = [options.mode for _, options in engine.asked[4:]]
    assert modes == ["single", "speculative"] * 3
    heads = {messages[0]["content"].split()[0] for messages, _ in engine.asked[1:4]}
    assert len(heads) == 3  # no prefill is served from the cache of the one before


def test_a_backend_that_cannot_verify_is_measured_in_one_mode() -> None:
    from dataclasses import replace

    engine = FakeEngine(facts=replace(FACTS, verify_width=1))
    rows = [e.test for e in quick_bench(engine, threading.Event()) if isinstance(e, BenchRow)]
    assert rows[1:] == ["single pass"]


def test_a_bench_that_fails_says_so() -> None:
    with pytest.raises(RuntimeError):
        list(quick_bench(FakeEngine(fail_after=3), threading.Event()))
    with pytest.raises(BackendError, match="nothing to measure"):
        list(quick_bench(FakeEngine(answers=["one"]), threading.Event()))


def test_results_are_kept_and_a_cut_line_is_skipped(tmp_path: Path) -> None:
    store = BenchStore(tmp_path / "bench.jsonl")
    assert store.all() == []
    result = BenchResult(1.0, "m, x", "b", 25.0, "measured", (BenchRow("prefill 100", (1.0, 3.0), ttft_s=0.1),))
    store.add(result)
    store.add(result)
    with store.path.open("a") as file:
        file.write('{"created": 1')
    assert store.all() == [result, result]
    assert json.loads(export_text(result, "json"))["rows"][0]["samples"] == [1.0, 3.0]
    assert export_text(result, "csv").splitlines()[1] == '"m, x",b,prefill 100,2.00,1.41,100.0,,,,'
    assert export_text(result, "md").splitlines()[2].startswith("| m, x | b | prefill 100 | 2.00 | 1.41 |")
    assert "Peak: 25.0 GB/s, measured." in export_text(result, "md")


# -- the rest


def test_native_output_is_caught_line_by_line(tmp_path: Path) -> None:
    """In a process of its own: it redirects descriptors 1 and 2."""
    code = (
        "import os\nfrom flint_tui.fd_guard import FdGuard\nguard = FdGuard()\n"
        "with guard.active():\n    os.write(1, b'one\\npart')\n    os.write(2, b'ial \\x1b[31mred\\n')\n"
        "    print('to the terminal', file=guard.terminal)\n"
        "print([list(guard.lines), guard.count])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[['one', 'partial red'], 2]\n"
    assert done.stderr == "to the terminal\n"


def test_the_gpu_panel_reads_nvml() -> None:
    nvml = SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetName=lambda h: b"NVIDIA H200",
        nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(used=12_300_000_000, total=150_000_000_000),
        nvmlDeviceGetClockInfo=lambda h, kind: {1: 1980, 2: 3201}[kind],
        nvmlDeviceGetPowerUsage=lambda h: 512_345,
        nvmlDeviceGetEnforcedPowerLimit=lambda h: 700_000,
        nvmlDeviceGetTemperature=lambda h, kind: 54,
    )
    reading = gpu_watch.read(nvml, object())
    text = "\n".join(row.plain for row in rows(reading))
    assert "NVIDIA H200" in text
    assert "1,980 MHz core" in text
    assert "512 of 700 W" in text
    assert "12.3 of 150 GB" in text
    assert all(row.cell_length <= 32 for row in rows(reading))


def test_starting_imports_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "pygments", "markdown_it", "plotext", "pynvml", "transformers", "gguf", "tokenizers")
    code = f"import sys, flint_tui.app, flint_tui.chat_screen; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_every_reply_draws_a_new_seed_unless_one_is_fixed() -> None:
    from dataclasses import replace

    from engine.sampling import Sampling
    from tests.flint_tui.driving import ask

    async with running() as (app, pilot, engine):
        await ask(pilot, "a")
        await ask(pilot, "b")
        app.session.options = replace(app.session.options, sampling=Sampling(temperature=1.0, seed=7), fixed_seed=True)
        await ask(pilot, "c")
        await ask(pilot, "d")
        seeds = [options.sampling.seed for _, options in engine.asked if options.sampling is not None]
        assert seeds[0] != seeds[1]
        assert seeds[2:] == [7, 7]


def test_an_unknown_conversation_is_refused_before_the_screen_opens() -> None:
    from flint_tui.conversations import ConversationNotFound

    with pytest.raises(ConversationNotFound):
        FlintApp(lambda model, say: FakeEngine(), resume="nosuch")
    assert os.isatty(2) == os.isatty(2)
