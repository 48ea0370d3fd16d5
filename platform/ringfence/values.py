"""Whether values of a type can be changed in place."""

from __future__ import annotations

import types
from collections import deque
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from uuid import UUID

_CHANGEABLE = (list, dict, set, bytearray, deque)
_FIXED = (str, int, float, complex, bool, bytes, type(None), date, time, timedelta, Decimal, PurePath, UUID, Enum)


def can_change(kind: Any, *, unknown: bool, _within: tuple[object, ...] = ()) -> bool:
    """Whether values of an annotation can be changed in place, in whatever depth; ``unknown`` where it does not say
    so, as ``Mapping`` and ``Any`` do not."""
    if kind in _within:  # a type within itself adds nothing
        return False
    within, origin, arguments = (*_within, kind), get_origin(kind), get_args(kind)
    if kind is None or origin is Literal:
        return False
    if origin is Annotated:
        return can_change(arguments[0], unknown=unknown, _within=within)
    if origin in (tuple, frozenset, Union, types.UnionType):
        parts = [argument for argument in arguments if argument is not Ellipsis]
        return any(can_change(part, unknown=unknown, _within=within) for part in parts)
    plain = origin or kind
    if not isinstance(plain, type):
        return unknown
    if is_dataclass(plain):
        known: Any = plain
        if not known.__dataclass_params__.frozen:
            return True
        try:
            hints = get_type_hints(plain, include_extras=True)
        except Exception:  # a name that is not known where the class is
            return unknown
        return any(can_change(hints[one.name], unknown=unknown, _within=within) for one in fields(known))
    if issubclass(plain, _CHANGEABLE):
        return True
    return unknown and not issubclass(plain, _FIXED)
