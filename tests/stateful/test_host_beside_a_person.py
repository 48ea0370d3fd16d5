"""A person saves files at any instant of a call, of its rollback, after its crash and during the recovery.

What the person saved last of a path stays byte for byte, whatever becomes of the call: in the tree, in the history of
a call that was committed, or, where two saves want one place, among what is kept for a conflict. Where nobody saved
anything, the tree is wholly as it was. The process of the call is really killed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from captured_tree import CapturedPath, capture_tree
from effort import amount, spread
from failpoints import injected
from hypothesis import example, given, settings
from hypothesis import strategies as st
from killing import killed_at
from real_git import blob_id, objects_of

from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace

CASES = amount(prove=5000, test=25)
PATHS = ("a", "b", "d/a", "d/b", "d/e/a", "n/a", "n/o/b", "d", "d/e", "n")
paths = st.sampled_from(PATHS)


@dataclass(frozen=True)
class Edit:
    """The person saves a file, in place or by replacing it, before the system call with this number."""

    at: int
    path: str
    how: Literal["in place", "replace"]
    number: int

    @property
    def content(self) -> bytes:
        return b"the person's %d\n" % self.number * 20


@dataclass(frozen=True)
class Case:
    changes: tuple[tuple[str, ...], ...]
    end: Literal["commit", "rollback"]
    killed: int
    edits: tuple[Edit, ...]
    later: tuple[Edit, ...]
    """Those after the crash, the first of them before the recovery."""
    again: int
    """Where the first recovery is killed."""


changes = st.one_of(
    st.tuples(st.just("write"), paths),
    st.tuples(st.just("append"), paths),
    st.tuples(st.just("delete"), paths),
    st.tuples(st.just("move"), paths, paths),
    st.tuples(st.just("mkdir"), paths),
    st.tuples(st.just("chmod"), paths),
    st.tuples(st.just("symlink"), paths),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    numbers = iter(range(1000))

    def edits(most: int) -> tuple[Edit, ...]:
        how = st.sampled_from(("in place", "replace"))
        drawn: list[tuple[int, str, Literal["in place", "replace"]]] = draw(
            st.lists(st.tuples(st.integers(0, most), paths, how), max_size=4)
        )
        return tuple(Edit(at, path, way, next(numbers)) for at, path, way in sorted(drawn))

    return Case(
        tuple(draw(st.lists(changes, min_size=1, max_size=6))),
        draw(st.sampled_from(("commit", "rollback"))),
        draw(st.integers(0, 90)),
        edits(60),
        edits(25),
        draw(st.integers(0, 40)),
    )


class Person:
    """Saves files, and writes down what was saved: the last of every path counts."""

    def __init__(self, root: Path, diary: Path) -> None:
        self.root = root
        self.diary = diary

    def save(self, edit: Edit) -> None:
        path = self.root / edit.path
        with suppress(OSError):
            if path.is_symlink() or path.is_dir():
                return
            if edit.how == "in place":
                self._note(edit)
                path.write_bytes(edit.content)
            else:
                beside = path.with_name("editor's")
                beside.write_bytes(edit.content)
                self._note(edit)
                os.replace(beside, path)

    def _note(self, edit: Edit) -> None:
        if edit.path.rpartition("/")[0] == "" or (self.root / edit.path).parent.is_dir():
            inode = (self.root / edit.path).stat().st_ino if (self.root / edit.path).exists() else 0
            with open(self.diary, "a") as diary:
                diary.write(json.dumps([edit.path, edit.number, edit.how, inode]) + "\n")

    def at(self, edits: tuple[Edit, ...]) -> Callable[[str], None]:
        """To be called before every system call."""
        waiting = list(edits)
        calls = 0

        def before(name: str) -> None:
            nonlocal calls
            while waiting and waiting[0].at <= calls:
                self.save(waiting.pop(0))
            calls += 1

        return before

    def saved(self) -> dict[str, bytes]:
        """By path, what was saved there last. A later save in place, by whatever path, is one of the same inode."""
        found: dict[str, tuple[bytes, int]] = {}
        if self.diary.exists():
            for line in self.diary.read_text().splitlines():
                path, number, _, inode = json.loads(line)
                content = Edit(0, path, "replace", number).content
                for other in [other for other, (_, its) in found.items() if inode and its == inode]:
                    del found[other]
                found[path] = (content, inode)
        return {path: content for path, (content, _) in found.items()}


def change(fs: HostFilesystem, deed: str, path: str, to: str = "") -> None:
    match deed:
        case "write":
            fs.write(path, "the call's\n")
        case "append":
            fs.write(path, "more\n", mode="append")
        case "delete":
            fs.delete(path, recursive=True)
        case "move":
            fs.move(path, to, overwrite=True)
        case "mkdir":
            fs.mkdir(path)
        case "chmod":
            fs.chmod(path, 0o700)
        case "symlink":
            fs.symlink(path, "a")


@contextmanager
def place() -> Generator[Path]:
    top = Path(tempfile.mkdtemp(prefix="beside-a-person-"))
    try:
        for path in ("a", "d/a", "d/e/a"):
            (top / "root" / path).parent.mkdir(parents=True, exist_ok=True)
            (top / "root" / path).write_text(f"{path} as it was\n")
        yield top
    finally:
        shutil.rmtree(top)


def the_call(top: Path, case: Case, person: Person) -> Callable[[Callable[[str], None]], None]:
    def work(stop: Callable[[str], None]) -> None:
        saving = person.at(case.edits)

        def before(name: str) -> None:
            saving(name)
            stop(name)

        workspace = Workspace.open(top / "root", store=top / "store")
        with injected(before):
            with held_call(workspace.filesystem) as held:
                fs = workspace.filesystem.for_call(held)
                for one in case.changes:
                    with suppress(OSError, ValueError):
                        change(fs, *one)
                try:
                    held.changed()
                    getattr(held, case.end)()
                except OSError:
                    held.rollback()
            workspace.close()

    return work


def unchanged(before: Mapping[str, CapturedPath], now: Mapping[str, CapturedPath], conflicts: tuple[str, ...]) -> None:
    """Every file is the very file that it was, but for conflicts and what the person saved."""
    for path, one in before.items():
        if one.kind == "0o100000" and not any(f"{path}/".startswith(f"{conflict}/") for conflict in conflicts):
            assert now.get(path) == one, path


@pytest.mark.parametrize("how", ["in place", "replace"])
@pytest.mark.parametrize("changes", [(("write", "a"), ("write", "a")), (("write", "n/a"),)], ids=["twice", "new"])
def test_a_save_that_a_rollback_met_stays_in_its_place_if_that_is_killed_next(
    changes: tuple[tuple[str, ...], ...], how: Literal["in place", "replace"]
) -> None:
    saved = 0
    for at in spread(range(6, 20), 3):
        edit = Edit(at, changes[0][1], how, 1)
        with place() as top:
            root, person = top / "root", Person(top / "root", top / "diary")
            Workspace.open(root, store=top / "store").close()
            killed_at(at + 1, the_call(top, Case(changes, "rollback", at + 1, (edit,), (), 0), person))
            Workspace.open(root, store=top / "store").close()
            for path, content in person.saved().items():
                assert (root / path).read_bytes() == content, at
                saved += 1
    assert saved


@pytest.mark.parametrize("how", ["in place", "replace"])
@pytest.mark.parametrize(
    "changes",
    [
        (("move", "a", "d/a"), ("write", "a")),
        (("write", "a"), ("delete", "a"), ("write", "a")),
        (("write", "a"), ("append", "a")),
        (("write", "a"), ("move", "a", "b")),
        (("write", "a"), ("move", "d/a", "a")),
        (("write", "a"), ("chmod", "a"), ("write", "a")),
        (("move", "d/a", "a"), ("delete", "a"), ("write", "a"), ("write", "a")),
        (("append", "a"), ("append", "a"), ("chmod", "a"), ("append", "a")),
    ],
    ids=["moved away", "deleted", "appended", "moved", "moved over", "another mode", "made anew", "told and gone on"],
)
def test_a_save_of_what_the_call_had_made_is_not_written_over(
    changes: tuple[tuple[str, ...], ...], how: Literal["in place", "replace"]
) -> None:
    for at in spread(range(4, 18), 4):
        with place() as top:
            root, person = top / "root", Person(top / "root", top / "diary")
            Workspace.open(root, store=top / "store").close()
            assert not killed_at(
                200, the_call(top, Case(changes, "commit", 200, (Edit(at, "a", how, 1),), (), 0), person)
            )
            Workspace.open(root, store=top / "store").close()
            there = {path.read_bytes() for path in root.rglob("*") if path.is_file()}
            in_history = objects_of(top / "store/history")
            for content in person.saved().values():
                assert content in there or blob_id(content) in in_history, at


@pytest.mark.parametrize("how", ["in place", "replace"])
@pytest.mark.parametrize(
    ("changes", "edited"),
    [
        ((("write", "d/a"), ("move", "d", "e"), ("delete", "e")), "d/a"),
        ((("write", "d/a"), ("move", "d", "e"), ("delete", "e")), "e/a"),
        ((("delete", "d"), ("append", "d/a"), ("delete", "d/a")), "d/a"),
        ((("delete", "d/a"), ("delete", "d")), "d/a"),
        ((("mkdir", "n"), ("delete", "n")), "n/a"),
        ((("mkdir", "n"), ("move", "a", "n/a"), ("move", "n", "m"), ("delete", "m")), "n/a"),
    ],
    ids=["written", "moved", "made anew", "deleted", "made", "moved into one made"],
)
def test_a_save_in_a_directory_that_the_call_deletes_is_not_lost(
    changes: tuple[tuple[str, ...], ...], edited: str, how: Literal["in place", "replace"]
) -> None:
    for at in spread(range(4, 24), 4):
        with place() as top:
            root, person = top / "root", Person(top / "root", top / "diary")
            Workspace.open(root, store=top / "store").close()
            the_call(top, Case(changes, "commit", 200, (Edit(at, edited, how, 1),), (), 0), person)(lambda _: None)
            Workspace.open(root, store=top / "store").close()
            there = {path.read_bytes() for path in root.rglob("*") if path.is_file()}
            in_history = objects_of(top / "store/history")
            for content in person.saved().values():
                assert content in there or blob_id(content) in in_history, at


@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ((("write", "a"), ("write", "b")), "a"),
        ((("write", "b"),), "b"),
        ((("delete", "a"),), "a"),
        ((("move", "a", "b"),), "a"),
        ((("write", "a"), ("move", "a", "b")), "b"),
        ((("write", "d/a"), ("move", "d", "e")), "e/a"),
        ((("delete", "d/e"), ("write", "d/e/a")), "d/e/a"),
    ],
)
def test_a_save_over_what_a_call_left_is_not_its_step(changes: tuple[tuple[str, ...], ...], saved: str) -> None:
    with place() as top, Workspace.open(top / "root", store=top / "store") as workspace:
        with held_call(workspace.filesystem) as held:
            fs = workspace.filesystem.for_call(held)
            for one in changes:
                change(fs, *one)
            (top / "root" / saved).write_text("the person's\n")
            held.changed()
            with pytest.raises(OSError, match="changed by somebody else"):
                held.commit()
            held.rollback()
        there = {path.read_text() for path in (top / "root").rglob("*") if path.is_file()}
        assert "the person's\n" in there  # what the call had moved is moved back, with what was saved in it
        assert not workspace.steps()


@pytest.mark.parametrize(
    "changes",
    [
        (("write", "a"), ("move", "a", "b"), ("write", "a"), ("chmod", "b")),
        (("delete", "d"), ("write", "d/a"), ("move", "d", "n"), ("delete", "n/a")),
        (("move", "a", "b"), ("move", "b", "a")),
        (("write", "n/a"), ("delete", "n"), ("mkdir", "n"), ("symlink", "n/a")),
        (("move", "d/a", "a"), ("move", "d", "n"), ("move", "n/e", "d"), ("delete", "n")),
    ],
)
def test_what_a_call_changed_itself_is_nobody_else_s(changes: tuple[tuple[str, ...], ...]) -> None:
    with place() as top, Workspace.open(top / "root", store=top / "store") as workspace:
        with held_call(workspace.filesystem) as held:
            fs = workspace.filesystem.for_call(held)
            for one in changes:
                change(fs, *one)
            held.commit()
        assert len(workspace.steps()) <= 1


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_what_is_written_into_a_file_of_the_call_that_it_has_replaced_is_kept(end: str) -> None:
    with place() as top, Workspace.open(top / "root", store=top / "store") as workspace:
        with held_call(workspace.filesystem) as held:
            fs = workspace.filesystem.for_call(held)
            fs.write("a", "the call's first\n")
            with open(top / "root/a", "a") as program:
                fs.write("a", "the call's second\n")
                program.write("written into the first\n")
            (top / "root/a").write_text("saved after it\n")
            held.changed()
            if end == "commit":
                with pytest.raises(OSError, match="nothing is changed, read it again"):
                    held.commit()
            held.rollback()
        assert (top / "root/a").read_text() == "saved after it\n"
        kept = [path.read_text() for path in (top / "store/kept").iterdir()]
        assert sorted(kept) == ["a as it was\n", "the call's first\nwritten into the first\n"]


@pytest.mark.parametrize("deed", ["write", "delete"])
def test_a_save_of_what_an_inner_rollback_gave_back_is_not_lost(deed: str) -> None:
    with place() as top:
        with Workspace.open(top / "root", store=top / "store") as workspace:
            fs = workspace.filesystem
            with held_call(fs) as held:
                with held_call(fs, call_id="inner", parent=held) as inner:
                    change(fs.for_call(inner), "write", "a")
                    inner.rollback()
                Person(top / "root", top / "diary").save(Edit(0, "a", "replace", 1))
                change(fs.for_call(held), deed, "a")
                held.commit()
        assert blob_id(Edit(0, "a", "replace", 1).content) in objects_of(top / "store/history")


def test_a_new_time_alone_is_no_save() -> None:
    with place() as top, Workspace.open(top / "root", store=top / "store") as workspace:
        with held_call(workspace.filesystem) as held:
            fs = workspace.filesystem.for_call(held)
            fs.write("a", "first\n")
            os.utime(top / "root/a", ns=(1, 1))
            fs.write("a", "second\n")
            held.commit()
        assert (top / "root/a").read_text() == "second\n"


@example(
    Case(
        (("write", "a"), ("write", "n/a"), ("write", "a"), ("chmod", "n/a")),
        "commit",
        18,
        (Edit(14, "n/a", "in place", 0),),
        (),
        0,
    )
)
@example(Case((("write", "n/o/b"), ("write", "n/a")), "commit", 200, (Edit(3, "n/a", "in place", 0),), (), 0))
@example(
    Case((("delete", "a"), ("mkdir", "a"), ("write", "a/b")), "commit", 200, (Edit(9, "a/b", "replace", 0),), (), 0)
)
@given(cases())
@settings(max_examples=CASES)
def test_what_a_person_saved_stays_byte_for_byte(case: Case) -> None:
    with place() as top:
        root, person = top / "root", Person(top / "root", top / "diary")
        Workspace.open(root, store=top / "store").close()
        before = capture_tree(root)
        killed = killed_at(case.killed, the_call(top, case, person))
        for edit in case.later[:1]:
            person.save(edit)

        def recovery(stop: Callable[[str], None]) -> None:
            saving = person.at(case.later[1:])

            def announced(name: str) -> None:
                saving(name)
                stop(name)

            with injected(announced):
                Workspace.open(root, store=top / "store").close()

        killed_at(case.again, recovery)
        with Workspace.open(root, store=top / "store") as workspace:
            done = any(step.call_id == "call-1" for step in workspace.steps())
            now = capture_tree(root)
            there = {path.read_bytes() for path in root.rglob("*") if path.is_file() and not path.is_symlink()}
            saved = person.saved()
            if len(case.edits) + len(case.later) > 1:
                # Of two saves that want one place, since the call moved or wrote between them, one is kept aside.
                there |= {path.read_bytes() for path in (top / "store/kept").rglob("*") if path.is_file()}
            if not done and not saved:
                unchanged(before, now, ())
        in_history = objects_of(top / "store/history") if done and saved else set[str]()
        for path, content in saved.items():
            assert content in there or blob_id(content) in in_history, (path, content[:20], killed, done)
        assert not [name for name in os.listdir(root) if name.startswith(".ringfence")]
