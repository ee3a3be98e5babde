"""The native CPU backend against the torch reference, and its promises about streams, threads, forks and memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.backends.base import WholeLoop
from engine.backends.cpu import CpuBackend, native_library
from engine.backends.torch_reference import TorchReference
from engine.config import Family, ModelConfig
from engine.errors import BackendError, ContextOverflow
from engine.packed.matrix import Storage
from engine.packed.model import PackedModel
from engine.sampling import Sampling, sample
from kernels import native
from tests.synthetic import small_config, write_random_packed

# fp16 keys and values are what is left: rounding them by 2^-11 moves logits by a few 1e-4 of their norm.
TOLERANCE = 2e-3
FAMILIES: tuple[Family, ...] = ("granite", "llama", "mistral", "qwen3")
STORAGES = {
    "int4-g32": {"bits": 4, "group": 32},
    "int4-g64": {"bits": 4, "group": 64},
    "int4-g32-asym": {"bits": 4, "group": 32, "symmetric": False},
    "int8-g32": {"bits": 8, "group": 32},
    "bf16": {"bits": 16},
}
Open = Callable[..., CpuBackend]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Writes a random model and opens it; `last` is the PackedModel. All are closed at the end."""
    backends: list[CpuBackend] = []

    def open_random(config: ModelConfig | None = None, threads: int = 2, context: int | None = None, **kinds: Any):
        directory = write_random_packed(tmp_path / f"model{len(backends)}", config, **kinds)
        backends.append(CpuBackend(PackedModel.open(directory), threads=threads, context_size=context))
        return backends[-1]

    yield open_random
    for backend in backends:
        backend.close()


def reference(tmp_path: Path, index: int = 0) -> TorchReference:
    return TorchReference.from_packed(PackedModel.open(tmp_path / f"model{index}"))


