"""Arms side by side, with workers that answer from a script."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.bench import arms as contestants
from engine.bench.arms import Arm, find_arms, launch
from engine.bench.compare import Outcome, outcome_from_json, outcome_json, run
from engine.bench.compare_table import comparison_markdown
from engine.bench.gguf_peer import find_gguf
from engine.errors import BackendError, UsageError
from engine.machine.hardware import Bandwidth
from engine.packed.model import PackedModel
from tests.synthetic import small_config, write_random_packed

REQUEST: dict[str, Any] = {"prompt": [1, 2, 3, 4], "tokens": 5, "threads": 1, "context": 32, "model": "m", "gguf": None}
RIGHT = [10, 11, 12, 13, 14]
REFERENCE = {"ids": RIGHT, "margins": [2.0] * 5, "runners_up": [1] * 5}
ARMS = [Arm("ours"), Arm("peer"), Arm("absent", missing="it is not here")]


class Script:
    """Answers in the place of processes; `seconds` of each arm's decode by call."""

    def __init__(self, seconds: dict[str, list[float]], **answers: dict[str, Any]) -> None:
        self.seconds, self.answers, self.calls = seconds, answers, []

    def __call__(self, arm: Arm, request: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(arm.name)
        if arm.name == "reference":
            return REFERENCE
        if arm.name in self.answers:
            return self.answers[arm.name]
        times = self.seconds[arm.name]
        seconds = times[(self.calls.count(arm.name) - 1) % len(times)]
        return {"ids": RIGHT, "prefill_s": 0.5, "decode_s": seconds, "bytes_per_token": 1e6, "device": "d"}


def outcome(script: Script, rounds: int = 5, **options: Any) -> Outcome:
    return run(ARMS, REQUEST, rounds, script, **options)


def test_the_gate_comes_first_and_rounds_are_interleaved() -> None:
    script = Script({"ours": [0.04], "peer": [0.08]})
    result = outcome(script)
    assert script.calls == ["reference", "ours", "peer", *["ours", "peer"] * 5]
    ours, peer, absent = result.results
    assert ours.samples == pytest.approx([100.0] * 5)  # 4 tokens after the first in 0.04 s
    assert ours.prefill == pytest.approx([8.0] * 5)
    assert (absent.state, absent.problem, absent.samples) == ("missing", "it is not here", [])
    comparison = result.comparison(peer)
    assert comparison is not None
    assert (comparison.ratio, comparison.verdict) == (pytest.approx(2.0), "faster")
    assert result.comparison(ours) is None
    assert len(result.machine) == 5


def test_drift_that_both_arms_share_cancels() -> None:
    drift = [1.0, 3.0, 0.7, 1.9, 1.2, 0.5]  # the first is the gate's
    result = outcome(Script({"ours": [0.04 * d for d in drift], "peer": [0.048 * d for d in drift]}))
    comparison = result.comparison(result.results[1])
    assert comparison is not None
    assert (comparison.low, comparison.high) == pytest.approx((1.2, 1.2))


def test_a_wrong_arm_is_not_timed() -> None:
    script = Script({"ours": [0.04]}, peer={"ids": [10, 99, 12, 13, 14], "decode_s": 0.001})
    result = outcome(script)
    assert script.calls.count("peer") == 1
    assert result.results[1].state == "wrong"
    assert "wrong token after 1 of 5" in result.results[1].problem
    assert result.comparison(result.results[1]) is None


def test_an_arm_that_fails_in_a_round_loses_its_samples_but_not_its_row() -> None:
    class Dying(Script):
        def __call__(self, arm: Arm, request: dict[str, Any]) -> dict[str, Any]:
            answer = super().__call__(arm, request)
            return {"error": "out of memory"} if arm.name == "peer" and self.calls.count("peer") == 4 else answer

    result = outcome(Dying({"ours": [0.04], "peer": [0.08]}))
    peer = result.results[1]
    assert (peer.state, peer.problem, peer.samples) == ("failed", "out of memory", [])
    assert "peer: FAILED, out of memory" in comparison_markdown(result)


class Interrupted(Script):
    """Ctrl-C while `peer` runs for the `at`-th time, the gate's turn counted."""

    def __init__(self, at: int) -> None:
        super().__init__({"ours": [0.04], "peer": [0.08]})
        self.at = at

    def __call__(self, arm: Arm, request: dict[str, Any]) -> dict[str, Any]:
        answer = super().__call__(arm, request)
        if arm.name == "peer" and self.calls.count("peer") == self.at:
            raise KeyboardInterrupt
        return answer


def test_each_round_is_told_when_it_ends() -> None:
    told: list[str] = []
    script = Script({"ours": [0.04]}, peer={"ids": RIGHT, "decode_s": 0.0})
    outcome(script, rounds=2, tell=told.append)
    assert told == [f"round {i} of 2: ours 100.00 tok/s, peer FAILED" for i in (1, 2)]


def test_each_answer_is_told_with_what_it_took_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr("engine.bench.compare.time.perf_counter", lambda: clock)

    class Slow(Script):
        def __call__(self, arm: Arm, request: dict[str, Any]) -> dict[str, Any]:
            nonlocal clock
            clock += {"reference": 7.0, "ours": 10.0, "peer": 20.0}[arm.name]
            return super().__call__(arm, request)

    told: list[str] = []
    outcome(Slow({"ours": [0.04], "peer": [0.08]}), rounds=5, answered=told.append)
    assert told[:4] == [
        "reference (7.0 s)",
        "gate: ours: all 5 tokens of the reference (10.0 s)",
        "gate: peer: all 5 tokens of the reference (20.0 s)",
        "round 1 of 5: ours 100.00 tok/s (10.0 s), about 2 min left",
    ]
    assert told[-3:] == [
        "round 4 of 5: peer 50.00 tok/s (20.0 s), about 30 s left",
        "round 5 of 5: ours 100.00 tok/s (10.0 s), about 20 s left",
        "round 5 of 5: peer 50.00 tok/s (20.0 s)",
    ]
    told.clear()
    outcome(Script({"ours": [0.04]}, peer={"error": "out of memory"}), rounds=1, answered=told.append)
    assert [line.split(" (")[0] for line in told] == [
        "reference",
        "gate: ours: all 5 tokens of the reference",
        "gate: peer: out of memory",
        "round 1 of 1: ours 100.00 tok/s",
    ]


def test_an_interrupted_comparison_keeps_the_rounds_that_ended() -> None:
    result = outcome(Interrupted(at=7), rounds=9)
    ours, peer, _ = result.results
    assert (result.rounds, result.stopped_of, len(result.machine)) == (5, 9, 5)
    assert (len(ours.samples), len(peer.samples), len(ours.prefill)) == (5, 5, 5)
    comparison = result.comparison(peer)
    assert comparison is not None
    assert comparison.ratio == pytest.approx(2.0)
    assert "STOPPED after 5 of 9 rounds" in comparison_markdown(result)
    again = outcome_from_json(json.loads(json.dumps(outcome_json(result))), "compare.json")
    assert comparison_markdown(again) == comparison_markdown(result)
    whole = outcome(Script({"ours": [0.04], "peer": [0.08]}))
    assert "STOPPED" not in comparison_markdown(whole)


@pytest.mark.parametrize("at", [1, 2])  # in the gate, in the first round
def test_interrupted_before_a_round_has_ended_there_is_nothing_to_keep(at: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        outcome(Interrupted(at))


def test_without_a_reference_nothing_is_compared() -> None:
    with pytest.raises(BackendError, match="The reference failed, so nothing can be checked: no torch"):
        run([Arm("ours")], REQUEST, 5, lambda arm, request: {"error": "no torch"})


def test_the_base_can_be_chosen_and_bytes_be_counted_from_outside() -> None:
    script = Script({"ours": [0.04], "peer": [0.08]})
    result = outcome(script, against="peer", weights=lambda arm: 2e6)
    assert result.base == "peer"
    script.answers["peer"] = {"ids": RIGHT, "decode_s": 0.08}
    result = outcome(script, weights=lambda arm: 2e6)
    assert result.results[1].bytes_per_token == 2e6
    assert [r.bytes_per_token for r in result.results] == [1e6, 2e6, None]


def test_the_table_has_a_line_for_everyone() -> None:
    result = outcome(Script({"ours": [0.04], "peer": [0.08]}))
    result.peaks.update(cpu=Bandwidth(1.0, "by hand"), gpu=Bandwidth(4800.0, "the driver's"))
    table = comparison_markdown(result)
    lines = table.splitlines()
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == [
        "ours", "100.00 ± 0.00", "8.0", "1.00", "x1.00", "0.10", "10%", "", "", "base",
    ]  # fmt: skip
    assert [cell.strip() for cell in lines[3].strip("|").split("|")][-3:] == ["x2.00", "2.00 to 2.00", "faster"]
    assert "absent: MISSING, it is not here" in lines
    assert "Equal bytes within 5 %: peer." in table
    assert "MBU on the CPU against 1.0 GB/s: by hand." in lines
    assert "GPU" not in table
    few = comparison_markdown(outcome(Script({"ours": [0.04], "peer": [0.08]}), rounds=2))
    assert "No verdict: 2 rounds are fewer than 5." in few


def test_an_arm_on_the_gpu_is_measured_against_the_gpus_memory() -> None:
    answers = {"ids": RIGHT, "decode_s": 0.04, "bytes_per_token": 24e9, "device": "cuda", "gpu": True}
    result = outcome(Script({"peer": [0.08]}, ours=answers))
    result.peaks.update(cpu=Bandwidth(1.0, "by hand"), gpu=Bandwidth(4800.0, "the driver's"))
    ours, peer = (line.split("|") for line in comparison_markdown(result).splitlines()[2:4])
    assert (ours[7].strip(), peer[7].strip()) == ("50%", "5%")  # 2,400 of 4,800 GB/s; 0.05 of 1


def test_json_keeps_every_sample_and_no_paths() -> None:
    value = outcome_json(outcome(Script({"ours": [0.04], "peer": [0.08]})))
    text = json.dumps(value)
    assert json.loads(text) == value
    assert [arm["state"] for arm in value["arms"]] == ["measured", "measured", "missing"]
    assert value["arms"][1]["interval_95"] == pytest.approx([2.0, 2.0])
    assert value["prompt_tokens"] == 4
    assert not {"prompt", "model", "gguf"} & set(value)


# --- workers ----------------------------------------------------------------------------------------------------------


def worker(code: str) -> Arm:
    return Arm("arm", (sys.executable, "-c", code))


def test_a_workers_last_line_is_its_answer() -> None:
    code = "import json, sys; r = json.load(sys.stdin); print('noise'); print(json.dumps([r['arm'], r['prompt']]))"
    assert launch(worker(code), {"prompt": [1]}) == {"error": "exit code 0"}  # JSON, but no object
    code = code.replace("[r['arm'], r['prompt']]", "{'ids': r['prompt'] + [r['arm']]}")
    assert launch(worker(code), {"prompt": [1]}) == {"ids": [1, "arm"]}


def test_a_worker_that_dies_babbles_or_hangs_is_an_answer_too() -> None:
    died = launch(worker("import sys; sys.stderr.write('no such device\\n'); sys.exit(3)"), {})
    assert died == {"error": "exit code 3: no such device"}
    assert launch(worker("print('hello')"), {}) == {"error": "exit code 0"}
    assert launch(worker("import time; time.sleep(60)"), {}, timeout=0.2) == {"error": "no answer within 0 s"}
    assert "cannot be started" in launch(Arm("arm", ("/nonexistent/python",)), {})["missing"]


def test_every_arm_is_listed_with_why_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants, "find_spec", lambda name: None)
    monkeypatch.setattr(contestants, "_no_gpu", lambda: "No GPU")
    monkeypatch.setattr(contestants.shutil, "which", lambda name: None)
    found = {arm.name: arm for arm in find_arms(None, Path("m.gguf"), "", None)}
    assert list(found) == list(contestants.NAMES)
    assert found["cuda-single"].missing == found["torch-int4-graph"].missing == "No GPU"
    assert "transformers" in found["transformers"].missing
    assert "--llama-python" in found["llama.cpp"].missing
    assert find_arms(["llama.cpp"], None, "there is no GGUF", "python")[0].missing == "there is no GGUF"
    with pytest.raises(UsageError, match="No arm named 'vllm'"):
        find_arms(["cpu-single", "vllm"], None, "", None)


def test_llama_bench_is_taken_where_there_is_no_binding_and_says_that_it_is_unchecked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contestants, "find_spec", lambda name: None)
    monkeypatch.setattr(contestants.shutil, "which", lambda name: "/somewhere/llama-bench")
    (arm,) = find_arms(["llama.cpp"], Path("m.gguf"), "", None)
    assert not arm.missing
    assert not arm.gated
    assert arm.command[-1] == "/somewhere/llama-bench"
    (arm,) = find_arms(["llama.cpp"], Path("m.gguf"), "", "other-python")
    assert (arm.gated, arm.command[0]) == (True, "other-python")


