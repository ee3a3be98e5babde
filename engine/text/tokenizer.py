"""Text to token ids and back: a model's own tokenizer, with user text that can never become a special token."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import CheckpointError, ContextOverflow, UnsupportedModel, UsageError
from engine.files.reading import read_file
from engine.text.gguf_tokenizer import from_the_library

if TYPE_CHECKING:
    import tokenizers

    from engine.packed.model import PackedModel

MAX_TOKENIZER_BYTES = 128 << 20  # of a tokenizer.json; the largest real ones have 35 MB
_PIECE = 1 << 18  # characters
_CUT_TOKENS = 64  # far more than what cutting a text in two can add
_MAX_GROWTH = 64  # of a text in normalisation; real tokenizers replace a space by another character
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Encodes and decodes with one vocabulary.

    `encode_special_tokens` makes the library read special tokens as plain text, always; where they are wanted, they are
    cut out of the text here, before the library sees it. So one instance serves both ways of encoding, and a special
    token can only come from text that was marked as allowed to hold one.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        _refuse_growth(_state(tokenizer.normalizer))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._spaces_first = _take_first_prefix(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token.content: id for id, token in added.items() if token.special}
        self._ordinary_added = {id: token.content for id, token in added.items() if not token.special}
        self._added = list(added.values())
        self._to_bytes, self.strips_first_space = _piece_decoder(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self.special_ids = frozenset(self._special.values())
        # The unknown token may stand for plain text: some vocabularies have nothing else for a rare character.
        self._reserved = self.special_ids - {tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")}
        # get_vocab_size(with_added_tokens=True) would build the whole vocabulary as a map: 10 ms for 49152 tokens.
        self.token_count: int = max([tokenizer.get_vocab_size(with_added_tokens=False), *(id + 1 for id in added)])

    @classmethod
    def from_file(cls, path: Path | str) -> Tokenizer:
        """Read a tokenizer.json. Raises CheckpointError when it is missing or malformed."""
        from tokenizers import Tokenizer as LibraryTokenizer

        try:
            return cls(LibraryTokenizer.from_buffer(read_file(Path(path), MAX_TOKENIZER_BYTES)))
        except (CheckpointError, UnsupportedModel):
            raise
        except BaseException as error:
            if not from_the_library(error):
                raise
            raise CheckpointError(f"{path} is not a readable tokenizer: {_one_line(error)}") from None

    @classmethod
    def from_packed(cls, model: PackedModel) -> Tokenizer:
        """The tokenizer of a packed model."""
        return cls.from_file(model.tokenizer_path)

    def token(self, id: int) -> str:
        """The token's text in the vocabulary; special tokens read as they are written in templates. "" if unknown."""
        return (self._tokenizer.id_to_token(id) or "") if 0 <= id < self.token_count else ""

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text, with nothing added around it. special: whether special tokens written in it count as such.

        Lone surrogates, which no UTF-8 text can hold, are read as U+FFFD.
        """
        return self.encode_parts([(text, special)])

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of a text given in (text, special) parts.

        A special token counts only where it lies whole within one part marked special. Other text runs together across
        parts, so that the ids are those of the joined text.
        """
        ids: list[int] = []
        plain: list[str] = []
        for text, special in parts:
            end = 0
            for match in self._special_pattern.finditer(text) if special else ():
                plain.append(text[end : match.start()])
                self._encode_plain(plain, ids)
                ids.append(self._special_id(match.group()))
                end = match.end()
            plain.append(text[end:] if end else text)
        self._encode_plain(plain, ids)
        return ids

    def refuse_longer(self, text: str, most: int) -> None:
        """Raise ContextOverflow where a long text has far more than `most` tokens, judged by its pieces one at a time:
        encoding a megabyte takes 200 MB. Where the pieces do not tell, nothing happens."""
        if len(text) <= _PIECE:
            return
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(self.encode(text[start : start + _PIECE])) - _CUT_TOKENS
            if count > most:
                raise ContextOverflow(
                    f"The prompt has {len(text)} characters, too many for a context of {most} tokens",
                    "Shorten the prompt, or open the model with a larger --ctx.",
                )

    def find_special(self, text: str) -> list[tuple[int, int]]:
        """(start, end) of every special token written in the text, in capital letters or small ones."""
        return [match.span() for match in self._special_pattern_any_case.finditer(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens left out; bytes that are not UTF-8 become U+FFFD."""
        stream = TextStream(self)
        return stream.push(ids) + stream.flush()

    def bytes_of(self, id: int) -> bytes:
        """The bytes that a token stands for: empty for a special token and for an id outside the vocabulary."""
        known = self._bytes.get(id)
        if known is None:
            if id in self.special_ids:
                known = b""
            elif id in self._ordinary_added:
                known = self._ordinary_added[id].encode()
            else:
                known = self._to_bytes(self.token(id))
            self._bytes[id] = known
        return known

    # Compiled when first needed: 771 special tokens take 30 ms.

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return _any_of(token for token in self._added if token.special)

    @cached_property
    def _special_pattern_any_case(self) -> re.Pattern[str]:
        return re.compile(self._special_pattern.pattern, re.IGNORECASE)

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        return _any_of(self._added)

    def _special_id(self, matched: str) -> int:
        """The id of a special token, matched with or without white space that it swallows."""
        return self._special[matched if matched in self._special else matched.strip()]

    def _encode_plain(self, plain: list[str], ids: list[int]) -> None:
        """Encode the collected text into ids, and forget it."""
        text = _without_lone_surrogates("".join(plain))
        plain.clear()
        if not text:
            return
        if self._spaces_first and not ids and text[0] not in " ▁" and not self._added_pattern.match(text):
            text = " " + text
        ids.extend(self._plain_ids(text))

    def _plain_ids(self, text: str) -> list[int]:
        """The library's ids. Should its merges, or a vocabulary that is looked up by whole words, have built a special
        token from plain text, that token is spelled out in two halves."""
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            if not from_the_library(error):
                raise
            raise CheckpointError(f"the tokenizer fails on this text: {_one_line(error)}") from None
        if self._reserved.isdisjoint(ids):
            return ids
        spelled: list[int] = []
        for id in ids:
            token = self.token(id)
            if id not in self._reserved:
                spelled.append(id)
            elif len(token) > 1:
                spelled += self._plain_ids(token[: len(token) // 2]) + self._plain_ids(token[len(token) // 2 :])
        return spelled


class TextStream:
    """Decodes a reply token by token: each push returns the text that became complete.

    Bytes of an unfinished character wait for the next token; special tokens, and ids in `hidden`, give no text. The
    pieces of any way of cutting `ids` add up to `tokenizer.decode(ids)`. Constant time per token.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strips_first_space

    def push(self, ids: Iterable[int]) -> str:
        """Text that became printable with these ids."""
        data = b"".join(self._tokenizer.bytes_of(id) for id in ids if id not in self._hidden)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The end of the reply: U+FFFD where a character stayed incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Ends a reply at the first stop string, never showing any part of it.

    Text that might be the beginning of a stop string is held back. Where several match, the one complete first counts
    (of those, the longest), so the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise UsageError("a stop string is empty", "give every stop string at least one character")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now. Once `matched` is set, always empty."""
        if not self._stops or self.matched is not None:
            return "" if self.matched is not None else text
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The end of the reply: what was held back and turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that is a beginning of stop, but not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _any_of(tokens: Iterable[tokenizers.AddedToken]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest where several begin, with the white space that they swallow; nothing where
    there are none."""
    ordered = sorted(tokens, key=lambda token: len(token.content), reverse=True)
    alternatives = [
        (r"\s*" if token.lstrip else "") + re.escape(token.content) + (r"\s*" if token.rstrip else "")
        for token in ordered
        if token.content
    ]
    return re.compile("|".join(alternatives) or r"(?!)")


def _without_lone_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _state(component: Any) -> dict[str, Any]:
    """The configuration of a normalizer, pre-tokenizer or decoder, as in tokenizer.json; {} for None."""
    return json.loads(component.__getstate__()) if component is not None else {}


def _refuse_growth(normalizer: dict[str, Any]) -> None:
    """Raise UnsupportedModel where replacements could make a text of megabytes one of gigabytes."""
    growth, steps = 1, [normalizer]
    for step in steps:
        steps += step.get("normalizers", [])
        if step.get("type") == "Replace":
            growth *= max(1, len(step["content"]))
    if growth > _MAX_GROWTH:
        raise UnsupportedModel(f"a tokenizer that makes texts up to {growth} times as long is not supported")


def _take_first_prefix(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether a text's very beginning gets a space (Metaspace with prepend_scheme "first").

    The library would give one to every piece that is encoded on its own, so that this is turned off in it, and done
    in `Tokenizer._encode_plain`.
    """
    state = json.dumps(_state(tokenizer.pre_tokenizer))
    never = state.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
    if never == state:
        return False
    pre_tokenizer: Any = tokenizer.pre_tokenizer
    pre_tokenizer.__setstate__(never.encode())
    tokenizer.pre_tokenizer = pre_tokenizer
    return True


def _piece_decoder(tokenizer: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How one token of the vocabulary turns into bytes, and whether the text's first space is the tokenizer's own."""
    state = _state(tokenizer.decoder)
    steps = state.get("decoders", [state]) if state else []
    kinds = {step["type"]: step for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level_bytes, False
    unknown = kinds.keys() - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if unknown or not kinds:
        raise UnsupportedModel(f"the tokenizer's decoder {', '.join(sorted(unknown)) or '(none)'} is not supported")
    metaspace = kinds.get("Metaspace", {})
    space = metaspace.get("replacement") or kinds.get("Replace", {}).get("pattern", {}).get("String", "▁")
    strips = kinds.get("Strip", {}).get("start", 0) > 0 or metaspace.get("prepend_scheme", "never") != "never"

    def to_bytes(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(space, " ").encode()

    return to_bytes, strips


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # not written in the byte alphabet: the token is its own text
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte for each printable character that stands for one: bytes that print stand for themselves, the others,
    in order, are written from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
