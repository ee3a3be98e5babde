"""`flint bench`: what it prints where, on a scripted backend."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.machine.hardware import Bandwidth
from tests.fake_backend import FakeLoopBackend, hashed_logits
from tests.fake_bench import fake_engine
from tests.flint_tui.command_line import flint


@pytest.fixture(autouse=True)
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What `open_engine` opens."""
    opened = fake_engine(tmp_path, FakeLoopBackend(context_size=4096, chunk=512))
    monkeypatch.setattr("engine.loading.open_engine", lambda *arguments, **named: opened)
    monkeypatch.setattr("engine.loading.streaming_bandwidth", lambda seen: Bandwidth(0.0002, "measured, by nobody"))
    monkeypatch.setattr("engine.bench.conditions.busy_note", lambda: None)
    return opened


def test_quick_is_the_default_and_names_what_it_measured_against() -> None:
    result = flint("bench", "--json")
    assert result.code == 0, result.stderr
    out = json.loads(result.stdout)
    assert (out["bench"], out["model"], out["backend"]) == ("quick", "scripted", "fake")
    assert (out["peak_gb_s"], out["peak_source"]) == (0.0002, "measured, by nobody")
    assert out["ledger"] == {"head": 1000}
    tests = [row["test"] for row in out["rows"]]
    assert tests[0].startswith("prefill ")
    assert tests[1:] == ["single pass", "speculative"]
    single = out["rows"][1]
    assert single["avg_ts"] == pytest.approx(100.0)  # the fake's clock
    assert single["mbu"] == pytest.approx(single["bandwidth_gb_s"] / 0.0002)


def test_the_panel_fits_eighty_columns_and_the_result_is_kept_for_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    from flint_tui.bench_quick import BenchStore

    monkeypatch.setenv("COLUMNS", "80")
    result = flint("bench", "quick", "--mode", "single")
    assert result.code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert {len(line) for line in lines} == {80}
    assert "…" not in result.stdout
    assert any("single pass" in line and "100.0 ± 0.0" in line and "MBU" not in line for line in lines)
    assert any("of at most" in line for line in lines)
    assert "speculative" not in result.stdout
    (kept,) = BenchStore().all()
    assert [row.test for row in kept.rows][1:] == ["single pass"]


def test_decode_prints_rows(engine) -> None:
    result = flint("bench", "decode", "-p", "64", "-n", "16", "-d", "0,32", "-r", "2", "-o", "jsonl")
    assert result.code == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["test"] for row in rows] == ["pp64", "tg16", "pp64 @ d32", "tg16 @ d32"]
    assert all(len(row["samples_ts"]) == 2 for row in rows)
    assert rows[1]["avg_ts"] == pytest.approx(100.0)
    assert "| scripted" in flint("bench", "decode", "-p", "8", "-n", "4", "-r", "1").stdout


def test_an_interrupted_comparison_is_printed_and_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.bench.arms import Arm
    from engine.bench.compare import Outcome, Result

    result = Result(Arm("cpu-single"), samples=[100.0, 102.0])
    outcome = Outcome([result], "cpu-single", 2, {"prompt": [1], "tokens": 5}, [], stopped_of=5)
    monkeypatch.setattr("engine.loading.open_model", lambda *arguments, **named: None)
    monkeypatch.setattr("flint_tui.bench_runs.prepare_compare", lambda *arguments: SimpleNamespace(arms=[result.arm]))
    monkeypatch.setattr("flint_tui.bench_runs.run_compare", lambda *arguments: outcome)
    printed = flint("bench", "compare")
    assert printed.code == 130
    assert "101.00" in printed.stdout
    assert "STOPPED after 2 of 5 rounds" in printed.stdout
    as_json = flint("bench", "compare", "--json")
    assert (as_json.code, json.loads(as_json.stdout)["stopped_of"]) == (130, 5)


def test_bad_options_are_usage_errors(engine) -> None:
    result = flint("bench", "decode", "-n", "many")
    assert (result.code, result.error[:11]) == (2, "-n 'many' i")
    assert flint("bench", "decode", "-d", "100000").code == 2


def test_the_commands_of_the_documentation_exist() -> None:
    """Every `flint bench` and `flint eval` line of docs/benchmarking.md names commands and options that are there."""
    text = (Path(__file__).parents[2] / "docs" / "benchmarking.md").read_text(encoding="utf-8")
    lines = [line.split("#")[0].split() for line in text.splitlines() if line.startswith("    flint ")]
    lines = [words for words in lines if words[1] in ("bench", "eval")]
    assert len(lines) >= 6
    for _, group, command, *rest in lines:
        result = flint(group, command, "--help")
        assert result.code == 0
        for option in (word for word in rest if word.startswith("-")):
            assert option in result.stdout.split(), (group, command, option)


