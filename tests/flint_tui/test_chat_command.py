"""`flint chat` without a screen: what goes where, and how it ends. The first part runs in this process on a scripted
backend, the second in real processes on a small random model."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from engine.decoder import Decoder
from engine.errors import ContextOverflow, FlintError, UsageError
from engine.events import Event, Note, Tokens
from engine.files.paths import models_dir
from engine.loading import Engine
from engine.machine.hardware import Bandwidth
from engine.packed.model import PackedModel
from engine.sampling import Sampling
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from flint_tui import one_shot
from flint_tui.cli import app
from flint_tui.conversations import ConversationStore, Message
from flint_tui.options import ChatOptions
from flint_tui.text.safety import printable
from tests.fake_backend import FakeBackend
from tests.synthetic import small_config, write_random_packed

JSON_KEYS = [
    "model", "backend", "mode", "drafter", "prompt_tokens", "completion_tokens", "token_ids", "text", "finish_reason",
    "ttft_s", "prefill_tok_s", "decode_tok_s", "bytes_per_token", "mbu", "bandwidth_gb_s", "peak_gb_s", "peak_source",
    "acceptance_length", "accepted_per_position",
]  # fmt: skip


class Scripted(FakeBackend):
    """Writes `text` after the chat template's assistant header, then its stop token; remembers every prompt."""

    HEADER = (1, *(3 + byte for byte in b"assistant\n"))

    def __init__(self, text: str, **options: Any) -> None:
        reply = [*(3 + byte for byte in text.encode()), 2]

        def logits(tokens: Sequence[int]) -> np.ndarray:
            row = np.zeros(259, np.float32)
            start = len(tokens) - 1 - list(reversed(tokens)).index(1) + len(self.HEADER)
            row[reply[min(max(len(tokens) - start, 0), len(reply) - 1)]] = 10
            return row

        self.prompts: list[list[int]] = []
        super().__init__(logits, **options)

    def step(self, tokens, *, logits="all", features=()):
        out = super().step(tokens, logits=logits, features=features)
        if tuple(self.tokens[-len(self.HEADER) :]) == self.HEADER:
            self.prompts.append(list(self.tokens))
        return out


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scripted]:
    """Makes `open_engine` open a scripted backend that writes the given text."""
    model = PackedModel.open(write_random_packed(tmp_path / "scripted", small_config(vocab_size=259), name="scripted"))
    monkeypatch.setattr("engine.loading.streaming_bandwidth", lambda seen: Bandwidth(20.0, "measured, by nobody"))
    monkeypatch.setattr(one_shot, "_piped", lambda: None)

    def make(text: str, **options: Any) -> Scripted:
        settings: dict[str, Any] = {"context_size": 512, "chunk": 512}
        backend = Scripted(text, **(settings | options))
        tokenizer = Tokenizer.from_packed(model)
        template = ChatTemplate.from_packed(model, tokenizer)
        engine = Engine(model, backend, tokenizer, template, Decoder(backend, tokenizer))
        monkeypatch.setattr("engine.loading.open_engine", lambda *arguments, **named: engine)
        return backend

    return make


def prompt_text(backend: Scripted) -> str:
    """The last prompt, its special tokens as signs."""
    names = {0: "<end>", 1: "<start>", 2: "<stop>"}
    return b"".join(names.get(i, "").encode() or bytes([i - 3]) for i in backend.prompts[-1]).decode()


def test_the_answer_alone_goes_to_stdout(scripted, capsys):
    backend = scripted("Paris.")
    assert one_shot.answer(ChatOptions(prompt="Capital?")) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("Paris.\n", "")
    assert "Capital?" in prompt_text(backend)


def test_an_answer_that_ends_its_line_gets_no_second_one(scripted, capsys):
    scripted("Paris.\n")
    one_shot.answer(ChatOptions(prompt="Capital?"))
    assert capsys.readouterr().out == "Paris.\n"


