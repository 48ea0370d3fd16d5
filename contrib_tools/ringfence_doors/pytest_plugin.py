"""Fixtures for tests of agents and tools (the extra ``pytest``). pytest finds this plugin where ringfence is installed.

Nothing but pytest is imported until a test asks for a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ringfence.adapters import ScriptedAdapter
    from ringfence_sandbox import PodmanSandbox, Workspace


@pytest.fixture
def ringfence_workspace(tmp_path: Path) -> Iterator[Workspace]:
    """An opened workspace at an empty directory of its own. Its history is gone with the test."""
    from ringfence_sandbox import Workspace

    root = tmp_path / "workspace"
    root.mkdir()
    with Workspace.open(root, store=tmp_path / "ringfence-store") as workspace:
        yield workspace


@pytest.fixture
def scripted_model() -> Callable[[Sequence[Mapping[str, Any]]], ScriptedAdapter]:
    """Makes a model that answers with the turns it is given: ``scripted_model([{"text": "Done."}])``."""

    def make(turns: Sequence[Mapping[str, Any]]) -> ScriptedAdapter:
        from ringfence.adapters import ScriptedAdapter

        return ScriptedAdapter(turns)

    return make


@pytest.fixture
def ringfence_sandbox(tmp_path: Path) -> Iterator[PodmanSandbox]:
    """A container over an empty directory of its own. The test is skipped where Podman or the image is not there."""
    from ringfence.errors import SandboxUnavailableError
    from ringfence_sandbox import PodmanSandbox

    root = tmp_path / "sandbox"
    root.mkdir()
    sandbox = PodmanSandbox(root)
    try:
        sandbox.start()
    except SandboxUnavailableError as error:
        sandbox.close()
        pytest.skip(f"there is no sandbox here: {error}")
    try:
        yield sandbox
    finally:
        sandbox.close()


@pytest.fixture
def assert_rolled_back(ringfence_workspace: Workspace) -> Callable[[], AbstractContextManager[None]]:
    """``with assert_rolled_back():`` fails where a block has left any change in `ringfence_workspace`."""

    @contextmanager
    def unchanged() -> Generator[None]:
        ringfence_workspace.look()
        before, steps = ringfence_workspace.newest, len(ringfence_workspace.steps())
        yield
        ringfence_workspace.look()
        changed = sorted({one.path for one in ringfence_workspace.changes_since(before)})
        assert not changed, f"what the block changed was not rolled back: {', '.join(changed)}"
        made = len(ringfence_workspace.steps()) - steps
        assert not made, f"the block made {made} step{'' if made == 1 else 's'}, and was to be rolled back"

    return unchanged
