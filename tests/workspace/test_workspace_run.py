"""Commands on this machine as transactions: what they print, change and leave running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from captured_tree import shape
from killing import killed_at

from ringfence import Session
from ringfence.errors import CallCancelledError, CallDeniedError, TransactionError
from ringfence.limits import Cancellation
from ringfence.prompt import ApprovalPolicy, ApprovalRequest, DeletionLimitPolicy, PathPolicy
from ringfence.runtime import tool_transaction
from ringfence_sandbox import ScanLimits, Workspace

BEAT = "while :; do date +%N > beat; sleep 0.02; done"
"""For a shell: it writes into the tree as long as it lives."""
AWAY = f"(setsid sh -c '{BEAT}' &); while [ ! -s beat ]; do sleep 0.01; done"
"""One such in a session of its own, of which nobody is the parent any more."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/a").write_text("one\n")
    return tmp_path / "root"


def is_still(path: Path) -> bool:
    """Whether nobody writes a file any more."""
    before = path.read_bytes() if path.exists() else None
    time.sleep(0.1)
    return before == (path.read_bytes() if path.exists() else None)


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.01)


def test_a_command_that_succeeds_is_one_step(root: Path, workspace: Workspace) -> None:
    done = workspace.run(["sh", "-c", "cat >> a; echo out; echo err >&2"], stdin="two\n", env={"X": "1"})
    assert (done.exit_code, done.stdout, done.stderr, done.outcome) == (0, "out\n", "err\n", "committed")
    assert (root / "a").read_text() == "one\ntwo\n"
    assert done.step == workspace.steps()[-1]
    assert done.step is not None
    assert done.receipt is not None
    assert done.receipt.commit == done.step.commit
    assert [change.path for change in done.changes] == [*done.changed_paths] == ["a"]
    record = done.receipt.to_json()
    assert record["params"] == {
        "command": None,
        "argv": ["sh", "-c", "cat >> a; echo out; echo err >&2"],
        "cwd": "",
        "env": {"X": "(set)"},
        "stdin": "4 bytes",
        "timeout_seconds": 600.0,
        "leave_running": False,
    }
    assert json.dumps(record)
    assert workspace.undo().has_changed
    assert (root / "a").read_text() == "one\n"


def test_a_command_that_fails_is_rolled_back_and_what_it_was_is_kept_aside(root: Path, workspace: Workspace) -> None:
    before = shape(root)
    done = workspace.run("echo more >> a; mkdir d; exit 7", shell=True)
    assert (done.exit_code, done.outcome, done.step, done.changed_paths) == (7, "failed", None, ())
    assert [change.path for change in done.changes] == ["a", "d"]
    assert shape(root) == before
    assert workspace.aborted()[0].call_id == done.receipt.call_id if done.receipt else False


def test_on_error_keep_keeps_a_failure_but_never_a_timeout(root: Path, workspace: Workspace) -> None:
    assert workspace.run("echo more >> a; exit 7", shell=True, on_error="keep").kept
    before = shape(root)
    late = workspace.run("echo more >> a; sleep 60", shell=True, on_error="keep", timeout_seconds=0.3)
    assert (late.exit_code, late.timed_out, late.outcome) == (124, True, "failed")
    assert shape(root) == before


def test_a_rollback_that_cannot_keep_what_it_removes_does_not_happen_unless_it_is_to_be_discarded(
    root: Path, tmp_path: Path
) -> None:
    with Workspace.open(root, store=tmp_path / "store", limits=ScanLimits(max_file_bytes=1000)) as workspace:
        before = shape(root)
        script = "head -c 2000 /dev/zero > large; echo two > a; mkfifo p; exit 3"
        thrown = workspace.run(script, shell=True, discard=True)
        assert (thrown.outcome, thrown.rollback_refused) == ("failed", False)
        assert shape(root) == before
        assert workspace.run(script, shell=True, dry_run=True).rollback_refused is False
        denied = workspace.run(script, shell=True, on_error="keep", policies=[PathPolicy(deny=["a"])])
        assert denied.outcome == "denied"
        assert shape(root) == before
        refused = workspace.run(script, shell=True)
        assert (refused.exit_code, refused.outcome, refused.kept, refused.rollback_refused) == (
            3,
            "failed",
            False,
            True,
        )
        assert refused.changed_paths == ("a", "large", "p")
        assert "large" in " ".join(refused.notes)
        assert (root / "large").stat().st_size == 2000
        assert (root / "a").read_text() == "two\n"
        assert refused.receipt is not None
        assert "large" in refused.receipt.message
        later = workspace.run("echo three > a; exit 1", shell=True)
        assert later.rollback_refused is False, "only what the command itself did counts"
        assert (root / "a").read_text() == "two\n"
    with Workspace.open(root, store=tmp_path / "store") as workspace:
        assert workspace.recovered is None


