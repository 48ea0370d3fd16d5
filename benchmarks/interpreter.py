"""The interpreter that all rows run on: one that has the peer installed beside this checkout of ringfence."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import peer

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv" / "bench"
"""Inside .venv, so that whatever leaves that alone leaves this alone, and `make clean` takes it along."""
PEERS = (f"{peer.NAME}=={peer.VERSION}", f"{peer.SANDLOCK}=={peer.SANDLOCK_VERSION}")
NAMES = ("python3.13", "python3.12", "python3")


def with_the_peer() -> Path | str:
    """The interpreter, its virtual environment made now where there is none; or why there can be none."""
    python = VENV / "bin" / "python"
    named = os.environ.get("BENCH_PYTHON")
    wanted = "\n".join([named or "", *PEERS, (ROOT / "requirements.lock").read_text()])
    made_for = VENV / "made-for"
    if made_for.exists() and made_for.read_text() == wanted:
        return python
    chosen = next(filter(new_enough, [named] if named else candidates()), None)
    if chosen is None:
        return "it needs Python 3.12 or 3.13; name one: BENCH_PYTHON=/path/to/python3.13 make bench"
    print(f"Making {VENV} with {chosen} and {peer.NAME} {peer.VERSION}", file=sys.stderr)
    try:
        make(chosen, python)
    except subprocess.CalledProcessError as error:
        return f"its virtual environment could not be made: {' '.join(error.cmd)} ended with {error.returncode}"
    made_for.write_text(wanted)
    return python


def candidates() -> list[str]:
    on_path = [found for name in NAMES if (found := shutil.which(name))]
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    versions = sorted(glob.glob(f"{pyenv}/versions/3.1[23]*/bin/python"), reverse=True)
    return [sys.executable, *on_path, *versions]


def new_enough(python: str) -> bool:
    # A name on PATH may be a version manager's shim that runs nothing: only running it tells.
    code = "import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))"
    return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0


def make(chosen: str, python: Path) -> None:
    """With what the lock file says, so that the rows say something about what people run."""
    subprocess.run([chosen, "-m", "venv", "--clear", VENV], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        lines = (ROOT / "requirements.lock").read_text().splitlines()
        pinned = (line.removesuffix("\\").rstrip() for line in lines if not line.lstrip().startswith(("--", "#")))
        constraints.write("\n".join(pinned))
        constraints.flush()
        pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", constraints.name]
        subprocess.run([*pip, "-e", f"{ROOT}[anthropic,mcp,openai]", *PEERS], check=True)
