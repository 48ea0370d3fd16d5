"""Policies: constraints on tool calls and on their effects, with their state in the session."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast, runtime_checkable

from ringfence.errors import PromptValidationError

if TYPE_CHECKING:
    from rpds import HashTrieMap

    from ringfence.participants import Change
    from ringfence.runtime.context import ToolContext
    from ringfence.runtime.tool import Tool
    from ringfence.session.tool_result import ToolResult


Hook: TypeAlias = Literal["check", "check_effects", "on_result"]
"""When a policy is asked: before the handler, about its changes, after its success."""


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """Whether a call may run; ``reason`` is for the model, where it may not."""

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

    Any class with these members is one. `BasePolicy` has the optional hooks as well. A policy keeps its state in the
    session only, since no rollback reaches the policy itself.
    """

    @property
    def name(self) -> str: ...

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        """Decide about a call before its handler runs. This method must change nothing."""
        return ALLOW

    def on_result(self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext) -> None:
        """Observe a success after its handler, inside the transaction. An exception rolls the call back."""
        return  # a body: mypy takes one without for abstract


@runtime_checkable
class EffectPolicy(Protocol):
    """A constraint on what tool calls change. A policy that denies or raises rolls the call back.

    Any class with these members is one, and may be a `ToolPolicy` as well. Calls that failed, or changed no file, are
    not shown to it.
    """

    @property
    def name(self) -> str: ...

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        """After a handler that succeeded, before the commit. Must change nothing.

        ``changes`` are of every filesystem that the call changed, with resolved paths, however a path was changed: also
        through links, or by moving or removing a directory above it. ``context.filesystem`` has the bytes.
        """
        return ALLOW


class BasePolicy(ToolPolicy, EffectPolicy):
    """A policy with every hook, each of which allows everything or does nothing.

    A subclass overrides the hooks that it needs. A method with a name that is almost a hook's is a TypeError when the
    class is made: it would never be called.
    """

    name: str  # pyright: ignore[reportIncompatibleMethodOverride]
    """The name of the policy in receipts and denials."""
    observes_all_tools: bool = False
    """Whether a section's policy gets the results of the tools of all sections."""
    runs_last: bool = False
    """Whether its checks come after those of all other policies: where all of them deny, nobody is bothered."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse_misspelt(vars(cls), cls.__name__)

    def applies_to(self, tool: Tool[Any, Any], hook: Hook) -> bool:
        """Whether a hook has to be called for a tool. Asked once, when the tool is bound.

        Where it does not apply, `check` and `check_effects` count as allowing. A subclass that overrides a hook, and
        not this method, is called for every tool.
        """
        return True

    def validate(self, tool_names: frozenset[str]) -> None:
        """Raise PromptValidationError if the policy does not fit a prompt with these tools."""


Policy: TypeAlias = ToolPolicy | EffectPolicy
"""What stands among the ``policies`` of a section or a prompt: a `BasePolicy`, or a class with the same methods."""

_HOOKS: Sequence[Hook] = ("check", "check_effects", "on_result")
_BASE_ONLY = ("applies_to", "validate", "observes_all_tools", "runs_last")


def has_hook(policy: Policy, hook: Hook) -> bool:
    """Whether a policy implements a hook itself."""
    return hasattr(policy, hook) and getattr(type(policy), hook, None) is not getattr(BasePolicy, hook)


def is_asked(policy: Policy, hook: Hook, tool: Tool[Any, Any]) -> bool:
    """Whether a hook has to be called for a tool."""
    if not has_hook(policy, hook) or not isinstance(policy, BasePolicy):
        return has_hook(policy, hook)
    own, filtered = (next(kind for kind in type(policy).__mro__ if name in vars(kind)) for name in (hook, "applies_to"))
    return not issubclass(filtered, own) or policy.applies_to(tool, hook)


def runs_last(policy: object) -> bool:
    return isinstance(policy, BasePolicy) and policy.runs_last


def observes_all_tools(policy: Policy) -> bool:
    return isinstance(policy, BasePolicy) and policy.observes_all_tools


def check_policy(policy: object, where: str) -> None:
    """Raise TypeError for what is no policy, for a class of policies, and for a hook that would never be called."""
    has_text = type(policy).__repr__ is not object.__repr__ and not inspect.isroutine(policy)
    what = f"{policy!r} in {where}" if has_text else f"the {type(policy).__name__} in {where}"
    if isinstance(policy, type):
        raise TypeError(f"the class {policy.__name__} in {where} is no policy yet: write {policy.__name__}(...)")
    hooks = {hook for hook in _HOOKS if has_hook(cast("Policy", policy), hook)}
    if isinstance(policy, BasePolicy):
        is_policy = bool(hooks)
    else:
        _refuse_misspelt(dict(inspect.getmembers_static(policy)), what)
        if unused := [name for name in _BASE_ONLY if hasattr(policy, name)]:
            raise TypeError(f"{what} has {unused[0]}, which only a BasePolicy has: inherit from it")
        is_policy = hooks == {"check_effects"} or hooks >= {"check", "on_result"}
    if not is_policy or not isinstance(getattr(policy, "name", None), str):
        raise TypeError(
            f"{what} is no policy: a ToolPolicy has name, check and on_result, an EffectPolicy name and check_effects, "
            "a BasePolicy name and at least one of these hooks"
        )


def _refuse_misspelt(members: Mapping[str, object], what: str) -> None:
    """Raise TypeError for a misspelt hook, and for a misspelt `observes_all_tools`."""
    for name, value in members.items():
        if name.startswith("_") or name in (*_HOOKS, *_BASE_ONLY):
            continue
        known = (*_HOOKS, "applies_to", "validate") if callable(value) else ("observes_all_tools",)
        for meant in difflib.get_close_matches(name, known, n=1, cutoff=0.75):
            raise TypeError(f"{what}: {name} would never be called; did you mean the hook {meant}?")


@dataclass(frozen=True, slots=True)
class PolicyState:
    """The state of one policy in one scope: a prompt, and for some policies a filesystem. STATE slices hold it.

    ``invoked_keys`` pairs a tool or path with a key: for `ReadBeforeWritePolicy` a resolved path with the sha256 of
    the bytes that the model knows. Where it knows only some lines, a space and those follow.
    """

    policy_name: str
    invoked_tools: frozenset[str] = frozenset()
    invoked_keys: Set[tuple[str, str]] = frozenset()
    scope: str = ""


class PathHashes(Set[tuple[str, str]]):
    """An immutable set of (path, sha256) pairs with one pair for each path.

    Versions share all but a few nodes: the cost of an update hardly grows with the number of files.
    """

    __slots__ = ("_made_of", "_map", "of")

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        from rpds import HashTrieMap

        self._map: HashTrieMap[str, str] = HashTrieMap(dict(pairs))
        self.of: Callable[[str], str | None] = self._map.get
        """The hash of a path."""
        self._made_of: tuple[PathHashes, Mapping[str, str | None]] | None = None
        """The previous version and the argument of `updated`. Only the newest version has them, to free older ones."""

    def updated(self, known: Mapping[str, str | None]) -> PathHashes:
        """Return a version with these hashes. The hash None removes a path."""
        result = self._map
        for path, content_hash in known.items():
            result = result.discard(path) if content_hash is None else result.insert(path, content_hash)
        hashes = object.__new__(PathHashes)
        hashes._map, hashes.of = result, result.get
        self._made_of, hashes._made_of = None, (self, known)
        return hashes

    def since(self, earlier: PathHashes) -> Mapping[str, str | None]:
        """The argument of `updated` that turns an earlier version into this one.

        For the previous version, it is stored. For others, all pairs are compared.
        """
        if self._made_of is not None and self._made_of[0] is earlier:
            return self._made_of[1]
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
    """The state of a policy in a scope, by default an empty one. ``before`` selects the state at the call's start."""
    session, call = context.session, context.call
    mark = call.mark_of(session.lock) if before and call is not None else None
    for state in session[PolicyState].all() if mark is None else session.held_at(mark, PolicyState):
        if state.policy_name == policy_name and state.scope == scope:
            return state
    return PolicyState(policy_name, scope=scope)


