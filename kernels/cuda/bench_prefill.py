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
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.build import architecture, compile_cubin
from kernels.cuda.driver import BoundLaunch, Module, driver_or_exit
from kernels.cuda.megakernel import Megakernel
from kernels.cuda.phases import KernelDims
from kernels.cuda.prefill import CHUNK, SOURCE, EmbeddingTable, Prefill

GROUP = 128
GRANITE_3B = KernelDims(
    hidden=2560,
    layers=40,
    heads=40,
    kv_heads=8,
    head_dim=64,
    intermediate=8192,
    vocab=100352,
    rms_norm_eps=1e-5,
    qk_norm=False,
    tied_head=True,
    embedding_multiplier=12.0,
    attention_multiplier=1 / 64,
    residual_multiplier=0.22,
    logits_scaling=10.0,
)


@dataclass(frozen=True)
class RandomMatrix:
    """int4, symmetric, random codes on the device; standard deviation k^-0.5."""

    n: int
    k: int
    q: Tensor
    scale: Tensor
    format: str = "int4"
    group: int = GROUP
    minimum: None = None

    @classmethod
    def draw(cls, n: int, k: int) -> RandomMatrix:
        q = torch.randint(-(2**31), 2**31, (n, k // 8), dtype=torch.int32, device="cuda")
        scale = (torch.rand(n, k // GROUP, device="cuda") + 0.5) * (k**-0.5 * 12**0.5 / 16)
        return cls(n, k, q, scale.half())


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

    def _enqueue(self, launch: BoundLaunch) -> None:
        self._timed(launch.kernel.name, lambda: super(TimedPrefill, self)._enqueue(launch))

    def _matmul(self, x: Tensor, weights: Tensor, out: Tensor) -> None:
        name = f"product {weights.shape[1]} x {weights.shape[0]}"
        self._timed(name, lambda: super(TimedPrefill, self)._matmul(x, weights, out))

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self._timed("attention", lambda: super(TimedPrefill, self)._attend(q, keys, values))

    def milliseconds(self) -> dict[str, float]:
        torch.cuda.synchronize()
        sums: defaultdict[str, float] = defaultdict(float)
        for name, begin, end in self.marks:
            sums[name] += begin.elapsed_time(end)
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def open_megakernel(dims: KernelDims, context: int) -> Megakernel:
    """Random weights, tiled; nothing is compiled but the re-tiling."""
    hidden, inner = dims.hidden, dims.intermediate
    q, kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    sizes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    sizes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    matrices = {
        f"layers.{i}.{name}": RandomMatrix.draw(*size) for i in range(dims.layers) for name, size in sizes.items()
    }
    matrices["embed"] = RandomMatrix.draw(dims.vocab, hidden)
    ones = np.ones(hidden, dtype=np.float32)
    vectors = {f"layers.{i}.{norm}": ones for i in range(dims.layers) for norm in ("attn_norm", "mlp_norm")}
    half = dims.head_dim // 2
    frequencies = (1e7 ** -(np.arange(half) / half)).astype(np.float32)
    return Megakernel(dims, matrices, vectors | {"final_norm": ones}, frequencies, context)


def over(megakernel: Megakernel, kind: type[Prefill], module: Module) -> Prefill:
    dims = megakernel.dims
    ones = torch.ones(dims.hidden, device="cuda")
    vectors = {f"layers.{i}.{norm}": ones for i in range(dims.layers) for norm in ("attn_norm", "mlp_norm")}
    half = dims.head_dim // 2
    frequencies = 1e7 ** -(torch.arange(half, device="cuda", dtype=torch.float32) / half)
    table = EmbeddingTable("int4", GROUP, *megakernel.embedding)
    return kind(dims, megakernel.tiled_weights, table, vectors | {"final_norm": ones}, frequencies, module)


def feed(prefill: Prefill, tokens: list[int], cache: Tensor, chunk: int) -> Tensor:
    """The whole prompt; the last row's logits on the host."""
    logits = None
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        last = start + chunk >= len(tokens)
        logits = prefill.run(part, start, cache, logits="last" if last else "none").logits
    assert logits is not None
    return logits.cpu()


def flop(dims: KernelDims, tokens: int) -> tuple[float, float]:
    """Of the layers' products and of causal attention; the head counts for one row and is left out."""
    q = dims.heads * dims.head_dim
    weights = dims.hidden * (dims.qkv_rows + q + 3 * dims.intermediate) * dims.layers
    return 2.0 * weights * tokens, 4.0 * q * dims.layers * tokens * (tokens + 1) / 2


def time_attention(dims: KernelDims, queries: int, keys: int) -> None:
    """Flash attention as the prefill calls it, beside cuDNN's on the same operands: TFLOP/s over the visible keys."""
    half = {"dtype": torch.float16, "device": "cuda"}
    q = torch.randn(1, dims.heads, queries, dims.head_dim, **half)
    k, v = torch.randn(2, 1, dims.kv_heads, keys, dims.head_dim, **half)
    causal = queries == keys
    work = 4.0 * dims.heads * dims.head_dim * queries * (keys - (queries - 1) / 2 if causal else keys)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    outputs = []
    for name, call in {
        "flash": lambda: flash(q, k, v, 0.0, causal, False, scale=dims.attention_multiplier),
        "cudnn": lambda: cudnn(q, k, v, None, True, 0.0, causal, False, scale=dims.attention_multiplier),
    }.items():
        try:
            outputs.append(call())
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(10):
                call()
            end.record()
            torch.cuda.synchronize()
            seconds = begin.elapsed_time(end) / 10 / 1e3
            shapes = [tuple(t.shape) for t in outputs[-1][:2]]
            print(f"  {name} {queries} x {keys}: {seconds * 1e6:.0f} us, {work / seconds / 1e12:.0f} TFLOP/s, {shapes}")
        except RuntimeError as error:
            print(f"  {name} {queries} x {keys}: {str(error).splitlines()[0]}")
    if len(outputs) == 2:
        pairs = zip(*(output[:2] for output in outputs), strict=True)
        apart = [float((a.float().flatten() - b.float().flatten()).norm() / a.float().norm()) for a, b in pairs]
        print(f"  apart: output {apart[0]:.1e}, logsumexp {apart[1]:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 32, 64, 128, 1024, 16384])
    parser.add_argument("--chunk", type=int, nargs="+", default=[CHUNK])
    parser.add_argument("--attention", action="store_true", help="also time flash attention beside cuDNN's")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()

    driver = driver_or_exit()
    gpu = driver.gpu()
    cubin = compile_cubin(SOURCE, arch=architecture(gpu.capability))
    module, dims = Module(driver, cubin.code), GRANITE_3B
    print(f"{gpu.name}, driver {gpu.driver_version}, torch {torch.__version__}, compiled in {cubin.seconds:.1f} s")
    if options.attention:
        for queries, keys in ((1024, 1024), (2048, 2048), (2048, 8192), (2048, 14336)):
            time_attention(dims, queries, keys)
    longest = max(options.prompts)
    megakernel = open_megakernel(dims, longest)
    cache = megakernel.kv_cache
    plain, timed = (over(megakernel, kind, module) for kind in (Prefill, TimedPrefill))
    assert isinstance(timed, TimedPrefill)
    ids = torch.randint(0, dims.vocab, (longest,)).tolist()
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
            products, attention = flop(dims, count)
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
            command = " ".join(["python -m kernels.cuda.bench_prefill", *sys.argv[1:]])
            facts = {"command": command, "date": time.strftime("%Y-%m-%d"), "gpu": gpu.name, "torch": torch.__version__}
            json.dump({**facts, "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
