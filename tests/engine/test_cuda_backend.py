"""engine/backends/cuda.py without a GPU: what it asks of the kernels, and what it says when something fails."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends import cuda
from engine.backends.base import LoopStep, SpeculativeLoop, WholeLoop
from engine.backends.cuda import COLUMNS, PASSES, CudaBackend, find_gpu
from engine.errors import BackendError, ContextOverflow, DeviceOutOfMemory
from engine.packed.model import PackedModel
from engine.sampling import Sampling
from kernels.build import CompileError
from kernels.cuda import driver
from kernels.cuda.driver import CudaError, Driver, MappedMemory, Module, NotResident
from kernels.cuda.phases import Unsupported
from kernels.cuda.token_ring import TOKEN_ENTRY, KernelStopped, Step, read_entries
from tests.fake_cuda import FakeLibcuda
from tests.synthetic import small_config, write_random_packed

CONFIG = small_config("llama")
STOP = frozenset({2})


class FakeRing:
    """Tokens by script: each poll takes the next item, a list of ids or an exception; then the kernel has ended."""

    def __init__(self, script: Sequence[list[int] | Exception], *, hangs: bool = False, obeys: bool = True) -> None:
        self.script, self.hangs, self.obeys = list(script), hangs, obeys
        self.cancelled = False
        self.clock = 0.0

    @property
    def done(self) -> bool:
        return not self.script and (not self.hangs or (self.cancelled and self.obeys))

    def poll_steps(self) -> tuple[list[int], list[float], list[Step]]:
        if not self.script:
            return [], [], []
        item = self.script.pop(0)
        if isinstance(item, Exception):
            raise item
        seconds = [self.clock + 0.001 * (i + 1) for i in range(len(item))]
        self.clock += 0.001 * len(item)
        return item, seconds, [Step(len(item), 3, len(item) - 1, 2)]

    def cancel(self) -> None:
        self.cancelled = True


class FakeMegakernel:
    """Logits are the token's own id as a one-hot row; features are its position."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.kv_cache = object()
        self.weight_bytes = {"embed": 320 * 64, "q": 1000, "head": 320 * 64}
        self.ring: Callable[[], FakeRing] = lambda: FakeRing([[5], [6, 7]])
        self.streamed: dict[str, Any] = {}
        self.failure: Exception | None = None
        self.closed = False

    def step(self, tokens: Sequence[int], position: int, *, all_logits: bool = True, features: Sequence[int] = ()):
        if self.failure:
            raise self.failure
        self.calls.append((len(tokens), position))
        logits = torch.nn.functional.one_hot(torch.tensor(tokens), CONFIG.vocab_size).float()
        rows = torch.arange(position, position + len(tokens)).float()[:, None].expand(-1, CONFIG.hidden_size)
        return (logits if all_logits else logits[-1:]), {layer: rows + 1000 * layer for layer in features}

    def stream(self, token, position, sampling, max_tokens, stop_ids, history) -> FakeRing:
        if self.failure:
            raise self.failure
        self.streamed = {"token": token, "position": position, "sampling": sampling, "max_tokens": max_tokens}
        self.streamed |= {"stop_ids": stop_ids, "history": history}
        return self.ring()

    def stream_speculative(
        self, position, sampling, max_tokens, stop_ids, history, *, columns, most_drafts, least_match, learned
    ) -> FakeRing:
        self.stream(history[-1], position, sampling, max_tokens, stop_ids, history)
        self.streamed |= {
            "columns": columns,
            "most_drafts": most_drafts,
            "least_match": least_match,
            "learned": learned,
        }
        return self.ring()

    def close(self) -> None:
        self.closed = True


class FakePrefill:
    def __init__(self) -> None:
        self.calls: list[tuple[int, int, str]] = []

    def run(self, tokens, start, cache, *, logits, features=()):
        self.calls.append((len(tokens), start, logits))
        rows = torch.nn.functional.one_hot(torch.tensor(tokens), CONFIG.vocab_size).float()
        taken = {layer: torch.full((len(tokens), CONFIG.hidden_size), float(layer)) for layer in features}
        return SimpleNamespace(logits=rows if logits == "all" else rows[-1:], features=taken)


