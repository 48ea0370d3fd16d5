"""The policy that a file is only changed with the content that the model knows."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringfence.filesystem.paths import escape_path, is_link, path_message, resolve_nofollow
from ringfence.filesystem.protocol import Filesystem
from ringfence.prompt.policy import (
    ALLOW,
    BasePolicy,
    Hook,
    PathHashes,
    PolicyDecision,
    PolicyState,
    check_names,
    policy_state,
    update_policy_state,
)
from ringfence.prompt.tool import ContentOf, Itself, Written

if TYPE_CHECKING:
    from ringfence.participants import CallInfo, CallLock, Change
    from ringfence.prompt.tool import Tool, ToolContext
    from ringfence.runtime.tool_result import ToolResult


class ReadBeforeWritePolicy(BasePolicy):
    """An existing file is written, moved or removed only with the content that the model has read, or written itself.

    What counts is the sha256 of the very bytes that the read returned or the call wrote, so an edit by anybody else
    makes a read stale. The tools named in ``write_tools``, and every tool that declares `Tool.writes`, are denied
    before they run; one of them whose targets cannot be told is, too. What ``write_tools`` have changed was read as it
    was then, else the call fails: somebody may have come between. Any other tool, and one that has written more
    than it declared, is denied what it has done, unless the handler itself had read the file in that call; what it has
    made of that the model does not know. Not governed: opaque tools, whose commands read what they like, and what a
    handler does through calls of its own, which have policies of theirs.
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
            return self._governs(tool)
        # `on_result` looks at the effects of tools that declare all that they write, for less.
        return hook == "on_result" or not (tool.opaque or tool.name in self.write_tools)

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        if not self._governs(tool):
            return ALLOW
        filesystem = context.filesystem
        targets = _targets(tool, params)
        if targets is None:
            return ALLOW
        if filesystem is None:
            return PolicyDecision.deny(f"{tool.name} is governed by {self.name}, but no filesystem is bound")
        if not targets:
            return PolicyDecision.deny(f"{self.name} cannot tell which files {tool.name} would change")
        known = _hashes(policy_state(context, self.name, _files_scope(context, filesystem)))
        for written in targets:
            target = written if isinstance(written, str) else written.path
            try:
                meant = context.resolve_path(target, mount_point=self.mount_point)
            except PermissionError as error:
                return PolicyDecision.deny(f"{escape_path(target)} {error.strerror}")
            except ValueError as error:
                return PolicyDecision.deny(str(error))
            try:
                if (denial := self._denial(filesystem, meant, written, known)) is not None:
                    return PolicyDecision.deny(denial)
            except OSError as error:  # a name that is none for files, or what may not be read, or changes just now
                if not isinstance(error, PermissionError) and error.errno != errno.ESTALE:
                    raise
                return PolicyDecision.deny(
                    path_message(escape_path(str(error.filename or meant)), error.strerror or "no access")
                )
        return ALLOW

    def _denial(self, filesystem: Filesystem, meant: str, written: Written, known: PathHashes) -> str | None:
        for file, content_hash in _files_at(filesystem, meant, written, known):
            read = known.of(file)
            if read is not None and read == content_hash:
                continue
            below = f"{escape_path(meant)} is a directory, and " if file.startswith(f"{meant}/") else ""
            if read is None:
                return f"{below}{escape_path(file)} exists and has not been read: read it first"
            return f"{below}{escape_path(file)} has changed since it was read: read it again"
        return None

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        call = context.call
        if call is None or tool.opaque:
            return ALLOW
        for lock, changed in call.changes.items():
            read, earlier = call.reads.get(lock, {}), (call.read_before or {}).get(lock, ())
            answered_for = (call.answered_for or {}).get(lock, ())
            known = _hashes(policy_state(context, self.name, _scope_of(context, lock)))
            for change in changed:
                before = change.before.content_hash if change.before is not None else None
                after = change.after.content_hash if change.after is not None else None
                read_as = (known.of(change.path), read.get(change.path))
                if before in (after, *read_as) and before is not None:
                    continue
                if before is None and (any(read_as) or not _replaces_unhashed(change)):
                    continue
                if (change.path, before) in earlier or (change.path, before) in answered_for:
                    continue
                return PolicyDecision.deny(
                    f"{tool.name} changed {escape_path(change.path)} without having read it: read it first"
                )
        return ALLOW

    def on_result(self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext) -> None:
        call = context.call
        if call is None:
            return
        reads, writes = tool.name in self.read_tools, not tool.opaque and (not call.inner or self._governs(tool))
        # `check` has let these change what the model knows, and nothing else: what differs came after it.
        declared = tool.name in self.write_tools
        for lock in {**(call.reads if reads else {}), **(call.changes if writes else {})}:
            scope = _scope_of(context, lock)
            state = policy_state(context, self.name, scope)
            known = _hashes(state)
            learned: dict[str, str | None] = {**call.reads.get(lock, {})} if reads else {}
            if writes and lock in call.changes:

                def known_before(path: str, scope: str = scope) -> str | None:
                    return _hashes(policy_state(context, self.name, scope, before=True)).of(path)

                learned |= _left_by(call, lock, known, learned, known_before, declared=declared)
            news = {path: content_hash for path, content_hash in learned.items() if known.of(path) != content_hash}
            if news:
                update_policy_state(context, state, invoked_keys=known.updated(news))

    def _governs(self, tool: Tool[Any, Any]) -> bool:
        return tool.writes is not None or tool.name in self.write_tools


