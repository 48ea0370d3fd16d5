"""Ids for calls and receipts, that no other process has."""

from __future__ import annotations

import itertools
import os

# Drawn once a process, and anew in a forked child; the counter tells its ids apart.
_process_id = os.urandom(12).hex() + "%08x"
_numbers = itertools.count(1)


def _forked() -> None:
    global _process_id  # noqa: PLW0603
    _process_id = os.urandom(12).hex() + "%08x"


os.register_at_fork(after_in_child=_forked)


def new_id() -> str:
    return _process_id % next(_numbers)