@pytest.fixture
def megakernel() -> FakeMegakernel:
    return FakeMegakernel()


@pytest.fixture
def backend(megakernel: FakeMegakernel) -> CudaBackend:
    gpu = Driver(FakeLibcuda()).gpu()
    return CudaBackend(CONFIG, gpu, megakernel, FakePrefill(), context_size=100)  # type: ignore[arg-type]


def stream(backend: CudaBackend, history: Sequence[int] = (1, 4), max_tokens: int = 50, **sampling: Any):
    return backend.stream(
        history[-1], sampling=Sampling(**sampling), max_tokens=max_tokens, stop_ids=STOP, history=history
    )


# --- steps ----------------------------------------------------------------------------------------------------------


def test_short_steps_run_in_passes_of_the_megakernel(backend: CudaBackend, megakernel: FakeMegakernel):
    tokens = list(range(10, 10 + 2 * COLUMNS + 3))
    output = backend.step(tokens, features=[0, 2])
    assert megakernel.calls == [(COLUMNS, 0), (COLUMNS, COLUMNS), (3, 2 * COLUMNS)]
    assert output.logits.argmax(axis=1).tolist() == tokens
    assert output.features[2][:, 0].tolist() == [2000.0 + i for i in range(len(tokens))]
    assert backend.position == len(tokens)
    last = backend.step([7, 8], logits="last")
    assert last.logits.shape == (1, CONFIG.vocab_size)
    assert last.logits.argmax() == 8


def test_a_gpu_with_little_shared_memory_takes_narrower_passes(megakernel: FakeMegakernel):
    gpu, prefill = Driver(FakeLibcuda()).gpu(), FakePrefill()
    narrow = CudaBackend(CONFIG, gpu, megakernel, prefill, context_size=100, columns=2)  # type: ignore[arg-type]
    assert narrow.verify_width == 2
    narrow.step([1, 2, 3])
    assert megakernel.calls == [(2, 0), (1, 2)]
    narrow.step([1] * (2 * PASSES + 1))
    assert len(prefill.calls) == 1


def test_long_steps_run_as_prefill(backend: CudaBackend, megakernel: FakeMegakernel):
    tokens = [3] * (PASSES * COLUMNS + 1)
    backend.step([9])
    output = backend.step(tokens, logits="last", features=[1])
    assert backend._prefill.calls == [(len(tokens), 1, "last")]  # type: ignore[union-attr]
    assert output.features[1].shape == (len(tokens), CONFIG.hidden_size)
    assert megakernel.calls == [(1, 0)]
    assert backend.position == 1 + len(tokens)


def test_truncate_moves_the_next_step_back(backend: CudaBackend, megakernel: FakeMegakernel):
    backend.step([1, 2, 3])
    backend.truncate(1)
    backend.step([4])
    assert megakernel.calls[-1] == (1, 1)
    with pytest.raises(ValueError, match="holds 2 tokens"):
        backend.truncate(3)


def test_bad_steps_are_refused(backend: CudaBackend):
    with pytest.raises(ValueError, match="at least one token"):
        backend.step([])
    with pytest.raises(ValueError, match=r"0\.\.319"):
        backend.step([320])
    with pytest.raises(ContextOverflow, match="101 tokens do not fit the context of 100"):
        backend.step([1] * 101)
    assert backend.position == 0


def test_the_ledger_counts_rows_of_the_embedding_and_the_whole_head(backend: CudaBackend):
    ledger = backend.ledger(2, 10)
    assert ledger.weights == {"embed": 2 * 64, "q": 1000, "head": 320 * 64}
    assert ledger.kv_written == 2 * 2 * 2 * CONFIG.num_layers * CONFIG.kv_size
    assert ledger.kv_read == 6 * ledger.kv_written


