"""Checkpoint to packed tensors: what is kept, what is quantised, and how much memory that takes."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint import open_checkpoint
from engine.errors import UnsupportedModel
from engine.files.safetensors_file import header
from engine.packed.conversion import convert, describe, plan_storage
from engine.packed.manifest import Quantization
from engine.packed.matrix import Storage
from engine.packed.quantize import dequantize, quantize_int4, quantize_int8
from engine.packed.tensors import tensor_shapes
from tests.gguf_files import write_gguf
from tests.hugging_face_folders import config_json, hf_module, random_tensors, write_folder
from tests.synthetic import small_config

WIDE = small_config("llama", rope_scaling=None, hidden_size=256, intermediate_size=512, head_dim=64, num_layers=1)


def as_smollm2(name: str) -> str:
    return "Q8_0" if name == "embed" else "Q4_1"


def as_q4_k_m(name: str) -> str:
    return "Q6_K" if name in ("embed", "layers.0.v", "layers.0.down") else "Q4_K"


def test_a_quantised_checkpoint_is_kept_as_it_is(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "m.gguf", WIDE, as_smollm2)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        plan = plan_storage(checkpoint)
        assert plan.pop("embed") == Storage("int8", 32)
        assert set(plan.values()) == {Storage("int4", 32, symmetric=False)}
        plan = plan_storage(checkpoint)
        assert describe(checkpoint, plan) == Quantization("int4", 32, False, "int8", 32, lossless=True)
        for name, storage in plan.items():
            assert np.array_equal(dequantize(convert(checkpoint, name, storage)), expected[name])


def test_types_without_an_equal_become_int8_unless_bits_are_given(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", WIDE, as_q4_k_m)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        plan = plan_storage(checkpoint)
        assert plan["embed"] == plan["layers.0.down"] == Storage("int8", 32)
        assert plan["layers.0.q"] == Storage("int4", 32, symmetric=False)
        assert not describe(checkpoint, plan).lossless
        assert plan_storage(checkpoint, bits=4)["embed"] == Storage("int4", 128)
        assert plan_storage(checkpoint, bits=4)["layers.0.q"] == Storage("int4", 32, symmetric=False)
        assert plan_storage(checkpoint, bits=4, embed_bits=8)["embed"] == Storage("int8", 32)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Storage("int4", 128)),
        ({"bits": 4, "group": 64}, Storage("int4", 64)),
        ({"bits": 4, "symmetric": False}, Storage("int4", 128, symmetric=False)),
        ({"bits": 8}, Storage("int8", 128)),
        ({"bits": 8, "group": 32}, Storage("int8", 32)),
        ({"bits": 16}, Storage("bf16")),
    ],
)
def test_floating_point_checkpoints_are_quantised_as_asked(
    tmp_path: Path, options: dict[str, Any], expected: Storage
) -> None:
    folder = write_folder(tmp_path, config_json(WIDE), [random_tensors(WIDE, "BF16")])
    with open_checkpoint(folder) as checkpoint:
        plan = plan_storage(checkpoint, **options)
        assert set(plan.values()) == {expected}
        assert describe(checkpoint, plan).lossless == (options.get("bits") == 16)
        assert plan_storage(checkpoint, **options, embed_bits=8)["embed"].format == "int8"


def test_a_group_that_does_not_divide_a_row_gives_way_to_a_smaller_one(tmp_path: Path) -> None:
    config = small_config(hidden_size=192, intermediate_size=160, head_dim=32)  # K: 192 = 3 x 64, 128, 160 = 5 x 32
    folder = write_folder(tmp_path, config_json(config), [random_tensors(config)])
    with open_checkpoint(folder) as checkpoint:
        plan = plan_storage(checkpoint, bits=4, group=128)
        groups = {name: plan[f"layers.0.{name}"].group for name in ("q", "o", "down")}
        assert groups == {"q": 64, "o": 128, "down": 32}
        for name, storage in plan.items():
            assert convert(checkpoint, name, storage).storage == storage


def test_rows_that_no_group_divides_are_refused_with_a_way_out(tmp_path: Path) -> None:
    config = small_config(hidden_size=80)
    folder = write_folder(tmp_path, config_json(config), [random_tensors(config)])
    with open_checkpoint(folder) as checkpoint:
        with pytest.raises(UnsupportedModel, match="80 input channels") as error:
            plan_storage(checkpoint, bits=4)
        assert "--bits 16" in error.value.hint
        assert convert(checkpoint, "embed", plan_storage(checkpoint, bits=16)["embed"]).format == "bf16"


@pytest.mark.parametrize("storage", [Storage("int4", 64), Storage("int4", 32, False), Storage("int8", 128)])
def test_conversion_in_pieces_is_the_quantisation_of_the_whole(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.packed.conversion._CHUNK_WEIGHTS", 7 * 256)
    folder = write_folder(tmp_path, config_json(WIDE), [random_tensors(WIDE, "F32")])
    with open_checkpoint(folder) as checkpoint:
        importance = np.linspace(0.1, 2, 256, dtype=np.float32)
        done: list[int] = []
        pieces = convert(checkpoint, "layers.0.gate", storage, importance, after_rows=done.append)
        w = checkpoint.read_float("layers.0.gate")
    if storage.format == "int4":
        whole = quantize_int4(w, storage.group, storage.symmetric, importance)
    else:
        whole = quantize_int8(w, storage.group)
    assert all(np.array_equal(a, b) for a, b in zip(pieces.arrays(), whole.arrays(), strict=True))
    assert done == [*range(7, 512, 7), 512]


MEMORY_PROBE = """
import sys
sys.path.insert(0, {root!r})
import numpy as np
from engine.checkpoint import open_checkpoint
from engine.packed.conversion import convert, describe, plan_storage
from engine.packed.manifest import Source
from engine.packed.writer import PackedWriter
from engine.machine.hardware import peak_memory
before = peak_memory()
with open_checkpoint({folder!r}) as checkpoint:
    plan = plan_storage(checkpoint, bits={bits})
    with PackedWriter({directory!r}, checkpoint.config, plan) as writer:
        for name in writer.names:
            if name in plan:
                writer.add_matrix(convert(checkpoint, name, plan[name]))
            else:
                writer.add_vector(name, checkpoint.read_float(name))
        writer.add_file("tokenizer.json", b"{{}}")
        writer.commit(name="m", variant="v", quantization=describe(checkpoint, plan),
                      source=Source("", "", "", ""), license="")
print((peak_memory() - before) // 1000**2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the peak memory")
@pytest.mark.parametrize("bits", [8, 16])
def test_packing_holds_one_tensor_not_the_model(tmp_path: Path, bits: int) -> None:
    """A 180 MB bf16 checkpoint of 13 MB matrices: packing may not keep what it has read or written in memory."""
    config = small_config(
        "mistral", hidden_size=1024, intermediate_size=6144, num_layers=4, num_heads=16, num_kv_heads=16, head_dim=64
    )
    layout = {f"{hf_module(name)}.weight": ("BF16", shape) for name, shape in tensor_shapes(config).items()}
    folder = write_folder(tmp_path / "m", config_json(config), [{}])
    with (folder / "model.safetensors").open("wb") as file:  # zeros, as a hole
        size = file.write(header(layout, {})) + sum(2 * math.prod(shape) for _, shape in layout.values())
        file.truncate(size)
    assert size > 180e6
    code = MEMORY_PROBE.format(
        root=str(Path(__file__).parents[2]), folder=str(folder), bits=bits, directory=str(tmp_path / "v")
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    print(f"{result.stdout.strip()} MB more than after the imports")
    assert int(result.stdout) < 90
