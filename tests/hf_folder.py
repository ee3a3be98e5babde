"""A whole Hugging Face folder, weights, configuration, tokenizer and chat template: where a user begins to pack."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from engine.quantize import to_bf16
from engine.safetensors_file import header
from engine.tensors import tensor_shapes
from tests.hugging_face_folders import config_json, hf_module
from tests.synthetic import CHAT_TEMPLATE, byte_tokenizer, small_config


def write_hf_folder(folder: Path, seed: int | None = 0, **overrides: Any) -> Path:
    """A llama of `small_config` with bf16 weights: normal with deviation K^-0.5, or zeros for seed None (at once)."""
    config = small_config("llama", rope_scaling=None, **overrides)
    rng = np.random.default_rng(seed)
    shapes = {f"{hf_module(name)}.weight": shape for name, shape in tensor_shapes(config).items()}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header({name: ("BF16", shape) for name, shape in shapes.items()}, {}))
        for shape in shapes.values():
            if seed is None:
                file.write(bytes(2 * math.prod(shape)))
            else:
                file.write(to_bf16(rng.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5).tobytes())
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder
