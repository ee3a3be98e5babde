"""`flint draft`: what it refuses before it begins."""

from __future__ import annotations

from engine.files.paths import models_dir
from tests.flint_tui.command_line import flint
from tests.synthetic import small_config, write_random_packed


def test_evaluating_a_learned_drafter_that_is_not_there_is_one_line() -> None:
    write_random_packed(models_dir() / "small" / "int4-g32", small_config(), name="small")
    result = flint("draft", "eval", "small", "--backend", "torch", "--limit", "1", "--max-tokens", "2")
    assert (result.code, result.error) == (1, "small has no learned drafter")
    assert "flint draft train" in result.hint


def test_training_on_from_what_is_no_drafter_is_one_line(tmp_path) -> None:
    write_random_packed(models_dir() / "small" / "int4-g32", small_config(), name="small")
    path = tmp_path / "drafter.safetensors"
    path.write_bytes(b"not a drafter")
    options = ("--data", str(tmp_path), "--out", str(tmp_path / "out"))
    result = flint("draft", "train", "small", "--from", str(path), *options)
    assert (result.code, result.hint) == (2, "give a drafter of this model, or leave it out")
    assert result.error.startswith("--from: drafter.safetensors is not a readable drafter")
    result = flint("draft", "train", "small", "--head-bits", "5", *options)
    assert (result.code, result.error) == (2, "--head-bits 5: 8 or 4")


def test_a_harvest_that_cannot_begin_is_one_line(tmp_path, monkeypatch) -> None:
    """Its default batch, made for a GPU, was killed for memory on a machine of 24 GB, before the prompts were read."""
    write_random_packed(models_dir() / "small" / "int4-g32", small_config(), name="small")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("not json")
    monkeypatch.setattr("engine.drafting.batched_target.physical_memory", lambda: 1 << 20)
    options = ("draft", "harvest", "small", "--device", "cpu", "--out", str(tmp_path), "--prompts", str(prompts))
    result = flint(*options)
    assert (result.code, result.error) == (2, 'prompts.jsonl, line 1: expected an object with "text"')
    prompts.write_text('{"text": "hello"}')
    result = flint(*options)
    assert result.code == 1
    assert result.error.startswith("Keys and values of 1024 sequences of 512 tokens take ")
    assert result.hint.endswith("sequences fit")
    fitting = int(result.hint.split()[0])
    assert 0 < fitting < 1024