def test_a_command_that_leaves_only_pipes_and_sockets_is_rolled_back(root: Path, workspace: Workspace) -> None:
    before = shape(root)
    assert workspace.run("mkfifo p; exit 3", shell=True).rollback_refused is False
    assert shape(root) == before


def test_a_dry_run_says_what_would_change_and_changes_nothing(root: Path, workspace: Workspace) -> None:
    before = shape(root)
    done = workspace.run(["touch", "new"], dry_run=True)
    assert (done.exit_code, done.outcome, [change.path for change in done.changes]) == (0, "rolled_back", ["new"])
    assert shape(root) == before


def test_a_policy_that_denies_rolls_back_and_is_in_the_receipt(root: Path, workspace: Workspace) -> None:
    before = shape(root)
    done = workspace.run(["touch", "kept", "no"], policies=[PathPolicy(deny=["no"])])
    assert (done.exit_code, done.outcome, done.step) == (0, "denied", None)
    assert done.receipt is not None
    assert [(one.policy, one.allowed) for one in done.receipt.policies] == [("paths", False)]
    assert shape(root) == before
    assert workspace.run(["touch", "yes"], policies=[PathPolicy(deny=["no"])]).kept


def test_a_person_is_asked_last_and_sees_output_and_patch(root: Path, workspace: Workspace) -> None:
    asked: list[tuple[str, bytes, int | None]] = []

    def ask(request: ApprovalRequest) -> None:
        asked.append((request.output, request.diff, request.exit_code))

    policies = [ApprovalPolicy(ask), PathPolicy(deny=["no"])]
    assert workspace.run(["touch", "no"], policies=policies).outcome == "denied"
    assert asked == []
    assert workspace.run("echo said; echo two > a", shell=True, policies=policies).outcome == "denied"
    [(output, patch, code)] = asked
    assert "said" in output
    assert b"+two" in patch
    assert code == 0
    assert (root / "a").read_text() == "one\n"


def test_a_limit_on_deletions_counts_over_the_commands_of_an_opening(root: Path, workspace: Workspace) -> None:
    (root / "b").write_text("")
    limit = [DeletionLimitPolicy(max_files=1)]
    assert workspace.run(["rm", "a"], policies=limit).kept
    assert workspace.run(["rm", "b"], policies=limit).outcome == "denied"
    assert (root / "b").exists()


@pytest.mark.parametrize(
    "left",
    [
        f"({BEAT}) &",
        f"setsid sh -c '{BEAT}' &",
        f"nohup sh -c '{BEAT}' >/dev/null 2>&1 &",
        f"(setsid sh -c '({BEAT}) & exit' &) &",
        f"trap '' TERM HUP INT; ({BEAT}) &",
    ],
    ids=["background", "setsid", "nohup", "double fork", "deaf"],
)
@pytest.mark.parametrize("code", [0, 1])
def test_what_a_command_leaves_running_has_ended_when_it_returns(
    root: Path, workspace: Workspace, left: str, code: int
) -> None:
    done = workspace.run(f"{left} while [ ! -s beat ]; do sleep 0.01; done; exit {code}", shell=True)
    assert done.leftovers >= 1
    assert is_still(root / "beat")
    assert (root / "beat").exists() == (code == 0)


def test_a_daemon_that_closes_everything_and_leaves_its_session_is_ended(root: Path, workspace: Workspace) -> None:
    daemon = (
        "import os, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "os.closerange(0, 1000); os.umask(0)\n"
        "while True:\n"
        "    open('beat', 'w').write(str(time.monotonic_ns())); time.sleep(0.02)\n"
    )
    script = 'python3 -c "$0"; while [ ! -s beat ]; do sleep 0.01; done'
    done = workspace.run(["sh", "-c", script.replace("python3", sys.executable), daemon])
    assert done.kept
    assert done.leftovers >= 1
    assert is_still(root / "beat")


