"""`flint draft`: make and judge a drafter: harvest conversations, train a head on them, evaluate it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flint_tui.commands import HelpfulGroup

draft = typer.Typer(name="draft", help="Make and judge speculative drafters.", cls=HelpfulGroup)

Model = Annotated[str | None, typer.Argument(help="A packed model; the default one if left out.")]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1)]


class DeviceChoice(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


Device = Annotated[DeviceChoice | None, typer.Option(help="Default: the GPU if there is one.")]


def register(app: typer.Typer) -> None:
    app.add_typer(draft)


@draft.command()
def harvest(
    out: Annotated[Path, typer.Option(help="Folder for the shards; shards already there are kept.")],
    model: Model = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 20_000_000,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='JSONL of {"text": ..., "complete": ...}: prompts, or (complete false) how user turns begin. '
            "Default: prompts from flint's own themes."
        ),
    ] = None,
    length: Annotated[int, typer.Option(min=64, help="Tokens of the longest conversation.")] = 512,
    batch: Annotated[int, typer.Option(min=1, help="Conversations written at once.")] = 1024,
    steps: Annotated[int, typer.Option(min=64, help="Tokens that each of them, and its successors, add.")] = 1024,
    greedy_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of conversations with greedy replies.")
    ] = 0.6,
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Let the model write its own conversations: training data without a data set."""
    from engine.drafting.harvest import Harvester, HarvestOptions, TurnTokens, Words, from_prompts, from_themes
    from engine.drafting.harvest import harvest as run
    from engine.drafting.prompts import load_prompts
    from engine.drafting.themes import Themes
    from engine.errors import UsageError

    given = None if prompts is None else load_prompts(prompts)
    packed, tokenizer, template = _open(model)
    ends = packed.config.eos_token_ids
    if not ends:
        raise UsageError("this model names no end-of-turn token")
    turns = TurnTokens.from_template(lambda messages, prompt: template.encode(messages, tokenizer, prompt), ends[0])
    options = HarvestOptions(
        tokens=tokens, length=length, batch=batch, steps=steps, greedy_share=greedy_share, seed=seed
    )
    harvester = Harvester(_target(packed, device), turns, options)
    words = Words(tokenizer.encode, tokenizer.decode)
    if given is None:
        openings = from_themes(harvester, Themes(), words, out)
    else:
        openings = from_prompts(given, words)
    held_out = {tuple(tokenizer.encode(prompt.text)) for prompt in load_prompts(None)}
    with _progress("harvest") as report:
        written = run(harvester, out, openings, held_out, report)
    typer.echo(f"{written:,} tokens in {out}")


