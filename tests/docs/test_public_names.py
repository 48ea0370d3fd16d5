"""What can be imported from where."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import ringfence

PROMISED = {
    "ringfence.prompt": "Prompt PromptTemplate RenderedPrompt Section MarkdownSection ToolsSection Tool ToolContext "
    "ToolHandler ToolResult ToolExample ToolRenderableResult ToolPolicy PolicyDecision PolicyState "
    "SequentialDependencyPolicy ReadBeforeWritePolicy SectionVisibility VisibilityExpansionRequired "
    "PromptValidationError PromptRenderError OutputParseError ToolValidationError PromptError",
    "ringfence.resources": "Binding ResourceRegistry Scope Snapshotable Closeable PostConstruct ResourceError "
    "UnboundResourceError CircularDependencyError DuplicateBindingError ProviderError",
    "ringfence.runtime": "Session InProcessDispatcher reducer Append Extend Replace Clear append_all replace_latest "
    "replace_latest_by upsert_by SlicePolicy ToolInvoked PromptRendered PromptExecuted Deadline "
    "DeadlineExceededError Budget BudgetTracker BudgetExceededError Heartbeat tool_transaction create_snapshot "
    "restore_snapshot CompositeSnapshot ReducerContext SliceOp Dispatcher",
    "ringfence.adapters": "ProviderAdapter PromptResponse PromptEvaluationError ToolExecutor ScriptedAdapter "
    "OpenAIAdapter AnthropicAdapter",
    "ringfence.filesystem": "Filesystem FilesystemSnapshot FileStat FileEntry GlobMatch GrepMatch ReadResult "
    "ReadBytesResult WriteResult InMemoryFilesystem DEFAULT_READ_LIMIT READ_ENTIRE_FILE MAX_GREP_MATCHES "
    "MAX_WRITE_LENGTH",
    "ringfence_tools": "VfsToolsSection HostMount PlanningToolsSection PlanningStrategy Plan PlanStep SetupPlan "
    "AddStep UpdateStep ReadPlan PodmanSandboxSection AstevalSection",
    "ringfence_sandbox": "HostFilesystem Workspace PodmanSandbox SandboxUnavailableError",
    "ringfence": "ToolExecutor Session Tool",
}


@pytest.mark.parametrize("module", [*PROMISED])
def test_the_promised_names_are_there_and_all_that_are_listed(module: str) -> None:
    home = import_module(module)
    assert len(set(home.__all__)) == len(home.__all__)
    assert [name for name in {*PROMISED[module].split(), *home.__all__} if getattr(home, name, None) is None] == []


@pytest.mark.parametrize("module", ["ringfence", "ringfence.adapters", "ringfence_sandbox", "ringfence_tools"])
def test_names_that_are_imported_when_they_are_asked_for_are_listed_before(module: str) -> None:
    code = f"import {module} as home; assert set(home.__all__) <= set(dir(home))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_itself_offers_few_names_each_from_its_layer() -> None:
    assert len(ringfence.__all__) <= 40
    assert ringfence.__all__ == sorted(ringfence.__all__)
    with pytest.raises(AttributeError, match="Sesion"):
        ringfence.Sesion  # noqa: B018


def test_importing_everything_of_the_core_loads_nothing_heavy() -> None:
    heavy = ("pydantic", "rich", "click", "fsspec", "podman", "dulwich", "openai", "anthropic", "mcp", "re2", "rpds")
    code = (
        "import sys, ringfence\n"
        "for name in ringfence.__all__: getattr(ringfence, name)\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
