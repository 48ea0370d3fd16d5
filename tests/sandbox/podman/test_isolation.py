"""What a command in a container cannot do: each is tried from inside."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ringfence_sandbox import PodmanSandbox
from ringfence_sandbox.container.isolation import PROBE, verified

PRELUDE = """
import ctypes, errno, json, os, resource, signal, socket, struct, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    if result < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""


def python(sandbox: PodmanSandbox, code: str) -> str:
    """What a program in the container prints; it has to end well."""
    result = sandbox.run(["python3", "-I", "-S", "-c", PRELUDE + code])
    assert result.exit_code == 0, result
    return result.stdout


def refusal(sandbox: PodmanSandbox, code: str) -> str:
    """The error that a statement ends with in the container; it has to end with one."""
    result = sandbox.run(["python3", "-I", "-S", "-c", PRELUDE + code])
    assert result.exit_code == 1, result
    return result.stderr.strip().splitlines()[-1]


def refusals(sandbox: PodmanSandbox, *statements: str) -> list[str]:
    """The errors that statements end with, each tried after the others in one program; each has to end with one."""
    tried = f"""
errors = []
for statement in {list(statements)!r}:
    try:
        exec(statement)
    except Exception as error:
        errors.append(f"{{type(error).__name__}}: {{error}}")
    else:
        errors.append("")
print(json.dumps(errors))"""
    errors: list[str] = json.loads(python(sandbox, tried))
    assert [statement for statement, error in zip(statements, errors, strict=True) if "Error" not in error] == []
    return errors


def test_every_capability_is_gone_and_cannot_come_back(shared: PodmanSandbox) -> None:
    assert (
        python(shared, "print(*[l.split()[1] for l in open('/proc/self/status') if l.startswith('Cap')])").split()
        == ["0000000000000000"] * 5
    )
    # PR_CAP_AMBIENT_RAISE, and capset of everything.
    raising = "print(sum(libc.prctl(47, 2, number, 0, 0) == 0 for number in range(64)))"
    assert python(shared, raising) == "0\n"


def test_capset_gives_nothing(shared: PodmanSandbox) -> None:
    code = """
head = struct.pack('=Ii', 0x20080522, 0)
data = struct.pack('=6I', 0xffffffff, 0xffffffff, 0, 0x1ff, 0x1ff, 0)
call('capset', head, data)"""
    assert "Operation not permitted" in refusal(shared, code)


def test_a_setuid_program_gives_nothing(shared: PodmanSandbox) -> None:
    done = shared.run(
        "cp /bin/busybox /workspace/root 2>/dev/null || cp /bin/cat /workspace/root; chmod 2755 /workspace/root; "
        "find / -xdev -perm -4000 -type f 2>/dev/null | wc -l; /workspace/root id -u 2>/dev/null || id -u; "
        "rm /workspace/root"
    )
    assert done.stdout.split()[-1] == shared.run("id -u").stdout.strip() != "0"
    assert "NoNewPrivs:\t1" in shared.run("cat /proc/self/status").stdout


SETUID = (
    "os.chmod('s', 0o4755)",
    "os.chmod('s', 0o104755)",
    "os.fchmod(os.open('s', os.O_RDONLY), 0o6755)",
    "os.chmod('s', 0o4755, dir_fd=os.open('.', os.O_RDONLY))",
    "call('syscall', 452, -100, b's', 0o4755, 0)",  # fchmodat2
    "os.open('made', os.O_CREAT | os.O_RDWR, 0o4755)",
    "call('syscall', 2, b'made', os.O_CREAT | os.O_RDWR, 0o4755)",  # open
    "call('syscall', 85, b'made', 0o4755)",  # creat
    "os.link(f'/proc/self/fd/{os.open(chr(46), os.O_TMPFILE | os.O_RDWR, 0o4755)}', 'made')",
    "os.mknod('made', 0o104755)",
    "os.mknod('made', 0o104755, dir_fd=os.open('.', os.O_RDONLY))",
    "call('syscall', 437, -100, b'made', struct.pack('=3Q', os.O_CREAT | os.O_RDWR, 0o4755, 0), 24)",  # openat2
)


def test_no_program_can_be_made_that_runs_as_the_owner_of_the_tree(shared: PodmanSandbox) -> None:
    root = Path(shared.filesystem.root)
    (root / "s").write_text("#!/bin/sh\n")
    refusals(shared, *(f"os.umask(0); os.chdir('/workspace'); {code}" for code in SETUID))
    assert [path.name for path in root.iterdir() if path.stat().st_mode & 0o4000] == []
    (root / "s").unlink()


