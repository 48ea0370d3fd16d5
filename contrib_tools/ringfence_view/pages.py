"""The parts of the page as HTML: for the server one at a time, and for an export all at once."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from ringfence import __version__
from ringfence.escapes import escape_path
from ringfence_tools.printable import one_line, plural
from ringfence_view.blame import BlamedLine
from ringfence_view.diffs import MAX_ROWS, DiffFile, DiffRow, diff_rows
from ringfence_view.sources import CallSource, EntryDetail, StepDifference, TimelinePage
from ringfence_view.timeline import OUTCOMES, TimelineEntry

if TYPE_CHECKING:
    from ringfence_view.questions import Question

OPENED_ROWS = 400
"""The most rows of diffs that are open at first. A file with more than are left of them is opened by a click."""
MAX_TEXT_CHARACTERS, MORE_CHARACTERS = 20_000, 200_000
MAX_EXPORTED = 5_000
MAX_EXPORTED_CHARACTERS = 60_000_000
EXPORTED_ROWS = 20_000
"""The most rows of diffs of one entry of an export."""
_TEMPLATES = Path(__file__).with_name("templates")
_CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, slots=True)
class DiffAddress:
    """Where the rows of one file's diff come from."""

    base: str
    file: int
    query: str = ""
    can_reject: bool = False
    key: str = ""

    def __call__(self, start: int, count: int, width: int) -> str:
        return f"{self.base}?{self.query}file={self.file}&from={start}&count={count}&width={width}"

    def hunk(self, at: int) -> str:
        return urlencode({"key": self.key, "file": self.file, "row": at})

    @property
    def whole(self) -> str:
        return urlencode({"key": self.key, "file": self.file})


@dataclass(frozen=True, slots=True)
class MoreRows:
    at: int
    count: int
    left: int


@dataclass(frozen=True, slots=True)
class ShownFile:
    name: str
    added: int
    removed: int
    rows: Sequence[DiffRow]
    more: MoreRows | None
    load: str
    """From where its diff comes when somebody opens it; empty where it is there."""
    address: DiffAddress | None


@dataclass(frozen=True, slots=True)
class ShownText:
    name: str
    shown: str
    left: int
    load: str


