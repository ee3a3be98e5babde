from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.machine.datasheets import DATASHEETS, datasheet, recognise
from engine.machine.roofline import (
    Ceiling,
    Machine,
    Workload,
    attainable,
    batch_at_ridge,
    intensity,
    kv_bytes,
    ridge_point,
    roofline,
    token_rate,
    workload,
)
from engine.machine.shapes import _SHAPES, known_workload
from engine.meter import packed_weight_bytes, step_ledger
from engine.packed.model import PackedModel
from engine.sources.catalog import CATALOG
from tests.synthetic import small_config, write_random_packed

A100 = datasheet("a100-pcie")
LLAMA_3_8B = Workload("llama-3-8b", 8_030_000_000, int(kv_bytes(32, 8, 128)), 8192)
ON_A100 = Machine("A100", A100.bandwidth_gb_s, "datasheet", A100.tflops["bf16"], "datasheet")


def ceilings(load: Workload, machine: Machine, context: int = 0) -> dict[str, Ceiling]:
    return {ceiling.precision: ceiling for ceiling in roofline(load, machine, context).ceilings}


# Known answers


def test_flop_per_byte() -> None:
    assert [intensity(size) for size in (2, 1, 0.5)] == [1, 2, 4]
    assert intensity(0.5, batch=8) == 32


def test_the_ridge_point_of_an_a100() -> None:
    assert round(ridge_point(312e12, 1.935e12)) == 161
    assert round(ON_A100.ridge or 0) == 161
    assert Machine("cpu", 30, "measured").ridge is None


def test_llama_3_8b_on_an_a100() -> None:
    found = ceilings(LLAMA_3_8B, ON_A100)
    assert {name: round(ceiling.tok_s) for name, ceiling in found.items()} == {"bf16": 120, "int8": 241, "int4": 482}
    assert {name: ceiling.flop_per_byte for name, ceiling in found.items()} == {"bf16": 1, "int8": 2, "int4": 4}


def test_the_kv_cache_of_llama_3_8b() -> None:
    assert kv_bytes(32, 8, 128) == 128 * 1024
    assert kv_bytes(32, 8, 128, context=8192) == pytest.approx(1.07e9, rel=0.005)
    assert ceilings(LLAMA_3_8B, ON_A100)["bf16"].kv_equals_weights == pytest.approx(16.06e9 / 131072)


def test_granite_3b() -> None:
    """models-and-formats: 1.754 GB a token at int4 with a scale of two bytes for 128 weights; 80 KiB of KV a token."""
    load = known_workload("granite-4.1-3b")
    assert load.kv_per_position == 80 * 1024
    assert load.weights * (0.5 + 2 / 128) == pytest.approx(1.754e9, rel=1e-3)


# What follows


def test_attainable_is_the_lower_of_two_roofs() -> None:
    assert attainable(1, 312e12, 1.935e12) == 1.935e12
    assert attainable(1000, 312e12, 1.935e12) == 312e12
    assert attainable(312 / 1.935, 312e12, 1.935e12) == pytest.approx(312e12)


def test_context_lowers_the_ceiling_until_kv_halves_it() -> None:
    empty = ceilings(LLAMA_3_8B, ON_A100)["int4"]
    deep = ceilings(LLAMA_3_8B, ON_A100, round(empty.kv_equals_weights))["int4"]
    assert deep.tok_s == empty.tok_s == empty.tok_s_context
    assert deep.tok_s_context == pytest.approx(empty.tok_s / 2, rel=1e-4)


def test_the_batch_that_reaches_the_ridge() -> None:
    found = ceilings(LLAMA_3_8B, ON_A100)
    assert found["bf16"].batch_at_ridge == pytest.approx(312 / 1.935)  # 161 sequences, as many as FLOP per byte
    assert found["int4"].batch_at_ridge == pytest.approx(312 / 1.935 / 4)
    deep = ceilings(LLAMA_3_8B, ON_A100, 512)["bf16"]
    assert deep.batch_at_ridge is not None
    batch, kv = deep.batch_at_ridge, 512 * 131072
    assert batch > 161
    assert 2 * LLAMA_3_8B.weights * batch / (16.06e9 + batch * kv) == pytest.approx(312 / 1.935)


def test_kv_traffic_caps_the_intensity() -> None:
    deep = ceilings(LLAMA_3_8B, ON_A100, 8192)["bf16"]
    assert deep.batch_at_ridge is None
    assert deep.flop_per_byte_limit is not None
    assert deep.flop_per_byte_limit == pytest.approx(2 * 8.03e9 / 1.0737e9, rel=1e-3)
    assert deep.flop_per_byte_limit < 312 / 1.935
    assert batch_at_ridge(8.03e9, 16.06e9, 312 / 1.935, 2 * 8.03e9 / 200) is not None
    assert ceilings(LLAMA_3_8B, ON_A100)["bf16"].flop_per_byte_limit is None
    assert ceilings(LLAMA_3_8B, Machine("cpu", 30, "measured"))["bf16"].batch_at_ridge is None


def test_a_machine_weak_in_arithmetic_is_limited_by_it() -> None:
    slow = Machine("slow", 1935, "datasheet", 2.0, "measured")  # ridge point: about 1 FLOP per byte
    found = ceilings(LLAMA_3_8B, slow)
    assert found["bf16"].tok_s == pytest.approx(1935 / 16.06)
    assert found["int4"].tok_s == found["int8"].tok_s == pytest.approx(2e12 / 16.06e9)


