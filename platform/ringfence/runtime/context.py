"""What surrounds a tool call: the context that handlers and policies get, and what it needs of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ringfence.filesystem.paths import resolve_model_path
from ringfence.filesystem.protocol import Filesystem
from ringfence.limits import BudgetTracker, RunOptions
from ringfence.session.tool_result import ToolResult

if TYPE_CHECKING:
    from ringfence.limits import Budget, Cancellation, Deadline, Heartbeat, RunContext
    from ringfence.participants import CallInfo, CallLock, Change
    from ringfence.resources import CallResources, ResourceContext
    from ringfence.session.events import Dispatcher, PromptResponse
    from ringfence.session.session import Session

ContraParamsT = TypeVar("ContraParamsT", contravariant=True)
CoResultT = TypeVar("CoResultT", covariant=True)

_NOT_LOOKED_UP: Any = object()


class Rendering(Protocol):
    """A rendered prompt, as far as its tool calls need it: `RenderedPrompt` is one."""

    @property
    def text(self) -> str: ...
    @property
    def tools(self) -> Sequence[Any]:
        """The `Tool`s that can be called."""
        ...

    @property
    def tool_param_descriptions(self) -> Mapping[str, Mapping[str, str]]: ...


class PromptOfCalls(Protocol):
    """The prompt of tool calls, as far as they need it: `Prompt` is one."""

    @property
    def ns(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def scope(self) -> str:
        """The scope of the policies' state."""
        ...

    @property
    def resources(self) -> HasContext: ...
    def render(self, *, session: Session, deadline: Deadline | None = None) -> Rendering: ...
    def policies_for_tool(self, name: str) -> Sequence[object]: ...
    def result_policies(self, name: str) -> Sequence[object]: ...


class HasContext(Protocol):
    """The resources of a prompt, within their block."""

    @property
    def context(self) -> ResourceContext: ...


class Evaluates(Protocol):
    """What evaluates child prompts: each `ProviderAdapter` does."""

    def evaluate(
        self,
        prompt: Any,
        *,
        session: Session,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        budget_tracker: BudgetTracker | None = None,
        heartbeat: Heartbeat | None = None,
        run_context: RunContext | None = None,
    ) -> PromptResponse[Any]:
        """See `ProviderAdapter.evaluate`."""
        ...


@dataclass(slots=True, eq=False, init=False)
class ToolContext:
    """What surrounds one tool call. Made for the call, and of no use after it.

    The filesystem and the resources that it has belong to the call in every thread: changes made through them are
    committed or rolled back with it, and are refused once the handler has ended. A context that a test makes has no
    call: changes stay.
    """

    prompt: PromptOfCalls
    rendered_prompt: Rendering | None
    adapter: Evaluates | None
    session: Session
    options: RunOptions
    call: CallInfo | None
    scope: CallResources | None
    cancellation: Cancellation | None
    result: ToolResult[Any] | None
    """What the handler has returned. Only policies on effects have it."""
    _paths: dict[tuple[str, str | None], str] = field(repr=False)
    _filesystem: Any = field(repr=False)
    _scopes: dict[CallLock | None, str] = field(repr=False)

    def __init__(
        self,
        prompt: PromptOfCalls,
        rendered_prompt: Rendering | None,
        adapter: Evaluates | None,
        session: Session,
        deadline: Deadline | None = None,
        budget_tracker: BudgetTracker | None = None,
        heartbeat: Heartbeat | None = None,
        *,
        options: RunOptions | None = None,
        call: CallInfo | None = None,
        scope: CallResources | None = None,
        cancellation: Cancellation | None = None,
    ) -> None:
        """``options`` take the place of the three limits.

        Raises TypeError for a limit of another type, such as a number of seconds for a deadline.
        """
        self.prompt = prompt
        self.rendered_prompt = rendered_prompt
        self.adapter = adapter
        self.session = session
        self.options = RunOptions(deadline, budget_tracker, heartbeat) if options is None else options
        self.call = call
        self.scope = scope
        self.cancellation = cancellation
        self.result = None
        self._paths = {}
        self._filesystem = _NOT_LOOKED_UP
        self._scopes = {}

    @property
    def deadline(self) -> Deadline | None:
        return self.options.deadline

    @property
    def heartbeat(self) -> Heartbeat | None:
        return self.options.heartbeat

    @property
    def run_context(self) -> RunContext | None:
        return self.options.run_context

    @property
    def resources(self) -> CallResources | ResourceContext:
        """The prompt's live resources; instances of ``Scope.TOOL_CALL`` are this call's own."""
        return self.scope if self.scope is not None else self.prompt.resources.context

    @property
    def filesystem(self) -> Filesystem | None:
        """The prompt's filesystem, as this call's; None where none is bound."""
        if self._filesystem is _NOT_LOOKED_UP:
            self._filesystem = (self.scope or self.resources).get_optional(Filesystem)
        return self._filesystem

    def resolve_path(self, path: str, *, mount_point: str | None = None) -> str:
        """The path in `filesystem` that a model means by `path`: see `resolve_model_path`.

        It is resolved once a call, so what a policy has checked is what the handler gets.
        """
        key = path, mount_point
        resolved = self._paths.get(key)
        if resolved is None:
            filesystem = self.filesystem
            assert filesystem is not None, "no filesystem is bound"
            resolved = self._paths[key] = resolve_model_path(filesystem, path, mount_point=mount_point)
        return resolved

    def scope_of(self, lock: CallLock | None) -> str:
        """The scope of policies' state about the filesystem with this lock.

        What was read of one workspace says nothing about another.
        """
        scope = self._scopes.get(lock)
        if scope is None:
            filesystem, place = self.filesystem, "" if lock is None else f"{lock.name} {lock.serial}"
            if filesystem is not None and getattr(filesystem, "lock", None) is lock:
                root = filesystem.root
                place = root if root != "/" or lock is None else f"memory {lock.serial}"
            scope = self._scopes[lock] = f"{self.prompt.scope}@{place}"
        return scope

    @property
    def budget_tracker(self) -> BudgetTracker | None:
        """The budget tracker of the evaluation, or else the one that is bound as a resource."""
        return self.options.budget_tracker or self.resources.get_optional(BudgetTracker)

    @property
    def event_bus(self) -> Dispatcher:
        """The session's dispatcher."""
        return self.session.dispatcher

    @property
    def changes(self) -> Sequence[Change]:
        """The changes of this call in its filesystem. Known after the handler's end, such as in `on_result`."""
        return () if self.call is None else self.call.changes.get(self._files_lock, ())

    @property
    def reads(self) -> Mapping[str, str]:
        """What this call has read through its filesystem: resolved path to the sha256 of the file's bytes."""
        return {} if self.call is None else self.call.reads.get(self._files_lock, {})

    @property
    def _files_lock(self) -> Any:
        return getattr(self.filesystem, "lock", None)

    def beat(self) -> None:
        """Signal that the call is alive. Handlers that take long call this method regularly."""
        if self.options.heartbeat is not None:
            self.options.heartbeat.beat()


class ToolHandler(Protocol[ContraParamsT, CoResultT]):
    """What runs when a tool is called. Synchronous; everything that has effects belongs here."""

    def __call__(self, params: ContraParamsT, /, *, context: ToolContext) -> ToolResult[CoResultT]: ...
