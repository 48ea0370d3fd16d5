"""What a search leaves out is what git ignores."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringfence.filesystem import InMemoryFilesystem
from ringfence_tools.searching import Ignored

NAMES = ("a", "b", "ab", "a.b", ".a", "A", "b c", "build", "x.py")
DIRECTORIES = ("a", "b", "build", "a/b", "b/build", "build/a")
FILES = tuple(
    f"{d}{name}" for d in ("", *(f"{d}/" for d in DIRECTORIES)) for name in NAMES if d + name not in DIRECTORIES
)

PATTERNS = r"* ? ** a* *b *.py *a*b b? [ab] [!a] [^a] [a-c]* [[:alpha:]] []a] [a\]b] \a {a,b} !a #a \!a \#a".split()
segments = st.sampled_from((*NAMES, *PATTERNS, " ", "a\\ "))


def line_of(no: str, start: str, names: list[str], end: str) -> str:
    return f"{no}{start}{'/'.join(names)}{end}"


lines = st.builds(
    line_of,
    st.sampled_from(("", "", "", "!")),
    st.sampled_from(("", "", "/")),
    st.lists(segments, min_size=1, max_size=3),
    st.sampled_from(("", "", "/", "  ", "/  ", "\\ ", "\r")),
)
rules = st.lists(lines, max_size=4).map("\n".join)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(("", "a/", "b/build/")), rules))
def test_what_is_ignored_is_what_git_ignores(tmp_path: Path, found: dict[str, str]) -> None:
    if not (tmp_path / ".git").exists():
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
        for path in FILES:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).touch()
    files = InMemoryFilesystem()
    for directory in ("", "a/", "b/build/"):
        (tmp_path / directory / ".gitignore").write_text(found.get(directory, ""), newline="")
        files.write(f"{directory}.gitignore", found.get(directory, ""))
    ignored = Ignored(files, "", None)
    ours = {path for path in FILES if ignored.has(path)} | {
        path for path in DIRECTORIES if ignored.has(path, is_directory=True)
    }
    assert ours == ignored_by_git(tmp_path, (*FILES, *DIRECTORIES))


def ignored_by_git(root: Path, paths: tuple[str, ...]) -> set[str]:
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin", "-z"],
        cwd=root,
        input="\0".join(paths),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull},
        check=False,  # 1 where nothing is ignored
    )
    assert done.returncode in (0, 1)
    return set(done.stdout.split("\0")) - {""}
