"""Runs the `flint` command in a child process, as a script would: no terminal, this test's folders."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass


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


def flint(*arguments: str, stdin: str | None = None, **environment: str) -> Result:
    """`flint ARGUMENTS...` with extra environment variables."""
    command = [sys.executable, "-m", "flint_tui.cli", *arguments]
    run = subprocess.run(
        command, env=os.environ | environment, input=stdin or "", capture_output=True, text=True, timeout=240
    )
    return Result(run.returncode, run.stdout, run.stderr)
