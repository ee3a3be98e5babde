"""Which models are packed, which can be packed, and packing one in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.errors import Cancelled, FlintError
from engine.progress import Progress


@dataclass(frozen=True)
class Model:
    """A row of the model switcher. identifier: what to load, or to pack. bytes: on disk, or to download."""

    identifier: str
    name: str
    detail: str
    bytes: int
    packed: bool
    note: str = ""


class Shelf(Protocol):
    def models(self) -> list[Model]:
        """The packed models, newest first, then those that can be packed."""
        ...

    def pack(self, identifier: str, report: Callable[[Progress], None], cancel: threading.Event) -> str:
        """Pack a model and return what to load. Raises FlintError; Cancelled once `cancel` is set."""
        ...


class LocalShelf:
    """The models of this machine and flint's catalogue."""

    def models(self) -> list[Model]:
        from engine.packed.library import packed_models
        from engine.sources.catalog import CATALOG

        packed = packed_models()
        rows = [Model(e.identifier, e.name, e.variant, e.bytes, True, e.manifest.license) for e in packed]
        there = {entry.name for entry in packed}
        for entry in CATALOG.values():
            if entry.name not in there:
                note = entry.licence + (", accept it on the hub first" if entry.gated else "")
                detail = f"{entry.parameters / 1e9:.2g} B parameters"
                rows.append(Model(entry.name, entry.name, detail, entry.download_bytes, False, note))
        return rows

    def pack(self, identifier: str, report: Callable[[Progress], None], cancel: threading.Event) -> str:
        from engine.packed.library import entry_at
        from engine.packing import pack

        return entry_at(pack(identifier, progress=report, cancel=cancel)).identifier


class PackJob:
    """One packing run in a thread. Read `progress` as often as you like; `done` once it has ended."""

    def __init__(self, shelf: Shelf, model: Model) -> None:
        self.model = model
        self.progress: Progress | None = None
        self.packed = ""  # what to load, when it went well
        self.error = ""
        self.hint = ""
        self.cancelled = False
        self.done = False
        self._cancel = threading.Event()
        self._shelf = shelf
        self._thread = threading.Thread(target=self._run, name="flint-pack", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        self._cancel.set()

    def _run(self) -> None:
        try:
            self.packed = self._shelf.pack(self.model.identifier, self._report, self._cancel)
        except Cancelled:
            self.cancelled = True
        except FlintError as error:
            self.error, self.hint = str(error), error.hint
        except Exception as error:  # told on the screen, which stays
            self.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
        finally:
            self.done = True

    def _report(self, progress: Progress) -> None:
        self.progress = progress
