"""The other end of `evaluate_python`: a process of its own that runs one piece of code and ends.

It runs as a script, by ``python -I -S``, and imports nothing of this package. It speaks lines of JSON: one request in,
questions for files out and their answers in, one outcome out. Before the code runs, the process gives up every system
call that computing and its two pipes do not need.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable
from copy import copy
from importlib import import_module
from inspect import ismodule
from types import ModuleType, SimpleNamespace
from typing import Any, cast

MAX_STREAM_CHARACTERS = 4096
MAX_SHOWN_GLOBALS = 64
MEMORY_BYTES = 512 << 20

_NAMES = (
    "abs all any bin bool bytearray bytes chr complex dict divmod enumerate filter float frozenset hash hex int "
    "isinstance len list map max min oct ord pow range repr reversed round set slice sorted str sum tuple zip "
    "ArithmeticError AssertionError AttributeError Exception IndexError KeyError LookupError NameError OverflowError "
    "RuntimeError StopIteration TypeError ValueError ZeroDivisionError FileExistsError FileNotFoundError"
).split()

# What a running interpreter needs of the kernel: read, write, close, fstat, lseek, memory, signals, locks, clocks, an
# end. No open, no socket, no new process, no signal to anybody.
_CALLS = {
    "x86_64": (0xC000003E, (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 28, 39, 60, 96, 98, 131, 186, 202, 228,
                            231, 318)),
    "aarch64": (0xC00000B7, (63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 124, 216, 233, 172, 93, 169, 165,
                             132, 178, 98, 113, 94, 278)),
}  # fmt: skip
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_FILTER_MODE = 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000


class BoundedStream:
    """A text stream that keeps a bounded number of characters."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._left = MAX_STREAM_CHARACTERS
        self._cut = False

    def write(self, text: str) -> None:
        self._cut = self._cut or len(text) > self._left
        self._parts.append(text[: self._left])
        self._left -= len(self._parts[-1])

    def flush(self) -> None:
        pass

    def text(self) -> str:
        return plain("".join(self._parts)) + ("\n[... cut here ...]" if self._cut else "")


class Files:
    """The workspace as the code sees it. Reads ask the parent process. The parent may carry out the writes."""

    def __init__(self) -> None:
        self.writes: dict[str, tuple[str, str]] = {}

    def read_text(self, path: str) -> str:
        send({"read": plain(str(path))})
        answer = receive()
        if "error" in answer:
            raise FileNotFoundError(answer["error"])
        return answer["content"]

    def write_text(self, path: str, content: str, mode: str = "create") -> None:
        path, content = plain(str(path)), str(content)
        content.encode()  # raises for text that is not valid UTF-8
        if mode not in ("create", "overwrite", "append"):
            raise ValueError(f"mode is create, overwrite or append, not {mode!r}")
        if path in self.writes:
            raise ValueError(f"{path} is written twice")
        self.writes[path] = (content, mode)


def plain(text: str) -> str:
    """The text with lone surrogates escaped, which JSON cannot carry."""
    return text.encode("utf-8", "backslashreplace").decode()


def send(message: object) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


def receive() -> dict[str, Any]:
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(1)
    return json.loads(line)


def confine() -> None:
    """Bound the memory, die with the parent, and give up every system call that is not needed to compute."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        return
    architecture, calls = _CALLS[platform.machine()]
    rules = [(_LOAD, 0, 0, 4), (_JUMP_IF_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    rules += [(_JUMP_IF_EQUAL, len(calls) - place, 0, number) for place, number in enumerate(calls)]
    rules += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(rules), ctypes.addressof(program)))
    control = ctypes.CDLL(None, use_errno=True).prctl
    failed = (
        control(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        control(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        control(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.c_void_p(ctypes.addressof(head)), 0, 0),
    )
    if any(failed):
        send({"error": "this kernel does not let a process confine itself, so no code is run"})
        os._exit(1)


def public(module: ModuleType) -> SimpleNamespace:
    """The functions and numbers of a module, and none of the modules that it uses itself."""
    own: dict[str, object] = vars(module)
    return SimpleNamespace(**{name: value for name, value in own.items() if name[0] != "_" and not ismodule(value)})


def render(value: object) -> str:
    text = plain(repr(value))
    return text if len(text) <= MAX_STREAM_CHARACTERS else f"{text[:MAX_STREAM_CHARACTERS]}[... cut here ...]"


def complete(interpreter: Any) -> None:
    """Give asteval what it lacks: generator expressions, evaluated at once, and stars in displays and calls."""

    def values(nodes: list[ast.expr]) -> list[Any]:
        found: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                found.extend(interpreter.run(node.value))
            else:
                found.append(interpreter.run(node))
        return found

    def mapping(node: ast.Dict) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            found |= interpreter.run(value) if key is None else {interpreter.run(key): interpreter.run(value)}
        return found

    def call(node: ast.Call) -> object:
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            node = copy(node)
            node.args = [ast.Constant(value) for value in values(node.args)]
        return interpreter.on_call(node)

    handlers: dict[str, Callable[[Any], object]] = {
        "generatorexp": interpreter.on_listcomp,
        "list": lambda node: values(node.elts),
        "tuple": lambda node: tuple(values(node.elts)),
        "set": lambda node: set(values(node.elts)),
        "dict": mapping,
        "call": call,
    }
    interpreter.node_handlers |= handlers


def evaluate(request: dict[str, Any]) -> dict[str, Any]:
    sys.path.append(request["packages"])
    cast("dict[str, object]", sys.modules)["numpy"] = None  # slow to import, and nothing that code may reach
    asteval: Any = import_module("asteval")
    files, stdout, stderr = Files(), BoundedStream(), BoundedStream()
    symbols: dict[str, Any] = {name: getattr(builtins, name) for name in _NAMES}
    symbols |= {"read_text": files.read_text, "write_text": files.write_text, "vfs_reads": request["reads"]}
    for name in ("math", "statistics"):
        if name in request["code"]:  # statistics takes long to import
            symbols[name] = public(import_module(name))
    interpreter: Any = asteval.Interpreter(
        symtable=symbols | request["globals"],
        use_numpy=False,
        writer=stdout,
        err_writer=stderr,
        readonly_symbols=list(symbols),
    )
    complete(interpreter)
    confine()
    outcome: dict[str, Any] = {}
    try:
        value: object = interpreter.eval(request["code"], show_errors=False)
        failed = [" ".join(map(str, error.get_error()[:2])) for error in interpreter.error[-1:]]
        if not failed:
            outcome["value_repr"] = None if value is None else render(value)
            own: list[str] = [name for name in interpreter.symtable if name not in symbols and name != "print"]
            outcome["globals"] = {name: render(interpreter.symtable[name]) for name in own[:MAX_SHOWN_GLOBALS]}
            outcome["writes"] = [[path, content, mode] for path, (content, mode) in files.writes.items()]
    except MemoryError:
        failed = [f"MemoryError: the code needed more than {MEMORY_BYTES >> 20} MiB"]
    except Exception as error:
        failed = [f"{type(error).__name__}: {error}"]
    outcome["stdout"], outcome["stderr"] = stdout.text(), stderr.text()
    if failed:
        outcome["failed"] = plain(failed[0][:MAX_STREAM_CHARACTERS])
    return outcome


if __name__ == "__main__":
    send({"outcome": evaluate(receive())})
    os._exit(0)
