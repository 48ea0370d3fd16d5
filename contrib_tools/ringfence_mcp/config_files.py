"""Careful edits of other programs' configuration files: JSON, JSON with comments, and TOML.

An edit changes one entry. Comments, order and layout of the rest stay as they are.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tomlkit
from tomlkit.exceptions import TOMLKitError

KeyPath = Sequence[str]


class ConfigFile:
    """The text of a configuration file, and edits of it. Nothing is written before `save`."""

    def __init__(self, path: Path) -> None:
        """The text of a file that is not there is empty.

        Raises:
            ValueError: it cannot be parsed, or is no object.
            OSError: it cannot be read.
        """
        self.path = path
        self._found = _read(path)
        try:
            content = self._found.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8, and stays as it is: {error}") from error
        self._newline = "\r\n" if "\r\n" in content else "\n"
        self.before = self.text = content.replace("\r\n", "\n")
        self._toml = path.suffix == ".toml"
        self.data()

    def data(self) -> dict[str, Any]:
        """What the text says now."""
        try:
            if self._toml:
                return tomlkit.parse(self.text).unwrap()
            parsed: Any = json.loads(_plain(self.text)) if self.text.strip() else {}
        except (TOMLKitError, ValueError, RecursionError) as error:
            raise ValueError(f"{self.path} cannot be parsed, and stays as it is: {error}") from error
        if type(parsed) is not dict:
            raise ValueError(f"{self.path} holds no object, and stays as it is")
        return cast("dict[str, Any]", parsed)

    def get(self, path: KeyPath) -> Any:
        """The value at a path of keys; None where there is none."""
        found: Any = self.data()
        for key in path:
            found = cast("dict[str, Any]", found).get(key) if isinstance(found, dict) else None
        return found

    def set(self, path: KeyPath, value: object) -> None:
        """Make the entry hold `value`. Objects on the way are created.

        Raises ValueError where something else than an object is on the way.
        """
        before = self.data()
        if self.get(path) == value:
            return
        for depth in range(1, len(path)):
            if self.get(path[:depth]) is not None and type(self.get(path[:depth])) is not dict:
                raise ValueError(f"{self.path}: {'.'.join(path[:depth])} holds no object: make it one by hand first")
        if self._toml:
            self._set_toml(path, value)
        else:
            self._set_json(path, value)
        self._check_edit(before, path, value)

    def add(self, path: KeyPath, values: Sequence[str]) -> None:
        """Append the values that the list at a path lacks. A list is created where there is none."""
        before, held = self.data(), self._listed(path)
        missing = [value for value in values if value not in held]
        if self._toml or not held:
            self.set(path, [*held, *missing])
        else:
            for value in missing:
                held_at, _ = _find(self.text, path)
                self.text = _insert(self.text, held_at, json.dumps(value))
            self._check_edit(before, path, [*held, *missing])

    def discard(self, path: KeyPath, values: Sequence[str]) -> None:
        """Remove the values from the list at a path, and an empty list too."""
        before, held = self.data(), self._listed(path)
        kept = [value for value in held if value not in values]
        if held and not kept:
            self.remove(path)
        elif self._toml and kept != held:
            self.set(path, kept)
        elif kept != held:
            for at in reversed(range(len(held))):
                if held[at] in values:
                    held_at, _ = _find(self.text, path)
                    self.text = _remove(self.text, held_at, at)
            self._check_edit(before, path, kept)

    def _listed(self, path: KeyPath) -> list[Any]:
        held: list[Any] | None = self.get(path)
        if held is not None and type(held) is not list:
            raise ValueError(f"{self.path}: {'.'.join(path)} holds no list")
        return held or []

    def remove(self, path: KeyPath) -> None:
        """Remove the entry, and the objects around it that it leaves empty."""
        before = self.data()
        if self.get(path) is None:
            return
        if self._toml:
            document = tomlkit.parse(self.text)
            around: Any = document
            for key in path[:-1]:
                around = around[key]
            del around[path[-1]]
            self.text = tomlkit.dumps(document)
        else:
            holder, _ = _find(self.text, path[:-1])
            keys = [entry.key for entry in _entries(self.text, holder)]
            self.text = _remove(self.text, holder, keys.index(path[-1]))
        self._check_edit(before, path, None)
        if len(path) > 1 and self.get(path[:-1]) == {}:
            self.remove(path[:-1])

    def _check_edit(self, before: dict[str, Any], path: KeyPath, value: object) -> None:
        """Raise ValueError where the text differs from what it said before in more than this entry; None is no entry.

        A key that occurs twice leads to that, and tables around dotted keys, which tomlkit puts in the wrong place.
        """
        around = before
        for key in path[:-1]:
            around[key] = around.get(key) or {}
            around = around[key]
        around[path[-1]] = value
        if value is None:
            del around[path[-1]]
        try:
            if _canonical(self.data()) == _canonical(before):
                return
        except ValueError:  # the edit broke it
            pass
        raise ValueError(f"{self.path} cannot be edited, and stays as it is: change {'.'.join(path)} by hand")

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing, not even in a comment."""
        return not self.data() and self.text.strip() in ("", "{\n}", "{}")

    def save(self) -> None:
        """Replace the file as a whole, or remove one that says nothing any more. A link stays a link.

        Raises ValueError where somebody has changed it since it was read: a client may write its own file at any time.
        """
        target = Path(os.path.realpath(self.path))
        if _read(target) != self._found:
            raise ValueError(f"{self.path} has just been changed by another program, and stays as it is: try again")
        if self.is_empty:
            target.unlink(missing_ok=True)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with open(new, "x", encoding="utf-8", newline=self._newline) as file:
                file.write(self.text)
            if target.exists():
                new.chmod(target.stat().st_mode & 0o7777)
            new.replace(target)
        finally:
            new.unlink(missing_ok=True)

    def _set_toml(self, path: KeyPath, value: object) -> None:
        document = tomlkit.parse(self.text)
        around: Any = document
        for key in path[:-1]:
            if key not in around:
                around[key] = tomlkit.table(is_super_table=isinstance(around, tomlkit.TOMLDocument))
            around = around[key]
        around[path[-1]] = value
        self.text = tomlkit.dumps(document)

    def _set_json(self, path: KeyPath, value: object) -> None:
        if not self.text.strip():
            self.text = "{}\n"
        at, missing = _find(self.text, path)
        is_inside = bool(missing) and self.text[at] == "{"  # else a null is replaced
        for key in reversed(missing[is_inside:]):
            value = {key: value}
        dumped = json.dumps(value, indent=_step(self.text), ensure_ascii=False)
        if is_inside:
            self.text = _insert(self.text, at, f"{json.dumps(missing[0])}: {dumped}")
        else:
            _, end = json.JSONDecoder().raw_decode(_plain(self.text), at)
            self.text = self.text[:at] + dumped.replace("\n", f"\n{_indent(self.text, at)}") + self.text[end:]


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _canonical(data: object) -> object:
    """The same for the same data, without empty objects: tomlkit writes no table around nothing."""
    text = json.dumps(data, default=str)
    return json.loads(text, object_hook=lambda held: {key: value for key, value in held.items() if value != {}})


