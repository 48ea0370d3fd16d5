"""The executor of a sandbox as the first process of a PID namespace, without a container around it."""

from __future__ import annotations

import ast
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import pytest

from ringfence_sandbox.container import executor as protocol
from ringfence_sandbox.container.channel import EXECUTOR, SOCKET_NAME, Channel, ExecutorLostError, Listener
from ringfence_workspace.commands import CommandExit

AS_ROOT = os.geteuid() == 0
# One that another user may execute, as a container has it.
PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else os.path.realpath(sys.executable)
BASH = """
set -e
mount -t tmpfs none /mnt
mkdir -m 755 /mnt/channel; mkdir -m 1777 /mnt/work; touch /mnt/executor.py
mount --bind "$1" /mnt/channel; mount -o remount,ro,bind /mnt/channel
mount --bind "$2" /mnt/executor.py
mount --bind "$3" /mnt/work
shift 3
exec "$@"
"""
NOTHING = ["--bounding-set", "-all", "--inh-caps", "-all"]


@dataclass
class Sandboxed:
    """A running executor, and what a command printed."""

    channel: Channel
    unshare: subprocess.Popen[bytes]
    work: Path
    out: dict[str, bytearray] = field(default_factory=dict)

    def run(
        self, command: str | Sequence[str], stdin: bytes | None = None, timeout: float = 20.0, **env: str
    ) -> CommandExit:
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else command
        self.out = {"stdout": bytearray(), "stderr": bytearray()}
        return self.channel.run(
            argv,
            cwd="/mnt/work",
            env=env,
            stdin=stdin,
            timeout_seconds=timeout,
            on_output=lambda stream, data: self.out[stream].extend(data),
        )

    @property
    def text(self) -> str:
        return self.out["stdout"].decode()

    def python(self, code: str, timeout: float = 20.0) -> CommandExit:
        return self.run([PYTHON, "-I", "-S", "-c", code], timeout=timeout)

    def pids(self) -> list[int]:
        """The first process and all others of the namespace, as the machine sees them."""
        namespace = os.stat(f"/proc/{first_process(self.unshare)}/ns/pid").st_ino
        found: list[int] = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.stat(f"/proc/{name}/ns/pid").st_ino == namespace:
                    found.append(int(name))
            except OSError:
                continue
        return found


def first_process(unshare: subprocess.Popen[bytes]) -> int:
    children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
    while not children.read_text():
        assert unshare.poll() is None
        time.sleep(0.005)
    return int(children.read_text())


def started(listener_directory: str, work: Path, *, uid: int = 1000, processes: int = 0) -> subprocess.Popen[bytes]:
    inside = ["setpriv", *NOTHING]
    inside += ["--reuid", str(uid), "--regid", str(uid), "--clear-groups"] if AS_ROOT else []
    inside += ["prlimit", f"--nproc={processes}"] if processes else []
    inside += [PYTHON, "-I", "-S", "-B", "/mnt/executor.py", f"/mnt/channel/{SOCKET_NAME}"]
    new = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *([] if AS_ROOT else ["--map-root-user"])]
    command = [*new, "sh", "-c", BASH, "sh", listener_directory, EXECUTOR, work, *inside]
    return subprocess.Popen(command, env={"PATH": os.environ["PATH"], "RINGFENCE_SECRET": "x"})


@contextmanager
def sandboxed(*, uid: int = 1000, processes: int = 0) -> Iterator[Sandboxed]:
    with tempfile.TemporaryDirectory() as private:
        work = Path(private) / "work"
        work.mkdir()
        work.chmod(0o777)
        with Listener(private) as listener:
            unshare = started(listener.directory, work, uid=uid, processes=processes)
            try:
                with listener.accept(20, pid=first_process(unshare)) as channel:
                    yield Sandboxed(channel, unshare, work)
                    assert channel.close()
            finally:
                unshare.kill()
                unshare.wait()


@pytest.fixture
def sandbox() -> Iterator[Sandboxed]:
    with sandboxed() as it:
        yield it


