"""Is the megakernel right? Random models of every shape and format against plain torch.

    python -m kernels.cuda.check [NAME ...] [--json FILE]

Without names: every case. Each line says how much of the tolerance was used. Exit code 1 if any case fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.cuda.driver import driver_or_exit
from kernels.cuda.kv_layout import pack_keys, pack_values
from kernels.cuda.phases import KernelDims

LOGIT_TOLERANCE = 3e-3  # relative, against float32 with an fp16 cache; the cache's own rounding is shown beside it


@dataclass(frozen=True)
class Case:
    """A shape at small depth, its storage, and how far the context reaches."""

    dims: KernelDims
    kind: str
    group: int
    head: tuple[str, int] | None = None
    context: int = 512
    columns: tuple[int, ...] = (1, 2, 3, 5, 8)


def shape(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    *,
    layers: int = 2,
    vocab: int = 4096,
    qk_norm: bool = False,
    tied: bool = True,
    granite: bool = False,
) -> KernelDims:
    multipliers = (12.0, 1 / 64, 0.22, 10.0) if granite else (1.0, head_dim**-0.5, 1.0, 1.0)
    return KernelDims(hidden, layers, heads, kv_heads, head_dim, intermediate, vocab, 1e-5, qk_norm, tied, *multipliers)


CASES = {
    "granite-3b": Case(shape(2560, 40, 8, 64, 8192, granite=True), "int4", 128),
    "granite-long": Case(shape(2560, 40, 8, 64, 8192, layers=1, granite=True), "int4", 128, context=33000),
    "smollm2": Case(shape(576, 9, 3, 64, 1536), "int4_asymmetric", 32, ("int8", 32)),
    "llama-1b": Case(shape(2048, 32, 8, 64, 8192), "int4", 64),
    "llama-3b": Case(shape(3072, 24, 8, 128, 8192), "int4", 32),
    "llama-3b-asymmetric": Case(shape(3072, 24, 8, 128, 8192), "int4_asymmetric", 128),
    "qwen-0.6b": Case(shape(1024, 16, 8, 128, 3072, qk_norm=True), "int4", 128, context=5000),
    "qwen-1.7b": Case(shape(2048, 16, 8, 128, 6144, qk_norm=True), "int8", 128),
    "mistral-7b": Case(shape(4096, 32, 8, 128, 14336, tied=False), "int4", 128),
    "bf16": Case(shape(2048, 32, 8, 64, 8192), "bf16", 0),
    "int8-g32": Case(shape(960, 15, 5, 64, 2560, vocab=4100), "int8", 32),
    "int8-g64": Case(shape(1024, 16, 8, 64, 2816), "int8", 64),
}


def error(out: Any, truth: Any) -> float:
    """Relative error in the 2-norm; NaN counts as infinite."""
    value = float((out.float() - truth).norm() / truth.norm())
    return value if value == value else float("inf")


def run_case(name: str, case: Case, cache: Path, tuning: dict[str, int]) -> dict[str, Any]:
    import torch

    from kernels.cuda.megakernel import Megakernel
    from kernels.cuda.reference import Reference, random_model

    d = case.dims
    model = random_model(d, case.kind, case.group, head=case.head, seed=len(name))
    kernel = Megakernel(
        d, model.matrices, model.vectors, model.inverse_frequencies, case.context, cubin_cache=cache, tuning=tuning
    )
    truth = Reference(model, case.context + 16)
    exact = Reference(model, case.context + 16, cache_dtype=torch.float32)
    kernel.kv_cache.fill_(float("nan"))  # whatever is read before it is written shows
    generator = torch.Generator().manual_seed(1)
    errors: dict[str, float] = {}
    rounding = [0.0]

    def tokens(m: int) -> list[int]:
        return torch.randint(0, d.vocab, (m,), generator=generator).tolist()

    def compare(label: str, m: int, position: int) -> None:
        ids = tokens(m)
        logits, features = kernel.step(ids, position, features=(0, d.layers))
        expected, entering = truth.step(ids, position)
        errors[label] = max(errors.get(label, 0.0), error(logits, expected))
        if position < 64:
            rounding[0] = max(rounding[0], error(logits, exact.step(ids, position)[0]))
        errors["features"] = max(
            errors.get("features", 0.0),
            error(features[0], entering[0]),
            error(features[d.layers], entering[d.layers]),
        )

    position = 0
    for _ in range(20):
        compare("one token", 1, position)
        position += 1
    for m in case.columns:
        compare(f"{m} columns", m, position)
        position += m
    # The rest of the context at random, written in the cache's own layout.
    for start in (200, case.context - 40):
        if start < position:
            continue
        whole = -(-start // 16) * 16
        shape_kv = (d.layers, d.kv_heads, whole - position, d.head_dim)
        for cache_tensor in (truth.keys, truth.values):
            cache_tensor[:, :, position:whole] = torch.randn(shape_kv, device="cuda").half().float()
        blocks = whole // 16
        kernel.kv_cache[:, :, :blocks, 0] = pack_keys(truth.keys[:, :, :whole].half())
        kernel.kv_cache[:, :, :blocks, 1] = pack_values(truth.values[:, :, :whole].half())
        position = start
        for m in case.columns:
            compare(f"{m} columns at {start}", m, position)
            position += m
    streams = check_streams(kernel, d, case)
    worst = max(errors.values())
    registers = {c: kernel.registers(c) for c in (1, 8)}
    kernel.close()
    return {
        "name": name,
        "worst": worst,
        "ok": worst < LOGIT_TOLERANCE and all(streams.values()),
        "errors": errors,
        "streams": streams,
        "float32 cache": rounding[0],
        "registers": registers,
    }


def check_streams(kernel: Any, d: KernelDims, case: Case) -> dict[str, bool]:
    """The whole loop against steps: the same tokens, for every way of choosing them; twice the same; stops in time. The
    speculative loops, too."""
    from kernels.cuda.megakernel import DeviceSampling
    from kernels.cuda.reference import draw

    ways = {
        "greedy": DeviceSampling(),
        "greedy, penalty": DeviceSampling(repeat_penalty=1.3, repeat_window=8),
        "temperature": DeviceSampling(temperature=1.0, seed=11),
        "top-k": DeviceSampling(temperature=0.9, top_k=40, seed=12),
        "top-p": DeviceSampling(temperature=1.1, top_p=0.9, seed=13),
        "all": DeviceSampling(
            temperature=0.8, top_k=100, top_p=0.95, min_p=0.02, repeat_penalty=1.1, repeat_window=16, seed=1 << 40
        ),
    }
    outcome = {}
    rounding = 1e-3  # between kernels of different widths: of a logit, or of a draw's probability
    first: list[int] = []
    prompt = [3, 1, 4, 1, 5]
    for name, way in ways.items():
        kernel.step(prompt[:-1], 0)
        first = kernel.stream(prompt[-1], len(prompt) - 1, way, 48, [], prompt).wait()[0]
        again = kernel.stream(prompt[-1], len(prompt) - 1, way, 48, [], prompt).wait()[0]
        history, right = list(prompt), first == again and len(first) == 48
        for id_ in first:  # teacher-forced, so that one rounding does not spoil what follows
            logits = kernel.step(history[-1:], len(history) - 1)[0][0]
            expected, distance = draw(logits, way, history)
            right &= expected == id_ or distance < 1e-5
            history.append(id_)
        outcome[name] = right
        if way.repeat_penalty != 1.0:
            continue
        for width in kernel.widths()[1:]:
            kernel.step(prompt[:-1], 0)
            ids = kernel.stream_speculative(len(prompt) - 1, way, 48, [], prompt, columns=width).wait()[0]
            history, right = list(prompt), len(ids) == 48
            for id_ in ids:
                logits = kernel.step(history[-1:], len(history) - 1)[0][0]
                expected, distance = draw(logits, way, history)
                right &= expected == id_ or distance < rounding
                history.append(id_)
            outcome[f"{name}, speculative, {width}"] = right
    kernel.step(prompt[:-1], 0)
    endless = kernel.stream(prompt[-1], len(prompt) - 1, ways["greedy"], 10**9, [], prompt)
    while len(endless.poll()[0]) == 0:
        pass
    endless.cancel()
    rest = len(endless.wait()[0])
    outcome["cancel"] = rest < case.context - 8
    stop = first[7]
    got = kernel.stream(prompt[-1], len(prompt) - 1, ways["all"], 48, [stop], prompt).wait()[0]
    outcome["stop id"] = got == first[: first.index(stop) + 1]
    return outcome


def compile_all(plans: list[Any], cache: Path) -> None:
    """Compile the cubins of all plans, side by side."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, [(plan.constants, str(cache)) for plan in plans]))


