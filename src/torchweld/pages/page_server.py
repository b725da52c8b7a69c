"""Serves one page to this machine alone: 127.0.0.1, one address, nothing from the disk."""

from __future__ import annotations

import errno
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torchweld.core.errors import TorchweldError

HOST = "127.0.0.1"


class PageServer(ThreadingHTTPServer):
    """`serve_forever` answers until `shutdown`; `address` is what to open."""

    daemon_threads = True
    # A second server on the same port would otherwise take turns with this one on some systems.
    allow_reuse_port = False

    def __init__(self, html: str, port: int = 0) -> None:
        self.body = html.encode(errors="backslashreplace")
        try:
            super().__init__((HOST, port), _Answer)
        except (OSError, OverflowError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            why = "is in use" if taken else f"cannot be used ({error})"
            raise TorchweldError(
                f"port {port} {why}; give another, or none for a free one"
            ) from error

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"


class _Answer(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        # Another site whose name points here would have its own name in this header.
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self.send_error(403)
            return
        if self.path.partition("?")[0] != "/":
            self.send_error(404)
            return
        self.send_response(200)
        for name, value in (
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Length", str(len(self.server.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(self.server.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name in the base)
        """Nothing: only the command line prints."""
