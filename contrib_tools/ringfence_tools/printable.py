"""Text from a model or a file on its way to a terminal: nothing in it may act on the terminal or hide."""

from __future__ import annotations

import base64
import dataclasses
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from ringfence.escapes import display_path
from ringfence.failures import describe_error, with_limit
from ringfence.filesystem.diff import has_unknown_bytes
from ringfence.filesystem.paths import GIT_ADVICE, directories_above
from ringfence.participants import Change, FileVersion
from ringfence.receipts import Receipt

# Control characters but tab and newline; surrogates; line separators; and the invisible ones that reorder or hide what
# stands around them, or look like nothing. The joiners (U+200C, U+200D) stay within what is not ASCII: scripts and
# emoji are written with them.
_ACTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\u2800\u3164\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
    "|(?<![^\x00-\x7f\u200b-\u200f])[\u200c\u200d]|[\u200c\u200d](?![^\x00-\x7f\u200b-\u200f])"
)
MAX_VALUE_CHARACTERS = 40
MAX_PARAMS_CHARACTERS = 120
MAX_REASON_CHARACTERS = 300


def printable(text: str) -> str:
    """`text` with every character that could act on a terminal, or hide, as an escape. Newlines and tabs stay."""
    return _ACTIVE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def one_line(text: str, limit: int) -> str:
    """Return `text` on one line of at most `limit` characters. A text that was cut ends in "..."."""
    flat = " ".join(printable(text[: 4 * limit]).split())
    return flat if len(flat) <= limit and len(text) <= 4 * limit else flat[: limit - 3] + "..."


def why(error: Exception) -> str:
    """Describe an error without its path, for a message that names the path."""
    return with_limit(error.strerror, error) if isinstance(error, OSError) and error.strerror else describe_error(error)


def how_to_look(said: str, directory: Path | None) -> str:
    """Return a message about a rollback, with the command that shows the copy that it kept.

    None: the history of the call is gone, so nothing shows it.
    """
    if directory is None:
        return re.sub(r"(; )?[^;]*is kept as aborted/\d+", "", said)
    show = f"`ringfence show {shlex.quote(str(directory))}"
    return re.sub(r"is kept as aborted/(\d+)", lambda kept: f"is kept: {show} {kept[1]} --aborted` has it", said)


def plural(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun[:-1]}ies" if noun.endswith("y") else f"{count:,} {noun}s"


def ignored_line(count: int, *, has_option: bool = True) -> str:
    """Return the line that stands for the changes of ignored paths. ``has_option``: something can show them."""
    them = "it" if count == 1 else "them"
    how = f"--with-ignored shows {them}" if has_option else f"the patch is without {them}"
    return f"{plural(count, 'ignored path')} changed: {how}"


def how_to_apply(patch: Path, directory: Path) -> str:
    """Return the command that applies a patch of the files in a directory there.

    In a subdirectory of a repository, `git apply` alone skips each path of the patch and says nothing.
    """
    from ringfence_sandbox import Repository  # only here: a server starts without it

    base = Repository(str(directory)).base
    words = ["git", "-C", os.path.abspath(directory), "apply", *([f"--directory={base}"] if base else [])]
    return shlex.join([*words, os.path.abspath(patch)])


