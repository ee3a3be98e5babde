"""`flint bench kernels`: the experiments of kernels/cuda/experiments, each correct before it is timed, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.bench.clocks import snapshot
from engine.bench.conditions import utc_now
from engine.bench.environment import commit
from engine.errors import BackendError, DeviceOutOfMemory, UsageError
from engine.files.disk import human_bytes
from engine.machine.datasheets import recognise
from engine.machine.hardware import Bandwidth, gpu_bandwidth
from engine.statistics import ROUNDS, Comparison, Summary, compare, summarise
from kernels.build import CompileError
from kernels.cuda.driver import CudaError
from kernels.cuda.experiments.levers import LEVERS
from kernels.cuda.experiments.sweep import Device, Size, Variant, Weights

if TYPE_CHECKING:
    from kernels.cuda.experiments.gpu import CudaDevice

WARM_UPS = 2
MEMORY_SHARE = 0.8  # of the free memory: scales, results and kernels need some, too
COLD = 4  # times the L2 cache: what a sweep reads at least, so that none of it is still there in the next


@dataclass(frozen=True)
class Row:
    """One variant's outcome. samples: seconds for one `unit`, a sweep's mean each. error: of its check, None where it
    was not run. problem: why it has no samples: missing here, or wrong."""

    lever: str
    name: str
    why: str
    unit: str
    bytes: int
    base: bool
    error: float | None = None
    samples: tuple[float, ...] = ()
    problem: str = ""

    @property
    def summary(self) -> Summary:
        return summarise(self.samples)

    @property
    def gb_s(self) -> float | None:
        """By the median; None where the unit is not about bytes."""
        return self.bytes / self.summary.median / 1e9 if self.samples and self.bytes else None


@dataclass(frozen=True)
class Outcome:
    """rows: lever by lever. peak: the datasheet's or driver's figure. states: clocks and throttle
    reasons behind each lever, by its key."""

    gpu: str
    size: Size
    rounds: int
    peak: Bandwidth | None
    rows: tuple[Row, ...]
    states: dict[str, Any]

    @property
    def read(self) -> Bandwidth | None:
        """The fastest streaming read of this run."""
        rates = [(row.gb_s or 0.0, row.name) for row in self.rows if row.lever == "streaming read" and row.samples]
        return Bandwidth(*max(rates)) if rates else None

    def comparison(self, row: Row) -> Comparison | None:
        """The row's speed against its lever's base."""
        base = next((other for other in self.rows if other.lever == row.lever and other.base), None)
        if base is None or base is row or not (base.samples and len(row.samples) >= ROUNDS):
            return None
        return compare([1 / s for s in row.samples], [1 / s for s in base.samples])

    @property
    def complete(self) -> bool:
        """Whether every variant that exists for this GPU gave the right result."""
        return not any(row.problem and row.error is not None for row in self.rows)


def open_device(progress: Callable[[str], None]) -> CudaDevice:
    """The GPU. Raises BackendError, one line, where there is none or no CUDA build of torch."""
    from engine.files.paths import cache_dir
    from kernels.cuda.driver import GpuUnavailable
    from kernels.cuda.experiments.gpu import CudaDevice

    try:
        device = CudaDevice(cache_dir() / "kernels", progress)
    except (GpuUnavailable, CudaError) as error:
        raise BackendError(f"flint bench kernels needs an NVIDIA GPU: {error}") from None
    import torch

    if not torch.cuda.is_available():
        raise BackendError(f"flint bench kernels needs a CUDA build of torch; torch {torch.__version__} sees no GPU")
    return device


def chosen(names: str | None) -> list[str]:
    """ "gemv,barrier" -> the levers' keys, the streaming read always among them. Raises UsageError."""
    wanted = names.split(",") if names else list(LEVERS)
    unknown = [name for name in wanted if name not in LEVERS]
    if unknown:
        raise UsageError(f"No lever named {unknown[0][:60]!r}", f"Use some of {', '.join(LEVERS)}.")
    return [key for key in LEVERS if key in wanted or key == "read"]


