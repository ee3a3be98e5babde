"""Speculation inside the megakernel's loop, on the emulated GPU: single pass' tokens, in the steps that prompt lookup
promises, whatever the shape, the width and the way of drawing."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.cuda.check import Case
from kernels.cuda.megakernel import DeviceSampling, Megakernel
from kernels.cuda.phases import KernelDims
from kernels.cuda.plan import Plan
from kernels.cuda.token_ring import TOKEN_ENTRY, Step
from tests.kernels.test_megakernel_on_cpu import EmulatedGpu, small

pytestmark = [
    pytest.mark.slow,  # ten seconds of g++ and as many of fibers for each
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to run the kernel on the CPU"),
]
CONTEXT = 96
REPETITIVE = [7, 8, 9, 10, 11, 7, 8, 9, 12, 7, 8, 9, 10]
RANDOM = [151, 4, 288, 37, 90, 201, 12, 77, 250, 163, 5, 119]
GREEDY = DeviceSampling()
# Random weights with a tied head repeat themselves when greedy; warmer draws accept some drafts and reject some.
WARM = DeviceSampling(0.35, seed=5)
HOT = DeviceSampling(0.8, top_k=40, top_p=0.9, min_p=0.01, seed=(1 << 40) + 3)


def longest_match(history: Sequence[int]) -> tuple[int, int]:
    """(tokens in common, position after them) of the longest earlier occurrence of the end, the latest among equals."""
    best = (0, 0)
    for end in range(len(history) - 1):
        length = 0
        while length < min(32, end + 1) and history[end - length] == history[-1 - length]:
            length += 1
        if length:
            best = max(best, (length, end + 1))
    return best


def expected_steps(history: Sequence[int], ids: Sequence[int], most: int, least: int, ends: bool) -> list[Step]:
    """What the loop should do on its way to `ids`. ends: they are all that was wanted (or fits)."""
    steps, done = [], 0
    while done < len(ids):
        known = [*history, *ids[:done]]
        length, start = longest_match(known)
        room = len(ids) - done - 1 if ends else most
        draft: list[int] = []
        while length >= least and len(draft) < min(most, room):
            draft.append([*known, *draft][start + len(draft)])
        kept = 0
        while kept < len(draft) and draft[kept] == ids[done + kept] and done + kept + 1 < len(ids):
            kept += 1
        # The last token of all may be an accepted draft, too: a stop token.
        accepted = kept + (kept < len(draft) and done + kept + 1 == len(ids) and draft[kept] == ids[done + kept])
        steps.append(Step(kept + 1, len(draft), accepted, length))
        done += kept + 1
    return steps


@dataclass
class Pair:
    """The same model with one column and with several."""

    single: EmulatedGpu
    several: EmulatedGpu
    known: dict[tuple[object, ...], list[int]] = field(default_factory=dict)  # what plain() has found

    def fill(self, history: list[int]) -> None:
        """All but the last token into both caches."""
        width, blocks = self.several.columns, self.single._cache.shape[2]
        for first in range(0, len(history) - 1, width):
            self.several.step(history[first : min(first + width, len(history) - 1)], first)
        self.single._cache.copy_(self.several._cache[:, :, :blocks])

    def plain(self, history: list[int], way: DeviceSampling, count: int) -> list[int]:
        key = (tuple(history), way, count)
        if key not in self.known:
            self.fill(history)
            self.known[key] = self.single.stream(history, way, count, position=len(history) - 1)
        return self.known[key]

    def speculative(
        self, history: list[int], way: DeviceSampling, count: int, stop: tuple[int, ...] = (), **options: Any
    ) -> tuple[list[int], list[Step]]:
        self.fill(history)
        return self.several.speculate(history, way, count, stop, **options)

    def check(self, history: list[int], way: DeviceSampling, count: int, **options: Any) -> list[Step]:
        """Both ways give the same tokens, and the steps are those of the rule."""
        ids = self.plain(history, way, count)
        got, steps = self.speculative(history, way, count, **options)
        assert got == ids
        most = min(self.several.columns - 1, options.get("most_drafts", 7))
        assert steps == expected_steps(history, ids, most, options.get("least_match", 1), ends=True)
        return steps


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    made: dict[tuple[object, ...], Pair] = {}

    def of(dims: KernelDims, kind: str, group: int, head, columns: int, sms: int, **tuning: int) -> Pair:
        key = (dims, kind, group, head, columns, sms, *tuning.items())
        if key not in made:
            folder: Path = tmp_path_factory.mktemp("speculation")
            both = []
            for width in (1, columns):
                (folder / str(width)).mkdir()
                case = Case(dims, kind, group, head)
                both.append(EmulatedGpu(folder / str(width), dims, case, width, sms, CONTEXT, tuning))
            made[key] = Pair(*both)
        return made[key]

    return of


def cyclic(*shape: int, **options: int) -> KernelDims:
    """A shape whose head is not its embedding: greedy replies run into cycles of several tokens."""
    return replace(small(*shape, **options), tied_head=False)


SHAPES = [
    (cyclic(128, 2, 2, 64, 256), "int4", 128, None, 2, 3),
    (small(192, 3, 1, 128, 320, qk_norm=True), "int4_asymmetric", 32, ("int8", 32), 4, 2),
    (cyclic(128, 2, 1, 64, 128, layers=1), "bf16", 0, None, 8, 2),
    (cyclic(128, 2, 1, 64, 192, layers=1), "int4", 64, None, 8, 9),  # one SM has no tiles of o and down
    # Pairs of SMs, as in the third.
    (cyclic(128, 2, 2, 64, 256, layers=1), "int4", 64, None, 2, 4),
    (small(256, 4, 2, 64, 384, layers=1, qk_norm=True), "int4_asymmetric", 64, ("int8", 64), 4, 6),
]
PAIRED = SHAPES[2], SHAPES[4], SHAPES[5]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[1]}-{shape[4]}-columns")
def test_tokens_are_single_pass_s_and_steps_those_of_the_rule(pair, shape):
    both, accepted, rejected = pair(*shape), 0, 0
    assert {both.single.shares, both.several.shares} == {2 if shape in PAIRED else 1}
    for history, way, count in ((REPETITIVE, GREEDY, 20), (REPETITIVE, WARM, 8), (RANDOM, HOT, 8)):
        for step in both.check(history, way, count):
            accepted += step.accepted
            rejected += step.drafted - step.accepted
    assert accepted
    assert rejected


SMALL = (cyclic(128, 2, 1, 64, 128, layers=1), "int4", 64, None, 4, 2)


def test_the_order_of_the_sms_changes_nothing(pair):
    both = pair(*SMALL)
    first = both.speculative(REPETITIVE, HOT, 16)
    for order in (1, 2):
        assert both.speculative(REPETITIVE, HOT, 16, order=order) == first


def test_a_stop_token_cuts_a_run_of_accepted_ones(pair):
    both = pair(*SMALL)
    history = REPETITIVE + both.plain(REPETITIVE, GREEDY, 50)  # as far as its cycle, and once around
    ids, whole = both.speculative(history, GREEDY, 20)
    assert ids == both.plain(history, GREEDY, 20)
    assert max(step.accepted for step in whole) == 3
    cut = set()
    for stop in sorted(set(ids))[:8]:
        until = ids[: ids.index(stop) + 1]
        got, steps = both.speculative(history, GREEDY, 20, (299, stop))
        assert got == until
        last = steps[-1]
        if last.accepted == last.tokens:  # the stop token was a draft itself
            cut.add(last.tokens)
    assert len(cut) > 1


def test_as_many_tokens_as_were_asked_for(pair):
    both = pair(*SMALL)
    history = REPETITIVE + both.plain(REPETITIVE, GREEDY, 50)
    for count in (1, 2, 3, 4, 5, 9):
        steps = both.check(history, GREEDY, count)
        assert sum(step.tokens for step in steps) == count


def test_to_the_last_position_of_the_context(pair):
    both = pair(*SMALL)
    long = [(3 * i * i + i) % 290 for i in range(CONTEXT - 7)]
    steps = both.check(long, WARM, 8)  # the last one fed is at CONTEXT - 1
    assert sum(step.tokens for step in steps) == 8
    again = both.check(long[:15], WARM, 40)  # from the middle of a block of keys over the next ones
    assert len(again) > 1


@pytest.mark.parametrize("sms", [5, 6])  # the latter in pairs
def test_sms_begin_to_attend_and_cease_in_the_middle_of_a_reply(pair, sms: int):
    both = pair(*SMALL[:5], sms, BLOCKS_PER_SPLIT=1)  # the next 16 keys go to another SM, up to the last
    assert both.several.shares == 2 - sms % 2
    history = REPETITIVE + both.plain(REPETITIVE, GREEDY, 16)
    steps = both.check(history, GREEDY, 66)
    assert len(steps) < 40


def test_few_drafts_and_long_matches_only(pair):
    both = pair(*SMALL)
    assert max(step.drafted for step in both.check(REPETITIVE, WARM, 20, most_drafts=2)) == 2
    picky = both.check(REPETITIVE, WARM, 20, least_match=2)
    free = both.check(REPETITIVE, WARM, 20)
    assert 0 < sum(step.drafted > 0 for step in picky) < sum(step.drafted > 0 for step in free)
    assert all((step.tokens, step.drafted) == (1, 0) for step in both.check(REPETITIVE, WARM, 6, most_drafts=0))


def test_the_stop_flag_ends_it_within_a_step(pair):
    both = pair(*SMALL)
    ids, steps = both.speculative(REPETITIVE, WARM, 60, cancel=True)
    assert len(steps) <= 2
    assert ids == both.plain(REPETITIVE, WARM, 60)[: len(ids)]


def test_a_history_of_one_token(pair):
    pair(*SMALL).check([9], WARM, 10)


class EmulatedDoor(Megakernel):
    """The host's side of a loop over an emulated GPU, whose launch returns when the kernel has ended."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        event = SimpleNamespace(record=lambda: None, query=lambda: True)
        names = {name: getattr(torch, name) for name in ("zeros", "empty", "tensor", "from_numpy", "int32", "int64")}
        self._torch = SimpleNamespace(**names, float32=torch.float32, cuda=SimpleNamespace(Event=lambda: event))
        self._device, self.dims, self.columns = torch.device("cpu"), gpu.dims, gpu.columns
        self.context_size, self._buffers, self._emulated = CONTEXT, {}, gpu
        self._host_control, self._host_tokens = gpu._host[:4], gpu._host[8:].view(TOKEN_ENTRY)

    def _kernel(self, columns: int, learned: bool = False) -> tuple[Any, Plan]:
        assert columns == self.columns
        return None, self._emulated.plan

    def _parameters(self, plan: Plan) -> Any:
        return self._emulated._parameters()

    def _launch(self, kernel: Any, plan: Plan, p: Any) -> None:
        assert self._emulated._run(ctypes.byref(p), ctypes.c_uint64(0)) == 0, "deadlock"

    def _raise_if_stopped(self) -> None:
        pass


