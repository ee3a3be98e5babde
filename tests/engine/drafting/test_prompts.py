"""Prompt files: what is read, and what is one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.drafting.prompts import OPENERS, Prompt, load_prompts
from engine.errors import UsageError
from tests.flint_tui.command_line import flint


def test_the_shipped_files() -> None:
    held_out = load_prompts(None)
    assert len(held_out) == 64
    assert {prompt.domain for prompt in held_out} == {"chat", "code", "summarise", "rewrite"}
    assert not {prompt.text for prompt in load_prompts(None, OPENERS)} & {prompt.text for prompt in held_out}
    assert len(load_prompts(None, limit=2)) == 8


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "a"}\n\n{"domain": "code", "text": "b", "more": 1}\n{"text": "c"}\n')
    assert load_prompts(path) == [Prompt("all", "a"), Prompt("code", "b"), Prompt("all", "c")]
    assert load_prompts(path, limit=1) == [Prompt("all", "a"), Prompt("code", "b")]


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"[1]", b'{"domain": "x"}', b"\xff\xfe", b"[" * 100_000, b'"text"', b'{"text": "a"']
)
def test_what_is_no_prompt_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"p\.jsonl"):
        load_prompts(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a file"):
        load_prompts(tmp_path / "pipe")


@pytest.mark.parametrize("options", [("--device", "x"), ("--seed", "-1"), ("--seed", str(2**40))])
def test_impossible_options(options: tuple[str, str]) -> None:
    assert flint("draft", "train", "--data", "x", "--out", "y", *options).code == 2
