"""What does a step of the speculative loop cost, and what would it bring? Cost curves: acceptance is forced.

    python -m kernels.cuda.bench_speculation [--model granite-3b] [--context 1024] [--widths 1,2,4,8] [--steps 64]
        [--rounds 5] [--drafter] [--set NAME=VALUE,...] [--json FILE]

Random weights of a real shape. For each width, one line with the time of a step in the loop (drafting by lookup in a
history of `context` tokens, verifying, choosing), and the acceptance length at which it equals single pass; then tokens
a second as a function of the acceptance length. --drafter: a learned head of the model's own proportions makes all
drafts, in int8 with 16,384 tokens in int4. How many drafts of a model are right is another question: flint bench spec
answers it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernels.cuda.bench import MODELS, measure, read_tuning
from kernels.cuda.check import CASES, compile_all, plan_of
from kernels.cuda.drafting import DraftHead
from kernels.cuda.driver import driver_or_exit
from kernels.cuda.loading import DRAFT_NORMS
from kernels.cuda.phases import DraftDims, KernelDims, draft_matrix_sizes, plan_drafter

DRAFT_VOCAB = 16384
SIXTEENTHS = (0, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112)  # drafts accepted in 16 steps


def random_head(dims: KernelDims) -> DraftHead:
    """An EAGLE-3 head for a model of that shape, as flint stores one, with random weights."""
    import torch

    from kernels.cuda.reference import DEVICE, random_matrix

    layers = tuple(sorted({2, dims.layers // 2, dims.layers - 3}))
    draft = DraftDims(
        dims.intermediate, DRAFT_VOCAB, layers, dims.heads, dims.kv_heads, dims.head_dim, dims.rms_norm_eps
    )
    generator = torch.Generator(DEVICE).manual_seed(2)
    matrices = {
        name: random_matrix(*size, "int4_asymmetric" if name == "head" else "int8", 32, generator)
        for name, size in draft_matrix_sizes(dims, draft).items()
    }
    vectors = {name: torch.ones(dims.hidden).numpy() for name in DRAFT_NORMS}
    frequencies = (1e4 ** (-torch.arange(0, dims.head_dim, 2, dtype=torch.float32) / dims.head_dim)).numpy()
    return DraftHead(draft, matrices, vectors, frequencies, torch.arange(DRAFT_VOCAB).numpy())


def seconds_a_step(
    kernel: Any, width: int, context: int, sixteenths: int, steps: int, rounds: int, learned: bool = False
) -> list[float]:
    """Of each round, after one to warm up: the mean of all steps but the first, which carries the launch."""
    import torch

    from kernels.cuda.megakernel import DeviceSampling

    history = torch.randint(0, kernel.dims.vocab, (context,), generator=torch.Generator().manual_seed(1)).tolist()
    tokens = steps + steps * sixteenths // 16
    start = max(0, min(context, kernel.context_size - tokens) - tokens // 2)
    times = []
    for _ in range(rounds + 1):
        ring = kernel.stream_speculative(
            start,
            DeviceSampling(),
            tokens,
            [],
            history,
            columns=width,
            learned=learned,
            forced_sixteenths=sixteenths,
        )
        clocks: list[float] = []  # of every step's end
        while True:
            over = ring.done
            _, seconds, taken = ring.poll_steps()
            at = -1
            for step in taken:
                at += step.tokens
                clocks.append(seconds[at])
            if over and not taken:
                break
        times.append((clocks[-1] - clocks[0]) / (len(clocks) - 1))
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="granite-3b", choices=sorted(MODELS))
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--widths", default="1,2,4,8")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--drafter", action="store_true")
    parser.add_argument("--set", default="", help="NAME=VALUE,... of plan.make_plan's tuning")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    import torch

    from kernels.cuda.megakernel import Megakernel
    from kernels.cuda.reference import random_model

    case, sizes = CASES[options.model], MODELS[options.model]
    dims = replace(case.dims, vocab=sizes["vocab"], layers=options.layers or sizes["layers"])
    tuning = read_tuning(options.set, False) | {"FORCED_ACCEPTANCE": 1}
    widths = sorted({1, *(int(width) for width in options.widths.split(","))})
    gpu, cache = driver_or_exit().gpu(), Path(tempfile.gettempdir()) / "flint-cubins"
    head = random_head(dims) if options.drafter else None
    gpu_of = (dims, case, gpu.sm_count, gpu.shared_per_block)
    shares = plan_of(*gpu_of, 1, tuning, clusters=gpu.clusters).phases["o"].shares
    drafting = plan_drafter(dims, head.dims, head.matrices, gpu.sm_count, shares) if head else None
    plans = [
        plan_of(*gpu_of, width, tuning, drafting if width > 1 else None, clusters=gpu.clusters) for width in widths
    ]
    compile_all(plans, cache)
    model = random_model(dims, case.kind, case.group, head=case.head)
    room = options.context + 8 * options.steps
    kernel = Megakernel(
        dims,
        model.matrices,
        model.vectors,
        model.inverse_frequencies,
        room,
        room_for_drafter=options.drafter,
        cubin_cache=cache,
        tuning=tuning,
    )
    kernel.settle()
    if head:
        kernel.hold_drafter(head)
    kernel.kv_cache.normal_()
    single_rounds = measure(kernel, 1, options.context, 2 * options.steps, options.rounds)
    single = statistics.median(single_rounds)
    row: dict[str, Any] = {"gpu": gpu.name, "model": options.model, "context": options.context, "tuning": options.set}
    row["drafter"] = options.drafter
    rows = [row | {"width": 1, "sixteenths": 0, "seconds_a_step": single_rounds}]
    drafts = "a learned head drafts" if options.drafter else "drafts by lookup"
    print(f"{options.model}, context {options.context}, {gpu.name}, {drafts}. Cost curves: acceptance is forced.")
    print(f"single pass: {single * 1e6:.1f} us a token, {1 / single:.0f} tok/s")
    for width in widths[1:]:
        registers, spills = kernel.registers(width, options.drafter) or (None, None)
        for sixteenths in (n for n in SIXTEENTHS if n <= 16 * (width - 1)):
            times = seconds_a_step(
                kernel, width, options.context, sixteenths, options.steps, options.rounds, options.drafter
            )
            rows.append(row | {"width": width, "sixteenths": sixteenths, "seconds_a_step": times})
            step, length = statistics.median(times), 1 + sixteenths / 16
            if sixteenths == 0:
                print(
                    f"width {width}: {step * 1e6:.1f} us a step ({min(times) * 1e6:.1f}..{max(times) * 1e6:.1f}), "
                    f"x{step / single:.2f} of single pass, which it equals at acceptance length {step / single:.2f}; "
                    f"{registers} registers, {spills} B spilled"
                )
            print(
                f"    acceptance length {length:.2f}: {step * 1e6:7.1f} us a step, {length / step:6.0f} tok/s, "
                f"x{length * single / step:.2f}",
                flush=True,
            )
    kernel.close()
    torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
