"""Edits of the configuration files of other programs, in plain JSON and TOML, and a record of what was there before.

What an edit does not concern stays as it is written. A file with comments in JSON is refused.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ringfence_tools.json_text import edited, indentation_step

KeyPath = Sequence[str]
NAME = "ringfence"
_ORIGINAL = ""
"""The entry of a record for a file as a whole. No edit has such a key."""
STATE_VARIABLES = ("RINGFENCE_STATE_DIR", "XDG_STATE_HOME")


class UneditableFileError(ValueError):
    """A configuration file cannot be edited, and stays as it is."""


@dataclass(frozen=True, slots=True)
class ClientScope:
    """Where a client is configured: for the project in a directory, or for all projects of a person."""

    project: Path
    home: Path
    personal: bool = False
    environ: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def directory(self) -> Path:
        return self.home if self.personal else self.project


@dataclass(frozen=True, slots=True)
class ConfigEdit:
    """One entry of one file: a value, or members that a list has to contain. ``text`` is a whole file instead."""

    path: Path
    key: KeyPath = ()
    value: Any = None
    members: Sequence[Any] = ()
    text: str | None = None

    def describe(self) -> str:
        """Return the entry as text, for a person who edits the file by hand.

        Raises:
            ModuleNotFoundError: the file is TOML, and tomlkit is missing.
        """
        if self.text is not None:
            return self.text
        held: Any = [*self.members] if self.members else self.value
        for key in reversed(self.key):
            held = {key: held}
        if self.path.suffix != ".toml":
            return json.dumps(held, indent=2, ensure_ascii=False)
        import tomlkit

        return tomlkit.dumps(held).strip()


class ConfigFile:
    """The text of a configuration file, and edits of it. Nothing is written before `save`."""

    def __init__(self, path: Path) -> None:
        """The text of a file that is not there is empty.

        Raises:
            UneditableFileError: it cannot be parsed, or is no object.
            OSError: it cannot be read.
            ModuleNotFoundError: it is TOML, and tomlkit is missing.
        """
        self.path = path
        self._content = _read(path)
        try:
            content = self._content.decode()
        except UnicodeDecodeError as error:
            raise UneditableFileError(f"{path} is not UTF-8, and stays as it is: {error}") from error
        if content.startswith("\ufeff"):
            message = "begins with a byte order mark, and stays as it is: save it as UTF-8 without one"
            raise UneditableFileError(f"{path} {message}")
        self._newline = "\r\n" if content.count("\r\n") == content.count("\n") > 0 else "\n"
        self.before = self.text = content.replace("\r\n", "\n") if self._newline == "\r\n" else content
        self._is_removed_empty = True
        self._toml = path.suffix == ".toml"
        self.data()

    def data(self) -> dict[str, Any]:
        """Parse the text as it is now."""
        try:
            parsed: Any = self._parse()
        except (ValueError, RecursionError) as error:  # an error of tomlkit is a ValueError
            kind = "TOML" if self._toml else "JSON without comments"
            raise UneditableFileError(f"{self.path} is not {kind}, and stays as it is: {error}") from error
        if type(parsed) is not dict:
            raise UneditableFileError(f"{self.path} holds no object, and stays as it is")
        return cast("dict[str, Any]", parsed)

    def _parse(self) -> Any:
        if self._toml:
            import tomlkit

            return tomlkit.parse(self.text).unwrap()
        return json.loads(self.text, object_pairs_hook=_object) if self.text.strip() else {}

    def get(self, path: KeyPath) -> Any:
        """Return the value at a path of keys; None where there is none."""
        held: Any = self.data()
        for key in path:
            held = cast("dict[str, Any]", held).get(key) if isinstance(held, dict) else None
        return held

    def set(self, path: KeyPath, value: object) -> None:
        """Make the entry hold `value`. Objects on the way are created.

        Raises:
            UneditableFileError: something else than an object is on the way, or the edit would change more.
        """
        before = self.data()
        if self.get(path) == value:
            return
        for depth in range(1, len(path)):
            if self.get(path[:depth]) is not None and type(self.get(path[:depth])) is not dict:
                raise UneditableFileError(f"{self.path}: {'.'.join(path[:depth])} holds no object: change it by hand")
        self._rewrite(before, path, value)

    def add(self, path: KeyPath, members: Sequence[Any]) -> None:
        """Append the members that the list at a path lacks. A list is created where there is none."""
        held = self._list_at(path)
        self.set(path, [*held, *(member for member in members if member not in held)])

    def discard(self, path: KeyPath, members: Sequence[Any]) -> None:
        """Remove the members from the list at a path, and an empty list too."""
        held = self._list_at(path)
        kept = [member for member in held if member not in members]
        if held and not kept:
            self.remove(path)
        elif kept != held:
            self.set(path, kept)

    def _list_at(self, path: KeyPath) -> list[Any]:
        held: list[Any] | None = self.get(path)
        if held is not None and type(held) is not list:
            raise UneditableFileError(f"{self.path}: {'.'.join(path)} holds no list")
        return held or []

    def remove(self, path: KeyPath) -> None:
        """Remove the entry, and the objects around it that it leaves empty."""
        if self.get(path) is None:
            return
        self._rewrite(self.data(), path, None)
        if len(path) > 1 and self.get(path[:-1]) == {}:
            self.remove(path[:-1])

    def _rewrite(self, data: dict[str, Any], path: KeyPath, value: object) -> None:
        """Make the text say `data` with another value at the path; None is no entry."""
        if self._toml:
            self._edit_toml(path, value)
        around = data
        for key in path[:-1]:
            around[key] = around.get(key) or {}
            around = around[key]
        if value is None:
            around.pop(path[-1], None)
        else:
            around[path[-1]] = value
        if not self._toml:
            self.text = self._edited_json(data, path, value)
        elif not self._says(data):
            message = f"{self.path} cannot be edited, and stays as it is: change {'.'.join(path)} by hand"
            raise UneditableFileError(message)

    def _edited_json(self, data: dict[str, Any], path: KeyPath, value: object) -> str:
        if self.text.strip():
            with suppress(ValueError, TypeError):
                text = edited(self.text, path, value)
                if json.loads(text) == data:
                    return text
        end = "\n" if not self.text.strip() or self.text.endswith("\n") else ""
        return json.dumps(data, indent=indentation_step(self.text), ensure_ascii=False, allow_nan=False) + end

    def _edit_toml(self, path: KeyPath, value: object) -> None:
        import tomlkit

        document = tomlkit.parse(self.text)
        around: Any = document
        for key in path[:-1]:
            if key not in around:
                around[key] = tomlkit.table(is_super_table=isinstance(around, tomlkit.TOMLDocument))
            around = around[key]
        if value is None:
            del around[path[-1]]
        else:
            around[path[-1]] = value
        self.text = tomlkit.dumps(document)

    def _says(self, data: dict[str, Any]) -> bool:
        """Whether the text says this. tomlkit puts tables around dotted keys in the wrong place."""
        with suppress(UneditableFileError):  # the edit broke it
            return _canonical(self.data()) == _canonical(data)
        return False

    @property
    def is_changed(self) -> bool:
        return self.text != self.before

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing, not even in a comment."""
        return not self.data() and self.text.strip() in ("", "{\n}", "{}")

    def restore(self, content: str | None) -> None:
        """Make it what it was once; None is no file."""
        self._is_removed_empty, self._newline = content is None, "\n"
        self.text = content or ""

    def keep_empty(self) -> None:
        """Have `save` leave a file that says nothing."""
        self._is_removed_empty = False

    def diff(self) -> str:
        """Return the change as a unified diff."""
        import difflib

        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True),
            [] if self.is_empty else self.text.splitlines(keepends=True),
            str(self.path) if self.before else "/dev/null",
            "/dev/null" if self.is_empty else str(self.path),
        )
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)

    @property
    def original(self) -> str:
        """The text as it was read."""
        return self._content.decode()

    @property
    def checksum(self) -> str:
        """Of what was read."""
        return _checksum(self._content)

    @property
    def new_checksum(self) -> str:
        """Of what `save` writes."""
        return _checksum(self.content)

    @property
    def content(self) -> bytes:
        """What `save` writes."""
        return (self.text.replace("\n", self._newline) if self._newline == "\r\n" else self.text).encode()

    def save(self, backups: Path) -> None:
        """Replace the file as a whole, or remove one that says nothing any more. A link stays a link, and the file
        its owner's.

        ``backups`` is the directory for a copy of what the file was.

        Raises:
            UneditableFileError: somebody has changed it since it was read, as a client may at any time; or it is
                another user's, and this one cannot leave it so.
            OSError: it cannot be written.
        """
        import hashlib

        target = Path(os.path.realpath(self.path))
        if self._content:
            backups.mkdir(parents=True, exist_ok=True, mode=0o700)
            name = f"{hashlib.sha256(os.fsencode(target)).hexdigest()[:16]}-{target.name}"
            _replace(backups / name, self._content, 0o600)
        found = target.stat() if target.exists() else None
        target.parent.mkdir(parents=True, exist_ok=True)
        if _read(target) != self._content:
            message = f"{self.path} has just been changed by another program, and stays as it is: try again"
            raise UneditableFileError(message)
        if self.is_empty and self._is_removed_empty:
            target.unlink(missing_ok=True)
        else:
            _replace(target, self.content, None if found is None else found.st_mode & 0o7777, found)