def known_hashes(state: PolicyState) -> PathHashes:
    """The keys of a state as `PathHashes`. A program may have seeded them as another kind of set."""
    keys = state.invoked_keys
    return keys if isinstance(keys, PathHashes) else PathHashes(keys)


def refuse_unknown(policy: str, unknown: Set[str], tool_names: Set[str]) -> None:
    """Raise PromptValidationError if a policy names unknown tools. The message lists the known ones."""
    if unknown:
        near = {name: difflib.get_close_matches(name, sorted(tool_names), n=1) for name in sorted(unknown)}
        names = [f"{name} (did you mean {meant[0]}?)" if meant else name for name, meant in near.items()]
        raise PromptValidationError(
            f"the policy {policy} names tools that this prompt does not have: {', '.join(names)}; "
            f"it has {', '.join(sorted(tool_names)) or 'none'}",
            placeholder=min(unknown),
        )


def check_names(names: Iterable[str]) -> frozenset[str]:
    """The names, or patterns, as a set. Raises TypeError for a single string, which is an iterable of letters."""
    if isinstance(names, str):
        raise TypeError(f"{names!r} is one name where a list of names is expected: put it in brackets")
    return frozenset(names)


class SequentialDependencyPolicy(BasePolicy):
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
        self.dependencies = {tool: check_names(needed) for tool, needed in dependencies.items()}
        self._awaited = frozenset[str]().union(*self.dependencies.values())
        try:
            TopologicalSorter(self.dependencies).prepare()
        except CycleError as error:
            cycle: Sequence[str] = error.args[1]
            message = f"these tools wait for each other: {' -> '.join(reversed(cycle))}"
            raise PromptValidationError(message, placeholder=cycle[0]) from None

    def applies_to(self, tool: Tool[Any, Any], hook: Hook) -> bool:
        return tool.name in (self.dependencies if hook == "check" else self._awaited)

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        needed = self.dependencies.get(tool.name, frozenset())
        missing = needed - policy_state(context, self.name, context.prompt.scope).invoked_tools
        if not missing:
            return ALLOW
        return PolicyDecision.deny(
            f"{tool.name} needs these tools to have succeeded first: {', '.join(sorted(missing))}"
        )

    def on_result(self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext) -> None:
        state = policy_state(context, self.name, context.prompt.scope)
        if tool.name in self._awaited - state.invoked_tools:
            succeeded = replace(state, invoked_tools=state.invoked_tools | {tool.name})
            context.session[PolicyState].replace_item(state, succeeded)

    def validate(self, tool_names: frozenset[str]) -> None:
        refuse_unknown(self.name, (self._awaited | self.dependencies.keys()) - tool_names, tool_names)
