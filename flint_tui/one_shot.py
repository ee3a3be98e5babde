"""One answer without a screen: the prompt from -p and standard input, the answer to stdout, the rest to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from engine.errors import DrafterError, FlintError, UsageError, printable
from engine.events import Finished, Note, Tokens
from flint_tui.options import ChatOptions

if TYPE_CHECKING:
    from engine.loading import Engine
    from flint_tui.conversations import Conversation, ConversationStore

OK, FAILURE, INTERRUPTED = 0, 1, 130
MAX_INPUT_BYTES = 8 << 20  # beyond any context; keeps `yes | flint chat` from filling the memory


def answer(options: ChatOptions) -> int:
    """Print the reply to `options.prompt` and piped input; returns the exit code. Raises FlintError before any text."""
    prompt = _prompt(options.prompt)
    thread = _Thread(options)
    engine = _open(options)
    try:
        with _interruptible() as cancel:
            reply = _stream(engine, thread.messages(prompt), options, cancel)
        if reply.end.reason == "error" and not reply.ids:
            raise FlintError(reply.end.error, reply.end.hint)
        if options.json:
            utf8 = (sys.stdout.encoding or "utf-8").lower() in ("utf-8", "utf8")
            text = json.dumps(_figures(engine, options, reply), ensure_ascii=not utf8)
            reply.broken |= not _write(sys.stdout, text + "\n")
        if not reply.broken:
            thread.save(engine.name, prompt, reply)
            _report(engine, options, reply)
        return _exit_code(reply)
    finally:
        engine.close()


@dataclass
class _Reply:
    """What came of a reply. broken: stdout was closed by its reader."""

    ids: list[int]
    text: str
    end: Finished
    broken: bool = False


def _open(options: ChatOptions) -> Engine:
    from engine.loading import open_engine

    with contextlib.ExitStack() as bars:
        shown: list[Any] = []

        def progress(state: Any) -> None:
            if not shown:  # Rich is imported only when there is something to show
                from flint_tui.pack_progress import show_progress

                shown.append(bars.enter_context(show_progress()))
            shown[0](state)

        return open_engine(
            options.model, options.backend, options.threads, options.context, notify=_note, progress=progress
        )


def _stream(engine: Engine, messages: list[dict[str, str]], options: ChatOptions, cancel: threading.Event) -> _Reply:
    """Decode the reply; its text goes to stdout as it comes, unless an object is wanted."""
    from engine.loading import ReplyOptions

    wanted = ReplyOptions(
        mode=options.mode,
        drafter=options.drafter,
        sampling=options.sampling(engine.default_sampling),
        max_tokens=options.max_tokens,
    )
    show = _Shower(sys.stdout)
    ids: list[int] = []
    text = ""
    late: list[str] = []  # on a terminal a note would stand in the middle of a line of the answer
    for event in engine.reply(messages, wanted, cancel):
        match event:
            case Tokens():
                ids += event.ids
                text += event.text
                if not options.json and not show(event.text):
                    cancel.set()
            case Note() if text:
                late.append(event.text)
            case Note():
                _note(event.text)
            case Finished():
                if not options.json and text:
                    show.end(newline=not text.endswith("\n"))
                for line in late:
                    _note(line)
                return _Reply(ids, text, event, show.broken)
            case _:
                pass  # prefill progress: nothing to see without a screen
    raise FlintError("The decoder stopped without saying why")


class _Shower:
    """Writes a reply's text; harmless to a terminal, verbatim to a file or a pipe."""

    def __init__(self, stream: TextIO) -> None:
        self.broken = False
        self._stream = stream
        self._printable = None
        if stream.isatty():
            from flint_tui.text.safety import PrintableStream

            self._printable = PrintableStream()

    def __call__(self, text: str) -> bool:
        """False once nobody reads any more."""
        self.broken = self.broken or not _write(self._stream, self._printable.feed(text) if self._printable else text)
        return not self.broken

    def end(self, newline: bool) -> None:
        rest = self._printable.close() if self._printable else ""
        self.broken = self.broken or not _write(self._stream, rest + ("\n" if newline else ""))


