"""Who multiplies what: pairs of SMs where a GPU has clusters and K can be halved, and every tile in one place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.backends.cuda import kernel_dims
from kernels.cuda.check import Stored, stored_matrices
from kernels.cuda.driver import Driver
from kernels.cuda.phases import (
    PHASES,
    TILE_ROWS,
    DraftDims,
    KernelDims,
    Unsupported,
    draft_matrix_sizes,
    own_tiles,
    phases_of,
    plan_drafter,
    shares_of,
    split_tiles,
    tiles_index,
)
from tests.fake_cuda import FakeLibcuda
from tests.gpu.models import SHAPES, config_of

DIMS = KernelDims(256, 3, 4, 2, 64, 768, 1000, 1e-5, False, True, 1.0, 0.125, 1.0, 1.0)
SMS = (2, 4, 6, 18, 48, 132)


def stored_draft(dims: KernelDims, draft: DraftDims) -> dict[str, Stored]:
    return {name: Stored("int8", 32, *size) for name, size in draft_matrix_sizes(dims, draft).items()}


@pytest.mark.parametrize(
    ("changed", "group", "sms", "clusters", "shares"),
    [
        ({}, 64, 132, True, 2),
        ({}, 128, 4, True, 2),  # a pair for each KV head
        ({}, 64, 132, False, 1),
        ({}, 64, 131, True, 1),
        ({}, 64, 3, True, 1),
        ({}, 64, 2, True, 1),  # fewer pairs than KV heads
        ({"heads": 3, "kv_heads": 1, "head_dim": 128}, 64, 132, True, 1),  # 1.5 heads each, though 384 can be halved
        ({"hidden": 320}, 64, 132, True, 1),  # 2.5 blocks of 64
        ({"hidden": 384}, 64, 132, True, 2),
        ({"hidden": 384}, 128, 132, True, 1),  # 1.5 groups
        ({"intermediate": 832}, 64, 132, True, 1),
    ],
)
def test_two_sms_share_a_layer_where_each_can_have_half_of_it(
    changed, group: int, sms: int, clusters: bool, shares: int
):
    dims = replace(DIMS, **changed)
    matrices = stored_matrices(dims, "int4", group)
    assert shares_of(dims, matrices, sms, clusters) == shares
    phases = phases_of(dims, matrices, shares)
    assert {name: phase.shares for name, phase in phases.items()} == dict.fromkeys(PHASES, shares) | {"head": 1}
    assert {phase.own_k * phase.shares - phase.k for phase in phases.values()} == {0}


@pytest.mark.parametrize("shape", SHAPES)
def test_which_models_have_pairs_on_an_h200(shape: str):
    dims = kernel_dims(config_of(shape))
    for kind, group in (("int4", 32), ("int4", 128), ("int8", 64), ("bf16", 0)):
        if dims.hidden % max(group, 1) == 0:
            shares = shares_of(dims, stored_matrices(dims, kind, group), 132, True)
            assert shares == (1 if shape == "smollm2-135m" else 2)  # it has nine heads


def test_gpus_with_clusters():
    for capability, clusters in (((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), True)):
        assert Driver(FakeLibcuda(capability=capability)).gpu().clusters is clusters


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("sms", [*SMS, 5])
def test_every_tile_has_one_place(sms: int, shares: int):
    if sms % shares:
        pytest.skip("no pairs")
    phases = phases_of(DIMS, stored_matrices(DIMS, "int4", 64), shares)
    split = split_tiles(phases, DIMS.layers, sms)
    for name in PHASES:
        at, phase = tiles_index(name), phases[name]
        owners: list[int] = []
        for sm in range(sms):
            rank, first, count = sm % phase.shares, split.first[sm][at], split.count[sm][at]
            assert (first, count) == (split.first[sm - rank][at], split.count[sm - rank][at])
            owners += [first + tile for tile in own_tiles(count, phase.shares, rank)]
        assert sorted(owners) == list(range(phase.tiles))
        counts = [row[at] for row in split.count]
        assert max(counts) - min(counts) <= 1
    o, down = PHASES.index("o"), PHASES.index("down")
    assert all((f[o], c[o]) == (f[down], c[down]) for f, c in zip(split.first, split.count, strict=True))


@pytest.mark.parametrize("sms", SMS)
def test_pairs_read_what_single_sms_would(sms: int):
    """The same bytes of weights, each once; streams of a pair are alike up to the head, which is nobody's in common."""
    matrices = stored_matrices(DIMS, "int4", 64)
    alone, paired = phases_of(DIMS, matrices), phases_of(DIMS, matrices, 2)
    assert {n: p.total_bytes for n, p in paired.items()} == {n: p.total_bytes for n, p in alone.items()}
    split = split_tiles(paired, DIMS.layers, sms)
    assert sum(split.layer_bytes) == sum(paired[name].total_bytes for name in PHASES[:-1])
    assert split.layer_bytes[::2] == split.layer_bytes[1::2]
    ends = [
        offset + DIMS.layers * of_layer + row[-1] * paired["head"].tile_bytes
        for offset, of_layer, row in zip(split.offset, split.layer_bytes, split.count, strict=True)
    ]
    following = [*split.offset[1:], split.total_bytes]
    assert all(end <= begin < end + 128 for end, begin in zip(ends, following, strict=True))
    heads = [row[-1] for row in split.count]
    assert heads == sorted(heads, reverse=True)  # spread over SMs, not over pairs
    assert sum(heads) == -(-DIMS.vocab // TILE_ROWS)


def test_a_drafter_that_cannot_be_halved_is_refused_for_a_paired_model():
    good = DraftDims(768, 107, (1, 2), 4, 2, 64, DIMS.rms_norm_eps)
    paired = plan_drafter(DIMS, good, stored_draft(DIMS, good), 6, 2)
    assert {name for name, phase in paired.phases.items() if phase.shares == 2} == {"fc", *PHASES[:-1]}
    assert paired.split.count[0][:-1] == paired.split.count[1][:-1]
    odd = replace(good, intermediate=832)
    assert plan_drafter(DIMS, odd, stored_draft(DIMS, odd), 6).phases["down"].shares == 1
    with pytest.raises(
        Unsupported, match=r"^down has 832 input channels: two multiprocessors share a multiple of 128$"
    ):
        plan_drafter(DIMS, odd, stored_draft(DIMS, odd), 6, 2)
    narrow = replace(good, intermediate=512)  # its passes would leave old tags in the wider hop of the model's MLP
    with pytest.raises(Unsupported, match=r"^a drafter whose MLP has 512 channels, the model's 768$"):
        plan_drafter(DIMS, narrow, stored_draft(DIMS, narrow), 6)
