"""The commits of the history, and their messages: for people in `git log`, and with trailers for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from ringfence_workspace.history.entries import NOTHING, Unknown
from ringfence_workspace.history.trees import Folder

CommitKind: TypeAlias = Literal["baseline", "step", "external", "aborted"]

BY_PEOPLE = frozenset({"undo", "restore"})
"""The tools of steps that bring back earlier states."""
_PLAIN = re.compile(r'[^\x00-\x1f\x7f"\ud800-\udfff\u2028\u2029]*')
MOST_PATHS = 200
"""More are not listed in a message; what lists them is a comparison with the step before."""
_LETTERS = {"created": "A", "modified": "M", "deleted": "D", "unknown": "?"}


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """What is known of a commit besides its files.

    ``step`` is a committed tool call, ``external`` what somebody else changed, ``aborted`` what a rollback took away.
    """

    kind: CommitKind
    created_at: datetime
    tool: str = ""
    call_id: str = ""
    session_id: str = ""
    receipt_id: str = ""
    title: str = ""
    """In the first line of the message, behind the tool of a step; by default, what it changed."""
    client: str = ""
    begun: str = ""
    """Tells an aborted call from others of the same id."""
    opaque: bool = False
    """Whether programs could change files in the call."""
    reverses: str = ""
    """The numbers of the steps that an undo reversed, with spaces between; of a restore ">" and the number of the step
    that it went back to."""
    promotes: str = ""
    """Of a promotion, the name of the fork and the commit of its own history that was promoted."""

    def is_reversal_of(self, number: int) -> bool:
        """Whether a step with a lower number than its own is one that it reversed."""
        if self.reverses.startswith(">"):
            return number > int(self.reverses[1:])
        return str(number) in self.reverses.split()


@dataclass(frozen=True, slots=True)
class CommitLinks:
    """Earlier commits that a commit names, so that nobody has to walk to them. Old histories have none of them, and
    `gc` may have dropped what is named."""

    earlier_step: str = ""
    """Of an even step n, step ``n & (n - 1)``: any step is a few dozen such links and parents away, at most."""
    session_start: str = ""
    """What was there before the first step of the session."""


REPLACED = "another directory"
"""The tool of an external commit that has what came with a directory in the place of the one before."""


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    info: CommitInfo
    number: int | None
    """Of a step, and 0 of the baseline."""
    paths: tuple[str, ...] | None
    """The changed paths, sorted; None where they were too many to list."""
    links: CommitLinks


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """One commit of the history."""

    commit: str
    parent: str | None
    message: ParsedMessage

    @property
    def number(self) -> int | None:
        return self.message.number


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A commit whose objects are written, and that is not part of the history yet."""

    commit: str
    parent: str | None
    number: int | None
    newest: int
    """The number of the newest step with this commit."""
    root: Folder
    changed: tuple[str, ...]
    """The paths whose kind, bytes or permissions changed, sorted; of a step also those that are unknown since it."""
    unknown: Unknown = NOTHING


def format_message(
    info: CommitInfo, number: int | None, changed: Sequence[tuple[str, str]], links: CommitLinks
) -> bytes:
    """The message; ``changed`` has the changed paths, each with "created", "modified", "deleted" or
    "unknown"."""
    lines = [_title(info, changed), ""]
    listed = len(changed) <= MOST_PATHS
    if listed and changed:
        lines += [f"{_LETTERS[kind]} {_written(path)}" for path, kind in changed] + [""]
    elif changed:
        lines += [f"{len(changed)} paths", ""]
    trailers = {
        "Kind": info.kind,
        "Step": str(number) if number is not None else "",
        "Tool": info.tool,
        "Call-Id": info.call_id,
        "Session-Id": info.session_id,
        "Receipt-Id": info.receipt_id,
        "Client": info.client,
        "Begun": info.begun,
        "Opaque": "yes" if info.opaque else "",
        "Reverses": info.reverses,
        "Promotes": info.promotes,
        "Created-At": info.created_at.astimezone(UTC).isoformat(),
        "Title": info.title,
        "Earlier-Step": links.earlier_step,
        "Session-Start": links.session_start,
        "Paths": str(len(changed)),
    }
    lines += [f"{name}: {_written(value)}" for name, value in trailers.items() if value]
    return ("\n".join(lines) + "\n").encode()


def _title(info: CommitInfo, changed: Sequence[tuple[str, str]]) -> str:
    if info.title:
        return _short(f"{_written(info.tool)}: {info.title}" if info.tool else info.title)
    what = _written(changed[0][0]) if len(changed) == 1 else f"{len(changed)} paths"
    who = {"baseline": "the workspace as it was found", "external": "changed by somebody else"}.get(info.kind)
    if who is None:
        who = f"{_written(info.tool) or 'step'}" + (" (rolled back)" if info.kind == "aborted" else "")
    return who if info.kind == "baseline" else _short(f"{who}: {what}")


def _short(text: str) -> str:
    line = " ".join(_CONTROL.sub(" ", text).split())
    return (line if len(line) <= 100 else line[:99] + "…") or "step"


_CONTROL = re.compile("[\x00-\x1f\x7f\ud800-\udfff\u2028\u2029]+")


def _written(value: str) -> str:
    """On one line of UTF-8: as it is, or as JSON if it has anything odd."""
    return value if _PLAIN.fullmatch(value) and value == value.strip() else json.dumps(value)


def _read(written: str) -> str:
    return json.loads(written) if written.startswith('"') else written


def parse_message(message: bytes) -> ParsedMessage:
    """What `format_message` wrote.

    Raises:
        ValueError: the commit is none of this store's.
    """
    try:
        _, *blocks = message.decode().removesuffix("\n").split("\n\n")
        trailers = dict(line.split(": ", 1) for line in blocks[-1].split("\n"))
        get = {name: _read(value) for name, value in trailers.items()}.get
        kind = trailers["Kind"]
        if kind not in ("baseline", "step", "external", "aborted"):
            raise ValueError(kind)
        info = CommitInfo(
            kind,
            datetime.fromisoformat(trailers["Created-At"]),
            get("Tool", ""),
            get("Call-Id", ""),
            get("Session-Id", ""),
            get("Receipt-Id", ""),
            get("Title", ""),
            get("Client", ""),
            get("Begun", ""),
            get("Opaque") == "yes",
            get("Reverses", ""),
            get("Promotes", ""),
        )
        count = int(trailers["Paths"])
        listed = [_read(line[2:]) for line in blocks[0].split("\n")] if len(blocks) > 1 and count <= MOST_PATHS else []
        step = trailers.get("Step")
        return ParsedMessage(
            info,
            int(step) if step is not None else None,
            tuple(listed) if len(listed) == count else None,
            CommitLinks(get("Earlier-Step", ""), get("Session-Start", "")),
        )
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"a commit of the history has a message of somebody else's: {error}") from error