def tokens(count: int, config: ModelConfig, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, count).tolist()


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# --- the same numbers as the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", STORAGES.values(), ids=STORAGES.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_features_match_the_reference(
    opened: Open, tmp_path: Path, family: Family, kinds: dict[str, Any]
) -> None:
    backend = opened(small_config(family), **kinds)
    ids = tokens(140, backend.config)  # two blocks and a remainder; three KV chunks
    wanted = range(backend.config.num_layers + 1)
    ours, theirs = backend.step(ids, features=wanted), reference(tmp_path).step(ids, features=wanted)
    assert distance(ours.logits, theirs.logits) < TOLERANCE
    for layer in wanted:
        assert distance(ours.features[layer], theirs.features[layer]) < TOLERANCE
    np.testing.assert_array_equal(backend.step(ids[:3], logits="last").logits.shape, (1, backend.config.vocab_size))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[ModelConfig, dict[str, Storage], int]:
    head_dim = draw(st.sampled_from([8, 16, 24, 40, 64, 72, 128]))
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 5))
    hidden = draw(st.sampled_from([32, 64, 72, 96, 160, 256]))
    inner = draw(st.sampled_from([32, 72, 128, 200, 384]))
    config = small_config(
        draw(st.sampled_from(FAMILIES)),
        hidden_size=hidden,
        num_layers=draw(st.integers(1, 3)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        vocab_size=draw(st.integers(259, 400)),
        qk_norm=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
    )

    def storage(k: int) -> Storage:
        allowed = [Storage("bf16")]
        for group in (32, 64, 128):
            if k % group == 0:
                allowed += [Storage("int4", group), Storage("int4", group, symmetric=False), Storage("int8", group)]
        return draw(st.sampled_from(allowed))

    columns = {"embed": hidden} | ({} if config.tie_word_embeddings else {"head": hidden})
    for i in range(config.num_layers):
        columns |= {f"layers.{i}.{name}": hidden for name in ("q", "k", "v", "gate", "up")}
        columns |= {f"layers.{i}.o": config.q_size, f"layers.{i}.down": inner}
    return config, {name: storage(k) for name, k in columns.items()}, draw(st.integers(1, 90))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(shapes(), st.integers(1, 4))
def test_any_shape_and_any_mixture_of_formats(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[ModelConfig, dict[str, Storage], int], threads: int
) -> None:
    config, storage, count = case
    model = PackedModel.open(write_random_packed(tmp_path_factory.mktemp("shape") / "m", config, storage=storage))
    backend = CpuBackend(model, threads=threads, context_size=128)
    ids = tokens(count, config)
    ours = backend.step(ids).logits
    assert distance(ours, TorchReference.from_packed(model).step(ids).logits) < TOLERANCE
    backend.truncate(0)
    one_by_one = np.concatenate([backend.step([token]).logits for token in ids])
    np.testing.assert_array_equal(one_by_one, ours)
    backend.close()


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "neon"])
def test_every_instruction_set_of_this_processor(
    opened: Open, tmp_path: Path, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa not in native.isas(native_library()):
        pytest.skip(f"this processor has no {isa}")
    monkeypatch.setenv("FLINT_CPU_PATH", isa)
    backend = opened(small_config("qwen3", head_dim=24), embed_bits=8)
    assert isa in backend.description
    ids = tokens(80, backend.config)
    assert distance(backend.step(ids).logits, reference(tmp_path).step(ids).logits) < TOLERANCE


# --- the same numbers as itself ---------------------------------------------------------------------------------------


def test_pieces_give_the_bits_of_the_whole(opened: Open) -> None:
    backend = opened(small_config("qwen3"), symmetric=False)
    ids = tokens(200, backend.config)
    whole = backend.step(ids, features=(1,))
    for pieces in ((1,) * 10 + (2, 3, 4, 5, 6, 7, 8, 9, 64, 65, 17), (64, 64, 64, 8), (130, 1, 69)):
        backend.truncate(0)
        parts, start = [], 0
        for size in pieces:
            parts.append(backend.step(ids[start : start + size], features=(1,)))
            start += size
        np.testing.assert_array_equal(np.concatenate([part.logits for part in parts]), whole.logits)
        np.testing.assert_array_equal(np.concatenate([part.features[1] for part in parts]), whole.features[1])


def test_the_number_of_threads_changes_no_bit(opened: Open) -> None:
    ids = tokens(100, small_config())
    expected = opened(threads=1).step(ids).logits
    for threads in (2, 3, 8):
        np.testing.assert_array_equal(opened(threads=threads).step(ids).logits, expected)


def test_truncating_forgets(opened: Open) -> None:
    backend = opened()
    ids = tokens(150, backend.config)
    expected = backend.step(ids).logits
    backend.truncate(70)
    assert backend.position == 70
    backend.step(tokens(60, backend.config, seed=1))
    backend.truncate(70)
    np.testing.assert_array_equal(backend.step(ids[70:]).logits, expected[70:])


def test_last_logits_are_the_last_row(opened: Open) -> None:
    backend = opened()
    for count in (1, 5, 64, 100):
        ids = tokens(count, backend.config)
        backend.truncate(0)
        everything = backend.step(ids).logits
        backend.truncate(0)
        np.testing.assert_array_equal(backend.step(ids, logits="last").logits, everything[-1:])


# --- whole-loop decoding ----------------------------------------------------------------------------------------------

SAMPLINGS = [
    Sampling(),
    Sampling(repeat_penalty=1.3, repeat_window=8),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=1.5, top_k=7, seed=2),
    Sampling(temperature=1.2, top_p=0.8, seed=3),
    Sampling(temperature=1.0, min_p=0.1, seed=2**63 + 5),
    Sampling(temperature=0.9, top_k=50, top_p=0.95, min_p=0.02, repeat_penalty=1.1, seed=4),
    Sampling(temperature=1.0, top_p=0.0, seed=5),
    Sampling(temperature=1e-4, seed=6),
]


def collect(stream) -> list[int]:
    return [token for batch in stream for token in batch.ids]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T{s.temperature}k{s.top_k}p{s.top_p}m{s.min_p}")
def test_a_stream_gives_the_tokens_of_single_steps(opened: Open, sampling: Sampling) -> None:
    backend = opened(context=300)
    prompt = tokens(20, backend.config)
    backend.step(prompt[:-1])
    history = list(prompt)
    for _ in range(120):
        history.append(sample(backend.step(history[-1:]).logits[0], sampling, history))
    backend.truncate(len(prompt) - 1)
    assert isinstance(backend, WholeLoop)
    stream = backend.stream(prompt[-1], sampling=sampling, max_tokens=120, stop_ids=frozenset(), history=prompt)
    assert collect(stream) == history[len(prompt) :]
    assert backend.position == len(prompt) - 1 + 120  # every token but the last


