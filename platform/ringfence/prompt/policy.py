"""Policies: what must hold before a tool call runs and before it is kept, remembered in the session."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

from ringfence.errors import PromptValidationError

if TYPE_CHECKING:
    from rpds import HashTrieMap

    from ringfence.participants import Change
    from ringfence.prompt.tool import Tool, ToolContext
    from ringfence.prompt.tool_result import ToolResult


MethodT = TypeVar("MethodT", bound=Callable[..., object])


def only_for(concerned: Callable[[Any, Tool[Any, Any]], bool]) -> Callable[[MethodT], MethodT]:
    """Mark the `check` or `on_result` of a policy: for tools that are not ``concerned`` it allows everything, or does
    nothing, and calls leave it out. Asked when a tool is offered; it does not speak for what overrides the method."""

    def mark(method: MethodT) -> MethodT:
        setattr(method, "only_for", concerned)  # noqa: B010  # pyright knows no attributes of functions
        return method

    return mark


def is_for(tool: Tool[Any, Any], method: Callable[..., object]) -> bool:
    """Whether a policy's method has to be called for a tool."""
    concerned: Callable[[object, Tool[Any, Any]], bool] | None = getattr(method, "only_for", None)
    return concerned is None or concerned(getattr(method, "__self__", None), tool)


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """Whether a call may run; ``reason`` is what the model is told where it may not."""

    allowed: bool
    reason: str | None = None

    @staticmethod
    def allow() -> PolicyDecision:
        """The call may run."""
        return ALLOW

    @staticmethod
    def deny(reason: str) -> PolicyDecision:
        """It may not; the model reads the reason."""
        return PolicyDecision(allowed=False, reason=reason)


ALLOW = PolicyDecision(allowed=True)


@runtime_checkable
class ToolPolicy(Protocol):
    """A constraint on tool calls. A policy that raises denies.

    It keeps what it knows in the session only, since it is not told of rollbacks. A policy may also have
    ``validate(tool_names: frozenset[str])``, called when a prompt is put together, that raises PromptValidationError;
    and a true ``observes_all_tools``: a policy of a section is then called after the successes of all other tools, too.
    """

    @property
    def name(self) -> str: ...

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        """Before the handler. Must change nothing."""
        ...

    def on_result(self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext) -> None:
        """After a handler that succeeded, inside its transaction; raising rolls the call back."""
        ...


@runtime_checkable
class EffectPolicy(Protocol):
    """A constraint on what tool calls change. A policy that denies or raises rolls the call back.

    It stands among the ``policies`` of a section or a prompt, and may be a `ToolPolicy` as well. It keeps what it knows
    in the session only. Calls that fail by themselves, or change no file, do not come to it; nor do those of a tool to
    which its ``concerns(tool) -> bool``, if it has one, said no when the tool was offered.
    """

    @property
    def name(self) -> str: ...

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        """After a handler that succeeded, before the commit. Must change nothing.

        ``changes`` are of every filesystem that the call has changed, with resolved paths: what became of each path, in
        whatever way, through links, by moving or removing a directory above it. ``context.filesystem`` has the bytes.
        """
        ...


