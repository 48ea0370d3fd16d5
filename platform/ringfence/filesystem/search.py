"""Glob and grep over any filesystem: the caller gives the directories and the bytes, in the order of their paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import takewhile
from operator import attrgetter, methodcaller
from time import perf_counter
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from ringfence.filesystem.paths import escape_path, one_encoding
from ringfence.filesystem.protocol import MAX_GREP_MATCHES, GlobMatch, GrepMatch

DirectoryT = TypeVar("DirectoryT")

Child: TypeAlias = tuple[str, GlobMatch, DirectoryT | None]
"""A name in a directory, its match if it matches, and the directory that it is (None for all else, links included)."""

MAX_LINE_CHARACTERS = 500
"""Of a longer line, a `GrepMatch` has this much around the match."""
BINARY_PREFIX_BYTES = 8192
"""A file with a NUL in so many first bytes is binary, as for git and ripgrep."""
MAX_SEARCH_SECONDS = 60.0
"""Of looking for a pattern, without the reading of files."""
AT_ONCE = 1 << 30
"""Bytes times the instructions of a pattern. Where a pattern has too many states to keep, RE2 goes through all of its
instructions for each byte, which takes 2 ns each."""
MAX_LINE_PIECES = 30
"""A longer line could take longer than a search may, and nothing could end that."""
NARROWER = "look in fewer files (path, glob), or for a pattern that repeats less"
ALTERNATIVES = re.compile(r"(?<!\\)\{[^{}]*,[^{}]*\}")
"""What other globs take for several patterns in one, and these take as it is."""


class Directories(Protocol[DirectoryT]):
    """What `glob_below` walks through; a prefix is the directory's path with a "/" after it, "" for the root."""

    def children(self, directory: DirectoryT, prefix: str) -> Iterable[Child[DirectoryT]]: ...

    def child(self, directory: DirectoryT, prefix: str, name: str) -> Child[DirectoryT] | None: ...


_Test: TypeAlias = Callable[[str], object]


class Glob:
    """A glob pattern, taken apart at its "/".

    A segment is a name as it is, a test for one name, or None for ``**``. Names have no "/" in them, so ``*`` cannot
    cross one.
    """

    __slots__ = ("after_fixed", "directories_only", "ending", "fixed", "segments")

    def __init__(self, pattern: str) -> None:
        names = [name for name in one_encoding(pattern, "glob pattern").split("/") if name not in ("", ".")]
        if not names:
            raise ValueError(f"a glob pattern needs a name to match, {pattern!r} has none")
        if ".." in names:
            raise ValueError(f"a glob pattern cannot have '..': {pattern!r}; give the directory as path instead")
        self.directories_only: Final = pattern.endswith("/")
        self.segments: Final = tuple(
            None if name == "**" else _segment(name)
            for place, name in enumerate(names)
            if name != "**" or place == 0 or names[place - 1] != "**"
        )
        self.ending: Final = _ending(names[-1])
        """Of the last names of all matches, where that is all they need."""
        last = len(self.segments) - 1
        literal = takewhile(lambda name: isinstance(name, str), self.segments[:last])
        self.fixed: Final = tuple(str(name) for name in literal)
        """The names that every match begins with, without the last name of a match."""
        self.after_fixed: Final = self._open({len(self.fixed)})

    def start(self) -> frozenset[int]:
        return self._open({0})

    def literal(self, at: frozenset[int]) -> str | None:
        """The one name that can match next, if there is only one."""
        segment = self.segments[min(at)]  # with several places the first is a "**", which it cannot leave behind
        return segment if isinstance(segment, str) else None

    def accepts(self, at: frozenset[int]) -> _Test | None:
        """A test for the names that complete a match, or None where no name can."""
        last = len(self.segments) - 1
        if last not in at:
            return None
        segment = self.segments[last]
        if segment is None:
            return _any_name
        return segment.__eq__ if isinstance(segment, str) else segment

    def ends_at(self, at: frozenset[int]) -> bool:
        return len(at) == 1 and len(self.segments) - 1 in at and self.segments[-1] is not None

    def below(self, at: frozenset[int], name: str) -> frozenset[int]:
        """Where a walk stands after it has gone down into `name`; empty if nothing below can match."""
        reached: set[int] = set()
        for place in at:
            segment = self.segments[place]
            if segment is None:
                reached.add(place)
            elif name == segment if isinstance(segment, str) else segment(name):
                reached.add(place + 1)
        return self._open(reached)

    def matches(self, path: str) -> bool:
        """Whether a whole path, relative to where the pattern starts, matches."""
        *above, name = path.split("/")
        at = self.start()
        for directory in above:
            at = self.below(at, directory)
        test = self.accepts(at)
        return test is not None and bool(test(name))

    def _open(self, places: set[int]) -> frozenset[int]:
        # "**" also stands for no directory at all; a place past the end is a match that can go no further down.
        here = {place for place in places if place < len(self.segments)}
        here |= {place + 1 for place in here if self.segments[place] is None and place + 1 < len(self.segments)}
        return frozenset(here)


def _any_name(name: str) -> bool:
    return True


_MAGIC = re.compile(r"[*?\[\\]")


def _segment(name: str) -> str | _Test:
    if not _MAGIC.search(name):
        return name
    if name == "*":
        return _any_name
    ending = _ending(name)
    if ending is not None:
        return methodcaller("endswith", ending)  # in C, where a function of our own takes twice as long
    from wcmatch import fnmatch  # here, since it takes longer to import than most programs take to need it

    translated, _ = fnmatch.translate(name, flags=fnmatch.DOTMATCH | fnmatch.CASE | fnmatch.FORCEUNIX)
    # fullmatch, since "$" also matches before a newline that ends a name.
    return re.compile(translated[0]).fullmatch


