"""Measures the app on a pseudo-terminal and prints the figures; run by hand, on a quiet machine.

    python -m tests.flint_tui.measure_app [MEASURE...]

The decoder is a fake whose steps are native work of a fixed length, so only the app is measured; real_throughput, which
runs only when named, decodes with the default model. Each measure ends with what other processes took of the machine
meanwhile: above a few per cent the figures are theirs, not the app's, unless it runs as root on Linux and goes first.
"""

from __future__ import annotations

import atexit
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engine.files.paths import cache_dir
from flint_tui.decode_thread import EngineThread
from flint_tui.engine_door import ChatEngine, TurnOptions
from tests.flint_tui.run_fake import PacedEngine, TimedEngine
from tests.flint_tui.terminal import Terminal, fake_app

READY = "msk anything"  # a style ends before it: the cursor stands on the first letter, so keys arrive
SECONDS = 5.0
PROMPT = "Tell me all about stones"
PAIRS = 9  # off/on, at most
QUIET_PAIRS = 5  # enough of them
QUIET = 0.03  # of the machine, for others


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@contextmanager
def app(**options: Any) -> Iterator[tuple[Terminal, Path]]:
    """A running app, ready for input, and its log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        home = options.pop("home", folder)
        environment: dict[str, str] = {f"FLINT_{kind}_DIR": f"{home}/{kind}" for kind in ("DATA", "CONFIG", "CACHE")}
        if "model" in options:
            environment["FLINT_CACHE_DIR"] = str(cache_dir())
        with fake_app({**options, "log": str(log)}, (120, 36), ignore_hangup=False, **environment) as terminal:
            go_first(terminal.process.pid)
            yield terminal, log


def entries(log: Path, what: str) -> list[dict[str, Any]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [entry for line in lines if (entry := json.loads(line))["what"] == what]


def wait_entry(log: Path, what: str, count: int = 1) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while len(found := entries(log, what)) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.1)  # reading the log more often takes the app's CPU time
    return found[count - 1]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def go_first(pid: int | str, nice: int = -15) -> None:
    """Put the process's session before others on a busy machine, where one may (Linux, as root)."""
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def machine_seconds() -> float:
    """CPU time that all processes have used."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split(None, 11)[1:11])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def others_since() -> Callable[[], float]:
    """Call what it returns for the share of the machine that other processes have used since."""
    machine, own, began = machine_seconds(), sum(os.times()[:4]), time.monotonic()

    def share() -> float:
        used = machine_seconds() - machine - (sum(os.times()[:4]) - own)
        return max(0.0, used) / (time.monotonic() - began) / (os.cpu_count() or 1)

    return share


def rate_of(reply: dict[str, Any]) -> float:
    return (reply["tokens"] - 1) / (reply["last"] - reply["first"])


def rate_without_screen(engine: ChatEngine, found: dict[str, Any]) -> float:
    """In the thread that decodes for the app, which nobody disturbs."""
    thread = EngineThread(lambda model, say: engine)
    thread.load(None)
    thread.reply(1, [{"role": "user", "content": PROMPT}], TurnOptions())
    while thread.busy:
        time.sleep(0.1)
    thread.close()
    return rate_of(found)


def rate_with_screen(options: dict[str, Any]) -> float:
    with app(**options) as (terminal, log):
        terminal.wait_for(READY)
        wait_entry(log, "loaded")
        terminal.type(f"{PROMPT}\r")
        return rate_of(wait_entry(log, "reply"))


def compare(name: str, options: dict[str, Any], engine: Callable[[dict[str, Any], Any], ChatEngine]) -> None:
    """Pairs off/on; a busy machine slows the process with more threads, so the pairs of its quietest moments count."""
    pairs: list[tuple[float, float, float]] = []
    while len(pairs) < PAIRS and sum(others < QUIET for others, _, _ in pairs) < QUIET_PAIRS:
        share = others_since()
        found: dict[str, Any] = {}
        off = rate_without_screen(engine(options, lambda what, _found=found, **values: _found.update(values)), found)
        on = rate_with_screen(options)
        pairs.append((share(), off, on))
    pairs = sorted(pairs)[:QUIET_PAIRS]
    off, on = (statistics.median(pair[i] for pair in pairs) for i in (1, 2))
    ratio = statistics.median(pair[2] / pair[1] for pair in pairs)
    print(f"{name}: {off:.0f} tok/s off, {on:.0f} on, {ratio:.3f}, median of {len(pairs)} pairs "
          f"(others {pairs[0][0]:.0%} to {pairs[-1][0]:.0%})")  # fmt: skip


def throughput() -> None:
    for rate in (600, 2000):
        compare(f"throughput at {rate} tok/s", {"rate": rate, "tokens": int(rate * SECONDS)}, PacedEngine)


def real_throughput() -> None:
    """The CPU decoder and the packed default model; only on request."""
    compare("throughput of the CPU decoder", {"model": "smollm2-135m-instruct", "tokens": 600}, TimedEngine)


def escape_latency() -> None:
    latencies = []
    with app(rate=600) as (terminal, log):
        terminal.wait_for(READY)
        wait_entry(log, "loaded")
        for count in range(1, 11):
            terminal.type("go\r")
            time.sleep(1.5)
            pressed = terminal.type("\x1b")
            latencies.append(wait_entry(log, "reply", count)["last"] - pressed)
            time.sleep(0.5)
    print(f"Esc to the last token at 600 tok/s: median {statistics.median(latencies) * 1e3:.0f}, "
          f"worst of {len(latencies)} {max(latencies) * 1e3:.0f} ms")  # fmt: skip


def key_echo() -> None:
    letters = "абвгдежзиклмнопрстуфхцчшщэюя"
    delays = []
    with app(rate=600) as (terminal, log):
        terminal.wait_for(READY)
        wait_entry(log, "loaded")
        terminal.type("go\r")
        time.sleep(1.0)
        for i in range(200):
            letter = letters[i % len(letters)]
            since = len(terminal.output)
            pressed = terminal.type(letter)
            delays.append(terminal.wait_for(letter, since, 5.0) - pressed)
            if i % len(letters) == len(letters) - 1:
                terminal.type("\x15")  # empty the line, so that the letters can come again
                time.sleep(0.3)
            time.sleep(0.03)
    print(f"key echo while streaming at 600 tok/s: median {statistics.median(delays) * 1e3:.0f}, "
          f"p99 {percentile(delays, 0.99) * 1e3:.0f} ms")  # fmt: skip


def first_paint() -> None:
    times = []
    for _ in range(5):
        with app() as (terminal, _):
            times.append(terminal.wait_for(READY) - terminal.started)
    print(f"first paint from process start: median {statistics.median(times):.2f} s, worst {max(times):.2f} s")


def leaving() -> None:
    """Ctrl+Q to the end of the process, in states that do not look at the cancel flag."""
    for state, options in (
        ("idle", {}),
        ("decoding", {"rate": 600}),
        ("in a prefill of 600 s", {"prefill_s": 600}),
        ("loading for 600 s", {"load_s": 600}),
    ):
        with app(**options) as (terminal, log):
            terminal.wait_for(READY)
            if state != "loading for 600 s":
                wait_entry(log, "loaded")
                if state != "idle":
                    terminal.type("go\r")
            time.sleep(1.5)
            pressed = terminal.type("\x11")
            terminal.wait()
            took = time.monotonic() - pressed
            print(
                f"leaving while {state}: {took * 1e3:.0f} ms, terminal {'restored' if terminal.restored else 'BROKEN'}"
            )


def idle_cpu() -> None:
    with app(tokens=400) as (terminal, log):
        terminal.wait_for(READY)
        terminal.type("go\r")
        wait_entry(log, "reply")
        time.sleep(2)
        before = cpu_seconds(terminal.process.pid)
        time.sleep(15)
        print(f"idle: {(cpu_seconds(terminal.process.pid) - before) / 15:.2%} of a core")


def long_conversations() -> None:
    """CPU per second of streaming at 200 tok/s after conversations of different lengths."""
    from flint_tui.conversations import ConversationStore, Message

    answer = (
        "Some *prose* about it:\n\n1. one\n2. two\n\n```python\nfor i in range(10):\n    print(i)\n```\n\n"
        + "Words. " * 80
    )
    for messages in (0, 50, 200, 1000):
        with tempfile.TemporaryDirectory() as home:
            store = ConversationStore(Path(home) / "DATA" / "conversations.db")
            conversation = store.create("fake")
            for i in range(messages):
                store.save(
                    conversation.id, i, Message("assistant" if i % 2 else "user", answer if i % 2 else "And then?")
                )
            store.flush()
            store.close()
            with app(home=home, resume=conversation.id, rate=200) as (terminal, log):
                shown = terminal.wait_for(READY) - terminal.started
                wait_entry(log, "loaded")
                terminal.type("go\r")
                time.sleep(2)
                before = cpu_seconds(terminal.process.pid)
                time.sleep(SECONDS)
                used = (cpu_seconds(terminal.process.pid) - before) / SECONDS
                print(f"after {messages:>4} messages: {used:.1%} of a core at 200 tok/s, shown after {shown:.2f} s")


def long_reply() -> None:
    """CPU per second over one reply of 30,000 tokens at 1,000 tok/s, half of it inside one code fence."""
    words = ["```python\n", *["    x = f(1)  # and so on\n", "    y", " = g(2)\n"] * 200]
    for name, script in (("prose", None), ("one open fence", words)):
        options = {"rate": 1000, "tokens": 30_000, **({"words": script} if script else {})}
        with app(**options) as (terminal, log):
            terminal.wait_for(READY)
            wait_entry(log, "loaded")
            terminal.type("go\r")
            shares = []
            for _ in range(5):
                before = cpu_seconds(terminal.process.pid)
                time.sleep(5)
                shares.append((cpu_seconds(terminal.process.pid) - before) / 5)
            wait_entry(log, "reply")
            steps = ", ".join(f"{share:.0%}" for share in shares)
            print(f"30,000 tokens at 1,000 tok/s, {name}: {steps} of a core (each 5 s)")


ALL = (
    throughput,
    real_throughput,
    escape_latency,
    key_echo,
    first_paint,
    leaving,
    idle_cpu,
    long_conversations,
    long_reply,
)


def main() -> None:
    wanted = sys.argv[1:]
    go_first("self")
    atexit.register(go_first, "self", 0)
    for measure in ALL:
        if measure.__name__ in wanted or not (wanted or measure is real_throughput):
            share = others_since()
            measure()
            print(f"    others: {share():.0%} of the machine", flush=True)


if __name__ == "__main__":
    main()