Policy: TypeAlias = ToolPolicy | EffectPolicy
"""What stands among the ``policies`` of a section or a prompt."""


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What one policy knows in one scope (a prompt, and where it matters a filesystem); a STATE slice has one of each.

    ``invoked_keys`` pairs a tool or path with a key: for `ReadBeforeWritePolicy` a resolved path with the sha256 of
    the bytes that the model knows.
    """

    policy_name: str
    invoked_tools: frozenset[str] = frozenset()
    invoked_keys: Set[tuple[str, str]] = frozenset()
    scope: str = ""


class PathHashes(Set[tuple[str, str]]):
    """(path, sha256) pairs, one a path. Immutable, and the next version shares all but a few nodes with this one, so
    that the ten-thousandth file that an agent reads costs what the tenth did."""

    __slots__ = ("_made_of", "_map")

    def __init__(self, pairs: HashTrieMap[str, str] | Iterable[tuple[str, str]] = ()) -> None:
        from rpds import HashTrieMap

        given = isinstance(pairs, HashTrieMap)
        self._map: HashTrieMap[str, str] = cast("HashTrieMap[str, str]", pairs) if given else HashTrieMap(dict(pairs))
        self._made_of: tuple[PathHashes, Mapping[str, str | None]] | None = None
        """The version before, and what `updated` was given; of the newest alone, or all would be kept alive."""

    def of(self, path: str) -> str | None:
        return self._map.get(path)

    def updated(self, known: Mapping[str, str | None]) -> PathHashes:
        """With these hashes; None forgets the path."""
        result = self._map
        for path, content_hash in known.items():
            result = result.discard(path) if content_hash is None else result.insert(path, content_hash)
        hashes = object.__new__(PathHashes)
        hashes._map = result
        self._made_of, hashes._made_of = None, (self, known)
        return hashes

    def since(self, earlier: PathHashes) -> Mapping[str, str | None]:
        """What `updated` makes these of an earlier version with; of the one just before it is known without a look at
        the rest."""
        made_of = self._made_of
        if made_of is not None and made_of[0] is earlier:
            return made_of[1]
        before, now = dict(earlier), dict(self)
        return {**dict.fromkeys(before.keys() - now.keys()), **dict(now.items() - before.items())}

    def __contains__(self, pair: object) -> bool:
        match pair:
            case (str() as path, str() as content_hash):
                return self._map.get(path) == content_hash
            case _:
                return False

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._map.items())

    def __len__(self) -> int:
        return len(self._map)

    def __hash__(self) -> int:
        return self._hash()

    def __repr__(self) -> str:
        return f"PathHashes({sorted(self)!r})"


def policy_state(context: ToolContext, policy_name: str, scope: str, *, before: bool = False) -> PolicyState:
    """The state of a policy in a scope, empty where it has none yet; ``before``, as it was when the call began."""
    session, call = context.session, context.call
    mark = call.mark_of(session.lock) if before and call is not None else None
    for state in session[PolicyState].all() if mark is None else session.held_at(mark, PolicyState):
        if state.policy_name == policy_name and state.scope == scope:
            return state
    return PolicyState(policy_name, scope=scope)


def refuse_unknown(policy: str, unknown: Set[str], tool_names: Set[str]) -> None:
    """Raises PromptValidationError where a policy names tools that there are not, and says which there are."""
    if unknown:
        near = {name: difflib.get_close_matches(name, sorted(tool_names), n=1) for name in sorted(unknown)}
        said = [f"{name} (did you mean {meant[0]}?)" if meant else name for name, meant in near.items()]
        raise PromptValidationError(
            f"the policy {policy} names tools that this prompt does not have: {', '.join(said)}; "
            f"it has {', '.join(sorted(tool_names)) or 'none'}",
            placeholder=min(unknown),
        )


def tool_names(names: Iterable[str]) -> frozenset[str]:
    """The names as a set. Raises TypeError for a single string, which would be read as a list of letters."""
    if isinstance(names, str):
        raise TypeError(f"{names!r} is one name where a list of tool names is expected: put it in brackets")
    return frozenset(names)


class SequentialDependencyPolicy:
    """A tool runs only after every tool that it depends on has succeeded in this session and prompt, in whatever
    section that is."""

    name = "sequential_dependency"
    observes_all_tools = True

    def __init__(self, dependencies: Mapping[str, Iterable[str]]) -> None:
        """``dependencies`` maps a tool's name to the names of the tools it directly depends on.

        Raises:
            PromptValidationError: tools that wait for each other.
            TypeError: a text in the place of a list.
        """
        self.dependencies = {tool: tool_names(needed) for tool, needed in dependencies.items()}
        self._awaited = frozenset[str]().union(*self.dependencies.values())
        self._refuse_cycles()

    @only_for(lambda policy, tool: tool.name in policy.dependencies)
    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        needed = self.dependencies.get(tool.name)
        if not needed:
            return ALLOW
        missing = needed - policy_state(context, self.name, context.prompt.scope).invoked_tools
        if not missing:
            return ALLOW
        return PolicyDecision.deny(
            f"{tool.name} needs these tools to have succeeded first: {', '.join(sorted(missing))}"
        )

    @only_for(lambda policy, tool: tool.name in policy._awaited)
    def on_result(self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext) -> None:
        if tool.name not in self._awaited:
            return
        state = policy_state(context, self.name, context.prompt.scope)
        if tool.name not in state.invoked_tools:
            invoked = state.invoked_tools | {tool.name}
            context.session[PolicyState].replace_item(state, replace(state, invoked_tools=invoked))

    def validate(self, tool_names: frozenset[str]) -> None:
        unknown = {*self.dependencies, *(name for needed in self.dependencies.values() for name in needed)} - tool_names
        refuse_unknown(self.name, unknown, tool_names)

    def _refuse_cycles(self) -> None:
        done: set[str] = set()

        def visit(tool: str, way: tuple[str, ...]) -> None:
            if tool in way:
                raise PromptValidationError(
                    f"these tools wait for each other: {' -> '.join((*way[way.index(tool) :], tool))}", placeholder=tool
                )
            if tool not in done:
                for needed in sorted(self.dependencies.get(tool, ())):
                    visit(needed, (*way, tool))
                done.add(tool)

        for tool in self.dependencies:
            visit(tool, ())
