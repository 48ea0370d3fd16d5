"""Results of tools: the values, the text that a model reads, and where it finds the rest of a long one."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Never, Protocol, Self, TypeVar, cast, runtime_checkable

from ringfence import serde

if TYPE_CHECKING:
    from ringfence.participants import Change

logger = logging.getLogger(__name__)

MAX_RESULT_CHARACTERS = 100_000
"""A model gets at most this much text for one tool call, unless `RunOptions` say less."""
CUT_CHARACTERS = 400
"""The number of characters reserved for the sentence that replaces the cut text."""

ValueT = TypeVar("ValueT", covariant=True)
OkT = TypeVar("OkT")


@runtime_checkable
class ToolRenderableResult(Protocol):
    """A result value with its own text for the model."""

    def render(self) -> str: ...


@runtime_checkable
class AcceptsChanges(Protocol):
    """A result value of an opaque tool that receives the changes of its call. The handler cannot know them."""

    def with_changes(self, changes: Sequence[Change]) -> Self: ...


class ShowsLines(Protocol):
    """A result value of a read tool that may show only some lines of the file. The others do not count as read."""

    def lines_shown(self) -> tuple[range, int] | None:
        """The shown lines, from 0, and the number of lines of the file. None if the whole file is shown."""
        ...


@dataclass(frozen=True)
class ToolResult(Generic[ValueT]):
    """A message, a typed value, and whether the call is to be committed (``success``) or rolled back.

    The model reads the message and, unless ``exclude_value_from_context``, the rendered value; the session gets the
    value in any case. That flag saves context, it hides nothing.
    """

    message: str
    value: ValueT | None = None
    success: bool = True
    exclude_value_from_context: bool = False

    @staticmethod
    def ok(value: OkT, message: str = "OK") -> ToolResult[OkT]:
        """A success with a value. A message alone is `ToolResult(message)`."""
        return ToolResult(message, value)

    @staticmethod
    def error(message: str) -> ToolResult[Never]:
        """A failure: it type-checks as the failure of any result type."""
        return ToolResult(message=message, value=None, success=False)

    def render(self) -> str:
        """The value as text: its own ``render()``, else JSON. Never raises."""
        return render_value(self.value)

    def text(self) -> str:
        """The whole text for the model: the message and the rendered value."""
        return bounded(whole_text(self, self.render()))


def whole_text(result: ToolResult[object], rendered: str) -> str:
    """The message, a blank line and the rendered value, whatever of it there is; however long it is."""
    if not rendered or result.exclude_value_from_context:
        return sendable(result.message)
    return sendable(f"{result.message}\n\n{rendered}" if result.message else rendered)


def bounded(text: str, limit: int | None = None, *, whole_at: str | None = None) -> str:
    """`text`, cut in the middle where it is longer than a model should get at once.

    ``limit`` is by default MAX_RESULT_CHARACTERS. A character of several bytes counts as that many, as some clients of
    models count. ``whole_at`` is a path at which `read_file` shows all of it.
    """
    limit = limit or MAX_RESULT_CHARACTERS
    if 4 * len(text) <= limit or len(data := text.encode("utf-8", "surrogatepass")) <= limit:
        return text
    kept = (limit - CUT_CHARACTERS) // 2
    head, tail = data[:kept].decode("utf-8", "ignore"), data[-kept:].decode("utf-8", "ignore")
    gone = len(text) - len(head) - len(tail)
    advice = f"read_file shows all of it: {whole_at}" if whole_at is not None else "ask for a smaller part"
    return f"{head}\n[... {gone} characters left out: {advice} ...]\n{tail}"


def sendable(text: str) -> str:
    """`text` with lone surrogates escaped (of a file name that is not UTF-8, or from a model's own JSON), which could
    not be sent."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def exit_code_of(value: object) -> int | None:
    """The exit code of the command whose result is `value`. None if `value` is no result of a command."""
    if value is None:
        return None
    try:
        found = getattr(value, "exit_code", None)
    except Exception:  # a property of somebody's own may do anything
        return None
    return found if type(found) is int else None


def render_value(value: object) -> str:
    """Text for any value. Rendering never fails a call: what has no text of its own becomes JSON, else its repr."""
    try:
        return _render(value)
    except Exception:
        logger.warning("a %s could not be rendered; its repr stands in", type(value).__name__, exc_info=True)
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _render(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        return value.decode("utf-8", errors="replace")
    own = getattr(value, "render", None)
    if callable(own) and not isinstance(value, type):
        try:
            return str(own())
        except Exception:
            logger.warning("render() of %s raised; JSON stands in", type(value).__name__, exc_info=True)
            return _json(value)
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        _say_once(kind)
        return _json(value)
    if isinstance(value, Mapping):
        return _json(cast("Mapping[object, object]", value))
    if isinstance(value, Sequence):
        return _render_items([render_value(item) for item in cast("Sequence[object]", value)])
    return str(value)


def _render_items(texts: list[str]) -> str:
    if not texts:
        return "[]"
    try:
        return json.dumps([serde.STRICT_JSON.decode(text) for text in texts], ensure_ascii=False)
    except ValueError:
        return "\n\n".join(text for text in texts if text)


def _json(value: object) -> str:
    return json.dumps(serde.dump_any(value, exclude_none=True), ensure_ascii=False)


_said: set[type] = set()


def _say_once(kind: type) -> None:
    if kind not in _said:
        _said.add(kind)
        logger.warning("%s has no render(): the model reads it as JSON", kind.__qualname__)
