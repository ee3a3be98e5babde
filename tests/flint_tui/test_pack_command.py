"""`flint pack`: what it prints where, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.files.paths import models_dir
from engine.packed.model import PackedModel
from tests.fake_hub import COMMIT, FakeHub
from tests.flint_tui.command_line import flint, flint_process
from tests.hugging_face_folders import write_hf_folder

REPO = "someone/Some-Model"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path / "My-Model")


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeHub]:
    files = {path.name: path.read_bytes() for path in write_hf_folder(tmp_path / "remote").iterdir()}
    server = FakeHub({REPO: files, "Qwen/Qwen3-0.6B": files})
    yield server
    server.close()


def online(fake: FakeHub) -> dict[str, str]:
    return {"HF_ENDPOINT": fake.endpoint, "HF_HUB_OFFLINE": "0"}


def test_stdout_is_the_path_and_nothing_else(folder: Path) -> None:
    result = flint_process("pack", str(folder))
    assert result.code == 0, result.stderr
    directory = Path(result.stdout.removesuffix("\n"))
    assert PackedModel.open(directory, verify=True).manifest.name == "my-model"
    assert "packing" in result.stderr
    assert "\x1b" not in result.stderr  # no terminal, no bars

    again = flint_process("pack", str(folder))
    assert (again.code, again.stdout, again.stderr) == (0, result.stdout, "")


def test_json_is_one_object(folder: Path) -> None:
    result = flint("pack", str(folder), "--bits", "8", "--group", "64", "--name", "mine", "--json")
    assert result.code == 0, result.stderr
    value = json.loads(result.stdout)
    assert (value["model"], value["variant"]) == ("mine", "int8-g64")
    assert value["path"] == str(models_dir() / "mine" / "int8-g64")
    assert value["quantization"]["format"] == "int8"
    assert value["bytes"] == sum(path.stat().st_size for path in Path(value["path"]).glob("[!m]*"))
    assert value["seconds"] >= 0


def test_a_dry_run_says_what_would_be_done(folder: Path) -> None:
    result = flint("pack", str(folder), "--dry-run")
    assert result.code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("my-model/int4-g")
    assert lines[1:] == ["would download 0 B", lines[2]]
    assert lines[2].startswith("would write ")
    assert not models_dir().exists()
    flint("pack", str(folder))
    assert "packed already" in flint("pack", str(folder), "--dry-run").stdout


def test_a_dry_run_of_the_embedded_default() -> None:
    value = json.loads(flint("pack", "smollm2-135m-instruct", "--dry-run", "--json").stdout)
    assert value["download_bytes"] == 92_871_040
    assert value["packed_bytes"] == 98_362_432
    assert value["path"] is None
    assert value["license"] == "Apache-2.0"


def test_from_the_hub_by_repository_and_by_catalogue_name(fake: FakeHub) -> None:
    forecast = json.loads(flint_process("pack", REPO, "--dry-run", "--json", **online(fake)).stdout)
    assert forecast["download_bytes"] == sum(file["bytes"] for file in forecast["files"]) > 0
    assert {file["name"] for file in forecast["files"]} >= {"config.json", "model.safetensors"}
    assert not fake.downloads("model.safetensors")

    result = flint_process("pack", "qwen3-0.6b", "--json", **online(fake))
    assert result.code == 0, result.stderr
    value = json.loads(result.stdout)
    assert value["model"] == "qwen3-0.6b"
    assert value["source"]["location"] == "hub:Qwen/Qwen3-0.6B"
    assert value["source"]["revision"] == COMMIT
    assert value["license"] == "Apache-2.0"

    fake.requests.clear()
    assert flint("pack", "qwen3-0.6b").stdout.strip() == value["path"]
    assert not fake.requests  # done already: not even the listing is asked for


def test_a_killed_download_is_continued_by_the_next_run(fake: FakeHub, tmp_path: Path) -> None:
    release, chunks = threading.Event(), iter(range(1000))
    fake.slowly = lambda: None if next(chunks) < 3 else release.wait(60)  # tokenizer.json, then two of the weights
    command = [sys.executable, "-m", "flint_tui.cli", "pack", REPO]
    environment = os.environ | online(fake) | {"HF_HOME": str(tmp_path / "hf")}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while sum(part.stat().st_size for part in tmp_path.rglob("*.flint-part")) < 1 << 17:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    assert process.communicate()[0] == b""
    release.set()
    assert not list(models_dir().rglob("*.safetensors"))

    fake.requests.clear()
    result = flint_process("pack", REPO, HF_HOME=str(tmp_path / "hf"), **online(fake))
    assert result.code == 0, result.stderr
    (request,) = fake.downloads("model.safetensors")
    assert request.range == f"bytes={1 << 17}-"


def test_ctrl_c_exits_130_and_leaves_nothing_packed(fake: FakeHub, tmp_path: Path) -> None:
    release = threading.Event()
    reached = threading.Event()
    fake.slowly = lambda: (reached.set(), release.wait(60))
    command = [sys.executable, "-m", "flint_tui.cli", "pack", REPO]
    process = subprocess.Popen(
        command, env=os.environ | online(fake), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert reached.wait(60)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    release.set()
    assert (process.returncode, stdout) == (130, "")
    assert "Traceback" not in stderr
    assert not list(models_dir().rglob("*.safetensors"))


def test_refusals_of_the_hub_exit_1_with_one_line(fake: FakeHub) -> None:
    fake.token = "hf_secret"
    refused = flint_process("pack", REPO, **online(fake))
    assert (refused.code, refused.stdout) == (1, "")
    assert "(401)" in refused.error
    assert "HF_TOKEN" in refused.hint

    unknown = flint_process("pack", "someone/Absent", HF_TOKEN="hf_secret", **online(fake))
    assert unknown.code == 1
    assert "does not exist (404)" in unknown.error


def test_a_wrong_digest_exits_1_and_packs_nothing(fake: FakeHub) -> None:
    content = fake.repos[REPO]["model.safetensors"]
    fake.served["model.safetensors"] = content[:-1] + bytes([content[-1] ^ 1])
    result = flint_process("pack", REPO, **online(fake))
    assert result.code == 1
    assert "another digest" in result.error
    assert not list(models_dir().rglob("*.safetensors"))


def test_unknown_names_offer_near_matches() -> None:
    result = flint("pack", "granite-4.1-3")
    assert (result.code, result.stdout) == (1, "")
    assert result.error == "No model named 'granite-4.1-3'"
    assert "granite-4.1-3b" in result.hint


@pytest.mark.parametrize("arguments", [["--bits", "5"], ["--group", "16"], ["--bits", "four"], ["--nonsense"], []])
def test_usage_errors_exit_2(arguments: list[str]) -> None:
    spec = ["qwen3-0.6b"] if arguments else []
    result = flint("pack", *spec, *arguments)
    assert (result.code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


def test_what_is_no_model_exits_1(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    for path in (tmp_path, tmp_path / "empty", tmp_path / "bad.gguf", tmp_path / "absent"):
        result = flint("pack", str(path))
        assert (result.code, result.stdout) == (1, "")
        assert result.error
    assert not list(models_dir().rglob("*.safetensors"))
