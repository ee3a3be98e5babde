"""The packed format: what is written is read back; a killed or failed writer leaves what was there; damage is named."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import CheckpointError, DiskFull, ModelNotFound, UnsupportedModel
from engine.files.safetensors_file import SafetensorsFile
from engine.packed.library import LEFTOVERS
from engine.packed.manifest import Quantization, Source
from engine.packed.matrix import Storage
from engine.packed.model import PackedModel
from engine.packed.quantize import dequantize
from engine.packed.tensors import tensor_shapes
from engine.packed.writer import PackedWriter, restore_interrupted
from engine.packing import packed_size
from tests.synthetic import random_matrix, small_config, write_random_packed

COMMIT: dict[str, Any] = {
    "name": "m",
    "variant": "v",
    "quantization": Quantization("int4", 32, True, "int4", 32, False),
    "source": Source("somewhere", "", "random", ""),
    "license": "none",
}


@pytest.mark.parametrize("family", ["granite", "llama", "mistral", "qwen3"])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (16, True)])
def test_what_is_written_is_read_back(tmp_path: Path, family: Any, bits: int, symmetric: bool) -> None:
    config = small_config(family)
    rng = np.random.default_rng(5)
    storage = {4: Storage("int4", 32, symmetric), 8: Storage("int8", 64), 16: Storage("bf16")}[bits]
    shapes = tensor_shapes(config)
    matrices = {name: random_matrix(name, *shape, storage, rng) for name, shape in shapes.items() if len(shape) == 2}
    vectors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items() if len(shape) == 1}
    with PackedWriter(tmp_path / "v", config, dict.fromkeys(matrices, storage)) as writer:
        for name in writer.names:
            if name in matrices:
                writer.add_matrix(matrices[name])
            else:
                writer.add_vector(name, vectors[name])
        writer.add_file("tokenizer.json", b"{}")
        assert writer.commit(**COMMIT) == tmp_path / "v"
    model = PackedModel.open(tmp_path / "v", verify=True)
    assert model.nbytes == packed_size(shapes, writer.storage)
    assert model.config == config
    assert model.names() == list(shapes)
    assert model.matrix_names() == list(matrices)
    assert model.tokenizer_path.read_bytes() == b"{}"
    assert model.chat_template is None
    for name, matrix in matrices.items():
        read = model.matrix(name)
        assert (read.name, read.n, read.k, read.storage) == (name, matrix.n, matrix.k, storage)
        for stored, original in zip(read.arrays(), matrix.arrays(), strict=True):
            assert stored.dtype == original.dtype
            assert np.array_equal(stored, original)
        assert not read.q.flags.writeable
    for name, vector in vectors.items():
        assert np.array_equal(model.vector(name), vector)
    assert {path.name for path in tmp_path.iterdir()} == {"v"}


@pytest.mark.parametrize(
    "storage", [Storage("int4", 32, symmetric=False), Storage("int8", 64), Storage("bf16")], ids=str
)
def test_rows_of_a_matrix_are_a_matrix(storage: Storage) -> None:
    matrix = random_matrix("m", 6, 128, storage, np.random.default_rng(1))
    rows = matrix.rows([4, 0, 4])
    assert (rows.n, rows.k, rows.storage) == (3, 128, storage)
    assert np.array_equal(dequantize(rows), dequantize(matrix)[[4, 0, 4]])


def test_formats_may_differ_from_matrix_to_matrix(tmp_path: Path) -> None:
    storage = {"embed": Storage("int8", 64), "layers.0.q": Storage("bf16"), "layers.1.up": Storage("int4", 64, False)}
    model = PackedModel.open(write_random_packed(tmp_path / "v", small_config(), storage=storage))
    assert {name: model.storage(name) for name in storage} == storage
    assert model.storage("layers.0.k") == Storage("int4", 32)
    assert all(np.isfinite(dequantize(model.matrix(name))).all() for name in model.matrix_names())


def test_the_file_is_one_that_the_safetensors_library_reads(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    directory = write_random_packed(tmp_path / "v", small_config(), symmetric=False)
    ours, theirs = SafetensorsFile(directory / "weights.safetensors"), load_file(directory / "weights.safetensors")
    assert set(ours.tensors) == set(theirs)
    for name, array in theirs.items():
        assert np.array_equal(ours.array(name), array)


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    first, second = (write_random_packed(tmp_path / name, small_config()) for name in ("a", "b"))
    assert (first / "weights.safetensors").read_bytes() == (second / "weights.safetensors").read_bytes()


def test_opening_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    directory = write_random_packed(tmp_path / "v", small_config())
    code = (
        "import sys; from engine.packed.model import PackedModel; from engine.checkpoint import open_checkpoint\n"
        f"PackedModel.open({str(directory)!r}, verify=True).matrix('embed')\n"
        "print([name for name in ('torch', 'transformers', 'gguf', 'textual', 'safetensors') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return write_random_packed(tmp_path / "v", small_config())


def edit_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_nothing_there(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ModelNotFound, match="no packed model"):
            PackedModel.open(path)


def test_verify_finds_a_flipped_bit_in_any_file(packed: Path) -> None:
    for name in ("weights.safetensors", "tokenizer.json", "chat_template.jinja"):
        data = bytearray((packed / name).read_bytes())
        data[-1] ^= 1
        (packed / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=name):
            PackedModel.open(packed, verify=True)
        data[-1] ^= 1
        (packed / name).write_bytes(data)
    PackedModel.open(packed, verify=True)


def test_a_truncated_or_missing_file_is_named_without_verify(packed: Path) -> None:
    weights = packed / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"weights\.safetensors: \d+ bytes, the manifest says"):
        PackedModel.open(packed)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
        PackedModel.open(packed)


def test_what_is_not_a_file_is_named(packed: Path) -> None:
    tokenizer = packed / "tokenizer.json"
    edit_manifest(packed, lambda m: m["files"]["tokenizer.json"].update(bytes=0))
    tokenizer.unlink()
    os.mkfifo(tokenizer)  # reading it would wait for ever
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a file"):
        PackedModel.open(packed, verify=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.pop("config"), "missing key config"),
        (lambda m: m.update(surprise=1), "unknown key surprise"),
        (lambda m: m["config"].update(hidden_size=1 << 60), "hidden_size"),
        (lambda m: m["config"].update(num_layers=3), r"layers\.2"),
        (lambda m: m["config"].update(intermediate_size=256), r"layers\.0\.gate"),
        (lambda m: m["config"].pop("rope_theta"), "config: missing key rope_theta"),
        (lambda m: m["quantization"].update(format="int3"), "quantization: format"),
        (lambda m: m["quantization"].update(group="32"), "quantization: group"),
        (lambda m: m["source"].update(location=None), "source: location"),
        (lambda m: m["files"].update({"../../etc/passwd": m["files"]["tokenizer.json"]}), "not a file name"),
        (lambda m: m["files"].update({"/etc/passwd": m["files"]["tokenizer.json"]}), "not a file name"),
        (lambda m: m["files"].update({"extra.bin": m["files"]["tokenizer.json"]}), r"extra\.bin"),
        (lambda m: m["files"].pop("tokenizer.json"), r"missing key tokenizer\.json"),
        (lambda m: m["files"]["tokenizer.json"].update(bytes=-1), r"tokenizer\.json"),
        (lambda m: m["files"]["tokenizer.json"].update(sha256="zz"), "sha256"),
        (lambda m: m.update(name=["a"]), "name: expected text"),
    ],
)
def test_a_changed_manifest_is_refused_by_file_and_key(packed: Path, change: Any, words: str) -> None:
    edit_manifest(packed, change)
    with pytest.raises(CheckpointError, match=words) as error:
        PackedModel.open(packed)
    assert str(packed) in str(error.value)
    assert "\n" not in str(error.value)


def test_another_format_version_says_to_pack_again(packed: Path) -> None:
    edit_manifest(packed, lambda m: m.update(format_version=99))
    with pytest.raises(UnsupportedModel, match="format version 99") as error:
        PackedModel.open(packed)
    assert "flint pack" in error.value.hint


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": 1, "a": 2}', '{"a": NaN}', "[" * 100_000, "\xff"])
def test_a_manifest_that_is_not_json_is_refused(packed: Path, text: str) -> None:
    (packed / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        PackedModel.open(packed)


def test_an_enormous_manifest_is_not_read(packed: Path) -> None:
    with (packed / "manifest.json").open("ab") as file:
        file.truncate(1 << 30)  # sparse
    with pytest.raises(CheckpointError, match="larger than"):
        PackedModel.open(packed)


def test_a_scale_or_norm_that_is_not_finite_is_refused_when_read(packed: Path) -> None:
    path = packed / "weights.safetensors"
    tensors = SafetensorsFile(path).tensors
    data = bytearray(path.read_bytes())
    for name, value in (("layers.0.q.scale", np.float16(np.nan)), ("layers.1.attn_norm", np.float32(np.inf))):
        data[tensors[name].start : tensors[name].start + value.nbytes] = value.tobytes()
    path.write_bytes(data)
    model = PackedModel.open(packed)
    with pytest.raises(CheckpointError, match=r"layers\.0\.q"):
        model.matrix("layers.0.q")
    with pytest.raises(CheckpointError, match=r"layers\.1\.attn_norm"):
        model.vector("layers.1.attn_norm")
    model.matrix("layers.0.k")


# --- writing ------------------------------------------------------------------------------------------------------


def test_a_config_without_stop_token_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no end-of-text token") as error:
        write_random_packed(tmp_path / "v", small_config(eos_token_ids=()))
    assert "eos_token_id" in error.value.hint
    assert list(tmp_path.iterdir()) == []


def test_an_abandoned_writer_leaves_nothing_new_and_nothing_lost(packed: Path) -> None:
    before = {path.name: path.read_bytes() for path in packed.iterdir()}
    storage = dict.fromkeys(PackedModel.open(packed).matrix_names(), Storage("bf16"))
    with contextlib.suppress(KeyboardInterrupt), PackedWriter(packed, small_config(), storage) as writer:
        writer.add_matrix(random_matrix("embed", 320, 64, Storage("bf16"), np.random.default_rng(0)))
        raise KeyboardInterrupt
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == before
    assert [path.name for path in packed.parent.iterdir()] == [packed.name]


def test_a_full_disk_leaves_nothing_new_and_nothing_lost(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in packed.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="The disk filled up") as error:
        write_random_packed(packed, small_config(), bits=16)
    assert error.value.hint
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == before
    assert [path.name for path in packed.parent.iterdir()] == [packed.name]


def test_a_really_full_disk_is_reported(tmp_path: Path) -> None:
    """Writing to /dev/full fails as a full disk does, in the middle of the weights."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    storage = {name: Storage("bf16") for name, shape in tensor_shapes(small_config()).items() if len(shape) == 2}
    with PackedWriter(tmp_path / "v", small_config(), storage) as writer, Path("/dev/full").open("wb", 0) as full:
        writer._weights = full
        with pytest.raises(DiskFull):
            writer.add_matrix(random_matrix("embed", 320, 64, Storage("bf16"), np.random.default_rng(0)))
    assert list(tmp_path.iterdir()) == []


