"""Generic classes whose instances know, from ``__init__`` on, what their class was subscripted with."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

UNDECLARED: Any = object()

_specialisations: WeakValueDictionary[Hashable, type] = WeakValueDictionary()
"""By class and arguments; weak, so that the classes of a caller's module can be collected."""


def specialise(cls: type, name: str, **attributes: Hashable) -> type:
    """The subclass ``cls[name]`` with these class attributes: the same one for the same attributes."""
    key = (cls, *attributes.items())
    found = _specialisations.get(key)
    if found is None:
        namespace = {**attributes, "__module__": cls.__module__, "__doc__": cls.__doc__}
        found = _specialisations.setdefault(key, type(f"{cls.__name__}[{name}]", (cls,), namespace))
    return found


class TypeArgument:
    """Remembers what a generic class was subscripted with: ``type_argument`` of ``MarkdownSection[Params]`` is Params.

    The subscripted class is a subclass at run time. An alias of typing would set the argument only after ``__init__``,
    which needs it.
    """

    type_argument: ClassVar[Any] = UNDECLARED

    if not TYPE_CHECKING:

        def __class_getitem__(cls, item: Any) -> Any:
            if cls.type_argument is UNDECLARED and not _is_variable(item):
                return specialise(cls, getattr(item, "__name__", str(item)), type_argument=item)
            return super().__class_getitem__(item)


def _is_variable(item: Any) -> bool:
    return not isinstance(item, type) and (hasattr(item, "__bound__") or bool(getattr(item, "__parameters__", ())))
