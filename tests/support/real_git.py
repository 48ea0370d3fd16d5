"""A real git, which reads the history of a workspace, and takes what is exported of it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
NOT_THE_USERS = {"HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"} | {
    f"GIT_{who}_{what}": "tester" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
}


def git_bytes(folder: Path, *arguments: str, given: bytes | None = None) -> bytes:
    """The output of a command that succeeds, without any configuration of the user; in a repository, bare or not."""
    environment = {"PATH": os.environ["PATH"], **NOT_THE_USERS}
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, env=environment, input=given, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace") + done.stdout.decode(errors="replace")
    return done.stdout


def git(folder: Path, *arguments: str, given: bytes | None = None) -> str:
    return git_bytes(folder, *arguments, given=given).decode()


def fsck(history: Path) -> None:
    """Git finds nothing wrong with it."""
    assert git(history, "fsck", "--full", "--strict", "--no-dangling") == ""


def repository(folder: Path) -> Path:
    """A repository of all that is in the folder, committed."""
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "as it was")
    return folder


def blob_id(content: bytes) -> str:
    """The name that git gives a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def objects_of(history: Path) -> set[str]:
    """The names of all that a closed history has."""
    listed = git(history, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)")
    return set(listed.split())
