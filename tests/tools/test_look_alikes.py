"""Paths that look alike and are different: a missing one names the other, a new one is not made without a word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.adapters import ToolExecutor
from ringfence.escapes import unescaped
from ringfence.filesystem import Filesystem, InMemoryFilesystem
from ringfence.filesystem.look_alikes import appearance, display_exactly
from ringfence.prompt import Prompt, PromptTemplate
from ringfence.runtime import Session
from ringfence_sandbox import HostFilesystem
from ringfence_tools import VfsToolsSection

TWINS = [
    ("caf\u00e9.txt", "cafe\u0301.txt"),
    ("cafe\u0301.txt", "caf\u00e9.txt"),
    ("Shot 10.30 AM.png", "Shot 10.30\u202fAM.png"),
    ("a b.txt", "a\u00a0b.txt"),
    ("main.py", "ma\u200bin.py"),
    ("README.md", "\ufeffREADME.md"),
    ("main.py", "\uff4d\uff41\uff49\uff4e.py"),
    ("it's.md", "it\u2019s.md"),
    ("a-b.txt", "a\u2011b.txt"),
    ("a.txt", "a.txt "),
    ("d\u00e9/x.txt", "de\u0301/x.txt"),
]


@pytest.fixture(params=["memory", "disk"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Filesystem]:
    if request.param == "memory":
        yield InMemoryFilesystem()
    else:
        root = tmp_path / "root"
        root.mkdir()
        with HostFilesystem(root, store=tmp_path / "store") as filesystem:
            yield filesystem


@pytest.fixture
def executor(files: Filesystem) -> Iterator[ToolExecutor]:
    session = Session()
    section = VfsToolsSection(session=session, filesystem=files)
    prompt = Prompt(PromptTemplate(ns="tests", key="files", sections=[section]))
    with prompt.resources:
        yield ToolExecutor(prompt=prompt, session=session)


def text_of(executor: ToolExecutor, tool: str, *, success: bool = True, **arguments: object) -> str:
    answer = executor.execute(tool, arguments)
    assert answer.result.success is success, answer.text
    return answer.text


@pytest.mark.parametrize(("wanted", "there"), TWINS)
def test_a_missing_path_names_its_only_look_alike_by_escapes_that_every_tool_takes(
    files: Filesystem, executor: ToolExecutor, wanted: str, there: str
) -> None:
    files.write(there, "x\n")
    escaped = display_exactly(there)
    assert escaped.isascii()
    place = escaped if "/" not in there else escaped.partition("/")[0]
    for tool, arguments in (
        ("read_file", {"file_path": wanted}),
        ("edit_file", {"file_path": wanted, "old_string": "x", "new_string": "y"}),
        ("apply_patch", {"patch": f"--- a/{wanted}\n+++ b/{wanted}\n@@ -1 +1 @@\n-x\n+y\n"}),
        ("move", {"source": wanted, "target": "elsewhere"}),
        ("rm", {"path": wanted}),
        ("grep", {"path": wanted, "pattern": "x"}),
        ("ls", {"path": wanted}),
    ):
        if there != there.strip() and tool == "apply_patch":
            continue
        text = text_of(executor, tool, success=False, **arguments)
        assert f"there is no {display_exactly(wanted)} in the workspace, but {place}, which looks the same" in text
    assert "1 | x" in text_of(executor, "read_file", file_path=escaped)
    text_of(executor, "edit_file", file_path=escaped, old_string="x", new_string="y")
    assert files.read(there).content == "y\n"


@pytest.mark.parametrize(("wanted", "there"), TWINS)
def test_a_new_path_beside_a_look_alike_is_made_with_a_word(
    files: Filesystem, executor: ToolExecutor, wanted: str, there: str
) -> None:
    if wanted == there.strip():
        pytest.skip("blanks around a name are the writer's")
    files.write(there, "x\n")
    place = display_exactly(there).partition("/")[0]
    text = text_of(executor, "write_file", file_path=wanted, content="new\n")
    assert f"there is {place}, which looks the same" in text
    assert files.read(there).content == "x\n"
    text_of(executor, "move", source=wanted, target="z")
    files.delete(wanted.partition("/")[0] if "/" in wanted else "z")
    files.write("z", "x\n")
    text_of(executor, "read_file", file_path="z")
    assert f"there is {place}, which looks the same" in text_of(executor, "move", source="z", target=wanted)
    files.delete(wanted.partition("/")[0], recursive=True)
    patch = f"--- /dev/null\n+++ b/{wanted}\n@@ -0,0 +1 @@\n+y\n"
    assert f"there is {place}, which looks the same" in text_of(executor, "apply_patch", patch=patch)
    assert "looks the same" not in text_of(executor, "write_file", file_path=wanted, content="again\n")


def test_a_file_is_renamed_to_its_look_alike_without_a_word(files: Filesystem, executor: ToolExecutor) -> None:
    files.write("cafe\u0301.txt", "x\n")
    text_of(executor, "read_file", file_path="cafe\\xcc\\x81.txt")
    assert "same" not in text_of(executor, "move", source="cafe\\xcc\\x81.txt", target="caf\u00e9.txt")
    assert [match.path for match in files.glob("*")] == ["caf\u00e9.txt"]


def test_names_that_only_resemble_each_other_are_no_look_alikes(files: Filesystem, executor: ToolExecutor) -> None:
    files.write("src/main.py", "x\n")
    files.write("caf\u00e8.txt", "x\n")
    files.write("x2.txt", "x\n")
    for other in ("src/Main.py", "caf\u00e9.txt", "cafe.txt", "x\u00b2.txt"):
        assert "looks the same" not in text_of(executor, "write_file", file_path=other, content="y\n")
    assert "did you mean src/main.py" in text_of(executor, "read_file", success=False, file_path="src/mian.py")


@given(st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_what_is_displayed_exactly_is_read_back(name: str) -> None:
    assert unescaped(display_exactly(name)) == name
    assert appearance(appearance(name)) == appearance(name)
