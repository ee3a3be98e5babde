"""Speculation on the real model, prompt lookup drafting: token by token what single pass gives, greedy and sampled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import assets
from engine.backends.base import Backend
from engine.decoder import DecodeOptions, Decoder
from engine.drafting.ngram import NgramDrafter
from engine.errors import BackendError
from engine.events import Finished, Tokens, Usage
from engine.loading import open_backend
from engine.packed.model import PackedModel
from engine.sampling import Sampling
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.real_model
SAMPLED = Sampling(temperature=0.7, top_k=40, top_p=0.95, min_p=0.02, repeat_penalty=1.1, seed=11)


def prompts(count: int) -> list[str]:
    """Held-out prompts, the domains in turn."""
    lines = (Path(assets.__file__).parent / "prompts" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    by_domain: dict[str, list[str]] = {}
    for line in map(json.loads, lines):
        by_domain.setdefault(line["domain"], []).append(line["text"])
    rows = [
        texts[i] for i in range(max(map(len, by_domain.values()))) for texts in by_domain.values() if i < len(texts)
    ]
    assert len(rows) >= count
    return rows[:count]


@pytest.fixture(scope="module", params=["cpu", "torch"])
def opened(request: pytest.FixtureRequest, smollm2: Path) -> Iterator[tuple[Backend, Tokenizer, ChatTemplate]]:
    model = PackedModel.open(smollm2)
    try:
        # One thread: torch's spin when other tests take the cores.
        backend = open_backend(model, request.param, threads=1 if request.param == "torch" else None, context=2048)
    except BackendError as missing:
        pytest.skip(str(missing))
    tokenizer = Tokenizer.from_packed(model)
    yield backend, tokenizer, ChatTemplate.from_packed(model, tokenizer)
    backend.close()


def decode(decoder: Decoder, ids: Sequence[int], options: DecodeOptions) -> tuple[list[int], Usage]:
    tokens: list[int] = []
    for event in decoder.generate(ids, options):
        if isinstance(event, Tokens):
            tokens += event.ids
        if isinstance(event, Finished):
            assert event.reason in ("stop", "length"), event.error
            return tokens, event.usage
    raise AssertionError("no end")


def compare(opened, count: int, length: int, sampling: Sampling, draft_tokens: int | None) -> float:
    """Decode both ways, each in its own conversation; returns accepted drafts per verify step + 1."""
    backend, tokenizer, template = opened
    decoder, drafter = Decoder(backend, tokenizer), NgramDrafter()
    backend.truncate(0)
    accepted = verified = 0
    for prompt in prompts(count):
        ids = template.encode([{"role": "user", "content": prompt}], tokenizer)
        plain, _ = decode(decoder, ids, DecodeOptions(sampling, length, stop_ids=frozenset()))
        options = DecodeOptions(sampling, length, stop_ids=frozenset(), drafter=drafter, draft_tokens=draft_tokens)
        drafted, usage = decode(decoder, ids, options)
        assert drafted == plain, prompt
        accepted, verified = accepted + usage.accepted, verified + usage.verify_steps
    return 1 + accepted / verified if verified else 1.0


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_few_prompts(opened, sampling):
    count, length = (2, 24) if opened[0].name == "torch" else (4, 40)
    assert compare(opened, count, length, sampling, draft_tokens=4) >= 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("draft_tokens", [4, None], ids=["K=4", "adaptive"])
def test_fifty_prompts(opened, draft_tokens):
    length = compare(opened, 50, 256, Sampling(), draft_tokens)
    print(f"{opened[0].name}: acceptance length {length:.2f}")
    assert length > 1
