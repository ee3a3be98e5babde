"""kernels/cuda/experiments: every kernel compiles without spills, and computes the right thing on an emulated GPU."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from kernels.build import ARCHITECTURES, compile_cubin
from kernels.cuda.driver import CudaError
from kernels.cuda.experiments import formats, hardware, launching, products
from kernels.cuda.experiments.gpu import FOLDER, SOURCES, CudaDevice
from kernels.cuda.experiments.levers import LEVERS
from kernels.cuda.experiments.sweep import Launch, RowsArgument, Size, Step, Variant, Weights
from tests.kernels.emulated import EmulatedDevice, kernels_of, libraries

# Channels that fill a chunk of 1024 and a quarter of the next, or two and a half; or less than one.
SMALL = Size(hidden=384, inner=2560, layers=2)
SIZES = {"gemv": Size(1280, 256, 2), "tensor": Size(384, 256, 2), "sparsity": Size(640, 256, 2)}
OFTEN = ("sm_80", "sm_90a", "sm_100a")

needs_compiler = pytest.mark.skipif(not libraries(), reason="no g++ to run the kernels on the CPU")


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch in OFTEN else pytest.mark.slow) for arch in ARCHITECTURES]
)
@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_compiles_without_spills(source: str, arch: str) -> None:
    cubin = compile_cubin(FOLDER / f"{source}.cu", arch=arch)
    reports = {r.name: r for r in cubin.reports if r.entry}
    assert set(reports) == set(kernels_of(source))
    for report in reports.values():
        print(f"{arch} {report.name}: {report.registers} registers, {report.spills} bytes of spills")
        assert (report.spills, report.stack) == (0, 0), report


def test_four_blocks_of_the_plain_kernels_fit_an_sm() -> None:
    """launching.BLOCKS_PER_SM stands on it."""
    for report in compile_cubin(FOLDER / "gemv.cu", arch="sm_90a").reports:
        assert report.registers * 256 * launching.BLOCKS_PER_SM <= 65536, report.name


# --- the layouts ------------------------------------------------------------------------------------------------------


def scattered(layout: str, q: np.ndarray) -> np.ndarray:
    """The words of nibbles [rows, channels], written weight by weight from the drawings."""
    rows, channels = q.shape
    out = np.zeros(rows * channels // 2, np.uint8)

    def put(nibble: int, byte: int, high: bool) -> None:
        out[byte] |= nibble << (4 if high else 0)

    for row in range(rows):
        for k in range(channels):
            nibble = int(q[row, k])
            if layout == "rows":
                index = row * channels + k
                put(nibble, index // 2, index % 2 == 1)
            elif layout == "columns":
                index = k * rows + row
                put(nibble, index // 2, index % 2 == 1)
            else:
                block, half, t, i = k // 64, k % 64 // 32, k % 32 // 8, k % 8
                lane = row % 8 * 4 + t
                byte = (row // 16 * (channels // 64) + block) * 512 + lane * 16 + half * 8 + i
                put(nibble, byte, row % 16 >= 8)
    return out.view(np.uint32)


@pytest.mark.parametrize("layout", ["rows", "columns", "tiles"])
def test_numpy_reads_the_layout_that_is_drawn(layout: str) -> None:
    rng = np.random.default_rng(1)
    q, scales = rng.integers(0, 16, (32, 256)), rng.uniform(0.5, 1.5, (32, 2)).astype(np.float16)
    expected = (q - 8) * np.repeat(scales.astype(np.float32), 128, axis=1)
    given = scales.T if layout == "columns" else scales
    read = getattr(formats, f"from_{layout}")(scattered(layout, q), np.ascontiguousarray(given).reshape(-1), 32, 256)
    np.testing.assert_array_equal(read, expected.astype(np.float32))


def test_fixed_point_x_is_x() -> None:
    x = np.random.default_rng(2).standard_normal(384).astype(np.float32)
    x[128:256] = 0.0
    blocks, groups = formats.quantise_x(x)
    fixed = (blocks[:, 0].astype(int) * 256 + blocks[:, 1]).reshape(-1, 128)
    scale = groups[:, 0].copy().view(np.float32)
    assert np.abs(fixed * scale[:, None] - x.reshape(-1, 128)).max() <= scale.max() / 2
    np.testing.assert_array_equal(groups[:, 1], -8 * fixed.sum(axis=1))


# --- the kernels ------------------------------------------------------------------------------------------------------


def variants_of(lever: str, device: EmulatedDevice) -> list[Variant]:
    return LEVERS[lever](device, Weights(device, SIZES.get(lever, SMALL)))


@needs_compiler
@pytest.mark.parametrize("order", [5, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lever", LEVERS)
def test_every_variant_computes_the_right_thing(lever: str, order: int) -> None:
    device = EmulatedDevice(sms=14 if lever == "barrier" else 3, order=order)
    variants = variants_of(lever, device)
    assert [v.base for v in variants].count(True) == 1
    assert len({v.name for v in variants}) == len(variants)
    for variant in variants:
        if variant.missing:
            continue
        error = variant.check()
        print(f"{variant.lever}, {variant.name}: {error:.1e} of {variant.tolerance:.0e}")
        assert error <= variant.tolerance, variant.name


@needs_compiler
def test_a_check_notices_one_wrong_weight_and_one_row_that_nobody_wrote() -> None:
    """The checks can fail: a changed word in the middle matrix's reference, a launch left out."""
    device = EmulatedDevice()
    plain = next(v for v in variants_of("gemv", device) if v.base)
    last = plain.steps[-1]
    assert isinstance(last, Launch)
    assert plain.check() <= plain.tolerance
    last.arguments[0].words += 4  # every weight of the last matrix from its neighbour
    assert plain.check() > plain.tolerance
    last.arguments[0].words -= 4
    last.arguments[0].rows -= 32
    assert plain.check() == float("inf")


