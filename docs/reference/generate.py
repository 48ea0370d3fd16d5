"""Write the pages of the reference that come from the code: `python.md` and `command-line.md`.

Run it after a change of a public name, a docstring or an option: ``make docs``. A test compares the pages with what
this script would write.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click

from ringfence_cli.main import ringfence

HERE = Path(__file__).parent
MODULES = (
    "ringfence.prompt",
    "ringfence.runtime",
    "ringfence.adapters",
    "ringfence.resources",
    "ringfence.filesystem",
    "ringfence.serde",
    "ringfence.telemetry",
    "ringfence.testing",
    "ringfence_tools",
    "ringfence_workspace",
    "ringfence_sandbox",
    "ringfence_batch",
    "ringfence_mcp",
)
NOTE = "<!-- Written by docs/reference/generate.py (make docs). Edit the docstring or the option instead. -->\n"


def first_sentence(docstring: str) -> str:
    """The first sentence as Markdown, in one cell of a table."""
    paragraph = " ".join(inspect.cleandoc(docstring).partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:])\s+(?=[A-Z`])", paragraph, maxsplit=1)[0]
    return sentence.replace("``", "`").replace("|", "\\|")


def description(name: str, value: object) -> str:
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return "" if hasattr(value, "__dict__") else f"`{value!r}`".replace("|", "\\|")
    docstring = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    if not isinstance(docstring, str) or docstring.startswith(f"{name}("):  # a dataclass's own signature
        return ""
    return first_sentence(docstring)


def python_page() -> str:
    """Every public name of every module, with the first sentence of its docstring."""
    lines = ["# Python", "", NOTE]
    lines += ["The names that may be imported, module by module. `help(NAME)` has the whole docstring of each.", ""]
    short = ", ".join(f"`{name}`" for name in import_module("ringfence").__all__)
    lines += ["## ringfence", "", f"The most used names can be imported from `ringfence` itself: {short}.", ""]
    for module_name in MODULES:
        module = import_module(module_name)
        lines += [f"## {module_name}", ""]
        names = set(module.__all__)
        if module_name == "ringfence_sandbox":
            lines += ["The names of `ringfence_workspace` can be imported from here, too.", ""]
            names -= set(import_module("ringfence_workspace").__all__)
        lines += ["| name | |", "|---|---|"]
        lines += [f"| `{name}` | {description(name, getattr(module, name))} |" for name in sorted(names)]
        lines.append("")
    return "\n".join(lines).replace("|  |\n", "| |\n").rstrip() + "\n"


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group, info_name=path)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            if command.invoke_without_command:
                yield f"{path} {name}", command
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def option_row(option: click.Option) -> str:
    choices = option.type.choices if isinstance(option.type, click.Choice) else ()
    kind = "\\|".join(choices) or option.metavar or {"text": "TEXT"}.get(option.type.name, "N")
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag else f" {kind}"
    default = f" [default: {option.default}]" if option.show_default is True and not option.is_flag else ""
    return f"| {names}{value} | {' '.join((option.help or '').split())}{default} |"


def command_line_page() -> str:
    """Every command with its options."""
    lines = ["# Command line", "", NOTE]
    lines += [
        "`ringfence COMMAND --help` prints the same. `python -m ringfence` is the same command.",
        "[Exit codes and JSON](json.md) have a page of their own.",
        "",
        "Your shell completes commands, options and directories after this line in its start file, for bash",
        "(`~/.bashrc`), zsh (`~/.zshrc`) or fish (`~/.config/fish/config.fish`):",
        "",
        "```sh",
        'eval "$(_RINGFENCE_COMPLETE=bash_source ringfence)"',
        'eval "$(_RINGFENCE_COMPLETE=zsh_source ringfence)"',
        "_RINGFENCE_COMPLETE=fish_source ringfence | source",
        "```",
        "",
    ]
    for path, command in commands(ringfence, "ringfence"):
        arguments = [param for param in command.params if isinstance(param, click.Argument)]
        words = [
            word if one.required else f"[{word}]"
            for one in arguments
            if (word := one.metavar or one.human_readable_name)
        ]
        lines += [f"## {path}", "", f"`{' '.join((path, *words))}`", ""]
        lines += [" ".join(inspect.cleandoc(command.help or "").split()), ""]
        options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
        if options:
            lines += ["| option | |", "|---|---|", *map(option_row, options), ""]
    return "\n".join(lines).rstrip() + "\n"


PAGES = {"python.md": python_page, "command-line.md": command_line_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
