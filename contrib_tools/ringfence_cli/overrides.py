"""`ringfence overrides`: the files with texts of prompts, listed and checked."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringfence_cli.options import Interruptible

if TYPE_CHECKING:
    from ringfence.prompt import LocalPromptOverridesStore, Prompt

ROOT = click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where the overrides are kept.  [default: .ringfence/prompts/overrides in the git repository]",
)


@click.group(cls=Interruptible)
def overrides() -> None:
    """Texts of prompts and tools, replaced from files."""


@overrides.command("list")
@ROOT
def list_files(root: Path | None) -> int:
    """List the files with overrides, and how much is in each."""
    from ringfence.errors import PromptOverridesError
    from ringfence_tools.printable import one_line, plural, printable
    from ringfence_tools.runs.outputs import put_line

    store = _open_store(root)
    files = list(store.files())
    if not files:
        click.echo(printable(f"there are no overrides in {store.root}"), err=True)
    for path in files:
        try:
            one = store.read(path)
        except PromptOverridesError as error:
            click.echo(one_line(str(error), 300), err=True)
            continue
        if one is not None:
            counts = f"{plural(len(one.sections), 'section')}, {plural(len(one.tools), 'tool')}"
            put_line(printable(f"{one.ns}:{one.prompt_key} {one.tag}  {counts}  {path}"))
    return 0


@overrides.command()
@click.argument("prompt", metavar="MODULE:NAME")
@ROOT
@click.option("--tag", default="latest", show_default=True, help="Which set of overrides.")
def check(prompt: str, root: Path | None, tag: str) -> int:
    """Print the overrides that do not fit the prompt any more. Exit codes: 0 all fit, 1 some do not, 2 usage.

    MODULE:NAME is a prompt of yours: an attribute of a module that Python finds from the current directory.
    """
    from ringfence.errors import PromptOverridesError
    from ringfence.prompt.overrides import select_fitting
    from ringfence_tools.printable import one_line, plural
    from ringfence_tools.runs.outputs import put_line

    loaded, store = _load_prompt(prompt), _open_store(root)
    try:
        path = store.path(loaded.ns, loaded.key, tag)
        there = store.read(path)
    except PromptOverridesError as error:
        raise click.ClickException(str(error)) from None
    problems = select_fitting(loaded.descriptor, there)[1] if there is not None else []
    for problem in problems:
        put_line(one_line(problem, 500))
    click.echo(f"{plural(len(problems), 'override')} of {path} would be left out" if problems else "all fit", err=True)
    return 1 if problems else 0


def _open_store(root: Path | None) -> LocalPromptOverridesStore:
    from ringfence.prompt import LocalPromptOverridesStore, PromptOverridesError

    if root is not None and not root.is_dir():
        raise click.UsageError(
            f"there is no directory {str(root)!r}: --root names the one where the overrides are kept"
        )
    try:
        return LocalPromptOverridesStore(root)
    except PromptOverridesError as error:
        raise click.UsageError(str(error).replace("root_path=", "--root")) from None


def _load_prompt(spec: str) -> Prompt[Any]:
    """Import the prompt that a user names."""
    from ringfence.failures import describe_error
    from ringfence.prompt import Prompt, PromptTemplate

    module, _, name = spec.partition(":")
    if not module or not name:
        raise click.UsageError(f"{spec!r} names no prompt: write MODULE:NAME, such as app.prompts:MAIN")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a module that ends with exit code 0 has failed, too
        raise click.UsageError(f"{spec!r} cannot be had: {describe_error(error)}") from None
    kind: type[Any] = found.__class__
    if issubclass(kind, PromptTemplate):
        return Prompt[Any](found)
    if issubclass(kind, Prompt):
        return found
    raise click.UsageError(f"{spec!r} is no Prompt or PromptTemplate but a {kind.__name__}")
