"""The native CPU decoder against llama.cpp, on one machine, same weights, same threads.

    python -m engine.bench.cpu_peers MODEL --gguf FILE [--llama-python PATH] [--threads N] [--rounds N] [--out FILE]

Every round runs both in fresh processes, one after the other, in alternating order. MODEL is a packed directory made
from the GGUF. llama.cpp (llama-cpp-python, flash attention on) is optional: without it only our own figures come. With
--busy another process keeps one processor busy, and our decoding is compared with one thread of it alone. On a shared
machine, --quiet 0.1 repeats each run during which other processes took more than a tenth of one processor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engine.backends.cpu import native_library
from engine.bench.arms import LLAMA_WORKER
from engine.bench.environment import commit
from engine.bench.workload import prompt_ids
from engine.machine.hardware import processor
from engine.packed.library import resolve
from engine.packed.model import PackedModel
from engine.statistics import ROUNDS, Summary, compare, summarise
from engine.text.tokenizer import Tokenizer
from kernels.cpu.threads import default_threads

PROMPT, LONG_PROMPT, TOKENS, CONTEXT = 36, 512, 129, 2048
TIMEOUT_S = 600
SPIN = "while True: pass"
ATTEMPTS = 20  # to catch a quiet time, for one run
STAT = Path("/proc/stat")  # Linux; elsewhere nobody knows what others use


def main() -> None:
    options = parse()
    native_library()  # compiled now if need be, not in the first round
    model = resolve(options.model)
    tokenizer = Tokenizer.from_packed(PackedModel.open(model))
    request = {
        "model": str(model),
        "gguf": str(options.gguf),
        "threads": options.threads,
        "context": CONTEXT,
        "prompt": prompt_ids(tokenizer, PROMPT),
        "long_prompt": prompt_ids(tokenizer, LONG_PROMPT),
        "tokens": TOKENS,
    }
    rounds = under_load(request, options.rounds, options.quiet) if options.busy else against_peer(request, options)
    if options.out:
        record = {"commit": commit(), "processor": processor(), "threads": options.threads, "rounds": rounds}
        options.out.write_text(json.dumps(record) + "\n")
    (report_load if options.busy else report)(rounds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench.cpu_peers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", help="a packed model: its name, or its folder")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--llama-python", help="a Python that can import llama_cpp")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="raw samples, as JSON")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--quiet", type=float, metavar="SHARE", help="processors that others may use during a run")
    return parser.parse_args()


# --- running ----------------------------------------------------------------------------------------------------------


def ask(command: list[str], request: dict[str, Any]) -> dict[str, Any]:
    run = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=TIMEOUT_S)
    if run.returncode != 0:
        raise SystemExit(f"{command[-1]} failed:\n{run.stderr[-2000:]}")
    answer = json.loads(run.stdout.strip().splitlines()[-1])
    if problem := answer.get("missing") or answer.get("error"):
        raise SystemExit(f"{Path(command[-1]).name}: {problem}")
    return answer


def in_quiet(run: Callable[[], dict[str, Any]], limit: float | None) -> dict[str, Any]:
    """The answer of the first run that others left alone, or of the last attempt; with the processors they used."""
    answer: dict[str, Any] = {}
    for _ in range(ATTEMPTS if limit is not None and STAT.exists() else 1):
        others, start = others_seconds(), time.monotonic()
        answer = run()
        answer["others"] = (others_seconds() - others) / (time.monotonic() - start)
        if limit is None or answer["others"] <= limit:
            break
    return answer


def others_seconds() -> float:
    """Processor time of all but this process and those it has waited for; 0 where the system does not say."""
    if not STAT.exists():
        return 0.0
    ticks = [int(field) for field in STAT.read_text().split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]  # and waiting for a disk
    used = os.times()
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK") - sum(used[:4])


def probe(request: dict[str, Any], what: str, **changes: Any) -> dict[str, Any]:
    return ask([sys.executable, "-m", "engine.bench.cpu_probe"], request | {"what": what} | changes)


def ours(request: dict[str, Any]) -> dict[str, Any]:
    """All figures, between two measurements of what memory gives at the time."""
    before = probe(request, "bandwidth")["bandwidth_gb_s"]
    answer = probe(request, "all")
    return answer | {"bandwidth_gb_s": [before, probe(request, "bandwidth")["bandwidth_gb_s"]]}


def llama(python: str, request: dict[str, Any]) -> dict[str, Any]:
    """The same figures from two processes, one per prompt length."""
    short = ask([python, str(LLAMA_WORKER)], request)
    long = ask([python, str(LLAMA_WORKER)], request | {"prompt": request["long_prompt"], "tokens": 1})
    return {
        "ids": short["ids"],
        "ttft_s": short["prefill_s"],
        "decode_s": short["decode_s"],
        "prefill_s": long["prefill_s"],
        "features": short.get("features"),
        "versions": short["versions"],
    }


def against_peer(request: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    arms: list[tuple[str, Callable[[], dict[str, Any]]]] = [("flint", partial(ours, request))]
    if options.llama_python:
        arms.append(("llama.cpp", partial(llama, options.llama_python, request)))
    rounds = []
    for i in range(options.rounds):
        order = arms if i % 2 == 0 else arms[::-1]
        rounds.append({name: in_quiet(run, options.quiet) for name, run in order})
        print(f"round {i + 1}: " + ", ".join(f"{name} {rate(answer):.1f} tok/s" for name, answer in rounds[-1].items()))
    return rounds


def under_load(request: dict[str, Any], count: int, quiet: float | None) -> list[dict[str, Any]]:
    rounds = []
    for _ in range(count):
        alone = in_quiet(partial(probe, request, "decode", threads=1), quiet)
        with subprocess.Popen([sys.executable, "-c", SPIN]) as busy:
            loaded = in_quiet(partial(probe, request, "decode"), None if quiet is None else 1 + quiet)
            busy.kill()
        rounds.append({"one thread alone": alone, "beside a busy process": loaded})
    return rounds


# --- reporting --------------------------------------------------------------------------------------------------------


def rate(answer: dict[str, Any]) -> float:
    """Decoded tokens per second, the first token left out."""
    return (len(answer["ids"]) - 1) / answer["decode_s"]


FIGURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "decode, tok/s": rate,
    f"prompt of {LONG_PROMPT}, tok/s": lambda answer: LONG_PROMPT / answer["prefill_s"],
    f"first token of a prompt of {PROMPT}, 1/s": lambda answer: 1 / answer["ttft_s"],
}


def report(rounds: list[dict[str, Any]]) -> None:
    for name, figure in FIGURES.items():
        samples = {arm: [figure(each[arm]) for each in rounds] for arm in rounds[0]}
        print(f"{name}: " + "; ".join(f"{arm} {line(summarise(values))}" for arm, values in samples.items()))
        if len(samples) == 2 and len(rounds) >= ROUNDS:
            print(f"    ratio {compare(samples['flint'], samples['llama.cpp'])}")
    flint = [each["flint"] for each in rounds]
    for width in (2, 4, 8):
        ratios = [each["step_s"][str(width)] / each["step_s"]["1"] for each in flint]
        print(f"M = {width} against M = 1: {line(summarise(ratios), 2)}")
    used = [each["decode_bytes"] / each["decode_s"] / 1e9 for each in flint]
    shares = [gb_s / max(each["bandwidth_gb_s"]) for gb_s, each in zip(used, flint, strict=True)]
    print(
        f"bandwidth used: {line(summarise(used))} GB/s, MBU {line(summarise(shares), 2)} of what was measured beside it"
    )
    for name, when in (("chat_memory", f"{PROMPT + TOKENS} tokens"), ("peak_memory", f"a prompt of {LONG_PROMPT}")):
        if memory := [each[name] / each["weight_bytes"] for each in flint if each[name]]:
            print(f"peak memory after {when}: {line(summarise(memory), 2)} times the weights, interpreter included")
    print(
        f"processors that others used: {line(summarise([each[arm]['others'] for each in rounds for arm in each]), 2)}"
    )


def report_load(rounds: list[dict[str, Any]]) -> None:
    ratios = [rate(each["beside a busy process"]) / rate(each["one thread alone"]) for each in rounds]
    print(f"beside a busy process, against one thread alone: {line(summarise(ratios), 2)}")
    others = [each["beside a busy process"]["others"] for each in rounds]
    print(f"processors that others used, the busy process included: {line(summarise(others), 2)}")


def line(summary: Summary, digits: int = 1) -> str:
    return f"{summary.median:.{digits}f} ({summary.low:.{digits}f} to {summary.high:.{digits}f})"


if __name__ == "__main__":
    main()