DAEMON = """
import os, signal, sys, time
if os.fork(): sys.exit(7)
os.setsid()
if os.fork(): os._exit(0)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
while True:
    with open("heartbeat", "ab") as file: file.write(b".")
    time.sleep(0.001)
"""


def test_a_daemon_that_ignores_signals_and_keeps_writing_has_ended_when_run_returns(sandbox: Sandboxed) -> None:
    ended = sandbox.python(DAEMON)
    assert (ended.exit_code, ended.leftovers, ended.timed_out) == (7, 1, False)
    size = (sandbox.work / "heartbeat").stat().st_size
    assert size > 0
    assert len(sandbox.pids()) == 1
    time.sleep(0.1)
    assert (sandbox.work / "heartbeat").stat().st_size == size


def test_output_exit_code_and_directory_come_back(sandbox: Sandboxed) -> None:
    ended = sandbox.run("pwd; echo oops >&2; exit 3")
    assert (ended.exit_code, ended.problem) == (3, "")
    assert sandbox.out == {"stdout": b"/mnt/work\n", "stderr": b"oops\n"}


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["false"], 1),
        (["sh", "-c", "exit 255"], 255),
        (["sh", "-c", "kill -TERM $$"], 128 + signal.SIGTERM),
        (["sh", "-c", "kill -KILL $$"], 128 + signal.SIGKILL),
        (["no-such-program"], 127),
        (["./no-such-program"], 127),
        ([""], 127),
        (["/"], 126),
        (["/etc/passwd"], 126),
        (["true", "zero \0 character"], 126),
        (["true", "x" * 200_000], 126),
        (["true", *["x" * 100_000] * 50], 126),
        ([], 126),
    ],
)
def test_exit_codes_are_a_shells(sandbox: Sandboxed, command: list[str], code: int) -> None:
    ended = sandbox.run(command)
    assert ended.exit_code == code
    assert bool(ended.problem) == (code in (126, 127))
    assert sandbox.run("true").exit_code == 0


def test_a_directory_that_is_not_there_is_an_answer(sandbox: Sandboxed) -> None:
    ended = sandbox.channel.run(
        ["true"], cwd="/nowhere", env={}, stdin=None, timeout_seconds=5, on_output=lambda *_: None
    )
    assert (ended.exit_code, ended.problem) == (127, "No such file or directory: /nowhere")


def test_a_time_limit_may_be_as_long_as_one_likes(sandbox: Sandboxed) -> None:
    assert sandbox.run("true", timeout=1e308).exit_code == 0


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_command_has_a_time_limit(sandbox: Sandboxed, seconds: float) -> None:
    with pytest.raises(ValueError, match="time limit"):
        sandbox.run("true", timeout=seconds)


SURROUNDINGS = """
import os, signal
print(sorted(os.listdir("/proc/self/fd")), os.umask(0), open("/proc/self/oom_score_adj").read().strip())
print(os.getsid(0) == os.getpid() == os.getpgid(0))
print([n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN and n not in (13, 25)])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), sorted(os.environ), os.environ["A"])
"""


def test_a_command_gets_nothing_but_what_it_was_given(sandbox: Sandboxed) -> None:
    assert sandbox.run([PYTHON, "-I", "-S", "-c", SURROUNDINGS], A="b=c\nd").exit_code == 0
    # 3 is the listing's own; Python ignores two signals by itself.
    descriptors, session, ignored, rest = sandbox.text.splitlines()[:4]
    assert descriptors == "['0', '1', '2', '3'] 18 1000"
    assert (session, ignored) == ("True", "[]")
    assert rest.startswith("set() ['A', ")
    assert "RINGFENCE" not in rest
    assert sandbox.run("grep -E 'Sig(Ign|Blk)|Cap(Prm|Eff|Bnd)|NoNewPrivs' /proc/self/status").exit_code == 0
    # Ignored are 32 and 33, which are the C library's own: it does that in every process that it spawns.
    assert {line.split()[1].lstrip("0") for line in sandbox.text.splitlines()} <= {"", "1", "180000000"}
    assert "NoNewPrivs:\t1\n" in sandbox.text


