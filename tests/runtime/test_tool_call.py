"""Every way a tool call can end, and what is left of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from ringfence import DeadlineExceededError, RestoreFailedError, Snapshotable, ToolValidationError
from ringfence.adapters import PromptEvaluationError, ScriptedAdapter, ToolExecutor
from ringfence.errors import VisibilityExpansionRequired
from ringfence.filesystem import Filesystem, InMemoryFilesystem
from ringfence.prompt import MarkdownSection, PolicyDecision, Prompt, PromptTemplate, Tool, ToolContext, ToolResult
from ringfence.resources import Binding, Scope
from ringfence.runtime import (
    Append,
    Cancellation,
    Deadline,
    Heartbeat,
    Receipt,
    RejectedToolParams,
    Replace,
    Session,
    SlicePolicy,
    ToolCallStarted,
    ToolInvoked,
    reducer,
)


@dataclass(frozen=True)
class Note:
    """A STATE slice's item, and a result."""

    text: str

    def render(self) -> str:
        return f"note: {self.text}"


@dataclass(frozen=True)
class Logged:
    text: str


@dataclass(frozen=True)
class Params:
    text: str = field(default="x", metadata={"description": "What to write."})


Handler = Callable[..., ToolResult[Any]]


@dataclass
class World:
    """A prompt with one tool `act`, entered; a session; a filesystem."""

    handler: Handler
    policies: tuple[Any, ...] = ()
    resources: dict[type, Any] = field(default_factory=dict)
    tool_options: dict[str, Any] = field(default_factory=dict)
    deadline: Deadline | None = None
    adapter: Any = None
    result: Any = Note

    def __post_init__(self) -> None:
        self.session = Session()
        self.session[Logged].register(Logged, lambda view, event, *, context: Append(event), policy=SlicePolicy.LOG)
        self.files = InMemoryFilesystem()
        self.files.write("kept.txt", "before\n")
        tool = Tool[Params, self.result](name="act", description="Act.", handler=self.handler, **self.tool_options)
        section = MarkdownSection(title="Work", key="work", template="Do it.", tools=[tool], policies=self.policies)
        self.prompt = Prompt(PromptTemplate(ns="tests", key="call", sections=[section]))
        self.prompt.bind(resources={Filesystem: self.files, **self.resources})

    def __enter__(self) -> World:
        self.prompt.resources.__enter__()
        self.executor = ToolExecutor(
            prompt=self.prompt, session=self.session, adapter=self.adapter, deadline=self.deadline
        )
        return self

    def __exit__(self, *error: Any) -> None:
        self.prompt.resources.__exit__(None, None, None)

    def call(self, name: str = "act", arguments: Any = None) -> ToolResult[Any]:
        return self.executor.call(name, {"text": "y"} if arguments is None else arguments)

    def left(self) -> tuple[dict[str, bytes], tuple[Note, ...]]:
        files = {m.path: self.files.read_bytes(m.path).content for m in self.files.glob("**") if m.is_file}
        return files, self.session[Note].all()

    def receipt(self) -> Receipt:
        receipt = self.session[Receipt].latest()
        assert receipt is not None
        return receipt


UNTOUCHED = ({"kept.txt": b"before\n"}, ())


def change_everything(context: ToolContext) -> None:
    assert context.filesystem is not None
    context.filesystem.write("kept.txt", "after\n")
    context.filesystem.write("made/new.txt", "new\n")
    context.session.dispatch(Note("from the handler"))
    context.session.dispatch(Logged("seen"))


def test_a_successful_call_keeps_files_state_and_value() -> None:
    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        change_everything(context)
        return ToolResult.ok(Note(params.text), message="done")

    with World(act) as world:
        result = world.call()
        assert (result.success, result.message) == (True, "done")
        files, notes = world.left()
        assert files == {"kept.txt": b"after\n", "made/new.txt": b"new\n"}
        assert notes == (Note("from the handler"), Note("y"))
        assert world.receipt().outcome == "committed"
        assert [c.path for c in world.receipt().changes] == ["kept.txt", "made", "made/new.txt"]


def fail_by_result(context: ToolContext) -> ToolResult[Note]:
    return ToolResult.error("no luck")


