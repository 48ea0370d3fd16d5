"""Stand-ins for the programs of MCP clients, which edit their configuration as the real ones do."""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAM = """\
import json, os, sys
from pathlib import Path

program, words = Path(sys.argv[0]).name, sys.argv[1:]
home, key = Path(os.environ["HOME"]), "mcpServers"
personal = "user" in words
if program == "code":
    path, key = home / ".config/Code/User/mcp.json", "servers"
    entry = json.loads(words[1])
    name, adds = entry.pop("name"), True
elif program == "claude":
    path = home / ".claude.json" if personal else Path(".mcp.json")
    adds, name = words[1] == "add-json", words[4]
    entry = json.loads(words[5]) if adds else None
else:
    path, adds, name = home / ".gemini/settings.json", words[1] == "add", "ringfence"
    at = words.index("ringfence")
    env = dict(words[n + 1].split("=", 1) for n in range(at) if words[n] == "-e")
    command, args = (words[at + 1], words[at + 3:]) if adds else ("", [])
    entry = {"command": command, "args": args, "env": env, "trust": "--trust" in words}
data = json.loads(path.read_text()) if path.exists() else {}
servers = data.setdefault(key, {})
if adds and program == "claude" and name in servers:
    sys.exit(f"MCP server {name} already exists")
if not adds and name not in servers:
    sys.exit(f"No MCP server named {name}")
servers.pop(name, None)
if adds:
    servers[name] = entry
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(json.dumps(data, indent=2))
"""


def make_client_programs(directory: Path) -> None:
    """Make ``claude``, ``gemini`` and ``code`` in the directory."""
    directory.mkdir()
    for name in ("claude", "gemini", "code"):
        program = directory / name
        program.write_text(f"#!{sys.executable} -ISE\n{PROGRAM}")
        program.chmod(0o755)
