"""One failing command over a tree with everything in it, a row a property: what other tools restore only in part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest
from captured_tree import capture_tree

from ringfence.prompt import PathPolicy
from ringfence_sandbox import Workspace

OLD_NS = 10**18
_SET = "import os, sys; os.setxattr(sys.argv[2], sys.argv[1], bytes([2]))"
XATTR = f"xattr() {{ '{sys.executable}' -I -S -c '{_SET}' $1 $2; }}; "


def build(root: Path) -> None:
    for number in range(60):
        (root / f"d{number % 6}").mkdir(exist_ok=True)
        (root / f"d{number % 6}/f{number}").write_text(f"{number}\n" * 20)
    (root / ".gitignore").write_text("/ignored\n*.log\n")
    (root / "ignored").write_text("ignored\n")
    (root / "empty/inner").mkdir(parents=True)
    (root / "link").symlink_to("d0/f0")
    (root / "one").write_text("linked\n")
    os.link(root / "one", root / "d1/two")
    os.link(root / "one", root / "d2/three")
    (root / "mode").write_text("m\n")
    os.chmod(root / "mode", 0o750)
    os.setxattr(root / "mode", "user.note", b"1")
    os.chmod(root / "d3", 0o750)
    for path in [*root.rglob("*"), root]:
        os.utime(path, ns=(OLD_NS, OLD_NS + 123_456_789), follow_symlinks=False)


PROPERTIES: dict[str, str] = {
    "content": "echo more >> d0/f0; printf x > d1/f1; sed -i s/2/3/ d2/f2",
    "symlinks": "ln -sfn elsewhere link; ln -s /etc new-link; rm d0/f6; ln -s f0 d0/f6",
    "mode": "chmod 600 mode d0/f0",
    "mtime": "touch d0/f0 d1/f1 d2",
    "content of one size and mtime": "touch -r d0/f0 r; tr 0 1 < d0/f0 > t; cat t > d0/f0; touch -r r d0/f0; rm t r",
    "mode and mtime of directories": "chmod 700 d3 d4; touch d3 d4; touch d5/new",
    "empty directories": "rm -r empty; mkdir new-empty",
    "ignored files": "echo changed > ignored; echo new > new.log; rm -f d0/x.log",
    "files that came and went": "mkdir -p n/e/w; echo x > n/e/w/file; rm -r d0 d1/f1; mv d2 moved",
    "hard links": "rm d1/two; cp one d1/two; echo more >> d2/three; ln mode again",
    "extended attributes": XATTR + "xattr user.note mode; xattr user.new d0/f0; xattr user.dir d1",
    "owners": "chown 12345:54321 d0/f0 d1",
    "all at once": XATTR
    + "echo x > d0/f0; chmod 600 mode; xattr user.note mode; rm -r d1 empty; echo y >> one; mkdir q",
}


def everything(root: Path) -> object:
    attributes = {
        path: {name: os.getxattr(path, name) for name in os.listxattr(path)}
        for path in sorted(map(str, root.rglob("*")))
        if not path.startswith(f"{root}/.ringfence") and not os.path.islink(path)
    }
    found = {
        path: (one.kind, one.mode, one.size, one.mtime_ns, one.owner, one.content, one.links)
        for path, one in capture_tree(root).items()
    }
    return found, attributes  # an inode may be another one: a file that was replaced is made again


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    build(tmp_path / "root")
    return tmp_path / "root"


def run_fails(workspace: Workspace, root: Path, script: str) -> None:
    done = workspace.run(f"{script}; exit 1", shell=True)
    assert (done.exit_code, done.outcome) == (1, "failed"), done.stderr


def run_is_denied(workspace: Workspace, root: Path, script: str) -> None:
    policies = [PathPolicy(allow=["/nothing"])]
    assert workspace.run(script, shell=True, policies=policies, on_error="keep").outcome == "denied"


def transaction_raises(workspace: Workspace, root: Path, script: str) -> None:
    with pytest.raises(ZeroDivisionError), workspace.transaction("somebody's own"):
        subprocess.run(script, shell=True, cwd=root, check=True)
        _ = 1 / 0


def look_is_denied(workspace: Workspace, root: Path, script: str) -> None:
    mark = workspace.begin_look()
    subprocess.run(script, shell=True, cwd=root, check=True)
    assert workspace.adopt(mark, tool="Bash", policies=[PathPolicy(allow=["/nothing"])]).outcome == "denied"


WAYS = {"a look": look_is_denied, "a failure": run_fails, "a denial": run_is_denied, "an exception": transaction_raises}


def needs(script: str) -> None:
    if "chown" in script and os.geteuid() != 0:
        pytest.skip("only root gives files away")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("property_name", PROPERTIES)
def test_it_is_as_before_the_call(root: Path, workspace: Workspace, way: str, property_name: str) -> None:
    script = PROPERTIES[property_name]
    needs(script)
    if way in ("a denial", "a look") and property_name in ("mtime", "extended attributes", "owners"):
        pytest.skip("no policy is asked about these alone")
    before = everything(root)
    WAYS[way](workspace, root, script)
    assert everything(root) == before


@pytest.mark.parametrize("way", WAYS)
def test_a_persons_edits_between_two_calls_stay(root: Path, workspace: Workspace, way: str) -> None:
    workspace.run(["touch", "step"])
    (root / "d0/f0").write_text("a person's\n")
    (root / "mine").write_text("a person's\n")
    (root / "d1/f1").unlink()
    before = everything(root)
    WAYS[way](workspace, root, "echo more >> d0/f0; rm mine; echo back > d1/f1")
    assert everything(root) == before


def test_names_of_one_file_stay_so_after_a_rollback_a_rename_and_a_rollback(tmp_path: Path) -> None:
    """What a rollback has made anew is another inode, and a rename of a directory has one of the names read alone."""
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    (root / "a").write_text("one\n")
    os.link(root / "a", root / "d/b")
    with Workspace.open(root, store=tmp_path / "store") as workspace:
        assert workspace.run("echo more >> a; exit 1", shell=True).outcome == "failed"
        assert os.path.samefile(root / "a", root / "d/b")
        sleep(0.05)  # until the next look need not read them again
        assert workspace.run("true", shell=True).kept
        assert workspace.run("mv d e", shell=True).kept
        assert workspace.run("echo more >> a; exit 1", shell=True).outcome == "failed"
        assert os.path.samefile(root / "a", root / "e/b")
        assert (root / "a").read_text() == "one\n"
