"""Makes any text harmless to a terminal: what a model, a file or a native library wrote is never a control sequence."""

from __future__ import annotations

import re

# A whole escape sequence goes (CSI, OSC, DCS/SOS/PM/APC strings, or ESC and one byte), so that no debris stays behind.
_SEQUENCE = re.compile(
    "\x1b\\[[0-?]*[ -/]*[@-~]?"  # CSI, whole or broken off
    "|\x1b\\][^\x07\x1b]*(?:\x07|\x1b\\\\)?"
    "|\x1b[PX^_][^\x1b]*(?:\x1b\\\\)?"
    "|\x1b[ -/]*[0-~]?"
)
# The beginning of one at the end of the text: more of it may follow.
_UNFINISHED = re.compile("\x1b(?:\\[[0-?]*[ -/]*|\\][^\x07\x1b]*\x1b?|[PX^_][^\x1b]*\x1b?|[ -/]*)\\Z|\r\\Z")
# C0 without tab and newline, DEL, C1, and the invisible marks that reorder text around them (Trojan Source, 2021).
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff]")
TAB = "    "


def printable(text: str) -> str:
    """`text` without escape sequences and control characters; newlines stay, CR LF becomes LF, tabs four spaces."""
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n").replace("\t", TAB)
    if "\x1b" in text:
        text = _SEQUENCE.sub("", text)
    return _CONTROL.sub("", text)


class PrintableStream:
    """`printable` over text that arrives in pieces: an escape sequence may be split between two of them."""

    LONGEST = 256  # an unfinished sequence longer than this is no sequence

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        text = self._held + text
        self._held = ""
        unfinished = _UNFINISHED.search(text)
        if unfinished is not None and len(unfinished.group()) < self.LONGEST:
            text, self._held = text[: unfinished.start()], unfinished.group()
        return printable(text)

    def close(self) -> str:
        held, self._held = self._held, ""
        return printable(held)
