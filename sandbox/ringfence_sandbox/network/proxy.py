"""The way out of a container that has no network: a proxy on the host, which connects to allowed hosts alone.

The listening socket is one of the container: its executor makes it and hands it over. So only what is in the container
can connect to it, and nothing in the container knows what is behind it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

from ringfence.receipts import NetworkUse
from ringfence_sandbox.network.network import (
    AllowedHosts,
    Resolve,
    Traffic,
    as_address,
    count_bypasses,
    normalise_host,
)
from ringfence_sandbox.network.proxy_requests import (
    END_OF_HEAD,
    LONGEST_HEAD,
    LONGEST_LINE,
    UNRECOGNIZED_NAME,
    HttpRequest,
    chunk_length,
    is_cut,
    parse_request,
    record_length,
    server_name,
)
from ringfence_workspace.tree.kernel import FORKS

MOST_CONNECTIONS = 128
"""At a time; further ones wait."""
_MOST_HOSTS = 100
_OTHERS = "(others)"
_CHUNK = 256 * 1024
_HEAD_SECONDS = 15.0
_CONNECT_SECONDS = 10.0
_LINGER_SECONDS = 1.0


class _RefusedError(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Proxy:
    """Serves the connections of one command at a time, in a thread of its own."""

    def __init__(self, listener: socket.socket, allowed: AllowedHosts, resolve: Resolve, pid: int) -> None:
        """``listener`` is the proxy's from now on. ``pid`` is a process of the container."""
        self._listener = listener
        self._pid = pid
        self._bypasses = 0
        self._allowed = allowed
        self._resolve = resolve
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._traffic: dict[tuple[str, int], Traffic] = {}
        self._sockets: set[socket.socket] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._accepts = False
        listener.setblocking(False)
        with FORKS:
            _proxies.add(self)

    def start(self) -> None:
        """Begin to accept connections."""
        self.stop()  # where Ctrl-C came in the place of the last one
        self._traffic = {}
        self._bypasses = count_bypasses(self._pid)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name="ringfence-proxy", daemon=True)
        self._thread.start()

    def stop(self) -> NetworkUse:
        """End all connections, also those that nobody accepted yet; return what was exchanged since `start`."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return NetworkUse()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        self._loop = self._thread = None
        with suppress(OSError):
            while True:
                self._listener.accept()[0].close()
        # A container that has ended has no counters.
        return NetworkUse(
            tuple(one.record() for one in self._traffic.values()), max(0, count_bypasses(self._pid) - self._bypasses)
        )

    def close(self) -> None:
        self.stop()
        with FORKS:
            _proxies.discard(self)
            self._listener.close()

    def in_child(self) -> None:
        """In a forked child: let go of the copies, so that connections end with the parent."""
        for one in (self._listener, *self._sockets):
            one.close()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        self._accepts = True
        self._listen(loop)
        loop.run_forever()
        self._accepts = False
        loop.remove_reader(self._listener)
        tasks = [*self._serving]
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        for one in [*self._sockets]:  # of tasks that had not begun
            self._close(one)

    def _keep(self, one: socket.socket) -> socket.socket:
        one.setblocking(False)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets.add(one)
        return one

    def _close(self, one: socket.socket) -> None:
        self._sockets.discard(one)
        one.close()

    def _traffic_of(self, host: str, port: int) -> Traffic:
        key = host, port
        if key not in self._traffic and len(self._traffic) >= _MOST_HOSTS:
            key = _OTHERS, 0
        return self._traffic.setdefault(key, Traffic(*key))

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._accepts:
            loop.add_reader(self._listener, self._accept, loop)

    def _accept(self, loop: asyncio.AbstractEventLoop) -> None:
        # Not by `sock_accept`: a connection that it has accepted when it is cancelled is lost.
        try:
            client = self._keep(self._listener.accept()[0])
        except OSError:  # this process may have too many files open
            loop.remove_reader(self._listener)
            loop.call_later(0.1, self._listen, loop)
            return
        task = loop.create_task(self._serve(client))
        self._serving.add(task)
        task.add_done_callback(self._served)
        if len(self._serving) >= MOST_CONNECTIONS:
            loop.remove_reader(self._listener)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._listen(task.get_loop())

    async def _serve(self, client: socket.socket) -> None:
        """Answer one request. The next one needs a connection of its own, so that none goes unchecked."""
        incoming = _Incoming(client)
        host: socket.socket | None = None
        traffic: Traffic | None = None
        try:
            request = await self._read_request(incoming)
            traffic = self._traffic_of(request.host, request.port)
            host = await self._connect(request)
            traffic.connections += 1
            if request.is_tunnel:
                await self._tunnel(incoming, host, request, traffic)
            else:
                await self._forward(incoming, host, request, traffic)
                await _end(client)
        except _RefusedError as refused:
            self._note(traffic, str(refused))
            with suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(client, _answer(refused))
                await _end(client)
        except (OSError, ExceptionGroup):  # one of the two sides has gone, or a body is malformed
            pass
        finally:
            self._close(client)
            if host is not None:
                self._close(host)

    def _note(self, traffic: Traffic | None, reason: str) -> None:
        traffic = traffic or self._traffic_of("", 0)
        traffic.refused += 1
        traffic.reason = reason

    async def _read_request(self, incoming: _Incoming) -> HttpRequest:
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                return parse_request(await incoming.until(END_OF_HEAD, LONGEST_HEAD))
        except ValueError as error:
            raise _RefusedError(400, str(error)) from None
        except TimeoutError:
            raise _RefusedError(400, f"no whole request came within {_HEAD_SECONDS:g} s") from None

    async def _connect(self, request: HttpRequest) -> socket.socket:
        """A connection to an address of the host that was checked."""
        name, port = request.host, request.port
        ports = self._allowed.ports(name)
        if port not in ports:
            only = f", only its port {' and '.join(map(str, sorted(ports)))}: a further one is to be named"
            raise _RefusedError(403, f"{_shown(name, port)} is not allowed by --network{only if ports else ''}")
        try:
            addresses = [name] if as_address(name) is not None else await self._resolved(name, port)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else ""
            raise _RefusedError(502, f"{name} was not resolved: {why or error}") from None
        usable = [address for address in addresses if self._allowed.allows_address(address, port)]
        if not usable:
            found = ", ".join(addresses[:4]) or "none"
            raise _RefusedError(403, f"no address of {name} is public, and --network names none of them: {found}")
        failure = ""
        for address in usable:
            connection = self._keep(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await asyncio.get_running_loop().sock_connect(connection, (address, port))
                is_here = connection.getpeername()[0] == connection.getsockname()[0]
                if not is_here or self._allowed.names_address(address, port):
                    return connection
                failure = f"{address} is this machine, and --network does not name it"
            except OSError as error:
                failure = f"{address}: {os.strerror(error.errno) if error.errno else 'no answer'}"
            self._close(connection)
        raise _RefusedError(502, f"no connection to {_shown(name, port)}: {failure}")

    async def _resolved(self, name: str, port: int) -> Sequence[str]:
        # In a thread that nobody waits for: a resolver may take half a minute, the end of a command may not.
        found: Future[Sequence[str]] = Future()
        found.set_running_or_notify_cancel()

        def ask() -> None:
            try:
                found.set_result(self._resolve(name, port))
            except Exception as error:  # whoever waits for it says which are expected
                found.set_exception(error)

        threading.Thread(target=ask, name="ringfence-resolver", daemon=True).start()
        return await asyncio.wrap_future(found)

    async def _tunnel(self, incoming: _Incoming, host: socket.socket, request: HttpRequest, traffic: Traffic) -> None:
        send = asyncio.get_running_loop().sock_sendall
        await send(incoming.source, b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                hello, name = await _read_hello(incoming)
            wanted = "" if as_address(request.host) is not None else request.host
            if (normalise_host(name) if name else "") != wanted:
                raise ValueError(f"TLS asks for {name}, not for {request.host}" if name else "TLS names no host")
        except (ValueError, TimeoutError) as error:
            self._note(traffic, str(error) or f"no ClientHello came within {_HEAD_SECONDS:g} s")
            await send(incoming.source, UNRECOGNIZED_NAME)
            await _end(incoming.source)
            return

        async def upload() -> None:
            data = hello
            while data:
                await send(host, data)
                traffic.sent += len(data)
                await asyncio.sleep(0)  # where both sides are quick, nothing else here waits
                data = await incoming.some(_CHUNK)
            host.shutdown(socket.SHUT_WR)

        async with asyncio.TaskGroup() as both:
            both.create_task(upload())
            both.create_task(_download(host, incoming.source, traffic))

    async def _forward(self, incoming: _Incoming, host: socket.socket, request: HttpRequest, traffic: Traffic) -> None:
        async def send(data: bytes) -> None:
            await asyncio.get_running_loop().sock_sendall(host, data)
            traffic.sent += len(data)
            await asyncio.sleep(0)

        async def upload() -> None:
            await send(request.head)
            if not request.is_chunked:
                await incoming.forward(request.body_bytes, send)
                return
            while size := chunk_length(await incoming.until(b"\r\n", LONGEST_LINE)):
                await send(b"%x\r\n" % size)
                await incoming.forward(size, send)
                if await incoming.exactly(2) != b"\r\n":
                    raise ValueError("a chunk is malformed")
                await send(b"\r\n")
            await send(b"0\r\n\r\n")  # its trailers are left out

        async with asyncio.TaskGroup() as both:
            uploading = both.create_task(upload())
            await _download(host, incoming.source, traffic)
            uploading.cancel()  # a host need not read all of a request


class _Incoming:
    """What a client sends."""

    def __init__(self, source: socket.socket) -> None:
        self.source = source
        self._ahead = bytearray()

    async def some(self, most: int) -> bytes:
        """Up to so many bytes; none at the end."""
        if self._ahead:
            return self._take(most)
        return await asyncio.get_running_loop().sock_recv(self.source, min(most, _CHUNK))

    async def until(self, mark: bytes, most: int) -> bytes:
        """All up to a mark. Raises ConnectionError where the end comes first, _RefusedError where the mark does not."""
        searched = 0
        while (found := self._ahead.find(mark, searched)) < 0 and len(self._ahead) <= most:
            searched = max(0, len(self._ahead) - len(mark) + 1)
            await self._read()
        if not 0 <= found <= most:
            raise _RefusedError(431, f"more than {most} bytes")
        return self._take(found + len(mark))

    async def exactly(self, count: int) -> bytes:
        """Raises ConnectionError where the end comes first."""
        while len(self._ahead) < count:
            await self._read()
        return self._take(count)

    async def forward(self, count: int, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Raises ConnectionError where the end comes first."""
        while count:
            if not (data := await self.some(count)):
                raise ConnectionError
            await send(data)
            count -= len(data)

    async def _read(self) -> None:
        data = await asyncio.get_running_loop().sock_recv(self.source, _CHUNK)
        if not data:
            raise ConnectionError
        self._ahead += data

    def _take(self, count: int) -> bytes:
        taken = bytes(self._ahead[:count])
        del self._ahead[:count]
        return taken


