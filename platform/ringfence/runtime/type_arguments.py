"""Generic classes whose instances know, from ``__init__`` on, what their class was subscripted with."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any


class _Subscripted(types.GenericAlias):
    """``Section[Params]``. An alias of typing would set the arguments only after ``__init__``, which needs them."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        origin: Any = self.__origin__
        made = origin.__new__(origin)
        object.__setattr__(made, "type_arguments", self.__args__)
        made.__init__(*args, **options)
        return made


class TypeArguments:
    """Remembers what a generic class, or the base of a subclass, was subscripted with."""

    type_arguments: tuple[Any, ...] | None = None
    """None without a subscript. Of ``Section[None]`` it is ``(NoneType,)``."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in vars(cls).get("__orig_bases__", ()):
            if isinstance(base, _Subscripted):
                cls.type_arguments = base.__args__

    if not TYPE_CHECKING:

        def __class_getitem__(cls, item: Any) -> Any:
            alias = super().__class_getitem__(item)
            return alias if alias.__parameters__ else _Subscripted(cls, alias.__args__)
