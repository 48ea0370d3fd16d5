"""Patterns of paths: which paths a list of globs covers."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

from ringfence.errors import PromptValidationError
from ringfence.filesystem.paths import directories_above
from ringfence.filesystem.search import ALTERNATIVES, path_filter

Matches = Callable[[str], bool]
_CLASS = re.compile(r"(?<!\\)\[[!^]?(\]?[^\]]*)\]")
_RANGE = re.compile(r"([^\\])-([^\\])")


def folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def covering(patterns: Iterable[str]) -> Matches:
    """Return a test of a path: does it, or a directory above it, match one of the patterns?

    Raises:
        PromptValidationError: no path can match a pattern, so it would protect nothing.
    """
    return _covering([_checked(pattern) for pattern in patterns])


def _covering(patterns: Iterable[str]) -> Matches:
    tests = [test for pattern in patterns for test in _tests(pattern)]

    def covers(path: str) -> bool:
        return bool(tests) and any(test(place) for place in (path, *directories_above(path)) for test in tests)

    return covers


def covering_any_case(patterns: Sequence[str]) -> Matches:
    """`covering`, whatever the case and the accents; also as it is, since ``[!a-z]`` and ``?`` may mean less then."""
    covers, covers_folded = covering(patterns), _covering([folded(pattern) for pattern in patterns])
    return lambda path: covers(path) or covers_folded(folded(path))


def each_name(patterns: Iterable[str], *, besides: Iterable[str]) -> Matches:
    """`covering`, but for names that are among ``besides``."""
    covered, spared = covering(patterns), [path_filter(pattern) for pattern in besides]

    def covers(path: str) -> bool:
        names = path.split("/")
        kept = "/".join("-" if any(one(name) for one in spared) else name for name in names)
        return covered(kept)

    return covers


def _checked(pattern: str) -> str:
    if ALTERNATIVES.search(pattern) is not None:  # it would match nothing, and so deny nothing
        message = f"braces are not expanded in {pattern!r}: give each alternative a pattern of its own"
        raise PromptValidationError(f"{message} (a brace itself is \\{{)", placeholder=pattern)
    if ".." in pattern.split("/"):
        message = f"{pattern!r} is from the root of the workspace, so it cannot have '..'"
        raise PromptValidationError(message, placeholder=pattern)
    if pattern != pattern.strip():
        message = f"{pattern!r} begins or ends with a blank: leave it out (a blank itself is [ ])"
        raise PromptValidationError(message, placeholder=pattern)
    for found in _CLASS.finditer(pattern):
        if (empty := next((one for one in _RANGE.findall(found[1]) if one[0] > one[1]), None)) is not None:
            first, last = empty
            message = f"no character is in the range {first}-{last} of {pattern!r}: write {last}-{first}"
            raise PromptValidationError(message, placeholder=pattern)
    return pattern


def _tests(pattern: str) -> Iterator[Matches]:
    try:
        yield path_filter(pattern)
        if pattern.endswith("/**") and pattern.strip("/*"):
            yield path_filter(f"/{pattern.removesuffix('/**')}")
    except ValueError as error:
        raise PromptValidationError(str(error), placeholder=pattern) from None