def _write(stream: TextIO, text: str) -> bool:
    """Write and flush. False when the reader has gone."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        return False
    return True


# --- the prompt and the conversation ----------------------------------------------------------------------------------


def _prompt(given: str | None) -> str:
    """-p, a blank line, and what is piped in; either may be missing, not both."""
    piped = _piped()
    parts = [part for part in (given, piped) if part and part.strip()]
    if not parts:
        raise UsageError("There is no prompt", "Give one with -p TEXT, or pipe it in.")
    if piped is not None and not piped.strip():
        _note("nothing was piped in: the answer is to -p alone")
    return "\n\n".join(part.rstrip("\n") for part in parts)


def _piped() -> str | None:
    """Standard input to its end where it is a pipe, a socket or a file; None where it is not: a terminal or /dev/null
    has nothing to say."""
    if sys.stdin is None or sys.stdin.closed:
        return None
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
        if stat.S_ISCHR(kind):
            return None
        data = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    except (OSError, ValueError):
        return None
    if len(data) > MAX_INPUT_BYTES:
        raise UsageError(
            f"Standard input is longer than {MAX_INPUT_BYTES >> 20} MiB, and than any context", "pipe in less of it"
        )
    return data.decode("utf-8", errors="replace")


class _Thread:
    """The saved conversation that is continued, if one is."""

    def __init__(self, options: ChatOptions) -> None:
        self._system = options.system
        self._store: ConversationStore | None = None
        if options.resume is None:
            return
        from flint_tui.conversations import ConversationStore

        self._store = ConversationStore(on_error=_note)
        self._conversation: Conversation = self._store.find(options.resume)
        self._past = self._store.messages(self._conversation.id)
        if self._system is None:
            self._system = self._conversation.system

    def messages(self, prompt: str) -> list[dict[str, str]]:
        """What the chat template is given."""
        turns = [{"role": "system", "content": self._system}] if self._system else []
        if self._store is not None:
            turns += [{"role": message.role, "content": message.text} for message in self._past]
        return [*turns, {"role": "user", "content": prompt}]

    def save(self, model: str, prompt: str, reply: _Reply) -> None:
        """Add the turn to the conversation that was resumed; any other is not kept."""
        if self._store is None:
            return
        from flint_tui.conversations import Message

        turn = [Message("user", prompt), Message("assistant", reply.text, reason=reply.end.reason)]
        for position, message in enumerate(turn, start=len(self._past)):
            self._store.save(self._conversation.id, position, message)
        self._store.update(self._conversation.id, model=model)
        self._store.flush()
        self._store.close()


# --- how it ends ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl+C sets the event and the reply ends within one step; a second one interrupts whatever is running."""
    cancel = threading.Event()

    def stop(number: int, frame: object) -> None:
        cancel.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, before)


def _exit_code(reply: _Reply) -> int:
    if reply.end.reason == "error":
        _note(reply.end.error, *([reply.end.hint] if reply.end.hint else []))
        return FAILURE
    if reply.broken:
        return FAILURE
    return INTERRUPTED if reply.end.reason == "cancelled" else OK


def _note(line: str, *more: str) -> None:
    for text in (f"flint: {line}", *(f"       {hint}" for hint in more)):
        print(printable(text), file=sys.stderr, flush=True)  # a note may quote a file's name


def _figures(engine: Engine, options: ChatOptions, reply: _Reply) -> dict[str, Any]:
    """The object of --json. The names are stable."""
    usage = reply.end.usage
    bandwidth = usage.bandwidth_gb_s
    peak = engine.bandwidth(bandwidth)
    return {
        "model": engine.name,
        "backend": engine.backend.name,
        "mode": options.mode,
        "drafter": _drafter_name(engine, options),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "token_ids": reply.ids,
        "text": reply.text,
        "finish_reason": reply.end.reason,
        "ttft_s": usage.ttft_s,
        "prefill_tok_s": usage.prefill_tok_s,
        "decode_tok_s": usage.decode_tok_s,
        "bytes_per_token": usage.bytes_per_token,
        "mbu": bandwidth / peak.gb_s if bandwidth is not None and peak is not None else None,
        "bandwidth_gb_s": bandwidth,
        "peak_gb_s": peak.gb_s if peak else None,
        "peak_source": peak.source if peak else None,
        "acceptance_length": usage.acceptance_length,
        "accepted_per_position": list(usage.accepted_per_position),
    }


def _drafter_name(engine: Engine, options: ChatOptions) -> str | None:
    """Who drafted; None in single pass, and where no drafter could be had (a note has said so)."""
    if options.mode != "speculative":
        return None
    try:
        return engine.drafters(options.drafter)[0].name
    except DrafterError:
        return None


def _report(engine: Engine, options: ChatOptions, reply: _Reply) -> None:
    """Statistics, one line on stderr: by default where that is a terminal; --stats and --no-stats decide otherwise."""
    if sys.stderr is None or not (sys.stderr.isatty() if options.stats is None else options.stats):
        return
    print("; ".join(_statistics(engine, reply)), file=sys.stderr)


def _statistics(engine: Engine, reply: _Reply) -> list[str]:
    usage = reply.end.usage
    parts = [f"{engine.name} on {engine.backend.description}"]
    parts.append(f"{usage.prompt_tokens} + {usage.completion_tokens} tokens, first after {usage.ttft_s:.2f} s")
    bandwidth = usage.bandwidth_gb_s
    if usage.decode_tok_s and usage.bytes_per_token and bandwidth:
        parts.append(f"{usage.decode_tok_s:.1f} tok/s at {usage.bytes_per_token / 1e6:.1f} MB/token")
        peak = engine.bandwidth(bandwidth)
        share = f" = {bandwidth / peak.gb_s:.0%} of {peak.gb_s:.1f} GB/s ({peak.source})" if peak else ""
        parts.append(f"{bandwidth:.1f} GB/s{share}")
    if usage.acceptance_length:
        parts.append(f"acceptance length {usage.acceptance_length:.2f}")
    return parts
