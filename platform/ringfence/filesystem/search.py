"""Glob and grep for any filesystem. The caller passes the directories, or the bytes of files in the order of paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib import import_module
from itertools import takewhile
from operator import attrgetter, methodcaller
from time import perf_counter
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from ringfence.escapes import escape_path
from ringfence.filesystem.encodings import BEGINNING_BYTES, as_utf8
from ringfence.filesystem.paths import one_encoding
from ringfence.filesystem.protocol import MAX_GREP_MATCHES, GlobMatch, GrepMatch

DirectoryT = TypeVar("DirectoryT")

Child: TypeAlias = tuple[str, GlobMatch, DirectoryT | None]
"""A name in a directory, its match if the pattern matches, and its directory if it is one. A link is none."""

MAX_LINE_CHARACTERS = 500
"""The longest line that a `GrepMatch` contains. It has this many characters of a longer line, around the match."""
MAX_SEARCH_SECONDS = 60.0
"""The limit of the time for matching a pattern, without the time for reading files."""
AT_ONCE = 1 << 30
"""The limit of one call of RE2: the number of bytes times the number of instructions of the pattern.

If a pattern has too many states to cache, RE2 runs all instructions for each byte. One instruction takes 2 ns.
"""
MAX_LINE_PIECES = 30
"""The limit of pieces of a line. A longer line could exceed the time limit, and RE2 cannot be interrupted."""
NARROWER = "look in fewer files (path, glob), or for a pattern that repeats less"
ALTERNATIVES = re.compile(r"(?<!\\)\{[^{}]*,[^{}]*\}")
"""Matches the alternatives in braces of other glob dialects, which have no special meaning here."""


class Directories(Protocol[DirectoryT]):
    """The directories that `glob_below` walks. A prefix is a directory's path with a "/", or "" for the root."""

    def children(self, directory: DirectoryT, prefix: str) -> Iterable[Child[DirectoryT]]: ...

    def child(self, directory: DirectoryT, prefix: str, name: str) -> Child[DirectoryT] | None: ...


_Test: TypeAlias = Callable[[str], object]


class GlobPattern:
    """A glob pattern.

    ``*``, ``?`` and ``[...]`` (``[!...]``) match within a name. ``**`` as a whole segment matches any directories. Case
    counts. A leading dot, braces and parentheses have no special meaning. A backslash escapes the next character. A
    "/" at the end restricts the matches to directories.

    Raises:
        ValueError: The pattern is empty, or has a ".." or a character that no name can have.
    """

    __slots__ = ("directories_only", "ending", "literals", "tests")

    def __init__(self, pattern: str) -> None:
        names = [name for name in one_encoding(pattern, "glob pattern").split("/") if name not in ("", ".")]
        if not names:
            raise ValueError(f"a glob pattern needs a name to match, {pattern!r} has none")
        if ".." in names:
            raise ValueError(f"a glob pattern cannot have '..': {pattern!r}; give the directory as path instead")
        if names[-1] == "**":
            names.append("*")
        self.directories_only: Final = pattern.endswith("/")
        self.ending: Final = _ending(names[-1])
        """The suffix of the last name, if the test of that name is only a suffix."""
        self.literals: Final = tuple(None if _MAGIC.search(name) else name for name in names)
        """The name of each segment without wildcards. None for the other segments."""
        self.tests: Final = tuple(None if name == "**" else _name_test(name) for name in names)
        """A test of a name for each segment; None for ``**``."""

    @property
    def fixed(self) -> list[str]:
        """The directories that every match begins with."""
        return [name for name in takewhile(bool, self.literals[:-1]) if name]

    def matches(self, path: str) -> bool:
        """Whether a whole path, relative to where the pattern starts, matches."""
        names, tests = path.split("/"), self.tests
        at = place = 0
        retry: tuple[int, int] | None = None  # backtracking: the last "**" matches one name more
        while at < len(names):
            test = tests[place] if place < len(tests) else _no_name
            if test is None:
                place += 1
                retry = at, place
            elif test(names[at]):
                at, place = at + 1, place + 1
            elif retry is not None:
                at, place = retry = retry[0] + 1, retry[1]
            else:
                return False
        return place == len(tests)


def _no_name(name: str) -> bool:
    return False


_MAGIC = re.compile(r"[*?\[\\]")


def _name_test(pattern: str) -> _Test:
    """Return the test of a name for one segment. It runs in C if possible, since a search tests every name."""
    if not _MAGIC.search(pattern):
        return pattern.__eq__
    if (ending := _ending(pattern)) is not None:
        return methodcaller("endswith", ending)
    from wcmatch import fnmatch  # imported late, since the import is slow

    translated, _ = fnmatch.translate(pattern, flags=fnmatch.DOTMATCH | fnmatch.CASE | fnmatch.FORCEUNIX)
    # `fullmatch`: a "$" would also match before a final newline of a name.
    return re.compile(translated[0]).fullmatch


