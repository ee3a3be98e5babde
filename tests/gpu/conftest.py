"""Everything here needs a GPU; without one each test skips and says why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.backends.cuda import find_gpu
from engine.errors import BackendError
from kernels.cuda.driver import Gpu


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


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    """Each test starts with the GPU's memory free."""
    yield
    import torch

    torch.cuda.empty_cache()
