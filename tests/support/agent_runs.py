"""Runs of agents in this process, as `ringfence run` makes them."""

from __future__ import annotations

from ringfence_cli.options import container, place_of
from ringfence_cli.resume import RunRecord, interrupted_run, record_of
from ringfence_cli.run import run_watched
from ringfence_cli.run_command import read_task
from ringfence_cli.run_ending import apply_outcome
from ringfence_tools.printable import MAX_CHANGE_LINES, outcome_words, unpatchable_changes
from ringfence_tools.runs.agent_run import (
    CALL_OUTCOMES,
    EXIT_CODES,
    AgentTask,
    RunObserver,
    RunOutcome,
    RunStats,
    apply_changes,
    run_agent,
)
from ringfence_tools.runs.asking import question_lines
from ringfence_tools.runs.hiding import hidden_as_before
from ringfence_tools.runs.outputs import CLEARED, OutputFile, recording
from ringfence_tools.runs.owner_policies import owner_file, policies_of
from ringfence_tools.runs.place import Place
from ringfence_tools.runs.receipts_file import ReceiptsFile
from ringfence_tools.runs.report import render_call, render_patch
from ringfence_tools.runs.run_limits import RunLimits, join_policies
from ringfence_tools.runs.run_workspace import HIDDEN, DiskWorkspace, MemoryWorkspace
from ringfence_tools.runs.signals import Signals
from ringfence_tools.runs.write_back import write_back

__all__ = [
    "CALL_OUTCOMES",
    "CLEARED",
    "EXIT_CODES",
    "HIDDEN",
    "MAX_CHANGE_LINES",
    "AgentTask",
    "DiskWorkspace",
    "MemoryWorkspace",
    "OutputFile",
    "Place",
    "ReceiptsFile",
    "RunLimits",
    "RunObserver",
    "RunOutcome",
    "RunRecord",
    "RunStats",
    "Signals",
    "apply_changes",
    "apply_outcome",
    "container",
    "hidden_as_before",
    "interrupted_run",
    "join_policies",
    "outcome_words",
    "owner_file",
    "place_of",
    "policies_of",
    "question_lines",
    "read_task",
    "record_of",
    "recording",
    "render_call",
    "render_patch",
    "run_agent",
    "run_watched",
    "unpatchable_changes",
    "write_back",
]
