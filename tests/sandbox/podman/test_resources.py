"""Commands that take all they can get: they are ended, it is said, and the next command works on an exact tree."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from captured_tree import names_in

from ringfence_sandbox import HostFilesystem, PodmanSandbox, SandboxLimits

MakeSandbox = Callable[..., PodmanSandbox]
MIB = 1 << 20


def works_on(sandbox: PodmanSandbox) -> None:
    assert sandbox.run("echo next && ps -e --no-headers | wc -l").stdout.split()[0] == "next"


@pytest.mark.usefixtures("limits_hold")
def test_a_process_that_takes_too_much_memory_is_killed_and_the_model_told(sandbox: PodmanSandbox) -> None:
    first = sandbox.start()
    result = sandbox.run(["python3", "-c", "held = bytearray(2 << 30)"])
    assert result.exit_code == 137
    assert result.out_of_memory
    assert "out of memory" in result.stderr
    works_on(sandbox)
    assert sandbox.start() is first


HIDDEN = """
import ctypes
libc = ctypes.CDLL(None)
segments = 0
while segments < 100 and libc.shmget(0, 4 << 20, 0o1600) >= 0: segments += 1
libc.shmat.restype = ctypes.c_void_p
for number in range(segments):
    address = libc.shmat(number, None, 0)
    if address != ctypes.c_void_p(-1).value: ctypes.memset(address, 1, 4 << 20)
