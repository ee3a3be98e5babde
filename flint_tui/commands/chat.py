"""`flint chat`: the full-screen app, or one answer on stdout where there is a prompt or no terminal.

stdout carries the answer alone (or one JSON object), stderr everything else: notes, progress, and statistics, which are
printed where stderr is a terminal unless --no-stats, and elsewhere only with --stats.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
import typer.core

if TYPE_CHECKING:
    from flint_tui.options import ChatOptions


class Mode(StrEnum):
    single = "single"
    speculative = "speculative"


class DrafterChoice(StrEnum):
    auto = "auto"
    eagle = "eagle"
    ngram = "ngram"


class BackendChoice(StrEnum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"
    torch = "torch"


class ChatCommand(typer.core.TyperCommand):
    """Lets --resume stand without an ID, which typer has no option for."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        given = list(args)
        for index, argument in enumerate(args):
            if argument == "--":
                break
            if argument == "--resume" and (index + 1 == len(args) or args[index + 1].startswith("-")):
                given[index] = "--resume="
        return super().parse_args(ctx, given)


def register(app: typer.Typer) -> None:
    app.command(cls=ChatCommand)(chat)


def chat(
    model: Annotated[
        str | None,
        typer.Argument(help="A packed model, a directory or a GGUF file. Without it: the newest that runs well here."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="Answer this on stdout, without a screen. Piped input follows it, and is read to its end first.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    mode: Annotated[Mode, typer.Option(help="One token per pass, or draft several and verify them.")] = Mode.single,
    drafter: Annotated[
        DrafterChoice, typer.Option(help="Who drafts: a learned head, prompt lookup, or what this model has.")
    ] = DrafterChoice.auto,
    backend: Annotated[BackendChoice, typer.Option(help="Where to decode.")] = BackendChoice.auto,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the cpu and torch backends.")] = None,
    context: Annotated[
        int | None, typer.Option("--ctx", min=1, help="Most tokens that prompt and replies may have.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of a reply.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token always.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the K likeliest tokens; 0 keeps all.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens that make up this probability.")
    ] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest one.")] = None,
    repeat_penalty: Annotated[float | None, typer.Option(help="Above 1: tokens of late become less likely.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same reply on the same backend.")] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="[ID]", help="Continue a saved conversation: the last one, or that of ID.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the answer.")] = False,
    stats: Annotated[
        bool | None,
        typer.Option(
            "--stats/--no-stats", help="Statistics of a -p answer on stderr. Default: only where stderr is a terminal."
        ),
    ] = None,
) -> None:
    """Chat with a model: full screen, or one answer with -p, --json or piped input (which is read to its end first)."""
    from flint_tui.options import ChatOptions

    options = ChatOptions(
        model=model,
        prompt=prompt,
        system=system,
        mode=mode.value,
        drafter=drafter.value,
        backend=backend.value,
        threads=threads,
        context=context,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        seed=seed,
        resume=resume,
        json=as_json,
        stats=stats,
    )
    _check(options)
    if prompt is None and not as_json and sys.stdin.isatty() and sys.stdout.isatty():
        if os.environ.get("TERM") == "dumb":
            from engine.errors import UsageError

            raise UsageError("A terminal of type dumb cannot show a screen", "give a prompt with -p TEXT, or set TERM")
        from flint_tui.app import run_app

        raise typer.Exit(run_app(options))
    from flint_tui.one_shot import answer

    raise typer.Exit(answer(options))


def _check(options: ChatOptions) -> None:
    """Raise UsageError for sampling values out of range before anything is loaded."""
    from engine.sampling import Sampling

    options.sampling(Sampling())
