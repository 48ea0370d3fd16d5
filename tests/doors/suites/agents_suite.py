"""Sandbox agents of the OpenAI Agents SDK, whose model is a script. The SDK's own local sandbox does the same."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import ModelResponse, RunConfig, Runner, Usage
from agents.models.interface import Model
from agents.sandbox import Dir, LocalSnapshotSpec, Manifest, SandboxAgent, SandboxRunConfig, User
from agents.sandbox.entries import File
from agents.sandbox.errors import SandboxError
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
from openai.types.responses import (
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

from ringfence.prompt import PathPolicy
from ringfence_doors.openai_agents import RingfenceSandboxClient, RingfenceSession, ringfence_capabilities
from ringfence_sandbox import Workspace


class Scripted(Model):
    """Answers one item after the other, and keeps what it was asked."""

    def __init__(self, *answers: Any) -> None:
        text = ResponseOutputText(type="output_text", text="Done.", annotations=[])
        end = ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=[text])
        self.answers = [[one] if not isinstance(one, list) else one for one in answers] + [[end]]
        self.asked: list[str] = []

    async def get_response(self, system_instructions: Any, input: Any, *args: Any, **options: Any) -> ModelResponse:
        self.asked.append(json.dumps(input, default=str))
        return ModelResponse(output=self.answers.pop(0), usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError


def command(line: str, number: int = 0, **arguments: Any) -> ResponseFunctionToolCall:
    call = {"cmd": line, **arguments}
    return ResponseFunctionToolCall(
        type="function_call", name="exec_command", call_id=f"call_{number}", arguments=json.dumps(call)
    )


def patch(*lines: str, number: int = 0) -> ResponseCustomToolCall:
    text = "\n".join(["*** Begin Patch", *lines, "*** End Patch"])
    return ResponseCustomToolCall(type="custom_tool_call", name="apply_patch", call_id=f"call_{number}", input=text)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    made = tmp_path / "root"
    (made / "d").mkdir(parents=True)
    (made / "a.txt").write_text("one\ntwo\n")
    (made / "b.txt").write_text("b\n")
    return made


@pytest.fixture
def workspace(root: Path) -> Iterator[Workspace]:
    with Workspace.open(root) as opened:
        yield opened


@pytest.fixture
async def session(workspace: Workspace) -> AsyncIterator[RingfenceSession]:
    async with await RingfenceSandboxClient(workspace).create() as made:
        assert isinstance(made, RingfenceSession)
        yield made


def files(root: str | Path) -> dict[str, tuple[int, int, bytes]]:
    found = (path for path in Path(root).rglob("*") if ".ringfence" not in str(path.relative_to(root)))
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() and not path.is_symlink() else b"",
        )
        for path in found
    }


async def run(model: Model, client: Any, **options: Any) -> None:
    agent = SandboxAgent(name="Worker", model=model, capabilities=ringfence_capabilities(), **options)
    config = RunConfig(sandbox=SandboxRunConfig(client=client), tracing_disabled=True)
    await Runner.run(agent, "Go.", run_config=config)


async def test_a_patch_is_one_step_and_one_that_does_not_apply_leaves_no_trace(
    root: Path, workspace: Workspace
) -> None:
    client, before = RingfenceSandboxClient(workspace), files(root)
    bad = patch("*** Add File: new.txt", "+n", "*** Delete File: b.txt", "*** Update File: a.txt", "@@", "-three", "+3")
    model = Scripted(bad)
    await run(model, client)
    assert files(root) == before
    assert workspace.steps() == []
    assert "three" in model.asked[1] or "Invalid" in model.asked[1]
    good = patch(
        "*** Add File: e/new.txt",
        "+n",
        "*** Delete File: b.txt",
        "*** Update File: a.txt",
        "*** Move to: e/c.txt",
        "@@",
        " one",
        "-two",
        "+2",
    )
    await run(Scripted(good), client)
    assert [(step.tool, step.paths) for step in workspace.steps()] == [
        ("apply_patch", ("a.txt", "b.txt", "e", "e/c.txt", "e/new.txt"))
    ]
    assert (root / "e/c.txt").read_text() == "one\n2\n"
    client.undo()
    assert {path: one[0::2] for path, one in files(root).items()} == {path: one[0::2] for path, one in before.items()}


async def test_a_failed_command_leaves_no_trace_and_an_undo_reverses_the_others(
    root: Path, workspace: Workspace
) -> None:
    client, before = RingfenceSandboxClient(workspace, rollback_on_error=True), files(root)
    model = Scripted(command("mv a.txt d; echo > c; chmod 700 d; exit 3"), command("rm b.txt; echo c > c", 1))
    await run(model, client)
    assert "rolled back: a.txt, c, d, d/a.txt" in model.asked[1]
    assert files(root) == {**{path: one for path, one in before.items() if path != "b.txt"}, "c": files(root)["c"]}
    client.undo()
    assert {path: one[0::2] for path, one in files(root).items()} == {path: one[0::2] for path, one in before.items()}
    assert [receipt.outcome for receipt in client.calls.receipts] == ["failed", "committed"]


async def test_what_a_policy_denies_is_told_to_the_model_and_leaves_nothing(root: Path, workspace: Workspace) -> None:
    client, before = RingfenceSandboxClient(workspace, policies=[PathPolicy(deny=["secrets"])]), files(root)
    model = Scripted(
        command("mkdir secrets; echo > c"), patch("*** Delete File: b.txt", "*** Add File: secrets/key", "+k", number=1)
    )
    await run(model, client)
    for asked in model.asked[1:]:
        assert "secrets must not be created" in asked
    assert "secrets/key must not be created" in model.asked[2] or model.asked[2].count("must not be created") > 1
    assert files(root) == before


async def test_a_command_outlasts_what_the_model_waits_for_and_not_its_time(root: Path, workspace: Workspace) -> None:
    model = Scripted(command("sleep 0.3; echo c > c", yield_time_ms=1))
    await run(model, RingfenceSandboxClient(workspace))
    assert (root / "c").read_text() == "c\n"
    agent = SandboxAgent(
        name="Worker",
        model=(model := Scripted(command("echo > late; sleep 60"))),
        capabilities=ringfence_capabilities(command_seconds=0.5),
    )
    config = RunConfig(sandbox=SandboxRunConfig(client=RingfenceSandboxClient(workspace)), tracing_disabled=True)
    await Runner.run(agent, "Go.", run_config=config)
    assert "timed out after" in model.asked[1]
    assert not (root / "late").exists()


async def test_many_calls_at_once_take_turns(root: Path, workspace: Workspace) -> None:
    line = "test ! -e busy && touch busy && echo {0} > {0} && rm busy"
    calls: list[Any] = [command(line.format(f"x{number}"), number) for number in range(12)]
    calls += [patch(f"*** Add File: p{number}", "+p", number=number) for number in range(12, 20)]
    await run(Scripted(calls), RingfenceSandboxClient(workspace))
    assert sorted(step.paths for step in workspace.steps()) == sorted(
        [(f"x{number}",) for number in range(12)] + [(f"p{number}",) for number in range(12, 20)]
    )


async def test_a_cancelled_command_is_rolled_back(root: Path, session: RingfenceSession) -> None:
    before = files(root)
    running = asyncio.ensure_future(session.exec("echo > c; sleep 60"))
    while not (root / "c").exists():
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert files(root) == before


async def test_attacks_on_paths_are_refused(root: Path, session: RingfenceSession) -> None:
    (root.parent / "outside.txt").write_text("outside\n")
    (root / "link").symlink_to(root.parent)
    (root / "leaf").symlink_to(root.parent / "outside.txt")
    (root / "dangling").symlink_to(root.parent / "made.txt")
    before = files(root)
    following: list[Callable[[str], Any]] = [
        lambda path: session.read(Path(path)),
        lambda path: session.write(Path(path), io.BytesIO(b"x")),
        lambda path: session.mkdir(path, parents=True),
        lambda path: session.apply_patch({"type": "create_file", "path": path, "diff": "+x"}),
        lambda path: session.apply_patch({"type": "delete_file", "path": path}),
    ]
    any_path: list[Callable[[str], Any]] = [
        lambda path: session.rm(path, recursive=True),
        lambda path: session.mv("b.txt", path),
        lambda path: session.mv(path, "c.txt"),
    ]
    outside = ["../outside.txt", str(root.parent / "outside.txt"), "link/outside.txt", "a\\..\\..\\outside.txt"]
    attempts = [(attempt, path) for path in outside for attempt in (*following, *any_path)]
    attempts += [(attempt, path) for path in ("leaf", "dangling") for attempt in following]
    for attempt, path in attempts:
        with pytest.raises((SandboxError, ValueError)):
            await attempt(path)
    assert files(root) == before
    assert (root.parent / "outside.txt").read_text() == "outside\n"
    assert not (root.parent / "made.txt").exists()
    for refused in (session.rm("."), session.mv("d", "f"), session.exec("true", user="nobody")):
        with pytest.raises((SandboxError, ValueError)):
            await refused
    assert files(root) == before


async def test_an_archive_is_extracted_as_one_step_or_not_at_all(root: Path, session: RingfenceSession) -> None:
    def archive(*names: str) -> io.BytesIO:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as made:
            for name in names:
                member = tarfile.TarInfo(name)
                member.size = 1
                made.addfile(member, io.BytesIO(b"x"))
        stream.seek(0)
        return stream

    before = files(root)
    with pytest.raises(SandboxError):
        await session.extract("e/x.tar", archive("one", "../../two"))
    assert files(root) == before
    await session.extract("e/x.tar", archive("one", "two"))
    assert (root / "e/one").read_text() == "x"
    [step] = session.calls.workspace.steps()
    assert step.tool == "extract"


async def test_a_snapshot_is_the_number_of_a_step(root: Path, workspace: Workspace, tmp_path: Path) -> None:
    client, spec = RingfenceSandboxClient(workspace), LocalSnapshotSpec(base_path=tmp_path / "snapshots")
    async with await client.create(snapshot=spec) as first:
        await first.exec("echo 1 > c")
        state = client.serialize_session_state(first.state)
    [kept] = (tmp_path / "snapshots").iterdir()
    assert json.loads(kept.read_bytes()) == {"ringfence": str(root), "step": 1}
    (root / "b.txt").write_text("a person's\n")
    async with await client.resume(client.deserialize_session_state(json.loads(json.dumps(state)))) as again:
        assert (await again.read(Path("b.txt"))).read() == b"a person's\n"
        await again.exec("rm c; echo 2 > e")
    kept.write_text(json.dumps({"ringfence": str(root), "step": 1}))
    async with await client.create(snapshot=first.state.snapshot) as new:
        assert (await new.read(Path("c"))).read() == b"1\n"
        assert not (root / "e").exists()
        client.undo()
    assert ((root / "b.txt").read_text(), (root / "e").read_text()) == ("a person's\n", "2\n")
    with pytest.raises(SandboxError):
        await new.hydrate_workspace(io.BytesIO(b"no snapshot"))


async def test_a_manifest_is_written_and_what_is_not_here_is_refused(root: Path, workspace: Workspace) -> None:
    client = RingfenceSandboxClient(workspace)
    entries = {"m": Dir(children={"one.txt": File(content=b"1")})}
    async with await client.create(manifest=Manifest(entries=entries)) as session:
        assert (await session.read(Path("m/one.txt"))).read() == b"1"
    for manifest in (Manifest(root="/elsewhere"), Manifest(users=[User(name="somebody")])):
        with pytest.raises(ValueError):
            await client.create(manifest=manifest)


async def test_the_sessions_of_the_sdk_do_the_same(root: Path, workspace: Workspace, tmp_path: Path) -> None:
    async def told(session: Any) -> list[Any]:
        found: list[Any] = []

        async def note(work: Any) -> None:
            try:
                value = await work
                found.append(value.read() if isinstance(value, io.IOBase) else value)
            except (SandboxError, FileExistsError) as error:
                found.append(type(error).__name__)

        for line in ("echo out; echo err >&2; exit 3", "cat a.txt", "no-such-program"):
            result = await session.exec(line)
            found.append((result.exit_code, result.stdout, bool(result.stderr)))
        await note(session.exec("sleep 60", timeout=0.2))
        await note(session.mkdir("x/y"))
        await note(session.mkdir("x/y", parents=True))
        await note(session.mkdir("x/y", parents=True))
        await note(session.write(Path("x/y/z.txt"), io.BytesIO(b"z")))
        await note(session.read(Path("x/y/z.txt")))
        await note(session.read(Path("missing")))
        await note(session.read(Path("x")))
        await note(session.write(Path("x"), io.BytesIO(b"z")))
        await note(session.mv("x/y/z.txt", "x/w.txt"))
        await note(session.mv("x", "v"))
        await note(session.same_file("a.txt", "./a.txt"))
        await note(session.same_file("a.txt", "b.txt"))
        await note(session.rm("missing"))
        await note(session.rm("missing", recursive=True))
        await note(session.rm("x"))
        await note(session.apply_patch({"type": "create_file", "path": "n.txt", "diff": "+n"}))
        await note(session.apply_patch({"type": "create_file", "path": "n.txt", "diff": "+n"}))
        await note(session.apply_patch({"type": "update_file", "path": "n.txt", "diff": "@@\n-n\n+m"}))
        await note(session.apply_patch({"type": "update_file", "path": "n.txt", "diff": "@@\n-q\n+m"}))
        await note(session.apply_patch({"type": "delete_file", "path": "nothing"}))
        await note(session.apply_patch({"type": "delete_file", "path": "n.txt"}))
        await note(session.read_bounded(Path("a.txt"), max_bytes=3))
        found.append(
            [
                (one.path.rpartition("/")[2], one.kind, one.size)
                for one in sorted(await session.ls("x"), key=lambda one: one.path)
            ]
        )
        await note(session.ls("missing"))
        return found

    other = tmp_path / "other"
    other.mkdir()
    for name in ("a.txt", "b.txt"):
        (other / name).write_bytes((root / name).read_bytes())
    async with await UnixLocalSandboxClient().create(manifest=Manifest(root=str(other))) as session:
        expected = await told(session)
    async with await RingfenceSandboxClient(workspace).create() as session:
        assert await told(session) == expected


def test_the_programs_of_the_page_run(run_page: Callable[[str], int]) -> None:
    assert run_page("openai-agents") == 1
