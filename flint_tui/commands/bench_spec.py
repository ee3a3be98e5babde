"""`flint bench spec`: single pass against speculation on real prompts, by kind of work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flint_tui.commands.chat import BackendChoice, DrafterChoice

if TYPE_CHECKING:
    from engine.bench.speculation import DomainResult


def spec(
    model: Annotated[str | None, typer.Argument(help="A packed model, a directory or a GGUF file.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL of domain and text. Default: held-out prompts.")] = None,
    drafter: Annotated[DrafterChoice, typer.Option(help="Who drafts.")] = DrafterChoice.auto,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each domain.")] = None,
    rounds: Annotated[int, typer.Option("-r", "--rounds", min=1, max=100)] = 3,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", min=2)] = 128,
    draft_tokens: Annotated[int | None, typer.Option(min=1, max=15, help="Fixed; default: adapted as it goes.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy, and the answers must be equal.")] = 0.0,
    backend: Annotated[BackendChoice, typer.Option(help="Where to decode.")] = BackendChoice.auto,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the cpu and torch backends.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead, with every prompt's seconds.")] = False,
) -> None:
    """Both modes on the same prompts, in alternating order: ratio with its 95 % interval, worst prompt, acceptance.

    Exit code 1 where a greedy answer differs between the modes.
    """
    import json
    from dataclasses import asdict

    from engine.bench.speculation import measure, result_json, results
    from engine.drafting.prompts import load_prompts
    from engine.errors import BackendError
    from engine.loading import ReplyOptions
    from engine.sampling import Sampling
    from flint_tui.commands.bench import note, open_shown, say_if_busy, status

    asked = load_prompts(prompts, limit=limit)
    busy = say_if_busy()
    engine = open_shown(model, backend.value, threads)
    options = ReplyOptions(
        drafter=drafter.value,
        sampling=Sampling(temperature=temperature),
        max_tokens=max_tokens,
        draft_tokens=draft_tokens,
    )
    try:
        with status() as say:
            pairs = measure(engine, asked, options, rounds, lambda done, total: say(f"answer {done} of {total}"))
        name, described = engine.name, engine.backend.description
    finally:
        engine.close()
    timed = [pair for pair in pairs if pair.timeable]
    if not timed:
        raise BackendError("No reply was long enough to be timed", "Give other --prompts, or more --max-tokens.")
    if len(timed) < len(pairs):
        note(
            f"{len(pairs) - len(timed)} of {len(pairs)} replies are too short to be timed; only their text is compared"
        )
    rows = results(timed)
    if as_json:
        head = {"model": name, "backend": described, "drafter": drafter.value, "draft_tokens": draft_tokens}
        head |= {"temperature": temperature, "max_tokens": max_tokens, "rounds": rounds, "note": busy}
        samples = [asdict(pair) | {"acceptance": None} for pair in pairs]
        typer.echo(json.dumps(head | {"domains": [result_json(row) for row in rows], "prompts": samples}, indent=2))
    else:
        title = f"{name} on {described}; drafter {drafter.value}, {rounds} rounds, temperature {temperature:g}"
        _table(rows, title)
    if temperature == 0 and not all(pair.equal for pair in pairs):
        raise typer.Exit(1)


def _table(rows: list[DomainResult], title: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("domain", "single", "speculative", "ratio (95 %)", "worst", "length", "equal"):
        table.add_column(heading, justify="left" if heading == "domain" else "right", no_wrap=True)
    for row in rows:
        seen = row.comparison
        table.add_row(
            row.domain,
            f"{row.single:.1f}",
            f"{row.speculative:.1f}",
            f"{seen.ratio:.3f} ({seen.low:.3f}-{seen.high:.3f})" if seen else "-",
            f"{row.worst:.3f}",
            f"{row.acceptance.length:.2f}" if row.acceptance.steps else "-",
            f"{row.equal}/{row.prompts}",
        )
    console = Console()
    console.print(title, markup=False, highlight=False)
    console.print(table)
