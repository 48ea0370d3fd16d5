"""What can be known of tasks before any of them is started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from ringfence_batch.sources import local_source
from ringfence_batch.task import BatchTask, TaskFileError
from ringfence_tools.model_specs import model_of
from ringfence_tools.policy_specs import is_code, parse_specs
from ringfence_tools.spec_error import SpecError


def check_tasks(tasks: Sequence[BatchTask]) -> None:
    """Check tasks that will run on this machine: workspaces, models with their keys, policies, sections and secrets.

    It runs no code of the tasks.

    Raises:
        TaskFileError: names everything that is not there.
    """
    models: dict[str, str] = {}
    problems = [f"{task.id}: {problem}" for task in tasks for problem in _problems(task, models)]
    if problems:
        raise TaskFileError(problems)


def _problems(task: BatchTask, models: dict[str, str]) -> Iterator[str]:
    local = local_source(task)
    if local is not None and not local.exists():
        yield f"there is no workspace {local}"
    if task.model not in models:
        models[task.model] = ""
        try:
            with ExitStack() as stack:
                model_of(task.model, stack)
        except SpecError as error:
            models[task.model] = str(error)
    if models[task.model]:
        yield models[task.model]
    try:
        parse_specs([spec for spec in task.policies if not is_code(spec)], local or Path())
    except (SpecError, OSError) as error:
        yield str(error)
    for spec in (*task.sections, *filter(is_code, task.policies)):
        file = spec.rpartition(":")[0]
        if file.endswith(".py") and not Path(file).is_file():
            yield f"there is no file {file}"
    yield from (f"secrets: there is no variable {name}" for name in task.secrets if name not in os.environ)
