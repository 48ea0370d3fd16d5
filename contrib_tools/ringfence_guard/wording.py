"""What models and people are told."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ringfence.escapes import escape_path

if TYPE_CHECKING:
    from ringfence.participants import Change
    from ringfence.receipts import Receipt
    from ringfence_guard.events import HookEvent

MAX_PATHS = 40
MAYBE_OTHERS = "by a command that may still run, or by somebody else"
LATE = "ringfence guard has rolled back a late change"
LATE_HIDDEN = "ringfence guard has found a late change that stays as it is, since hidden files are in no history"
SENT = "What was sent elsewhere stays sent."
_CONTEXT = re.compile(r"\A(?:\s*<hook_context>.*?</hook_context>)+", re.DOTALL)
"""What Gemini CLI puts before the prompt that a person typed."""
_GIT_OBJECT = re.compile(r"(?:^|/)\.git/objects/(?:[0-9a-f]{2}/|pack/|info/)[^/]+$")
_GIT_OBJECTS = re.compile(r"(?:^|/)\.git/objects(?:/(?:[0-9a-f]{2}|pack|info))?$")
"""The directories of git's objects."""
_ROOT_OBJECTS = ".git/objects"
_UNDO = re.compile(r"\s*undo!(?:\s+(\d{1,4}))?\s*")


def asked_undo(prompt: str) -> int | None:
    """The number of steps that a prompt asks to undo; None for any other prompt."""
    found = _UNDO.fullmatch(_CONTEXT.sub("", prompt))
    return None if found is None else int(found[1] or 1)


def describe_background(event: HookEvent) -> str:
    """Tell a model that a command was not run since it would run in the background."""
    if event.is_detached:
        why = "its line has `&`, `nohup`, `setsid`, `disown` or `daemonize`, and no `wait` at its end"
    else:
        why = "the call asks for that"
    return f"ringfence guard: commands must not run in the background here, and this one would: {why}. It was not run."


def describe_denial(
    receipt: Receipt,
    conflicts: Collection[str],
    hidden: Collection[str],
    aborted: int | None,
    together: Sequence[str],
    others: Sequence[str],
    *,
    is_apart: bool,
) -> str:
    """Tell a model that its call was rolled back.

    ``hidden`` are changed paths that no history has. ``together`` are calls that cannot be told apart. ``others`` are
    commands that may still run. ``is_apart`` says that what a person changed meanwhile was told apart.
    """
    denial = next((verdict for verdict in receipt.policies if not verdict.allowed), None)
    why = "" if denial is None else f" The policy {denial.policy} denies it: {denial.reason}."
    lines = [f"ringfence guard has rolled this call back.{why}"]
    if together:
        lines.append(f"These calls overlapped, cannot be told apart, and all went back: {'; '.join(together)}.")
    if others:
        lines.append(f"Some of it may be by a command that may still run: {'; '.join(others)}.")
    stays = {*conflicts, *hidden, *(change.path for change in receipt.changes if _is_new_object(change))}
    back = [change.path for change in receipt.changes if change.path not in stays]
    lines.append(f"Back to what they were: {list_paths(back)}. Read them again before you edit them.")
    if any(map(_is_new_object, receipt.changes)):
        lines.append(f"What came to {_ROOT_OBJECTS} stays there, and git's refs are what they were.")
    if conflicts:
        lines.append(f"These stay as they are, and are in conflict: {list_paths(conflicts)}.")
    if hidden:
        lines.append(f"These stay as the call left them, since hidden files are in no history: {list_paths(hidden)}.")
    if aborted is not None:
        lines.append(f"What the call had made of them is kept as aborted/{aborted}.")
        if back and not is_apart:
            lines.append(f"If a person changed one of them meanwhile, {_get_back(aborted)} brings that back.")
    lines.append(SENT)
    return " ".join(lines)


def describe_denied_before(paths: Collection[str], aborted: int | None) -> str:
    """Tell a model that its call was rolled back by a guard that was killed, or failed, before it said so."""
    return (
        "ringfence guard has rolled this call back, and failed before it could say why. Back to what they were: "
        f"{list_paths(paths)}. Read them again before you edit them. What the call had made of them is kept as "
        f"aborted/{aborted}. {SENT}"
    )


def describe_late(command: str, denied: Mapping[str, str], aborted: int | None) -> str:
    """Tell a model of changes that were rolled back and may be somebody else's."""
    whys = "; ".join(dict.fromkeys(denied.values()))
    kept = "" if aborted is None else f" What they were is kept: {_get_back(aborted)} brings it back."
    return (
        f"{LATE}, by {command or 'a command'} or by somebody else: "
        f"{list_paths(sorted(denied))} ({whys}). Read them again before you edit them.{kept}"
    )


def _get_back(aborted: int) -> str:
    return f"`ringfence guard show aborted/{aborted} | git apply --include=PATH`"


def describe_late_hidden(command: str, denied: Mapping[str, str]) -> str:
    """Tell a model of changes of hidden files that are denied, stay, and may be somebody else's."""
    whys = "; ".join(dict.fromkeys(denied.values()))
    by = f"by {command or 'a command'} or by somebody else"
    return f"{LATE_HIDDEN}. It is {by}: {list_paths(sorted(denied))} ({whys})."


def is_for_person(text: str) -> bool:
    """Whether a text for a model tells of what may be a person's own change."""
    return text.startswith((LATE, LATE_HIDDEN))


def describe_undo(
    outcomes: Mapping[str, str], step: int | None, unknown: Collection[str] = (), *, dry_run: bool = False
) -> str:
    """Say what an undo did or would do, by path, and which step it made. ``unknown`` are paths of which the history
    does not know what they were."""
    changed = [path for path, outcome in outcomes.items() if outcome in ("restored", "removed")]
    stays = [path for path, outcome in outcomes.items() if outcome == "conflict"]
    done, nothing = ("Would be undone", "Nothing would be undone") if dry_run else ("Undone", "Nothing was undone")
    text = f"{done}: {list_paths(changed)}." if changed else f"{nothing}."
    if not changed and not stays and not unknown:
        text = f"{nothing}: the files are as they were before that."
    if stays:
        text += f" These stay, since they were changed later: {list_paths(stays)}."
    if unknown:
        text += f" Not undone, since hidden files are in no history: {list_paths(unknown)}."
    return text if step is None else f"{text} (step {step})"


def _is_new_object(change: Change) -> bool:
    """Whether it has come to git's objects in the root, where a rollback leaves it."""
    return change.before is None and change.path.startswith(f"{_ROOT_OBJECTS}/")


def list_paths(paths: Collection[str], limit: int = MAX_PATHS) -> str:
    """The paths in a line, git's own last. Many are cut, and objects of git are counted."""
    objects = sum(1 for path in paths if _GIT_OBJECT.search(path))
    named = [path for path in paths if not _GIT_OBJECT.search(path) and not _GIT_OBJECTS.search(path)]
    named.sort(key=lambda path: ".git" in path.split("/"))
    shown = [", ".join(escape_path(path) for path in named[:limit])] if named else []
    shown += [f"{len(named) - limit} more"] if len(named) > limit else []
    shown += [f"{objects} object{'s' if objects > 1 else ''} of git"] if objects else []
    return " and ".join(shown) or "no file"
