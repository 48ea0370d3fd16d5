"""Ways in which a call was once left half done, its locks held, or its policy passed by."""

from __future__ import annotations

import asyncio
import contextvars
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from running_calls import current_call

from ringfence import Snapshotable
from ringfence.adapters import PromptEvaluationError, ToolExecutor
from ringfence.filesystem import Filesystem, InMemoryFilesystem
from ringfence.prompt import (
    MarkdownSection,
    PolicyDecision,
    Prompt,
    ReadBeforeWritePolicy,
    Tool,
    ToolContext,
    ToolResult,
)
from ringfence.resources import Binding, Scope
from ringfence.runtime import Receipt, Session, SlicePolicy, tool_transaction

if TYPE_CHECKING:
    from ringfence_sandbox import Workspace


@dataclass(frozen=True)
class Note:
    text: str = "x"


class Evil(Exception):
    def __str__(self) -> str:
        raise Evil


Handler = Callable[..., Any]


class World:
    """One session, one filesystem, and tools made of functions of the context."""

    def __init__(
        self,
        *,
        policies: tuple[Any, ...] = (),
        resources: dict[type, Any] | None = None,
        files: Any = None,
        **tools: Handler,
    ):
        self.session, self.files = Session(), files or InMemoryFilesystem()
        self.files.write("kept.txt", "before")

        def tool(name: str, act: Handler) -> Tool[Note, Note]:
            def handler(params: Note, *, context: ToolContext) -> ToolResult[Note]:
                return act(context)

            return Tool[Note, Note](name=name, description="Act.", handler=handler)

        section = MarkdownSection(
            title="T", template="x", tools=[tool(n, a) for n, a in tools.items()], policies=policies
        )
        self.prompt = Prompt(ns="tests", key="attacks", sections=[section])
        self.prompt.bind(resources={Filesystem: self.files, **(resources or {})})

    @contextmanager
    def open(self) -> Iterator[ToolExecutor]:
        with self.prompt.resources:
            yield ToolExecutor(prompt=self.prompt, session=self.session)

    def is_free(self) -> None:
        """Nothing is held, and no call is current."""
        assert (self.files.lock.holder, self.session.lock.holder, current_call()) == (None, None, None)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def is_untouched(self) -> None:
        self.is_free()
        assert self.files.read("kept.txt").content == "before"
        assert self.session[Note].all() == ()


def change(context: ToolContext, content: str = "after") -> None:
    assert context.filesystem is not None
    context.filesystem.write("kept.txt", content)
    context.session.dispatch(Note(content))


def evil(*args: Any, **kwargs: Any) -> Any:
    raise Evil


def change_and_evil(context: ToolContext) -> Any:
    change(context)
    raise Evil


class Policy:
    name = "policy"

    def __init__(self, check: Handler = PolicyDecision.allow, after: Handler = lambda: None) -> None:
        self._check, self._after = check, after

    def check(self, tool: Any, params: Any, *, context: ToolContext) -> Any:
        return self._check()

    def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
        self._after()


def ok(context: ToolContext) -> ToolResult[Note]:
    change(context)
    return ToolResult.ok(Note())


@pytest.mark.parametrize(
    "world",
    [
        World(act=change_and_evil),
        World(act=ok, policies=(Policy(check=evil),)),
        World(act=ok, policies=(Policy(after=evil),)),
        World(act=ok, policies=(Policy(check=lambda: PolicyDecision(allowed=False, reason=Evil())),)),  # pyright: ignore[reportArgumentType]
    ],
    ids=["handler", "check", "on_result", "reason"],
)
def test_an_exception_without_a_text_is_told_all_the_same(world: World) -> None:
    with world.open() as executor:
        assert not executor.call("act", {}).success
        world.is_untouched()
        assert len(world.session[Receipt].all()) == 1


def test_a_nested_call_that_outlives_its_handler_is_taken_back_and_holds_nothing() -> None:
    inside, go_on, outcome = threading.Event(), threading.Event(), list[ToolResult[Any]]()

    def slow(context: ToolContext) -> ToolResult[Note]:
        change(context, "half")
        inside.set()
        go_on.wait(10)
        try:
            change(context, "late")
        except RuntimeError:
            return ToolResult.error("refused")
        return ToolResult.ok(Note())

    def act(context: ToolContext) -> ToolResult[Note]:
        copied = contextvars.copy_context()
        thread = threading.Thread(target=lambda: outcome.append(copied.run(executor.call, "slow", {})))
        thread.start()
        threads.append(thread)
        inside.wait(10)
        return ToolResult.ok(Note())

    threads: list[threading.Thread] = []
    world = World(act=act, slow=slow)
    with world.open() as executor:
        result = executor.call("act", {})
        assert "still running" in result.message
        world.is_untouched()
        go_on.set()
        threads[0].join(10)
        assert not outcome[0].success
        world.is_untouched()


