"""`evaluate_python` without a container: what it can do, and what it cannot get at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tool_values import EvalResult

from ringfence.adapters import ToolExecutor
from ringfence.filesystem import InMemoryFilesystem
from ringfence.prompt import Prompt, PromptTemplate, ToolResult
from ringfence.runtime import Session
from ringfence_tools import AstevalSection, VfsToolsSection, python_evaluator


@pytest.fixture
def files() -> InMemoryFilesystem:
    filesystem = InMemoryFilesystem()
    filesystem.write("numbers.txt", "3\n4\n5\n")
    return filesystem


@pytest.fixture
def tools(files: InMemoryFilesystem) -> Iterator[ToolExecutor]:
    session = Session()
    sections = [VfsToolsSection(session=session, filesystem=files), AstevalSection(session=session)]
    prompt = Prompt(PromptTemplate(ns="t", key="t", sections=sections))
    with prompt.resources:
        yield ToolExecutor(prompt=prompt, session=session)


def evaluated(tools: ToolExecutor, code: str, **more: Any) -> ToolResult[EvalResult]:
    return tools.call("evaluate_python", {"code": code, **more})


def value_of(tools: ToolExecutor, code: str, **more: Any) -> str | None:
    result = evaluated(tools, code, **more)
    assert result.success, result.message
    assert result.value is not None
    return result.value.value_repr


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", "2"),
        ("sum([x * x for x in range(10)])", "285"),
        ("def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nf(10)", "3628800"),
        ("math.sqrt(16)", "4.0"),
        ("statistics.mean([1, 2, 3])", "2"),
        ("x = {'a': 1}\nfor k in x:\n    x[k] += 1\nx", "{'a': 2}"),
        ("'ü' * 3", "'üüü'"),
        ("x = 1", None),
    ],
)
def test_the_last_expression_is_the_value(tools: ToolExecutor, code: str, value: str | None) -> None:
    assert value_of(tools, code) == value


def test_what_is_printed_and_the_variables_are_in_the_result(tools: ToolExecutor) -> None:
    result = evaluated(tools, "total = a + len(b)\nprint('total', total)", globals={"a": "40", "b": "[1, 2]"})
    assert result.value == EvalResult(None, "total 42\n", "", {"a": "40", "b": "[1, 2]", "total": "42"})


def test_files_are_read_whole_and_written_when_the_code_succeeds(
    tools: ToolExecutor, files: InMemoryFilesystem
) -> None:
    code = "n = [int(line) for line in vfs_reads['numbers.txt'].split()]\nwrite_text('out/sum.txt', '{}' + str(sum(n)))"
    result = evaluated(tools, code, reads=[{"path": "numbers.txt"}])
    assert result.success, result.message
    assert result.value is not None
    assert result.value.writes == ("out/sum.txt",)
    assert files.read("out/sum.txt").content == "{}12"
    assert value_of(tools, "read_text('numbers.txt')[0]") == "'3'"


def test_a_long_file_is_read_to_its_end(tools: ToolExecutor, files: InMemoryFilesystem) -> None:
    files.write("long.txt", "x\n" * 3_000)
    assert value_of(tools, "read_text('long.txt').count('x')") == "3000"
    assert value_of(tools, "vfs_reads['long.txt'].count('x')", reads=[{"path": "long.txt"}]) == "3000"


def test_code_does_not_keep_the_host_busy_with_files(tools: ToolExecutor, files: InMemoryFilesystem) -> None:
    result = evaluated(tools, "for i in range(101): write_text('many/%d' % i, 'x')")
    assert not result.success
    assert "101 files are to be written, at most 100" in result.message
    assert not files.exists("many")


@pytest.mark.prove
@pytest.mark.parametrize("size", [3, 300_000])
def test_code_that_is_ended_while_it_is_answered_has_not_ended_in_time(
    tools: ToolExecutor, files: InMemoryFilesystem, size: int
) -> None:
    files.write("asked", "x" * size)
    result = evaluated(tools, "while True: read_text('asked')")
    assert not result.success
    assert "did not end within 5 seconds" in result.message


def test_code_that_fails_writes_nothing(tools: ToolExecutor, files: InMemoryFilesystem) -> None:
    result = evaluated(tools, "write_text('a.txt', 'x')\nprint('so far')\n1 / 0", writes=[{"path": "b.txt"}])
    assert not result.success
    assert "ZeroDivisionError" in result.message
    assert result.value is not None
    assert result.value.stdout == "so far\n"
    assert not files.exists("a.txt")
    assert not files.exists("b.txt")


def test_writes_are_all_or_none(tools: ToolExecutor, files: InMemoryFilesystem) -> None:
    for mode in ("overwrite", "append"):
        writes = [{"path": "new.txt", "content": "x"}, {"path": "missing.txt", "content": "x", "mode": mode}]
        assert "missing.txt is not there" in evaluated(tools, "1", writes=writes).message
        assert not files.exists("new.txt")
    assert not evaluated(tools, "write_text('numbers.txt', 'x')").success
    assert files.read("numbers.txt").content == "3\n4\n5\n"


@pytest.mark.parametrize("again", ["new.txt", "./new.txt", "/new.txt"])
def test_a_file_is_written_once_in_whatever_spelling(
    tools: ToolExecutor, files: InMemoryFilesystem, again: str
) -> None:
    result = evaluated(tools, f"write_text('new.txt', '1')\nwrite_text('{again}', '2')")
    assert "new.txt is written twice" in result.message
    assert not files.exists("new.txt")


def test_a_file_is_written_over_only_after_it_was_read(tools: ToolExecutor, files: InMemoryFilesystem) -> None:
    code, writes = "write_text('numbers.txt', '6')", [{"path": "numbers.txt", "mode": "overwrite"}]
    assert "has not been read" in evaluated(tools, code, writes=writes).message
    assert tools.call("read_file", {"file_path": "numbers.txt"}).success
    assert "name it in writes" in evaluated(tools, "write_text('numbers.txt', '6', 'overwrite')").message
    assert evaluated(tools, code, writes=writes).success
    assert files.read("numbers.txt").content == "6"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"code": "1", "reads": [{"path": "new.txt"}], "writes": [{"path": "./new.txt"}]}, "two calls"),
        ({"code": "1", "writes": [{"path": "a"}, {"path": "/a"}]}, "twice"),
        ({"code": "1", "globals": {"not a name": "1"}}, "no name of a variable"),
        ({"code": "1", "globals": {"for": "1"}}, "no name of a variable"),
        ({"code": "1", "globals": {"a": "{"}}, "no JSON"),
        ({"code": "1\x00"}, "control characters"),
        ({"code": "1" * 2001}, "2,001 characters"),
        ({"code": "1", "reads": [{"path": "gone.txt"}]}, "gone.txt"),
    ],
)
def test_what_cannot_be_meant_is_said(tools: ToolExecutor, arguments: dict[str, Any], said: str) -> None:
    result = tools.call("evaluate_python", arguments)
    assert not result.success
    assert said in result.message


def test_code_that_does_not_end_is_ended(tools: ToolExecutor) -> None:
    result = evaluated(tools, "max(range(10 ** 12))")
    assert not result.success
    assert "5 seconds" in result.message


def test_code_that_takes_all_memory_is_ended(tools: ToolExecutor) -> None:
    for code in ("[0] * 10 ** 9", "x = []\nwhile True:\n    x.append('y' * 100000 + str(len(x)))"):
        result = evaluated(tools, code)
        assert not result.success
        assert "memory" in result.message.lower(), result.message


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("sum(x * x for x in range(4))", "14"),
        ("any(x > 1 for x in [1, 2])", "True"),
        ("[y for x in [[1], [2]] for y in x]", "[1, 2]"),
        ("[*range(3), 5]", "[0, 1, 2, 5]"),
        ("(*[1, 2], 3)", "(1, 2, 3)"),
        ("{*[1, 2], 2}", "{1, 2}"),
        ("{**{'a': 1}, 'b': 2}", "{'a': 1, 'b': 2}"),
        ("def total(*numbers):\n    return sum(numbers)\ntotal(*[1, 2])", "3"),
    ],
)
def test_generator_expressions_and_stars_are_evaluated(tools: ToolExecutor, code: str, value: str) -> None:
    assert value_of(tools, code) == value


def test_without_a_filesystem_it_computes() -> None:
    session = Session()
    prompt = Prompt(PromptTemplate(ns="tests", key="alone", sections=[AstevalSection(session=session)]))
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)
        assert value_of(executor, "1 + 1") == "2"
        assert not evaluated(executor, "write_text('a', 'x')").success


def test_what_is_printed_is_bounded(tools: ToolExecutor) -> None:
    result = evaluated(tools, "for i in range(1000):\n    print('x' * 1000)\n'y' * 100000")
    assert result.value is not None
    assert len(result.value.stdout) < 5000
    assert result.value.value_repr is not None
    assert len(result.value.value_repr) < 5000


@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/hostname').read()",
        "import os",
        "__import__('os').listdir('/')",
        "eval('1')",
        "().__class__.__bases__[0].__subclasses__()",
        "math.sqrt.__self__",
        "statistics.sys",
        "'{0.__class__}'.format(1)",
        "read_text.__globals__",
        "read_text('/etc/hostname')",
        "read_text('../../etc/hostname')",
    ],
)
def test_nothing_of_the_machine_can_be_reached(tools: ToolExecutor, code: str) -> None:
    result = evaluated(tools, code)
    assert not result.success
    assert os.uname().nodename not in result.message


def test_the_process_itself_can_do_nothing_but_compute(tmp_path: Path) -> None:
    """Were there a way out of the language, the kernel would still refuse: here all of Python tries."""
    import subprocess
    import sys

    target = tmp_path / "seen"
    target.write_text("secret")
    attempts = {
        "open": f"open({str(target)!r})",
        "make": f"open({str(tmp_path / 'made')!r}, 'w')",
        "run": "os.posix_spawn('/bin/true', ['true'], {})",
        "fork": "os.fork()",
        "exec": "os.execv('/bin/true', ['true'])",
        "socket": "socket.socket()",
        "kill": "os.kill(os.getppid(), 0)",
        "list": "os.listdir('/')",
        "link": f"os.symlink('/', {str(tmp_path / 'link')!r})",
        "thread": "threading.Thread(target=print).start()",
    }
    code = f"import sys, os, socket, threading; sys.path.insert(0, {str(Path(python_evaluator.__file__).parent)!r})\n"
    code += "import python_evaluator; python_evaluator.confine()\n"
    code += f"for name, attempt in {attempts!r}.items():\n"
    code += "    try:\n        eval(attempt); os.write(1, f'{name} came through\\n'.encode())\n"
    code += "    except (OSError, RuntimeError) as error:\n        os.write(1, f'{name}: {error}\\n'.encode())\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={})
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == list(attempts), done.stdout + done.stderr
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "link").is_symlink()
