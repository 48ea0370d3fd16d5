"""A model that has others work in candidates, and promotes one of them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ringfence import EffectPolicy, PromptValidationError, ToolPolicy
from ringfence.adapters import ScriptedAdapter
from ringfence.prompt import (
    Approval,
    ApprovalPolicy,
    MarkdownSection,
    PathPolicy,
    Prompt,
    PromptTemplate,
    Tool,
    ToolContext,
    ToolResult,
    ToolsSection,
)
from ringfence.runtime import Budget, BudgetTracker, Receipt, Session
from ringfence_sandbox import Workspace
from ringfence_tools import Delegate, DelegatedTask, DelegationSection, HistoryToolsSection, VfsToolsSection

Policies = Sequence[ToolPolicy | EffectPolicy]
DONE = {"text": "Done."}


@dataclass(frozen=True)
class Script:
    text: str


class World:
    """A lead on files on disk, and a writer who works in candidates, with a file tool and a program."""

    def __init__(self, root: Path, store: Path) -> None:
        self.root = root
        self.workspace = Workspace.open(root, store=store)
        self.session = Session()
        self.heard: list[Receipt] = []
        self.session.dispatcher.subscribe(Receipt, self.heard.append)

    def run(self, *turns: dict[str, Any], lead: Policies = (), programs: bool = False, **options: Any) -> list[str]:
        """Return what the tools answered, in order."""

        def writer(fork: Workspace, session: Session) -> PromptTemplate[Any]:
            task = MarkdownSection[DelegatedTask](title="Your task", key="task", template="Do this: $task")
            files = VfsToolsSection(session=session, filesystem=fork.filesystem)
            tools = [ToolsSection(title="Run", key="run", tools=[script_tool(fork.root)])] if programs else []
            return PromptTemplate(ns="tests", key="writer", sections=[task, files, *tools])

        sections = [
            DelegationSection([Delegate("writer", "Writes files.", writer)], candidates=True),
            HistoryToolsSection(session=self.session, workspace=lambda: nullcontext(self.workspace), candidates=True),
            VfsToolsSection(session=self.session, filesystem=self.workspace.filesystem),
        ]
        prompt = Prompt[None](ns="tests", key="lead", sections=sections, policies=lead)
        adapter = ScriptedAdapter(turns)
        adapter.evaluate(prompt, session=self.session, **options)
        return [one["content"] for one in adapter.requests[-1]["messages"] if one["role"] == "tool"]

    @property
    def files(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.root.iterdir() if path.is_file()}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.txt").write_text("one\n")
    world = World(root, tmp_path / "store")
    with world.workspace:
        yield world


def script_tool(root: str) -> Tool[Script, None]:
    def run(params: Script, *, context: ToolContext) -> ToolResult[None]:
        subprocess.run(["sh", "-ec", params.text], cwd=root, check=True)
        return ToolResult.ok(None)

    return Tool[Script, None](name="run", description="Run a script.", handler=run, opaque=True)


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"name": tool, "arguments": arguments}]}


def fork(name: str) -> dict[str, Any]:
    return call("fork_workspace", name=name)


def delegate(candidate: str) -> dict[str, Any]:
    return call("delegate", to="writer", task="Write.", candidate=candidate)


def write(path: str, content: str) -> dict[str, Any]:
    return call("write_file", file_path=path, content=content)


def test_each_child_works_in_a_candidate_and_the_lead_promotes_one(world: World) -> None:
    answers = world.run(
        fork("a"),
        fork("b"),
        delegate("a"),
        write("new.txt", "of a\n"),
        {"text": "A new file."},
        delegate("b"),
        write("new.txt", "of b\n"),
        {"text": "Another one."},
        call("promote", name="b"),
        call("discard", name="a"),
        DONE,
    )
    assert world.files == {"a.txt": "one\n", "new.txt": "of b\n"}
    assert "A new file." in answers[2]
    assert "changed in the candidate a: new.txt" in answers[2]
    assert "+of a" in answers[2]
    assert [record.name for record in world.workspace.forks()] == ["b"]
    [step] = world.workspace.steps()
    assert (step.tool, step.session_id) == ("promote", str(world.session.session_id))
    outcomes = [(one.tool, one.outcome, len(one.changes)) for one in world.session[Receipt].all()]
    assert outcomes == [
        ("fork_workspace", "committed", 0),
        ("fork_workspace", "committed", 0),
        ("delegate", "committed", 0),
        ("delegate", "committed", 0),
        ("promote", "committed", 1),
        ("discard", "committed", 0),
    ]
    heard = [(one.tool, one.session_id == str(world.session.session_id)) for one in world.heard]
    assert heard.count(("write_file", False)) == 2  # observers have the receipts of the children, too


def test_a_promotion_is_undone_by_the_model(world: World) -> None:
    world.run(fork("a"), delegate("a"), write("new.txt", "x\n"), DONE, call("promote", name="a"), call("undo"), DONE)
    assert world.files == {"a.txt": "one\n"}
    assert [step.tool for step in world.workspace.steps()] == ["promote", "undo"]


@pytest.mark.parametrize("programs", [False, True])
def test_a_child_that_fails_leaves_the_source_and_its_candidate_as_they_were(world: World, programs: bool) -> None:
    works = [write("new.txt", "x\n")] + [call("run", text="echo y > other.txt")] * programs
    answers = world.run(
        fork("a"),
        delegate("a"),
        *works,
        {"text": "No.", "ended": "refused"},
        call("promote", name="a"),
        DONE,
        programs=programs,
    )
    assert "what it did is undone" in answers[1]
    assert "nothing to promote" in answers[2]
    assert world.files == {"a.txt": "one\n"}
    with Workspace.open(world.workspace.fork_named("a").root, store=world.workspace.fork_named("a").store) as made:
        assert made.steps() == []


def test_what_a_child_s_programs_do_is_a_step_of_the_candidate_and_an_edit_of_a_person_here_is_none_of_it(
    world: World,
) -> None:
    edit = f"echo edited > {world.root}/person.txt; echo y > other.txt"
    answers = world.run(
        fork("a"), delegate("a"), call("run", text=edit), DONE, call("promote", name="a"), DONE, programs=True
    )
    assert "other.txt" in answers[1]
    assert "person.txt" not in answers[1]
    assert world.files == {"a.txt": "one\n", "person.txt": "edited\n", "other.txt": "y\n"}
    [promoted] = world.workspace.steps()
    assert promoted.paths == ("other.txt",)


def test_a_second_child_goes_on_in_the_same_candidate(world: World) -> None:
    world.run(
        fork("a"),
        delegate("a"),
        write("one.txt", "1\n"),
        DONE,
        delegate("a"),
        write("two.txt", "2\n"),
        DONE,
        call("promote", name="a"),
        DONE,
    )
    assert sorted(world.files) == ["a.txt", "one.txt", "two.txt"]


def test_policies_of_the_lead_judge_a_promotion(world: World) -> None:
    denied = PathPolicy(deny=["new.txt"])
    world.run(fork("a"), delegate("a"), write("new.txt", "x\n"), DONE, call("promote", name="a"), DONE, lead=[denied])
    assert world.files == {"a.txt": "one\n"}
    assert [one.outcome for one in world.session[Receipt].all() if one.tool == "promote"] == ["denied"]


def test_a_conflict_changes_nothing_until_the_rest_is_asked_for(world: World) -> None:
    read = call("read_file", file_path="a.txt")
    answers = world.run(
        fork("a"),
        delegate("a"),
        read,
        write("a.txt", "of the candidate\n"),
        write("new.txt", "x\n"),
        DONE,
        read,
        write("a.txt", "of the lead\n"),
        call("promote", name="a"),
        call("promote", name="a", on_conflict="keep", dry_run=True),
        call("promote", name="a", on_conflict="keep"),
        DONE,
    )
    refused, tried, kept = answers[-3:]
    assert "nothing was changed" in refused
    assert "a.txt" in refused
    assert "1 path would be promoted, 0 kept, 1 conflict" in tried
    assert "1 path promoted, 0 kept, 1 conflict" in kept
    assert world.files == {"a.txt": "of the lead\n", "new.txt": "x\n"}


def test_a_model_discards_only_what_it_has_made_and_a_person_is_asked_before(world: World) -> None:
    asked: list[str] = []

    def ask(request: Any) -> Approval:
        asked.append(request.tool)
        return Approval(True)

    with world.workspace.fork("of-a-person"):
        pass
    answers = world.run(
        call("discard", name="of-a-person"), fork("a"), call("discard", name="a"), DONE, lead=[ApprovalPolicy(ask)]
    )
    assert "not of your making" in answers[0]
    assert [record.name for record in world.workspace.forks()] == ["of-a-person"]
    assert asked == ["discard", "discard"]


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (delegate("none"), "no fork 'none'"),
        (call("promote", name="none"), "no fork 'none'"),
        (fork("../a"), "cannot be the name"),
        (call("delegate", to="nobody", task="x", candidate="a"), "there are: writer"),
    ],
)
def test_what_cannot_be_done_is_an_answer(world: World, turn: dict[str, Any], said: str) -> None:
    assert said in world.run(turn, DONE)[0]


def test_a_name_is_taken_once(world: World) -> None:
    assert "choose another name" in world.run(fork("a"), fork("a"), DONE)[1]


def test_a_child_gets_a_share_of_the_tokens_that_are_left(world: World) -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=1000))
    first = {**delegate("a"), "usage": {"input_tokens": 200}}
    works = [{**write(name, "x\n"), "usage": {"input_tokens": 300}} for name in ("b.txt", "c.txt")]
    answers = world.run(fork("a"), first, *works, DONE, budget_tracker=tracker)
    assert "budget" in answers[-1]


def test_without_the_tools_for_candidates_nothing_is_delegated() -> None:
    def writer(fork: Workspace, session: Session) -> PromptTemplate[Any]:
        raise AssertionError

    section = DelegationSection([Delegate("writer", "Writes.", writer)], candidates=True)
    adapter = ScriptedAdapter([delegate("a"), DONE])
    adapter.evaluate(Prompt[None](ns="tests", key="lead", sections=[section]), session=Session())
    assert "HistoryToolsSection(candidates=True)" in adapter.requests[-1]["messages"][-1]["content"]


def test_the_template_of_a_candidate_s_child_is_a_function_and_no_other_one_is() -> None:
    task = MarkdownSection[DelegatedTask](title="Your task", key="task", template="$task")
    template = PromptTemplate[Any](ns="tests", key="writer", sections=[task])
    with pytest.raises(PromptValidationError, match="a function"):
        DelegationSection([Delegate("writer", "Writes.", template)], candidates=True)
    with pytest.raises(PromptValidationError, match="a PromptTemplate"):
        DelegationSection([Delegate("writer", "Writes.", lambda fork, session: template)])


def test_a_section_has_the_tools_for_candidates_where_they_are_enabled_and_it_may_change_files(world: World) -> None:
    def names(**options: bool) -> set[str]:
        section = HistoryToolsSection(session=world.session, workspace=lambda: nullcontext(world.workspace), **options)
        return {tool.name for tool in section.tools()}

    own = {"fork_workspace", "promote", "discard"}
    assert names(candidates=True) - names() == own
    assert not own & names(candidates=True, read_only=True)