def static_file(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def shell_page() -> str:
    """The page that asks for everything else. It has nothing of a workspace."""
    return str(_template().page("ringfence view", "", "", "", Markup(""), ()))


def main_part(source: CallSource, first: TimelinePage, *, can_act: bool, can_answer: bool = False) -> str:
    return str(_template().main(source, rows_part(first, "", "", is_first=True), True, can_act, can_answer))


def spending_part(source: CallSource) -> str:
    return str(_template().spending(source.spending))


def question_part(question: Question | None) -> str:
    return "" if question is None else str(_template().question(question))


def rows_part(page: TimelinePage, outcome: str, words: str, *, is_first: bool = False) -> Markup:
    def address(after: str) -> str:
        return "rows?" + urlencode({"after": after, "outcome": outcome, "q": words})

    nothing = "No further entry matches."
    if is_first:
        nothing = "No entry matches." if outcome or words else "There are no calls yet."
    return _template().rows(page, address, nothing)


def row_part(entry: TimelineEntry) -> str:
    return str(_template().row(entry))


def entry_part(detail: EntryDetail, *, can_act: bool, exported: bool = False) -> Markup:
    key = detail.entry.key
    texts = [text_of(key, name, text, exported=exported) for name, text in detail.texts.items()]
    can_reject = can_act and bool(detail.entry.number)
    address = None if exported else DiffAddress(f"entry/{key}/diff", 0, "", can_reject, key)
    return _template().entry(detail, texts, _shown(detail.files or (), address), can_act)


def text_of(key: str, name: str, text: str, start: int = 0, *, exported: bool = False) -> ShownText:
    end = start + MORE_CHARACTERS if start else MAX_TEXT_CHARACTERS
    load = "" if exported else f"entry/{key}/text?name={quote(name, safe='')}&from={end}"
    return ShownText(name, text[start:end], max(len(text) - end, 0), load)


def text_part(part: ShownText) -> str:
    return str(_template().text(part))


def changes_part(difference: StepDifference, *, exported: bool = False) -> Markup:
    query = urlencode({"a": difference.since or "", "b": difference.until or ""}) + "&"
    address = None if exported else DiffAddress("changes/diff", 0, query)
    return _template().changes(difference, _shown(difference.files, address), not exported)


def forks_part(source: CallSource, *, can_act: bool, exported: bool = False) -> Markup:
    return _template().forks(source.forks, source.spent_by, can_act, not exported)


def notes_part(notes: Sequence[tuple[int, str]]) -> str:
    return str(_template().notes(notes))


def fork_difference_part(difference: StepDifference, one: str, other: str) -> str:
    address = fork_address(one, other, 0)
    return str(_template().fork_difference(one, other, _shown(difference.files, address)))


def fork_address(one: str, other: str, file: int) -> DiffAddress:
    return DiffAddress("fork-difference/rows", file, urlencode({"a": one, "b": other}) + "&")


def diff_part(file: DiffFile, address: DiffAddress, start: int, count: int, width: int) -> str:
    """A table with some rows of a file."""
    rows = diff_rows(file, start, count, width=width)
    more = _more(file, start + len(rows)) if count != 1 else None
    return str(_template().table(rows, more, address, file.name))


def blame_part(path: str, lines: Sequence[BlamedLine], left: int) -> str:
    return str(_template().blame(path, lines, left))


def export_page(source: CallSource, *, contents: bool) -> str:
    """The whole page as one file. Without ``contents`` it has no arguments, answers and diffs."""
    entries: list[TimelineEntry] = []
    page = source.page(size=MAX_EXPORTED)
    entries.extend(page.entries)
    parts: list[tuple[str, Markup]] = []
    room = MAX_EXPORTED_CHARACTERS
    for entry in entries:
        try:
            detail = source.detail(entry.key)
        except (LookupError, OSError, ValueError) as error:
            parts.append((f"entry/{entry.key}", Markup("<p>{}</p>").format(one_line(str(error), 300))))
            continue
        part = entry_part(detail if contents else without_contents(detail), can_act=False, exported=True)
        room -= len(part)
        if room < 0:
            part = Markup("<p>There was no room for it in this page.</p>")
        parts.append((f"entry/{entry.key}", part))
    if source.has_changes and contents:
        parts.append(("changes", changes_part(source.difference(), exported=True)))
    if source.forks:
        parts.append(("forks", forks_part(source, can_act=False, exported=True)))
    rest = Markup('<li class="rest dim">Older entries are not in this page.</li>') if page.next_key else Markup("")
    shown = entries if contents else [replace(entry, summary="", command="") for entry in entries]
    first = _template().rows(TimelinePage(shown, None), None, "There are no calls.") + rest
    style, script = static_file("view.css"), static_file("view.js")
    # If hostile text ever passes the escaping, the browser still runs and fetches nothing.
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    body = _template().main(source, first, False, False)
    body += Markup('<p class="dim">ringfence {}</p>').format(__version__)
    return str(_template().page(source.title, policy, Markup(style), Markup(script), body, parts))  # noqa: S704  # our own


def without_contents(detail: EntryDetail) -> EntryDetail:
    entry = replace(detail.entry, summary="", command="")
    return EntryDetail(entry, detail.facts, {}, detail.policies, detail.read, detail.changes, None, detail.notes)


def _shown(files: Sequence[DiffFile], address: DiffAddress | None) -> list[ShownFile]:
    room = EXPORTED_ROWS if address is None else OPENED_ROWS
    shown: list[ShownFile] = []
    for at, file in enumerate(files):
        place = None if address is None else replace(address, file=at)
        fits = file.rows <= room or (address is None and room > 0)
        rows = diff_rows(file, 0, min(room, MAX_ROWS)) if fits else ()
        room -= len(rows)
        load = "" if fits or place is None else place(0, MAX_ROWS, 1_000)
        shown.append(
            ShownFile(file.name, file.added, file.removed, rows, _more(file, len(rows)) if fits else None, load, place)
        )
    return shown


def _more(file: DiffFile, shown: int) -> MoreRows | None:
    left = file.rows - shown
    return MoreRows(shown, min(left, MAX_ROWS), left) if left > 0 else None


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _with_code(value: str) -> Markup:
    """A message as HTML, with what stands between backticks as code."""
    pieces = _CODE.split(value)  # every second one is code
    return Markup().join(
        Markup("<code>{}</code>").format(one) if at % 2 else escape(one) for at, one in enumerate(pieces)
    )


def _seconds(value: float) -> str:
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.1f} s"


def _sizes(change: Mapping[str, Any]) -> str:
    before: Mapping[str, object] | None = change.get("before")
    after: Mapping[str, object] | None = change.get("after")
    if before is None or after is None:
        return ""
    text = f", {before.get('size')} -> {after.get('size')} bytes"
    modes = [before.get("mode"), after.get("mode")]
    return one_line(text + (f", mode {modes[0]} -> {modes[1]}" if modes[0] != modes[1] else ""), 100)


def _line(value: object) -> str:
    return one_line(str(value), 400)


def _path(value: str) -> str:
    return one_line(escape_path(value), 300)


@cache
def _template() -> Any:
    """The macros of the template."""
    environment = Environment(loader=PackageLoader("ringfence_view"), autoescape=True)
    values: dict[str, Any] = {"outcomes": OUTCOMES}
    environment.globals.update(values)
    filters: dict[str, Any] = {
        "line": _line,
        "path": _path,
        "plural": plural,
        "seconds": _seconds,
        "code": _with_code,
        "sizes": _sizes,
    }
    environment.filters.update(filters)
    return environment.get_template("view.html.j2").module
