"""Quantisation: the error of the search, exact round trips, and what cannot be quantised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.errors import CheckpointError
from engine.packed.matrix import GROUPS, Storage
from engine.packed.quantize import (
    dequantize,
    from_bf16,
    pack_nibbles,
    quantize_bf16,
    quantize_int4,
    quantize_int8,
    to_bf16,
    unpack_nibbles,
)
from tests.synthetic import random_matrix


def gaussian(n: int, k: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n, k)) * 0.02).astype(np.float32)


def normalised_error(w: np.ndarray, approximation: np.ndarray, weight: np.ndarray | float = 1.0) -> float:
    return float((weight * (w - approximation) ** 2).sum() / (weight * w**2).sum())


def amax_over_7(w: np.ndarray, group: int) -> np.ndarray:
    """The plain method: scale = largest magnitude / 7, codes rounded."""
    blocks = w.reshape(-1, group)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 7
    return (np.clip(np.rint(blocks / scale), -8, 7) * scale).reshape(w.shape)


@pytest.mark.parametrize("group", GROUPS)
def test_the_search_beats_amax_by_a_quarter(group: int) -> None:
    w = gaussian(256, 1024)
    plain = normalised_error(w, amax_over_7(w, group))
    assert normalised_error(w, dequantize(quantize_int4(w, group, symmetric=True))) < 0.72 * plain
    assert normalised_error(w, dequantize(quantize_int4(w, group, symmetric=False))) < 0.65 * plain


def test_published_errors_at_group_128_are_reached() -> None:
    """Symmetric search with least squares: 0.0093 on Gaussian weights; asymmetric min-max: 0.0100."""
    w = gaussian(512, 1024)
    assert normalised_error(w, dequantize(quantize_int4(w, 128, symmetric=True))) < 0.00940
    assert normalised_error(w, dequantize(quantize_int4(w, 128, symmetric=False))) < 0.00865


@pytest.mark.parametrize("symmetric", [True, False])
def test_importance_lowers_the_error_that_it_weighs(symmetric: bool) -> None:
    w = gaussian(128, 512)
    importance = np.exp(np.random.default_rng(1).standard_normal(512)).astype(np.float32)
    plain = dequantize(quantize_int4(w, 64, symmetric))
    weighted = dequantize(quantize_int4(w, 64, symmetric, importance))
    assert normalised_error(w, weighted, importance) < 0.98 * normalised_error(w, plain, importance)


@pytest.mark.parametrize("symmetric", [True, False])
def test_equal_importance_changes_nothing(symmetric: bool) -> None:
    w = gaussian(32, 256)
    plain = quantize_int4(w, 32, symmetric)
    ones = quantize_int4(w, 32, symmetric, np.ones(256, np.float32))
    assert np.mean(plain.q == ones.q) > 0.99  # sums in another order may break a tie between candidates


def test_int8_error_is_that_of_127_steps() -> None:
    w = gaussian(256, 1024)
    for group in GROUPS:
        matrix = quantize_int8(w, group)
        step = np.abs(w.reshape(-1, group)).max(axis=1, keepdims=True) / 127
        assert np.all(np.abs(w - dequantize(matrix)).reshape(-1, group) <= step * 0.57)  # half a step, fp16's rounding


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", GROUPS)
def test_constant_and_zero_groups(group: int, symmetric: bool) -> None:
    w = np.zeros((3, group * 2), np.float32)
    w[1] = 0.5
    w[2, :group] = -3.0
    np.testing.assert_allclose(dequantize(quantize_int4(w, group, symmetric)), w, rtol=1e-3)
    np.testing.assert_allclose(dequantize(quantize_int8(w, group)), w, rtol=1e-3)


@pytest.mark.parametrize("symmetric", [True, False])
def test_requantising_a_quantised_matrix_changes_little(symmetric: bool) -> None:
    """Values on a 16-level grid are found again by the search, up to the grid's own scale."""
    matrix = random_matrix("m", 64, 256, Storage("int4", 32, symmetric), np.random.default_rng(3))
    w = dequantize(matrix)
    assert normalised_error(w, dequantize(quantize_int4(w, 32, symmetric))) < 1e-3


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e5, -1e5])
def test_what_fp16_scales_cannot_hold_is_refused_by_name(value: float) -> None:
    w = gaussian(4, 64)
    w[2, 3] = value
    for quantize in (
        lambda: quantize_int4(w, 32, True, name="layers.0.q"),
        lambda: quantize_int8(w, 32, name="layers.0.q"),
    ):
        with pytest.raises(CheckpointError, match=r"layers\.0\.q"):
            quantize()
    w[2, 3] = value if not np.isfinite(value) else 3.4e38  # which bf16 rounds to infinity
    with pytest.raises(CheckpointError, match=r"layers\.0\.q"):
        quantize_bf16(w, name="layers.0.q")


