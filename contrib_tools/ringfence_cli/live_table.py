"""A table on standard error that is drawn anew while something goes on. Plain lines where no terminal is."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from time import monotonic
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.live import Live

from ringfence_tools.runs.outputs import ErrorStream

StateT = TypeVar("StateT")
REFRESH_SECONDS = 0.25
"""How often a terminal is drawn anew."""


@contextmanager
def live_table(
    errors: ErrorStream | None,
    draw: Callable[[StateT], RenderableType],
    lines: Callable[[ErrorStream], Callable[[StateT], None]],
) -> Generator[Callable[[StateT], None]]:
    """Yield what shows a state: as ``draw`` makes it at a terminal, else by what ``lines`` gives for the stream.
    Without a stream, nothing does."""
    if errors is None:
        yield lambda state: None
        return
    console = Console(file=errors, markup=False, emoji=False, highlight=False)
    if not errors.isatty() or not console.is_terminal or console.is_dumb_terminal:
        yield lines(errors)
        return
    # The two streams stay as they are: nothing else writes while this runs.
    live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
    drawn_again = 0.0

    def show(state: StateT) -> None:
        nonlocal drawn_again
        if monotonic() >= drawn_again:
            drawn_again = monotonic() + REFRESH_SECONDS
            live.update(draw(state), refresh=True)

    with live:
        yield show
