"""The package indexes that a user configured for pip and npm, read without running either."""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_NPM_REGISTRY = re.compile(r"""^\s*registry\s*=\s*["']?([^\s"']+)""", re.MULTILINE)


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
    pip = _pip(environment)
    main = environment.get("PIP_INDEX_URL") or environment.get("UV_DEFAULT_INDEX") or pip.get("index-url", "")
    extra = environment.get("PIP_EXTRA_INDEX_URL") or pip.get("extra-index-url", "")
    return Registries(
        python=next(iter(_urls(main)), ""),
        python_extra=_urls(extra),
        npm=_npm(environment).rstrip("/"),
        certificates=environment.get("PIP_CERT") or pip.get("cert", ""),
    )


def _urls(words: str) -> Sequence[str]:
    return [url.rstrip("/") for url in words.split() if url.startswith(("http://", "https://"))]


def _home(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("HOME") or os.path.expanduser("~"))


def _pip(environment: Mapping[str, str]) -> Mapping[str, str]:
    home = _home(environment)
    config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"), home / ".pip/pip.conf", config / "pip/pip.conf"]
    if "PIP_CONFIG_FILE" in environment:
        files.append(Path(environment["PIP_CONFIG_FILE"]))
    parser = configparser.RawConfigParser()
    with suppress(configparser.Error, UnicodeDecodeError, OSError):
        parser.read(files)
    sections = [name for name in ("global", "install") if parser.has_section(name)]
    return dict(item for name in sections for item in parser.items(name))


def _npm(environment: Mapping[str, str]) -> str:
    """npm's registry. Its variables are of either case."""
    variables = {name.lower(): value for name, value in environment.items()}
    found = ""
    for file in ("/etc/npmrc", variables.get("npm_config_userconfig") or _home(environment) / ".npmrc"):
        with suppress(OSError, UnicodeDecodeError):
            for value in _NPM_REGISTRY.findall(Path(file).read_text()):
                found = value
    return variables.get("npm_config_registry") or found