# --- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_yields_what_the_kernel_produced(backend: CudaBackend, megakernel: FakeMegakernel):
    assert isinstance(backend, WholeLoop)
    backend.step([1])
    batches = list(stream(backend, (1, 4), temperature=0.5, top_k=3, seed=9))
    assert [b.ids for b in batches] == [[5], [6, 7]]
    assert [t for b in batches for t in b.seconds] == pytest.approx([0.001, 0.002, 0.003])
    assert megakernel.streamed["position"] == 1
    assert megakernel.streamed["stop_ids"] == [2]
    assert megakernel.streamed["history"] == [1, 4]
    chosen = megakernel.streamed["sampling"]
    assert (chosen.temperature, chosen.top_k, chosen.top_p, chosen.seed) == (0.5, 3, 1.0, 9)
    assert backend.position == 1 + 3  # the token fed, and every yielded token but the last


def test_a_speculative_stream_tells_its_steps(backend: CudaBackend, megakernel: FakeMegakernel):
    assert isinstance(backend, SpeculativeLoop)
    backend.step([1])
    options: dict[str, Any] = {"sampling": Sampling(temperature=0.5), "max_tokens": 50, "stop_ids": STOP}
    batches = list(backend.stream_speculative(4, **options, history=[1, 4], width=4))
    assert [b.ids for b in batches] == [[5], [6, 7]]
    assert [step for b in batches for step in b.steps] == [LoopStep(1, 3, 0, 2), LoopStep(2, 3, 1, 2)]
    assert (megakernel.streamed["position"], megakernel.streamed["columns"]) == (1, 4)
    assert megakernel.streamed["most_drafts"] == 3
    assert backend.position == 1 + 3
    list(backend.stream_speculative(7, **options, history=[1, 4, 5, 6, 7], width=8, most_drafts=2))
    assert megakernel.streamed["most_drafts"] == 2


class FakeDrafts:
    """A head's cache that only counts: every token follows on, and the last one waits for the next."""

    def __init__(self) -> None:
        self.position = 0
        self.said: list[Any] = []

    def extend(self, tokens, start, features) -> None:
        if start == self.position:
            self.position += len(tokens)
            assert {layer: rows.shape for layer, rows in features.items()} == {
                layer: (len(tokens), CONFIG.hidden_size) for layer in features
            }
            self.said.append((start, len(tokens), sorted(features)))

    def complete(self, token: int) -> None:
        self.said.append(token)

    def truncate(self, position: int) -> None:
        self.position = min(self.position, position)

    def took(self, position: int) -> None:
        self.position = position


def holding(backend: CudaBackend, megakernel: FakeMegakernel, drafts: FakeDrafts) -> None:
    compiled: list[tuple[int, bool]] = []
    megakernel.hold_drafter = lambda head: drafts  # type: ignore[attr-defined]
    megakernel.draft_widths = (2, 4)  # type: ignore[attr-defined]
    megakernel.compile = lambda width, learned: compiled.append((width, learned))  # type: ignore[attr-defined]
    backend.hold_head(SimpleNamespace(dims=SimpleNamespace(feature_layers=(1, 2))), 6)  # type: ignore[arg-type]
    assert compiled == [(4, True)]


def learned(backend: CudaBackend, history: Sequence[int], width: int = 4) -> None:
    options: dict[str, Any] = {"sampling": Sampling(), "max_tokens": 50, "stop_ids": STOP}
    list(backend.stream_speculative(history[-1], **options, history=history, width=width, least_match=4, learned=True))


