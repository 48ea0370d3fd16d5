"""The server of the page: on loopback, with a token for each request but those of the page's own files."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router

from ringfence_tools.web_server import serve_until_cancelled
from ringfence_view import pages
from ringfence_view.actions import Actions
from ringfence_view.diffs import MAX_ROWS
from ringfence_view.guarded import Answer, Guarded, event_stream, in_thread, tried
from ringfence_view.questions import Questions, WithQuestions
from ringfence_view.sources import CallSource

MAX_BODY_BYTES = 64_000
MAX_BLAMED_LINES = 5_000
OPEN = {"/": "text/html", "/view.js": "text/javascript", "/view.css": "text/css"}
"""What is served without a token: the page's own files, with nothing of a workspace."""
_OPEN_PATH = re.compile(r"(?:/(?:tasks|fork)/[\w.-]{1,100})*(/[\w.]*)", re.ASCII)


def view_app(
    source: CallSource, token: str, *, can_write: bool = False, questions: Questions | None = None
) -> Starlette:
    """Return the application. Requests name a loopback address, with any port. ``questions`` can be answered in the
    page."""
    if can_write and source.directory is None:
        raise ValueError("receipts alone cannot be written: name the directory")
    actions = Actions(source, source.directory) if can_write and source.directory is not None else None
    app = Starlette(routes=call_routes(source, actions, questions))
    app.add_middleware(Guarded, token=token, is_open=is_open_file)
    return app


def call_routes(
    source: CallSource, actions: Actions | None = None, questions: Questions | None = None
) -> Sequence[BaseRoute]:
    """Return the routes of the page of some calls, which may stand below another path."""
    parts = _Parts(source, actions, questions)
    routes: list[BaseRoute] = [
        Route("/", parts.shell),
        *(Route(f"/{name}", parts.static) for name in ("view.js", "view.css")),
    ]
    answers: dict[str, Answer] = {
        "/page": parts.page,
        "/spending": parts.spending,
        "/rows": parts.rows,
        "/row/{key}": parts.row,
        "/entry/{key}": parts.entry,
        "/entry/{key}/diff": parts.entry_diff,
        "/entry/{key}/text": parts.entry_text,
        "/changes": parts.changes,
        "/changes/diff": parts.changes_diff,
        "/blame": parts.blame,
        "/forks": parts.forks,
        "/fork-difference": parts.fork_difference,
        "/fork-difference/rows": parts.fork_rows,
    }
    routes += [Route(path, in_thread(answer)) for path, answer in answers.items()]
    routes += [Route("/events", parts.events), Mount("/fork/{name}", PagesBelow(source.of_fork))]
    if actions is not None:
        posts = {"/preview": parts.preview, "/act": parts.act, "/note": parts.note}
        routes += [Route(path, answer, methods=["POST"]) for path, answer in posts.items()]
        routes.append(Route("/notes", in_thread(parts.notes)))
    if questions is not None:
        routes += [Route("/question", in_thread(parts.question)), Route("/answer", parts.answer, methods=["POST"])]
    return routes


def is_open_file(path: str) -> bool:
    """Whether a path is a file of a page of calls, here or below: it is served without a token."""
    found = _OPEN_PATH.fullmatch(path)
    return found is not None and found[1] in OPEN


class PagesBelow:
    """Pages of calls, each below its name. It is an application of ASGI."""

    def __init__(self, find: Callable[[str], CallSource]) -> None:
        """``find`` raises LookupError, RingfenceError, OSError or ValueError where there is none."""
        self._find = find

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        name = scope["path_params"]["name"]

        def found() -> Any:
            # Whether there is one of that name, nobody learns from the files that need no token.
            return Router(call_routes(CallSource(None, None) if is_open_file(scope["path"]) else self._find(name)))

        await (await to_thread.run_sync(lambda: tried(found)))(scope, receive, send)