def _hashes(state: PolicyState) -> PathHashes:
    keys = state.invoked_keys
    return keys if isinstance(keys, PathHashes) else PathHashes(keys)


def _left_by(
    call: CallInfo,
    lock: CallLock,
    known: PathHashes,
    learned: Mapping[str, str | None],
    known_before: Callable[[str], str | None],
    *,
    declared: bool,
) -> dict[str, str | None]:
    """The files that a call has changed, with their hashes where the model knows what is in them now, and None where
    not: if it did not know what was in one of them, that may be in any of them now. Raises OSError (ESTALE) where a
    call that has ``declared`` its changes has made another one."""

    def is_known(content_hash: str, path: str) -> bool:
        # The state before the call is the slowest to find, and seldom decides: a call of the handler, or another
        # policy of this name, may have learned what the call has made.
        return content_hash in (known.of(path), learned.get(path)) or content_hash == known_before(path)

    answered_for = (call.answered_for or {}).get(lock, ())
    left: dict[str, str | None] = {}
    unread = False
    for change in call.changes[lock]:
        path = change.path
        was = change.before.content_hash if change.before is not None else None
        after = change.after.content_hash if change.after is not None else None
        if was is not None and was == after:  # nothing but its permissions
            continue
        seen = was is None or is_known(was, path)
        if declared and not seen and (path, was) not in answered_for:
            said = "was not as it had been read when this call changed it; nothing is changed, read it again"
            raise OSError(errno.ESTALE, said, path)
        left[path] = after
        unread = unread or not seen
    if not unread:
        return left
    return {path: after if after and is_known(after, path) else None for path, after in left.items()}


def _replaces_unhashed(change: Change) -> bool:
    """Whether it took a file from its path that is too large to be hashed. That it was ever read has to do then."""
    before, after = change.before, change.after
    if before is None or before.kind != "file" or before.content_hash is not None or before.size == 0:
        return False
    return after is None or (after.kind, after.size, after.content_hash) != ("file", before.size, None)


def _files_scope(context: ToolContext, filesystem: Filesystem) -> str:
    """A scope of the prompt and the filesystem: what was read of one workspace says nothing about another."""
    root = filesystem.root
    if root == "/" and (lock := getattr(filesystem, "lock", None)) is not None:
        root = f"memory {lock.serial}"
    return f"{context.prompt.scope}@{root}"


def _scope_of(context: ToolContext, lock: CallLock) -> str:
    """The scope of the filesystem that a call knows by this lock: the prompt's own, or another resource."""
    filesystem = context.filesystem
    if filesystem is not None and getattr(filesystem, "lock", None) is lock:
        return _files_scope(context, filesystem)
    return f"{context.prompt.scope}@{lock.name} {lock.serial}"


_PATH_FIELDS = ("file_path", "path", "source", "target")


def _targets(tool: Tool[Any, Any], params: Any) -> list[Written] | None:
    """None where the tool says that this call is to change no file that is there."""
    if tool.writes is not None:
        declared = tool.writes(params)
        if declared is None:
            return None
        paths: list[Any] = [declared] if isinstance(declared, Written) else list(declared)
        if not all(isinstance(path, Written) for path in paths):
            raise TypeError(f"the paths that {tool.name} says it writes are no strings: {paths!r}")
        return paths
    return [path for field in _PATH_FIELDS if isinstance(path := getattr(params, field, None), str)]


def _files_at(
    filesystem: Filesystem, path: str, written: Written, known: PathHashes
) -> Iterable[tuple[str, str | None]]:
    """The files that a change of `path` reaches: itself, or all below a directory; none where nothing is, or a pipe.
    With the hashes of those that were ever read. What a link out of the workspace leads to is nobody's to change, and
    the filesystem sees to that; one in a circle, or with a name that is too long for any file, leads to nothing."""
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
