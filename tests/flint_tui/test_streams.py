"""The standard streams of `flint`, in whatever state a caller leaves them: closed, full, unread, without UTF-8."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.files.paths import models_dir
from tests.synthetic import write_random_packed

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
CHAT = "chat random -p hi --backend torch --max-tokens 2 --temperature 0"
COMMANDS = (CHAT, "models show random --json", "roofline random --gpu H200")

# All that a command is given of this process's environment: a PYTHONUNBUFFERED hides what a buffer does at exit.
KEPT = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "FLINT_CACHE_DIR", "FLINT_DATA_DIR", "FLINT_CONFIG_DIR")
KEPT += ("HF_HOME", "HF_HUB_OFFLINE")
BARE: dict[str, str] = {}
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
ENVIRONMENTS = {
    "bare": BARE,
    "unbuffered": UNBUFFERED,
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "development": {"PYTHONDEVMODE": "1", "PYTHONWARNINGS": "ignore"},  # complains where Python is silent otherwise
}
environments = pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
either_buffering = pytest.mark.parametrize("environment", [BARE, UNBUFFERED], ids=["bare", "unbuffered"])

# A command that does nothing but write, in each of the ways in which commands do.
WRITING = """
import rich, sys, typer
from flint_tui import cli
cli.app = lambda: {}
cli.main()
"""
WAYS = ("sys.stdout.write('text')", "print('text', flush=True)", "typer.echo('text')", "rich.print('text')")
FULL = [
    "flint: The output could not be written: No space left on device",
    "       check where standard output leads to",
]


@pytest.fixture(autouse=True)
def model() -> None:
    write_random_packed(models_dir() / "random" / "int4-g32", name="random")


def run(command: str, redirection: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python(f"-m flint_tui.cli {command}", redirection, environment)


def run_python(
    arguments: str, redirection: str, environment: dict[str, str], stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f"exec '{sys.executable}' {arguments} {redirection}"],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="surrogateescape",
        timeout=240,
        env={name: os.environ[name] for name in KEPT if name in os.environ} | environment,
    )


def write(expression: str) -> str:
    return f"-c {shlex.quote(WRITING.format(expression))}"


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_stream_leads_nowhere(command: str, redirection: str) -> None:
    done = run(command, redirection)
    assert (done.returncode, "unexpected" in done.stderr) == (0, False), done.stderr


def test_without_a_prompt_a_closed_input_is_a_usage_error() -> None:
    done = run("chat random", "<&-")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "flint: There is no prompt")


@needs_dev_full
@either_buffering
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_behind_the_output_is_one_line(command: str, environment: dict[str, str]) -> None:
    done = run(command, ">/dev/full", **environment)
    assert (done.returncode, done.stderr.splitlines()) == (1, FULL)


@needs_dev_full
@environments
@pytest.mark.parametrize("way", WAYS)
def test_nothing_follows_that_line_at_exit(way: str, environment: dict[str, str]) -> None:
    done = run_python(write(way), ">/dev/full", environment)
    assert (done.returncode, done.stderr.splitlines()) == (1, FULL)


@environments
@pytest.mark.parametrize("way", WAYS)
def test_a_reader_who_left_is_no_news(way: str, environment: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run_python(write(way), "", environment, writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@either_buffering
def test_an_output_that_is_not_for_writing_is_one_line(environment: dict[str, str]) -> None:
    done = run("--version", "1</dev/null", **environment)
    line = "flint: The output could not be written: Bad file descriptor"
    assert (done.returncode, done.stderr.splitlines()) == (1, [line, FULL[1]])


@needs_dev_full
def test_a_traceback_that_was_asked_for_is_the_last_word() -> None:
    done = run("--version", ">/dev/full", FLINT_DEBUG="1")
    assert (done.returncode, done.stderr.splitlines()[-1].split(": ", 1)[1]) == (1, FULL[0].removeprefix("flint: "))


@needs_dev_full
@either_buffering
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (write("typer.echo('note', err=True) or print('text')"), 0),
        ("-m flint_tui.cli models show nothing", 1),
        ("-m flint_tui.cli chat --what", 2),
    ],
    ids=["success", "failure", "usage"],
)
def test_messages_that_cannot_be_written_change_nothing(arguments: str, code: int, environment: dict[str, str]) -> None:
    done = run_python(arguments, "2>/dev/full", environment)
    assert (done.returncode, done.stdout) == (code, "" if code else "text\n")


@needs_dev_full
@environments
def test_both_full_is_an_exit_code(environment: dict[str, str]) -> None:
    done = run("--version", ">/dev/full 2>&1", **environment)
    assert (done.returncode, done.stderr) == (1, "")


@either_buffering
def test_a_disk_that_fills_up_in_the_middle_of_a_write(tmp_path: Path, environment: dict[str, str]) -> None:
    """It takes what it has room for; without a buffer, Python's own stream does not notice that this was not all."""
    limit = "__import__('resource').setrlimit(__import__('resource').RLIMIT_FSIZE, (5000, 5000))"
    done = run_python(write(f"{limit} or typer.echo('x' * 9000)"), f">'{tmp_path}/out'", environment)
    line = "flint: The output could not be written: File too large"
    assert (done.returncode, done.stderr.splitlines()) == (1, [line, FULL[1]])
    assert (tmp_path / "out").read_bytes() == b"x" * 5000


@either_buffering
def test_a_slow_reader_of_a_pipe_that_does_not_block_gets_everything(environment: dict[str, str]) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with os.fdopen(reader, "rb") as pipe, ThreadPoolExecutor() as pool:

        def read() -> bytes:
            time.sleep(1)
            return pipe.read()

        text = pool.submit(read)
        try:
            done = run_python(write("typer.echo('x' * 300_000)"), "", environment, writer)
        finally:
            os.close(writer)
        assert (done.returncode, done.stderr, text.result()) == (0, "", b"x" * 300_000 + b"\n")


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
