"""The terminal's input, read without Textual's waits.

Textual's thread looks every 100 ms whether an Esc stood alone, needs two looks to leave, and dies of a byte that is not
UTF-8; here an Esc counts after ESCDELAY (104 -> 28 ms until the decoder stops), leaving takes one look, and such a byte
is a replacement character. Keys typed before there is somebody to take them stay in the terminal until there is:
Textual would drop those of the first half second.
"""

from __future__ import annotations

import os
import selectors
from codecs import getincrementaldecoder
from typing import TYPE_CHECKING, cast

from textual import constants
from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

if TYPE_CHECKING:
    from flint_tui.app import FlintApp

LOOK_S = 0.1  # between two looks whether the app is leaving, while nothing is typed


class TerminalDriver(LinuxDriver):
    def run_input_thread(self) -> None:
        parser = XTermParser(self._debug)
        decode = getincrementaldecoder("utf-8")("replace").decode
        wait = LOOK_S
        while not cast("FlintApp", self._app).listening.wait(LOOK_S):
            if self.exit_event.is_set():
                return
        with selectors.SelectSelector() as selector:  # macOS cannot poll a terminal in another way
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                if selector.select(wait):
                    data = self._read()
                    if not data:  # the terminal is gone, and nobody can ask for anything
                        self._app.call_later(self._app.exit)
                        return
                    found = parser.feed(decode(data))
                    wait = constants.ESCAPE_DELAY  # an Esc at its end may stand alone
                else:
                    found = parser.tick()
                    wait = LOOK_S
                for event in found:
                    self.process_message(event)

    def _read(self) -> bytes:
        try:
            return os.read(self.fileno, 4096)
        except OSError:
            return b""
