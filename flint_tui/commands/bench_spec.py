"""`flint bench spec`: single pass against speculation on real prompts, by kind of work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flint_tui.commands.chat import BackendChoice, DrafterChoice

if TYPE_CHECKING:
    from engine.bench.speculation import DomainResult
    from engine.loading import Engine


def spec(
    model: Annotated[str | None, typer.Argument(help="A packed model, a directory or a GGUF file.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL of domain and text. Default: held-out prompts.")] = None,
    drafter: Annotated[DrafterChoice, typer.Option(help="Who drafts.")] = DrafterChoice.auto,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each domain.")] = None,
    rounds: Annotated[int, typer.Option("-r", "--rounds", min=1, max=100)] = 3,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", min=2)] = 128,
    draft_tokens: Annotated[int | None, typer.Option(min=1, max=15, help="Fixed; default: adapted as it goes.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy, answers equal but for near ties.")] = 0.0,
    backend: Annotated[BackendChoice, typer.Option(help="Where to decode.")] = BackendChoice.auto,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the cpu and torch backends.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead, with every prompt's seconds.")] = False,
) -> None:
    """Both modes on the same prompts, in alternating order: ratio with its 95 % interval, worst prompt, acceptance.

    Where greedy answers differ, the logits of the first tokens that do are compared: exit code 1 where they are no near
    tie.
    """
    import json

    from engine.bench.conditions import utc_now
    from engine.bench.environment import commit
    from engine.bench.speculation import NEAR_TIE, measure, pair_json, result_json, results
    from engine.drafting.prompts import load_prompts
    from engine.errors import BackendError
    from engine.loading import ReplyOptions
    from engine.sampling import Sampling
    from flint_tui.commands.bench import note, open_shown, say_if_busy, status

    asked = load_prompts(prompts, limit=limit)
    busy = say_if_busy()
    engine = open_shown(model, backend.value, threads)
    try:
        engine.drafters(drafter.value)  # else both modes would be single pass
        if engine.unreadable_head:
            note(f"{engine.unreadable_head}: prompt lookup drafts alone")
        if draft_tokens is not None:
            draft_tokens = held(engine, drafter.value, draft_tokens)
        options = ReplyOptions(
            drafter=drafter.value,
            sampling=Sampling(temperature=temperature),
            max_tokens=max_tokens,
            draft_tokens=draft_tokens,
        )
        with status() as say:
            pairs = measure(engine, asked, options, rounds, lambda done, total: say(f"answer {done} of {total}"))
        name, described = engine.name, engine.backend.description
    finally:
        engine.close()
    rows = results(pairs)
    short = sum(not pair.timeable for pair in pairs)
    if short == len(pairs):
        raise BackendError("No reply was long enough to be timed", "Give other --prompts, or more --max-tokens.")
    if short:
        note(f"{short} of {len(pairs)} replies are too short to be timed; only their text is compared")
    if as_json:
        head = {"model": name, "backend": described, "drafter": drafter.value, "draft_tokens": draft_tokens}
        head |= {"temperature": temperature, "max_tokens": max_tokens, "rounds": rounds, "near_tie": NEAR_TIE}
        head |= {"commit": commit(), "created": utc_now(), "note": busy}
        tables = {"domains": [result_json(row) for row in rows], "prompts": [pair_json(pair) for pair in pairs]}
        typer.echo(json.dumps(head | tables, indent=2))
    else:
        title = f"{name} on {described}; drafter {drafter.value}, {rounds} round{'s' if rounds > 1 else ''}"
        title += f", temperature {temperature:g}"
        _print(rows, title)
    every = rows[-1].answers
    if temperature == 0 and every.near_ties:
        note(
            f"{every.near_ties} of {every.prompts} answers part at a near tie (logits less than {NEAR_TIE} apart): "
            "passes of other widths round differently"
        )
    if temperature == 0 and every.different:
        note(
            f"{every.different} of {every.prompts} greedy answers differ where their tokens are no near tie "
            f"(largest gap {every.largest_gap:.3g} logits): one of the modes is wrong"
        )
        raise typer.Exit(1)


def held(engine: Engine, drafter: str, wanted: int) -> int:
    """`wanted` drafts in each step, or as many as a step here can hold, which is then said. Raises DrafterError."""
    from flint_tui.commands.bench import note

    most = engine.most_drafts(drafter)
    if wanted <= most:
        return wanted
    note(f"a step of the {engine.backend.name} backend holds {most} drafts: --draft-tokens {wanted} is taken as {most}")
    return most


def _print(rows: list[DomainResult], title: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from engine.errors import printable

    def table(*headings: str) -> Table:
        made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in headings:
            made.add_column(heading, justify="left" if heading == "domain" else "right", no_wrap=True)
        return made

    speed = table("domain", "single", "speculative", "ratio (95 %)", "worst", "length", "timed")
    same = table("domain", "equal", "near ties", "largest gap", "different")
    for row in rows:
        domain, answers, timing = Text(printable(row.domain)), row.answers, row.timing  # the file's word, no markup
        gap = "-" if answers.largest_gap is None else f"{answers.largest_gap:.2g}"
        counts = (f"{answers.equal}/{answers.prompts}", str(answers.near_ties), gap, str(answers.different))
        same.add_row(domain, *counts)
        if timing is None:
            speed.add_row(domain, *"-----", "0")
            continue
        seen = timing.comparison
        speed.add_row(
            domain,
            f"{timing.single:.1f}",
            f"{timing.speculative:.1f}",
            f"{seen.ratio:.3f} ({seen.low:.3f}-{seen.high:.3f})" if seen else "-",
            f"{timing.worst:.3f}",
            f"{timing.acceptance.length:.2f}" if timing.acceptance.steps else "-",
            str(timing.prompts),
        )
    console = Console()
    console.print(title, markup=False, highlight=False)
    console.print(speed)
    console.print(same)
