"""The house rules: which room may import which, what stays unimported, and that the README names what exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("flint_tui", "engine", "kernels", "assets")
MAY_IMPORT = {
    "flint_tui": {"flint_tui", "engine", "kernels", "assets"},
    "engine": {"engine", "kernels", "assets"},
    "kernels": {"kernels"},
}


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
        rooms |= {name.split(".")[0] for name in names} & {*ROOMS, "tests"}
    return rooms


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_point_one_way(room):
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    wrong = {str(f.relative_to(ROOT)): imported_rooms(f) - MAY_IMPORT[room] for f in files}
    assert {name: rooms for name, rooms in wrong.items() if rooms} == {}


def loaded_by(code: str) -> set[str]:
    """Top-level modules in memory after `code` ran in a fresh interpreter."""
    probe = f"{code}\nimport sys; print(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


RUN = "import contextlib, sys\nsys.argv = ['flint', {arguments}]\nfrom flint_tui.cli import app\n"
CALL = "with contextlib.suppress(SystemExit):\n    app()"


@pytest.mark.parametrize("arguments", ["'--help'", "'--version'", "'chat', '--help'", "'pack', '--help'"])
def test_help_and_version_load_nothing_heavy(arguments):
    heavy = {"torch", "textual", "transformers", "huggingface_hub", "gguf", "tokenizers", "numpy"}
    assert loaded_by(RUN.format(arguments=arguments) + CALL) & heavy == set()


def test_the_engine_never_loads_the_screen_and_the_cpu_path_never_loads_torch():
    loaded = loaded_by("import engine.loading, engine.backends.cpu, engine.decoder, engine.packing")
    assert loaded & {"torch", "textual", "transformers", "flint_tui"} == set()


def test_kernels_is_importable_beside_the_package_of_that_name():
    """transformers imports a top-level `kernels` and looks at its version: ours must have none, and cost nothing."""
    assert not hasattr(__import__("kernels"), "__version__")
    assert loaded_by("import kernels") & {"numpy", "torch", "cuda"} == set()


def test_documents_name_files_that_exist():
    missing = []
    for document in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "kernels").glob("*.md")),
    ]:
        for name in re.findall(
            r"`((?:flint_tui|engine|kernels|assets|tests|docs)/[\w./-]+)`", document.read_text("utf-8")
        ):
            if not (ROOT / name).exists():
                missing.append(f"{document.name}: {name}")
        for link in re.findall(r"\]\(((?!http)[^)#]+)", document.read_text("utf-8")):
            if not (document.parent / link).exists():
                missing.append(f"{document.name}: {link}")
    assert missing == []
