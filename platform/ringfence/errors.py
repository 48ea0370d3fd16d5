"""Every exception of the project that several of its layers name, in one tree.

RingfenceError
├── PromptError                     where in a prompt: section_path, dataclass_type, placeholder
│   ├── PromptValidationError       a tool, section or prompt is constructed wrongly
│   ├── PromptRenderError           a prompt cannot be rendered
│   └── VisibilityExpansionRequired the model asked to open sections: leaves the call, and the loop renders again
├── PromptOverridesError            overrides cannot be read, kept or do not fit their prompt
├── OutputParseError                the final answer does not fit the declared output type
├── ToolValidationError (ValueError)            a tool's input is not acceptable: the model reads the message
├── DeadlineExceededError (RuntimeError)        a deadline has passed
├── BudgetExceededError (RuntimeError)          a token budget is used up (`ringfence.runtime`)
├── PromptEvaluationError (RuntimeError)        the evaluation cannot go on: phase
│   ├── ContextWindowExceededError  the request is longer than the model takes
│   └── ThrottleError               the provider does not serve the request: details
├── SnapshotRestoreError (RuntimeError)         a snapshot does not fit what it should be restored to
├── TransactionError (RuntimeError)
│   ├── ParticipantBusyError        another tool call holds a participant: names the holder
│   ├── CallCancelledError          a tool call was cancelled
│   ├── CallEndedError              a change came through the context of a tool call that has ended
│   └── RestoreFailedError          a rollback could not be completed: failures
├── WorkspaceConflictError (RuntimeError)       files changed on disk since they were read: paths
├── WorkspaceLockedError (RuntimeError)         another opener has the workspace: path, holder
├── SandboxUnavailableError (RuntimeError)      commands cannot run here: the message says what to do
└── ResourceError (RuntimeError)                and what inherits from it (`ringfence.resources`)

Filesystems raise the built-in errors (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError,
PermissionError, ValueError) for what those mean. A value without a JSON form is a TypeError or ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

SectionPath = tuple[str, ...]
"""The keys from the root of a prompt to a section."""


class SectionVisibility(Enum):
    """How much of a section a prompt shows: all of it, or its summary."""

    FULL = "full"
    SUMMARY = "summary"


def format_error(error: BaseException) -> str:
    """The kind and the text of an error, even if its ``__str__`` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


class RingfenceError(Exception):
    """The root of the tree."""

    def __reduce__(self) -> tuple[object, ...]:
        # Not by its constructor, whose arguments differ from the message: such an error could be pickled, but not read.
        return _unpickle, (type(self), self.args), self.__dict__


def _unpickle(kind: type[RingfenceError], args: tuple[object, ...]) -> RingfenceError:
    return kind.__new__(kind, *args)


