"""A program on a pseudo-terminal of its own: types keys, reads what is drawn, knows if the terminal was restored."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Terminal:
    """Runs `command`; `output` is everything drawn so far. Use as a context manager: what still runs is killed."""

    def __init__(
        self, command: list[str], size: tuple[int, int] = (120, 36), *, ignore_hangup: bool = False, **environment: str
    ) -> None:
        self.master, slave = pty.openpty()
        self.resize(*size)
        self.before = termios.tcgetattr(slave)
        variables = {**os.environ, "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1", **environment}
        variables.pop("TMUX", None)
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=variables, start_new_session=True,
            preexec_fn=lambda: _begin(ignore_hangup),
        )  # fmt: skip
        self.slave = slave
        self.output = bytearray()
        self.changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self.master, 65536)
            except OSError:
                return
            with self.changed:
                self.output += chunk
                self.changed.notify_all()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._close()

    def type(self, keys: str) -> float:
        """Send keys; returns when."""
        os.write(self.master, keys.encode())
        return time.monotonic()

    def wait_for(self, text: str, since: int = 0, timeout: float = 20.0) -> float:
        """Wait until `text` is drawn at or after offset `since` of the output; returns when."""
        wanted = text.encode()
        deadline = time.monotonic() + timeout
        with self.changed:
            while self.output.find(wanted, since) < 0:
                if not self.changed.wait(deadline - time.monotonic()) and time.monotonic() > deadline:
                    raise AssertionError(f"{text!r} was not drawn: ...{bytes(self.output[-400:])!r}")
        return time.monotonic()

    def vanish(self) -> None:
        """Close both ends, as when the connection to a remote terminal breaks."""
        self.type("x")  # its echo wakes our reader, which holds the master open as long as it waits
        self._close()

    def _close(self) -> None:
        for descriptor in (self.slave, self.master):
            with suppress(OSError):
                os.close(descriptor)
        self.slave = self.master = -1

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def wait(self, timeout: float = 10.0) -> int:
        """Wait for the end; returns the exit code."""
        return self.process.wait(timeout)

    @property
    def restored(self) -> bool:
        """Cooked mode is back, and what was switched on was switched off: alternate screen, cursor, mouse, paste."""
        output = bytes(self.output)
        pairs = [(b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h")]
        pairs += [(b"\x1b[?%dh" % n, b"\x1b[?%dl" % n) for n in (1000, 1003, 1006, 2004)]
        undone = all(output.rfind(off) > output.rfind(on) for on, off in pairs if on in output)
        return undone and termios.tcgetattr(self.slave)[3] == self.before[3]


def _begin(ignore_hangup: bool) -> None:
    """In the child: the terminal becomes its controlling terminal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    if ignore_hangup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def fake_app(
    options: dict[str, Any], size: tuple[int, int] = (120, 36), *, ignore_hangup: bool = False, **environment: str
) -> Terminal:
    """The app with the paced fake engine."""
    command = [sys.executable, "-m", "tests.flint_tui.run_fake", json.dumps(options)]
    return Terminal(command, size, ignore_hangup=ignore_hangup, **environment)
