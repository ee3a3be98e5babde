"""The stock-PyTorch arm on the CPU, where the same operators have other packings: its model is ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.packed.model import PackedModel
from engine.packed.quantize import dequantize
from tests.synthetic import small_config, write_random_packed


@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_scales_and_zeros_are_the_packed_weights(tmp_path: Path, symmetric: bool) -> None:
    from engine.bench.torch_int4 import codes_and_scales

    model = PackedModel.open(write_random_packed(tmp_path / "m", small_config(), symmetric=symmetric))
    matrix = model.matrix("layers.0.gate")
    codes, both = codes_and_scales(matrix)
    scale, zero = both.float().numpy().transpose(2, 1, 0)  # each [n, k/g]
    spread = [values.repeat(matrix.group, axis=1) for values in (scale, zero)]
    weights = (codes.numpy().astype(np.float32) - 8) * spread[0] + spread[1]
    wanted = dequantize(matrix)
    # bfloat16 keeps 8 bits of scale (times a code of at most 8) and of zero.
    assert np.abs(weights - wanted).max() <= 2**-8 * (8 * np.abs(scale).max() + np.abs(zero).max())


@pytest.mark.parametrize("family", ["llama", "granite", "qwen3"])
def test_its_logits_are_the_references_within_bfloat16(tmp_path: Path, family) -> None:
    import torch

    from engine.backends.torch_reference import TorchReference
    from engine.bench.torch_int4 import Int4Decoder

    model = PackedModel.open(write_random_packed(tmp_path / "m", small_config(family)))
    decoder = Int4Decoder(model, context=32, device="cpu")
    reference = TorchReference.from_packed(model, context_size=32)
    prompt = [20, 30, 40, 50, 60]
    with torch.inference_mode():
        for token in prompt[:-1]:
            decoder.token.fill_(token)
            decoder._step()
        decoder.token.fill_(prompt[-1])
        logits = decoder._forward(decoder.token, decoder.position)
    got = logits[0].numpy() / model.config.logits_scaling
    wanted = reference.step(prompt, logits="last").logits[0]
    used = np.abs(got - wanted).max() / np.abs(wanted).max()
    print(f"{used:.3f} of the largest logit")
    assert used < 0.04  # a few roundings to 8 bits in each of two layers
    ids, seconds = decoder.decode(prompt, 6)
    assert len(ids) == 6
    assert seconds > 0
    assert decoder.weight_bytes > 0
