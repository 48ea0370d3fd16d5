"""What a person is told of a call that was killed, when its workspace is opened again."""

from __future__ import annotations

from pathlib import Path

from ringfence.escapes import display_path
from ringfence_sandbox import Recovered
from ringfence_tools.printable import how_to_look


def describe_recovery(recovered: Recovered, directory: Path) -> str:
    """Describe the recovery of a crash to a person."""
    call = f"the tool call {recovered.call_id} ({recovered.tool})" if recovered.call_id else "a change"
    said = {
        "rolled back": f"recovered: {call} was interrupted by a crash, and is rolled back",
        "finished": f"recovered: {call} was committed before a crash, and is whole"
        if recovered.tool
        else "found at the opening:",
        "set aside": f"{call} of another directory that was here before is set aside",
    }[recovered.outcome]
    more = [
        f"{display_path(path)} was changed meanwhile, not by the call, and stays as it is"
        for path in recovered.conflicts
    ]
    return how_to_look("\n  ".join([said, *more, *recovered.notes]), directory)