def test_a_nested_call_that_ends_while_its_outer_call_rolls_back_lets_nobody_in_before_the_end_of_that() -> None:
    class Restoring(Snapshotable[None]):
        def snapshot(self, *, tag: str | None = None) -> None: ...

        def restore(self, snapshot: None) -> None:  # the first to go back, and the files after it
            go_on.set()
            threads[0].join(0.3)  # it waits for us at the end, but lets go of the files before that
            threads.append(threading.Thread(target=lambda: world.files.write("theirs.txt", "x")))
            threads[1].start()
            threads[1].join(0.3)

    def slow(context: ToolContext) -> ToolResult[Note]:
        inside.set()
        go_on.wait(10)
        return ToolResult.ok(Note())

    def act(context: ToolContext) -> ToolResult[Note]:
        threads.append(threading.Thread(target=contextvars.copy_context().run, args=(executor.call, "slow", {})))
        threads[0].start()
        inside.wait(10)
        return ToolResult.error("no")

    inside, go_on, threads = threading.Event(), threading.Event(), list[threading.Thread]()
    world = World(act=act, slow=slow, resources={Restoring: Restoring()})
    with world.open() as executor:
        executor.call("act", {})
        threads[1].join(10)
    assert world.files.read("theirs.txt").content == "x"


class Once(Snapshotable[int]):
    """Fails to restore the first time."""

    def __init__(self) -> None:
        self.value = 0
        self.failures = 1

    def snapshot(self, *, tag: str | None = None) -> int:
        return self.value

    def restore(self, snapshot: int) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("not now")
        self.value = snapshot


def test_an_inner_rollback_that_failed_dooms_the_outer_call_even_where_its_handler_goes_on() -> None:
    once = Once()

    def inner(context: ToolContext) -> ToolResult[Note]:
        once.value = 1
        return ToolResult.error("no")

    def act(context: ToolContext) -> ToolResult[Note]:
        with pytest.raises(PromptEvaluationError):
            executor.call("inner", {})
        once.value = 2
        return ToolResult.ok(Note())

    world = World(act=act, inner=inner, resources={Once: once})
    with world.open() as executor:
        assert not executor.call("act", {}).success
        assert once.value == 0
        world.is_untouched()


def test_a_doubtful_state_is_not_forgotten_when_the_resources_are_left() -> None:
    once = Once()
    once.failures = 2

    def act(context: ToolContext) -> ToolResult[Note]:
        context.resources.get(Once).value += 1
        return ToolResult.ok(Note()) if good else ToolResult.error("no")

    good = False
    world = World(act=act, resources={Once: once})
    with world.open() as executor, pytest.raises(PromptEvaluationError):
        executor.call("act", {})
    good = True
    with world.open() as executor, pytest.raises(PromptEvaluationError):
        executor.call("act", {})
    with world.open() as executor:
        assert executor.call("act", {}).success
    assert once.value == 1


def test_an_abandoned_async_generator_lets_go_of_everything() -> None:
    world = World(act=ok)

    async def stream() -> Any:
        with tool_transaction(world.session, world.prompt.resources):
            world.files.write("kept.txt", "half")
            yield world.files.read("kept.txt").content

    async def main() -> None:
        async for seen in stream():
            assert seen == "half"
            break

    with world.open():
        asyncio.run(main())
        world.is_untouched()