def test_names_and_values_that_are_not_utf8_go_through(sandbox: Sandboxed) -> None:
    odd = os.fsdecode(b"a\xff\nb")
    assert sandbox.run(["sh", "-c", 'printf %s "$0$X"', odd], X=odd).exit_code == 0
    assert sandbox.out["stdout"] == b"a\xff\nba\xff\nb"


def test_stdin_is_fed_while_output_comes_back(sandbox: Sandboxed) -> None:
    data = os.urandom(5_000_000) * 4
    assert sandbox.run(["cat"], stdin=data).exit_code == 0
    assert sandbox.out["stdout"] == data


@pytest.mark.parametrize("stdin", [b"", b"x" * 10_000_000])
def test_a_command_need_not_read_its_stdin(sandbox: Sandboxed, stdin: bytes) -> None:
    assert sandbox.run("sleep 0.05; exit 9", stdin=stdin).exit_code == 9


def test_without_stdin_there_is_nothing_to_read(sandbox: Sandboxed) -> None:
    assert sandbox.run(["cat"], timeout=5).exit_code == 0


@pytest.mark.parametrize(
    "command",
    [
        "while :; do :; done",
        "trap '' TERM INT HUP; while :; do sleep 1; done",
        "yes",
        "yes >&2 & yes",
        "setsid sh -c 'while :; do sleep 0.01; done' & sleep 100",
        "kill -STOP $$",
        "cat /dev/zero | cat | cat",
    ],
)
def test_a_timeout_ends_everything(sandbox: Sandboxed, command: str) -> None:
    ended = sandbox.channel.run(
        ["sh", "-c", command], cwd="/", env={}, stdin=None, timeout_seconds=0.3, on_output=lambda *_: None
    )
    assert (ended.exit_code, ended.timed_out) == (124, True)
    assert len(sandbox.pids()) == 1
    assert sandbox.run("true").exit_code == 0


def test_a_background_process_that_holds_stdout_is_not_waited_for(sandbox: Sandboxed) -> None:
    ended = sandbox.run("sleep 3600 & echo started")
    assert (ended.exit_code, ended.leftovers, sandbox.text) == (0, 1, "started\n")


def test_what_a_background_process_says_at_once_is_not_lost(sandbox: Sandboxed) -> None:
    assert sandbox.run("(sleep 0.02; echo late) & echo early").leftovers == 0
    assert sandbox.text == "early\nlate\n"


FORK_BOMB = """
import ast
import json
import os
import select
import shutil
while True:
    try: os.fork()
    except OSError: pass
"""


def test_a_fork_bomb_ends_and_the_next_command_runs() -> None:
    with sandboxed(uid=61001, processes=150) as sandbox:
        ended = sandbox.python(FORK_BOMB, timeout=1)
        assert (ended.timed_out, ended.killed_by_oom) == (True, False)
        assert ended.leftovers > 50
        assert len(sandbox.pids()) == 1
        assert sandbox.run("echo fine").exit_code == 0


ALL_TAKEN = """
import os, time
while True:
    try:
        if not os.fork(): time.sleep(100)
    except OSError: break
print("full", flush=True)
time.sleep(100)
"""


def test_when_all_processes_are_taken_kill_still_works() -> None:
    with sandboxed(uid=61002, processes=50) as sandbox:

        def kill_when_full(*_: object) -> None:
            sandbox.channel.kill()

        ended = sandbox.channel.run(
            [PYTHON, "-c", ALL_TAKEN], cwd="/", env={}, stdin=None, timeout_seconds=20, on_output=kill_when_full
        )
        assert (ended.exit_code, ended.timed_out, ended.leftovers) == (137, False, 48)
        assert sandbox.run("true").exit_code == 0


def test_a_command_that_cannot_get_a_process_is_an_answer() -> None:
    with sandboxed(uid=61003, processes=1) as sandbox:  # the executor is one
        ended = sandbox.run("true")
        assert (ended.exit_code, ended.problem) == (126, "Resource temporarily unavailable: /bin/sh")
        sandbox.channel.kill()
        assert sandbox.run("true").exit_code == 126


