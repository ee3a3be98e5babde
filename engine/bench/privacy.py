"""Takes what names a person or a machine out of what is given to strangers: names, hosts, paths, addresses, serials.

Two nets: what is captured is chosen field by field (engine/bench/environment.py), and every text then goes through
here, since an error message may quote anything.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

_USER_VARIABLES = ("USER", "LOGNAME", "USERNAME", "SUDO_USER", "LNAME")
_HOST_VARIABLES = ("HOSTNAME", "HOST", "COMPUTERNAME", "SLURMD_NODENAME")
_SECRET_VARIABLE = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY", re.IGNORECASE)
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}")
_LEAST_SECRET = 6  # characters; a shorter value is a flag, and would be found in innocent words

# In this order: a URL's host is no path, and a UUID's parts are no serial numbers.
_PATTERNS = (
    (re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"<>]+", re.IGNORECASE), "<url>"),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*"), "<address>"),
    (re.compile(r"\b(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE), "<uuid>"),
    (re.compile(r"\b[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5}\b", re.IGNORECASE), "<address>"),
    (re.compile(r"\b(?:[0-9]{1,3}\.){3}[0-9]{1,3}\b"), "<address>"),
    # IPv6: with its "::", or long enough to be no time of day.
    (
        re.compile(
            r"(?<![\w:])(?=[0-9a-f:]*::|(?:[0-9a-f]{1,4}:){4})(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?![\w:])",
            re.IGNORECASE,
        ),
        "<address>",
    ),
    (re.compile(r"\b(serial(?:[ _-]?(?:number|no))?\.?\s*[:=#]?\s*)[\w-]*[0-9][\w-]*", re.IGNORECASE), r"\1<serial>"),
    (re.compile(r"\b[A-Z0-9]*(?:[0-9][A-Z]*){9,}\b"), "<serial>"),  # long runs of capitals and digits
    (re.compile(r"\b[A-Za-z]:\\[^\s'\"<>|]*|\\\\[^\s'\"<>|]+"), "<path>"),
    (re.compile(r"(?<![\w<.~])~?/[^\s'\"<>:,;)]*[^\s'\"<>:,;).]"), "<path>"),
)
# Five numbers and more, and nothing else in the text: nvidia-cuda-cccl 13.3.5.0.6. Four could be an address.
_VERSION = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3}){4,7}")


class Scrubber:
    """Replaces, in texts and in everything made of them, what it knows by name and what looks like it."""

    def __init__(self, names: dict[str, str], whole: dict[str, str] | None = None) -> None:
        """names: text -> what stands in its place; found in any case, as whole words. whole: the same for texts that
        go first and wherever they stand: home folders, secrets."""
        self._whole = [(re.compile(re.escape(text), re.IGNORECASE), sign) for text, sign in _longest_first(whole or {})]
        self._names = [
            (re.compile(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", re.IGNORECASE), sign)
            for name, sign in _longest_first(names)
        ]

    @classmethod
    def of_this_machine(cls) -> Scrubber:
        """Knows the user, the host, the home folder, and the values of variables that hold secrets."""
        homes = {str(Path.home()), os.environ.get("HOME", ""), os.environ.get("USERPROFILE", "")}
        users = {os.environ.get(variable, "") for variable in _USER_VARIABLES} | _account_names()
        hosts = {os.environ.get(variable, "") for variable in _HOST_VARIABLES} | {platform.node()}
        with suppress(OSError):
            hosts.add(socket.gethostname())
        hosts |= {host.split(".")[0] for host in hosts}
        names = dict.fromkeys(users | {Path(home).name for home in homes if home}, "<user>")
        names |= dict.fromkeys(hosts - {"localhost"}, "<host>")
        whole = {home: "<home>" for home in homes if len(home) > 1}
        for variable, value in os.environ.items():
            if _SECRET_VARIABLE.search(variable) and len(value) >= _LEAST_SECRET:
                whole[value] = "<secret>"
        return cls(names, whole)

    def text(self, text: str) -> str:
        if _VERSION.fullmatch(text):
            return text
        # Patterns before names: a path that holds a user's name goes as a whole.
        for pattern, sign in (*self._whole, *_PATTERNS, *self._names):
            text = pattern.sub(sign, text)
        return text

    def __call__(self, value: Any) -> Any:
        """A JSON value with every text in it scrubbed. Keys are flint's own field names: a key that could be anything
        else is refused with ValueError."""
        match value:
            case str():
                return self.text(value)
            case dict():
                for key in value:
                    if not (isinstance(key, str) and _KEY.fullmatch(key)):
                        raise ValueError(f"{key!r} is not a field name")
                return {key: self(item) for key, item in value.items()}
            case list() | tuple():
                return [self(item) for item in value]
            case None | bool() | int() | float():
                return value
        raise TypeError(f"a {type(value).__name__} is no JSON value")


def _longest_first(names: dict[str, str]) -> list[tuple[str, str]]:
    return sorted(((name, sign) for name, sign in names.items() if name.strip()), key=lambda item: -len(item[0]))


def _account_names() -> set[str]:
    """The login name and, where the system keeps one, the person's name and its parts."""
    names = set()
    with suppress(OSError, KeyError, ImportError):
        names.add(getpass.getuser())
    with suppress(OSError, KeyError, ImportError):
        import pwd

        account = pwd.getpwuid(os.getuid())
        person = account.pw_gecos.split(",")[0]
        names |= {account.pw_name, person, *(part for part in person.split() if len(part) > 2)}
    return names
