"""Everything here needs a GPU; without one each test skips and says why."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from engine.backends.cuda import CudaBackend, find_gpu
from engine.errors import BackendError
from engine.packed.model import PackedModel
from kernels.cuda.driver import Gpu
from tests.gpu.models import RandomModel

Opener = Callable[..., CudaBackend]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Failures at once, to the file FLINT_TEST_FAILURES: a run that is cut short still says what failed, and why."""
    path = os.environ.get("FLINT_TEST_FAILURES")
    if path and report.failed:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n\n")


@pytest.fixture(scope="session", autouse=True)
def gpu() -> Gpu:
    try:
        found = find_gpu()
    except BackendError as error:
        pytest.skip(str(error))
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} was built without CUDA")
    return found


@pytest.fixture(scope="session")
def packed_smollm2(request: pytest.FixtureRequest) -> Path:
    """The packed directory of the real smollm2: FLINT_TEST_PACKED, else packed here."""
    given = os.environ.get("FLINT_TEST_PACKED")
    return Path(given) if given else request.getfixturevalue("smollm2")


@pytest.fixture(autouse=True)
def _shared_kernels(monkeypatch: pytest.MonkeyPatch, _isolated_home: None) -> None:
    """Compiled kernels outlive a test, a worker and a run: they are found by what they were made from."""
    monkeypatch.setenv("FLINT_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"flint-gpu-tests-{os.getuid()}"))


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    """Each test starts with the GPU's memory free."""
    yield
    import torch

    torch.cuda.empty_cache()


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Opens backends, and closes them after the test."""
    backends: list[CudaBackend] = []

    def open_one(model: RandomModel, context_size: int = 512) -> CudaBackend:
        backends.append(CudaBackend.from_packed(cast(PackedModel, model), context_size=context_size))
        return backends[-1]

    yield open_one
    for backend in backends:
        backend.close()
