"""The machine and the software, for a stranger: chosen field by field, so that nothing unforeseen comes along."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.bench.clocks import snapshot

if TYPE_CHECKING:
    from engine.machine.capabilities import Report

PACKAGES = ("numpy", "tokenizers", "transformers", "gguf", "accelerate", "llama_cpp_python", "triton")
GPU_FIELDS = ("name", "memory_bytes", "sm_count", "capability", "l2_bytes", "peak_bytes_per_second")


def environment(report: Report) -> dict[str, Any]:
    """Of `engine.machine.capabilities.inspect`'s report: no folder, no host, no user, no serial number, no process."""
    processor = report.processor
    return {
        "flint": report.flint,
        "commit": commit(),
        "python": report.python,
        "system": report.system,
        "processor": {
            "name": processor.name,
            "cores": processor.cores,
            "threads": processor.threads,
            "cpu_limit": processor.cpu_limit,
            "features": list(processor.features),
            "caches": processor.caches,
            "isas": list(processor.isas),
        },
        "memory_bytes": report.memory_bytes,
        "bandwidth": asdict(report.bandwidth),
        "gpu": {name: getattr(report.gpu, name, None) for name in GPU_FIELDS} if report.gpu else None,
        "gpu_bandwidth": asdict(report.gpu_bandwidth) if report.gpu_bandwidth else None,
        "driver": report.driver,
        "packages": report.packages | {name: _version(name) for name in PACKAGES},
        "backends": {state.name: state.detail if state.runs else f"no: {state.detail}" for state in report.backends},
        "clocks": snapshot(),
    }


def commit() -> str | None:
    """Of the checkout that flint runs from, with "+" where files were changed; None where it is installed."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    with suppress(OSError, subprocess.SubprocessError):
        return _git(folder, "rev-parse", "HEAD")[:12] + ("+" if _git(folder, "status", "--porcelain", "-uno") else "")
    return None


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ("git", *arguments), cwd=folder, capture_output=True, text=True, check=True, timeout=20
    ).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
