"""What commands in a container change is found by a watch on the host, and whatever they try, as by a scan."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from captured_tree import capture_tree, lasting

from ringfence.adapters import ToolExecutor
from ringfence.prompt import Prompt, PromptTemplate
from ringfence.runtime import Receipt, Session
from ringfence_sandbox import PodmanSandbox
from ringfence_tools import PodmanSandboxSection

SEEN = {
    "nothing": "true",
    "reads": "cat a b d/c; ls -R; grep -r x .",
    "a write": "echo two > a",
    "an append": "echo more >> d/c",
    "bytes in the middle": "printf X | dd of=b bs=1 seek=2 conv=notrunc status=none",
    "a new file": "echo new > d/new",
    "an editor's save": "echo saved > a.new && mv a.new a",
    "a rename": "mv b d/b",
    "sed": "sed -i s/o/0/ a",
    "permission bits": "chmod 600 a; chmod 711 d",
    "times": "touch -d 2001-01-01 a",
    "a link": "ln a d/another; echo x >> d/another",
    "a symlink": "ln -s a link",
    "a mapping": "python3 -c \"import mmap; m = mmap.mmap(open('b', 'r+b').fileno(), 0); m[1:2] = b'M'\"",
    "a mapping that is killed": "python3 -c \"import mmap, os; m = mmap.mmap(open('b', 'r+b').fileno(), 0); "
    "m[1:2] = b'K'; os.kill(os.getpid(), 9)\"; true",
    "a process that goes on": "(exec 3>>a; sleep 0.2; echo late >&3; sleep 60) & sleep 0.4",
    "a removal": "rm a",
}
DOUBTS = {
    "a directory": "mkdir -p n/e/w; echo x > n/e/w/file",
    "a removed directory": "rm -r d",
    "a moved directory": "mv d e; echo x >> e/c",
    "a name that goes": "ln a z; echo through >> z; rm z",
    "a name that is replaced": "ln a z; echo through >> z; echo other > y; mv y z",
    "a name in a directory that goes": "mkdir n; ln a n/z; echo through >> n/z; rm -r n",
    "a name in the hold": "for hold in .ringfence-hold-*; do ln a $hold/z; echo through >> $hold/z; rm $hold/z; done",
    "a name that is gone and open": "ln a z; exec 3>>z; rm z; echo through >&3",
}


def test_what_commands_change_is_found_whatever_they_try(make_sandbox: Callable[..., PodmanSandbox]) -> None:
    sandbox, session = make_sandbox(), Session()
    root = Path(sandbox.filesystem.root)
    section = PodmanSandboxSection(session=session, sandbox=sandbox)
    prompt = Prompt(PromptTemplate(ns="tests", key="watched", sections=[section]))
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)

        def run(command: str) -> Receipt:
            return executor.execute("shell_execute", {"command": command}).receipt

        for name, command in {**SEEN, **DOUBTS}.items():
            shutil.rmtree(root / "d", ignore_errors=True)
            (root / "d").mkdir()
            for path in ("a", "b", "d/c"):
                (root / path).unlink(missing_ok=True)
                (root / path).write_text("one two three\n")
            run("true")
            before = lasting(capture_tree(root))
            receipt = run(command)
            after = lasting(capture_tree(root))
            differing = {path for path in {*before, *after} if before.get(path) != after.get(path)}
            assert {change.path for change in receipt.changes} == differing, name
            assert name not in SEEN or receipt.detection == "watch", name
            assert receipt.detection != "audit-failed", name
