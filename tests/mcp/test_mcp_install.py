"""`ringfence mcp install` and `uninstall`, on the real files of clients."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from client_programs import make_client_programs
from command_line import ringfence_text

from ringfence_tools.client_files import ConfigFile, UneditableFileError

QWEN = """\
{
    "mcpServers": {"other": {"command": "other"}},
    "ui": {"theme": "dünkel"}
}
"""
CODEX = """\
# my settings
model = "gpt" # the good one

[mcp_servers.other]
command = "other"
"""
PROJECT_FILES = {
    "claude": (".mcp.json", ("mcpServers", "ringfence")),
    "codex": (".codex/config.toml", ("mcp_servers", "ringfence")),
    "gemini": (".gemini/settings.json", ("mcpServers", "ringfence")),
    "opencode": ("opencode.json", ("mcp", "ringfence")),
    "qwen": (".qwen/settings.json", ("mcpServers", "ringfence")),
}
EMPTY = ["{", '"mcpServers":', "{}", "}"]
BY_HAND = {
    "vscode": (".vscode/mcp.json", ("servers", "ringfence")),
    "cursor": (".cursor/mcp.json", ("mcpServers", "ringfence")),
}


@pytest.fixture
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture
def mcp(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs the command in the project ``tmp_path / "project"``, with a home of its own; returns what it prints.

    The clients that have a command of their own are on PATH.
    """
    (tmp_path / "project").mkdir()
    make_client_programs(state / "programs")
    monkeypatch.setenv("PATH", f"{state / 'programs'}:{os.environ['PATH']}")
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(state))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("CODEX_HOME", raising=False)

    def run(*arguments: str, exit_code: int = 0) -> str:
        done = ringfence_text("mcp", *arguments, cwd=tmp_path / "project")
        assert done.returncode == exit_code, done.stderr
        return done.stdout + done.stderr

    return run


def parsed(path: Path) -> Any:
    text = path.read_text()
    return tomllib.loads(text) if path.suffix == ".toml" else ConfigFile(path).data()


