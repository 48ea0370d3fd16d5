"""Words about what did not fit, for somebody who can only change the data."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ringfence.serde.nodes import Node

MAX_PROBLEMS = 20


_KINDS = {  # of a core schema; the last three of an error
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "none": "null",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "frozenset": "a list",
    "named-tuple": "a list",
    "call": "a list",
    "dict": "an object",
    "decimal": "a decimal number",
    "date": "a date such as 2026-01-31",
    "datetime": "a date and time such as 2026-01-31T12:30:00Z",
    "time": "a time of day such as 12:30:00",
    "timedelta": "a duration such as PT90S",
    "uuid": "a UUID",
    "bytes": "bytes as base64 text",
    "path_type": "a path",
    "string_unicode": "text without lone surrogates",
    "invalid_key": "a string for a key",
}
_WRONG_KIND = frozenset(
    {"enum", "literal_error", "none_required", "int_from_float", "is_instance_of", "sequence_str"}
    | {"bytes_invalid_encoding", "date_from_datetime_inexact"}
)


Location: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True)
class Layout:
    """A tightened core schema, to find what an error's location is about."""

    root: Node
    definitions: Mapping[str, Node]

    def explain(self, problems: Sequence[Any]) -> str:
        """One line for all problems; what several members of a union expected in one place is said once."""
        # Items that do not fit are not counted: then that there are too few says nothing.
        around = {problem["loc"][:depth] for problem in problems for depth in range(len(problem["loc"]))}
        problems = [each for each in problems if each["type"] != "too_short" or each["loc"] not in around]
        problems = self._of_members_meant(problems)
        said: dict[tuple[str, str], list[str]] = {}
        more: list[str] = []
        for number, problem in enumerate(problems):
            if len(said) == MAX_PROBLEMS:
                more = [f"and {len(problems) - number} more problems"]
                break
            where, what, got = self._problem(problem)
            whats = said.setdefault((where, got), [])
            if what not in whats:
                whats.append(what)
        return "; ".join([_sentence(where, whats, got) for (where, got), whats in said.items()] + more)

    def _of_members_meant(self, problems: Sequence[Any]) -> Sequence[Any]:
        """Without those of members of a union that another kind of object was meant for: a literal of theirs did not
        fit (``"kind": "line"``), and that of another member did."""
        unfit = {problem["loc"][:-1]: problem["loc"][-1:] for problem in problems if problem["type"] == "literal_error"}
        tags: dict[Location, set[Location]] = {}
        for member, tag in unfit.items():
            if member and self._find(member[:-1])[1]["type"] == "union":
                tags.setdefault(member[:-1], set()).add(tag)
        meant: set[Location] = set()
        for problem in problems:
            for member in _above(problem["loc"]):
                if member and member not in unfit and member[:-1] in tags:
                    fields = _fields(self._find(member)[1])
                    if any((_key(one),) in tags[member[:-1]] for one in fields):
                        meant.add(member[:-1])
        return [
            problem
            for problem in problems
            if not any(member in unfit and member[:-1] in meant for member in _above(problem["loc"]))
        ]

    def _problem(self, problem: Any) -> tuple[str, str, str]:
        """Where it is, what is wrong, and what came (empty where that says nothing more)."""
        kind, loc = problem["type"], problem["loc"]
        if kind in ("unexpected_keyword_argument", "extra_forbidden"):
            path, node = self._find(loc[:-1])
            known = _keys(node)
            twice = next((_key(each) for each in _fields(node) if each["name"] == loc[-1]), None)
            what = f'the same as "{twice}": give one of them' if twice in known else _unknown_key(str(loc[-1]), known)
            return path_text([*path, loc[-1]]), what, ""
        path, node = self._find(loc)
        where = path_text(path) + (" (its key)" if loc[-1:] == ("[key]",) else "")
        if kind == "missing":
            return where, "required, but missing", ""
        if kind.startswith("recursion"):
            return where, "nested too deeply", ""
        if kind in ("value_error", "assertion_error"):  # raised by the class itself
            return where, str(problem["ctx"]["error"]), ""
        got = shown_value(problem["input"])
        expected = _KINDS.get(kind, "")
        if kind.endswith("_type") or "_parsing" in kind or kind in _WRONG_KIND:
            expected = expected or _expected(node)
        if expected:
            return where, f"expected {expected}", got
        return where, re.sub(r"^\w+ (?=should )| after validation", "", problem["msg"]), got

    def _find(self, loc: Sequence[str | int]) -> tuple[list[str | int], Node]:
        """The keys and indexes of a location, without pydantic's labels between them, and the node it leads to."""
        path: list[str | int] = []
        node = outer = self._bare(self.root)
        for part in loc:
            if node["type"] in ("union", "tagged-union"):
                choices = node["choices"]
                members = choices if node["type"] == "tagged-union" else {label: member for member, label in choices}
                inner = members.get(part, _NOWHERE)
            elif part == "[key]":
                inner = outer.get("keys_schema", _NOWHERE)
            else:
                path.append(part)
                inner = _child(node, part)
            node, outer = self._bare(inner), node
        return path, node

    def _bare(self, node: Node) -> Node:
        """Without what only wraps it: defaults, guards, references."""
        while True:
            wraps = (node[key] for key in ("schema", "python_schema", "lax_schema") if key in node)
            if "schema_ref" in node:
                node = self.definitions[node["schema_ref"]]
            elif "steps" in node:
                node = node["steps"][-1]
            elif (inner := next(wraps, None)) is not None:
                node = inner
            else:
                return node


