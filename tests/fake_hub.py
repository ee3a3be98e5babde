"""A Hugging Face hub on loopback that can misbehave: cuts, wrong bytes, refusals, redirects to another host, no ranges.

Only what flint and huggingface_hub ask of a hub: the model's file listing, and HEAD and GET of its files, large ones
through a redirect to a second server that stands for the content network.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0de"
LFS_SUFFIXES = (".safetensors", "tokenizer.json")


@dataclass
class Request:
    """What one request to either server asked, for a test to look at afterwards."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    content_network: bool


@dataclass
class FakeHub:
    """Serves `repos` (name -> file name -> content) until closed. The switches may be set at any time."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None  # required to see anything; without it the hub answers 401
    gated: bool = False  # 403 with the hub's GatedRepo code
    status: int | None = None  # answer everything with this status
    body: bytes = b"{}"  # and this
    ranges: bool = True  # honour Range requests
    redirect: bool = True  # large files come from the second server
    cut_after: list[int] = field(default_factory=list)  # bytes sent by each following transfer of a large file
    reset: bool = False  # cut by a reset instead of an orderly close
    served: dict[str, bytes] = field(default_factory=dict)  # file name -> other content than the listing announces
    slowly: Callable[[], object] = lambda: None  # called before each chunk of a large file
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._closed = False
        self._servers = [self._start(content_network=False), self._start(content_network=True)]
        self.endpoint, self.content_endpoint = (f"http://127.0.0.1:{s.server_address[1]}" for s in self._servers)

    def close(self) -> None:
        """Stop listening and answering, on connections that clients keep open too."""
        self._closed = True
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def downloads(self, name: str) -> list[Request]:
        """The GET requests that were answered with content of the file."""
        return [
            r
            for r in self.requests
            if r.method == "GET" and r.path.endswith(name) and (r.content_network or not self._moved(name))
        ]

    def _moved(self, name: str) -> bool:
        return self.redirect and name.endswith(LFS_SUFFIXES)

    def _start(self, content_network: bool) -> ThreadingHTTPServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self, content_network)

            def do_HEAD(self) -> None:
                hub._answer(self, content_network)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    def _answer(self, handler: BaseHTTPRequestHandler, content_network: bool) -> None:
        if self._closed:
            handler.close_connection = True
            return
        path = unquote(urlsplit(handler.path).path)
        authorization = handler.headers.get("Authorization")
        self.requests.append(
            Request(handler.command, path, handler.headers.get("Range"), authorization, content_network)
        )
        if not content_network and (refusal := self._refusal(authorization)) is not None:
            return _send(handler, *refusal)
        if listing := re.fullmatch(r"/api/models/(.+?)(?:/revision/(.+))?", path):
            return self._list(handler, listing[1], listing[2] or "main")
        if file := re.fullmatch(r"/(?:content/)?(.+?)/resolve/([^/]+)/(.+)", path):
            return self._file(handler, file[1], file[2], file[3], content_network)
        _send(handler, 404, {}, b"")

    def _refusal(self, authorization: str | None) -> tuple[int, dict[str, str], bytes] | None:
        if self.status is not None:
            return self.status, {}, self.body
        if self.gated:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}, b"{}"
        if self.token is not None and authorization != f"Bearer {self.token}":
            return 401, {"X-Error-Message": "Invalid username or password."}, b"{}"
        return None

    def _list(self, handler: BaseHTTPRequestHandler, repo: str, revision: str) -> None:
        if repo not in self.repos:
            return _send(handler, 404, {"X-Error-Code": "RepoNotFound"}, b"{}")
        if revision not in ("main", COMMIT):
            return _send(handler, 404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
        siblings = []
        for name, content in self.repos[repo].items():
            sibling: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": _git_sha1(content)}
            if name.endswith(LFS_SUFFIXES):
                sibling["lfs"] = {"sha256": _sha256(content), "size": len(content), "pointerSize": 134}
            siblings.append(sibling)
        body = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "cardData": {"license": "apache-2.0"}}
        _send(handler, 200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _file(
        self, handler: BaseHTTPRequestHandler, repo: str, revision: str, name: str, content_network: bool
    ) -> None:
        announced = self.repos.get(repo, {}).get(name)
        if announced is None or revision not in ("main", COMMIT):
            return _send(handler, 404, {"X-Error-Code": "EntryNotFound"}, b"")
        large = name.endswith(LFS_SUFFIXES)
        etag = _sha256(announced) if large else _git_sha1(announced)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if large and not content_network:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(announced))}
            if self.redirect:
                location = f"{self.content_endpoint}/content/{repo}/resolve/{revision}/{name}"
                return _send(handler, 302, headers | {"Location": location}, b"")
        content = self.served.get(name, announced)
        asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or "")
        status, start = 200, 0
        if asked and self.ranges:
            status, start = 206, int(asked[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._transfer(handler, status, headers, content[start:], large)

    def _transfer(
        self, handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes, large: bool
    ) -> None:
        handler.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            handler.send_header(key, value)
        handler.end_headers()
        if handler.command == "HEAD":
            return
        limit = self.cut_after.pop(0) if large and self.cut_after else len(body)
        try:
            for at in range(0, min(limit, len(body)), 1 << 16):
                if large:
                    self.slowly()
                handler.wfile.write(body[at : min(at + (1 << 16), limit)])
            handler.wfile.flush()
        except OSError:
            handler.close_connection = True  # the client went away
            return
        if limit < len(body):
            self._cut(handler)

    def _cut(self, handler: BaseHTTPRequestHandler) -> None:
        if self.reset:  # closing with linger 0 sends RST, which also discards what the client has not read yet
            time.sleep(0.1)
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.close_connection = True


def _send(handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes) -> None:
    handler.send_response(status)
    for key, value in (headers | {"Content-Length": str(len(body))}).items():
        handler.send_header(key, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
