"""The report of a run: one HTML file that loads nothing else. Values from models, tools and files are escaped."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import re
import reprlib
import secrets
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, cast

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from ringfence import __version__, serde
from ringfence.adapters.model import ModelTurn
from ringfence.escapes import display_path, escape_path
from ringfence.limits import dollars, utc_now
from ringfence.participants import Change, FileVersion
from ringfence.receipts import PolicyVerdict, Receipt
from ringfence.session.events import RejectedToolParams
from ringfence_tools.planning import Plan
from ringfence_tools.printable import (
    files_of,
    ignored_line,
    line_counts,
    one_line,
    outcome_words,
    params_summary,
    plural,
    printable,
    shown_outcome,
)
from ringfence_tools.runs.agent_run import RunOutcome, RunStats, RunWatcher
from ringfence_tools.runs.attention import Moved, with_moves
from ringfence_tools.runs.run_workspace import RunWorkspace

HEADINGS = {
    "done": "The task was done",
    "failed": "The task failed",
    "provider_failed": "The model's provider failed",
    "limit_reached": "A limit was reached",
    "unchanged": "Nothing was changed",
    "interrupted": "The run was interrupted",
}
MARKS = {"pending": "to do", "in_progress": "begun", "done": "done"}
MAX_VALUE_CHARACTERS = 4_000
"""The most characters of one parameter of a call."""
MAX_TEXT_CHARACTERS = 20_000
"""The most characters of a turn's text or of a task."""
MAX_ROWS = 200
"""The most items of one list."""
MAX_RECORD_CHARACTERS = 5_000_000
"""The most HTML for turns and calls."""
MAX_PATCH_CHARACTERS = 3_000_000
MAX_FILE_LINES, MAX_LINE_CHARACTERS = 2_000, 1_000
_CODE = re.compile(r"`([^`\n]+)`")
OPENED_LINES = 400
"""The most lines of a patch that are unfolded. A file with more lines than are left of them is folded."""
KINDS = {b"@": "hunk", b"+": "add", b"-": "del"}


Split: TypeAlias = Callable[[Sequence[Change]], tuple[Sequence[Change], Sequence[Change]]]


