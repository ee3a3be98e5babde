"""Lets the user write a prompt in their own editor, with the terminal handed over and taken back."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from textual.app import SuspendNotSupported

if TYPE_CHECKING:
    from flint_tui.app import FlintApp


def edit_text(app: FlintApp, text: str) -> tuple[str | None, str]:
    """The edited text, or None and one line about what went wrong.

    Nothing may raise while the app is suspended (Textual would never resume), so failures come back as text.
    """
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        words = shlex.split(command)
    except ValueError as error:
        return None, f"$EDITOR {command!r}: {error}"
    with tempfile.TemporaryDirectory(prefix="flint-") as folder:
        path = Path(folder) / "prompt.md"
        path.write_text(text, encoding="utf-8")
        try:
            with app.suspend():
                problem = _run([*words, str(path)], app)
        except SuspendNotSupported:
            return None, "This terminal cannot be handed to an editor"
        if problem:
            return None, problem
        try:
            return path.read_text(encoding="utf-8").rstrip("\n"), ""
        except (OSError, ValueError) as error:
            return None, f"The edited prompt could not be read: {error}"


def _run(command: list[str], app: FlintApp) -> str:
    # The guard leads descriptors 1 and 2 into the log: the editor gets the real terminal.
    terminal = app.guard.terminal
    try:
        done = subprocess.run(command, stdout=terminal, stderr=terminal)
    except Exception as error:
        return f"{command[0]}: {getattr(error, 'strerror', None) or error}; set $EDITOR"
    return f"{command[0]} ended with {done.returncode}; the prompt is unchanged" if done.returncode else ""
