"""What is said of calls that had committed, when a call around them takes them back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_runs import ReceiptsFile, RunObserver, RunStats, Signals
from running_calls import sort_participants

from ringfence import (
    InMemoryFilesystem,
    MarkdownSection,
    Prompt,
    PromptEvaluationError,
    RestoreFailedError,
    Session,
    Tool,
    ToolContext,
    ToolExecutor,
    ToolResult,
)
from ringfence.filesystem import Filesystem
from ringfence.runtime import Receipt, ToolInvoked, Transaction, final_receipts, tool_transaction
from ringfence_tools import VfsToolsSection

Act = Callable[[ToolExecutor], ToolResult[None]]
NO: ToolResult[None] = ToolResult.error("no")
YES: ToolResult[None] = ToolResult("yes")


class World:
    """Files, and tools whose handlers make calls of their own."""

    def __init__(self, session: Session | None = None, **tools: Act) -> None:
        self.session = session or Session()
        self.files = InMemoryFilesystem()
        section = VfsToolsSection(session=self.session, filesystem=self.files)
        acting = MarkdownSection(
            title="Acting", template="Act.", tools=[self.tool(name, act) for name, act in tools.items()]
        )
        self.prompt = Prompt[None](ns="tests", key="taken", sections=[section, acting])
        self.prompt.resources.__enter__()
        self.executor = ToolExecutor(prompt=self.prompt, session=self.session)

    def tool(self, name: str, act: Act) -> Tool[None, None]:
        def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
            return act(self.executor)

        return Tool[None, None](name=name, description="Act.", handler=handler)

    def outcomes(self) -> list[tuple[str, str, str | None]]:
        """Of the receipts as they were told: tool, outcome, and which tool's call took it back."""
        receipts = self.session[Receipt].all()
        tools = {receipt.call_id: receipt.tool for receipt in receipts}
        taken = [(one, tools.get(one.rolled_back_by or "")) for one in receipts]
        return [(receipt.tool, receipt.outcome, by) for receipt, by in taken]


def write(path: str, after: ToolResult[None] = YES) -> Act:
    def act(call: ToolExecutor) -> ToolResult[None]:
        assert call.call("write_file", {"file_path": path, "content": "x"}).success
        return after

    return act


def calls(name: str, after: ToolResult[None]) -> Act:
    def act(call: ToolExecutor) -> ToolResult[None]:
        call.call(name, {})
        return after

    return act


def test_who_listens_to_events_knows_by_the_call_s_id_what_was_taken_back() -> None:
    world = World(outer=write("a", after=NO), fine=write("b"))
    kept: dict[str | None, str] = {}

    def invoked(event: ToolInvoked) -> None:
        if event.result.success:
            kept[event.call_id] = event.name

    def settle(receipt: Receipt) -> None:
        if receipt.rolled_back_by is not None:
            del kept[receipt.call_id]

    world.session.dispatcher.subscribe(ToolInvoked, invoked)
    world.session.dispatcher.subscribe(Receipt, settle)
    world.executor.call("outer", {})
    world.executor.call("fine", {})
    assert list(kept.values()) == ["write_file", "fine"]
    assert [world.files.exists(path) for path in ("a", "b")] == [False, True]


def test_the_outermost_call_that_failed_is_named_for_all_that_it_took_back() -> None:
    world = World(inner=write("a"), outer=calls("inner", NO))
    world.executor.call("outer", {})
    committed = [("write_file", "committed", None), ("inner", "committed", None)]
    assert world.outcomes() == [
        *committed,
        ("outer", "failed", None),
        ("write_file", "rolled_back", "outer"),
        ("inner", "rolled_back", "outer"),
    ]


def test_what_a_call_in_between_took_back_is_told_once() -> None:
    world = World(inner=write("a", NO), outer=calls("inner", NO))
    world.executor.call("outer", {})
    told = [("inner", "failed", None), ("write_file", "rolled_back", "inner"), ("outer", "failed", None)]
    assert world.outcomes() == [("write_file", "committed", None), *told]


