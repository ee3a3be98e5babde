"""Markdown as models write it -> blocks: CommonMark plus tables and strikethrough; HTML is shown as text."""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cache
from typing import TYPE_CHECKING

from rich.cells import cell_len

from flint_tui.text.blocks import Block, Kind, Span

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

HIGHLIGHT_LIMIT = 32 * 1024  # characters; longer code keeps one colour (pygments: about 1 ms per 1,000 characters)
_BULLETS = "•◦▪"


@cache
def parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


class LineMap:
    """Line numbers of a source -> character offsets."""

    def __init__(self, source: str) -> None:
        self.starts = [0, *(m.end() for m in re.finditer("\n", source)), len(source)]

    def offset(self, line: int) -> int:
        return self.starts[min(line, len(self.starts) - 1)]

    def line(self, offset: int) -> int:
        return bisect_right(self.starts, offset) - 1


def last_part(tokens: list[Token]) -> int:
    """The source line from which more text may still change what was parsed: where the last top-level block begins,
    or, of a list, its last item."""
    index = next((i for i in range(len(tokens) - 1, -1, -1) if tokens[i].level == 0 and tokens[i].nesting >= 0), -1)
    if index < 0 or tokens[index].map is None:
        return 0
    if tokens[index].type in ("bullet_list_open", "ordered_list_open"):
        index = max(i for i, t in enumerate(tokens) if t.type == "list_item_open" and t.level == 1)
    where = tokens[index].map
    return where[0] if where else 0


def to_blocks(tokens: list[Token], source: LineMap, base: int = 0, highlight: bool = True) -> list[Block]:
    """Blocks of a parsed message; `base` is added to every source offset."""
    return _Builder(source, base, highlight).build(tokens)


def parse(source: str) -> list[Block]:
    """Blocks of a whole message."""
    return to_blocks(parser().parse(source), LineMap(source))


class _Builder:
    """Walks markdown-it's flat token list, keeping the prefixes of the lists and quotes it is inside."""

    def __init__(self, source: LineMap, base: int, highlight: bool) -> None:
        self.source = source
        self.base = base
        self.highlight = highlight
        self.blocks: list[Block] = []
        self.prefixes: list[str] = []  # one an open list item or quote, for the lines after the first
        self.marker = ""  # bullet or number that the next block starts with
        self.lists: list[bool] = []  # tight?
        self.previous_list = -1  # the outermost list that the block above belongs to, counted from 0
        self.list_count = 0

    def build(self, tokens: list[Token]) -> list[Block]:
        role = ""
        items: list[Token] = []
        index = 0
        while index < len(tokens):
            token = tokens[index]
            match token.type:
                case "heading_open":
                    role = "heading.1" if token.tag == "h1" else "heading.2" if token.tag == "h2" else "heading.3"
                case "heading_close":
                    role = ""
                case "inline":
                    text, spans = inline(token)
                    if role:
                        spans = [Span(0, len(text), role), *spans]
                    self.add(text, spans, token)
                case "fence" | "code_block":
                    self.code(token)
                case "hr":
                    self.add("", [], token, kind="rule")
                case "bullet_list_open" | "ordered_list_open":
                    self.list_count += not self.lists
                    self.lists.append(_tight(tokens, index))
                case "bullet_list_close" | "ordered_list_close":
                    self.lists.pop()
                case "list_item_open":
                    number = (
                        f"{token.info}{token.markup} " if token.info else f"{_BULLETS[min(len(self.lists), 3) - 1]} "
                    )
                    self.marker = number
                    items.append(token)
                    self.prefixes.append(" " * cell_len(number))
                case "blockquote_open":
                    self.prefixes.append("▎ ")
                case "list_item_close" | "blockquote_close":
                    if self.marker and token.type == "list_item_close":
                        self.add("", [], items[-1])  # an empty item still shows its bullet
                    self.prefixes.pop()
                    if token.type == "list_item_close":
                        items.pop()
                case "table_open":
                    index = self.table(tokens, index)
            index += 1
        return self.blocks

    def add(self, text: str, spans: list[Span], token: Token, kind: Kind = "text", label: str = "") -> None:
        rest = "".join(self.prefixes)
        first = rest
        if self.marker:
            first = "".join(self.prefixes[:-1]) + self.marker
            self.marker = ""
        in_list = self.list_count if self.lists else -1
        same_list = in_list >= 0 and in_list == self.previous_list
        space = int(bool(self.blocks) and not (same_list and self.lists[-1] and kind == "text"))
        above = self.blocks[-1].rest if self.blocks else ""
        self.previous_list = in_list
        begin, end = token.map or (0, 0)
        where = (self.base + self.source.offset(begin), self.base + self.source.offset(end))
        gap = _common_prefix(above, rest)
        self.blocks.append(Block(text, tuple(spans), kind, first, rest, space, gap, where, label))

    def code(self, token: Token) -> None:
        text = token.content.rstrip("\n")
        language = token.info.strip().split()[0] if token.info.strip() else ""
        spans = code_spans(text, language) if self.highlight else []
        self.add(text, spans, token, kind="code", label=language)

    def table(self, tokens: list[Token], index: int) -> int:
        """Lay the cells out in columns; wide tables are clipped by the screen, copying gives the whole row."""
        opening = tokens[index]
        rows: list[list[tuple[str, list[Span], str]]] = []
        while tokens[index].type != "table_close":
            token = tokens[index]
            if token.type == "tr_open":
                rows.append([])
            elif token.type == "inline":
                text, spans = inline(token)
                rows[-1].append((text.replace("\n", " "), spans, str(tokens[index - 1].attrs.get("style", ""))))
            index += 1
        widths = [max(cell_len(row[c][0]) for row in rows if c < len(row)) for c in range(len(rows[0]))]
        text = ""
        spans: list[Span] = []
        for number, row in enumerate(rows):
            for column, (cell, cell_spans, style) in enumerate(row):
                padding = widths[column] - cell_len(cell)
                left = padding if "right" in style else padding // 2 if "center" in style else 0
                text += " " * left
                if number == 0:
                    spans.append(Span(len(text), len(text) + len(cell), "strong"))
                spans += [Span(s.start + len(text), s.end + len(text), s.role) for s in cell_spans]
                text += cell + " " * (padding - left)
                if column + 1 < len(row):
                    spans.append(Span(len(text), len(text) + 3, "rule"))
                    text += " │ "
            if number == 0:
                start = len(text) + 1
                text += "\n" + "─┼─".join("─" * w for w in widths)
                spans.append(Span(start, len(text), "rule"))
            if number + 1 < len(rows):
                text += "\n"
        self.add(text, spans, opening, kind="table")
        return index


