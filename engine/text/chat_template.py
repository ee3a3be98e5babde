"""Turns a conversation into the token ids that a model was trained on, by the model's own Jinja template."""

from __future__ import annotations

import datetime
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ChatTemplateError, CheckpointError, FlintError
from engine.files.reading import read_text
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.packed.model import PackedModel

Message = Mapping[str, Any]  # {"role": "system" | "user" | "assistant", "content": str, ...}

# For a model that brings no template, such as a base model: a transcript that it can continue.
FALLBACK_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- message['role'] | capitalize + ': ' + message['content'] + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %}"""
FALLBACK_STOP_STRINGS = ("\nUser:", "\nSystem:")

_NOT_CONTENT = frozenset({"role", "type"})  # the strings of a message that a template compares, not text of a person
_MAX_FILE = 16 << 20  # bytes; real ones are under 1 MB
_PRIVATE_USE = range(0xE000, 0xF900)


class ChatTemplate:
    """One model's template.

    source: Jinja, or None for a plain transcript ("User: ...", one line per message), whose reply should end at
    `stop_strings`. bos_token, eos_token: as the template may write them. Raises ChatTemplateError when it does not
    compile.
    """

    def __init__(self, source: str | None, bos_token: str = "", eos_token: str = "") -> None:
        from engine.text.template_sandbox import TemplateEnvironment

        self.source = FALLBACK_TEMPLATE if source is None else source
        self.stop_strings: tuple[str, ...] = FALLBACK_STOP_STRINGS if source is None else ()
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._environment = TemplateEnvironment()
        try:
            self._template = self._environment.load(self.source)
        except Exception as error:
            raise _malformed(error) from None

    @classmethod
    def from_packed(cls, model: PackedModel, tokenizer: Tokenizer | None = None) -> ChatTemplate:
        """The template of a packed model. tokenizer: the model's, where it is open already."""
        tokenizer = tokenizer or Tokenizer.from_packed(model)
        bos, eos = model.config.bos_token_id, model.config.eos_token_ids
        return cls(
            model.chat_template,
            bos_token="" if bos is None else tokenizer.token(bos),
            eos_token=tokenizer.token(eos[0]) if eos else "",
        )

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The conversation as the text of a prompt. variables: more names for the template, such as enable_thinking.

        Raises ChatTemplateError with what the template says against these messages.
        """
        return self._render(messages, add_generation_prompt, variables, datetime.datetime.now())

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        add_generation_prompt: bool = True,
        most: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of the rendered conversation. Special tokens come from the template only: where a message has one
        written in it, it stays plain text. For other messages the ids are those of encoding the rendered text. most:
        the context; a text that is far longer raises ContextOverflow before it is encoded as a whole.

        The template is rendered with private-use characters around every message text and inside every special token
        written in one; they show, in the result, what came from a message. Where a template does not keep the first
        kind (it splits the text, or looks at its beginning), the second kind alone is used.
        """
        now = datetime.datetime.now()
        marks = _Marks(self.source, messages)

        def render(change: Callable[[str], str]) -> str:
            return self._render([_map_text(m, change) for m in messages], add_generation_prompt, variables, now)

        exact = render(lambda text: text)
        if most is not None:
            tokenizer.refuse_longer(exact, most)
        try:
            parts = marks.split(render(lambda text: marks.around(marks.inside(text, tokenizer))))
        except FlintError:
            parts = None
        if parts is None or "".join(text for text, _ in parts) != exact:
            parts = marks.split(render(lambda text: marks.inside(text, tokenizer))) or []
        return tokenizer.encode_parts(parts)

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        now: datetime.datetime,
    ) -> str:
        names = {"tools": None, "documents": None, "strftime_now": now.strftime} | self._tokens | dict(variables)
        self._environment.reset()
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **names)
        except Exception as error:
            raise _failure(error) from None


class _Marks:
    """Three characters that occur nowhere in the conversation or the template."""

    def __init__(self, source: str, messages: Sequence[Message]) -> None:
        used = set(source).union(*(_texts(message) for message in messages))
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        marks = list(itertools.islice(free, 3))
        if len(marks) < 3:
            raise ChatTemplateError("the conversation uses all 6400 private-use characters", "shorten it")
        self._open, self._close, self._cut = marks
        self._any = re.compile("([" + "".join(marks) + "])")

    def around(self, text: str) -> str:
        """Mark a message text, inside its outer white space, which templates strip. White space alone is left alone."""
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        return text[:start] + self._open + core + self._close + text[start + len(core) :]

    def inside(self, text: str, tokenizer: Tokenizer) -> str:
        """Cut through every special token that is written in a message text."""
        pieces, end = [], 0
        for start, stop in tokenizer.find_special(text):
            middle = (start + stop) // 2
            pieces.append(text[end:middle])
            end = middle
        return self._cut.join([*pieces, text[end:]])

    def split(self, rendered: str) -> list[tuple[str, bool]] | None:
        """The rendered text without marks, in parts: (text, whether the template wrote it). None when an opening and a
        closing mark do not pair up."""
        parts, template = [], True
        for piece in self._any.split(rendered):
            if piece == self._cut:
                continue
            if piece == self._open or piece == self._close:
                if template != (piece == self._open):
                    return None
                template = not template
            elif piece:
                parts.append((piece, template))
        return parts if template else None


def template_from_gguf(metadata: Mapping[str, Any]) -> str | None:
    """The Jinja source that a GGUF file carries, or None."""
    source = metadata.get("tokenizer.chat_template")
    return source if isinstance(source, str) and source.strip() else None


def template_from_hf(directory: Path | str) -> str | None:
    """The Jinja source beside a Hugging Face checkpoint (chat_template.jinja, else tokenizer_config.json), or None."""
    directory = Path(directory)
    own = directory / "chat_template.jinja"
    if own.exists():
        return read_text(own, _MAX_FILE)
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = directory / name
        if path.exists():
            try:
                config = json.loads(read_text(path, _MAX_FILE))
            except (ValueError, RecursionError) as error:
                raise CheckpointError(f"{path} is not valid JSON: {_one_line(error)}") from None
            source = _default_of(config.get("chat_template") if isinstance(config, dict) else None)
            if source:
                return source
    return None


def _default_of(source: Any) -> str | None:
    """A tokenizer_config.json holds one template, or a list of named ones."""
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    return source if isinstance(source, str) and source.strip() else None


def _map_text(value: Any, change: Callable[[str], str], key: str = "") -> Any:
    """A message with every text that a person or a model wrote changed."""
    if isinstance(value, str):
        return value if key in _NOT_CONTENT else change(value)
    if isinstance(value, Mapping):
        return {name: _map_text(item, change, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_text(item, change, key) for item in value]
    return value


def _texts(message: Message) -> str:
    found: list[str] = []
    _map_text(message, lambda text: found.append(text) or text)
    return "".join(found)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _malformed(error: Exception) -> ChatTemplateError:
    number = getattr(error, "lineno", None)
    line = f", line {number}" if number else ""
    return ChatTemplateError(f"the chat template does not compile{line}: {_one_line(error)}")


def _failure(error: Exception) -> ChatTemplateError:
    from engine.text.template_sandbox import Refused

    verb = "refuses" if isinstance(error, Refused) else "failed on"
    return ChatTemplateError(f"the chat template {verb} this conversation: {_one_line(error)}")
