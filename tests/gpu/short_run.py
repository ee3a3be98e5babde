"""A few steps of a tiny model through every kernel, for compute-sanitizer:

compute-sanitizer --tool memcheck python -m tests.gpu.short_run
"""

from __future__ import annotations

from typing import cast

from engine.backends.cuda import COLUMNS, PASSES, CudaBackend
from engine.packed.matrix import Storage
from engine.packed.model import PackedModel
from engine.sampling import Sampling
from tests.gpu.models import RandomModel
from tests.synthetic import small_config


def main() -> None:
    config = small_config("qwen3", hidden_size=256, num_layers=1, head_dim=64, intermediate_size=512, vocab_size=1000)
    model = RandomModel(config, Storage("int4", 32, symmetric=False), seed=1)
    backend = CudaBackend.from_packed(cast(PackedModel, model), context_size=128)
    backend.step(list(range(PASSES * COLUMNS + 5)), features=[0, 1])
    backend.step(list(range(PASSES * COLUMNS + 3)), logits="last")
    for width in (1, 2, 4, 8):
        backend.step(list(range(width)), features=[1])
    history = [1, 2, 3]
    for sampling in (Sampling(), Sampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repeat_penalty=1.1)):
        reply = backend.stream(3, sampling=sampling, max_tokens=3, stop_ids=frozenset({0}), history=history)
        errors = [batch.error for batch in reply if batch.error]
        assert not errors, errors
    for width in backend.loop_widths:
        for sampling in (Sampling(), Sampling(temperature=0.5, top_k=50, top_p=0.9)):
            reply = backend.stream_speculative(
                3, sampling=sampling, max_tokens=6, stop_ids=frozenset({0}), history=[1, 2, 3, 1, 2, 3], width=width
            )
            errors = [batch.error for batch in reply if batch.error]
            assert not errors, errors
    backend.close()
    print("short run done")


if __name__ == "__main__":
    main()