def test_only_the_file_that_was_packed_is_a_fair_peer(tmp_path: Path) -> None:
    import dataclasses
    import hashlib

    model = PackedModel.open(write_random_packed(tmp_path / "m", small_config()))
    path, problem = find_gguf(model, None)
    assert (path, "give it with --gguf" in problem) == (None, True)
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF of another model")
    source = dataclasses.replace(model.manifest.source, sha256=hashlib.sha256(b"GGUF").hexdigest())
    model.manifest = dataclasses.replace(model.manifest, source=source)
    assert "sha256 differs" in find_gguf(model, file)[1]
    file.write_bytes(b"GGUF")
    assert find_gguf(model, file) == (file.resolve(), "")


@pytest.mark.slow
def test_our_own_arm_in_a_real_process_gives_the_references_tokens(tmp_path: Path) -> None:
    """Both workers on a small random model: the reference agrees with the torch backend behind the decoder."""
    directory = write_random_packed(tmp_path / "m", small_config(vocab_size=320))
    request = {**REQUEST, "prompt": list(range(10, 30)), "tokens": 8, "context": 64, "model": str(directory)}
    result = run([Arm("torch-single")], request, 1, launch)
    (ours,) = result.results
    assert ours.state == "measured", ours.problem
    assert ours.gate is not None
    assert ours.gate.agreed == 8
    assert len(ours.samples) == 1
    assert ours.bytes_per_token
