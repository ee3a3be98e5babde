"""engine/sources/catalog.py: what flint knows by name."""

from __future__ import annotations

import pytest

from engine.packed.library import NAME
from engine.sources.catalog import (
    CATALOG,
    EMBEDDED_DEFAULT,
    GPU_DEFAULT,
    HubSource,
    WheelSource,
    find,
    near_matches,
    not_found,
)


def test_every_entry_is_complete() -> None:
    assert set(CATALOG) == {
        "smollm2-135m-instruct",
        "granite-4.1-3b",
        "granite-4.1-8b",
        "granite-3.3-2b-instruct",
        "llama-3.2-1b-instruct",
        "llama-3.2-3b-instruct",
        "qwen3-0.6b",
        "qwen3-1.7b",
        "mistral-7b-instruct-v0.3",
    }
    for name, entry in CATALOG.items():
        assert entry.name == name
        assert NAME.fullmatch(name)
        assert entry.licence
        assert entry.parameters > 1e8
        assert entry.download_bytes > 1e7
        assert entry.context >= 8192
        assert entry.stop_tokens
    assert isinstance(CATALOG[EMBEDDED_DEFAULT].source, WheelSource)
    assert isinstance(CATALOG[GPU_DEFAULT].source, HubSource)


# As the public configurations state them: hidden, layers, heads, kv heads, head size, ffn, vocabulary.
SHAPES = {
    "smollm2-135m-instruct": (576, 30, 9, 3, 64, 1536, 49152, 1, False),
    "granite-4.1-3b": (2560, 40, 40, 8, 64, 8192, 100352, 1, False),
    "granite-4.1-8b": (4096, 40, 32, 8, 128, 12800, 100352, 1, False),
    "granite-3.3-2b-instruct": (2048, 40, 32, 8, 64, 8192, 49159, 1, False),
    "llama-3.2-1b-instruct": (2048, 16, 32, 8, 64, 8192, 128256, 1, False),
    "llama-3.2-3b-instruct": (3072, 28, 24, 8, 128, 8192, 128256, 1, False),
    "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072, 151936, 1, True),
    "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144, 151936, 1, True),
    "mistral-7b-instruct-v0.3": (4096, 32, 32, 8, 128, 14336, 32768, 2, False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_follow_from_the_shape(name: str) -> None:
    hidden, layers, heads, kv_heads, size, inner, vocabulary, embeddings, qk_norm = SHAPES[name]
    attention = 2 * hidden * heads * size + 2 * hidden * kv_heads * size
    layer = attention + 3 * hidden * inner + 2 * hidden + (2 * size if qk_norm else 0)
    assert CATALOG[name].parameters == layers * layer + embeddings * vocabulary * hidden + hidden


def test_find_takes_names_and_repositories_in_any_case() -> None:
    assert find("Granite-4.1-3B") is CATALOG["granite-4.1-3b"]
    assert find("qwen/qwen3-0.6b") is CATALOG["qwen3-0.6b"]
    assert find("granite") is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("granite-4.1-3", "granite-4.1-3b"),
        ("granite4.1-3b", "granite-4.1-3b"),
        ("smollm", "smollm2-135m-instruct"),
        ("smolm2", "smollm2-135m-instruct"),
        ("llama-3.2-1b", "llama-3.2-1b-instruct"),
        ("qwen3-0.6", "qwen3-0.6b"),
        ("mistral", "mistral-7b-instruct-v0.3"),
    ],
)
def test_a_near_miss_suggests_what_was_meant(typed: str, meant: str) -> None:
    assert near_matches(typed, list(CATALOG))[0] == meant
    assert meant in not_found(typed, list(CATALOG)).hint


def test_a_far_miss_names_the_list() -> None:
    error = not_found("xyzzy" * 100, list(CATALOG))
    assert error.hint == "`flint models` lists what can be packed"
    assert len(str(error)) < 120
