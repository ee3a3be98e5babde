"""Whatever the bytes, a reader succeeds or raises a FlintError: within memory, within time, without a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from engine.config import RopeDivisors
from engine.packed.model import PackedModel
from tests.engine.test_compressed_tensors import folder_of, quantised
from tests.gguf_files import write_gguf
from tests.hugging_face_folders import config_json, random_tensors, write_folder
from tests.synthetic import small_config, write_random_packed

CASES = 3000


def write_seeds(root: Path) -> None:
    """One small model for each reader and format."""
    sizes = {"num_layers": 1, "vocab_size": 264, "hidden_size": 32, "head_dim": 8, "intermediate_size": 32}
    llama = small_config("llama", **sizes, rope_scaling=RopeDivisors((1.0, 1.0, 2.0, 8.0)))
    granite = small_config("granite", **sizes)
    qwen3 = small_config("qwen3", **sizes)
    wide = small_config("llama", **{**sizes, "hidden_size": 256, "intermediate_size": 256}, rope_scaling=None)
    for name in ("gguf-q4_1", "gguf-q8_0", "gguf-f16", "gguf-k"):
        (root / name).mkdir(parents=True)
    write_gguf(root / "gguf-q4_1" / "m.gguf", llama, "Q4_1")
    write_gguf(root / "gguf-q8_0" / "m.gguf", granite, "Q8_0")
    write_gguf(root / "gguf-f16" / "m.gguf", qwen3, "F16")
    kinds = {"gate": "Q4_K", "up": "Q5_K", "down": "Q6_K"}  # the others' rows are too short
    write_gguf(root / "gguf-k" / "m.gguf", wide, lambda name: kinds.get(name.rpartition(".")[2], "Q4_0"))
    write_folder(root / "hf-bf16", config_json(granite), [random_tensors(granite)])
    (root / "hf-bf16" / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    tensors = list(random_tensors(qwen3, "F32").items())
    write_folder(root / "hf-sharded", config_json(qwen3), [dict(tensors[:5]), dict(tensors[5:])])
    folder_of(root / "hf-compressed", granite, quantised(granite, groups=1, asymmetric=True)[0])
    write_random_packed(root / "packed-int4", granite, symmetric=False)
    write_random_packed(root / "packed-int8", qwen3, bits=8, embed_bits=16)


@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit is read from /proc")
def test_mutated_files_never_crash_a_reader(tmp_path: Path) -> None:
    write_seeds(tmp_path / "seeds")
    command = [sys.executable, "-m", "tests.engine.fuzz_readers", str(tmp_path / "seeds"), str(CASES), "0"]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=root)
    assert result.returncode == 0, f"the reader died ({result.returncode}): {result.stderr[-2000:]}"
    report = json.loads(result.stdout)
    assert report["findings"] == [], "\n".join(finding["trace"] for finding in report["findings"])
    outcomes = Counter[str]()
    for key, count in report["outcomes"].items():
        outcomes[key.rpartition(": ")[2]] += count
    assert sum(outcomes.values()) == CASES
    # Both happen often, or the mutations do not test what they should.
    assert outcomes["read"] > CASES // 40
    assert outcomes["refused"] > CASES // 3


def test_the_unmutated_seeds_are_read(tmp_path: Path) -> None:
    from tests.engine.fuzz_readers import read_everything

    write_seeds(tmp_path)
    models = list(tmp_path.iterdir())
    assert len(models) == 9
    for model in models:
        read_everything(model)
    assert PackedModel.open(tmp_path / "packed-int8").storage("embed").format == "bf16"