def files_below(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def without_servers(directory: Path) -> dict[str, str]:
    """The files below a directory but for one that Claude Code leaves when it has removed its last server."""
    return {name: text for name, text in files_below(directory).items() if text.split() != EMPTY}


@pytest.mark.parametrize("client", PROJECT_FILES)
def test_a_client_gets_an_entry_that_starts_the_server_and_loses_it_again(
    client: str, mcp: Callable[..., str], tmp_path: Path, state: Path
) -> None:
    name, key = PROJECT_FILES[client]
    mcp("install", client)
    entry = parsed(tmp_path / "project" / name)
    for one in key:
        entry = entry[one]
    words = entry["command"] if client == "opencode" else [entry["command"], *entry["args"]]
    assert "serve" in words
    assert "ringfence" in words[0] or "ringfence" in words
    assert entry["environment" if client == "opencode" else "env"] == {"RINGFENCE_STATE_DIR": str(state)}
    settings = {"project/.claude/settings.json"} if client == "claude" else set[str]()
    assert set(files_below(tmp_path)) == {f"project/{name}", *settings}
    mcp("uninstall", client)
    assert without_servers(tmp_path) == {}


def test_claude_may_call_the_tools_until_the_server_is_taken_out(mcp: Callable[..., str], tmp_path: Path) -> None:
    settings = tmp_path / "project/.claude/settings.json"
    settings.parent.mkdir()
    settings.write_text('{"permissions": {"allow": ["WebFetch"]}}')
    said = mcp("install", "claude")
    assert f"+++ {settings}" in said
    assert parsed(settings) == {"permissions": {"allow": ["WebFetch", "mcp__ringfence"]}}
    mcp("uninstall", "claude")
    assert parsed(settings) == {"permissions": {"allow": ["WebFetch"]}}


def test_codex_loads_the_tools_at_once(mcp: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "project/.codex/config.toml"
    file.parent.mkdir()
    given = '[features]\nhooks = true # mine\n\n[features.code_mode]\ndirect_only_tool_namespaces = ["mcp__other"]\n'
    file.write_text(given)
    mcp("install", "codex", "--exclusive")
    features = parsed(file)["features"]
    assert features["code_mode"] == {"direct_only_tool_namespaces": ["mcp__other", "mcp__ringfence"]}
    assert (features["hooks"], features["shell_tool"]) == (True, False)
    mcp("uninstall", "codex", "--exclusive")
    assert file.read_text().strip() == given.strip()


@pytest.mark.parametrize("client", PROJECT_FILES)
def test_a_second_time_changes_nothing(client: str, mcp: Callable[..., str], tmp_path: Path) -> None:
    mcp("install", client)
    before = files_below(tmp_path)
    assert "nothing was changed" in mcp("install", client)
    assert files_below(tmp_path) == before
    mcp("uninstall", client)
    assert "nothing was changed" in mcp("uninstall", client)


@pytest.mark.parametrize(("client", "given"), [("qwen", QWEN), ("codex", CODEX), ("gemini", QWEN)])
def test_what_else_is_in_a_file_stays_as_it_is(
    client: str, given: str, mcp: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "project" / PROJECT_FILES[client][0]
    file.parent.mkdir(exist_ok=True)
    file.write_text(given)
    file.chmod(0o640)
    said = mcp("install", client)
    assert "ringfence" in file.read_text()
    assert f"+++ {file}" in said
    assert file.stat().st_mode & 0o777 == 0o640
    mcp("uninstall", client)
    assert file.read_text().strip() == given.strip()


@pytest.mark.parametrize("client", ["claude", "codex", "gemini", "opencode", "qwen"])
def test_exclusive_denies_the_own_tools_and_uninstalling_it_allows_them(
    client: str, mcp: Callable[..., str], tmp_path: Path
) -> None:
    mcp("install", client, "--exclusive")
    written = files_below(tmp_path)
    assert any("deny" in text or "read-only" in text for text in written.values())
    mcp("uninstall", client, "--exclusive")
    assert without_servers(tmp_path) == {}


def test_without_exclusive_an_uninstall_leaves_what_somebody_denied(mcp: Callable[..., str], tmp_path: Path) -> None:
    settings = tmp_path / "project/.claude/settings.json"
    settings.parent.mkdir()
    settings.write_text('{"permissions": {"deny": ["Bash", "WebFetch"]}}')
    mcp("install", "claude", "--exclusive")
    denied = parsed(settings)["permissions"]["deny"]
    assert denied[:2] == ["Bash", "WebFetch"]
    assert set(denied) == {"Bash", "WebFetch", "Edit", "Write", "NotebookEdit"}
    assert "uninstall claude --exclusive" in mcp("uninstall", "claude")
    assert parsed(settings)["permissions"]["deny"] == denied


BEFORE = {
    "claude": (".claude/settings.json", '{"permissions": {"deny": ["Bash"]}}'),
    "qwen": (".qwen/settings.json", '{"permissions": {"deny": ["edit"]}}'),
    "codex": (".codex/config.toml", 'sandbox_mode = "read-only"\n'),
    "codex changed": (".codex/config.toml", 'sandbox_mode = "workspace-write"\n'),
    "codex server": (".codex/config.toml", '[mcp_servers.ringfence]\ncommand = "mine"\nargs = ["a"]\n'),
    "opencode": ("opencode.json", '{"permission": {"bash": "deny", "edit": "ask"}}'),
}


@pytest.mark.parametrize("case", BEFORE)
@pytest.mark.parametrize("times", [1, 2])
def test_uninstalling_brings_back_what_was_there_before(
    case: str, times: int, mcp: Callable[..., str], tmp_path: Path
) -> None:
    client, (name, given) = case.split(maxsplit=1)[0], BEFORE[case]
    file = tmp_path / "project" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(given)
    before = parsed(file)
    for number in range(times):
        mcp("install", client, "--exclusive", *(["--", "--read-only"] if number else []))
    mcp("uninstall", client, "--exclusive")
    assert parsed(file) == before


def test_a_damaged_record_is_named_and_nothing_is_written(mcp: Callable[..., str], state: Path, tmp_path: Path) -> None:
    mcp("install", "gemini")
    settings = tmp_path / "project/.gemini/settings.json"
    before = settings.read_bytes()
    (state / "clients.json").write_text("{")
    said = " ".join(mcp("uninstall", "gemini", exit_code=2).split())
    assert f"{state / 'clients.json'} is damaged" in said
    assert settings.read_bytes() == before


def test_without_a_record_an_uninstall_leaves_what_may_be_the_user_s_and_says_so(
    mcp: Callable[..., str], tmp_path: Path, state: Path
) -> None:
    mcp("install", "codex", "--exclusive")
    (state / "clients.json").unlink()
    file = tmp_path / "project/.codex/config.toml"
    assert "sandbox_mode stays" in mcp("uninstall", "codex", "--exclusive")
    assert parsed(file) == {"sandbox_mode": "read-only", "features": {"shell_tool": False}}


@pytest.mark.parametrize("client", ["vscode", "cursor"])
def test_exclusive_is_refused_where_no_file_can_say_it(client: str, mcp: Callable[..., str], tmp_path: Path) -> None:
    assert "--exclusive" in mcp("install", client, "--exclusive", exit_code=2)
    assert files_below(tmp_path) == {}


def test_an_uninstall_of_what_has_no_exclusive_says_how_to_uninstall(mcp: Callable[..., str]) -> None:
    assert "`ringfence mcp uninstall cursor`" in mcp("uninstall", "cursor", "--exclusive", exit_code=2)


@pytest.mark.parametrize("options", [["--nonsense"], ["--http", "127.0.0.1:1"], ["/no/such/dir"]])
@pytest.mark.parametrize("client", ["codex", "vscode"])
def test_options_that_the_server_would_not_take_are_refused_before_anything_is_written(
    client: str, options: list[str], mcp: Callable[..., str], tmp_path: Path
) -> None:
    assert options[0] in mcp("install", client, "--", *options, exit_code=2)
    assert files_below(tmp_path) == {}


@pytest.mark.parametrize(("installed", "other"), [([], ["--global"]), (["--global"], [])])
def test_an_uninstall_in_the_other_scope_names_where_the_entry_is(
    installed: list[str], other: list[str], mcp: Callable[..., str], tmp_path: Path
) -> None:
    mcp("install", "codex", *installed)
    written = files_below(tmp_path)
    said = mcp("uninstall", "codex", *other)
    assert "--global" in said
    assert str(next(iter(written))) in said
    assert files_below(tmp_path) == written
    assert "It is registered in" not in mcp("install", "codex", *installed)


@pytest.mark.parametrize("client", PROJECT_FILES)
def test_an_uninstall_leaves_no_directory(client: str, mcp: Callable[..., str], tmp_path: Path) -> None:
    mcp("install", client)
    mcp("uninstall", client)
    assert [path for path in (tmp_path / "project").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("permission", ['{"bash": {"git *": "allow"}}', '"ask"'])
def test_rules_of_opencode_that_exclusive_would_replace_are_named_with_what_to_do(
    permission: str, mcp: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "project/opencode.json"
    file.write_text(given := f'{{"permission": {permission}}}')
    assert "by hand" in mcp("install", "opencode", "--exclusive", exit_code=2)
    assert file.read_text() == given


@pytest.mark.parametrize("client", ["claude", "opencode", "codex"])
def test_a_second_install_writes_the_state_directory_that_is_in_force(
    client: str, mcp: Callable[..., str], tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mcp("install", client)
    file = tmp_path / "project" / PROJECT_FILES[client][0]
    assert str(state) in file.read_text()
    monkeypatch.delenv("RINGFENCE_STATE_DIR")
    mcp("install", client)
    assert "RINGFENCE_STATE_DIR" not in file.read_text()


SWITCHES = [
    ("claude", "project/.claude/settings.json", {"disabledMcpjsonServers": ["ringfence"]}, "take ringfence out"),
    (
        "claude",
        "project/.claude/settings.local.json",
        {"disabledMcpjsonServers": ["x", "ringfence"]},
        "take ringfence out",
    ),
    ("claude", "home/.claude/settings.json", {"deniedMcpServers": [{"serverName": "ringfence"}]}, "take ringfence out"),
    ("claude", "home/.claude/settings.json", {"permissions": {"deny": ["mcp__ringfence"]}}, "mcp__ringfence"),
    ("claude", "home/.claude.json", {"projects": {"": {"disabledMcpServers": ["ringfence"]}}}, "/mcp"),
    ("claude", "home/.claude.json", {"projects": {"": {"disabledMcpjsonServers": ["ringfence"]}}}, "claude mcp reset"),
    (
        "codex",
        "project/.codex/config.toml",
        {"mcp_servers": {"ringfence": {"command": "ringfence", "enabled": False}}},
        "remove this line",
    ),
    ("codex", "home/.codex/config.toml", {"mcp_servers": {"ringfence": {"enabled": False}}}, "remove this line"),
    ("gemini", "project/.gemini/settings.json", {"mcp": {"excluded": ["ringfence"]}}, "take ringfence out"),
    ("gemini", "home/.gemini/settings.json", {"mcp": {"allowed": ["other"]}}, "add ringfence"),
    ("gemini", "home/.gemini/mcp-server-enablement.json", {"ringfence": {"enabled": False}}, "gemini mcp enable"),
    ("qwen", "home/.qwen/settings.json", {"mcp": {"excluded": ["ringfence"]}}, "take ringfence out"),
    ("qwen", "project/.qwen/settings.json", {"mcp": {"allowed": []}}, "add ringfence"),
    ("opencode", "home/.config/opencode/opencode.json", {"tools": {"ringfence_*": False}}, "remove the entry"),
    ("vscode", "home/.config/Code/User/settings.json", {"chat.mcp.access": "none"}, "set it to all"),
]


@pytest.mark.parametrize(("client", "file", "held", "remedy"), SWITCHES)
def test_a_setting_that_keeps_the_server_off_is_named_with_what_to_do(
    client: str, file: str, held: Any, remedy: str, mcp: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.endswith(".toml"):
        path.write_text(tomlkit.dumps(held))
    else:
        path.write_text(json.dumps(held).replace('""', json.dumps(str(tmp_path / "project"))))
    for options in (["--dry-run"], [], []):  # the last time the server is registered already
        (line,) = [line for line in mcp("install", client, *options).splitlines() if "keeps the server off" in line]
        assert str(path) in line
        assert remedy in line
        assert len(line.split()) <= 25


ON = [
    (
        "claude",
        "home/.claude/settings.json",
        {"disabledMcpjsonServers": ["other"], "permissions": {"deny": ["Bash", 5]}},
    ),
    ("claude", "home/.claude.json", {"projects": {"/other": {"disabledMcpServers": ["ringfence"]}}}),
    ("codex", "home/.codex/config.toml", {"mcp_servers": {"ringfence": {"enabled": True}}}),
    ("gemini", "home/.gemini/settings.json", {"mcp": {"excluded": ["other"], "allowed": ["ringfence"]}}),
    ("gemini", "home/.gemini/settings.json", {"mcp": {"excluded": "ringfence", "allowed": None}}),
    ("opencode", "home/.config/opencode/opencode.json", {"tools": {"ringfence_*": True, "bash": False}}),
    ("vscode", "home/.config/Code/User/settings.json", {"chat.mcp.access": "all"}),
]


@pytest.mark.parametrize(("client", "file", "held"), ON)
def test_a_setting_that_leaves_the_server_on_is_not_named(
    client: str, file: str, held: Any, mcp: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomlkit.dumps(held) if file.endswith(".toml") else json.dumps(held))
    assert "keeps the server off" not in mcp("install", client)


def test_what_gemini_and_codex_do_elsewhere_is_said(mcp: Callable[..., str]) -> None:
    assert "in all projects" in mcp("install", "gemini", "--exclusive")
    assert "codex mcp list" in mcp("install", "codex")


BROKEN = [
    "{",
    '["a list"]',
    '{"mcpServers": 3}',
    '{"mcpServers": {"a": {}}, "mcpServers": {}}',
    "[" * 9_999,
    '{"mcpServers": {}} // mine',
    '{"mcpServers": {},}',
]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("action", ["install", "uninstall"])
def test_a_file_that_cannot_be_edited_stays_and_what_to_write_is_printed(
    broken: str, action: str, mcp: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "project/.qwen/settings.json"
    file.parent.mkdir()
    file.write_text(broken)
    if action == "install" or "3" not in broken:
        said = mcp(action, "qwen", exit_code=2)
        assert str(file) in said
        assert json.loads(said[said.index("by hand:") + 8 :])["mcpServers"]["ringfence"]
    assert files_below(tmp_path) == {"project/.qwen/settings.json": broken}


def test_a_file_that_cannot_be_edited_without_harm_stays_and_is_named(mcp: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "project/.codex/config.toml"
    file.parent.mkdir()
    dotted = 'mcp_servers.other.command = "other"\nmodel = "gpt"\n'  # a table in between would take the model along
    file.write_text(dotted)
    assert f"{file} cannot be edited" in mcp("install", "codex", exit_code=2)
    assert file.read_text() == dotted


def test_null_is_replaced_and_what_is_no_text_stays_in_a_list(mcp: Callable[..., str], tmp_path: Path) -> None:
    settings = tmp_path / "project/.qwen/settings.json"
    settings.parent.mkdir()
    settings.write_text('{"mcpServers": null, "permissions": {"deny": [{}, "edit"]}}')
    mcp("install", "qwen", "--exclusive")
    assert list(parsed(settings)["mcpServers"]) == ["ringfence"]
    mcp("uninstall", "qwen", "--exclusive")
    assert parsed(settings) == {"permissions": {"deny": [{}, "edit"]}}


def test_the_line_ends_of_a_file_stay(mcp: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "project/opencode.json"
    file.write_bytes(b'{\r\n  "theme": "dark"\r\n}\r\n')
    mcp("install", "opencode")
    content = file.read_bytes()
    assert content.count(b"\n") == content.count(b"\r\n") > 3


def test_a_dry_run_only_prints_the_change(mcp: Callable[..., str], tmp_path: Path) -> None:
    assert '+    "ringfence"' in mcp("install", "qwen", "--dry-run")
    assert "$ claude mcp add-json --scope project ringfence" in mcp("install", "claude", "--dry-run")
    assert files_below(tmp_path) == {}
    mcp("install", "claude")
    before = files_below(tmp_path)
    assert "$ claude mcp remove --scope project ringfence" in mcp("uninstall", "claude", "--dry-run")
    assert files_below(tmp_path) == before


def test_options_of_the_server_replace_those_of_before(mcp: Callable[..., str], tmp_path: Path) -> None:
    mcp("install", "codex", "--", "--workspace", "podman")
    file = tmp_path / "project/.codex/config.toml"
    file.write_text(file.read_text().replace("required = true", "required = true\nstartup_timeout_sec = 60"))
    mcp("install", "codex", "--", "--read-only")
    entry = parsed(file)["mcp_servers"]["ringfence"]
    assert entry["args"][-2:] == ["serve", "--read-only"]
    assert entry["startup_timeout_sec"] == 60


@pytest.mark.parametrize(
    ("client", "file"), [("codex", ".codex/config.toml"), ("opencode", ".config/opencode/opencode.json")]
)
def test_global_is_for_all_projects_of_a_person(
    client: str, file: str, mcp: Callable[..., str], tmp_path: Path
) -> None:
    mcp("install", client, "--global")
    assert set(files_below(tmp_path)) == {f"home/{file}"}


def test_a_file_of_the_other_ending_that_is_there_is_edited(mcp: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "project/opencode.jsonc").write_text('{"theme": "dark"}\n')
    mcp("install", "opencode", "--exclusive")
    (written,) = files_below(tmp_path).items()
    assert written[0] == "project/opencode.jsonc"
    assert "ringfence" in written[1]


@pytest.mark.parametrize(
    ("client", "scope"), [("claude", []), ("claude", ["--global"]), ("gemini", ["--global"]), ("vscode", ["--global"])]
)
def test_where_the_program_of_a_client_is_missing_the_entry_is_printed_and_nothing_written(
    client: str, scope: list[str], mcp: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = mcp("install", client, *scope, exit_code=2)
    assert f"{client.replace('vs', '')} is not on PATH" in said
    (servers,) = json.loads(said[said.index("by hand:") + 8 :]).values()
    assert "serve" in servers["ringfence"]["args"]
    assert files_below(tmp_path) == {}


@pytest.mark.parametrize("client", ["claude", "gemini", "vscode"])
def test_the_own_command_of_a_client_registers_the_server_for_all_projects(
    client: str, mcp: Callable[..., str], tmp_path: Path
) -> None:
    file = {"claude": ".claude.json", "gemini": ".gemini/settings.json", "vscode": ".config/Code/User/mcp.json"}[client]
    path, key = tmp_path / "home" / file, "servers" if client == "vscode" else "mcpServers"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({key: {"other": {"command": "x"}}}))
    assert "$ " in mcp("install", client, "--global", "--", "--read-only")
    entry = parsed(path)[key]["ringfence"]
    end = ["${workspaceFolder}"] if client == "vscode" else []
    assert entry["args"][entry["args"].index("serve") :] == ["serve", "--read-only", *end]
    assert "nothing was changed" in mcp("install", client, "--global", "--", "--read-only")
    mcp("install", client, "--global")
    assert "--read-only" not in path.read_text()
    mcp("uninstall", client, "--global")
    assert parsed(path) == {key: {"other": {"command": "x"}}}


def test_what_the_own_command_says_when_it_fails_is_printed(mcp: Callable[..., str], state: Path) -> None:
    (state / "programs/claude").write_text("#!/bin/sh\necho it broke >&2\nexit 3\n")
    assert "it broke" in mcp("install", "claude", exit_code=2)


def test_an_entry_that_install_wrote_into_a_file_is_taken_out_of_the_file(
    mcp: Callable[..., str], tmp_path: Path, state: Path
) -> None:
    """Before the client's own command was used, `install` wrote the entry."""
    file = tmp_path / "project/.mcp.json"
    file.write_text('{"mcpServers": {"ringfence": {"command": "ringfence"}}}')
    before = {"command": "mine"}
    (state / "clients.json").write_text(json.dumps({str(file): {"mcpServers.ringfence": before}}))
    mcp("uninstall", "claude")
    assert parsed(file) == {"mcpServers": {"ringfence": before}}


@pytest.mark.parametrize("client", BY_HAND)
def test_for_an_editor_the_entry_and_its_file_are_printed_until_it_is_there(
    client: str, mcp: Callable[..., str], tmp_path: Path
) -> None:
    name, key = BY_HAND[client]
    file = tmp_path / "project" / name
    said = mcp("install", client)
    assert f"write this into {file}" in said
    assert files_below(tmp_path) == {}
    snippet = said[said.index("{") : said.rindex("}") + 1]
    assert json.loads(snippet)[key[0]]["ringfence"]["args"][-1] == "${workspaceFolder}"
    file.parent.mkdir()
    file.write_text(snippet)
    assert "registered already" in mcp("install", client)
    mcp("uninstall", client)
    assert files_below(tmp_path) == {}


def test_a_link_to_the_settings_stays_a_link(mcp: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "dotfiles.json").write_text("{}")
    (tmp_path / "project/opencode.json").symlink_to(tmp_path / "dotfiles.json")
    mcp("install", "opencode")
    assert (tmp_path / "project/opencode.json").is_symlink()
    assert "ringfence" in (tmp_path / "dotfiles.json").read_text()


def test_a_copy_of_a_file_is_kept_before_it_is_changed(mcp: Callable[..., str], tmp_path: Path, state: Path) -> None:
    file = tmp_path / "project/opencode.json"
    file.write_text(given := '{"theme": "dark"}')
    file.chmod(0o600)
    mcp("install", "opencode")
    (kept,) = (state / "clients").iterdir()
    assert (kept.read_text(), kept.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (given, 0o600, 0o600)


def test_what_somebody_has_added_to_the_entry_stays(mcp: Callable[..., str], tmp_path: Path, state: Path) -> None:
    mcp("install", "gemini")
    file = tmp_path / "project/.gemini/settings.json"
    file.write_text(file.read_text().replace('"env": {', '"timeout": 9, "env": {"MINE": "1", '))
    mcp("install", "gemini", "--", "--read-only")
    entry = parsed(file)["mcpServers"]["ringfence"]
    assert entry["env"] == {"MINE": "1", "RINGFENCE_STATE_DIR": str(state)}
    assert entry["timeout"] == 9


def test_an_entry_over_http_is_replaced_since_clients_refuse_one_that_is_both(
    mcp: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "project/.codex/config.toml"
    file.parent.mkdir()
    file.write_text('[mcp_servers.ringfence]\nurl = "http://127.0.0.1:1/mcp"\nbearer_token_env_var = "TOKEN"\n')
    mcp("install", "codex")
    entry = parsed(file)["mcp_servers"]["ringfence"]
    assert "command" in entry
    assert not {"url", "bearer_token_env_var"} & set(entry)


def test_rules_of_somebody_s_own_are_not_replaced(mcp: Callable[..., str], tmp_path: Path) -> None:
    own = '{"permission": {"bash": {"git *": "allow"}}}'
    (tmp_path / "project/opencode.json").write_text(own)
    rules = tmp_path / "home/.gemini/policies/ringfence.toml"
    rules.parent.mkdir(parents=True)
    rules.write_text("# mine\n")
    assert "permission.bash holds rules" in mcp("install", "opencode", "--exclusive", exit_code=2)
    for action in ("install", "uninstall"):
        assert str(rules) in mcp(action, "gemini", "--exclusive", exit_code=2)
    assert files_below(tmp_path) == {"project/opencode.json": own, "home/.gemini/policies/ringfence.toml": "# mine\n"}


def test_what_a_client_has_written_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text("{}")
    file = ConfigFile(path)
    file.set(("mine",), "x")
    path.write_text('{"theirs": 1}')
    with pytest.raises(UneditableFileError, match="has just been changed"):
        file.save(tmp_path / "backups")
    assert path.read_text() == '{"theirs": 1}'


def test_a_file_that_is_not_utf_8_stays_and_is_named(mcp: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "project/opencode.json"
    file.write_bytes(b'{"a": "\xe9"}')
    assert f"{file} is not UTF-8" in mcp("install", "opencode", exit_code=2)
    assert file.read_bytes() == b'{"a": "\xe9"}'
