"""Resources: how they are bound, built, scoped, closed, and how they take part in tool calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from running_calls import CallState, participant_of

from ringfence.errors import CallEndedError, ParticipantBusyError
from ringfence.filesystem import Filesystem, InMemoryFilesystem
from ringfence.resources import (
    Binding,
    CircularDependencyError,
    DuplicateBindingError,
    ProviderError,
    ResourceContext,
    ResourceError,
    ResourceRegistry,
    ResourceResolver,
    Scope,
    Snapshotable,
    UnboundResourceError,
)
from ringfence.runtime import CallInfo, Session, Transactional, tool_transaction


@dataclass
class Log:
    lines: list[str] = field(default_factory=list[str])


class Thing:
    """Says in a log when it is closed."""

    def __init__(self, log: Log, name: str = "thing") -> None:
        self.log = log
        self.name = name

    def close(self) -> None:
        self.log.lines.append(f"closed {self.name}")


class Other(Thing):
    pass


class Third(Thing):
    pass


class Counter(Snapshotable[int]):
    def __init__(self) -> None:
        self.value = 0

    def snapshot(self, *, tag: str | None = None) -> int:
        return self.value

    def restore(self, snapshot: int) -> None:
        self.value = snapshot


class Files:
    """What a filesystem is to resources: it has a handle for each call."""

    def __init__(self, call: CallInfo | None = None) -> None:
        self.call = call
        self.closed = False

    def for_call(self, call: CallInfo) -> Files:
        return Files(call)

    def close(self) -> None:
        self.closed = True


class RunningCall(CallInfo):
    """A call whose handler runs: what joins it, it holds."""

    def __init__(self, call_id: str = "1", parent: CallInfo | None = None) -> None:
        super().__init__(call_id, "tool", parent)
        self.joined: list[Transactional] = []

    def join(self, participant: Transactional) -> None:
        participant.lock.acquire(self, patience_seconds=0)
        self.joined.append(participant)


def opened(*bindings: Binding[Any]) -> ResourceContext:
    return ResourceRegistry.of(*bindings).open()


# Registries


def test_two_bindings_of_one_protocol_are_refused() -> None:
    with pytest.raises(DuplicateBindingError, match="Log"):
        ResourceRegistry.of(Binding.instance(Log, Log()), Binding.instance(Log, Log()))


def test_a_registry_is_built_of_instances_and_bindings_and_leaves_none_out() -> None:
    log, lazy = Log(), Binding(Counter, lambda r: Counter())
    registry = ResourceRegistry.build({Log: log, Counter: lazy, Files: None})
    assert list(registry) == [Log, Counter]
    assert registry.binding_for(Counter) is lazy
    assert Files not in registry
    assert len(registry) == 2


def test_a_binding_under_another_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match=r"binding of Counter stands under Log"):
        ResourceRegistry.build({Log: Binding(Counter, lambda r: Counter())})


def test_merging_refuses_conflicts_unless_the_second_registry_may_win() -> None:
    mine, theirs = Log(), Log()
    left = ResourceRegistry.build({Log: mine, Counter: Counter()})
    right = ResourceRegistry.build({Log: theirs})
    assert left.conflicts(right) == {Log}
    with pytest.raises(DuplicateBindingError, match="Log"):
        left.merge(right)
    with left.merge(right, strict=False).open() as resources:
        assert resources.get(Log) is theirs


def test_a_registry_does_not_change_with_the_mapping_it_was_made_of() -> None:
    bindings: dict[type[Any], Binding[Any]] = {Log: Binding.instance(Log, Log())}
    registry = ResourceRegistry(bindings)
    bindings.clear()
    assert Log in registry
    with pytest.raises(TypeError):
        registry.bindings[Counter] = Binding.instance(Counter, Counter())


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Binding("Log", lambda r: Log()), TypeError),
        (lambda: Binding(Log, Log()), TypeError),
        (lambda: Binding(Log, lambda r: Log(), scope=Scope.TOOL_CALL, eager=True), ValueError),
        (lambda: Binding.instance(Log, None), ValueError),
    ],
    ids=["no class", "no provider", "eager and short-lived", "None"],
)
def test_a_binding_that_cannot_work_is_refused(make: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error, match="Log"):
        make()


@pytest.mark.parametrize(("protocol", "made"), [(Log, Log), (Filesystem, InMemoryFilesystem)])
def test_a_class_in_the_place_of_an_instance_is_refused(protocol: type[Any], made: type[Any]) -> None:
    with pytest.raises(TypeError, match=rf"the class {made.__name__} is no {protocol.__name__} yet: write"):
        Binding.instance(protocol, made)


# Getting


def test_a_singleton_is_built_at_its_first_use_and_only_once() -> None:
    built: list[Log] = []

    def build(resolver: ResourceResolver) -> Log:
        built.append(Log())
        return built[-1]

    with opened(Binding(Log, build)) as resources:
        assert not built
        assert resources.get(Log) is resources.get(Log) is built[0]
    assert len(built) == 1


def test_nothing_bound_is_an_error_or_none() -> None:
    with opened() as resources:
        with pytest.raises(UnboundResourceError, match="Log") as caught:
            resources.get(Log)
        assert isinstance(caught.value, LookupError)
        assert resources.get_optional(Log) is None
        assert resources.for_call(RunningCall()).get_optional(Log) is None


@pytest.mark.parametrize("protocol", [Log, Counter], ids=["bound", "unbound"])
def test_outside_of_the_context_there_is_nothing_to_get(protocol: type[Any]) -> None:
    context = opened(Binding.instance(Log, Log()))
    with pytest.raises(RuntimeError, match=r"with prompt\.resources"):
        context.get(protocol)
    with context:
        pass
    with pytest.raises(RuntimeError, match=r"with prompt\.resources"):
        context.get_optional(protocol)


def test_what_a_provider_raises_is_the_cause_of_a_provider_error() -> None:
    with (
        opened(Binding(Log, lambda r: Log(1 / 0))) as resources,
        pytest.raises(ProviderError, match=r"Log.*ZeroDivisionError") as caught,
    ):
        resources.get(Log)
    assert caught.value.protocol is Log
    assert isinstance(caught.value.cause, ZeroDivisionError)


def test_a_provider_that_failed_is_asked_again() -> None:
    answers = iter([RuntimeError("not yet"), Log()])

    def build(resolver: ResourceResolver) -> Log:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with opened(Binding(Log, build)) as resources:
        with pytest.raises(ProviderError):
            resources.get(Log)
        assert resources.get(Log).lines == []


def test_a_provider_that_returns_none_has_failed() -> None:
    with (
        opened(Binding(Log, lambda r: None)) as resources,
        pytest.raises(ProviderError, match="returned None"),
    ):
        resources.get(Log)


def test_a_cycle_is_named_in_order() -> None:
    context = opened(
        Binding(Log, lambda r: r.get(Counter) and Log()),
        Binding(Counter, lambda r: r.get(Files) and Counter()),
        Binding(Files, lambda r: r.get(Counter) and Files()),
    )
    with context, pytest.raises(CircularDependencyError, match="Counter -> Files -> Counter") as caught:
        context.get(Log)
    assert caught.value.cycle == (Counter, Files, Counter)


@st.composite
def dependencies(draw: st.DrawFn) -> dict[int, list[int]]:
    size = draw(st.integers(1, 8))
    return {one: draw(st.lists(st.integers(0, size - 1), max_size=3, unique=True)) for one in range(size)}


def is_cyclic(needs: dict[int, list[int]], one: int, above: tuple[int, ...] = ()) -> bool:
    return one in above or any(is_cyclic(needs, other, (*above, one)) for other in needs[one])


@given(dependencies())
def test_whatever_the_dependencies_all_is_built_once_and_closed_backwards_or_a_cycle_is_named(
    needs: dict[int, list[int]],
) -> None:
    kinds = {one: type(f"Kind{one}", (Thing,), {}) for one in needs}
    log, built = Log(), list[str]()

    def binding(one: int) -> Binding[Any]:
        def build(resolver: ResourceResolver) -> Thing:
            for other in needs[one]:
                resolver.get(kinds[other])
            built.append(str(one))
            return kinds[one](log, str(one))

        return Binding(kinds[one], build)

    with opened(*map(binding, needs)) as resources:
        for one, kind in kinds.items():
            if is_cyclic(needs, one):
                with pytest.raises(CircularDependencyError) as caught:
                    resources.get(kind)
                assert caught.value.cycle[0] is caught.value.cycle[-1]
            else:
                assert isinstance(resources.get(kind), kind)
    assert len(built) == len(set(built)) == sum(not is_cyclic(needs, one) for one in needs)
    assert log.lines == [f"closed {one}" for one in reversed(built)]


# Lifetime


def test_what_the_context_built_is_closed_in_reverse_order_of_construction() -> None:
    log = Log()
    with opened(
        Binding(Thing, lambda r: Thing(log, "first")),
        Binding(Other, lambda r: r.get(Thing) and Other(log, "second")),
        Binding(Third, lambda r: Third(log, "third"), scope=Scope.PROTOTYPE),
    ) as resources:
        resources.get(Other)
        resources.get(Third)
    assert log.lines == ["closed third", "closed second", "closed first"]


def test_a_ready_made_instance_stays_its_makers() -> None:
    log = Log()
    with opened(Binding.instance(Thing, Thing(log))) as resources:
        resources.get(Thing)
    assert log.lines == []


def test_an_alias_is_not_closed_a_second_time_nor_what_it_stands_for_if_that_was_given() -> None:
    log = Log()
    with opened(
        Binding.instance(Thing, Thing(log, "given")),
        Binding(object, lambda r: r.get(Thing)),
        Binding(Other, lambda r: Other(log, "built")),
        Binding(Third, lambda r: r.get(Other)),
    ) as resources:
        assert resources.get(object) is resources.get(Thing)
        assert resources.get(Third) is resources.get(Other)
    assert log.lines == ["closed built"]


def test_a_close_that_raises_stops_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()

    class Broken:
        def close(self) -> None:
            raise OSError("stuck")

    def work() -> None:
        with opened(Binding(Thing, lambda r: Thing(log)), Binding(Broken, lambda r: Broken())) as resources:
            resources.get(Thing)
            resources.get(Broken)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert log.lines == ["closed thing"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "stuck" in caplog.text


def test_an_interrupt_while_closing_comes_through_after_the_rest_was_closed() -> None:
    log = Log()

    class Interrupted:
        def close(self) -> None:
            raise KeyboardInterrupt

    def work() -> None:
        with opened(Binding(Thing, lambda r: Thing(log)), Binding(Interrupted, lambda r: Interrupted())) as resources:
            resources.get(Thing)
            resources.get(Interrupted)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert log.lines == ["closed thing"]


def test_entering_again_joins_the_block_that_is_open_and_after_the_last_builds_anew() -> None:
    log = Log()
    context = opened(Binding(Thing, lambda r: Thing(log)))
    with context:
        thing = context.get(Thing)
        with context as inner:
            assert inner.get(Thing) is thing
        assert log.lines == []
        assert context.get(Thing) is thing
    assert log.lines == ["closed thing"]
    with context:
        assert context.get(Thing) is not thing


def test_when_an_eager_one_fails_those_before_it_are_closed_and_the_context_is_not_open() -> None:
    log = Log()
    context = opened(
        Binding(Thing, lambda r: Thing(log), eager=True),
        Binding(Log, lambda r: Log(1 / 0), eager=True),
    )
    with pytest.raises(ProviderError), context:
        raise AssertionError("the body must not run")
    assert log.lines == ["closed thing"]
    assert not context.is_open


class Prepared(Thing):
    failing = False

    def post_construct(self) -> None:
        self.log.lines.append("prepared")
        if self.failing:
            raise OSError("no connection")


class NeverPrepared(Prepared):
    failing = True


def test_a_second_step_of_construction_is_taken_once_before_anybody_gets_it() -> None:
    log = Log()
    with opened(Binding(Prepared, lambda r: Prepared(log)), Binding(Thing, lambda r: r.get(Prepared))) as resources:
        resources.get(Thing)
        resources.get(Prepared)
        assert log.lines == ["prepared"]


def test_what_could_not_be_prepared_is_closed_and_a_provider_error() -> None:
    log = Log()
    with opened(Binding(NeverPrepared, lambda r: NeverPrepared(log))) as resources:
        with pytest.raises(ProviderError, match="no connection"):
            resources.get(NeverPrepared)
        assert log.lines == ["prepared", "closed thing"]
    assert log.lines == ["prepared", "closed thing"]


# Threads


def test_threads_that_ask_at_once_get_one_singleton() -> None:
    together = threading.Barrier(8)
    built: list[Log] = []

    def build(resolver: ResourceResolver) -> Log:
        built.append(Log())
        threading.Event().wait(0.01)
        return built[-1]

    def ask(context: ResourceContext) -> Log:
        together.wait()
        return context.get(Log)

    with opened(Binding(Log, build)) as resources, ThreadPoolExecutor(8) as pool:
        got = list(pool.map(ask, [resources] * 8))
    assert len(built) == 1
    assert all(one is built[0] for one in got)


def test_two_threads_that_need_the_same_thing_are_no_cycle() -> None:
    together = threading.Barrier(2)

    def build(kind: type[Any]) -> Callable[[ResourceResolver], Any]:
        def provider(resolver: ResourceResolver) -> Any:
            resolver.get(Log)
            return kind()

        return provider

    def ask(context: ResourceContext, kind: type[Any]) -> object:
        together.wait()
        return context.get(kind)

    bindings = Binding(Counter, build(Counter)), Binding(Files, build(Files)), Binding(Log, lambda r: Log())
    with opened(*bindings) as resources, ThreadPoolExecutor(2) as pool:
        counter, files = pool.map(ask, [resources] * 2, [Counter, Files])
    assert isinstance(counter, Counter)
    assert isinstance(files, Files)


def test_a_cycle_entered_at_both_ends_at_once_does_not_hang() -> None:
    together = threading.Barrier(2)

    def ask(context: ResourceContext, kind: type[Any]) -> str:
        together.wait()
        try:
            context.get(kind)
        except CircularDependencyError:
            return "cycle"
        return "built"

    with (
        opened(
            Binding(Counter, lambda r: r.get(Files) and Counter()), Binding(Files, lambda r: r.get(Counter) and Files())
        ) as resources,
        ThreadPoolExecutor(2) as pool,
    ):
        answers = [pool.submit(ask, resources, kind) for kind in (Counter, Files)]
        assert [answer.result(timeout=30) for answer in answers] == ["cycle", "cycle"]


# Tool calls


def test_an_instance_for_a_tool_call_lives_as_long_as_the_call() -> None:
    log = Log()
    with opened(Binding(Thing, lambda r: Thing(log), scope=Scope.TOOL_CALL)) as resources:
        first, second = resources.for_call(RunningCall("1")), resources.for_call(RunningCall("2"))
        assert first.get(Thing) is first.get(Thing)
        assert first.get(Thing) is not second.get(Thing)
        first.close()
        assert log.lines == ["closed thing"]
        second.close()
    assert log.lines == ["closed thing", "closed thing"]


def test_nothing_is_built_for_a_call_that_has_ended() -> None:
    with opened(Binding(Log, lambda r: Log(), scope=Scope.TOOL_CALL)) as resources:
        scope = resources.for_call(RunningCall("42"))
        scope.close()
        with pytest.raises(ResourceError, match=r"'42'.*ended"):
            scope.get(Log)


def test_a_calls_instances_and_prototypes_are_closed_in_reverse_order_and_singletons_are_not() -> None:
    log = Log()
    with opened(
        Binding(Thing, lambda r: Thing(log, "singleton")),
        Binding(Other, lambda r: Other(log, "prototype"), scope=Scope.PROTOTYPE),
        Binding(Third, lambda r: r.get(Thing) and r.get(Other) and Third(log, "call"), scope=Scope.TOOL_CALL),
    ) as resources:
        scope = resources.for_call(RunningCall())
        scope.get(Third)
        scope.close()
        assert log.lines == ["closed call", "closed prototype"]


def test_a_call_scoped_alias_of_a_singleton_does_not_close_it() -> None:
    log = Log()
    with opened(
        Binding(Thing, lambda r: Thing(log)), Binding(object, lambda r: r.get(Thing), scope=Scope.TOOL_CALL)
    ) as resources:
        scope = resources.for_call(RunningCall())
        assert scope.get(object) is resources.get(Thing)
        scope.close()
        assert log.lines == []


@pytest.mark.parametrize("first", [Files, object], ids=["handle first", "alias first"])
def test_a_call_scoped_alias_of_a_filesystem_does_not_close_its_handle(first: type[Any]) -> None:
    with opened(
        Binding.instance(Files, Files()), Binding(object, lambda r: r.get(Files), scope=Scope.TOOL_CALL)
    ) as resources:
        scope = resources.for_call(RunningCall())
        scope.get(first)
        scope.get(object)
        scope.close()
        assert not scope.get(Files).closed


@pytest.mark.parametrize("failures", [1, 2])
def test_an_error_in_closing_a_call_is_raised_after_all_was_closed(failures: int) -> None:
    log = Log()

    class Broken:
        def close(self) -> None:
            raise OSError("stuck")

    with opened(
        Binding(Thing, lambda r: Thing(log), scope=Scope.TOOL_CALL),
        Binding(Broken, lambda r: Broken(), Scope.PROTOTYPE),
    ) as resources:
        scope = resources.for_call(RunningCall())
        scope.get(Thing)
        for _ in range(failures):
            scope.get(Broken)
        with pytest.raises(OSError, match="stuck"):
            scope.close()
        assert log.lines == ["closed thing"]
        scope.close()  # nothing is left


def test_an_error_in_closing_does_not_hide_an_interrupt_in_closing() -> None:
    log = Log()

    class Interrupted:
        def close(self) -> None:
            raise KeyboardInterrupt

    class Broken:
        def close(self) -> None:
            log.lines.append("tried")
            raise OSError("stuck")

    with opened(
        Binding(Broken, lambda r: Broken(), Scope.PROTOTYPE),
        Binding(Interrupted, lambda r: Interrupted(), Scope.TOOL_CALL),
    ) as resources:
        scope = resources.for_call(RunningCall())
        scope.get(Broken)
        scope.get(Interrupted)
        with pytest.raises(KeyboardInterrupt):
            scope.close()
        assert log.lines == ["tried"]


def test_an_alias_of_a_prototype_is_not_prepared_a_second_time() -> None:
    log = Log()

    class Prepared:
        def post_construct(self) -> None:
            log.lines.append("prepared")

    with opened(
        Binding(Prepared, lambda r: Prepared(), Scope.PROTOTYPE),
        Binding(object, lambda r: r.get(Prepared), Scope.PROTOTYPE),
    ) as resources:
        scope = resources.for_call(RunningCall())
        for each in (resources, scope):
            each.get(object)
        scope.close()
    assert log.lines == ["prepared"] * 2


def test_a_singleton_cannot_hold_what_lives_for_one_call() -> None:
    with opened(
        Binding(Thing, lambda r: Thing(r.get(Log))), Binding(Log, lambda r: Log(), scope=Scope.TOOL_CALL)
    ) as resources:
        scope = resources.for_call(RunningCall())
        for ask in (lambda: scope.get(Thing), lambda: resources.get(Log)):
            with pytest.raises(ResourceError, match="Log"):
                ask()
        assert scope.get(Log) is scope.get(Log)


def test_a_call_gets_its_own_handle_of_a_filesystem() -> None:
    files, call = Files(), RunningCall()
    with opened(Binding.instance(Files, files)) as resources:
        scope = resources.for_call(call)
        assert scope.get(Files).call is call
        assert scope.get(Files) is scope.get(Files)
        assert resources.get(Files) is files


class OnlySaved(Snapshotable[int]):
    def snapshot(self, *, tag: str | None = None) -> int:
        return 0


class OnlyRestored(Snapshotable[int]):
    def restore(self, snapshot: int) -> None: ...


@pytest.mark.parametrize(("half", "missing"), [(OnlySaved, "restore"), (OnlyRestored, "snapshot")])
def test_what_lacks_a_method_of_a_snapshotable_cannot_be_made(half: type[Any], missing: str) -> None:
    with pytest.raises(TypeError, match=f"abstract method '?{missing}"):
        half()


def test_participants_are_given_and_built_ones_each_once() -> None:
    given, lazy = Counter(), Binding(Snapshotable, lambda r: Counter())
    with opened(
        Binding.instance(Counter, given), Binding.instance(object, given), Binding.instance(Log, Log()), lazy
    ) as r:
        assert r.participants == (participant_of(given),)
        assert r.participants is r.participants
        built = r.get(Snapshotable)
        assert r.participants == (participant_of(given), participant_of(built))
    assert r.participants == ()


def test_a_prototype_takes_part_for_as_long_as_somebody_holds_it() -> None:
    prototype = Binding(Counter, lambda r: Counter(), scope=Scope.PROTOTYPE)
    with opened(prototype, Binding(list, lambda r: [r.get(Counter)])) as resources:
        for _ in range(100):
            held = resources.get(Counter)
            assert resources.participants == (participant_of(held),)
        del held
        assert resources.participants == ()
        held = resources.get(list)[0]
        assert resources.participants == (participant_of(held),)


def test_what_only_looks_like_a_snapshotable_takes_no_part() -> None:
    class Camera:
        def snapshot(self) -> bytes:
            return b""

        def restore(self, snapshot: bytes) -> None: ...

    with opened(Binding.instance(Camera, Camera())) as resources:
        assert resources.participants == ()


@pytest.mark.parametrize("scope", list(Scope), ids=lambda scope: scope.value)
def test_what_is_built_inside_a_call_joins_it_before_it_is_handed_out(scope: Scope) -> None:
    call = RunningCall()
    with opened(Binding(Counter, lambda r: Counter(), scope=scope)) as resources:
        counter = resources.for_call(call).get(Counter)
        assert call.joined == [participant_of(counter)]


def test_a_dependency_built_inside_a_call_joins_it_in_any_thread() -> None:
    call = RunningCall()
    with opened(Binding(Counter, lambda r: Counter()), Binding(list, lambda r: [r.get(Counter)])) as resources:
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(resources.for_call(call).get, list).result()
        assert call.joined == [participant_of(held[0])]


def test_what_another_thread_had_built_since_the_call_began_joins_when_it_is_handed_out() -> None:
    call = RunningCall()
    with opened(Binding(Counter, lambda r: Counter())) as resources:
        scope = resources.for_call(call)
        counter = resources.get(Counter)
        assert call.joined == []
        assert scope.get(Counter) is counter
        assert call.joined == [participant_of(counter)]
        scope.get(Counter)
        assert len(call.joined) == 1


@pytest.mark.parametrize("scope", [Scope.SINGLETON, Scope.TOOL_CALL], ids=lambda scope: scope.value)
def test_what_a_policy_had_built_joins_when_the_handler_gets_it(scope: Scope) -> None:
    call = RunningCall()
    call.state = CallState.PREPARING  # as before the handler runs
    with opened(Binding(Counter, lambda r: Counter(), scope=scope)) as resources:
        resources_of_call = resources.for_call(call)
        counter = resources_of_call.get(Counter)
        assert call.joined == []
        call.state = CallState.RUNNING
        assert resources_of_call.get(Counter) is counter
        assert call.joined == [participant_of(counter)]


def test_a_participant_that_another_call_holds_fails_the_call_that_gets_it() -> None:
    with opened(Binding(Counter, lambda r: Counter())) as resources:
        resources.for_call(RunningCall("first")).get(Counter)
        with pytest.raises(ParticipantBusyError, match="'first'"):
            resources.for_call(RunningCall("second")).get(Counter)


def test_a_call_without_a_transaction_builds_no_participant() -> None:
    with (
        opened(Binding(Counter, lambda r: Counter())) as resources,
        pytest.raises(CallEndedError),
    ):
        resources.for_call(CallInfo("1", "tool")).get(Counter)


def test_a_resource_built_inside_a_transaction_that_fails_goes_back_to_how_it_was_built() -> None:
    given = Counter()
    with opened(Binding.instance(Counter, given), Binding(Snapshotable, lambda r: Counter())) as resources:

        def work() -> None:
            with tool_transaction(Session(), resources):
                given.value = 1
                resources.get(Snapshotable).restore(2)
                raise KeyError

        with pytest.raises(KeyError):
            work()
        assert given.value == 0
        assert resources.get(Snapshotable).snapshot() == 0


# A filesystem of one's own


class Wrapped:
    """A filesystem that passes on what it is asked, or some of it."""

    def __init__(self, files: InMemoryFilesystem, *, hidden: str = "") -> None:
        self.files = files
        self.hidden = hidden

    def __getattr__(self, name: str) -> Any:
        if name == self.hidden:
            raise AttributeError(name)
        return getattr(self.files, name)


def test_a_filesystem_that_takes_part_in_no_transaction_is_refused() -> None:
    methods = {name: getattr(InMemoryFilesystem, name) for name in dir(Filesystem) if not name.startswith("_")}
    outside: Any = type("Outside", (), {**methods, "read_only": False})()
    for binding in (Binding.instance(Filesystem, outside), Binding(Filesystem, lambda _: outside)):
        with (
            pytest.raises(ResourceError, match="Outside is bound to Filesystem, but takes part in no transaction"),
            opened(binding) as resources,
        ):
            resources.get(Filesystem)


def test_a_filesystem_that_takes_part_through_another_or_changes_nothing_is_not_refused() -> None:
    wrapped: Any = Wrapped(InMemoryFilesystem())
    read_only: Any = Wrapped(InMemoryFilesystem(read_only=True), hidden="lock")
    for files in (wrapped, read_only):
        with opened(Binding(Filesystem, lambda _, files=files: files)) as resources:
            assert resources.get(Filesystem) is files
