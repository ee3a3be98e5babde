"""Reads JSON written by others: every surprise becomes a CheckpointError naming the file and the key."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NoReturn

from engine.errors import CheckpointError


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data` (UTF-8). Duplicate keys, NaN, infinities and absurd nesting are errors."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise CheckpointError(f"{where}: JSON is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {_kind(value)}")
    return value


class Record:
    """One JSON object being read into a dataclass: take each key with its type, then `finish()` finds the rest."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise CheckpointError(f"{where}: expected a JSON object, found {_kind(value)}")
        self.where = where
        self._left = dict(value)

    def fail(self, key: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: {key}: {problem}")

    def take(self, key: str) -> Any:
        if key not in self._left:
            raise CheckpointError(f"{self.where}: missing key {key}")
        return self._left.pop(key)

    def text(self, key: str) -> str:
        value = self.take(key)
        if not isinstance(value, str):
            self.fail(key, f"expected text, found {_kind(value)}")
        return value

    def boolean(self, key: str) -> bool:
        value = self.take(key)
        if not isinstance(value, bool):
            self.fail(key, f"expected true or false, found {_kind(value)}")
        return value

    def integer(self, key: str) -> int:
        value = self.take(key)
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(key, f"expected an integer, found {_kind(value)}")
        return value

    def optional_integer(self, key: str) -> int | None:
        if self._left.get(key, 0) is None:
            return self.take(key)
        return self.integer(key)

    def number(self, key: str) -> float:
        return self._number(key, self.take(key))

    def integers(self, key: str) -> tuple[int, ...]:
        values = self._list(key)
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            self.fail(key, "expected a list of integers")
        return tuple(values)

    def numbers(self, key: str) -> tuple[float, ...]:
        return tuple(self._number(key, value) for value in self._list(key))

    def record(self, key: str) -> Record:
        return Record(self.take(key), f"{self.where}: {key}")

    def optional_record(self, key: str) -> Record | None:
        if self._left.get(key, 0) is None:
            return self.take(key)
        return self.record(key)

    def remaining(self) -> list[str]:
        """The keys not yet taken."""
        return list(self._left)

    def finish(self) -> None:
        if self._left:
            raise CheckpointError(f"{self.where}: unknown key {sorted(self._left)[0]}")

    def _list(self, key: str) -> Sequence[Any]:
        value = self.take(key)
        if not isinstance(value, list | tuple):
            self.fail(key, f"expected a list, found {_kind(value)}")
        return value

    def _number(self, key: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(key, f"expected a number, found {_kind(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.fail(key, "expected a finite number")
        return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        repeated = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"duplicate key {repeated!r}")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
