"""Who may ask for what, and how an answer is made: for each page that is served."""

from __future__ import annotations

import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Any, Protocol, TypeAlias, TypeVar

import anyio
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from ringfence.errors import RingfenceError
from ringfence.failures import describe_error
from ringfence_tools.printable import one_line

LOOK_SECONDS = 1.0
"""How often news are looked for, for each page that is open. A look that takes long comes less often."""
QUIET_LOOKS = 15
"""After so many looks without news, something is sent: so a page that was closed is found out."""
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

_LOOPBACK = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::[0-9]{1,5})?")

ResponseT = TypeVar("ResponseT")
Answer: TypeAlias = Callable[[Request], Response]


def in_thread(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await run_in_threadpool(lambda: tried(lambda: answer(request)))

    return endpoint


def tried(work: Callable[[], ResponseT]) -> ResponseT | Response:
    """Return the answer, or a line about what is wrong."""
    try:
        return work()
    except LookupError as error:
        return PlainTextResponse(one_line(str(error.args[0]) if error.args else "there is none", 500), 404)
    except (RingfenceError, OSError, ValueError) as error:
        return PlainTextResponse(one_line(describe_error(error), 500), 409)


class Live(Protocol):
    """What a page follows."""

    @property
    def version(self) -> str: ...

    def refresh(self) -> bool:
        """Look for news. Return whether there is any."""
        ...


def event_stream(request: Request, live: Live) -> Response:
    """Send the version of what a page is about, whenever it changes."""
    return StreamingResponse(_news(request, live), media_type="text/event-stream")


async def _news(request: Request, live: Live) -> AsyncIterator[str]:
    version, quiet = "", QUIET_LOOKS
    while not await request.is_disconnected():
        began = monotonic()
        with suppress(RingfenceError, OSError, ValueError, LookupError):  # it is being written: the next look has it
            await run_in_threadpool(live.refresh)
        quiet += 1
        if live.version != version or quiet > QUIET_LOOKS:
            version, quiet = live.version, 0
            yield f"data: {version}\n\n"
        await anyio.sleep(max(LOOK_SECONDS, 5 * (monotonic() - began)))


class Guarded:
    """Refuses requests of other pages, of other names than those of loopback, and without the token.

    The port may be any: it is another one than the server's where ssh forwards it. A path that ``is_open`` needs no
    token: it has nothing of a workspace.
    """

    def __init__(self, app: Any, token: str, is_open: Callable[[str], bool]) -> None:
        self._app = app
        self._token = token.encode()
        self._is_open = is_open

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
        # A name that leads here by somebody's DNS is refused by itself.
        if len(hosts) != 1 or not _LOOPBACK.fullmatch(hosts[0]):
            return PlainTextResponse("this is not the address of the page", 421)
        if any(value != f"http://{hosts[0]}" for name, value in headers if name == "origin"):
            return PlainTextResponse("another page may not ask", 403)
        if self._is_open(scope["path"]):
            return None
        given = next((value for name, value in headers if name == "authorization"), "")
        scheme, _, token = given.partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(token.encode("utf-8", "replace"), self._token):
            return None
        return PlainTextResponse("open the address that `ringfence view` printed", 401, {"www-authenticate": "Bearer"})
