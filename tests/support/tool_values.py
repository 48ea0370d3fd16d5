"""The tools of ringfence without their sections, and the values that they take and give."""

from __future__ import annotations

from ringfence_tools.delegation import Delegated
from ringfence_tools.expected_hash import expecting
from ringfence_tools.files import EditedFile, FileListing, FileText, file_tools
from ringfence_tools.frameworks import OrderedCalls
from ringfence_tools.python_eval import EvalResult
from ringfence_tools.shell import MAX_CHANGES, CommandOutcome, EvaluatePython, ShellExecute

__all__ = [
    "MAX_CHANGES",
    "CommandOutcome",
    "Delegated",
    "EditedFile",
    "EvalResult",
    "EvaluatePython",
    "FileListing",
    "FileText",
    "OrderedCalls",
    "ShellExecute",
    "expecting",
    "file_tools",
]
