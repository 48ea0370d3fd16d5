"""The policy that a file is only changed with the content that the model knows."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
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
        if tool.writes is not None:
            declared = tool.writes(params)
            if declared is None:
                return ALLOW
            targets = [declared] if isinstance(declared, (str, ContentOf, Itself)) else list(declared)
        elif tool.name in self.write_tools:
            targets = [path for name in _PATH_FIELDS if isinstance(path := getattr(params, name, None), str)]
        else:
            return ALLOW
        filesystem = context.filesystem
        if filesystem is None:
            return PolicyDecision.deny(f"{tool.name} is governed by {self.name}, but no filesystem is bound")
        if not targets:
            return PolicyDecision.deny(f"{self.name} does not know which files {tool.name} would change")
        scope = context.scope_of(getattr(filesystem, "lock", None))
        known = known_hashes(policy_state(context, self.name, scope))
        for written in targets:
            target = written if isinstance(written, str) else written.path
            try:
                path = context.resolve_path(target, mount_point=self.mount_point)
                for file, content_hash in _files_at(filesystem, path, written, known):
                    read = known.of(file)
                    is_part_enough = not isinstance(written, str) and not written.whole
                    if read is None or (_hash_in(read) if is_part_enough else read) != content_hash:
                        return PolicyDecision.deny(_denial(path, file, read, content_hash))
            except (ValueError, PermissionError) as error:
                return PolicyDecision.deny(describe_error(error))
            except OSError as error:
                if error.errno != errno.ESTALE:  # it changes just now
                    raise
                return PolicyDecision.deny(describe_error(error))
        return ALLOW

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        call = context.call
        if call is None or tool.opaque:
            return ALLOW
        for lock, changed in call.changes.items():
            read, earlier = call.reads.get(lock, {}), (call.read_before or {}).get(lock, ())
            answered_for = (call.answered_for or {}).get(lock, ())
            known = known_hashes(policy_state(context, self.name, context.scope_of(lock)))
            for change in changed:
                before, after = _hash_of(change.before), _hash_of(change.after)
                known_as = known.of(change.path)
                # The lines that a tool needs were checked before it ran, if it declares what it writes.
                read_as = (known_as if tool.writes is None else _hash_in(known_as), read.get(change.path))
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
            known = known_hashes(state)
            learned: dict[str, str | None] = {
                path: _with_lines(known.of(path), content_hash, result.value)
                for path, content_hash in reads.get(lock, {}).items()
            }
            if lock in writes:
                learned |= self._left_by(context, lock, state, known, learned, tool.name in self.write_tools)
            news = {path: content_hash for path, content_hash in learned.items() if known.of(path) != content_hash}
            if news:
                new = PolicyState(self.name, state.invoked_tools, known.updated(news), state.scope)
                context.session[PolicyState].replace_item(state, new)

    def _left_by(
        self,
        context: ToolContext,
        lock: CallLock,
        state: PolicyState,
        known: PathHashes,
        learned: Mapping[str, str | None],
        declared: bool,
    ) -> dict[str, str | None]:
        """The files that a call changed: path to the content that the model knows, else None.

        If the model did not know one of the files, its content may be in any of them now. Raises OSError (ESTALE)
        where a call of ``write_tools`` changed an unknown file: `check` had passed, so the file changed after it.
        """
        call = context.call
        assert call is not None

        def known_as(content_hash: str, path: str) -> str | None:
            for found in (known.of(path), learned.get(path)):
                if _hash_in(found) == content_hash:
                    return found
            # The state before the call comes last: it is the slowest to find, and seldom decides. It differs where an
            # inner call, or another policy of this name, has recorded this call's changes already.
            found = known_hashes(policy_state(context, self.name, state.scope, before=True)).of(path)
            return found if _hash_in(found) == content_hash else None

        answered_for = (call.answered_for or {}).get(lock, ())
        left: dict[str, str | None] = {}
        moved_parts = set[str]()
        unread = False
        for change in call.changes[lock]:
            path, before, after = change.path, change.before, change.after
            was = None if before is None else before.content_hash
            now = None if after is None else after.content_hash
            if was is not None and was == now:  # nothing but its permissions
                continue
            left[path] = now
            if was is None:
                continue
            if (read := known_as(was, path)) is not None:
                if read != was and now is None:
                    moved_parts.add(was)
                elif read != was:
                    left[path] = f"{now} "
                continue
            if declared and (path, was) not in answered_for:
                message = "was not as it had been read when this call changed it; nothing is changed, read it again"
                raise OSError(errno.ESTALE, message, path)
            unread = True
        if unread:
            return {path: now and known_as(now.rstrip(), path) for path, now in left.items()}
        if moved_parts:  # to any of the files that are new, or in the place of another with this content
            new = {change.path for change in call.changes[lock] if change.before is None}
            return {
                path: f"{now} " if now and (path in new or now in moved_parts) else now for path, now in left.items()
            }
        return left


def _denial(path: str, file: str, read: str | None, content_hash: str | None) -> str:
    below = f"{escape_path(path)} is a directory, and " if file.startswith(f"{path}/") else ""
    if read is None:
        return f"{below}{escape_path(file)} exists and has not been read: read it first"
    if _hash_in(read) != content_hash:
        return f"{below}{escape_path(file)} has changed since it was read: read it again"
    spans = _spans(read)
    lines = ", ".join(f"{span.start + 1}-{span.stop}" for span in spans if span)
    if spans and not lines:
        return f"{below}no line of {escape_path(file)} has been read whole: change a part of it with edit_file"
    if not lines:
        return f"{below}only a part of {escape_path(file)} was read before it was changed: read all of it first"
    part = f"{below}only the lines {lines} of {escape_path(file)} have been read"
    return f"{part}: read the others first, or use edit_file"


def _hash_in(known: str | None) -> str | None:
    return None if known is None else known.partition(" ")[0]


def _spans(known: str) -> list[range]:
    """The lines that are known of a content, from 0; of one that is known as a whole, none."""
    return [range(*map(int, span.split("-"))) for span in known.split(" ")[1:] if span]


def _with_lines(known: str | None, content_hash: str, value: ShowsLines | Any) -> str:
    """What is known of a content after a read with this result: its hash, and lines unless it is all of them."""
    # A check of the protocol would take ten times as long.
    shown = value.lines_shown() if hasattr(value, "lines_shown") else None
    if shown is None or known == content_hash:
        return content_hash
    lines, total = shown
    spans: list[range] = []
    earlier = _spans(known) if known is not None and _hash_in(known) == content_hash else []
    for span in sorted((*earlier, lines), key=attrgetter("start")):
        if spans and span.start <= spans[-1].stop:
            spans[-1] = range(spans[-1].start, max(spans[-1].stop, span.stop))
        else:
            spans.append(span)
    if spans[0] == range(total):
        return content_hash
    return " ".join((content_hash, *(f"{span.start}-{span.stop}" for span in spans)))


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
    filesystem: Filesystem, path: str, written: Written, known: PathHashes
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
        if known.of(path) is None and filesystem.stat(path).is_file:
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
            (file, None if known.of(file) is None else filesystem.content_hash(file))
            for file in below
            if filesystem.resolve(file) == file
        )
