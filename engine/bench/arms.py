"""The contestants of `flint bench compare`: who they are, how their process is started, and why one is missing.

An arm is run by a worker in a process of its own, which reads one JSON request from stdin and prints one JSON answer:

    request   arm, prompt (token ids), tokens, threads, context, model (packed directory), gguf (path or null)
    answer    ids, prefill_s, decode_s, bytes_per_token, device, versions; or missing (why); or error
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.errors import BackendError, UsageError

TIMEOUT_S = 900
LLAMA_WORKER = Path(__file__).with_name("llama_worker.py")
WORKER = (sys.executable, "-m", "engine.bench.worker")


@dataclass(frozen=True)
class Arm:
    """command: of its worker. missing: why it cannot run here ("" where it can). gated: whether it tells its tokens.
    note: what a reader must know to be fair to it."""

    name: str
    command: tuple[str, ...] = WORKER
    missing: str = ""
    gated: bool = True
    note: str = ""


FLINT_ARMS = tuple(f"{backend}-{mode}" for backend in ("cuda", "cpu", "torch") for mode in ("single", "speculative"))
PEERS = ("torch-int4-graph", "torch-int4-compile", "transformers", "llama.cpp")
NAMES = (*(name for name in FLINT_ARMS if name != "torch-speculative"), *PEERS)
OF_BACKEND = {  # flint on it, and what others run there
    "cuda": ("cuda-single", "cuda-speculative", *PEERS),
    "cpu": ("cpu-single", "cpu-speculative", "transformers", "llama.cpp"),
    "torch": ("torch-single", "transformers", "llama.cpp"),
}


def find_arms(names: Sequence[str] | None, gguf: Path | None, gguf_problem: str, llama_python: str | None) -> list[Arm]:
    """Every arm asked for (None: all), those that are missing here with their reason. Raises UsageError."""
    wanted = list(dict.fromkeys(names or NAMES))
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise UsageError(f"No arm named {unknown[0][:60]!r}", f"Use some of {', '.join(NAMES)}.")
    return [_find(name, gguf, gguf_problem, llama_python) for name in wanted]


def launch(arm: Arm, request: dict[str, Any], timeout: float = TIMEOUT_S) -> dict[str, Any]:
    """Run the arm's worker once. A worker that dies, hangs or babbles is an answer with `error`, too."""
    try:
        run = subprocess.run(
            arm.command,
            input=json.dumps({**request, "arm": arm.name}),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout:.0f} s"}
    except OSError as failure:
        return {"missing": f"{arm.command[0]} cannot be started: {failure.strerror}"}
    lines = run.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        answer = None
    if isinstance(answer, dict):
        return answer
    said = run.stderr.strip().splitlines()
    return {"error": f"exit code {run.returncode}{': ' + said[-1][:200] if said else ''}"}


def _find(name: str, gguf: Path | None, gguf_problem: str, llama_python: str | None) -> Arm:
    backend = name.split("-")[0]
    if name in PEERS:
        finders: dict[str, Callable[[], Arm]] = {
            "torch-int4-graph": lambda: _torch_int4(name),
            "torch-int4-compile": lambda: _torch_int4(name),
            "transformers": lambda: _transformers(name, gguf, gguf_problem),
            "llama.cpp": lambda: _llama(name, gguf, gguf_problem, llama_python),
        }
        return finders[name]()
    if backend == "cuda":
        return Arm(name, missing=_no_gpu())
    if backend == "cpu":
        return Arm(name, missing=_no_library())
    return Arm(name, missing="" if find_spec("torch") else "torch is not installed")


def _no_gpu() -> str:
    from engine.backends.cuda import find_gpu

    try:
        find_gpu()
    except BackendError as failure:
        return str(failure)
    return ""


def _no_library() -> str:
    from engine.backends.cpu import native_library
    from kernels.native import LibraryMissing

    try:
        native_library()
    except LibraryMissing as failure:
        return f"the native library is missing: {failure}"
    return ""


def _torch_int4(name: str) -> Arm:
    return Arm(name, missing=_no_gpu(), note="prompt fed token by token, so no prefill rate")


def _transformers(name: str, gguf: Path | None, gguf_problem: str) -> Arm:
    absent = [module for module in ("torch", "transformers", "gguf", "accelerate") if not find_spec(module)]
    missing = gguf_problem if gguf is None else f"not installed: {', '.join(absent)}" if absent else ""
    return Arm(name, missing=missing, note="dequantises the GGUF when it loads it")


def _llama(name: str, gguf: Path | None, gguf_problem: str, python: str | None) -> Arm:
    if gguf is None:
        return Arm(name, missing=gguf_problem)
    if python is not None or find_spec("llama_cpp"):
        return Arm(name, (python or sys.executable, str(LLAMA_WORKER)), note="greedy by argmax, not detokenised")
    binary = shutil.which("llama-bench")
    if binary is not None:
        note = "llama-bench prints no tokens, so its correctness was not checked"
        return Arm(name, (sys.executable, str(LLAMA_WORKER), binary), gated=False, note=note)
    return Arm(name, missing="llama_cpp is not importable (give --llama-python PATH) and llama-bench is not on PATH")
