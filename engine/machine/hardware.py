"""How fast this machine's memory can be read: the denominator of MBU, always named.

On a CPU it is measured, once: streaming reads of a buffer well beyond the caches, by all threads at once. The result
is kept under the cache folder for this processor. On a GPU it is the driver's figure: memory clock x bus width x 2.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.files.paths import cache_dir
from kernels import native
from kernels.cpu.threads import default_threads

FILE_NAME = "bandwidth.json"
MIN_BUFFER_BYTES = 256 << 20
MAX_BUFFER_BYTES = 1 << 30
MEASURE_SECONDS = 0.6
MAX_MEASUREMENTS = 5
_L3_BYTES = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second / 1e9, and what kind of figure it is, for instance "measured streaming read, 2 threads"."""

    gb_s: float
    source: str


def streaming_bandwidth(seen_gb_s: float = 0.0) -> Bandwidth:
    """Streaming-read bandwidth of this machine's memory: from the cache, else measured (under a second) and kept.

    seen_gb_s: a rate at which decoding was seen to read. Where it is above the kept figure, that one was probably
    taken while the machine was busy: it is measured again, and the better one kept. A few times only, since a model
    that fits the caches may really be read faster than memory.
    """
    threads = default_threads()
    method = "native" if _native_is_ready() else "numpy"
    key = f"{processor()}, {threads} threads, {method}"
    known, times = _load(key)
    if known is not None and (seen_gb_s <= known.gb_s or times >= MAX_MEASUREMENTS):
        return known
    gb_s = native.streaming_bandwidth(threads) if method == "native" else _numpy_bandwidth(threads)
    measured = Bandwidth(gb_s, f"measured streaming read, {threads} thread{'s' if threads > 1 else ''}")
    best = max((measured, known or measured), key=lambda bandwidth: bandwidth.gb_s)
    _store(key, best, times + 1)
    return best


def gpu_bandwidth(gpu: Any) -> Bandwidth | None:
    """The driver's peak of a kernels.cuda.driver.Gpu; None where the driver hides the memory clock."""
    if gpu.peak_bytes_per_second <= 0:
        return None
    return Bandwidth(gpu.peak_bytes_per_second / 1e9, f"{gpu.name}, memory clock x bus width from the driver")


def physical_memory() -> int | None:
    """Bytes of RAM, or None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # no sysconf on Windows
        return None


def peak_memory() -> int | None:
    """Largest resident size of this process so far, in bytes; None where the system is not Linux.

    Not getrusage's ru_maxrss: on Linux a new process starts with that of the one that started it.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _native_is_ready() -> bool:
    """Whether the native library is there; it is not built for the sake of a measurement."""
    try:
        native.load()
    except native.LibraryMissing:
        return False
    return True


def _numpy_bandwidth(threads: int) -> float:
    """GB/s of `threads` threads each reading its part of one buffer, the best of the passes that fit the time."""
    buffer = np.ones(_buffer_bytes() // 4, dtype=np.float32)
    parts = np.array_split(buffer, threads)
    best, deadline = 0.0, time.perf_counter() + MEASURE_SECONDS
    while best == 0.0 or time.perf_counter() < deadline:
        barrier = threading.Barrier(threads + 1)

        def read(part: np.ndarray, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            part.max()  # vectorised, without the GIL, and bound by memory: 9.9 GB/s a thread where sum() reaches 8.6

        workers = [threading.Thread(target=read, args=(part,)) for part in parts]
        for worker in workers:
            worker.start()
        barrier.wait()
        start = time.perf_counter()
        for worker in workers:
            worker.join()
        best = max(best, buffer.nbytes / (time.perf_counter() - start) / 1e9)
    return best


def _buffer_bytes() -> int:
    """Twice the last-level cache, within bounds and within a quarter of the memory."""
    cache = 0
    with suppress(OSError, ValueError):
        cache = int(_L3_BYTES.read_text().strip().removesuffix("K")) * 1024
    wanted = min(max(2 * cache, MIN_BUFFER_BYTES), MAX_BUFFER_BYTES)
    return min(wanted, (physical_memory() or MAX_BUFFER_BYTES) // 4)


def processor() -> str:
    """The processor's model name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _load(key: str) -> tuple[Bandwidth | None, int]:
    """The kept figure, and how often it was measured."""
    try:
        entry = json.loads((cache_dir() / FILE_NAME).read_text(encoding="utf-8"))[key]
        known, times = Bandwidth(float(entry["gb_s"]), str(entry["source"])), int(entry["times"])
    except (OSError, ValueError, KeyError, TypeError):  # none yet, or damaged: it is measured again
        return None, 0
    return (known, times) if 0 < known.gb_s < 1e5 else (None, 0)


def _store(key: str, bandwidth: Bandwidth, times: int) -> None:
    """Add to the file, atomically. A cache that cannot be written costs the next process a measurement."""
    path = cache_dir() / FILE_NAME
    with suppress(OSError):
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            known = known if isinstance(known, dict) else {}
        except (OSError, ValueError):
            known = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{FILE_NAME}.{os.getpid()}")
        partial.write_text(
            json.dumps(known | {key: asdict(bandwidth) | {"times": times}}, indent=2) + "\n", encoding="utf-8"
        )
        partial.replace(path)
