"""The policy that a file is only changed with the content that the model knows."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ringfence.escapes import escape_path
from ringfence.failures import describe_error
from ringfence.filesystem.paths import is_link, resolve_nofollow
from ringfence.filesystem.protocol import Filesystem
from ringfence.runtime.policy import (
    ALLOW,
    BasePolicy,
    Hook,
    PathHashes,
    PolicyDecision,
    PolicyState,
    check_names,
    known_hashes,
    policy_state,
)
from ringfence.runtime.tool import ContentOf, Itself, Written

if TYPE_CHECKING:
    from ringfence.participants import CallLock, Change, FileVersion
    from ringfence.runtime.context import ToolContext
    from ringfence.runtime.tool import Tool
    from ringfence.session.tool_result import ShowsLines, ToolResult


@dataclass(frozen=True, slots=True)
class Known:
    """What the model has seen of the content of a file."""

    hash: str
    """The sha256 of the content."""
    lines: tuple[range, ...] | None = None
    """The lines that it has seen, counted from 0; None where it has seen all. After a change that quoted what it
    replaced there are none."""

    @classmethod
    def parse(cls, text: str) -> Known:
        """Read the key of a `PolicyState`, which `str` of a `Known` writes."""
        content_hash, separator, spans = text.partition(" ")
        if not separator:
            return cls(content_hash)
        return cls(content_hash, tuple(range(*map(int, span.split("-"))) for span in spans.split()))

    def __str__(self) -> str:
        if self.lines is None:
            return self.hash
        return f"{self.hash} {' '.join(f'{span.start}-{span.stop}' for span in self.lines)}"

    def covers(self, content_hash: str | None, *, in_part: bool) -> bool:
        """Whether the content has this hash, and the model has seen all of it; any of it, if ``in_part``."""
        return self.hash == content_hash and (in_part or self.lines is None)

    def with_lines(self, shown: range, total: int) -> Known:
        """Add the lines that a read of this content has shown, of ``total`` lines."""
        if self.lines is None:
            return self
        spans: list[range] = []
        for span in sorted((*self.lines, shown), key=attrgetter("start")):
            if spans and span.start <= spans[-1].stop:
                spans[-1] = range(spans[-1].start, max(spans[-1].stop, span.stop))
            else:
                spans.append(span)
        return Known(self.hash, None if spans[0] == range(total) else tuple(spans))


class ReadBeforeWritePolicy(BasePolicy):
    """An existing file is written, moved or removed only with the content that the model has read, or written itself.

    Known is the sha256 of the very bytes that a read returned or a call wrote. An edit by anybody else makes it stale.
    A read whose result `ShowsLines` makes those lines known. They are enough for a change that quotes what it replaces
    (``whole=False`` in `Tool.writes`). After such a change, none of the lines are known.

    - The tools in ``write_tools``, and every tool that declares `Tool.writes`, are denied before they run. One whose
      targets are unknown is denied, too.
    - A call of ``write_tools`` fails if a file changed between the check and the write.
    - Any other tool, and one that wrote more than it declared, is rolled back unless its handler read the file in
      that call. The model does not know what the handler wrote then.
    - Opaque tools are not governed: their commands read what they like. Calls that a handler makes are governed by
      their own policies.
    """

    name = "read_before_write"

    def __init__(
        self,
        read_tools: Iterable[str] = ("read_file",),
        write_tools: Iterable[str] = ("write_file", "edit_file", "apply_patch", "move", "rm"),
        mount_point: str | None = None,
    ) -> None:
        """``mount_point`` is the prefix under which the model sees the workspace, such as ``/workspace``. Left out,
        it is where the filesystem is on disk.

        Raises TypeError for a text in the place of a list.
        """
        self.read_tools = check_names(read_tools)
        self.write_tools = check_names(write_tools)
        self.mount_point = mount_point

    def applies_to(self, tool: Tool[Any, Any], hook: Hook) -> bool:
        if hook == "check":
            return tool.writes is not None or tool.name in self.write_tools
        # `on_result` looks at the effects of tools that declare all that they write, for less.
        return hook == "on_result" or not (tool.opaque or tool.name in self.write_tools)

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        targets = self._targets(tool, params)
        if targets is None:
            return ALLOW
        filesystem = context.filesystem
        if filesystem is None:
            return PolicyDecision.deny(f"{tool.name} is governed by {self.name}, but no filesystem is bound")
        if not targets:
            return PolicyDecision.deny(f"{self.name} does not know which files {tool.name} would change")
        scope = context.scope_of(getattr(filesystem, "lock", None))
        keys = known_hashes(policy_state(context, self.name, scope))
        for written in targets:
            target = written if isinstance(written, str) else written.path
            try:
                path = context.resolve_path(target, mount_point=self.mount_point)
                is_part_enough = not isinstance(written, str) and not written.whole
                for file, content_hash in _files_at(filesystem, path, written, keys):
                    known = _known(keys, file)
                    if known is None or not known.covers(content_hash, in_part=is_part_enough):
                        return PolicyDecision.deny(_denial(path, file, known, content_hash))
            except (ValueError, PermissionError) as error:
                return PolicyDecision.deny(describe_error(error))
            except OSError as error:
                if error.errno != errno.ESTALE:  # it changes just now
                    raise
                return PolicyDecision.deny(describe_error(error))
        return ALLOW

    def _targets(self, tool: Tool[Any, Any], params: Any) -> Sequence[Written] | None:
        """The paths that a call is about to write. None for a tool that is not governed, or a call that writes none."""
        if tool.writes is not None:
            declared = tool.writes(params)
            if declared is None or isinstance(declared, (str, ContentOf, Itself)):
                return None if declared is None else [declared]
            return list(declared)
        if tool.name not in self.write_tools:
            return None
        return [path for name in _PATH_FIELDS if isinstance(path := getattr(params, name, None), str)]

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        call = context.call
        if call is None or tool.opaque:
            return ALLOW
        for lock, changed in call.changes.items():
            read, earlier = call.reads.get(lock, {}), (call.read_before or {}).get(lock, ())
            answered_for = (call.answered_for or {}).get(lock, ())
            keys = known_hashes(policy_state(context, self.name, context.scope_of(lock)))
            for change in changed:
                before, after = _hash_of(change.before), _hash_of(change.after)
                known = _known(keys, change.path)
                # The lines that a tool needs were checked before it ran, if it declares what it writes.
                is_enough = known is not None and (known.lines is None or tool.writes is not None)
                read_as = (known.hash if known is not None and is_enough else None, read.get(change.path))
                if before is None:
                    is_known = any(read_as) or not _replaces_unhashed(change)
                else:
                    is_known = before in (after, *read_as)
                if is_known or (change.path, before) in earlier or (change.path, before) in answered_for:
                    continue
                return PolicyDecision.deny(
                    f"{tool.name} changed {escape_path(change.path)} without having read it: read it first"
                )
        return ALLOW

    def on_result(self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext) -> None:
        call = context.call
        if call is None:
            return
        governed = tool.writes is not None or tool.name in self.write_tools
        reads = call.reads if tool.name in self.read_tools else {}
        writes = {} if tool.opaque or (call.inner and not governed) else call.changes
        for lock in {**reads, **writes}:
            state = policy_state(context, self.name, context.scope_of(lock))
            keys = known_hashes(state)
            learned: dict[str, Known | None] = {
                path: _after_read(_known(keys, path), content_hash, result.value)
                for path, content_hash in reads.get(lock, {}).items()
            }
            if lock in writes:
                learned |= self._left_by(context, lock, state, learned, tool.name in self.write_tools)
            texts = {path: None if known is None else str(known) for path, known in learned.items()}
            news = {path: text for path, text in texts.items() if keys.of(path) != text}
            if news:
                new = PolicyState(self.name, state.invoked_tools, keys.updated(news), state.scope)
                context.session[PolicyState].replace_item(state, new)

    def _left_by(
        self,
        context: ToolContext,
        lock: CallLock,
        state: PolicyState,
        learned: Mapping[str, Known | None],
        declared: bool,
    ) -> Mapping[str, Known | None]:
        """What the model knows of the files that a call changed: None for those that it does not know now.

        If the model did not know one of the files, its content may be in any of them now. Raises OSError (ESTALE)
        where a call of ``write_tools`` changed an unknown file: `check` had passed, so the file changed after it.
        """
        call = context.call
        assert call is not None
        changes = [change for change in call.changes[lock] if not _keeps_content(change)]
        left = {change.path: _known_whole(change.after) for change in changes}
        answered_for = (call.answered_for or {}).get(lock, ())
        parts = dict[str, str]()
        unknown = False
        for change in changes:
            before = _hash_of(change.before)
            if before is None:
                continue
            known = self._known_before(context, state, learned, change.path, before)
            if known is None and declared and (change.path, before) not in answered_for:
                message = "was not as it had been read when this call changed it; nothing is changed, read it again"
                raise OSError(errno.ESTALE, message, change.path)
            unknown |= known is None
            if known is not None and known.lines is not None:
                parts[change.path] = before
        if unknown:
            return {
                path: now and self._known_before(context, state, learned, path, now.hash) for path, now in left.items()
            }
        return _known_in_part(changes, left, parts) if parts else left

    def _known_before(
        self,
        context: ToolContext,
        state: PolicyState,
        learned: Mapping[str, Known | None],
        path: str,
        content_hash: str,
    ) -> Known | None:
        """What the model knows of the content with this hash, if `path` had it before the call, or the call read it."""
        known = _known(known_hashes(state), path)
        if known is None or known.hash != content_hash:
            known = learned.get(path)
        if known is None or known.hash != content_hash:
            # The state before the call comes last: it is the slowest to find, and seldom decides. It differs where an
            # inner call, or another policy of this name, has recorded this call's changes already.
            known = _known(known_hashes(policy_state(context, self.name, state.scope, before=True)), path)
        return known if known is not None and known.hash == content_hash else None


def _known_in_part(
    changes: Sequence[Change], left: Mapping[str, Known | None], parts: Mapping[str, str]
) -> Mapping[str, Known | None]:
    """What is known of the changed files ``left``, if of ``parts`` (with their hashes before) only lines were known.

    A file that is gone may have moved: to any of the files that are new, or in the place of another one with this
    content.
    """
    moved = {content_hash for path, content_hash in parts.items() if left[path] is None}
    new = {change.path for change in changes if change.before is None} if moved else set[str]()
    return {
        path: Known(now.hash, ()) if now is not None and (path in parts or path in new or now.hash in moved) else now
        for path, now in left.items()
    }


def _denial(path: str, file: str, known: Known | None, content_hash: str | None) -> str:
    below = f"{escape_path(path)} is a directory, and " if file.startswith(f"{path}/") else ""
    if known is None:
        return f"{below}{escape_path(file)} exists and has not been read: read it first"
    if known.hash != content_hash:
        return f"{below}{escape_path(file)} has changed since it was read: read it again"
    lines = ", ".join(f"{span.start + 1}-{span.stop}" for span in known.lines or () if span)
    if known.lines and not lines:
        return f"{below}no line of {escape_path(file)} has been read whole: change a part of it with edit_file"
    if not lines:
        return f"{below}only a part of {escape_path(file)} was read before it was changed: read all of it first"
    part = f"{below}only the lines {lines} of {escape_path(file)} have been read"
    return f"{part}: read the others first, or use edit_file"


def _known(keys: PathHashes, path: str) -> Known | None:
    text = keys.of(path)
    return None if text is None else Known.parse(text)


def _after_read(known: Known | None, content_hash: str, value: ShowsLines | Any) -> Known:
    """What is known of a content after a read with this result."""
    # A check of the protocol would take ten times as long.
    shown = value.lines_shown() if hasattr(value, "lines_shown") else None
    if shown is None:
        return Known(content_hash)
    lines, total = shown
    earlier = known if known is not None and known.hash == content_hash else Known(content_hash, ())
    return earlier.with_lines(lines, total)


def _known_whole(version: FileVersion | None) -> Known | None:
    return None if version is None or version.content_hash is None else Known(version.content_hash)


def _keeps_content(change: Change) -> bool:
    """Whether nothing but permissions changes."""
    before = _hash_of(change.before)
    return before is not None and before == _hash_of(change.after)


def _hash_of(version: FileVersion | None) -> str | None:
    return None if version is None else version.content_hash


def _replaces_unhashed(change: Change) -> bool:
    """Whether it replaced or removed a file too large to be hashed. There, any earlier read counts."""
    before, after = change.before, change.after
    if before is None or before.kind != "file" or before.content_hash is not None or before.size == 0:
        return False
    return after is None or (after.kind, after.size, after.content_hash) != ("file", before.size, None)


_PATH_FIELDS = ("file_path", "path", "source", "target")


def _files_at(
    filesystem: Filesystem, path: str, written: Written, keys: PathHashes
) -> Iterable[tuple[str, str | None]]:
    """The existing files that a change of `path` reaches: itself, or all below a directory. Pipes are none.

    A file that was ever read comes with its hash. A link out of the workspace reaches no file: the filesystem refuses
    to write through it. Neither does a link in a circle, nor a name too long for any file.
    """
    try:
        if isinstance(written, Itself):
            path = resolve_nofollow(filesystem, path)
            if is_link(filesystem, path):
                return ()
        else:
            path = filesystem.resolve(path)
    except OSError as error:
        if isinstance(error, PermissionError) or error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            return ()
        raise
    try:
        if keys.of(path) is None and filesystem.stat(path).is_file:
            return ((path, None),)
        return ((path, filesystem.content_hash(path)),)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except PermissionError:
        if filesystem.stat(path).is_file:
            raise
        return ()
    except IsADirectoryError:
        if isinstance(written, ContentOf):
            return ()
        below = [match.path for match in filesystem.glob("**", path=path) if match.is_file]
        # A link in it is removed or moved itself, whatever it leads to.
        return (
            (file, None if keys.of(file) is None else filesystem.content_hash(file))
            for file in below
            if filesystem.resolve(file) == file
        )