def raising(error: BaseException) -> Callable[[ToolContext], ToolResult[Note]]:
    def fail(context: ToolContext) -> ToolResult[Note]:
        raise error

    return fail


class Nameless(Exception):
    def __str__(self) -> str:
        return ""


FAILURES: list[tuple[Callable[[ToolContext], Any], str]] = [
    (fail_by_result, "no luck"),
    (raising(ToolValidationError("text must be short")), "text must be short"),
    (raising(TypeError("wrong kind")), "TypeError: wrong kind"),
    (raising(KeyError("k")), "KeyError"),
    (raising(FileNotFoundError("gone.txt")), "there is no such file or directory: gone.txt"),
    (raising(FileNotFoundError(2, "No such file or directory", "gone.txt")), "gone.txt"),
    (raising(MemoryError()), "not enough memory"),
    (raising(RecursionError()), "too deep"),
    (raising(Nameless()), "Nameless"),
    (lambda context: None, "returned NoneType, not a ToolResult"),
    (lambda context: "text", "returned str, not a ToolResult"),
    (lambda context: ToolResult("no", success=cast("Any", "no")), "success='no': it is True or False"),
    (lambda context: ToolResult("sorry", Note("why"), success=False), "sorry"),
]


@pytest.mark.parametrize(("failure", "said"), FAILURES)
def test_a_call_that_fails_leaves_no_trace_and_tells_the_model(
    failure: Callable[[ToolContext], Any], said: str
) -> None:
    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        change_everything(context)
        return failure(context)

    with World(act) as world:
        result = world.call()
        assert not result.success
        assert said in result.message
        assert world.left() == UNTOUCHED
        assert world.session[Logged].all() == (Logged("seen"),), "logs are never rolled back"
        invoked = world.session[ToolInvoked].latest()
        assert invoked is not None
        assert invoked.result is result
        assert world.receipt().outcome == "failed"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_what_is_no_exception_leaves_the_call_after_the_rollback(error: BaseException) -> None:
    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        change_everything(context)
        raise error

    with World(act) as world:
        with pytest.raises(type(error)):
            world.call()
        assert world.left() == UNTOUCHED
        assert world.receipt().outcome == "interrupted"


EXPANSION = VisibilityExpansionRequired("open", requested_overrides={}, reason="curious", section_keys=("a",))


@pytest.mark.parametrize("error", [EXPANSION, PromptEvaluationError("inner", phase="response")])
def test_what_leaves_the_loop_does_so_after_the_rollback(error: Exception) -> None:
    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        change_everything(context)
        raise error

    with World(act) as world:
        with pytest.raises(type(error)) as caught:
            world.call()
        assert caught.value is error
        assert world.left() == UNTOUCHED


def test_a_handler_that_notices_the_deadline_ends_the_evaluation() -> None:
    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        change_everything(context)
        raise DeadlineExceededError("too late")

    with World(act) as world:
        with pytest.raises(PromptEvaluationError) as caught:
            world.call()
        assert caught.value.phase == "tool"
        assert world.left() == UNTOUCHED


def test_a_passed_deadline_refuses_the_call_before_its_handler() -> None:
    ran: list[str] = []

    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        ran.append("ran")
        return ToolResult.ok(Note("x"))

    start = datetime(2026, 1, 1, tzinfo=UTC)
    deadline = Deadline(start + timedelta(seconds=5), start, clock=lambda: start + timedelta(seconds=9))
    with World(act, deadline=deadline) as world:
        with pytest.raises(PromptEvaluationError):
            world.call()
        assert not ran
        assert world.receipt().outcome == "denied"


class Unrenderable:
    def __repr__(self) -> str:
        raise RuntimeError("not even this")


@dataclass(frozen=True)
class Odd:
    value: object

    def render(self) -> str:
        raise RuntimeError("cannot")


@pytest.mark.parametrize("value", [Odd(1), Odd(Unrenderable()), Odd(b"\xff"), Odd(float("nan")), Odd({1: {2}})])
def test_a_value_that_cannot_be_rendered_fails_nothing(value: object) -> None:
    def act(params: Params, *, context: ToolContext) -> ToolResult[Any]:
        return ToolResult.ok(value, message="made")

    with World(act, result=Odd) as world:
        answer = world.executor.execute("act", {})
        assert answer.result.success
        assert answer.text.startswith("made\n\n")


