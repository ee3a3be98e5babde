"""compressed-tensors int4: codes kept as they are, zero points, group indices, and what is refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint import open_checkpoint
from engine.checkpoint.compressed_tensors import PackedWeight
from engine.config import ModelConfig
from engine.errors import CheckpointError, UnsupportedModel
from engine.packed.matrix import Storage
from engine.packed.quantize import dequantize, from_bf16, pack_nibbles, to_bf16
from engine.packed.tensors import tensor_shapes
from tests.hugging_face_folders import config_json, hf_module, random_tensors, write_folder
from tests.synthetic import small_config

SCHEME: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
            "input_activations": None,
        }
    },
    "ignore": ["lm_head"],
}


def quantised(
    config: ModelConfig, groups: int = 2, asymmetric: bool = False, scale_dtype: str = "BF16", small: float = 0.004
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Tensors of a model whose layers' matrices are packed, and the float32 values of those matrices by formula."""
    rng = np.random.default_rng(11)
    tensors, values = random_tensors(config), {}
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 1 or name in ("embed", "head"):
            continue
        n, k = shape
        module = hf_module(name)
        codes = rng.integers(0, 16, shape, dtype=np.uint8)
        exact = (rng.uniform(0.5, 1.5, (n, groups)) * small).astype(np.float32)
        scale = {"BF16": to_bf16, "F16": lambda v: v.astype(np.float16), "F32": lambda v: v}[scale_dtype](exact)
        exact = from_bf16(scale) if scale_dtype == "BF16" else scale.astype(np.float32)
        zero = rng.integers(0, 16, (n, groups), dtype=np.uint8) if asymmetric else np.full((n, groups), 8, np.uint8)
        difference = codes.astype(np.float32) - np.repeat(zero, k // groups, axis=1).astype(np.float32)
        values[name] = difference * np.repeat(exact, k // groups, axis=1)
        del tensors[f"{module}.weight"]
        tensors[f"{module}.weight_packed"] = pack_nibbles(codes)
        tensors[f"{module}.weight_scale"] = scale
        tensors[f"{module}.weight_shape"] = np.array(shape, np.int64)
        if asymmetric:  # packed along rows: eight consecutive rows per word
            tensors[f"{module}.weight_zero_point"] = np.ascontiguousarray(pack_nibbles(np.ascontiguousarray(zero.T)).T)
    return tensors, values


def folder_of(path: Path, config: ModelConfig, tensors: dict[str, np.ndarray], scheme: dict[str, Any] = SCHEME) -> Path:
    return write_folder(path, {**config_json(config), "quantization_config": scheme}, [tensors])


@pytest.mark.parametrize("scale_dtype", ["BF16", "F16"])
def test_symmetric_weights_load_without_conversion(tmp_path: Path, scale_dtype: str) -> None:
    config = small_config("granite")
    tensors, values = quantised(config, scale_dtype=scale_dtype)
    with open_checkpoint(folder_of(tmp_path, config, tensors)) as checkpoint:
        assert checkpoint.format == "compressed-tensors int4"
        for name, expected in values.items():
            matrix = checkpoint.read_matrix(name)
            assert matrix is not None
            assert checkpoint.exact(name)
            group = expected.shape[1] // 2
            assert matrix.storage == checkpoint.storage(name) == Storage("int4", group)
            assert np.array_equal(dequantize(matrix), expected), name
            assert np.array_equal(checkpoint.read_float(name), expected)
            assert np.array_equal(matrix.q, tensors[hf_module(name) + ".weight_packed"])
        assert checkpoint.storage("embed") == Storage("bf16")
        assert not checkpoint.quantized("embed")


def test_zero_points_become_minima(tmp_path: Path) -> None:
    config = small_config("qwen3")
    tensors, values = quantised(config, asymmetric=True, scale_dtype="F16")
    with open_checkpoint(folder_of(tmp_path, config, tensors)) as checkpoint:
        for name, expected in values.items():
            matrix = checkpoint.read_matrix(name)
            assert matrix is not None
            assert not matrix.storage.symmetric
            np.testing.assert_allclose(checkpoint.read_float(name), expected, rtol=1e-6)
            # zero * scale has up to 15 bits and fp16 holds 11: the minimum (up to 15 scales) is rounded.
            step = np.repeat(np.asarray(matrix.scale, np.float32), expected.shape[1] // 2, axis=1)
            assert np.all(np.abs(dequantize(matrix) - expected) <= 16 * step * 2**-11)
            assert not checkpoint.exact(name)


def test_scales_that_fp16_cannot_hold_are_said_to_be_inexact(tmp_path: Path) -> None:
    """Below 2^-14 fp16 has fewer bits than bf16's 8: codes are kept and scales rounded, and `exact` says so."""
    config = small_config()
    tensors, values = quantised(config, small=2e-6)
    with open_checkpoint(folder_of(tmp_path, config, tensors)) as checkpoint:
        assert not checkpoint.exact("layers.0.q")
        matrix = checkpoint.read_matrix("layers.0.q")
        assert matrix is not None
        assert np.abs(dequantize(matrix) - values["layers.0.q"]).max() <= 8 * 2**-25
        assert np.array_equal(checkpoint.read_float("layers.0.q"), values["layers.0.q"])


def test_per_channel_scales_are_repeated_for_each_group(tmp_path: Path) -> None:
    config = small_config(hidden_size=256, head_dim=64, intermediate_size=384)
    tensors, values = quantised(config, groups=1)
    with open_checkpoint(folder_of(tmp_path, config, tensors)) as checkpoint:
        for name, expected in values.items():
            matrix = checkpoint.read_matrix(name)
            assert matrix is not None
            assert matrix.group == 128
            assert np.array_equal(dequantize(matrix), expected)


def test_a_group_index_is_obeyed(tmp_path: Path) -> None:
    config = small_config()
    tensors, _ = quantised(config)
    module = hf_module("layers.0.up")
    order = np.random.default_rng(2).permutation(np.arange(64) // 32).astype(np.int32)
    tensors[f"{module}.weight_g_idx"] = order
    trivial = (np.arange(64) // 32).astype(np.int32)
    tensors[f"{hf_module('layers.0.gate')}.weight_g_idx"] = trivial
    with open_checkpoint(folder_of(tmp_path, config, tensors)) as checkpoint:
        assert checkpoint.storage("layers.0.up") is None  # its groups are not consecutive channels
        assert checkpoint.quantized("layers.0.up")
        assert checkpoint.storage("layers.0.gate") == Storage("int4", 32)
        codes = np.stack([tensors[f"{module}.weight_packed"].view(np.uint32) >> 4 * i & 15 for i in range(8)], axis=2)
        scale = from_bf16(tensors[f"{module}.weight_scale"])
        expected = (codes.reshape(128, 64).astype(np.float32) - 8) * scale[:, order]
        assert np.array_equal(checkpoint.read_float("layers.0.up"), expected)
        assert np.array_equal(checkpoint.read_float("layers.0.up", slice(5, 7)), expected[5:7])


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_what_the_library_itself_wrote_reads_as_it_reads_it(kind: str) -> None:
    golden = json.loads((Path(__file__).parent / "golden" / "compressed_tensors.json").read_text())[kind]
    stored = {
        "weight_packed": np.array(golden["weight_packed"], np.int32),
        "weight_scale": np.array(golden["weight_scale"], np.float32),
    }
    if golden["weight_zero_point"]:
        stored["weight_zero_point"] = np.array(golden["weight_zero_point"], np.int32)
    weight = PackedWeight(stored.get, 16, 64, "golden")
    expected = np.array(golden["weight"], np.float32)
    assert weight.exact  # its scales are multiples of 1/64
    assert np.array_equal(weight.values(slice(None)), expected)
    assert np.array_equal(dequantize(weight.matrix("m")), expected)


@pytest.mark.parametrize(
    ("suffix", "array", "words"),
    [
        ("weight_packed", np.zeros((128, 9), np.int32), "weight_packed: int32"),
        ("weight_packed", np.zeros((128, 8), np.float32), "weight_packed: float32"),
        ("weight_scale", np.ones((127, 2), np.float16), "weight_scale: shape"),
        ("weight_scale", np.ones((128, 3), np.float16), "weight_scale: shape"),
        ("weight_scale", np.ones((128,), np.float16), "weight_scale: shape"),
        ("weight_scale", np.ones((128, 2), np.int32), "floating-point"),
        ("weight_scale", np.full((128, 2), np.inf, np.float16), "not finite"),
        ("weight_scale", np.full((128, 2), 1e6, np.float32), "not finite"),
        ("weight_shape", np.array([64, 128]), "weight_shape"),
        ("weight_g_idx", np.arange(64, dtype=np.int32), "weight_g_idx"),
        ("weight_zero_point", np.zeros((128, 2), np.int32), "weight_zero_point"),
    ],
)
def test_parts_that_do_not_fit_are_named(tmp_path: Path, suffix: str, array: np.ndarray, words: str) -> None:
    config = small_config()
    tensors, _ = quantised(config)
    tensors[f"{hf_module('layers.0.up')}.{suffix}"] = array
    with (
        open_checkpoint(folder_of(tmp_path, config, tensors)) as checkpoint,
        pytest.raises(CheckpointError, match=words) as error,
    ):
        checkpoint.read_matrix("layers.0.up")
    assert "mlp.up_proj" in str(error.value)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    config = small_config()
    tensors, _ = quantised(config)
    del tensors[f"{hf_module('layers.0.up')}.weight_scale"]
    with (
        open_checkpoint(folder_of(tmp_path, config, tensors)) as checkpoint,
        pytest.raises(CheckpointError, match=r"weight_scale: missing tensor"),
    ):
        checkpoint.read_matrix("layers.0.up")


def test_a_weight_in_both_forms_is_refused(tmp_path: Path) -> None:
    config = small_config()
    tensors, _ = quantised(config)
    tensors[f"{hf_module('layers.0.up')}.weight"] = np.zeros((128, 64), np.float32)
    with pytest.raises(CheckpointError, match="expected one of weight and weight_packed"):
        open_checkpoint(folder_of(tmp_path, config, tensors))


def changed(**weights: Any) -> dict[str, Any]:
    group = SCHEME["config_groups"]["group_0"]
    return {**SCHEME, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **weights}}}}


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (changed(num_bits=8), "8-bit int"),
        (changed(type="float"), "4-bit float"),
        ({**SCHEME, "format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
        ({**SCHEME, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({**SCHEME, "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (
            {**SCHEME, "config_groups": {"g": {**SCHEME["config_groups"]["group_0"], "input_activations": {"x": 1}}}},
            "quantised activations",
        ),
    ],
)
def test_other_schemes_are_named(tmp_path: Path, scheme: dict[str, Any], words: str) -> None:
    config = small_config()
    with pytest.raises(UnsupportedModel, match=words):
        open_checkpoint(folder_of(tmp_path, config, quantised(config)[0], scheme))


@pytest.mark.parametrize("scheme", [{"config_groups": {}}, {"config_groups": {"g": {"weights": None}}}, [1]])
def test_malformed_schemes_are_named(tmp_path: Path, scheme: Any) -> None:
    config = small_config()
    with pytest.raises(CheckpointError, match="quantization_config"):
        open_checkpoint(folder_of(tmp_path, config, quantised(config)[0], scheme))


@pytest.mark.parametrize("scale", [np.inf, np.nan, 3e38])
def test_scales_beyond_any_number_are_refused_without_a_warning(tmp_path: Path, scale: float) -> None:
    config = small_config()
    tensors, _ = quantised(config, asymmetric=True)
    tensors[f"{hf_module('layers.0.up')}.weight_scale"] = np.full((128, 2), scale, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a user would see them on the terminal
        with open_checkpoint(folder_of(tmp_path, config, tensors)) as checkpoint:
            for read in (checkpoint.read_matrix, checkpoint.read_float):
                with pytest.raises(CheckpointError, match="not finite"):
                    read("layers.0.up")