def test_a_held_head_follows_the_steps_and_its_loops(backend: CudaBackend, megakernel: FakeMegakernel):
    drafts = FakeDrafts()
    backend.step([1, 4])
    assert backend.head_widths == ()
    holding(backend, megakernel, drafts)
    assert backend.head_widths == (2, 4)
    assert drafts.said == []  # it trails
    history = [1, 4, *range(10, 50)]
    output = backend.step(history[2:-1], features=[2])
    assert list(output.features) == [2]
    assert drafts.said == []
    learned(backend, history)  # brought up to date: the prompt is fed again
    assert drafts.said == [(0, 41, [1, 2]), 49]
    assert (megakernel.streamed["learned"], megakernel.streamed["least_match"]) == (True, 4)
    assert drafts.position == backend.position == 41 + 3
    backend.step([7, 8])
    assert drafts.said[2:] == [(44, 2, [1, 2])]  # and from here on it follows
    backend.step([9], logits="last")
    list(stream(backend, [0] * 47 + [3]))  # single passes leave it behind
    assert (drafts.position, backend.position) == (47, 50)
    learned(backend, [5] * 50 + [6], width=2)
    assert drafts.said[3:] == [(46, 1, [1, 2]), (47, 3, [1, 2]), 6]
    backend.truncate(20)
    assert drafts.position == 20
    with pytest.raises(ValueError, match="no speculative loop of 8 tokens"):
        learned(backend, [1] * 21, width=8)


def test_a_head_that_the_kernel_does_not_run_is_one_line(backend: CudaBackend, megakernel: FakeMegakernel):
    def refuse(head: Any) -> None:
        raise Unsupported("a drafter's heads and epsilon (2, 1) are not the model's")

    megakernel.hold_drafter = refuse  # type: ignore[attr-defined]
    with pytest.raises(BackendError, match="does not run this drafter: a drafter's heads"):
        backend.hold_head(SimpleNamespace(dims=None), 4)  # type: ignore[arg-type]
    assert backend.head_widths == ()
    assert backend.step([1, 2]).logits.shape[0] == 2


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (CompileError("megakernel.cu does not compile"), "does not run this drafter: megakernel.cu does not compile"),
        (Unsupported("a block cannot be resident"), "does not run this drafter: a block cannot be resident"),
        (CudaError("cuModuleLoadData", driver.OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"), "out of memory"),
    ],
    ids=["compiler", "plan", "memory"],
)
def test_a_head_whose_kernel_cannot_be_had_is_not_held(
    backend: CudaBackend, megakernel: FakeMegakernel, failure: Exception, message: str
):
    def fail(width: int, learned: bool) -> None:
        raise failure

    drafts = FakeDrafts()
    megakernel.hold_drafter = lambda head: drafts  # type: ignore[attr-defined]
    megakernel.draft_widths = (2, 4)  # type: ignore[attr-defined]
    megakernel.compile = fail  # type: ignore[attr-defined]
    with pytest.raises(BackendError, match=message):
        backend.hold_head(SimpleNamespace(dims=SimpleNamespace(feature_layers=(1, 2))), 4)  # type: ignore[arg-type]
    assert backend.head_widths == ()
    backend.step([1, 2])
    assert drafts.said == []


def test_a_closed_backend_lets_go_of_the_head_s_cache(backend: CudaBackend, megakernel: FakeMegakernel):
    drafts = FakeDrafts()
    holding(backend, megakernel, drafts)
    learned(backend, [5])
    alive = weakref.ref(drafts)
    del drafts, megakernel.hold_drafter  # type: ignore[attr-defined]
    gc.disable()
    try:
        backend.close()
        assert alive() is None
    finally:
        gc.enable()


def test_what_the_speculative_loop_cannot_do_is_refused(megakernel: FakeMegakernel):
    gpu = Driver(FakeLibcuda()).gpu()
    penalised = Sampling(repeat_penalty=1.1)
    for columns, width, sampling in ((8, 8, penalised), (8, 3, Sampling()), (2, 4, Sampling()), (1, 2, Sampling())):
        narrow = CudaBackend(CONFIG, gpu, megakernel, FakePrefill(), context_size=100, columns=columns)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"no speculative loop of {width} tokens"):
            narrow.stream_speculative(4, sampling=sampling, max_tokens=5, stop_ids=STOP, history=[1, 4], width=width)
    assert not narrow.can_speculate(Sampling())
    assert backend_can(gpu, megakernel, Sampling(repeat_penalty=1.1, repeat_window=0))