class ConfigRecord:
    """What install read, per configuration file and entry, so that uninstall restores it."""

    def __init__(self, path: Path, entries: dict[str, dict[str, Any]]) -> None:
        self.path, self._entries = path, entries
        self.unknown: list[str] = []
        """The entries that uninstall could not tell from the user's own."""

    @property
    def backups(self) -> Path:
        return self.path.with_suffix("")

    @classmethod
    def load(cls, path: Path) -> ConfigRecord:
        """Raises ValueError if the record cannot be read."""
        try:
            return cls(path, json.loads(path.read_text()) if path.exists() else {})
        except ValueError:
            message = f"{path} is damaged. It has what was in the clients' settings before: mend it, or delete it"
            raise ValueError(message) from None

    @classmethod
    @contextmanager
    def locked(cls, path: Path) -> Generator[ConfigRecord]:
        """Load the record, and keep other processes from it until the end of the block.

        Raises:
            ValueError: it cannot be read.
            OSError: the lock beside it cannot be made.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield cls.load(path)

    def save(self) -> None:
        entries = {path: held for path, held in self._entries.items() if held}
        if entries or self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self.path, json.dumps(entries, indent=1, default=str).encode(), 0o600)

    def has(self, edit: ConfigEdit) -> bool:
        """Whether install made the edit in the file."""
        return ".".join(edit.key) in self._entries.get(str(edit.path), {})

    def keep_original(self, file: ConfigFile, *, is_own: bool) -> None:
        """Before an installation saves a file: keep what it was without one. ``is_own``: it has an earlier one."""
        entries = self._entries.setdefault(str(file.path), {})
        held: dict[str, Any] | None = entries.get(_ORIGINAL)
        if held is None or not is_own:
            is_made, above = not file.path.exists(), [str(one) for one in file.path.parents if not one.exists()]
            held = {"text": None if is_made or is_own else file.original, "is_made": is_made, "directories": above}
        elif held["left"] != file.checksum:
            held["text"] = None  # somebody has edited it since
        entries[_ORIGINAL] = {**held, "left": file.new_checksum}

    def restore_original(self, file: ConfigFile) -> Sequence[Path]:
        """Before an uninstallation saves a file: make it what it was, if nobody has edited it since. Return the
        directories that the installation made, the lowest first."""
        held = self._entries.get(str(file.path), {}).pop(_ORIGINAL, None)
        if held is None:
            return ()
        if held["left"] == file.checksum and (held["is_made"] or held["text"] is not None):
            file.restore(held["text"])
        elif not held["is_made"]:
            file.keep_empty()
        return [Path(one) for one in held["directories"]]

    def install(self, file: ConfigFile, edit: ConfigEdit) -> None:
        """Make the edit."""
        entries, key, held = self._entries.setdefault(str(edit.path), {}), ".".join(edit.key), file.get(edit.key)
        if edit.members:
            file.add(edit.key, edit.members)
            added = [member for member in edit.members if member not in (held or [])]
            entries[key] = [*entries.get(key, []), *added]
            return
        value: object = _merged(held, edit)
        if held is None or (held != value and not (isinstance(edit.value, Mapping) and key in entries)):
            entries[key] = held
        file.set(edit.key, value)

    def uninstall(self, file: ConfigFile, edit: ConfigEdit) -> None:
        """Reverse the edit, as far as install made it."""
        entries, key = self._entries.get(str(edit.path), {}), ".".join(edit.key)
        held: Any = file.get(edit.key)
        is_own = NAME in key or any(NAME in str(member) for member in edit.members)  # by its name, without a record
        is_known, before = key in entries or is_own, entries.pop(key, None)
        if edit.members:
            added: Sequence[Any] = edit.members if is_own else before or []
            file.discard(edit.key, added)
            if any(member in edit.members and member not in added for member in cast("list[Any]", held or [])):
                self.unknown.append(f"{edit.path}: {key}")
        elif held is not None and (isinstance(edit.value, Mapping) or held == edit.value):
            if not is_known:
                self.unknown.append(f"{edit.path}: {key}")
            elif before is None:
                file.remove(edit.key)
            else:
                file.set(edit.key, before)


def edit_files(edits: Sequence[ConfigEdit], record: ConfigRecord, *, add: bool) -> list[ConfigFile]:
    """Make the edits, or reverse them. Return the files, which are not saved.

    Raises:
        UneditableFileError: a file cannot be edited. The message has what to write there by hand.
        OSError: a file cannot be read.
        ModuleNotFoundError: a file is TOML, and tomlkit is missing.
    """
    files: dict[Path, ConfigFile] = {}
    for edit in edits:
        try:
            file = files[edit.path] = files.get(edit.path) or ConfigFile(edit.path)
            if edit.text is None:
                (record.install if add else record.uninstall)(file, edit)
            elif file.before in ("", edit.text):
                file.text = edit.text if add else ""
            else:
                raise UneditableFileError(f"{edit.path} holds rules of somebody else, and stays as it is")
        except UneditableFileError as error:
            what = "Write this there by hand" if add else "Take this out there by hand"
            by_hand = "\n".join(other.describe() for other in edits if other.path == edit.path)
            raise UneditableFileError(f"{error}. {what}:\n{by_hand}") from error
    return list(files.values())


def is_made(edit: ConfigEdit) -> bool:
    """Whether the file has the value, with what somebody has added to it. A file that cannot be read has none."""
    with suppress(OSError, UneditableFileError):
        held = ConfigFile(edit.path).get(edit.key)
        return held is not None and _merged(held, edit) == held
    return False


def _merged(held: Any, edit: ConfigEdit) -> Any:
    """Return the value of an edit, with what somebody has added there, such as a time limit or a variable."""
    if type(held) is not dict:
        return edit.value
    if not isinstance(edit.value, dict):
        raise UneditableFileError(f"{edit.path}: {'.'.join(edit.key)} holds rules, and stays as it is")
    entry = cast("dict[str, Any]", held)
    for name in ("env", "environment"):  # what is in force now is in the value
        if type(entry.get(name)) is dict:
            kept = {key: one for key, one in entry[name].items() if key not in STATE_VARIABLES}
            entry = {key: one for key, one in entry.items() if key != name} | ({name: kept} if kept else {})
    value = cast("dict[str, Any]", edit.value)
    if "command" not in entry:  # a server over HTTP: clients refuse an entry that is both
        return value
    return entry | {
        key: entry[key] | new if type(new) is type(entry.get(key)) is dict else new for key, new in value.items()
    }


def _checksum(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _replace(path: Path, content: bytes, mode: int | None, before: os.stat_result | None = None) -> None:
    """Write a file beside the path, and move it there. Only its owner reads it before it has the mode. It is of the
    user and the group that the one ``before`` was of."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600), "wb") as file:
            file.write(content)
            if before is not None:
                _give(file.fileno(), before, path)
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _give(file: int, before: os.stat_result, path: Path) -> None:
    now = os.fstat(file)
    if now.st_gid != before.st_gid:
        with suppress(PermissionError):  # who has it may be in that group or not
            os.fchown(file, -1, before.st_gid)
    if now.st_uid != before.st_uid:
        try:
            os.fchown(file, before.st_uid, -1)
        except PermissionError:
            raise UneditableFileError(f"{path} is another user's, and stays as it is: do this as that user") from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    held = dict(pairs)
    if len(held) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return held


def _canonical(data: object) -> object:
    """The same for the same data, without empty objects: tomlkit writes no table around nothing."""
    text = json.dumps(data, default=str)
    return json.loads(text, object_hook=lambda held: {key: value for key, value in held.items() if value != {}})
