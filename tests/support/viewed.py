"""A workspace with steps, a rolled-back call and hostile texts, and its receipts, for tests of `ringfence view`."""

from __future__ import annotations

import json
from pathlib import Path

from starlette.testclient import TestClient

from ringfence_sandbox import Workspace
from ringfence_view import CallSource, view_app

HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202egpj.exe</script>"
LONG = 1_000_000


def viewed_workspace(directory: Path) -> tuple[Path, Path]:
    """Make the workspace. Return it, and the file of its receipts."""
    root, receipts = directory / "tree", directory / "calls.jsonl"
    root.mkdir(parents=True)
    (root / "app.py").write_text("def add(a, b):\n    return a - b\n\n\nprint(add(1, 2))\n")
    (root / ".env").write_text("API_TOKEN=correct-horse-battery\n")
    lines: list[str] = []
    with Workspace.open(root) as workspace:

        def call(tool: str, path: str, content: str, *, is_kept: bool = True) -> None:
            with workspace.transaction(tool, opaque=False) as block:
                workspace.filesystem.write(path, content)
                if not is_kept:
                    block.rollback()
            assert block.receipt is not None
            record = block.receipt.to_json() | {"params": {"file_path": path, "content": content}, "answer": "written"}
            lines.append(json.dumps(record | ({} if is_kept else {"message": f"tests failed: {HOSTILE}"})))

        call("edit_file", "app.py", "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n")
        call("write_file", f"{HOSTILE.replace('/', '')}.txt", HOSTILE)
        call("write_file", "wrong.py", "import nothing\n", is_kept=False)
        call("write_file", "notes.txt", "the token is correct-horse-battery\n")
    (root / "app.py").write_text("def add(a, b):\n    return a + b\n\n\nprint(add(2, 2))\n")
    with Workspace.open(root) as workspace:
        call("write_file", "long.txt", "x" * LONG + "\n")
        call("write_file", "many.txt", "".join(f"line {number}\n" for number in range(5_000)))
    receipts.write_text("".join(f"{line}\n" for line in lines) + "no receipt\n")
    return root, receipts


TOKEN = "a token of the tests"
HOST = "127.0.0.1:1234"


def client_of(source: CallSource, *, can_write: bool = False, token: str = TOKEN, host: str = HOST) -> TestClient:
    app = view_app(source, TOKEN, can_write=can_write)
    return TestClient(app, base_url=f"http://{host}", headers={"authorization": f"Bearer {token}"})