def test_two_threads_that_meet_a_participant_at_once_do_not_wait_for_each_other() -> None:
    def act(context: ToolContext) -> ToolResult[Note]:
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(other.write, "a.txt", "x")),
            threading.Thread(target=contextvars.copy_context().run, args=(context.resources.get, Once)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
        return ToolResult.ok(Note())

    def build(resolver: Any) -> Once:
        other.write("b.txt", "y")
        return Once()

    for _ in range(20):
        other = InMemoryFilesystem()
        world = World(act=act, resources={Once: Binding(Once, build)})
        with world.open() as executor:
            assert executor.call("act", {}).success
        assert other.lock.holder is None


def test_what_a_closing_resource_changes_goes_back_too() -> None:
    class Flushing:
        def __init__(self, files: Filesystem) -> None:
            self.files = files

        def close(self) -> None:
            self.files.write("kept.txt", "flushed")

    def act(context: ToolContext) -> ToolResult[Note]:
        context.resources.get(Flushing)
        raise ValueError("no")

    binding = Binding(Flushing, lambda r: Flushing(r.get(Filesystem)), scope=Scope.TOOL_CALL)
    world = World(act=act, resources={Flushing: binding})
    with world.open() as executor:
        executor.call("act", {})
        world.is_untouched()


def test_a_closing_resource_that_exits_leaves_a_receipt() -> None:
    class Exiting:
        def close(self) -> None:
            raise SystemExit(3)

    def act(context: ToolContext) -> ToolResult[Note]:
        context.resources.get(Exiting)
        raise ValueError("no")

    world = World(act=act, resources={Exiting: Binding(Exiting, lambda r: Exiting(), scope=Scope.TOOL_CALL)})
    with world.open() as executor:
        with pytest.raises(SystemExit):
            executor.call("act", {})
        world.is_untouched()
        assert len(world.session[Receipt].all()) == 1


@dataclass(frozen=True)
class At:
    file_path: str


def test_writes_may_be_one_path_and_a_path_is_not_its_letters() -> None:
    def stamp(params: At, *, context: ToolContext) -> ToolResult[None]:
        assert context.filesystem is not None
        context.filesystem.write(params.file_path, "stamped")
        return ToolResult("done")

    files = InMemoryFilesystem()
    files.write("Makefile", "all:")
    for writes, said in ((lambda p: p.file_path, "has not been read"), (lambda p: [3], "could not decide")):
        tool = Tool[At, None](name="stamp", description="Stamp.", handler=stamp, writes=writes)  # pyright: ignore[reportArgumentType]
        section = MarkdownSection(title="T", template="x", tools=[tool], policies=[ReadBeforeWritePolicy()])
        prompt = Prompt(ns="tests", key="writes", sections=[section]).bind(resources={Filesystem: files})
        with prompt.resources:
            executor = ToolExecutor(prompt=prompt, session=Session())
            assert said in executor.call("stamp", {"file_path": "Makefile"}).message
        assert files.read("Makefile").content == "all:"


class Liar:
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return ToolResult


@pytest.mark.parametrize("result", [Liar(), ToolResult(message=None), ToolResult.error(ValueError("x"))])  # type: ignore[arg-type]
def test_a_result_that_is_none_fails_the_call(result: Any) -> None:
    def act(context: ToolContext) -> Any:
        change(context)
        return result

    world = World(act=act)
    with world.open() as executor:
        assert "ToolResult" in executor.call("act", {}).message
        world.is_untouched()


@pytest.mark.parametrize("allowed", ["deny", NotImplemented, object(), 1, PolicyDecision.deny("no")])
def test_a_decision_that_is_neither_yes_nor_no_denies(allowed: Any) -> None:
    world = World(act=ok, policies=(Policy(check=lambda: PolicyDecision(allowed=allowed)),))
    with world.open() as executor:
        assert "could not decide" in executor.call("act", {}).message
        world.is_untouched()


def test_what_the_model_reads_can_be_sent() -> None:
    world = World(act=lambda context: ToolResult.ok(Note("\ud800"), message="caf\udce9"))
    with world.open() as executor:
        assert executor.execute("act", {}).text.encode("utf-8").startswith(b"caf")


def test_the_receipt_has_the_params_as_they_came() -> None:
    @dataclass
    class Loose:
        text: str = "as it came"

    def act(params: Loose, *, context: ToolContext) -> ToolResult[None]:
        params.text = "changed"
        return ToolResult("done")

    tool = Tool[Loose, None](name="act", description="Act.", handler=act)
    prompt, session = (
        Prompt(ns="t", key="t", sections=[MarkdownSection(title="T", template="x", tools=[tool])]),
        Session(),
    )
    with prompt.resources:
        ToolExecutor(prompt=prompt, session=session).call("act", {})
    receipt = session[Receipt].latest()
    assert receipt is not None
    assert json.loads(json.dumps(receipt.to_json()))["params"] == {"text": "as it came"}


def test_two_filesystems_in_one_call_are_told_apart() -> None:
    other = InMemoryFilesystem()
    other.write("kept.txt", "other")

    def act(context: ToolContext) -> ToolResult[Note]:
        assert context.filesystem is not None
        context.filesystem.read("kept.txt")
        other.read("kept.txt")
        other.write("kept.txt", "changed")
        return ToolResult.ok(Note())

    changes: list[Any] = []

    class Watching(Policy):
        def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
            changes.extend(context.changes)

    world = World(act=act, policies=(Watching(),))
    with world.open() as executor:
        receipt = executor.execute("act", {}).receipt
    assert changes == []
    assert len(receipt.read or {}) == 2


def test_a_handler_that_swallows_one_interrupt_can_be_stopped_by_the_next() -> None:
    def act(context: ToolContext) -> ToolResult[Note]:
        change(context)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            time.sleep(1.05)
        signal.raise_signal(signal.SIGINT)
        return ToolResult.ok(Note())

    world = World(act=act)
    with world.open() as executor:
        with pytest.raises(KeyboardInterrupt):
            executor.call("act", {})
        world.is_untouched()


def test_interrupts_of_many_writes_never_leave_the_filesystem_locked() -> None:
    files, main = InMemoryFilesystem(), threading.get_ident()
    stop = threading.Event()
    ready = False

    def storm() -> None:
        while not stop.wait(0.001):
            signal.pthread_kill(main, signal.SIGINT)

    def arrived(number: int, frame: object) -> None:
        nonlocal ready
        if ready:  # not in the lines of this test itself
            ready = False
            raise KeyboardInterrupt

    def write_until_one_arrives() -> None:  # not in the `try`: its jumps back are outside of it from Python 3.12 on
        while ready:
            files.write("a.txt", "x")

    usual, reporting = signal.signal(signal.SIGINT, arrived), sys.unraisablehook
    # One may land in a callback of the garbage collector, where Python only reports it.
    sys.unraisablehook = lambda unraisable: None
    thread = threading.Thread(target=storm)
    thread.start()
    hits = 0
    while hits < 200:
        try:
            ready = True
            write_until_one_arrives()
        except KeyboardInterrupt:
            hits += 1
    stop.set()
    thread.join()
    sys.unraisablehook = reporting
    signal.signal(signal.SIGINT, usual)
    done = threading.Event()
    threading.Thread(target=lambda: (files.write("b.txt", "y"), done.set()), daemon=True).start()
    assert done.wait(5)


def test_a_log_slice_is_told_of_the_call_whatever_its_reducer_does() -> None:
    world = World(act=ok)
    world.session[Note].register(Receipt, evil, policy=SlicePolicy.LOG)
    with world.open() as executor:
        assert executor.call("act", {}).success
        world.is_free()


def test_a_failing_call_cannot_take_anything_out_of_the_logs() -> None:
    def act(context: ToolContext) -> ToolResult[Note]:
        for emptying in (context.session.reset, context.session[Receipt].clear):
            with pytest.raises(RuntimeError, match="only added to"):
                emptying()
        return ToolResult.error("no")

    world = World(act=act, first=ok)
    with world.open() as executor:
        executor.call("first", {})
        executor.call("act", {})
        assert len(world.session[Receipt].all()) == 2


@pytest.mark.parametrize("allow", [True, False])
def test_a_policy_that_changes_the_session_while_it_decides_denies_and_leaves_no_trace(allow: bool) -> None:
    class Meddling(Policy):
        def check(self, tool: Any, params: Any, *, context: ToolContext) -> Any:
            context.session.dispatch(Note("meddled"))
            return PolicyDecision(allow)

    world = World(act=ok, policies=(Meddling(),))
    with world.open() as executor:
        assert "could not decide" in executor.call("act", {}).message
        world.is_untouched()


@pytest.mark.parametrize("end", [ValueError("no"), KeyboardInterrupt()])
def test_the_receipt_of_a_call_that_raised_says_what_it_had_changed(end: BaseException) -> None:
    def act(context: ToolContext) -> ToolResult[Note]:
        change(context)
        raise end

    world = World(act=act)
    with world.open() as executor:
        with suppress(KeyboardInterrupt):
            executor.call("act", {})
        receipt = world.session[Receipt].latest()
        assert receipt is not None
        assert [one.path for one in receipt.changes] == ["kept.txt"]
        world.is_untouched()


@dataclass(frozen=True)
class Other:
    value: int = 1


@pytest.mark.parametrize(
    ("declared", "value", "fits"),
    [
        (Note, Note("a"), True),
        (Note, None, True),
        (Note, Other(), False),
        (Note, "text", False),
        (Note, {"text": "a"}, False),
        (Note, [Note("a")], False),
        (None, None, True),
        (None, "text", False),
        (None, Other(), False),
        (list[Note], [Note("a")], True),
        (list[Note], (), True),
        (list[Note], None, True),
        (list[Note], [Note("a"), Other()], False),
        (list[Note], ["a"], False),
        (list[Note], "text", False),
        (list[Note], Note("a"), False),
    ],
    ids=repr,
)
def test_a_value_of_another_type_than_declared_fails_the_call(declared: Any, value: Any, fits: bool) -> None:
    def act(params: None, *, context: ToolContext) -> ToolResult[Any]:
        return ToolResult.ok(value)

    tool = Tool[None, declared](name="act", description="Act.", handler=act)
    prompt = Prompt[None](ns="t", key="k", sections=[MarkdownSection(title="T", template="x", tools=[tool])])
    with prompt.resources:
        result = ToolExecutor(prompt=prompt, session=Session()).call("act", {})
    assert result.success is fits
    assert fits or "another type than it declares" in result.message


def in_copied_context(act: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=contextvars.copy_context().run, args=(act,))
    thread.start()
    return thread


def test_a_second_nested_call_that_was_waiting_when_its_handler_ended_gets_nothing() -> None:
    inside, go_on, threads = threading.Event(), threading.Event(), list[threading.Thread]()

    def slow(context: ToolContext) -> ToolResult[Note]:
        inside.set()
        go_on.wait(10)
        return ToolResult.ok(Note())

    def act(context: ToolContext) -> ToolResult[Note]:
        threads.append(in_copied_context(lambda: executor.call("slow", {})))
        inside.wait(10)
        threads.append(in_copied_context(lambda: executor.call("quick", {})))
        time.sleep(0.05)  # for `quick` to wait for what `slow` holds
        return ToolResult.ok(Note())

    world = World(act=act, slow=slow, quick=ok)
    with world.open() as executor:
        assert not executor.call("act", {}).success
        go_on.set()
        for thread in threads:
            thread.join(10)
        world.is_untouched()
        assert executor.call("quick", {}).success


def test_a_thread_that_goes_on_calling_after_its_handler_has_ended_changes_nothing() -> None:
    inside, go_on, threads, results = threading.Event(), threading.Event(), list[threading.Thread](), list[bool]()

    def slow(context: ToolContext) -> ToolResult[Note]:
        inside.set()
        go_on.wait(10)
        return ToolResult.ok(Note())

    def calls() -> None:
        results.extend(executor.call(name, {}).success for name in ("slow", "write", "write"))

    def act(context: ToolContext) -> ToolResult[Note]:
        threads.append(in_copied_context(calls))
        inside.wait(10)
        return ToolResult.error("no")

    world = World(act=act, slow=slow, write=lambda context: change(context, "late") or ToolResult.ok(Note()))
    with world.open() as executor:
        executor.call("act", {})
        go_on.set()
        threads[0].join(10)
        assert results == [False, False, False]
        world.is_untouched()


def test_a_nested_call_that_begins_after_the_outer_rollback_holds_nothing(workspace: Workspace) -> None:
    late, deciding, go_on, threads = threading.Event(), threading.Event(), threading.Event(), list[threading.Thread]()

    def decide() -> PolicyDecision:
        if late.is_set():
            deciding.set()
            go_on.wait(10)
        return PolicyDecision.allow()

    def act(context: ToolContext) -> ToolResult[Note]:
        late.set()
        threads.append(in_copied_context(lambda: executor.call("write", {})))
        deciding.wait(10)
        return ToolResult.ok(Note())

    policies, files = (Policy(check=decide),), workspace.filesystem
    world = World(act=act, write=ok, policies=policies, files=files)
    with world.open() as executor:
        assert not executor.call("act", {}).success
        go_on.set()
        threads[0].join(10)
        world.is_untouched()
        assert executor.call("write", {}).success
    assert [step.paths for step in workspace.steps()] == [("kept.txt",)]
    workspace.close()
    assert (Path(workspace.root) / "kept.txt").read_text() == "after"


def test_a_nested_call_that_goes_back_while_the_one_around_it_does_takes_nothing_of_the_next_one() -> None:
    class Slow(Once):
        def restore(self, snapshot: int) -> None:
            going_back.set()
            go_on.wait(0.5)

    going_back, go_on, threads = threading.Event(), threading.Event(), list[threading.Thread]()

    def fail(context: ToolContext) -> ToolResult[Note]:
        change(context)
        return ToolResult.error("no")

    def act(context: ToolContext) -> ToolResult[Note]:
        threads.append(in_copied_context(lambda: executor.call("fail", {})))
        going_back.wait(10)
        return ToolResult.error("no")

    world = World(act=act, fail=fail, write=ok, resources={Once: Slow()})
    with world.open() as executor:
        assert not executor.call("act", {}).success
        assert executor.call("write", {}).success
        go_on.set()
        threads[0].join(10)
    assert (world.files.read("kept.txt").content, len(world.session[Note].all())) == ("after", 2)


def test_a_nested_call_that_ends_late_reports_no_later_changes(workspace: Workspace) -> None:
    inside, go_on, threads = threading.Event(), threading.Event(), list[threading.Thread]()

    def slow(context: ToolContext) -> ToolResult[Note]:
        inside.set()
        go_on.wait(10)
        return ToolResult.error("no")

    def act(context: ToolContext) -> ToolResult[Note]:
        threads.append(in_copied_context(lambda: executor.call("slow", {})))
        inside.wait(10)
        return ToolResult.error("no")

    def write(context: ToolContext) -> ToolResult[Note]:
        change(context)
        go_on.set()
        threads[0].join(10)
        return ToolResult.ok(Note())

    world = World(act=act, slow=slow, write=write, files=workspace.filesystem)
    with world.open() as executor:
        executor.call("act", {})
        executor.call("write", {})
    told = [(receipt.tool, [change.path for change in receipt.changes]) for receipt in world.session[Receipt].all()]
    assert told == [("act", []), ("slow", []), ("write", ["kept.txt"])]


def test_transactions_of_one_thread_that_end_in_the_wrong_order_leave_it_free() -> None:
    world = World(act=ok)
    with world.open() as executor:
        outer, inner = tool_transaction(world.session), tool_transaction(world.session)
        outer.__enter__()
        inner.__enter__()
        with pytest.raises(RuntimeError, match="still running"):
            outer.__exit__(None, None, None)
        with pytest.raises(RuntimeError, match="has ended"):
            inner.__exit__(None, None, None)
        assert executor.call("act", {}).success
        world.is_free()


def test_a_write_that_waited_for_a_nested_call_does_not_come_after_the_end() -> None:
    inside, go_on, threads, written = threading.Event(), threading.Event(), list[threading.Thread](), list[str]()

    def slow(context: ToolContext) -> ToolResult[Note]:
        inside.set()
        go_on.wait(10)
        return ToolResult.ok(Note())

    def late(files: Filesystem) -> None:
        try:
            files.write("kept.txt", "late")
            written.append("late")
        except RuntimeError:
            written.append("refused")

    def act(context: ToolContext) -> ToolResult[Note]:
        files = context.filesystem
        assert files is not None
        threads.append(in_copied_context(lambda: executor.call("slow", {})))
        inside.wait(10)
        threads.append(in_copied_context(lambda: late(files)))
        time.sleep(0.05)
        return ToolResult.error("no")

    world = World(act=act, slow=slow)
    with world.open() as executor:
        executor.call("act", {})
        go_on.set()
        for thread in threads:
            thread.join(10)
        assert written == ["refused"]
        world.is_untouched()


def test_every_write_that_is_kept_is_in_the_receipt() -> None:
    def act(context: ToolContext) -> ToolResult[Note]:
        files = context.filesystem
        assert files is not None

        def write() -> None:
            for number in range(100):
                try:
                    files.write(f"n{number}", "x")
                except RuntimeError:
                    return

        threads.append(threading.Thread(target=write))
        threads[-1].start()
        return ToolResult.ok(Note())

    threads: list[threading.Thread] = []
    for _ in range(60):
        world = World(act=act)
        with world.open() as executor:
            receipt = executor.execute("act", {}).receipt
            threads[-1].join()
            kept = {entry.name for entry in world.files.list() if entry.name != "kept.txt"}
            assert kept == {change.path for change in receipt.changes}


def test_a_dispatch_from_outside_is_not_taken_for_the_doing_of_a_call_that_only_reads() -> None:
    stop = threading.Event()

    def outside() -> None:
        while not stop.is_set():
            world.session.dispatch(Note("outside"))

    world = World(act=lambda context: ToolResult("read"), policies=(Policy(),))
    thread = threading.Thread(target=outside)
    with world.open() as executor:
        thread.start()
        try:
            assert all(executor.call("act", {}).success for _ in range(200))
        finally:
            stop.set()
            thread.join()
