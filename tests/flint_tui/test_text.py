"""Wrapping, Markdown, growing documents, and keeping model text harmless."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from flint_tui.text.blocks import layout
from flint_tui.text.document import PLAIN_LIMIT, Document
from flint_tui.text.markdown import parse
from flint_tui.text.safety import PrintableStream, printable
from flint_tui.text.wrap import wrap

SAMPLES = Path(__file__).resolve().parents[2]


def lines(text: str, width: int) -> list[str]:
    return [text[a:b] for a, b in wrap(text, width)]


def shown(document: Document, width: int = 60) -> list[str]:
    return [line.prefix + line.block.text[line.start : line.end] for line in document.lines(width)]


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("hello world this is long", 10, ["hello", "world this", "is long"]),
        ("a\n\nb\n", 10, ["a", "", "b", ""]),
        ("", 10, [""]),
        ("   ", 2, [""]),
        ("    indented code", 12, ["    indented", "code"]),
        ("abcdefghijklm xyz", 5, ["abcde", "fghij", "klm", "xyz"]),
        ("日本語のテキストは、どこでも", 10, ["日本語のテ", "キストは、", "どこでも"]),
        ("あいうえお、か", 10, ["あいうえ", "お、か"]),
        ("ab 日本", 4, ["ab", "日本"]),
        ("abcd \u0301", 4, ["abcd", "\u0301"]),
    ],
)
def test_wrapping(text: str, width: int, expected: list[str]) -> None:
    assert lines(text, width) == expected


@given(st.text(alphabet=st.sampled_from("ab  \n日本、。é́🇩🇪👩‍👧x"), max_size=80), st.integers(4, 20))
def test_wrapped_slices_cover_everything_but_spaces(text: str, width: int) -> None:
    slices = wrap(text, width)
    at = 0
    for begin, end in slices:
        assert begin >= at
        assert text[at:begin].strip() == ""
        assert cell_len(text[begin:end]) <= width or end - begin <= 2
        at = end
    assert text[at:].strip() == ""


@given(st.text(max_size=200), st.integers(1, 7))
def test_what_is_printable_has_no_control_characters(text: str, size: int) -> None:
    clean = printable(text)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", clean)
    stream = PrintableStream()
    pieces = "".join(stream.feed(text[i : i + size]) for i in range(0, len(text), size)) + stream.close()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", pieces)


def test_a_sequence_split_between_two_pieces_leaves_no_debris() -> None:
    text = "a\x1b[31;1mred\x1b]0;title\x07b\r\nc"
    for cut in range(len(text)):
        stream = PrintableStream()
        assert stream.feed(text[:cut]) + stream.feed(text[cut:]) + stream.close() == "aredb\nc"


def test_markdown_blocks() -> None:
    document = Document("# T\n\na **b** `c` [d](http://e) <x>\n\n- one\n  - two\n\n> q\n\n1. x\n2. y")
    assert shown(document) == [
        "T", "", "a b c d (http://e) <x>", "", "• one", "  ◦ two", "", "▎ q", "", "1. x", "2. y",
    ]  # fmt: skip
    roles = {span.role for block in parse(document.source) for span in block.spans}
    assert {"heading.1", "strong", "code", "link", "muted"} <= roles


def test_a_table_is_aligned() -> None:
    document = Document("| a | n |\n|---|--:|\n| x | 1 |\n| yy | 22 |")
    assert shown(document) == ["a  │  n", "───┼───", "x  │  1", "yy │ 22"]


def test_code_is_highlighted_and_wrapped_without_loss() -> None:
    block = parse("```python\nx = 1  # " + "long " * 30 + "\n```")[0]
    assert {"code.number", "code.comment"} <= {span.role for span in block.spans}
    assert "".join(line.block.text[line.start : line.end] for line in layout(block, 40)).replace(" ", "") == (
        block.text.replace(" ", "")
    )


def test_unknown_languages_and_unclosed_fences_are_shown() -> None:
    assert shown(Document("```nosuchlanguage\nx\n```")) == ["x"]
    assert shown(Document("text\n\n```python\nx = 1")) == ["text", "", "x = 1"]


@pytest.mark.parametrize("seed", range(3))
def test_growing_by_pieces_shows_what_parsing_at_once_shows(seed: int) -> None:
    source = "\n\n".join(
        [
            "# Title\n\nA paragraph with *emphasis*\nand a second line.",
            "1. one\n2. two\n   - nested\n   - more\n3. three",
            "```python\n" + "x = f(1)  # comment\n" * 200 + "```",  # longer than PLAIN_LIMIT
            "word " * 1000,
            "| a | b |\n|---|---|\n| 1 | 2 |",
            "> quoted\n> twice\n\nend",
        ]
    )
    assert len(source) > 2 * PLAIN_LIMIT
    random_source = random.Random(seed)
    document = Document(closed=False)
    at = 0
    while at < len(source):
        size = random_source.randint(1, 300)
        document.append(source[at : at + size])
        document.height(60)
        at += size
    document.close()
    assert shown(document) == shown(Document(source))


def test_a_long_open_block_is_plain_and_costs_only_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from flint_tui.text import blocks

    wrapped: list[int] = []
    real = blocks.wrap
    monkeypatch.setattr(
        blocks, "wrap", lambda text, width, start=0: wrapped.append(len(text)) or real(text, width, start)
    )
    document = Document(closed=False)
    document.height(80)
    document.append("```python\n")
    for i in range(1200):
        document.append(f"x{i} = f({i})\n")
        document.height(80)
    assert document.height(80) >= 1200
    assert max(wrapped[-500:]) <= 4096 + 100
    assert not any(line.block.spans for line in document.lines(80))  # plain while it is open
    document.append("```\n\nafter")
    assert any(line.block.spans for line in document.lines(80))  # highlighted once it has closed
    assert shown(document, 80)[-1] == "after"


def test_tint_marks_the_rendered_text_of_source_ranges() -> None:
    source = "one **two** three\n\n```\nfour\n```"
    where = [(source.index("two"), source.index("two") + 3), (source.index("four"), source.index("four") + 4)]
    document = Document(source, marks=where, tint=True)
    found = [
        block.text[span.start : span.end]
        for block in (line.block for line in document.lines(40))
        for span in block.spans
        if span.role == "accepted"
    ]
    assert found == ["two", "four"]
    document.tint = False
    assert not any(span.role == "accepted" for line in document.lines(40) for span in line.block.spans)


def test_rewrapping_at_another_width_is_what_that_width_shows() -> None:
    source = "word " * 100 + "\n\n- " + "item " * 40
    document = Document(source)
    document.height(60)
    assert shown(document, 33) == shown(Document(source), 33)


@pytest.mark.parametrize("seed", range(20))
def test_no_text_makes_the_parser_fail(seed: int) -> None:
    """Models write anything: fragments of markup in any order."""
    random_source = random.Random(seed)
    parts = [
        "```",
        "\n",
        "- ",
        "1. ",
        "> ",
        "|",
        "**",
        "`",
        "[",
        "](",
        ")",
        "#",
        "~~",
        "  ",
        "x",
        "\n\n",
        "---",
        "<a>",
        "&amp;",
        "\\",
    ]
    source = "".join(random_source.choice(parts) for _ in range(400))
    document = Document(closed=False)
    for start in range(0, len(source), 7):
        document.append(source[start : start + 7])
        document.height(30)
    document.close()
    assert document.height(30) > 0


@pytest.mark.parametrize("seed", range(4))
def test_what_is_called_stable_has_not_changed(seed: int) -> None:
    """The transcript repaints from `stable` on: everything above must look as before."""
    source = "# T\n\nSome *prose* here.\n\n```py\n" + "x = f(1)\n" * 400 + "```\n\n1. one\n2. two\n\n" + "word " * 900
    random_source = random.Random(seed)
    document = Document(closed=False)
    document.height(50)
    at = 0
    while at < len(source):
        size = random_source.randint(1, 120)
        before = shown(document, 50)
        document.append(source[at : at + size])
        assert shown(document, 50)[: document.stable] == before[: document.stable]
        assert document.stable <= max(0, len(before))
        at += size
    before = shown(document, 50)
    document.close()
    assert shown(document, 50)[: document.stable] == before[: document.stable]
