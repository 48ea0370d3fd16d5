"""What a transaction asks of its participants, and in which order."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from running_calls import TRANSITIONS, current_call

from ringfence import Snapshotable
from ringfence.prompt import Prompt
from ringfence.resources import Binding, Scope
from ringfence.runtime import (
    CallInfo,
    CallLock,
    Change,
    Receipt,
    RollbackReport,
    Session,
    Step,
    Transactional,
    tool_transaction,
)


class Noting(Transactional):
    """Holds nothing and notes what it is asked for."""

    def __init__(self, name: str, said: list[str], *, durable: bool = False, rollback_only: bool = False) -> None:
        self.name, self.said, self.durable, self.rollback_only = name, said, durable, rollback_only
        self.lock = CallLock(name)

    def begin(self, call: CallInfo) -> Any:
        self.said.append(f"{self.name} begins")

    def changes(self, mark: Any) -> Sequence[Change]:
        self.said.append(f"{self.name} tells")
        return ()

    def commit(self, mark: Any, receipt: Receipt) -> Step | None:
        self.said.append(f"{self.name} commits")
        return None

    def rollback(self, mark: Any) -> RollbackReport:
        self.said.append(f"{self.name} goes back")
        return RollbackReport()


@pytest.mark.parametrize("method", ["begin", "changes", "commit", "rollback"])
def test_a_participant_that_lacks_a_method_cannot_be_made(method: str) -> None:
    forgetful = type("Forgetful", (Noting,), {method: getattr(Transactional, method)})  # as if Noting had not had it
    with pytest.raises(TypeError, match=f"Forgetful .*{method}"):
        forgetful("forgetful", [])


@dataclass(frozen=True)
class Holding:
    participants: tuple[Transactional, ...]


def test_the_page_draws_the_transitions_between_the_states_of_a_call() -> None:
    page = Path(__file__).parents[2].joinpath("docs/understand/transactions.md").read_text()
    drawn = set(re.findall(r"^ +(\w+) --> (\w+)", page, re.MULTILINE))
    assert drawn == {(one.name.lower(), after.name.lower()) for one, many in TRANSITIONS.items() for after in many}


def test_what_outlives_the_process_commits_first_and_what_is_only_undone_is_not_asked() -> None:
    said: list[str] = []
    memory, counter = Noting("memory", said), Noting("counter", said, rollback_only=True)
    disk = Noting("disk", said, durable=True)
    with tool_transaction(Session(), Holding((memory, counter, disk))):
        assert said == ["memory begins", "counter begins", "disk begins"]
        said.clear()
    assert [one for one in said if "commits" in one] == ["disk commits", "memory commits"]
    assert sorted(said[:2]) == ["disk tells", "memory tells"]


def test_what_joins_a_call_later_is_asked_as_if_it_had_been_there_from_the_beginning() -> None:
    said: list[str] = []
    with tool_transaction(Session(), Holding((Noting("memory", said),))):
        call = current_call()
        assert call is not None
        call.join(Noting("counter", said, rollback_only=True))
        call.join(Noting("disk", said, durable=True))
        said.clear()
    assert said == ["disk tells", "memory tells", "disk commits", "memory commits"]


def test_all_go_back_the_last_taken_first() -> None:
    said: list[str] = []
    ours = (Noting("memory", said), Noting("counter", said, rollback_only=True), Noting("disk", said, durable=True))
    with pytest.raises(ZeroDivisionError), tool_transaction(Session(), Holding(ours)):
        said.clear()
        raise ZeroDivisionError
    assert said == ["disk goes back", "counter goes back", "memory goes back"]


def test_what_a_rollback_says_is_in_the_notes_of_the_exception() -> None:
    class Doubting(Noting):
        def rollback(self, mark: Any) -> RollbackReport:
            return RollbackReport(("a.txt",), ("b.txt is gone",))

    with pytest.raises(ZeroDivisionError) as caught, tool_transaction(Session(), Holding((Doubting("disk", []),))):
        raise ZeroDivisionError
    assert caught.value.__notes__ == [
        "a.txt was changed by somebody else meanwhile, and stays as it is",
        "b.txt is gone",
    ]


def collected_at(line: int) -> bool:
    """Whether another transaction has so many lines; an abandoned one was collected before that one."""
    abandoned = [tool_transaction(Session())]
    copy_context().run(abandoned[0].__enter__)
    left = line

    def trace(frame: FrameType, kind: str, argument: object) -> Callable[..., Any]:
        nonlocal left
        left -= kind == "line"
        if left == 0:
            sys.settrace(None)
            abandoned.clear()
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        with tool_transaction(Session()):
            pass
    finally:
        sys.settrace(before)
    return not abandoned


def test_an_abandoned_transaction_may_be_collected_at_any_line_of_another_one() -> None:
    line = 1
    while collected_at(line):
        line += 1
    assert line > 100


class Counter(Snapshotable[int]):
    def snapshot(self, *, tag: str | None = None) -> int:
        return 0

    def restore(self, snapshot: int) -> None: ...


class Own:
    def close(self) -> None: ...


def work() -> None:
    """What a failing call does, with all that it needs made anew."""
    resources = {Counter: Counter(), Own: Binding(Own, lambda resolver: Own(), scope=Scope.TOOL_CALL)}
    prompt = Prompt(ns="tests", key="forks", sections=[]).bind(resources=resources)
    with (
        prompt.resources as live,
        suppress(ValueError),
        tool_transaction(Session(), live) as call,
        closing(prompt.resources.context.for_call(call)) as own,
    ):
        own.get(Own)
        raise ValueError


def forked_at(line: int) -> int | None:
    """How a child ended that was forked off while a thread was before that line of its work, of the lines with locks
    that all share; None where it has not so many."""
    left, there, go_on = line, threading.Event(), threading.Event()

    def trace(frame: FrameType, kind: str, argument: object) -> Callable[..., Any] | None:
        nonlocal left
        if frame.f_code.co_name not in {"seal", "rollback", "release", "participant_of", "meet", "_owned"}:
            return None
        left -= kind == "line"
        if left == 0:
            sys.settrace(None)
            there.set()
            go_on.wait(60)
        return trace

    def run() -> None:
        sys.settrace(trace)
        work()
        sys.settrace(None)
        there.set()

    thread = threading.Thread(target=run)
    thread.start()
    there.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        work()
        os._exit(0)
    go_on.set()
    thread.join()
    ended = os.waitpid(child, 0)[1]
    return ended if left <= 0 else None


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_what_a_thread_does_when_a_child_is_forked_off_does_not_hang_the_child() -> None:
    line = 1
    while (ended := forked_at(line)) is not None:
        assert ended == 0
        line += 1
    assert line > 30