def test_what_is_to_go_on_running_goes_on_and_the_receipt_says_so(root: Path, workspace: Workspace) -> None:
    done = workspace.run("sh -c 'sleep 30; exit' >/dev/null 2>&1 & echo $!", shell=True, leave_running=True)
    process = int(done.stdout)
    try:
        os.kill(process, 0)
        assert done.receipt is not None
        assert "'leave_running': True" in str(done.receipt.to_json()["params"])
        assert workspace.run(["true"]).kept
        os.kill(process, 0)
    finally:
        for one in (process, *_children(process)):
            os.kill(one, signal.SIGKILL)


def _children(process: int) -> list[int]:
    return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]


def test_a_flood_of_output_is_bounded_and_says_where_the_rest_is(workspace: Workspace) -> None:
    done = workspace.run("head -c 3000000 /dev/zero | tr '\\0' x; echo end; head -c 100000 /dev/zero >&2", shell=True)
    assert len(done.stdout) < 40_000
    assert done.stdout.endswith("end\n")
    assert "bytes left out; read .ringfence-output/" in done.stdout
    assert "bytes left out" in done.stderr
    name = done.stdout.partition("; read ")[2].partition(" for all")[0]
    assert len(workspace.filesystem.read_bytes(name).content) == 3_000_004


def test_input_that_nobody_reads_and_output_that_nobody_waits_for(workspace: Workspace) -> None:
    assert workspace.run(["true"], stdin=b"x" * 1_000_000).exit_code == 0
    assert workspace.run(["cat"]).stdout == ""
    assert workspace.run(["wc", "-c"], stdin="y" * 300_000).stdout.strip() == "300000"


@pytest.mark.parametrize(
    ("command", "code"),
    [(["no-such-program"], 127), (["./a"], 126), (["sh", "-c", "kill -TERM $$"], 143), (["false"], 1)],
)
def test_exit_codes_are_a_shells(workspace: Workspace, command: list[str], code: int) -> None:
    done = workspace.run(command)
    assert (done.exit_code, done.outcome) == (code, "failed")


def test_a_command_has_its_directory_variables_default_signals_and_a_quiet_git(
    root: Path, workspace: Workspace
) -> None:
    (root / "d").mkdir()
    done = workspace.run(
        "pwd; echo $A; git config gc.auto; git config maintenance.auto", shell=True, cwd="d", env={"A": "b"}
    )
    assert done.stdout == f"{root}/d\nb\n0\nfalse\n"
    ignored = workspace.run(["grep", "-E", "Sig(Ign|Blk)", "/proc/self/status"]).stdout
    of_the_c_library = 3 << 31  # which lets nobody set 32 and 33: what ignores them hands that on
    assert {int(line.split()[1], 16) & ~of_the_c_library for line in ignored.splitlines()} == {0}
    found = workspace.run(["sh", "-c", "ls /proc/self/fd | wc -l; ps -o sid= -p $$"]).stdout.split()
    assert int(found[0]) <= 4
    assert int(found[1]) != os.getsid(0)


def test_the_callers_own_process_stays_as_it_is(workspace: Workspace) -> None:
    def state() -> object:
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        own = subprocess.Popen(["sh", "-c", "sleep 0.05 & exit 3"])
        return handlers, os.umask(os.umask(0o022)), os.getcwd(), dict(os.environ), own.wait()

    before = state()
    workspace.run(f"({BEAT}) & exit 0", shell=True)
    assert state() == before


@pytest.mark.parametrize(
    "call",
    [
        lambda workspace: workspace.run("echo a text"),
        lambda workspace: workspace.run(["a", "list"], shell=True),
        lambda workspace: workspace.run([]),
        lambda workspace: workspace.run(["x"], on_error="never"),
        lambda workspace: workspace.run(["x"], timeout_seconds=0),
        lambda workspace: workspace.run(["x"], cwd="nowhere"),
        lambda workspace: workspace.run(["x"], cwd="../.."),
        lambda workspace: workspace.run(["x"], policies=[object()]),
    ],
)
def test_what_cannot_be_asked_for_raises_and_leaves_no_step(
    workspace: Workspace, call: Callable[[Workspace], object]
) -> None:
    with pytest.raises((ValueError, TypeError, OSError)):
        call(workspace)
    assert workspace.steps() == []
    assert workspace.run(["true"]).kept


