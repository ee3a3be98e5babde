"""A jinja2 environment for chat templates: the functions that the ecosystem's templates use, and a limit on their work.

Templates come with a model, from elsewhere. jinja2's sandbox keeps them away from Python; here every render also has a
budget, so that a template can neither loop for minutes nor fill the memory. Loop turns, calls, filters, operators,
literals and output are counted with the size of what they make, and an operation that multiplies its operands is
refused beforehand. What remains possible: about a second of work, and one operation that makes _MAX_PRODUCT characters.
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

# Filters and string methods whose result can be as large as the product of their operands.
_MULTIPLYING = frozenset(
    {"batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace", "rjust", "round"}
    | {"slice", "truncate", "wordwrap", "zfill"}
)
# A width of a million in a format, or one taken from the arguments.
_WIDE_FORMAT = re.compile(r"\d{6}|%[-#0 +\d.]*\*|\{[^}]*\{")


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
        return self.counted(value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int | float) and abs(right) > 64:
            raise TooMuchWork
        if operator == "*" and _holds(left) != _holds(right):
            self._refuse_product(*((left, right) if _holds(left) else (right, left)))
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise TooMuchWork
        return self.counted(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if owner is __self:  # what this class put into the template
            return __obj(*args)
        if isinstance(owner, str) and __obj.__name__ in _MULTIPLYING:
            __self._refuse_product(owner, *args, *kwargs.values())
        __self.counted(args)
        __self.counted({name: value for name, value in kwargs.items() if not name.startswith("_")})
        return __self.counted(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FORMAT.search(value.__self__):
            raise TooMuchWork
        return wrapped

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same filter, counted. wraps() keeps jinja2's mark of what it passes as the first argument."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            if name in _MULTIPLYING:
                self._refuse_product(*args[first:], *kwargs.values())
            if name == "format" and isinstance(args[first], str) and _WIDE_FORMAT.search(args[first]):
                raise TooMuchWork
            if isinstance(args[first], Iterator):
                args = (*args[:first], self._metered(args[first]), *args[first + 1 :])
            return self.counted(function(*args, **kwargs))

        return limited

    def _metered(self, items: Iterator[Any]) -> Iterator[Any]:
        return (self.counted(item) for item in items)

    def _refuse_product(self, first: Any, *others: Any) -> None:
        product = len(first) if _holds(first) else 1
        for operand in others:
            if isinstance(operand, int | float):
                product *= max(1, abs(operand))
            elif _holds(operand):
                product *= max(1, len(operand))
        if not product <= _MAX_PRODUCT:
            raise TooMuchWork

    def _spend(self, units: int) -> None:
        self._left -= units
        if self._left < 0:
            raise TooMuchWork


def _holds(value: Any) -> bool:
    return isinstance(value, str | list | tuple | dict)


def _size(value: Any) -> int:
    """Units of work that a value stands for, not counting what it holds."""
    if isinstance(value, str | list | tuple | dict):
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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
