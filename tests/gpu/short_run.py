"""A few steps of a tiny model through every kernel, for compute-sanitizer:

    compute-sanitizer --tool memcheck python -m tests.gpu.short_run
    compute-sanitizer --tool racecheck python -m tests.gpu.short_run --racecheck

--racecheck compiles with line numbers and with a release of the ring's stages that racecheck understands, and lets
kernels take minutes.
"""

from __future__ import annotations

import sys
from typing import Any, cast

from engine.backends import cuda
from engine.backends.cuda import COLUMNS, PASSES, CudaBackend
from engine.packed.matrix import Storage
from engine.packed.model import PackedModel
from engine.sampling import Sampling
from kernels.cuda import megakernel
from kernels.cuda import plan as planning
from tests.gpu.models import RandomModel
from tests.synthetic import small_config


def prepare_for_racecheck() -> None:
    compile_cubin, make_plan = megakernel.compile_cubin, planning.make_plan

    def compile_with_lines(*args: Any, **named: Any) -> Any:
        return compile_cubin(*args, options={"lineinfo": True}, **named)

    def plan_of_lanes(*args: Any, **named: Any) -> Any:
        plan = make_plan(*args, **named)
        plan.constants.update(LANES_ARRIVE="1", WATCHDOG_MS="600000")
        return plan

    megakernel.compile_cubin, planning.make_plan = compile_with_lines, plan_of_lanes
    cuda.WATCHDOG_SECONDS = 600.0


def main() -> None:
    megakernel.PLACES = megakernel.STEPS_A_PLACE = 1  # the sanitizer's steps are slow
    if "--racecheck" in sys.argv:
        prepare_for_racecheck()
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
