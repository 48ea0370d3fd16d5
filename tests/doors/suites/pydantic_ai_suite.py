"""pydantic-ai's own suite for backends of workspaces, over a workspace of ringfence."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from pydantic_ai.workspaces import WorkspaceBackend, WorkspaceRef
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from ringfence_doors.pydantic_ai import RingfenceBackend
from ringfence_sandbox import Workspace

CANCELLED = "a cancelled command is rolled back, so the file that it has written is gone"
REFUSED = {
    ("TestDefault", "test_cancellation_stops_foreground_work"): CANCELLED,
    ("TestDefault", "test_a_backend_attached_by_ref_reaches_a_detached_process"): "a process ends with its command",
    ("TestLeaveRunning", "test_cancellation_stops_foreground_work"): CANCELLED,
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    (tmp_path / "root").mkdir()
    with Workspace.open(tmp_path / "root", store=tmp_path / "store") as opened:
        yield opened


class OfRingfence(WorkspaceBackendSuite):
    leave_running = False

    @pytest.fixture
    def backend(self, workspace: Workspace) -> WorkspaceBackend:
        return RingfenceBackend(workspace, leave_running=self.leave_running)

    @pytest.fixture
    def destructive_backend(self, backend: WorkspaceBackend) -> Callable[[], WorkspaceBackend]:
        return lambda: backend

    @pytest.fixture
    def attach_backend(self, workspace: Workspace) -> Callable[[WorkspaceRef], WorkspaceBackend]:
        return lambda ref: RingfenceBackend(workspace, leave_running=self.leave_running)

    @pytest.fixture
    def destroy_environment(self) -> Callable[[WorkspaceBackend], Awaitable[None]]:
        async def destroy(backend: WorkspaceBackend) -> None:
            shutil.rmtree(await backend.working_dir())

        return destroy


class TestDefault(OfRingfence):
    pass


class TestLeaveRunning(OfRingfence):
    leave_running = True


def test_the_programs_of_the_page_run(run_page: Callable[[str], int]) -> None:
    assert run_page("pydantic-ai") == 1
