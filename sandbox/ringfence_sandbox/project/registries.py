"""The package indexes that a user configured for pip and npm, read without running either."""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Registries:
    """Empty where nothing is configured: then the default of the image's pip or npm holds."""

    python: Sequence[str] = ()
    """The URLs of simple indexes, where the main one is configured."""
    python_extra: Sequence[str] = ()
    """The URLs of those beside the main one."""
    npm: str = ""
    npm_scopes: Mapping[str, str] = field(default_factory=dict[str, str])
    """The registry of ``@scope``."""
    npm_tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    """By the beginning of a URL after its scheme, as in an npmrc."""
    certificates: str = ""
    """A file of certificates for TLS, where it is not the system's."""


def configured(environment: Mapping[str, str] = os.environ) -> Registries:
    """What pip and npm would use here, from their variables and from the files of the user and the system. Files of
    the project are not read: they are not the user's."""
    pip = _pip(environment)
    npm = _npmrc(environment)
    main = environment.get("PIP_INDEX_URL") or environment.get("UV_DEFAULT_INDEX") or pip.get("index-url", "")
    extra = environment.get("PIP_EXTRA_INDEX_URL") or pip.get("extra-index-url", "")
    registry = environment.get("npm_config_registry") or environment.get("NPM_CONFIG_REGISTRY")
    return Registries(
        python=[*_urls(main), *_urls(extra)] if _urls(main) else [],
        python_extra=_urls(extra),
        npm=(registry or npm.get("registry", "")).rstrip("/"),
        npm_scopes={
            name.removesuffix(":registry"): url.rstrip("/")
            for name, url in npm.items()
            if name.startswith("@") and name.endswith(":registry")
        },
        npm_tokens={
            name.removesuffix(":_authToken"): token
            for name, token in npm.items()
            if name.startswith("//") and name.endswith(":_authToken")
        },
        certificates=environment.get("PIP_CERT") or pip.get("cert", "") or npm.get("cafile", ""),
    )


def _urls(words: str) -> Sequence[str]:
    return [url.rstrip("/") for url in words.split() if url.startswith(("http://", "https://"))]


def _pip(environment: Mapping[str, str]) -> dict[str, str]:
    home = Path(environment.get("HOME") or os.path.expanduser("~"))
    config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    files = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"), home / ".pip/pip.conf", config / "pip/pip.conf"]
    if "PIP_CONFIG_FILE" in environment:
        files.append(Path(environment["PIP_CONFIG_FILE"]))
    parser = configparser.RawConfigParser()
    with suppress(configparser.Error, UnicodeDecodeError, OSError):
        parser.read(files)
    return {**_section(parser, "global"), **_section(parser, "install")}


def _section(parser: configparser.RawConfigParser, name: str) -> dict[str, str]:
    return dict(parser.items(name)) if parser.has_section(name) else {}


def _npmrc(environment: Mapping[str, str]) -> dict[str, str]:
    home = Path(environment.get("HOME") or os.path.expanduser("~"))
    named = environment.get("npm_config_userconfig") or environment.get("NPM_CONFIG_USERCONFIG")
    found: dict[str, str] = {}
    for file in (Path("/etc/npmrc"), Path(named) if named else home / ".npmrc"):
        with suppress(OSError, UnicodeDecodeError):
            for line in file.read_text().splitlines():
                name, equals, value = (word.strip() for word in line.partition("="))
                if equals and not name.startswith(("#", ";")):
                    value = value.strip("\"'")
                    found[name] = re.sub(r"\$\{(\w+)\}", lambda match: environment.get(match[1], ""), value)
    return found