def test_a_stream_ends_after_a_stop_token(opened: Open) -> None:
    backend = opened()
    prompt = tokens(10, backend.config)
    backend.step(prompt[:-1])
    plain = collect(
        backend.stream(prompt[-1], sampling=Sampling(), max_tokens=40, stop_ids=frozenset(), history=prompt)
    )
    stop = plain[12]
    backend.truncate(len(prompt) - 1)
    stream = backend.stream(prompt[-1], sampling=Sampling(), max_tokens=40, stop_ids=frozenset({stop}), history=prompt)
    assert collect(stream) == plain[: plain.index(stop) + 1]
    assert backend.position == len(prompt) - 1 + plain.index(stop) + 1


def test_a_stream_ends_where_the_context_does(opened: Open) -> None:
    backend = opened(context=90)
    prompt = tokens(30, backend.config)
    backend.step(prompt[:-1])
    stream = backend.stream(prompt[-1], sampling=Sampling(), max_tokens=10**6, stop_ids=frozenset(), history=prompt)
    assert len(collect(stream)) == 61
    assert backend.position == 90
    with pytest.raises(ContextOverflow):
        backend.stream(prompt[-1], sampling=Sampling(), max_tokens=1, stop_ids=frozenset(), history=prompt)


def test_cancelling_stops_within_a_token_and_the_backend_goes_on(opened: Open) -> None:
    backend = opened(small_config(max_position_embeddings=100_000))
    prompt = tokens(10, backend.config)
    backend.step(prompt[:-1])
    expected = backend.step(prompt[-1:]).logits
    backend.truncate(len(prompt) - 1)
    stream = backend.stream(prompt[-1], sampling=Sampling(), max_tokens=10**6, stop_ids=frozenset(), history=prompt)
    seen = []
    for batch in stream:
        seen += batch.ids
        if len(seen) > 20:
            threading.Thread(target=stream.cancel).start()
    assert 20 < len(seen) < 90_000
    assert backend.position == len(prompt) - 1 + len(seen)
    stream.cancel()
    backend.truncate(len(prompt) - 1)
    np.testing.assert_array_equal(backend.step(prompt[-1:]).logits, expected)


def test_an_abandoned_stream_lets_the_model_go(opened: Open) -> None:
    backend = opened(small_config(max_position_embeddings=100_000))
    prompt = tokens(5, backend.config)
    iterator = iter(
        backend.stream(prompt[-1], sampling=Sampling(), max_tokens=10**6, stop_ids=frozenset(), history=prompt)
    )
    next(iterator)
    with pytest.raises(BackendError, match="still running"):
        backend.step([1])
    iterator.close()  # type: ignore[attr-defined]
    backend.step([1])


def test_clocks_of_a_stream_rise(opened: Open) -> None:
    backend = opened()
    stream = backend.stream(3, sampling=Sampling(), max_tokens=50, stop_ids=frozenset(), history=[3])
    seconds = [second for batch in stream for second in batch.seconds]
    assert len(seconds) == 50
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


# --- errors -----------------------------------------------------------------------------------------------------------


def test_what_the_contract_forbids_is_refused(opened: Open) -> None:
    backend = opened(context=32)
    with pytest.raises(ValueError, match="at least one token"):
        backend.step([])
    for bad in (-1, backend.config.vocab_size):
        with pytest.raises(ValueError, match="token ids"):
            backend.step([bad])
    backend.step([1] * 30)
    with pytest.raises(ContextOverflow, match="33 tokens do not fit the context of 32"):
        backend.step([1, 2, 3])
    assert backend.position == 30
    for bad in (-1, 31):
        with pytest.raises(ValueError, match="cannot truncate"):
            backend.truncate(bad)
    with pytest.raises(ValueError, match="history"):
        backend.stream(1, sampling=Sampling(), max_tokens=1, stop_ids=frozenset(), history=[2])


def test_closing_is_idempotent_and_final(opened: Open) -> None:
    backend = opened()
    backend.step([1])
    backend.close()
    backend.close()
    for call in (lambda: backend.step([1]), lambda: backend.position, lambda: backend.truncate(0)):
        with pytest.raises(BackendError, match="closed"):
            call()


