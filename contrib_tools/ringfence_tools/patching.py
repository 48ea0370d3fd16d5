"""The tool ``apply_patch``. It plans the patch over all files, then writes."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from ringfence.errors import ToolValidationError
from ringfence.escapes import display_path, escape_path, path_message
from ringfence.filesystem.patch import SYMLINK, FilePatch, apply_patch
from ringfence.filesystem.patch_text import parse_patch
from ringfence.filesystem.paths import directories_above, is_link, os_error, resolve_model_path
from ringfence.filesystem.protocol import Filesystem
from ringfence.runtime.context import ToolContext
from ringfence.runtime.tool import ContentOf, Itself, Written
from ringfence.session.tool_result import ToolResult
from ringfence_tools.handlers import FileHandlers, check_length, describe_excess_size, describe_missing, describe_twins
from ringfence_tools.printable import plural

MAX_PROBLEMS = 20
Action = Literal["created", "modified", "deleted", "renamed", "copied"]


@dataclass(frozen=True, slots=True)
class ApplyPatch:
    patch: str = field(
        metadata={
            "description": "A unified diff: for each file '--- a/PATH' and '+++ b/PATH' (/dev/null to create or delete)"
            ", then hunks that begin with '@@ -START,COUNT +START,COUNT @@'; lines around a change quoted exactly. Or "
            "a patch from '*** Begin Patch' to '*** End Patch'."
        }
    )

    def __post_init__(self) -> None:
        check_length("patch", len(self.patch), "apply it in several patches")
        try:
            parse_patch(self.patch)
        except ValueError as error:
            raise ToolValidationError(str(error)) from None


@dataclass(frozen=True, slots=True)
class PatchedFile:
    path: str
    action: Action
    added: int
    removed: int
    source: str | None = None
    """The old path of a renamed or copied file."""
    shifts: tuple[int, ...] = ()
    """The distance in lines from the stated to the actual place of each hunk. Negative: above it."""

    def render(self) -> str:
        came = f" from {self.source}" if self.source is not None else ""
        moved = [
            f"hunk {number} {plural(abs(lines), 'line')} {'below' if lines > 0 else 'above'}"
            for number, lines in enumerate(self.shifts, 1)
            if lines
        ]
        where = f"; found {', '.join(moved)} the line in its header" if moved else ""
        return f"{self.action} {self.path}{came} (+{self.added} -{self.removed}{where})"


@dataclass(frozen=True, slots=True)
class PatchedFiles:
    files: tuple[PatchedFile, ...]

    def render(self) -> str:
        return "\n".join(file.render() for file in self.files)


class PatchHandler(FileHandlers):
    def apply_patch(self, params: ApplyPatch, *, context: ToolContext) -> ToolResult[PatchedFiles]:
        """Apply a patch to all its files. Raises ToolValidationError with every hunk that does not fit, and then
        changes nothing."""
        filesystem, _ = self._open(context, "")
        plan = _applied(filesystem, lambda name: self._open(context, name)[1], parse_patch(params.patch))
        message = f"patched {plural(len(plan.files), 'file')}{''.join(plan.twins)}"
        return ToolResult.ok(PatchedFiles(tuple(plan.files)), message)


def apply_to(filesystem: Filesystem, patch: str | bytes) -> Sequence[PatchedFile]:
    """Apply a patch to the files of a filesystem, as strictly as git does where its hunks belong: not a second time.

    Raises ToolValidationError, and changes nothing, if it does not apply, and ValueError if it is none.
    """
    patches = [one.as_in_git() for one in parse_patch(patch)]
    return _applied(filesystem, lambda name: resolve_model_path(filesystem, name), patches).files


def _applied(filesystem: Filesystem, find: Callable[[str], str], patches: Iterable[FilePatch]) -> _PatchPlan:
    plan = _PatchPlan(filesystem, find)
    for patch in patches:
        plan.add(patch)
    if plan.problems:
        listed = [f"- {problem}" for problem in plan.problems[:MAX_PROBLEMS]]
        if len(plan.problems) > MAX_PROBLEMS:
            listed.append(f"- ... and {len(plan.problems) - MAX_PROBLEMS} more")
        raise ToolValidationError("\n".join(("the patch does not apply, and nothing was changed:", *listed)))
    if not plan.changes:
        raise ToolValidationError("the patch changes nothing: every file is already as it says")
    for change in plan.changes:
        change()
    return plan


def list_writes(params: ApplyPatch) -> Iterable[Written]:
    """Return the paths that a patch changes, for `Tool.writes`. Of a symlink, it changes the link itself."""
    return dict.fromkeys(
        (Itself if SYMLINK in (patch.old_mode, patch.new_mode) else ContentOf)(path, whole=False)
        for patch in parse_patch(params.patch)
        for path in patch.paths
    )


@dataclass(frozen=True, slots=True)
class _Node:
    """A file or symlink as the plan leaves it."""

    content: bytes
    """The target of a symlink; else None."""
    executable: bool = False
    is_link: bool = False


class _PatchPlan:
    def __init__(self, filesystem: Filesystem, find: Callable[[str], str]) -> None:
        """``find`` turns a patch's path into one of the filesystem."""
        self.problems: list[str] = []
        self.files: list[PatchedFile] = []
        self.changes: list[Callable[[], object]] = []
        self.twins: list[str] = []
        """Remarks about new files that look like others."""
        self._filesystem = filesystem
        self._find = find
        self._nodes: dict[str, _Node | None] = {}
        """The files after the patches so far, by path. None: no file."""

    def add(self, patch: FilePatch) -> None:
        try:
            self._add(patch)
        except IsADirectoryError as error:
            self.problems.append(f"{display_path(error.filename)} is a directory: only files can be patched")
        except (OSError, ValueError) as error:
            words = getattr(error, "strerror", None) or str(error)
            self.problems.append(path_message(escape_path(patch.paths[0]), words))

    def _add(self, patch: FilePatch) -> None:
        path, target = ([self._resolve(name, patch) for name in patch.paths] * 2)[:2]
        # In git, a copy is made from the file as it was before the whole patch.
        before = self._read(path) if patch.copy else self._node(path)
        if before is None and patch.source is not None and (not patch.hunks or any(hunk.old for hunk in patch.hunks)):
            self.problems.append(describe_missing(self._filesystem, path))
            return
        patched = apply_patch(patch, None if before is None else before.content)
        if problems := [*patched.problems, *self._conflicts(patch, path, target, before)]:
            self.problems += [f"{escape_path(path)}: {problem}" for problem in problems]
            return
        planned = len(self.changes)
        self._plan_file(patch, path, target, before, patched.content)
        if len(self.changes) > planned:
            self._report(patch, path, target, before, patched.shifts)

    def _conflicts(self, patch: FilePatch, path: str, target: str, before: _Node | None) -> Iterator[str]:
        """Yield why the files do not admit the patch, whatever its hunks say."""
        if target != path and self._node(target) is not None:
            yield f"it cannot become {escape_path(target)}, which exists already"
        if patch.target is not None and self._node(target) is None and (above := self._file_above(target)) is not None:
            yield f"{escape_path(above)} is a file, where it would need a directory"
        if before is not None and before.is_link != (patch.old_mode == SYMLINK):
            yield "it is not a symlink"

    def _plan_file(self, patch: FilePatch, path: str, target: str, before: _Node | None, content: bytes) -> None:
        if patch.target is None:
            self._plan(path, None, partial(self._filesystem.delete, path))
            return
        if target != path and not patch.copy:
            self._plan(target, before, partial(self._filesystem.move, path, target))
            self._nodes[path] = None
        now, after = self._node(target), _patch_node(patch, before, content)
        if now != after:
            self._plan(target, after, partial(self._put, target, now, after))

    def _report(self, patch: FilePatch, path: str, target: str, before: _Node | None, shifts: tuple[int, ...]) -> None:
        action = _action(patch, before, renamed=target != path)
        origin = escape_path(path) if target != path else None
        added, removed = patch.count("+"), patch.count("-")
        if action in ("created", "renamed", "copied") and len(self.twins) < MAX_PROBLEMS:
            twins = describe_twins(self._filesystem, target, None if patch.copy else path)
            self.twins += [twins] if twins else []
        self.files.append(PatchedFile(escape_path(target), action, added, removed, origin, shifts))

    def _plan(self, path: str, after: _Node | None, change: Callable[[], object]) -> None:
        self._nodes[path] = after
        self.changes.append(change)

    def _resolve(self, name: str, patch: FilePatch) -> str:
        """Return the path for a name in the patch. A patch for a regular file follows links, as a read does."""
        path = self._find(name)
        for above in directories_above(path):
            node = self._nodes.get(above)
            if node is not None and node.is_link:
                # Where it leads is known only when the link is there, and then nobody has looked at what is behind it.
                raise ValueError(
                    f"it is below {escape_path(above)}, a symlink that the same patch makes: use two patches"
                )
        if path in self._nodes or SYMLINK in (patch.old_mode, patch.new_mode) or not self._filesystem.exists(path):
            return path
        if patch.source != patch.target and is_link(self._filesystem, path):
            raise ValueError("it is a symlink: remove or move it with rm or move")
        return self._filesystem.resolve(path)

    def _file_above(self, path: str) -> str | None:
        """Return the file that stands in the place of a directory of the path, or None."""
        for above in directories_above(path):
            if self._nodes.get(above) is not None:
                return above
            if above not in self._nodes and self._filesystem.exists(above):
                return None if self._filesystem.stat(above).is_directory else above
        return None

    def _node(self, path: str) -> _Node | None:
        if path not in self._nodes:
            self._nodes[path] = self._read(path)
        return self._nodes[path]

    def _read(self, path: str) -> _Node | None:
        if not self._filesystem.exists(path):
            return None
        try:
            stat = self._filesystem.stat(path)
        except OSError:  # a link that is broken, leads out or leads in a circle
            stat = None
        if stat is None or stat.is_symlink:
            return _Node(self._filesystem.readlink(path).encode("utf-8", "surrogateescape"), is_link=True)
        if stat.is_directory:
            raise os_error(errno.EISDIR, path)
        if (reason := describe_excess_size(stat.size_bytes)) is not None:
            raise ValueError(reason)
        return _Node(self._filesystem.read_bytes(path).content, bool(stat.mode & 0o100))

    def _put(self, path: str, before: _Node | None, after: _Node) -> None:
        filesystem = self._filesystem
        if before is not None and (before.is_link or after.is_link):
            filesystem.delete(path)
            before = None
        if after.is_link:
            filesystem.symlink(path, after.content.decode("utf-8", "surrogateescape"))
            return
        if before is None or before.content != after.content:
            filesystem.write_bytes(path, after.content)
        mode = filesystem.stat(path).mode
        if bool(mode & 0o100) != after.executable:
            # Whoever may read it may run it, as git has it.
            filesystem.chmod(path, mode | (mode & 0o444) >> 2 if after.executable else mode & ~0o111)


def _patch_node(patch: FilePatch, before: _Node | None, content: bytes) -> _Node:
    executable = before is not None and before.executable
    if patch.new_mode is not None and patch.new_mode != patch.old_mode:
        executable = bool(patch.new_mode & 0o100)  # as git has it: 100775 is 100755
    return _Node(content, executable, is_link=patch.new_mode == SYMLINK)


def _action(patch: FilePatch, before: _Node | None, *, renamed: bool) -> Action:
    if patch.target is None:
        return "deleted"
    if renamed:
        return "copied" if patch.copy else "renamed"
    return "modified" if before is not None else "created"
