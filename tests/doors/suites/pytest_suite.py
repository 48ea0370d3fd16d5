"""The plugin for pytest, in runs of pytest of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
PAGE = Path(__file__).parents[3] / "docs/build/doors/pytest.md"


def run(pytester: pytest.Pytester, text: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(text)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)


def test_the_tests_of_the_page_pass(pytester: pytest.Pytester) -> None:
    found = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    run(pytester, found[1], "-W", "error").assert_outcomes(passed=2)


def test_a_run_without_the_fixtures_imports_nothing_of_ringfence(pytester: pytest.Pytester) -> None:
    text = """
        import sys

        def test_modules(request):
            assert request.config.pluginmanager.hasplugin("ringfence")
            loaded = {name for name in sys.modules if name.partition(".")[0].startswith("ringfence")}
            assert loaded == {"ringfence_doors", "ringfence_doors.pytest_plugin"}
    """
    run(pytester, text).assert_outcomes(passed=1)


def test_two_tests_have_workspaces_of_their_own(pytester: pytest.Pytester) -> None:
    text = """
        import pytest

        @pytest.mark.parametrize("number", [1, 2])
        def test_own(ringfence_workspace, number):
            assert ringfence_workspace.steps() == []
            ringfence_workspace.run(["touch", "a.txt"])
            assert [step.number for step in ringfence_workspace.steps()] == [1]
            ringfence_workspace.undo()
    """
    run(pytester, text).assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("(root / 'a.txt').write_text('a')", "not rolled back: a.txt"),
        ("workspace.run(['touch', 'a.txt']); workspace.undo()", "made 2 steps"),
    ],
    ids=["a change by somebody else", "a change that was undone"],
)
def test_what_a_block_leaves_fails_the_test(pytester: pytest.Pytester, block: str, message: str) -> None:
    text = f"""
        from pathlib import Path

        def test_block(ringfence_workspace, assert_rolled_back):
            workspace, root = ringfence_workspace, Path(ringfence_workspace.root)
            with assert_rolled_back():
                {block}
    """
    result = run(pytester, text)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*AssertionError: *{message}*"])


def test_where_there_is_no_podman_a_test_of_the_sandbox_is_skipped(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_sandbox(ringfence_sandbox): ringfence_sandbox.run(['true'])")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs"]
    environment = {"PATH": "/nowhere", "CONTAINER_HOST": "unix:///nowhere/podman.sock", "HOME": str(pytester.path)}
    done = subprocess.run(command, cwd=pytester.path, capture_output=True, text=True, check=False, env=environment)
    assert "1 skipped" in done.stdout, done.stdout
    assert "there is no sandbox here" in done.stdout
