"""Overrides of a user's prompts: seeded, listed, checked and compared."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from ringfence.prompt.override_files import LocalPromptOverridesStore

from ringfence.adapters.loop import tool_schema
from ringfence.errors import PromptError, PromptOverridesError
from ringfence.failures import describe_error
from ringfence.prompt.overrides import PromptOverride, problems
from ringfence.prompt.prompt import Prompt, PromptTemplate
from ringfence_cli.printable import one_line, plural, printable
from ringfence_cli.terminal import put_diff


def seed(spec: str, root: Path | None, tag: str) -> int:
    prompt, store = _prompt(spec), _store(root)
    try:
        path = store.path(prompt.ns, prompt.key, tag)
        there = os.path.exists(path)
        store.seed(prompt, tag)
    except PromptOverridesError as error:
        raise click.ClickException(str(error)) from None
    click.echo(
        f"{path} was there already and stays as it is" if there else f"{path} has the prompt's own texts", err=True
    )
    click.echo(path)
    return 0


def list_files(root: Path | None) -> int:
    store = _store(root, there=True)
    files = list(store.files())
    if not files:
        click.echo(printable(f"there are no overrides in {store.root}"), err=True)
    for path in files:
        try:
            one = store.read(path)
        except PromptOverridesError as error:
            click.echo(one_line(str(error), 300), err=True)
            continue
        counts = (plural(len(one.sections), "section"), plural(len(one.tools), "tool"))
        tasks = plural(len(one.task_examples), "task example")
        click.echo(printable(f"{one.ns}:{one.prompt_key} {one.tag}  {', '.join((*counts, tasks))}  {path}"))
    return 0


def check(spec: str, root: Path | None, tag: str) -> int:
    prompt, store = _prompt(spec), _store(root, there=True)
    try:
        path = store.path(prompt.ns, prompt.key, tag)
        said = _read(store, path)
        wrong = problems(prompt.descriptor, said) if said is not None else {}
    except PromptOverridesError as error:
        raise click.ClickException(str(error)) from None
    for problem in wrong.values():
        click.echo(one_line(problem, 500))
    click.echo(f"{plural(len(wrong), 'override')} of {path} would be left out" if wrong else "all fit", err=True)
    return 1 if wrong else 0


def _read(store: LocalPromptOverridesStore, path: Path) -> PromptOverride | None:
    """None where there is no file. Raises PromptOverridesError, also where that cannot be told."""
    try:
        return store.read(path)
    except PromptOverridesError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return None
        raise


def diff(spec: str, root: Path | None, tag: str) -> int:
    prompt, store = _prompt(spec), _store(root, there=True)
    plain = Prompt[Any](prompt.template)
    overridden = Prompt[Any](prompt.template, overrides_store=store, overrides_tag=tag)
    for one in (plain, overridden):
        one.bind(*prompt.params)
    try:
        before, after = _as_text(plain), _as_text(overridden)
    except (PromptError, PromptOverridesError) as error:
        raise click.ClickException(str(error)) from None
    name = f"{prompt.ns}:{prompt.key}"
    lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name} ({tag})", lineterm="")
    put_diff("".join(f"{line}\n" for line in lines).encode())
    return 0


def _as_text(prompt: Prompt[Any]) -> list[str]:
    """All that a model is told: the text, then each tool's description and schema."""
    rendered = prompt.render()
    lines = rendered.text.splitlines()
    for tool in rendered.tools:
        schema = tool_schema(tool, rendered)
        lines += ["", f"tool {tool.name}: {tool.description}"]
        lines += json.dumps(schema.parameters, indent=2, ensure_ascii=False).splitlines()
    return lines


def _store(root: Path | None, *, there: bool = False) -> LocalPromptOverridesStore:
    """``there``: a root that is named must be a directory already."""
    if there and root is not None and not root.is_dir():
        raise click.UsageError(
            f"there is no directory {str(root)!r}: --root names the one where the overrides are kept"
        )
    try:
        return LocalPromptOverridesStore(root)
    except PromptOverridesError as error:
        raise click.UsageError(str(error).replace("root_path=", "--root")) from None


def _prompt(spec: str) -> Prompt[Any]:
    """The prompt that a user names; what its module does when it is imported, it does."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise click.UsageError(f"{spec!r} names no prompt: write MODULE:NAME, such as app.prompts:MAIN")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a user's module may raise anything, and end with 0 what has failed
        raise click.UsageError(f"{spec!r} cannot be had: {describe_error(error)}") from None
    kind: type[Any] = found.__class__
    if issubclass(kind, PromptTemplate):
        return Prompt[Any](found)
    if issubclass(kind, Prompt):
        return found
    raise click.UsageError(f"{spec!r} is no Prompt or PromptTemplate but a {kind.__name__}")
