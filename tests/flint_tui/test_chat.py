"""The chat: prompts, replies, stopping, queueing, modes, editing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flint_tui.actions import ACTIONS, SLASH, slash_action
from flint_tui.app import FlintApp
from flint_tui.screens.help import HelpScreen
from flint_tui.text.document import Document
from tests.flint_tui.driving import ask, idle, running, screen_text, wait
from tests.flint_tui.fake_engine import ANSWER, FakeEngine


async def test_a_prompt_is_answered_and_saved() -> None:
    async with running() as (app, pilot, engine):
        await ask(pilot, "What is the capital of France?")
        assert [m.text for m in app.session.messages] == ["What is the capital of France?", ANSWER]
        assert engine.asked[0][0] == [{"role": "user", "content": "What is the capital of France?"}]
        text = screen_text(app)
        assert "What is the capital of France?" in text
        assert "The capital of France is Paris." in text
        assert "200 tok/s" in text
        app.store.flush()
        saved = app.store.messages(app.store.find().id)
        assert [m.text for m in saved] == ["What is the capital of France?", ANSWER]
        assert saved[1].reason == "stop"
        assert app.store.find().title == "What is the capital of France?"


async def test_the_whole_conversation_goes_to_the_model() -> None:
    async with running(FakeEngine(answers=["one", "two"]), system="be brief") as (_app, pilot, engine):
        await ask(pilot, "first")
        await ask(pilot, "second")
        assert [turn["content"] for turn in engine.asked[1][0]] == ["be brief", "first", "one", "second"]
        assert engine.asked[1][0][0]["role"] == "system"


async def test_text_shows_while_the_reply_is_still_running() -> None:
    engine = FakeEngine(hold=True)
    async with running(engine) as (app, pilot, _):
        await ask(pilot, "hello", finish=False)
        engine.release(4)
        await wait(pilot, lambda: "The capital of France" in screen_text(app))
        assert app.session.replying
        engine.release(1000)
        await idle(pilot)


async def test_escape_stops_the_reply_and_keeps_what_came() -> None:
    engine = FakeEngine(hold=True)
    async with running(engine) as (app, pilot, _):
        await ask(pilot, "hello", finish=False)
        engine.release(3)
        await wait(pilot, lambda: app.session.reply is not None and app.session.reply.text == "The capital of")
        await pilot.press("escape")
        await idle(pilot)
        assert app.session.messages[-1].text == "The capital of"
        assert app.session.messages[-1].reason == "cancelled"
        assert "stopped" in screen_text(app)
        await pilot.press("escape", "escape", "escape")
        assert app.is_running


async def test_prompts_typed_ahead_are_sent_one_after_the_other() -> None:
    engine = FakeEngine(answers=["one", "two", "three"], hold=True)
    async with running(engine) as (app, pilot, _):
        for prompt in ("a", "b", "c"):
            await ask(pilot, prompt, finish=False)
        assert app.session.queue == ["b", "c"]
        assert "queued" in screen_text(app)
        engine.release(1000)
        await wait(pilot, lambda: len(app.session.messages) == 6)
        await idle(pilot)
        assert [m.text for m in app.session.messages] == ["a", "one", "b", "two", "c", "three"]


async def test_stopping_gives_queued_prompts_back_to_the_composer() -> None:
    engine = FakeEngine(hold=True)
    async with running(engine) as (app, pilot, _):
        await ask(pilot, "a", finish=False)
        await ask(pilot, "b", finish=False)
        app.chat.composer.put("draft")
        await pilot.press("escape")
        await idle(pilot)
        assert app.session.queue == []
        assert app.chat.composer.text == "b\n\ndraft"
        assert len(engine.asked) == 1


async def test_mode_switches_by_key_and_mouse_and_both_figures_stay() -> None:
    async with running() as (app, pilot, engine):
        await ask(pilot, "a")
        await pilot.press("ctrl+t")
        assert app.session.options.mode == "speculative"
        await ask(pilot, "b")
        assert [options.mode for _, options in engine.asked] == ["single", "speculative"]
        assert set(app.session.live.last) == {"single", "speculative"}
        text = screen_text(app)
        assert "×2." in text
        assert "tok/step" in text
        await pilot.click("#mode")
        assert app.session.options.mode == "single"


async def test_mode_switched_during_a_reply_applies_to_the_next() -> None:
    engine = FakeEngine(hold=True)
    async with running(engine) as (app, pilot, _):
        await ask(pilot, "a", finish=False)
        await pilot.press("ctrl+t")
        assert "next" in screen_text(app)
        engine.release(1000)
        await idle(pilot)
        await ask(pilot, "b")
        assert [options.mode for _, options in engine.asked] == ["single", "speculative"]


async def test_accepted_draft_tokens_are_tinted_exactly() -> None:
    async with running() as (app, pilot, _):
        await pilot.press("ctrl+t")
        await ask(pilot, "a")
        await pilot.press("f7")
        entry = app.chat.transcript.entries[-1]
        lines = [line for line in entry.document.lines(80) if any(s.role == "accepted" for s in line.block.spans)]
        tinted = [line.block.text[s.start : s.end] for line in lines for s in line.block.spans if s.role == "accepted"]
        # The first token is not drafted; then two of three are: " capital of" | " France" | " is **Paris**." | ...
        assert tinted[0] == " capital of"
        assert tinted[1] == " is Paris."
        assert app.session.messages[-1].marks[0] == (3, 14)
        await pilot.press("f7")
        assert not any(s.role == "accepted" for line in entry.document.lines(80) for s in line.block.spans)


async def test_regenerate_replaces_the_last_reply() -> None:
    async with running(FakeEngine(answers=["one", "two"])) as (app, pilot, engine):
        await ask(pilot, "a")
        await pilot.press("f5")
        await idle(pilot)
        assert [m.text for m in app.session.messages] == ["a", "two"]
        assert len(engine.asked[1][0]) == 1
        app.store.flush()
        assert [m.text for m in app.store.messages(app.store.find().id)] == ["a", "two"]


async def test_edit_and_resend_the_last_prompt() -> None:
    async with running(FakeEngine(answers=["one", "two"])) as (app, pilot, _):
        await ask(pilot, "helo")
        await pilot.press("f6")
        assert app.chat.composer.text == "helo"
        assert "editing" in screen_text(app)
        await ask(pilot, "hello")
        assert [m.text for m in app.session.messages] == ["hello", "two"]
        assert len(app.store.search()) == 1


async def test_editing_an_earlier_prompt_keeps_the_later_turns_in_a_fork() -> None:
    async with running(FakeEngine(answers=["one", "two", "three"])) as (app, pilot, _):
        await ask(pilot, "a")
        await ask(pilot, "b")
        original = app.session.conversation
        assert original is not None
        await pilot.press("alt+up", "alt+up", "alt+up", "alt+up")  # up to the first prompt
        await pilot.press("f6")
        assert app.chat.composer.text == "a"
        await ask(pilot, "A")
        assert [m.text for m in app.session.messages] == ["A", "three"]
        app.store.flush()
        assert [m.text for m in app.store.messages(original.id)] == ["a", "one", "b", "two"]
        assert app.store.find().parent == original.id


async def test_giving_up_an_edit() -> None:
    async with running() as (app, pilot, _):
        await ask(pilot, "a")
        await pilot.press("f6", "escape")
        assert app.chat.editing is None
        assert app.chat.composer.text == ""
        await ask(pilot, "b")
        assert [m.text for m in app.session.messages if m.role == "user"] == ["a", "b"]


@pytest.mark.parametrize("leave", ["open", "fork", "regenerate"])
async def test_an_edit_ends_with_what_it_was_of(leave) -> None:
    """The next prompt once replaced one at the same place in the conversation that had been opened meanwhile."""
    async with running(FakeEngine(answers=["one", "two", "three"])) as (app, pilot, _):
        await ask(pilot, "in one conversation")
        first = app.session.conversation
        assert first is not None
        await pilot.press("ctrl+n")
        await ask(pilot, "in another")
        await pilot.press("f6")
        assert app.chat.editing == 0
        if leave == "open":
            app.open_conversation(first)
        else:
            await pilot.press({"fork": "alt+f", "regenerate": "f5"}[leave])
            await idle(pilot)
        assert app.chat.editing is None
        kept = [message.text for message in app.session.messages]
        assert len(kept) == 2
        await ask(pilot, "next")
        assert [message.text for message in app.session.messages][:3] == [*kept, "next"]


async def test_a_failing_backend_ends_the_reply_and_the_app_lives() -> None:
    engine = FakeEngine(fail_after=2)
    async with running(engine) as (app, pilot, _):
        await ask(pilot, "a")
        assert "RuntimeError: the device fell over" in screen_text(app)
        assert [m.reason for m in app.session.messages] == ["", "error"]
        engine.fail_after = None
        await ask(pilot, "b")
        assert app.session.messages[-1].text == ANSWER


async def test_a_reply_that_fails_before_its_first_token_leaves_no_empty_message() -> None:
    engine = FakeEngine(fail_after=0)
    async with running(engine) as (app, pilot, _):
        await ask(pilot, "a")
        assert [m.role for m in app.session.messages] == ["user"]
        engine.fail_after = None
        await ask(pilot, "b")
        # Templates want turns to alternate: the prompt without an answer is not told twice.
        assert engine.asked[-1][0] == [{"role": "user", "content": "b"}]


async def test_a_model_that_cannot_be_opened_says_so_and_another_can_be_chosen() -> None:
    from engine.errors import BackendError
    from flint_tui.app import FlintApp

    engine = FakeEngine()
    fail = [True]

    def open_engine(model: str | None, say: object) -> FakeEngine:
        if fail[0]:
            raise BackendError("No room for 9 GB of weights", "choose a smaller model")
        return engine

    app = FlintApp(open_engine)
    try:
        async with app.run_test(size=(100, 30), notifications=True) as pilot:
            await wait(pilot, lambda: "No room for 9 GB of weights" in screen_text(app))
            assert "choose a smaller model" in screen_text(app)
            fail[0] = False
            app.load_model("small")
            await wait(pilot, lambda: app.chat.facts is not None)
            await ask(pilot, "hi")
            assert app.session.messages[-1].text == ANSWER
    finally:
        app.engine_thread.close(5.0)
        app.store.close()


async def test_history_in_the_composer() -> None:
    async with running() as (app, pilot, _):
        await ask(pilot, "first")
        await ask(pilot, "second")
        app.chat.composer.put("draft")
        await pilot.press("up")
        assert app.chat.composer.text == "second"
        await pilot.press("up", "up", "up")
        assert app.chat.composer.text == "first"
        await pilot.press("down", "down")
        assert app.chat.composer.text == "draft"


async def test_choosing_messages_and_copying_one() -> None:
    async with running() as (app, pilot, _):
        await ask(pilot, "first")
        await pilot.press("alt+up", "alt+up")
        cursor = app.chat.transcript.cursor
        assert cursor is not None
        assert cursor.message == 0
        await pilot.press("ctrl+y")
        assert app.copied == "first"
        await pilot.press("alt+down", "alt+down")
        assert app.chat.transcript.cursor is None
        await pilot.press("ctrl+y")
        assert app.copied == ANSWER


async def test_copy_code_and_all() -> None:
    answer = "Here:\n\n```python\nx = 1\n```\n\nand\n\n```sh\nls\n```"
    async with running(FakeEngine(answers=[answer])) as (app, pilot, _):
        await pilot.press("alt+c")
        assert app.copied == ""
        await ask(pilot, "code")
        await pilot.press("alt+c")
        assert app.copied == "ls\n"
        await pilot.press("alt+a")
        assert app.copied.startswith("# code\n")
        assert answer in app.copied


async def test_scrolling_by_key_from_the_composer() -> None:
    long = "\n\n".join(f"Paragraph {i}." for i in range(60))
    async with running(FakeEngine(answers=[long])) as (app, pilot, _):
        await ask(pilot, "go")
        transcript = app.chat.transcript
        end = transcript.scroll_offset.y
        assert transcript.following
        await pilot.press("pageup")
        assert 0 < transcript.scroll_offset.y < end
        assert not transcript.following
        await pilot.press("ctrl+home")
        assert transcript.scroll_offset.y == 0
        await pilot.press("ctrl+end")
        assert transcript.scroll_offset.y == end
        assert transcript.following


async def test_the_sidebar_is_hidden_by_key_and_the_choice_is_kept() -> None:
    from flint_tui.settings import Settings

    async with running() as (app, pilot, _):
        await pilot.press("f8")
        assert not app.chat.sidebar.display
        assert app.chat.strip.display
        assert not Settings.load().panels
        await ask(pilot, "a")
        assert "tok/s" in screen_text(app)
        await pilot.press("f8")
        assert app.chat.sidebar.display


def test_a_document_grows_like_it_parses_at_once() -> None:
    source = "# T\n\na *b*\n\n1. one\n2. two\n   - x\n\n```py\nx = 1\n```\n\n> q\n\nend"
    document = Document(closed=False)
    for character in source:
        document.append(character)
        document.height(40)
    document.close()
    assert document.lines(40) == Document(source).lines(40)


async def test_going_narrow_turns_the_panels_into_a_line() -> None:
    async with running(size=(120, 36)) as (app, pilot, _):
        await ask(pilot, "a")
        assert "MEMORY BANDWIDTH" in screen_text(app)
        await pilot.resize_terminal(60, 20)
        await wait(pilot, lambda: "67% MBU" in screen_text(app))
        assert "MEMORY BANDWIDTH" not in screen_text(app)
        assert "/ 2,048" in screen_text(app).splitlines()[0]
        await pilot.resize_terminal(120, 36)
        await wait(pilot, lambda: "MEMORY BANDWIDTH" in screen_text(app))
        assert "context ─" in screen_text(app).splitlines()[0]


async def test_a_click_on_the_key_line_does_what_the_key_does() -> None:
    async with running() as (app, pilot, _):
        line = screen_text(app).splitlines()[-1]
        await pilot.click("#keys", offset=(line.index("^t") + 1, 0))
        await wait(pilot, lambda: app.session.options.mode == "speculative")


async def test_the_scrollbar_stands_where_the_view_does() -> None:
    async with running(size=(80, 24)) as (app, pilot, _):
        await ask(pilot, "go")
        transcript = app.chat.transcript
        app.chat.show_error("line\n" * 30)  # scrolls at once, when there is no scrollbar yet
        await wait(pilot, lambda: transcript.show_vertical_scrollbar)
        assert transcript.scroll_offset.y > 0
        assert transcript.vertical_scrollbar.position == transcript.scroll_offset.y


async def test_what_people_type_in_other_chats_is_an_action_and_not_a_prompt() -> None:
    async with running() as (app, pilot, engine):
        await ask(pilot, "hello")
        await ask(pilot, "/clear", finish=False)
        await wait(pilot, lambda: not app.session.messages, "a new conversation")
        await ask(pilot, "/?", finish=False)
        await wait(pilot, lambda: isinstance(app.screen, HelpScreen), "the help")
        await pilot.press("escape")
        await ask(pilot, "/toggle-mode", finish=False)
        await wait(pilot, lambda: app.session.options.mode == "speculative", "the other mode")
        await ask(pilot, "/etc/hosts, what is it?")
        assert [turns[-1]["content"] for turns, _ in engine.asked] == ["hello", "/etc/hosts, what is it?"]
        await ask(pilot, "/bye", finish=False)
        await wait(pilot, lambda: not app.is_running, "it quits")


def test_every_slash_name_is_an_action() -> None:
    ids = {action.id for action in ACTIONS}
    assert {slash_action(f"/{name}") for name in SLASH} <= ids
    assert all(slash_action(f" /{id}\n") == id for id in ids)
    assert [slash_action(text) for text in ("bye", "/", "/bye bye", "// bye")] == ["", "", "", ""]


async def test_a_model_that_cannot_be_opened_leaves_the_one_that_was_open() -> None:
    first, again = FakeEngine(), FakeEngine()
    first.facts = again.facts = replace(first.facts, identifier="first")
    engines = iter((first, OSError("the disk is gone"), again, OSError("no"), OSError("no more")))

    def open_engine(model: str | None, say: object) -> FakeEngine:
        engine = next(engines)
        if isinstance(engine, OSError):
            raise engine
        return engine

    app = FlintApp(open_engine)
    try:
        async with app.run_test(size=(120, 36)) as pilot:
            await wait(pilot, lambda: hasattr(app, "chat") and app.chat.facts is not None, "the first is open")
            assert app.session.options.sampling is not None
            chosen = replace(app.session.options.sampling, temperature=0.125)
            app.session.options = replace(app.session.options, sampling=chosen)
            app.load_model("second")
            await idle(pilot)
            assert "the disk is gone" in screen_text(app)
            assert app.chat.facts is again.facts
            assert app.session.options.sampling == chosen
            assert first.closed
            await ask(pilot, "hello")
            assert len(again.asked) == 1
            app.load_model("third")
            await idle(pilot)
            assert app.chat.facts is None
            status = screen_text(app).splitlines()[0]
            assert "no model" in status
            assert first.facts.model not in status
    finally:
        app.engine_thread.close(5.0)
        app.store.close()


async def test_the_context_of_a_conversation_that_was_not_read_yet_is_unknown() -> None:
    async with running() as (app, pilot, _):
        assert "0 / 2,048" in screen_text(app)
        await ask(pilot, "hello")
        conversation = app.session.conversation
        assert conversation is not None
        await pilot.press("ctrl+n")
        app.open_conversation(app.store.find(conversation.id))
        await wait(pilot, lambda: "– / 2,048" in screen_text(app))
        await ask(pilot, "more")
        await wait(pilot, lambda: "– / 2,048" not in screen_text(app))
