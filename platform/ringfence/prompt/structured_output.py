"""The typed answer of a prompt: from its declared type to a schema, and from a model's last words to a value."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal, NoReturn, cast, get_args, get_origin

from ringfence import serde
from ringfence.errors import OutputParseError, PromptValidationError
from ringfence.serde import STRICT_JSON

# At the start of a line only: that cannot be inside of a JSON string, which has no line breaks.
_FENCE = re.compile(r"^[ \t]*`{3,}json\b\s*", re.IGNORECASE | re.MULTILINE)
_FENCE_END = re.compile(r"\s*(```|$)")
_OPENING = re.compile(r"[\[{]")
_MAX_LOOKBACK = 16 * 1024


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The type of a final answer: one ``dataclass_type``, or a list of them if ``container`` is "array"."""

    dataclass_type: type[Any]
    container: Literal["object", "array"]
    allow_extra_keys: bool = False
    """Whether an answer may have keys that are no fields; they are dropped."""

    @staticmethod
    def of(declared: Any, allow_extra_keys: bool = False) -> StructuredOutput:
        """From a dataclass or ``list[Dataclass]``. Raises PromptValidationError for any other type."""
        arguments = get_args(declared)
        if get_origin(declared) is list and len(arguments) == 1 and is_dataclass_type(arguments[0]):
            return StructuredOutput(arguments[0], "array", allow_extra_keys)
        if is_dataclass_type(declared):
            return StructuredOutput(declared, "object", allow_extra_keys)
        raise PromptValidationError(
            f"the output of a prompt is a dataclass or list[a dataclass], not {declared!r}; None is for text",
            dataclass_type=declared if isinstance(declared, type) else None,
        )

    def schema(self) -> dict[str, object]:
        """The JSON Schema of the answer, always of an object: an array is its required key ``items``."""
        item = serde.schema(self.dataclass_type, extra="ignore" if self.allow_extra_keys else "forbid")
        if self.container == "object":
            return item
        definitions = {"$defs": item.pop("$defs")} if "$defs" in item else {}  # references are from the root
        properties = {"items": {"type": "array", "items": item}}
        whole = {"type": "object", "properties": properties, "required": ["items"], "additionalProperties": False}
        return whole | definitions

    def parse(self, text: str) -> Any:
        """The value of a final answer.

        The JSON is the content of the first fence marked ``json``, else the whole text, else the first object or
        array in it that fits the container.

        Raises:
            OutputParseError: no JSON, or JSON that does not fit; or a text with two that both do and differ.
        """
        try:
            return self.parse_value(self._decode(text))
        except RecursionError as error:
            self._refuse("the answer is nested too deeply", error)

    def parse_value(self, value: object) -> Any:
        """Convert decoded JSON to the value of the answer, as `parse` does. Raises OutputParseError."""
        if self.container == "object":
            return self._item(value, "the answer")
        items = _array_items(value)
        if items is None:
            self._refuse(f'the answer must be a JSON array or an object with the key "items", not {_json_kind(value)}')
        return [self._item(item, f"item {index}") for index, item in enumerate(items)]

    def _item(self, value: object, what: str) -> Any:
        if not isinstance(value, dict):
            self._refuse(f"{what} must be a JSON object, not {_json_kind(value)}")
        try:
            extra = "ignore" if self.allow_extra_keys else "forbid"
            return serde.parse(self.dataclass_type, cast("dict[str, object]", value), extra=extra)
        except (ValueError, TypeError) as error:
            self._refuse(f"{what} is no {self.dataclass_type.__name__}: {error}", error)

    def _has_container(self, value: object) -> bool:
        return isinstance(value, dict) if self.container == "object" else _array_items(value) is not None

    def _decode(self, text: str) -> object:
        fence = _FENCE.search(text)
        try:
            if fence is not None:  # not cut at the next one: a JSON string may have backticks in it
                value, end = STRICT_JSON.raw_decode(text, fence.end())
                if _FENCE_END.match(text, end) is None:
                    raise json.JSONDecodeError("Extra data", text, end)
                return value
            try:
                return STRICT_JSON.decode(text)
            except json.JSONDecodeError:
                return self._find_embedded(text)
        except ValueError as error:  # not of the syntax only: a key twice, NaN, a number too long to read
            self._refuse(f"the answer is not acceptable JSON: {error}", error)

    def _find_embedded(self, text: str) -> object:
        """The first fitting JSON value in a text, or else the first JSON value, whose error the caller reports."""
        fitting: list[object] = []
        others: list[object] = []
        start = 0
        while (opening := _OPENING.search(text, start)) is not None:
            start = opening.start()
            # Whatever is no JSON costs the lines before it, which JSONDecodeError counts; so they are cut off in time.
            if start > _MAX_LOOKBACK:
                text, start = text[start:], 0
            try:
                value, start = STRICT_JSON.raw_decode(text, start)
            except json.JSONDecodeError:
                start += 1
                continue
            if not self._has_container(value):
                others.append(value)
            elif not fitting:
                fitting.append(value)
            elif value != fitting[0] and self._parses(value) and self._parses(fitting[0]):
                self._refuse(f"there are several JSON {self.container}s in the answer, which differ: send exactly one")
        if not fitting and not others:
            self._refuse("there is no JSON in the answer")
        return (fitting or others)[0]

    def _parses(self, value: object) -> bool:
        try:
            self.parse_value(value)
        except OutputParseError:
            return False
        return True

    def _refuse(self, message: str, cause: BaseException | None = None) -> NoReturn:
        raise OutputParseError(message, dataclass_type=self.dataclass_type) from cause


def is_dataclass_type(kind: object) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


def _array_items(value: object) -> list[object] | None:
    """The items of an array answer, if it is one."""
    if isinstance(value, dict):
        value = cast("dict[str, object]", value).get("items")
    return cast("list[object]", value) if isinstance(value, list) else None


def _json_kind(value: object) -> str:
    kinds: dict[type, str] = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return kinds.get(type(value), "a number")
