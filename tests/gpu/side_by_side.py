"""Our loop beside stock PyTorch's int4 on one GPU, in one process, by turns.

    python -m tests.gpu.side_by_side [--shape granite-3b | --packed DIRECTORY] [--context 1024] [--tokens 128]
        [--rounds 7] [--json FILE]

--shape: random weights of a real shape. --packed: a model as `flint pack` wrote it, on flint's own text.

`flint bench compare` starts a process for every sample, and opening a large model takes minutes of that; here each arm
opens once. The gate, the statistics and the table are its own. Every arm decodes --tokens tokens with --context of them
in its cache halfway. Exit code 1 where our loop was not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from engine.backends.cuda import CudaBackend, find_gpu
from engine.backends.torch_reference import TorchReference
from engine.bench.arms import Arm
from engine.bench.compare import outcome_json, run
from engine.bench.compare_table import comparison_markdown
from engine.bench.conditions import utc_now
from engine.bench.environment import commit
from engine.bench.worker import reference_answer, torch_int4_answer
from engine.bench.workload import prompt_ids
from engine.errors import BackendError
from engine.machine.hardware import gpu_bandwidth
from engine.packed.matrix import Storage
from engine.packed.model import PackedModel
from engine.sampling import Sampling
from engine.text.tokenizer import Tokenizer
from tests.gpu.models import SHAPES, RandomModel, config_of

Answer = dict[str, Any]
ARMS = ("cuda-single", "torch-int4-graph", "torch-int4-compile")


class Contestants:
    """Opens an arm at its first turn and keeps it; `launch` is what engine.bench.compare.run asks for."""

    def __init__(self, model: RandomModel | PackedModel) -> None:
        self._model = cast(PackedModel, model)
        self._reference = model.reference if isinstance(model, RandomModel) else self._packed_reference
        self._open: dict[str, Callable[[Answer], Answer]] = {}

    def launch(self, arm: Arm, request: Answer) -> Answer:
        started = time.perf_counter()
        try:
            if arm.name == "reference":  # once, and 4 bytes a weight: not kept
                answer = reference_answer(self._reference(request["context"]), request)
            else:
                if arm.name not in self._open:
                    self._open[arm.name] = self._opened(arm.name, request)
                answer = self._open[arm.name](request)
        except Exception as failure:  # the others still count
            answer = {"error": f"{type(failure).__name__}: {failure}".splitlines()[0][:300]}
        rate = (request["tokens"] - 1) / answer["decode_s"] if "decode_s" in answer else None
        said = answer.get("error") or (f"{rate:.1f} tok/s" if rate else "")
        print(f"{arm.name}: {said} ({time.perf_counter() - started:.1f} s)", file=sys.stderr, flush=True)
        return answer

    def _packed_reference(self, context: int) -> TorchReference:
        return TorchReference.from_packed(self._model, context_size=context, device="cuda")

    def _opened(self, name: str, request: Answer) -> Callable[[Answer], Answer]:
        if name == "cuda-single":
            backend = CudaBackend.from_packed(self._model, context_size=request["context"])
            return lambda request: ours(backend, request)
        from engine.bench.torch_int4 import Int4Decoder

        decoder = Int4Decoder(self._model, request["context"], compiled=name.endswith("compile"))
        return lambda request: torch_int4_answer(decoder, request)


def ours(backend: CudaBackend, request: Answer) -> Answer:
    """Greedy, by the whole loop; timed by the kernel's own stamps, from the first token to the last."""
    prompt, count = request["prompt"], request["tokens"]
    backend.truncate(0)
    started = time.perf_counter()
    backend.step(prompt[:-1], logits="last")
    prefilled = time.perf_counter() - started
    ids: list[int] = []
    seconds: list[float] = []
    for batch in backend.stream(
        prompt[-1], sampling=Sampling(), max_tokens=count, stop_ids=frozenset(), history=prompt
    ):
        if batch.error:
            return {"error": batch.error}
        ids += batch.ids
        seconds += batch.seconds
    return {
        "ids": ids,
        "prefill_s": prefilled,
        "decode_s": seconds[-1] - seconds[0],
        "bytes_per_token": backend.ledger(1, len(prompt) + count // 2).total,
        "device": backend.description,
        "gpu": True,
    }


def random_model(shape: str, layers: int | None) -> RandomModel:
    """As flint would pack such a model: int4 in groups of 128; SmolLM2 as its GGUF is stored."""
    if shape.startswith("smollm2"):
        storage = Storage("int4", 32, symmetric=False)
        return RandomModel(config_of(shape, layers=layers), storage, overrides={"embed": Storage("int8", 32)}, seed=5)
    return RandomModel(config_of(shape, layers=layers), Storage("int4", 128), seed=5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="granite-3b")
    parser.add_argument("--packed", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the shape has, for a quick try")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    try:
        gpu = find_gpu()
    except BackendError as error:
        raise SystemExit(f"this runs on an NVIDIA GPU only: {error}") from error
    length = options.context - options.tokens // 2
    if options.packed:
        model: RandomModel | PackedModel = PackedModel.open(options.packed)
        name, prompt = model.manifest.name, prompt_ids(Tokenizer.from_packed(model), length)
    else:
        model = random_model(options.shape, options.layers)
        name = f"{options.shape} with random weights, {model.config.num_layers} layers"
        prompt = np.random.default_rng(1).integers(0, model.config.vocab_size, length).tolist()
    request = {"prompt": prompt, "tokens": options.tokens, "context": length + options.tokens, "what": name}
    arms = [Arm(name) for name in options.arms.split(",")]
    outcome = run(arms, request, options.rounds, Contestants(model).launch, against=ARMS[0])
    peak = gpu_bandwidth(gpu)
    if peak is not None:
        outcome.peaks["gpu"] = peak
    print(f"{name}, context {options.context}, {gpu.name}, {utc_now()}")
    print(comparison_markdown(outcome))
    if options.json:
        value = outcome_json(outcome) | {"gpu": gpu.name, "commit": commit(), "created": utc_now()}
        options.json.write_text(json.dumps(value, indent=1))
    return 0 if ARMS[0] in [result.arm.name for result in outcome.measured()] else 1


if __name__ == "__main__":
    sys.exit(main())