def test_the_figures_go_to_stderr_when_asked(scripted, capsys):
    scripted("Paris, of course.")
    assert one_shot.answer(ChatOptions(prompt="Capital?", stats=True)) == 0
    out, err = capsys.readouterr()
    assert out == "Paris, of course.\n"
    assert err.startswith("scripted on fake; ")
    assert re.search(r"\d+ \+ 18 tokens, first after \d+\.\d\d s; [\d.]+ tok/s at 0\.0 MB/token; ", err)
    assert "of 20.0 GB/s (measured, by nobody)" in err
    assert err.count("\n") == 1


def test_json_is_one_object_with_the_names_of_the_design(scripted, capsys):
    scripted("Paris.")
    assert one_shot.answer(ChatOptions(prompt="Capital?", json=True)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    found = json.loads(out)
    assert list(found) == JSON_KEYS
    assert found["model"] == "scripted"
    assert (found["backend"], found["mode"], found["drafter"]) == ("fake", "single", None)
    assert found["token_ids"] == [3 + byte for byte in b"Paris."] + [2]
    assert (found["text"], found["finish_reason"], found["completion_tokens"]) == ("Paris.", "stop", 7)
    assert (found["peak_gb_s"], found["peak_source"]) == (20.0, "measured, by nobody")
    assert found["mbu"] == pytest.approx(found["bandwidth_gb_s"] / 20.0)
    assert found["bandwidth_gb_s"] == pytest.approx(found["bytes_per_token"] * found["decode_tok_s"] / 1e9)
    assert found["acceptance_length"] is None
    assert found["accepted_per_position"] == []


def test_json_of_a_speculative_reply(scripted, capsys):
    scripted("ab ab ab ab ab ab ab")
    one_shot.answer(ChatOptions(prompt="x", json=True, mode="speculative"))
    found = json.loads(capsys.readouterr().out)
    assert (found["mode"], found["drafter"], found["text"]) == ("speculative", "ngram", "ab ab ab ab ab ab ab")


def test_json_without_the_drafter_that_was_asked_for(scripted, capsys):
    scripted("Paris.")
    options = ChatOptions(prompt="x", json=True, mode="speculative", drafter="eagle")
    assert one_shot.answer(options) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["mode"], found["drafter"], found["text"]) == ("speculative", None, "Paris.")
    assert err == "flint: Speculation is off: scripted has no learned drafter\n"


def test_control_characters_reach_a_file_but_not_a_terminal(scripted, capsys, monkeypatch):
    nasty = "a\x1b]0;owned\x07b\x1b[31mred\x1b[0m\x9b2Jc\x08\u202ed"
    scripted(nasty)
    one_shot.answer(ChatOptions(prompt="x"))
    assert capsys.readouterr().out == nasty + "\n"
    scripted(nasty)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    one_shot.answer(ChatOptions(prompt="x"))
    shown = capsys.readouterr().out
    assert shown.startswith("abred")
    assert printable(shown) == shown


def test_prompt_and_piped_text_are_joined(scripted, monkeypatch):
    backend = scripted("ok")
    monkeypatch.setattr(one_shot, "_piped", lambda: "line 1\nline 2\n")
    one_shot.answer(ChatOptions(prompt="Summarise:"))
    assert "Summarise:\n\nline 1\nline 2<stop>" in prompt_text(backend)
    backend = scripted("ok")
    one_shot.answer(ChatOptions())
    assert "user\nline 1\nline 2<stop>" in prompt_text(backend)


@pytest.mark.parametrize("piped", ["", "\n \n"])
def test_an_empty_pipe_is_told(piped: str, scripted, monkeypatch, capsys):
    """`git diff | flint chat -p "Write a commit message"` where nothing has changed."""
    backend = scripted("ok")
    one_shot.answer(ChatOptions(prompt="Summarise:"))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(one_shot, "_piped", lambda: piped)
    backend = scripted("ok")
    one_shot.answer(ChatOptions(prompt="Summarise:"))
    assert "user\nSummarise:<stop>" in prompt_text(backend)
    assert capsys.readouterr().err == "flint: nothing was piped in: the answer is to -p alone\n"


@pytest.mark.parametrize("prompt", [None, "", " \n"])
def test_no_prompt_is_a_usage_error(prompt, scripted):
    scripted("never")
    with pytest.raises(UsageError, match="There is no prompt"):
        one_shot.answer(ChatOptions(prompt=prompt))