# Of JSON with comments as text. A value is known by where it begins.

_STRING = r'"(?:[^"\\]|\\.)*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])", re.DOTALL)
_BLANK = re.compile(r"\s*")


def _plain(text: str) -> str:
    """The same as JSON, with blanks where comments and trailing commas are: everything is where it was."""
    return _TRAILING_COMMA.sub(_blank, _without_comments(text))


def _without_comments(text: str) -> str:
    return _COMMENT.sub(_blank, text)


def _blank(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith('"') else re.sub(r"\S", " ", found[0])


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of an object, or of a list, where it has no key; ``start`` is the key's."""

    key: str | None
    start: int
    value: int
    end: int


def _skip(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _entries(text: str, at: int) -> list[_Entry]:
    """Those of the object or list at `at`; none of anything else."""
    text, entries = _plain(text), list[_Entry]()
    is_object, decode = text[at] == "{", json.JSONDecoder().raw_decode
    at = _skip(text, at + 1) if text[at] in "{[" else len(text)
    while at < len(text) and text[at] not in "}]":
        start, key = at, None
        if is_object:
            key, at = decode(text, at)
            at = _skip(text, _skip(text, at) + 1)  # the colon
        _, end = decode(text, at)
        entries.append(_Entry(key, start, at, end))
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at
    return entries


def _find(text: str, path: KeyPath) -> tuple[int, KeyPath]:
    """Where the value is at the path, as far as there is one, and the keys that are missing."""
    at = _skip(_plain(text), 0)
    for depth, key in enumerate(path):
        found = next((entry for entry in _entries(text, at) if entry.key == key), None)
        if found is None:
            return at, path[depth:]
        at = found.value
    return at, ()


def _indent(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 :]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _step(text: str) -> str:
    """One level of indentation, as the text has it."""
    found = re.search(r"\n([ \t]+)\S", text)
    return found[1] if found else "  "


def _insert(text: str, holder: int, entry: str) -> str:
    """With `entry` as the last one of an object or list, behind the comments at its end."""
    entries, (_, end) = _entries(text, holder), json.JSONDecoder().raw_decode(_plain(text), holder)
    close, outer = end - 1, _indent(text, holder)
    entry = "".join(f"\n{outer}{_step(text)}{line}" for line in entry.split("\n"))
    if entries:
        comma = _without_comments(text).find(",", entries[-1].end, close)
        if comma < 0:
            text, close = f"{text[: entries[-1].end]},{text[entries[-1].end :]}", close + 1
        else:
            entry += ","
    return f"{text[:close].rstrip()}{entry}\n{outer}{text[close:]}"


def _remove(text: str, holder: int, index: int) -> str:
    """Without an entry of an object or list, its comma, and its line where nothing else is on it."""
    entries, code = _entries(text, holder), _without_comments(text)
    start, end = entries[index].start, entries[index].end
    _, close = json.JSONDecoder().raw_decode(_plain(text), holder)
    limit = entries[index + 1].start if index + 1 < len(entries) else close
    comma = code.find(",", end, limit)
    if comma >= 0:
        end = comma + 1
    elif index:
        comma = code.index(",", entries[index - 1].end)
        text, start, end = text[:comma] + text[comma + 1 :], start - 1, end - 1
    line, rest = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    if text[line:start].strip() or rest < 0 or text[end:rest].strip():
        return text[:start].rstrip(" \t") + text[end:]
    return text[:line] + text[rest + 1 :]
