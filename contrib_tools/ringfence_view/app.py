"""The server of the page: on loopback, with a token for each request but those of the page's own files."""

from __future__ import annotations

import hmac
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

import anyio
from anyio import to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ringfence.errors import RingfenceError
from ringfence.failures import describe_error
from ringfence_tools.printable import one_line
from ringfence_tools.web_server import serve_until_cancelled
from ringfence_view import pages
from ringfence_view.actions import Actions
from ringfence_view.diffs import MAX_ROWS
from ringfence_view.sources import CallSource

LOOK_SECONDS = 1.0
"""How often news are looked for, for each page that is open."""
QUIET_LOOKS = 15
"""After so many looks without news, something is sent: so a page that was closed is found out."""
MAX_BODY_BYTES = 64_000
MAX_BLAMED_LINES = 5_000
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
OPEN = {"/": "text/html", "/view.js": "text/javascript", "/view.css": "text/css"}
"""What is served without a token: the page's own files, with nothing of a workspace."""

Answer: TypeAlias = Callable[[Request], Response]


def view_app(source: CallSource, token: str, host: str, *, can_write: bool = False) -> Starlette:
    """Return the application. ``host`` is the only one that requests may name, with its port."""
    if can_write and source.directory is None:
        raise ValueError("receipts alone cannot be written: name the directory")
    actions = Actions(source, source.directory) if can_write and source.directory is not None else None
    parts = _Parts(source, actions)
    routes = [Route("/", parts.shell), *(Route(f"/{name}", parts.static) for name in ("view.js", "view.css"))]
    answers: dict[str, Answer] = {
        "/page": parts.page,
        "/rows": parts.rows,
        "/row/{key}": parts.row,
        "/entry/{key}": parts.entry,
        "/entry/{key}/diff": parts.entry_diff,
        "/entry/{key}/text": parts.entry_text,
        "/changes": parts.changes,
        "/changes/diff": parts.changes_diff,
        "/blame": parts.blame,
    }
    routes += [Route(path, _in_thread(answer)) for path, answer in answers.items()]
    routes.append(Route("/events", parts.events))
    if actions is not None:
        routes += [Route("/preview", parts.preview, methods=["POST"]), Route("/act", parts.act, methods=["POST"])]
    app = Starlette(routes=routes)
    app.add_middleware(_Guarded, token=token, host=host)
    return app


