"""What a command makes belongs to the owner of the tree, whoever that is; and never is a container's user root."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mounts import mounted
from podman_parts import FIRST_ID, MOUNTS, own_label, swapped_ids

from ringfence_sandbox import PodmanSandbox, SandboxUnavailableError

MakeSandbox = Callable[..., PodmanSandbox]

COMMAND = """
set -e
cat secret; echo more >> secret; echo new > new; mkdir -p made/deep; echo deep > made/deep/file
cp secret copy; ln secret hard; ln -s secret link; chmod 0700 private/file
mv private/file private/moved; git init -q repo
"""


def private_tree(root: Path, owner: int) -> Path:
    root.mkdir()
    (root / "private").mkdir(mode=0o700)
    for name in ("secret", "private/file"):
        (root / name).write_text("secret\n")
        (root / name).chmod(0o600)
    root.chmod(0o700)
    for path in (root, *root.rglob("*")):
        os.lchown(path, owner, owner)
    return root


def owners(root: Path) -> set[tuple[int, int]]:
    return {(path.lstat().st_uid, path.lstat().st_gid) for path in (root, *root.rglob("*"))}


@pytest.mark.parametrize("owner", [0, 1000, 12345])
def test_files_belong_to_the_owner_of_the_tree(make_sandbox: MakeSandbox, tmp_path: Path, owner: int) -> None:
    if os.geteuid() != 0 and owner != os.geteuid():
        pytest.skip("only root can give files away")
    root = private_tree(tmp_path / "tree", owner)
    result = make_sandbox(root).run(COMMAND)
    assert (result.exit_code, result.stdout) == (0, "secret\n"), result
    assert owners(root) == {(owner, owner)}
    assert stat.S_IMODE((root / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE((root / "private").stat().st_mode) == 0o700
    assert (root / "secret").read_text() == "secret\nmore\n"


@pytest.mark.parametrize("owner", [0, 1000])
def test_a_container_s_users_are_nobody_s_on_the_host(make_sandbox: MakeSandbox, tmp_path: Path, owner: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    sandbox = make_sandbox(private_tree(tmp_path / "tree", owner))
    pid = sandbox.start().process.pid
    assert Path(f"/proc/{pid}/uid_map").read_text().split() == ["0", str(FIRST_ID), "65536"]
    assert Path(f"/proc/{pid}/gid_map").read_text().split() == ["0", str(FIRST_ID), "65536"]


@pytest.fixture
def plain_filesystem(tmp_path: Path) -> Iterator[Path]:
    """A mounted filesystem that has no idmapped mounts."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    place = tmp_path / "plain"
    place.mkdir()
    with mounted(place, "-t", "ramfs", "none"):
        yield place


def test_without_idmapped_mounts_the_user_is_the_owner(plain_filesystem: Path, make_sandbox: MakeSandbox) -> None:
    root = private_tree(plain_filesystem / "tree", 1000)
    with pytest.raises(SandboxUnavailableError, match="users mapped"):
        make_sandbox(root).run("true")
    shutil.rmtree(root)
    sandbox = make_sandbox(private_tree(plain_filesystem / "other", 1000), strict=False)
    assert sandbox.run(COMMAND).exit_code == 0
    assert owners(plain_filesystem / "other") == {(1000, 1000)}


def test_without_such_a_mount_a_tree_of_root_is_refused(plain_filesystem: Path, make_sandbox: MakeSandbox) -> None:
    sandbox = make_sandbox(private_tree(plain_filesystem / "tree", 0), strict=False)
    with pytest.raises(SandboxUnavailableError, match="chown -R"):
        sandbox.run("true")


