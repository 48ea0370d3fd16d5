"""What a guard adds to a command of the real Claude Code, beside hooks of its that do nothing, and beside none.

The time between two requests to its model, which is a script: on the clock, since what it waits for is other processes.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from measure import scratch_directory
from trees import sample, written

PROJECT = Path(__file__).parent.parent
sys.path.insert(0, str(PROJECT / "tests" / "support"))
from provider_server import Asked, ProviderServer, Reply  # noqa: E402
from real_agents import AGENTS, Place  # noqa: E402

AGENT = AGENTS["claude"]
PROGRAMS = PROJECT / f"build/claude-{AGENT.version}/node_modules/.bin"
"""`make prove` installs it."""
TREES = (1_000, 10_000, 50_000)
CALLS, ROUNDS = 12, 4
LINE = "claude -p 'Work.' --allowedTools Bash"
CALL = {"name": "Bash", "arguments": {"command": "true", "description": "run"}}
SETTINGS = ".claude/settings.local.json"


class Model(ProviderServer):
    """Asks for one command after the other, and notes when it is asked."""

    def __init__(self) -> None:
        calls = [{"tool_calls": [{"id": f"call_{number}", **CALL}]} for number in range(CALLS)]
        super().__init__([*calls, {"text": "Done."}])
        self.times: list[float] = []

    def reply(self, asked: Asked) -> Reply:
        if '"Bash"' not in json.dumps(asked.body.get("tools")):
            return {"text": "A title"}
        self.times.append(time.perf_counter())
        return super().reply(asked)


def seconds_a_call(place: Place) -> float:
    """Of all but the first, which starts what the others find."""
    with Model() as model:
        place.log_in(model.url)
        place.run(LINE, model.url)
    between = [later - earlier for earlier, later in zip(model.times, model.times[1:], strict=False)]
    assert len(between) == CALLS, model.times
    return median(between[1:])


def doing_nothing(hooks: Any) -> Any:
    """The same hooks, with another command."""
    if isinstance(hooks, dict):
        return {key: "true" if key == "command" else doing_nothing(value) for key, value in hooks.items()}
    return [doing_nothing(one) for one in hooks] if isinstance(hooks, list) else hooks


@contextmanager
def places(scratch: Path, number: int) -> Generator[Sequence[Place]]:
    """Three equal trees: guarded, with hooks that do nothing, and with none."""
    made: list[Place] = []
    for name in ("guarded", "hooked", "bare"):
        base = scratch / f"{name}-{number}"
        written(base / "root", sample(number))
        made.append(Place(AGENT, PROGRAMS, base))
    guarded, hooked, _ = made
    guarded.run("ringfence guard install claude")
    settings = json.loads((guarded.root / SETTINGS).read_text())
    (hooked.root / SETTINGS).parent.mkdir()
    (hooked.root / SETTINGS).write_text(json.dumps(doing_nothing(settings)))
    try:
        yield made
    finally:
        guarded.run("ringfence guard stop")
        for one in made:
            shutil.rmtree(one.base)


def main() -> None:
    if not PROGRAMS.exists():
        print("What a guard adds to a command of Claude Code was not measured: `make prove` installs that.")
        return
    print(f"A command of Claude Code {AGENT.version}, milliseconds from its call to the model's next request:")
    print("    files   guarded   with hooks that do nothing   with none   (median of rounds, fastest)")
    with scratch_directory() as scratch:
        for number in TREES:
            with places(scratch, number) as made:
                rounds = [[seconds_a_call(place) * 1000 for place in made] for _ in range(ROUNDS)]
            shown = [f"{median(times):.0f} ({min(times):.0f})" for times in zip(*rounds, strict=True)]
            print(f"{number:9,}   {shown[0]:>9}   {shown[1]:>10}   {shown[2]:>27}", flush=True)


if __name__ == "__main__":
    main()
