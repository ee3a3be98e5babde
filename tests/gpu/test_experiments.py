"""`flint bench kernels` on the GPU: every variant right, and a timer that times."""

from __future__ import annotations

import pytest

from kernels.cuda.experiments.gpu import CudaDevice
from kernels.cuda.experiments.levers import LEVERS
from kernels.cuda.experiments.sweep import Size, Weights

SIZES = {"granite-3b": Size(2560, 8192, 4), "smollm2": Size(640, 1536, 6)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lever", LEVERS)
def test_every_variant_is_right_and_can_be_timed(lever: str, size: str, record_property) -> None:
    device = CudaDevice()
    worst = 0.0
    for variant in LEVERS[lever](device, Weights(device, SIZES[size])):
        if variant.missing:
            continue
        error = variant.check()
        assert error <= variant.tolerance, variant.name
        worst = max(worst, error)
        seconds = device.timer(variant.steps)
        assert min(seconds() for _ in range(3)) > 0, variant.name
        assert variant.check() == error, f"{variant.name} gives other results after a replay"
    record_property("worst", worst)