def _ending(pattern: str) -> str | None:
    return pattern[1:] if pattern[0] == "*" and not _MAGIC.search(pattern, 1) else None


compiled_glob = lru_cache(maxsize=256)(GlobPattern)


def path_filter(pattern: str) -> Callable[[str], bool]:
    """`pattern` as a filter of relative paths: without a "/" it is matched against their last names.

    Raises:
        ValueError: See `GlobPattern`.
    """
    matches = compiled_glob(pattern).matches
    return matches if "/" in pattern else lambda path: matches(path.rpartition("/")[2])


def glob_below(pattern: str, directories: Directories[DirectoryT], top: DirectoryT, prefix: str) -> list[GlobMatch]:
    """Return the matches below `top`, sorted by path. Links can match and are not followed."""
    glob = compiled_glob(pattern)
    tests, last, below = glob.tests, len(glob.tests) - 1, len(prefix)
    found: list[GlobMatch] = []
    waiting = [(top, prefix, 0)]
    while waiting:
        directory, prefix, depth = waiting.pop()
        literal, test = glob.literals[depth], tests[depth]
        if literal is None:
            children = directories.children(directory, prefix)
        else:
            child = directories.child(directory, prefix, literal)
            children = () if child is None else (child,)
        if test is not None and depth < last:
            waiting += [
                (sub, f"{match.path}/", depth + 1) for name, match, sub in children if sub is not None and test(name)
            ]
            continue
        if test is None:  # every name below a "**" is tested
            waiting += [(sub, f"{match.path}/", depth) for _, match, sub in children if sub is not None]
            test = tests[last]
        if glob.directories_only:
            children = [child for child in children if child[2] is not None]
        found += _matching(children, glob, None if depth < last - 1 else test, below)
    found.sort(key=attrgetter("path"))
    return found


def _matching(children: Iterable[Child[Any]], glob: GlobPattern, test: _Test | None, below: int) -> Sequence[GlobMatch]:
    """The children that match. With a ``test`` their names are matched, else their paths from the offset ``below``."""
    if test is None:
        return [match for _, match, _ in children if glob.matches(match.path[below:])]
    if (ending := glob.ending) is not None:  # equivalent to `test` in half the time
        return [match for name, match, _ in children if name.endswith(ending)]
    return [match for name, match, _ in children if test(name)]


_Find: TypeAlias = Callable[[bytes, int], tuple[int, int] | None]
_REGEX_MAGIC = re.compile(r"[\\.^$|?*+()\[\]{}]")
LITERALLY = "literal=True looks for the text as it is"
"""The advice to a program with a pattern that is no regular expression."""
# Matches a pattern with a line end outside of a character class. It could never match a line.
_ESCAPED_LINE_END = re.compile(r"(?:[^\\\[]|\\[^n]|\[\^?+\]?+(?:\[:\w+:\]|\\.|[^\]\\])*+\])*+\\n", re.DOTALL)


def grep_files(
    files: Iterable[tuple[str, bytes]],
    pattern: str,
    *,
    literal: bool = False,
    max_matches: int = MAX_GREP_MATCHES,
    clock: Callable[[], float] = perf_counter,
    at_once: int = AT_ONCE,
) -> list[GrepMatch]:
    """Return the first match of every matching line of `files`. The search ends after ``max_matches`` matches.

    Lines have no line ends. ``line_content`` of a line of more than MAX_LINE_CHARACTERS is the part around the match.
    UTF-16 and UTF-32 are decoded. Other bytes that are not UTF-8 are matched as U+FFFD.

    Raises:
        ValueError: The pattern does not parse, is empty or spans lines, or ``max_matches`` is negative.
        TimeoutError: The search takes more than MAX_SEARCH_SECONDS, or could take them for one line.
    """
    if max_matches < 0:
        raise ValueError(f"max_matches cannot be negative: {max_matches}")
    _check_one_line(pattern, literal)
    needle = _encoded(pattern) if literal or not _REGEX_MAGIC.search(pattern) else None
    find = _regex_finder(pattern, clock, at_once) if needle is None else _literal_finder(needle)
    found: list[GrepMatch] = []
    if max_matches == 0:
        return found
    for path, content in files:
        content, encoding = as_utf8(content)
        if needle is not None and content.find(needle) == -1:  # twice as fast as `in`
            continue
        if encoding is None and content.find(0, 0, BEGINNING_BYTES) != -1:
            continue
        try:
            _grep_text(path, _as_text(content), find, found, max_matches)
        except TimeoutError as error:
            raise TimeoutError(f"{error} (in {escape_path(path)}): {NARROWER}") from None
        if len(found) == max_matches:
            break
    return found


