"""Every exception of the project, in one tree.

RingfenceError
├── PromptError                     where in a prompt: section_path, dataclass_type, placeholder
│   ├── PromptValidationError       the author's mistake, found when a tool, section or prompt is constructed
│   ├── PromptRenderError           the prompt cannot be turned into text
│   └── VisibilityExpansionRequired the model asked to open sections: leaves the call, and the loop renders again
├── PromptOverridesError            overrides cannot be read, kept or do not fit their prompt
├── OutputParseError                the final answer does not fit the declared output type
├── ToolValidationError (ValueError)            a tool's input is not acceptable: told to the model
├── DeadlineExceededError (RuntimeError)        a deadline has passed
├── BudgetExceededError (RuntimeError)          a token budget is used up
├── PromptEvaluationError (RuntimeError)        the evaluation cannot go on: phase says where
│   └── ThrottleError               the provider was asked again and again, or must not be: details
├── SnapshotError (RuntimeError)
│   ├── SnapshotSerializationError  a snapshot holds something that has no JSON form
│   └── SnapshotRestoreError        a snapshot does not fit what it should be restored to
├── TransactionError (RuntimeError)
│   ├── ParticipantBusyError        another tool call holds a participant: names the holder
│   ├── CallCancelledError          nobody wants the result of a tool call any more
│   ├── CallEndedError              something was changed through the context of a tool call that has ended
│   └── RestoreFailedError          a rollback could not be completed: state is doubtful
├── WorkspaceConflictError (RuntimeError)       files changed on disk since they were read
├── WorkspaceLockedError (RuntimeError)         another opener has the workspace: path, holder
├── ExecutorLostError (RuntimeError)            a sandbox's container, or the way to it, ended: ended
├── SandboxUnavailableError (RuntimeError)      commands cannot run here: the message says what to do
└── ResourceError (RuntimeError)
    ├── UnboundResourceError (LookupError)
    ├── CircularDependencyError     cycle: the protocols in order
    ├── DuplicateBindingError (ValueError)
    └── ProviderError               protocol, cause

Filesystems raise the built-in errors (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError,
PermissionError, ValueError) for what those mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ringfence.adapters.retry import ThrottleDetails, ThrottleKind
    from ringfence.runtime.limits import Budget, TokenUsage
    from ringfence.runtime.visibility import SectionVisibility

SectionPath = tuple[str, ...]


def described(error: BaseException) -> str:
    """The kind and the text of an error, whatever its ``__str__`` does."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


class RingfenceError(Exception):
    """The root of the tree."""

    def __reduce__(self) -> tuple[object, ...]:
        # As it is, and not by its constructor: that takes other things than the message, so that an error could be
        # sent to another process, but not received there.
        return _received, (type(self), self.args), self.__dict__


def _received(kind: type[RingfenceError], args: tuple[object, ...]) -> RingfenceError:
    return kind.__new__(kind, *args)


class PromptError(RingfenceError):
    """Something about a prompt, and where in it.

    ``section_path`` is the keys from the root to the section, empty when unknown; ``placeholder`` names the
    template placeholder, tool or field at fault.
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


class BudgetExceededError(RingfenceError, RuntimeError):
    """A budget is used up; ``exceeded_dimension`` says which limit."""

    def __init__(
        self,
        budget: Budget,
        consumed: TokenUsage,
        exceeded_dimension: Literal["deadline", "total_tokens", "input_tokens", "output_tokens"],
    ) -> None:
        if exceeded_dimension == "deadline":
            said = "its deadline has passed"
        else:
            used, limit = getattr(consumed, exceeded_dimension), getattr(budget, f"max_{exceeded_dimension}")
            kind = exceeded_dimension.replace("_", " ").removeprefix("total ")
            said = f"{used:,} {kind}, of {limit:,} that it allows"
        super().__init__(f"the budget is used up: {said}")
        self.budget = budget
        self.consumed = consumed
        self.exceeded_dimension = exceeded_dimension


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


class SnapshotError(RingfenceError, RuntimeError):
    """Something about a snapshot."""


class SnapshotSerializationError(SnapshotError):
    """A snapshot holds something that has no JSON form; the message says in which slice."""


class SnapshotRestoreError(SnapshotError):
    """A snapshot does not belong to, or does not fit, what it should be restored to. Nothing was changed."""


class TransactionError(RingfenceError, RuntimeError):
    """Something about a transaction."""


class ParticipantBusyError(TransactionError):
    """Another tool call holds a participant and did not let go of it in time."""


class CallCancelledError(TransactionError):
    """A tool call was cancelled before its commit point, so nothing of it is kept."""


class CallEndedError(TransactionError):
    """A change came through the context of a tool call that has ended."""


class RestoreFailedError(TransactionError):
    """A rollback could not be completed; ``failures`` says which participants are in a doubtful state and why."""

    def __init__(self, failures: Sequence[tuple[str, BaseException]]) -> None:
        said = "; ".join(f"{name}: {described(error)}" for name, error in failures)
        super().__init__(f"the rollback could not be completed, this state is doubtful: {said}")
        self.failures = tuple(failures)


class WorkspaceConflictError(RingfenceError, RuntimeError):
    """Files changed on disk since they were read, so nothing was written; ``paths`` lists them."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(f"changed on disk meanwhile, nothing was written: {', '.join(paths)}")
        self.paths = tuple(paths)


class WorkspaceLockedError(RingfenceError, RuntimeError):
    """A workspace, or one around or inside of it, is open already; ``holder`` says by whom and since when."""

    def __init__(self, path: str, holder: str) -> None:
        super().__init__(
            f"{path} is open in {holder}: a workspace has one opener at a time, try again when it has ended"
        )
        self.path = path
        self.holder = holder


class ExecutorLostError(RingfenceError, RuntimeError):
    """The executor of a container has ended or cannot be trusted any more, so no command can run there.

    ``ended`` says that every process of the container is known to have ended; otherwise end the container.
    """

    def __init__(self, message: str, *, ended: bool = False) -> None:
        super().__init__(message)
        self.ended = ended


class SandboxUnavailableError(RingfenceError, RuntimeError):
    """A sandbox cannot be had here. The message ends with what to do about it; the command line exits with 4."""


class ResourceError(RingfenceError, RuntimeError):
    """Something about the resources of a prompt."""


class UnboundResourceError(ResourceError, LookupError):
    """Nothing is bound to the protocol that was asked for."""


class CircularDependencyError(ResourceError):
    """Providers need each other; ``cycle`` lists the protocols in the order they were asked for."""

    def __init__(self, cycle: Sequence[type]) -> None:
        super().__init__("circular dependency: " + " -> ".join(kind.__name__ for kind in cycle))
        self.cycle = tuple(cycle)


class DuplicateBindingError(ResourceError, ValueError):
    """Two bindings for one protocol."""


class ProviderError(ResourceError):
    """A resource could not be built or opened."""

    def __init__(self, protocol: type, cause: BaseException) -> None:
        super().__init__(f"the resource {protocol.__name__} could not be built: {described(cause)}")
        self.protocol = protocol
        self.cause = cause