def test_what_was_kept_in_the_end_is_not_told_again() -> None:
    world = World(inner=write("a"), outer=calls("inner", YES))
    world.executor.call("outer", {})
    with tool_transaction(world.session, world.prompt.resources):
        world.executor.call("inner", {})
    assert {outcome for _, outcome, _ in world.outcomes()} == {"committed"}


@pytest.mark.parametrize("deep", [False, True])
def test_a_transaction_of_ones_own_says_it_too(deep: bool) -> None:
    world = World(inner=write("a"))
    heard: list[Receipt] = []
    world.session.dispatcher.subscribe(Receipt, heard.append)
    with pytest.raises(ValueError, match="no"), tool_transaction(world.session, world.prompt.resources) as outer:
        if deep:
            with tool_transaction(world.session, world.prompt.resources):
                world.executor.call("inner", {})
        else:
            world.executor.call("inner", {})
        raise ValueError("no")
    assert [(one.outcome, one.rolled_back_by) for one in final_receipts(heard)] == [("rolled_back", outer.call_id)] * 2
    assert world.session[Receipt].all() == tuple(heard)


class Stuck(InMemoryFilesystem):
    """Cannot go back."""

    stuck = False

    def rollback(self, mark: Any) -> Any:
        if self.stuck:
            raise OSError("stuck")
        return super().rollback(mark)


def test_what_could_not_be_taken_back_whole_is_doubtful() -> None:
    world = World(inner=write("a"))
    stuck = Stuck()
    world.prompt.resources.__exit__(None, None, None)
    world.prompt.bind(resources={Filesystem: stuck}).resources.__enter__()
    with pytest.raises(RestoreFailedError), tool_transaction(world.session, world.prompt.resources):
        world.executor.call("inner", {})
        stuck.stuck = True
        raise ValueError("no")
    assert [receipt.outcome for receipt in final_receipts(world.session[Receipt].all())] == ["doubtful"] * 2
    stuck.stuck = False


def test_a_call_that_nobody_can_go_on_after_says_it_too() -> None:
    def act(call: ToolExecutor) -> ToolResult[None]:
        write("a")(call)
        raise PromptEvaluationError("no")

    world = World(outer=act)
    with pytest.raises(PromptEvaluationError, match="no"):
        world.executor.call("outer", {})
    assert world.outcomes()[-1] == ("write_file", "rolled_back", "outer")


def test_a_receipts_file_has_a_further_line_and_what_reads_it_joins_them(tmp_path: Path) -> None:
    world, tally, path = World(outer=write("a", NO)), RunStats(), tmp_path / "receipts.jsonl"
    file = ReceiptsFile(path)
    with Signals() as signals:
        telling = RunObserver(world.session, signals, tally, [file])
        world.executor.call("outer", {})
        write("b")(world.executor)
        telling.catch_up()
    file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["committed", "failed", "rolled_back", "committed"]
    assert lines[2]["receipt_id"] == lines[0]["receipt_id"]
    assert tally.outcomes == {"committed": 1, "failed": 1, "rolled_back": 1}


def test_a_call_that_commits_while_the_one_around_it_ends_says_it_itself() -> None:
    session = Session()
    outer = Transaction("1", "outer", None)
    outer.acquire(sort_participants((session,)))
    outer.begin()
    inner = Transaction("2", "inner", outer)
    inner.acquire(sort_participants(()))
    inner.begin()
    world = World()
    receipt = world.executor.execute("ls", {}).receipt
    inner.commit(receipt)
    outer.seal()
    outer.rollback()
    assert outer.rolled_back_receipts() == []
    [(_, again)] = inner.merge_into_parent((session, receipt))
    assert (again.outcome, again.rolled_back_by) == ("rolled_back", "1")
    inner.release()
    outer.release()
