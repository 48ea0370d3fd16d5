"""Policies that see what a call has really changed, attacked through every way of changing something."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import PromptValidationError
from ringfence.adapters import ScriptedAdapter, ToolExecutor
from ringfence.filesystem import Filesystem, InMemoryFilesystem
from ringfence.prompt import (
    DeletionLimitPolicy,
    MarkdownSection,
    PathPolicy,
    PolicyDecision,
    Prompt,
    PromptTemplate,
    ProtectedFilesPolicy,
    RequireCleanTestsPolicy,
    Tool,
    ToolContext,
    ToolResult,
)
from ringfence.runtime import Change, FileVersion, Receipt, Session, ToolInvoked
from ringfence_sandbox import HostFilesystem

Do = Callable[[Filesystem, ToolContext], object]


@dataclass(frozen=True)
class Ran:
    exit_code: int


class Agent:
    """A prompt whose one tool does with the files what a test says; `tests` stands for running the tests."""

    def __init__(self, files: Filesystem, policies: Sequence[Any]) -> None:
        self.files = files
        self.session = Session()
        self.do: Do = lambda files, context: None
        self.exit_code = 0
        self.hidden = False
        tools: list[Tool[Any, Any]] = [
            Tool[None, None](name="act", description="Act.", handler=self._act),
            Tool[None, None](name="publish", description="Publish.", handler=self._act),
            Tool[None, Ran](name="tests", description="Test.", handler=self._test),
        ]
        section = MarkdownSection(title="Work", key="work", template="Do it.", tools=tools)
        self.prompt = Prompt(PromptTemplate(ns="tests", key="effects", sections=[section], policies=policies))
        self.prompt.bind(resources={Filesystem: files})

    def _act(self, params: None, *, context: ToolContext) -> ToolResult[None]:
        assert context.filesystem is not None
        self.do(context.filesystem, context)
        return ToolResult("done")

    def _test(self, params: None, *, context: ToolContext) -> ToolResult[Ran]:
        assert context.filesystem is not None
        self.do(context.filesystem, context)
        return ToolResult("OK", Ran(self.exit_code), exclude_value_from_context=self.hidden)

    def __call__(self, do: Do | Callable[[Filesystem], object], tool: str = "act") -> ToolResult[Any]:
        takes_context = do.__code__.co_argcount == 2  # type: ignore[union-attr]
        self.do = do if takes_context else (lambda files, context: do(files))  # type: ignore[call-arg,assignment]
        with self.prompt.resources:
            adapter: Any = ScriptedAdapter([{"text": "done"}])
            return ToolExecutor(prompt=self.prompt, session=self.session, adapter=adapter).call(tool, {})

    def receipt(self) -> Receipt:
        receipt = self.session[Receipt].latest()
        assert receipt is not None
        return receipt


TREE = {
    "src/a.py": "a\n",
    "src/deep/b.py": "b\n",
    "docs/x.md": "x\n",
    "keep/.env": "SECRET=1\n",
    "keep/data.txt": "data\n",
    ".github/workflows/ci.yml": "on: push\n",
    "README.md": "read\n",
    "empty.txt": "",
}


@pytest.fixture(params=["memory", "disk"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Filesystem]:
    with made_files(request.param, tmp_path) as files:
        yield files


@contextmanager
def made_files(kind: str, tmp_path: Path) -> Iterator[Filesystem]:
    if kind == "memory":
        memory = InMemoryFilesystem()
        fill(memory)
        yield memory
        return
    (tmp_path / "tree").mkdir()
    with HostFilesystem(tmp_path / "tree", store=tmp_path / "store") as disk:
        fill(disk)
        yield disk


def fill(files: Filesystem) -> None:
    for path, content in TREE.items():
        files.write(path, content)


def contents(files: Filesystem) -> dict[str, bytes]:
    return {found.path: files.read_bytes(found.path).content for found in files.glob("**") if found.is_file}


def link_and_write(files: Filesystem) -> None:
    files.symlink("src/link", "../docs")
    files.write("src/link/x.md", "through a link\n")


def swap_directories(files: Filesystem) -> None:
    files.move("docs", "src/docs")
    files.mkdir("docs")


WAYS_OUT_OF_SRC: list[Callable[[Filesystem], object]] = [
    lambda files: files.write("docs/new.md", "x"),
    lambda files: files.write("src/../docs/x.md", "x"),
    lambda files: files.write(".//docs//./x.md", "x"),
    lambda files: files.write("/docs/x.md", "x", mode="append"),
    lambda files: files.delete("docs", recursive=True),
    lambda files: files.delete("docs/x.md"),
    lambda files: files.move("docs/x.md", "src/x.md"),
    lambda files: files.move("docs", "src/docs"),
    lambda files: files.move("src", "lib"),
    lambda files: files.move("src/a.py", "docs/a.py"),
    lambda files: files.chmod("docs/x.md", 0o755),
    lambda files: files.mkdir("elsewhere"),
    lambda files: files.symlink("ln", "src"),
    lambda files: files.write("SRC/a.py", "x"),
    link_and_write,
    swap_directories,
]


@pytest.mark.parametrize("do", WAYS_OUT_OF_SRC)
def test_nothing_outside_of_what_is_allowed_changes_in_whatever_way(
    files: Filesystem, do: Callable[[Filesystem], object]
) -> None:
    agent, before = Agent(files, [PathPolicy(allow=["/src/**"])]), contents(files)
    result = agent(do)
    assert not result.success
    assert "denied by the policy paths" in result.message
    assert contents(files) == before
    assert agent.receipt().outcome == "denied"
    assert agent.receipt().changes, "the receipt says what the call had changed"
    assert agent(lambda files: files.write("src/deep/er/c.py", "c")).success


def test_what_a_command_found_out_is_told_though_its_changes_are_denied(files: Filesystem) -> None:
    agent, before = Agent(files, [PathPolicy(allow=["/src/**"])]), contents(files)
    agent.exit_code = 3
    result = agent(lambda files: files.write("docs/cache", "x"), "tests")
    assert (result.success, result.value, agent.receipt().exit_code) == (False, Ran(3), 3)
    assert "docs/cache is not among what may be changed; it had ended with exit code 3" in result.message
    assert agent.session[Ran].all() == ()
    agent.hidden = True
    hidden = agent(lambda files: files.write("docs/cache", "x"), "tests")
    assert (hidden.exclude_value_from_context, agent.session[ToolInvoked].all()[-1].rendered_output) == (True, "")
    assert contents(files) == before


@pytest.mark.parametrize("do", WAYS_OUT_OF_SRC[:10])
@pytest.mark.parametrize("pattern", ["docs", "/docs", "docs/", "docs/**", "DOCS", "d?cs", "**/docs"])
def test_what_is_denied_does_not_change_in_whatever_way(
    files: Filesystem, do: Callable[[Filesystem], object], pattern: str
) -> None:
    agent, before = Agent(files, [PathPolicy(deny=[pattern, "/src/**"])]), contents(files)
    assert "denied by the policy paths" in agent(do).message
    assert contents(files) == before
    assert agent(lambda files: files.write("README.md", "x")).success


def test_the_way_to_an_allowed_file_may_be_made_and_no_more(files: Filesystem) -> None:
    agent = Agent(files, [PathPolicy(allow=["/new/**/*.py"])])
    assert agent(lambda files: files.write("new/deep/a.py", "x")).success
    assert not agent(lambda files: files.mkdir("new/other")).success
    assert not agent(lambda files: files.write("new/deep/a.txt", "x")).success


def test_a_denial_names_the_file_and_not_the_directory_that_was_made_for_it(files: Filesystem) -> None:
    agent = Agent(files, [PathPolicy(allow=["/src/**"])])
    assert "made/for/it.txt is not among" in agent(lambda files: files.write("made/for/it.txt", "x")).message


def test_an_empty_list_allows_nothing(files: Filesystem) -> None:
    assert not Agent(files, [PathPolicy(allow=[])])(lambda files: files.write("x", "x")).success


@pytest.mark.parametrize("path", ["caf\u00e9/x", "cafe\u0301/x", "CAFE\u0301/x", "STRASSE/x", "stra\u00dfe/x"])
def test_other_ways_of_writing_a_denied_name_are_denied(path: str) -> None:
    files = InMemoryFilesystem()
    agent = Agent(files, [PathPolicy(deny=["caf\u00e9", "stra\u00dfe"])])
    assert not agent(lambda files: files.write(path, "x")).success


@pytest.mark.parametrize(
    ("pattern", "path"), [("stra?e", "stra\u00dfe/x"), ("[!a-z].py", "A.py"), ("[Z-a]*", "Zebra"), ("[A-z]x", "_x")]
)
def test_what_a_pattern_matches_as_it_is_written_is_denied(pattern: str, path: str) -> None:
    agent = Agent(InMemoryFilesystem(), [PathPolicy(deny=[pattern])])
    assert not agent(lambda files: files.write(path, "x")).success


PROTECTED = [
    ".git/hooks/post-checkout",
    "sub/.git",
    ".GIT/config",
    "git~1/config",
    ".git . /config",
    ".g\u200cit/config",
    ".github/workflows/new.yml",
    ".GitHub/Workflows/new.yml",
    ".env",
    "app/.env.production",
    "id_rsa",
    "x/.ssh/config",
    "certs/server.PEM",
    "config/secrets.yaml",
    "a/.docker/config.json",
]


@pytest.mark.parametrize("path", PROTECTED)
def test_protected_files_are_not_made(files: Filesystem, path: str) -> None:
    agent = Agent(files, [ProtectedFilesPolicy()])
    assert "denied by the policy protected_files" in agent(lambda files: files.write(path, "x")).message


@pytest.mark.parametrize("path", [".gitignore", ".github/CODEOWNERS", ".env.example", "environment.py", "keys.py"])
def test_other_files_are_not_taken_for_protected_ones(files: Filesystem, path: str) -> None:
    assert Agent(files, [ProtectedFilesPolicy()])(lambda files: files.write(path, "x")).success


def link_in_the_way(files: Filesystem) -> None:
    files.symlink(".github", "mine")


@pytest.mark.parametrize(
    "do",
    [
        lambda files: files.delete("keep", recursive=True),
        lambda files: files.move("keep", "elsewhere"),
        lambda files: files.move("src", ".github/workflows/src"),
        lambda files: files.delete(".github", recursive=True),
        lambda files: files.move(".github", "github"),
        lambda files: (files.symlink("src/w", "../.github/workflows"), files.write("src/w/ci.yml", "x")),
    ],
)
def test_protected_files_do_not_go_with_a_directory_or_through_a_link(files: Filesystem, do: Any) -> None:
    agent, before = Agent(files, [ProtectedFilesPolicy()]), contents(files)
    assert not agent(do).success
    assert contents(files) == before


def test_a_link_does_not_take_the_place_of_a_directory_above_a_protected_one() -> None:
    agent = Agent(InMemoryFilesystem(), [ProtectedFilesPolicy()])
    assert "must not become a link" in agent(link_in_the_way).message


def test_so_many_files_may_be_removed_and_no_more(files: Filesystem) -> None:
    agent = Agent(files, [DeletionLimitPolicy(max_files=2)])
    assert "3 files" in agent(lambda files: [files.delete(name, recursive=True) for name in ("src", "docs")]).message
    assert agent(lambda files: files.delete("docs", recursive=True)).success
    assert agent(lambda files: files.delete("empty.txt")).success
    denied = agent(lambda files: files.delete("README.md"))
    assert "deletion_limit" in denied.message
    assert "README.md" in denied.message
    assert files.exists("README.md")
    assert agent(lambda files: files.write("README.md", "x")).success
    assert agent(lambda files: files.write("docs/x.md", "back")).success
    assert agent(lambda files: files.delete("README.md")).success


@pytest.mark.parametrize(
    "do",
    [
        lambda files: files.write("README.md", ""),
        lambda files: (files.delete("README.md"), files.symlink("README.md", "src/a.py")),
        lambda files: (files.delete("README.md"), files.mkdir("README.md")),
        lambda files: (files.move("src/a.py", "README.md", overwrite=True), files.delete("README.md")),
        lambda files: files.delete("README.md"),
    ],
)
def test_emptied_or_replaced_is_removed(files: Filesystem, do: Any) -> None:
    agent = Agent(files, [DeletionLimitPolicy(max_files=0)])
    assert "deletion_limit" in agent(do).message
    assert files.read("README.md").content == "read\n"


def test_what_a_session_made_itself_it_may_remove(files: Filesystem) -> None:
    agent = Agent(files, [DeletionLimitPolicy(max_files=0)])
    assert agent(lambda files: files.write("tmp/note.txt", "mine")).success
    assert agent(lambda files: files.move("tmp/note.txt", "tmp/other.txt")).success
    assert agent(lambda files: files.write("tmp/other.txt", "")).success
    assert agent(lambda files: files.delete("tmp", recursive=True)).success


def test_a_moved_file_is_not_removed_and_stays_somebody_else_s(files: Filesystem) -> None:
    agent = Agent(files, [DeletionLimitPolicy(max_files=0)])
    assert agent(lambda files: files.move("src", "lib")).success
    assert not agent(lambda files: files.delete("lib", recursive=True)).success


def test_a_link_is_moved_with_its_directory_and_stays_somebody_else_s(files: Filesystem) -> None:
    files.symlink("src/link", "a.py")
    agent = Agent(files, [DeletionLimitPolicy(max_files=0)])
    assert agent(lambda files: files.move("src", "lib")).success
    assert "1 file removed" in agent(lambda files: files.delete("lib/link")).message


def test_the_root_is_called_so_where_it_must_not_be_changed(files: Filesystem) -> None:
    agent = Agent(files, [PathPolicy(allow=["/src"])])
    assert "the root is not among" in agent(lambda files: files.chmod("", 0o700)).message


def test_files_of_one_content_are_moved_and_stay_somebody_else_s(files: Filesystem) -> None:
    for path in ("src/__init__.py", "src/deep/__init__.py"):
        files.write(path, "")
    agent = Agent(files, [DeletionLimitPolicy(max_files=0)])
    assert agent(lambda files: files.move("src", "lib")).success
    assert "1 file removed" in agent(lambda files: files.delete("lib/__init__.py")).message
    assert "1 file removed" in agent(lambda files: files.delete("lib/deep/__init__.py")).message


def test_a_file_that_is_moved_over_another_is_one_file_less(files: Filesystem) -> None:
    agent = Agent(files, [DeletionLimitPolicy(max_files=0)])
    assert agent(lambda files: files.write("own.txt", "mine")).success
    assert "README.md" in agent(lambda files: files.move("README.md", "own.txt", overwrite=True)).message
    assert "README.md" in agent(lambda files: files.move("README.md", "docs/x.md", overwrite=True)).message
    assert files.read("docs/x.md").content == "x\n"


def test_a_file_of_one_s_own_over_somebody_else_s_does_not_make_that_one_s_own(files: Filesystem) -> None:
    agent = Agent(files, [DeletionLimitPolicy(max_files=0)])
    assert agent(lambda files: files.write("own.txt", "mine")).success
    assert agent(lambda files: files.move("own.txt", "README.md", overwrite=True)).success
    assert not agent(lambda files: files.delete("README.md")).success


def test_files_that_take_each_other_s_places_in_one_call_count_as_removed(files: Filesystem) -> None:
    agent = Agent(files, [DeletionLimitPolicy(max_files=0)])
    assert not agent(lambda files: (files.move("docs/x.md", "new.md"), files.move("README.md", "docs/x.md"))).success
    assert files.read("README.md").content == "read\n"


@pytest.mark.parametrize("between", [lambda files: files.exists("README.md"), lambda files: files.mkdir("README.md")])
def test_a_file_of_one_s_own_where_somebody_else_s_was_removed_is_not_one_s_own(files: Filesystem, between: Do) -> None:
    def back(files: Filesystem) -> None:
        if files.exists("README.md"):
            files.delete("README.md")
        files.move("own.txt", "README.md")

    agent = Agent(files, [DeletionLimitPolicy(max_files=1)])
    assert agent(lambda files: files.delete("README.md")).success
    assert agent(between).success
    assert agent(lambda files: files.write("own.txt", "mine")).success
    assert agent(back).success
    assert agent(lambda files: files.delete("README.md")).success
    assert "2 files removed" in agent(lambda files: files.delete("src/a.py")).message


@pytest.mark.parametrize("others", [9, 1])
def test_two_limits_on_deletions_count_a_file_once(files: Filesystem, others: int) -> None:
    agent = Agent(files, [DeletionLimitPolicy(max_files=1), DeletionLimitPolicy(max_files=others)])
    assert agent(lambda files: (files.write("mine", "x"), files.write("mine too", "x"))).success
    assert agent(lambda files: (files.delete("mine"), files.delete("mine too"))).success, "its own"
    assert agent(lambda files: files.delete("docs/x.md")).success
    assert agent(lambda files: files.write("docs/x.md", "back")).success
    assert agent(lambda files: files.delete("docs/x.md")).success
    assert not agent(lambda files: files.delete("src/a.py")).success, "somebody else's, after one"


def test_a_limit_on_deletions_with_a_name_of_its_own_counts_for_itself(files: Filesystem) -> None:
    class Strict(DeletionLimitPolicy):
        name = "strict"

    agent = Agent(files, [DeletionLimitPolicy(max_files=2), Strict(max_files=1)])
    assert agent(lambda files: files.delete("docs/x.md")).success
    assert "strict" in agent(lambda files: files.delete("src/a.py")).message


def within(agent: Agent, *deeds: Callable[[Filesystem], object]) -> Do:
    """A call whose handler makes a call of the same prompt for each deed."""

    def outer(files: Filesystem, context: ToolContext) -> None:
        call = ToolExecutor(prompt=agent.prompt, session=context.session).call
        for deed in deeds:
            agent.do = lambda files, context, deed=deed: deed(files)
            assert call("act", {}).success

    return outer


def test_what_a_nested_call_removed_of_the_session_s_own_is_not_somebody_else_s_to_the_call_around_it(
    files: Filesystem,
) -> None:
    agent = Agent(files, [DeletionLimitPolicy(max_files=0)])
    assert agent(lambda files: files.write("mine", "x")).success
    assert agent(within(agent, lambda files: files.delete("mine"))).success


def test_a_file_that_nested_calls_moved_and_then_removed_counts_once(files: Filesystem) -> None:
    agent = Agent(files, [DeletionLimitPolicy(max_files=1)])
    deeds = lambda files: files.move("docs/x.md", "new.md"), lambda files: files.delete("new.md")
    assert agent(within(agent, *deeds)).success
    assert "2 files" in agent(lambda files: files.delete("README.md")).message


def test_what_was_rolled_back_does_not_count_as_removed(files: Filesystem) -> None:
    def delete_and_fail(files: Filesystem) -> None:
        files.delete("README.md")
        raise OSError("broken")

    agent = Agent(files, [DeletionLimitPolicy(max_files=1)])
    assert not agent(delete_and_fail).success
    assert agent(lambda files: files.delete("docs/x.md")).success


def test_tools_and_files_wait_for_tests_that_have_passed_since_the_last_change(files: Filesystem) -> None:
    agent = Agent(files, [RequireCleanTestsPolicy("tests", before=["publish"], paths=["README.md"])])
    nothing: Callable[[Filesystem], object] = lambda files: None  # noqa: E731
    release: Callable[[Filesystem], object] = lambda files: files.write("README.md", "1.0")  # noqa: E731
    assert "run tests first" in agent(nothing, "publish").message
    assert "run tests first" in agent(release).message
    agent.exit_code = 1
    agent(nothing, "tests")
    assert not agent(nothing, "publish").success
    agent.exit_code = 0
    agent(nothing, "tests")
    assert agent(nothing).success
    assert agent(nothing, "publish").success
    assert agent(release).success
    assert not agent(nothing, "publish").success, "that was a change, too"
    agent(nothing, "tests")
    agent.exit_code = 2
    agent(nothing, "tests")
    assert not agent(nothing, "publish").success, "a later failure counts"


@dataclass(frozen=True)
class RunAny:
    """What a tool that runs any command is told."""

    command: str | None = None
    argv: tuple[str, ...] = ()
    cwd: str = ""
    env: dict[str, str] = field(default_factory=dict[str, str])
    stdin: str | None = None


def counts(patterns: str | list[str], arguments: dict[str, object], *besides: RequireCleanTestsPolicy) -> bool:
    """Whether a call of such a tool, which ends with 0, counts as the tests that a release waits for."""

    def run(params: RunAny, *, context: ToolContext) -> ToolResult[Ran]:
        return ToolResult.ok(Ran(0))

    def release(params: None, *, context: ToolContext) -> ToolResult[None]:
        return ToolResult("released")

    tools: list[Tool[Any, Any]] = [
        Tool[RunAny, Ran](name="shell", description="Run.", handler=run),
        Tool[None, None](name="release", description="Release.", handler=release),
    ]
    section = MarkdownSection(title="Work", key="work", template="Do it.", tools=tools)
    policy = RequireCleanTestsPolicy("shell", command=patterns, before=["release"])
    policies = [policy, *besides]
    prompt = Prompt(PromptTemplate(ns="tests", key="commands", sections=[section], policies=policies))
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=Session())
        assert executor.call("shell", arguments).success
        released = executor.call("release", {})
    assert released.success or f"run shell with {policy.command[0]!r}" in released.message
    return released.success


def test_the_tests_of_one_policy_are_not_those_of_another() -> None:
    other = RequireCleanTestsPolicy("shell", command="true", paths=["other"])
    assert not counts("pytest", {"command": "true"}, other)
    assert counts("pytest", {"command": "pytest"}, other)


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": "pytest"},
        {"command": "  pytest tests/test_a.py "},
        {"command": "pytest 'a and b' \"x\""},
        {"command": "pytest", "cwd": ".", "env": {}},
        {"argv": ["pytest", "tests/a and (b)"]},
        {"command": "make check"},
        {"command": "npm test -- --run"},
        {"command": "go test -v -count=1 ./..."},
    ],
)
def test_a_command_that_is_named_counts_as_the_tests(arguments: dict[str, object]) -> None:
    assert counts(["pytest*", "make check", "npm test -- --run", "go test -v -count=1*"], arguments)


@pytest.mark.parametrize(
    ("pattern", "command"),
    [
        ("pytest*", "pytest 'tests/a.py::test_a[x=1-*]'"),
        ("pytest*", 'pytest "tests/{a,b}.py" '),
        ("pytest tests/test_*.py", "pytest tests/test_*.py"),
        ("go test ./{a,b}/...", "go test ./{a,b}/..."),
        ("make test CI=1", "make test CI=1"),
    ],
)
def test_what_a_shell_would_expand_counts_where_it_is_quoted_or_named(pattern: str, command: str) -> None:
    assert counts(pattern, {"command": command})


def test_words_that_are_globs_stand_for_words() -> None:
    for pattern in ("*", "* tests/*", "pytest *", "pytest tests*", "py?est tests/*", "pytest [t]ests/a.py"):
        assert counts(pattern, {"command": "pytest tests/a.py"}), pattern


@pytest.mark.parametrize(
    ("pattern", "commands"),
    [
        (
            "pytest*",
            (
                "pytest -h|pytest -V|pytest -qh|pytest --markers|pytest --fixtures|pytest --collect-only|"
                "pytest --co tests|pytest --help|pytest --version|pytest --setup-plan|pytest --deselect tests|"
                "pytest -k nothing|pytest -q|pytest -o addopts=--co|"
                "pytest -c other.ini|pytest @options|pytest-watch|pytest --|pytest -*"
            ),
        ),
        ("pytest -q*", "pytest|pytest -qh|pytest -q -h|pytest -q --co|pytest -q -k x|pytest -k -q|pytest tests -q"),
        ("python -m pytest*", "python -m pytest --co|python -m pytest_other|python -h -m pytest|python -c pytest"),
        ("make test*", "make test -n|make -n test|make test --dry-run|make test T=true|make test T:=x|make tests -q"),
        (
            "pytest*",
            (
                "pytest *co|pytest ?-co|pytest [-]-co|pytest {--co,}|pytest {a,--co}|pytest tests/*|pytest ~|"
                "pytest 'tests'/[a-b].py|pytest \"tests\"*|pytest ''*co|pytest '*'*|pytest tests?|pytest \v--co|"
                "pytest \f--co|pytest\u00a0tests|pytest a\x1ctests"
            ),
        ),
        ("pytest *", "pytest *|pytest ?-co|pytest *co"),
        ("./run tests/a*", "./run tests/*|./run tests/?|./ru? tests/a"),
        (
            "make test*",
            "make test a.b=x|make test MAKE-FLAGS=x|make test a/b=x|make test x::=y|make test =|make test é.=x",
        ),
        ("npm test*", "npm test --help|npm test -- --passWithNoTests|npm --prefix elsewhere test"),
        ("go test*", "go test -run none ./...|go test -list . ./...|go test -c|go test -n ./..."),
        ("cargo test*", "cargo test --no-run|cargo test -- --list|cargo test -h"),
        ("ctest", "ctest -N|ctest --show-only"),
    ],
)
def test_what_runs_no_test_does_not_count_unless_its_options_are_named(pattern: str, commands: str) -> None:
    for command in commands.split("|"):
        assert not counts(pattern, {"command": command}), command


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": command}
        for command in (
            *("true", "echo pytest", "xpytest", "./pytest", "PYTEST", "pytes", "make  checks", "make check VAR=1 x"),
            *(
                "pytest || true",
                "pytest; true",
                "pytest & true",
                "pytest | cat",
                "pytest\ntrue",
                "pytest &",
                "! pytest",
            ),
            *("pytest > a.py", "pytest < x", "pytest $(true)", "pytest `true`", "pytest $X", "(pytest)", "pytest # x"),
            *(
                "pytest --version",
                "pytest --help",
                "pytest 'a",
                "pytest \\a",
                "A=1 pytest",
                "PATH=. pytest",
                "if pytest",
            ),
            *("pytest --version || true", "exit 0\npytest", "true #\npytest", "eval pytest", "'pytest;true'"),
        )
    ]
    + [
        {"argv": ["sh", "-c", "pytest"]},
        {"argv": ["/tmp/pytest"]},
        {"argv": ["true", "pytest"]},
        {"argv": ["pytest", "--version"]},
        {"argv": []},
        {"command": "pytest", "argv": ["true"]},
        {"command": "pytest", "cwd": "empty"},
        {"command": "pytest", "env": {"PYTEST_ADDOPTS": "--collect-only"}},
        {"command": "pytest", "stdin": "x"},
        {},
    ],
    ids=str,
)
def test_another_command_does_not_whatever_its_exit_code(arguments: dict[str, object]) -> None:
    assert not counts(["pytest*", "make check"], arguments)


def test_a_whole_command_is_that_one_alone() -> None:
    assert counts("pytest", {"command": "pytest"})
    for other in ("pytest -q", "pytest --collect-only", "pytest-other"):
        assert not counts("pytest", {"command": other})


def test_a_tool_without_commands_never_counts_where_one_is_named(files: Filesystem) -> None:
    agent = Agent(files, [RequireCleanTestsPolicy("tests", command="*", before=["publish"])])
    agent(lambda files: None, "tests")
    assert not agent(lambda files: None, "publish").success


@pytest.mark.parametrize(
    "make",
    [
        PathPolicy,
        lambda: PathPolicy(deny=[]),
        lambda: PathPolicy(deny=[""]),
        lambda: RequireCleanTestsPolicy("tests", command="", before=["x"]),
        lambda: RequireCleanTestsPolicy("tests", command=["pytest", " "], before=["x"]),
        lambda: PathPolicy(allow=["../x"]),
        lambda: PathPolicy(deny=["*.{pem,key}"]),
        lambda: PathPolicy(deny="src"),
        lambda: DeletionLimitPolicy(max_files=-1),
        lambda: RequireCleanTestsPolicy("tests"),
        lambda: RequireCleanTestsPolicy("tests", before=["tests"]),
        lambda: RequireCleanTestsPolicy("tests", paths="x"),
        lambda: Agent(InMemoryFilesystem(), [RequireCleanTestsPolicy("tset", before=["publish"])]),
    ],
)
def test_what_cannot_be_a_policy_is_refused_at_once(make: Callable[[], object]) -> None:
    with pytest.raises((PromptValidationError, TypeError)):
        make()


def test_a_pattern_may_have_a_brace_of_its_own() -> None:
    agent = Agent(InMemoryFilesystem(), [PathPolicy(deny=["\\{a,b}"])])
    assert not agent(lambda files: files.write("{a,b}", "x")).success
    assert agent(lambda files: files.write("a", "x")).success


class Effect:
    """An effect policy that does what a test says."""

    name = "effect"

    def __init__(self, decide: Callable[[Sequence[Change], ToolContext], Any]) -> None:
        self.decide = decide
        self.asked = 0

    def check_effects(self, tool: Any, params: Any, changes: Sequence[Change], *, context: ToolContext) -> Any:
        self.asked += 1
        return self.decide(changes, context)


@pytest.mark.parametrize(
    "decide",
    [
        lambda changes, context: 1 / 0,
        lambda changes, context: None,
        lambda changes, context: True,
        lambda changes, context: PolicyDecision("no"),
        lambda changes, context: context.session.dispatch(Ran(1)) and PolicyDecision.allow(),
        lambda changes, context: context.filesystem.write("late", "x") and PolicyDecision.allow(),
    ],
)
def test_an_effect_policy_that_cannot_decide_denies(files: Filesystem, decide: Any) -> None:
    agent, before = Agent(files, [Effect(decide)]), contents(files)
    assert "denied by the policy effect: the policy could not decide" in agent(lambda f: f.write("x", "x")).message
    assert contents(files) == before
    assert agent.session[Ran].all() == ()


def test_all_have_to_allow_and_the_first_denial_ends_it(files: Filesystem) -> None:
    first, second, third = (
        Effect(lambda changes, context: PolicyDecision.allow()),
        Effect(lambda changes, context: PolicyDecision.deny("because")),
        Effect(lambda changes, context: PolicyDecision.allow()),
    )
    agent = Agent(files, [first, second, third])
    assert agent(lambda files: files.write("x", "x")).message.endswith("because")
    assert (first.asked, second.asked, third.asked) == (1, 1, 0)
    assert [verdict.allowed for verdict in agent.receipt().policies] == [True, False]


def test_an_effect_policy_sees_the_bytes_that_are_about_to_be_kept_and_its_reads_are_not_the_call_s(
    files: Filesystem,
) -> None:
    def look(changes: Sequence[Change], context: ToolContext) -> PolicyDecision:
        assert context.filesystem is not None
        text = context.filesystem.read(changes[0].path).content
        return PolicyDecision.deny("a draft") if "DRAFT" in text else PolicyDecision.allow()

    agent = Agent(files, [Effect(look)])
    assert not agent(lambda files: files.write("README.md", "DRAFT")).success
    assert agent(lambda files: files.write("README.md", "done")).success
    assert not agent.receipt().read


def test_calls_that_change_nothing_or_fail_anyway_are_not_looked_at(files: Filesystem) -> None:
    def fail(files: Filesystem) -> None:
        files.write("x", "x")
        raise ValueError("no")

    policy = Effect(lambda changes, context: PolicyDecision.allow())
    agent = Agent(files, [policy])
    agent(lambda files: files.read("README.md"))
    agent(fail)
    agent(lambda files: (files.write("x", "x"), files.delete("x")))
    assert policy.asked == 0


def test_what_a_nested_call_changed_is_looked_at_with_the_call_around_it(files: Filesystem) -> None:
    inner = Agent(files, [])
    inner.do = lambda files, context: files.write("docs/x.md", "inner")

    def delegate(files: Filesystem, context: ToolContext) -> None:
        with inner.prompt.resources:
            assert ToolExecutor(prompt=inner.prompt, session=context.session).call("act", {}).success

    agent, before = Agent(files, [PathPolicy(deny=["docs"])]), contents(files)
    assert "denied by the policy paths" in agent(delegate).message
    assert contents(files) == before


def test_what_is_no_policy_is_refused() -> None:
    class Half:
        name = "half"

        def check(self) -> None: ...

        def check_effects(self) -> None: ...

    with pytest.raises(TypeError, match="on_result"):
        Agent(InMemoryFilesystem(), [Half()])


NAMES = st.sampled_from(["src", "SRC", "docs", "a.py", ".git", "\u00e9", "x y", "\udcff"])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
FILE = FileVersion("file", 0o644, 1, "0" * 64)


@given(st.lists(PATHS, unique=True), st.sampled_from(["src", "/src", "src/**", "**/docs", "*.py", "/docs/*"]))
def test_what_denies_a_directory_denies_all_below_and_what_allows_allows_no_less_than_it_matches(
    paths: list[str], pattern: str
) -> None:
    def permitted(policy: PathPolicy, *changed: str) -> bool:
        changes = [Change(path, None, FILE) for path in changed]
        context: Any = None
        tool: Any = None
        return policy.check_effects(tool, None, changes, context=context).allowed

    deny, allow = PathPolicy(deny=[pattern]), PathPolicy(allow=[pattern])
    assert permitted(deny, *paths) == all(permitted(deny, path) for path in paths)
    for path in paths:
        if not permitted(deny, path):
            assert not permitted(deny, f"{path}/below")
        if permitted(allow, path):
            assert permitted(allow, f"{path}/below")
            assert not permitted(deny, path)