@dataclass(frozen=True, slots=True)
class CheckEnded:
    """A command that checked the work of a run. ``log`` is the name of the file beside the page with its output."""

    command: str
    ended: str
    log: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of a task whose run worked on a copy. The copy is gone, and its history with it."""

    outcome: str
    heading: str
    reason: str
    checks: Sequence[CheckEnded] = ()


@dataclass(frozen=True, slots=True)
class RunDescription:
    """The request of a run. ``terms`` are policies and limits. ``next_steps`` are commands for the reader.

    ``directory`` is where the run worked or, with a ``judgement``, what its copy was made of.
    """

    task: str
    model: str
    terms: str
    directory: str
    started_at: datetime
    ended_at: datetime
    next_steps: Sequence[str]
    judgement: Judgement | None = None


@dataclass(frozen=True, slots=True)
class ReportedFile:
    name: str
    added: int
    removed: int
    lines: Sequence[tuple[str, str]]
    """The lines, each with its CSS class."""
    more: int
    is_open: bool


def render_page(about: RunDescription, outcome: RunOutcome, workspace: RunWorkspace, record: Markup) -> bytes:
    """Return the whole page in UTF-8. ``record`` comes from `ReportFile.record`."""
    styles = _template().style()
    digest = base64.b64encode(hashlib.sha256(styles.encode()).digest()).decode()
    # If hostile text ever passes the escaping, the browser still runs and fetches nothing.
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return _template().page(about, outcome, workspace, record, policy, styles, __version__).encode()


def render_turn(event: ModelTurn) -> Markup:
    return _template().turn(event)


def render_call(
    receipt: Receipt, answer: str, directory: Path | None, split: Split = lambda changes: (changes, ())
) -> Markup:
    """Render a tool call and its answer. A call that was not committed is unfolded. ``directory`` is as in
    `outcome_words`. ``split`` separates the changes of ignored paths, which are only counted."""
    changes, ignored = split(receipt.changes)
    return _template().call(receipt, answer, directory, changes, len(ignored))


def render_patch(patch: bytes) -> Markup:
    """Render a patch as one foldable part for each file. The end of a very long patch is only counted."""
    shown: list[ReportedFile] = []
    room, opened, left = MAX_PATCH_CHARACTERS, 0, 0
    for old, new, part in files_of(patch):
        lines = part.split(b"\n")
        is_open = opened + len(lines) <= OPENED_LINES
        opened += len(lines) if is_open else 0
        file = _patched_file(new if old == new else f"{old} -> {new}", lines, is_open=is_open)
        room -= sum(len(content) + len('<span class="same">\n</span>') for _, content in file.lines)
        if room >= 0:
            shown.append(file)
        else:
            left += 1
    return _template().patch(shown, left)


def _patched_file(name: str, lines: list[bytes], *, is_open: bool) -> ReportedFile:
    added, removed = line_counts(b"\n".join(lines))
    shown: list[tuple[str, str]] = []
    in_header = True
    for line in lines[:MAX_FILE_LINES]:
        in_header &= not line.startswith(b"@@ ")
        kind = "head" if in_header else KINDS.get(line[:1], "same")
        shown.append((kind, text(line.decode("utf-8", "surrogateescape"), MAX_LINE_CHARACTERS)))
    return ReportedFile(name, added, removed, shown, max(len(lines) - MAX_FILE_LINES, 0), is_open)


def text(value: str, limit: int = MAX_TEXT_CHARACTERS) -> str:
    rest = len(value) - limit
    return printable(value[:limit]) + (f"[... {rest:,} more characters]" if rest > 0 else "")


def _with_code(value: str) -> Markup:
    """Return a message as HTML, with what stands between backticks as code."""
    parts = _CODE.split(value)  # every second one is code
    shown = [Markup("<code>{}</code>").format(part) if at % 2 else escape(part) for at, part in enumerate(parts)]
    return Markup().join(shown)


def _ends(value: str) -> str:
    """Cut a text in the middle. The end of an output usually has the result."""
    half = MAX_VALUE_CHARACTERS // 2
    if len(value) <= MAX_VALUE_CHARACTERS:
        return text(value)
    return f"{text(value[:half])}[... {len(value) - 2 * half:,} characters left out ...]{text(value[-half:])}"


def _line(value: str, limit: int = 300) -> str:
    return one_line(value, limit)


def _path(value: str) -> str:
    return one_line(escape_path(value), 300)


def _paths_line(paths: Sequence[str], workspace: RunWorkspace) -> str:
    """Return the paths of a step. Ignored ones are only counted, unless they are shown everywhere."""
    has = workspace.ignored.has
    shown = [path for path in paths if workspace.with_ignored or not (has(path) or has(path, is_directory=True))]
    count = [plural(len(paths) - len(shown), "ignored path")] if len(shown) < len(paths) else []
    return one_line(", ".join([*map(display_path, shown)]), 200) + ", ".join(["", *count] if shown else count)


def _utc(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _values(params: object) -> list[tuple[str, str]]:
    if isinstance(params, RejectedToolParams):
        found = [("As the model wrote it", _value(params.raw_arguments)), ("Why it does not fit", params.error)]
    elif is_dataclass(params):
        found = [(field.name, _value(getattr(params, field.name))) for field in fields(params)]
    elif isinstance(params, Mapping):
        named = cast("Mapping[object, object]", params)
        found = [(str(name), _value(value)) for name, value in named.items()]
    else:
        found = [] if params is None else [("As the model wrote it", _value(params))]
    return found[:MAX_ROWS]


def _value(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(serde.dump_any(value), ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        return reprlib.repr(value)


def _verdicts(receipt: Receipt) -> Sequence[PolicyVerdict]:
    """Return each policy once, although one can be asked before the call and after it: its denial, or what it said."""
    found: dict[str, PolicyVerdict] = {}
    for verdict in receipt.policies:
        said = found.get(verdict.policy)
        if said is None or (said.allowed and (not verdict.allowed or not said.reason)):
            found[verdict.policy] = verdict
    return [*found.values()]


def _sizes(change: Change | Moved) -> str:
    before, after = change.before, change.after
    if before is None or after is None or {before.kind, after.kind} != {"file"}:
        versions = (_version(one) for one in (before, after) if one is not None)
        return ", then ".join(dict.fromkeys(versions))
    size = plural(after.size, "byte") if before.size == after.size else f"{before.size:,} -> {after.size:,} bytes"
    mode = f"{after.mode:o}" if before.mode == after.mode else f"{before.mode:o} -> {after.mode:o}"
    return f"{size}, mode {mode}"


def _version(version: FileVersion) -> str:
    if version.kind == "symlink":
        return f"a link to {one_line(escape_path(version.target or ''), 200)}"
    return "a directory" if version.kind == "directory" else f"{plural(version.size, 'byte')}, mode {version.mode:o}"


def _seconds(value: float) -> str:
    return f"{value * 1000:,.1f} ms" if value < 1 else f"{value:,.1f} s"


def _facts(about: RunDescription, outcome: RunOutcome) -> Iterator[tuple[str, str]]:
    stats, usage = outcome.stats, outcome.stats.usage
    if about.judgement is None:
        yield "Directory", one_line(escape_path(about.directory), 300)
        yield "Exit code", str(outcome.exit_code)
    else:
        yield "Source", one_line(escape_path(about.directory), 300)
    yield "Model", one_line(about.model, 300)
    if about.terms:
        yield "Policies and limits", one_line(about.terms, 1_000)
    yield "Began" if stats.parts == 1 else "Resumed", _utc(about.started_at)
    yield "Ended", f"{_utc(about.ended_at)}, after {_seconds(stats.seconds)} of work"
    yield "Came to", one_line(stats.describe(), 300)
    counts = (
        ("in", usage.input_tokens),
        ("of them cached", usage.cached_tokens),
        ("to the cache", usage.cache_write_tokens),
        ("out", usage.output_tokens),
    )
    if tokens := [f"{count:,} {word}" for word, count in counts if count is not None]:
        yield "Tokens", ", ".join(tokens)
    if usage.cost_usd is not None:
        yield "Cost", dollars(usage.cost_usd)


@cache
def _template() -> Any:
    """Return the macros of the template."""
    environment = Environment(loader=PackageLoader("ringfence_tools.runs"), autoescape=True)
    values: dict[str, Any] = {
        "headings": HEADINGS,
        "marks": MARKS,
        "max_rows": MAX_ROWS,
        "max_value": MAX_VALUE_CHARACTERS,
    }
    environment.globals.update(values)
    filters: dict[str, Any] = {
        "text": text,
        "line": _line,
        "path": _path,
        "paths_line": _paths_line,
        "quote": shlex.quote,
        "with_code": _with_code,
        "ends": _ends,
        "values": _values,
        "sizes": _sizes,
        "verdicts": _verdicts,
        "shown_outcome": shown_outcome,
        "with_moves": with_moves,
        "ignored_line": ignored_line,
        "seconds": _seconds,
        "utc": _utc,
        "plural": plural,
        "params_summary": params_summary,
        "outcome_words": outcome_words,
        "line_counts": line_counts,
        "facts": _facts,
        "diff": render_patch,
    }
    environment.filters.update(filters)
    return environment.get_template("report.html.j2").module


class ReportFile(RunWatcher):
    """A watcher that renders each turn and call at once, and writes the page atomically at the end.

    The directory of the page is held open. The page goes there even if its path leads elsewhere meanwhile.
    """

    def __init__(self, path: Path, directory: Path | None, split: Split = lambda changes: (changes, ())) -> None:
        """``directory`` is where the run works; None if nothing of that is left. ``split`` is as in `render_call`.

        Raises OSError for a path that cannot be written, or that is not a regular file.
        """
        self.started_at = utc_now()
        self.path = Path(os.path.realpath(path.parent)) / path.name
        # Whoever reads the page is somewhere else.
        self._workspace = None if directory is None else Path(os.path.abspath(directory))
        self._split = split
        self._record: list[Markup] = []
        self._room = MAX_RECORD_CHARACTERS
        self._turns = self._calls = self._left_turns = self._left_calls = 0
        self._directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(FileNotFoundError):
                found = os.stat(self.path.name or ".", dir_fd=self._directory, follow_symlinks=False)
                # In the place of a link or a device a file would be of no use, and the other gone.
                if not stat.S_ISREG(found.st_mode):
                    raise OSError(errno.EINVAL, "something is there that is no regular file", str(path))
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=self._directory):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        except BaseException:
            os.close(self._directory)
            raise

    def turn(self, event: ModelTurn) -> None:
        self._turns += 1
        self._left_turns += not self._keep(render_turn(event))

    def call(self, receipt: Receipt, plan: Plan | None, answer: str) -> None:
        self._calls += 1
        self._left_calls += not self._keep(render_call(receipt, answer, self._workspace, self._split))

    def _keep(self, piece: Markup) -> bool:
        self._room -= len(piece)
        if self._room >= 0:
            self._record.append(piece)
        return self._room >= 0

    def record(self, stats: RunStats) -> Markup:
        """Return the kept turns and calls, and the number of the others."""
        found = Markup().join(self._record)
        if self._room < 0:
            left = f"{plural(self._left_turns, 'more turn')} and {plural(self._left_calls, 'more tool call')}"
            calls = "receipts.jsonl" if self._workspace is None else "--receipts FILE.jsonl"
            found += Markup("<p>There is no room for {}; {} has every call.</p>").format(left, calls)
        if stats.parts > 1:
            turns, calls = stats.turns - self._turns, stats.calls - self._calls
            before = f"{plural(turns, 'turn')} and {plural(calls, 'tool call')} of the parts before"
            found = Markup("<p>The run was resumed: {} are not on this page.</p>").format(before) + found
        return found

    def write(self, page: bytes) -> None:
        """Write the page. If it raises OSError, the file of before is unchanged."""
        name = f".{self.path.name[:100]}.{secrets.token_hex(8)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(name, flags, 0o666, dir_fd=self._directory), "wb") as file:
                file.write(page)
            os.replace(name, self.path.name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except BaseException as error:
            with suppress(OSError):
                os.unlink(name, dir_fd=self._directory)
            if isinstance(error, OSError):  # it names a file that nobody has given, or none
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            raise

    def close(self) -> None:
        os.close(self._directory)