class Refusing:
    name = "refusing"

    def __init__(self, *, check: Callable[[], Any] = PolicyDecision.allow, after: Callable[[], Any] = lambda: None):
        self._check, self._after = check, after

    def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
        return self._check()

    def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
        self._after()


def explode() -> Any:
    raise ZeroDivisionError("broken policy")


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Refusing(check=lambda: PolicyDecision.deny("not today")), "not today"),
        (Refusing(check=explode), "could not decide"),
        (Refusing(check=lambda: None), "could not decide"),
    ],
)
def test_a_policy_that_denies_raises_or_answers_nothing_stops_the_call_before_its_handler(
    policy: Refusing, said: str
) -> None:
    ran: list[str] = []

    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        ran.append("ran")
        return ToolResult.ok(Note("x"))

    with World(act, policies=(policy,)) as world:
        result = world.call()
        assert not result.success
        assert not ran
        assert "refusing" in result.message
        assert said in result.message
        assert world.left() == UNTOUCHED
        assert world.receipt().outcome == "denied"
        assert [(v.policy, v.allowed) for v in world.receipt().policies] == [("refusing", False)]


def test_a_policy_that_writes_while_it_decides_leaves_no_trace() -> None:
    class Meddling(Refusing):
        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            assert context.filesystem is not None
            context.filesystem.write("kept.txt", "meddled")
            return PolicyDecision.allow()

    with World(lambda params, *, context: ToolResult.ok(Note("x")), policies=(Meddling(),)) as world:
        assert not world.call().success
        assert world.left() == UNTOUCHED


def test_an_on_result_that_raises_rolls_the_call_back() -> None:
    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        change_everything(context)
        return ToolResult.ok(Note("x"))

    with World(act, policies=(Refusing(after=explode),)) as world:
        result = world.call()
        assert not result.success
        assert "the policy refusing failed on the result: ZeroDivisionError: broken policy" in result.message
        assert world.left() == UNTOUCHED


def test_a_reducer_that_fails_at_any_time_dooms_the_call() -> None:
    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        context.session.dispatch(Note("bad"))
        assert context.filesystem is not None
        context.filesystem.write("kept.txt", "after")
        return ToolResult.ok(Note("good"))

    def reduce(view: Any, event: Note, *, context: Any) -> Append[Note]:
        if event.text == "bad":
            raise ValueError("no bad notes")
        return Append(event)

    with World(act) as world:
        world.session[Note].register(Note, reduce)
        result = world.call()
        assert not result.success
        assert result.message.endswith("it cannot be kept: the reducer reduce of Note failed on a Note: no bad notes")
        assert world.left() == UNTOUCHED


def test_a_reducer_that_fails_on_the_result_is_named_as_the_method_that_it_is() -> None:
    @dataclass(frozen=True)
    class Count:
        @reducer(on=Note)
        def count(self, event: Note) -> Replace[Any]:
            raise KeyError("total")

    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        return ToolResult.ok(Note("x"))

    with World(act) as world:
        world.session.install(Count, initial=Count)
        assert "the reducer Count.count failed on a Note: KeyError: 'total'" in world.call().message


def test_an_observer_that_fails_undoes_nothing() -> None:
    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        change_everything(context)
        return ToolResult.ok(Note("x"))

    with World(act) as world:
        world.session.dispatcher.subscribe(ToolInvoked, lambda event: explode())
        assert world.call().success
        assert world.left()[0]["kept.txt"] == b"after\n"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("atc", {}, "did you mean act"),
        ("", {}, "there is no tool"),
        ("act", {"text": 3}, "text"),
        ("act", {"text": "a", "colour": "red"}, "colour"),
        ("act", '{"text": ', "do not fit"),
        ("act", "[1, 2]", "do not fit"),
        ("act", [], "do not fit"),
        ("act", False, "do not fit"),
        ("act", '"text"', "do not fit"),
        ("act", '{"text": "a", "text": "b"}', "do not fit"),
    ],
)
def test_a_malformed_call_is_an_answer(name: str, arguments: Any, said: str) -> None:
    with World(lambda params, *, context: ToolResult.ok(Note("x"))) as world:
        result = world.call(name, arguments)
        assert not result.success
        assert said in result.message
        assert world.left() == UNTOUCHED
        assert world.receipt().outcome == "rejected"
        world.receipt().to_json()
        invoked = world.session[ToolInvoked].latest()
        assert invoked is not None
        assert isinstance(invoked.params, RejectedToolParams)
        assert invoked.params.raw_arguments == arguments


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_no_arguments_are_an_empty_object(arguments: Any) -> None:
    with World(lambda params, *, context: ToolResult.ok(Note(params.text))) as world:
        assert world.executor.call("act", arguments).value == Note("x")


