"""The live report: the page over HTTP, on the loopback interface only, following a growing ledger.

It only reads, and it idles nine times as long as it works, so it hardly slows a running sweep.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from orchestrator.report import html
from orchestrator.report.html import document
from orchestrator.report.html.data import Memory, as_json
from orchestrator.results import status
from trainables.errors import UserError

LOOPBACK = "127.0.0.1"
IDLE_FACTOR = 9.0  # idle seconds per second of work: at most a tenth of a core
TIMEOUT_S = 15.0  # for a connection that sends no request
LOCAL_EVERY_S, REMOTE_EVERY_S = 1.0, 20.0
"""Shortest time between two reads."""


class Following:
    """The page's data, up to date with the ledger."""

    def __init__(self, results: str) -> None:
        self.results = results
        self._remote = "://" in results
        self._lock = threading.Lock()
        self._read_version: Any = None
        self._next = 0.0
        self._memory = Memory()
        self._current = self._read()

    def current(self) -> tuple[dict[str, Any], str]:
        """The data and their ETag. A request during a read gets the previous data."""
        if time.monotonic() >= self._next and self._lock.acquire(blocking=False):
            try:
                if self._remote or self._version() != self._read_version:
                    self._current = self._read()
                else:
                    self._next = time.monotonic() + LOCAL_EVERY_S
            finally:
                self._lock.release()
        return self._current

    def _read(self) -> tuple[dict[str, Any], str]:
        began, version = time.monotonic(), self._version()
        data = document.content(html.read([self.results], self._memory), live={"every_ms": document.LIVE_EVERY_MS})
        took = time.monotonic() - began
        self._read_version = version
        self._next = began + took + max(REMOTE_EVERY_S if self._remote else LOCAL_EVERY_S, IDLE_FACTOR * took)
        return data, hashlib.sha256(as_json(data).encode()).hexdigest()[:16]

    def _version(self) -> Any:
        """A value that changes with the ledger or its driver. `_read` takes it before the data, so that no change is
        missed."""
        if self._remote:
            return None
        folder = Path(self.results)
        files = [folder / name for name in ("ledger.sqlite", "ledger.sqlite-wal")]
        stats = [(file.stat().st_mtime_ns, file.stat().st_size) if file.exists() else None for file in files]
        return stats, status.holder(folder)


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connection errors, such as a client that closes its connection early."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """The page's URL. Other users of this machine can connect too, but do not know the token."""
        token = self.RequestHandlerClass.token  # type: ignore[attr-defined]
        return f"http://{LOOPBACK}:{self.server_address[1]}/{token}/"


def server(results: str, port: int) -> Server:
    """A server bound to the loopback interface, ready for `serve_forever`; port 0 picks a free port. The results are
    read last, because that may take a while."""

    class Bound(Handler):
        token = secrets.token_urlsafe(16)

    try:
        bound = Server((LOOPBACK, port), Bound)
    except OSError as error:
        raise UserError(f"port = {port} cannot be used: {error.strerror}; choose another with --port") from None
    try:
        Bound.source = Following(results)
    except BaseException:
        bound.server_close()
        raise
    return bound


class Handler(BaseHTTPRequestHandler):
    source: ClassVar[Following]
    token: ClassVar[str]
    timeout = TIMEOUT_S
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "fedsweep", ""

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").partition(":")[0]
        if host not in (LOOPBACK, "localhost"):  # against DNS rebinding
            self._answer(403, b"This page is served to this machine only.\n", "text/plain")
            return
        token, _, path = self.path.partition("?")[0].removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            self._answer(403, b"Open the address that fedsweep serve has printed.\n", "text/plain")
            return
        if path not in ("", "data.json"):
            self._answer(404, b"Not found. There are the page and data.json.\n", "text/plain")
            return
        try:
            data, tag = self.source.current()
        except UserError as error:
            self._answer(503, f"{error}.\n".encode(), "text/plain")
            return
        if not path:
            self._answer(200, document.page(data).encode(), "text/html")
        elif self.headers.get("If-None-Match") == f'"{tag}"':
            self._answer(304, b"", "application/json", tag)
        else:
            self._answer(200, as_json(data).encode(), "application/json", tag)

    def _answer(self, code: int, body: bytes, kind: str, tag: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Frame-Options", "DENY")
        if tag:
            self.send_header("ETag", f'"{tag}"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the terminal free of request logs."""
