"""`flint eval`: what a packing costs in quality: perplexity on a text, and KL divergence from another packing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flint_tui.commands import HelpfulGroup
from flint_tui.commands.chat import BackendChoice

if TYPE_CHECKING:
    from engine.evaluation import Divergence, Perplexity, Window
    from engine.packed.model import PackedModel

MAX_TEXT = 4 << 20  # characters; scoring them takes hours, encoding them 800 MB

evaluate = typer.Typer(cls=HelpfulGroup, help="Quality of a packed model: perplexity, and KL divergence.")


def register(app: typer.Typer) -> None:
    app.add_typer(evaluate, name="eval")


Text = Annotated[Path | None, typer.Option("--text", "-f", help="UTF-8 text. Default: the one that ships with flint.")]
Tokens = Annotated[int | None, typer.Option("--tokens", "-n", min=2, help="The first N tokens of the text alone.")]
WindowSize = Annotated[int, typer.Option("--window", min=2, help="Tokens that are seen at once.")]
Stride = Annotated[int, typer.Option(min=1, help="Tokens that each window scores: those before it are context.")]
Bos = Annotated[bool, typer.Option("--bos", help="Put the model's first token before the text.")]
Backend = Annotated[BackendChoice, typer.Option(help="The backend under test.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of the cpu and torch backends.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@evaluate.command()
def ppl(
    model: Annotated[str | None, typer.Argument(help="A packed model, a directory or a GGUF file.")] = None,
    text: Text = None,
    tokens: Tokens = None,
    window: WindowSize = 1024,
    stride: Stride = 512,
    bos: Bos = False,
    backend: Backend = BackendChoice.auto,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Perplexity on a text. Every token is scored once, with at least WINDOW - STRIDE tokens of context where there
    are so many."""
    import json

    from engine.evaluation import perplexity, plan_windows
    from engine.loading import open_model

    packed = open_model(model, notify=_note)
    ids, source = _ids(packed, text, tokens, bos)
    windows = plan_windows(len(ids), window, stride)
    opened = _open(packed, backend.value, threads, windows)
    try:
        with _progress("scoring") as report:
            result = perplexity(opened, ids, windows, report)
    finally:
        opened.close()
    value = _setting(packed, opened, source, window, stride, bos) | _perplexity_json(result)
    if as_json:
        typer.echo(json.dumps(value, indent=2))
        return
    typer.echo(
        f"{value['model']} {value['variant']} on {opened.description}: perplexity {result.perplexity:.3f} "
        f"± {result.perplexity_error:.3f}, {result.tokens} tokens of {source}, window {window}, stride {stride}"
    )