class _Parts:
    """The answers to requests."""

    def __init__(self, source: CallSource, actions: Actions | None, questions: Questions | None) -> None:
        self._source = source
        self._questions = questions
        self._actions = actions

    def shell(self, request: Request) -> Response:
        return HTMLResponse(pages.shell_page())

    def static(self, request: Request) -> Response:
        return _static(request.url.path.rpartition("/")[2])

    def page(self, request: Request) -> Response:
        self._source.refresh(anew=True)
        can_act, can_answer = self._actions is not None, self._questions is not None
        return HTMLResponse(pages.main_part(self._source, self._source.page(), can_act=can_act, can_answer=can_answer))

    def spending(self, request: Request) -> Response:
        return HTMLResponse(pages.spending_part(self._source))

    def rows(self, request: Request) -> Response:
        given = request.query_params
        outcome, words = given.get("outcome", ""), given.get("q", "")[:1000]
        page = self._source.page(given.get("after") or None, outcome, words)
        return HTMLResponse(str(pages.rows_part(page, outcome, words, is_first="after" not in given)))

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
        query = f"{pages.urlencode({'a': difference.since or '', 'b': difference.until or ''})}&"
        address = pages.DiffAddress("changes/diff", at, query)
        return HTMLResponse(pages.diff_part(difference.files[at], address, *_rows_of(request)))

    def forks(self, request: Request) -> Response:
        return HTMLResponse(str(pages.forks_part(self._source, can_act=self._actions is not None)))

    def fork_difference(self, request: Request) -> Response:
        one, other = _ends(request)
        return HTMLResponse(pages.fork_difference_part(self._source.fork_difference(one, other), one, other))

    def fork_rows(self, request: Request) -> Response:
        (one, other), at = _ends(request), _number(request, "file")
        file = self._source.fork_difference(one, other).files[at]
        return HTMLResponse(pages.diff_part(file, pages.fork_address(one, other, at), *_rows_of(request)))

    def blame(self, request: Request) -> Response:
        path = request.query_params["path"]
        lines = self._source.blame(path)
        return HTMLResponse(pages.blame_part(path, lines[:MAX_BLAMED_LINES], max(len(lines) - MAX_BLAMED_LINES, 0)))

    async def events(self, request: Request) -> Response:
        if self._questions is None:
            return event_stream(request, self._source)
        return event_stream(request, WithQuestions(self._source, self._questions))

    def question(self, request: Request) -> Response:
        assert self._questions is not None
        return HTMLResponse(pages.question_part(self._questions.waiting))

    async def answer(self, request: Request) -> Response:
        return await self._asked(request, self._answered)

    def _answered(self, given: Mapping[str, str]) -> Mapping[str, object]:
        assert self._questions is not None
        return {"lines": [self._questions.answer(given)]}

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
        lines = self._actions.act(given.get("once", ""), given.get("words", ""))
        self._source.refresh()
        return {"lines": lines}

    def notes(self, request: Request) -> Response:
        assert self._actions is not None
        return HTMLResponse(pages.notes_part(self._actions.waiting_notes()))

    async def note(self, request: Request) -> Response:
        return await self._asked(request, self._noted)

    def _noted(self, given: Mapping[str, str]) -> Mapping[str, object]:
        assert self._actions is not None
        if "withdraw" in given:
            self._actions.withdraw(int(given["withdraw"]))
            return {"lines": ["The agent will not be told."]}
        self._actions.comment(given)
        return {"lines": ["The agent will be told."]}

    async def _asked(self, request: Request, work: Callable[[Mapping[str, str]], Mapping[str, object]]) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return PlainTextResponse("too much", 413)
        given = dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))
        # A change that has begun ends, even if its page is closed meanwhile.
        return await to_thread.run_sync(lambda: tried(lambda: JSONResponse(work(given))))


def _static(name: str) -> Response:
    return Response(pages.static_file(name), media_type=OPEN[f"/{name}"])


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


async def serve_view(app: Starlette, listening: socket.socket) -> None:
    """Serve until cancelled."""
    await serve_until_cancelled(app, listening, lifespan="off")