def test_a_program_that_ran_as_its_owner_does_not_with_other_bytes(shared: PodmanSandbox) -> None:
    """A write takes the bit away by itself, but not one through a mapping."""
    program, other = Path(shared.filesystem.root, "s"), Path(shared.filesystem.root, "other")
    for path in (program, other):
        path.write_text("#!/bin/sh\nid -u\n")
        path.chmod(0o4755)
    other.write_text("#!/bin/sh\nwho\n")
    other.chmod(0o4755)
    mapped = "m = mmap.mmap(os.open('/workspace/s', os.O_RDWR), 0); m[10:12] = b'ps'"
    assert python(shared, f"import mmap; {mapped}; os.rename('/workspace/s', '/workspace/t')") == ""
    assert shared.run("mv other moved; touch moved").exit_code == 0
    moved, renamed = other.with_name("moved"), program.with_name("t")
    assert renamed.read_text() == "#!/bin/sh\nps -u\n"
    assert (oct(renamed.stat().st_mode), oct(moved.stat().st_mode)) == ("0o100755", "0o104755")
    assert shared.run("true").changed_paths == ()
    renamed.unlink()
    moved.unlink()


def test_all_other_modes_can_be_given(shared: PodmanSandbox) -> None:
    code = """
os.umask(0); os.chdir('/workspace')
os.close(os.open('made', os.O_CREAT | os.O_RDWR, 0o1777)); os.chmod('made', 0o754)
os.mkdir('shared'); os.chmod('shared', 0o2775)
os.close(call('syscall', 257, -100, b'made', os.O_RDONLY, 0xffffffff))  # a mode that is not looked at
print(oct(os.stat('made').st_mode), oct(os.stat('shared').st_mode)); os.unlink('made'); os.rmdir('shared')"""
    assert python(shared, code).split() == ["0o100754", "0o42775"]


NAMESPACES = {
    "mnt": 0x20000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "time": 0x80,
}


def test_no_namespace_can_be_made_or_entered(shared: PodmanSandbox) -> None:
    refusals(shared, *(f"call('unshare', {flag})" for flag in NAMESPACES.values()))
    # clone with the stack of the parent, as fork has it, and the flag; that of "time" is part of the exit signal.
    flags = [flag for kind, flag in NAMESPACES.items() if kind != "time"]
    refusals(shared, *(f"call('syscall', 56, {flag} | 17, 0, 0, 0, 0)" for flag in flags))
    # clone3 has its flags where no filter sees them.
    clone3 = "call('syscall', 435, struct.pack('=8Q', {}, 0, 0, 0, 17, 0, 0, 0), 64)"
    for error in refusals(shared, *(clone3.format(flag) for flag in NAMESPACES.values())):
        assert "Function not implemented" in error
    entering = "call('setns', os.open('/proc/self/ns/{}', os.O_RDONLY), 0)"
    refusals(shared, *(entering.format(kind) for kind in NAMESPACES if kind != "time"))


def test_no_process_can_be_traced(shared: PodmanSandbox) -> None:
    own = "child = subprocess.Popen(['sleep', '5']); call('ptrace', 16, child.pid, 0, 0)"
    reading = "call('syscall', 310, 1, 0, 0, 0, 0, 0)"  # process_vm_readv
    for error in refusals(shared, "call('ptrace', 16, 1, 0, 0)", own, reading, "call('syscall', 438, 3, 0, 0)"):
        assert "Operation not permitted" in error
    files = ("mem", "maps", "environ", "fd/1", "root/etc/passwd", "cwd")
    for error in refusals(shared, *(f"os.open('/proc/1/{file}', os.O_RDONLY)" for file in files)):
        assert "Permission" in error


def test_calls_into_the_kernel_and_those_of_privileged_programs_are_refused(shared: PodmanSandbox) -> None:
    kept = {"keyctl": 250, "add_key": 248, "request_key": 249, "name_to_handle_at": 303}
    for error in refusals(shared, *(f"call('syscall', {number}, 0, 0, 0, 0, 0)" for number in kept.values())):
        assert "Operation not permitted" in error
    privileged = (425, 426, 427, 321, 298, 323, 175, 246, 155, 165, 166, 428, 429, 430, 442, 101)
    for error in refusals(shared, *(f"call('syscall', {number}, 0, 0, 0, 0, 0, 0)" for number in privileged)):
        assert "Operation not permitted" in error or "Function not implemented" in error


def test_no_socket_but_of_the_usual_families(shared: PodmanSandbox) -> None:
    # With bits above the lower 32 too, which the kernel drops and a filter may not.
    opening = "call('syscall', ctypes.c_long(41), ctypes.c_long({}), ctypes.c_long(1), ctypes.c_long(0))"
    families = [family for family in range(46) if family not in (1, 2, 10, 16)]
    refusals(shared, *(opening.format(number) for family in families for number in (family, family | 1 << 32)))


