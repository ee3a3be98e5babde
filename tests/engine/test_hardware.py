"""The measured bandwidth is kept, named, and measured again where the file is damaged. No test asserts on its size
beyond what any machine would give."""

from __future__ import annotations

import json
import math

import pytest

from engine.files.paths import cache_dir
from engine.machine import hardware
from engine.machine.hardware import Bandwidth, gpu_bandwidth, streaming_bandwidth
from kernels.cuda.driver import Gpu


@pytest.fixture
def measured(monkeypatch) -> list[float]:
    """Results that the measurement gives, one after the other."""
    results = [10.0, 14.0, 12.0]
    monkeypatch.setattr(hardware, "_native_is_ready", lambda: False)
    monkeypatch.setattr(hardware, "_numpy_bandwidth", lambda threads: results.pop(0))
    monkeypatch.setattr(hardware, "default_threads", lambda: 2)
    return results


def test_measured_once_and_named(measured):
    first = streaming_bandwidth()
    assert first == Bandwidth(10.0, "measured streaming read, 2 threads")
    assert streaming_bandwidth() == first
    assert len(measured) == 2


def test_a_rate_above_the_kept_figure_measures_again_and_keeps_the_better(measured):
    assert streaming_bandwidth(5.0).gb_s == 10.0
    assert streaming_bandwidth(9.9).gb_s == 10.0
    assert streaming_bandwidth(13.0).gb_s == 14.0
    assert streaming_bandwidth(15.0).gb_s == 14.0  # measured 12
    assert streaming_bandwidth().gb_s == 14.0
    assert measured == []


def test_it_is_not_measured_for_ever(measured):
    for _ in range(3 * hardware.MAX_MEASUREMENTS):
        measured.append(10.0)
        streaming_bandwidth(1000.0)
    assert len(measured) == 3 + 2 * hardware.MAX_MEASUREMENTS


def test_another_processor_or_thread_count_is_another_figure(measured, monkeypatch):
    streaming_bandwidth()
    monkeypatch.setattr(hardware, "default_threads", lambda: 1)
    assert streaming_bandwidth() == Bandwidth(14.0, "measured streaming read, 1 thread")
    monkeypatch.setattr(hardware, "processor", lambda: "another")
    assert streaming_bandwidth().gb_s == 12.0
    assert len(json.loads((cache_dir() / hardware.FILE_NAME).read_text())) == 3


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"x": 1}', '"text"'])
def test_a_damaged_file_is_measured_over(measured, damage):
    streaming_bandwidth()
    (cache_dir() / hardware.FILE_NAME).write_text(damage)
    assert streaming_bandwidth().gb_s == 14.0
    assert streaming_bandwidth().gb_s == 14.0


@pytest.mark.parametrize("value", [-1, 0, 1e9, "fast", None])
def test_an_absurd_value_is_measured_over(measured, value):
    streaming_bandwidth()
    path = cache_dir() / hardware.FILE_NAME
    known = json.loads(path.read_text())
    path.write_text(json.dumps({key: entry | {"gb_s": value} for key, entry in known.items()}))
    assert streaming_bandwidth().gb_s == 14.0


def test_a_cache_that_cannot_be_written_still_gives_a_figure(measured, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLINT_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert streaming_bandwidth().gb_s == 10.0


def test_numpy_s_measurement_gives_a_rate(monkeypatch):
    monkeypatch.setattr(hardware, "MIN_BUFFER_BYTES", 64 << 20)
    monkeypatch.setattr(hardware, "MAX_BUFFER_BYTES", 64 << 20)
    monkeypatch.setattr(hardware, "MEASURE_SECONDS", 0.05)
    assert 0 < hardware._numpy_bandwidth(2) < math.inf


def gpu(peak: float) -> Gpu:
    return Gpu("NVIDIA X", (9, 0), 132, 1, peak, 1, 1, True, 13000)


def test_a_gpu_s_peak_is_the_driver_s():
    assert gpu_bandwidth(gpu(4.8e12)) == Bandwidth(4800.0, "NVIDIA X, memory clock x bus width from the driver")
    assert gpu_bandwidth(gpu(0.0)) is None
