"""Programs from npm, which `make prove` installs once into the build folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from pages import PROJECT

PROBE_SECONDS, INSTALL_SECONDS = 20, 300


def programs_of(
    packages: Sequence[str], program: str, request: pytest.FixtureRequest, options: Sequence[str] = ()
) -> Path:
    """Return the directory of a program, and install the packages first if that may be done. Skip the test if not.

    The packages name their versions; the first is that of the program.
    """
    installed = PROJECT / f"build/{program}-{packages[0].rpartition('@')[2]}"
    if not installed.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip(f"there is no npm here to install {program} with")
        if os.environ.get("RINGFENCE_PROVE") != "1" and request.node.get_closest_marker("prove") is None:
            pytest.skip(f"{program} is not installed: `make prove` does that")
        installed.parent.mkdir(exist_ok=True)
        with open(f"{installed}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not installed.exists():
                _install(npm, packages, program, installed, options)
    return installed / "node_modules/.bin"


def _install(npm: str, packages: Sequence[str], program: str, installed: Path, options: Sequence[str]) -> None:
    once = ["--fetch-retries=0", "--loglevel=error"]
    partial = Path(f"{installed}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    install = [npm, "install", "--prefix", str(partial), "--no-audit", "--no-fund", *options, *once, *packages]
    reachable = [npm, "view", packages[0], "version", *once]
    bin = partial / "node_modules/.bin"
    runs = ["env", f"HOME={partial}", f"PATH={bin}:{os.environ['PATH']}", str(bin / program), "--version"]
    environment = {**os.environ, "TMPDIR": str(partial)}
    try:
        for command, seconds in ((reachable, PROBE_SECONDS), (install, INSTALL_SECONDS), (runs, PROBE_SECONDS)):
            subprocess.run(command, cwd=partial, env=environment, capture_output=True, check=True, timeout=seconds)
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        said = (getattr(error, "stderr", None) or str(error).encode()).decode(errors="replace")
        pytest.skip(f"npm could not install {packages[0]}: {said.strip().splitlines()[0]}")
    partial.rename(installed)