def test_programs_of_another_architecture_make_no_calls(shared: PodmanSandbox) -> None:
    # int 0x80 from a 64-bit process: getpid of 32 bits, whose numbers the list does not know.
    code = """
import mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex('b814000000cd80c3'))
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())"""
    result = shared.run(["python3", "-I", "-S", "-c", PRELUDE + code])
    assert result.exit_code >= 128 or result.stdout.strip() in ("-1", "-38"), result


NOT_WRITABLE = (
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sysrq-trigger",
    "/proc/1/oom_score_adj",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/pids/pids.max",
    "/sys/fs/cgroup/memory.max",
    "/sys/kernel/uevent_helper",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/etc/passwd",
    "/etc/hosts",
    "/usr/bin/python3",
    "/run/executor.py",
    "/run/ringfence/other",
    "/dev/sda",
    "/dev/other",
    "/var/other",
    "/root/other",
    "/other",
)


def test_nothing_outside_of_the_workspace_can_be_written(shared: PodmanSandbox) -> None:
    refusals(shared, *(f"os.write(os.open({path!r}, os.O_WRONLY | os.O_CREAT), b'1')" for path in NOT_WRITABLE))


def test_only_the_workspace_and_temporary_directories_are_writable(shared: PodmanSandbox) -> None:
    found = shared.run(
        "find / -xdev -writable -not -type l 2>/dev/null; find /dev /run /sys -writable -type d 2>/dev/null"
    )
    assert {line for line in found.stdout.split() if not line.startswith("/proc/")} <= {
        "/workspace",
        "/tmp",
        "/dev/shm",
        "/dev/mqueue",
    }


def test_what_tells_of_the_machine_is_masked(shared: PodmanSandbox) -> None:
    masked = "/proc/kcore /proc/keys /proc/timer_list /sys/firmware/acpi"
    assert shared.run(f"cat {masked} 2>/dev/null | head -c 100").stdout == ""


def test_no_device_can_be_made_or_opened(shared: PodmanSandbox) -> None:
    for kind, major, minor in (("b", 8, 0), ("b", 254, 0), ("c", 1, 1), ("c", 5, 1)):
        mode = "0o60666" if kind == "b" else "0o20666"
        made = f"os.mknod('{{}}/device', {mode}, os.makedev({major}, {minor}))"
        for error in refusals(shared, *(made.format(place) for place in ("/workspace", "/tmp", "/dev/shm"))):
            assert "Operation not permitted" in error
    devices = python(shared, "print(*sorted(n for n in os.listdir('/dev') if os.path.exists('/dev/' + n)))").split()
    assert set(devices) <= set(
        "console core fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero".split()
    )


def test_a_device_that_lies_in_the_workspace_cannot_be_opened(shared: PodmanSandbox) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root makes devices")
    device = Path(shared.filesystem.root, "disk")
    os.mknod(device, 0o60666, os.stat("/").st_dev)
    try:
        os.chmod(device, 0o666)
        assert "Error" in refusal(shared, "os.open('/workspace/disk', os.O_RDONLY)")
    finally:
        device.unlink()


def test_nothing_can_be_mounted(shared: PodmanSandbox) -> None:
    refusals(
        shared,
        "call('mount', b'none', b'/tmp', b'tmpfs', 0, None)",
        "call('mount', None, b'/', None, 0x20 | 0x1000, None)",
        "call('umount2', b'/workspace', 2)",
        "call('syscall', 155, b'/tmp', b'/tmp')",
        "os.chroot('/tmp')",
    )


def test_there_is_no_network(shared: PodmanSandbox) -> None:
    assert python(shared, "print(*os.listdir('/sys/class/net'))").split() == ["lo"]
    places = (("192.0.2.1", 80), ("169.254.169.254", 80), ("10.88.0.1", 22), ("1.1.1.1", 53))
    for error in refusals(shared, *(f"socket.create_connection({place}, 1)" for place in places)):
        assert "Network is unreachable" in error
    # Sockets of the host without a name in any directory belong to its network namespace.
    assert python(shared, "print(sum(1 for line in open('/proc/net/unix')))").strip() in ("1", "2", "3")


def test_processes_of_the_host_cannot_be_seen_or_signalled(shared: PodmanSandbox) -> None:
    pids = python(shared, "print(*[p for p in os.listdir('/proc') if p.isdigit()])").split()
    assert len(pids) <= 3
    assert "ProcessLookupError" in refusal(shared, f"os.kill({os.getpid() + 1_000_000}, 0)")


