"""What each role of a message's text looks like, in the theme's colours."""

from __future__ import annotations

from textual.style import Style

STYLES = {
    "user": "$foreground on $surface",
    "assistant": "$foreground",
    "note": "$muted",
    "error": "$error",
    "bar": "$accent",
    "chosen": "$warning",
    "footer": "$muted",
    "pen": "$accent",
    "strong": "bold",
    "em": "italic",
    "s": "strike",
    "link": "underline",
    "code": "$accepted",
    "muted": "$muted",
    "rule": "$faint",
    "bullet": "$accent",
    "heading.1": "bold underline",
    "heading.2": "bold",
    "heading.3": "bold $primary",
    "block": "on $surface",
    "accepted": "$accepted on $accent 14%",
    "code.comment": "italic $muted",
    "code.keyword": "$accent",
    "code.string": "$success",
    "code.number": "$warning",
    "code.name": "$single",
    "code.builtin": "$single",
}
# Without colour the same is said by other means.
NO_COLOR = {
    **STYLES,
    "code": "",
    "accepted": "underline",
    "user": "bold",
    "code.keyword": "bold",
    "muted": "",
    "footer": "dim",
}


def role_style(role: str, variables: dict[str, str], no_color: bool) -> Style:
    return Style.parse((NO_COLOR if no_color else STYLES)[role], variables)
