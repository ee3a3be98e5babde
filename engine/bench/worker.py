"""One arm, once, in a process of its own: `python -m engine.bench.worker` (engine/bench/arms.py has the protocol)."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import BackendError, FlintError

if TYPE_CHECKING:
    from engine.backends.torch_reference import TorchReference
    from engine.bench.torch_int4 import Int4Decoder


def main() -> None:
    request = json.loads(sys.stdin.read())
    answer_to = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    with os.fdopen(answer_to, "w") as out:
        out.write(json.dumps(answer(request)) + "\n")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    name = request["arm"]
    try:
        if name == "reference":
            return _reference(request)
        if name == "transformers":
            return _transformers(request)
        if name.startswith("torch-int4"):
            return _torch_int4(request, compiled=name.endswith("compile"))
        return _flint(request, *name.split("-"))
    except FlintError as failure:
        return {"error": str(failure)}
    except Exception as failure:
        return {"error": f"{type(failure).__name__}: {failure}".splitlines()[0][:300]}


def _flint(request: dict[str, Any], backend: str, mode: str) -> dict[str, Any]:
    """Our decoder, its greedy sampling and detokenising included, as a chat runs it."""
    from engine.decoder import DecodeOptions
    from engine.events import Finished, Tokens
    from engine.loading import open_engine
    from engine.sampling import Sampling

    engine = open_engine(request["model"], backend, _threads(request, backend), request["context"])
    drafter, fallback = engine.drafters("auto") if mode == "speculative" else (None, None)

    def decode(prompt: list[int], count: int) -> tuple[list[int], Finished]:
        ids: list[int] = []
        options = DecodeOptions(
            Sampling(temperature=0.0), count, stop_ids=frozenset(), drafter=drafter, fallback=fallback
        )
        for event in engine.decoder.generate(prompt, options):
            if isinstance(event, Tokens):
                ids += event.ids
            elif isinstance(event, Finished):
                if event.reason == "error":
                    raise BackendError(event.error)
                return ids, event
        raise BackendError("the decoder stopped without saying why")

    decode(request["prompt"][:16], 8)
    engine.decoder.truncate(0)
    ids, end = decode(request["prompt"], request["tokens"])
    return {
        "ids": ids,
        "prefill_s": end.usage.prefill_s,
        "decode_s": end.usage.decode_s,
        "bytes_per_token": end.usage.bytes_per_token,
        "acceptance_length": end.usage.acceptance_length,
        "device": engine.backend.description,
        "gpu": engine.backend.name == "cuda",
        "drafter": drafter.name if drafter else None,
        "versions": _versions("flint", "numpy", *(["torch"] if backend != "cpu" else [])),
    }


def _reference(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    from engine.backends.torch_reference import TorchReference
    from engine.packed.model import PackedModel

    torch.set_num_threads(request["threads"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = PackedModel.open(Path(request["model"]))
    return reference_answer(TorchReference.from_packed(model, context_size=request["context"], device=device), request)


def reference_answer(reference: TorchReference, request: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of engine/backends/torch_reference.py in float32, and how clearly each won."""
    import numpy as np

    prompt, ids, margins, seconds = request["prompt"], [], [], []
    feed = prompt
    while len(ids) < request["tokens"]:
        logits = reference.step(feed, logits="last").logits[0]
        second, first = np.argpartition(logits, -2)[-2:]
        if logits[second] > logits[first]:
            first, second = second, first
        best = int(logits.argmax())  # among equals the lowest id, as sampling has it
        runner_up = int(second if best == first else first)
        ids.append(best)
        seconds.append(runner_up)
        margins.append(float(logits[best] - logits[runner_up]))
        feed = [best]
    return {"ids": ids, "margins": margins, "runners_up": seconds, "device": reference.description}


def _transformers(request: dict[str, Any]) -> dict[str, Any]:
    """generate() of transformers on the GGUF, float32 on a CPU, bfloat16 on a GPU."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(request["threads"])
    on_gpu = bool(request.get("gpu"))
    path = Path(request["gguf"])
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype)
    model = model.to("cuda" if on_gpu else "cpu").eval()
    model.generation_config.eos_token_id = None

    class Clock(BaseStreamer):
        """Notes when each token arrives; the prompt comes first."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def generate(prompt: list[int], count: int) -> tuple[list[int], float, list[float]]:
        ids, clock = torch.tensor([prompt], device=model.device), Clock()
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
        return out[0, len(prompt) :].tolist(), start, clock.times[1:]

    with torch.inference_mode():
        generate(request["prompt"][:16], 4)
        ids, start, times = generate(request["prompt"], request["tokens"])
    config = model.config
    weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * head * dtype.itemsize
    return {
        "ids": ids,
        "prefill_s": times[0] - start,
        "decode_s": times[-1] - times[0],
        "bytes_per_token": weights + kv * (len(request["prompt"]) + len(ids) / 2),
        "gpu": on_gpu,
        "device": f"{str(dtype).removeprefix('torch.')} on {model.device}, {torch.get_num_threads()} threads",
        "versions": _versions("transformers", "torch"),
    }


def _torch_int4(request: dict[str, Any], compiled: bool) -> dict[str, Any]:
    from engine.bench.torch_int4 import Int4Decoder
    from engine.packed.model import PackedModel

    decoder = Int4Decoder(PackedModel.open(Path(request["model"])), request["context"], compiled=compiled)
    return torch_int4_answer(decoder, request)


def torch_int4_answer(decoder: Int4Decoder, request: dict[str, Any]) -> dict[str, Any]:
    ids, seconds = decoder.decode(request["prompt"], request["tokens"])
    return {
        "ids": ids,
        "prefill_s": None,
        "decode_s": seconds,
        "bytes_per_token": decoder.weight_bytes + decoder.kv_bytes * request["context"],
        "device": decoder.description,
        "gpu": True,
        "versions": _versions("torch"),
    }


def _threads(request: dict[str, Any], backend: str) -> int | None:
    return None if backend == "cuda" else request["threads"]


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


if __name__ == "__main__":
    main()