SLOWING = (
    "call('syscall', 251, 1, 1, 3 << 13)",  # ioprio_set of a process
    "call('syscall', 251, 3, os.getuid(), 3 << 13)",  # of a user
    "call('syscall', 251, ctypes.c_long(1 | 1 << 32), ctypes.c_long(1), 3 << 13)",
    "os.write(os.open('/proc/1/timerslack_ns', os.O_WRONLY), b'999999999999')",
    "os.write(os.open('/proc/1/autogroup', os.O_WRONLY), b'19')",
    "os.write(os.open('/proc/1/comm', os.O_WRONLY), b'x')",
    "os.write(os.open('/proc/1/coredump_filter', os.O_WRONLY), b'0')",
    "os.write(os.open('/proc/1/clear_refs', os.O_WRONLY), b'1')",
)


def test_the_first_process_cannot_be_slowed_down(shared: PodmanSandbox) -> None:
    refusals(shared, *SLOWING)
    assert python(shared, "call('syscall', 251, 1, 0, 3 << 13); print('its own')") == "its own\n"


def test_the_first_process_survives_every_signal(shared: PodmanSandbox) -> None:
    before = shared.start().process
    python(shared, "for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}: os.kill(1, number)")
    shared.run("kill -KILL 1; kill -STOP 1")
    assert shared.run("echo here").stdout == "here\n"
    assert shared.start().process == before


def test_the_control_socket_takes_nobody_else(shared: PodmanSandbox) -> None:
    tried = "s = socket.socket(socket.AF_UNIX); s.connect('/run/ringfence/socket')"
    assert "Error" in refusal(shared, tried)


def test_limits_are_as_asked_for_and_cannot_be_raised(shared: PodmanSandbox) -> None:
    limits = shared.limits
    code = "print(*[resource.getrlimit(getattr(resource, 'RLIMIT_' + n))[1] for n in ('NOFILE', 'FSIZE', 'CORE')])"
    assert python(shared, code).split() == [str(limits.open_files), str(limits.file_bytes), "1"]
    for name in ("NOFILE", "FSIZE", "NPROC"):
        limit = f"resource.RLIMIT_{name}"
        raised = f"hard = resource.getrlimit({limit})[1]; resource.setrlimit({limit}, (hard, hard + 1))"
        assert "not allowed to raise maximum limit" in refusal(shared, raised)


def test_a_file_has_a_largest_size_and_a_process_a_most_of_files(shared: PodmanSandbox) -> None:
    big = shared.run("head -c 100M /dev/zero > big; code=$?; stat -c %s big; rm big; exit $code")
    assert big.exit_code != 0
    assert int(big.stdout) <= shared.limits.file_bytes
    assert "Too many open files" in refusal(shared, "held = [os.open('/dev/null', 0) for _ in range(300)]")


def test_temporary_space_and_shared_memory_are_bounded(shared: PodmanSandbox) -> None:
    for place in ("/tmp", "/dev/shm"):
        filled = shared.run(f"head -c 60M /dev/zero > {place}/fill; code=$?; rm -f {place}/fill; exit $code")
        assert "No space left on device" in filled.stderr


CORE_DUMPS = (
    "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "resource.setrlimit(resource.RLIMIT_CORE, (0, 1))",
    "resource.prlimit(0, resource.RLIMIT_CORE, (0, 0))",
    "call('syscall', 160, 4, struct.pack('=2Q', 0, 0))",  # setrlimit
    "call('syscall', 160, ctypes.c_long(4 | 1 << 32), struct.pack('=2Q', 0, 0))",
    "call('syscall', 302, 0, ctypes.c_long(4 | 1 << 32), struct.pack('=2Q', 0, 0), 0)",  # prlimit64
    "call('syscall', 302, os.getpid(), 4, struct.pack('=2Q', 0, 0), 0)",
)


def test_no_program_of_the_host_is_given_a_core_dump(shared: PodmanSandbox) -> None:
    """With a limit of 1 the kernel gives it to none, with 0 it does: no command may come to that."""
    tried = "\n".join(f"try: {code}\nexcept OSError: pass" for code in CORE_DUMPS)
    limits = "print(*resource.getrlimit(resource.RLIMIT_CORE))"
    assert python(shared, f"{tried}\n{limits}") == "1 1\n"


def test_a_command_lowers_its_own_limits(shared: PodmanSandbox) -> None:
    done = shared.run(
        "ulimit -c 0 && ulimit -n 30 && ulimit -f 5 && ulimit -t 9 && ulimit -n && ulimit -f && ulimit -t"
    )
    assert (done.exit_code, done.stdout) == (0, "30\n5\n9\n")