def _grep_text(path: str, content: bytes, find: _Find, found: list[GrepMatch], max_matches: int) -> None:
    line_number = 1
    at = counted = 0
    while at < len(content) and len(found) < max_matches:
        span = find(content, at)
        if span is None or (span[0] == len(content) and content.endswith(b"\n")):
            return  # an empty match after the last line's end is on no line
        start = content.rfind(b"\n", counted, span[0]) + 1 or counted
        end = content.find(b"\n", span[0])
        end = len(content) if end == -1 else end
        line_number += content.count(b"\n", counted, start)
        found.append(_grep_match(path, line_number, content[start:end], span[0] - start, span[1] - start))
        at = end + 1
        counted = start


def _grep_match(path: str, line_number: int, line: bytes, start: int, end: int) -> GrepMatch:
    text = line.decode()
    if len(text) != len(line):
        # Incomplete characters are ignored: an empty match may be within a character.
        start, end = len(line[:start].decode(errors="ignore")), len(line[:end].decode(errors="ignore"))
    if len(text) > MAX_LINE_CHARACTERS:
        room = max(0, MAX_LINE_CHARACTERS - (end - start)) // 2
        cut = min(max(0, start - room), len(text) - MAX_LINE_CHARACTERS)
        text = text[cut : cut + MAX_LINE_CHARACTERS]
        start, end = start - cut, min(end - cut, MAX_LINE_CHARACTERS)
    return GrepMatch(path, line_number, text, start, end)


def _as_text(content: bytes) -> bytes:
    """Convert bytes to valid UTF-8 with \\n as line ends. "$" then matches before a \\r\\n, and "." one character."""
    if b"\r" in content:
        content = content.replace(b"\r\n", b"\n")
    if content.isascii():
        return content
    try:
        content.decode()
    except UnicodeDecodeError:
        return content.decode(errors="replace").encode()
    return content.removeprefix(b"\xef\xbb\xbf")


def _literal_finder(needle: bytes) -> _Find:
    def find(content: bytes, at: int) -> tuple[int, int] | None:
        start = content.find(needle, at)
        return None if start == -1 else (start, start + len(needle))

    return find


def _regex_finder(pattern: str, clock: Callable[[], float], at_once: int) -> _Find:
    """Return a search with RE2. One call of RE2 takes at most two seconds, since it cannot be interrupted."""
    compiled = _compiled(_encoded(pattern))
    piece = max(1, at_once // compiled.programsize)
    spent = 0.0

    def find(content: bytes, at: int) -> tuple[int, int] | None:
        nonlocal spent
        while True:
            end = len(content)
            if end - at > piece:
                end = content.rfind(b"\n", at, at + piece) + 1 or content.find(b"\n", at + piece) + 1 or end
                if end - at > MAX_LINE_PIECES * piece:
                    raise TimeoutError(f"the pattern is too large for a line of {end - at:,} bytes")
            if spent > MAX_SEARCH_SECONDS:
                raise TimeoutError(f"the search was given up after {MAX_SEARCH_SECONDS:.0f} seconds")
            began = clock()
            match = compiled.search(content, at, end)
            spent += clock() - began
            # An empty match at the end of a piece belongs to the next line.
            if match is not None and (match.start() < end or end == len(content)):
                return match.start(), match.end()
            if end == len(content):
                return None
            at = end

    return find


def _compiled(pattern: bytes) -> Any:
    re2: Any = import_module("re2")  # imported late, since few programs search
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.never_nl = True  # [^x] and \s must not match a line end
    try:
        return re2.compile(b"(?m)" + pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace").replace(": (?m)", ": ", 1)  # without the added flag
        raise ValueError(
            f"not a regular expression of RE2's dialect: {reason} (it has no backreferences and no lookaround, "
            f"and repeats at most 1,000 times; {LITERALLY})"
        ) from None


def _check_one_line(pattern: str, literal: bool) -> None:
    if not pattern:
        raise ValueError("the pattern is empty")
    if "\n" in pattern or (not literal and _ESCAPED_LINE_END.match(pattern)):
        raise ValueError("a match lies within one line, so the pattern cannot have a line end; '$' stands before one")


def _encoded(pattern: str) -> bytes:
    try:
        return pattern.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the pattern is not text, it has a lone surrogate: {pattern!r}") from None
