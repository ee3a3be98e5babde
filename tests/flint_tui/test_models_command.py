"""`flint models`: list, show, verify, rm."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.errors import ModelNotFound, UsageError
from engine.files.paths import models_dir
from engine.sources.catalog import CATALOG
from flint_tui.cli import app
from tests.flint_tui.command_line import flint
from tests.synthetic import write_random_packed


def add(name: str, variant: str = "int4-g32") -> Path:
    return write_random_packed(models_dir() / name / variant, name=name)


def run(*arguments: str, input: str | None = None) -> str:
    """stdout of a command that succeeds; raises what it raises."""
    result = CliRunner().invoke(app, ["models", *arguments], input=input, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_list_on_a_fresh_machine() -> None:
    text = run()
    assert text == run("list")
    assert "Nothing is packed yet." in text
    for name in CATALOG:
        assert name in text


def test_the_list_as_json() -> None:
    directory = add("qwen3-0.6b")
    value = json.loads(run("--json"))
    assert value == json.loads(run("list", "--json"))
    assert [entry["path"] for entry in value["packed"]] == [str(directory)]
    assert value["packed"][0]["quantization"]["format"] == "int4"
    assert {entry["model"] for entry in value["available"]} == set(CATALOG) - {"qwen3-0.6b"}
    granite = next(entry for entry in value["available"] if entry["model"] == "granite-4.1-3b")
    assert granite["license"] == "Apache-2.0"
    assert granite["download_bytes"] == 6_805_672_960


def test_a_broken_directory_is_listed_as_such() -> None:
    add("good")
    bad = add("bad")
    os.truncate(bad / "weights.safetensors", 10)
    text = run()
    assert "good/int4-g32" in text
    assert "bad/int4-g32  does not load: " in text
    assert [entry["path"] for entry in json.loads(run("--json"))["broken"]] == [str(bad)]


def test_text_of_a_manifest_cannot_control_the_terminal() -> None:
    directory = add("m")
    manifest = directory / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"license": "none"', '"license": "\\u001b[2Jgone"'))
    assert "\x1b" not in run("show", "m")
    (directory / "manifest.json").write_text('{"format_version": 1, "\\u001b[2J": 1}')
    assert "\x1b" not in run()


def test_show_prints_the_essentials() -> None:
    add("mine")
    text = run("show", "mine")
    for expected in ("mine/int4-g32", "llama, 2 layers of 64", "groups of 32", "512 tokens", "weights.safetensors"):
        assert expected in text
    value = json.loads(run("show", "mine", "--json"))
    assert value["packed"] is True
    assert value["config"]["hidden_size"] == 64
    assert len(value["files"]["weights.safetensors"]["sha256"]) == 64


def test_show_knows_what_could_be_packed() -> None:
    text = run("show", "granite-4.1-3b")
    assert "flint pack granite-4.1-3b" in text
    assert "6.81 GB" in text
    assert json.loads(run("show", "granite-4.1-3b", "--json"))["packed"] is False
    with pytest.raises(ModelNotFound):
        run("show", "nosuchmodel")


def test_verify_reads_every_byte() -> None:
    add("good")
    bad = add("bad")
    assert sorted(run("verify").splitlines()) == ["bad/int4-g32: ok", "good/int4-g32: ok"]
    with (bad / "weights.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    result = flint("models", "verify")
    assert result.code == 1
    assert "good/int4-g32: ok" in result.stdout
    assert "sha256" in result.stdout
    assert "damaged" in result.error
    assert "--force" in result.hint
    assert flint("models", "verify", "good").code == 0
    value = json.loads(flint("models", "verify", "--json").stdout)
    assert {entry["model"]: entry["ok"] for entry in value["results"]} == {"good/int4-g32": True, "bad/int4-g32": False}


def test_rm_without_a_terminal_needs_yes() -> None:
    directory = add("m")
    result = flint("models", "rm", "m")
    assert (result.code, result.stdout) == (2, "")
    assert "--yes" in result.hint
    assert directory.exists()
    assert flint("models", "rm", "m", "--yes").stdout == "removed m/int4-g32\n"
    assert not directory.exists()


def test_rm_asks_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = add("m")
    monkeypatch.setattr("flint_tui.commands.models._is_terminal", lambda: True)
    answer = CliRunner().invoke(app, ["models", "rm", "m"], input="n\n")
    assert answer.exit_code == 1
    assert "m/int4-g32" in answer.stderr
    assert directory.exists()
    assert run("rm", "m", input="y\n").endswith("removed m/int4-g32\n")  # after the echo of the answer
    assert not directory.exists()


def test_rm_of_a_name_with_several_variants_wants_one_named() -> None:
    first, second = add("m", "int4-g32"), add("m", "int8-g32")
    with pytest.raises(UsageError) as failure:
        run("rm", "m", "--yes")
    assert "m/int4-g32, m/int8-g32" in failure.value.hint
    run("rm", "m/int8-g32", "--yes")
    assert (first.exists(), second.exists()) == (True, False)


def test_rm_takes_broken_directories_too() -> None:
    directory = add("m")
    (directory / "manifest.json").unlink()
    assert json.loads(run("rm", "m", "--yes", "--json"))["removed"] == ["m/int4-g32"]
    assert not directory.exists()


def test_rm_keeps_everything_when_one_name_is_wrong() -> None:
    directory = add("m")
    with pytest.raises(ModelNotFound):
        run("rm", "m", "nosuchmodel", "--yes")
    assert directory.exists()


def test_no_name_leads_out_of_the_models_folder(tmp_path: Path) -> None:
    outside = write_random_packed(tmp_path / "outside" / "int4-g32")
    add("inside")
    relative = os.path.relpath(outside, models_dir())
    for name in (str(outside), relative, f"inside/../{relative}", "..", "inside/..", ".", "inside/", "/"):
        for command in (["rm", name, "--yes"], ["show", name], ["verify", name]):
            with pytest.raises(ModelNotFound):
                run(*command)
    assert (outside / "manifest.json").exists()
    assert (models_dir() / "inside" / "int4-g32" / "manifest.json").exists()
