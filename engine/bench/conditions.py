"""Under what conditions a figure was taken: the model and its bytes, the backend, and both bandwidths, each named."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from engine.loading import Engine
from engine.machine.hardware import Bandwidth

GPU_BUFFER_BYTES = 4 << 30


@dataclass(frozen=True)
class Conditions:
    """weight_bytes: read by one step, by kind of tensor, scales and padding included. kv_bytes: that each position of
    context adds to it. peak: what 100 % MBU means; measured: the streaming read of this machine. On a CPU they are
    the same: no driver tells the peak of a memory."""

    model: str
    variant: str
    parameters: int
    backend: str
    description: str
    weight_bytes: dict[str, int]
    kv_bytes: int
    peak: Bandwidth | None
    measured: Bandwidth | None

    @property
    def step_bytes(self) -> int:
        """Of the weights that one step reads."""
        return sum(self.weight_bytes.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "variant": self.variant,
            "parameters": self.parameters,
            "backend": self.backend,
            "device": self.description,
            "weight_bytes_per_step": self.step_bytes,
            "ledger": self.weight_bytes,
            "kv_bytes_per_position": self.kv_bytes,
            **bandwidth_json(self.peak, self.measured),
        }


def bandwidth_json(peak: Bandwidth | None, measured: Bandwidth | None) -> dict[str, Any]:
    return {
        "peak_gb_s": peak.gb_s if peak else None,
        "peak_source": peak.source if peak else None,
        "measured_gb_s": measured.gb_s if measured else None,
        "measured_source": measured.source if measured else None,
    }


def conditions(engine: Engine, seen_gb_s: float = 0.0) -> Conditions:
    """seen_gb_s: the best rate that decoding reached; a measured peak below it is taken again."""
    peak = engine.bandwidth(seen_gb_s)
    here, deeper = engine.backend.ledger(1, 0), engine.backend.ledger(1, 1)
    on_gpu = engine.backend.name == "cuda"
    return Conditions(
        model=engine.name,
        variant=engine.model.manifest.variant,
        parameters=parameters(engine.model.config),
        backend=engine.backend.name,
        description=engine.backend.description,
        weight_bytes=dict(here.weights),
        kv_bytes=deeper.kv_read - here.kv_read,
        peak=peak,
        measured=gpu_streaming_read() if on_gpu else peak,
    )


def parameters(config: Any) -> int:
    """Weights of all matrices, an embedding that is also the head counted once."""
    import math

    from engine.packed.tensors import tensor_shapes

    return sum(math.prod(shape) for shape in tensor_shapes(config).values() if len(shape) == 2)


def gpu_streaming_read(size: int = GPU_BUFFER_BYTES, passes: int = 5) -> Bandwidth:
    """The best of some sums over a buffer of at most `size` bytes, by torch, far beyond the L2 cache."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    buffer = torch.ones(min(size, free // 2) // 4, dtype=torch.float32, device="cuda")
    best = float("inf")
    for _ in range(passes + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        buffer.sum()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e-3)
    gb_s = buffer.nbytes / best / 1e9
    del buffer
    torch.cuda.empty_cache()
    return Bandwidth(gb_s, f"measured streaming read, torch.sum of {min(size, free // 2) / 1e9:.1f} GB")


def busy_note() -> str | None:
    """A warning where other programs wanted the processors in the last minute; None where it was quiet or nobody
    knows. Take it before measuring."""
    from kernels.cpu.threads import usable_cpus

    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
    cpus = len(usable_cpus())
    if load <= cpus / 2:
        return None
    return f"this machine is busy (load {load:.1f} on {cpus} processors): figures will be too low"


def utc_now() -> str:
    """ISO 8601, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
