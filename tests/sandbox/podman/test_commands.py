"""Commands in a container: what they get, what they give, and what is kept of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from captured_tree import names_in
from running_calls import current_call

from ringfence.errors import TransactionError
from ringfence.runtime import Cancellation, Session, tool_transaction
from ringfence_sandbox import HostFilesystem, PodmanSandbox, ScanLimits

MakeSandbox = Callable[..., PodmanSandbox]


def test_a_command_that_daemonises_ignores_signals_and_keeps_writing_has_ended(sandbox: PodmanSandbox) -> None:
    root = Path(sandbox.filesystem.root)
    writing = "trap '' TERM HUP INT; while :; do echo x >> late; done"
    result = sandbox.run(
        f'setsid sh -c "(setsid sh -c \\"{writing}\\" </dev/null >/dev/null 2>&1 &)" ; sleep 0.1; echo done'
    )
    assert (result.exit_code, result.stdout) == (0, "done\n")
    size = (root / "late").stat().st_size
    time.sleep(0.3)
    assert (root / "late").stat().st_size == size
    assert sandbox.run("ps -e | wc -l").stdout.strip() in ("4", "5")


def test_a_command_is_text_for_the_shell_or_a_program_and_its_arguments(sandbox: PodmanSandbox) -> None:
    assert sandbox.run("echo $((1 + 1)) | tr 2 3").stdout == "3\n"
    assert sandbox.run(["printf", "%s|", "a b", "$HOME", "*"]).stdout == "a b|$HOME|*|"
    assert sandbox.run(["sh", "-c", "exit 3"]).exit_code == 3


def test_a_command_gets_its_input_its_environment_and_its_directory(sandbox: PodmanSandbox) -> None:
    (Path(sandbox.filesystem.root) / "sub dir").mkdir()
    result = sandbox.run("cat; echo $NAME; pwd", stdin="given\n", env={"NAME": "a=b c"}, cwd="sub dir")
    assert result.stdout == "given\na=b c\n/workspace/sub dir\n"
    assert sandbox.run("cat").stdout == ""
    assert sandbox.run("pwd", cwd="/workspace/sub dir").stdout == "/workspace/sub dir\n"
    assert sandbox.run("cat", stdin=b"\xff" * 300_000).stdout.startswith("�")


def test_exit_codes_are_those_of_a_shell(sandbox: PodmanSandbox) -> None:
    assert sandbox.run("exit 7").exit_code == 7
    assert sandbox.run("kill -TERM $$").exit_code == 128 + 15
    assert sandbox.run(["no-such-program"]).exit_code == 127
    assert "No such file" in sandbox.run(["no-such-program"]).stderr
    assert sandbox.run(["/etc/passwd"]).exit_code == 126


def test_the_result_says_what_a_rollback_left(make_sandbox: MakeSandbox, tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    root.mkdir()
    (root / "large").write_text("x" * 100)
    with HostFilesystem(root, store=tmp_path / "store", limits=ScanLimits(max_file_bytes=50)) as filesystem:
        result = make_sandbox(filesystem=filesystem).run("echo y >> large; echo n > new; sleep 9", timeout_seconds=0.5)
    assert result.failure == "timed out after 0.5 seconds"
    assert "[large is not as before the call: it is not covered" in result.stderr
    assert "[rolled back: new; what they were is kept as aborted/" in result.stderr


def test_a_cancellation_ends_everything_and_takes_the_changes_back(sandbox: PodmanSandbox) -> None:
    root = Path(sandbox.filesystem.root)
    (root / "before").write_text("before\n")
    cancellation = Cancellation()

    def cancel(stream: str, data: bytes) -> None:
        cancellation.cancel()

    result = sandbox.run(
        "rm before; echo begun; sleep 3600 & sleep 110",
        timeout_seconds=120,
        on_output=cancel,
        cancellation=cancellation,
    )
    assert (result.exit_code, result.timed_out, result.failure) == (137, False, "ended because its call was cancelled")
    assert names_in(root) == ["before"]
    assert sandbox.run("true", cancellation=Cancellation()).failure == ""


def test_a_timeout_ends_everything_and_takes_the_changes_back(sandbox: PodmanSandbox) -> None:
    root = Path(sandbox.filesystem.root)
    (root / "before").write_text("before\n")
    waiting = "sleep 3600 & sleep 3600"
    result = sandbox.run(f"echo some; echo after > before; echo new > new; {waiting}", timeout_seconds=0.3)
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, "some\n")
    assert "timed out" in result.stderr
    assert result.changed_paths == ()
    assert sandbox.run("echo next").stdout == "next\n"


def test_output_is_bounded_and_the_whole_of_it_is_kept(sandbox: PodmanSandbox) -> None:
    result = sandbox.run("seq 1 100000; echo fine >&2")
    whole = "".join(f"{n}\n" for n in range(1, 100001))
    assert len(result.stdout) < 33 * 1024
    assert result.stdout.startswith("1\n2\n")
    assert result.stdout.endswith("99999\n100000\n")
    assert result.stderr == "fine\n"
    where = result.stdout.split("; read ")[1].split(" for all of it")[0]
    assert sandbox.filesystem.read(where, limit=-1).content == whole
    assert sandbox.filesystem.read(where, offset=50_000, limit=2).content == "50001\n50002\n"
    # It is no file of the tree, and cannot be written.
    assert names_in(Path(sandbox.filesystem.root)) == []
    with pytest.raises(PermissionError, match="kept as it is"):
        sandbox.filesystem.write(where, "forged")


def test_output_of_a_command_that_is_taken_back_is_kept(sandbox: PodmanSandbox) -> None:
    result = sandbox.run("seq 1 20000; sleep 20", timeout_seconds=1)
    assert result.timed_out
    where = result.stdout.split("; read ")[1].split(" for all of it")[0]
    assert sandbox.filesystem.read(where, offset=19_999).content == "20000\n"


def test_bytes_that_are_no_text_are_replaced(sandbox: PodmanSandbox) -> None:
    assert sandbox.run(["printf", r"a\377b\n"]).stdout == "a�b\n"


def test_output_comes_while_the_command_runs(sandbox: PodmanSandbox) -> None:
    came: list[tuple[str, bytes]] = []
    answered = Path(sandbox.filesystem.root, "answered")

    def hear(stream: str, data: bytes) -> None:
        came.append((stream, data))
        answered.touch()

    result = sandbox.run("echo one; until [ -e answered ]; do sleep 0.01; done; echo two >&2", on_output=hear)
    assert (result.exit_code, came) == (0, [("stdout", b"one\n"), ("stderr", b"two\n")])


def test_one_container_serves_many_commands(sandbox: PodmanSandbox) -> None:
    first = sandbox.start()
    sandbox.run("echo kept > /tmp/kept")
    assert sandbox.run("cat /tmp/kept").stdout == "kept\n"
    assert sandbox.start() is first


def test_a_working_directory_has_to_be_there(shared: PodmanSandbox) -> None:
    Path(shared.filesystem.root, "file").write_text("")
    Path(shared.filesystem.root, "loop").symlink_to("loop")
    for cwd, error in (("missing", FileNotFoundError), ("file", NotADirectoryError), ("loop", NotADirectoryError)):
        with pytest.raises(error, match="no directory of the workspace .* such as 'src', or below /workspace"):
            shared.run("true", cwd=cwd)


def test_a_command_in_a_call_belongs_to_the_call(sandbox: PodmanSandbox) -> None:
    root = Path(sandbox.filesystem.root)
    with pytest.raises(KeyError), tool_transaction(Session(), opaque=True) as call:
        sandbox.run("echo made > made")
        sandbox.filesystem.write("typed", "typed\n")
        assert current_call() is call
        raise KeyError
    assert names_in(root) == []


def test_a_command_in_a_call_that_is_not_opaque_is_refused(sandbox: PodmanSandbox) -> None:
    with tool_transaction(Session()), pytest.raises(TransactionError, match="opaque=True"):
        sandbox.run("true")


def test_each_command_is_a_step_that_can_be_undone(sandbox: PodmanSandbox) -> None:
    root = Path(sandbox.filesystem.root)
    (root / "a").write_text("one\n")
    result = sandbox.run("echo two > a; mkdir d; echo new > d/b")
    assert sorted(result.changed_paths) == ["a", "d", "d/b"]
    assert sandbox.workspace is not None
    assert [step.paths for step in sandbox.workspace.steps()] == [("a", "d", "d/b")]
    sandbox.workspace.undo()
    assert (root / "a").read_text() == "one\n"
    assert names_in(root) == ["a"]


def test_a_sandbox_that_is_closed_runs_nothing(make_sandbox: MakeSandbox) -> None:
    sandbox = make_sandbox()
    sandbox.run("true")
    sandbox.close()
    sandbox.close()
    with pytest.raises(ValueError, match="closed"):
        sandbox.run("true")


@pytest.mark.parametrize(
    "command", ["", "  ", [], [""], ["a\0b"], "echo \0", ["echo", "x" * 131_072], "echo " + "é" * 70_000]
)
def test_a_command_that_cannot_be_run_is_refused(shared: PodmanSandbox, command: str | list[str]) -> None:
    with pytest.raises(ValueError, match="command"):
        shared.run(command)


@pytest.mark.parametrize("command", [None, b"ls", 7, {"ls", "-l"}, ["ls", 3], ["ls", None], [b"ls"], ["ls", Path("a")]])
def test_a_command_of_another_type_is_refused(shared: PodmanSandbox, command: Any) -> None:
    with pytest.raises(TypeError, match="command"):
        shared.run(command)


@pytest.mark.parametrize(
    "options",
    [
        {"cwd": Path("a")},
        {"stdin": 1},
        {"env": ["A=1"]},
        {"env": {"A": 1}},
        {"env": {"A=": "1"}},
        {"env": {"A": "x" * 131_070}},
        {"timeout_seconds": "30"},
        *({"timeout_seconds": seconds} for seconds in (0, -1, float("nan"), float("inf"), 1e9)),
    ],
)
def test_what_a_command_cannot_be_run_with_is_refused(shared: PodmanSandbox, options: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"cwd|stdin|variable|env|timeout_seconds"):
        shared.run("true", **options)


def test_arguments_may_be_empty_and_as_long_as_the_kernel_takes(shared: PodmanSandbox) -> None:
    assert shared.run(["printf", "%s|", "", "a", ""]).stdout == "|a||"
    assert shared.run(["sh", "-c", "echo ${#1}", "sh", "x" * 131_071]).stdout == "131071\n"
    many = shared.run(["true", *["x" * 1000] * 3000])
    assert many.exit_code == 126
    assert "Argument list too long" in many.stderr


def test_a_program_that_is_not_there_is_said_with_what_to_do(shared: PodmanSandbox) -> None:
    Path(shared.filesystem.root, "script").write_text("#!/no/such/interpreter\n")
    Path(shared.filesystem.root, "script").chmod(0o755)
    for command, advice in (
        (["no-such"], "No such file or directory: no-such; the container's PATH has no such program"),
        (["ls -l"], "a line for the shell is one text, not a list"),
        (["/no/such"], "that, or the interpreter which its first line names, is not in the container"),
        (["/workspace/script"], "that, or the interpreter which its first line names, is not in the container"),
    ):
        result = shared.run(command)
        assert result.exit_code == 127
        assert advice in result.stderr
