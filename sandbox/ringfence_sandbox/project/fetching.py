"""Files of packages, fetched from where a lock or an index says and checked against the hash in the lock."""

from __future__ import annotations

import base64
import configparser
import hashlib
import html
import os
import re
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

import requests
from requests.adapters import HTTPAdapter
from requests.utils import get_auth_from_url, get_environ_proxies, urldefragauth
from urllib3.exceptions import HTTPError

from ringfence_sandbox.container.images import Progress
from ringfence_sandbox.project.project_files import LockError

_MOST_INDEX_BYTES = 64 << 20
_MOST_ARTEFACT_BYTES = 8 << 30
_SILENCE_SECONDS = 60.0
_SHOWN_EVERY_SECONDS = 2.0
_AT_ONCE = 4
_ALGORITHMS = ("sha512", "sha384", "sha256")
_ANCHOR = re.compile(r"""<a\s[^>]*?href=(["'])([^"'>]*)\1""", re.IGNORECASE)
_NPM_REGISTRY = re.compile(r"""^\s*registry\s*=\s*["']?([^\s"']+)""", re.MULTILINE)
_FAILED = (OSError, ValueError, HTTPError)


@dataclass(frozen=True, slots=True)
class Registries:
    """URLs. Empty where nothing is configured: then the default of the image's pip or npm holds."""

    python: str = ""
    """The main simple index."""
    python_extra: Sequence[str] = ()
    """The simple indexes beside the main one."""
    npm: str = ""
    certificates: str = ""
    """A file of certificates for TLS, where it is not the system's."""


def configured(environment: Mapping[str, str] = os.environ) -> Registries:
    """What pip and npm would use here, from their variables and from the files of the user and the system. Files of
    the project are not read: they are not the user's."""
    home = Path(environment.get("HOME") or os.path.expanduser("~"))
    pip = _pip(environment, home)
    main = environment.get("PIP_INDEX_URL") or environment.get("UV_DEFAULT_INDEX") or pip.get("index-url", "")
    return Registries(
        python=next(iter(_urls(main)), ""),
        python_extra=_urls(environment.get("PIP_EXTRA_INDEX_URL") or pip.get("extra-index-url", "")),
        npm=_npm({name.lower(): value for name, value in environment.items()}, home).rstrip("/"),
        certificates=environment.get("PIP_CERT") or pip.get("cert", ""),
    )


def _urls(words: str) -> Sequence[str]:
    return [url.rstrip("/") for url in words.split() if url.startswith(("http://", "https://"))]


def _pip(environment: Mapping[str, str], home: Path) -> Mapping[str, str]:
    config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    files = ["/etc/xdg/pip/pip.conf", "/etc/pip.conf", home / ".pip/pip.conf", config / "pip/pip.conf"]
    parser = configparser.RawConfigParser()
    with suppress(configparser.Error, UnicodeDecodeError, OSError):
        parser.read([*files, environment.get("PIP_CONFIG_FILE", "")])
    return {key: value for name in ("global", "install") if name in parser for key, value in parser.items(name)}


def _npm(environment: Mapping[str, str], home: Path) -> str:
    """npm's registry, of whose variables, given in lower case, any case counts."""
    found = [""]
    for file in ("/etc/npmrc", environment.get("npm_config_userconfig") or home / ".npmrc"):
        with suppress(OSError, UnicodeDecodeError):
            found += _NPM_REGISTRY.findall(Path(file).read_text())
    return environment.get("npm_config_registry") or found[-1]


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
        self._session = requests.Session()
        self._session.headers.update({"User-Agent": "ringfence", "Accept-Encoding": "identity"})
        self._session.trust_env = False  # no password of ~/.netrc goes to where a lock says
        own, system = registries.certificates, ssl.get_default_verify_paths()
        self._certificates = own if os.path.isfile(own) else system.cafile or system.capath
        # A redirect goes by these, too: what begins with none of them is not fetched.
        self._session.adapters.clear()
        self._session.mount("https://", HTTPAdapter())
        for url in (registries.python, *registries.python_extra, registries.npm):
            if url.startswith("http://"):
                self._session.mount(urljoin(urldefragauth(url), "/"), HTTPAdapter())
        self._stopped = threading.Event()
        self._shown = 0.0

    def fetch_all(self, artefacts: Sequence[Artefact], directory: Path, what: str) -> None:
        """Fetch all into a directory, which is made.

        Raises:
            LockError: one cannot be had, or is not what its hash says.
        """
        size = 0
        directory.mkdir(exist_ok=True)
        self._progress(f"fetching {len(artefacts)} {what}")
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            try:
                for done, fetched in enumerate(pool.map(partial(self._fetch, directory=directory), artefacts), 1):
                    size += fetched
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
            except _FAILED as error:
                reasons.append(f"{public(url)}: {error}")
        raise LockError(f"{artefact.name} cannot be fetched: {'; '.join(reasons) or 'no address is known'}")

    def _download(self, url: str, artefact: Artefact, target: Path) -> int:
        digests = {name: hashlib.new(name) for name in {one.partition(":")[0] for one in artefact.hashes}}
        size, part = 0, target.with_name(f"{target.name}.part")
        with self._open(url) as answer, part.open("wb") as file:
            while (chunk := answer.raw.read(1 << 20)) and not self._stopped.is_set():
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
                text = answer.raw.read(_MOST_INDEX_BYTES + 1)
            if len(text) > _MOST_INDEX_BYTES:
                raise ValueError(f"its answer has more than {_MOST_INDEX_BYTES >> 20} MiB")
        except FileNotFoundError:
            return ()
        except _FAILED as error:
            raise LockError(f"the index {public(url)} does not answer: {error}") from error
        links = [html.unescape(found[1]) for found in _ANCHOR.findall(text.decode(errors="replace"))]
        addresses = [urldefrag(urljoin(answer.url, link)).url for link in links]
        return [(basename(address), address) for address in addresses]

    def _open(self, url: str, accept: str = "*/*") -> requests.Response:
        """The answer, whose body is not read yet. OSError where it is an error, FileNotFoundError for 404."""
        auth = get_auth_from_url(url)
        try:
            answer = self._session.get(
                urldefragauth(url),
                auth=auth if any(auth) else None,
                headers={"Accept": accept},
                stream=True,
                verify=self._certificates,
                proxies=get_environ_proxies(url),
                timeout=_SILENCE_SECONDS,
            )
        except requests.exceptions.InvalidSchema:
            raise ValueError(
                "only https is fetched, and http from an index that you configured for pip or npm"
            ) from None
        if not answer.ok:
            answer.close()
            failure = FileNotFoundError if answer.status_code == requests.codes.not_found else OSError
            raise failure(f"it answers {answer.status_code} {answer.reason}")
        return answer


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
