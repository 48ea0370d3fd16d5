"""The operations of the filesystem in memory, beside fsspec's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from fsspec.implementations.memory import MemoryFileSystem
from measure import Row, alternated, less, repeated, report
from trees import loaded, sample

AREA = "files in memory, 10,000"
BESIDE = "fsspec memory"
NEEDLE = "a text that is in no file"


def rows() -> Iterator[Row]:
    files = sample(10_000)
    ours = loaded(files)
    theirs = MemoryFileSystem(global_store=False, skip_instance_cache=True)
    for path, content in files.items():
        theirs.pipe_file(f"/{path}", content)
    some = list(files)[::10]
    paths, same_paths = cycle(some), cycle(some)
    directory = some[0].rpartition("/")[0]
    contents, same_contents = cycle([b"a" * 1_000, b"b" * 1_000]), cycle([b"a" * 1_000, b"b" * 1_000])

    def texts_with_needle() -> list[str]:
        needle = NEEDLE.encode()
        return [path for path in theirs.find("") if needle in theirs.cat_file(path)]

    for what, one, other, at_least in (
        ("read", lambda: ours.read(next(paths)), lambda: theirs.cat_file(next(same_paths)).decode(), 1.2),
        ("read bytes", lambda: ours.read_bytes(next(paths)), lambda: theirs.cat_file(next(same_paths)), 1.2),
        ("stat", lambda: ours.stat(next(paths)), lambda: theirs.info(next(same_paths)), 100),
        (
            "overwrite",
            lambda: ours.write_bytes(next(paths), next(contents)),
            lambda: theirs.pipe_file(next(same_paths), next(same_contents)),
            4,
        ),
        ("list a directory of 100", lambda: ours.list(directory), lambda: theirs.ls(directory), 50),
        (
            "glob with a fixed prefix",
            lambda: ours.glob(f"{directory}/*.py"),
            lambda: theirs.glob(f"{directory}/*.py"),
            150,
        ),
        ("glob **/*.py", lambda: ours.glob("**/*.py"), lambda: theirs.glob("**/*.py"), 7),
        ("grep a literal in no file", lambda: ours.grep(NEEDLE), texts_with_needle, 4),
    ):
        yield less(AREA, what, BESIDE, alternated(repeated(one), repeated(other)), at_least=at_least)


if __name__ == "__main__":
    report(rows())
