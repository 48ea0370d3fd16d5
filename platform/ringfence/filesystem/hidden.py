"""Hidden files: which files of a workspace no tool and no command can read."""

from __future__ import annotations

import errno
import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol, runtime_checkable

from ringfence.filesystem.path_patterns import Matches, covering_any_case, folded
from ringfence.participants import HiddenContent

HIDDEN = (".env", ".env.*", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519")
"""Patterns of the names of files that are hidden unless somebody wants them shown."""
PRIVATE_KEYS = ("*.pem", "*.key")
"""Patterns of the names of files that are hidden if they contain a private key."""
SECRETS = (
    *(*HIDDEN, *PRIVATE_KEYS, ".envrc", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".ssh", ".gnupg", ".aws", ".azure", ".kube"),
    *(".netrc", "_netrc", ".npmrc", ".pypirc", ".git-credentials", ".htpasswd", "**/.docker/config.json"),
    *("credentials", "credentials.json", "secrets", "secrets.*"),
)
"""Patterns of the files in which programs usually keep keys, passwords and tokens."""
SAMPLES = (".env.example", ".env.sample", ".env.template", ".env.dist")
NO_SECRETS = (*SAMPLES, "id_*.pub")
PRIVATE_KEY = b"PRIVATE KEY"
HEAD_BYTES = 1 << 20
"""The length of the beginning of a file in which a private key is looked for."""


def _no_head() -> bytes:
    return b""


@dataclass(frozen=True)
class HiddenFiles:
    """The rule by which files are hidden: the usual names of files with secrets, and patterns of one's own.

    A pattern follows the rules of `PathPolicy`: one without a ``/`` is for names at any depth, one with a ``/`` for
    paths from the root. A directory that matches is hidden with all that is below it. Neither case nor the way in
    which accents are encoded counts.
    """

    globs: tuple[str, ...] = ()
    """Patterns of one's own. The constructor takes any iterable."""
    usual: bool = True
    """Whether the files that match `HIDDEN`, and those of `PRIVATE_KEYS` with a private key, are hidden."""
    _covers: Matches = field(init=False, repr=False, compare=False)

    def __init__(self, globs: Iterable[str] = (), *, usual: bool = True) -> None:
        """Raises PromptValidationError for a bad pattern, and TypeError for a text in the place of a list."""
        if isinstance(globs, str):
            raise TypeError(f"globs is a list of patterns, not a text: [{globs!r}]")
        object.__setattr__(self, "globs", tuple(dict.fromkeys(globs)))
        object.__setattr__(self, "usual", usual)
        object.__setattr__(self, "_covers", lru_cache(maxsize=1 << 17)(covering_any_case(self.globs)))

    def __bool__(self) -> bool:
        """Whether it hides anything."""
        return self.usual or bool(self.globs)

    def hides(self, path: str, head: Callable[[], bytes] = _no_head, *, is_directory: bool = False) -> bool:
        """Whether the rule hides a normal path. ``head`` returns the first `HEAD_BYTES` of the file."""
        if self.globs and self._covers(path):
            return True
        if not self.usual or is_directory:
            return False
        kind = _usual_kind(path.rpartition("/")[2])
        return kind == "hidden" or (kind == "key" and PRIVATE_KEY in head())


@runtime_checkable
class HidesFiles(Protocol):
    """The optional protocol of a filesystem that can hide files."""

    @property
    def hidden(self) -> HiddenFiles | None:
        """The rule by which it hides files. None: it hides none."""
        ...

    def hides(self, path: str) -> bool:
        """Whether a normal path is hidden, or would be if it existed."""
        ...

    def hidden_files(self) -> Iterable[HiddenContent]:
        """The hidden files that the host can read."""
        ...


def hidden_error(path: str) -> PermissionError:
    """Return the error of an operation on a hidden file."""
    return PermissionError(errno.EACCES, "is there and hidden, as files with secrets are: do without it", path)


def _any_name(patterns: Iterable[str]) -> Callable[[str], object]:
    return re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns)).match


_is_hidden, _is_key, _is_spared = _any_name(HIDDEN), _any_name(PRIVATE_KEYS), _any_name(NO_SECRETS)


@lru_cache(maxsize=1 << 17)
def _usual_kind(name: str) -> Literal["", "hidden", "key"]:
    name = folded(name)
    if _is_hidden(name):
        return "" if _is_spared(name) else "hidden"
    return "key" if _is_key(name) else ""