def _ending(name: str) -> str | None:
    """What a name ends with, if a segment asks for nothing else."""
    return name[1:] if name[0] == "*" and name != "**" and not _MAGIC.search(name, 1) else None


@lru_cache(maxsize=256)
def compiled_glob(pattern: str) -> Glob:
    """`pattern` ready to use.

    ``*``, ``?`` and ``[...]`` (``[!...]``) match within a name, ``**`` as a whole segment any directories; case
    counts, a leading dot is a character like any other, braces and parentheses too; a backslash takes the magic
    from what follows; a "/" at the end asks for directories.

    Raises:
        ValueError: nothing to match, "..", or what no name can have.
    """
    return Glob(pattern)


def path_filter(pattern: str) -> Callable[[str], bool]:
    """`pattern` as a filter of relative paths: without a "/" it is matched against their last names.

    Raises:
        ValueError: as `compiled_glob`.
    """
    compiled = compiled_glob(pattern)
    if "/" in pattern:
        return compiled.matches
    return lambda path: compiled.matches(path.rpartition("/")[2])


def glob_below(pattern: str, directories: Directories[DirectoryT], top: DirectoryT, prefix: str) -> list[GlobMatch]:
    """What matches below `top`, sorted by path; links are matched and not descended into."""
    glob = compiled_glob(pattern)
    found: list[GlobMatch] = []
    for name in glob.fixed:
        child = directories.child(top, prefix, name)
        if child is None or child[2] is None:
            return found
        top, prefix = child[2], f"{prefix}{name}/"
    waiting = [(top, prefix, glob.after_fixed)]
    while waiting:
        directory, prefix, at = waiting.pop()
        name = glob.literal(at)
        if name is None:
            children = directories.children(directory, prefix)
        else:
            child = directories.child(directory, prefix, name)
            children = () if child is None else (child,)
        accepted = glob.accepts(at)
        if accepted is not None:
            if glob.directories_only:
                found += [match for name, match, sub in children if sub is not None and accepted(name)]
            elif (ending := glob.ending) is not None:  # `accepted` says the same, and takes twice as long
                found += [match for name, match, _ in children if name.endswith(ending)]
            else:
                found += [match for name, match, _ in children if accepted(name)]
        if glob.ends_at(at):
            continue
        for name, match, subdirectory in children:
            if subdirectory is not None and (below := glob.below(at, name)):
                waiting.append((subdirectory, f"{match.path}/", below))
    found.sort(key=attrgetter("path"))
    return found


class _Match(Protocol):
    def start(self) -> int: ...

    def end(self) -> int: ...


_Search: TypeAlias = Callable[[bytes, int, int], _Match | None]
_Find: TypeAlias = Callable[[bytes, int], tuple[int, int] | None]
_REGEX_MAGIC = re.compile(r"[\\.^$|?*+()\[\]{}]")
LITERALLY = "literal=True looks for the text as it is"
"""What a program is advised to, whose pattern is no regular expression."""
# A line end asked for outside of a character class, where the answer could only be: never.
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
    """The first match of every matching line of `files`, which are taken one by one until ``max_matches`` are found.

    As many as ``max_matches`` means that there may be more. Lines come without their ends; where one is longer than
    MAX_LINE_CHARACTERS, ``line_content`` is the part around the match. Bytes that are not UTF-8 count as U+FFFD.

    Raises:
        ValueError: the pattern does not parse, is empty or spans lines; ``max_matches`` is negative.
        TimeoutError: it takes, or could take for one line, more than MAX_SEARCH_SECONDS.
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
        if needle is not None and content.find(needle) == -1:  # `in` takes twice as long
            continue
        if content.find(0, 0, BINARY_PREFIX_BYTES) != -1:
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
            return  # the second: an empty match after the last line's end is on no line
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
        # Ignoring what does not decode: a match of no length may stand within a character.
        start, end = len(line[:start].decode(errors="ignore")), len(line[:end].decode(errors="ignore"))
    if len(text) > MAX_LINE_CHARACTERS:
        room = max(0, MAX_LINE_CHARACTERS - (end - start)) // 2
        cut = min(max(0, start - room), len(text) - MAX_LINE_CHARACTERS)
        text = text[cut : cut + MAX_LINE_CHARACTERS]
        start, end = start - cut, min(end - cut, MAX_LINE_CHARACTERS)
    return GrepMatch(path, line_number, text, start, end)


def _as_text(content: bytes) -> bytes:
    """UTF-8 with lines ending in \\n, as patterns expect: "$" stands before a \\r\\n, and "." is one character."""
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
    size = len(needle)

    def find(content: bytes, at: int) -> tuple[int, int] | None:
        start = content.find(needle, at)
        return None if start == -1 else (start, start + size)

    return find


def _regex_finder(pattern: str, clock: Callable[[], float], at_once: int) -> _Find:
    """It looks at no more lines at once than take two seconds at worst, which nothing could end."""
    compiled = _compiled(_encoded(pattern))
    search: _Search = compiled.search
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
            match = search(content, at, end)
            spent += clock() - began
            # What is empty at the end of a piece is in the next line.
            if match is not None and (match.start() < end or end == len(content)):
                return match.start(), match.end()
            if end == len(content):
                return None
            at = end

    return find


def _re2() -> Any:
    import re2  # pyright: ignore[reportMissingTypeStubs]  # it ships none; imported here, since few programs search

    return re2


def _compiled(pattern: bytes) -> Any:
    re2 = _re2()
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.never_nl = True  # [^x] and \s must not run on into the next line
    try:
        return re2.compile(b"(?m)" + pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace").replace(": (?m)", ": ", 1)  # as it was given
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
