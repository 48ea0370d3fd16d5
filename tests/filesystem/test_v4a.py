"""Patches that begin with ``*** Begin Patch``: how they are read, and that they do what unified diffs do."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.adapters import ToolExecutor
from ringfence.filesystem import InMemoryFilesystem
from ringfence.prompt import Prompt, PromptTemplate
from ringfence.runtime import Receipt, Session
from ringfence_tools import VfsToolsSection

CODE = "class A:\n    def f(self):\n        return 1\n\nclass B:\n    def f(self):\n        return 1\n"


def patched(files: dict[str, bytes], patch: str, *, reads: bool = True) -> tuple[dict[str, bytes] | str, Receipt]:
    """The files after a call of ``apply_patch`` on them, which were read before; or what its answer says."""
    filesystem, session = InMemoryFilesystem(), Session()
    for path, content in files.items():
        filesystem.write_bytes(path, content)
    section = VfsToolsSection(session=session, filesystem=filesystem)
    prompt = Prompt(PromptTemplate(ns="n", key="k", sections=[section]))
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)
        for path in files if reads else ():
            executor.call("read_file", {"file_path": path})
        ended = executor.execute("apply_patch", {"patch": patch})
    after = {match.path: filesystem.read_bytes(match.path).content for match in filesystem.glob("**") if match.is_file}
    if not ended.result.success:
        assert after == files
        return ended.text, ended.receipt
    return after, ended.receipt


def update(body: str, path: str = "f") -> str:
    return f"*** Begin Patch\n*** Update File: {path}\n{body}*** End Patch\n"


@pytest.mark.parametrize(
    ("body", "before", "after"),
    [
        ("@@\n a\n-b\n+c\n", "a\nb\n", "a\nc\n"),
        (" a\n-b\n+c\n", "a\nb\n", "a\nc\n"),
        ("@@ class B:\n-        return 1\n+        return 2\n", CODE, CODE[:-2] + "2\n"),
        ("@@ class B: @@\n-        return 1\n+        return 2\n", CODE, CODE[:-2] + "2\n"),
        ("@@ class B:\n class B:\n     def f(self):\n-        return 1\n+        return 2\n", CODE, CODE[:-2] + "2\n"),
        ("@@ class B:\n@@     def f(self):\n     def f(self):\n-        return 1\n+        return 2\n", CODE,
         CODE[:-2] + "2\n"),
        ("@@ class B:\n-class B:\n+class C:\n@@ class B:\n-        return 1\n+        return 2\n", CODE,
         CODE.replace("B", "C")[:-2] + "2\n"),
        ("@@ -7 +7 @@\n-        return 1\n+        return 2\n", CODE, CODE[:-2] + "2\n"),
        ("@@ -7,1 +7,1 @@ class A:\n-        return 1\n+        return 2\n", CODE, CODE[:-2] + "2\n"),
        ("@@ -1,0 +2 @@\n+x\n", "a\nb\n", "a\nx\nb\n"),
        ("@@ ... @@\n-b\n+c\n", "a\nb\n", "a\nc\n"),
        ("--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n", "a\nb\n", "a\nc\n"),
        ("@@ class B:\n@@     def f(self):\n+        # new\n", "class B:\n    def f(self):\n        x\n",
         "class B:\n    def f(self):\n        # new\n        x\n"),
        ("@@\n-a\n+x\n@@\n-c\n+z\n", "a\nb\nc\n", "x\nb\nz\n"),
        ("@@\n a\n\n-b\n+c\n", "a\n\nb\n", "a\n\nc\n"),
        ("@@\n-a\n+x\n*** End of File\n", "a\nb\na\n", "a\nb\nx\n"),
        ("@@\n+z\n*** End of File\n", "a\n", "a\nz\n"),
        ("@@\n+z\n*** End of File\n", "a", "a\nz"),
        ("@@\n-b\n+c\n", "a\nb", "a\nc"),
        ("@@\n-b\n", "a\nb", "a\n"),
        ("@@\n a\n omega\n+added\n", "a\nomega", "a\nomega\nadded"),
        ("@@\n a\n omega\n+added\n", "a\r\nomega", "a\r\nomega\r\nadded"),
        ("@@\n a\n omega\n+added\n", "a\romega", "a\romega\radded"),
        ("@@\n+added\n omega\n", "omega", "added\nomega"),
        ("@@\n-b\n+c\n\\ No newline at end of file\n", "a\nb\n", "a\nc"),
        ("@@\n-b\n\\ No newline at end of file\n+c\n", "a\nb", "a\nc\n"),
        ("@@\n-b\n+c\n", "a\r\nb\r\n", "a\r\nc\r\n"),
        ("@@\n-b\n+c\n", "\ufeffb\n", "\ufeffc\n"),
    ],
)  # fmt: skip
def test_hunks_that_fit(body: str, before: str, after: str) -> None:
    assert patched({"f": before.encode()}, update(body))[0] == {"f": after.encode()}


@pytest.mark.parametrize(
    ("body", "before", "said"),
    [
        ("@@\n-        return 1\n+        return 2\n", CODE, "fits at lines 3, 7"),
        ("@@ class C:\n-        return 1\n+        return 2\n", CODE, "class C:"),
        ("@@ class B:\n-class A:\n+class Z:\n", CODE, "above what its header names"),
        ("@@     def f(self):\n+        # new\n", CODE, "lines 2, 6"),
        ("@@ -9 +9 @@\n-        return 1\n+        return 2\n", CODE, "fits at lines 3, 7"),
        ("@@ -1,3 +1,4 @@\n+x\n", CODE, "nothing shows where"),
        ("@@\n-c\n+z\n@@\n-a\n+x\n", "a\nb\nc\n", "above the hunk before it"),
        ("@@\n+z\n", "a\n", "nothing shows where"),
        ("@@\n-x\n+z\n", "a\n", "Read the file again"),
        ("@@\n-a\n+x\n*** End of File\n", "a\nb\n", "does not fit"),
    ],
)
def test_hunks_that_do_not_fit_in_exactly_one_place_change_nothing(body: str, before: str, said: str) -> None:
    answer, receipt = patched({"f": before.encode()}, update(body))
    assert said in answer
    assert receipt.outcome == "failed"


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        (update("@@\n-a\n+b\n").replace("*** End Patch\n", ""), "cut off"),
        ("*** Begin Patch\n*** End Patch\n", "names no file"),
        (update(""), "line 2 of the patch: nothing is said"),
        (update("@@ class A:\n"), "nothing is said about what to change there"),
        (update("a\n"), "line 3 of the patch: each line of a hunk"),
        ("*** Begin Patch\n*** Add File: n\na\n*** End Patch\n", "line 3 of the patch: each line of a new file"),
        ("*** Begin Patch\n*** Delete File: f\n-a\n*** End Patch\n", "line 3 of the patch: a file that is deleted"),
        ("*** Begin Patch\nf\n*** End Patch\n", "line 2 of the patch: a file begins with"),
        ("*** Update File: f\n@@\n-a\n+b\n", "cut off"),
        ("*** Begin Patch\n*** Add File: n", "cut off"),
        ("*** Begin Patch\n--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n", "cut off"),
        (update("@@ -1 +1 @@\n"), "line 3 of the patch: this hunk has no lines"),
        (update("--- a/g\n+++ b/g\n@@ -1 +1 @@\n-a\n+b\n"), "line 3 of the patch: names of a unified diff"),
        (update("@@\n-a\n+b\n--- a/g\n+++ b/g\n@@ -1 +1 @@\n-a\n+b\n"), "line 6 of the patch: names of a unified diff"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(patch: str, said: str) -> None:
    answer, receipt = patched({"f": b"a\n"}, patch)
    assert said in answer
    assert receipt.outcome == "rejected"


def test_a_patch_creates_deletes_moves_and_changes_in_one_call() -> None:
    patch = (
        "*** Begin Patch\n*** Add File: new/n.txt\n+a\n+\n+b\n*** Delete File: gone\n"
        "*** Update File: old\n*** Move to: moved\n@@\n-x\n+y\n*** Update File: kept\n"
        "*** Move to: kept too\n*** End Patch"
    )
    files = {"gone": b"anything\n", "old": b"x\n", "kept": b"k\n"}
    assert patched(files, patch)[0] == {"new/n.txt": b"a\n\nb\n", "moved": b"y\n", "kept too": b"k\n"}


def test_a_patch_in_a_fence_or_with_other_line_ends_is_the_same() -> None:
    text = update("@@\n-a\n+b\n")
    for patch in (f"Here it is:\n```\n{text}```\n", text.replace("\n", "\r\n")):
        assert patched({"f": b"a\n"}, patch)[0] == {"f": b"b\n"}


@pytest.mark.parametrize(
    "patch",
    [
        "*** Update File: f\n@@\n-a\n+b\n*** End Patch\n",
        "*** Begin Patch\n--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n*** End Patch\n",
        "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n*** End Patch\n",
        "--- a/f\n+++ b/f\n@@\n-a\n+b\n*** End of File\n",
        "--- a/f\n+++ b/f\n@@ a @@\n-a\n+b\n",
        "*** Delete File: f\n*** Add File: f\n--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+b\n*** End Patch\n",
    ],
)
def test_forms_that_are_mixed_are_understood(patch: str) -> None:
    assert patched({"f": b"a\n"}, patch)[0] == {"f": b"b\n"}


def test_the_heading_of_a_unified_hunk_tells_places_apart_if_it_is_in_the_file() -> None:
    hunk = "-        return 1\n+        return 2\n"
    for heading in ("class B:", "class B: @@"):
        assert patched({"f": CODE.encode()}, f"--- a/f\n+++ b/f\n@@ {heading}\n{hunk}")[0] == {
            "f": (CODE[:-2] + "2\n").encode()
        }
    assert "lines 3, 7" in patched({"f": CODE.encode()}, f"--- a/f\n+++ b/f\n@@ class C:\n{hunk}")[0]


@pytest.mark.parametrize("patch", [update("@@\n-a\n+b\n"), "*** Begin Patch\n*** Delete File: f\n*** End Patch\n"])
def test_a_file_that_was_not_read_is_neither_changed_nor_deleted(patch: str) -> None:
    assert patched({"f": b"a\n"}, patch, reads=False)[1].outcome == "denied"


def test_a_new_file_replaces_none() -> None:
    answer, _ = patched({"f": b"a\n"}, "*** Begin Patch\n*** Add File: f\n+b\n*** End Patch\n")
    assert "exists already" in answer


# Every line of a file is another one, so that each hunk fits in one place; a line that is new is like none of them.
TREES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 12), min_size=1)
EDITS = st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["drop", "change", "insert"])), max_size=4)


def edited(lines: Sequence[str], edits: Sequence[tuple[int, str]]) -> list[str]:
    after = [[line] for line in lines]
    for number, (at, edit) in enumerate(edits):
        if at < len(after):
            after[at] = {"drop": [], "change": [f"new {number}\n"], "insert": [*after[at], f"new {number}\n"]}[edit]
    return [line for part in after for line in part]


@given(TREES, st.dictionaries(st.sampled_from("abcde"), EDITS), st.sets(st.sampled_from("abcd")))
def test_both_forms_of_a_patch_give_the_same_tree(
    tree: dict[str, int], edits: dict[str, list[tuple[int, str]]], removed: set[str]
) -> None:
    before = {path: [f"{path} line {n}\n" for n in range(count)] for path, count in tree.items()}
    unified, v4a = "", "*** Begin Patch\n"
    for path in sorted({*before, *edits}):
        old = before.get(path, [])
        new = [] if path in removed else edited(old, edits.get(path, [])) if old else ["new\n"]
        if old == new:
            continue
        hunks = list(difflib.unified_diff(old, new, n=2))[2:]
        names = (f"--- a/{path}\n" if old else "--- /dev/null\n", f"+++ b/{path}\n" if new else "+++ /dev/null\n")
        unified += "".join((*names, *hunks))
        if not new:
            v4a += f"*** Delete File: {path}\n"
        elif not old:
            v4a += f"*** Add File: {path}\n" + "".join(f"+{line}" for line in new)
        else:
            v4a += f"*** Update File: {path}\n" + "".join("@@\n" if one.startswith("@@") else one for one in hunks)
    if not unified:
        return
    files = {path: "".join(lines).encode() for path, lines in before.items()}
    trees = [patched(files, patch)[0] for patch in (unified, f"{v4a}*** End Patch\n")]
    assert trees[0] == trees[1]
    assert isinstance(trees[0], dict)