@draft.command()
def train(
    data: Annotated[list[Path], typer.Option(help="Folder of a harvest; may be given several times.")],
    out: Annotated[Path, typer.Option(help="The drafter file to write.")],
    model: Model = None,
    begin: Annotated[
        Path | None, typer.Option("--from", help="A drafter file of this model to train on; the optimiser is fresh.")
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            min=2, help="Most frequent tokens that the head covers. Default: 8192, or those of --from (which can grow)."
        ),
    ] = None,
    intermediate: Annotated[
        int | None, typer.Option(min=32, help="Width of the head's MLP. Default: the model's own, or that of --from.")
    ] = None,
    head_bits: Annotated[
        int, typer.Option(min=4, max=8, help="Of the head's matrix in the file: 8, or 4 for a larger vocabulary.")
    ] = 8,
    depth: Annotated[int, typer.Option(min=1, max=8, help="Draft positions unrolled in training.")] = 4,
    learning_rate: float = 1e-3,
    batch_tokens: Annotated[int, typer.Option(min=64, help="Tokens a step.")] = 8192,
    epochs: Annotated[int, typer.Option(min=1)] = 1,
    label_temperature: Annotated[
        float, typer.Option(min=0, help="Sharpens the target's distribution; 0: train on its argmax.")
    ] = 1.0,
    reached_only: Annotated[
        bool, typer.Option(help="Learn a draft position only where the drafts before it were right.")
    ] = False,
    warm_start: Annotated[bool, typer.Option(help="Start from the target's last layer.")] = True,
    skip_loops: Annotated[bool, typer.Option(help="Learn nothing from text that repeats itself.")] = True,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="Stop after this long; the learning rate falls by then.")
    ] = None,
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Train an EAGLE-3 style head by training-time test. Checkpoints beside OUT; run again to resume."""
    from engine.drafting.checkpoint import load_drafter, save_drafter, target_fingerprint
    from engine.drafting.corpus import read_shards
    from engine.drafting.train import TrainOptions, TrainProgress
    from engine.drafting.train import train as run
    from engine.errors import DrafterError, UsageError

    if head_bits not in (4, 8):
        raise UsageError(f"--head-bits {head_bits}: 8 or 4")
    packed, _, _ = _open(model)
    start = None
    if begin is not None:
        try:
            start = load_drafter(begin, packed)
        except DrafterError as error:
            raise UsageError(f"--from: {error}", "give a drafter of this model, or leave it out") from None
        draft_vocab = draft_vocab or start.config.draft_vocab_size
        intermediate = intermediate or start.config.intermediate_size
    options = TrainOptions(
        draft_vocab=draft_vocab or TrainOptions.draft_vocab,
        intermediate_size=intermediate,
        depth=depth,
        learning_rate=learning_rate,
        batch_tokens=batch_tokens,
        epochs=epochs,
        label_temperature=label_temperature,
        reached_only=reached_only,
        warm_start=warm_start,
        skip_loops=skip_loops,
        max_seconds=None if minutes is None else 60 * minutes,
        seed=seed,
    )

    def report(now: TrainProgress) -> None:
        rates = " ".join(f"{rate:.3f}" for rate in now.accuracy)
        line = f"step {now.step}/{now.steps}  loss {now.loss:.4f}  accuracy {rates}  length {now.length:.3f}"
        typer.echo(f"{line}  {now.tokens:,} tokens  {now.seconds:.0f} s", err=True)

    def save(head) -> None:
        save_drafter(out, head, fingerprint, head_bits)

    fingerprint = target_fingerprint(packed)
    checkpoint = out.with_suffix(".training")
    save(run(_target(packed, device), read_shards(*data), options, checkpoint, report, saved=save, start=start))
    checkpoint.unlink(missing_ok=True)
    typer.echo(str(out))


@draft.command("eval")
def evaluate(
    model: Model = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL of domain and text. Default: held-out prompts.")] = None,
    drafter: Annotated[str, typer.Option(help="eagle, ngram, or auto: both in concert.")] = "eagle",
    draft_tokens: Annotated[int, typer.Option(min=1, max=16, help="Tokens drafted in every step (K).")] = 4,
    max_tokens: Annotated[int, typer.Option(min=2)] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each domain.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.0,
    seed: Seed = 0,
    backend: str = "auto",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    true_context: Annotated[bool, typer.Option(help="Also score the finished replies in one pass (greedy).")] = True,
    json_output: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Acceptance length and per-position rates by domain, with 95 % intervals: live, and in true context."""
    import json

    from engine.drafting.evaluate import summarise
    from engine.drafting.live import answer
    from engine.drafting.prompts import load_prompts
    from engine.loading import ReplyOptions, open_engine
    from engine.sampling import Sampling
    from flint_tui.commands.bench_spec import held

    chosen = load_prompts(prompts, limit=limit)
    domains = list(dict.fromkeys(prompt.domain for prompt in chosen))
    engine = open_engine(model, backend, threads, notify=lambda line: typer.echo(line, err=True))
    answers = []
    try:
        draft_tokens = held(engine, drafter, draft_tokens)
        options = ReplyOptions(
            mode="speculative",
            drafter=drafter,
            sampling=Sampling(temperature=temperature, seed=seed),
            max_tokens=max_tokens,
            draft_tokens=draft_tokens,
        )
        with _progress("answering") as report:
            for answered in answer(engine, chosen, options, draft_tokens):
                answers.append(answered)
                report(len(answers), len(chosen))
    finally:
        engine.close()
    offline = {}
    if true_context and drafter == "eagle" and temperature == 0:
        offline = _true_context(engine.model, answers, draft_tokens)
    rows = {}
    for domain in [*domains, "all"]:
        mine = [i for i, a in enumerate(answers) if domain in (a.domain, "all")]
        live = summarise([answers[i].acceptance for i in mine])
        rows[domain] = {
            "acceptance_length": round(live.length, 4),
            "interval_95": [round(live.low, 4), round(live.high, 4)],
            "per_position": [round(rate, 4) for rate in live.per_position],
            "verify_steps": live.steps,
            "prompts": len(mine),
            "draft_share": round(sum(answers[i].draft_s for i in mine) / sum(answers[i].decode_s for i in mine), 4),
        }
        if offline:
            rows[domain]["true_context_length"] = round(summarise([offline[i] for i in mine]).length, 4)
    if json_output:
        head = {"model": engine.name, "backend": engine.backend.name, "drafter": drafter, "draft_tokens": draft_tokens}
        typer.echo(json.dumps(head | {"temperature": temperature, "max_tokens": max_tokens, "domains": rows}))
        return
    _table(rows, f"{engine.name}, drafter {drafter}, K = {draft_tokens}, temperature {temperature:g}")