_NOWHERE: Node = {"type": "any"}


def _above(location: Location) -> Iterator[Location]:
    """What a location is in, the outermost first."""
    return (location[:depth] for depth in range(len(location)))


def _child(node: Node, part: str | int) -> Node:
    kind = node["type"]
    if kind == "dataclass-args":
        return next((each for each in node["fields"] if part in (each["name"], _key(each))), _NOWHERE)
    if kind in ("typed-dict", "model-fields"):
        return node["fields"].get(part, _NOWHERE)
    if kind == "named-tuple" and isinstance(part, int):
        return node["fields"][part] if part < len(node["fields"]) else _NOWHERE
    if kind == "tuple" and node["items_schema"] and isinstance(part, int):
        return node["items_schema"][min(part, len(node["items_schema"]) - 1)]
    return node.get("values_schema" if kind == "dict" else "items_schema", _NOWHERE)


def _key(field: Node) -> str:
    alias = field.get("validation_alias")
    return alias if isinstance(alias, str) else field["name"]


def _keys(node: Node) -> list[str]:
    """The keys that the object of a node may have."""
    if node["type"] == "dataclass-args":
        return [_key(field) for field in _fields(node)]
    return list(node["fields"]) if node["type"] in ("typed-dict", "model-fields") else []


def _fields(node: Node) -> list[Node]:
    return [field for field in node["fields"] if field.get("init", True)] if node["type"] == "dataclass-args" else []


def _expected(node: Node) -> str:
    kind = node["type"]
    if kind in ("literal", "enum"):
        values = node["expected"] if kind == "literal" else [member.value for member in node["members"]]
        return ("one of " if len(values) > 1 else "") + ", ".join(shown_value(each) for each in values)
    if keys := _keys(node):
        return f"an object with the keys {', '.join(keys)}"
    return _KINDS.get(kind, "")


def _unknown_key(key: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    around = [name for name in known if len(key) > 2 and key in name]  # "file" is not nearer to "title"
    near = around or get_close_matches(key[:100], known, 1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    return f"unknown key{hint}" + (f" (known: {', '.join(known)})" if known else "")


def _sentence(where: str, whats: Sequence[str], got: str) -> str:
    """Expectations of one place are joined: "expected a string or a list (got 3)"."""
    kinds = [what.removeprefix("expected ") for what in whats if what.startswith("expected ")]
    parts = [f"expected {' or '.join(kinds)}"] if kinds else []
    parts += [what for what in whats if not what.startswith("expected ")]
    return (f"{where}: " if where else "") + ", or ".join(parts) + (f" (got {got})" if got else "")


def shown_value(value: object) -> str:
    """A value for a message, as JSON where it is short and JSON."""
    if isinstance(value, str):
        short = value if len(value) <= 60 else f"{value[:40]}...{value[-15:]}"
        return encodable(json.dumps(short, ensure_ascii=False))
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    try:
        text = reprlib.repr(value)
    except ValueError:  # an integer with more digits than Python converts
        return f"a very long {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:80]}..."


def path_text(parts: Iterable[str | int]) -> str:
    """``edits[2].count``; the middle of a very long one is left out."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and len(part) <= 60:
            text += f".{part}" if text else part
        else:
            text += f"[{shown_value(part)}]"
    return text if len(text) <= 200 else f"{text[:120]}...{text[-60:]}"


def encodable(text: str) -> str:
    if text.isascii():  # a flag of the string, so that the common case does not look at the characters
        return text
    return text.encode("utf-8", "backslashreplace").decode()
