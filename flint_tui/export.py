"""Writes the conversation to a file: Markdown for people, JSON for programs, by the file's ending."""

from __future__ import annotations

import re
from pathlib import Path

from flint_tui.conversations import Conversation, Message, to_json, to_markdown


def default_name(conversation: Conversation) -> str:
    stem = re.sub(r"[^\w-]+", "-", conversation.title.lower()).strip("-")[:48] or "conversation"
    return f"flint-{stem}.md"


def export(conversation: Conversation, messages: list[Message], path: str) -> str:
    """Write the file; returns one line about it. An existing file is never overwritten."""
    target = Path(path).expanduser()
    text = to_json(conversation, messages) if target.suffix == ".json" else to_markdown(conversation, messages)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return f"{target} exists; nothing was written"
    except OSError as error:
        return f"{target}: {error.strerror or error}"
    return f"Exported to {target.resolve()}"