def params_summary(params: object, room: int = 0) -> str:
    """Return the params of a tool call on one line: without defaults, with long values cut.

    Where there is ``room`` for more characters than usual, values get an equal share of it.
    """
    from ringfence.session.events import RejectedToolParams

    limit = max(room, MAX_PARAMS_CHARACTERS)
    if isinstance(params, RejectedToolParams):
        return one_line(str(params.raw_arguments), limit)
    # A mapping has the params as the model wrote them.
    given = list(cast("Mapping[str, object]", params).items() if isinstance(params, Mapping) else given_params(params))
    share = max(room // max(len(given), 1), MAX_VALUE_CHARACTERS)
    return one_line(" ".join(f"{name}={_value(value, share)}" for name, value in given), limit)


def given_params(params: object) -> Iterator[tuple[str, object]]:
    """Yield the fields of a dataclass that are not at their defaults."""
    for field in dataclasses.fields(params) if dataclasses.is_dataclass(params) else ():
        value: object = getattr(params, field.name)
        factory = field.default_factory
        if value != (field.default if factory is dataclasses.MISSING else factory()):
            yield field.name, value


def _value(value: object, limit: int) -> str:
    said = one_line(str(value), limit)
    return f"'{said}'" if isinstance(value, str) else said


def shown_outcome(receipt: Receipt) -> str:
    """Return the outcome for a person. A call that changed no file, such as a read, is "ok"."""
    return "ok" if receipt.outcome == "committed" and not receipt.changes else receipt.outcome


def outcome_words(receipt: Receipt, directory: Path | None) -> str:
    """Return outcome and reason of a call on one line. The call was on the files of ``directory``.

    None: they were a copy that is gone.
    """
    why = one_line(how_to_look(receipt.message, directory), MAX_REASON_CHARACTERS)
    denial = next((verdict for verdict in receipt.policies if not verdict.allowed), None)
    match receipt.outcome:
        case "committed" | "rejected":
            return f"{shown_outcome(receipt)}: {why}"
        case "denied" if denial is not None:
            reason = one_line(denial.reason or why, MAX_REASON_CHARACTERS)
            # A file tool, which has no exit code, never changes git's own data.
            is_git = denial.policy == "off_limits" and receipt.exit_code is not None and GIT_ADVICE in reason
            allow = " (`--allow-git` lets commands do it)" if is_git and directory is not None else ""
            return f"denied by the policy {one_line(denial.policy, 80)}: {reason}{allow}"
        case "denied":
            return f"denied: {why}"
        case "failed":
            return f"failed and rolled back: {why}"
        case "interrupted":
            return "interrupted and rolled back"
        case "rolled_back":
            return f"rolled back with the call {one_line(receipt.rolled_back_by or '', 80)} that made it"
        case "doubtful":
            return f"rollback not completed: {why}"


def line_counts(patch: bytes) -> tuple[int, int]:
    """Return how many lines a patch adds and removes. Binary files count as none."""
    added = removed = 0
    in_hunk = False
    for line in patch.split(b"\n"):
        if line.startswith(b"diff --git "):
            in_hunk = False
        elif line.startswith(b"@@ "):
            in_hunk = True
        elif in_hunk:
            added += line.startswith(b"+")
            removed += line.startswith(b"-")
    return added, removed


def files_of(patch: bytes) -> Iterator[tuple[str, str, bytes]]:
    """Yield the old path, the new path and the part of each file in a patch. Paths are quoted as git quotes them."""
    # The lines of content begin with a blank or a sign, so none looks like a header.
    for part in re.split(rb"\n(?=diff --git )", patch.removesuffix(b"\n")) if patch else ():
        header, _, rest = part.partition(b"\n")
        both = header.removeprefix(b"diff --git ").decode("utf-8", "surrogateescape")
        old, new = both[: len(both) // 2], both[len(both) // 2 + 1 :]  # a/PATH b/PATH
        if renamed := re.search(rb"^rename from (.*)\nrename to (.*)", rest, re.MULTILINE):
            old, new = (f"x/{os.fsdecode(name)}" for name in renamed.groups())
        yield _without_side(old), _without_side(new), part


def _without_side(name: str) -> str:
    """A path of a header of git without its ``a/`` or ``b/``, which stands behind the quote of a quoted one."""
    return f'"{name[3:]}' if name.startswith('"') else name[2:]


def stat_lines(patch: bytes) -> Iterator[str]:
    """Yield a line for each file in a patch, with the numbers of its added and removed lines, and one for all."""
    rows = [
        (
            str(one["path"]) if one["old_path"] is None else f"{one['old_path']} -> {one['path']}",
            "binary" if one["is_binary"] else f"+{one['added']} -{one['removed']}",
        )
        for one in patch_stats(patch)
    ]
    width = min(max((len(name) for name, _ in rows), default=0), MAX_STAT_COLUMNS)
    yield from (f"{name:{width}}  {counts}" for name, counts in rows)
    added, removed = line_counts(patch)
    yield f"{plural(len(rows), 'file')} changed, +{added} -{removed} lines"


def patch_stats(patch: bytes) -> list[dict[str, object]]:
    """Return for JSON what a patch does to each file. ``old_path`` is None unless the file was moved."""
    found: list[dict[str, object]] = []
    for old, new, part in files_of(patch):
        added, removed = line_counts(part)
        is_binary = b"\nGIT binary patch\n" in part
        moved = None if old == new else old
        found.append({"path": new, "old_path": moved, "added": added, "removed": removed, "is_binary": is_binary})
    return found


def patch_json(patch: bytes) -> dict[str, object]:
    """A patch for JSON: as text, or, since files need not be UTF-8, in base64."""
    try:
        return {"patch": patch.decode(), "patch_base64": None}
    except UnicodeDecodeError:
        return {"patch": None, "patch_base64": base64.b64encode(patch).decode()}


MAX_CHANGE_LINES = 20
MAX_STAT_COLUMNS = 60
"""Longer names push the numbers of their line aside."""
IN_A_PATCH = {0o644, 0o755}


def unpatchable_changes(changes: Sequence[Change]) -> Iterator[str]:
    """A line for each path whose change no patch can express: git knows no directories, and of permission bits one.

    A directory that a patch makes or removes with its files is not among them.
    """
    made = {change.path for change in changes if _is_directory(change.after) and not _is_directory(change.before)}
    gone = {change.path for change in changes if change.after is None and _is_directory(change.before)}
    for change in changes:
        above = {*directories_above(change.path)}
        if change.after is not None:
            made -= above
        if change.before is not None and not _is_directory(change.before):
            gone -= above
    said = [line for change in changes for line in _change_lines(change, made, gone)]
    yield from said[:MAX_CHANGE_LINES]
    if len(said) > MAX_CHANGE_LINES:
        yield f"{len(said) - MAX_CHANGE_LINES} more of these; --json lists all"


def _change_lines(change: Change, made: set[str], gone: set[str]) -> Iterator[str]:
    path, before, after = change.path, change.before, change.after
    if path in made:
        yield f"{display_path(path)} (directory made)"
    elif path in gone and gone.isdisjoint(directories_above(path)):
        yield f"{display_path(path)} (directory removed)"
    elif has_unknown_bytes(change):
        yield f"{display_path(path)} ({change.kind}; it cannot be shown, as its bytes are in no history)"
    elif before is not None and after is not None and _has_other_bits(before, after):
        yield f"{display_path(path)} (permissions {before.mode:o} -> {after.mode:o})"


def _has_other_bits(before: FileVersion, after: FileVersion) -> bool:
    """Whether its permission bits are others, and a patch does not say so."""
    if before.kind != after.kind or before.mode == after.mode:
        return False
    return after.kind != "file" or not {before.mode, after.mode} <= IN_A_PATCH


def _is_directory(version: FileVersion | None) -> bool:
    return version is not None and version.kind == "directory"
