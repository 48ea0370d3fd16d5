"""A sandbox for deep agents of LangChain (the extra ``deepagents``): each command and each change is a transaction."""

# deepagents is not installed where this is checked. Its classes are used as its own suite proves in tests/doors.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUntypedBaseClass=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import base64
import errno
import os
import posixpath
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ringfence.errors import CallCancelledError, CallDeniedError, RingfenceError
from ringfence.extras import missing
from ringfence_doors.door_calls import LONGEST_SECONDS, DoorCalls, in_thread, rollback_note

try:
    from deepagents.backends import protocol, utils
    from deepagents.backends.sandbox import BaseSandbox
except ImportError as error:
    raise ModuleNotFoundError(missing("deepagents", "deepagents"), name="deepagents") from error

if TYPE_CHECKING:
    from ringfence.limits import Cancellation
    from ringfence.prompt import BasePolicy
    from ringfence_workspace import Reversal, Workspace

ResultT = TypeVar("ResultT")

DEFAULT_TIMEOUT_SECONDS = 1800
MOST_SHOWN_BYTES = 500 * 1024
"""Of one read of a file. So it is in every sandbox of deepagents."""
CUT = "\n\n[Output was truncated due to size limits. Read on with a larger offset or a smaller limit.]"
MOST_MATCHES = 10_000
ERRORS = {errno.ENOENT: "file_not_found", errno.EACCES: "permission_denied", errno.EISDIR: "is_directory"}
DENIED_EXIT_CODE = 126


