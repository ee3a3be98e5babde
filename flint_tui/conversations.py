"""Conversations in SQLite: every turn is saved while it streams.

Writes go through one thread with one connection (WAL), so the screen never waits for a disk; reads use a connection
of their own. Several processes may share the file. A killed process loses what was not yet written: callers save a
streaming reply every SAVE_INTERVAL_S.

    conversations   id, title, model, system prompt, times, and what it was forked from
    messages        id, conversation, position, role, text, tint marks, how it ended, figures
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from engine.errors import FlintError
from engine.files.paths import data_dir

SAVE_INTERVAL_S = 0.5
VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, title TEXT NOT NULL, model TEXT NOT NULL, system TEXT NOT NULL,
    created REAL NOT NULL, updated REAL NOT NULL, parent TEXT
);
CREATE TABLE IF NOT EXISTS messages (
    id TEXT PRIMARY KEY, conversation TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
    position INTEGER NOT NULL, role TEXT NOT NULL, text TEXT NOT NULL, marks TEXT NOT NULL,
    reason TEXT NOT NULL, figures TEXT NOT NULL, created REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS messages_by_conversation ON messages (conversation, position, created);
CREATE INDEX IF NOT EXISTS conversations_by_time ON conversations (updated DESC);
"""

Role = Literal["user", "assistant"]


class ConversationNotFound(FlintError):
    """No saved conversation has that id."""


def new_id() -> str:
    return uuid.uuid4().hex[:12]


@dataclass(frozen=True)
class Message:
    """One turn. marks: source ranges of accepted draft tokens. reason: how a reply ended ("" while it runs, or for a
    user's turn). figures: what the reply's statistics line says."""

    role: Role
    text: str
    id: str = field(default_factory=new_id)
    marks: tuple[tuple[int, int], ...] = ()
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Conversation:
    """A conversation without its messages."""

    id: str
    title: str
    model: str
    system: str
    created: float
    updated: float
    parent: str | None = None
    messages: int = 0


