"""Files of packages, fetched from where a lock or an index says and checked against the hash in the lock."""

from __future__ import annotations

import base64
import hashlib
import html
import http.client
import os
import re
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

from ringfence.errors import SandboxUnavailableError
from ringfence_sandbox.container.images import Progress
from ringfence_sandbox.project.registries import Registries

_MOST_INDEX_BYTES = 64 << 20
_MOST_ARTEFACT_BYTES = 8 << 30
_SILENCE_SECONDS = 60.0
_SHOWN_EVERY_SECONDS = 2.0
_AT_ONCE = 4
_ALGORITHMS = ("sha512", "sha384", "sha256")
_ANCHOR = re.compile(r"""<a\s[^>]*?href=(["'])([^"'>]*)\1""", re.IGNORECASE)


class LockError(SandboxUnavailableError):
    """A lock that cannot be installed from; the message names what in it."""


@dataclass(frozen=True, slots=True)
class Artefact:
    """One file of a package. ``hashes`` are ``algorithm:hexadecimal``: the file has one of them."""

    name: str
    """In words: the package and its version."""
    hashes: frozenset[str]
    urls: Sequence[str]
    """Where it may be, best first. All that they give is checked."""
    filename: str
    """A plain name, which the directory of the artefacts has only once."""


class Fetcher:
    """Fetches by HTTPS, and by HTTP only from a host that the user configured so. What it leaves was checked."""

    def __init__(self, registries: Registries, progress: Progress) -> None:
        self._progress = progress
        hosts = [registries.python, *registries.python_extra, registries.npm]
        self._plain = {_origin(url) for url in hosts if url.startswith("http://")}
        certificates = registries.certificates
        context = ssl.create_default_context(cafile=certificates if os.path.isfile(certificates) else None)
        https = urllib.request.HTTPSHandler(context=context)
        self._opener = urllib.request.build_opener(https, _Redirects(self._check_url))
        self._stopped = threading.Event()
        self._shown = 0.0

    def fetch_all(self, artefacts: Sequence[Artefact], directory: Path, what: str) -> None:
        """Fetch all into a directory, which is made.

        Raises:
            LockError: one cannot be had, or is not what its hash says.
        """
        done, size = 0, 0
        directory.mkdir(exist_ok=True)
        self._progress(f"fetching {len(artefacts)} {what}")

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            try:
                for bytes_ in pool.map(partial(self._fetch, directory=directory), artefacts):
                    done, size = done + 1, size + bytes_
                    if done == len(artefacts) or time.monotonic() > self._shown + _SHOWN_EVERY_SECONDS:
                        self._shown = time.monotonic()
                        self._progress(f"fetched {done} of {len(artefacts)} {what}, {size / 1e6:.1f} MB")
            except BaseException:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _fetch(self, artefact: Artefact, directory: Path) -> int:
        """Its size in bytes. LockError as `fetch_all`."""
        reasons: list[str] = []
        for url in artefact.urls:
            try:
                return self._download(url, artefact, directory / artefact.filename)
            except (OSError, ValueError, http.client.HTTPException) as error:
                reasons.append(f"{public(url)}: {error}")
        raise LockError(f"{artefact.name} cannot be fetched: {'; '.join(reasons) or 'no address is known'}")

    def _download(self, url: str, artefact: Artefact, target: Path) -> int:
        digests = {name: hashlib.new(name) for name in {one.partition(":")[0] for one in artefact.hashes}}
        size, part = 0, target.with_name(f"{target.name}.part")
        with self._open(url) as answer, part.open("wb") as file:
            while (chunk := answer.read(1 << 20)) and not self._stopped.is_set():
                size += len(chunk)
                if size > _MOST_ARTEFACT_BYTES:
                    raise ValueError(f"it has more than {_MOST_ARTEFACT_BYTES >> 30} GiB")
                file.write(chunk)
                for digest in digests.values():
                    digest.update(chunk)
        found = {f"{name}:{digest.hexdigest()}" for name, digest in digests.items()}
        if not found & artefact.hashes:
            part.unlink()
            raise ValueError(f"it has the hash {', '.join(sorted(found))}, which the lock does not name")
        part.rename(target)
        return size

    def index_files(self, index: str, package: str) -> Sequence[tuple[str, str]]:
        """Name and URL of each file of a package in a simple index; none where it does not have the package.

        Raises:
            LockError: the index does not answer as one.
        """
        url = f"{index}/{package}/"
        try:
            with self._open(url, "text/html") as answer:
                text, base = answer.read(_MOST_INDEX_BYTES + 1), answer.geturl()
            if len(text) > _MOST_INDEX_BYTES:
                raise ValueError(f"its answer has more than {_MOST_INDEX_BYTES >> 20} MiB")
            links = [html.unescape(found[1]) for found in _ANCHOR.findall(text.decode(errors="replace"))]
            addresses = [urldefrag(urljoin(base, link)).url for link in links]
            return [(basename(address), address) for address in addresses]
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == 404:
                return ()
            raise LockError(f"the index {public(url)} does not answer: {error}") from error

    def _check_url(self, url: str) -> None:
        if urlsplit(url).scheme == "https" or _origin(url) in self._plain:
            return
        raise ValueError("only https is fetched, and http from an index that you configured for pip or npm")

    def _open(self, url: str, accept: str = "*/*") -> Any:
        self._check_url(url)
        parts = urlsplit(url)
        headers = {"Accept": accept, "User-Agent": "ringfence"}
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
            url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        return self._opener.open(urllib.request.Request(url, headers=headers), timeout=_SILENCE_SECONDS)  # noqa: S310


class _Redirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, check: Callable[[str], None]) -> None:
        self._check = check

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        self._check(newurl)
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and _origin(newurl) != _origin(req.full_url):
            new.remove_header("Authorization")
        return new


def basename(url: str) -> str:
    """The name of the file at a URL."""
    return unquote(urlsplit(url).path.rpartition("/")[2])


def integrity(text: str) -> frozenset[str]:
    """The strongest hashes of an integrity as npm writes it. ValueError: it has none."""
    found: dict[str, set[str]] = {}
    for one in text.split():
        algorithm, _, digest = one.partition("?")[0].partition("-")
        found.setdefault(algorithm, set()).add(f"{algorithm}:{base64.b64decode(digest, validate=True).hex()}")
    for algorithm in (*_ALGORITHMS, "sha1"):
        if algorithm in found:
            return frozenset(found[algorithm])
    raise ValueError(f"{text!r} is no hash that is known")


def strong(hashes: Sequence[str]) -> frozenset[str]:
    """Hashes of a Python lock. ValueError: one is of a kind that does not count, or malformed."""
    for one in hashes:
        if not re.fullmatch(rf"({'|'.join(_ALGORITHMS)}):[0-9a-f]{{64,128}}", one):
            raise ValueError(f"{one!r} is no hash that is known")
    return frozenset(hashes)


def public(url: str) -> str:
    """A URL without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port