def test_a_command_in_a_typed_call_is_refused_and_in_an_opaque_one_a_part_of_it(
    root: Path, workspace: Workspace
) -> None:
    with pytest.raises(TransactionError), workspace.transaction("typed", opaque=False):
        workspace.run(["touch", "no"])
    with workspace.transaction("outer") as outer:
        inner = workspace.run(["touch", "one"])
        workspace.filesystem.write("two", "typed")
        failed = workspace.run("touch three; exit 1", shell=True)
    assert (inner.step, inner.outcome, failed.outcome) == (None, "committed", "failed")
    assert outer.step is not None
    assert outer.step.paths == ("one", "two")
    assert outer.receipt is not None
    assert inner.receipt is not None
    assert inner.receipt.parent_call == outer.receipt.call_id


def test_a_second_command_on_the_same_opening_waits_for_the_first(root: Path, workspace: Workspace) -> None:
    begun = threading.Event()
    results: list[int] = []

    def first() -> None:
        begun.set()
        results.append(workspace.run("sleep 0.3; echo first >> order", shell=True).exit_code)

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait()
    time.sleep(0.1)
    results.append(workspace.run("echo second >> order", shell=True).exit_code)
    thread.join()
    assert results == [0, 0]
    assert sorted((root / "order").read_text().split()) == ["first", "second"]
    assert len(workspace.steps()) == 2


def test_a_cancellation_ends_the_command_and_rolls_it_back(root: Path, workspace: Workspace) -> None:
    before, cancellation = shape(root), Cancellation()
    threading.Timer(0.2, cancellation.cancel).start()
    with pytest.raises(CallCancelledError):
        workspace.run(f"({BEAT}) & sleep 60", shell=True, cancellation=cancellation)
    assert is_still(root / "beat")
    assert shape(root) == before


def test_an_interrupt_ends_the_command_and_rolls_it_back(root: Path, workspace: Workspace) -> None:
    before = shape(root)

    def interrupt() -> None:
        wait_for((root / "beat").exists)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        workspace.run(f"({BEAT}) & sleep 60", shell=True)
    assert is_still(root / "beat")
    assert shape(root) == before
    assert workspace.run(["true"]).kept


def test_a_supervisor_that_somebody_kills_takes_the_command_and_its_changes_along(
    root: Path, workspace: Workspace
) -> None:
    before = shape(root)
    with pytest.raises(Exception, match="supervisor"):
        workspace.run(f"{AWAY}; kill -9 $PPID; sleep 60", shell=True)
    assert is_still(root / "beat")
    assert shape(root) == before
    assert workspace.run(["true"]).kept


def test_a_caller_that_is_killed_during_a_command_takes_all_of_it_along(root: Path, tmp_path: Path) -> None:
    before = shape(root)
    script = f"{AWAY}; touch ready; sleep 60"

    def work(kill: Callable[[str], None]) -> None:
        def killer() -> None:
            wait_for((root / "ready").exists)
            kill("now")

        threading.Thread(target=killer).start()
        with Workspace.open(root, store=tmp_path / "store") as workspace:
            workspace.run(script, shell=True)

    assert killed_at(0, work)
    with Workspace.open(root, store=tmp_path / "store") as workspace:
        assert workspace.recovered is not None
        assert workspace.recovered.outcome == "rolled back"
        assert workspace.steps() == []
    assert is_still(root / "beat")
    assert shape(root) == before


def test_a_caller_and_a_supervisor_that_are_both_killed_leave_it_to_the_next_opening(
    root: Path, tmp_path: Path
) -> None:
    before = shape(root)
    script = f"{AWAY}; kill -STOP $PPID; touch ready; sleep 60"

    def work(kill: Callable[[str], None]) -> None:
        def killer() -> None:
            wait_for((root / "ready").exists)
            [supervisor] = _children(os.getpid())
            os.kill(supervisor, signal.SIGKILL)
            kill("now")

        threading.Thread(target=killer).start()
        with Workspace.open(root, store=tmp_path / "store") as workspace, suppress(Exception):
            workspace.run(script, shell=True)

    assert killed_at(0, work)
    with Workspace.open(root, store=tmp_path / "store") as workspace:
        assert workspace.recovered is not None
        assert workspace.recovered.outcome == "rolled back"
    assert is_still(root / "beat")
    assert shape(root) == before


def test_a_workspace_that_was_opened_read_only_runs_nothing(root: Path, workspace: Workspace) -> None:
    with (
        Workspace.open(root, store=root.parent / "store", read_only=True) as reader,
        pytest.raises(PermissionError),
    ):
        reader.run(["true"])


