"""The host's end of a sandbox's channel, against an executor that does not keep to the protocol."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence_sandbox.container import executor as protocol
from ringfence_sandbox.container.channel import SOCKET_NAME, Channel, ExecutorLostError, Listener
from ringfence_workspace.commands import CommandExit

MUST_NOT = "the executor sent what it must not send"


def message(kind: int, payload: bytes) -> bytes:
    return protocol.ANSWER.pack(kind) + payload


READY = message(protocol.READY, b"")
DONE = message(protocol.ENDED, protocol.OUTCOME.pack(1, 0, False, 0, 0, 0, False))


def outsider() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextmanager
def greeted() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the other end of its stream, in the place of an executor."""
    ours, theirs = ends()
    with theirs:
        theirs.send(READY)
        with Channel(ours, pid=None, timeout_seconds=5) as channel:
            yield channel, theirs


def ends() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def requested(theirs: socket.socket) -> tuple[dict[str, Any], dict[str, int]]:
    """What a channel wants to be run, and the ends of pipes that come with it."""
    _, descriptors, _ = protocol.received(theirs, 100, 9)
    with open(descriptors[0], "rb") as file:
        request = json.load(file)
    return request, dict(zip(request["descriptors"], descriptors[1:], strict=True))


def run(channel: Channel) -> CommandExit:
    return channel.run(["true"], cwd="/", env={}, stdin=None, timeout_seconds=5, on_output=lambda *_: None)


def answered(answer: bytes, descriptors: Sequence[int] = ()) -> CommandExit:
    """What a run makes of an answer, after which the other end is closed."""
    with greeted() as (channel, theirs):
        socket.send_fds(theirs, [answer or b"\0"], descriptors)
        theirs.shutdown(socket.SHUT_WR)
        return run(channel)


def test_an_answer_that_fits_is_taken() -> None:
    outcome = protocol.OUTCOME.pack(1, 7, False, 5_000_000_000, 1, 2, False)
    assert answered(message(protocol.ENDED, outcome) + b"why") == CommandExit(7, False, True, 5.0, 2, "why")


@pytest.mark.parametrize(
    "answer",
    [
        b"\0",
        message(99, b""),
        READY,
        message(protocol.REFUSED, b"no"),
        message(protocol.RUN, b""),
        message(protocol.COVERED, b""),
        message(protocol.ENDED, b""),
        message(protocol.ENDED, protocol.OUTCOME.pack(2, 0, False, 0, 0, 0, False)),
        DONE[:-1],
    ],
)
def test_an_answer_that_does_not_fit_closes_the_channel(answer: bytes) -> None:
    with pytest.raises(ExecutorLostError):
        answered(answer)


