"""Reads thousands of mutated checkpoints and packed models under a memory and a time limit (run by test_fuzz_readers).

    python -m tests.engine.fuzz_readers SEEDS CASES FIRST

SEEDS: a folder whose subfolders are models; CASES mutations are read, numbered from FIRST (the number alone makes the
mutation, so a finding can be repeated). Prints one JSON object: outcomes by kind, and findings: whatever was neither
a success nor a FlintError. Memory beyond what the process had at its start is limited to MEMORY_BYTES.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType

from engine.checkpoint import open_checkpoint
from engine.errors import FlintError
from engine.packed.conversion import convert, plan_storage
from engine.packed.model import PackedModel
from engine.packed.quantize import dequantize

MEMORY_BYTES = 256 << 20
SECONDS_PER_CASE = 10
EXTREMES = (
    0,
    1,
    7,
    0x7F,
    0xFF,
    0xFFFF,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
)
TEXT_VALUES = (b"-1", b"0", b"1e999", b"NaN", b"null", b'""', b"[]", b"{}", b"99999999999999999999", b"true", b"0.5")


class TooSlow(Exception):
    pass


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to three edits, four of five of them in the first half kilobyte of the header or right behind it."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        if not out:
            break
        reach = min(len(out), rng.choice((24, 64, 512, 4096, len(out))))
        at = rng.randrange(reach)
        match rng.randrange(8):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at] = rng.randrange(256)
            case 2:
                del out[at:]
            case 3:
                out[at : at + 8] = struct.pack("<Q", rng.choice(EXTREMES))
            case 4:
                out[at : at + 4] = struct.pack("<I", rng.choice(EXTREMES) & 0xFFFFFFFF)
            case 5:
                del out[at : at + rng.randint(1, 16)]
            case 6:
                out[at:at] = out[at : at + rng.randint(1, 64)]
            case 7:
                _edit_text(out, rng)
    return bytes(out)


def _edit_text(out: bytearray, rng: random.Random) -> None:
    """Swap a JSON value (or any run of digits) for another kind of value."""
    digits = [i for i in range(min(len(out), 4096)) if 48 <= out[i] <= 57]
    if digits:
        at = end = rng.choice(digits)
        while end < len(out) and 48 <= out[end] <= 57:
            end += 1
        out[at:end] = rng.choice(TEXT_VALUES)


def read_everything(path: Path) -> None:
    """Open as flint would, and touch every value."""
    if (path / "manifest.json").exists():
        model = PackedModel.open(path)
        for name in model.names():
            dequantize(model.matrix(name)) if name in model.matrix_names() else model.vector(name)
        model.chat_template  # noqa: B018
        PackedModel.open(path, verify=True)
        return
    files = list(path.glob("*.gguf"))
    with open_checkpoint(files[0] if files else path) as checkpoint:
        plan = plan_storage(checkpoint)
        checkpoint.config.rope_inverse_frequencies()
        for name in checkpoint.names():
            checkpoint.read_float(name)
            if name in plan:
                convert(checkpoint, name, plan[name])


def read_case(path: Path) -> tuple[str, str]:
    """("read", ""), ("refused", the error) or ("finding", the traceback)."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_CASE)
    try:
        read_everything(path)
    except FlintError as error:
        one_line = str(error).isprintable() and error.hint.isprintable()
        return ("refused", str(error)) if one_line else ("finding", repr(error))
    except BaseException:
        return "finding", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "read", ""


def _alarm(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def main(seeds: Path, cases: int, first: int) -> None:
    warnings.simplefilter("error")  # a user would see them on the terminal
    models = sorted(path for path in seeds.iterdir() if path.is_dir())
    for model in models:
        read_everything(model)
    _limit_memory()
    signal.signal(signal.SIGALRM, _alarm)
    outcomes: Counter[str] = Counter()
    findings = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + cases):
            rng = random.Random(number)
            model = models[number % len(models)]
            case = Path(folder) / "case"
            shutil.copytree(model, case)
            target = rng.choice(sorted(case.iterdir()))
            target.write_bytes(mutate(target.read_bytes(), rng))
            outcome, trace = read_case(case)
            if outcome == "finding":
                findings.append({"case": number, "file": f"{model.name}/{target.name}", "trace": trace})
            outcomes[f"{model.name}: {outcome}"] += 1
            shutil.rmtree(case)
    print(json.dumps({"outcomes": outcomes, "findings": findings[:10]}))


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
