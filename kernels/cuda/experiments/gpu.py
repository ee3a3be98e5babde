"""The experiments' device: torch for memory and timing, NVRTC and the driver for the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.build import CUDA_DIRECTORY, architecture, compile_cubin
from kernels.cuda.driver import BoundLaunch, Driver, Kernel, Module
from kernels.cuda.experiments.sweep import Buffer, Fill, Launch, Step

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = CUDA_DIRECTORY / "experiments"
SOURCES = tuple(sorted(path.stem for path in FOLDER.glob("*.cu")))
SHARED_WITHOUT_ASKING = 48 << 10


@dataclass(frozen=True)
class TensorBuffer:
    """A one-dimensional uint8 tensor."""

    tensor: Tensor

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()


class CudaDevice:
    """Device 0. Buffers live as long as it does, because launches hold bare addresses.

    driver, place: a test puts a fake library and the CPU's memory there. Raises GpuUnavailable, and CompileError from
    the first kernel of a source that does not compile.
    """

    def __init__(
        self,
        cubin_cache: Path | None = None,
        progress: Callable[[str], None] | None = None,
        *,
        driver: Driver | None = None,
        place: str = "cuda",
    ) -> None:
        self._driver = driver or Driver()
        self.gpu = self._driver.gpu()
        self.sms, self.shared_bytes = self.gpu.sm_count, self.gpu.shared_per_block
        self._cache, self._progress, self._place = cubin_cache, progress, place
        self._buffers: list[TensorBuffer] = []
        self._modules: dict[str, Module] = {}
        self._kernels: dict[tuple[str, str], Kernel] = {}

    # -- memory

    def random(self, nbytes: int, seed: int) -> TensorBuffer:
        import torch

        generator = torch.Generator(self._place).manual_seed(seed)
        bytes_ = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=self._place, generator=generator)
        return self._kept(bytes_)

    def free_bytes(self) -> int:
        return self._driver.memory()[0]

    def put(self, array: np.ndarray) -> TensorBuffer:
        import torch

        return self._kept(torch.from_numpy(array.reshape(-1).view(np.uint8).copy()).to(self._place))

    def _kept(self, tensor: Tensor) -> TensorBuffer:
        self._buffers.append(TensorBuffer(tensor))
        return self._buffers[-1]

    def read(self, buffer: Buffer, dtype: Any, start: int = 0, count: int = -1) -> np.ndarray:
        assert isinstance(buffer, TensorBuffer)
        size = np.dtype(dtype).itemsize
        last = None if count < 0 else (start + count) * size
        return buffer.tensor[start * size : last].cpu().numpy().view(dtype)

    # -- work

    def run(self, steps: Sequence[Step]) -> None:
        self._enqueue(self._bind(steps))
        self._driver.synchronize()

    def timer(self, steps: Sequence[Step]) -> Callable[[], float]:
        """The steps as one CUDA graph, so that the host's launches are not what is timed; without a graph where there
        is a cooperative kernel, whose sweep is a single launch."""
        import torch

        bound = self._bind(steps)
        cooperative = any(isinstance(step, Launch) and step.cooperative for step in steps)
        work = partial(self._enqueue, bound) if cooperative else self._graph(bound)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def once() -> float:
            begin.record()
            work()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) * 1e-3

        return once

    def _graph(self, bound: Sequence[BoundLaunch | Fill]) -> Callable[[], None]:
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._enqueue(bound)
        return graph.replay

    def _bind(self, steps: Sequence[Step]) -> list[BoundLaunch | Fill]:
        return [self._bound(step) if isinstance(step, Launch) else step for step in steps]

    def _bound(self, step: Launch) -> BoundLaunch:
        kernel = self._kernel(step.source, step.kernel)
        if step.shared > SHARED_WITHOUT_ASKING:
            kernel.allow_shared(self.shared_bytes)
        return kernel.bind(step.grid, step.threads, step.arguments, shared=step.shared, cooperative=step.cooperative)

    def _kernel(self, source: str, name: str) -> Kernel:
        if source not in self._modules:
            self._modules[source] = Module(self._driver, self._compile(source))
        if (source, name) not in self._kernels:
            self._kernels[source, name] = self._modules[source].kernel(name)
        return self._kernels[source, name]

    def _compile(self, source: str) -> bytes:
        return compile_cubin(
            FOLDER / f"{source}.cu",
            arch=architecture(self.gpu.capability),
            cache=self._cache,
            driver_version=self.gpu.driver_version,
            progress=self._progress,
        ).code

    def _enqueue(self, bound: Sequence[BoundLaunch | Fill]) -> None:
        self._driver.use_device()
        stream = self._stream()
        for step in bound:
            if isinstance(step, Fill):
                assert isinstance(step.buffer, TensorBuffer)
                step.buffer.tensor.fill_(step.byte)
            else:
                step.launch(stream)

    def _stream(self) -> int:
        """torch's current stream, also while a graph is being captured."""
        if self._place == "cpu":
            return 0
        import torch

        return torch.cuda.current_stream().cuda_stream
