"""The version of what a store is, written in it: another one is not guessed at."""

from __future__ import annotations

import os
from pathlib import Path

from ringfence_sandbox.disk.places import unusable
from ringfence_sandbox.disk.state_files import replacing, sync_directory

FORMAT = 1
"""Stores without a number are of this form too: it came before the number."""
_NAME = "format"
_WORDS = "ringfence store"


def check_format(store: str) -> None:
    """Raises ValueError where the store is of a form that is not known here, and OSError where none can be."""
    try:
        said = Path(store, _NAME).read_bytes()[:100].decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return
    except OSError as error:
        raise unusable(store, error) from error
    if said == f"{_WORDS} {FORMAT}":
        return
    words, _, number = said.rpartition(" ")
    if words == _WORDS and number.isdigit():
        raise ValueError(
            f"the store {store} has form {number}, and this version of ringfence knows form {FORMAT}: use the version "
            "that wrote it, or give another store"
        )
    raise ValueError(
        f"{os.path.join(store, _NAME)} says {said!r}, which is no form of a store: restore that file, "
        "or give another store"
    )


def note_format(store: str) -> None:
    """Write the version down, for whoever opens the store next, where that is not done yet."""
    path = Path(store, _NAME)
    if not path.exists():
        with replacing(path) as file:
            file.write(f"{_WORDS} {FORMAT}\n".encode())
        sync_directory(path.parent)