def _common_prefix(a: str, b: str) -> str:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]


def _tight(tokens: list[Token], index: int) -> bool:
    """A list is tight when its items' paragraphs are hidden."""
    level = tokens[index].level
    for token in tokens[index + 1 :]:
        if token.type == "paragraph_open" and token.level == level + 2:
            return token.hidden
        if token.level == level and token.nesting < 0:
            break
    return True


def inline(token: Token) -> tuple[str, list[Span]]:
    """The text of a paragraph, heading or cell, and the roles inside it."""
    parts: list[str] = []
    length = 0
    spans: list[Span] = []
    open_at: list[tuple[int, str]] = []
    for child in token.children or ():
        piece = ""
        match child.type:
            case "text" | "html_inline":
                piece = child.content
            case "code_inline":
                piece = child.content
                spans.append(Span(length, length + len(piece), "code"))
            case "softbreak" | "hardbreak":
                piece = "\n"  # chat text breaks where the model broke it
            case "em_open" | "strong_open" | "s_open" | "link_open":
                open_at.append((length, str(child.attrs.get("href", ""))))
            case "em_close" | "strong_close" | "s_close":
                spans.append(Span(open_at.pop()[0], length, child.type.removesuffix("_close")))
            case "link_close":
                start, target = open_at.pop()
                spans.append(Span(start, length, "link"))
                if target and target not in "".join(parts)[start:] and not target.startswith("#"):
                    piece = f" ({target})"  # where a link leads is always shown
                    spans.append(Span(length, length + len(piece), "muted"))
            case "image":
                piece = f"[image: {child.content or child.attrs.get('src', '')}]"
                spans.append(Span(length, length + len(piece), "muted"))
            case _:
                piece = child.content
        parts.append(piece)
        length += len(piece)
    return "".join(parts), spans


_CODE_ROLES = (  # pygments token -> role, the first match wins
    ("Token.Comment", "code.comment"),
    ("Token.Keyword", "code.keyword"),
    ("Token.Operator.Word", "code.keyword"),
    ("Token.Literal.String", "code.string"),
    ("Token.Literal.Number", "code.number"),
    ("Token.Name.Function", "code.name"),
    ("Token.Name.Class", "code.name"),
    ("Token.Name.Decorator", "code.name"),
    ("Token.Name.Tag", "code.keyword"),
    ("Token.Name.Builtin", "code.builtin"),
)


@cache
def _code_role(token_type: str) -> str:
    return next((role for name, role in _CODE_ROLES if token_type.startswith(name)), "")


def code_spans(text: str, language: str) -> list[Span]:
    """Highlighting of a code block; none for an unknown language or very long code."""
    if not language or len(text) > HIGHLIGHT_LIMIT:
        return []
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return []
    spans = []
    for start, token_type, value in lexer.get_tokens_unprocessed(text):
        if role := _code_role(str(token_type)):
            spans.append(Span(start, start + len(value), role))
    return spans
