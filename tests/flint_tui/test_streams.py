"""The standard streams of `flint`, in whatever state a caller leaves them: closed, full, without UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.files.paths import models_dir
from tests.synthetic import write_random_packed

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
CHAT = "chat random -p hi --backend torch --max-tokens 2 --temperature 0"
COMMANDS = (CHAT, "models show random --json", "roofline random --gpu H200")


@pytest.fixture(autouse=True)
def model() -> None:
    write_random_packed(models_dir() / "random" / "int4-g32", name="random")


def run(command: str, redirection: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = f"exec '{sys.executable}' -m flint_tui.cli {command} {redirection}"
    return subprocess.run(
        ["sh", "-c", line],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=240,
        env=os.environ | environment,
    )


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_stream_leads_nowhere(command: str, redirection: str) -> None:
    done = run(command, redirection)
    assert (done.returncode, "unexpected" in done.stderr) == (0, False), done.stderr


def test_without_a_prompt_a_closed_input_is_a_usage_error() -> None:
    done = run("chat random", "<&-")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "flint: There is no prompt")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_behind_the_output_is_one_line(command: str) -> None:
    done = run(command, ">/dev/full")
    lines = [line for line in done.stderr.splitlines() if line.startswith("flint: ")]
    assert (done.returncode, len(lines)) == (1, 1), done.stderr
    assert "could not be written: No space left on device" in lines[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_without_utf8_gets_what_it_can_show(command: str) -> None:
    done = run(command, "", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr.count("flint: ")) == (0, 0), done.stderr
    assert done.stdout.isascii()


def test_a_path_that_is_not_utf8_is_printed_as_it_is(tmp_path: Path) -> None:
    cache = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        write_random_packed(cache / "models" / "random" / "int4-g32", name="random")
    except OSError:
        pytest.skip("this file system's names are UTF-8")
    done = run("models show random --json", "", FLINT_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr
    done = run(CHAT, "", FLINT_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("variable", ["FLINT_CACHE_DIR", "FLINT_DATA_DIR"])
@pytest.mark.parametrize("folder", ["/dev/null", "x" * 300, "~no-such-user/x"])
def test_a_folder_that_cannot_be_is_one_line(variable: str, folder: str) -> None:
    done = run("chat no-such-model --resume -p hi", "", **{variable: folder})
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (1, 2), done.stderr
    assert "unexpected" not in done.stderr
