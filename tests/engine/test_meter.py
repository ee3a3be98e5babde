"""The ledger against sizes added up by hand, and the running figures."""

from __future__ import annotations

import pytest

from engine.events import Tokens
from engine.meter import Meter, Reading, packed_weight_bytes, step_ledger
from engine.packed.model import PackedModel
from tests.synthetic import small_config, write_random_packed


def test_packed_bytes_are_values_scales_and_minima(tmp_path):
    config = small_config("qwen3", tie_word_embeddings=False)  # q width 128, hidden 64, head_dim 32, 2 layers
    write_random_packed(tmp_path / "m", config, bits=4, group=32, symmetric=False, embed_bits=8)
    sizes = packed_weight_bytes(PackedModel.open(tmp_path / "m"))

    def int4(n: int, k: int) -> int:
        return n * k // 2 + n * (k // 32) * 2 * 2  # values; fp16 scale and minimum

    int8 = 320 * 64 + 320 * 2 * 2
    assert sizes == {
        "embed": int8,
        "head": int8,
        "q": 2 * int4(128, 64),
        "k": 2 * int4(64, 64),
        "v": 2 * int4(64, 64),
        "o": 2 * int4(64, 128),
        "gate": 2 * int4(128, 64),
        "up": 2 * int4(128, 64),
        "down": 2 * int4(64, 128),
        "norm": 4 * (2 * (64 + 64 + 32 + 32) + 64),
    }


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_weights_once_and_the_rows_of_its_tokens(tied):
    config = small_config("llama", tie_word_embeddings=tied)  # vocab 320, 2 layers, kv width 32
    weights = {"embed": 320 * 100, "q": 5000, "norm": 7} | ({} if tied else {"head": 640})
    ledger = step_ledger(config, weights, 4, 10, kv_element_bytes=2)
    assert ledger.weights == {"embed": 400, "head": 32000 if tied else 640, "q": 5000, "norm": 7}
    assert ledger.kv_read == 2 * 2 * 32 * 2 * 14
    assert ledger.kv_written == 2 * 2 * 32 * 2 * 4
    assert ledger.total == ledger.weight_bytes + ledger.kv_read + ledger.kv_written


def test_granite_3b_s_known_sizes():
    """fp16 KV of Granite-4.1-3b: 80 KiB a token."""
    config = small_config("granite", num_layers=40, hidden_size=2560, num_heads=40, num_kv_heads=8, head_dim=64)
    assert step_ledger(config, {"embed": 320}, 1, 0, kv_element_bytes=2).kv_written == 80 * 1024


def token_event(**values) -> Tokens:
    return Tokens(**({"ids": (1,), "text": "", "seconds": 0.1, "bytes": 10**9} | values))


def test_rates():
    reading = Reading.of([token_event(), token_event(ids=(1, 2, 3), seconds=0.3)])
    assert reading.tok_s == pytest.approx(4 / 0.4)
    assert reading.bandwidth_gb_s == pytest.approx(2 / 0.4)
    assert reading.bytes_per_token == 5e8
    assert reading.mbu(20.0) == pytest.approx(0.25)
    assert reading.acceptance_length is None


def test_nothing_counted_has_no_rates():
    empty = Reading()
    assert (empty.tok_s, empty.bytes_per_token, empty.bandwidth_gb_s, empty.mbu(10.0)) == (None, None, None, None)
    assert empty.accepted_per_position == ()


def test_the_first_token_does_not_count():
    assert Reading.of([token_event(steps=0, seconds=0.0, bytes=0)]) == Reading()


def test_acceptance_is_of_verify_steps_and_by_position():
    steps = [
        token_event(
            ids=(1, 2, 3), verify_steps=1, drafted=2, accepted=2, position_drafted=(1, 1), position_accepted=(1, 1)
        ),
        token_event(ids=(4,), verify_steps=1, drafted=3, accepted=0, position_drafted=(1,), position_accepted=(0,)),
        token_event(),
    ]
    meter = Meter()
    for step in steps:
        meter.add(step)
    assert meter.total.acceptance_length == 2.0
    assert meter.total.accepted_per_position == (0.5, 1.0)
    assert meter.total.steps == 3
    assert meter.total == Reading.of(steps)


def test_the_live_reading_covers_the_last_second():
    meter = Meter(window_s=1.0)
    for _ in range(30):
        meter.add(token_event(seconds=0.1))
    for _ in range(5):
        meter.add(token_event(seconds=0.2))
    assert meter.live.seconds == pytest.approx(1.0)
    assert meter.live.tok_s == pytest.approx(5.0)
    assert meter.total.seconds == pytest.approx(4.0)
    meter.add(token_event(seconds=5.0))  # one step longer than the window is still shown
    assert meter.live.tokens == 1
