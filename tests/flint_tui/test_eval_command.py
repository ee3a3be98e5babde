"""`flint eval` on small random models, through the torch backend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.files.paths import models_dir
from tests.fake_backend import FakeBackend
from tests.flint_tui.command_line import flint
from tests.hugging_face_folders import write_hf_folder
from tests.synthetic import small_config, write_random_packed


@pytest.fixture(autouse=True)
def models(tmp_path: Path) -> Path:
    """Three packings called small, and a text."""
    for bits, seed in ((16, 0), (8, 1), (4, 2)):
        write_random_packed(models_dir() / "small" / f"int{bits}", small_config(), bits=bits, seed=seed, name="small")
    path = tmp_path / "text.txt"
    path.write_text("To be scored, a text needs some letters; these are enough of them.", encoding="utf-8")
    return path


SMALL = ("--window", "32", "--stride", "16", "--backend", "torch", "--threads", "1")


def test_perplexity_says_on_what_it_was_taken(models: Path) -> None:
    result = flint("eval", "ppl", "small/int8", "-f", str(models), *SMALL, "--json")
    assert result.code == 0, result.stderr
    out = json.loads(result.stdout)
    assert (out["backend"], out["text"], out["window"], out["stride"]) == ("torch", "text.txt", 32, 16)
    assert out["tokens"] == len(models.read_text()) - 1  # a byte is a token of this vocabulary
    assert out["perplexity"] > 1
    line = flint("eval", "ppl", "small/int8", "-f", str(models), *SMALL).stdout
    assert f"perplexity {out['perplexity']:.3f}" in line
    assert "window 32, stride 16" in line
    with_bos = json.loads(flint("eval", "ppl", "small/int8", "-f", str(models), *SMALL, "--bos", "--json").stdout)
    assert with_bos["tokens"] == out["tokens"] + 1


def test_divergence_of_several_packings_from_one(models: Path) -> None:
    arguments = ("eval", "kld", "small/int8", "small/int16", "--against", "small/int16", "-f", str(models), *SMALL)
    result = flint(*arguments, "--json")
    assert result.code == 0, result.stderr
    out = json.loads(result.stdout)
    other, same = out["tested"]
    assert other["kl_mean"] > 0
    assert (same["kl_mean"], same["same_top"]) == (0.0, 1.0)
    assert out["reference_perplexity"] == same["perplexity"]
    lines = flint(*arguments).stdout.splitlines()
    assert "(reference)" in lines[2]
    assert len(lines[:5]) == 5
    assert "each scored once; window 32, stride 16" in lines[-1]


def test_the_default_reference_is_the_checkpoint_as_bf16(models: Path, tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "Some-Model")
    packed = flint("pack", str(folder), "--bits", "8")
    assert packed.code == 0, packed.stderr
    name = Path(packed.stdout.strip()).parent.name
    result = flint("eval", "kld", name, "-f", str(models), *SMALL, "-n", "20", "--json")
    assert result.code == 0, result.stderr
    out = json.loads(result.stdout)
    assert out["reference"] == f"{name}-bf16/bf16"
    (row,) = out["tested"]
    assert row["variant"].startswith("int8")
    assert 0 < row["kl_mean"] < 0.01  # 8 bits cost little
    assert out["reference_bytes"] > row["bytes"]


def test_a_backend_that_is_not_the_one_under_test_gives_no_figure(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.loading.open_backend", lambda *arguments: FakeBackend())
    result = flint("eval", "ppl", "small/int8", "-f", str(models), *SMALL)
    assert (result.code, result.stdout) == (1, "")
    assert result.error == "fake was opened where torch was to be evaluated"


def test_what_cannot_be_evaluated_is_one_line(models: Path, tmp_path: Path) -> None:
    assert "cannot be read" in flint("eval", "ppl", "small/int8", "-f", str(tmp_path / "none.txt")).error
    (tmp_path / "latin").write_bytes(b"\xff\xfe\xfd")
    assert "is not UTF-8" in flint("eval", "ppl", "small/int8", "-f", str(tmp_path / "latin")).error
    assert (
        "--stride 64" in flint("eval", "ppl", "small/int8", "-f", str(models), "--window", "32", "--stride", "64").error
    )
    assert "--against" in flint("eval", "kld", "small/int8", "-f", str(models)).hint
    write_random_packed(models_dir() / "wide" / "x", small_config(vocab_size=512), name="wide")
    wide = flint("eval", "kld", "wide", "--against", "small/int16", "-f", str(models), *SMALL)
    assert wide.error == "wide and small divide text into different tokens"


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_a_text_without_end_is_refused(models: Path) -> None:
    result = flint("eval", "ppl", "small/int8", "-f", "/dev/zero", *SMALL)
    assert (result.code, result.error) == (2, "/dev/zero has more than 4,194,304 characters")
