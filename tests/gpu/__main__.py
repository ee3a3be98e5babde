"""Everything of tests/gpu on the machine at hand, and a table of what came out.

    python -m tests.gpu [--packed DIRECTORY | --chat DIRECTORY] [--sanitizer] [--bench] [--out DIRECTORY] [-k WORDS]

--packed: smollm2 as `flint pack` wrote it; runs its tests, and `flint chat` end to end. --chat: only the latter, with
any packed model. --sanitizer runs a tiny model under compute-sanitizer's memcheck and racecheck. --bench times the
prefill. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MINUTES = {"tests": 8, "sanitizer": 4, "chat": 3, "bench": 2}


def run(title: str, command: list[str], minutes: int, **environment: str) -> tuple[bool, str]:
    """Run a command, with a limit; its success and its output."""
    print(f"== {title}", flush=True)
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            timeout=60 * minutes,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as late:
        return False, f"{late.stdout or ''}\nno end after {minutes} minutes"
    return done.returncode == 0, done.stdout


def tests(packed: str | None, out: Path, expression: str | None) -> bool:
    report = out / "tests-gpu.xml"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-o", "junit_family=xunit1", f"--junitxml={report}"]
    command += ["-k", expression] if expression else []
    if importlib.util.find_spec("xdist"):  # most of the time is compiling, and that runs side by side
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    command += [] if packed else ["--ignore=tests/gpu/test_smollm2.py"]
    environment = {"FLINT_TEST_FAILURES": str(out / "failures.txt")}
    environment |= {"FLINT_TEST_PACKED": packed} if packed else {}
    good, output = run("pytest tests/gpu", command, MINUTES["tests"], **environment)
    (out / "tests-gpu.log").write_text(output)
    if not good:
        print(output[-6000:])
    if report.exists():
        print_table(report)
    return good


def print_table(report: Path) -> None:
    """One line per test function: outcomes of its cases, the worst of each recorded number, seconds."""
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    numbers: defaultdict[str, dict[str, float]] = defaultdict(dict)
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rsplit('.', 1)[-1]}.{case.get('name', '').split('[')[0]}"
        states = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[name][states[0] if states else "passed"] += 1
        seconds[name] += float(case.get("time", 0))
        for item in case.iter("property"):
            key, value = item.get("name", ""), float(item.get("value", 0))
            numbers[name][key] = max(value, numbers[name].get(key, value))
    for name, counts in outcomes.items():
        cases = ", ".join(f"{count} {state}" for state, count in counts.items())
        worst = ", ".join(f"{key} {value:.2g}" for key, value in numbers[name].items())
        print(f"{name:70} {cases:22} {seconds[name]:6.1f} s  {worst}")


def sanitize(out: Path) -> bool:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        print("compute-sanitizer is not here")
        return False
    good = True
    for check in ("memcheck", "racecheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, "-m", "tests.gpu.short_run"]
        command += ["--racecheck"] if check == "racecheck" else []
        clean, output = run(f"compute-sanitizer {check}", command, MINUTES["sanitizer"])
        (out / f"{check}.log").write_text(output)
        print("\n".join(output.splitlines()[-3:]))
        good &= clean
    return good


def chat(packed: str) -> bool:
    command = [sys.executable, "-m", "flint_tui.cli", "chat", packed, "-p", "What is gravity?", "--backend", "cuda"]
    command += ["--temperature", "0", "--max-tokens", "200", "--json"]
    good = True
    for attempt in ("first", "second"):  # the first compiles
        done, output = run(f"flint chat, {attempt} time", command, MINUTES["chat"])
        found = output[output.find("{") :]
        try:
            answer = json.loads(found[: found.rfind("}") + 1])
        except ValueError:
            print(output[-2000:])
            return False
        text = answer.pop("text", "")
        answer.pop("token_ids", None)
        print(json.dumps(answer))
        print(text[:300])
        good &= done and answer.get("backend") == "cuda"
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packed")
    parser.add_argument("--chat")
    parser.add_argument("--sanitizer", action="store_true")
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("-k", dest="expression")
    options = parser.parse_args()
    packed = str(Path(options.packed).resolve()) if options.packed else None

    results = {"tests": tests(packed, options.out, options.expression)}
    if packed or options.chat:
        results["chat"] = chat(packed or str(Path(options.chat).resolve()))
    if options.bench:
        command = [sys.executable, "-m", "kernels.cuda.bench_prefill", "--json", str(options.out / "prefill.json")]
        results["bench"], output = run("prefill", command, MINUTES["bench"])
        print(output)
    if options.sanitizer:
        results["sanitizer"] = sanitize(options.out)
    print(", ".join(f"{name} {'passed' if good else 'FAILED'}" for name, good in results.items()))
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