@pytest.mark.parametrize("group", [0, 16, 48, 256])
def test_groups_that_the_format_does_not_have_are_refused(group: int) -> None:
    with pytest.raises(ValueError, match="group"):
        quantize_int4(gaussian(4, 256), group, True)


def test_a_group_must_divide_the_row() -> None:
    with pytest.raises(ValueError, match="group"):
        quantize_int8(gaussian(4, 96), 64)


def test_the_result_does_not_depend_on_how_rows_are_chunked() -> None:
    w = gaussian(2000, 128)
    whole = quantize_int4(w, 64, True)
    for start in (0, 700, 1999):
        part = quantize_int4(w[start : start + 1], 64, True)
        assert np.array_equal(part.q[0], whole.q[start])
        assert np.array_equal(np.asarray(part.scale)[0], np.asarray(whole.scale)[start])


finite = st.floats(-1000, 1000, width=32)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.just(64)), elements=finite), st.booleans())
def test_int4_error_never_exceeds_that_of_rounding_to_the_range(w: np.ndarray, symmetric: bool) -> None:
    """The search starts from the range itself, so it can only do better than that."""
    approximation = dequantize(quantize_int4(w, 32, symmetric))
    assert np.isfinite(approximation).all()
    blocks = w.reshape(-1, 32).astype(np.float64)
    if symmetric:  # the extreme weight is code -8
        extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
        scale = -extreme / 8
        plain = np.clip(np.rint(blocks / np.where(scale == 0, 1, scale)), -8, 7) * scale
    else:
        low = blocks.min(axis=1, keepdims=True)
        scale = (blocks.max(axis=1, keepdims=True) - low) / 15
        plain = np.rint((blocks - low) / np.where(scale == 0, 1, scale)) * scale + low
    # Scale and minimum are fp16 here and exact there: 2^-11 relative each, and the smallest step for tiny ones.
    largest = np.abs(w).max(axis=1, keepdims=True)
    allowance = np.broadcast_to(3 * largest * 2**-11 + 16 * 2**-25, w.shape)
    assert np.sqrt(((w - approximation) ** 2).sum()) <= (
        1.001 * np.sqrt(((blocks - plain) ** 2).sum()) + np.sqrt((allowance**2).sum())
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 5), st.just(64)), elements=st.integers(0, 15)))
def test_nibbles_round_trip_and_are_little_endian(codes: np.ndarray) -> None:
    words = pack_nibbles(codes)
    assert words.dtype == np.int32
    assert words.shape == (codes.shape[0], 8)
    assert np.array_equal(unpack_nibbles(words), codes)
    for k in range(64):
        assert np.array_equal((words[:, k // 8].view(np.uint32) >> (4 * (k % 8))) & 15, codes[:, k])


@pytest.mark.parametrize(
    "storage", [Storage("int4", 32), Storage("int4", 64, False), Storage("int4", 128), Storage("int8", 64)]
)
def test_dequantize_is_the_formula_of_the_format(storage: Storage) -> None:
    matrix = random_matrix("m", 16, 256, storage, np.random.default_rng(0))
    assert matrix.scale is not None
    scale = np.repeat(matrix.scale.astype(np.float32), storage.group, axis=1)
    codes = matrix.q.astype(np.float32) if storage.format == "int8" else unpack_nibbles(matrix.q).astype(np.float32)
    if matrix.minimum is not None:
        expected = codes * scale + np.repeat(matrix.minimum.astype(np.float32), storage.group, axis=1)
    else:
        expected = (codes - 8 if storage.format == "int4" else codes) * scale
    assert np.array_equal(dequantize(matrix), expected)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(hnp.arrays(np.float32, (4, 8), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)))
def test_bf16_rounds_as_torch_does(w: np.ndarray) -> None:
    import torch

    ours = from_bf16(to_bf16(w))
    theirs = torch.from_numpy(w.copy()).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(hnp.arrays(np.uint16, (2, 8)))
def test_bf16_round_trip(bits: np.ndarray) -> None:
    values = from_bf16(bits)
    keep = ~np.isnan(values)
    assert np.array_equal(to_bf16(values)[keep], bits[keep])


def test_importance_of_unused_channels_may_be_zero() -> None:
    w = gaussian(16, 64)
    importance = np.zeros(64, np.float32)
    for symmetric in (True, False):
        assert np.isfinite(dequantize(quantize_int4(w, 32, symmetric, importance))).all()
