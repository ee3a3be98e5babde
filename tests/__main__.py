"""The one check: format, lint, types, tests. `python -m tests`; `--all` also runs the slow tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    selection = ["-m", ""] if "--all" in sys.argv[1:] else []  # pyproject.toml leaves the slow ones out
    checks = [
        ["ruff", "format", "--check", "."],
        ["ruff", "check", "."],
        ["pyright"],
        ["pytest", *selection],
    ]
    for check in checks:
        print("+", *check, flush=True)
        status = subprocess.run([sys.executable, "-m", *check], cwd=ROOT).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
