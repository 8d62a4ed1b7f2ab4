"""The page over HTTP on this machine alone, following a ledger that grows. It only reads, and rests nine times as long
as it works, so the sweep beside it hardly notices; the sweep need not be alive."""

from __future__ import annotations

import hashlib
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
REST = 9.0  # seconds of rest for one of work: a tenth of a core at most
LOCAL_EVERY_S, REMOTE_EVERY_S = 1.0, 20.0
"""How often, at most, to look for something new."""


class Following:
    """What the page shows, as of the ledger's last change."""

    def __init__(self, results: str) -> None:
        self.results = results
        self._remote = "://" in results
        self._lock = threading.Lock()
        self._seen: Any = None
        self._next = 0.0
        self._memory = Memory()
        self._found = self._read()

    def current(self) -> tuple[dict[str, Any], str]:
        """The data and a tag that changes with them. Whoever asks while they are being read gets the last ones."""
        if time.monotonic() >= self._next and self._lock.acquire(blocking=False):
            try:
                if self._remote or self._sign() != self._seen:
                    self._found = self._read()
                else:
                    self._next = time.monotonic() + LOCAL_EVERY_S
            finally:
                self._lock.release()
        return self._found

    def _read(self) -> tuple[dict[str, Any], str]:
        began, sign = time.monotonic(), self._sign()
        found = document.content(html.read([self.results], self._memory), live={"every_ms": document.LIVE_EVERY_MS})
        took = time.monotonic() - began
        self._seen = sign
        self._next = began + took + max(REMOTE_EVERY_S if self._remote else LOCAL_EVERY_S, REST * took)
        return found, hashlib.sha256(as_json(found).encode()).hexdigest()[:16]

    def _sign(self) -> Any:
        """What changes when the ledger or its driver does; read before the ledger, so that no change is missed."""
        if self._remote:
            return None
        folder = Path(self.results)
        files = [folder / name for name in ("ledger.sqlite", "ledger.sqlite-wal")]
        stats = [(file.stat().st_mtime_ns, file.stat().st_size) if file.exists() else None for file in files]
        return stats, status.holder(folder)


def server(results: str, port: int) -> ThreadingHTTPServer:
    """Ready to serve, on the loopback interface; `port` 0: whichever is free."""
    following = Following(results)

    class Bound(Handler):
        source = following

    try:
        return ThreadingHTTPServer((LOOPBACK, port), Bound)
    except OSError as error:
        raise UserError(f"port = {port} cannot be used: {error.strerror}; choose another with --port") from None


class Handler(BaseHTTPRequestHandler):
    source: ClassVar[Following]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "fedsweep", ""

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").partition(":")[0]
        if host not in (LOOPBACK, "localhost"):  # else a page from elsewhere could read this one under another name
            self._answer(403, b"This page is for this machine alone.\n", "text/plain")
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/data.json"):
            self._answer(404, b"There are / and /data.json.\n", "text/plain")
            return
        try:
            found, tag = self.source.current()
        except UserError as error:
            self._answer(503, f"{error}.\n".encode(), "text/plain")
            return
        if path == "/":
            self._answer(200, document.page(found).encode(), "text/html")
        elif self.headers.get("If-None-Match") == f'"{tag}"':
            self._answer(304, b"", "application/json", tag)
        else:
            self._answer(200, as_json(found).encode(), "application/json", tag)

    def _answer(self, code: int, body: bytes, kind: str, tag: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if tag:
            self.send_header("ETag", f'"{tag}"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: whoever runs this wants its own terminal."""