def resident(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_flood_of_output_costs_no_memory_on_either_side(sandbox: Sandboxed) -> None:
    (first,) = sandbox.pids()
    before = resident("self"), resident(first)
    most = [0, 0]
    count = 0

    def look(_stream: str, data: bytes) -> None:
        nonlocal count, most
        count += len(data)
        if count % 50_000_000 < len(data):
            most = [max(most[0], resident("self")), max(most[1], resident(first))]

    ended = sandbox.channel.run(
        ["head", "-c", "1000000000", "/dev/zero"], cwd="/", env={}, stdin=None, timeout_seconds=60, on_output=look
    )
    assert (ended.exit_code, count) == (0, 1_000_000_000)
    assert most[0] - before[0] < 8_000_000
    assert most[1] - before[1] < 2_000_000


COUNTING = """
import ast
import json
import os
import select
import shutil
count = 0
while True:
    count += os.write(1, b"x" * 65536)
    with open("count", "w") as file: file.write(str(count))
"""


def test_a_reader_that_stops_reading_stops_the_command(sandbox: Sandboxed) -> None:
    def wait(_stream: str, _data: bytes) -> None:
        time.sleep(0.5)
        raise EOFError

    with pytest.raises(EOFError):
        sandbox.channel.run(
            [PYTHON, "-c", COUNTING], cwd="/mnt/work", env={}, stdin=None, timeout_seconds=20, on_output=wait
        )
    assert 0 < int((sandbox.work / "count").read_text()) < 2_000_000


def test_a_command_whose_output_is_not_wanted_has_ended_when_the_error_comes(sandbox: Sandboxed) -> None:
    def refuse(_stream: str, _data: bytes) -> None:
        raise KeyError("enough")

    for command in (["yes"], ["echo"], ["echo"], ["sh", "-c", "echo & sleep 3600"]):
        with pytest.raises(KeyError, match="enough"):
            sandbox.channel.run(command, cwd="/", env={}, stdin=b"x" * 10**7, timeout_seconds=3600, on_output=refuse)
    assert len(sandbox.pids()) == 1
    assert sandbox.run("echo next").exit_code == 0
    assert sandbox.text == "next\n"


ATTACKS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def said(result): return os.strerror(ctypes.get_errno()) if result < 0 else "DONE"
buffer = ctypes.create_string_buffer(16)
pieces = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 16)
print("ptrace", said(libc.ptrace(16, 1, 0, 0)))
print("seize", said(libc.ptrace(0x4206, 1, 0, 0)))
print("vm", said(libc.process_vm_readv(1, pieces, 1, pieces, 1, 0)))
print("pidfd", said(libc.syscall(438, os.pidfd_open(1), 3, 0)))
for path in ("fd", "fd/3", "mem", "environ", "maps", "map_files", "cwd", "root", "exe", "fdinfo"):
    try:
        os.listdir("/proc/1/" + path) if path in ("fd", "fdinfo", "map_files") else open("/proc/1/" + path, "rb+")
        print(path, "DONE")
    except PermissionError as error:
        print(path, error.strerror)
    except OSError as error:
        print(path, error.strerror)
try: open("/proc/1/oom_score_adj", "w").write("1000")
except PermissionError as error: print("score", error.strerror)
"""


def test_a_command_does_not_reach_into_the_executor(sandbox: Sandboxed) -> None:
    assert sandbox.python(ATTACKS).exit_code == 0, sandbox.out
    refused = {"Operation not permitted", "Permission denied"}
    for line in sandbox.text.splitlines():
        assert line.partition(" ")[2] in refused, line


def test_nobody_else_can_connect(sandbox: Sandboxed) -> None:
    assert sandbox.run("ls -a /mnt/channel; touch /mnt/channel/socket").exit_code != 0
    assert sandbox.text == ".\n..\n" or sandbox.text == ""


@pytest.mark.parametrize("name", ["KILL", "STOP", "TERM", "INT", "SEGV", "CHLD", "USR1", "XCPU"])
def test_the_executor_is_not_ended_by_a_command(sandbox: Sandboxed, name: str) -> None:
    assert sandbox.run(f"for i in 1 2 3 4 5 6 7 8 9; do kill -{name} 1; done; exit 4").exit_code == 4
    assert sandbox.run("echo here").exit_code == 0


def test_streams_may_be_closed_and_opened_again(sandbox: Sandboxed) -> None:
    assert sandbox.run("exec 0<&- 1>&- 2>&-; sleep 0.05; exit 5").exit_code == 5
    assert sandbox.run("echo out >/dev/stdout; echo err >/dev/stderr; exec 3>&1 1>&2 2>&3; echo crossed").exit_code == 0
    assert sandbox.out == {"stdout": b"out\n", "stderr": b"err\ncrossed\n"}


STORM = """
import os, time
def fork():
    while True:
        try: return os.fork()
        except BlockingIOError: time.sleep(0.001)  # without reaping it stays like this
