"""Pieces of the page that tells of a run. What models, tools and files say gets into it as text and nowhere else."""

from __future__ import annotations

import html
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TypeVar, cast

from ringfence import serde
from ringfence.adapters.model import ModelTurn
from ringfence.filesystem.paths import escape_path
from ringfence.participants import Change, FileVersion
from ringfence.runtime.events import RejectedToolParams
from ringfence.runtime.receipts import PolicyVerdict, Receipt
from ringfence_cli.printable import one_line, outcome_words, params_summary, plural, printable

ItemT = TypeVar("ItemT")

MAX_VALUE_CHARACTERS = 4_000
"""Of one parameter of one call."""
MAX_TEXT_CHARACTERS = 20_000
"""Of what a model says in one turn, and of a task."""
MAX_ROWS = 200
"""Of any one list."""


def text(value: str, limit: int = MAX_TEXT_CHARACTERS) -> str:
    """Any text as HTML's: nothing in it is an element, acts on what stands around it, or hides."""
    rest = len(value) - limit
    cut = f"[... {rest:,} more characters]" if rest > 0 else ""
    return html.escape(printable(value[:limit])) + cut


def ends(value: str, limit: int) -> str:
    """`text` of which both ends are kept: what a command says last is what it came to."""
    if len(value) <= limit:
        return text(value)
    half = limit // 2
    return f"{text(value[:half])}[... {len(value) - 2 * half:,} characters left out ...]{text(value[-half:])}"


def line(value: str, limit: int = 300) -> str:
    """`text` on one line."""
    return html.escape(one_line(value, limit))


def path(value: str) -> str:
    return f"<code>{line(escape_path(value))}</code>"


def badge(kind: str) -> str:
    """``kind`` is an outcome's word, and so the name of a class."""
    return f'<span class="badge {kind}">{kind.replace("_", " ")}</span>'


def table(found: Sequence[ItemT], row: Callable[[ItemT], Iterable[str]]) -> str:
    """A row for each, at most so many, of cells of HTML; the first one is its name."""
    lines: list[str] = []
    for one in found[:MAX_ROWS]:
        head, *cells = row(one)
        lines.append(f"<tr><th>{head}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    more = f'<p class="dim">and {len(found) - MAX_ROWS:,} more</p>' if len(found) > MAX_ROWS else ""
    return f"<table><tbody>{''.join(lines)}</tbody></table>{more}" if lines else ""


def paths(found: Sequence[str]) -> str:
    return table(found, lambda one: (path(one),))


def turn(event: ModelTurn) -> str:
    said = event.turn.text.strip()
    return f"<h3>Turn {event.number}</h3>" + (f"<pre>{text(said)}</pre>" if said else "")


def call(receipt: Receipt, answer: str, directory: Path) -> str:
    """One tool call on the files of a directory and what its tool answered, opened where it was not committed."""
    opened = "" if receipt.outcome == "committed" else " open"
    summary = (
        f"{badge(receipt.outcome)} <code>{line(receipt.tool, 64)}</code> {html.escape(params_summary(receipt.params))}"
        f' <span class="dim">{seconds(receipt.duration_seconds)}</span>'
    )
    inside = "".join(_inside(receipt, answer, directory))
    return f'<details{opened}><summary>{summary}</summary><div class="inside">{inside}</div></details>'


def _inside(receipt: Receipt, answer: str, directory: Path) -> Iterator[str]:
    yield f"<p>{html.escape(outcome_words(receipt, directory))}</p>"
    if receipt.policies:
        yield f"<h3>Policies</h3>{table(receipt.policies, _verdict)}"
    yield from (
        f"<h3>{line(name)}</h3><pre>{text(value, MAX_VALUE_CHARACTERS)}</pre>"
        for name, value in list(_params(receipt.params))[:MAX_ROWS]
    )
    if answer.strip():
        yield f"<h3>Answer</h3><pre>{ends(answer, MAX_VALUE_CHARACTERS)}</pre>"
    if receipt.changes:
        done = "Changed" if receipt.outcome == "committed" else "Had changed, and was taken back"
        yield f"<h3>{done}</h3>{changes(receipt.changes)}"
    if receipt.conflicts:
        yield "<h3>Kept, since somebody else had changed it meanwhile</h3>"
        yield paths(receipt.conflicts)
    facts = [f"call {line(receipt.call_id, 80)}", receipt.started_at.strftime("%Y-%m-%d %H:%M:%S UTC")]
    if receipt.read:
        facts.append(f"{plural(len(receipt.read), 'file')} read")
    if receipt.exit_code is not None:
        facts.append(f"exit code {receipt.exit_code}")
    if receipt.commit is not None:
        facts.append(f"commit {line(receipt.commit, 80)}")
    yield f'<p class="dim">{", ".join(facts)}</p>'


def _params(params: object) -> Iterator[tuple[str, str]]:
    if isinstance(params, RejectedToolParams):
        yield "As the model wrote it", _value(params.raw_arguments)
        yield "Why it does not fit", params.error
    elif is_dataclass(params):
        yield from ((field.name, _value(getattr(params, field.name))) for field in fields(params))
    elif isinstance(params, Mapping):
        named = cast("Mapping[object, object]", params)
        yield from ((str(name), _value(value)) for name, value in named.items())
    elif params is not None:
        yield "As the model wrote it", _value(params)


def _value(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(serde.dump_any(value), ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):
        return reprlib.repr(value)


def _verdict(verdict: PolicyVerdict) -> Iterable[str]:
    return line(verdict.policy), "allowed" if verdict.allowed else "denied", line(verdict.reason or "", 1_000)


def changes(found: Sequence[Change]) -> str:
    return table(found, lambda change: (change.kind, path(change.path), _sizes(change)))


def _sizes(change: Change) -> str:
    said = dict.fromkeys(_version(one) for one in (change.before, change.after) if one is not None)
    return html.escape(", then ".join(said))


def _version(version: FileVersion) -> str:
    if version.kind == "symlink":
        return f"a link to {one_line(escape_path(version.target or ''), 200)}"
    return "a directory" if version.kind == "directory" else f"{plural(version.size, 'byte')}, mode {version.mode:o}"


def seconds(value: float) -> str:
    return f"{value * 1000:,.1f} ms" if value < 1 else f"{value:,.1f} s"