@pytest.mark.parametrize("way", [GREEDY, WARM], ids=["greedy", "warm"])
def test_the_host_s_door(pair, way: DeviceSampling):
    both = pair(*SMALL)
    expected, steps = both.speculative(REPETITIVE, way, 9)
    door, position = EmulatedDoor(both.several), len(REPETITIVE) - 1
    ring = door.stream_speculative(position, way, 9, [299], REPETITIVE, columns=4)
    ids, seconds, told = ring.poll_steps()
    assert (ids, told) == (expected, steps)
    assert seconds == sorted(seconds)
    assert ring.wait() == ([], [])
    single = EmulatedDoor(both.single)
    ids, seconds = single.stream(REPETITIVE[-1], position, way, 9, [299], REPETITIVE).wait()
    assert ids == expected
    with pytest.raises(ValueError, match="no repeat penalty"):
        door.stream_speculative(5, DeviceSampling(repeat_penalty=1.1), 9, [], REPETITIVE, columns=4)
    for columns in (1, 3, 8):
        with pytest.raises(ValueError, match=f"loop of {columns} columns"):
            door.stream_speculative(5, GREEDY, 9, [], REPETITIVE, columns=columns)
    with pytest.raises(ValueError, match="no room"):
        door.stream_speculative(CONTEXT, GREEDY, 9, [], REPETITIVE, columns=4)


@pytest.mark.parametrize("sixteenths", [0, 20, 48])
def test_forced_acceptance_takes_what_it_is_told_for_right(tmp_path: Path, sixteenths: int):
    dims = SMALL[0]
    gpu = EmulatedGpu(tmp_path, dims, Case(dims, "int4", 64), 4, 2, CONTEXT, {"FORCED_ACCEPTANCE": 1})
    gpu.step([1], 0)
    _, steps = gpu.speculate([1, 5], GREEDY, 40, forced_sixteenths=sixteenths)
    whole = steps[:8]
    assert sum(step.accepted for step in whole) == 8 * sixteenths // 16
    assert {step.drafted for step in whole} == {3}