print(segments)
"""


def test_memory_that_is_held_without_a_process_leaves_enough_for_the_next_command(make_sandbox: MakeSandbox) -> None:
    sandbox = make_sandbox(limits=SandboxLimits(memory_bytes=256 * MIB, tmp_bytes=128 * MIB, processes=64))
    first = sandbox.start()
    sandbox.run("head -c 300M /dev/zero > /tmp/fill; head -c 300M /dev/zero > /dev/shm/fill")
    assert 0 < int(sandbox.run(["python3", "-I", "-S", "-c", HIDDEN]).stdout) <= 8
    assert sandbox.run(["python3", "-c", "held = bytearray(20 << 20); print('next')"]).stdout == "next\n"
    assert sandbox.start() is first


COUNTLESS = {
    "empty files": "import itertools\nfor n in itertools.count(): open(f'/tmp/{n}', 'w').close()",
    "semaphores": "import ctypes\nwhile ctypes.CDLL(None).semget(0, 32000, 0o1600) >= 0: pass",
}


@pytest.mark.prove
@pytest.mark.parametrize("code", COUNTLESS.values(), ids=COUNTLESS)
@pytest.mark.usefixtures("limits_hold")
def test_memory_that_is_used_up_without_a_process_goes_with_its_container(sandbox: PodmanSandbox, code: str) -> None:
    assert sandbox.run(["python3", "-I", "-S", "-c", code], timeout_seconds=60).out_of_memory
    result = sandbox.run(["python3", "-c", "held = bytearray(20 << 20); print('next')"])
    assert result.stdout == "next\n", result
    assert "this is a new one" in result.stderr


def test_temporary_space_takes_at_most_half_of_the_memory() -> None:
    with pytest.raises(ValueError, match="tmp_bytes is at most half"):
        SandboxLimits(memory_bytes=64 * MIB)


def test_a_fork_bomb_is_bounded_and_ended(sandbox: PodmanSandbox) -> None:
    result = sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 20", timeout_seconds=2)
    assert result.timed_out or "fork" in result.stderr
    works_on(sandbox)
    assert int(sandbox.run("ps -e --no-headers | wc -l").stdout) <= 5


def test_forking_for_ever_ends_with_the_command(sandbox: PodmanSandbox) -> None:
    code = "import os, time\nwhile True:\n  try: os.fork()\n  except OSError: time.sleep(0.01)"
    result = sandbox.run(["python3", "-I", "-S", "-c", code], timeout_seconds=2)
    assert result.timed_out
    works_on(sandbox)


def test_a_flood_of_output_is_bounded_in_memory_and_on_disk(sandbox: PodmanSandbox) -> None:
    result = sandbox.run("head -c 1G /dev/zero | tr '\\0' 'x'", timeout_seconds=240)
    assert result.exit_code == 0
    assert len(result.stdout) < 33 * 1024
    where = result.stdout.split("; read ")[1].split(" for all of it")[0]
    assert len(sandbox.filesystem.read_bytes(where).content) == sandbox.limits.output_bytes
    works_on(sandbox)


def test_a_command_that_never_ends_is_ended(sandbox: PodmanSandbox) -> None:
    assert sandbox.run("while :; do :; done", timeout_seconds=1).timed_out
    works_on(sandbox)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 96 MiB and some thousand inodes."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m,nr_inodes=6000", "none", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


FLOORS = SandboxLimits(free_disk_bytes=48 * MIB, free_inodes=3000, file_bytes=64 * MIB)


def test_a_command_that_fills_the_disk_is_ended_before_it_is_full(small_disk: Path, make_sandbox: MakeSandbox) -> None:
    sandbox = make_sandbox(small_disk / "workspace", limits=FLOORS)
    fill = "i=0; while :; do head -c 1M /dev/zero > f$i || exit 1; i=$((i+1)); sleep 0.01; done"
    result = sandbox.run(fill, timeout_seconds=20)
    assert "bytes are left on the disk" in result.failure, result
    assert not result.timed_out
    assert names_in(small_disk / "workspace") == []
    works_on(sandbox)


def test_a_command_that_uses_up_the_inodes_is_ended(small_disk: Path, make_sandbox: MakeSandbox) -> None:
    sandbox = make_sandbox(small_disk / "workspace", limits=FLOORS)
    code = "import itertools, time\nfor n in itertools.count():\n  open(f'f{n}', 'w').close()\n  time.sleep(0.0001)"
    result = sandbox.run(["python3", "-I", "-S", "-c", code], timeout_seconds=20)
    assert "inodes are left on the disk" in result.failure, result
    assert names_in(small_disk / "workspace") == []
    works_on(sandbox)


def test_a_full_disk_does_not_stop_a_rollback(small_disk: Path, make_sandbox: MakeSandbox) -> None:
    root = small_disk / "workspace"
    root.mkdir()
    (root / "kept").write_text("kept\n")
    # As quick as it can, so that it is full before anybody looks.
    sandbox = make_sandbox(root, limits=FLOORS)
    sandbox.run("rm kept; head -c 60M /dev/zero > a; head -c 60M /dev/zero > b; sleep 20", timeout_seconds=1)
    assert {name: (root / name).read_text() for name in names_in(root)} == {"kept": "kept\n"}
    works_on(sandbox)


def test_a_quick_command_that_fills_the_disk_is_rolled_back(small_disk: Path, make_sandbox: MakeSandbox) -> None:
    sandbox = make_sandbox(small_disk / "workspace", limits=FLOORS)
    for _ in range(5):
        result = sandbox.run("fallocate -l 60M full")
        assert "bytes are left on the disk" in result.failure, result
        assert names_in(small_disk / "workspace") == []
    works_on(sandbox)


@pytest.mark.prove
def test_output_leaves_room_on_the_disk_for_a_rollback(small_disk: Path, make_sandbox: MakeSandbox) -> None:
    root = small_disk / "workspace"
    root.mkdir()
    kept = os.urandom(5 * MIB)
    (root / "kept").write_bytes(kept)
    with HostFilesystem(root, store=small_disk / "store") as filesystem:
        sandbox = make_sandbox(root, filesystem=filesystem)
        for _ in range(12):
            sandbox.run("head -c 60M /dev/zero; head -c 60M /dev/zero >&2")
        assert sandbox.run("rm kept; head -c 60M /dev/zero; sleep 20", timeout_seconds=1).failure
        assert (root / "kept").read_bytes() == kept
        sandbox.close()


def test_a_deep_tree_and_odd_names_go_back(sandbox: PodmanSandbox) -> None:
    deep = "import os\nfor n in range(200): os.mkdir('d' * 100); os.chdir('d' * 100)"
    odd = "open(b'caf\\xe9', 'w').close(); open('a\\nb', 'w').close(); os.symlink('nowhere', 'link'); os.mkfifo('pipe')"
    code = f"import os, time\n{odd}\n{deep}\ntime.sleep(20)"
    assert sandbox.run(["python3", "-I", "-S", "-c", code], timeout_seconds=1).timed_out
    assert names_in(Path(sandbox.filesystem.root)) == []
    works_on(sandbox)
