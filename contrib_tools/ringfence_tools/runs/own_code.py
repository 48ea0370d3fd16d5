"""Adapters, sections and policies that a user has written: in a Python file, a module, or an installed plug-in."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ringfence.adapters.loop import LoopAdapter
from ringfence.errors import PromptValidationError
from ringfence.failures import describe_error, place_in
from ringfence.prompt.section import Section
from ringfence.runtime.policy import Policy, check_policy
from ringfence.runtime.tool import Tool
from ringfence.session.session import Session
from ringfence_tools.printable import why
from ringfence_tools.runs.agent_run import MakeSection
from ringfence_tools.runs.plug_ins import describe_plug_ins, plug_ins
from ringfence_tools.runs.spec_error import SpecError

_MODEL, _SECTION, _POLICY = "--model", "--section", "--policy"
_GROUPS = {_MODEL: "ringfence.models", _SECTION: "ringfence.sections", _POLICY: "ringfence.policies"}
_WANTED_MODEL = "it is FILE.py:NAME or MODULE:NAME, of a LoopAdapter or a function that returns one"
_WANTED_SECTION = "it is FILE.py:NAME or MODULE:NAME, of a section or a function from a session to one"
_WANTED_POLICY = "it is FILE.py:NAME, of a policy"


def adapter_of(spec: str, directory: Path, stack: ExitStack) -> LoopAdapter:
    """Return the adapter that a SPEC names. ``stack`` closes it, if it is a context manager. Raises SpecError."""
    found = _load(spec, directory, _WANTED_MODEL, _MODEL)
    try:
        made = found() if callable(found) else found
        if isinstance(made, LoopAdapter):
            if isinstance(made, AbstractContextManager):
                stack.enter_context(cast("AbstractContextManager[object]", made))
            return made
    except (Exception, SystemExit) as error:
        raise _bad(f"{spec!r} makes no adapter: {_describe_failure(error)}", _MODEL) from error
    what = "has no such name" if found is None else f"gives a {type(made).__name__}"
    raise _bad(f"{spec!r}: it {what}, and a LoopAdapter, or a function that returns one, is wanted", _MODEL)


def sections_of(specs: Sequence[str], directory: Path) -> tuple[MakeSection, ...]:
    """Return the functions that make the sections of the SPECs for the session of a run.

    Raises SpecError if there is no such section, a module cannot be imported, or the agent could change its file.
    """
    return tuple(_section_of(spec, directory) for spec in specs)


def policy_of(spec: str, directory: Path) -> Policy:
    """Return the policy that FILE.py:NAME, or the name of a plug-in, names. Raises SpecError if there is none."""
    found = _load(spec, directory, _WANTED_POLICY, _POLICY)
    if found is None:
        raise _bad(f"{spec!r}: it has no such name", _POLICY)
    place, _, name = spec.rpartition(":")
    if not place and callable(found):  # a plug-in is code that is meant to be called
        found = _made(found, spec)
    elif isinstance(found, type) or inspect.isroutine(found):
        kind = "class" if isinstance(found, type) else "function"
        how = f"put `policy = {name}()` into {place}, and name {place}:policy"
        raise _bad(f"{spec!r} is a {kind}, and a policy is wanted: {how}", _POLICY)
    try:
        check_policy(found, os.path.basename(place) or spec)
    except (PromptValidationError, TypeError, ValueError) as error:
        raise _bad(f"{spec!r}: {error}{_line_of(found)}", _POLICY) from None
    return cast("Policy", found)


def _made(function: Callable[[], object], spec: str) -> object:
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise _bad(f"{spec!r} makes no policy: {_describe_failure(error)}", _POLICY) from error


def _line_of(found: object) -> str:
    try:
        return f" (its class is at line {inspect.getsourcelines(type(found))[1]})"
    except (OSError, TypeError):  # a built-in type
        return ""


def _load(spec: str, directory: Path, wanted: str, option: str) -> object:
    """Return what a SPEC names: FILE.py:NAME, MODULE:NAME or a plug-in. None if the module has no such name."""
    if ":" not in spec:
        place, name = _of_plug_in(spec, directory, wanted, option)
    else:
        place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise _bad(f"{spec!r}: {wanted}", option)
    try:
        module = (
            _of_file(Path(place), directory, option) if place.endswith(".py") else _of_name(place, directory, option)
        )
        return getattr(module, name, None)
    except SpecError:
        raise
    except (Exception, SystemExit) as error:  # a program, say, that is not meant to be imported
        raise _bad(f"{place} cannot be imported: {_describe_failure(error, place)}", option) from error


def _of_plug_in(name: str, directory: Path, wanted: str, option: str) -> tuple[str, str]:
    """Return the module of a plug-in, and the name in it. Raises SpecError."""
    found = plug_ins(_GROUPS[option], directory)
    if name not in found:
        kind = option.removeprefix("--")
        raise _bad(f"there is no {kind} {name!r}: {wanted}, or {describe_plug_ins(found)}", option)
    place, _, attribute = found[name].partition(":")
    return place, attribute


def _section_of(spec: str, directory: Path) -> MakeSection:
    found = _load(spec, directory, _WANTED_SECTION, _SECTION)
    if isinstance(found, Section):
        section = cast("Section[Any]", found)
        return lambda session: section
    if not callable(found) and not isinstance(found, Tool):
        what = "has no such name" if found is None else f"has a {type(found).__name__} there"
        raise _bad(f"{spec!r}: it {what}, and a section, or a function from a session to one, is wanted")
    if isinstance(found, Tool) or (inspect.isfunction(found) and "context" in inspect.signature(found).parameters):
        raise _bad(f"{spec!r} is a tool: put it in a section, such as ToolsSection(title=..., tools=[Tool.wrap(...)])")
    function = cast("Callable[[Session], object]", found)

    def made(session: Session) -> Section[Any]:
        try:
            section = function(session)
        except (Exception, SystemExit) as error:
            raise _bad(f"{spec!r} makes no section: {_describe_failure(error)}") from error
        if not isinstance(section, Section):
            raise _bad(f"{spec!r}: it made a {type(section).__name__}, and no section")
        return cast("Section[Any]", section)

    return made


def _of_file(file: Path, directory: Path, option: str) -> ModuleType:
    real = os.path.realpath(file)
    _refuse_in(directory, option, os.path.abspath(file), real)
    try:
        with open(real, "rb"):
            pass
    except OSError as error:
        raise _bad(f"{file} cannot be read: {why(error)}", option) from None
    # A name that no other module has: dataclasses and others look their module up by it.
    name = f"user_code_{sha256(real.encode(errors='surrogateescape')).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    found = spec_from_file_location(name, real)
    assert found is not None
    assert found.loader is not None
    module = sys.modules[name] = module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _of_name(name: str, directory: Path, option: str) -> ModuleType:
    names = name.split(".")
    for end in range(1, len(names) + 1):
        found = find_spec(".".join(names[:end]))  # which imports what is above it, that has passed, and not itself
        if found is None:
            raise _bad(
                f"there is no module {'.'.join(names[:end])}: install its package, or name a file, FILE.py:NAME", option
            )
        places = [*([found.origin] if found.origin else []), *(found.submodule_search_locations or [])]
        _refuse_in(directory, option, *places, *map(os.path.realpath, places))
    return import_module(name)


def _refuse_in(directory: Path, option: str, *places: str) -> None:
    root = os.path.realpath(directory)
    for place in places:
        if Path(place).is_relative_to(root):
            raise _bad(
                f"{place} is inside of the workspace, where the agent could change it: keep it elsewhere", option
            )


def _describe_failure(error: BaseException, file: str = "") -> str:
    if own := place_in(error, os.path.realpath(file)):
        return f"{describe_error(error)} ({own})"
    if isinstance(error, SyntaxError):  # which says where
        return describe_error(error)
    *_, last = traceback.extract_tb(error.__traceback__)
    return f"{describe_error(error)} ({last.filename}, line {last.lineno})"


def _bad(message: str, option: str = _SECTION) -> SpecError:
    return SpecError(option, message)
