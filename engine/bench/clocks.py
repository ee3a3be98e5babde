"""The state of the machine while something is timed: load, clocks, power, and why a GPU holds its clock back."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

_FREQUENCIES = Path("/sys/devices/system/cpu")

# nvml.h, nvmlClocksEventReasons
THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal, software",
    0x40: "thermal, hardware",
    0x80: "power brake",
    0x100: "display clocks",
}


def snapshot() -> dict[str, Any]:
    """What can be read without privileges; what cannot is left out."""
    state: dict[str, Any] = {}
    with suppress(AttributeError, OSError):
        state["load"] = [round(value, 2) for value in os.getloadavg()]
    mhz = _cpu_mhz()
    if mhz:
        state["cpu_mhz"] = mhz
    gpu = _gpu_state()
    if gpu:
        state["gpu"] = gpu
    return state


def throttle_reasons(bits: int) -> list[str]:
    known = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    rest = bits & ~sum(THROTTLE_REASONS)
    return known + ([f"0x{rest:x}"] if rest else [])


def _cpu_mhz() -> dict[str, float]:
    """Least, mean and most over the processors' governors; nothing where there is none (most virtual machines)."""
    values = []
    for path in _FREQUENCIES.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
        with suppress(OSError, ValueError):
            values.append(int(path.read_text()) / 1e3)
    return {"low": min(values), "mean": sum(values) / len(values), "high": max(values)} if values else {}


def _gpu_state() -> dict[str, Any]:
    try:
        import pynvml as nvml
    except ImportError:
        return {}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return {}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        return {
            "sm_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "celsius": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "throttle": throttle_reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        }
    except nvml.NVMLError:
        return {}
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
