"""The rule by which the files of a workspace are hidden, as its store remembers it."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from ringfence.errors import PromptValidationError
from ringfence.filesystem.hidden import HiddenFiles
from ringfence_workspace.history.store import FOLDER
from ringfence_workspace.tree.places import replacing, store_of

_NAME = "hidden.json"


def remembered_rule(store: str) -> HiddenFiles | None:
    """Return the rule of the newest opening that was given one. None: nothing is hidden.

    If a store has a history, and what was hidden cannot be read, the usual files are.
    """
    try:
        rule = _read(store)
    except ValueError:
        return HiddenFiles()
    return rule or None


def remember_rule(store: str, rule: HiddenFiles) -> None:
    """Have later openings hide the same. OSError."""
    with replacing(Path(store, _NAME)) as file:
        file.write(json.dumps([rule.globs, rule.usual]).encode())


def note_new_store(store: str) -> None:
    """Have a store that is about to get its history say that nothing is hidden, unless it says what is. OSError."""
    if not os.path.exists(os.path.join(store, FOLDER)) and not os.path.lexists(os.path.join(store, _NAME)):
        remember_rule(store, HiddenFiles(usual=False))


def remembered_hidden(root: str | os.PathLike[str]) -> HiddenFiles | None:
    """Return the rule by which files of a directory were hidden last. None: none were, or it has no history.

    Raises:
        StateDirectoryError: the state directory is unknown.
    """
    return remembered_rule(store_of(os.path.realpath(root)))


def describe_lost_rule(root: str | os.PathLike[str]) -> str | None:
    """Describe to a person that nobody knows what was hidden in a directory; None if that is known."""
    store = store_of(os.path.realpath(root))
    try:
        _read(store)
    except ValueError as error:
        return (
            f"{os.path.join(store, _NAME)} {error}: only the usual files with secrets are hidden. "
            f"`ringfence run {shlex.quote(os.fspath(root))} --hide GLOB` hides more"
        )
    return None


def _read(store: str) -> HiddenFiles | None:
    """Raises ValueError where it is not known what is hidden."""
    try:
        text = Path(store, _NAME).read_bytes()
    except FileNotFoundError:
        if os.path.exists(os.path.join(store, FOLDER)):
            raise ValueError("is missing") from None
        return None
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    try:
        globs, usual = json.loads(text)
        if (type(globs), type(usual)) == (list, bool):
            return HiddenFiles(globs, usual=usual)
    except (ValueError, TypeError, AttributeError, PromptValidationError):
        pass
    raise ValueError("is damaged")
