"""Rows of `flint bench decode`, on a backend whose clock and bytes are known."""

from __future__ import annotations

import csv
import io
import json
import threading
from pathlib import Path

import pytest

from engine.bench.conditions import Conditions
from engine.bench.rows import Case, Row, parse_counts, plan, run
from engine.bench.tables import FORMATS, render, row_json
from engine.bench.workload import prompt_ids
from engine.errors import BackendError, Cancelled, UsageError
from engine.machine.hardware import Bandwidth
from tests.fake_backend import FakeBackend, FakeLoopBackend
from tests.fake_bench import fake_engine

WHERE = Conditions(
    model="scripted",
    variant="int4-g32",
    parameters=1_000_000,
    backend="fake",
    description="fake, 1 thread",
    weight_bytes={"gate": 400_000, "head": 100_000},
    kv_bytes=8,
    peak=Bandwidth(10.0, "the driver's figure"),
    measured=Bandwidth(8.0, "measured by hand"),
)


def test_decode_counts_the_steps_after_the_first_token_and_the_ledgers_bytes(tmp_path: Path) -> None:
    engine = fake_engine(tmp_path, FakeLoopBackend(context_size=512, chunk=64))
    (row,) = run(engine, [Case("tg", 12, depth=20)], repetitions=3)
    # The fake's clock: 10 ms a token. Its ledger: 1000 bytes, 2 a position and 1 for the token; positions 21 to 32.
    assert row.samples == pytest.approx((100.0,) * 3)
    assert row.seconds == pytest.approx((0.12,) * 3)
    moved = sum(1000 + (position + 1) + 1 for position in range(21, 33))
    assert row.bytes_per_token == pytest.approx(moved / 12)
    assert row.gb_s == pytest.approx(moved / 0.12 / 1e9)
    assert row.latencies == pytest.approx((0.01, 0.01))


def test_prefill_feeds_exactly_the_tokens_of_the_test_each_time(tmp_path: Path) -> None:
    backend = FakeBackend(context_size=512, chunk=64)
    engine = fake_engine(tmp_path, backend)
    seen: list[int] = []
    rows = run(engine, [Case("pp", 100, depth=30)], repetitions=2, watch=lambda text: seen.append(len(backend.widths)))
    (row,) = list(rows)
    # The depth once (the warm-up left its first token in the cache), then 100 tokens twice.
    assert backend.widths[seen[-1] :] == [29, 64, 36, 64, 36]
    assert len(row.samples) == 2
    assert row.bytes_per_token is None
    assert backend.tokens[:130] == prompt_ids(engine.tokenizer, 130)


def test_speculation_reports_its_acceptance(tmp_path: Path) -> None:
    from tests.fake_backend import hashed_logits

    engine = fake_engine(tmp_path, FakeLoopBackend(hashed_logits(259, repeats=0.9), context_size=2048, chunk=512))
    (row,) = run(engine, [Case("tg", 200, depth=400)], repetitions=1, mode="speculative", drafter="ngram")
    assert row.mode == "speculative"
    assert row.acceptance_length is not None
    assert 1.0 <= row.acceptance_length <= 8.0


def test_a_failing_device_and_a_cancel_end_the_run(tmp_path: Path) -> None:
    engine = fake_engine(tmp_path / "a", FakeBackend(context_size=512, fail_at=60))
    with pytest.raises(BackendError, match="The device was lost"):
        list(run(engine, [Case("pp", 100)], repetitions=1))
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        list(run(fake_engine(tmp_path / "b"), [Case("pp", 100)], repetitions=1, cancel=cancel))


def test_what_does_not_fit_the_context_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    backend = FakeBackend(context_size=100)
    with pytest.raises(UsageError, match="tg64 @ d64 needs 130 positions, the context has 100"):
        list(run(fake_engine(tmp_path, backend), [Case("pp", 8), Case("tg", 64, 64)], repetitions=1))
    assert backend.widths == []


def test_the_plan_goes_depth_by_depth() -> None:
    names = [test.name for test in plan((512,), (128,), (0, 1024))]
    assert names == ["pp512", "tg128", "pp512 @ d1024", "tg128 @ d1024"]
    assert [test.name for test in plan((0,), (64, 128), (0,))] == ["tg64", "tg128"]
    with pytest.raises(UsageError, match="nothing to measure"):
        plan((0,), (0,), (0,))


def test_lists_of_numbers() -> None:
    assert parse_counts("128,512,128", "-p") == (128, 512)
    assert parse_counts("0,64", "-d", zero=True) == (0, 64)
    for text in ("", "0", "-1", "1.5", "1e3", "12345678", "64,,2"):
        with pytest.raises(UsageError, match="-p"):
            parse_counts(text, "-p")


ROWS = [
    Row(Case("pp", 512), "single", (1000.0, 1100.0), (0.512, 0.4654)),
    Row(Case("tg", 128, 64), "single", (90.0, 110.0), (1.42, 1.16), 500_000, 5.0, (0.01, 0.02)),
]


def test_markdown_names_bytes_and_bandwidth() -> None:
    lines = render(ROWS, WHERE, "md").splitlines()
    assert len({len(line) for line in lines[:4]}) == 1  # columns line up
    assert "1050.00 ± 70.71" in lines[2]
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert cells[5:] == ["tg128 @ d64", "100.00 ± 14.14", "0.50", "5.00", "50.0%"]
    assert lines[-2:] == [
        "MBU against 10.0 GB/s: the driver's figure.",
        "Measured beside it: 8.0 GB/s, measured by hand.",
    ]


def test_json_and_csv_keep_the_samples() -> None:
    prefill, decode = json.loads(render(ROWS, WHERE, "json"))
    assert (prefill["test"], prefill["n_prompt"], prefill["n_gen"], prefill["mbu"]) == ("pp512", 512, 0, None)
    assert decode["samples_ts"] == [90.0, 110.0]
    assert decode["samples_ns"] == [1_420_000_000, 1_160_000_000]
    assert (decode["mbu"], decode["mbu_measured"]) == (0.5, 0.625)
    assert (decode["latency_p50_s"], decode["latency_p99_s"]) == (0.01, 0.02)
    assert [json.loads(line) for line in render(ROWS, WHERE, "jsonl").splitlines()] == [prefill, decode]
    table = list(csv.DictReader(io.StringIO(render(ROWS, WHERE, "csv"))))
    assert table[1]["samples_ts"] == "90.0;110.0"
    assert list(table[0]) == list(row_json(ROWS[0], WHERE))


def test_every_format_is_rendered() -> None:
    assert all(render(ROWS, WHERE, kind) for kind in FORMATS)
    with pytest.raises(UsageError, match="-o 'xml'"):
        render(ROWS, WHERE, "xml")