def run(
    device: CudaDevice, size: Size, rounds: int, keys: Sequence[str], say: Callable[[str], None] = lambda text: None
) -> Outcome:
    """Raises UsageError for a size that the kernels do not take or the L2 cache would serve, DeviceOutOfMemory,
    BackendError."""
    gpu = device.gpu
    if size.problem():
        raise UsageError(size.problem())
    if size.total_bytes < COLD * gpu.l2_bytes:
        raise UsageError(
            f"{human_bytes(size.total_bytes)} of weights are less than {COLD} times the L2 cache "
            f"({human_bytes(gpu.l2_bytes)})",
            "Give more --layers.",
        )
    free = device.free_bytes()
    if MEMORY_SHARE * free < size.total_bytes:
        raise DeviceOutOfMemory(
            f"{human_bytes(size.total_bytes)} of weights with what goes with them do not fit {human_bytes(free)} "
            f"of free memory on the {gpu.name}",
            "Give fewer --layers.",
        )
    rows: list[Row] = []
    states: dict[str, Any] = {}
    say("random weights")
    weights = Weights(device, size)
    for key in keys:
        try:
            rows += measure(LEVERS[key](device, weights), device, rounds, say)
        except CudaError as error:
            raise BackendError(f"{key}: the GPU reports {error}") from error
        states[key] = snapshot()
    sheet = recognise(gpu.name, gpu.memory_bytes)
    datasheet = Bandwidth(sheet.bandwidth_gb_s, f"datasheet of the {sheet.name}") if sheet else None
    return Outcome(gpu.name, size, rounds, datasheet or gpu_bandwidth(gpu), tuple(rows), states)


def measure(
    variants: Sequence[Variant], device: Device, rounds: int, say: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """Check each variant, then time the right ones A B C, A B C, ..., `rounds` sweeps each."""
    errors: dict[str, float] = {}
    problems = {variant.name: variant.missing for variant in variants}
    for variant in variants:
        if variant.missing:
            continue
        say(f"{variant.lever}: checking {variant.name}")
        try:
            errors[variant.name] = error = variant.check()
        except CompileError as failure:
            problems[variant.name] = f"does not compile: {failure}"
            continue
        if error > variant.tolerance:
            problems[variant.name] = f"wrong: error {error:.1e} where {variant.tolerance:.0e} is allowed"
    right = [variant for variant in variants if not problems[variant.name]]
    timers = {variant.name: device.timer(variant.steps) for variant in right}
    samples: dict[str, list[float]] = {variant.name: [] for variant in right}
    for turn in range(WARM_UPS + rounds):
        for variant in right:
            say(f"{variant.lever}: {variant.name}, {max(0, turn - WARM_UPS + 1)} of {rounds}")
            seconds = timers[variant.name]() / variant.units
            if turn >= WARM_UPS:
                samples[variant.name].append(seconds)
    return [
        Row(
            variant.lever,
            variant.name,
            variant.why,
            variant.unit,
            variant.bytes,
            variant.base,
            errors.get(variant.name),
            tuple(samples.get(variant.name, ())),
            problems[variant.name],
        )
        for variant in variants
    ]


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    peak, read = outcome.peak, outcome.read
    return {
        "bench": "kernels",
        "gpu": outcome.gpu,
        "commit": commit(),
        "created": utc_now(),
        "hidden": outcome.size.hidden,
        "inner": outcome.size.inner,
        "layers": outcome.size.layers,
        "weight_bytes": outcome.size.total_bytes,
        "rounds": outcome.rounds,
        "peak_gb_s": peak.gb_s if peak else None,
        "peak_source": peak.source if peak else None,
        "read_gb_s": read.gb_s if read else None,
        "read_source": read.source if read else None,
        "rows": [_row_json(row, outcome) for row in outcome.rows],
        "states": outcome.states,
    }


def _row_json(row: Row, outcome: Outcome) -> dict[str, Any]:
    comparison, gb_s = outcome.comparison(row), row.gb_s
    return {
        "lever": row.lever,
        "variant": row.name,
        "why": row.why,
        "unit": row.unit,
        "bytes": row.bytes or None,
        "base": row.base,
        "problem": row.problem or None,
        "error": row.error if row.error != float("inf") else None,
        "median_s": row.summary.median if row.samples else None,
        "samples_s": list(row.samples),
        "bandwidth_gb_s": gb_s,
        "of_peak": gb_s / outcome.peak.gb_s if gb_s and outcome.peak else None,
        "of_read": gb_s / outcome.read.gb_s if gb_s and outcome.read else None,
        "speed": comparison.ratio if comparison else None,
        "interval": [comparison.low, comparison.high] if comparison else None,
        "verdict": comparison.verdict if comparison else None,
    }