@given(st.binary(max_size=60))
def test_no_answer_does_more_than_close_the_channel(answer: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with suppress(ExecutorLostError):
        assert isinstance(answered(answer), CommandExit)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_descriptor_that_comes_with_an_answer_closes_the_channel(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with (tmp_path / "file").open("w") as file, pytest.raises(ExecutorLostError, match=MUST_NOT):
        answered(DONE, [file.fileno()])
    assert len(os.listdir("/proc/self/fd")) == before


@contextmanager
def printing(theirs: socket.socket, printed: bytes) -> Iterator[None]:
    """An executor whose command prints, and of which something keeps the pipes open when it has ended."""
    pipes: dict[str, int] = {}

    def work() -> None:
        pipes.update(requested(theirs)[1])
        os.write(pipes["stdout"], printed)
        theirs.send(DONE)

    thread = Thread(target=work)
    thread.start()
    yield
    thread.join()
    for descriptor in pipes.values():
        os.close(descriptor)


def test_the_end_of_a_command_is_believed_although_a_pipe_stays_open() -> None:
    seen: list[bytes] = []
    with greeted() as (channel, theirs), printing(theirs, b"all of it"):
        channel.run(["x"], cwd="/", env={}, stdin=None, timeout_seconds=5, on_output=lambda _, data: seen.append(data))
    assert seen == [b"all of it"]


def test_output_that_is_not_wanted_after_the_end_costs_no_waiting() -> None:
    def refuse(_stream: str, _data: bytes) -> None:
        raise KeyError("enough")

    with greeted() as (channel, theirs), printing(theirs, b"more"):
        with pytest.raises(KeyError, match="enough"):
            channel.run(["x"], cwd="/", env={}, stdin=None, timeout_seconds=5, on_output=refuse)
        assert not channel.closed  # as it is when it has waited for what never comes


@pytest.mark.parametrize("kind", [protocol.ENDED, 99])
def test_a_message_that_is_too_long_closes_the_channel(kind: int) -> None:
    with pytest.raises(ExecutorLostError, match=MUST_NOT):
        answered(message(kind, DONE[1:] + b"x" * protocol.LONGEST_ANSWER))


@pytest.mark.parametrize(
    "greeting",
    [b"", message(protocol.ENDED, b""), b"SSH-2.0-OpenSSH\r\n"],
)
def test_who_does_not_greet_is_no_executor(greeting: bytes) -> None:
    ours, theirs = ends()
    with theirs:
        theirs.send(greeting)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ExecutorLostError):
            Channel(ours, pid=None, timeout_seconds=5)


def test_what_comes_with_a_greeting_is_a_socket(tmp_path: Path) -> None:
    ours, theirs = ends()
    before = len(os.listdir("/proc/self/fd"))
    with theirs, (tmp_path / "file").open("w") as file:
        socket.send_fds(theirs, [READY], [file.fileno()])
        with pytest.raises(ExecutorLostError, match=MUST_NOT):
            Channel(ours, pid=None, timeout_seconds=5)
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_who_says_nothing_is_no_executor() -> None:
    ours, theirs = ends()
    with theirs, pytest.raises(ExecutorLostError, match="does not answer"):
        Channel(ours, pid=None, timeout_seconds=0.05)


def test_a_container_in_which_nothing_can_run_says_why() -> None:
    ours, theirs = ends()
    with theirs:
        theirs.send(message(protocol.REFUSED, b"no such luck \xff"))
        with pytest.raises(ExecutorLostError, match="no such luck"):
            Channel(ours, pid=None, timeout_seconds=5)


def test_nobody_but_the_container_may_connect(tmp_path: Path) -> None:
    with Listener(tmp_path) as listener, outsider() as stranger:
        stranger.connect(f"{listener.directory}/{SOCKET_NAME}")
        with pytest.raises(ExecutorLostError, match=f"process {os.getpid()} connected"):
            listener.accept(5, pid=1)
        assert os.listdir(tmp_path) == []


def test_a_listener_can_be_asked_again(tmp_path: Path) -> None:
    with Listener(tmp_path) as listener, outsider() as executor:
        with pytest.raises(TimeoutError, match=r"no executor connected within 0\.01 seconds"):
            listener.accept(0.01)
        executor.connect(f"{listener.directory}/{SOCKET_NAME}")
        executor.send(READY)
        with listener.accept(5):
            assert os.listdir(tmp_path) == []


def test_an_executor_that_waits_to_be_heard_ends_with_its_listener_though_a_child_lives(tmp_path: Path) -> None:
    with (
        Listener(tmp_path) as listener,
        outsider() as executor,
        lives() as fork,
    ):
        executor.connect(f"{listener.directory}/{SOCKET_NAME}")
        fork()
        listener.close()
        executor.settimeout(10)
        with pytest.raises(ConnectionResetError):
            executor.recv(1)


def test_an_executor_that_greets_ends_with_its_host_though_a_child_lives() -> None:
    ours, theirs = ends()
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


def test_what_comes_with_a_message_is_inherited_by_no_program() -> None:
    ours, theirs = ends()
    with ours, theirs:
        socket.send_fds(theirs, [b"x"], [theirs.fileno()] * 2)
        _, descriptors, _ = protocol.received(ours, 1, 2)
        assert [os.get_inheritable(descriptor) for descriptor in descriptors] == [False, False]
        for descriptor in descriptors:
            os.close(descriptor)
