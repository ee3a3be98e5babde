"""docs/how-mbu-is-computed.md says what the code computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.machine.datasheets import datasheet
from engine.machine.roofline import intensity, ridge_point, token_rate
from engine.meter import packed_weight_bytes, step_ledger
from engine.packed.model import PackedModel

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "how-mbu-is-computed.md").read_text(encoding="utf-8")


@pytest.mark.real_model
def test_the_example_is_the_ledger_of_the_real_model(smollm2: Path) -> None:
    model = PackedModel.open(smollm2)
    ledger = step_ledger(model.config, packed_weight_bytes(model), 1, 255, kv_element_bytes=2)
    rows = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", TEXT, re.MULTILINE))
    weights = ledger.weights
    assert rows["q, k, v, o"] == " + ".join(f"{weights[kind]:,}" for kind in "qkvo")
    assert rows["gate, up, down"] == f"3 x {weights['gate']:,}"
    assert weights["gate"] == weights["up"] == weights["down"]
    assert rows["head (the tied embedding)"] == f"{weights['head']:,}"
    assert rows["norms"] == f"{weights['norm']:,}"
    assert rows["embedding, one row"] == f"{weights['embed']:,}"
    assert rows["**weights**"] == f"**{ledger.weight_bytes:,}**"
    assert rows[f"keys and values read, 256 positions at {ledger.kv_written:,}"] == f"{ledger.kv_read:,}"
    assert rows["keys and values written"] == f"{ledger.kv_written:,}"
    assert rows["**total**"] == f"**{ledger.total:,}**"
    assert f"takes {1e3 * ledger.total / 30e9:.1f} ms" in TEXT
    assert f"exceeds {token_rate(30e9, ledger.total):.0f} tok/s" in TEXT


def test_the_figures_of_the_introduction() -> None:
    h200 = datasheet("h200")
    ridge = ridge_point(h200.tflops["bf16"] * 1e12, h200.bandwidth_gb_s * 1e9)
    assert f"({intensity(0.5):.0f} FLOP for an int4 weight, where an H200 could do {ridge:.0f})" in TEXT


def test_what_it_names_exists() -> None:
    for path in re.findall(r"`((?:engine|kernels|flint_tui)/[^`]+)`", TEXT):
        assert (ROOT / path).is_file(), path
    commands = {path.stem for path in (ROOT / "flint_tui" / "commands").glob("*.py")}
    assert {name for name in re.findall(r"\bflint (\w+)", TEXT) if name not in ("shows",)} <= commands
