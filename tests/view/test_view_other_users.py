"""What another user of the machine learns of a page: nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from viewed import viewed_workspace

# It asks without the token, and looks for it where one process can see something of another. Root becomes nobody.
LOOKING = """
import codecs, http.client, os, sys
from pathlib import Path

codecs.lookup("idna")  # the interpreter's own files may be nobody's to read

port, token = sys.stdin.read().split()
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for path in ("/page", "/changes", "/events"):
    asking = http.client.HTTPConnection("127.0.0.1", int(port))
    asking.request("GET", path)
    print(path, asking.getresponse().status)
    asking.close()
seen = 0
for process in Path("/proc").glob("[0-9]*"):
    for name in ("cmdline", "environ"):
        try:
            found = (process / name).read_bytes()
        except OSError:
            continue
        seen += bool(found)
        if token.encode() in found:
            print("found in", name)
print("looked" if seen else "saw nothing")
"""


@pytest.mark.parametrize("command", ["view", "run"])
def test_another_user_gets_no_page_and_finds_the_token_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    root, receipts = viewed_workspace(tmp_path)
    words: list[str | Path] = ["view", root, "--receipts", receipts, "--write"]
    if command == "run":  # it waits for an answer, with a page of its own process
        call = {"name": "write_file", "arguments": {"file_path": "new.txt", "content": "new\n"}}
        (tmp_path / "script.jsonl").write_text(json.dumps({"tool_calls": [call]}) + "\n")
        words = ["run", root, "--task", "x", "--model", f"script:{tmp_path / 'script.jsonl'}"]
        words += ["--view", "--write", "--ask", "writes"]
    started = [sys.executable, "-m", "ringfence_cli", *words]
    with subprocess.Popen(
        started, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        address = next(line for line in process.stdout if "#token=" in line)
        place, _, token = address.strip().partition("/#token=")
        looked = subprocess.run(
            [sys.executable, "-c", LOOKING],
            input=f"{place.rpartition(':')[2]} {token}",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if token.encode() in path.read_bytes()]
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert (looked.stdout.split("\n")[:-1], looked.stderr) == (
        ["/page 401", "/changes 401", "/events 401", "looked"],
        "",
    )
