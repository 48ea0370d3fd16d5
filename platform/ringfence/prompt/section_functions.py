"""The functions that a section asks: whether it is there, and how much of it is shown."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from typing_extensions import TypeVar

from ringfence.errors import SectionVisibility

if TYPE_CHECKING:
    from ringfence.runtime.session import Session


ParamsT = TypeVar("ParamsT", default=None)
AskingT = TypeVar("AskingT", contravariant=True)
AnswerT = TypeVar("AnswerT", covariant=True)


class OfSession(Protocol[AnswerT]):
    def __call__(self, *, session: Session | None) -> AnswerT: ...


class OfParamsAndSession(Protocol[AskingT, AnswerT]):
    def __call__(self, params: AskingT, /, *, session: Session | None) -> AnswerT: ...


Predicate: TypeAlias = (
    Callable[[], bool] | Callable[[ParamsT], bool] | OfSession[bool] | OfParamsAndSession[ParamsT, bool]
)
Selector: TypeAlias = (
    Callable[[], SectionVisibility]
    | Callable[[ParamsT], SectionVisibility]
    | OfSession[SectionVisibility]
    | OfParamsAndSession[ParamsT, SectionVisibility]
)


class SectionFunction:
    """An enabled predicate or a visibility selector, in one of the shapes ``()``, ``(params)``, ``(*, session)`` and
    ``(params, *, session)``."""

    def __init__(self, function: Callable[..., Any], role: str) -> None:
        """Raises TypeError for anything that cannot be called in one of these shapes."""
        if not callable(function):
            raise TypeError(f"{role} is a function of (params, *, session) or fewer of these, not {function!r}")
        try:
            signature = inspect.signature(function)
            parameters = signature.parameters.values()
            self.takes_session = any(_takes_session(parameter) for parameter in parameters)
            self.takes_params = any(_takes_params(parameter) for parameter in parameters)
            signature.bind(*self._positional(None), **self._keywords(None))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{role} is a function of (params, *, session) or fewer of these: {error}") from None
        self._function = function

    def __call__(self, params: object, session: Session | None) -> Any:
        return self._function(*self._positional(params), **self._keywords(session))

    def _positional(self, params: object) -> tuple[object, ...]:
        return (params,) if self.takes_params else ()

    def _keywords(self, session: Session | None) -> dict[str, Any]:
        return {"session": session} if self.takes_session else {}


def _takes_session(parameter: inspect.Parameter) -> bool:
    if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        return parameter.name == "session"
    return parameter.kind is parameter.VAR_KEYWORD


def _takes_params(parameter: inspect.Parameter) -> bool:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return True
    if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) or _takes_session(parameter):
        return False
    # A default, as in `lambda on=on: on`, is how a loop variable is kept: such a parameter waits for nothing.
    return parameter.default is parameter.empty or parameter.name == "params"