@pytest.mark.parametrize("name", CATALOG)
def test_known_shapes_have_the_parameters_of_the_catalogue(name: str) -> None:
    hidden, layers, _, _, head_dim, _, vocabulary = _SHAPES[name]
    norms = layers * 2 * hidden + hidden + (layers * 2 * head_dim if name.startswith("qwen3") else 0)
    second_table = vocabulary * hidden if name.startswith("mistral") else 0
    assert known_workload(name).weights + norms + second_table == CATALOG[name].parameters


@pytest.mark.parametrize("family", ["granite", "qwen3", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_reads_what_its_ledger_says(family: str, tied: bool, tmp_path: Path) -> None:
    config = small_config(family, tie_word_embeddings=tied)  # type: ignore[arg-type]
    model = PackedModel.open(write_random_packed(tmp_path / "m", config, bits=4, group=32))
    sizes = packed_weight_bytes(model)
    load = workload("random", config, ("int4-g32", sizes))
    ledger = step_ledger(config, sizes, 1, 99, kv_element_bytes=2)
    assert load.packed is not None
    assert load.packed == ("int4-g32", ledger.weight_bytes - ledger.weights["embed"])
    assert load.kv_per_position * 100 == ledger.kv_read
    matrices = sum(m.n * m.k for m in map(model.matrix, model.matrix_names()) if tied or m.name != "embed")
    assert load.weights == matrices
    packed = ceilings(load, ON_A100, 100)["int4-g32"]
    assert packed.tok_s_context == pytest.approx(token_rate(1935e9, load.packed[1] + ledger.kv_read))
    assert 0.5 + 2 / 32 <= packed.bytes_per_weight < 0.7  # scales, and the norms of a very small model


@pytest.mark.real_model
def test_smollm2_as_packed(smollm2: Path) -> None:
    model = PackedModel.open(smollm2)
    sizes = packed_weight_bytes(model)
    load = workload("smollm2-135m-instruct", model.config, (model.manifest.variant, sizes))
    assert load.weights == known_workload("smollm2-135m-instruct").weights
    assert load.packed is not None
    assert load.packed[1] == pytest.approx(96.44e6, rel=2e-3)  # Q4_1 layers and Q8_0 head, norms in float32


def test_json_is_plain_and_complete() -> None:
    found = json.loads(json.dumps(roofline(LLAMA_3_8B, ON_A100, 8192).to_json(), allow_nan=False))
    assert found["ridge_flop_per_byte"] == pytest.approx(161.24, abs=0.01)
    assert [ceiling["precision"] for ceiling in found["ceilings"]] == ["bf16", "int8", "int4"]
    json.dumps(roofline(LLAMA_3_8B, Machine("cpu", 30, "measured"), 0).to_json(), allow_nan=False)


# Datasheets


@pytest.mark.parametrize("name", ["H200", "h200", " h200 ", "a100_pcie", "A100 PCIe", "RTX 4090"])
def test_a_gpu_is_found_as_people_write_it(name: str) -> None:
    assert datasheet(name) in DATASHEETS.values()


def test_an_unknown_gpu_is_one_line_with_near_matches() -> None:
    with pytest.raises(UsageError) as caught:
        datasheet("a100")
    assert str(caught.value) == "No datasheet for a GPU named 'a100'"
    assert caught.value.hint.startswith("known: a100-40gb, a100-pcie, a100-sxm; or give --bandwidth")
    with pytest.raises(UsageError):
        datasheet("")


@pytest.mark.parametrize(
    ("device", "gigabytes", "expected"),
    [
        ("NVIDIA H200", 141, "h200"),
        ("NVIDIA H100 80GB HBM3", 80, "h100-sxm"),
        ("NVIDIA H100 PCIe", 80, "h100-pcie"),
        ("NVIDIA H100 NVL", 94, None),
        ("NVIDIA A100-SXM4-80GB", 85, "a100-sxm"),
        ("NVIDIA A100 80GB PCIe", 85, "a100-pcie"),
        ("NVIDIA A100-PCIE-40GB", 42, "a100-40gb"),
        ("NVIDIA B200", 180, "b200"),
        ("NVIDIA A10", 24, "a10"),
        ("NVIDIA A10G", 24, None),
        ("NVIDIA L4", 24, "l4"),
        ("NVIDIA L40S", 48, "l40s"),
        ("NVIDIA L40", 48, None),
        ("NVIDIA GeForce RTX 4090", 24, "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, None),
        ("NVIDIA GeForce RTX 4090 D", 24, None),
        ("NVIDIA GeForce RTX 3090 Ti", 24, None),
        ("NVIDIA GeForce GTX 1080", 8, None),
    ],
)
def test_a_gpu_is_recognised_by_its_drivers_name(device: str, gigabytes: int, expected: str | None) -> None:
    assert recognise(device, gigabytes * 10**9) == (DATASHEETS[expected] if expected else None)


def test_datasheets_are_plausible() -> None:
    for sheet in DATASHEETS.values():
        ridge = ridge_point(sheet.tflops["bf16"] * 1e12, sheet.bandwidth_gb_s * 1e9)
        assert 70 < ridge < 450, sheet.name
        assert sheet.tflops["int8"] >= 1.9 * sheet.tflops["bf16"]
