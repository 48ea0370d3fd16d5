"""What turns of a model have used: tokens, and what they cost as far as a table of prices knows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ringfence.limits import TokenUsage
from ringfence_tools.printable import one_line, plural
from ringfence_tools.runs.task_log import RunUsage


@dataclass(frozen=True, slots=True)
class Spending:
    """Turns, added up. ``unpriced`` are those whose price is unknown."""

    turns: int = 0
    usage: TokenUsage = TokenUsage()
    unpriced: int = 0

    def with_turn(self, usage: TokenUsage, turns: int = 1) -> Spending:
        unpriced = turns if usage.cost_usd is None else 0
        return Spending(self.turns + turns, self.usage + usage, self.unpriced + unpriced)

    def describe(self) -> str:
        """Return turns, tokens and cost for a person, with the table that has the prices."""
        parts = [plural(self.turns, "turn"), describe_usage(self.usage)]
        if self.unpriced and self.usage.cost_usd is not None:
            parts.append(f"without {plural(self.unpriced, 'turn')} whose price is unknown")
        return ", ".join(filter(None, parts))


def spending_of(runs: Iterable[RunUsage]) -> Spending:
    found = Spending()
    for run in runs:
        found = found.with_turn(run.usage, run.turns)
    return found


def describe_usage(usage: TokenUsage) -> str:
    by = f" by {one_line(usage.prices, 60)}" if usage.prices and usage.cost_usd is not None else ""
    return f"{usage.describe()}{by}"


def describe_turn(number: object, usage: TokenUsage) -> str:
    """Return one turn for a person, with its tokens by kind."""
    kinds = {
        "in": usage.input_tokens,
        "of them cached": usage.cached_tokens,
        "to the cache": usage.cache_write_tokens,
        "out": usage.output_tokens,
    }
    counts = [f"{count:,} {kind}" for kind, count in kinds.items() if count is not None]
    said = describe_usage(usage)
    return one_line(f"{number}" + (f": {said}" if said else "") + (f" ({', '.join(counts)})" if counts else ""), 200)