class PromptError(RingfenceError):
    """An error in a prompt, with its place.

    ``section_path`` has the keys from the root to the section, and is empty if the section is unknown. ``placeholder``
    names the faulty template placeholder, tool or field.
    """

    def __init__(
        self,
        message: str,
        *,
        section_path: SectionPath = (),
        dataclass_type: type | None = None,
        placeholder: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.section_path = tuple(section_path)
        self.dataclass_type = dataclass_type
        self.placeholder = placeholder


class PromptValidationError(PromptError):
    """A tool, section or prompt was put together wrongly."""


class PromptRenderError(PromptError):
    """A prompt cannot be rendered with the parameters it has."""


class VisibilityExpansionRequired(PromptError):
    """The model asked for sections in full; whoever runs the loop opens them and renders again."""

    def __init__(
        self,
        message: str,
        *,
        requested_overrides: Mapping[SectionPath, SectionVisibility],
        reason: str,
        section_keys: Sequence[str],
    ) -> None:
        super().__init__(f"{message} (sections: {', '.join(section_keys)}; reason: {reason})")
        self.requested_overrides = dict(requested_overrides)
        self.reason = reason
        self.section_keys = tuple(section_keys)


class PromptOverridesError(RingfenceError):
    """Overrides of a prompt's texts cannot be read or kept, or do not fit the prompt."""


class OutputParseError(RingfenceError):
    """The model's final answer is not of the output type that the prompt declares."""

    def __init__(self, message: str, *, dataclass_type: type | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.dataclass_type = dataclass_type


class ToolValidationError(RingfenceError, ValueError):
    """A tool's input is not acceptable; the message goes to the model."""


class DeadlineExceededError(RingfenceError, RuntimeError):
    """A deadline has passed."""


EvaluationPhase = Literal["request", "response", "tool", "budget"]


class PromptEvaluationError(RingfenceError, RuntimeError):
    """An evaluation cannot go on; ``phase`` says in which part of it."""

    def __init__(
        self,
        message: str,
        *,
        prompt_name: str = "",
        phase: EvaluationPhase = "request",
        provider_payload: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.prompt_name = prompt_name
        self.phase: EvaluationPhase = phase
        self.provider_payload = provider_payload


class ContextWindowExceededError(PromptEvaluationError):
    """A request is longer than the model takes."""


ThrottleKind = Literal["rate_limit", "quota_exhausted", "timeout", "overloaded", "connection"]
"""Why a request was not served. "connection" is also an answer that broke off."""


@dataclass(frozen=True, slots=True)
class ThrottleDetails:
    """The reason why a provider did not answer, and the number of attempts."""

    kind: ThrottleKind
    retry_after: float | None = None
    """Seconds that the provider asked to wait."""
    attempts: int = 1
    retry_safe: bool = True
    """Whether asking once more at once makes sense; False when that has been tried, or cannot help."""
    provider_payload: Mapping[str, object] | None = None


class ThrottleError(PromptEvaluationError):
    """A provider has no time for a request: it limits rates, is overloaded, or does not answer."""

    def __init__(self, message: str, *, prompt_name: str = "", details: ThrottleDetails) -> None:
        super().__init__(message, prompt_name=prompt_name, provider_payload=details.provider_payload)
        self.details = details

    @property
    def kind(self) -> ThrottleKind:
        return self.details.kind

    @property
    def retry_after(self) -> float | None:
        return self.details.retry_after

    @property
    def attempts(self) -> int:
        return self.details.attempts

    @property
    def retry_safe(self) -> bool:
        return self.details.retry_safe


class SnapshotRestoreError(RingfenceError, RuntimeError):
    """A snapshot does not belong to, or does not fit, what it should be restored to. Nothing was changed."""


class TransactionError(RingfenceError, RuntimeError):
    """An error in a transaction."""


class ParticipantBusyError(TransactionError):
    """Another tool call holds a participant and did not release it in time."""


class CallCancelledError(TransactionError):
    """A tool call was cancelled before its commit point, so nothing of it is kept."""


class CallDeniedError(TransactionError):
    """A policy denied a call, so nothing of it is kept. ``policy`` names it, ``reason`` is what it says."""

    def __init__(self, policy: str, reason: str | None) -> None:
        super().__init__(f"denied by the policy {policy}: {reason or 'no reason given'}")
        self.policy = policy
        self.reason = reason


class CallEndedError(TransactionError):
    """A change came through the context of a tool call that has ended."""


class RestoreFailedError(TransactionError):
    """A rollback could not be completed; ``failures`` says which participants are in a doubtful state and why."""

    def __init__(self, failures: Sequence[tuple[str, BaseException]]) -> None:
        listed = "; ".join(f"{name}: {format_error(error)}" for name, error in failures)
        super().__init__(f"the rollback could not be completed, this state is doubtful: {listed}")
        self.failures = tuple(failures)


class WorkspaceConflictError(RingfenceError, RuntimeError):
    """Files changed on disk since they were read, so nothing was written; ``paths`` lists them."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(f"changed on disk meanwhile, nothing was written: {', '.join(paths)}")
        self.paths = tuple(paths)


class WorkspaceLockedError(RingfenceError, RuntimeError):
    """A workspace, or one around or inside of it, is open already; ``holder`` says by whom and since when.

    ``is_around``: the holder runs the command that this process is a part of.
    """

    def __init__(self, path: str, holder: str, *, is_around: bool = False) -> None:
        advice = (
            "this runs inside of a call there, so its history can only be changed when that has ended"
            if is_around
            else "a workspace has one opener at a time, try again when it has ended"
        )
        super().__init__(f"{path} is open in {holder}: {advice}")
        self.path = path
        self.holder = holder
        self.is_around = is_around


class SandboxUnavailableError(RingfenceError, RuntimeError):
    """A sandbox is not available here. The message ends with a remedy. The command line exits with 4."""


class ResourceError(RingfenceError, RuntimeError):
    """An error in the resources of a prompt."""
