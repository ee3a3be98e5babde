"""The tokens of a running loop, as the kernel leaves them in pinned memory, one entry each."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from kernels.cuda.megakernel import Megakernel


class KernelStopped(RuntimeError):
    """The kernel stopped answering or failed; the CUDA context may be unusable from here on."""


@dataclass(frozen=True)
class Step:
    """One pass of a loop: how many tokens it brought, how many drafts it verified and how many of those it accepted.

    match: how many tokens the end of the history had in common with the place that the drafts came from; 0 where a
    learned drafter made them.
    """

    tokens: int
    drafted: int = 0
    accepted: int = 0
    match: int = 0


TOKEN_ENTRY = np.dtype([("id", "<u4"), ("step", "<u4"), ("nanoseconds", "<u8")])  # HostToken; bits in speculate.cuh
_INDEX_MASK = (1 << 20) - 1  # of ids and of 1 + the token's index


def read_entries(entries: np.ndarray, first: int, most: int) -> tuple[list[int], list[int], list[Step], int]:
    """Ids, clocks in nanoseconds and steps from entry `first` on, whole steps only, and where the next look begins.

    entries: TOKEN_ENTRY [>= most]; an entry that has not been written yet has another index.
    """
    last, begun, steps = first, first, []
    while last < most and (word := int(entries["step"][last])) & _INDEX_MASK == (last + 1) & _INDEX_MASK:
        last += 1
        if word >> 28 == 0:
            match = int(entries["id"][last - 1]) >> 20
            steps.append(Step(last - begun, word >> 20 & 15, word >> 24 & 15, match))
            begun = last
    rows = entries[first:begun]
    return (rows["id"] & _INDEX_MASK).tolist(), rows["nanoseconds"].tolist(), steps, begun


class TokenRing:
    """A running whole-loop decode: tokens arrive in pinned memory while the kernel goes on."""

    def __init__(self, owner: Megakernel, max_tokens: int, finished: torch.cuda.Event) -> None:
        self._owner, self._max_tokens, self._finished = owner, max_tokens, finished
        self._taken = 0
        self._entries = owner._host_tokens
        self._lock = threading.Lock()

    def poll(self) -> tuple[list[int], list[float]]:
        """Ids that arrived since the last call, and for each the seconds from the kernel's start to its completion.

        Never blocks. Raises KernelStopped.
        """
        return self.poll_steps()[:2]

    def poll_steps(self) -> tuple[list[int], list[float], list[Step]]:
        """What `poll` returns, and the steps that brought it. Tokens come in whole steps."""
        with self._lock:
            ended = self.done
            ids, clocks, steps, self._taken = read_entries(self._entries, self._taken, self._max_tokens)
            if not ids and ended:
                self._owner._raise_if_stopped()
            started = int(self._owner._host_control[1])
            return ids, [(ns - started) * 1e-9 for ns in clocks], steps

    @property
    def done(self) -> bool:
        """True once the kernel has ended (a last `poll` may still return tokens)."""
        try:
            return self._finished.query()
        except RuntimeError:  # a failed kernel; poll says what happened
            return True

    def cancel(self) -> None:
        """Ask the kernel to stop within one step. Idempotent, callable from any thread."""
        self._owner._host_control[2] = 1

    def wait(self) -> tuple[list[int], list[float]]:
        """All remaining tokens, blocking until the kernel has ended."""
        ids: list[int] = []
        seconds: list[float] = []
        while True:
            ended = self.done
            more = self.poll()
            ids += more[0]
            seconds += more[1]
            if ended and not more[0]:
                return ids, seconds
            time.sleep(0.0002)