for number in range(1000):
    if not fork():
        if not fork(): os._exit(0)
        os._exit(0)
    os.wait()
"""


def test_orphans_that_end_are_reaped_while_the_command_runs() -> None:
    with sandboxed(uid=61004, processes=60) as sandbox:  # an unreaped one counts
        assert sandbox.python(STORM).exit_code == 0
        assert len(sandbox.pids()) == 1


def test_a_flood_of_child_signals_keeps_off_no_timeout(sandbox: Sandboxed) -> None:
    assert sandbox.python("import os\nwhile True: os.kill(1, 17)", timeout=0.3).timed_out


@pytest.mark.parametrize(
    "code",
    [
        "import resource as r; r.prlimit(1, r.RLIMIT_NOFILE, (1, 1))",
        "import resource as r; r.prlimit(1, r.RLIMIT_NPROC, (0, 0))",
        "import os; os.setpriority(os.PRIO_PROCESS, 1, 19)",
        "import os; os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
    ],
)
def test_an_executor_that_a_command_has_tampered_with_runs_no_other(sandbox: Sandboxed, code: str) -> None:
    try:
        assert sandbox.python(code).exit_code == 0
    except ExecutorLostError as error:
        assert error.ended
    assert sandbox.channel.closed
    with pytest.raises(ExecutorLostError, match="closed"):
        sandbox.run("true")


def test_kill_ends_the_command_that_runs_now(sandbox: Sandboxed) -> None:
    sandbox.channel.kill()
    ended = sandbox.channel.run(
        ["sh", "-c", "sleep 100 & echo; while :; do :; done"],
        cwd="/",
        env={},
        stdin=None,
        timeout_seconds=20,
        on_output=lambda *_: threading.Thread(target=sandbox.channel.kill).start(),
    )
    assert (ended.exit_code, ended.timed_out, ended.leftovers) == (137, False, 1)
    assert sandbox.run("echo next").exit_code == 0


def test_commands_of_several_threads_run_one_after_the_other(sandbox: Sandboxed) -> None:
    command = ["sh", "-c", "test ! -e busy && touch busy && sleep 0.02 && rm busy"]
    codes: list[int] = []

    def run() -> None:
        for _ in range(5):
            ended = sandbox.channel.run(
                command, cwd="/mnt/work", env={}, stdin=None, timeout_seconds=20, on_output=lambda *_: None
            )
            codes.append(ended.exit_code)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 20


def test_when_the_executor_is_killed_run_says_so_after_everything_has_ended(sandbox: Sandboxed) -> None:
    (first,) = sandbox.pids()
    timer = threading.Timer(0.2, os.kill, (first, signal.SIGKILL))
    timer.start()
    with pytest.raises(ExecutorLostError, match="ended") as lost:
        sandbox.python(DAEMON.replace("sys.exit(7)", "time.sleep(100)"))
    timer.join()
    assert lost.value.ended
    size = (sandbox.work / "heartbeat").stat().st_size
    time.sleep(0.05)
    assert (sandbox.work / "heartbeat").stat().st_size == size > 0


def test_closing_from_another_thread_ends_the_command(sandbox: Sandboxed) -> None:
    timer = threading.Timer(0.2, sandbox.channel.close)
    timer.start()
    with pytest.raises(ExecutorLostError) as lost:
        sandbox.run("yes")
    timer.join()
    assert lost.value.ended


CLIENT = """
import os, sys
sys.path[:0] = [{tests!r}]
from test_executor import DAEMON, PYTHON, sandboxed
with sandboxed() as sandbox:
    if not os.fork():  # a copy of the stream is not what keeps it alive
        sys.stdin.read()
        os._exit(0)
    print(sandbox.work, *sandbox.pids(), flush=True)
    sandbox.python(DAEMON.replace("sys.exit(7)", "time.sleep(100)"))
