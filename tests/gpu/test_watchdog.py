"""A kernel that stops answering costs the reply, or the device, and never the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from engine.backends import cuda
from engine.backends.cuda import CudaBackend
from engine.packed.model import PackedModel
from engine.sampling import Sampling
from tests.gpu.hung_kernel import reply
from tests.gpu.models import RandomModel
from tests.synthetic import small_config

ROOT = Path(__file__).resolve().parents[2]


def hang(who: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.hung_kernel", who], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_wait_that_never_ends_is_ended_by_the_kernel(record_property):
    outcome = hang("kernel")
    record_property("seconds", round(outcome["seconds"], 2))
    assert outcome["healthy"] == [8, ""]
    assert outcome["tokens"] == 0
    assert outcome["error"].startswith("the GPU failed: the kernel stopped waiting (wait ")
    assert outcome["afterwards"] == outcome["error"]


def test_a_kernel_that_obeys_nobody_is_given_up_by_the_host(record_property):
    outcome = hang("host")
    record_property("seconds", round(outcome["seconds"], 2))
    assert outcome["healthy"] == [8, ""]
    assert outcome["tokens"] == 0
    assert outcome["error"] == "the GPU kernel brought no token for 1 s and does not stop"
    assert outcome["afterwards"] == outcome["error"]


def test_a_silent_kernel_that_stops_when_asked_leaves_the_device_usable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda, "WATCHDOG_SECONDS", 0.2)
    config = small_config(
        "llama",
        hidden_size=512,
        num_layers=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=4099,
        max_position_embeddings=200_000,
    )
    model = RandomModel(config, seed=11)
    # 100,000 tokens would take seconds.
    backend = CudaBackend.from_packed(cast(PackedModel, model), context_size=100_000)
    try:
        stream = backend.stream(5, sampling=Sampling(), max_tokens=99_999, stop_ids=frozenset(), history=[5])
        stream._ring._entries = np.zeros_like(stream._ring._entries)  # the host looks where nothing arrives
        batches = list(stream)
        assert [batch.ids for batch in batches] == [[]]
        assert batches[0].error == "the GPU kernel brought no token for 0 s; it was stopped"
        assert reply(backend, 8) == (8, "")
    finally:
        backend.close()
