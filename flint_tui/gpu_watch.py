"""Reads a GPU's clocks, power and memory once a second through NVML, in a thread of its own (a call may take 20 ms)."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuReading:
    name: str
    sm_mhz: int
    memory_mhz: int
    watts: float
    limit_watts: float
    used_bytes: int
    total_bytes: int
    celsius: int


class GpuWatch:
    """`reading` is the latest, or None where NVML is missing or fails."""

    INTERVAL_S = 1.0

    def __init__(self, index: int = 0) -> None:
        self.reading: GpuReading | None = None
        self._index = index
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="flint-gpu", daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(self._index)
            while not self._stop.wait(0 if self.reading is None else self.INTERVAL_S):
                self.reading = read(pynvml, handle)
        except pynvml.NVMLError:
            self.reading = None
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()


def read(nvml: Any, handle: object) -> GpuReading:
    """One reading of a device through the pynvml module; raises NVMLError."""
    name = nvml.nvmlDeviceGetName(handle)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuReading(
        name=name.decode() if isinstance(name, bytes) else name,
        sm_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        memory_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        watts=nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        limit_watts=nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        used_bytes=memory.used,
        total_bytes=memory.total,
        celsius=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    )
