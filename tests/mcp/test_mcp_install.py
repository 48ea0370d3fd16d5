"""`ringfence mcp install` and `uninstall`, on the real files of clients."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from command_line import ringfence_text
from hypothesis import given
from hypothesis import strategies as st

from ringfence_mcp.config_files import ConfigFile

CLAUDE = """\
{
  // servers of this project
  "mcpServers": {
    "other": {"command": "other"} // keep me
    /* and me */
  },
  "theme": "dark", // and this
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
    "vscode": (".vscode/mcp.json", ("servers", "ringfence")),
    "cursor": (".cursor/mcp.json", ("mcpServers", "ringfence")),
}


@pytest.fixture
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture
def mcp(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs the command in the project ``tmp_path / "project"``, with a home of its own; returns what it prints."""
    (tmp_path / "project").mkdir()
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
    assert files_below(tmp_path) == {}


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


@pytest.mark.parametrize(("client", "given"), [("claude", CLAUDE), ("codex", CODEX), ("gemini", CLAUDE)])
def test_what_else_is_in_a_file_stays_as_it_is(
    client: str, given: str, mcp: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "project" / PROJECT_FILES[client][0]
    file.parent.mkdir(exist_ok=True)
    file.write_text(given)
    file.chmod(0o640)
    said = mcp("install", client)
    with_it = file.read_text().splitlines()
    gone = [line for line in given.splitlines() if line not in with_it and f"{line}," not in with_it]
    assert [line for line in gone if line.replace("}", "},", 1) not in with_it] == []
    assert f"+++ {file}" in said
    assert file.stat().st_mode & 0o777 == 0o640
    mcp("uninstall", client)
    assert re.sub(r"[,\s]", "", file.read_text()) == re.sub(r"[,\s]", "", given)


@pytest.mark.parametrize("client", ["claude", "codex", "gemini", "opencode", "qwen"])
def test_exclusive_denies_the_own_tools_and_uninstalling_it_allows_them(
    client: str, mcp: Callable[..., str], tmp_path: Path
) -> None:
    mcp("install", client, "--exclusive")
    written = files_below(tmp_path)
    assert any("deny" in text or "read-only" in text for text in written.values())
    mcp("uninstall", client, "--exclusive")
    assert files_below(tmp_path) == {}


def test_without_exclusive_an_uninstall_leaves_what_somebody_denied(mcp: Callable[..., str], tmp_path: Path) -> None:
    settings = tmp_path / "project/.claude/settings.json"
    settings.parent.mkdir()
    settings.write_text('{"permissions": {"deny": ["Bash" /* mine */, "WebFetch"]}}')
    mcp("install", "claude", "--exclusive")
    denied = parsed(settings)["permissions"]["deny"]
    assert denied[:2] == ["Bash", "WebFetch"]
    assert set(denied) == {"Bash", "WebFetch", "Edit", "Write", "NotebookEdit"}
    assert "/* mine */" in settings.read_text()
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
    assert list((tmp_path / "project").iterdir()) == []


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
    said = mcp("install", client)
    assert f"{state}" in "".join(line for line in said.splitlines() if line.startswith("-"))
    assert str(state) not in file.read_text()


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


BROKEN = ["{", '["a list"]', '{"mcpServers": 3}', '{"mcpServers": {"a": {}}, "mcpServers": {}}', "[" * 9_999]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_a_file_that_is_not_as_it_should_be_stays_and_is_named(
    broken: str, mcp: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "project/.mcp.json"
    file.write_text(broken)
    assert str(file) in mcp("install", "claude", exit_code=2)
    assert files_below(tmp_path) == {"project/.mcp.json": broken}


def test_a_file_that_cannot_be_edited_without_harm_stays_and_is_named(mcp: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "project/.codex/config.toml"
    file.parent.mkdir()
    dotted = 'mcp_servers.other.command = "other"\nmodel = "gpt"\n'  # a table in between would take the model along
    file.write_text(dotted)
    assert f"{file} cannot be edited" in mcp("install", "codex", exit_code=2)
    assert file.read_text() == dotted


def test_null_is_replaced_and_what_is_no_text_stays_in_a_list(mcp: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "project/.mcp.json").write_text('{"mcpServers": null}')
    settings = tmp_path / "project/.claude/settings.json"
    settings.parent.mkdir()
    settings.write_text('{"permissions": {"deny": [{}, "Bash"]}}')
    mcp("install", "claude", "--exclusive")
    assert list(parsed(tmp_path / "project/.mcp.json")["mcpServers"]) == ["ringfence"]
    mcp("uninstall", "claude", "--exclusive")
    assert parsed(settings) == {"permissions": {"deny": [{}, "Bash"]}}


def test_the_line_ends_of_a_file_stay(mcp: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "project/.mcp.json"
    file.write_bytes(b'{\r\n  "theme": "dark"\r\n}\r\n')
    mcp("install", "claude")
    content = file.read_bytes()
    assert content.count(b"\n") == content.count(b"\r\n") > 3


def test_a_dry_run_only_prints_the_change(mcp: Callable[..., str], tmp_path: Path) -> None:
    assert '+    "ringfence"' in mcp("install", "claude", "--dry-run")
    assert files_below(tmp_path) == {}


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
    (tmp_path / "project/opencode.jsonc").write_text('{"theme": "dark"} // mine\n')
    mcp("install", "opencode", "--exclusive")
    (written,) = files_below(tmp_path).items()
    assert written[0] == "project/opencode.jsonc"
    assert "ringfence" in written[1]
    assert written[1].endswith("// mine\n")


def test_claude_writes_its_own_file_and_has_to_be_there(
    mcp: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "claude is not installed" in mcp("install", "claude", "--global", exit_code=2)


def test_a_link_to_the_settings_stays_a_link(mcp: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "dotfiles.json").write_text("{}")
    (tmp_path / "project/.mcp.json").symlink_to(tmp_path / "dotfiles.json")
    mcp("install", "claude")
    assert (tmp_path / "project/.mcp.json").is_symlink()
    assert "ringfence" in (tmp_path / "dotfiles.json").read_text()


def test_what_somebody_has_added_to_the_entry_stays(mcp: Callable[..., str], tmp_path: Path, state: Path) -> None:
    mcp("install", "claude")
    file = tmp_path / "project/.mcp.json"
    file.write_text(file.read_text().replace('"env": {', '"timeout": 9, "env": {"MINE": "1", '))
    mcp("install", "claude", "--", "--read-only")
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
    with pytest.raises(ValueError, match="has just been changed"):
        file.save()
    assert path.read_text() == '{"theirs": 1}'


def test_a_file_that_is_not_utf_8_stays_and_is_named(mcp: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "project/.mcp.json"
    file.write_bytes(b'{"a": "\xe9"}')
    assert f"{file} is not UTF-8" in mcp("install", "claude", exit_code=2)
    assert file.read_bytes() == b'{"a": "\xe9"}'


KEYS = st.sampled_from(["a", "b", "c", 'q"uote', "key"])
DOCUMENTS = st.recursive(
    st.integers() | st.booleans() | st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=3),
    lambda inner: st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def commented(draw: st.DrawFn) -> str:
    """JSON with comments and trailing commas in random places between its tokens."""
    text = json.dumps(draw(st.dictionaries(KEYS, DOCUMENTS, max_size=3)), indent=draw(st.sampled_from([None, 2, "\t"])))
    number = 0

    def between(match: re.Match[str]) -> str:
        nonlocal number
        if match[0][0] == '"':
            return match[0]
        choice = draw(st.integers(0, 5))
        number += choice in (0, 1)
        comment = f" /* {number}, */ " if choice == 0 else f" // {number}, \n" if choice == 1 else ""
        return f"{comment}{match[0]}" if match[0] in "}]" else f"{match[0]}{comment}"

    return re.sub(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]', between, text)


@given(commented(), st.lists(KEYS, min_size=1, max_size=3), st.sampled_from(["x", ["y"], {"n": {"m": 1}}]))
def test_an_edit_changes_one_entry_and_keeps_every_comment(text: str, key: list[str], value: Any) -> None:
    file = ConfigFile(Path("nowhere.json"))
    file.text = text
    before = file.data()
    comments = re.findall(r"/\* \d+, \*/|// \d+,", text)
    held = file.get(key)
    try:
        file.set(key, value)
    except ValueError:
        return  # something else than an object is on the way
    expected = before
    for one in key[:-1]:
        expected = expected.setdefault(one, {})
    expected[key[-1]] = value
    assert file.data() == before
    if held is None:
        assert re.findall(r"/\* \d+, \*/|// \d+,", file.text) == comments
    file.remove(key)
    assert file.get(key) is None
