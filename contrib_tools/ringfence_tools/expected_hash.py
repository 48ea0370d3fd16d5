"""The file tools of callers that share a session: a call names the version of the file that it replaces or removes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ringfence.errors import ToolValidationError
from ringfence.escapes import display_path
from ringfence.filesystem.patch_text import parse_patch
from ringfence.filesystem.paths import is_link, resolve_nofollow
from ringfence.participants import Change
from ringfence.runtime.context import ToolContext, ToolHandler
from ringfence.runtime.policy import ALLOW, BasePolicy, Hook, PolicyDecision
from ringfence.runtime.tool import Tool
from ringfence.session.tool_result import ToolResult
from ringfence_tools.files import FileText, MoveParams, ReadFile, Remove, WriteFile

HASH_CHARACTERS = 16
"""What `read_file` prints of a sha256 in hex. A call may name more of it."""
_HASH = re.compile(f"[0-9a-f]{{{HASH_CHARACTERS},64}}")


def _expected(description: str) -> Any:
    return field(default="", metadata={"description": description})


@dataclass(frozen=True, slots=True)
class ReadExpected(ReadFile):
    expected: str = _expected("To read on: what came with the lines before.")


@dataclass(frozen=True, slots=True)
class WriteExpected(WriteFile):
    expected: str = _expected("If the file exists: what read_file gave.")


@dataclass(frozen=True, slots=True)
class MoveExpected(MoveParams):
    expected: str = _expected("If target exists: what read_file gave.")


@dataclass(frozen=True, slots=True)
class RemoveExpected(Remove):
    expected: str = _expected("Of a file: what read_file gave.")


_PARAMS: Mapping[str, type[Any]] = {
    "read_file": ReadExpected,
    "write_file": WriteExpected,
    "move": MoveExpected,
    "rm": RemoveExpected,
}


def expecting(tools: Iterable[Tool[Any, Any]], mount_point: str | None) -> tuple[Tool[Any, Any], ...]:
    """The tools of `file_tools`, with a parameter ``expected`` where `ExpectedHashPolicy` looks for it."""
    return tuple(_expecting(tool, mount_point) if tool.name in _PARAMS else tool for tool in tools)


def _expecting(tool: Tool[Any, Any], mount_point: str | None) -> Tool[Any, Any]:
    assert tool.handler is not None
    handler = _HashingReader(tool.handler, mount_point) if tool.name == "read_file" else tool.handler
    assert tool.declared_types is not None
    return replace(tool, handler=handler, declared_types=(_PARAMS[tool.name], tool.declared_types[1]))


class _HashingReader:
    """`read_file`, whose message has the hash once all lines up to these were read of one version of the file.

    Nobody remembers the earlier parts. So the hash of a part also covers how many lines come before its end, and
    whoever reads on names it. After a line that was cut, the hash is another one: it removes the file, but does not
    replace it.
    """

    def __init__(self, read: ToolHandler[Any, Any], mount_point: str | None) -> None:
        self._read = read
        self._mount_point = mount_point

    def __call__(self, params: Any, /, *, context: ToolContext) -> ToolResult[Any]:
        result = self._read(params, context=context)
        filesystem, value = context.filesystem, result.value
        if filesystem is None or not isinstance(value, FileText):
            return result
        path = context.resolve_path(params.file_path, mount_point=self._mount_point)
        content_hash = context.reads.get(filesystem.resolve(path)) if filesystem.exists(path) else None
        if content_hash is None:  # the output of a command, which no tool replaces
            return result
        cut_hash = _hash_after_cut(content_hash)
        if params.expected not in ("", cut_hash, _hash_of_part(content_hash, value.offset, value.total_lines)):
            raise ToolValidationError(f"{value.path} has changed since: read it again from its first line")
        if value.offset and not params.expected:
            return result
        secrets = context.session.secrets
        if secrets and secrets.mask(value) is not value:  # it counts as not read
            return result
        if params.expected == cut_hash or value.count_whole() < value.limit:
            use = "to remove it; a line is cut, so change it with edit_file"
            return replace(result, message=f"{result.message}; expected={cut_hash} {use}")
        end = value.offset + value.limit
        use = "with the next offset" if end < value.total_lines else "to replace or remove it"
        shown = _hash_of_part(content_hash, end, value.total_lines)
        return replace(result, message=f"{result.message}; expected={shown} {use}")


def _hash_of_part(content_hash: str, end: int, total: int) -> str:
    """The hash of a file, or of the lines before `end` in it."""
    if end < total:
        content_hash = hashlib.sha256(f"{content_hash} {end}".encode()).hexdigest()
    return content_hash[:HASH_CHARACTERS]


def _hash_after_cut(content_hash: str) -> str:
    """The hash of a file of which a line was shown in part."""
    return hashlib.sha256(f"{content_hash} cut".encode()).hexdigest()[:HASH_CHARACTERS]


class ExpectedHashPolicy(BasePolicy):
    """A call that replaces or removes a file names the hash of its content, as `read_file` printed it.

    It takes the place of `ReadBeforeWritePolicy` for callers that share a session: nobody knows what each of them has
    read. It governs the tools of `expecting`. Edits and patches quote what they replace. A denial does not print the
    hash, since it is to come from a read.
    """

    name = "expected_hash"

    def __init__(self, mount_point: str | None = None) -> None:
        """``mount_point`` is as in `ReadBeforeWritePolicy`."""
        self.mount_point = mount_point

    def applies_to(self, tool: Tool[Any, Any], hook: Hook) -> bool:
        return tool.name in ("write_file", "move", "rm") or (tool.name == "apply_patch" and hook == "check")

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        if tool.name == "apply_patch":
            if any(patch.whole for patch in parse_patch(params.patch)):
                return PolicyDecision.deny(
                    "'*** Delete File' quotes nothing of the file: use rm with its expected hash"
                )
            return ALLOW
        filesystem = context.filesystem
        assert filesystem is not None, "these tools have one"
        path = context.resolve_path(_named(params), mount_point=self.mount_point)
        shown = display_path(path)
        place = filesystem.resolve(path) if tool.name == "write_file" else resolve_nofollow(filesystem, path)
        if is_link(filesystem, place):
            return ALLOW
        try:
            content_hash = filesystem.content_hash(place)
        except (FileNotFoundError, NotADirectoryError):
            if params.expected and tool.name != "rm":
                return PolicyDecision.deny(f"there is no {shown} any more: leave out expected to make it anew")
            return ALLOW
        except IsADirectoryError:
            if tool.name == "rm" and filesystem.list(place):
                return PolicyDecision.deny(
                    f"{shown} is a directory that is not empty: first remove the files in it, each with its hash"
                )
            return ALLOW
        if not params.expected:
            return PolicyDecision.deny(f"{shown} exists: read it, and name the hash that read_file gives as expected")
        if tool.name != "rm" and params.expected == _hash_after_cut(content_hash):
            return PolicyDecision.deny(
                f"a line of {shown} was shown only in part: change the file with edit_file, or remove it with rm"
            )
        if not _matches(params.expected, content_hash, tool):
            return PolicyDecision.deny(f"{shown} is not the version that expected names: read it again")
        return ALLOW

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        """Deny what replaced or removed another version: somebody has saved the file between the check and the call."""
        source = context.resolve_path(params.source, mount_point=self.mount_point) if tool.name == "move" else None
        for change in changes:
            was = None if change.before is None else change.before.content_hash
            if source is not None and (change.path == source or change.path.startswith(f"{source}/")):
                continue
            if was is not None and not _matches(params.expected, was, tool):
                return PolicyDecision.deny(f"{display_path(change.path)} has just changed: read it again")
        return ALLOW


def _named(params: Any) -> str:
    """The path that a call replaces or removes."""
    if isinstance(params, WriteFile):
        return params.file_path
    return params.target if isinstance(params, MoveParams) else params.path


def _matches(expected: str, content_hash: str, tool: Tool[Any, Any]) -> bool:
    if tool.name == "rm" and expected == _hash_after_cut(content_hash):
        return True
    return _HASH.fullmatch(expected) is not None and content_hash.startswith(expected)
