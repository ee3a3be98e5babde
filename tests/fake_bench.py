"""An engine for benchmarks: a small packed model's files, and a backend that computes nothing."""

from __future__ import annotations

from pathlib import Path

from engine.decoder import Decoder
from engine.loading import Engine
from engine.packed.model import PackedModel
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.fake_backend import FakeBackend, FakeLoopBackend
from tests.synthetic import small_config, write_random_packed


def fake_engine(folder: Path, backend: FakeBackend | None = None) -> Engine:
    model = PackedModel.open(write_random_packed(folder / "packed", small_config(vocab_size=259), name="scripted"))
    tokenizer = Tokenizer.from_packed(model)
    backend = backend or FakeLoopBackend(context_size=2048, chunk=64)
    return Engine(model, backend, tokenizer, ChatTemplate.from_packed(model, tokenizer), Decoder(backend, tokenizer))
