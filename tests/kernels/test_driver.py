"""kernels/cuda/driver.py: what programs that measure say where there is no GPU."""

from __future__ import annotations

import pytest

from kernels.cuda import driver
from kernels.cuda.driver import CudaError, GpuUnavailable, driver_or_exit


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (GpuUnavailable("no NVIDIA driver is installed", ""), "no NVIDIA driver"),
        (CudaError("cuInit", 999, "X"), "cuInit"),
    ],
)
def test_without_a_gpu_a_program_ends_in_one_line(failure: Exception, words: str, monkeypatch: pytest.MonkeyPatch):
    def refuse() -> None:
        raise failure

    monkeypatch.setattr(driver, "_load_library", refuse)
    with pytest.raises(SystemExit, match=f"^this runs on an NVIDIA GPU only: {words}"):
        driver_or_exit()