def test_a_tree_that_cannot_be_written_is_looked_at_and_left_as_it_is(root: Path, workspace: Workspace) -> None:
    os.chmod(root, 0o555)
    try:
        before = shape(root)
        done = workspace.run("cat a; touch b", shell=True)
        if os.geteuid() != 0:
            assert done.outcome == "failed"
            assert shape(root) == before
        assert done.stdout == "one\n"
    finally:
        os.chmod(root, 0o755)


def test_a_transaction_takes_back_what_it_is_told_to(root: Path, workspace: Workspace) -> None:
    before = shape(root)
    with workspace.transaction("import data") as block:
        subprocess.run("echo two >> a; touch b", shell=True, cwd=root, check=True)
        report = block.rollback()
        assert shape(root) == before
    assert block.report == report
    assert block.step is None
    assert block.receipt is not None
    assert block.receipt.outcome == "rolled_back"
    assert [change.path for change in block.changes] == ["a", "b"]


def test_a_transaction_is_a_step_a_failure_or_denied(root: Path, workspace: Workspace) -> None:
    with workspace.transaction("import data") as block:
        subprocess.run("echo two >> a", shell=True, cwd=root, check=True)
    assert block.step == workspace.steps()[-1]
    assert block.step is not None
    assert block.step.tool == "import data"
    before = shape(root)
    with pytest.raises(ZeroDivisionError), workspace.transaction("fails") as failing:
        (root / "b").write_text("b")
        _ = 1 / 0
    assert failing.receipt is not None
    assert (failing.receipt.outcome, [change.path for change in failing.changes]) == ("failed", ["b"])
    with (
        pytest.raises(CallDeniedError, match="paths") as denied,
        workspace.transaction("denied", policies=[PathPolicy(deny=["b"])]) as block,
    ):
        (root / "b").write_text("b")
    assert denied.value.policy == "paths"
    assert block.receipt is not None
    assert block.receipt.outcome == "denied"
    assert shape(root) == before


def test_a_transaction_within_a_typed_call_is_typed_unless_it_says_otherwise(root: Path, workspace: Workspace) -> None:
    class Here:
        participants = (workspace.filesystem,)

    with tool_transaction(Session(), Here(), tag="outer"), workspace.transaction("inner"):
        workspace.filesystem.write("b", "typed")
    assert workspace.steps()[-1].paths == ("b",)


@pytest.mark.parametrize("cwd", ["/tmp", "nowhere", "../..", "a"])
def test_a_directory_that_is_none_of_the_workspace_is_named_with_what_one_is(workspace: Workspace, cwd: str) -> None:
    with pytest.raises(OSError, match=rf"^cwd is '{cwd}', which is no directory of the workspace"):
        workspace.run(["true"], cwd=cwd)


def test_a_step_says_which_command_it_is_of(root: Path, workspace: Workspace) -> None:
    done = workspace.run(["sh", "-c", "echo two >> a\necho three >> a"])
    assert done.step is not None
    assert done.step.title == "sh -c 'echo two >> a echo three >> a'"
    workspace.run("touch " + "x" * 200, shell=True)
    workspace.run(["touch", "\x1b[31mred"])
    workspace.run(["touch", "b"], tag="import", title="")
    long, odd, said = workspace.steps()[1:]
    assert len(long.title) == 100
    assert long.title.endswith("…")
    assert "\x1b" not in odd.title
    assert (said.tool, said.title) == ("import", "")
    assert [entry.title for entry in workspace.log()][:3] == ["", odd.title, long.title]
    assert workspace.show(1).step.title == done.step.title


@pytest.mark.parametrize(
    ("make", "outside"),
    [
        ("git init -q root", None),
        ("mkdir root", None),
        ("git init -q . && mkdir root", ".git"),
        (
            (
                "git init -q o && git -C o -c user.name=n -c user.email=e commit -q --allow-empty -m m"
                " && git -C o worktree add -q ../root"
            ),
            "o/.git",
        ),
        ("git init -q --separate-git-dir=data root", "data"),
    ],
    ids=["in the root", "no repository", "a directory of it", "a linked worktree", "elsewhere"],
)
def test_git_data_outside_of_the_root_is_known(tmp_path: Path, make: str, outside: str | None) -> None:
    place = tmp_path / "place"
    place.mkdir()
    subprocess.run(make, shell=True, cwd=place, check=True)
    with Workspace.open(place / "root", store=tmp_path / "store") as workspace:
        assert workspace.filesystem.git_outside == (None if outside is None else str(place / outside))
