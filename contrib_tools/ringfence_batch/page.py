"""The page of a batch: one HTML file that loads nothing else, or its parts for a server. It finds one of 10,000 tasks
at once."""

from __future__ import annotations

import base64
import hashlib
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from ringfence import __version__
from ringfence.limits import dollars
from ringfence_batch.summary import NO_RESULT, RUNNING, Summary, TaskRow
from ringfence_tools.printable import one_line, plural

MAX_CAUSES = 50
MOST_BARS = 40
_TEMPLATES = Path(__file__).with_name("templates")


def static_file(name: str) -> str:
    """A file of the page: ``index.css`` or ``index.js``."""
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def render_page(summary: Summary, place: str = "") -> str:
    """Return the whole page. ``place`` leads from the page to the directory of the batch, and ends in a slash."""
    style, script = static_file("index.css"), static_file("index.js")
    # If hostile text ever passes the escaping, the browser still runs and fetches nothing.
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    data = page_data(summary, quote(place))
    # Style and script are our own.
    return str(
        _template().page(
            _title(summary),
            policy,
            Markup(style),  # noqa: S704
            Markup(script),  # noqa: S704
            Markup(render_summary(summary)),  # noqa: S704
            data,
            quote(place),
            __version__,
        )
    )


def shell_page() -> str:
    """Return the page that asks a server for everything else. It has nothing of a batch."""
    return str(_template().page("ringfence view", "", "", "", "", None, "", __version__))


def render_summary(summary: Summary, *, is_running: bool = False) -> str:
    """Return the part of the page above its table."""
    plots = (
        _plot("Time", summary.rows, lambda row: row.seconds, _duration),
        _plot("Tokens", summary.rows, lambda row: row.tokens or 0, _tokens),
        _plot("Cost", summary.rows, lambda row: row.cost_usd or 0, dollars),
    )
    return str(
        _template().summary_part(
            _title(summary),
            one_line(summary.out, 300),
            "it runs" if is_running else f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            len(summary.rows),
            summary.counts,
            [plot for plot in plots if plot is not None],
            summary.causes[:MAX_CAUSES],
            max(len(summary.causes) - MAX_CAUSES, 0),
        )
    )


def _title(summary: Summary) -> str:
    return f"{summary.outcomes.get('done', 0):,} of {plural(len(summary.rows), 'task')} done"


@cache
def _template() -> Any:
    """The macros of the template."""
    environment = Environment(loader=PackageLoader("ringfence_batch"), autoescape=True)
    return environment.get_template("index.html.j2").module


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def page_data(summary: Summary, place: str = "") -> Mapping[str, Any]:
    """Return the rows in the order of fields that index.js has. What many rows have in common is there once."""
    outcomes, kinds, files = _Numbers(), _Numbers(), _Numbers()
    running = {*summary.running}
    listed = [
        [
            row.id,
            outcomes[row.outcome or (RUNNING if row.id in running else NO_RESULT)],
            row.cause,
            kinds[row.kind],
            row.seconds,
            row.tokens,
            row.cost_usd,
            row.turns,
            row.attempts,
            f"{place}{row.directory}",
            files[tuple(row.files.items())],
            row.task,
        ]
        for row in summary.rows
    ]
    return {"rows": listed, "outcomes": [*outcomes], "kinds": [*kinds], "files": [*files]}


class _Numbers(dict[Hashable, int]):
    """A number for each different value, in their order."""

    def __missing__(self, value: Hashable) -> int:
        return self.setdefault(value, len(self))


def _plot(
    name: str, rows: Iterable[TaskRow], measure: Callable[[TaskRow], float], say: Callable[[float], str]
) -> Mapping[str, Any] | None:
    """Return a histogram with a logarithmic axis, or None where there is nothing to show."""
    found = sorted((measure(row), row.outcome == "done") for row in rows if measure(row) > 0)
    if not found:
        return None
    values = [value for value, _ in found]
    low, high = values[0], values[-1]
    number = min(MOST_BARS, max(5, round(math.sqrt(len(values)))))
    step = math.log(high / low) / number if high > low else 1.0
    heights = [[0, 0] for _ in range(number)]
    for value, is_done in found:
        heights[min(int(math.log(value / low) / step), number - 1)][not is_done] += 1
    most = max(map(sum, heights))
    bars = [
        {
            "done": round(done / most * 96, 2),
            "other": round(other / most * 96, 2),
            "title": f"{say(low * math.exp(at * step))} to {say(low * math.exp((at + 1) * step))}: "
            f"{plural(done + other, 'task')}, {other:,} not done",
        }
        for at, (done, other) in enumerate(heights)
    ]
    within = values[min(int(len(values) * 0.9), len(values) - 1)]
    return {
        "name": name,
        "facts": f"median {say(statistics.median(values))}, 90% within {say(within)}, together {say(sum(values))}",
        "bars": bars,
        "low": say(low),
        "middle": say(math.sqrt(low * high)),
        "high": say(high),
    }


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 60 else f"{minutes / 60:,.1f} h"


def _tokens(value: float) -> str:
    return (
        f"{value:,.0f}"
        if value < 10_000
        else f"{value / 1000:,.0f} k"
        if value < 1e6
        else f"{value / 1e6:,.1f} M"
        if value < 1e8
        else f"{value / 1e6:,.0f} M"
    )
