"""The server of the page: HTTP on the loopback interface, GET only, with a token.

    /?token=T            sets a cookie and goes to /
    /, /page.js, ...     the page, from files of this package
    /api/runs            the table of runs
    /api/curves          curves of runs
    /api/plan, /api/best the plan explorer
    /report?run=NAME     the report of a run, as of now

Refused: a Host that is not this address (a name that an attacker resolves to 127.0.0.1), a request without the token,
a run that is not in the list. Nothing is written below the folder of runs.
"""

from __future__ import annotations

import hmac
import json
import secrets
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from weft.core.errors import InputError, WeftError
from weft.report.palette import PALETTE, css_variables
from weft.ui.explorer import choices
from weft.ui.page_data import PageData

HOST = "127.0.0.1"
SCRIPT, STYLE, HTML, JSON = "text/javascript", "text/css", "text/html", "application/json"
PAGE_FILES = {
    "/": ("weft.ui", "page/index.html", HTML),
    "/page.js": ("weft.ui", "page/page.js", SCRIPT),
    "/quick.js": ("weft.ui", "page/quick.js", SCRIPT),
    "/plans.js": ("weft.ui", "page/plans.js", SCRIPT),
    "/plotly.js": ("weft.report", "vendor/plotly.min.js", SCRIPT),
}
STYLES = (("weft.report", "style.css"), ("weft.ui", "page/page.css"))
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self';"
    " frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
CONNECTION_TIMEOUT_S = 60


class PageServer(ThreadingHTTPServer):
    """`url` has the token. Threads end with the process: Ctrl-C waits for no request."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, answers: PageData, *, port: int = 0) -> None:
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InputError(f"port {port} cannot be used: {reason}", hint="choose another --port, or none") from None
        self.answers, self.token = answers, secrets.token_urlsafe(24)
        self.port = int(self.server_address[1])
        self.cookie = f"weft-ui-{self.port}"  # browsers share cookies between ports

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closed its connection is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "weft", ""
    timeout = CONNECTION_TIMEOUT_S

    def do_GET(self) -> None:
        with self.server.answers.indexer.requests():
            try:
                self._answer()
            except WeftError as error:
                self._send(HTTPStatus.BAD_REQUEST, _json(error.as_dict()), JSON)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: their addresses may have the token."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query, keep_blank_values=True)
        if self.headers.get("Host") not in (f"{HOST}:{self.server.port}", f"localhost:{self.server.port}"):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server answers to 127.0.0.1 only")
        elif url.path == "/" and "token" in query:
            self._enter(query["token"][0])
        elif not self._is_known(self._cookie()):
            self._refuse(HTTPStatus.FORBIDDEN, "open the address that weft ui printed: it has the token")
        else:
            self._answer_known(url.path, query)

    def _answer_known(self, path: str, query: dict[str, list[str]]) -> None:
        answers = self.server.answers
        data = {
            "/api/runs": lambda: answers.table(),
            "/api/plan": lambda: answers.plan(query),
            "/api/best": lambda: answers.best(query),
            "/api/choices": lambda: {**choices(), "palette": PALETTE},
        }
        if path in data:
            self._send(HTTPStatus.OK, _json(data[path]()), JSON)
        elif path == "/api/curves":
            self._send(HTTPStatus.OK, answers.curves(query).encode(), JSON)
        elif path == "/report":
            page = answers.report(next(iter(query.get("run", ())), ""))
            self._send(HTTPStatus.OK, page.encode(), HTML, policy="frame-ancestors 'self'")
        elif path == "/style.css":
            self._send(HTTPStatus.OK, _styles(), STYLE)
        elif path in PAGE_FILES:
            package, name, kind = PAGE_FILES[path]
            self._send(HTTPStatus.OK, _file(package, name), kind)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def _enter(self, token: str) -> None:
        if not self._is_known(token):
            self._refuse(HTTPStatus.FORBIDDEN, "the token is wrong: open the address that weft ui printed")
            return
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", "/")
        self.send_header("Set-Cookie", f"{self.server.cookie}={token}; Path=/; HttpOnly; SameSite=Strict")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            return ""
        return found.value if found else ""

    def _is_known(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.server.token.encode())

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self._send(status, f"{sentence}\n".encode(), "text/plain")

    def _send(self, status: HTTPStatus, content: bytes, kind: str, *, policy: str = POLICY) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def _styles() -> bytes:
    return b"\n".join([css_variables().encode(), *(_file(package, name) for package, name in STYLES)])


def _file(package: str, name: str) -> bytes:
    return files(package).joinpath(name).read_bytes()