def test_a_read_only_tool_that_changes_something_is_rolled_back() -> None:
    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        assert context.filesystem is not None
        context.filesystem.write("kept.txt", "after")
        return ToolResult.ok(Note("x"))

    with World(act, tool_options={"read_only": True}) as world:
        result = world.call()
        assert "read-only" in result.message
        assert world.left() == UNTOUCHED


def test_a_call_through_an_ended_context_changes_nothing() -> None:
    contexts: list[ToolContext] = []

    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        assert context.filesystem is not None
        contexts.append(context)
        return ToolResult.ok(Note("x"))

    with World(act) as world:
        world.call()
        files = contexts[0].filesystem
        assert files is not None
        with pytest.raises(RuntimeError, match="not running"):
            files.write("kept.txt", "late")
        assert world.left()[0] == UNTOUCHED[0]


def test_a_thread_of_the_handler_takes_part_through_its_context() -> None:
    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        files = context.filesystem
        assert files is not None
        thread = threading.Thread(target=files.write, args=("threaded.txt", "x"))
        thread.start()
        thread.join()
        return ToolResult.error("and now back")

    with World(act) as world:
        world.call()
        assert world.left() == UNTOUCHED


def test_a_handler_that_uses_the_sections_filesystem_directly_takes_part() -> None:
    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        world.files.write("kept.txt", "after")
        return ToolResult.error("back")

    with World(act) as world:
        world.call()
        assert world.left() == UNTOUCHED


def test_a_filesystem_that_is_no_resource_joins_when_it_is_written() -> None:
    other = InMemoryFilesystem()

    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        other.write("a.txt", "x")
        return ToolResult.error("back")

    with World(act) as world:
        world.call()
        assert not other.exists("a.txt")
        other.write("a.txt", "free again")


def test_a_write_from_outside_waits_for_the_call_and_stays() -> None:
    inside, written = threading.Event(), threading.Event()

    def outside() -> None:
        inside.wait(10)
        world.files.write("outside.txt", "mine")
        written.set()

    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        change_everything(context)
        inside.set()
        assert not written.wait(0.2), "it wrote while a call held the filesystem"
        return ToolResult.error("back")

    with World(act) as world:
        thread = threading.Thread(target=outside)
        thread.start()
        world.call()
        thread.join(10)
        assert world.left()[0] == {**UNTOUCHED[0], "outside.txt": b"mine"}


