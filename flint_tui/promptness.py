"""Asks the system to let the decoder go on the moment it can.

The decoder's thread comes back from native code hundreds of times a second, often while another thread paints. Where
both are on one core, the painting one would keep it for the rest of its time slice (1 to 4 ms); a shorter slice has the
right to interrupt a longer one.
"""

from __future__ import annotations

import os
import platform
import struct
import sys

SLICE_NS = 100_000  # the shortest that Linux grants (6.12 and later; older kernels ignore it)
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # system call numbers: the C library has no function for it


def go_on_promptly() -> bool:
    """For the calling thread and those it starts. False where the system has no such thing, or refuses."""
    call = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or call is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    import ctypes

    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # struct sched_attr: size, policy, flags, nice, priority, runtime (here: the slice), deadline, period, clamps
    attributes = struct.pack("=IIQiIQQQII", 56, os.SCHED_OTHER, 0, nice, 0, SLICE_NS, 0, 0, 0, 0)
    return ctypes.CDLL(None).syscall(call, 0, attributes, 0) == 0