def backend_can(gpu: Any, megakernel: FakeMegakernel, sampling: Sampling) -> bool:
    return CudaBackend(CONFIG, gpu, megakernel, FakePrefill(), context_size=100).can_speculate(sampling)  # type: ignore[arg-type]


def test_entries_are_taken_in_whole_steps():
    entries = np.zeros(8, TOKEN_ENTRY)
    assert read_entries(entries, 0, 8) == ([], [], [], 0)
    for index, left in enumerate((2, 1, 0, 0, 1)):  # a step of three, one of one, half of the next
        drafted, accepted = ((3, 2), (0, 0), (3, 1))[(index > 2) + (index > 3)]
        step = (index + 1) | drafted << 20 | accepted << 24 | left << 28
        entries[index] = (100 + index | 5 << 20, step, 7 * index)
    ids, clocks, steps, taken = read_entries(entries, 0, 8)
    assert (ids, clocks, taken) == ([100, 101, 102, 103], [0, 7, 14, 21], 4)
    assert steps == [Step(3, 3, 2, 5), Step(1, 0, 0, 5)]
    assert read_entries(entries, 4, 8) == ([], [], [], 4)
    entries["step"][5] = 6 | 3 << 20 | 1 << 24
    assert read_entries(entries, 4, 8)[2:] == ([Step(2, 3, 1, 0)], 6)
    plain = np.zeros(3, TOKEN_ENTRY)
    plain["step"] = (1, 2, 0)
    assert read_entries(plain, 0, 3)[2:] == ([Step(1), Step(1)], 2)


def test_a_stream_ends_where_the_cache_does(backend: CudaBackend, megakernel: FakeMegakernel):
    backend.step([1] * 98)
    list(stream(backend, max_tokens=1000))
    assert megakernel.streamed["max_tokens"] == 2
    backend._position = 100
    with pytest.raises(ContextOverflow):
        stream(backend)


def test_a_stream_nobody_reads_is_ended_before_the_next_call(backend: CudaBackend, megakernel: FakeMegakernel):
    ring = FakeRing([[5], [6, 7], [8]])
    megakernel.ring = lambda: ring
    next(iter(stream(backend)))
    assert backend.position == 4
    assert ring.cancelled
    backend.step([3])
    assert megakernel.calls == [(1, 4)]


