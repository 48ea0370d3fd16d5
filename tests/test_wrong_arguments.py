"""Whatever of a wrong kind is given to what a program's author makes is refused there, by the name of the argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import fsspec
import pytest

import ringfence
import ringfence.adapters
import ringfence.prompt
import ringfence.runtime
import ringfence_sandbox
import ringfence_tools
from ringfence import (
    Binding,
    Budget,
    BudgetTracker,
    Deadline,
    Filesystem,
    InMemoryFilesystem,
    MarkdownSection,
    PolicyDecision,
    Prompt,
    PromptTemplate,
    ReadBeforeWritePolicy,
    ResourceRegistry,
    Scope,
    ScriptedAdapter,
    SequentialDependencyPolicy,
    Session,
    Tool,
    ToolContext,
    ToolExample,
    ToolExecutor,
    ToolResult,
    reducer,
    tool_transaction,
)
from ringfence.adapters import AnthropicAdapter, ModelParams, OpenAIAdapter, ThrottlePolicy, evaluate_with
from ringfence.arguments import checked
from ringfence.prompt import (
    DeletionLimitPolicy,
    FeedbackProviderConfig,
    FeedbackTrigger,
    LocalPromptOverridesStore,
    PathPolicy,
    RequireCleanTestsPolicy,
    SectionVisibility,
    TaskExample,
    TaskExamplesSection,
    TaskStep,
    ToolsSection,
)
from ringfence.resources.context import ResourceContext
from ringfence.runtime import (
    Heartbeat,
    InProcessDispatcher,
    PendingToolTracker,
    RunContext,
    SliceConfig,
    SnapshotMetadata,
    create_snapshot,
    restore_snapshot,
)
from ringfence.telemetry import Telemetry
from ringfence_sandbox import HostFilesystem, PodmanSandbox, SandboxLimits, Workspace
from ringfence_tools import (
    AstevalSection,
    Delegate,
    DelegatedTask,
    DelegationSection,
    HistoryToolsSection,
    HostMount,
    PlanningStrategy,
    PlanningToolsSection,
    PodmanSandboxSection,
    VfsToolsSection,
    WorkspaceDigestSection,
    agents_tools,
    pydantic_toolset,
    set_workspace_digest,
)


@dataclass(frozen=True)
class Params:
    path: str = "a.txt"


class Stranger:
    """What nothing takes."""

    def __repr__(self) -> str:
        return "<a stranger>"


class Provider:
    name = "hints"

    def should_run(self, *, context: Any) -> bool:
        return True

    def provide(self, *, context: Any) -> None: ...


def handle(params: Params, *, context: ToolContext) -> ToolResult[Params]:
    return ToolResult.ok(params, message="done")


def opened_by_fsspec(filesystem: Filesystem) -> object:
    return fsspec.filesystem("ringfence", filesystem=filesystem)


def in_a_transaction(session: Session) -> None:
    with tool_transaction(session):
        pass


TOOL = Tool[Params, Params](name="look", description="Look.", handler=handle)
EXAMPLE = ToolExample("An example.", Params(), Params())
TASK = MarkdownSection[DelegatedTask](title="Task", template="$task", key="task")
TEMPLATE = PromptTemplate[None](ns="n", key="k", sections=[TASK])
SECTION = {
    "title": "T",
    "key": "k",
    "default_params": Params(),
    "children": [TASK],
    "enabled": lambda: True,
    "tools": [TOOL],
    "policies": [PathPolicy(deny=["x"])],
    "accepts_overrides": True,
    "summary": "s",
    "visibility": SectionVisibility.FULL,
}
PARTS = {
    "ns": "n",
    "key": "k",
    "name": "a name",
    "sections": [TASK],
    "policies": [PathPolicy(deny=["x"])],
    "feedback_providers": [FeedbackProviderConfig(Provider(), FeedbackTrigger(every_n_calls=1))],
    "resources": ResourceRegistry(),
}
MODEL = {
    "model": "m",
    "base_url": "http://127.0.0.1:1",
    "api_key": "k",
    "params": ModelParams(),
    "tool_choice": "auto",
    "throttle": ThrottlePolicy(),
}
LIMITS = {"deadline": Deadline.after(60), "heartbeat": Heartbeat()}
TURNS = [{"text": "Done."}]
OF_A_WORKSPACE = (
    *(Workspace.log, Workspace.show, Workspace.diff, Workspace.export, Workspace.undo, Workspace.restore),
    *(Workspace.aborted_step, Workspace.checkpoint, Workspace.drop_checkpoint, Workspace.gc),
)
EXECUTOR = ToolExecutor(prompt=Prompt(TEMPLATE).bind(DelegatedTask("x")), session=Session())
DISK = {"root": "/nowhere", "store": "/nowhere", "durability": "process"}

GOOD: list[tuple[Callable[..., object], Mapping[str, object]]] = [
    (Binding, {"protocol": Params, "provider": lambda resolver: Params(), "scope": Scope.SINGLETON}),
    (Budget, {"deadline": Deadline.after(60), "max_total_tokens": 1}),
    (BudgetTracker, {"budget": Budget(max_total_tokens=1), "parent": BudgetTracker(Budget(max_total_tokens=1))}),
    (Deadline, {"expires_at": datetime.now(UTC) + timedelta(60), "started_at": datetime.now(UTC)}),
    (Deadline.after, {"seconds": 5.0}),
    (InMemoryFilesystem, {}),
    (MarkdownSection[Params], {**SECTION, "template": "t"}),
    (ToolsSection[Params], {**SECTION, "description": "d"}),
    (PolicyDecision, {"allowed": True, "reason": "r"}),
    (PromptTemplate, PARTS),
    (Prompt, {"template": TEMPLATE, "overrides_store": LocalPromptOverridesStore("/nowhere"), "overrides_tag": "x"}),
    (ReadBeforeWritePolicy, {"mount_point": "/w"}),
    (ResourceRegistry, {"bindings": {Params: Binding.instance(Params, Params())}}),
    (ResourceRegistry.build, {"resources": {Params: Params()}}),
    (ResourceRegistry.of, {"bindings": Binding.instance(Params, Params())}),
    (ScriptedAdapter, {"turns": TURNS}),
    (SequentialDependencyPolicy, {"dependencies": {"a": ["b"]}}),
    (
        Session,
        {
            "dispatcher": InProcessDispatcher(),
            "parent": Session(),
            "session_id": uuid4(),
            "tags": {"a": "b"},
            "created_at": datetime.now(UTC),
            "slice_config": SliceConfig(),
        },
    ),
    (
        Tool[Params, Params],
        {
            "name": "look",
            "description": "Look.",
            "handler": handle,
            "examples": [EXAMPLE],
            "writes": lambda params: [params.path],
        },
    ),
    (ToolExample, {"description": "d", "input": Params(), "output": Params()}),
    (
        ToolExecutor,
        {
            "prompt": Prompt(TEMPLATE).bind(DelegatedTask("x")),
            "session": Session(),
            **LIMITS,
            "adapter": ScriptedAdapter(TURNS),
            "budget_tracker": BudgetTracker(Budget(max_total_tokens=1)),
        },
    ),
    (OpenAIAdapter, {**MODEL, "api": "chat"}),
    (AnthropicAdapter, MODEL),
    (
        ModelParams,
        {
            "max_tokens": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "stop": ("x",),
            "seed": 1,
            "presence_penalty": 1.0,
            "frequency_penalty": 1.0,
            "extra": {},
        },
    ),
    (ThrottlePolicy, {}),
    (DeletionLimitPolicy, {"max_files": 3}),
    (FeedbackProviderConfig, {"provider": Provider(), "trigger": FeedbackTrigger(every_n_calls=1)}),
    (FeedbackTrigger, {"every_n_calls": 1, "every_n_seconds": 1.0}),
    (LocalPromptOverridesStore, {"root_path": "/nowhere"}),
    (PathPolicy, {"allow": ["/src/**"], "deny": ["/x"]}),
    (RequireCleanTestsPolicy, {"test_tool": "t", "command": "make test", "before": ["commit"], "paths": ["*.py"]}),
    (TaskExample, {"key": "k", "objective": "o", "outcome": "x", "steps": [TaskStep("look", EXAMPLE)], "title": "T"}),
    (
        TaskExamplesSection,
        {
            "examples": [TaskExample(key="k", objective="o", outcome="x", steps=[TaskStep("look", EXAMPLE)])],
        },
    ),
    (TaskStep, {"tool_name": "look", "example": EXAMPLE}),
    (Heartbeat, {}),
    (PendingToolTracker, {"session": Session()}),
    (SliceConfig, {"logs": Path("/nowhere")}),
    (SnapshotMetadata, {"tag": "t", "tool_call_id": "c", "tool_name": "n", "phase": "pre_tool"}),
    (create_snapshot, {"session": Session(), "resources": ResourceContext(ResourceRegistry()), "tag": "t"}),
    (
        restore_snapshot,
        {
            "session": Session(),
            "resources": ResourceContext(ResourceRegistry()),
            "snapshot": create_snapshot(Session(), None),
        },
    ),
    (AstevalSection, {"session": Session(), "filesystem": InMemoryFilesystem()}),
    (Delegate, {"name": "n", "description": "d", "template": TEMPLATE}),
    (DelegationSection, {"delegates": [Delegate("n", "d", TEMPLATE)]}),
    (HistoryToolsSection, {"session": Session(), "workspace": lambda: None}),
    (
        HostMount,
        {"host_path": "/nowhere", "mount_path": "x", "include_glob": ("*",), "exclude_glob": ("*",), "max_bytes": 1},
    ),
    (PlanningToolsSection, {"session": Session(), "strategy": PlanningStrategy.REACT}),
    (
        PodmanSandboxSection,
        {
            "session": Session(),
            "root": "/nowhere",
            "image": "i",
            "limits": SandboxLimits(),
            "policies": [PathPolicy(deny=["x"])],
        },
    ),
    (
        VfsToolsSection,
        {
            "session": Session(),
            "mounts": [HostMount("memory://nowhere")],
            "filesystem": InMemoryFilesystem(),
            "allowed_host_roots": ["/tmp"],
            "policies": [PathPolicy(deny=["x"])],
            "mount_point": "/w",
        },
    ),
    (WorkspaceDigestSection, {"session": Session()}),
    (HostFilesystem, DISK),
    (Workspace.open, DISK),
    (PodmanSandbox, {"root": "/nowhere", "image": "i", "limits": SandboxLimits(), "session": Session()}),
    (SandboxLimits, {}),
    (RunContext, {"run_id": uuid4(), "request_id": uuid4(), "session_id": uuid4(), "trace_id": "t", "span_id": "s"}),
    (Telemetry, {}),
    (opened_by_fsspec, {"filesystem": InMemoryFilesystem()}),
    (InProcessDispatcher.subscribe, {"self": InProcessDispatcher(), "event_type": Params, "handler": print}),
    (reducer, {"on": Params}),
    (Session.restore, {"self": Session(), "snapshot": Session().snapshot()}),
    *((method, {"self": None, "step": 1, "name": "n", "number": 1, "keep": 1}) for method in OF_A_WORKSPACE),
    (in_a_transaction, {"session": Session()}),
    (agents_tools, {"executor": EXECUTOR}),
    (pydantic_toolset, {"executor": EXECUTOR}),
    (set_workspace_digest, {"session": Session(), "section_key": "k", "body": "b", "summary": "s"}),
    (
        evaluate_with,
        {
            "model": ScriptedAdapter(TURNS),
            "adapter": ScriptedAdapter(TURNS),
            "prompt": EXECUTOR.prompt,
            "session": Session(),
            "budget": Budget(max_total_tokens=1),
            "run_context": RunContext(),
            **LIMITS,
        },
    ),
]


UNTYPED = ("Any", "object", "ParamsT", "ResultT", "ParamsT | None", "ScanLimits | None", "HasParticipants | None")
SEEN_LATER = ("self", "rendered_prompt", "before", "can", "history", "connection")
"""What only tests and ringfence itself give."""


def wrong_arguments() -> Iterator[Any]:
    for make, good in GOOD:
        for name, parameter in inspect.signature(make).parameters.items():
            for wrong in wrong_values(parameter, good.get(name, parameter.default)):
                yield pytest.param(make, good, name, wrong, id=f"{make.__qualname__}-{name}-{type(wrong).__name__}")


def wrong_values(parameter: inspect.Parameter, good: Any) -> Iterator[object]:
    said = str(parameter.annotation)
    if said in UNTYPED or parameter.name in SEEN_LATER or parameter.kind is parameter.VAR_KEYWORD:
        return
    yield Stranger()
    if "None" not in said:
        yield None
    if good not in (None, parameter.empty) and not callable(good) and not re.search("Callable|Selector", said):
        yield type(good)
    if said == "bool":
        yield from ("yes", 1)
    if re.match(r"Sequence|Iterable|tuple", said) and "| str" not in said and good:
        yield "abc"
        yield good[0]


@pytest.mark.parametrize(("make", "good", "name", "wrong"), list(wrong_arguments()))
def test_an_argument_of_a_wrong_kind_is_refused_by_its_name(
    make: Callable[..., object], good: Mapping[str, object], name: str, wrong: object
) -> None:
    parameters = inspect.signature(make).parameters
    if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
        made = partial(make, wrong)
    else:
        required = [each for each in good if each in parameters and parameters[each].default is inspect.Parameter.empty]
        made = partial(make, **{**{each: good[each] for each in required}, name: wrong})
    with pytest.raises((TypeError, ValueError, ringfence.PromptValidationError)) as caught:
        made()
    said = str(caught.value)
    assert name in said
    assert not re.search(r"has no attribute|object is not|not supported between|expected string|unhashable", said)


class Whole:
    """A whole number that is no int, as NumPy's are."""

    def __index__(self) -> int:
        return 3

    def __repr__(self) -> str:
        return "Whole(3)"


def test_a_whole_number_of_another_kind_is_told_how_to_become_one() -> None:
    @checked
    def taking(number: int | None = None) -> None: ...

    with pytest.raises(TypeError, match=r"number is a whole number or None, not Whole\(3\): write int\(...\)"):
        taking(cast("Any", Whole()))
    with pytest.raises(TypeError, match="not True$"):
        taking(True)


PACKAGES = (ringfence, ringfence.adapters, ringfence.prompt, ringfence_tools, ringfence_sandbox)
MADE_BY_AUTHORS = re.compile("(Section|Policy|Adapter|Filesystem|Sandbox|Store|Limits)$")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_section_policy_and_adapter_is_in_the_table(package: Any) -> None:
    known = {make.__qualname__.split("[")[0] for make, _ in GOOD}
    for name in filter(MADE_BY_AUTHORS.search, package.__all__):
        found = getattr(package, name)
        is_protocol = getattr(found, "_is_protocol", False)
        assert name in known or is_protocol or inspect.isabstract(found) or not inspect.signature(found).parameters
