"""The tool ``evaluate_python`` without a container. Its process sees only the files of the workspace."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from keyword import iskeyword
from pathlib import Path
from time import monotonic
from typing import Any, Literal, Self

from ringfence import serde
from ringfence.errors import SectionPath, SectionVisibility, ToolValidationError
from ringfence.escapes import escape_path
from ringfence.filesystem.paths import resolve_model_path
from ringfence.filesystem.protocol import READ_ENTIRE_FILE, Filesystem, WriteMode
from ringfence.policies.read_before_write import ReadBeforeWritePolicy
from ringfence.prompt.section import Section
from ringfence.resources import Binding, ResourceRegistry
from ringfence.runtime.context import ToolContext
from ringfence.runtime.tool import Tool
from ringfence.session.session import Session
from ringfence.session.tool_result import ToolResult
from ringfence_tools.handlers import check_length
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
            check_length(write.path, len(write.content), "write less at once")


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
    files = _CallFiles(context.filesystem, params)
    try:
        texts = {read.path: files.text(read.path) for read in params.reads}
    except ValueError as error:
        raise ToolValidationError(str(error)) from None
    values = {name: json.loads(text) for name, text in params.globals.items()}
    outcome = _run({"code": params.code, "globals": values, "reads": texts}, files)
    reads = tuple(files.read)
    result = EvalResult(outcome.value_repr, outcome.stdout, outcome.stderr, outcome.globals, reads)
    if outcome.failed is not None:
        return ToolResult(f"the code failed, and nothing was written: {outcome.failed}", result, success=False)
    return ToolResult.ok(replace(result, writes=files.write(outcome.writes)), "Evaluated.")


class _CallFiles:
    """The files of one call. What is written over must have been declared, so that the policy has seen it."""

    def __init__(self, filesystem: Filesystem | None, params: EvalParams) -> None:
        self._filesystem = filesystem
        self._declared = {self._resolve(write.path): write for write in params.writes}
        self.read: list[str] = []
        if len(self._declared) < len(params.writes):
            raise ToolValidationError("writes has one file twice: put its contents together")
        if both := self._declared.keys() & {self._resolve(read.path) for read in params.reads}:
            raise ToolValidationError(f"{escape_path(min(both))} is to be read and written: use two calls")

    def _open(self, path: str) -> tuple[Filesystem, str]:
        if self._filesystem is None:
            raise ToolValidationError("this prompt has no files: neither reads nor writes are possible")
        return self._filesystem, self._resolve(path)

    def _resolve(self, path: str) -> str:
        return path if self._filesystem is None else resolve_model_path(self._filesystem, path)

    def text(self, path: str) -> str:
        filesystem, place = self._open(path)
        size = filesystem.stat(place).size_bytes
        if size > MAX_READ_CHARACTERS:
            raise ValueError(f"{escape_path(place)} has {size:,} bytes, too many to evaluate with")
        content = filesystem.read(place, limit=READ_ENTIRE_FILE).content
        self.read.append(place)
        return content

    def write(self, computed: Sequence[tuple[str, str, WriteMode]]) -> tuple[str, ...]:
        """Write all files. Raises if one cannot be written; the call then rolls back the others."""
        wanted: dict[str, tuple[str, WriteMode]] = {}
        for path, text, mode in computed:
            place = self._resolve(path)
            if place in wanted:
                raise ToolValidationError(f"{escape_path(place)} is written twice: put its contents together")
            if place in self.read:
                raise ToolValidationError(f"{escape_path(place)} was read in this call: write it in another one")
            declared = self._declared.get(place)
            if declared is None and mode != "create":
                raise ToolValidationError(f"{escape_path(place)}: to {mode} a file, name it in writes with that mode")
            wanted[place] = (text, mode) if declared is None else (text + declared.content, declared.mode)
            check_length(escape_path(place), len(wanted[place][0]), "write less at once")
        for place, write in self._declared.items():
            wanted.setdefault(place, (write.content, write.mode))
        if len(wanted) > MAX_WRITES:
            raise ToolValidationError(f"{len(wanted):,} files are to be written, at most {MAX_WRITES} in a call")
        for place, (content, mode) in wanted.items():
            filesystem, _ = self._open(place)
            if mode != "create" and not filesystem.exists(place):
                raise ToolValidationError(f"{escape_path(place)} is not there: create it")
            filesystem.write(place, content, mode=mode)
        return tuple(wanted)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The last message of the process."""

    value_repr: str | None = None
    stdout: str = ""
    stderr: str = ""
    globals: dict[str, str] = field(default_factory=dict[str, str])
    writes: tuple[tuple[str, str, WriteMode], ...] = ()
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class _EvaluatorAnswer:
    """A line from the process, which is not trusted: a file that it asks for, its outcome, or why there is none."""

    read: str | None = None
    outcome: _Outcome | None = None
    error: str | None = None


def _run(request: dict[str, Any], files: _CallFiles) -> _Outcome:
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
    began = monotonic()
    # Killed, it closes its ends of the pipes: whatever waits for it ends with it.
    limit = threading.Timer(WALL_SECONDS, process.kill)
    limit.start()
    try:
        outcome = _converse(process, request, files)
    finally:
        limit.cancel()
        process.kill()
        process.communicate()
    if outcome is not None:
        return outcome
    if monotonic() - began >= WALL_SECONDS:
        return _Outcome(failed=f"it did not end within {WALL_SECONDS:g} seconds")
    memory = f"more than {MEMORY_BYTES >> 20} MiB of memory"
    return _Outcome(failed=f"it ended without an answer, perhaps for want of {memory}")


def _converse(process: subprocess.Popen[bytes], request: object, files: _CallFiles) -> _Outcome | None:
    """Return the outcome, or None if the process ended without one."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        while True:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            message = serde.parse(_EvaluatorAnswer, process.stdout.readline(_LONGEST_MESSAGE_BYTES))
            if message.error is not None:
                raise RuntimeError(message.error)
            if message.read is None:
                return message.outcome
            try:
                request = {"content": files.text(message.read)}
            except (OSError, ValueError) as error:
                request = {"error": str(error)}
    except (BrokenPipeError, ValueError):
        return None
