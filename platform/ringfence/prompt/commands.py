"""Whether a call runs a certain command and nothing else, as far as its parameters tell. In doubt it does not."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

# Other commands beside it, redirections, expansions, comments: also where they are quoted, `argv` is there for that.
_MORE_THAN_WORDS = re.compile(r"[|&;<>()$`\\\n\r#]")
_RUN_NOTHING = frozenset({"--help", "--version"})


def runs(params: Any, patterns: Sequence[str], value: object = None) -> bool:
    """Whether a tool's parameters ask for a command that matches one of these globs.

    The parameters have a text for a shell, ``command``, or words, ``argv``; of both, the words with a blank between
    them have to match as a whole. A text has to be one command of plain and quoted words. It has to run in the root
    with nothing in its environment and nothing to read: ``cwd``, ``env`` and ``stdin`` make another command of it, and
    so does, in the result's ``value``, that it ``began_in`` another directory, where the one before it had ended.
    """
    words = _words(_of(params, "command"), _of(params, "argv"))
    if not words or "=" in words[0] or words[0] == "!" or _RUN_NOTHING.intersection(words):
        return False
    if _of(params, "env") or _of(params, "stdin"):
        return False
    if any(place not in (None, "", ".") for place in (_of(params, "cwd"), getattr(value, "began_in", None))):
        return False
    return any(fnmatchcase(" ".join(words), pattern) for pattern in patterns)


def _of(params: Any, name: str) -> object:
    if isinstance(params, Mapping):  # of a receipt
        known: Mapping[str, object] = params  # pyright: ignore[reportUnknownVariableType]
        return known.get(name)
    return getattr(params, name, None)


def _words(command: object, argv: object) -> Sequence[str]:
    if isinstance(command, str) and not argv:
        if _MORE_THAN_WORDS.search(command):
            return ()
        try:
            return shlex.split(command)
        except ValueError:  # a quotation without an end
            return ()
    if isinstance(argv, tuple | list) and command is None:
        return [str(word) for word in argv]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return ()
