"""Failures that a user can act on: one class per action, one line each, then what to do."""

from __future__ import annotations

_LONGEST = 1000  # characters


class FlintError(Exception):
    """A known failure. `str(error)` is one line; `hint` says what to do about it.

    Both may quote names out of files and answers of servers, so line breaks and control characters are replaced.
    """

    what_to_do = ""  # the hint where whoever raises the error knows no better one

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(printable(message))
        self.hint = printable(hint or self.what_to_do)


class CheckpointError(FlintError):
    """A checkpoint, GGUF or packed file is malformed, truncated or incomplete."""

    what_to_do = "the file is damaged, incomplete or not what its name says: get it again, or take another model"


class UnsupportedModel(FlintError):
    """The model is well formed, but its architecture or quantisation is not one that flint decodes."""

    what_to_do = "`flint models` lists models that flint decodes"


class ModelNotFound(FlintError):
    """No catalogue entry, packed model, directory or file of that name."""

    what_to_do = "`flint models` lists what is packed, and what can be"


class FetchError(FlintError):
    """A download failed: no network, no permission, no such repository, or a wrong digest."""


class DiskFull(FlintError):
    """There is not enough room where the model would be written."""


class Cancelled(FlintError):
    """The user stopped a download or a pack; what was there before is untouched."""


class ContextOverflow(FlintError):
    """The prompt is longer than the context that the backend was opened with."""


class BackendError(FlintError):
    """A backend could not be opened, or failed while decoding."""


class DeviceOutOfMemory(BackendError):
    """Weights and KV cache do not fit; the message names the sizes and what would fit."""


class DrafterError(FlintError):
    """A drafter is corrupt or belongs to another model; decoding goes on without it."""


class ChatTemplateError(FlintError):
    """A chat template does not compile, or refuses the conversation."""

    what_to_do = "start a new conversation; if that does not help, correct the model's chat template and pack it again"


class ArchiveError(FlintError):
    """A benchmark archive cannot be written, or is none that flint wrote."""


class UsageError(FlintError):
    """An option's value is out of range or contradicts another one (exit code 2)."""


def printable(text: str) -> str:
    """The text as one line, of a length that fits a screen, that cannot control a terminal."""
    if len(text) > _LONGEST:  # a corrupt file may hold a name of megabytes
        text = text[: _LONGEST // 2] + " ... " + text[-_LONGEST // 2 :]
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)
