"""Copies text, and says honestly how far that is known to have worked.

A native tool that exits with 0 has the text. OSC 52 is a request to the terminal that nobody answers: over ssh it is
all there is, so it is sent where no tool is found, but never called a success.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

TIMEOUT_S = 1.0
OSC52_LIMIT = 74_994  # bytes; xterm and tmux drop longer sequences


def osc52(text: str, tmux: bool) -> str:
    """The escape sequence that asks the terminal to copy; inside tmux wrapped so that tmux passes it on."""
    payload = f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07"
    return "\x1bPtmux;" + payload.replace("\x1b", "\x1b\x1b") + "\x1b\\" if tmux else payload


def native_command() -> list[str] | None:
    """The tool that reaches this desktop's clipboard, if there is one."""
    if sys.platform == "darwin":
        candidates = [["pbcopy"]]
    elif os.environ.get("WAYLAND_DISPLAY"):
        candidates = [["wl-copy"]]
    elif os.environ.get("DISPLAY"):
        candidates = [["xclip", "-selection", "clipboard"], ["xsel", "--clipboard", "--input"]]
    else:
        candidates = []
    if os.environ.get("TMUX"):
        candidates.append(["tmux", "load-buffer", "-w", "-"])
    return next((command for command in candidates if shutil.which(command[0])), None)


def copy(text: str, write: Callable[[str], object] | None) -> str:
    """Copy `text`; returns one line about what is known. `write` sends a sequence to the terminal."""
    command = native_command()
    if command is not None:
        try:
            quiet = subprocess.DEVNULL
            done = subprocess.run(command, input=text.encode(), timeout=TIMEOUT_S, stdout=quiet, stderr=quiet)
            if done.returncode == 0:
                where = "the tmux buffer" if command[0] == "tmux" else "the clipboard"
                return f"Copied {len(text):,} characters to {where}"
        except (OSError, subprocess.TimeoutExpired):
            pass
    sequence = osc52(text, bool(os.environ.get("TMUX")))
    if write is None:
        return "Nothing was copied: there is no terminal to ask"
    if len(sequence) > OSC52_LIMIT:
        return "Too long for the terminal's clipboard: export it instead"
    write(sequence)
    return "Asked the terminal to copy (OSC 52); whether it did cannot be known"