class _Parts:
    """The answers to requests."""

    def __init__(self, source: CallSource, actions: Actions | None) -> None:
        self._source = source
        self._actions = actions

    def shell(self, request: Request) -> Response:
        return HTMLResponse(pages.shell_page())

    def static(self, request: Request) -> Response:
        return Response(pages.static_file(request.url.path[1:]), media_type=OPEN[request.url.path])

    def page(self, request: Request) -> Response:
        self._source.refresh()
        return HTMLResponse(pages.main_part(self._source, self._source.page(), can_act=self._actions is not None))

    def rows(self, request: Request) -> Response:
        given = request.query_params
        outcome, words = given.get("outcome", ""), given.get("q", "")[:1000]
        page = self._source.page(given.get("after") or None, outcome, words)
        return HTMLResponse(str(pages.rows_part(page, outcome, words)))

    def row(self, request: Request) -> Response:
        return HTMLResponse(pages.row_part(self._source.entry(request.path_params["key"])))

    def entry(self, request: Request) -> Response:
        detail = self._source.detail(request.path_params["key"])
        return HTMLResponse(str(pages.entry_part(detail, can_act=self._actions is not None)))

    def entry_diff(self, request: Request) -> Response:
        key = str(request.path_params["key"])
        at = _number(request, "file")
        can_reject = self._actions is not None and bool(self._source.entry(key).number)
        address = pages.DiffAddress(f"entry/{key}/diff", at, "", can_reject, key)
        return HTMLResponse(pages.diff_part(self._source.files(key)[at], address, *_rows_of(request)))

    def entry_text(self, request: Request) -> Response:
        key, name = str(request.path_params["key"]), request.query_params["name"]
        text = self._source.detail(key).texts[name]
        return HTMLResponse(pages.text_part(pages.text_of(key, name, text, _number(request, "from"))))

    def changes(self, request: Request) -> Response:
        return HTMLResponse(str(pages.changes_part(self._source.difference(*_ends(request)))))

    def changes_diff(self, request: Request) -> Response:
        difference = self._source.difference(*_ends(request))
        at = _number(request, "file")
        query = f"{pages.urlencode({'a': difference.since, 'b': difference.until})}&"
        address = pages.DiffAddress("changes/diff", at, query)
        return HTMLResponse(pages.diff_part(difference.files[at], address, *_rows_of(request)))

    def blame(self, request: Request) -> Response:
        path = request.query_params["path"]
        lines = self._source.blame(path)
        return HTMLResponse(pages.blame_part(path, lines[:MAX_BLAMED_LINES], max(len(lines) - MAX_BLAMED_LINES, 0)))

    async def events(self, request: Request) -> Response:
        return StreamingResponse(self._news(request), media_type="text/event-stream")

    async def _news(self, request: Request) -> AsyncIterator[str]:
        version, quiet = "", QUIET_LOOKS
        while not await request.is_disconnected():
            with suppress(
                RingfenceError, OSError, ValueError, LookupError
            ):  # it is being written: the next look has it
                await run_in_threadpool(self._source.refresh)
            quiet += 1
            if self._source.version != version or quiet > QUIET_LOOKS:
                version, quiet = self._source.version, 0
                yield f"data: {version}\n\n"
            await anyio.sleep(LOOK_SECONDS)

    async def preview(self, request: Request) -> Response:
        return await self._asked(request, self._previewed)

    async def act(self, request: Request) -> Response:
        return await self._asked(request, self._acted)

    def _previewed(self, given: Mapping[str, str]) -> Mapping[str, object]:
        assert self._actions is not None
        once, lines = self._actions.preview(given.get("what", ""), given)
        return {"once": once, "lines": lines}

    def _acted(self, given: Mapping[str, str]) -> Mapping[str, object]:
        assert self._actions is not None
        lines = self._actions.act(given.get("once", ""))
        self._source.refresh()
        return {"lines": lines}

    async def _asked(self, request: Request, work: Callable[[Mapping[str, str]], Mapping[str, object]]) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return PlainTextResponse("too much", 413)
        given = dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))
        # A change that has begun ends, even if its page is closed meanwhile.
        return await to_thread.run_sync(lambda: _tried(lambda: JSONResponse(work(given))))


def _in_thread(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await run_in_threadpool(lambda: _tried(lambda: answer(request)))

    return endpoint


def _tried(work: Callable[[], Response]) -> Response:
    """Return the answer, or a line about what is wrong."""
    try:
        return work()
    except LookupError as error:
        return PlainTextResponse(one_line(str(error.args[0]) if error.args else "there is none", 500), 404)
    except (RingfenceError, OSError, ValueError) as error:
        return PlainTextResponse(one_line(describe_error(error), 500), 409)


def _number(request: Request, name: str) -> int:
    """Raises ValueError for what is no number of a row or a file."""
    text = request.query_params.get(name, "0")
    if not text.isdecimal() or len(text) > 12:
        raise ValueError(f"{name} is a number")
    return int(text)


def _rows_of(request: Request) -> tuple[int, int, int]:
    return (
        _number(request, "from"),
        min(_number(request, "count") or MAX_ROWS, MAX_ROWS),
        _number(request, "width") or 1_000,
    )


def _ends(request: Request) -> Sequence[str]:
    return [request.query_params.get(name, "")[:100] for name in ("a", "b")]


class _Guarded:
    """Refuses requests of other pages, of other names for this machine, and without the token."""

    def __init__(self, app: Any, token: str, host: str) -> None:
        self._app = app
        self._token = token.encode()
        self._host = host

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        refusal = self._refusal(scope)
        app = self._app if refusal is None else refusal
        await app(scope, receive, send_with_headers)

    def _refusal(self, scope: Any) -> Response | None:
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        hosts = [value for name, value in headers if name == "host"]
        if hosts != [self._host]:
            return PlainTextResponse("this is not the address of the page", 421)
        if any(value != f"http://{self._host}" for name, value in headers if name == "origin"):
            return PlainTextResponse("another page may not ask", 403)
        if scope["path"] in OPEN:
            return None
        given = next((value for name, value in headers if name == "authorization"), "")
        scheme, _, token = given.partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(token.encode("utf-8", "replace"), self._token):
            return None
        return PlainTextResponse("open the address that `ringfence view` printed", 401, {"www-authenticate": "Bearer"})


async def serve_view(app: Starlette, listening: socket.socket) -> None:
    """Serve until cancelled."""
    await serve_until_cancelled(app, listening, lifespan="off")