def test_a_note_does_not_stand_within_the_answer(scripted, monkeypatch):
    scripted("one two")
    honest = Engine.reply

    def reply(self: Engine, *arguments: Any) -> Iterator[Event]:
        yield Note("before")
        for event in honest(self, *arguments):
            yield event
            if isinstance(event, Tokens):
                yield Note("within")

    monkeypatch.setattr(Engine, "reply", reply)
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert one_shot.answer(ChatOptions(prompt="x", max_tokens=7, temperature=0.0)) == 0
    said = terminal.getvalue().splitlines()
    assert said[:2] == ["flint: before", "one two"]
    assert set(said[2:]) == {"flint: within"}


def test_what_counts_as_piped(tmp_path, monkeypatch):
    """A file or a pipe is read to its end; a terminal, /dev/null and a closed stdin hold no prompt."""

    def piped(file: Any) -> str | None:
        monkeypatch.setattr(sys, "stdin", file)
        return one_shot._piped()

    (tmp_path / "text").write_bytes(b"caf\xc3\xa9 \xff")
    with open(tmp_path / "text") as file:
        assert piped(file) == "café \ufffd"
    reading, writing = os.pipe()
    os.write(writing, b"from a pipe")
    os.close(writing)
    with open(reading) as file:
        assert piped(file) == "from a pipe"
    with open(os.devnull) as file:
        assert piped(file) is None
    assert piped(file) is None  # closed
    assert piped(None) is None
    monkeypatch.setattr(one_shot, "MAX_INPUT_BYTES", 4)
    with open(tmp_path / "text") as file, pytest.raises(UsageError, match="Standard input is longer"):
        piped(file)


def test_sampling_is_the_model_s_own_but_for_what_was_asked():
    default = Sampling(temperature=0.2, top_p=0.9, seed=5)
    asked = ChatOptions(temperature=0.7, min_p=0.05, seed=1).sampling(default)
    assert asked == Sampling(temperature=0.7, top_p=0.9, min_p=0.05, seed=1)
    seeds = {ChatOptions().sampling(default).seed for _ in range(3)}
    assert len(seeds) == 3  # without a seed, another reply every time


def test_the_system_prompt_comes_first(scripted):
    backend = scripted("ok")
    one_shot.answer(ChatOptions(prompt="x", system="Be brief."))
    assert prompt_text(backend).startswith("<start>system\nBe brief.<stop>\n<start>user\nx<stop>")


def test_a_prompt_longer_than_the_context_is_one_line(scripted, capsys):
    scripted("never", context_size=20)
    with pytest.raises(FlintError, match=r"^The prompt has \d+ tokens, the context holds 20$") as failure:
        one_shot.answer(ChatOptions(prompt="a long prompt"))
    assert "--ctx" in failure.value.hint
    assert capsys.readouterr().out == ""
    assert issubclass(ContextOverflow, FlintError)


def test_a_failure_in_the_middle_keeps_what_came(scripted, capsys):
    scripted("Paris is the capital of France.", fail_at=50)
    assert one_shot.answer(ChatOptions(prompt="Capital?")) == 1
    out, err = capsys.readouterr()
    assert out.startswith("Paris")
    assert out.endswith("\n")
    assert err == "flint: The device was lost\n       Restart it.\n"


def test_options_reach_the_decoder(scripted, capsys):
    scripted("abcdefghijkl")
    one_shot.answer(ChatOptions(prompt="x", json=True, max_tokens=5, temperature=0.0))
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["finish_reason"]) == ("abcde", "length")


def test_a_resumed_conversation_is_continued_and_saved(scripted, capsys):
    store = ConversationStore()
    conversation = store.create("scripted", system="Be kind.")
    store.save(conversation.id, 0, Message("user", "first"))
    store.save(conversation.id, 1, Message("assistant", "reply"))
    store.flush()
    backend = scripted("second reply")
    assert one_shot.answer(ChatOptions(prompt="second", resume="")) == 0
    text = prompt_text(backend)
    assert "Be kind." in text
    assert text.index("first") < text.index("reply") < text.index("second")
    messages = store.messages(conversation.id)
    assert [(m.role, m.text) for m in messages] == [
        ("user", "first"),
        ("assistant", "reply"),
        ("user", "second"),
        ("assistant", "second reply"),
    ]
    assert messages[-1].reason == "stop"
    with pytest.raises(FlintError, match="No conversation 'zzz'"):
        one_shot.answer(ChatOptions(prompt="x", resume="zzz"))
    store.close()


