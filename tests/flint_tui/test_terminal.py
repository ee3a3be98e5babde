"""The app on a real (pseudo-)terminal: leaving, suspending, being killed, native output, resizing, no colour."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import sys
import time
from pathlib import Path

import pytest

from tests.flint_tui.terminal import Terminal, fake_app

READY = "msk anything"  # a style ends before it: the cursor stands on the first letter, so keys arrive
LEAVE_S = 8.0  # generous: what must not be waited for takes 600 s (the figures come from measure_app.py)
pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")


def log_entries(log: Path, what: str) -> list[dict]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [entry for line in lines if (entry := json.loads(line))["what"] == what]


def wait_log(log: Path, what: str, timeout: float = 30.0) -> dict:
    deadline = time.monotonic() + timeout
    while not (found := log_entries(log, what)):
        assert time.monotonic() < deadline, f"never logged: {what}"
        time.sleep(0.01)
    return found[0]


def state(terminal: Terminal) -> str:
    return Path(f"/proc/{terminal.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "decoding"])
def test_sigterm_restores_the_terminal(busy: bool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with fake_app({"rate": 500, "log": str(log)}) as terminal:
        terminal.wait_for(READY)
        wait_log(log, "loaded")
        if busy:
            terminal.type("go\r")
            terminal.wait_for("flint strikes steel")
        os.kill(terminal.process.pid, signal.SIGTERM)
        assert terminal.wait(LEAVE_S) == 128 + signal.SIGTERM
        assert terminal.restored


@pytest.mark.parametrize("busy", ["decoding", "prefill", "loading", "packing"])
def test_quitting_while_busy_restores_the_terminal_at_once(busy: str, tmp_path: Path) -> None:
    options = {
        "decoding": {"rate": 500},
        "prefill": {"prefill_s": 600},
        "loading": {"load_s": 600},
        "packing": {"packing": True},
    }[busy]
    log = tmp_path / "log"
    with fake_app({**options, "log": str(log)}) as terminal:
        terminal.wait_for(READY)
        if busy == "packing":
            wait_log(log, "loaded")
            terminal.type("\x1bOQ")  # F2
            terminal.wait_for("endless")
            terminal.type("\r")
            terminal.wait_for("downloading")
        elif busy != "loading":
            wait_log(log, "loaded")
            terminal.type("go\r")
            terminal.wait_for("flint strikes steel" if busy == "decoding" else "reading the prompt")
        terminal.type("\x11")
        assert terminal.wait(LEAVE_S) == 0
        assert terminal.restored


@pytest.mark.parametrize("after_s", [0.0, 0.3])  # in the shell's mode of the terminal still, and in the app's
def test_keys_typed_before_the_screen_is_there_are_kept(after_s: float) -> None:
    with fake_app({}) as terminal:
        time.sleep(after_s)
        terminal.type("early bird")  # echoed by the terminal itself, too, before the app takes it
        terminal.wait_for("\x1b[?1049h")
        terminal.wait_for("early bird", bytes(terminal.output).index(b"\x1b[?1049h"))


def test_ctrl_c_twice_leaves_and_once_does_not(tmp_path: Path) -> None:
    with fake_app({}) as terminal:
        terminal.wait_for(READY)
        terminal.type("\x03")
        terminal.wait_for("Press Ctrl+C")
        assert terminal.process.poll() is None
        terminal.type("\x03")
        assert terminal.wait(LEAVE_S) == 0
        assert terminal.restored


def test_a_killed_app_has_saved_all_but_the_last_moment(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with fake_app({"rate": 300, "log": str(log)}) as terminal:
        terminal.wait_for(READY)
        terminal.type("tell me a story\r")
        terminal.wait_for("flint strikes steel")
        while len(log_entries(log, "progress")) < 60:
            time.sleep(0.05)
        killed = time.monotonic()
        os.kill(terminal.process.pid, signal.SIGKILL)
        terminal.wait()
    database = sqlite3.connect(Path(os.environ["FLINT_DATA_DIR"]) / "conversations.db")
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    (prompt, reply) = database.execute("SELECT text FROM messages ORDER BY position").fetchall()
    assert prompt == ("tell me a story",)
    # Decoded two seconds before the end (one is promised; the other is for busy machines) means saved.
    must_be_there = max((e["tokens"] for e in log_entries(log, "progress") if e["at"] < killed - 2.0), default=1)
    assert len(re.findall(r"\w+|[,.]", reply[0])) >= must_be_there


def test_native_output_goes_to_the_log_and_not_on_the_screen(tmp_path: Path) -> None:
    with fake_app({"rate": 200, "tokens": 100, "noise": True, "log": str(tmp_path / "log")}) as terminal:
        terminal.wait_for(READY)
        terminal.type("go\r")
        wait_log(tmp_path / "log", "reply")
        terminal.wait_for("100 tokens")
        assert b"native noise" not in terminal.output
        terminal.type("\x0c")
        terminal.wait_for("native noise on 1")
        terminal.wait_for("native noise on 2")


def test_suspend_and_resume(tmp_path: Path) -> None:
    with fake_app({}) as terminal:
        terminal.wait_for(READY)
        terminal.type("\x1a")
        deadline = time.monotonic() + LEAVE_S
        while state(terminal) != "T":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert terminal.restored
        since = len(terminal.output)
        os.kill(terminal.process.pid, signal.SIGCONT)
        terminal.wait_for(READY, since)
        terminal.type("hello\r")
        terminal.wait_for("hello", since)
        terminal.type("\x11")
        assert terminal.wait(LEAVE_S) == 0


def test_the_editor_gets_the_terminal_and_its_text_the_composer(tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\ntest -t 1 && echo "editor on a terminal"\nprintf "edited %s" "$(cat "$1")" > "$1"\n')
    editor.chmod(0o755)
    with fake_app({}, EDITOR=str(editor)) as terminal:
        terminal.wait_for(READY)
        terminal.type("draft\x07")
        terminal.wait_for("editor on a terminal")
        terminal.wait_for("edited draft")


def test_an_editor_that_fails_changes_nothing(tmp_path: Path) -> None:
    with fake_app({}, EDITOR="/nonexistent/editor") as terminal:
        terminal.wait_for(READY)
        since = len(terminal.output)
        terminal.type("draft\x07")
        terminal.wait_for("/nonexistent/editor", since)
        terminal.type("!\r")
        terminal.wait_for("draft!", since)


def test_no_color_sends_no_colour(tmp_path: Path) -> None:
    with fake_app({"rate": 500, "tokens": 60}, NO_COLOR="1") as terminal:
        terminal.wait_for(READY)
        terminal.type("go\r")
        terminal.wait_for("60 tokens")
        terminal.type("\x11")
        terminal.wait(LEAVE_S)
        codes = {code for sgr in re.findall(rb"\x1b\[([\d;]*)m", bytes(terminal.output)) for code in sgr.split(b";")}
        colours = {
            code for code in codes if code and (30 <= int(code) <= 38 or 40 <= int(code) <= 48 or int(code) >= 90)
        }
        assert colours == set()


def test_a_storm_of_resizes_while_streaming(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with fake_app({"rate": 300, "tokens": 900, "log": str(log)}) as terminal:
        terminal.wait_for(READY)
        terminal.type("go\r")
        terminal.wait_for("strikes")
        for i in range(60):
            terminal.resize(30 + (i * 37) % 150, 8 + (i * 11) % 50)
            os.kill(terminal.process.pid, signal.SIGWINCH)
            time.sleep(0.02)
        terminal.resize(100, 30)
        os.kill(terminal.process.pid, signal.SIGWINCH)
        wait_log(log, "reply")
        since = len(terminal.output)
        terminal.type("zzz")
        terminal.wait_for("zzz", since)
        terminal.type("\x11")
        assert terminal.wait(LEAVE_S) == 0
        assert terminal.restored


def test_bytes_that_are_not_utf8_do_no_harm(tmp_path: Path) -> None:
    with fake_app({}) as terminal:
        terminal.wait_for(READY)
        os.write(terminal.master, b"caf\xe9 \xff")
        terminal.wait_for("caf\N{REPLACEMENT CHARACTER}")
        terminal.type("zzz")
        terminal.wait_for("zzz")
        terminal.type("\x11")
        assert terminal.wait(LEAVE_S) == 0


@pytest.mark.parametrize("rate", [0, 300], ids=["idle", "streaming"])
def test_a_vanished_terminal_ends_the_app_even_where_hangups_are_ignored(rate: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with fake_app({"rate": rate, "log": str(log)}, ignore_hangup=True) as terminal:
        terminal.wait_for(READY)
        wait_log(log, "loaded")
        if rate:
            terminal.type("go\r")
            terminal.wait_for("strikes")
        terminal.vanish()
        terminal.wait(LEAVE_S)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "loading"])
def test_a_bug_in_the_app_is_told_on_the_restored_terminal(busy: bool) -> None:
    with fake_app({"buggy": True, "load_s": 600 if busy else 0}) as terminal:
        terminal.wait_for(READY)
        terminal.type("\x1bOP")  # F1
        assert terminal.wait(LEAVE_S) == 1
        assert terminal.restored
        terminal.wait_for("RuntimeError: a bug in the app", timeout=1.0)


def test_a_dumb_terminal_gets_one_line_and_no_screen() -> None:
    with Terminal([sys.executable, "-m", "flint_tui.cli", "chat"], TERM="dumb") as terminal:
        assert terminal.wait(60.0) == 2
        terminal.wait_for("cannot show a screen", timeout=1.0)
        assert b"\x1b" not in terminal.output


def test_leaving_without_a_model_says_why_and_fails(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"no model")
    with Terminal([sys.executable, "-m", "flint_tui.cli", "chat", str(damaged)]) as terminal:
        terminal.wait_for("no model", timeout=60.0)
        terminal.type("\x11")  # Ctrl+Q
        assert terminal.wait(LEAVE_S) == 1
        assert terminal.restored
        told = bytes(terminal.output).rpartition(b"\x1b[?1049l")[2].decode()
        assert re.search(r"flint: \S*damaged\.gguf is not a GGUF file\r\n", told), told