# --- threads, processes, memory ---------------------------------------------------------------------------------------


def test_two_models_in_one_process(opened: Open) -> None:
    a, b = opened(small_config("llama")), opened(small_config("qwen3"), seed=1)
    ids = tokens(40, a.config)
    alone_a, alone_b = a.step(ids).logits, b.step(ids).logits
    a.truncate(0)
    b.truncate(0)
    results: dict[str, np.ndarray] = {}

    def run(name: str, backend: CpuBackend) -> None:
        for _ in range(5):
            backend.truncate(0)
            results[name] = backend.step(ids).logits

    workers = [threading.Thread(target=run, args=item) for item in (("a", a), ("b", b))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    np.testing.assert_array_equal(results["a"], alone_a)
    np.testing.assert_array_equal(results["b"], alone_b)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_can_go_on_and_so_can_its_parent(opened: Open) -> None:
    backend = opened(threads=3)
    ids = tokens(60, backend.config)
    expected = backend.step(ids).logits
    child = os.fork()
    if child == 0:
        backend.truncate(0)
        os._exit(0 if np.array_equal(backend.step(ids).logits, expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    backend.truncate(0)
    np.testing.assert_array_equal(backend.step(ids).logits, expected)


EXIT_SCRIPT = """
import sys
from engine.backends.cpu import CpuBackend
from engine.packed.model import PackedModel
from engine.sampling import Sampling
backend = CpuBackend(PackedModel.open(sys.argv[1]), threads=2)
stream = backend.stream(1, sampling=Sampling(), max_tokens=10**6, stop_ids=frozenset(), history=[1])
next(iter(stream))
assert "torch" not in sys.modules
print("leaving")
"""


def test_the_interpreter_exits_in_the_middle_of_a_stream_and_torch_is_never_loaded(tmp_path: Path) -> None:
    config = small_config(max_position_embeddings=100_000)
    directory = write_random_packed(tmp_path / "m", config)
    result = subprocess.run(
        [sys.executable, "-c", EXIT_SCRIPT, str(directory)], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "leaving\n", "")


def test_idle_threads_use_no_processor_time(opened: Open) -> None:
    backend = opened(threads=4)
    backend.step([1, 2, 3])
    time.sleep(0.05)  # the spinning that follows a step
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_models_give_their_memory_back(tmp_path: Path) -> None:
    model = PackedModel.open(write_random_packed(tmp_path / "m", small_config(hidden_size=256, vocab_size=20_000)))

    def mapped() -> int:
        fields = Path("/proc/self/statm").read_text().split()
        return int(fields[0]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")

    def use() -> None:
        backend = CpuBackend(model, threads=2)
        backend.step([1] * 20)
        backend.close()

    use()
    gc.collect()
    before = mapped()
    for _ in range(5):
        use()
    gc.collect()
    assert mapped() - before < 4 << 20  # a model takes 3 MB of weights alone


def test_the_ledger_counts_tiles_and_cache(opened: Open) -> None:
    config = small_config("qwen3", hidden_size=64, head_dim=24, vocab_size=320)
    backend = opened(config, bits=4, group=32)
    ledger = backend.ledger(2, 10)
    assert ledger.weights["gate"] == 2 * config.intermediate_size * 64 // 32 * (16 + 2)  # two layers; nibbles, scale
    assert ledger.weights["head"] == 320 * 64 // 32 * 18
    assert ledger.weights["embed"] == 2 * 64 // 32 * 18
    per_position = 2 * config.num_layers * config.num_kv_heads * 32 * 2  # head_dim padded to 32, two bytes
    assert (ledger.kv_read, ledger.kv_written) == (12 * per_position, 2 * per_position)


def test_the_phase_clocks_add_up(opened: Open) -> None:
    backend = opened()
    backend.profile(True)
    start = time.perf_counter()
    for _ in range(20):
        backend.step([1])
    elapsed_ms = (time.perf_counter() - start) * 1e3 / 20
    phases = backend.profile(False)
    assert set(phases) == set(native.PHASES)
    assert 0 < sum(phases.values()) < elapsed_ms
