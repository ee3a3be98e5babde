"""A decode kernel that hangs, in a process of its own, because it takes the CUDA context along: for test_watchdog.py.

    python -m tests.gpu.hung_kernel kernel|host

One multiprocessor is told that it has no rows, so all others wait for what it never publishes. "kernel": its own
watchdog ends it. "host": that one is too slow, and the backend's has to give it up. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from ctypes import sizeof
from typing import Any, cast

from engine.backends import cuda
from engine.backends.cuda import CudaBackend
from engine.errors import BackendError
from engine.packed.model import PackedModel
from engine.sampling import Sampling
from kernels.cuda import plan as planning
from kernels.cuda.loading import SmTiles
from tests.gpu.models import RandomModel
from tests.synthetic import small_config

SLOW_WATCHDOG_MS = 15000  # the kernel must end at last, or it would keep the GPU


def idle_last_sm(tiles: Any) -> None:
    """tiles: uint8 tensor, SmTiles of every SM."""
    last = tiles[-sizeof(SmTiles) :]
    last[SmTiles.count.offset : SmTiles.count.offset + SmTiles.count.size] = 0


def slow_the_kernels_watchdog() -> None:
    make = planning.make_plan

    def slowed(*arguments: Any, **named: Any) -> planning.Plan:
        plan = make(*arguments, **named)
        plan.constants["WATCHDOG_MS"] = str(SLOW_WATCHDOG_MS)
        return plan

    planning.make_plan = slowed


def reply(backend: CudaBackend, count: int) -> tuple[int, str]:
    """(tokens, error) of a reply from an empty cache."""
    backend.truncate(0)
    tokens, error = 0, ""
    for batch in backend.stream(5, sampling=Sampling(), max_tokens=count, stop_ids=frozenset(), history=[5]):
        tokens += len(batch.ids)
        error = error or batch.error
    return tokens, error


def main(who: str) -> None:
    if who == "host":
        cuda.WATCHDOG_SECONDS = cuda.CANCEL_SECONDS = 1.0
        slow_the_kernels_watchdog()
    model = RandomModel(small_config("llama", hidden_size=512, head_dim=64, intermediate_size=1536, vocab_size=4099))
    backend = CudaBackend.from_packed(cast(PackedModel, model), context_size=256)
    healthy = reply(backend, 8)
    assert backend._megakernel is not None
    idle_last_sm(backend._megakernel._loaded.sm_tiles)
    started = time.monotonic()
    tokens, error = reply(backend, 8)
    seconds = time.monotonic() - started
    try:
        backend.step([1])
        afterwards = ""
    except BackendError as failure:
        afterwards = str(failure)
    backend.close()
    outcome = {"healthy": healthy, "tokens": tokens, "error": error, "seconds": seconds, "afterwards": afterwards}
    print(json.dumps(outcome), flush=True)
    os._exit(0)  # torch would wait for the kernel


if __name__ == "__main__":
    main(sys.argv[1])
