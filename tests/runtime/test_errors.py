"""Errors go from one process to another."""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from ringfence import errors
from ringfence.adapters import ThrottleDetails
from ringfence.errors import SectionVisibility
from ringfence.resources import CircularDependencyError, ProviderError, UnboundResourceError
from ringfence.runtime import Budget, BudgetExceededError, TokenUsage
from ringfence_sandbox.container.channel import ExecutorLostError

ERRORS = [
    errors.PromptRenderError("no", section_path=("a",), dataclass_type=int, placeholder="x"),
    errors.VisibilityExpansionRequired(
        "no", requested_overrides={("a",): SectionVisibility.FULL}, reason="it matters", section_keys=["a"]
    ),
    errors.OutputParseError("no", dataclass_type=int),
    errors.ToolValidationError("no"),
    BudgetExceededError(Budget(max_total_tokens=1), TokenUsage(2, 3), "total_tokens"),
    errors.PromptEvaluationError("no", prompt_name="p", phase="tool", provider_payload={"a": 1}),
    errors.ThrottleError("no", details=ThrottleDetails("rate_limit", 1.0, 2, True, None)),
    errors.RestoreFailedError([("files", OSError(5, "no"))]),
    errors.WorkspaceConflictError(["a"]),
    errors.WorkspaceLockedError("/w", "process 1"),
    errors.WorkspaceLockedError("/w", "process 1", is_around=True),
    ExecutorLostError("no", ended=True),
    CircularDependencyError([int, str]),
    UnboundResourceError("no"),
    ProviderError(int, ValueError("no")),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_in_another_process_as_it_was(error: errors.RingfenceError) -> None:
    error.add_note("said meanwhile")
    arrived: errors.RingfenceError = pickle.loads(pickle.dumps(error))
    assert (type(arrived), str(arrived)) == (type(error), str(error))
    assert {name: repr(value) for name, value in vars(arrived).items()} == {
        name: repr(value) for name, value in vars(error).items()
    }


def test_an_error_of_a_worker_process_is_raised_where_its_result_is_asked_for() -> None:
    with (
        ProcessPoolExecutor(1, get_context("spawn")) as pool,
        pytest.raises(errors.WorkspaceLockedError, match="/w is open in process 1"),
    ):
        pool.submit(raised).result()


def raised() -> None:
    raise errors.WorkspaceLockedError("/w", "process 1")
