"""The policies of a workspace's owner: from the command line and from a file that no agent can reach."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from ringfence import serde
from ringfence.errors import PromptValidationError
from ringfence.failures import describe_error
from ringfence.filesystem.edits import read_host_text, too_long
from ringfence.filesystem.paths import escape_path, unescaped
from ringfence.filesystem.protocol import MAX_TEXT_BYTES
from ringfence.participants import CallInfo, CallLock, Change
from ringfence.prompt.effects import DeletionLimitPolicy, PathPolicy, ProtectedFilesPolicy, RequireCleanTestsPolicy
from ringfence.prompt.policy import EffectPolicy, Policy, ToolPolicy
from ringfence.prompt.prompt import Prompt
from ringfence.prompt.tool import Tool, ToolContext
from ringfence.prompt.tool_result import ToolResult
from ringfence.runtime.session import Session
from ringfence_cli.printable import why
from ringfence_sandbox.disk.places import store_of
from ringfence_sandbox.moved_roots import note_root

FILE_NAME = "ringfence.toml"
KINDS = "allow:GLOB, deny:GLOB, deletions:N, protected, tests:TOOL[=COMMAND]:GLOB or FILE.toml"

CONTAINER_TOOLS = ("shell_execute", "evaluate_python")


@dataclass(frozen=True, slots=True)
class Paths:
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tests:
    tool: str
    command: str | tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """The table ``[policies]`` of a file. The fields are those of the policies' constructors."""

    protected: bool = False
    deletions: int | None = None
    paths: Paths | None = None
    tests: Tests | None = None

    def policies(self) -> Iterator[Policy]:
        if self.protected:
            yield ProtectedFilesPolicy()
        if self.paths is not None:
            yield PathPolicy(allow=self.paths.allow, deny=self.paths.deny)
        if self.deletions is not None:
            yield DeletionLimitPolicy(max_files=self.deletions)
        if self.tests is not None:
            tests = self.tests
            yield RequireCleanTestsPolicy(tests.tool, command=tests.command, before=tests.before, paths=tests.paths)


@dataclass(frozen=True, slots=True)
class PolicyFile:
    policies: Wanted = field(default_factory=Wanted)


def owner_file(directory: Path) -> Path:
    """Where the owner of a workspace keeps its policies: beside its store, whether there is one yet or not."""
    return Path(store_of(os.path.realpath(directory)), FILE_NAME)


def policies_of(directory: Path, specs: Sequence[str]) -> tuple[Policy, ...]:
    """What holds for a workspace: its owner's file, if there is one, and what is said on the command line.

    Raises:
        click.UsageError: a file that cannot be read or understood, or that the agent could change; a bad SPEC.
    """
    file = owner_file(directory)
    try:
        owned = _of_file(file, directory) if os.path.lexists(file) else ()
    except click.BadParameter as error:
        raise click.UsageError(f"what the owner of the directory says cannot be understood: {error.message}") from None
    if owned:
        note_root(os.path.realpath(directory), str(file.parent))
    return _strictest((*owned, *policies_said(specs, directory)))


