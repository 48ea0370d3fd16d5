"""The server of the page of a batch: its table, and below it the calls of each task."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route

from ringfence_batch.page import page_data, render_summary, shell_page, static_file
from ringfence_view.app import PagesBelow, is_open_file
from ringfence_view.batch_source import BatchSource
from ringfence_view.guarded import Guarded, event_stream, in_thread

_OPEN_FILES = {"/": "text/html", "/index.js": "text/javascript", "/index.css": "text/css"}


def batch_app(source: BatchSource, token: str) -> Starlette:
    """Return the application. Requests name a loopback address, with any port."""

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
            Mount("/tasks/{name}", PagesBelow(source.calls)),
        ]
    )
    app.add_middleware(Guarded, token=token, is_open=_is_open)
    return app


def _is_open(path: str) -> bool:
    """Whether a path needs no token: the files of the pages have nothing of a batch."""
    return path in _OPEN_FILES or (path.startswith("/tasks/") and is_open_file(path))
