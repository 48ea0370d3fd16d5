"""An environment for mini-swe-agent (the extra ``mini-swe-agent``): each command of its agent is a transaction."""

# mini-swe-agent is not installed where this is checked. tests/doors runs its agent on it.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ringfence.errors import RingfenceError
from ringfence.extras import missing
from ringfence_doors.door_calls import DoorCalls, receipts_json, rollback_note
from ringfence_workspace import Reversal, Workspace

try:
    from minisweagent.exceptions import Submitted
except ImportError as error:
    raise ModuleNotFoundError(missing("minisweagent", "mini-swe-agent"), name="minisweagent") from error

SUBMISSION = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The first line of what a command prints by which an agent says that it is done."""


@dataclass
class RingfenceEnvironmentConfig:
    """``cwd`` is the directory of the workspace, ``timeout`` that of each command in seconds."""

    cwd: str = ""
    env: dict[str, str] = field(default_factory=dict[str, str])
    timeout: int = 30
    rollback_on_error: bool = False
    leave_running: bool = False


class RingfenceEnvironment:
    """Opens the workspace at ``cwd``, by default the directory of this process, until `close`.

    A command that takes longer than its timeout is rolled back. One that ends with another exit code than 0 is rolled
    back with ``rollback_on_error``. Raises what `Workspace.open` raises, and TypeError for an unknown option.
    """

    def __init__(self, **options: Any) -> None:
        self.config = RingfenceEnvironmentConfig(**options)
        self.calls = DoorCalls(
            Workspace.open(self.config.cwd or "."),
            rollback_on_error=self.config.rollback_on_error,
            leave_running=self.config.leave_running,
        )
        self.config.cwd = self.calls.root

    def execute(self, action: Mapping[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run the command of an action, in a directory of the workspace.

        Raises:
            Submitted: the command succeeded, and the first line that it printed says that the task is done.
        """
        try:
            result = self.calls.run(
                action.get("command", ""),
                cwd=self.calls.place(cwd or "."),
                env=self.config.env,
                timeout_seconds=timeout or self.config.timeout,
            )
        except (OSError, ValueError, RingfenceError) as error:
            return _failed("", -1, error)
        streams = (self.calls.whole(text) or text for text in (result.stdout, result.stderr))
        output = "\n".join(filter(None, [*(text.removesuffix("\n") for text in streams), rollback_note(result)]))
        if result.failure:
            return _failed(output, -1, TimeoutError(f"the command {result.failure}"))
        lines = output.lstrip().splitlines(keepends=True)
        if result.exit_code == 0 and lines and lines[0].strip() == SUBMISSION:
            submission = "".join(lines[1:])
            extra = {"exit_status": "Submitted", "submission": submission}
            raise Submitted({"role": "exit", "content": submission, "extra": extra})
        receipt = receipts_json([result.receipt]) if result.receipt is not None else []
        return {
            "output": output and output + "\n",
            "returncode": result.exit_code,
            "exception_info": "",
            "extra": {"ringfence_receipts": receipt},
        }

    def get_template_vars(self, **variables: Any) -> dict[str, Any]:
        return {**asdict(self.config), **platform.uname()._asdict(), **os.environ, **variables}

    def serialize(self) -> dict[str, Any]:
        """For the trajectory of a run: the options, and the receipts of the newest 1,000 commands."""
        kind = f"{type(self).__module__}.{type(self).__name__}"
        config = {"environment": asdict(self.config), "environment_type": kind}
        return {"info": {"config": config, "ringfence_receipts": receipts_json([*self.calls.receipts])}}

    def undo(self, n: int = 1) -> Reversal:
        """Reverse the newest steps. Raises what `Workspace.undo` raises."""
        return self.calls.workspace.undo(n)

    def close(self) -> None:
        """Close the workspace. Its files and their history stay."""
        self.calls.workspace.close()


def _failed(output: str, returncode: int, error: Exception) -> dict[str, Any]:
    return {
        "output": output,
        "returncode": returncode,
        "exception_info": f"An error occurred while executing the command: {error}",
        "extra": {"exception_type": type(error).__name__, "exception": str(error)},
    }