def _strictest(policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """Of several limits on deletions the lowest, which says all that they do."""
    limits = [policy for policy in policies if isinstance(policy, DeletionLimitPolicy)]
    lowest = min(limits, key=lambda limit: limit.max_files, default=None)
    return tuple(policy for policy in policies if policy is lowest or policy not in limits)


def policies_said(specs: Sequence[str], directory: Path | None = None) -> tuple[Policy, ...]:
    """The same of the command line alone."""
    found: list[Policy] = []
    lists: dict[str, list[str]] = {"allow": [], "deny": []}
    for spec in specs:
        kind, _, rest = spec.partition(":")
        try:
            if kind in (*lists, "tests"):
                _refuse_path_of_host(rest.rpartition(":")[2], directory)
            if kind in lists and rest:
                lists[kind].append(rest)
            elif spec == "protected":
                found.append(ProtectedFilesPolicy())
            elif kind == "deletions":
                if not (rest.isascii() and rest.isdigit() and len(rest) < 10):
                    raise _bad(f"{spec!r}: deletions:N takes a number of files, such as deletions:3")
                found.append(DeletionLimitPolicy(max_files=int(rest)))
            elif kind == "tests":
                found.append(_tests_said(rest))
            elif kind in lists:
                raise _bad(f"{spec!r}: {kind}:GLOB takes a pattern, such as {kind}:/src/**")
            elif spec.endswith(".toml"):
                said = _of_file(Path(spec), directory)
                if not said:  # whoever names a file does not want all to be allowed
                    raise _bad(f"{spec}: it has no policy: a table [policies] has protected, deletions, paths or tests")
                found.extend(said)
            else:
                raise _bad(f"there is no policy {spec!r}; there are {KINDS}")
        except (PromptValidationError, ValueError) as error:
            raise _bad(f"{spec!r}: {error}") from None
    if any(lists.values()):
        try:
            found.append(PathPolicy(allow=lists["allow"] or None, deny=lists["deny"]))
        except PromptValidationError as error:
            raise _bad(str(error)) from None
    return _strictest(found)


def unfit(error: PromptValidationError, directory: Path, workspace: str | None) -> click.UsageError:
    """What to say of a policy about a tool that the agent will not have, and how it could."""
    said = str(error)
    if error.placeholder in CONTAINER_TOOLS and workspace != "podman":
        said += f". {error.placeholder} is there with --workspace podman"
    file = owner_file(directory)
    if os.path.lexists(file):
        said += f". What the owner of the directory says is in {escape_path(str(file))}"
    return click.UsageError(said)


def _tests_said(rest: str) -> Policy:
    """Of ``TOOL:GLOB``, or ``TOOL=COMMAND:GLOB``, where the command may have colons and the glob not."""
    tool, _, pattern = rest.partition(":")
    command = ()
    if "=" in tool:
        named, _, pattern = rest.rpartition(":")
        tool, _, command = named.partition("=")
    if not (tool and pattern):
        raise ValueError("tests:TOOL:GLOB takes a tool and a pattern, such as tests:shell_execute:/src/**")
    return RequireCleanTestsPolicy(tool, command=command, paths=[pattern])


def _refuse_path_of_host(pattern: str, directory: Path | None) -> None:
    """ValueError for a pattern that is meant from the root of the machine, and so would match nothing."""
    for root in (os.path.abspath(directory), os.path.realpath(directory)) if directory is not None else ():
        if root != "/" and f"{pattern}/".startswith(f"{root}/"):
            meant = pattern.removeprefix(root) or "/**"
            raise ValueError(f"patterns are from the root of the workspace: for {pattern} write {meant}")


def _of_file(file: Path, directory: Path | None) -> tuple[Policy, ...]:
    if directory is not None:
        root = os.path.realpath(directory)
        for place in (os.path.abspath(file), os.path.realpath(file)):
            if os.path.commonpath((root, place)) == root:
                raise _bad(f"{file} is inside of the workspace, where the agent could change it: keep it elsewhere")
    try:
        table = tomllib.loads(read_host_text(file))
        wanted = serde.parse(PolicyFile, table, extra="forbid", coerce=False)
        paths = wanted.policies.paths or Paths()
        tests = wanted.policies.tests or Tests("")
        for pattern in (*(paths.allow or ()), *paths.deny, *tests.paths):
            _refuse_path_of_host(pattern, directory)
        return tuple(wanted.policies.policies())
    except (OSError, PromptValidationError, ValueError) as error:
        raise _bad(f"{file}: {why(error)}") from None


def _no_receipt(line: int, reason: str) -> click.BadParameter:
    return click.BadParameter(f"line {line} is no receipt: {reason}; `ringfence run --receipts FILE` writes them")


def _bad(message: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint="'--policy'")


@dataclass(frozen=True, slots=True)
class Denial:
    """What a policy would have said of a call that was committed."""

    call_id: str
    tool: str
    policy: str
    reason: str


def replayed(receipts: Path, policies: Sequence[Policy]) -> tuple[int, list[Denial]]:
    """How many committed calls a receipts file has, and those that the policies would have denied.

    Every call is judged as if all before it had been kept, those aside that would have been denied, and those that a
    call around them took back. Tests count as passed where their call was committed and the receipt has no other exit
    code than 0.

    Raises:
        click.BadParameter: a line that is no receipt.
    """
    session, denials = Session(), list[Denial]()
    prompt = Prompt[None](ns="ringfence", key="policies")
    past = _committed(receipts)
    for one in past:
        call = CallInfo(one.call_id, one.tool.name)
        call.changes = {CallLock("a past run"): one.changes} if one.changes else {}
        context = ToolContext(prompt=prompt, rendered_prompt=None, adapter=None, session=session, call=call)
        denial = _denial(policies, one.tool, one.params, one.changes, context)
        if denial is not None:
            denials.append(Denial(one.call_id, one.tool.name, *denial))
            continue
        for policy in policies:
            if isinstance(policy, ToolPolicy):
                policy.on_result(one.tool, one.params, one.answer, context=context)
    return len(past), denials


@dataclass(frozen=True, slots=True)
class _Past:
    """A call that was committed, and stayed so."""

    call_id: str
    tool: Tool[Any, Any]
    params: object
    changes: Sequence[Change]
    answer: ToolResult[Any]


def _committed(receipts: Path) -> Sequence[_Past]:
    found: dict[str, _Past] = {}
    with receipts.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_TEXT_BYTES + 1), b""), 1):
            if len(line) > MAX_TEXT_BYTES:  # such as /dev/zero, which is one line without an end
                raise _no_receipt(number, too_long("bytes"))
            if not line.strip():
                continue
            try:
                receipt = serde.read_json(line)
                changes = [serde.parse(Change, one) for one in _list_of(receipt["changes"])]
                changes = [replace(one, path=unescaped(one.path)) for one in changes]
                call_id, name, outcome = (str(receipt[key]) for key in ("call_id", "tool", "outcome"))
                receipt_id = str(receipt.get("receipt_id") or number)
                if outcome != "committed":
                    found.pop(receipt_id, None)  # where it had committed, and was taken back
                    continue
                tool = Tool[None, None](name=name, description="A tool of a past run.", handler=None)
            except KeyError as error:
                raise _no_receipt(number, f"it has no {error}") from None
            except (ValueError, TypeError, PromptValidationError) as error:
                raise _no_receipt(number, describe_error(error)) from None
            answer = ToolResult("done", SimpleNamespace(exit_code=receipt.get("exit_code") or 0))
            found[receipt_id] = _Past(call_id, tool, receipt.get("params"), changes, answer)
    return list(found.values())


def _denial(
    policies: Sequence[Policy], tool: Tool[Any, Any], params: object, changes: Sequence[Change], context: ToolContext
) -> tuple[str, str] | None:
    for policy in policies:
        if isinstance(policy, ToolPolicy):
            decision = policy.check(tool, params, context=context)
            if not decision.allowed:
                return policy.name, decision.reason or ""
    for policy in policies:
        if changes and isinstance(policy, EffectPolicy):
            decision = policy.check_effects(tool, params, changes, context=context)
            if not decision.allowed:
                return policy.name, decision.reason or ""
    return None


def _list_of(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("its changes are no list")
    return [*value]  # pyright: ignore[reportUnknownArgumentType]


def as_json(calls: int, denials: Sequence[Denial]) -> str:
    return json.dumps({"calls": calls, "denied": serde.dump(list(denials))})