"""


def test_when_the_client_is_killed_nothing_keeps_running() -> None:
    code = CLIENT.format(tests=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        work, first = client.stdout.readline().decode().split()
        heartbeat = Path(work) / "heartbeat"
        while not (heartbeat.exists() and heartbeat.stat().st_size):
            time.sleep(0.01)
        gone = os.pidfd_open(int(first))
        client.kill()
        ready = select.poll()
        ready.register(gone, select.POLLIN)
        assert ready.poll(5000)
        os.close(gone)
        size = heartbeat.stat().st_size
        time.sleep(0.05)
        assert heartbeat.stat().st_size == size
    shutil.rmtree(Path(work).parent)


def test_the_executor_does_not_start_outside_of_a_namespace_of_its_own() -> None:
    done = subprocess.run([PYTHON, "-I", "-S", "-B", EXECUTOR, "/nowhere"], capture_output=True)
    assert (done.returncode, done.stderr) == (64, b"this is only for the first process of a container\n")


def test_the_executor_is_written_for_old_interpreters() -> None:
    tree = ast.parse(EXECUTOR.read_text(), feature_version=(3, 9))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {"os", "contextlib"} < imported <= sys.stdlib_module_names - {"tomllib"}
    with pytest.raises(SyntaxError):
        ast.parse("match 1:\n    case _: pass", feature_version=(3, 9))


def test_ctrl_c_ends_the_command_first(sandbox: Sandboxed) -> None:
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        sandbox.python(DAEMON.replace("sys.exit(7)", "time.sleep(100)"))
    timer.join()
    assert len(sandbox.pids()) == 1
    assert sandbox.run("echo next").exit_code == 0


SLEEP = {"argv": ["sleep", "9"], "cwd": "/", "env": {}, "seconds": 9, "descriptors": []}


def message(kind: int, number: int = 1) -> bytes:
    return protocol.MESSAGE.pack(kind, number)


@pytest.mark.parametrize(
    "sent",
    [
        (b"GET / HTTP/1.1\r\n\r\n",),
        (message(0),),
        (message(protocol.READY),),
        (message(protocol.RUN),),
        (message(protocol.RUN), {}),
        (message(protocol.RUN), {"argv": ["true"], "cwd": "/", "env": {}, "seconds": 1, "descriptors": ["stdin"]}),
        (message(protocol.RUN), SLEEP, message(protocol.RUN), SLEEP),
        (message(protocol.RUN), SLEEP, message(99)),
    ],
)
def test_what_is_no_message_ends_the_executor(sent: Sequence[bytes | Mapping[str, object]], tmp_path: Path) -> None:
    directory = tmp_path / "channel"
    directory.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / SOCKET_NAME))
        (directory / SOCKET_NAME).chmod(0o666)
        listener.listen()
        with started(str(directory), tmp_path) as unshare:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(5)
                assert connection.recv(100) == bytes([protocol.READY])
                for head, request in zip_longest(sent[::2], sent[1::2]):
                    with tempfile.TemporaryFile() as file:
                        file.write(json.dumps(request).encode())
                        file.seek(0)
                        socket.send_fds(connection, [head], [] if request is None else [file.fileno()])
                with suppress(ConnectionResetError):
                    while connection.recv(100):
                        pass
            unshare.wait(5)


def test_an_executor_that_stands_still_is_ended_all_the_same(sandbox: Sandboxed) -> None:
    (first,) = sandbox.pids()
    os.kill(first, signal.SIGSTOP)
    assert sandbox.channel.close()