@evaluate.command()
def kld(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Packings under test.")],
    against: Annotated[
        str | None,
        typer.Option(help="The reference: a packing, or a checkpoint (as bf16). Default: what MODEL was packed from."),
    ] = None,
    text: Text = None,
    tokens: Tokens = None,
    window: WindowSize = 1024,
    stride: Stride = 512,
    bos: Bos = False,
    backend: Backend = BackendChoice.auto,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """KL divergence of the next token's distribution from a reference packing's, token by token, on a text."""
    import json

    from engine.evaluation import divergences, plan_windows
    from engine.loading import open_model

    tested = [open_model(name, notify=_note) for name in models]
    reference = _reference(tested[0], against)
    ids, source = _ids(reference, text, tokens, bos)
    for packed in tested:
        _require_same_text(packed, reference, text, tokens, bos, ids)
    windows = plan_windows(len(ids), window, stride)
    opened = []
    try:
        for packed in (reference, *tested):
            opened.append(_open(packed, backend.value, threads, windows))
        with _progress("scoring") as report:
            results = divergences(opened[0], opened[1:], ids, windows, report)
    finally:
        for one in opened:
            one.close()
    rows = [
        _setting(packed, one, source, window, stride, bos) | {"bytes": _bytes(packed)} | _divergence_json(result)
        for packed, one, result in zip(tested, opened[1:], results, strict=True)
    ]
    base = {
        "reference": f"{reference.manifest.name}/{reference.manifest.variant}",
        "reference_bytes": _bytes(reference),
        **{f"reference_{key}": value for key, value in _perplexity_json(results[0].reference).items()},
    }
    if as_json:
        typer.echo(json.dumps(base | {"tested": rows}, indent=2))
    else:
        typer.echo(kld_table(base, rows), nl=False)


def kld_table(base: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Markdown: the reference first, then each packing under test."""
    from engine.bench.tables import table_markdown

    header = ["packing", "MB", "perplexity", "mean KL", "median KL", "99 % KL", "same top token"]
    table = [
        header,
        [
            f"{base['reference']} (reference)",
            f"{base['reference_bytes'] / 1e6:.1f}",
            f"{base['reference_perplexity']:.3f}",
            *([""] * 4),
        ],
    ]
    for row in rows:
        table.append(
            [
                f"{row['model']}/{row['variant']}",
                f"{row['bytes'] / 1e6:.1f}",
                f"{row['perplexity']:.3f}",
                f"{row['kl_mean']:.2e} ± {row['kl_mean_error']:.0e}",
                f"{row['kl_median']:.2e}",
                f"{row['kl_p99']:.2e}",
                f"{row['same_top']:.2%}",
            ]
        )
    first = rows[0]
    return table_markdown(table, right_from=1) + (
        f"\n{first['tokens']} tokens of {first['text']}, each scored once; window {first['window']}, "
        f"stride {first['stride']}; KL in nats; {first['device']}.\n"
    )


# --- what both commands share -----------------------------------------------------------------------------------------


def _ids(packed: PackedModel, text: Path | None, tokens: int | None, bos: bool) -> tuple[list[int], str]:
    """(token ids, the text's name)."""
    from engine.bench.workload import text_path
    from engine.errors import UsageError
    from engine.text.tokenizer import Tokenizer

    path = text or text_path()
    try:
        with path.open(encoding="utf-8") as file:
            content = file.read(MAX_TEXT + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text") from None
    if len(content) > MAX_TEXT:
        raise UsageError(f"{path} has more than {MAX_TEXT:,} characters", "Score a part of it.")
    ids = Tokenizer.from_packed(packed).encode(content)[:tokens]
    first = packed.config.bos_token_id
    if bos and first is None:
        raise UsageError(f"{packed.manifest.name} has no first token", "Leave out --bos.")
    return ([first, *ids] if bos and first is not None else ids), path.name


def _require_same_text(
    packed: PackedModel, reference: PackedModel, text: Path | None, tokens: int | None, bos: bool, ids: list[int]
) -> None:
    """Distributions can be compared only over the same vocabulary, token by token."""
    from engine.errors import UsageError

    same = packed.config.vocab_size == reference.config.vocab_size and _ids(packed, text, tokens, bos)[0] == ids
    if not same:
        raise UsageError(
            f"{packed.manifest.name} and {reference.manifest.name} divide text into different tokens",
            "Compare packings of the same model.",
        )


def _reference(tested: PackedModel, against: str | None) -> PackedModel:
    """A packing as it is; a checkpoint packed as bf16, so that nothing but the quantisation differs."""
    from engine.errors import ModelNotFound, UsageError
    from engine.packed.library import resolve
    from engine.packed.model import PackedModel
    from engine.packing import PackOptions, pack
    from flint_tui.pack_progress import show_progress

    name = against or tested.manifest.source.location
    if against is not None:
        try:
            return PackedModel.open(resolve(against))
        except ModelNotFound:
            if not Path(against).expanduser().exists():
                raise
    elif not Path(name).exists():
        raise UsageError(
            f"What {tested.manifest.name} was packed from ({name}) is not on this disk", "Give --against MODEL."
        )
    with show_progress() as report:
        return PackedModel.open(pack(name, PackOptions(bits=16, name=f"{tested.manifest.name}-bf16"), report))


def _open(packed: PackedModel, backend: str, threads: int | None, windows: list[Window]):
    """The backend under test, with a context of one window; asserted to be the one that was asked for."""
    from engine.errors import UsageError
    from engine.evaluation import require_backend
    from engine.loading import open_backend

    longest = max(window.end - window.start for window in windows)
    trained = packed.config.max_position_embeddings
    if longest > trained:
        raise UsageError(f"--window {longest} is more than the {trained} positions of {packed.manifest.name}")
    return require_backend(open_backend(packed, backend, threads, longest, _note), backend)


def _setting(packed: PackedModel, opened, source: str, window: int, stride: int, bos: bool) -> dict[str, Any]:
    return {
        "model": packed.manifest.name,
        "variant": packed.manifest.variant,
        "backend": opened.name,
        "device": opened.description,
        "text": source,
        "window": window,
        "stride": stride,
        "bos": bos,
    }


def _perplexity_json(result: Perplexity) -> dict[str, Any]:
    return {
        "tokens": result.tokens,
        "nll": result.nll,
        "nll_error": result.error,
        "perplexity": result.perplexity,
        "perplexity_error": result.perplexity_error,
    }


def _divergence_json(result: Divergence) -> dict[str, Any]:
    return {
        **_perplexity_json(result.tested),
        "kl_mean": result.mean,
        "kl_mean_error": result.error,
        "kl_median": result.median,
        "kl_p99": result.p99,
        "kl_max": result.largest,
        "same_top": result.same_top,
    }


def _bytes(packed: PackedModel) -> int:
    from engine.meter import packed_weight_bytes

    return sum(packed_weight_bytes(packed).values())


def _note(line: str) -> None:
    typer.echo(f"flint: {line}", err=True)


def _progress(label: str):
    """A context manager yielding report(done, total): a Rich bar on a terminal, nothing otherwise."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import Progress

    @contextmanager
    def bar():
        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task(label, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    return bar()
