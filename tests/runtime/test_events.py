"""Events and the dispatcher that tells handlers of them."""

from __future__ import annotations

import threading
from dataclasses import FrozenInstanceError, dataclass, fields
from datetime import timedelta
from uuid import uuid4

import pytest

from ringfence.prompt import ToolResult
from ringfence.runtime import (
    InProcessDispatcher,
    PromptExecuted,
    PromptRendered,
    RenderedTools,
    ToolInvoked,
    ToolSchema,
)


@dataclass(frozen=True)
class Rang:
    times: int = 1


@dataclass(frozen=True)
class RangTwice(Rang):
    pass


def rang() -> tuple[InProcessDispatcher, list[object]]:
    return InProcessDispatcher(), []


def test_handlers_hear_in_the_order_in_which_they_subscribed_and_on_the_same_thread() -> None:
    dispatcher, heard = rang()
    dispatcher.subscribe(Rang, lambda event: heard.append(("first", event, threading.get_ident())))
    dispatcher.subscribe(Rang, lambda event: heard.append(("second", event, threading.get_ident())))
    result = dispatcher.dispatch(Rang())
    here = threading.get_ident()
    assert heard == [("first", Rang(), here), ("second", Rang(), here)]
    assert (result.event, result.handled_count, result.ok, result.errors) == (Rang(), 2, True, ())


def test_only_the_exact_type_of_an_event_counts() -> None:
    dispatcher, heard = rang()
    dispatcher.subscribe(Rang, heard.append)
    assert dispatcher.dispatch(RangTwice()).handled_count == 0
    assert heard == []


def test_a_handler_that_raises_stops_no_other_and_is_in_the_result(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher, heard = rang()

    def broken(event: Rang) -> None:
        raise LookupError("no bell")

    dispatcher.subscribe(Rang, broken)
    dispatcher.subscribe(Rang, heard.append)
    result = dispatcher.dispatch(Rang())
    assert heard == [Rang()]
    assert [(failure.handler, str(failure.error)) for failure in result.errors] == [(broken, "no bell")]
    assert result.handled_count == 2
    assert not result.ok
    assert "no bell" in caplog.text
    with pytest.raises(ExceptionGroup) as caught:
        result.raise_if_errors()
    assert caught.value.exceptions == (result.errors[0].error,)


def test_a_result_without_errors_raises_nothing() -> None:
    dispatcher, heard = rang()
    dispatcher.subscribe(Rang, heard.append)
    result = dispatcher.dispatch(Rang())
    result.raise_if_errors()
    assert (result.ok, result.errors, heard) == (True, (), [Rang()])


def test_an_interrupt_in_a_handler_is_not_held_back() -> None:
    dispatcher = InProcessDispatcher()

    def interrupted(event: Rang) -> None:
        raise KeyboardInterrupt

    dispatcher.subscribe(Rang, interrupted)
    with pytest.raises(KeyboardInterrupt):
        dispatcher.dispatch(Rang())


def test_unsubscribing_takes_the_first_subscription_and_says_whether_there_was_one() -> None:
    dispatcher, heard = rang()
    for _ in range(2):
        dispatcher.subscribe(Rang, heard.append)
    assert dispatcher.unsubscribe(Rang, heard.append)
    dispatcher.dispatch(Rang())
    assert heard == [Rang()]
    assert dispatcher.unsubscribe(Rang, heard.append)
    assert not dispatcher.unsubscribe(Rang, heard.append)
    assert not dispatcher.unsubscribe(RangTwice, heard.append)


def test_handlers_may_subscribe_and_unsubscribe_while_they_are_called() -> None:
    dispatcher, heard = rang()

    def first(event: Rang) -> None:
        dispatcher.unsubscribe(Rang, first)
        dispatcher.subscribe(Rang, lambda event: heard.append("late"))
        heard.append("first")

    dispatcher.subscribe(Rang, first)
    dispatcher.subscribe(Rang, lambda event: heard.append("second"))
    dispatcher.dispatch(Rang())
    assert heard == ["first", "second"]
    dispatcher.dispatch(Rang())
    assert heard == ["first", "second", "second", "late"]


def test_a_handler_may_dispatch_and_wait_for_a_thread_that_dispatches() -> None:
    dispatcher, heard = rang()

    def in_another_thread(event: Rang) -> None:
        thread = threading.Thread(target=dispatcher.dispatch, args=(RangTwice(),))
        thread.start()
        thread.join(5)
        assert not thread.is_alive()

    dispatcher.subscribe(Rang, in_another_thread)
    dispatcher.subscribe(RangTwice, heard.append)
    assert dispatcher.dispatch(Rang()).ok
    assert heard == [RangTwice()]


def invoked(**changes: object) -> ToolInvoked:
    given = {"prompt_name": "p", "adapter": "a", "name": "t", "params": None, "result": ToolResult.ok(None), **changes}
    return ToolInvoked(**given)  # type: ignore[arg-type]


def test_every_event_has_an_id_of_its_own_a_time_in_utc_and_a_place_for_the_run() -> None:
    events = [
        invoked(),
        invoked(),
        PromptRendered("ns", "key", None, "a", None, (), "text"),
        PromptExecuted("p", "a", result=None),  # type: ignore[arg-type]
        RenderedTools("ns", "key", (), uuid4()),
    ]
    assert len({event.event_id for event in events}) == len(events)
    assert {event.created_at.utcoffset() for event in events} == {timedelta(0)}
    assert all(event.run_context is None for event in events)


@pytest.mark.parametrize("kind", [ToolInvoked, PromptRendered, PromptExecuted, RenderedTools])
def test_events_cannot_be_changed(kind: type[ToolInvoked]) -> None:
    assert {"event_id", "run_context", "session_id", "created_at"} <= {field.name for field in fields(kind)}
    event = kind.__new__(kind)
    with pytest.raises(FrozenInstanceError):
        event.session_id = uuid4()  # type: ignore[misc]


def test_rendered_tools_can_be_asked_by_name() -> None:
    shell = ToolSchema("shell", "Runs.", {"type": "object"})
    event = RenderedTools("ns", "key", (ToolSchema("ls", "Lists.", {}), shell), uuid4())
    assert (event.tool_names, event.tool_count) == (("ls", "shell"), 2)
    assert event.get_tool("shell") is shell
    assert event.get_tool("rm") is None