def _compile(job: tuple[dict[str, str], str]) -> None:
    from kernels.build import CUDA_DIRECTORY, architecture, compile_cubin
    from kernels.cuda.driver import Driver

    gpu = Driver().gpu()
    compile_cubin(
        CUDA_DIRECTORY / "megakernel.cu",
        arch=architecture(gpu.capability),
        defines=job[0],
        cache=Path(job[1]),
        driver_version=gpu.driver_version,
    )


def plan_of(
    dims: KernelDims,
    case: Case,
    sms: int,
    shared_limit: int,
    columns: int,
    tuning: Any = None,
    drafting: Any = None,
    clusters: bool = True,
) -> Any:
    """The plan of a case without its weights. clusters: whether the GPU has them."""
    from kernels.cuda.phases import phases_of, shares_of, split_tiles
    from kernels.cuda.plan import make_plan

    matrices = stored_matrices(dims, case.kind, case.group, case.head)
    clusters = clusters and (tuning or {}).get("PAIRS", 1) > 0
    phases = phases_of(dims, matrices, shares_of(dims, matrices, sms, clusters))
    split = split_tiles(phases, dims.layers, sms)
    return make_plan(dims, phases, split, sms, shared_limit, columns, matrices["embed"], tuning, drafting)


class Stored:
    """A matrix without its values."""

    q = scale = None

    def __init__(self, kind: str, group: int, n: int, k: int) -> None:
        self.format = kind.removesuffix("_asymmetric")
        self.n, self.k, self.group = n, k, group
        self.minimum = True if kind.endswith("_asymmetric") else None


