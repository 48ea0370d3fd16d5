"""Careful edits of other programs' configuration files: JSON, JSON with comments, and TOML.

An edit changes one entry. Comments, order and layout of the rest stay as they are.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import json5
import tomlkit
from json5.loader import ModelLoader
from json5.model import JSONArray, JSONObject, Node
from json5.utils import JSON5DecodeError
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
        try:
            self.before = path.read_text("utf-8")
        except FileNotFoundError:
            self.before = ""
        self.text = self.before
        self._toml = path.suffix == ".toml"
        self.data()

    def data(self) -> dict[str, Any]:
        """What the text says now."""
        try:
            if self._toml:
                return tomlkit.parse(self.text).unwrap()
            parsed: Any = json5.loads(self.text) if self.text.strip() else {}
        except (JSON5DecodeError, TOMLKitError, UnicodeDecodeError) as error:
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
        if self.get(path) == value:
            return
        for depth in range(1, len(path)):
            if self.get(path[:depth]) is not None and type(self.get(path[:depth])) is not dict:
                raise ValueError(f"{self.path}: {'.'.join(path[:depth])} holds no object")
        if self._toml:
            self._set_toml(path, value)
        else:
            self._set_json(path, value)

    def add(self, path: KeyPath, values: Sequence[str]) -> None:
        """Append the values that the list at a path lacks. A list is created where there is none."""
        held = self._listed(path)
        missing = [value for value in values if value not in held]
        if self._toml or not held:
            self.set(path, [*held, *missing])
        else:
            for value in missing:
                root = _Json(self.text)
                self.text = root.insert(root.find(path)[0], json.dumps(value))

    def discard(self, path: KeyPath, values: Sequence[str]) -> None:
        """Remove the values from the list at a path, and an empty list too."""
        held = self._listed(path)
        kept = [value for value in held if value not in values]
        if held and not kept:
            self.remove(path)
        elif self._toml and kept != held:
            self.set(path, kept)
        else:
            for value in set(values).intersection(held):
                root = _Json(self.text)
                self.text = root.remove(root.find(path)[0], self._listed(path).index(value))

    def _listed(self, path: KeyPath) -> list[Any]:
        held: list[Any] | None = self.get(path)
        if held is not None and type(held) is not list:
            raise ValueError(f"{self.path}: {'.'.join(path)} holds no list")
        return held or []

    def remove(self, path: KeyPath) -> None:
        """Remove the entry, and the objects around it that it leaves empty."""
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
            root = _Json(self.text)
            holder = root.find(path[:-1])[0]
            self.text = root.remove(holder, list(_entries(holder)).index(path[-1]))
        if len(path) > 1 and self.get(path[:-1]) == {}:
            self.remove(path[:-1])

    def save(self) -> None:
        """Replace the file as a whole, or remove one that says nothing any more. A link stays a link."""
        target = Path(os.path.realpath(self.path))
        if not self.data() and self.text.strip() in ("", "{\n}", "{}"):
            target.unlink(missing_ok=True)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with open(new, "x", encoding="utf-8") as file:
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
        root = _Json(self.text)
        held, missing = root.find(path)
        if not missing:
            self.text = root.replace(held, value)
            return
        for key in reversed(missing[1:]):
            value = {key: value}
        self.text = root.insert(held, f"{json.dumps(missing[0])}: {root.dumped(value)}")


def _entries(node: Node) -> dict[str, Node]:
    if not isinstance(node, JSONObject):
        return {}
    keys = (getattr(key, "characters", None) or getattr(key, "name", "") for key in node.keys)
    return dict(zip(keys, node.values, strict=True))


_TO_THE_COMMA = re.compile(r"(?:\s|/\*.*?\*/|//[^\n]*+)*+,", re.DOTALL)


class _Json:
    """JSON with comments as text, and where in it the values are."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.value: Node = json5.loads(text, loader=ModelLoader()).value
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]
        step = re.search(r"\n([ \t]+)\S", text)
        self._step = step[1] if step else "  "

    def find(self, path: KeyPath) -> tuple[Node, KeyPath]:
        """The node at the path as far as there is one, and the keys that are missing."""
        node = self.value
        for depth, key in enumerate(path):
            entries = _entries(node)
            if key not in entries:
                return node, path[depth:]
            node = entries[key]
        return node, ()

    def dumped(self, value: object) -> str:
        return json.dumps(value, indent=self._step, ensure_ascii=False)

    def replace(self, node: Node, value: object) -> str:
        start = self._start(node)
        new = self.dumped(value).replace("\n", f"\n{self._indent(start)}")
        return self.text[:start] + new + self.text[self._end(node) :]

    def insert(self, holder: Node, entry: str) -> str:
        """With `entry` as the last one of an object or list, behind the comments at its end."""
        assert isinstance(holder, (JSONObject, JSONArray))
        text, close = self.text, self._end(holder) - 1
        outer = self._indent(self._start(holder))
        indent = outer + self._step
        entry = "".join(f"\n{indent}{line}" for line in entry.split("\n"))
        if holder.values and holder.trailing_comma is None:
            comma = self._end(holder.values[-1])
            text, close = f"{text[:comma]},{text[comma:]}", close + 1
        elif holder.values:
            entry += ","
        return f"{text[:close].rstrip()}{entry}\n{outer}{text[close:]}"

    def remove(self, holder: Node, index: int) -> str:
        """Without an entry of an object or list, its comma, and its line where nothing else is on it."""
        assert isinstance(holder, (JSONObject, JSONArray))
        first = holder.keys[index] if isinstance(holder, JSONObject) else holder.values[index]
        text, start, end = self.text, self._start(first), self._end(holder.values[index])
        if after := _TO_THE_COMMA.match(text, end):
            end = after.end()
        elif index and (before := _TO_THE_COMMA.match(text, self._end(holder.values[index - 1]))):
            comma = before.end() - 1
            text, start, end = text[:comma] + text[comma + 1 :], start - 1, end - 1
        line, rest = text.rfind("\n", 0, start) + 1, text.find("\n", end)
        if text[line:start].strip() or rest < 0 or text[end:rest].strip():
            return text[:start].rstrip(" \t") + text[end:]
        return text[:line] + text[rest + 1 :]

    def _start(self, node: Node) -> int:
        assert node.lineno is not None
        assert node.col_offset is not None
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: Node) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def _indent(self, at: int) -> str:
        line = self.text[self.text.rfind("\n", 0, at) + 1 :]
        return line[: len(line) - len(line.lstrip(" \t"))]
