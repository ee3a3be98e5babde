"""Times the GPU prefill on the Granite-3B shape with random weights, whole and part by part.

    python -m kernels.cuda.bench_prefill [--prompts 1024 16384] [--chunk 2048] [--json FILE]

A whole prompt is timed from the host's call to the last row's logits in host memory (median of the runs); the parts
are summed from device events around each launch in a run of their own. FLOP: 2 per weight and token, and 4 x heads x
head_dim per layer and visible key.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.build import architecture, compile_cubin
from kernels.cuda.driver import Driver, Module
from kernels.cuda.kv_layout import cache_shape
from kernels.cuda.prefill import CHUNK, SOURCE, DeviceMatrix, Prefill

GROUP = 128


@dataclass(frozen=True)
class Granite3B:
    """The Granite-4.1-3B shape (kernels.cuda.prefill.Shape)."""

    hidden_size: int = 2560
    num_layers: int = 40
    num_heads: int = 40
    num_kv_heads: int = 8
    head_dim: int = 64
    intermediate_size: int = 8192
    vocab_size: int = 100352
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    qk_norm: bool = False
    embedding_multiplier: float = 12.0
    attention_multiplier: float = 1 / 64
    residual_multiplier: float = 0.22
    logits_scaling: float = 10.0


class TimedPrefill(Prefill):
    """Records device events around every launch, by name."""

    marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]]

    def _timed(self, name: str, work: Callable[[], Any]) -> Any:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = work()
        end.record()
        self.marks.append((name, begin, end))
        return result

    def _launch(self, name: str, grid: int | tuple[int, int, int], *arguments: object) -> None:
        self._timed(name, lambda: super(TimedPrefill, self)._launch(name, grid, *arguments))

    def _matmul(self, x: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        name = f"product {weights.shape[0]} x {weights.shape[1]}"
        return self._timed(name, lambda: super(TimedPrefill, self)._matmul(x, weights, dtype))

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self._timed("attention", lambda: super(TimedPrefill, self)._attend(q, keys, values))

    def milliseconds(self) -> dict[str, float]:
        torch.cuda.synchronize()
        sums: defaultdict[str, float] = defaultdict(float)
        for name, begin, end in self.marks:
            sums[name] += begin.elapsed_time(end)
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def random_matrix(n: int, k: int) -> DeviceMatrix:
    """int4, symmetric, random codes; standard deviation k^-0.5."""
    q = torch.randint(-(2**31), 2**31, (n, k // 8), dtype=torch.int32, device="cuda")
    step = k**-0.5 * 12**0.5 / 16
    scale = ((torch.rand(n, k // GROUP, device="cuda") + 0.5) * step).half()
    return DeviceMatrix(n, k, 4, GROUP, q, scale, None)


def build(shape: Granite3B, kind: type[Prefill], module: Module, matrices: dict[str, DeviceMatrix]) -> Prefill:
    ones = torch.ones(shape.hidden_size, device="cuda")
    vectors = {f"layers.{i}.{norm}": ones for i in range(shape.num_layers) for norm in ("attn_norm", "mlp_norm")}
    half = shape.head_dim // 2
    frequencies = 1e7 ** -(torch.arange(half, device="cuda", dtype=torch.float32) / half)
    return kind(shape, matrices, vectors | {"final_norm": ones}, frequencies, module)


def matrices_of(shape: Granite3B) -> dict[str, DeviceMatrix]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    sizes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    found = {
        f"layers.{i}.{name}": random_matrix(*size) for i in range(shape.num_layers) for name, size in sizes.items()
    }
    return found | {"embed": random_matrix(shape.vocab_size, hidden)}


def feed(prefill: Prefill, tokens: list[int], cache: Tensor, chunk: int) -> Tensor:
    """The whole prompt; the last row's logits on the host."""
    logits = None
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        last = start + chunk >= len(tokens)
        logits = prefill.run(part, start, cache, logits="last" if last else "none").logits
    assert logits is not None
    return logits.cpu()


def flop(shape: Granite3B, tokens: int) -> tuple[float, float]:
    """Of the layers' products and of causal attention; the head counts for one row and is left out."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    weights = shape.hidden_size * (2 * q + 2 * kv + 3 * shape.intermediate_size) * shape.num_layers
    return 2.0 * weights * tokens, 4.0 * q * shape.num_layers * tokens * (tokens + 1) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 32, 64, 128, 1024, 16384])
    parser.add_argument("--chunk", type=int, nargs="+", default=[CHUNK])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()

    driver = Driver()
    gpu = driver.gpu()
    cubin = compile_cubin(SOURCE, arch=architecture(gpu.capability))
    module, shape = Module(driver, cubin.code), Granite3B()
    print(f"{gpu.name}, driver {gpu.driver_version}, torch {torch.__version__}, compiled in {cubin.seconds:.1f} s")
    matrices = matrices_of(shape)
    plain = build(shape, Prefill, module, matrices)
    timed = build(shape, TimedPrefill, module, matrices)
    assert isinstance(timed, TimedPrefill)
    longest = max(options.prompts)
    layout = cache_shape(shape.num_layers, shape.num_kv_heads, longest, shape.head_dim)
    cache = torch.zeros(layout, dtype=torch.bfloat16, device="cuda")
    ids = torch.randint(0, shape.vocab_size, (longest,)).tolist()
    figures = []
    for count in options.prompts:
        for chunk in options.chunk if count > min(options.chunk) else options.chunk[:1]:
            tokens, seconds = ids[:count], []
            feed(plain, tokens, cache, chunk)
            for _ in range(options.runs):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                feed(plain, tokens, cache, chunk)
                seconds.append(time.perf_counter() - begin)
            timed.marks = []
            feed(timed, tokens, cache, chunk)
            parts = timed.milliseconds()
            products, attention = flop(shape, count)
            median = statistics.median(seconds)
            rate = (products + attention) / median / 1e12
            print(
                f"{count} tokens in chunks of {chunk}: {median * 1e3:.2f} ms (min {min(seconds) * 1e3:.2f}, "
                f"max {max(seconds) * 1e3:.2f}), {count / median:.0f} tok/s, {rate:.0f} TFLOP/s"
            )
            if count >= 1024:
                device = sum(parts.values())
                print(f"  device {device:.2f} ms: " + ", ".join(f"{n} {ms:.2f}" for n, ms in parts.items()))
            figures.append({"tokens": count, "chunk": chunk, "seconds": seconds, "parts_ms": parts, "tflop_s": rate})
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"gpu": gpu.name, "torch": torch.__version__, "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
