"""Values of options as they are typed: durations, sizes, numbers. Each raises click.BadParameter for what is none."""

from __future__ import annotations

import math
import re

import click

SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST_SECONDS = 365 * 24 * 3600.0
BYTES = {"m": 1 << 20, "g": 1 << 30}
LEAST_BYTES = 64 << 20


def seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """A duration such as ``90s``, ``10m`` or ``1h30m``."""
    if value is None:
        return None
    parts = re.findall(r"(\d{1,9}(?:\.\d{1,9})?)([smh])", value)
    if not parts or "".join(number + unit for number, unit in parts) != value:
        raise click.BadParameter(f"{value!r} is not a duration: write 90s, 10m or 1h30m", ctx, param)
    found = sum(float(number) * SECONDS[unit] for number, unit in parts)
    if not 1 <= found <= LONGEST_SECONDS:
        raise click.BadParameter(f"{value!r} is not between 1s and a year", ctx, param)
    return found


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A size such as ``512m`` or ``4g``."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,6})([mg])", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a size: write 512m or 4g", ctx, param)
    found_bytes = int(found[1]) * BYTES[found[2]]
    if found_bytes < LEAST_BYTES:
        raise click.BadParameter(f"{value!r} is too little: a command needs {LEAST_BYTES >> 20}m", ctx, param)
    return found_bytes


def number(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """One that is in its range: ``nan`` is in every one for `click`."""
    if value is not None and math.isnan(value):
        raise click.BadParameter(f"{value} is not a number", ctx, param)
    return value
