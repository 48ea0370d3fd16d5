"""What can be known of tasks before any of them is started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from ringfence.errors import PromptValidationError
from ringfence.escapes import escape_path
from ringfence.filesystem.hidden import HiddenFiles
from ringfence_batch.sources import SourceError, check_source, local_source
from ringfence_batch.task import BatchTask, TaskFileError
from ringfence_tools.runs.model_specs import is_own_model, model_of
from ringfence_tools.runs.policy_specs import is_code, is_own_policy, parse_specs, refuse_path_of_host
from ringfence_tools.runs.scoring import model_of_candidate
from ringfence_tools.runs.spec_error import SpecError
from ringfence_tools.runs.unused_patterns import unused_patterns


def check_tasks(tasks: Sequence[BatchTask]) -> None:
    """Check tasks that will run on this machine: workspaces, models with their keys, policies, sections and secrets.

    It runs no code of the tasks. It reads all of each archive.

    Raises:
        TaskFileError: names everything that is not there.
    """
    models: dict[str, str] = {}
    sources: dict[tuple[str, str | None], str] = {}
    problems = [f"{task.id}: {problem}" for task in tasks for problem in _problems(task, models, sources)]
    if problems:
        raise TaskFileError(problems)


def describe_unused_patterns(tasks: Sequence[BatchTask]) -> Sequence[str]:
    """Return a line for each pattern of tasks that fits no path of their directory now. The tasks were checked."""
    found: dict[str, None] = {}
    for task in {(task.workspace, task.policies, task.hide): task for task in tasks}.values():
        local = local_source(task)
        if task.revision is None and local is not None and local.is_dir():
            policies = parse_specs([spec for spec in task.policies if not is_own_policy(spec, local)], local)
            lines = unused_patterns(policies, HiddenFiles(task.hide), local)
            found |= dict.fromkeys(f"{escape_path(str(local))}: {line}" for line in lines)
    return [*found]


def describe_stale_images(tasks: Sequence[BatchTask]) -> Sequence[str]:
    """Return a line for each directory whose files have changed since the image was built that its tasks will use."""
    sources = {local_source(task): None for task in tasks if task.kind == "podman" and task.image is None}
    if not sources:
        return []
    from ringfence_sandbox import describe_stale_image  # only here: it loads Podman's client

    found = (describe_stale_image(source) for source in sources if source is not None)
    return [line for line in found if line is not None]


def _problems(task: BatchTask, models: dict[str, str], sources: dict[tuple[str, str | None], str]) -> Iterator[str]:
    directory = local_source(task) or Path()
    source, is_own = (task.workspace, task.revision), is_own_model(task.model, directory)
    if source not in sources:
        sources[source] = _source_problem(task)
    if task.model not in models:
        models[task.model] = "" if is_own else _model_problem(task, directory)
    yield from filter(None, (sources[source], models[task.model]))
    try:
        parse_specs([spec for spec in task.policies if not is_own_policy(spec, directory)], directory)
        for pattern in task.hide:
            refuse_path_of_host(pattern, directory)
        HiddenFiles(task.hide)
    except (PromptValidationError, SpecError, OSError, ValueError) as error:
        yield str(error)
    for spec in (*task.sections, *filter(is_code, task.policies), *([task.model] if is_own else [])):
        file = spec.rpartition(":")[0]
        if file.endswith(".py") and not Path(file).is_file():
            yield f"there is no file {file}"
    yield from (f"secrets: there is no variable {name}" for name in task.secrets if name not in os.environ)


def _source_problem(task: BatchTask) -> str:
    try:
        check_source(task)
    except SourceError as error:
        return str(error)
    return ""


def _model_problem(task: BatchTask, directory: Path) -> str:
    try:
        for spec in dict.fromkeys(model_of_candidate(task.model, number) for number in range(1, task.candidates + 1)):
            with ExitStack() as stack:
                model_of(spec, directory, stack)
    except SpecError as error:
        return str(error)
    return ""
