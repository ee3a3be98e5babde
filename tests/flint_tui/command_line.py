"""Runs the `flint` command as a script would, without a terminal, in this test's isolated folders."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from unittest import mock


@dataclass(frozen=True)
class Result:
    code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one error line; fails the test when there is none, several, or a traceback."""
        assert "Traceback" not in self.stderr, self.stderr
        lines = [line for line in self.stderr.splitlines() if line.startswith("flint: ")]
        assert len(lines) == 1, self.stderr
        return lines[0].removeprefix("flint: ")

    @property
    def hint(self) -> str:
        """What the error line says to do."""
        return self.stderr.split(self.error, 1)[1].strip()


def flint(*arguments: str) -> Result:
    """`flint ARGUMENTS...` in this process, through its entry point: ten times as fast as `flint_process`."""
    from flint_tui.cli import main

    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["flint", *arguments]),
        mock.patch.object(sys, "stdin", io.StringIO()),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 0 if exit.code is None else 1
    return Result(code, stdout.getvalue(), stderr.getvalue())


def flint_process(*arguments: str, **environment: str) -> Result:
    """`flint ARGUMENTS...` in a child process with extra environment variables."""
    command = [sys.executable, "-m", "flint_tui.cli", *arguments]
    run = subprocess.run(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return Result(run.returncode, run.stdout, run.stderr)
