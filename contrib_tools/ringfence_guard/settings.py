"""What a person chose for the guard of a directory. It is kept beside the history, where no agent's tool writes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from ringfence_sandbox import store_directory

FOLDER = "guard"
_FILE = "settings.json"


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """The choices of `ringfence guard install`."""

    policies: tuple[str, ...] = ()
    """As ``--policy`` takes them."""
    deny_background: bool = False
    rollback_on_failure: bool = False


def guard_directory(root: str | os.PathLike[str]) -> Path:
    """The directory of the guard of a root: settings, log and socket. It need not exist."""
    return store_directory(root) / FOLDER


def make_guard_directory(root: str | os.PathLike[str]) -> Path:
    """Make the directory of the guard of a root. It and the store around it are private. Raises OSError."""
    directory = guard_directory(root)
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def client_path() -> str:
    """The file that hooks run."""
    return str(Path(__file__).with_name("hook_client.py"))


def launcher_path(state: str | os.PathLike[str]) -> Path:
    """What hooks run first, which is outside of any installation: it finds the client after an upgrade."""
    return Path(state) / FOLDER / "hook.sh"


def save_launcher(state: str | os.PathLike[str]) -> None:
    """Write what hooks run first. Raises OSError."""
    path = launcher_path(state)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_bytes(Path(__file__).with_name("hook_launcher.sh").read_bytes())
    new.replace(path)


def load_settings(root: str | os.PathLike[str]) -> GuardSettings:
    """Return the settings that hold in a root: those of the person, and those of the root. A root adds to a person's.

    Raises:
        ValueError: they cannot be read.
    """
    scopes = scoped_settings(root).values()
    return GuardSettings(
        tuple(dict.fromkeys(spec for one in scopes for spec in one.policies)),
        any(one.deny_background for one in scopes),
        any(one.rollback_on_failure for one in scopes),
    )


def scoped_settings(root: str | os.PathLike[str]) -> Mapping[str, GuardSettings]:
    """Return the settings of the person as "user" and of a root as "directory", in this order; only what there is.

    Raises:
        ValueError: they cannot be read.
    """
    files = zip(("user", "directory"), settings_files(root), strict=True)
    return {scope: _load(path) for scope, path in files if path.exists()}


def _load(path: Path) -> GuardSettings:
    try:
        held: object = json.loads(path.read_text())
        if not isinstance(held, dict):
            raise TypeError("they are no object")
        given = cast("Mapping[str, Any]", held)
        policies = tuple(str(spec) for spec in given.get("policies", ()))
        return GuardSettings(policies, bool(given.get("deny_background")), bool(given.get("rollback_on_failure")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def settings_files(root: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Where the settings of the person are, and those of a root. Neither needs to exist."""
    return _personal(), guard_directory(root) / _FILE


def save_settings(root: str | os.PathLike[str] | None, settings: GuardSettings) -> None:
    """Keep the settings of a root, or of all of a person's projects for None. Raises OSError."""
    path = _personal() if root is None else make_guard_directory(root) / _FILE
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(asdict(settings), indent=1))
    new.replace(path)


def _personal() -> Path:
    return store_directory("/").parent.parent / FOLDER / _FILE