def test_two_threads_calling_at_once_take_turns() -> None:
    running: list[int] = []
    overlaps: list[int] = []

    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        running.append(1)
        overlaps.append(len(running))
        files = context.filesystem
        assert files is not None
        count = int(files.read("count").content)
        threading.Event().wait(0.002)
        files.write("count", str(count + 1))
        running.pop()
        return ToolResult.ok(Note(params.text)) if count % 2 else ToolResult.error("even")

    with World(act) as world:
        world.files.write("count", "1")
        threads = [threading.Thread(target=lambda: [world.call() for _ in range(10)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(overlaps) == {1}
        # 1 -> 2 commits, every call after it sees an even count and rolls back.
        assert world.files.read("count").content == "2"


@dataclass
class Counter(Snapshotable[int]):
    value: int = 0

    def snapshot(self, *, tag: str | None = None) -> int:
        return self.value

    def restore(self, snapshot: int) -> None:
        self.value = snapshot


@dataclass
class LookAlike:
    value: int = 0

    def snapshot(self) -> int:
        return self.value

    def restore(self, to: int) -> None:
        self.value = to


def test_a_declared_snapshotable_rolls_back_and_a_look_alike_does_not() -> None:
    counter, other = Counter(), LookAlike()

    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        context.resources.get(Counter).value += 1
        context.resources.get(LookAlike).value += 1
        return ToolResult.error("back")

    with World(act, resources={Counter: counter, LookAlike: other}) as world:
        world.call()
        assert (counter.value, other.value) == (0, 1)


def test_a_resource_first_built_in_a_failing_call_goes_back_to_how_it_was_built() -> None:
    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        context.resources.get(Counter).value += 1
        return ToolResult.error("back")

    with World(act, resources={Counter: Binding(Counter, lambda r: Counter(7))}) as world:
        world.call()
        assert world.prompt.resources.get(Counter).value == 7


@dataclass
class Tracer:
    closed: int = 0
    broken: bool = False

    def close(self) -> None:
        self.closed += 1
        if self.broken:
            raise OSError("cannot close")


@pytest.mark.parametrize("success", [True, False])
def test_a_resource_of_the_call_is_new_every_time_and_closed_with_it(success: bool) -> None:
    tracers: list[Tracer] = []

    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        assert context.resources.get(Tracer) is context.resources.get(Tracer)
        tracers.append(context.resources.get(Tracer))
        if not success:
            raise ValueError("no")
        return ToolResult.ok(Note("x"))

    with World(act, resources={Tracer: Binding(Tracer, lambda r: Tracer(), scope=Scope.TOOL_CALL)}) as world:
        world.call()
        world.call()
        assert tracers[0] is not tracers[1]
        assert [tracer.closed for tracer in tracers] == [1, 1]


def test_an_error_in_closing_fails_the_call() -> None:
    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        context.resources.get(Tracer)
        change_everything(context)
        return ToolResult.ok(Note("x"))

    binding = Binding(Tracer, lambda r: Tracer(broken=True), scope=Scope.TOOL_CALL)
    with World(act, resources={Tracer: binding}) as world:
        assert not world.call().success
        assert world.left() == UNTOUCHED


@dataclass
class Stubborn(Counter):
    """Cannot be restored while `stuck`."""

    stuck: bool = True

    def restore(self, snapshot: int) -> None:
        if self.stuck:
            raise OSError("stuck")
        super().restore(snapshot)


def test_a_participant_that_cannot_restore_ends_the_loop_while_the_others_go_back() -> None:
    stubborn = Stubborn()

    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        change_everything(context)
        context.resources.get(Stubborn).value += 1
        return ToolResult.error("back")

    with World(act, resources={Stubborn: stubborn}) as world:
        with pytest.raises(PromptEvaluationError) as caught:
            world.call()
        assert caught.value.phase == "tool"
        assert isinstance(caught.value.__cause__, RestoreFailedError)
        assert "Stubborn" in str(caught.value)
        assert world.left() == UNTOUCHED
        assert world.receipt().outcome == "doubtful"
        with pytest.raises(PromptEvaluationError):
            world.call()
        stubborn.stuck = False
        assert world.call().message == "back", "the rollback was completed before the next call"
        assert stubborn.value == 0


def nested(outer: Callable[[ToolContext, ToolResult[Any]], ToolResult[Note]], inner: Handler) -> World:
    """A world whose tool evaluates a child prompt over the same session and filesystem."""
    child_tool = Tool[Params, Note](name="inner", description="Inner.", handler=inner)

    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        section = MarkdownSection(title="Child", key="child", template="Do.", tools=[child_tool])
        child = Prompt(PromptTemplate(ns="tests", key="child", sections=[section]))
        assert context.filesystem is not None
        context.filesystem.write("outer.txt", "before the inner call")
        child.bind(resources={Filesystem: context.filesystem})
        assert context.adapter is not None
        response = context.adapter.evaluate(child, session=context.session)
        return outer(context, ToolResult.ok(Note(response.text or "")))

    turns = [{"tool_calls": [{"name": "inner", "arguments": {"text": "z"}}]}, {"text": "child done"}]
    return World(act, adapter=ScriptedAdapter(turns))


def inner_writes(params: Params, *, context: ToolContext) -> ToolResult[Note]:
    assert context.filesystem is not None
    context.filesystem.write("inner.txt", params.text)
    context.session.dispatch(Note("inner"))
    return ToolResult.ok(Note("inner value"))


def test_a_nested_evaluation_commits_with_its_outer_call() -> None:
    with nested(lambda context, result: result, inner_writes) as world:
        assert world.call().value == Note("child done")
        files, notes = world.left()
        assert files == {"kept.txt": b"before\n", "outer.txt": b"before the inner call", "inner.txt": b"z"}
        assert notes == (Note("inner"), Note("inner value"), Note("child done"))
        inner, outer = world.session[Receipt].all()
        assert outer.inner == (inner.call_id,)


def test_an_outer_failure_takes_the_inner_commit_along() -> None:
    with nested(lambda context, result: ToolResult.error("no"), inner_writes) as world:
        world.call()
        assert world.left() == UNTOUCHED
        assert [i.name for i in world.session[ToolInvoked].all()] == ["inner", "act"]


def test_an_inner_failure_goes_back_to_its_own_beginning_only() -> None:
    def inner(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        inner_writes(params, context=context)
        assert context.filesystem is not None
        context.filesystem.write("outer.txt", "overwritten")
        raise ValueError("no")

    with nested(lambda context, result: result, inner) as world:
        assert world.call().success
        files, notes = world.left()
        assert files == {"kept.txt": b"before\n", "outer.txt": b"before the inner call"}
        assert notes == (Note("child done"),)


def test_a_participant_first_met_in_an_inner_call_goes_back_with_the_outer_one() -> None:
    other = InMemoryFilesystem()

    def inner(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        other.write("late.txt", "x")
        return ToolResult.ok(Note("x"))

    def outer(context: ToolContext, result: ToolResult[Any]) -> ToolResult[Note]:
        assert other.exists("late.txt")
        return ToolResult.error("back")

    with nested(outer, inner) as world:
        world.call()
        assert not other.exists("late.txt")


def test_an_inner_rollback_that_fails_is_made_good_by_the_outer_one() -> None:
    stubborn = Stubborn()

    def inner(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        stubborn.value += 1
        raise ValueError("no")

    world = nested(lambda context, result: result, inner)
    world.prompt.bind(resources={Stubborn: stubborn})
    attempts: list[int] = []
    restore = stubborn.restore

    class Once(Stubborn):
        def restore(self, snapshot: int) -> None:
            attempts.append(snapshot)
            if len(attempts) == 1:
                raise OSError("not now")
            self.value = snapshot

    once = Once()
    world.prompt.bind(resources={Stubborn: once})
    del restore
    with world:
        with pytest.raises(PromptEvaluationError):
            world.call()
        assert world.left() == UNTOUCHED
        assert len(attempts) == 2


def test_every_call_beats_the_heart() -> None:
    beats: list[int] = []
    heartbeat = Heartbeat()
    heartbeat.add_callback(lambda: beats.append(1))
    with World(lambda params, *, context: ToolResult.ok(Note("x"))) as world:
        executor = ToolExecutor(prompt=world.prompt, session=world.session, heartbeat=heartbeat)
        executor.call("act", {"text": "y"})
        executor.call("nothing", {})
        assert len(beats) == 4


def test_the_receipt_says_what_was_read_and_written_with_hashes() -> None:
    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        assert context.filesystem is not None
        context.filesystem.read("kept.txt")
        context.filesystem.write("new.txt", "hello")
        return ToolResult.ok(Note("x"))

    with World(act) as world:
        world.call()
        receipt = world.receipt().to_json()
        assert receipt["read"] == {"kept.txt": world.files.content_hash("kept.txt")}
        (change,) = world.receipt().changes
        assert change.after is not None
        assert (change.path, change.kind, change.after.content_hash) == (
            "new.txt",
            "created",
            world.files.content_hash("new.txt"),
        )
        assert receipt["diff_bytes"] == [0, 5]
        assert receipt["outcome"] == "committed"


def test_the_session_of_a_failed_call_is_as_before_also_where_values_are_cyclic() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)

    @dataclass(frozen=True)
    class Cyclic:
        value: Any

    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        context.session.dispatch(Cyclic(cycle))
        return ToolResult.error("back")

    with World(act) as world:
        world.call()
        assert world.session[Cyclic].all() == ()


def test_an_ended_handle_stays_ended_when_the_next_call_runs() -> None:
    handles: list[Filesystem] = []

    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        assert context.filesystem is not None
        handles.append(context.filesystem)
        if len(handles) == 2:
            thread = threading.Thread(target=lambda: attempts.append(attempt(handles[0])))
            thread.start()
            thread.join()
        return ToolResult.ok(Note("x"))

    def attempt(files: Filesystem) -> str:
        try:
            files.write("kept.txt", "late")
        except RuntimeError as error:
            return str(error)
        return "written"

    attempts: list[str] = []
    with World(act) as world:
        world.call()
        world.call()
        assert "not running" in attempts[0]


def test_policies_of_the_section_come_before_those_of_the_prompt() -> None:
    asked: list[str] = []

    class Asked(Refusing):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            asked.append(self.name)
            return PolicyDecision.allow()

    world = World(lambda params, *, context: ToolResult.ok(Note("x")), policies=(Asked("section"),))
    template = PromptTemplate(
        ns="tests", key="order", sections=world.prompt.template.sections, policies=(Asked("prompt"),)
    )
    world.prompt = Prompt(template).bind(resources={Filesystem: world.files})
    with world:
        world.call()
        assert asked == ["section", "prompt"]


def test_dataclasses_replace_keeps_a_tool_what_it_is() -> None:
    tool = Tool[Params, Note](name="act", description="Act.", handler=None)
    assert replace(tool, description="Other.").params_type is Params


@dataclass(frozen=True)
class Explosive:
    fuse: str = "short"

    def __post_init__(self) -> None:
        raise LookupError(f"no fuse {self.fuse}")


def test_params_that_raise_on_their_own_are_an_answer() -> None:
    def act(params: Explosive, *, context: ToolContext) -> ToolResult[Note]:
        return ToolResult.ok(Note("x"))

    tool = Tool[Explosive, Note](name="explode", description="Explode.", handler=act)
    prompt = Prompt(ns="tests", key="x", sections=[MarkdownSection(title="T", template="x", tools=[tool])])
    with prompt.resources:
        result = ToolExecutor(prompt=prompt, session=Session()).call("explode", {"fuse": "long"})
    assert "no fuse long" in result.message


def test_a_policy_that_writes_past_its_context_is_refused_at_once() -> None:
    class Meddling(Refusing):
        def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            world.files.write("kept.txt", "meddled")
            return PolicyDecision.allow()

    with World(lambda params, *, context: ToolResult.ok(Note("x")), policies=(Meddling(),)) as world:
        assert "not running" in world.call().message
        assert world.left() == UNTOUCHED


@dataclass(frozen=True)
class Wanted:
    items: list[str]


def test_a_receipt_says_what_was_asked_whatever_the_handler_did_to_its_params() -> None:
    def handler(params: Wanted, *, context: ToolContext) -> ToolResult[None]:
        params.items.append("what nobody asked for")
        return ToolResult("done", None)

    tool = Tool[Wanted, None](name="want", description="A tool.", handler=handler)
    session = Session()
    prompt = Prompt(ns="tests", key="params", sections=[MarkdownSection(title="T", template="x", tools=[tool])])
    with prompt.resources:
        assert ToolExecutor(prompt=prompt, session=session).call("want", {"items": ["beer"]}).success
    receipt = session[Receipt].latest()
    assert receipt is not None
    assert receipt.params == Wanted(["beer"])


def test_a_receipt_is_json_whatever_the_arguments_were() -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    with World(lambda params, *, context: ToolResult.ok(Note("x"))) as world:
        for arguments in ({"text": deep}, {"text": Unrenderable()}, {"text": "\udcff"}, {1: {2: b"\xff"}}):
            world.call("act", arguments)
            sent = json.dumps(world.receipt().to_json(), allow_nan=False, ensure_ascii=False).encode()
            assert json.loads(sent)["params"]


def test_the_receipt_of_a_call_to_no_tool_has_its_arguments() -> None:
    with World(lambda params, *, context: ToolResult.ok(Note("x"))) as world:
        world.call("atc", {"text": "what came"})
        assert world.receipt().to_json()["params"] == {"text": "what came"}


def test_a_call_that_is_cancelled_before_it_begins_does_not_run() -> None:
    ran: list[str] = []

    def handler(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        ran.append(params.text)
        return ToolResult.ok(Note("x"))

    cancellation = Cancellation()
    cancellation.cancel()
    with World(handler) as world:
        answer = world.executor.execute("act", {}, cancellation=cancellation)
    assert (answer.receipt.outcome, answer.result.success, ran) == ("interrupted", False, [])


def test_a_call_that_is_cancelled_while_its_handler_runs_is_rolled_back_and_told() -> None:
    cancellation = Cancellation()
    cancelling = threading.Timer(0.05, cancellation.cancel)

    def handler(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        assert context.filesystem is not None
        assert context.cancellation is cancellation
        context.filesystem.write("kept.txt", "changed\n")
        context.session.dispatch(Note("dispatched"))
        cancelling.start()
        assert cancellation.wait(10)
        return ToolResult.ok(Note("x"))

    with World(handler) as world:
        answer = world.executor.execute("act", {}, cancellation=cancellation)
        assert world.files.read("kept.txt").content == "before\n"
        assert world.session[Note].all() == ()
        assert (answer.receipt.outcome, answer.result.success) == ("interrupted", False)
        assert "cancelled" in answer.text
    cancelling.join()


def test_a_cancellation_after_the_commit_point_changes_nothing() -> None:
    cancellation = Cancellation()

    def handler(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        assert context.filesystem is not None
        context.filesystem.write("kept.txt", "changed\n")
        return ToolResult.ok(Note("x"))

    with World(handler) as world:
        world.session.dispatcher.subscribe(Receipt, lambda _: cancellation.cancel())
        answer = world.executor.execute("act", {}, cancellation=cancellation)
        assert answer.receipt.outcome == "committed"
        assert world.files.read("kept.txt").content == "changed\n"


def test_a_call_outside_of_the_block_of_resources_is_an_error_that_nobody_hears_of() -> None:
    world = World(lambda params, *, context: ToolResult.ok(Note("x")))
    started: list[ToolCallStarted] = []
    world.session.dispatcher.subscribe(ToolCallStarted, started.append)
    with pytest.raises(RuntimeError):
        ToolExecutor(prompt=world.prompt, session=world.session).call("act", {"text": "y"})
    assert (started, world.session[Receipt].all()) == ([], ())


@dataclass(frozen=True)
class Buggy:
    text: str

    def __post_init__(self) -> None:
        raise AttributeError("no such thing")


def test_a_bug_in_a_params_class_is_logged_and_rejects_the_call(caplog: pytest.LogCaptureFixture) -> None:
    tool = Tool[Buggy, None](name="act", description="Act.", handler=lambda params, *, context: ToolResult("done"))
    section = MarkdownSection(title="Work", key="work", template="Do it.", tools=[tool])
    prompt, session = Prompt(PromptTemplate(ns="tests", key="call", sections=[section])), Session()
    with prompt.resources:
        outcomes = [ToolExecutor(prompt=prompt, session=session).execute("act", {"text": "x"}).receipt.outcome]
        outcomes += [ToolExecutor(prompt=prompt, session=session).execute("act", {"txt": "x"}).receipt.outcome]
    assert outcomes == ["rejected"] * 2
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_a_path_of_a_model_is_resolved_once_a_call() -> None:
    resolved: list[str] = []

    def act(params: Params, *, context: ToolContext) -> ToolResult[Note]:
        resolved.append(context.resolve_path(" new.txt"))
        assert context.filesystem is not None
        context.filesystem.write(" new.txt", "x")
        resolved.append(context.resolve_path(" new.txt"))
        return ToolResult.ok(Note("x"))

    with World(act) as world:
        assert world.call().success
        assert world.call().success
    assert resolved == ["new.txt", "new.txt", " new.txt", " new.txt"]
