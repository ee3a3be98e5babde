"""Lets the decoder's thread in between two pieces of a frame.

A thread that wakes on the core where another one paints would wait for the rest of that one's time slice, 1 to 4 ms:
where few cores are there, once a frame.
"""

from __future__ import annotations

import time

PIECE_S = 3e-4  # of painting between two pauses
_since = 0.0


def give_way() -> None:
    """Pause for a moment (about 60 us) without the interpreter's lock, unless the last pause was just now."""
    global _since
    if time.perf_counter() - _since > PIECE_S:
        time.sleep(0)
        _since = time.perf_counter()