def test_without_resume_nothing_is_saved(scripted):
    scripted("ok")
    one_shot.answer(ChatOptions(prompt="x"))
    store = ConversationStore()
    assert store.search() == []
    store.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--temperature", "-1"],
        ["--top-p", "2"],
        ["--min-p", "x"],
        ["--mode", "fast"],
        ["--drafter", "magic"],
        ["--backend", "tpu"],
        ["--threads", "0"],
        ["--ctx", "0"],
        ["--max-tokens", "0"],
        ["--seed", "-1"],
    ],
)
def test_options_out_of_range_are_usage_errors(arguments):
    result = CliRunner().invoke(app, ["chat", "-p", "x", *arguments])
    assert result.exit_code == 2 or isinstance(result.exception, UsageError)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--resume"], (None, "", "x")),
        (["--resume", "abc"], (None, "abc", "x")),
        (["--resume", "--json"], (None, "", "x")),
        (["model", "--resume"], ("model", "", "x")),
        ([], (None, None, "x")),
    ],
)
def test_resume_with_and_without_an_id(arguments, wanted, monkeypatch):
    seen: list[ChatOptions] = []
    monkeypatch.setattr(one_shot, "answer", lambda options: seen.append(options) or 0)
    result = CliRunner().invoke(app, ["chat", "-p", "x", *arguments])
    assert result.exit_code == 0, result.output
    assert (seen[0].model, seen[0].resume, seen[0].prompt) == wanted


def test_ctrl_c_while_loading(monkeypatch):
    def interrupted(*arguments: object, **named: object) -> Engine:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.loading.open_engine", interrupted)
    result = CliRunner().invoke(app, ["chat", "-p", "x"])
    assert (result.exit_code, result.output) == (130, "")


# --- real processes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def model() -> str:
    """A packed random model whose greedy reply never stops by itself: it loops."""
    config = small_config(vocab_size=259, eos_token_ids=(258,), max_position_embeddings=200_000)
    write_random_packed(models_dir() / "endless" / "int4-g32", config, name="endless")
    return "endless"


def flint(*arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "flint_tui.cli", "chat", "--backend", "torch", "--threads", "1"]
    command += ["--temperature", "0", *arguments]
    return subprocess.Popen(command, env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_an_interrupt_while_the_program_is_imported_ends_it_quietly() -> None:
    program = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == WHERE:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from flint_tui.cli import main
main()
"""
    for where in ("typer", "flint_tui.commands.roofline"):
        command = [sys.executable, "-c", program.replace("WHERE", repr(where))]
        process = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (process.returncode, process.stdout, process.stderr) == (130, "", "")


def test_a_process_reads_a_pipe_and_writes_an_object(model):
    process = flint(model, "--json", "--max-tokens", "4", stdin=subprocess.PIPE)
    out, err = process.communicate(b"Hello\n", timeout=120)
    assert (process.returncode, err) == (0, b"")
    found = json.loads(out)
    assert list(found) == JSON_KEYS
    assert (found["model"], found["backend"], len(found["token_ids"])) == ("endless", "torch", 4)
    assert found["peak_source"].startswith("measured streaming read")


def test_ctrl_c_ends_the_reply_and_keeps_what_came(model):
    process = flint(model, "-p", "Hello", "--stats")
    assert process.stdout is not None
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first) == 20
    assert out.endswith(b"\n")
    assert err.startswith(b"endless on torch")
    assert b"Traceback" not in err


def test_a_closed_pipe_is_no_news(model):
    process = flint(model, "-p", "Hello")
    assert process.stdout is not None
    assert process.stdout.read(5)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 1


def test_failures_are_one_line_and_exit_code_1(model):
    process = flint("endles", "-p", "Hello")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, b"")
    assert err.splitlines()[0] == b"flint: No packed model named 'endles'"
    assert b"endless" in err
    assert b"Traceback" not in err
