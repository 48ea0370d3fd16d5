"""Ctrl-C at any instant of a call: everything before it or everything after it, and the next call works."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
from effort import SEED, amount

from ringfence import Snapshotable
from ringfence.adapters import ToolExecutor
from ringfence.filesystem import Filesystem, InMemoryFilesystem
from ringfence.prompt import MarkdownSection, Prompt, PromptTemplate, Tool, ToolContext, ToolResult
from ringfence.runtime import Receipt, Replace, Session, ToolInvoked, reducer, tool_transaction


@dataclass(frozen=True)
class Count:
    value: int

    def render(self) -> str:
        return str(self.value)


class World:
    def __init__(self, *resources: object, fail: bool = False, signal_in_handler: bool = False) -> None:
        self.session = Session()
        self.files = InMemoryFilesystem()
        self.files.write("count", "0")
        self.fail = fail

        def act(params: None, *, context: ToolContext) -> ToolResult[Count]:
            files = context.filesystem
            assert files is not None
            count = int(files.read("count").content) + 1
            files.write("count", str(count))
            if signal_in_handler:
                signal.raise_signal(signal.SIGINT)
            return ToolResult("no", success=False) if self.fail else ToolResult.ok(Count(count))

        tool = Tool[None, Count](name="act", description="Count.", handler=act)
        section = MarkdownSection(title="Work", key="work", template="Count.", tools=[tool])
        self.prompt = Prompt(PromptTemplate(ns="tests", key="interrupts", sections=[section]))
        self.prompt.bind(resources={Filesystem: self.files, **{type(one): one for one in resources}})

    def executor(self) -> ToolExecutor:
        return ToolExecutor(prompt=self.prompt, session=self.session)

    def consistent(self) -> int:
        """The files and the session tell the same; how many calls committed."""
        in_files = int(self.files.read("count").content)
        counts = self.session[Count].all()
        assert [count.value for count in counts] == list(range(1, in_files + 1))
        return in_files


class Signalling(Snapshotable[int]):
    """Gets a Ctrl-C while it is marked or restored."""

    def __init__(self, at: str) -> None:
        self.at = at
        self.value = 0
        self.restored = 0

    def snapshot(self, *, tag: str | None = None) -> int:
        if self.at == "snapshot":
            signal.raise_signal(signal.SIGINT)
        return self.value

    def restore(self, snapshot: int) -> None:
        if self.at == "restore":
            signal.raise_signal(signal.SIGINT)
            time.sleep(0)
        self.value = snapshot
        self.restored += 1


def test_an_interrupt_in_the_handler_rolls_back_and_propagates() -> None:
    world = World(signal_in_handler=True)
    with world.prompt.resources:
        with pytest.raises(KeyboardInterrupt):
            world.executor().call("act", {})
        assert world.consistent() == 0
        receipt = world.session[Receipt].latest()
        assert receipt is not None
        assert receipt.outcome == "interrupted"


def test_an_interrupt_during_the_rollback_waits_until_it_is_complete() -> None:
    signalling = Signalling("restore")
    world = World(signalling, fail=True)
    with world.prompt.resources:
        with pytest.raises(KeyboardInterrupt):
            world.executor().call("act", {})
        assert signalling.restored == 1
        assert world.consistent() == 0
        assert len(world.session[ToolInvoked].all()) == 1


def test_an_interrupt_while_the_marks_are_taken_comes_before_the_handler_and_leaves_no_trace() -> None:
    world = World(Signalling("snapshot"))
    with world.prompt.resources:
        with pytest.raises(KeyboardInterrupt):
            world.executor().call("act", {})
        assert world.consistent() == 0


def test_an_interrupt_after_the_commit_point_propagates_and_the_call_stays() -> None:
    world = World()
    world.session.dispatcher.subscribe(ToolInvoked, lambda event: signal.raise_signal(signal.SIGINT))
    with world.prompt.resources:
        with pytest.raises(KeyboardInterrupt):
            world.executor().call("act", {})
        assert world.consistent() == 1


def test_the_signal_handler_of_before_is_back_after_every_call() -> None:
    before = signal.getsignal(signal.SIGINT)
    world = World()
    with world.prompt.resources:
        world.executor().call("act", {})
        assert signal.getsignal(signal.SIGINT) is before
        world.fail = True
        world.executor().call("act", {})
        assert signal.getsignal(signal.SIGINT) is before


@dataclass(frozen=True)
class Add:
    value: int = 1


@dataclass(frozen=True)
class Total:
    value: int = 0

    @reducer(on=Add)
    def add(self, event: Add) -> Replace[Total]:
        return Replace((Total(self.value + event.value),))


def interrupted_at(line: int, work: Callable[[], object]) -> bool:
    """Whether so many lines were come to; the interrupt came before that one."""
    left = line

    def trace(frame: FrameType, kind: str, argument: object) -> Callable[..., Any]:
        nonlocal left
        left -= kind == "line"
        if not left:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    gc.disable()  # what else is left to be collected would be traced, too
    try:
        sys.settrace(trace)
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return False


def test_an_interrupt_before_any_line_of_a_dispatch_makes_no_later_event_vanish() -> None:
    session = Session()
    session.install(Total, initial=Total)
    session.dispatcher.subscribe(Add, lambda event: None)
    line = 1
    while interrupted_at(line, lambda: session.dispatch(Add())):
        before = session[Total].latest() or Total()
        session.dispatch(Add())  # where the one of before was, and so with its id
        assert session[Total].all() == (Total(before.value + 1),)
        line += 1
    assert line > 10


class Storm:
    """SIGINTs at random instants, of which the next `left` raise. (The others may be late: nothing waits for them.)"""

    left = 0  # no Event: an interrupt between two lines of its methods would leave its lock held

    def __call__(self, number: int, frame: object) -> None:
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt


@contextmanager
def storming(random_source: random.Random, main: int) -> Iterator[Storm]:
    storm, stop = Storm(), threading.Event()

    def run() -> None:
        while not stop.is_set():
            time.sleep(random_source.random() * 0.0001)
            if storm.left:
                signal.pthread_kill(main, signal.SIGINT)

    handling = signal.signal(signal.SIGINT, storm)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    # A call may come to its end without letting go of the interpreter, which the thread needs for its part.
    usual, reporting = sys.getswitchinterval(), sys.unraisablehook
    sys.setswitchinterval(1e-5)
    # An interrupt may land in a callback of the garbage collector or of a weak reference, where Python only reports it.
    sys.unraisablehook = lambda unraisable: None
    try:
        yield storm
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGINT, handling)
        sys.setswitchinterval(usual)
        sys.unraisablehook = reporting


def test_interrupts_at_random_instants_never_leave_anything_in_between() -> None:
    rounds = amount(prove=40_000, test=2_000)
    source = random.Random(SEED)
    world = World()
    interrupted = 0
    with world.prompt.resources, storming(source, threading.get_ident()) as storm:
        executor = world.executor()
        for number in range(rounds):
            world.fail = number % 3 == 0
            try:
                try:
                    storm.left = 2
                    executor.call("act", {})
                finally:
                    storm.left = 0
            except KeyboardInterrupt:  # the first, or the second in the line above
                interrupted += 1
            if number % 50 == 0:
                world.consistent()
    assert interrupted > rounds // 250
    committed = world.consistent()
    world.fail = False
    with world.prompt.resources:
        assert world.executor().call("act", {}).success, "no lock was left held"
    assert world.consistent() == committed + 1


def test_tool_transaction_rolls_back_on_whatever_leaves_its_block() -> None:
    world = World()
    with world.prompt.resources:

        def interrupted() -> None:
            with tool_transaction(world.session, world.prompt.resources.context):
                world.files.write("count", "7")
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert world.consistent() == 0
        with tool_transaction(world.session, world.prompt.resources.context):
            world.files.write("count", "1")
            world.session.dispatch(Count(1))
        assert world.consistent() == 1
