"""`flint bench reproduce` and `show`, with a scripted engine and scripted arms."""

from __future__ import annotations

import json
import os
import signal
import zipfile
from pathlib import Path
from typing import Any

import pytest

from engine.bench import arms as contestants
from engine.bench.arms import Arm
from engine.files.paths import models_dir
from engine.machine.hardware import Bandwidth
from tests.fake_backend import FakeLoopBackend
from tests.fake_bench import fake_engine
from tests.flint_tui.command_line import flint
from tests.synthetic import small_config, write_random_packed

IDS = list(range(10, 26))


def answer(arm: Arm, request: dict[str, Any]) -> dict[str, Any]:
    if arm.name == "reference":
        return {"ids": IDS, "margins": [3.0] * len(IDS), "runners_up": [0] * len(IDS)}
    if arm.name == "torch-single":
        return {"error": "/home/somebody/lib.so is broken"}
    seconds = {"cpu-single": 0.15, "cpu-speculative": 0.1}[arm.name]
    return {"ids": IDS, "prefill_s": 0.5, "decode_s": seconds, "bytes_per_token": 1e6, "device": "fake"}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What `flint bench reproduce small` opens; its arms are scripted."""
    engine = fake_engine(tmp_path, FakeLoopBackend(context_size=4096, chunk=512))
    write_random_packed(models_dir() / "small" / "int4", small_config(), name="small")
    monkeypatch.setattr("engine.loading.open_engine", lambda *arguments, **named: engine)
    monkeypatch.setattr("engine.loading.streaming_bandwidth", lambda seen: Bandwidth(0.001, "measured, by nobody"))
    monkeypatch.setattr("flint_tui.bench_runs.streaming_bandwidth", lambda seen=0.0: Bandwidth(0.001, "measured"))
    monkeypatch.setattr(
        "engine.machine.capabilities.streaming_bandwidth", lambda seen=0.0: Bandwidth(0.001, "measured")
    )
    monkeypatch.setattr("engine.machine.capabilities._native", lambda notify: (None, "not built here", ()))
    monkeypatch.setattr("engine.bench.conditions.busy_note", lambda: None)
    monkeypatch.setattr(contestants, "launch", answer)
    monkeypatch.setattr(contestants, "_no_library", lambda: "")
    return engine


SIZES = ("-p", "16", "-n", "16", "--rounds", "5")


@pytest.fixture
def archived(engine, tmp_path: Path) -> Path:
    """An archive that `flint bench reproduce` wrote."""
    path = tmp_path / "bench.zip"
    names = "cpu-single,cpu-speculative,torch-single,llama.cpp"
    result = flint("bench", "reproduce", "small", "-o", str(path), "--arms", names, *SIZES)
    assert result.code == 0, result.stderr
    assert result.stdout.strip() == str(path)
    return path


def test_every_answer_is_a_line_where_there_is_no_terminal(engine, tmp_path: Path) -> None:
    path = tmp_path / "bench.zip"
    result = flint("bench", "reproduce", "small", "-o", str(path), "--arms", "cpu-single,cpu-speculative", *SIZES)
    assert result.code == 0, result.stderr
    said = result.stderr.splitlines()
    assert any(line.startswith("flint: single pass: ") and line.endswith(" tok/s") for line in said)
    answers = [line for line in said if line.startswith("flint: round ") and "cpu-single 100.00 tok/s (" in line]
    assert len(answers) == 5
    assert answers[0].endswith("about 0 s left")


def test_the_arms_are_those_of_the_backend(engine, tmp_path: Path) -> None:
    engine.backend.name = "cpu"
    path = tmp_path / "bench.zip"
    result = flint("bench", "reproduce", "small", "-o", str(path), *SIZES)
    assert result.code == 0, result.stderr
    arms = json.loads(flint("bench", "show", str(path), "--json").stdout)["compare"]["arms"]
    assert [arm["arm"] for arm in arms] == ["cpu-single", "cpu-speculative", "transformers", "llama.cpp"]
    for backend, names in contestants.OF_BACKEND.items():
        assert names[0] == f"{backend}-single"
        assert set(names) <= set(contestants.NAMES)


@pytest.mark.parametrize(("at", "kept"), [(9, 2), (4, 0)], ids=["in the third round", "in the first"])
def test_sigterm_packs_the_rounds_that_have_ended(
    engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, kept: int
) -> None:
    calls = 0

    def ended(arm: Arm, request: dict[str, Any]) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return answer(arm, request)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(contestants, "launch", ended)
    path = tmp_path / "bench.zip"
    result = flint("bench", "reproduce", "small", "-o", str(path), "--arms", "cpu-single,cpu-speculative", *SIZES)
    assert result.code == 130
    assert signal.getsignal(signal.SIGTERM) is before
    assert path.exists() == bool(kept)
    if kept:
        assert f"STOPPED after {kept} of 5 rounds" in flint("bench", "show", str(path)).stdout
    else:
        assert "stopped before the first round had ended" in result.stderr


def test_an_archive_holds_everything_and_is_shown(archived: Path) -> None:
    with zipfile.ZipFile(archived) as file:
        assert sorted(file.namelist()) == ["compare.json", "environment.json", "manifest.json", "quick.json"]
        compare = json.loads(file.read("compare.json"))
    assert [arm["state"] for arm in compare["arms"]] == ["measured", "measured", "failed", "missing"]
    assert len(compare["machine"]) == 5
    shown = flint("bench", "show", str(archived))
    assert shown.code == 0, shown.stderr
    assert "command: flint bench reproduce --rounds 5" in shown.stdout
    assert "flint bench quick" in shown.stdout
    assert "torch-single: FAILED, <path> is broken" in shown.stdout
    assert "llama.cpp: MISSING" in shown.stdout
    assert " slower |" in shown.stdout  # cpu-single takes 1.5 times as long
    assert json.loads(flint("bench", "show", str(archived), "--json").stdout)["compare"] == compare


def test_the_verdict_comes_from_the_samples_not_from_the_archive(archived: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(archived) as file:
        parts = {name: json.loads(file.read(name)) for name in file.namelist()}
    for arm in parts["compare.json"]["arms"]:
        arm["verdict_on_base"], arm["base_over_this"] = "faster", 9.0
    shown = repacked(parts, tmp_path)
    assert " slower |" in shown.stdout
    assert "x9.0" not in shown.stdout


def repacked(parts: dict[str, Any], folder: Path):
    path = folder / "changed.zip"
    with zipfile.ZipFile(path, "w") as file:
        for name, value in parts.items():
            file.writestr(name, json.dumps(value))
    return flint("bench", "show", str(path))


def test_wrong_values_are_one_line_and_text_cannot_control_the_terminal(archived: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(archived) as file:
        parts = {name: json.loads(file.read(name)) for name in file.namelist()}
    parts["environment.json"]["driver"] = "\x1b[2J\nmoved"
    parts["quick.json"]["device"] = "\x1b]0;title\x07"
    parts["compare.json"]["arms"][2]["problem"] = "\x1b[31mred"
    clean = repacked(parts, tmp_path)
    assert clean.code == 0, clean.stderr
    assert "\x1b" not in clean.stdout
    assert "\x07" not in clean.stdout
    for document, key, values in (
        ("quick.json", "rows", (None, 3, [{}], [[]])),
        ("quick.json", "parameters", ("many", 10**30, -1)),
        ("quick.json", "ledger", ({"head": "x"}, [])),
        ("quick.json", "peak_gb_s", (-1, "x")),
        ("compare.json", "rounds", (0, "x", 7, 10**9)),
        ("compare.json", "arms", (None, ["x"], [{"arm": 1}])),
        ("compare.json", "base", ("nobody", 5)),
    ):
        for value in values:
            changed = {**parts, document: {**parts[document], key: value}}
            result = repacked(changed, tmp_path)
            assert result.code == 1, (document, key, value, result.stdout)
            assert "changed.zip" in result.error


def test_an_existing_file_is_kept(archived: Path) -> None:
    before = archived.read_bytes()
    result = flint("bench", "reproduce", "small", "-o", str(archived))
    assert (result.code, "exists already" in result.error) == (1, True)
    assert archived.read_bytes() == before


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("-o", "nowhere/bench.zip"), "nowhere/bench.zip cannot be written: No such file or directory"),
        (("-o", "small.txt/bench.zip"), "small.txt/bench.zip cannot be written: Not a directory"),
        (("--arms", "cpu-single,vllm"), "No arm named 'vllm'"),
        (("--arms", "cpu-single,"), "No arm named ''"),
        (("-p", "100000"), "-p 100000 and -n 16 are more than the "),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(
    engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.txt").touch()

    def measured(*arguments: object, **named: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr("flint_tui.bench_runs.run_quick", measured)
    result = flint("bench", "reproduce", "small", *SIZES, *given)
    assert result.code in (1, 2)
    assert result.error.startswith(said), result.stderr
    assert not list(tmp_path.glob("*.zip"))


def test_no_arm_at_all_is_a_failure_that_says_why(engine, tmp_path: Path) -> None:
    path = tmp_path / "bench.zip"
    result = flint("bench", "reproduce", "small", "-o", str(path), "--arms", "llama.cpp", *SIZES)
    assert result.code == 1
    assert "no arm could be measured" in result.stderr
    assert "llama.cpp: needs the GGUF" in result.stderr
    assert "flint: round" not in result.stderr
    assert flint("bench", "show", str(path)).code == 0


def test_the_base_must_take_part(engine) -> None:
    result = flint("bench", "compare", "small", *SIZES, "--arms", "cpu-single,torch-single", "--against", "cpu")
    assert (result.code, result.error) == (2, "--against cpu: no such arm takes part")