def test_what_belongs_to_others_in_the_tree_stays_theirs(make_sandbox: MakeSandbox, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    root = private_tree(tmp_path / "tree", 0)
    (root / "foreign").write_text("theirs\n")
    (root / "foreign").chmod(0o600)
    os.chown(root / "foreign", 1000, 1000)
    result = make_sandbox(root).run(
        "cat foreign; echo mine > foreign; chown 1000 secret; chown root secret; rm foreign; true"
    )
    assert "theirs" not in result.stdout
    assert owners(root) == {(0, 0)}  # the directory is the owner's, who may remove it


def test_no_mount_is_left_on_the_host(make_sandbox: MakeSandbox, tmp_path: Path) -> None:
    root = private_tree(tmp_path / "tree", os.geteuid())
    sandbox = make_sandbox(root)
    assert sandbox.run("echo one > file").exit_code == 0
    # The mount has gone from the host when the container runs, and the container has it still.
    assert f"{MOUNTS}/{own_label()}" not in Path("/proc/self/mounts").read_text()
    assert sandbox.run("cat file").stdout == "one\n"


def test_a_mount_that_somebody_killed_has_left_is_removed(make_sandbox: MakeSandbox, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    left = Path(MOUNTS, "1-1-another-boot-00000000")
    left.mkdir(parents=True)
    subprocess.run(["mount", "--bind", tmp_path, left], check=True)
    try:
        make_sandbox(private_tree(tmp_path / "tree", 0)).start()
        assert not left.exists()
        assert tmp_path.exists()
    finally:
        if left.exists():
            subprocess.run(["umount", left], check=False)


def test_numbers_are_exchanged_one_to_one() -> None:
    for owner in (0, 1, 999, 1000, 1001, 65535):
        maps = swapped_ids(FIRST_ID, 1000, owner)
        outside = {inside + n: first + n for inside, first, count in maps for n in range(count)}
        assert len(outside) == len(set(outside.values())) == 65536
        assert outside[owner] == FIRST_ID + 1000
        assert set(outside.values()) == set(range(FIRST_ID, FIRST_ID + 65536))


def test_a_directory_above_that_nobody_may_enter_is_no_obstacle(make_sandbox: MakeSandbox, tmp_path: Path) -> None:
    above = tmp_path / "above"
    above.mkdir(mode=0o700)
    root = private_tree(above / "tree", os.geteuid())
    assert make_sandbox(root).run("cat secret").stdout == "secret\n"


def test_a_linked_worktree_in_a_workspace_can_be_read_and_not_written(
    make_sandbox: MakeSandbox, tmp_path: Path
) -> None:
    place = tmp_path / "workspace" / "d" / "worktree"
    place.mkdir(parents=True)
    (place / ".git").write_text("gitdir: ../../.git/worktrees/worktree\n")
    (place / "x").write_text("inside\n")
    (place / "x").chmod(0o600)
    sandbox = make_sandbox()
    tried = sandbox.run("cat d/worktree/x; echo more >> d/worktree/x; touch d/worktree/y; touch d/z; mv d/worktree e")
    assert tried.stdout == "inside\n"
    assert tried.stderr.count("Read-only file system") == 2
    assert tried.changed_paths == ("d/z",)
    made = sandbox.run("mkdir later; echo 'gitdir: /workspace/.git/worktrees/later' > later/.git; touch later/made")
    assert "later/made" in made.changed_paths
    assert "Read-only file system" in sandbox.run("touch later/y").stderr
    shutil.rmtree(place)
    assert sandbox.run("mkdir d/worktree; touch d/worktree/y").exit_code == 0


def test_what_is_mounted_in_a_workspace_can_be_read_and_not_written(make_sandbox: MakeSandbox, tmp_path: Path) -> None:
    """Nor can what is under it, where no scan would see it."""
    place, late = tmp_path / "workspace" / "d" / "mnt", tmp_path / "workspace" / "late"
    place.mkdir(parents=True)
    late.mkdir()
    sandbox = make_sandbox()
    with mounted(place, "-t", "tmpfs", "none"):
        (place / "x").write_text("inside\n")
        (place / "x").chmod(0o666)
        place.chmod(0o777)
        tried = sandbox.run("cat d/mnt/x; echo more >> d/mnt/x; touch d/mnt/y; touch d/z")
        assert tried.stdout == "inside\n"
        assert tried.stderr.count("Read-only file system") == 2
        assert tried.changed_paths == ("d/z",)
        first = sandbox.start()
        with mounted(late, "-t", "tmpfs", "none"):
            assert "Read-only" in sandbox.run("touch late/y").stderr
            assert sandbox.start() is not first
        assert sandbox.run("touch late/y").exit_code == 0
        assert sorted(os.listdir(place)) == ["x"]
    assert os.listdir(place) == []
    assert sandbox.run("touch d/mnt/y").exit_code == 0
