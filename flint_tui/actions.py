"""Every action of the app, once: its key, its words, where it applies. Bindings, the footer, the help screen, the
command palette and the key file are all made from this list."""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding


@dataclass(frozen=True)
class Action:
    """id: name in keys.toml and, as action_<id>, the method. key: default keys, comma separated.
    short: the footer's word, "" to leave it out of the footer."""

    id: str
    key: str
    title: str
    group: str
    short: str = ""

    def binding(self) -> Binding:
        return Binding(
            self.key,
            self.id,
            self.short or self.title,
            show=bool(self.short),
            id=self.id,
            priority=True,
            tooltip=self.title,
        )


CHAT_ACTIONS = (
    Action("stop", "escape", "Stop the reply (never leaves the app)", "Reply", "stop"),
    Action("toggle_mode", "ctrl+t", "Switch between single pass and speculative decoding", "Reply", "mode"),
    Action("conversations", "ctrl+o", "Open, search, rename or delete conversations", "Conversation", "chats"),
    Action("models", "f2", "Change or pack a model", "Model", "model"),
    Action("regenerate", "f5", "Answer the last prompt again", "Reply"),
    Action("edit", "f6", "Edit a prompt and send it again", "Reply"),
    Action("tint", "f7", "Tint accepted draft tokens", "Reply"),
    Action("sampling", "f3", "Sampling settings", "Reply"),
    Action("system_prompt", "f4", "System prompt", "Reply"),
    Action("editor", "ctrl+g", "Write the prompt in $EDITOR", "Reply"),
    Action("bench", "f9", "Benchmark and roofline", "Model"),
    Action("new", "ctrl+n", "New conversation", "Conversation"),
    Action("fork", "alt+f", "Fork the conversation at the chosen message", "Conversation"),
    Action("rename", "alt+r", "Rename this conversation", "Conversation"),
    Action("delete", "alt+delete", "Delete this conversation", "Conversation"),
    Action("export", "ctrl+s", "Export to Markdown or JSON", "Conversation"),
    Action("copy_reply", "ctrl+y", "Copy the last (or chosen) message", "Copy"),
    Action("copy_code", "alt+c", "Copy the last code block", "Copy"),
    Action("copy_all", "alt+a", "Copy the whole conversation", "Copy"),
    Action("message_up", "alt+up", "Choose the message above", "Move"),
    Action("message_down", "alt+down", "Choose the message below", "Move"),
    Action("page_up", "pageup", "Scroll up a page", "Move"),
    Action("page_down", "pagedown", "Scroll down a page", "Move"),
    Action("top", "ctrl+home", "Go to the start", "Move"),
    Action("bottom", "ctrl+end", "Go to the end", "Move"),
    Action("panels", "f8", "Show or hide the panels", "View"),
    Action("log", "ctrl+l", "Log: what native code and libraries wrote", "View"),
)
APP_ACTIONS = (
    Action("help", "f1", "Every key", "App", "help"),
    Action("command_palette", "ctrl+p", "Command palette: every action by name", "App", "all"),
    Action("quit_app", "ctrl+q", "Quit", "App", "quit"),
    Action("theme", "f12", "Next of flint's themes", "App"),
    Action("themes", "alt+t", "Choose a theme", "App"),
    Action("interrupt", "ctrl+c", "Copy the selection, or stop, or quit (twice)", "App"),
    Action("suspend", "ctrl+z", "Suspend; `fg` comes back", "App"),
)
ACTIONS = (*CHAT_ACTIONS, *APP_ACTIONS)

# Keys that belong to a widget; shown on the help screen.
FIXED_KEYS = (
    ("Compose", "enter", "Send; while a reply runs, queue"),
    ("Compose", "ctrl+j", "New line, in every terminal"),
    ("Compose", "shift+enter, alt+enter", "New line, where the terminal can tell them"),
    ("Compose", "up, down", "Earlier and later prompts"),
    ("Compose", "alt+z", "Undo"),
    ("Compose", "/bye, /clear, /help", "These and other actions by name"),
    ("Move", "tab", "Between transcript and composer"),
    ("Move", "j, k, g, G, space", "Scroll, with the focus on the transcript"),
)
# What people type in other terminal chats -> action id. Action ids themselves work, too.
SLASH = {
    "bye": "quit_app", "exit": "quit_app", "quit": "quit_app", "q": "quit_app", "?": "help", "clear": "new",
    "reset": "new", "model": "models", "load": "models", "list": "models", "chats": "conversations",
    "resume": "conversations", "system": "system_prompt", "set": "sampling", "mode": "toggle_mode", "save": "export",
    "copy": "copy_reply", "retry": "regenerate",
}  # fmt: skip
EXTRA_IDS = ("composer.submit", "composer.newline")


def slash_action(text: str) -> str:
    """The action that a prompt like "/bye" stands for; "" where it is meant for the model."""
    name = text.strip().removeprefix("/").replace("-", "_").lower()
    if not text.lstrip().startswith("/"):
        return ""
    return SLASH.get(name, name if any(action.id == name for action in ACTIONS) else "")


_NAMES = {"escape": "Esc", "pageup": "PgUp", "pagedown": "PgDn", "enter": "Enter", "delete": "Del", "space": "Space"}


def key_name(keys: str) -> str:
    """ "ctrl+t,f5" as people write it: "Ctrl+T, F5"; single keys keep their case ("g" is not "G")."""
    named = []
    for key in (key.strip() for key in keys.split(",")):
        parts = [_NAMES.get(part, part.capitalize()) for part in key.split("+")]
        named.append("+".join(parts) if len(key) > 1 else key)
    return ", ".join(named)
