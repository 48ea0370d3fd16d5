"""Approval: somebody decides about the result of a call before it is kept."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

from ringfence import serde
from ringfence.errors import PromptValidationError
from ringfence.filesystem.diff import patch_of
from ringfence.filesystem.path_patterns import covering_any_case
from ringfence.filesystem.readable_diff import readable_patch
from ringfence.runtime.policy import ALLOW, BasePolicy, Hook, PolicyDecision, check_names, refuse_unknown
from ringfence.runtime.tool import TOOL_NAME
from ringfence.session.tool_result import AcceptsChanges, exit_code_of

if TYPE_CHECKING:
    from ringfence.filesystem.ignored import IgnoredPaths
    from ringfence.limits import Cancellation
    from ringfence.participants import Change
    from ringfence.runtime.context import ToolContext
    from ringfence.runtime.tool import Tool

ASK_SECONDS = 300.0
COMMANDS, WRITES = "commands", "writes"


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """A question about a call. Nothing in its texts is escaped for a terminal."""

    call_id: str
    tool: str
    params: object
    before: str = ""
    """Why it is asked before the handler: what the call does that no rollback takes back. Empty after the handler."""
    changes: Sequence[Change] = ()
    """The changes, without those in ``ignored``."""
    diff: bytes = b""
    """The patch of ``changes``, for a person: binary files are described, and not for ``git apply``."""
    ignored: Sequence[Change] = ()
    """The changes of paths that git ignores."""
    output: str = ""
    """The text of the result, without the list of changed paths that a command has."""
    exit_code: int | None = None
    always: str = ""
    """What a yes with ``always`` covers, in words."""
    timeout_seconds: float = ASK_SECONDS
    cancellation: Cancellation | None = field(default=None, repr=False)
    """Cancels the call. Its answer does not matter any more."""


@dataclass(frozen=True, slots=True)
class Approval:
    """An answer. ``reason`` is for the model where the answer is no. ``always`` covers the same until the run ends."""

    allowed: bool
    reason: str | None = None
    always: bool = False

    @staticmethod
    def no(why: str = "") -> Approval:
        """The answer of a person who said no."""
        return Approval(False, f"a person said no: {why}" if why else "a person said no")


Ask: TypeAlias = "Callable[[ApprovalRequest], Approval | None]"
"""Asks, and waits for the answer. None: nobody has answered in time."""


class ApprovalPolicy(BasePolicy):
    """Ask before a call commits, with what it has really changed. Without a yes in time the call is denied.

    It is asked after all other policies. A call that has changed no file has nothing to approve. A call that has
    `Tool.external_effects` is asked about before its handler, too, since no rollback takes these back.

    While it waits, other calls on the same session or filesystem are refused with ParticipantBusyError.
    """

    name = "approval"
    runs_last = True

    def __init__(
        self,
        ask: Ask,
        of: Iterable[str] = (WRITES,),
        *,
        timeout_seconds: float = ASK_SECONDS,
        ignored: Callable[[], IgnoredPaths] | None = None,
    ) -> None:
        """``of`` says which calls: "commands" is of opaque tools, "writes" of all that change files, a name of a tool
        is of that tool, and any other word is a glob of changed paths, as in `PathPolicy`.

        ``ignored`` gives the paths that git ignores. They are asked about like others, and are apart in the request.
        A tool that is named is asked about before its handler if it declares neither ``opaque`` nor ``writes``.

        Raises:
            PromptValidationError: there is nothing to ask about, a pattern is invalid or the timeout is not positive.
        """
        self.of = check_names(of)
        if not self.of or "" in self.of:
            raise PromptValidationError("an ApprovalPolicy asks about something: of=['writes'], or ['commands'], say")
        if not timeout_seconds > 0:
            raise PromptValidationError(f"timeout_seconds is more than 0, not {timeout_seconds!r}")
        self.timeout_seconds = timeout_seconds
        self._ask = ask
        self._covers = covering_any_case(sorted(self.of - {COMMANDS, WRITES}))
        self._ignored = ignored
        self._always: set[Hashable] = set()
        """What was approved for good. It is no slice of the session: a rollback must not take an answer back."""

    def validate(self, tool_names: frozenset[str]) -> None:
        """Refuse a word that is meant to be a tool: as a glob it would match nothing, and nobody be asked."""
        plain = {word for word in self.of - tool_names - {COMMANDS, WRITES} if TOOL_NAME.fullmatch(word)}
        known = [*tool_names, COMMANDS, WRITES]
        refuse_unknown(
            self.name,
            {word for word in plain if "_" in word or difflib.get_close_matches(word, known, n=1, cutoff=0.75)},
            frozenset(known),
        )

    def applies_to(self, tool: Tool[Any, Any], hook: Hook) -> bool:
        return hook != "check" or bool(self._reason_before(tool))

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        assert context.call is not None
        reason, always = self._reason_before(tool), "exactly this call"
        request = ApprovalRequest(context.call.call_id, tool.name, params, reason, always=always)
        return self._decision(request, {("before", *_command_key(tool, params, context))}, context)

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        concerns = WRITES in self.of or tool.name in self.of or (COMMANDS in self.of and tool.opaque)
        if not concerns and not any(self._covers(change.path) for change in changes):
            return ALLOW
        call, result = context.call, context.result
        assert call is not None
        assert result is not None
        keys: set[Hashable]
        if tool.opaque:
            began_in = getattr(result.value, "began_in", "")
            keys = {(*_command_key(tool, params, context), began_in)}
            always = "exactly this command"
        else:
            session = context.session.session_id
            keys = {
                (session, tool.name, lock.serial, one.path) for lock, found in call.changes.items() for one in found
            }
            always = f"{tool.name} of " + ("this path" if len(keys) == 1 else "these paths")
        if isinstance(result.value, AcceptsChanges):
            result = replace(result, value=result.value.with_changes(()))  # `changes` and `ignored` have them
        shown, ignored = changes, ()
        if self._ignored is not None:
            paths = self._ignored()
            shown, ignored = (paths if tool.opaque else paths.of_file_tools()).split(changes)
        request = ApprovalRequest(
            call.call_id,
            tool.name,
            params,
            changes=shown,
            diff=readable_patch(_patch(context, {change.path for change in ignored})),
            ignored=ignored,
            output=result.text(),
            exit_code=exit_code_of(result.value),
            always=always,
        )
        return self._decision(request, keys, context)

    def _reason_before(self, tool: Tool[Any, Any]) -> str:
        """Why to ask before the handler of a tool. Empty: there is no need to."""
        is_named = tool.name in self.of
        if tool.external_effects and (
            is_named or (COMMANDS in self.of and tool.opaque) or (WRITES in self.of and not tool.read_only)
        ):
            return tool.external_effects
        return "nothing says what it changes" if is_named and not tool.opaque and tool.writes is None else ""

    def _decision(self, request: ApprovalRequest, keys: set[Hashable], context: ToolContext) -> PolicyDecision:
        if keys <= self._always:
            return ALLOW
        seconds = self.timeout_seconds
        if context.deadline is not None:
            seconds = max(0.0, min(seconds, context.deadline.remaining().total_seconds()))
        request = replace(request, timeout_seconds=seconds, cancellation=context.cancellation)
        if context.session.secrets:
            request = context.session.secrets.for_people().mask(request)
        call, until = context.call, monotonic() + seconds
        assert call is not None
        call.awaits_approval = True
        try:
            answer = self._ask(request)
        finally:
            call.awaits_approval = False
        if answer is None or monotonic() > until:
            return PolicyDecision.deny(f"nobody answered within {seconds:.0f} s, so it counts as a no")
        if answer.allowed is not True:  # a word such as "no" is no yes
            return PolicyDecision.deny(answer.reason or "it was not approved")
        if answer.always:
            self._always |= keys
        return ALLOW


def _command_key(tool: Tool[Any, Any], params: object, context: ToolContext) -> tuple[Hashable, ...]:
    exact = json.dumps(serde.dump_any(params), sort_keys=True, default=repr)
    return context.session.session_id, tool.name, exact


def _patch(context: ToolContext, without: Container[str]) -> bytes:
    """The patch of the call's changes in all filesystems. One that cannot tell the bytes before has no part in it."""
    call, parts = context.call, list[bytes]()
    assert call is not None
    for lock, changes in call.changes.items():
        contents = call.contents(lock)
        if contents is not None:
            parts.append(patch_of([change for change in changes if change.path not in without], *contents))
    return b"".join(parts)