KILLED_WRITER = """
import os, signal, sys
sys.path.insert(0, {root!r})
import engine.packed.writer as module
from tests.synthetic import small_config, write_random_packed
where = {where!r}
original = getattr(os, where)
calls = 0
def killer(*args, **kwargs):
    global calls
    calls += 1
    if calls == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)
setattr(os, where, killer)
write_random_packed({directory!r}, small_config(), bits=16, seed=1)
print("finished")
"""


@pytest.mark.parametrize(
    ("where", "call"), [("fsync", 1), ("fsync", 3), ("fsync", 5), ("rename", 1), ("rename", 2), ("fsync", 6)]
)
def test_a_writer_killed_at_any_point_leaves_the_old_or_the_new_model(packed: Path, where: str, call: int) -> None:
    root = str(Path(__file__).parents[2])
    code = KILLED_WRITER.format(root=root, where=where, call=call, directory=str(packed))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    model = PackedModel.open(packed, verify=True)
    new = (where, call) == ("fsync", 6)  # the parent folder's, after the rename
    assert model.storage("embed") == (Storage("bf16") if new else Storage("int4", 32))
    write_random_packed(packed, small_config(), bits=8)  # and what the dead one left is not in the next one's way
    assert PackedModel.open(packed, verify=True).storage("embed") == Storage("int8", 32)
    left = {path for path in packed.parent.iterdir() if path != packed}
    assert left <= set(packed.parent.glob(LEFTOVERS))


