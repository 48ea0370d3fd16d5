"""Python code of a model, evaluated in a process of its own, with the workspace's files for its only data."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from keyword import iskeyword
from pathlib import Path
from typing import Any, Literal, Self

from ringfence.errors import SectionPath, SectionVisibility, ToolValidationError
from ringfence.filesystem.paths import escape_path, resolve_model_path
from ringfence.filesystem.protocol import MAX_WRITE_LENGTH, READ_ENTIRE_FILE, Filesystem, WriteMode
from ringfence.prompt.read_before_write import ReadBeforeWritePolicy
from ringfence.prompt.section import Section
from ringfence.prompt.tool import Tool, ToolContext
from ringfence.resources import Binding, ResourceRegistry
from ringfence.runtime.session import Session
from ringfence.runtime.tool_result import ToolResult
from ringfence_tools.python_evaluator import MEMORY_BYTES

WALL_SECONDS = 5.0
MAX_CODE_CHARACTERS = 2_000
MAX_READ_CHARACTERS = 4 << 20
MAX_WRITES = 100
_LONGEST_MESSAGE_BYTES = 32 << 20
_SCRIPT = Path(__file__).with_name("python_evaluator.py")

TEXT = f"""\
Compute with `evaluate_python`: it evaluates a small part of Python (expressions, loops, functions, comprehensions,
`math`, `statistics`; nothing to import) for at most {WALL_SECONDS:g} seconds, and answers with what was printed and
the value of the last expression.

- Name files in `reads` and find their texts in `vfs_reads["path"]`, or call `read_text("path")`.
- `write_text("path", text)` makes a new file. To replace or extend one that you have read, name it in `writes` with its
  mode as well.