def _true_context(model, answers, depth: int):
    """Row -> Acceptance of the finished replies, scored in one pass each."""
    import numpy as np

    from engine.drafting.checkpoint import load_drafter
    from engine.drafting.evaluate import true_context
    from engine.loading import drafter_path

    path = drafter_path(model)
    assert path is not None
    head, target = load_drafter(path, model), _target(model, "cpu")
    scored = {}
    for i, answered in enumerate(answers):
        tokens = np.array([[*answered.prompt, *answered.reply]], dtype=np.uint32)
        replies = np.arange(tokens.shape[1])[None] >= len(answered.prompt)
        (scored[i],) = true_context(head, target, tokens, replies, depth)
    return scored


def _table(rows, title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from engine.errors import printable

    table = Table(title=title, title_justify="left")
    for heading in ("domain", "length", "95 %", "by position", "true ctx", "drafting", "prompts"):
        table.add_column(heading, justify="left" if heading == "domain" else "right", no_wrap=True)
    for domain, row in rows.items():
        low, high = row["interval_95"]
        table.add_row(
            Text(printable(domain)),
            f"{row['acceptance_length']:.2f}",
            f"{low:.2f}-{high:.2f}",
            " ".join(f"{rate:.2f}" for rate in row["per_position"]),
            f"{row['true_context_length']:.2f}" if "true_context_length" in row else "-",
            f"{row['draft_share']:.0%}",
            str(row["prompts"]),
        )
    Console().print(table)


def _open(model: str | None):
    from engine.loading import open_model
    from engine.text.chat_template import ChatTemplate
    from engine.text.tokenizer import Tokenizer

    packed = open_model(model)
    tokenizer = Tokenizer.from_packed(packed)
    return packed, tokenizer, ChatTemplate.from_packed(packed)


def _target(packed, device: str | None):
    import torch

    from engine.drafting.batched_target import BatchedTarget
    from engine.errors import BackendError

    if device == "cuda" and not torch.cuda.is_available():
        raise BackendError("--device cuda: torch finds no GPU here", "`flint doctor` says why.")
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = name.startswith("cuda")
    return BatchedTarget(packed, name, torch.bfloat16 if on_gpu else torch.float32, compiled=on_gpu)


def _progress(label: str):
    """A context manager yielding report(done, total): a Rich bar on a terminal, nothing otherwise."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import Progress

    @contextmanager
    def bar():
        with Progress(console=Console(stderr=True), disable=not Console(stderr=True).is_terminal) as progress:
            task = progress.add_task(label, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    return bar()
