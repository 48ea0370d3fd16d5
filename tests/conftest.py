from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from ringfence_sandbox import Workspace

pytest.register_assert_rewrite("ringfence.testing")

# A shell starts its background jobs with Ctrl-C ignored, nohup with SIGHUP ignored, and they would hand that on to the
# processes of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How `make test` has the workers keep their memory is for them alone. (The first process hands it on to them.)
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("PYTHONMALLOC", "GLIBC_TUNABLES"):
        os.environ.pop(name, None)

# An agent may run the tests. What they start is no command of that agent.
for name in ("CLAUDECODE", "CODEX_THREAD_ID", "GEMINI_CLI", "QWEN_CODE", "OPENCODE"):
    os.environ.pop(name, None)

# As in the Makefile: each process that a test starts would else compile what it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A spread of a long test begins elsewhere in each run; RINGFENCE_SEED=N repeats a run. Workers inherit it.
os.environ.setdefault("RINGFENCE_SEED", str(int.from_bytes(os.urandom(3), "big")))

# No deadline: a busy machine is not a failure. The blob repeats a failure of another machine on this one.
settings.register_profile("quick", deadline=None, print_blob=True, max_examples=50, stateful_step_count=30)
settings.register_profile("prove", deadline=None, print_blob=True, max_examples=5000, stateful_step_count=60)
settings.load_profile("prove" if os.environ.get("RINGFENCE_PROVE") == "1" else "quick")


def pytest_report_header() -> str:
    return f"RINGFENCE_SEED={os.environ['RINGFENCE_SEED']}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests marked `prove` to `make prove`, unless somebody names one by its id."""
    if os.environ.get("RINGFENCE_PROVE") == "1" or any("::" in argument for argument in config.args):
        return
    long = [item for item in items if item.get_closest_marker("prove") is not None]
    items[:] = [item for item in items if item.get_closest_marker("prove") is None]
    config.hook.pytest_deselected(items=long)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Long and random values name no test: two workers would not agree on it."""
    return argname if isinstance(val, (str, bytes)) and len(val) > 60 else None


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, object, object]:
    """A name that is not UTF-8 in the words of a failure would end the worker that is to tell of it, and the run."""
    report = yield
    text = json.dumps(report, ensure_ascii=False)
    # Only then, since it makes lists of tuples, which a report in JUnit's form does not take.
    return report if text.isprintable() else json.loads(text.encode("utf-8", "replace"))


def spread(directory: Path | str) -> None:
    """Have ext4 put each directory in it elsewhere on the disk. Side by side, a new file waits for a search past all
    that was deleted there in the last half minute, which after some hundred tests is most of the time."""
    with suppress(OSError):  # another filesystem, or no chattr
        subprocess.run(["chattr", "+T", directory], stderr=subprocess.DEVNULL, check=False)


@pytest.fixture(scope="session", autouse=True)
def state_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[Path]]:
    """Stores of workspaces on disk go elsewhere than to the user's own, those of what lives longer than a test too."""
    base = tmp_path_factory.mktemp("state")
    spread(base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGFENCE_STATE_DIR", str(base / "shared"))
        yield (base / str(number) for number in count())


@pytest.fixture(autouse=True)
def state_directory(state_directories: Iterator[Path]) -> Iterator[None]:
    """No test sees the stores of another."""
    state = next(state_directories)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGFENCE_STATE_DIR", str(state))
        yield
    shutil.rmtree(state, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One for this run, which other users reach as they reach /tmp: nobody may leave anything in it."""
    spread(tmp_path_factory.getbasetemp())  # pytest's own stays where people look for it
    with tempfile.TemporaryDirectory(prefix="ringfence-tests-") as place, pytest.MonkeyPatch.context() as patch:
        os.chmod(place, 0o1777)
        spread(place)
        patch.setenv("TMPDIR", place)
        patch.setattr(tempfile, "tempdir", place)
        yield
        assert os.listdir(place) == []


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small tree; a module that needs another one has its own fixture of this name."""
    (tmp_path / "root/d").mkdir(parents=True)
    (tmp_path / "root/a.txt").write_text("".join(f"line {n}\n" for n in range(1, 10)))
    (tmp_path / "root/d/b.txt").write_text("b\n")
    return tmp_path / "root"


@pytest.fixture
def workspace(root: Path) -> Iterator[Workspace]:
    """Over the tree, with its store beside it."""
    from ringfence_sandbox import Workspace

    with Workspace.open(root, store=root.parent / "store") as workspace:
        yield workspace
