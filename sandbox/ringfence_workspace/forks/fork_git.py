"""What of git a fork and its source have to do with each other: new objects, and where a branch stands."""

from __future__ import annotations

from dulwich.errors import NotGitRepository
from dulwich.refs import Ref
from dulwich.repo import Repo

_HEAD = Ref(b"HEAD")


def checked_out(root: str) -> tuple[str, str]:
    """The branch that is checked out in a repository, as a full ref, and the commit. Empty for what there is not."""
    try:
        with Repo(root) as repo:
            chain, commit = repo.refs.follow(_HEAD)
    except (NotGitRepository, OSError, ValueError, KeyError, NotImplementedError):
        return "", ""
    branch = chain[-1].decode("utf-8", "surrogateescape") if len(chain) > 1 else ""
    return branch, "" if commit is None else commit.decode()