def test_the_paths_of_the_documentation_exist() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "benchmarking.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:engine|assets|tests)/[^`]+)`", text)
    assert paths
    assert all((root / path).is_file() for path in paths), paths


@pytest.fixture
def spec(engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs `flint bench spec` on six prompts, with more arguments; the engine opened anew."""
    monkeypatch.setenv("COLUMNS", "80")
    engine.backend._logits = hashed_logits(259, repeats=0.9)
    prompts = tmp_path / "prompts.jsonl"
    lines = ['{"domain": "summarise", "text": "again and again and again"}'] * 5 + ['{"text": "two two two two"}']
    prompts.write_text("\n".join(lines))

    def run(*arguments: str):
        engine.decoder.truncate(0)  # the command before closed it
        return flint("bench", "spec", "--prompts", str(prompts), "-n", "24", "-r", "2", *arguments)

    return run


def answers_of(printed: str) -> list[str]:
    """The last row of the last table."""
    return printed.rstrip().splitlines()[-1].split()


def test_spec_compares_the_modes_by_domain(spec, tmp_path: Path) -> None:
    result = spec("--draft-tokens", "3", "--json")
    assert result.code == 0, result.stderr
    out = json.loads(result.stdout)
    assert [row["domain"] for row in out["domains"]] == ["summarise", "all", "total"]
    assert [row["equal"] for row in out["domains"]] == [5, 1, 6]
    assert out["domains"][2]["largest_gap"] is None
    assert [len(pair["single"]) for pair in out["prompts"]] == [2] * 6
    shown = spec("--draft-tokens", "3")
    assert shown.code == 0, shown.stderr
    table = shown.stdout
    assert "speculative" in table
    assert answers_of(table) == ["total", "6/6", "0", "-", "0"]
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table
    assert "near tie" not in shown.stderr
    assert flint("bench", "spec", "--prompts", str(tmp_path / "absent.jsonl")).code == 2


def test_a_prompt_file_s_domain_is_neither_markup_nor_control(spec, tmp_path: Path) -> None:
    odd = tmp_path / "odd.jsonl"
    odd.write_text(json.dumps({"domain": "[/red]\x1b[31m", "text": "again and again and again"}))
    result = spec("--prompts", str(odd))
    assert result.code == 0, result.stderr
    assert "[/red]\N{REPLACEMENT CHARACTER}[31m" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(("apart", "code"), [(0.01, 0), (3.0, 1)])
def test_spec_tells_near_ties_and_fails_where_an_answer_differs(
    engine, spec, monkeypatch: pytest.MonkeyPatch, apart: float, code: int
) -> None:
    honest = engine.backend.step

    def rounding(tokens, **options):
        output = honest(tokens, **options)
        for row in output.logits:
            second, first = row.argsort()[-2:]
            row[second] = row[first] - apart
            if len(output.logits) > 1:  # a verify step
                row[[first, second]] = row[[second, first]]
        return output

    monkeypatch.setattr(engine.backend, "step", rounding)
    result = spec("--draft-tokens", "3", "--json")
    assert result.code == code
    every = json.loads(result.stdout)["domains"][-1]
    differing = every["different"] if code else every["near_ties"]
    assert differing > 0
    assert every["equal"] + differing == 6
    assert every["largest_gap"] == pytest.approx(apart, abs=1e-5)
    said = f"flint: {differing} of 6 "
    assert said + ("greedy answers differ" if code else "answers part at a near tie") in result.stderr
    assert ("largest gap 3 logits" in result.stderr) == bool(code)
    shown = spec("--draft-tokens", "3")
    assert shown.code == code
    ties, different = ("0", str(differing)) if code else (str(differing), "0")
    assert answers_of(shown.stdout) == ["total", f"{6 - differing}/6", ties, f"{apart:.2g}", different]


def test_more_drafts_than_a_step_holds_are_told(engine, spec) -> None:
    engine.backend.loop_widths = (2, 4, 8)
    result = spec("--draft-tokens", "15", "--json")
    assert "a step of the fake backend holds 7 drafts: --draft-tokens 15 is taken as 7" in result.stderr
    assert json.loads(result.stdout)["draft_tokens"] == 7
    assert "holds" not in spec("--draft-tokens", "7").stderr


def test_a_drafter_that_is_not_there_is_no_measurement(spec) -> None:
    result = spec("--drafter", "eagle")
    assert (result.code, result.error) == (1, "scripted has no learned drafter")