def test_a_kernel_that_fails_ends_the_reply_and_the_device(backend: CudaBackend, megakernel: FakeMegakernel):
    megakernel.ring = lambda: FakeRing([[5], KernelStopped("illegal address")])
    *tokens, last = list(stream(backend))
    assert [b.ids for b in tokens] == [[5]]
    assert last.error == "the GPU failed: illegal address"
    for call in (lambda: backend.step([1]), lambda: stream(backend), lambda: backend.position):
        with pytest.raises(BackendError, match="the GPU failed: illegal address"):
            call()
    backend.close()
    assert not megakernel.closed  # its memory belongs to a dead context


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "WATCHDOG_SECONDS", 0.05)
    monkeypatch.setattr(cuda, "CANCEL_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
def test_the_watchdog_stops_a_silent_kernel(backend: CudaBackend, megakernel: FakeMegakernel):
    megakernel.ring = lambda: FakeRing([[5]], hangs=True, obeys=True)
    *_, last = list(stream(backend))
    assert last.error == "the GPU kernel brought no token for 0 s; it was stopped"
    megakernel.ring = lambda: FakeRing([[5]])
    assert [b.ids for b in stream(backend)] == [[5]]  # the device is still good


@pytest.mark.usefixtures("impatient")
def test_the_watchdog_gives_up_a_kernel_that_does_not_stop(backend: CudaBackend, megakernel: FakeMegakernel):
    ring = FakeRing([[5]], hangs=True, obeys=False)
    megakernel.ring = lambda: ring
    *_, last = list(stream(backend))
    assert last.error.endswith("does not stop")
    assert ring.cancelled
    with pytest.raises(BackendError, match="does not stop") as caught:
        backend.step([1])
    assert caught.value.hint == "Restart flint."
    backend.close()


@pytest.mark.parametrize(
    ("failure", "message", "lost"),
    [
        (NotResident("132 blocks cannot be resident at once"), "The kernel cannot start: 132 blocks", False),
        (CudaError("cuLaunchKernel", 719, "CUDA_ERROR_LAUNCH_FAILED"), "CUDA_ERROR_LAUNCH_FAILED", True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried ..."), "out of memory in the middle of a step", False),
        (CudaError("cuModuleLoadData", 2, "CUDA_ERROR_OUT_OF_MEMORY"), "out of memory in the middle of a step", False),
        (torch.AcceleratorError("CUDA error: unspecified launch failure\nmore"), "unspecified launch failure", True),
    ],
    ids=["not resident", "launch failed", "out of memory", "the driver's memory", "torch"],
)
def test_failures_of_a_step_are_one_line(
    backend: CudaBackend, megakernel: FakeMegakernel, failure: Exception, message: str, lost: bool
):
    megakernel.failure = failure
    for call in (lambda: backend.step([1]), lambda: stream(backend)):
        with pytest.raises(BackendError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert caught.value.hint
    megakernel.failure = None
    if lost:
        with pytest.raises(BackendError):
            backend.step([1])
    else:
        assert backend.step([1]).logits.shape == (1, CONFIG.vocab_size)


def test_a_closed_backend_refuses(backend: CudaBackend, megakernel: FakeMegakernel):
    backend.close()
    backend.close()
    assert megakernel.closed
    with pytest.raises(BackendError, match="closed"):
        backend.step([1])


# --- the GPU that is not there --------------------------------------------------------------------------------------


def gpu_with(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> Callable[[], Any]:
    monkeypatch.setattr(driver, "_load_library", lambda: FakeLibcuda(**facts))
    monkeypatch.setattr(driver, "_SIGNATURES", {})
    return find_gpu


def test_find_gpu(monkeypatch: pytest.MonkeyPatch):
    gpu = gpu_with(monkeypatch)()
    assert (gpu.name, gpu.capability, gpu.sm_count) == ("NVIDIA H200", (9, 0), 132)
    assert gpu.peak_bytes_per_second == pytest.approx(4.814e12, rel=1e-3)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"version": 12080}, "the NVIDIA driver is too old: it supports CUDA 12.8, flint's kernels need 13.0"),
        ({"devices": 0}, "the NVIDIA driver sees no GPU"),
        ({"fail": {"cuInit": 100}}, "the NVIDIA driver sees no GPU"),
        ({"fail": {"cuInit": 804}}, "does not start: CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"),
        ({"capability": (7, 5)}, r"compute capability 7\.5; flint needs 8\.0"),
        ({"fail": {"cuDeviceGetAttribute": 2}}, "driver failed: cuDeviceGetAttribute: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_a_gpu_that_does_not_do(monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], message: str):
    with pytest.raises(BackendError, match=message) as caught:
        gpu_with(monkeypatch, **facts)()
    assert "--backend cpu" in caught.value.hint


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", absent)
    with pytest.raises(BackendError, match="No GPU for the cuda backend: no NVIDIA driver is installed"):
        find_gpu()


def test_asking_for_a_gpu_imports_no_torch():
    code = (
        "import sys\nfrom engine.backends.cuda import find_gpu\n"
        "try: find_gpu()\nexcept Exception as error: print(type(error).__name__)\n"
        "assert 'torch' not in sys.modules and 'cuda.core' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=60)


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    gpu_with(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = PackedModel.open(write_random_packed(tmp_path / "m"))
    with pytest.raises(BackendError, match="cannot use NVIDIA H200"):
        CudaBackend.from_packed(model)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (NotResident("no place for 132 blocks"), "The kernel cannot start: no place"),
        (KernelStopped("the kernel stopped waiting (wait 3, block 7)"), "The GPU failed: the kernel stopped waiting"),
        (torch.AcceleratorError("an illegal access\nand much more"), "The GPU failed: an illegal access$"),
        (CudaError("cuLaunchKernelEx", 719, "LAUNCH_FAILED"), "The GPU failed: .*LAUNCH_FAILED"),
        (CudaError("cuModuleLoadData", 2, "CUDA_ERROR_OUT_OF_MEMORY"), "KV cache for 64 positions"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_gpu_that_fails_while_a_model_is_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: Exception, message: str
):
    """The first launches happen then (Megakernel.settle): `auto` goes on to the CPU only on a BackendError."""
    gpu_with(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "_fitting_context", lambda *asked: 64)

    def fail(*arguments: Any) -> Any:
        raise failure

    monkeypatch.setattr(cuda, "_open", fail)
    model = PackedModel.open(write_random_packed(tmp_path / "m"))
    with pytest.raises(BackendError, match=message) as caught:
        CudaBackend.from_packed(model)
    assert caught.value.hint


# --- memory ---------------------------------------------------------------------------------------------------------


def test_the_context_is_what_was_asked_for_or_what_fits(tmp_path: Path):
    model = PackedModel.open(write_random_packed(tmp_path / "m"))
    assert cuda._fitting_context(model, 300, 8 << 30) == 300
    assert cuda._fitting_context(model, None, 8 << 30) == CONFIG.max_position_embeddings
    fixed, per_position = cuda._fixed_bytes(model), cuda._position_bytes(CONFIG)
    assert cuda._fitting_context(model, None, fixed + 100 * per_position) == 96  # whole blocks of 16


def test_out_of_memory_names_the_sizes_and_what_fits(tmp_path: Path):
    model = PackedModel.open(write_random_packed(tmp_path / "m"))
    free = cuda._fixed_bytes(model) + 1000 * cuda._position_bytes(CONFIG)
    with pytest.raises(DeviceOutOfMemory) as caught:
        cuda._fitting_context(model, 100_000, free)
    for part in ("weights and workspace 0.6", "KV cache for 100000 positions 0.0", "free 0.6"):
        assert part in str(caught.value)
    assert caught.value.hint == "The largest context that fits is --ctx 992."
    with pytest.raises(DeviceOutOfMemory) as caught:
        cuda._fitting_context(model, None, 100 << 20)
    assert "smaller model" in caught.value.hint


# --- the driver's door ----------------------------------------------------------------------------------------------


def test_a_cooperative_launch_that_cannot_be_resident_says_what_was_asked():
    library = FakeLibcuda(fail={"cuLaunchCooperativeKernel": 720}, blocks_per_sm=0)
    kernel = Module(Driver(library), b"").kernel("decode")
    with pytest.raises(NotResident, match=r"132 blocks of 544 threads and 230000 bytes .* \(0 fit a multiprocessor\)"):
        kernel.launch(132, 544, [], shared=230000, cooperative=True)


def test_launch_refuses_arguments_without_a_size():
    kernel = Module(Driver(FakeLibcuda()), b"").kernel("decode")
    with pytest.raises(TypeError, match="not float"):
        kernel.launch(1, 32, [1.0])


def test_every_thread_gets_the_context_once():
    library = FakeLibcuda()
    opened = Driver(library)
    opened.use_device()
    opened.use_device()
    assert library.calls.count("cuCtxSetCurrent") == 1
    import threading

    thread = threading.Thread(target=opened.use_device)
    thread.start()
    thread.join()
    assert library.calls.count("cuCtxSetCurrent") == 2
    assert library.calls.count("cuDevicePrimaryCtxRetain") == 1


def test_mapped_memory_is_shared_bytes():
    memory = MappedMemory(Driver(FakeLibcuda()), 64)
    words = np.frombuffer(memory.view, dtype=np.uint32)
    assert words.sum() == 0
    words[3] = 7
    assert memory.view[12] == 7
    assert memory.device != 0
