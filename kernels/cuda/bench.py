"""How fast is the megakernel? Random weights of a real shape; speed does not depend on their values.

    python -m kernels.cuda.bench [--model granite-3b] [--context 1024] [--columns 1,4,8] [--tokens 128] [--json FILE]
        [--set WINDOW=1 ...] [--profile]

Prints one line per measurement: microseconds a token (median, least, most of the rounds), tok/s, bytes and the share of
the driver's peak bandwidth. --profile prints where the clocks of each SM's first warp went. As in the product, one
token's hops lie where steps are fastest (Megakernel.settle).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernels.cuda.check import CASES, compile_all, plan_of
from kernels.cuda.driver import driver_or_exit
from kernels.cuda.phases import KernelDims

MODELS: dict[str, dict[str, int]] = {
    "granite-3b": {"layers": 40, "vocab": 100352},
    "smollm2": {"layers": 30, "vocab": 49152},
    "llama-1b": {"layers": 16, "vocab": 128256},
    "llama-3b": {"layers": 28, "vocab": 128256},
    "qwen-0.6b": {"layers": 28, "vocab": 151936},
    "mistral-7b": {"layers": 32, "vocab": 32768},
}


def kv_bytes(d: KernelDims, positions: int) -> int:
    return 2 * d.layers * d.kv_heads * d.head_dim * 2 * positions


def read_tuning(text: str, profile: bool) -> dict[str, int]:
    pairs = (pair.split("=") for pair in text.split(",") if pair)
    return {name: int(value) for name, value in pairs} | ({"PROFILE": 1} if profile else {})


def measure(kernel: Any, columns: int, context: int, tokens: int, rounds: int) -> list[float]:
    """Seconds a token (columns = 1: the whole loop, greedy) or a step."""
    import torch

    from kernels.cuda.megakernel import DeviceSampling

    times = []
    start = max(0, context - tokens // 2) if columns == 1 else context - columns
    for _ in range(rounds + 1):
        if columns == 1:
            ring = kernel.stream(5, start, DeviceSampling(), tokens, [], [5])
            ids, seconds = ring.wait()
            # The first token carries the launch and an empty ring; a stream's rate is that of the others.
            times.append((seconds[-1] - seconds[0]) / (len(ids) - 1))
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            repeats = max(8, tokens // 8)
            begin.record()
            for _ in range(repeats):
                kernel.step(list(range(columns)), start)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3 / repeats)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="granite-3b")
    parser.add_argument("--context", default="1024")
    parser.add_argument("--columns", default="1")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE,... one variant each")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gpu = driver_or_exit().gpu()

    import torch

    from kernels.cuda.megakernel import PROFILE_NAMES, Megakernel
    from kernels.cuda.reference import random_model

    case = CASES[options.model]
    contexts = [int(c) for c in options.context.split(",")]
    sizes = MODELS[options.model]
    dims = replace(case.dims, vocab=sizes["vocab"], layers=options.layers or sizes["layers"])
    model = random_model(dims, case.kind, case.group, head=case.head)
    cache = Path(tempfile.gettempdir()) / "flint-cubins"
    rows = []
    variants = [read_tuning(v, options.profile) for v in options.set or [""]]
    columns_wanted = [int(c) for c in options.columns.split(",")]
    compile_all(
        [
            plan_of(dims, case, gpu.sm_count, gpu.shared_per_block, columns, tuning, clusters=gpu.clusters)
            for tuning in variants
            for columns in columns_wanted
        ],
        cache,
    )
    for variant in options.set or [""]:
        tuning = read_tuning(variant, options.profile)
        started = time.perf_counter()
        kernel = Megakernel(
            dims,
            model.matrices,
            model.vectors,
            model.inverse_frequencies,
            max(contexts) + options.tokens,
            cubin_cache=cache,
            tuning=tuning,
        )
        torch.cuda.synchronize()
        load_seconds = time.perf_counter() - started
        kernel.kv_cache.normal_()
        places = kernel.settle() if 1 in columns_wanted else []
        peak = kernel._gpu.peak_bytes_per_second
        weights = sum(kernel.weight_bytes.values())
        for context in contexts:
            base = None
            for columns in columns_wanted:
                times = measure(kernel, columns, context, options.tokens, options.rounds)
                median = statistics.median(times)
                base = base or median
                total = weights + kv_bytes(dims, context)
                plan, (registers, spills) = kernel.compile(columns), kernel.registers(columns) or (None, None)
                row = {
                    "model": options.model,
                    "variant": variant,
                    "gpu": kernel._gpu.name,
                    "context": context,
                    "columns": columns,
                    "seconds": times,
                    "seconds_by_place": places if columns == 1 else [],
                    "weight_bytes": weights,
                    "kv_bytes": kv_bytes(dims, context),
                    "peak_bytes_per_second": peak,
                    "registers": registers,
                    "spills": spills,
                    "stages": plan.constants["STAGES"],
                    "load_seconds": load_seconds,
                }
                rows.append(row)
                print(
                    f"{options.model} ctx {context} M={columns} {variant or 'default'}: {median * 1e6:.1f} us "
                    f"({min(times) * 1e6:.1f}..{max(times) * 1e6:.1f}) {1 / median:.0f} steps/s, {total / 1e9:.3f} GB, "
                    f"MBU {total / median / peak:.1%}, x{median / base:.2f}, {registers} registers, "
                    f"{spills} B spilled, {plan.constants['STAGES']} stages",
                    flush=True,
                )
                if options.profile:
                    clock = 1e-3 / 1.98  # microseconds a clock at the H200's 1,980 MHz
                    passes = options.tokens if columns == 1 else 1
                    row["profile"] = kernel.profile()
                    for name, (mean, least, most) in kernel.profile().items():
                        per = passes * (dims.layers if not name.startswith(("head", "choose")) else 1)
                        figures = " ".join(f"{v * clock / per:6.2f}" for v in (mean, least, most))
                        print(f"    {name:24s} {figures}")
                    layer = sum(
                        kernel.profile()[n][0]
                        for n in PROFILE_NAMES.values()
                        if not n.startswith(("head", "choose", "producer"))
                    )
                    print(f"    {'layer':24s} {layer * clock / passes / dims.layers:6.2f}")
        kernel.close()
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
