"""The server of the page of a batch: its table, and below it the calls of each task."""

from __future__ import annotations

import re
from typing import Any

from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route, Router

from ringfence_batch.page import page_data, render_summary, shell_page, static_file
from ringfence_tools.printable import one_line
from ringfence_view.app import OPEN, call_routes
from ringfence_view.batch_source import BatchSource
from ringfence_view.guarded import Guarded, event_stream, in_thread
from ringfence_view.sources import CallSource

_OPEN_FILES = {"/": "text/html", "/index.js": "text/javascript", "/index.css": "text/css"}
_OF_TASK = re.compile(r"/tasks/[\w.-]{1,100}(/.*)", re.ASCII)


def batch_app(source: BatchSource, token: str, host: str) -> Starlette:
    """Return the application. ``host`` is the only one that requests may name, with its port."""

    def shell(request: Request) -> Response:
        return HTMLResponse(shell_page())

    def static(request: Request) -> Response:
        path = request.url.path
        return Response(static_file(path[1:]), media_type=_OPEN_FILES[path])

    def summary(request: Request) -> Response:
        return HTMLResponse(render_summary(source.summary, is_running=source.is_running))

    def data(request: Request) -> Response:
        return JSONResponse(page_data(source.summary))

    async def events(request: Request) -> Response:
        return event_stream(request, source)

    app = Starlette(
        routes=[
            Route("/", shell),
            *(Route(path, static) for path in _OPEN_FILES if path != "/"),
            Route("/summary", in_thread(summary)),
            Route("/data", in_thread(data)),
            Route("/events", events),
            Mount("/tasks/{id}", _Tasks(source)),
        ]
    )
    app.add_middleware(Guarded, token=token, host=host, is_open=_is_open)
    return app


def _is_open(path: str) -> bool:
    """Whether a path needs no token: the files of the pages have nothing of a batch."""
    below = _OF_TASK.fullmatch(path)
    return path in _OPEN_FILES if below is None else below[1] in OPEN


class _Tasks:
    """The pages of the calls of tasks, each below its id."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self._nothing = Router(call_routes(CallSource(None, None)))
        """The files of a page alone, which are open, so that nobody learns from them which tasks there are."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        router: Any = self._nothing
        if not _is_open(scope["path"]):
            try:
                calls = await to_thread.run_sync(self._source.calls, scope["path_params"]["id"])
                router = Router(call_routes(calls))
            except LookupError as error:
                router = PlainTextResponse(one_line(str(error.args[0]), 500), 404)
        await router(scope, receive, send)
