"""One round of the native CPU decoder in a process of its own; the worker of engine/bench/cpu_peers.py.

Reads one JSON request from stdin (model, threads, prompt, long_prompt, tokens, and what: "all", "decode" or
"bandwidth") and prints one JSON answer.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from engine.backends.cpu import CpuBackend, native_library
from engine.machine.hardware import peak_memory
from engine.packed.model import PackedModel
from engine.sampling import Sampling
from kernels import native

WIDTHS = (1, 2, 4, 8)
STEPS = 12  # of each width, taken in turn


def main() -> None:
    request = json.loads(sys.stdin.read())
    print(json.dumps(probe(request)))


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """Times in seconds, rates in 1e9 bytes per second, memory in bytes."""
    native_library()
    if request["what"] == "bandwidth":  # a process of its own: its buffer would count as the decoder's memory
        return {"bandwidth_gb_s": native.streaming_bandwidth(request["threads"])}
    model = PackedModel.open(request["model"])
    backend = CpuBackend(model, threads=request["threads"], context_size=2048)
    prompt = request["prompt"]
    backend.step(prompt[:8], logits="last")  # wakes the threads, and touches weights and cache
    answer: dict[str, Any] = {"device": backend.description} | decode(backend, prompt, request["tokens"])
    if request["what"] == "all":
        answer["chat_memory"] = peak_memory()
        answer["prefill_s"] = prefill(backend, request["long_prompt"])
        answer["peak_memory"] = peak_memory()
        answer["step_s"] = widths(backend, prompt)
        answer["weight_bytes"] = backend.ledger(1, 0).weight_bytes
    backend.close()
    return answer


def decode(backend: CpuBackend, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Time to the first token of a prompt, then the whole loop, greedy; bytes from the ledger at every position."""
    backend.truncate(0)
    start = time.perf_counter()
    first = int(backend.step(prompt, logits="last").logits[0].argmax())
    ttft = time.perf_counter() - start
    history = [*prompt, first]
    stream = backend.stream(first, sampling=Sampling(), max_tokens=tokens - 1, stop_ids=frozenset(), history=history)
    ids, seconds = [first], 0.0
    for batch in stream:
        ids += batch.ids
        seconds = batch.seconds[-1] if batch.seconds else seconds
    moved = sum(backend.ledger(1, len(prompt) + i).total for i in range(len(ids) - 1))
    return {
        "ids": ids,
        "ttft_s": ttft,
        "decode_s": seconds,
        "decode_bytes": moved,
        "active_threads": backend.active_threads(),
    }


def prefill(backend: CpuBackend, prompt: list[int]) -> float:
    backend.truncate(0)
    start = time.perf_counter()
    backend.step(prompt, logits="last")
    return time.perf_counter() - start


def widths(backend: CpuBackend, prompt: list[int]) -> dict[str, float]:
    """Median seconds of a step of M tokens after the prompt, all logits returned."""
    backend.truncate(0)
    backend.step(prompt)
    samples: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for _ in range(STEPS):
        for width in WIDTHS:
            backend.truncate(len(prompt))
            start = time.perf_counter()
            backend.step(prompt[:width])
            samples[width].append(time.perf_counter() - start)
    return {str(width): float(np.median(times)) for width, times in samples.items()}


if __name__ == "__main__":
    main()
