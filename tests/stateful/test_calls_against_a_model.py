"""Trees of tool calls against what was there when each handler began and when it ended.

A call that commits is as its handler left it, any other one as it began, at every depth and however it was made; and
receipts and steps say which, also of a call that the one around it took back.
"""

from __future__ import annotations

import contextvars
import os
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from captured_tree import CapturedPath, capture_tree, lasting, tree_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence import (
    DeadlineExceededError,
    Filesystem,
    InMemoryFilesystem,
    MarkdownSection,
    Prompt,
    PromptEvaluationError,
    Receipt,
    ResourceRegistry,
    ScriptedAdapter,
    Session,
    Snapshotable,
    Tool,
    ToolContext,
    ToolExecutor,
    ToolResult,
)
from ringfence.prompt import PolicyDecision, PromptTemplate
from ringfence.resources import Binding
from ringfence.runtime import Append, Change, SlicePolicy, append_all, final_receipts, tool_transaction
from ringfence_sandbox import Workspace


@dataclass(frozen=True)
class Id:
    """The params of the tool: which of the calls it is."""

    of: str


@dataclass(frozen=True)
class Fact:
    """Of a STATE slice, and what a call results in."""

    number: int

    def render(self) -> str:
        if self.number < 0:
            raise KeyboardInterrupt
        return str(self.number)


@dataclass(frozen=True)
class Added:
    """An event for the slice of `Fact`, whose reducer fails on 0."""

    number: int


@dataclass(frozen=True)
class Line:
    """Of a LOG slice."""