def test_a_replacement_killed_between_its_renames_is_undone_on_opening(packed: Path) -> None:
    os.rename(packed, packed.parent / f".{packed.name}.previous")
    PackedModel.open(packed, verify=True)
    restore_interrupted(packed)
    assert [path.name for path in packed.parent.iterdir()] == [packed.name]


def test_two_writers_at_once_both_succeed_and_one_wins(packed: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.synthetic import small_config, write_random_packed\n"
        f"for i in range(10): write_random_packed({str(packed)!r}, small_config(), bits=8 if {{}} else 16, seed=i)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code.format(i)]) for i in (0, 1)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert PackedModel.open(packed, verify=True).storage("embed") in (Storage("int8", 32), Storage("bf16"))
    assert [path.name for path in packed.parent.iterdir()] == [packed.name]


def test_the_writer_takes_only_what_was_planned(tmp_path: Path) -> None:
    config = small_config()
    plan = {name: Storage("int4", 32) for name, shape in tensor_shapes(config).items() if len(shape) == 2}
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="every matrix"):
        PackedWriter(tmp_path / "v", config, {"embed": Storage("int4", 32)})
    with PackedWriter(tmp_path / "v", config, plan) as writer:
        with pytest.raises(ValueError, match="out of order"):
            writer.add_vector("final_norm", np.ones(64, np.float32))
        with pytest.raises(ValueError, match="not what was planned"):
            writer.add_matrix(random_matrix("embed", 320, 64, Storage("int8", 32), rng))
    with PackedWriter(tmp_path / "v", config, plan) as writer:
        with pytest.raises(ValueError, match="never added"):
            writer.commit(**COMMIT)
        with pytest.raises(CheckpointError, match="file name"):
            writer.add_file("../tokenizer.json", b"")
        bad = random_matrix("embed", 320, 64, Storage("int4", 32), rng)
        assert bad.scale is not None
        bad.scale[3, 1] = np.inf
        with pytest.raises(CheckpointError, match="embed"):
            writer.add_matrix(bad)
    assert list(tmp_path.iterdir()) == []