def stored_matrices(dims: KernelDims, kind: str, group: int, head: tuple[str, int] | None = None) -> dict[str, Stored]:
    """The matrices of a model stored as reference.random_model's are, without their values."""
    queries, keys = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    sizes = {
        "q": (queries, dims.hidden),
        "k": (keys, dims.hidden),
        "v": (keys, dims.hidden),
        "o": (dims.hidden, queries),
        "gate": (dims.intermediate, dims.hidden),
        "up": (dims.intermediate, dims.hidden),
        "down": (dims.hidden, dims.intermediate),
    }
    matrices = {f"layers.{i}.{n}": Stored(kind, group, *size) for i in range(dims.layers) for n, size in sizes.items()}
    matrices["embed"] = matrices["head"] = Stored(*(head or (kind, group)), dims.vocab, dims.hidden)
    return matrices


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--set", default="", help="NAME=VALUE,... of plan.make_plan's tuning")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tuning = {n: int(v) for n, v in (pair.split("=") for pair in options.set.split(",") if pair)}
    cache = Path(tempfile.gettempdir()) / "flint-cubins"
    gpu = driver_or_exit().gpu()
    plans = [
        plan_of(
            CASES[name].dims, CASES[name], gpu.sm_count, gpu.shared_per_block, columns, tuning, clusters=gpu.clusters
        )
        for name in options.names or CASES
        for columns in (1, 2, 4, 8)
    ]
    compile_all(plans, cache)
    results = []
    for name in options.names or CASES:
        result = run_case(name, CASES[name], cache, tuning)
        results.append(result)
        used = result["worst"] / LOGIT_TOLERANCE
        print(
            f"{name:20s} {'ok' if result['ok'] else 'FAIL':4s} worst {result['worst']:.2e} ({used:.0%} of tolerance); "
            f"{result['float32 cache']:.1e} against a float32 cache; registers, spills {result['registers']}"
        )
        if not result["ok"]:
            print("   ", {k: f"{v:.1e}" for k, v in result["errors"].items()}, result["streams"])
        sys.stdout.flush()
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0 if all(r["ok"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
