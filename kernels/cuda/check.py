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

from kernels.cuda.kv_layout import pack_keys, pack_values
from kernels.cuda.plan import KernelDims

LOGIT_TOLERANCE = 3e-3  # relative, against float32 with a bf16 cache; the cache's own rounding is shown beside it


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


def run_case(name: str, case: Case, cache: Path) -> dict[str, Any]:
    import torch

    from kernels.cuda.megakernel import Megakernel
    from kernels.cuda.reference import Reference, random_model

    d = case.dims
    model = random_model(d, case.kind, case.group, head=case.head, seed=len(name))
    kernel = Megakernel(d, model.matrices, model.vectors, model.inverse_frequencies, case.context, cubin_cache=cache)
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
            cache_tensor[:, :, position:whole] = torch.randn(shape_kv, device="cuda").to(torch.bfloat16).float()
        blocks = whole // 16
        kernel.kv_cache[:, :, :blocks, 0] = pack_keys(truth.keys[:, :, :whole].to(torch.bfloat16))
        kernel.kv_cache[:, :, :blocks, 1] = pack_values(truth.values[:, :, :whole].to(torch.bfloat16))
        position = start
        for m in case.columns:
            compare(f"{m} columns at {start}", m, position)
            position += m
    worst = max(errors.values())
    registers = {c: (r.registers, r.spills) for c in (1, 8) for r in [kernel.report(c)[0]]}
    kernel.close()
    return {
        "name": name,
        "worst": worst,
        "ok": worst < LOGIT_TOLERANCE,
        "errors": errors,
        "float32 cache": rounding[0],
        "registers": registers,
    }


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cache = Path(tempfile.gettempdir()) / "flint-cubins"
    results = []
    for name in options.names or CASES:
        result = run_case(name, CASES[name], cache)
        results.append(result)
        used = result["worst"] / LOGIT_TOLERANCE
        print(
            f"{name:20s} {'ok' if result['ok'] else 'FAIL':4s} worst {result['worst']:.2e} ({used:.0%} of tolerance); "
            f"{result['float32 cache']:.1e} against a float32 cache; registers, spills {result['registers']}"
        )
        if not result["ok"]:
            print("   ", {k: f"{v:.1e}" for k, v in result["errors"].items()})
        sys.stdout.flush()
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0 if all(r["ok"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