class RingfenceSandbox(BaseSandbox):
    """An opened workspace as a backend. Whoever opened the workspace closes it.

    Nothing raises: what went wrong is in the ``error`` of a result, as deepagents wants it. A command that ends with
    another exit code than 0 keeps its changes, unless ``rollback_on_error`` is set. One that takes longer than its
    timeout is rolled back in any case, and so is one whose task is cancelled.
    """

    def __init__(
        self,
        workspace: Workspace,
        *,
        policies: Sequence[BasePolicy] = (),
        rollback_on_error: bool = False,
        leave_running: bool = False,
        timeout_seconds: int = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self.calls = DoorCalls(
            workspace, policies=policies, rollback_on_error=rollback_on_error, leave_running=leave_running
        )
        self._timeout = timeout_seconds

    @property
    def id(self) -> str:
        """The root."""
        return self.calls.root

    def undo(self, n: int = 1) -> Reversal:
        """Reverse the newest steps. Raises what `Workspace.undo` raises."""
        return self.calls.workspace.undo(n)

    def execute(self, command: str, *, timeout: int | None = None) -> protocol.ExecuteResponse:
        """Run a line of the shell as one transaction. A timeout of 0 is none."""
        return self._execute(command, timeout, None)

    async def aexecute(self, command: str, *, timeout: int | None = None) -> protocol.ExecuteResponse:
        return await in_thread(lambda cancellation: self._execute(command, timeout, cancellation))

    def _execute(
        self, command: str, timeout: int | None, cancellation: Cancellation | None
    ) -> protocol.ExecuteResponse:
        seconds = self._timeout if timeout is None else timeout or LONGEST_SECONDS
        try:
            result = self.calls.run(command, timeout_seconds=seconds, cancellation=cancellation)
        except CallCancelledError:
            raise
        except (OSError, ValueError, RingfenceError) as error:
            return protocol.ExecuteResponse(output=f"[ringfence: {error}]", exit_code=DENIED_EXIT_CODE)
        out, err = self.calls.whole(result.stdout), self.calls.whole(result.stderr)
        shown = [result.stdout if out is None else out, result.stderr if err is None else err]
        output = "\n".join(filter(None, [*shown, result.failure, rollback_note(result)]))
        return protocol.ExecuteResponse(output=output, exit_code=result.exit_code, truncated=out is None or err is None)

    def ls(self, path: str) -> protocol.LsResult:
        def entries() -> protocol.LsResult:
            found: list[protocol.FileInfo] = [
                protocol.FileInfo(path=posixpath.join(path, one.name), is_dir=one.is_directory, size=one.size_bytes)
                for one in self.calls.files.list(self._place(path))
            ]
            return protocol.LsResult(entries=found)

        return _or_error(entries, lambda problem: protocol.LsResult(error=f"Path '{path}': {problem}"))

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> protocol.ReadResult:
        def page() -> protocol.ReadResult:
            content = self.calls.files.read_bytes(self._place(file_path)).content
            try:
                text = content.decode()
            except UnicodeDecodeError:
                if len(content) > MOST_SHOWN_BYTES:
                    most = f"Binary file exceeds maximum preview size of {MOST_SHOWN_BYTES} bytes"
                    return protocol.ReadResult(error=f"File '{file_path}': {most}")
                return protocol.ReadResult(
                    file_data=protocol.FileData(content=base64.b64encode(content).decode(), encoding="base64")
                )
            if (note := utils.check_empty_content(text)) and not content:
                return protocol.ReadResult(file_data=protocol.FileData(content=note, encoding="utf-8"))
            shown = utils.slice_read_response(
                protocol.FileData(content=text, encoding="utf-8"), max(offset, 0), max(limit, 0)
            )
            if shown.file_data is not None and text.strip():
                lines = shown.file_data["content"].removesuffix("\n")  # as a sandbox's own script has it
                data = lines.encode()
                cut = data[:MOST_SHOWN_BYTES].decode("utf-8", "ignore") + CUT
                shown.file_data["content"] = lines if len(data) <= MOST_SHOWN_BYTES else cut
            return shown

        return _or_error(page, lambda problem: protocol.ReadResult(error=f"File '{file_path}': {problem}"))

    def write(self, file_path: str, content: str) -> protocol.WriteResult:
        def write() -> protocol.WriteResult:
            place, data = self._place(file_path), content.encode()
            self.calls.change("write_file", lambda: self.calls.files.write_bytes(place, data))
            return protocol.WriteResult(path=file_path)

        return _or_error(
            write, lambda problem: protocol.WriteResult(error=f"Failed to write file '{file_path}': {problem}")
        )

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> protocol.EditResult:
        def replace() -> protocol.EditResult:
            place = self._place(file_path)
            text = self.calls.files.read_bytes(place).content.decode()
            # A model is shown LF alone, whatever the lines of the file end with.
            found: tuple[str, int] | str = ""
            for ending in (None, "\r\n", "\n"):
                old, new = (_with_endings(one, ending) for one in (old_string, new_string))
                found = utils.perform_string_replacement(text, old, new, replace_all)
                if not isinstance(found, str):
                    self.calls.files.write_bytes(place, found[0].encode())
                    return protocol.EditResult(path=file_path, occurrences=found[1])
                if old and old in text:
                    often = f"Error: String '{old_string}' appears multiple times."
                    return protocol.EditResult(error=f"{often} Use replace_all=True to replace all occurrences.")
            return protocol.EditResult(error=found)

        def edit() -> protocol.EditResult:
            return self.calls.change("edit_file", replace)

        return _or_error(edit, lambda problem: protocol.EditResult(error=f"Error: File '{file_path}': {problem}"))

    def delete(self, file_path: str) -> protocol.DeleteResult:
        def delete() -> protocol.DeleteResult:
            place = self._place(file_path, follow=False)
            self.calls.change("rm", lambda: self.calls.files.delete(place, recursive=True))
            return protocol.DeleteResult(path=file_path)

        return _or_error(delete, lambda problem: protocol.DeleteResult(error=f"Error: '{file_path}': {problem}"))

    def grep(
        self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None
    ) -> protocol.GrepResult:
        """Search for a literal text. Directories of `grep_exclude_dirs` below ``path`` are left out."""

        def search() -> protocol.GrepResult:
            place = self._place(path or self.calls.root)
            is_wanted = utils.compile_grep_include_glob(glob) if glob else lambda below: True
            excluded = set(getattr(self, "grep_exclude_dirs", (".git",)))
            matches: list[protocol.GrepMatch] = []
            found = self.calls.files.grep(pattern, path=place, literal=True, max_matches=MOST_MATCHES)
            for one in found:
                below = posixpath.relpath(one.path, place or ".") if one.path != place else posixpath.basename(place)
                if is_wanted(below) and excluded.isdisjoint(below.split("/")[:-1]):
                    shown = self._shown(path, place, one.path)
                    matches.append(
                        protocol.GrepMatch(path=shown, line=one.line_number, text=one.line_content.rstrip("\r\n"))
                    )
            most = len(matches) if max_count is None else max_count
            is_cut = len(matches) > most or len(found) >= MOST_MATCHES
            result = protocol.GrepResult(matches=matches[:most])
            if is_cut and hasattr(result, "truncated"):
                result.truncated = True
            return result

        return _or_error(search, lambda problem: protocol.GrepResult(error=f"Path '{path or '.'}': {problem}"))

    def glob(self, pattern: str, path: str | None = None) -> protocol.GlobResult:
        def search() -> protocol.GlobResult:
            place = self._place(path or self.calls.root)
            is_wanted = utils.compile_grep_include_glob(pattern)
            matches: list[protocol.FileInfo] = [
                protocol.FileInfo(path=self._shown(path, place, one.path), is_dir=False)
                for one in self.calls.files.glob("**", path=place)
                if one.is_file and is_wanted(posixpath.relpath(one.path, place or "."))
            ]
            return protocol.GlobResult(matches=matches)

        return _or_error(search, lambda problem: protocol.GlobResult(error=f"Path '{path or '.'}': {problem}"))

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[protocol.FileUploadResponse]:
        """Write files as one step. A file that cannot be written is left out of it."""

        def write(path: str, content: bytes) -> str | None:
            return _or_error(lambda: self.calls.files.write_bytes(self._place(path), content) and None, str)

        def write_all() -> list[protocol.FileUploadResponse]:
            return [protocol.FileUploadResponse(path=path, error=write(path, content)) for path, content in files]

        return _or_error(
            lambda: self.calls.change("upload", write_all),
            lambda problem: [protocol.FileUploadResponse(path=path, error=problem) for path, _ in files],
        )

    def download_files(self, paths: list[str]) -> list[protocol.FileDownloadResponse]:
        def read(path: str) -> protocol.FileDownloadResponse:
            content = self.calls.files.read_bytes(self._place(path)).content
            return protocol.FileDownloadResponse(path=path, content=content, error=None)

        def response(path: str) -> protocol.FileDownloadResponse:
            return _or_error(
                lambda: read(path), lambda problem: protocol.FileDownloadResponse(path=path, error=problem)
            )

        return [response(path) for path in paths]

    # `BaseSandbox` has others, which run scripts.
    als, aread, awrite, aedit = (
        getattr(protocol.SandboxBackendProtocol, name) for name in ("als", "aread", "awrite", "aedit")
    )
    adelete, agrep, aglob = (getattr(protocol.SandboxBackendProtocol, name) for name in ("adelete", "agrep", "aglob"))

    def _place(self, path: str, *, follow: bool = True) -> str:
        if not os.path.isabs(path):
            raise ValueError("the path is not absolute")
        return self.calls.place(path, follow=follow)

    def _shown(self, path: str | None, place: str, found: str) -> str:
        """A found path as whoever asked for ``path`` writes it."""
        top = path or self.calls.root
        return top if found == place else posixpath.join(top, posixpath.relpath(found, place or "."))


def _with_endings(text: str, ending: str | None) -> str:
    return text if ending is None else text.replace("\r\n", "\n").replace("\n", ending)


def _or_error(work: Callable[[], ResultT], failed: Callable[[str], ResultT]) -> ResultT:
    """The result of work, or one with the word of deepagents for what went wrong."""
    try:
        return work()
    except CallDeniedError as error:
        return failed(f"permission_denied: {error}")
    except (RingfenceError, ValueError) as error:
        return failed("invalid_path" if "not absolute" in str(error) else str(error))
    except OSError as error:
        return failed(ERRORS.get(error.errno or 0) or str(error))
