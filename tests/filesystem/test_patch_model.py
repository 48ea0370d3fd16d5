"""Random patches of random files, beside a plain model: a file is a list of lines with their ends.

Whatever the file's line ends are and wherever a patch marks a missing newline, the file becomes what the model says, or
the patch is refused and the file stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from hypothesis import assume, given
from hypothesis import strategies as st
from patches import Patched, apply_patch, parse_patch

MARK = "\\ No newline at end of file\n"
TEXTS = st.integers(0, 30).map("line {}".format) | st.sampled_from(
    ["a", "b", "", " x", "-- x", "++ y", "\\ z", "@@", "ü"]
)
LAST_ENDS = {"lf": "\n", "crlf": "\r\n", "cr": "\r"}


@dataclass(frozen=True)
class Line:
    text: str
    end: str


@dataclass(frozen=True)
class Row:
    """A line of a patch: it stays, goes or comes."""

    kind: str
    text: str
    end: str


def joined(lines: Sequence[Line]) -> bytes:
    return "".join(line.text + line.end for line in lines).encode()


def ended(texts: Sequence[tuple[str, str]], has_newline: bool) -> list[Line]:
    lines = [Line(text, end) for text, end in texts]
    # An empty line without an end is no line.
    if lines and not has_newline and lines[-1].text:
        lines[-1] = Line(lines[-1].text, "")
    return lines


@st.composite
def files(draw: st.DrawFn) -> list[Line]:
    style = draw(st.sampled_from(["lf", "crlf", "cr", "mixed"]))
    ends = st.sampled_from(["\n", "\r\n"]) if style == "mixed" else st.just(LAST_ENDS[style])
    return ended(draw(st.lists(st.tuples(TEXTS, ends), max_size=10)), draw(st.booleans()))


def ends_of(lines: Sequence[Line]) -> list[str]:
    return sorted({line.end for line in lines if line.end}) or ["\n"]


@st.composite
def edits(draw: st.DrawFn, lines: Sequence[Line]) -> list[Row]:
    """An edit of the file: all its lines in order, and new ones between them."""
    rows: list[Row] = []
    new = st.builds(Row, st.just("+"), TEXTS, st.sampled_from(ends_of(lines)))
    for line in (*lines, None):
        rows += draw(st.lists(new, max_size=2)) if draw(st.integers(0, 4)) == 0 else []
        if line is not None:
            rows.append(Row(draw(st.sampled_from("     -")), line.text, line.end))
    return rows


# What a program writes: exact bytes. git's lines end at \n alone.


def exact_diff(old: bytes, new: bytes, context: int) -> bytes:
    before, after = (content.split(b"\n") for content in (old, new))
    rows = [
        [*(line + b"\n" for line in lines[:-1]), *([lines[-1] + b"\n" + MARK.encode()] if lines[-1] else [])]
        for lines in (before, after)
    ]
    patch = b"--- a/f\n+++ b/f\n"
    for group in SequenceMatcher(None, *rows, autojunk=False).get_grouped_opcodes(context):
        spans = [(group[0][1], group[-1][2]), (group[0][3], group[-1][4])]
        # An empty range names the line before it.
        patch += b"@@ -%d,%d +%d,%d @@\n" % tuple(n for a, b in spans for n in (a + (b > a), b - a))
        for tag, a, b, c, d in group:
            if tag == "equal":
                patch += b"".join(b" " + line for line in rows[0][a:b])
            else:
                patch += b"".join([*(b"-" + line for line in rows[0][a:b]), *(b"+" + line for line in rows[1][c:d])])
    return patch


@given(st.data(), st.integers(0, 4))
def test_an_exact_diff_gives_the_exact_file(data: st.DataObject, context: int) -> None:
    old = data.draw(files())
    rows = data.draw(edits(old))
    new = ended([(row.text, row.end or ends_of(old)[0]) for row in rows if row.kind != "-"], data.draw(st.booleans()))
    if joined(old) != joined(new):
        (file,) = parse_patch(exact_diff(joined(old), joined(new), context))
        assert apply_patch(file, joined(old)) == Patched(joined(new), (0,) * len(file.hunks))


# What a model writes: lines that end with \n, and marks anywhere.


@dataclass
class ModelHunk:
    rows: list[Row]
    start: int
    """The number of old lines above it."""
    reaches_end: bool
    marks: set[int] = field(default_factory=set)

    @property
    def old(self) -> list[str]:
        return [row.text for row in self.rows if row.kind != "+"]

    def text(self, header: str) -> str:
        lines = (f"{row.kind}{row.text}\n" + MARK * (at in self.marks) for at, row in enumerate(self.rows))
        return f"{header}\n{''.join(lines)}"

    def unified(self) -> str:
        old, new = len(self.old), sum(row.kind != "-" for row in self.rows)
        return self.text(f"@@ -{self.start + (old > 0)},{old} +1,{new} @@")

    def last(self, other: str) -> int | None:
        return max((at for at, row in enumerate(self.rows) if row.kind != other), default=None)


def hunks_of(rows: Sequence[Row], context: int) -> Iterator[ModelHunk]:
    """The changed rows with their context. Hunks whose context would touch are one."""
    near = [any(row.kind != " " for row in rows[max(at - context, 0) : at + context + 1]) for at in range(len(rows))]
    start = 0
    for at in range(len(rows) + 1):
        if at == len(rows) or not near[at]:
            if start < at:
                above, rest = (sum(row.kind != "+" for row in some) for some in (rows[:start], rows[at:]))
                yield ModelHunk(list(rows[start:at]), above, reaches_end=rest == 0)
            start = at + 1


def model_says(old: Sequence[Line], hunks: Sequence[ModelHunk]) -> tuple[bool, bool | None]:
    """Whether the marks of the hunks make sense, and whether the new file ends with a newline, if a mark says it."""
    newline: bool | None = None
    for hunk in hunks:
        ends = {"old": hunk.last("+"), "new": hunk.last("-")}
        marked = {side for side, at in ends.items() if at in hunk.marks}
        if marked and not hunk.reaches_end:
            # With a mark, the last of several equal places can be the only one that fits.
            assume(not hunk.old or hunk.old != [line.text for line in old[len(old) - len(hunk.old) :]])
        if hunk.marks - {*ends.values()} or (marked and not hunk.reaches_end):
            return False, None
        if "old" in marked and old[-1].end:
            return False, None
        if marked:
            newline = "new" not in marked
    return True, newline


def is_right(content: bytes, old: Sequence[Line], rows: Sequence[Row], newline: bool | None) -> bool:
    """Whether the content has the lines of the edit: lines that stay with their end, new ones with one of the file."""
    left, after = content.decode(), [row for row in rows if row.kind != "-"]
    for at, row in enumerate(after):
        if not left.startswith(row.text):
            return False
        left = left[len(row.text) :]
        ends = [row.end] if row.kind == " " and row.end else ends_of(old)
        if at == len(after) - 1:
            stays = newline if newline is not None else bool(not old or old[-1].end) if row.kind == "+" else None
            ends = ends if stays else [""] if stays is False else [row.end]
        end = next((end for end in ends if left.startswith(end)), None)
        if end is None:
            return False
        left = left[len(end) :]
    return not left


@given(st.data(), st.integers(0, 3), st.booleans())
def test_a_patch_of_either_form_gives_what_it_says_or_nothing(data: st.DataObject, context: int, marked: bool) -> None:
    old = data.draw(files())
    rows = data.draw(edits(old))
    hunks = list(hunks_of(rows, context))
    if not hunks:
        return
    for hunk in hunks if marked else ():
        hunk.marks = data.draw(st.sets(st.integers(0, len(hunk.rows) - 1), max_size=2))
    names, at_end = "--- a/f\n+++ b/f\n", "*** End of File\n" * (hunks[-1].reaches_end and data.draw(st.booleans()))
    numbered, bare = (
        "".join(texts) + at_end for texts in zip(*((h.unified(), h.text("@@")) for h in hunks), strict=True)
    )
    begin, end = "*** Begin Patch\n", "*** End Patch\n"
    unified, mixed = names + numbered, data.draw(st.sampled_from(["", names])) + numbered
    v4a = f"*** Update File: f\n{bare}{end}"
    makes_sense, newline = model_says(old, hunks)
    texts = [line.text for line in old]
    ambiguous = any(
        not hunk.old or sum(texts[at : at + len(hunk.old)] == hunk.old for at in range(len(texts))) > 1
        for hunk in hunks
    )
    patches = [(unified, False), (f"{begin}{unified}{end}", False), (f"{begin}*** Update File: f\n{mixed}{end}", False)]
    for patch, may_be_refused in (*patches, (v4a, ambiguous), (begin + v4a, ambiguous)):
        try:
            (file,) = parse_patch(patch)
            done = apply_patch(file, joined(old))
        except ValueError:
            done = Patched(joined(old), problems=("cannot be read",))
        if done.problems:
            assert done.content == joined(old)
            assert may_be_refused or not makes_sense, done.problems
        else:
            assert makes_sense, patch
            assert is_right(done.content, old, rows, newline), (patch, done.content)


# Text around and within patches: no changed line is ever left out.

SENTENCES = [
    "Here it is:",
    "",
    "- a point",
    "---",
    "```",
    "```diff",
    "*** End Patch",
    "-- ",
    "2.39.5",
    "diff it",
    "@@ x",
]
CONTENTS = st.integers(0, 5).map("line {}".format) | st.sampled_from(
    ["```", "", "diff it", "*** x", "Index: x", "@@ x"]
)
HUNKS = st.lists(st.tuples(st.sampled_from(" -+"), CONTENTS), min_size=1, max_size=6)
HEADERS = ("--- a/f", "+++ b/f")


def form(body: Sequence[tuple[str, str]], *, is_unified: bool, miscount: int) -> list[str]:
    rows = [kind + text for kind, text in body]
    if not is_unified:
        return ["*** Begin Patch", "*** Update File: f", "@@", *rows, "*** End Patch"]
    old, new = (sum(kind != other for kind, _ in body) + miscount for other in "+-")
    return [*HEADERS, f"@@ -1,{old} +1,{new} @@", *rows]


@st.composite
def damaged(draw: st.DrawFn) -> list[str]:
    """Patches of both forms one after the other, with text around them, and then with some damage."""
    lines: list[str] = []
    for body in draw(st.lists(HUNKS, min_size=1, max_size=3)):
        lines += draw(st.lists(st.sampled_from(SENTENCES), max_size=2))
        miscount = draw(st.sampled_from([0, 0, 0, 1]))
        lines += form(body, is_unified=draw(st.booleans()), miscount=miscount)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(lines) - 1))
        way = draw(st.sampled_from(["cut", "strip", "insert", "end"]))
        lines[at : at + 1] = {
            "cut": [],
            "strip": [lines[at].lstrip(" ")],
            "insert": [draw(st.sampled_from(SENTENCES)), lines[at]],
            "end": [lines[at]],
        }[way]
        if way == "end":
            del lines[at + 1 :]
        if not lines:
            break
    return lines


@given(damaged())
def test_no_changed_line_is_left_out(lines: list[str]) -> None:
    try:
        files = parse_patch("\n".join(lines))
    except ValueError:
        return
    changed = [line for line in lines if line[:1] in "+-" and line not in (*SENTENCES, *HEADERS) and line]
    assert sum(file.count("+") + file.count("-") for file in files) >= len(changed)