def test_core_dumps_are_not_written(shared: PodmanSandbox) -> None:
    crashed = shared.run("sh -c 'kill -SEGV $$'; ls -A")
    assert crashed.stdout == ""


def test_what_a_link_leads_to_is_looked_for_in_the_container(shared: PodmanSandbox) -> None:
    # And the host's file tools, on the other side of the same tree, refuse to follow it at all.
    shared.run("ln -s /etc/passwd link; ln -s /etc up")
    with pytest.raises(PermissionError):
        shared.filesystem.read("link")
    with pytest.raises(PermissionError):
        shared.run("true", cwd="up")
    shared.run("rm link up")


def test_a_path_out_of_the_workspace_is_no_working_directory(shared: PodmanSandbox) -> None:
    for cwd in ("..", "../..", "/etc", "a/../../..", "a\0b", ".ringfence-hold-0123456789abcdef"):
        with pytest.raises((ValueError, PermissionError, FileNotFoundError)) as caught:
            shared.run("pwd", cwd=cwd)
        assert str(caught.value).startswith(f"cwd is {cwd!r}, which is no directory of the workspace (")
        assert "it is a path from the root, such as 'src', or below /workspace" in str(caught.value)


def test_a_link_that_is_swapped_while_tools_read_never_shows_a_file_of_the_host(shared: PodmanSandbox) -> None:
    once = "mv d e; ln -s /etc d; rm d; mv e d; i=$((i+1))"
    swap = f"i=0; while [ $i -lt 300 ]; do {once}; done"
    seen: set[str] = set()

    def look(_stream: str, _data: bytes) -> None:
        for _ in range(50):
            try:
                seen.add(shared.filesystem.read("d/passwd").content)
            except OSError:
                seen.add("refused")

    shared.run(f"mkdir -p d; echo inside > d/passwd; echo go; {swap}", on_output=look)
    shared.run("rm -rf d e")
    assert seen <= {"inside\n", "refused"}


def test_environment_of_the_host_does_not_come_in(shared: PodmanSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://user:secret@proxy.invalid")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert "secret" not in shared.run("env; cat /proc/1/environ 2>/dev/null").stdout


@pytest.mark.usefixtures("limits_hold")
def test_what_did_not_come_out_as_asked_for_is_found_from_inside(shared: PodmanSandbox) -> None:
    shown = json.loads(shared.run(["python3", "-I", "-S", "-c", PROBE]).stdout)

    def lacking(**changed: object) -> set[str]:
        found = verified(json.dumps({**shown, **changed}), shared.limits, "none", rootless=False)
        return {one.name for one in found if not one.holds}

    assert lacking() == set()
    status = shown["status"]
    assert lacking(status=status.replace("CapEff:\t0", "CapEff:\t1")) == {"no capabilities (CapEff)"}
    assert lacking(status=status.replace("NoNewPrivs:\t1", "NoNewPrivs:\t0")) == {"no new privileges"}
    assert lacking(status=status.replace("Seccomp:\t2", "Seccomp:\t0")) == {"system calls filtered"}
    assert lacking(status=status.replace("1000", "0")) >= {"not root"}
    assert lacking(uids="0 0 4294967295\n") == lacking(uids="0 1 1000\n1000 0 1\n") == {"users mapped to nobody's"}
    assert lacking(net=["lo", "eth0"]) == {"no network"}
    assert lacking(mounts=shown["mounts"].replace(" ro,", " rw,")) >= {"read-only root", "read-only control directory"}
    assert lacking(limits="") >= {"max processes", "max file size", "max open files", "max core file size"}
    assert lacking(pids="max", memory="", swap="9223372036854771712", cpu="-1") == {
        "limit of processes",
        "limit of memory",
        "limit of memory and swap",
        "limit of processor time",
    }
    assert lacking(memory="max") == {"limit of memory"}


def test_the_network_of_the_host_cannot_be_asked_for(tmp_path: Path) -> None:
    for network in ("host", "container:other", ""):
        with pytest.raises(ValueError, match="network is one of"):
            PodmanSandbox(tmp_path, network=network)


def test_a_network_is_there_when_it_is_asked_for(podman: Any, limiting: bool, tmp_path: Path) -> None:
    if podman.host.rootless and shutil.which("slirp4netns") is None:
        pytest.skip("a rootless Podman's bridge needs slirp4netns")
    with PodmanSandbox(tmp_path, network="bridge", connection=podman, strict=limiting) as sandbox:
        assert len(sandbox.run("ls /sys/class/net").stdout.split()) == 2
