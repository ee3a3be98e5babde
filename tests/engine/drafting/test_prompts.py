"""Prompt files: what is read, and what is one line."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from engine.drafting.prompts import Prompt, load_prompts
from engine.drafting.themes import SHARES, Themes, plain
from engine.errors import UsageError
from tests.flint_tui.command_line import flint


def test_the_shipped_files() -> None:
    held_out = load_prompts(None)
    assert len(held_out) == 64
    assert {prompt.domain for prompt in held_out} == {"chat", "code", "summarise", "rewrite"}
    assert len(load_prompts(None, limit=2)) == 8


def test_themes_write_varied_prompts_and_none_of_the_held_out() -> None:
    themes = Themes()
    passages = [f"Passage number {i} is short." for i in range(500)]
    prompts = themes.openings(4000, np.random.default_rng(0), passages)
    assert len({prompt.text for prompt in prompts if prompt.complete}) > 3000
    for domain, share in SHARES.items():
        assert abs(sum(prompt.domain == domain for prompt in prompts) / 4000 - share) < 0.03
    assert all("{" not in prompt.text or "```" in prompt.text for prompt in prompts)
    assert all(prompt.complete != (prompt.domain == "open") for prompt in prompts)
    assert not {plain(prompt.text) for prompt in prompts} & themes.held_out
    themes.patterns["chat"] = ["What is the capital of Portugal and what is it known for?", "Why?"]
    written = {p.text for p in themes.openings(200, np.random.default_rng(0), []) if p.domain == "chat"}
    assert written == {"Why?"}
    requests = themes.passage_requests(100, np.random.default_rng(0))
    assert len({request.text for request in requests}) > 90


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "a"}\n\n{"domain": "code", "text": "b", "more": 1}\n{"text": "c", "complete": false}\n')
    assert load_prompts(path) == [Prompt("all", "a"), Prompt("code", "b"), Prompt("all", "c", complete=False)]
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