@needs_compiler
def test_a_slot_that_changes_warps_is_an_error_where_copies_end_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """ring_tensor.cu with stages that are no multiple of its warps: a warp takes another's phase for its own."""

    def ring() -> Variant:
        device = EmulatedDevice(order=5)
        return next(v for v in LEVERS["gemv"](device, Weights(device, Size(1280, 1024, 2))) if "tensor" in v.name)

    right = ring()
    assert right.check() <= right.tolerance
    monkeypatch.setattr(products, "TENSOR_WARPS", 9)
    with pytest.raises(CudaError, match="719"):
        ring().check()


def test_a_device_with_little_shared_memory_is_told_what_does_not_fit() -> None:
    device = EmulatedDevice(shared_bytes=40_000)
    both = [*variants_of("read", device), *variants_of("gemv", device)]
    missing = {v.name: v.missing for v in both if v.missing}
    assert "bulk copies, 3 x 16 KB" in missing
    assert "bulk copies, 2 x 16 KB" not in missing
    assert missing["bulk copies, 4 x 16 KB"] == "needs 65,792 bytes of shared memory, a block may have 40,000"
    for variant in (v for v in both if not v.missing):
        assert all(step.shared <= 40_000 for step in variant.steps if isinstance(step, Launch)), variant.name


@pytest.mark.parametrize("lever", LEVERS)
def test_a_sweep_reads_every_matrix_once(lever: str) -> None:
    """No two launches of a sweep read the same words: what is timed never comes from the L2 cache."""
    device = EmulatedDevice()
    for variant in variants_of(lever, device):
        words = [matrix.words for step in variant.steps for matrix in matrices_of(step)]
        assert len(words) == len(set(words)), variant.name
        assert variant.missing or variant.units * variant.bytes <= 2 * SIZES.get(lever, SMALL).total_bytes


def matrices_of(step: Step) -> list[RowsArgument]:
    """The matrices that a launch reads, where its arguments name them one by one."""
    return [a for a in step.arguments if isinstance(a, RowsArgument)] if isinstance(step, Launch) else []


@needs_compiler
@pytest.mark.parametrize(("lever", "captured"), [("fusion", True), ("barrier", False)])
def test_a_timer_replays_a_graph_but_launches_cooperative_kernels(
    lever: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = []

    class Graph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return 2.0  # milliseconds

    @contextlib.contextmanager
    def capture(graph: Graph):
        graphs.append(graph)
        yield

    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    monkeypatch.setattr("torch.cuda.graph", capture)
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr(hardware, "BARRIERS", 2)
    device = EmulatedDevice()
    steps = variants_of(lever, device)[0].steps
    device.library.calls.clear()
    seconds = CudaDevice.timer(device, steps)
    launches = sum(isinstance(step, Launch) for step in steps)

    def launched() -> int:
        return sum("Launch" in call for call in device.library.calls)

    assert launched() == (launches if captured else 0)
    assert [seconds(), seconds()] == [2e-3, 2e-3]
    assert launched() == (launches if captured else 2 * launches)
    assert [graph.replays for graph in graphs] == ([2] if captured else [])
