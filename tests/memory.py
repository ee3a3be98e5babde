"""The peak memory of this process.

Not getrusage's ru_maxrss: on Linux a new process starts with that of the one that started it, here of a whole test run.
"""

from __future__ import annotations

from pathlib import Path

STATUS = Path("/proc/self/status")


def peak_memory() -> int:
    """Largest resident size so far, in bytes. Linux only."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
