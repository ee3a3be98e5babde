"""A jinja2 environment for chat templates: the functions that the ecosystem's templates use, and a limit on their work.

Templates come with a model, from elsewhere. jinja2's sandbox keeps them away from Python; here every render also has a
budget, so that a template can neither loop for minutes nor fill the memory. Loop turns, calls, filters, operators,
literals and output are counted with the size of what they make, and an operation that multiplies its operands is
refused beforehand. What remains possible: about a second of work, and one operation that makes _MAX_PRODUCT bytes.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_BUDGET = 250_000  # units of work a render; 800 messages of 1300 characters need 22 000
_UNIT = 256  # characters, or items of a list, that count as one unit
_MAX_PRODUCT = 50_000_000
_MAX_NUMBER_BITS = 4096
_MAX_SOURCE = 1_000_000  # characters of template

# Filters, and methods of text, bytes and numbers, whose result can be as large as the product of their operands.
_MULTIPLYING = frozenset(
    {"batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace", "rjust", "round"}
    | {"slice", "to_bytes", "translate", "truncate", "wordwrap", "zfill"}
)
# Filters that go through a text character by character.
_ITERATING = frozenset(
    {"batch", "groupby", "list", "map", "reject", "select", "slice", "sort", "striptags", "title", "unique"}
    | {"urlize", "wordcount", "wordwrap"}
)
_CHARACTERS_A_UNIT = 32  # for them
_NUMBER = re.compile(r"\d+")
_MAX_WIDTH = 100_000  # of all the fields of a format
_FORMAT_OF_ANY_WIDTH = re.compile(r"%[-#0 +\d.]*\*|\{[^}]*\{")  # a width taken from the arguments
_MAX_INDENT = 64
_ITEM_BYTES = 8  # of a list, for each of its items


class TooMuchWork(jinja2.TemplateError):
    """The template used up its budget."""

    def __init__(self) -> None:
        super().__init__("it does too much work")


class Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Set up as the ecosystem's: trimmed blocks, loop controls, `{% generation %}`, tojson, raise_exception.

    `load` compiles a template; call `reset` before each render. Not for two threads at once.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants too are computed at render time, within the budget
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        self._left = _BUDGET
        self.finalize = self.output
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.filters["tojson"] = _to_json
        self.filters = {name: self._limited(name, function) for name, function in self.filters.items()}

    def load(self, source: str) -> jinja2.Template:
        """Compile a template. Raises jinja2.TemplateError."""
        if len(source) > _MAX_SOURCE:
            raise jinja2.TemplateError(f"it is longer than {_MAX_SOURCE} characters")
        self.reset()
        return self.from_string(_Counted().visit(self.parse(source)))

    def reset(self) -> None:
        """Give the next render its whole budget."""
        self._left = _BUDGET

    def step(self, characters: int) -> str:
        """One turn of a loop, or one call of a macro, whose body holds so many characters of text."""
        self._spend(1 + characters // _UNIT)
        return ""

    def counted(self, value: Any) -> Any:
        """Count a value that came to be: a text or number by its size, a container by all that it holds, so that
        containers which hold each other twice over cannot grow without bound."""
        if isinstance(value, list | tuple | dict):
            stack, size = [value], 0
            while stack:
                item = stack.pop()
                size += _size(item)
                if size > self._left:
                    raise TooMuchWork
                if isinstance(item, Mapping):
                    stack.extend(item.values())
                elif isinstance(item, list | tuple):
                    stack.extend(item)
        self._spend(_size(value))
        return value

    def concatenate(self, *operands: Any) -> str:
        """The ~ operator."""
        texts = [str(self.counted(operand)) for operand in operands]
        self._spend(sum(map(_size, texts)))
        return "".join(texts)

    @pass_context  # takes the context only so that jinja2 does not compute constant output while compiling
    def output(self, context: Any, value: Any) -> Any:
        """Called with every value that is written."""
        return self.counted(value if isinstance(value, str) else str(self.counted(value)))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int | float) and abs(right) > 64:
            raise TooMuchWork
        if operator == "*" and _holds(left) != _holds(right):
            _refuse_product(*((left, right) if _holds(left) else (right, left)))
        if operator == "%" and isinstance(left, str | bytes):
            _refuse_wide(left)
            _refuse_product(left, right)
        return self.counted(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if owner is __self:  # what this class put into the template
            return __obj(*args)
        if isinstance(owner, str | bytes | int) and __obj.__name__ in _MULTIPLYING:
            _refuse_product(owner, *args, *kwargs.values())
        __self.counted(args)
        __self.counted({name: value for name, value in kwargs.items() if not name.startswith("_")})
        return __self.counted(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__
        _refuse_wide(text)

        @functools.wraps(wrapped)
        def limited(*args: Any, **kwargs: Any) -> str:
            _refuse_product(text, *args, *kwargs.values())
            return wrapped(*args, **kwargs)

        return limited

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same filter, counted. wraps() keeps jinja2's mark of what it passes as the first argument."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            operand, others = args[first], (*args[first + 1 :], *kwargs.values())
            if name in _MULTIPLYING:
                _refuse_product(operand, *others)
            if name in _ITERATING and isinstance(operand, str | bytes):
                self._spend(len(operand) // _CHARACTERS_A_UNIT)
            if name == "format" and isinstance(operand, str):
                _refuse_wide(operand)
            if isinstance(operand, Iterator):
                args = (*args[:first], self._metered(operand, others), *args[first + 1 :])
            return self.counted(function(*args, **kwargs))

        return limited

    def _metered(self, items: Iterator[Any], others: tuple[Any, ...]) -> Iterator[Any]:
        """The items, each counted with the filter's other arguments: join writes its separator as often."""
        each = sum(_size(other) for other in others)
        for item in items:
            self._spend(each)
            yield self.counted(item)

    def _spend(self, units: int) -> None:
        self._left -= units
        if self._left < 0:
            raise TooMuchWork


