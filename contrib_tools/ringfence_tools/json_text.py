"""Edits of JSON as text: all else in it, such as its indentation, stays as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class _Member:
    """A member of an object or a list, and where it is in the text. The key of a list's member is None."""

    key: str | None
    start: int
    value: int
    end: int


@dataclass(frozen=True, slots=True)
class _Brackets:
    """An object or a list in the text, from its opening bracket to behind its closing one."""

    start: int
    end: int
    members: Sequence[_Member]


def edited(text: str, path: Sequence[str], value: object) -> str:
    """Return a text that has another value at a path of keys; None is no entry. A list keeps the members that are in
    both values.

    Raises ValueError and TypeError where the text has no objects on the way. The caller compares what the result says.
    """
    around = _container(text, _skip(text, 0))
    for depth, key in enumerate(path):
        found = next((member for member in around.members if member.key == key), None)
        if found is None:
            if value is None:
                return text
            held: Any = value
            for inner in reversed(path[depth + 1 :]):
                held = {inner: held}
            return _inserted(text, around, held, key)
        if depth < len(path) - 1:
            around = _container(text, found.value)
            continue
        if value is None:
            return _without(text, around, found)
        return _replaced(text, found, value)
    raise ValueError("a path has at least one key")


def _skip(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    assert found is not None
    return found.end()


def _container(text: str, start: int) -> _Brackets:
    if text[start] not in "{[":
        raise TypeError("no object is there")
    members: list[_Member] = []
    place = _skip(text, start + 1)
    while text[place] not in "}]":
        first, key = place, None
        if text[start] == "{":
            key, place = _DECODER.raw_decode(text, place)
            place = _skip(text, _skip(text, place) + 1)  # behind the colon
        value = place
        _, place = cast("tuple[object, int]", _DECODER.raw_decode(text, place))
        members.append(_Member(key, first, value, place))
        place = _skip(text, place)
        if text[place] == ",":
            place = _skip(text, place + 1)
    return _Brackets(start, place + 1, members)


def _replaced(text: str, member: _Member, value: object) -> str:
    old = _DECODER.raw_decode(text, member.value)[0]
    if not isinstance(old, list) or not isinstance(value, list):
        new = _dumped(text, value, _indentation(text, member.start), "\n" in text[member.value : member.end])
        return f"{text[: member.value]}{new}{text[member.end :]}"
    was, wanted = cast("list[Any]", old), cast("list[Any]", value)
    for number in reversed(range(len(was))):
        if was[number] not in wanted:
            held = _container(text, member.value)
            text = _without(text, held, held.members[number])
    for one in wanted:
        if one not in was:
            text = _inserted(text, _container(text, member.value), one)
    return text


def _inserted(text: str, around: _Brackets, value: object, key: str | None = None) -> str:
    """With another member at the end of an object or a list."""
    is_tall = "\n" in (text[around.start : around.members[0].start] if around.members else text)
    if around.members:
        place, indentation = around.members[-1].end, _indentation(text, around.members[0].start)
    else:
        place, indentation = around.start + 1, _indentation(text, around.start) + indentation_step(text)
    colon, comma = _separators(text)
    name = "" if key is None else f"{json.dumps(key, ensure_ascii=False)}{colon}"
    new = f"{name}{_dumped(text, value, indentation, is_tall)}"
    if around.members:
        gap = f",{_newline(text)}{indentation}" if is_tall else comma
        return f"{text[:place]}{gap}{new}{text[place:]}"
    if is_tall:
        new = f"{_newline(text)}{indentation}{new}{_newline(text)}{_indentation(text, around.start)}"
    return f"{text[:place]}{new}{text[around.end - 1 :]}"


def _without(text: str, around: _Brackets, member: _Member) -> str:
    number = around.members.index(member)
    if number > 0:
        return f"{text[: around.members[number - 1].end]}{text[member.end :]}"
    if len(around.members) > 1:
        return f"{text[: member.start]}{text[around.members[1].start :]}"
    return f"{text[: around.start + 1]}{text[around.end - 1 :]}"


def _indentation(text: str, place: int) -> str:
    """The blanks that the line begins with in which a place is."""
    line = text[text.rfind("\n", 0, place) + 1 :]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def indentation_step(text: str) -> str:
    """One level of indentation, as the text has it."""
    indented = re.search(r"\n([ \t]+)\S", text)
    return indented[1] if indented else "  "


def _separators(text: str) -> tuple[str, str]:
    """What stands behind a key, and between members on one line."""
    is_dense = any(text[_end_of_key(text, member) + 1] not in " \t\r\n" for member in _some_members(text))
    return (":", ",") if is_dense else (": ", ", ")


def _some_members(text: str) -> Iterator[_Member]:
    yield from _container(text, _skip(text, 0)).members[:1]


def _end_of_key(text: str, member: _Member) -> int:
    """Where the colon of a member is."""
    return _skip(text, cast("tuple[object, int]", _DECODER.raw_decode(text, member.start))[1])


def _dumped(text: str, value: object, indentation: str, is_tall: bool) -> str:
    """A value as the text would have it, at an indentation."""
    colon, comma = _separators(text)
    if not is_tall:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(comma, colon))
    lines = json.dumps(
        value, ensure_ascii=False, allow_nan=False, indent=indentation_step(text), separators=(",", colon)
    )
    return lines.replace("\n", f"{_newline(text)}{indentation}")
