"""Add up the hours of a plain text file, by project."""

from timesheet.duration import format_duration, parse_duration
from timesheet.entries import Entry, EntryError, parse_entries, parse_entry
from timesheet.report import render, totals

__all__ = [
    "Entry",
    "EntryError",
    "format_duration",
    "parse_duration",
    "parse_entries",
    "parse_entry",
    "render",
    "totals",
]