- Files are written when the code has come to its end, all of them or none, at most {MAX_WRITES} in a call."""


@dataclass(frozen=True, slots=True)
class EvalFileRead:
    path: str = field(metadata={"description": "A file, relative to the root; all of its text."})


@dataclass(frozen=True, slots=True)
class EvalFileWrite:
    path: str = field(metadata={"description": "A file, relative to the root."})
    content: str = field(
        default="", metadata={"description": "The text, as it is; what the code gives to write_text goes before it."}
    )
    mode: Literal["create", "overwrite", "append"] = field(
        default="create", metadata={"description": "create: the file must not be there yet; the others: it must."}
    )


@dataclass(frozen=True, slots=True)
class EvalParams:
    code: str = field(metadata={"description": f"At most {MAX_CODE_CHARACTERS:,} characters."})
    globals: dict[str, str] = field(
        default_factory=dict[str, str], metadata={"description": "Values by variable name, each as JSON text."}
    )
    reads: tuple[EvalFileRead, ...] = field(default=(), metadata={"description": "Files that the code needs."})
    writes: tuple[EvalFileWrite, ...] = field(default=(), metadata={"description": "Files to write when it succeeds."})

    def __post_init__(self) -> None:
        if len(self.code) > MAX_CODE_CHARACTERS:
            raise ToolValidationError(f"code has {len(self.code):,} characters, at most {MAX_CODE_CHARACTERS:,} do")
        if any(character < " " and character not in "\n\t" for character in self.code):
            raise ToolValidationError("code has control characters other than newlines and tabs")
        for name, text in self.globals.items():
            if not name.isidentifier() or iskeyword(name):
                raise ToolValidationError(f"globals: {name!r} is no name of a variable")
            try:
                json.loads(text)
            except ValueError as error:
                raise ToolValidationError(f"globals: the value of {name} is no JSON: {error}") from None
        for write in self.writes:
            if len(write.content) > MAX_WRITE_LENGTH:
                raise ToolValidationError(f"{write.path}: at most {MAX_WRITE_LENGTH:,} characters of content")


@dataclass(frozen=True, slots=True)
class EvalResult:
    """``globals`` are the variables that the code made, as text."""

    value_repr: str | None
    stdout: str
    stderr: str
    globals: Mapping[str, str] = field(default_factory=dict[str, str])
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def render(self) -> str:
        parts = [] if self.value_repr is None else [f"value: {self.value_repr}"]
        parts += [f"{name}:\n{text}" for name, text in (("stdout", self.stdout), ("stderr", self.stderr)) if text]
        parts += [f"{name} = {value}" for name, value in self.globals.items()]
        parts += [f"wrote {path}" for path in self.writes]
        return "\n".join(parts) or "nothing was printed, and the last statement has no value"


class AstevalSection(Section[None]):
    """`evaluate_python` without a container: in a process of its own, killed at its time limit, that has the files of
    the workspace and nothing else of this machine.

    The files are those of ``filesystem``, where one is given, else of the prompt's `Filesystem` resource. One that is
    there is written over only after the model itself has read it, with the `read_file` of a `VfsToolsSection`, say.
    """

    def __init__(
        self, *, session: Session, filesystem: Filesystem | None = None, accepts_overrides: bool = False
    ) -> None:
        self.session = session
        self.filesystem = filesystem
        tool = Tool[EvalParams, EvalResult](
            name="evaluate_python",
            description="Evaluate a small piece of Python, with files of the workspace as input and output.",
            handler=evaluate_python,
            accepts_overrides=accepts_overrides,
            writes=lambda params: [write.path for write in params.writes] or None,
        )
        super().__init__(
            title="Python evaluation",
            key="tools.asteval",
            tools=[tool],
            policies=[ReadBeforeWritePolicy()],
            accepts_overrides=accepts_overrides,
        )

    def resources(self) -> ResourceRegistry:
        return ResourceRegistry.of(*([Binding.instance(Filesystem, self.filesystem)] if self.filesystem else []))

    def render_body(
        self, params: None, *, visibility: SectionVisibility, path: SectionPath, session: Session | None
    ) -> str:
        return TEXT

    def clone(self, **changes: Any) -> Self:
        return type(self)(
            session=changes.get("session", self.session),
            filesystem=changes.get("filesystem", self.filesystem),
            accepts_overrides=self.accepts_overrides,
        )


def evaluate_python(params: EvalParams, *, context: ToolContext) -> ToolResult[EvalResult]:
    files = _Files(context.filesystem, params)
    outcome = _run(
        {
            "code": params.code,
            "globals": {name: json.loads(text) for name, text in params.globals.items()},
            "reads": files.read_declared(),
        },
        files,
    )
    result = EvalResult(
        outcome["value_repr"], outcome["stdout"], outcome["stderr"], outcome["globals"], tuple(files.read)
    )
    if (failed := outcome.get("failed")) is not None:
        return ToolResult(f"the code failed, and nothing was written: {failed}", result, success=False)
    written = files.write({path: (content, mode) for path, content, mode in outcome["writes"]})
    return ToolResult.ok(replace(result, writes=written), "Evaluated.")


class _Files:
    """The files of one call. What is written over must have been declared, so that the policy has seen it."""

    def __init__(self, filesystem: Filesystem | None, params: EvalParams) -> None:
        self._filesystem = filesystem
        self._named = [read.path for read in params.reads]
        self._writes = {self._resolve(write.path): write for write in params.writes}
        if len(self._writes) < len(params.writes):
            raise ToolValidationError("writes has one file twice: put its contents together")
        if both := self._writes.keys() & {self._resolve(path) for path in self._named}:
            raise ToolValidationError(f"{escape_path(min(both))} is to be read and written: use two calls")
        self.read: list[str] = []

    def _resolve(self, path: str) -> str:
        return path if self._filesystem is None else resolve_model_path(self._filesystem, path)

    def _bound_filesystem(self) -> Filesystem:
        if self._filesystem is None:
            raise ToolValidationError("this prompt has no files: neither reads nor writes are possible")
        return self._filesystem

    def read_declared(self) -> dict[str, str]:
        try:
            return {path: self.text(path) for path in self._named}
        except ValueError as error:
            raise ToolValidationError(str(error)) from None

    def text(self, path: str) -> str:
        place = self._resolve(path)
        size = self._bound_filesystem().stat(place).size_bytes
        if size > MAX_READ_CHARACTERS:
            raise ValueError(f"{escape_path(place)} has {size:,} bytes, too many to evaluate with")
        content = self._bound_filesystem().read(place, limit=READ_ENTIRE_FILE).content
        self.read.append(place)
        return content

    def write(self, computed: Mapping[str, tuple[str, WriteMode]]) -> tuple[str, ...]:
        """All of the writes; what cannot be written raises, and the call takes back the others."""
        wanted: dict[str, tuple[str, WriteMode]] = {
            path: (write.content, write.mode) for path, write in self._writes.items()
        }
        places = {path: self._resolve(path) for path in computed}
        if twice := [place for place, times in Counter(places.values()).items() if times > 1]:
            raise ToolValidationError(f"{escape_path(twice[0])} is written twice: put its contents together")
        for path, (content, mode) in computed.items():
            place = places[path]
            if place in self.read:
                raise ToolValidationError(f"{escape_path(place)} was read in this call: write it in another one")
            declared = self._writes.get(place)
            if declared is None and mode != "create":
                raise ToolValidationError(f"{escape_path(place)}: to {mode} a file, name it in writes with that mode")
            text = content if declared is None else content + declared.content
            if len(text) > MAX_WRITE_LENGTH:
                raise ToolValidationError(f"{escape_path(place)}: at most {MAX_WRITE_LENGTH:,} characters at once")
            wanted[place] = (text, mode if declared is None else declared.mode)
        if len(wanted) > MAX_WRITES:
            raise ToolValidationError(f"{len(wanted):,} files are to be written, at most {MAX_WRITES} in a call")
        for place, (content, mode) in wanted.items():
            if mode != "create" and not self._bound_filesystem().exists(place):
                raise FileNotFoundError(f"{escape_path(place)} is not there: create it")
            self._bound_filesystem().write(place, content, mode=mode)
        return tuple(wanted)


def _run(request: dict[str, Any], files: _Files) -> dict[str, Any]:
    spec = importlib.util.find_spec("asteval")
    assert spec is not None, "asteval is a dependency"
    assert spec.origin is not None
    request["packages"] = os.path.dirname(os.path.dirname(spec.origin))
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(_SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
        start_new_session=True,
    )
    late = threading.Event()

    def end() -> None:
        late.set()  # before its end, which is seen at once below
        process.kill()

    # Killed, it closes its ends of the pipes: whatever waits for it below ends with it.
    limit = threading.Timer(WALL_SECONDS, end)
    limit.start()
    try:
        outcome = _converse(process, request, files)
    finally:
        limit.cancel()
        process.kill()
        assert process.stdin is not None
        with process, suppress(BrokenPipeError):  # it ended before it read everything
            process.stdin.close()
    if outcome is not None:
        return outcome
    failed = f"it ended without an answer, perhaps for want of more than {MEMORY_BYTES >> 20} MiB of memory"
    if late.is_set():
        failed = f"it did not end within {WALL_SECONDS:g} seconds"
    return {"failed": failed, "value_repr": None, "stdout": "", "stderr": "", "globals": {}}


def _converse(process: subprocess.Popen[bytes], request: object, files: _Files) -> dict[str, Any] | None:
    """The outcome; None where the process ended without one. What it says is data from an untrusted place."""
    assert process.stdout is not None
    try:
        _send(process, request)
        while True:
            line = process.stdout.readline(_LONGEST_MESSAGE_BYTES)
            message = json.loads(line) if line.endswith(b"\n") else None
            match message:
                case {"read": str(path)}:
                    _send(process, _read_file(files, path))
                case {"error": str(message)}:
                    raise RuntimeError(message)
                case {"outcome": {} as outcome}:
                    return _check_outcome(outcome)
                case _:
                    return None
    except (BrokenPipeError, ValueError):
        return None


def _read_file(files: _Files, path: str) -> dict[str, str]:
    try:
        return {"content": files.text(path)}
    except (OSError, ValueError, ToolValidationError) as error:
        return {"error": str(error)}


def _send(process: subprocess.Popen[bytes], message: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()


def _check_outcome(outcome: dict[Any, Any]) -> dict[str, Any]:
    match outcome:
        case {
            "value_repr": str() | None,
            "stdout": str(),
            "stderr": str(),
            "globals": {},
            "writes": [*writes],
        } if all(_is_write(write) for write in writes) and isinstance(outcome.get("failed"), str | None):
            return outcome
        case _:
            raise ValueError("not an outcome")


def _is_write(write: object) -> bool:
    match write:
        case [str(), str(), "create" | "overwrite" | "append"]:
            return True
        case _:
            return False
