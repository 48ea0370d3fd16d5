"""The options of ``ringfence run``, and a run that is made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringfence.adapters.loop import MAX_TURNS
from ringfence.filesystem.edits import read_host_text
from ringfence.filesystem.hidden import HiddenFiles
from ringfence_cli.options import hidden_of, place_of
from ringfence_cli.resume import RunRecord
from ringfence_cli.run_questions import RunQuestions
from ringfence_tools.printable import why
from ringfence_tools.runs.agent_run import AgentTask
from ringfence_tools.runs.outputs import OutputFile
from ringfence_tools.runs.place import WorkspaceKind
from ringfence_tools.runs.policy_specs import is_code
from ringfence_tools.runs.receipts_file import ReceiptsFile
from ringfence_tools.runs.run_limits import RunLimits, absolute_code, absolute_policy
from ringfence_tools.runs.run_spec import RunSpec

if TYPE_CHECKING:
    from ringfence_sandbox import Detect
    from ringfence_tools.runs.report import ReportFile


@dataclass(frozen=True, slots=True)
class RunCommand:
    """The options of the command. ``container`` has those of `ringfence_cli.options.container`."""

    directory: Path
    task: str | None
    resume: bool
    model: str
    workspace: WorkspaceKind | None
    apply: bool | None
    patch: Path | None
    receipts: Path | None
    report: Path | None
    view: bool
    write: bool
    deadline: float | None
    max_tokens: int | None
    max_cost: float | None
    max_turns: int | None
    max_repeats: int | None
    fail_if_unchanged: bool
    sections: tuple[str, ...]
    policies: tuple[str, ...]
    with_ignored: bool
    allow_git: bool
    detect: Detect
    hide: HiddenFiles | None
    asks: tuple[str, ...]
    ask_seconds: float | None
    quiet: bool
    container: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> RunCommand:
        given = {**given}
        globs, no_hide = given.pop("hidden_globs"), given.pop("no_hide")
        hide = hidden_of(globs, no_hide, given["directory"], remembered=given["resume"])
        names = cls.__dataclass_fields__.keys() & given.keys()
        container = {name: value for name, value in given.items() if name not in names}
        return cls(**{name: given[name] for name in names}, hide=hide, container=container)

    def files_read(self) -> Iterator[tuple[str, Path]]:
        """The files that the run reads, by the option that names each."""
        if self.model.startswith("script:"):
            yield "--model", Path(self.model.removeprefix("script:"))
        if self.task is not None and self.task.startswith("@"):
            yield "--task", Path(self.task[1:])
        yield from (("--policy", Path(spec)) for spec in self.policies if spec.endswith(".toml"))
        own = (("--model", [self.model]), ("--policy", filter(is_code, self.policies)), ("--section", self.sections))
        for option, specs in own:
            files = (spec.rpartition(":")[0] for spec in specs)
            yield from ((option, Path(file)) for file in files if file.endswith(".py"))

    def spec(self, *, is_resumed: bool) -> RunSpec:
        """Return what the run is made of. For a resume, an option that is not given leaves the old limit in force."""
        workspace = self.workspace or (None if is_resumed else "disk")
        # A command that names its task means the same each time it is repeated.
        turns = self.max_turns if is_resumed and self.task is None else self.max_turns or MAX_TURNS
        limits = RunLimits(
            tuple(map(absolute_policy, self.policies)),
            self.deadline,
            self.max_tokens,
            turns,
            place_of(workspace, self.container),
            tuple(map(absolute_code, self.sections)),
            self.asks,
            self.ask_seconds,
            self.max_repeats,
            self.max_cost,
        )
        return RunSpec(
            self.directory, self.model, limits, self.hide, self.with_ignored, self.allow_git, detect=self.detect
        )


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is ready to start. ``record`` is None for a run in memory."""

    options: RunCommand
    task: AgentTask
    limits: RunLimits
    is_resumed: bool
    record: RunRecord | None
    patch: OutputFile | None
    receipts: ReceiptsFile | None
    report: ReportFile | None
    questions: RunQuestions


def read_task(text: str) -> str:
    """Return the text of ``--task`` or of the file that it names. Raises click.BadParameter if there is none."""
    if text.startswith("@"):
        try:
            text = read_host_text(Path(text[1:]))
        except (OSError, ValueError) as error:
            raise click.BadParameter(f"{text[1:]!r} cannot be read: {why(error)}", param_hint="'--task'") from None
    if not text.strip():
        raise click.BadParameter("it is empty: say what is to be done", param_hint="'--task'")
    return text
