"""The store: nothing lost, nothing mixed up, several processes at once."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.errors import FlintError
from flint_tui.conversations import (
    ConversationNotFound,
    ConversationStore,
    Message,
    title_of,
    to_json,
    to_markdown,
)

WRITER = """
import sys
from pathlib import Path
from flint_tui.conversations import ConversationStore, Message
store = ConversationStore(Path(sys.argv[1]))
conversation = store.create("model", title=sys.argv[2])
for i in range(100):
    store.save(conversation.id, i, Message("user", f"{sys.argv[2]} {i}"))
    store.flush()
store.close()
"""


@pytest.fixture
def store(tmp_path: Path):
    store = ConversationStore(tmp_path / "c.db")
    yield store
    store.close()


def test_messages_come_back_as_they_were(store: ConversationStore) -> None:
    conversation = store.create("model", "be brief", "title")
    message = Message(
        "assistant", "text \x00 \U0001f525", marks=((1, 3), (5, 9)), reason="stop", figures={"tok_s": 12.5}
    )
    store.save(conversation.id, 1, message)
    store.save(conversation.id, 0, Message("user", "hello"))
    assert store.flush()
    assert store.messages(conversation.id)[1] == message
    assert [m.text for m in store.messages(conversation.id)] == ["hello", message.text]
    assert store.find(conversation.id[:4]).system == "be brief"


def test_a_streaming_message_is_replaced_not_repeated(store: ConversationStore) -> None:
    conversation = store.create("model")
    message = Message("assistant", "")
    for text in ("a", "ab", "abc"):
        store.save(conversation.id, 0, Message("assistant", text, id=message.id))
    store.flush()
    assert [m.text for m in store.messages(conversation.id)] == ["abc"]


def test_search_finds_titles_and_text_and_treats_wildcards_as_text(store: ConversationStore) -> None:
    for title, text in (("apples", "about 100% fruit"), ("pears", "about 1000 fruit"), ("snake_case", "x")):
        conversation = store.create("model", title=title)
        store.save(conversation.id, 0, Message("user", text))
    store.flush()
    assert {c.title for c in store.search("FRUIT")} == {"apples", "pears"}
    assert [c.title for c in store.search("100%")] == ["apples"]
    assert [c.title for c in store.search("e_c")] == ["snake_case"]
    assert len(store.search()) == 3
    assert store.search("nothing") == []


def test_rename_truncate_fork_and_delete(store: ConversationStore) -> None:
    conversation = store.create("model", title="a")
    messages = [Message("user", "1"), Message("assistant", "2"), Message("user", "3")]
    for i, message in enumerate(messages):
        store.save(conversation.id, i, message)
    fork = store.fork(conversation, messages[:2])
    store.truncate(conversation.id, 1)
    store.update(conversation.id, title="b")
    store.flush()
    assert [m.text for m in store.messages(fork.id)] == ["1", "2"]
    assert store.find(fork.id).parent == conversation.id
    assert [m.text for m in store.messages(conversation.id)] == ["1"]
    assert store.find(conversation.id).title == "b"
    store.delete(conversation.id)
    store.flush()
    assert store.messages(conversation.id) == []
    assert [c.id for c in store.search()] == [fork.id]


def test_an_unknown_id_says_so(store: ConversationStore) -> None:
    with pytest.raises(ConversationNotFound, match="No conversation has been saved yet"):
        store.find()
    store.create("model")
    store.flush()
    with pytest.raises(ConversationNotFound, match="'zzz'"):
        store.find("zzz")
    with pytest.raises(ConversationNotFound):
        store.find("%")


def test_two_processes_and_a_thread_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    processes = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name]) for name in ("one", "two")]
    store = ConversationStore(path)
    conversation = store.create("model", title="three")
    for i in range(100):
        store.save(conversation.id, i, Message("user", f"three {i}"))
    store.flush(30.0)
    assert [process.wait(60) for process in processes] == [0, 0]
    for found in store.search():
        assert [m.text for m in store.messages(found.id)] == [f"{found.title} {i}" for i in range(100)]
    assert len(store.search()) == 3
    store.close()
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_write_that_fails_is_told_and_the_next_succeeds(tmp_path: Path) -> None:
    problems: list[str] = []
    store = ConversationStore(tmp_path / "c.db", problems.append)
    store.save("no such conversation", 0, Message("user", "x"))
    store.flush()
    assert len(problems) == 1
    assert "could not be saved" in problems[0]
    conversation = store.create("model")
    store.save(conversation.id, 0, Message("user", "y"))
    store.flush()
    assert [m.text for m in store.messages(conversation.id)] == ["y"]
    store.close()


def test_a_file_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "c.db").write_bytes(b"not a database, not at all" * 100)
    with pytest.raises(FlintError, match="Cannot open"):
        ConversationStore(tmp_path / "c.db")


def test_a_newer_file_is_refused(tmp_path: Path) -> None:
    ConversationStore(tmp_path / "c.db").close()
    database = sqlite3.connect(tmp_path / "c.db")
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(FlintError, match="another version"):
        ConversationStore(tmp_path / "c.db")


def test_closing_writes_what_is_queued(tmp_path: Path) -> None:
    others = set(threading.enumerate())  # of apps that earlier tests left closing
    store = ConversationStore(tmp_path / "c.db")
    conversation = store.create("model")
    for i in range(200):
        store.save(conversation.id, i, Message("user", str(i)))
    store.close(30.0)
    assert not any(thread.name == "flint-store" for thread in set(threading.enumerate()) - others)
    again = ConversationStore(tmp_path / "c.db")
    assert len(again.messages(conversation.id)) == 200
    again.close()


def test_exports(store: ConversationStore) -> None:
    conversation = store.create("model", "sys", "Title")
    messages = [Message("user", "hi"), Message("assistant", "*hello*", reason="stop")]
    assert to_markdown(conversation, messages) == (
        "# Title\n\n_model_\n\n## System\n\nsys\n\n## You\n\nhi\n\n## model\n\n*hello*\n"
    )
    parsed = json.loads(to_json(conversation, messages))
    assert [m["role"] for m in parsed["messages"]] == ["user", "assistant"]


def test_titles() -> None:
    assert title_of("\n  first line \nsecond") == "first line"
    assert len(title_of("x" * 100)) == 60
    assert title_of(" \n ") == "New conversation"
