"""What a program's author gives is looked at where it is given: a wrong value is refused at once, by its name."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache, wraps
from itertools import chain, repeat
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

MadeT = TypeVar("MadeT", bound=Callable[..., Any])

WORDS: Mapping[object, str] = {
    bool: "True or False",
    float: "a number",
    int: "a whole number",
    str: "a text",
    type(None): "None",
    type: "a class",
    Callable: "a function",
}
HOW_MADE: Mapping[str, str] = {
    "Budget": "Budget(max_total_tokens=...), say",
    "BudgetTracker": "BudgetTracker(budget)",
    "CompositeSnapshot": "create_snapshot(session, prompt.resources) makes one",
    "Deadline": "Deadline.after(seconds) makes one",
    "Filesystem": "InMemoryFilesystem(), or Workspace.open(path).filesystem",
    "Heartbeat": "Heartbeat()",
    "LiveResources": "prompt.resources, within its block",
    "ResourceRegistry": "ResourceRegistry.build({...}) makes one",
    "Session": "Session()",
    "Snapshot": "Snapshot.from_json(text, types=session.slice_types) makes one of JSON",
    "datetime": "datetime.now(UTC), or Deadline.after(seconds)",
}


def checked(made: MadeT) -> MadeT:
    """A class or function whose arguments are compared with their annotations, before it looks at them itself.

    A TypeError, or a ValueError for another text than one of those that there are, names the first that does not fit.
    Type variables, names that only type checkers know, and protocols that cannot be checked say nothing.
    """
    if isinstance(made, type):
        known: Any = made
        known.__init__ = _checked(known.__init__, made)
        return known
    return typing.cast("MadeT", _checked(made, made))


def _checked(function: Callable[..., Any], owner: Any) -> Callable[..., Any]:
    @wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        fits, kinds, positional, rest = _parameters(function, owner.__module__)
        for name, value in (*zip(chain(positional, repeat(rest)), values, strict=False), *named.items()):
            if name in fits and not fits[name](value):
                said = _said(value, kinds[name])
                wrong = ValueError if isinstance(value, str) and said.startswith("is one of") else TypeError
                raise wrong(f"{owner.__qualname__}: {name} {said}")
        return function(*values, **named)

    return call


Fits = Callable[[Any], bool]
Parameters = tuple[Mapping[str, Fits], Mapping[str, Any], Sequence[str], str]


@cache
def _parameters(function: Callable[..., Any], module: str) -> Parameters:
    """What fits the parameters, where anything can be said of it, and their annotations; the names of those that are
    given by their place, and of ``*rest``."""
    parameters = inspect.signature(function).parameters.values()
    kinds = {one.name: _kind(one.annotation, module) for one in parameters}
    fits = {name: fit for name, kind in kinds.items() if (fit := _fits(kind)) is not _anything}
    positional = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return fits, kinds, positional, next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), "")


def _kind(annotation: object, module: str) -> Any:
    if not isinstance(annotation, str):
        return Any if annotation is inspect.Parameter.empty else annotation
    try:
        return eval(annotation, vars(sys.modules[module]))  # noqa: S307  # as `get_type_hints` does, but one by one
    except (NameError, AttributeError, TypeError):
        return Any


def _anything(value: Any) -> bool:
    return True


def _fits(kind: Any) -> Fits:
    """What says whether a value is of this kind."""
    plain, kinds = _plain(kind), _kinds(kind)
    if len(kinds) > 1:
        several = [_fits(one) for one in kinds]
        return _anything if _anything in several else lambda value: any(fits(value) for fits in several)
    if get_origin(kind) is Literal:
        return lambda value: value in get_args(kind)
    if not _says_something(plain):
        return _anything
    if plain in (Callable, type):
        return lambda value: isinstance(value, plain)
    if _is_of_several(kind):
        each = [_fits(one) for one in get_args(kind) if one is not Ellipsis]
        return lambda values: (
            _are_several(values, plain)
            and all(all(map(fits, items)) for fits, items in zip(each, _items(values), strict=False))
        )
    wanted = (int, float) if plain is float else plain
    # A class has all that a protocol asks for, and True is a number.
    unwanted = type if plain is bool else (type, bool)
    return lambda value: isinstance(value, wanted) and not isinstance(value, unwanted)


def _are_several(values: object, plain: type[Any]) -> bool:
    if type(values) in (tuple, list):
        return not issubclass(plain, Mapping)
    if isinstance(values, (str, bytes, type)) or not isinstance(values, Iterable):
        return False
    return isinstance(values, Mapping) == issubclass(plain, Mapping)


def _items(values: Any) -> tuple[Iterable[Any], ...]:
    """What is in it, in the order of its annotation's arguments. What can be gone through only once is left alone."""
    if not isinstance(values, Collection):
        return ()
    return (values, values.values()) if isinstance(values, Mapping) else (values,)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


