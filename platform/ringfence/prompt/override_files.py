"""Overrides in files below a directory: one JSON file a prompt and tag, for people to edit."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringfence import serde
from ringfence.errors import PromptOverridesError
from ringfence.prompt.overrides import (
    LATEST,
    Override,
    PromptDescriptor,
    PromptOverride,
    fitting,
    own_texts,
    refuse_misfits,
)
from ringfence.prompt.section import SECTION_KEY

if TYPE_CHECKING:
    from ringfence.prompt.prompt import Prompt

VERSION = 2
COARSEST_CLOCK_NS = 2_000_000_000
"""Two writes of a file this close to each other may leave it with the same time, on some filesystems."""
BELOW_GIT_ROOT = (".ringfence", "prompts", "overrides")


@dataclass(frozen=True, slots=True)
class _Seen:
    """A file as it was read: its identity, the descriptor it was read for, what it said, and what of that fitted."""

    identity: tuple[int, int, int]
    settled: bool
    """Whether it was so old that another write would show in its identity."""
    descriptor: PromptDescriptor
    said: PromptOverride
    fits: PromptOverride


class LocalPromptOverridesStore:
    """``<root>/<ns>/<key>/<tag>.json``; a ``/`` in the ns makes directories.

    A file is written whole or not at all, by one process at a time. Links are followed as long as they stay below the
    root (or in the repository, where the root is the one in there): no other file is read, written or deleted.
    """

    def __init__(
        self, root_path: str | os.PathLike[str] | None = None, *, now: Callable[[], int] = time.time_ns
    ) -> None:
        """Left out, the root is below the git repository that the process works in. ``now`` is in nanoseconds.

        Raises:
            PromptOverridesError: there is no such repository.
        """
        self._within = Path(root_path) if root_path is not None else _git_root()
        self.root = self._within if root_path is not None else self._within.joinpath(*BELOW_GIT_ROOT)
        self._now = now
        self._seen: dict[Path, _Seen] = {}

    def resolve(self, descriptor: PromptDescriptor, tag: str = LATEST) -> PromptOverride | None:
        path = self.path(descriptor.ns, descriptor.key, tag)
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _unreadable(path, error) from error
        identity = (found.st_ino, found.st_size, found.st_mtime_ns)
        seen = self._seen.get(path)
        if seen is not None and seen.descriptor == descriptor:
            if seen.settled and seen.identity == identity:
                return seen.fits
        else:
            seen = None
        try:
            said = self.read(path)
        except PromptOverridesError as error:
            if isinstance(error.__cause__, FileNotFoundError):  # deleted since the look at it
                return None
            raise
        fits = seen.fits if seen is not None and seen.said == said else fitting(descriptor, said)
        settled = self._now() - found.st_mtime_ns > COARSEST_CLOCK_NS
        self._seen[path] = _Seen(identity, settled, descriptor, said, fits)
        return fits

    def upsert(self, descriptor: PromptDescriptor, override: PromptOverride) -> PromptOverride:
        path = self.path(override.ns, override.prompt_key, override.tag)
        refuse_misfits(descriptor, override)
        with self._locked():
            self._write(path, override)
        return override

    def store(self, descriptor: PromptDescriptor, override: Override, tag: str = LATEST) -> PromptOverride:
        path = self.path(descriptor.ns, descriptor.key, tag)
        with self._locked():
            there = self.read(path) if path.exists() else PromptOverride(descriptor.ns, descriptor.key, tag)
            alone = PromptOverride(descriptor.ns, descriptor.key, tag).with_one(override)
            refuse_misfits(descriptor, alone)
            whole = there.with_one(override)  # what is stale stays too: a person wrote it, and may want it back
            self._write(path, whole)
        return whole

    def delete(self, *, ns: str, prompt_key: str, tag: str = LATEST) -> None:
        path = self.path(ns, prompt_key, tag)
        with self._locked():
            self._refuse_outside(path.parent)
            path.unlink(missing_ok=True)

    def seed(self, prompt: Prompt[Any], tag: str = LATEST) -> PromptOverride:
        path = self.path(prompt.ns, prompt.key, tag)
        with self._locked():
            if path.exists():
                return self.read(path)
            texts = own_texts(prompt.template, tag)
            self._write(path, texts)
        return texts

    def files(self) -> Iterator[Path]:
        """Every file with overrides, sorted."""
        yield from sorted(self.root.rglob("*.json"))

    def path(self, ns: str, key: str, tag: str) -> Path:
        """Where the overrides of a prompt are. Raises PromptOverridesError for names that make no path."""
        names = (*ns.split("/"), key, tag)
        for name in names:
            if SECTION_KEY.fullmatch(name) is None:
                raise PromptOverridesError(
                    f"{name!r} of {ns}:{key} ({tag}) makes no file name: use a-z, 0-9, '.', '_' and '-'"
                )
        return self.root.joinpath(*names[:-1], f"{tag}.json")

    def read(self, path: Path) -> PromptOverride:
        """What a file says, whether it fits any prompt or not. Raises PromptOverridesError."""
        self._refuse_outside(path)
        try:
            data = serde.read_json(_bytes_of(path))
            if data.pop("version", None) != VERSION:
                raise ValueError(f"it is not of version {VERSION}")
            return serde.parse(PromptOverride, data, extra="forbid", coerce=False)
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error

    def _write(self, path: Path, override: PromptOverride) -> None:
        self._refuse_outside(path.parent)
        _write(path, override)

    def _refuse_outside(self, path: Path) -> None:
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self._within)):
            raise PromptOverridesError(
                f"{path} cannot be read or written: a link leads out of {self._within}; put what it leads to in its "
                "place"
            )

    @contextmanager
    def _locked(self) -> Generator[None]:
        self._refuse_outside(self.root)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise PromptOverridesError(f"overrides cannot be kept in {self.root}: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        except OSError as error:
            raise PromptOverridesError(f"overrides could not be kept in {self.root}: {error}") from error
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open, too
            os.close(descriptor)


def _bytes_of(path: Path) -> bytes:
    # Without waiting for who might write into a pipe, and no device has an end.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        return file.read()


def _unreadable(path: Path, error: Exception) -> PromptOverridesError:
    return PromptOverridesError(f"the overrides in {path} cannot be read: {error}")


def _write(path: Path, override: PromptOverride) -> None:
    text = json.dumps({"version": VERSION, **serde.dump(override)}, indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _git_root() -> Path:
    here = Path.cwd()
    for directory in (here, *here.parents):
        if (directory / ".git").exists():
            return directory
    raise PromptOverridesError(f"{here} is in no git repository: say where overrides are kept with root_path=")
