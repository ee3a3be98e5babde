"""Shapes of the catalogue's models, for arithmetic on a model that is not on this machine.

From the models' public configurations. What a packed model or a checkpoint says of itself comes first.
"""

from __future__ import annotations

from engine.machine.roofline import Workload, kv_bytes
from engine.sources.catalog import CATALOG

# hidden, layers, heads, kv heads, head size, intermediate, vocabulary
_SHAPES = {
    "smollm2-135m-instruct": (576, 30, 9, 3, 64, 1536, 49152),
    "granite-4.1-3b": (2560, 40, 40, 8, 64, 8192, 100352),
    "granite-4.1-8b": (4096, 40, 32, 8, 128, 12800, 100352),
    "granite-3.3-2b-instruct": (2048, 40, 32, 8, 64, 8192, 49159),
    "llama-3.2-1b-instruct": (2048, 16, 32, 8, 64, 8192, 128256),
    "llama-3.2-3b-instruct": (3072, 28, 24, 8, 128, 8192, 128256),
    "qwen3-0.6b": (1024, 28, 16, 8, 128, 3072, 151936),
    "qwen3-1.7b": (2048, 28, 16, 8, 128, 6144, 151936),
    "mistral-7b-instruct-v0.3": (4096, 32, 32, 8, 128, 14336, 32768),
}


def known_workload(name: str) -> Workload:
    """What decoding a catalogue entry reads. Of embedding and head only the head counts, tied or not."""
    hidden, layers, heads, kv_heads, head_dim, intermediate, vocabulary = _SHAPES[name]
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    weights = layers * (attention + 3 * hidden * intermediate) + vocabulary * hidden
    return Workload(name, weights, int(kv_bytes(layers, kv_heads, head_dim)), CATALOG[name].context)
