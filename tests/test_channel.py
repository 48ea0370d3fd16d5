"""The host's end of a sandbox's channel, against an executor that does not keep to the protocol."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread, Timer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence_sandbox.container import executor as protocol
from ringfence_sandbox.container.channel import SOCKET_NAME, Channel, Ended, ExecutorLostError, FrameStream

READY = (protocol.READY, protocol.NUMBER.pack(protocol.PROTOCOL))
FIRST = protocol.NUMBER.pack(1)
MUST_NOT = "the executor sent what it must not send"


def frame(kind: int, payload: bytes) -> bytes:
    return protocol.HEADER.pack(kind, len(payload)) + payload


DONE = frame(protocol.ENDED, protocol.OUTCOME.pack(1, 0, False, 0, 0, 0, False))


@contextmanager
def greeted() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the other end of its stream, in the place of an executor."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(frame(*READY))
        with Channel(ours, pid=None, timeout_seconds=5) as channel:
            yield channel, theirs


def run(channel: Channel) -> Ended:
    return channel.run(["true"], cwd="/", env={}, stdin=None, timeout_seconds=5, on_output=lambda *_: None)


def answered(answer: bytes, descriptors: Sequence[int] = ()) -> Ended:
    """What a run makes of an answer, after which the other end is closed."""
    with greeted() as (channel, theirs):
        socket.send_fds(theirs, [answer or b"\0"], descriptors)
        theirs.shutdown(socket.SHUT_WR)
        return run(channel)


def test_an_answer_that_fits_is_taken() -> None:
    outcome = protocol.OUTCOME.pack(1, 7, False, 5_000_000_000, 1, 2, False)
    assert answered(frame(protocol.ENDED, outcome)) == Ended(7, False, True, 5.0, 2)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0",
        protocol.HEADER.pack(protocol.FAILED, 2**32 - 1),
        frame(99, b""),
        frame(*READY),
        frame(protocol.REFUSED, b"no"),
        frame(protocol.RUN, b""),
        frame(protocol.STARTED, FIRST),
        frame(protocol.STARTED, b""),
        frame(protocol.FAILED, b""),
        frame(protocol.FAILED, protocol.FAILED_HEAD.pack(2, 0)),
        frame(protocol.ENDED, b""),
        frame(protocol.ENDED, protocol.OUTCOME.pack(2, 0, False, 0, 0, 0, False)),
        frame(protocol.ENDED, protocol.OUTCOME.pack(1, 0, False, 0, 0, 0, False) + b"x"),
    ],
)
def test_an_answer_that_does_not_fit_closes_the_channel(answer: bytes) -> None:
    with pytest.raises(ExecutorLostError):
        answered(answer)


@given(st.binary(max_size=60))
def test_no_answer_does_more_than_close_the_channel(answer: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with suppress(ExecutorLostError):
        assert isinstance(answered(answer), Ended)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kinds", ["", "r", "rrr", "w", "ww", "rw", "rf", "fd", "rd", "dd", "rrrr", "rrrrrrrr"])
def test_descriptors_that_are_not_two_pipes_to_read_close_the_channel(kinds: str, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reading, writing = os.pipe()
    other = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    directory = os.open(tmp_path, os.O_RDONLY)
    some = {"r": reading, "w": writing, "f": other, "d": directory}
    try:
        with pytest.raises(ExecutorLostError):
            answered(frame(protocol.STARTED, FIRST), [some[kind] for kind in kinds])
    finally:
        for descriptor in some.values():
            os.close(descriptor)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_second_start_of_one_command_closes_the_channel() -> None:
    reading, writing = os.pipe()
    with greeted() as (channel, theirs):
        for _ in range(2):
            socket.send_fds(theirs, [frame(protocol.STARTED, FIRST)], [reading, reading])
        os.close(reading)
        os.close(writing)
        with pytest.raises(ExecutorLostError, match="must not"):
            run(channel)


def test_the_end_of_a_command_is_believed_although_a_pipe_stays_open() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"all of it")
    seen: list[bytes] = []
    with greeted() as (channel, theirs):
        socket.send_fds(theirs, [frame(protocol.STARTED, FIRST), DONE], [reading, reading])
        channel.run(["x"], cwd="/", env={}, stdin=None, timeout_seconds=5, on_output=lambda _, data: seen.append(data))
    os.close(reading)
    os.close(writing)
    assert seen == [b"all of it"]


def test_output_that_is_not_wanted_after_the_end_costs_no_waiting() -> None:
    def refuse(_stream: str, _data: bytes) -> None:
        raise KeyError("enough")

    reading, writing = os.pipe()
    os.write(writing, b"more")
    with greeted() as (channel, theirs):
        socket.send_fds(theirs, [frame(protocol.STARTED, FIRST), DONE], [reading, reading])
        with pytest.raises(KeyError, match="enough"):
            channel.run(["x"], cwd="/", env={}, stdin=None, timeout_seconds=5, on_output=refuse)
        assert not channel.closed  # as it is when it has waited for what never comes
    os.close(reading)
    os.close(writing)


def test_descriptors_that_pile_up_close_the_channel() -> None:
    reading, writing = os.pipe()
    with greeted() as (channel, theirs):
        for _ in range(3):
            socket.send_fds(theirs, [b"\x12"], [reading, reading])
        with pytest.raises(ExecutorLostError, match=MUST_NOT):
            run(channel)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("kind", [protocol.FAILED, 99])
def test_a_frame_that_would_be_long_is_not_waited_for(kind: int) -> None:
    with greeted() as (channel, theirs):
        theirs.sendall(protocol.HEADER.pack(kind, 4097) + b"x")
        with pytest.raises(ExecutorLostError, match=MUST_NOT):
            run(channel)


@pytest.mark.parametrize(
    "greeting",
    [b"", frame(protocol.READY, protocol.NUMBER.pack(99)), frame(protocol.ENDED, b""), b"SSH-2.0-OpenSSH\r\n"],
)
def test_who_does_not_greet_is_no_executor(greeting: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(greeting)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ExecutorLostError):
            Channel(ours, pid=None, timeout_seconds=5)


def test_who_says_nothing_is_no_executor() -> None:
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(ExecutorLostError, match="does not answer"):
        Channel(ours, pid=None, timeout_seconds=0.05)


def test_a_container_in_which_nothing_can_run_says_why() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(frame(protocol.REFUSED, b"no such luck \xff"))
        with pytest.raises(ExecutorLostError, match="no such luck"):
            Channel(ours, pid=None, timeout_seconds=5)


def test_nobody_but_the_container_may_connect(tmp_path: Path) -> None:
    with Channel.listen(tmp_path) as listener, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"{listener.directory}/{SOCKET_NAME}")
        with pytest.raises(ExecutorLostError, match=f"process {os.getpid()} connected"):
            listener.accept(5, pid=1)
        assert os.listdir(tmp_path) == []


def test_a_listener_can_be_asked_again(tmp_path: Path) -> None:
    with Channel.listen(tmp_path) as listener, socket.socket(socket.AF_UNIX) as executor:
        with pytest.raises(TimeoutError, match=r"no executor connected within 0\.01 seconds"):
            listener.accept(0.01)
        executor.connect(f"{listener.directory}/{SOCKET_NAME}")
        executor.sendall(frame(*READY))
        with listener.accept(5):
            assert os.listdir(tmp_path) == []


def test_an_executor_that_waits_to_be_heard_ends_with_its_listener_though_a_child_lives(tmp_path: Path) -> None:
    with Channel.listen(tmp_path) as listener, socket.socket(socket.AF_UNIX) as executor, lives() as fork:
        executor.connect(f"{listener.directory}/{SOCKET_NAME}")
        fork()
        listener.close()
        executor.settimeout(10)
        with pytest.raises(ConnectionResetError):
            executor.recv(1)


def test_an_executor_that_greets_ends_with_its_host_though_a_child_lives() -> None:
    ours, theirs = socket.socketpair()
    with theirs, lives() as fork:

        def host() -> None:
            Thread(target=lambda: Channel(ours, pid=None, timeout_seconds=60), daemon=True).start()
            while ours.getblocking():
                pass
            fork()

        in_a_process(theirs, host)
        ours.close()
        theirs.settimeout(10)
        assert theirs.recv(1) == b""


def in_a_process(other_end: socket.socket, work: Callable[[], object]) -> None:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        other_end.close()
        work()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def lives() -> Iterator[Callable[[], None]]:
    """What forks children that live until the end of the block."""
    reading, writing = os.pipe()

    def fork() -> None:
        if os.fork() == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)

    try:
        yield fork
    finally:
        os.close(writing)
        os.close(reading)


@pytest.mark.prove
def test_an_executor_that_does_not_answer_when_its_command_is_killed_is_given_up_before_the_command_s_time() -> None:
    with greeted() as (channel, _), pytest.raises(ExecutorLostError, match="does not answer"):
        Timer(0.1, channel.kill).start()
        channel.run(["true"], cwd="/", env={}, stdin=None, timeout_seconds=3600, on_output=lambda *_: None)


def test_a_command_too_long_for_a_frame_is_an_answer() -> None:
    with greeted() as (channel, _):
        ended = channel.run(
            ["x" * (protocol.LONGEST + 1)], cwd="/", env={}, stdin=None, timeout_seconds=5, on_output=lambda *_: None
        )
    assert (ended.exit_code, "stdin or a file" in ended.problem) == (126, True)


def test_what_comes_with_a_frame_is_inherited_by_no_program() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(theirs, [b"x"], [theirs.fileno()] * 2)
        stream = FrameStream(ours)
        stream.receive()
        descriptors = stream.take_descriptors()
        assert [os.get_inheritable(descriptor) for descriptor in descriptors] == [False, False]
        protocol.close_all(descriptors)