async def _read_hello(incoming: _Incoming) -> tuple[bytes, str]:
    """The first records of TLS, and the name that they ask for. Raises ValueError where that is not what comes."""
    records, message = bytearray(), bytearray()
    while not message or is_cut(message):
        head = await incoming.exactly(5)
        fragment = await incoming.exactly(record_length(head))
        records += head + fragment
        message += fragment
    return bytes(records), server_name(bytes(message))


async def _download(host: socket.socket, client: socket.socket, traffic: Traffic) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(host, _CHUNK):
        traffic.received += len(data)
        await loop.sock_sendall(client, data)
        await asyncio.sleep(0)
    client.shutdown(socket.SHUT_WR)


async def _end(client: socket.socket) -> None:
    """Say that no more comes, and give the client the time to read: with bytes unread, a close would cut it off."""
    with suppress(OSError):
        client.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(_LINGER_SECONDS):
            while await asyncio.get_running_loop().sock_recv(client, _CHUNK):
                await asyncio.sleep(0)


def _answer(refused: _RefusedError) -> bytes:
    # Many programs show of a tunnel that is refused the first line alone.
    said = f"ringfence: {refused}".encode("ascii", "replace")
    head = b"HTTP/1.1 %d %s\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (refused.status, said, len(said) + 1) + said + b"\n"


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_proxies: weakref.WeakSet[Proxy] = weakref.WeakSet()


def _after_fork() -> None:
    for one in [*_proxies]:
        one.in_child()


os.register_at_fork(after_in_child=_after_fork)
