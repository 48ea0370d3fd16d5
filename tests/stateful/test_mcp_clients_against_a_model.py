"""Two clients of one MCP server over HTTP, in both eras of the protocol, and a person who saves files beside them.

No call loses what its client has not seen. A whole file goes only if the client has read this content, or has written
it as a client with an identity. An edit and a patch take away the lines that they quote. An undo takes away the lines
of one's own steps, or of the step that it names. Whoever has just read a file can replace and remove it.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from captured_tree import names_in
from effort import amount
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from mcp_servers import ERAS, MODERN, http_server
from served import open_served

Tree = Mapping[str, str]
PATHS = ("a", "b", "d/a", "d/b")
paths = st.sampled_from(PATHS)
who = st.integers(0, 1)


@dataclass
class Player:
    """A client, and what it knows."""

    session: str | None
    seen: set[str] = field(default_factory=set[str])
    """Contents that it has read or, with an identity, knows that it has written."""
    met: set[str] = field(default_factory=set[str])
    """Contents of which it has read some lines, which is enough to remove one."""
    hashes: dict[str, str] = field(default_factory=dict[str, str])
    """The last that was printed, by path."""
    believes: dict[str, str] = field(default_factory=dict[str, str])
    """The content that it last read, by path."""

    @property
    def has_identity(self) -> bool:
        return self.session is not None


@dataclass(frozen=True)
class Step:
    player: Player
    before: Tree
    after: Tree


def lines(tree: Tree, path: str) -> set[str]:
    return set(tree.get(path, "").splitlines())


def replacing(path: str, content: str, line: str, new: str) -> str:
    """A patch for one line of a content, with a line around it."""
    old = content.splitlines()
    at = old.index(line)
    first, end = max(0, at - 1), min(len(old), at + 2)
    body = [f" {one}\n" if one != line else f"-{one}\n+{new}\n" for one in old[first:end]]
    count = end - first
    return f"--- a/{path}\n+++ b/{path}\n@@ -{first + 1},{count} +{first + 1},{count} @@\n{''.join(body)}"


def removing(path: str, content: str) -> str:
    body = [f"-{line}\n" for line in content.splitlines()]
    return f"--- a/{path}\n+++ /dev/null\n@@ -1,{len(body)} +0,0 @@\n{''.join(body)}"


class ClientsOfOneServer(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.number = 0
        self.steps: list[Step] = []
        self.players: Sequence[Player] = ()

    @initialize(eras=st.tuples(st.sampled_from(ERAS), st.sampled_from(ERAS)))
    def start(self, eras: tuple[str, str]) -> None:
        self.base = Path(tempfile.mkdtemp())
        self.stack.callback(shutil.rmtree, self.base)
        self.root = self.base / "root"
        (self.root / "d").mkdir(parents=True)
        for path in PATHS:
            self.save(path)
        workspace = open_served(self.root)
        self.stack.enter_context(closing(workspace))
        self.server = self.stack.enter_context(http_server(workspace))
        self.players = [Player(self.server.session_of(era)) for era in eras]
        assert [player.has_identity for player in self.players] == [era != MODERN for era in eras]

    def teardown(self) -> None:
        self.stack.close()

    # What they do.

    @rule(path=paths)
    def save(self, path: str) -> None:
        """A person appends a line, or makes the file."""
        if (self.root / path).parent.is_dir():
            with open(self.root / path, "a") as file:
                file.writelines(f"{self.fresh()}\n" for _ in range(1 if self.players else 5))

    @rule(who=who, path=paths, limit=st.sampled_from((2000, 3)))
    def read(self, who: int, path: str, limit: int) -> None:
        player, tree = self.players[who], self.tree()
        done, text = self.call(player, "read_file", file_path=path, limit=limit)
        hashed = re.search(r"; expected=([0-9a-f]{16}) ", text)
        if done and hashed is not None:
            player.hashes[path] = hashed[1]
        if done and player.has_identity:
            player.met.add(tree[path])
        if done and limit >= len(lines(tree, path)):
            player.seen.add(tree[path])
            player.believes[path] = tree[path]
            assert (hashed is not None) is not player.has_identity

    @rule(who=who, path=paths, data=st.data())
    def write(self, who: int, path: str, data: st.DataObject) -> None:
        player, tree = self.players[who], self.tree()
        content = "".join(f"{self.fresh()}\n" for _ in range(data.draw(st.integers(1, 5))))
        done, _ = self.call(player, "write_file", file_path=path, content=content, **self.expected(player, path, data))
        if done:
            self.check_known(player, tree, [path])
            self.learn(player, content)
            assert self.tree() == {**tree, path: content}

    @rule(who=who, path=paths)
    def read_and_replace(self, who: int, path: str) -> None:
        """Nothing keeps a client from it, or nobody would obey the rules."""
        player = self.players[who]
        if path not in self.tree():
            return
        self.read(who, path, 2000)
        expected = {} if player.has_identity else {"expected": player.hashes[path]}
        content = f"{self.fresh()}\n"
        assert self.call(player, "write_file", file_path=path, content=content, **expected)[0]
        self.learn(player, content)

    @rule(who=who, path=paths, data=st.data())
    def edit(self, who: int, path: str, data: st.DataObject) -> None:
        player, tree = self.players[who], self.tree()
        if (line := self.line(player, path, data)) is None:
            return
        new = self.fresh()
        if self.call(player, "edit_file", file_path=path, old_string=line, new_string=new)[0]:
            self.check_line_replaced(player, tree, path, line, new)

    @rule(who=who, path=paths, data=st.data())
    def patch(self, who: int, path: str, data: st.DataObject) -> None:
        player, tree = self.players[who], self.tree()
        if (line := self.line(player, path, data)) is None:
            return
        new = self.fresh()
        if self.call(player, "apply_patch", patch=replacing(path, player.believes[path], line, new))[0]:
            self.check_line_replaced(player, tree, path, line, new)

    @rule(who=who, path=paths)
    def patch_away(self, who: int, path: str) -> None:
        player, tree = self.players[who], self.tree()
        if path in player.believes and self.call(player, "apply_patch", patch=removing(path, player.believes[path]))[0]:
            assert tree[path] == player.believes[path]
            self.check_gone(tree, [path])

    @rule(who=who, path=paths, data=st.data())
    def remove(self, who: int, path: str, data: st.DataObject) -> None:
        player, tree = self.players[who], self.tree()
        if self.call(player, "rm", path=path, **self.expected(player, path, data))[0]:
            assert tree[path] in player.seen | player.met
            self.check_gone(tree, [path])

    @rule(who=who)
    def remove_directory(self, who: int) -> None:
        player, tree = self.players[who], self.tree()
        if self.call(player, "rm", path="d", recursive=True)[0]:
            below = [path for path in tree if path.startswith("d/")]
            assert {tree[path] for path in below} <= player.seen | player.met
            self.check_gone(tree, below)

    @rule(who=who, source=paths, onto=paths, data=st.data())
    def move(self, who: int, source: str, onto: str, data: st.DataObject) -> None:
        player, tree = self.players[who], self.tree()
        if self.call(player, "move", source=source, target=onto, **self.expected(player, onto, data))[0]:
            self.check_known(player, tree, [onto] if onto in tree else [])
            left = {path: content for path, content in tree.items() if path != source}
            assert self.tree() == {**left, onto: tree[source]}

    @rule(who=who, data=st.data())
    def undo(self, who: int, data: st.DataObject) -> None:
        player, tree = self.players[who], self.tree()
        own = [step for step in reversed(self.steps) if step.player is player and player.has_identity]
        named = data.draw(st.sampled_from([None, *range(1, len(self.steps) + 1)][-4:]), "named")
        count = data.draw(st.integers(1, 2), "count")
        undone = own[:count] if named is None else [self.steps[named - 1]]
        arguments = {"steps": count} if named is None else {"step": named}
        if not self.call(player, "undo", **arguments)[0]:
            return
        assert len(undone) == (count if named is None else 1)
        now = self.tree()
        for path in {*tree, *now}:
            added = set[str]().union(*(lines(step.after, path) - lines(step.before, path) for step in undone))
            removed = set[str]().union(*(lines(step.before, path) - lines(step.after, path) for step in undone))
            assert lines(tree, path) - lines(now, path) <= added
            assert lines(now, path) - lines(tree, path) <= removed

    # What holds.

    def check_known(self, player: Player, tree: Tree, replaced: Sequence[str]) -> None:
        for path in replaced:
            assert path not in tree or tree[path] in player.seen, (path, tree[path])

    def check_gone(self, tree: Tree, gone: Sequence[str]) -> None:
        assert self.tree() == {path: content for path, content in tree.items() if path not in gone}

    def check_line_replaced(self, player: Player, tree: Tree, path: str, line: str, new: str) -> None:
        assert line in lines(tree, path)
        content = tree[path].replace(line, new)
        assert self.tree() == {**tree, path: content}
        if tree[path] in player.met:
            player.met.add(content)
        if tree[path] in player.seen:
            self.learn(player, content)

    # How they do it.

    def call(self, player: Player, tool: str, **arguments: Any) -> tuple[bool, str]:
        """Whether the call was committed, and what it said. Otherwise it has changed nothing."""
        before = self.tree()
        answer = self.server.call(tool, player.session, **arguments)
        committed = answer["_meta"]["ringfence/outcome"] == "committed"
        assert committed is not answer.get("isError", False)
        after = self.tree()
        if "ringfence/commit" in answer["_meta"]:
            self.steps.append(Step(player, before, after))
        else:
            assert before == after
        return committed, "".join(content["text"] for content in answer["content"])

    def expected(self, player: Player, path: str, data: st.DataObject) -> dict[str, str]:
        """The argument of a client without an identity, often that of the last read, which may be stale."""
        if player.has_identity:
            return {}
        known = [player.hashes[path]] * 3 if path in player.hashes else []
        drawn = data.draw(st.sampled_from([*known, "", *player.hashes.values(), "0" * 16, "0"]), "expected")
        return {"expected": drawn} if drawn else {}

    def line(self, player: Player, path: str, data: st.DataObject) -> str | None:
        """A line of what the client believes of a file, which may not be there any more."""
        believed = player.believes.get(path, "").splitlines()
        return data.draw(st.sampled_from(believed), "line") if believed else None

    def learn(self, player: Player, content: str) -> None:
        if player.has_identity:
            player.seen.add(content)

    def fresh(self) -> str:
        self.number += 1
        return f"line {self.number:04}"

    def tree(self) -> Tree:
        files = (path for name in names_in(self.root) for path in (self.root / name, *(self.root / name).rglob("*")))
        return {path.relative_to(self.root).as_posix(): path.read_text() for path in files if path.is_file()}


TestClientsOfOneServer = ClientsOfOneServer.TestCase
TestClientsOfOneServer.settings = settings(max_examples=amount(prove=3000, test=8))