def title_of(text: str) -> str:
    """A title from the first prompt: its first line, at most 60 characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "New conversation")
    return line if len(line) <= 60 else line[:59].rstrip() + "…"


_Write = Callable[[sqlite3.Connection], object]


class ConversationStore:
    """The saved conversations. Methods that change something return at once; `flush` waits for the disk."""

    def __init__(self, path: Path | None = None, on_error: Callable[[str], object] | None = None) -> None:
        self.path = path if path is not None else data_dir() / "conversations.db"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._on_error = on_error or (lambda message: None)
        self._reader = self._connect()
        self._writes: SimpleQueue[_Write | threading.Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write_loop, name="flint-store", daemon=True)
        self._thread.start()

    def _connect(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(self.path, timeout=5.0, check_same_thread=False, isolation_level=None)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.executescript(_SCHEMA)
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise FlintError(
                    f"{self.path} was written by another version of flint", "move it away to start with an empty one"
                )
            connection.execute(f"PRAGMA user_version = {VERSION}")
        except sqlite3.Error as error:
            raise FlintError(f"Cannot open {self.path}: {error}", "move it away, or set FLINT_DATA_DIR") from None
        return connection

    # -- writing

    def create(
        self, model: str, system: str = "", title: str = "New conversation", parent: str | None = None
    ) -> Conversation:
        now = time.time()
        conversation = Conversation(new_id(), title, model, system, now, now, parent)
        row = (conversation.id, title, model, system, now, now, parent)
        self._writes.put(lambda db: db.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?)", row))
        return conversation

    def save(self, conversation: str, position: int, message: Message) -> None:
        """Insert the message, or replace what was saved of it so far."""
        marks = json.dumps(message.marks, separators=(",", ":"))
        figures = json.dumps(message.figures, separators=(",", ":"))
        row = (
            message.id,
            conversation,
            position,
            message.role,
            message.text,
            marks,
            message.reason,
            figures,
            message.created,
        )

        def write(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR REPLACE INTO messages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            db.execute("UPDATE conversations SET updated = ? WHERE id = ?", (time.time(), conversation))

        self._writes.put(write)

    def truncate(self, conversation: str, position: int) -> None:
        """Remove the messages from `position` on."""
        statement = "DELETE FROM messages WHERE conversation = ? AND position >= ?"
        self._writes.put(lambda db: db.execute(statement, (conversation, position)))

    def update(
        self, conversation: str, *, title: str | None = None, system: str | None = None, model: str | None = None
    ) -> None:
        changes = {k: v for k, v in (("title", title), ("system", system), ("model", model)) if v is not None}
        statement = f"UPDATE conversations SET {', '.join(f'{k} = ?' for k in changes)} WHERE id = ?"
        if changes:
            self._writes.put(lambda db: db.execute(statement, (*changes.values(), conversation)))

    def delete(self, conversation: str) -> None:
        self._writes.put(lambda db: db.execute("DELETE FROM conversations WHERE id = ?", (conversation,)))

    def fork(self, conversation: Conversation, messages: Sequence[Message], title: str | None = None) -> Conversation:
        """A new conversation that begins with these messages."""
        title = title or f"{conversation.title} (fork)"
        copy = self.create(conversation.model, conversation.system, title, conversation.id)
        for position, message in enumerate(messages):
            self.save(copy.id, position, replace(message, id=new_id()))
        return copy

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything written so far is in the file."""
        done = threading.Event()
        self._writes.put(done)
        return done.wait(timeout)

    def close(self, timeout: float = 1.0) -> None:
        """Write what is queued and stop. Idempotent."""
        self._writes.put(None)
        self._thread.join(timeout)
        self._reader.close()

    def _write_loop(self) -> None:
        db = self._connect()
        closing = False
        while not closing:
            batch: list[_Write | threading.Event | None] = [self._writes.get()]
            while not self._writes.empty():
                batch.append(self._writes.get())
            closing = None in batch
            writes = [item for item in batch if callable(item)]
            try:
                if writes:
                    db.execute("BEGIN IMMEDIATE")
                    for write in writes:
                        write(db)
                    db.execute("COMMIT")
            except sqlite3.Error as error:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                self._on_error(f"The conversation could not be saved: {error}")
            for item in batch:
                if isinstance(item, threading.Event):
                    item.set()
        db.close()

    # -- reading

    def search(self, text: str = "", limit: int = 200) -> list[Conversation]:
        """Newest first; `text` is looked for titles and messages, case-insensitively ("": all)."""
        pattern = "%" + text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        rows = self._reader.execute(
            """
            SELECT c.*, (SELECT count(*) FROM messages WHERE conversation = c.id) FROM conversations c
            WHERE ? = '' OR c.title LIKE ? ESCAPE '\\'
               OR EXISTS (SELECT 1 FROM messages WHERE conversation = c.id AND text LIKE ? ESCAPE '\\')
            ORDER BY updated DESC LIMIT ?
            """,
            (text, pattern, pattern, limit),
        )
        return [Conversation(*row) for row in rows]

    def find(self, wanted: str = "") -> Conversation:
        """By id or its beginning; "" is the newest. Raises ConversationNotFound."""
        rows = self._reader.execute(
            "SELECT *, 0 FROM conversations WHERE substr(id, 1, ?) = ? ORDER BY updated DESC LIMIT 1",
            (len(wanted), wanted),
        ).fetchall()
        if not rows:
            what = f"No conversation {wanted!r}" if wanted else "No conversation has been saved yet"
            raise ConversationNotFound(what, "`flint chat` starts a new one; its list shows the saved ones")
        return Conversation(*rows[0])

    def messages(self, conversation: str) -> list[Message]:
        rows = self._reader.execute(
            "SELECT id, role, text, marks, reason, figures, created FROM messages WHERE conversation = ?"
            " ORDER BY position, created",
            (conversation,),
        )
        return [
            Message(role, text, id, tuple((a, b) for a, b in json.loads(marks)), reason, json.loads(figures), created)
            for id, role, text, marks, reason, figures, created in rows
        ]

    def prompts(self, limit: int = 200) -> list[str]:
        """The user's last prompts over all conversations, oldest first."""
        rows = self._reader.execute(
            "SELECT text FROM messages WHERE role = 'user' ORDER BY created DESC LIMIT ?", (limit,)
        ).fetchall()
        return [text for (text,) in reversed(rows)]


def to_markdown(conversation: Conversation, messages: Sequence[Message]) -> str:
    """The whole conversation for people to read."""
    parts = [f"# {conversation.title}", f"_{conversation.model}_"]
    if conversation.system:
        parts += ["## System", conversation.system]
    for message in messages:
        parts += ["## You" if message.role == "user" else f"## {conversation.model}", message.text]
    return "\n\n".join(parts) + "\n"


def to_json(conversation: Conversation, messages: Sequence[Message]) -> str:
    """The whole conversation for programs: one object, the messages in order."""
    described = asdict(conversation)
    described["messages"] = [asdict(message) for message in messages]
    return json.dumps(described, ensure_ascii=False, indent=2) + "\n"