def _wrong_item(values: Any, kind: Any) -> tuple[Any, Any] | None:
    """The first that does not fit, and of what kind each is."""
    if not (_is_of_several(kind) and _are_several(values, _plain(kind))):
        return None
    each = ((item, one) for items, one in zip(_items(values), get_args(kind), strict=False) for item in items)
    return next(((item, one) for item, one in each if not _fits(one)(item)), None)


def _is_of_several(kind: Any) -> bool:
    arguments, plain = get_args(kind), _plain(kind)
    if not arguments or not isinstance(plain, type) or not issubclass(plain, Iterable):
        return False
    return plain is not tuple or arguments[-1] is Ellipsis


def _says_something(plain: Any) -> bool:
    if not isinstance(plain, type) or plain in (Any, object):
        return False
    return not getattr(plain, "_is_protocol", False) or getattr(plain, "_is_runtime_protocol", False)


def _kinds(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _plain(kind: Any) -> Any:
    """The class of an annotation, without its arguments; `Tool[P, R]` is a subclass that knows them."""
    plain: Any = get_origin(kind) or kind
    return plain.__base__ if isinstance(plain, type) and plain.__name__.endswith("]") else plain


def _said(value: Any, kind: Any) -> str:
    """What is wrong with `value`, in words that follow its name."""
    wrong = next(filter(None, (_wrong_item(value, one) for one in _kinds(kind))), None)
    if wrong is not None:
        return f"are each {_words(wrong[1])}, not {_shown(*wrong)}"
    return f"is {_words(kind)}, not {_shown(value, kind)}"


def _words(kind: Any) -> str:
    plain = _plain(kind)
    if len(_kinds(kind)) > 1:
        return " or ".join(dict.fromkeys(map(_words, _kinds(kind))))
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if plain in WORDS:
        return WORDS[plain]
    if _is_of_several(kind):
        return "a mapping" if issubclass(plain, Mapping) else "a list"
    name = getattr(plain, "__name__", str(plain))
    made = f" ({HOW_MADE[name]})" if name in HOW_MADE else ""
    if isinstance(plain, type) and issubclass(plain, Enum):
        made = f", such as {next(iter(plain))}"
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}{made}"


def _shown(value: Any, kind: Any) -> str:
    """`value`, and what was probably meant by it."""
    if isinstance(value, type):
        return f"the class {value.__name__}: write {value.__name__}(...)"
    if int in _kinds(kind) and hasattr(value, "__index__") and not isinstance(value, bool):
        return f"{value!r}: write int(...)"  # a number of NumPy's, say
    for one in filter(lambda one: _says_something(_plain(one)), _kinds(kind)):
        near = _plain(one).__name__.lower()  # where a Workspace is given, say, for its filesystem
        if hasattr(value, near) and _fits(one)(getattr(value, near)):
            return f"{value!r}: give its .{near}"
        if _is_of_several(one) and _fits(get_args(one)[0])(value):
            return f"{value!r}: put it in brackets"
    return repr(value)