class Rows(Snapshotable[tuple[int, ...]]):
    """Made when a call first asks for it."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def snapshot(self, *, tag: str | None = None) -> tuple[int, ...]:
        return tuple(self.held)

    def restore(self, snapshot: tuple[int, ...]) -> None:
        self.held = list(snapshot)


Deed = tuple[str, str, str, int]


@dataclass(frozen=True)
class Call:
    way: str
    """How it is made by the handler around it."""
    says: str
    """What policies say of it."""
    does: tuple[Deed | Call, ...]
    end: str
    caught: bool
    """Whether the handler around it goes on after what it raises."""


@dataclass
class Noted:
    """What is known of a call besides its receipt."""

    call: Call
    around: str | None
    began: dict[str, object] | None = None
    left: dict[str, object] | None = None
    escaped: BaseException | None = None
    doomed: bool = False


RAISED: dict[str, Callable[[], BaseException]] = {
    "raise": ValueError,
    "evaluation": lambda: PromptEvaluationError("no", phase="tool"),
    "deadline": lambda: DeadlineExceededError("late"),
    "interrupt": KeyboardInterrupt,
    "exit": SystemExit,
    "generator": GeneratorExit,
    "group": lambda: BaseExceptionGroup("several", [ValueError(), KeyboardInterrupt()]),
}
RETURNED: dict[str, Any] = {
    "error": ToolResult.error("no"),
    "wrong type": ToolResult.ok(Line()),
    "no result": "done",
    "cannot be rendered": ToolResult.ok(Fact(-1)),
}
BEFORE = ("deny before", "raise before", "write before")
AFTER = ("deny after", "raise after", "write after")

PATHS = st.sampled_from(["a", "b", "d", "d/a", "n/a/b", "d/\udcff \t"])
KINDS = ["write", "write", "write", "append", "delete", "move", "chmod", "symlink", "second", "in a thread"]
DEEDS = st.tuples(
    st.sampled_from([*KINDS, "state", "event", "failing event", "log", "rows", "block", "broken block"]),
    PATHS,
    PATHS,
    st.integers(1, 8),
)


def calls(depth: int) -> st.SearchStrategy[Call]:
    return st.builds(
        Call,
        st.sampled_from(["execute", "evaluate", "thread"]),
        st.sampled_from(["yes"] * 18 + [*BEFORE, *AFTER, "raise on result"]),
        st.lists(st.one_of(DEEDS, DEEDS, calls(depth - 1)) if depth else DEEDS, max_size=4).map(tuple),
        st.sampled_from(["done"] * 22 + [*RAISED, *RETURNED]),
        st.booleans(),
    )


def change(files: Filesystem, kind: str, path: str, to: str, number: int) -> None:
    with suppress(OSError, ValueError):
        match kind:
            case "append":
                files.write(path, str(number), mode="append")
            case "delete":
                files.delete(path, recursive=True)
            case "move":
                files.move(path, to, overwrite=number > 4)
            case "chmod":
                files.chmod(path, 0o755 if number > 4 else 0o600)
            case "symlink":
                files.symlink(path, to)
            case _:
                files.write(path, "x" * number)


def in_thread(work: Callable[[], object]) -> None:
    """Do it in a thread, which is over when this returns; raises what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def add(view: object, event: Added, *, context: object) -> Append[Fact]:
    return Append(Fact(8 // event.number))


class World:
    """A session, a filesystem that is bound, one that calls meet when they change it, and a tool that does as drawn."""

    name = "of the world"  # of the policy that it is, of both kinds

    def __init__(self, files: Filesystem, look: Callable[[], dict[str, object]]) -> None:
        self.session, self.rows, self.second = Session(), Rows(), InMemoryFilesystem()
        self.session[Fact].register(Added, add)
        self.session[Line].register(Line, append_all, policy=SlicePolicy.LOG)
        self.look, self.lines = look, 0
        self.noted: dict[str, Noted] = {}
        tool = Tool[Id, Fact](name="act", description="Act.", handler=self.act)
        section = MarkdownSection(title="T", template="x", tools=[tool], policies=[self])
        resources = ResourceRegistry.of(
            Binding.instance(Filesystem, files),
            Binding(Rows, lambda resolver: self.rows),
        )
        self.prompt = Prompt(PromptTemplate[None](ns="t", key="t", sections=[section], resources=resources))

    def seen(self) -> dict[str, object]:
        """All that a failed call takes back, but for times, which a call within one that goes on may change."""
        facts, rows = self.session[Fact].all(), tuple(self.rows.held)
        return {"facts": facts, "rows": rows, "files": self.look(), "second": without_times(self.second)}

    # -- policies

    def check(self, tool: Any, params: Id, *, context: ToolContext) -> PolicyDecision:
        return self._said("before", params, context)

    def check_effects(
        self, tool: Any, params: Id, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        return self._said("after", params, context)

    def _said(self, when: str, params: Id, context: ToolContext) -> PolicyDecision:
        says = self.noted[params.of].call.says
        if says == f"raise {when}":
            raise ValueError("cannot say")
        if says == f"write {when}":
            context.session.dispatch(Fact(9))
        return PolicyDecision.deny("no") if says == f"deny {when}" else PolicyDecision.allow()

    def on_result(self, tool: Any, params: Id, result: object, *, context: ToolContext) -> None:
        if self.noted[params.of].call.says == "raise on result":
            raise ValueError("not that")

    # -- calls

    def act(self, params: Id, *, context: ToolContext) -> ToolResult[Fact]:
        noted = self.noted[params.of]
        noted.began = self.seen()
        try:
            for one in noted.call.does:
                if isinstance(one, Call):
                    self.make(one, around=params.of)
                else:
                    self.do(one, noted, context)
        except BaseException as error:
            noted.escaped = error
            raise
        finally:
            noted.left = self.seen()
        end = noted.call.end
        if end in RAISED:
            noted.escaped = RAISED[end]()
            raise noted.escaped
        return RETURNED[end] if end in RETURNED else ToolResult.ok(Fact(1))

    def do(self, deed: Deed, noted: Noted, context: ToolContext) -> None:
        files = context.resources.get(Filesystem)
        match deed:
            case ("state", _, _, number):
                context.session.dispatch(Fact(number))
            case ("event", _, _, number):
                assert context.session.dispatch(Added(number)).ok
            case ("failing event", *_):
                assert not context.session.dispatch(Added(0)).ok
                noted.doomed = True
            case ("log", *_):
                context.session.dispatch(Line())
                self.lines += 1
            case ("rows", _, _, number):
                context.resources.get(Rows).held.append(number)
            case ("block" | "broken block" as kind, path, to, number):
                before = self.seen()
                with suppress(ZeroDivisionError), tool_transaction(context.session, context.resources):
                    change(files, "write", path, to, number)
                    context.session.dispatch(Fact(1 // (kind == "block")))
                assert kind == "block" or self.seen() == before
            case ("second", path, to, number):
                change(self.second, "write", path, to, number)
            case ("in a thread", path, to, number):
                in_thread(lambda: change(files, "write", path, to, number))
            case _:
                change(files, *deed)

    def make(self, call: Call, around: str | None = None) -> str:
        of, before = f"call_{len(self.noted)}", self.seen()
        self.noted[of] = Noted(call, around)
        arguments = {"of": of}
        try:
            if call.way == "evaluate":
                turns = [{"tool_calls": [{"name": "act", "arguments": arguments, "id": of}]}, {"text": "Done."}]
                ScriptedAdapter(turns).evaluate(self.prompt, session=self.session)
            else:
                executor = ToolExecutor(prompt=self.prompt, session=self.session)
                run = contextvars.copy_context().run
                if call.way == "thread":
                    in_thread(lambda: run(executor.execute, "act", arguments, call_id=of))
                else:
                    executor.execute("act", arguments, call_id=of)
        except (PromptEvaluationError, KeyboardInterrupt, SystemExit, GeneratorExit, BaseExceptionGroup):
            if not call.caught and around is not None:
                raise
        finally:
            [receipt] = [one for one in self.session[Receipt].all() if one.call_id == of]
            assert receipt.outcome == self.expected(self.noted[of]), receipt.message
            assert self.seen() == (self.after(self.noted[of]) if receipt.outcome == "committed" else before)
        return of

    def after(self, noted: Noted) -> dict[str, object]:
        """What a call that commits leaves: what its handler did, and its result."""
        left = noted.left
        assert left is not None
        facts: Any = left["facts"]
        return {**left, "facts": (*facts, Fact(1))}

    def expected(self, noted: Noted) -> str:
        call = noted.call
        if call.says in BEFORE:
            return "denied"
        if noted.escaped is not None:
            return "failed" if isinstance(noted.escaped, Exception) else "interrupted"
        if call.end in RETURNED and call.end != "cannot be rendered":
            return "failed"
        if call.says in AFTER and self.changed(noted):
            return "denied"
        if call.end == "cannot be rendered":
            return "interrupted"
        return "failed" if call.says == "raise on result" or noted.doomed else "committed"

    def changed(self, noted: Noted) -> list[str]:
        """The paths that differ between the beginning and the end of its handler."""
        if noted.began is None or noted.left is None:
            return []
        pairs: list[Any] = [(noted.began[name], noted.left[name]) for name in ("files", "second")]
        return [path for was, now in pairs for path in sorted({*was, *now}) if was.get(path) != now.get(path)]

    # -- what is told of them

    def kept(self, of: str) -> Receipt | None:
        """The receipt of a call that nothing took back."""
        found = [
            one
            for one in final_receipts(self.session[Receipt].all())
            if (one.call_id, one.outcome) == (of, "committed")
        ]
        return found[0] if found else None

    def tells_the_truth(self) -> None:
        """Of all calls that have ended: how each one did, for good, and what it had changed."""
        told = self.session[Receipt].all()
        first = {one.call_id: one for one in reversed(told)}
        assert len(final_receipts(told)) == len(first), "a call has one receipt, which may be told once more"
        for receipt in final_receipts(told):
            noted = self.noted[receipt.call_id]
            around, by = noted.around, None
            while first[receipt.call_id].outcome == "committed" and around is not None and by is None:
                by = around if first[around].outcome != "committed" else None
                around = self.noted[around].around
            assert (receipt.outcome == "rolled_back", receipt.rolled_back_by) == (by is not None, by)
            paths = [one.path.rpartition(":")[2] for one in receipt.changes]
            assert sorted(paths) == sorted(self.changed(noted))
        assert len(self.session[Line].all()) == self.lines


def without_times(files: Filesystem) -> dict[str, object]:
    return {path: found[:2] if isinstance(found, tuple) else found for path, found in tree_of(files).items()}


@contextmanager
def on_disk() -> Generator[tuple[Workspace, Callable[[], dict[str, CapturedPath]]]]:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place, "root")
        (root / "d").mkdir(parents=True)
        (root / "d/a").write_text("one")
        with Workspace.open(root, store=Path(place, "store")) as workspace:
            yield workspace, lambda: capture_tree(root)


def without_what_waits(tree: dict[str, CapturedPath]) -> dict[str, object]:
    """What is there of the workspace in the middle of a call."""
    found = {path: one for path, one in lasting(tree).items() if path and not path.startswith(".ringfence-hold-")}
    return dict(found)


TREES = st.lists(calls(2), min_size=1, max_size=5)
# On disk each example writes a history, and looks at the tree again and again.
ON_DISK = settings() if os.environ.get("RINGFENCE_PROVE") == "1" else settings(max_examples=30)


@given(trees=TREES)
def test_calls_in_memory_are_kept_whole_or_leave_no_trace(trees: list[Call]) -> None:
    files = InMemoryFilesystem()
    files.write("d/a", "one")
    world = World(files, lambda: without_times(files))
    with world.prompt.resources:
        for tree in trees:
            exactly = tree_of(files), tree_of(world.second)
            of = world.make(tree)
            assert world.kept(of) or (tree_of(files), tree_of(world.second)) == exactly
    world.tells_the_truth()


@ON_DISK
@given(trees=TREES)
def test_calls_on_disk_are_steps_or_leave_no_trace(trees: list[Call]) -> None:
    with on_disk() as (workspace, look):
        world = World(workspace.filesystem, lambda: without_what_waits(look()))
        with world.prompt.resources:
            for tree in trees:
                exactly, steps = look(), len(workspace.steps())
                of = world.make(tree)
                receipt = world.kept(of)
                changed = lasting(look()) != lasting(exactly)
                made = [(step.call_id, step.commit) for step in workspace.steps()[steps:]]
                assert made == ([(of, receipt.commit)] if receipt and changed else [])
                assert receipt or look() == exactly
        world.tells_the_truth()
