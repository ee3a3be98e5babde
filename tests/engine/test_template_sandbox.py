from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ChatTemplateError
from engine.text.chat_template import ChatTemplate
from tests.engine.test_chat_template import SOURCES, chat, template

ROOT = Path(__file__).parent.parent.parent
NESTED = "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = "
BOMBS = {
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "silent loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}{% endfor %}{% endfor %}",
    "text in a loop": "{% for i in range(99999) %}" + "z" * 50_000 + "{% endfor %}",
    "text in a block": "{% set x %}{% for i in range(99999) %}" + "z" * 50_000 + "{% endfor %}{% endset %}",
    "recursive loop": "{% set x = [[1]] %}{% for i in [x, x] recursive %}{{ loop([x, x]) }}{% endfor %}",
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "call block": "{% macro f() %}{% for i in range(99999) %}{{ caller() }}{% endfor %}{% endmacro %}"
    "{% call f() %}{% for i in range(99999) %}{% endfor %}{% endcall %}",
    "doubling ~": NESTED + "ns.x ~ ns.x %}{% endfor %}",
    "doubling +": NESTED + "ns.x + ns.x %}{% endfor %}",
    "doubling *": NESTED + "ns.x * 2 %}{% endfor %}",
    "doubling %": NESTED + "'%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "doubling format": NESTED + "'{}{}'.format(ns.x, ns.x) %}{% endfor %}",
    "doubling filter": NESTED + "'%s%s' | format(ns.x, ns.x) %}{% endfor %}",
    "doubling join": NESTED + "[ns.x, ns.x] | join %}{% endfor %}",
    "doubling replace": NESTED + "ns.x | replace('a', 'aa') %}{% endfor %}",
    "doubling list": NESTED + "[ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "doubling tuple": NESTED + "(ns.x, ns.x) %}{% endfor %}{{ ns.x | tojson }}",
    "doubling dict": NESTED + "{'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | string }}",
    "doubling dict()": NESTED + "dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "doubling list +": NESTED.replace("'a'", "[1]") + "ns.x + ns.x %}{% endfor %}",
    "doubling block": NESTED + "(ns.x) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "squaring": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "repeat": "{{ 'a' * 10 ** 9 }}",
    "repeat, turned": "{{ 10 ** 9 * 'a' }}",
    "repeat a list": "{{ [('a' * 1000000)] * 100000 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "%": "{{ '%999999999d' % 1 }}",
    "% *": "{{ '%*d' % (10 ** 9, 1) }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "format {}": "{{ '{:{w}}'.format(1, w=10 ** 9) }}",
    "format_map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "center": "{{ 'x'.center(10 ** 9) }}",
    "center filter": "{{ 'x' | center(10 ** 9) }}",
    "ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "zfill": "{{ '1'.zfill(10 ** 9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "indent": "{{ ('a\n' * 100000) | indent(1000000) }}",
    "replace": "{% set x = 'a' * 1000000 %}{{ x.replace('a', x) }}",
    "replace filter": "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) }}",
    "join": "{{ ('a' * 1000000) | list | join('b' * 1000000) }}",
    "map": "{% set x = 'a' * 1000000 %}{{ range(100000) | map('string') | map('replace', '1', x) | join }}",
    "map default": "{% set x = 'a' * 1000000 %}{{ range(99999) | map(attribute='no', default=x) | join }}",
    "round": "{{ 5 | round(10 ** 9, 'ceil') }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "repeat bytes": "{{ 'a'.encode() * 10 ** 10 }}",
    "center bytes": "{{ 'a'.encode().center(10 ** 10) }}",
    "bytes, written": "{% set a = ('x' * 40000000).encode() %}{{ a }}{{ a }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "% of bytes": "{{ '%1000000000d'.encode() % 1 }}",
    "% many times": "{{ ('%(a)s' * 10000) % {'a': 'x' * 10000000} }}",
    "% wide fields": "{{ ('%99999d' * 10000) % ((1,) * 10000) }}",
    "format wide fields": "{{ ('{:>99999}' * 10000).format(*range(10000)) }}",
    "format an item": "{{ ('{0[0]}' * 10000).format(['x' * 10000000]) }}",
    "translate": "{{ ('a' * 1000000).translate({97: 'x' * 1000000}) }}",
    "tojson indent": "{{ [[[[[[[[[1]]]]]]]]] | tojson(indent=40000000) }}",
    "tojson separators": "{{ range(99999) | list | tojson(separators=('x' * 100000, ':')) }}",
    "join an iterator": "{{ range(99999) | map('string') | join('y' * 100000) }}",
    "repeat a small list": "{{ ([0] * 49000000) | length }}",
    "unique characters": "{{ ('x' * 49000000) | unique | list }}",
    "sorted characters": "{{ ('x' * 49000000) | sort }}",
    "wrapped words": "{{ ('x ' * 20000000) | wordwrap(1) }}",
    "write often": "{% set a = 'x' * 40000000 %}{{ a }}{{ a }}",
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What became of each bomb, in a process that may take 500 MB: far below what each of them wants."""
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout)


def set_off_the_bombs() -> None:
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (500_000_000, 500_000_000))
    outcomes = {}
    for name, source in BOMBS.items():
        try:
            outcomes[name] = f"rendered {len(ChatTemplate(source).render(chat('x')))} characters"
        except Exception as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(outcomes))


def test_long_texts_in_a_format_are_no_bomb() -> None:
    long = "x" * 100_000
    for form in ("'{} {} {}'.format(x, x, x)", "'%s %s %s' % (x, x, x)", "'%s %s %s' | format(x, x, x)"):
        source = "{% set x = messages[0]['content'] %}{{ " + form + " }}"
        assert ChatTemplate(source).render(chat(long)) == " ".join([long] * 3)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_stopped(name: str, outcomes: dict[str, str]) -> None:
    start, end = "ChatTemplateError: the chat template failed on this conversation: ", outcomes[name].partition(": ")[2]
    assert outcomes[name].startswith(start)
    assert end.endswith("it does too much work") or "maximum recursion depth" in end


@pytest.mark.parametrize("source", ["{{ range(100001) }}", "{{ lipsum(n=10) }}"])
def test_what_jinja_or_its_absence_stops(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render(chat("x"))


@pytest.mark.parametrize("name", SOURCES)
def test_long_conversations_are_far_from_the_budget(name: str) -> None:
    made = template(name)
    for messages in (chat(*["word 1234567 " * 100] * 801), chat("x" * 4_000_000)):
        assert len(made.render(messages)) > 1_000_000
        assert made._environment._left > 150_000


def test_every_render_has_its_own_budget() -> None:
    made = ChatTemplate("{% for i in range(60000) %}{{ i }}{% endfor %}")
    for _ in range(5):
        made.render(chat("x"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<é>"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        (
            "{% for i in [1, 2, 3, 4] %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}"
            "{% endfor %}",
            "13",
        ),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}!", "user!"),
        ("a\n    {% if true %}\nb\n    {% endif %}\nc", "a\nb\nc"),
        ("{% set ns = namespace(n=0) %}{% for i in (1, 2) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ 'a' ~ 1 ~ none ~ [2] }}", "a1None[2]"),
        ("{{ '%s-%03d' % ('x', 7) }} {{ '{}:{:>3}'.format(1, 2) }} {{ 2 ** 10 }}", "x-007 1:  2 1024"),
        ("{{ 'a-b'.split('-') | map('upper') | join('+') }}", "A+B"),
        ("{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "x1"),
        (
            "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}"
            "{{ f(1) }}{% call f(3) %}c{% endcall %}",
            "1232c",
        ),
        ("{% for i in [1, [2]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}", "12"),
        ("{{ tools is none }} {{ documents is none }} {{ nothing is defined }}[{{ nothing }}]", "True True False[]"),
        (
            "{{ messages[0].content.startswith('<') }} {{ (1, 2)[1] }} {{ 'x' if false else 'y' }} {{ -3 // 2 }}",
            "True 2 y -2",
        ),
        ("{{ '123456789'.strip('1') }} {{ '99999999{' | length }}", "23456789 9"),
    ],
)
def test_templates_work_as_in_the_ecosystem(source: str, expected: str) -> None:
    assert ChatTemplate(source).render(chat("<é>")) == expected


if __name__ == "__main__":
    set_off_the_bombs()
