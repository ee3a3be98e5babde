"""How the next tokens are chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Input, Label, Static

from engine.errors import UsageError
from engine.sampling import Sampling
from flint_tui.engine_door import TurnOptions
from flint_tui.screens.dialog import Dialog

FIELDS: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0: greedy, always the likeliest"),
    ("top_k", int, "keep the k likeliest; 0: off"),
    ("top_p", float, "keep this much mass; 1: off"),
    ("min_p", float, "share of the likeliest; 0: off"),
    ("repeat_penalty", float, "above 1 avoids repetition; 1: off"),
    ("seed", int, "empty: another one each time"),
    ("max_tokens", int, "empty: up to the context"),
)


class SamplingScreen(Dialog[TurnOptions]):
    """Answers with the changed options."""

    title_text = "Sampling"
    keys = "Tab next · Enter accepts · Esc closes"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "app.focus_next", show=False),
        Binding("up", "app.focus_previous", show=False),
    ]

    def __init__(self, options: TurnOptions) -> None:
        super().__init__()
        self.options = options
        self.sampling = options.sampling or Sampling()

    def body(self) -> ComposeResult:
        for name, _, hint in FIELDS:
            value = self._value(name)
            with Horizontal(classes="field"):
                yield Label(Content(name.replace("_", " ")), classes="field-name")
                yield Input(
                    "" if value is None else f"{value:g}" if isinstance(value, float) else str(value),
                    id=name,
                    compact=True,
                )
                yield Label(Content(hint), classes="field-hint")
        yield Static("", id="problem", markup=False)

    def _value(self, name: str) -> float | int | None:
        if name == "max_tokens":
            return self.options.max_tokens
        if name == "seed" and not self.options.fixed_seed:
            return None
        return getattr(self.sampling, name)

    def on_mount(self) -> None:
        self.query_one("#temperature").focus()

    def on_input_submitted(self) -> None:
        try:
            self.dismiss(self.read())
        except UsageError as error:
            self.query_one("#problem", Static).update(Content.styled(f"{error}: {error.hint}", "$error"))

    def read(self) -> TurnOptions:
        """The options as typed. Raises UsageError."""
        values: dict[str, float | int | None] = {}
        for name, kind, _ in FIELDS:
            text = self.query_one(f"#{name}", Input).value.strip()
            if name in ("max_tokens", "seed") and not text:
                values[name] = None
                continue
            try:
                values[name] = kind(text)
            except ValueError:
                what = "a whole number" if kind is int else "a number"
                raise UsageError(f"{name.replace('_', ' ')} is {text!r}", f"it must be {what}") from None
        max_tokens, seed = values.pop("max_tokens"), values.pop("seed")
        if seed is not None:
            values["seed"] = seed
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max tokens is {max_tokens}", "it must be 1 or more")
        sampling: Sampling = replace(self.sampling, **values)  # type: ignore[arg-type]
        return replace(self.options, sampling=sampling, fixed_seed=seed is not None, max_tokens=max_tokens)  # type: ignore[arg-type]
