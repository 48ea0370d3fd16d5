"""Opening the workspace of a server when a client first needs it."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringfence.errors import CallCancelledError, PromptValidationError, SandboxUnavailableError
from ringfence.failures import describe_error
from ringfence.limits import Cancellation
from ringfence.receipts import Receipt
from ringfence.runtime.tool import Tool
from ringfence.session.session import Session
from ringfence_mcp.clients import ServedClient
from ringfence_mcp.options import ServeOptions
from ringfence_mcp.workspaces import ServedWorkspace, open_workspace, preview_workspace
from ringfence_sandbox import StateDirectoryError
from ringfence_tools.printable import one_line, why
from ringfence_tools.runs.agent_run import MakeSection
from ringfence_tools.runs.asking import nobody
from ringfence_tools.runs.command_errors import UNAVAILABLE, BusyError, NotStartedError, spec_refused
from ringfence_tools.runs.outputs import ErrorStream, refuse_way_out
from ringfence_tools.runs.own_code import sections_of
from ringfence_tools.runs.owner_policies import missing_tool_error
from ringfence_tools.runs.receipts_file import ReceiptsFile
from ringfence_tools.runs.reserved_stdout import reserve_stdout
from ringfence_tools.runs.run_workspace import protect_path
from ringfence_tools.runs.spec_error import SpecError

if TYPE_CHECKING:
    from ringfence.telemetry import Telemetry
    from ringfence_mcp.approvals import Approvals

SHARING = "To share it, run one server with --http for all clients. To look only, serve with --read-only."


REFUSALS = (
    PromptValidationError,
    SpecError,
    SandboxUnavailableError,
    CallCancelledError,
    OSError,
    click.ClickException,
)


class UnavailableError(click.ClickException):
    """Commands cannot be run here."""

    exit_code = UNAVAILABLE


class LazyWorkspace:
    """The workspace of a server's options, with what they say about its calls."""

    def __init__(self, options: ServeOptions, telemetry: Telemetry | None, approvals: Approvals | None = None) -> None:
        self._options = options
        self._approvals = approvals
        self._telemetry = telemetry
        self._errors = ErrorStream()
        self._stack = ExitStack()
        self._receipts: ReceiptsFile | None = None
        self._workspace: ServedWorkspace | None = None
        self._reason = ""
        """Why it could not be opened the last time."""

    def close(self) -> None:
        self._stack.close()

    def list_tools(self, *, shared: bool, extra: bool = True) -> Iterable[Tool[Any, Any]]:
        """Raise click.ClickException: the sections of the options cannot be used."""
        with self._refusals():
            sections = self._sections() if extra else ()
            options = self._options
            preview = preview_workspace(
                options.spec.place, options.directory, read_only=options.read_only, extra_sections=sections
            )
            return self._try_client(preview, sections, shared=shared)

    def open(self, cancellation: Cancellation) -> ServedWorkspace:
        """Open it, unless it is open, and tell a person about it.

        Raises:
            click.ClickException: it cannot be opened.
        """
        if self._workspace is None:
            try:
                with self._refusals(), ExitStack() as stack:
                    self._workspace = self._open(cancellation, stack)
                    self._stack.push(stack.pop_all())
            finally:
                gc.freeze()  # so that no collection during a call traverses what is loaded now
                gc.enable()
        return self._workspace

    def observe(self, session: Session) -> None:
        if self._telemetry is not None:  # its spans are inside those of the SDK
            self._telemetry.observe(session)
        if self._receipts is not None:
            session.dispatcher.subscribe(Receipt, partial(_write_receipt, self._receipts, self._errors))

    def _open(self, cancellation: Cancellation, stack: ExitStack) -> ServedWorkspace:
        options, say = self._options, self._errors.say
        ask = self._approvals.ask if self._approvals is not None else nobody
        workspace = open_workspace(options.spec, say, read_only=options.read_only, ask=ask, cancellation=cancellation)
        stack.callback(workspace.close)
        self._try_client(workspace, workspace.own_sections)
        self._receipts = _open_receipts(options.receipts, workspace, stack)
        for line in workspace.notes:
            say(line)
        return workspace

    def _sections(self) -> tuple[MakeSection, ...]:
        specs = self._options.spec.limits.sections
        with reserve_stdout(specs):
            return sections_of(specs, self._options.directory)

    def _try_client(
        self, workspace: ServedWorkspace, sections: Sequence[MakeSection], *, shared: bool = False
    ) -> Iterable[Tool[Any, Any]]:
        """Begin with a client and end it. Return its tools."""
        try:
            with reserve_stdout(sections):
                client = ServedClient(workspace, lambda session: None, shared=shared)
                client.close()
        except (click.ClickException, PromptValidationError, SpecError):
            raise
        except Exception as error:
            if not sections:
                raise
            raise NotStartedError(f"--section: no client could begin with it: {describe_error(error)}") from error
        return client.tools.values()

    @contextmanager
    def _refusals(self) -> Generator[None]:
        """Raise click.ClickException for all that keeps the workspace from being opened, and tell a person once."""
        try:
            yield
        except REFUSALS as error:
            refusal = self._refusal(error)
            reason = refusal.format_message()
            if reason != self._reason and not self._options.has_person:  # who sees how the command ends
                self._errors.say(f"ringfence: {reason}")
            self._reason = reason
            raise refusal from error

    def _refusal(self, error: Exception) -> click.ClickException:
        if isinstance(error, PromptValidationError):
            return missing_tool_error(error, self._options.directory, self._options.spec.place.workspace)
        if isinstance(error, SpecError):
            return spec_refused(error)
        if isinstance(error, StateDirectoryError):
            return NotStartedError.of(error)
        if isinstance(error, BusyError):
            return BusyError(f"{error.message}. {SHARING}")
        if isinstance(error, SandboxUnavailableError):
            return UnavailableError(str(error))
        return error if isinstance(error, click.ClickException) else NotStartedError(describe_error(error))


def _open_receipts(path: Path | None, workspace: ServedWorkspace, stack: ExitStack) -> ReceiptsFile | None:
    """Open the file, and complete it with the receipts that a crash prevented."""
    if path is None:
        return None
    try:
        refuse_way_out(path, workspace.directory)
        receipts = stack.enter_context(closing(ReceiptsFile(path)))
    except OSError as error:
        raise click.UsageError(f"{str(path)!r} cannot be written: {why(error)}") from None
    opened = workspace.opened
    if opened is not None and opened.history is not None:
        protect_path(opened, path, "the receipts of this server come there")
        receipts.complete(opened.history)
    return receipts


def _write_receipt(receipts: ReceiptsFile, errors: ErrorStream, receipt: Receipt) -> None:
    try:
        receipts.call(receipt, None, "")
    except OSError as error:
        errors.say(
            f"ringfence: the receipt of {one_line(receipt.tool, 64)} could not be written: {describe_error(error)}"
        )