def _refuse_product(first: Any, *others: Any) -> None:
    """Raise TooMuchWork where `first`, repeated by numbers or filled with values, would become too large."""
    factor = sum(abs(other) if isinstance(other, int | float) else _weight(other) for other in others)
    if not max(1, _weight(first)) * max(1, factor) <= _MAX_PRODUCT:  # also for NaN
        raise TooMuchWork


def _refuse_wide(form: str | bytes) -> None:
    """Raise TooMuchWork where the fields of a format are wide, or as wide as its arguments say."""
    text = form if isinstance(form, str) else form.decode("latin-1")
    width = sum(int(digits[:9]) for digits in _NUMBER.findall(text))
    if width > _MAX_WIDTH or _FORMAT_OF_ANY_WIDTH.search(text):
        raise TooMuchWork


def _holds(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple | dict)


def _weight(value: Any) -> int:
    """Bytes of a value, roughly, with all that it holds; 0 for a number."""
    weight, stack = 0, [value]
    while stack and weight <= _MAX_PRODUCT:
        item = stack.pop()
        if isinstance(item, str | bytes):
            weight += len(item)
        elif isinstance(item, list | tuple):
            weight += _ITEM_BYTES * len(item)
            stack.extend(item)
        elif isinstance(item, Mapping):
            weight += _ITEM_BYTES * len(item)
            stack.extend(item.values())
    return weight


def _size(value: Any) -> int:
    """Units of work that a value stands for, not counting what it holds."""
    if _holds(value):
        return 1 + len(value) // _UNIT
    if isinstance(value, int) and value.bit_length() > _MAX_NUMBER_BITS:
        raise TooMuchWork
    return 1


class _Counted(NodeTransformer):
    """Makes a parsed template call the environment at each loop turn, macro call, literal and ~."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        return self._with_step(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._with_step(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        return self._with_step(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call_environment("concatenate", node.nodes, node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Call:
        self.generic_visit(node)
        return _call_environment("counted", [node], node.lineno)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Call:
        self.generic_visit(node)
        return _call_environment("counted", [node], node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _call_environment("counted", [node], node.lineno) if node.ctx == "load" else node

    def _with_step(self, node: Any) -> Any:
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        step = _call_environment("step", [nodes.Const(text)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node


def _call_environment(method: str, arguments: list[Any], line: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(function, arguments, [], None, None, lineno=line)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training tools; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain json.dumps: jinja2's own tojson escapes <, > and & for HTML."""
    if (indent is not None and indent > _MAX_INDENT) or any(len(text) > _MAX_INDENT for text in separators or ()):
        raise TooMuchWork
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
