"""The contract suites of policies and of sections, the parts of a prompt that others write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringfence.adapters.loop import tool_schema
from ringfence.filesystem.memory import InMemoryFilesystem
from ringfence.filesystem.protocol import Filesystem
from ringfence.prompt.prompt import Prompt
from ringfence.prompt.section import MarkdownSection, Section
from ringfence.receipts import Receipt
from ringfence.runtime.context import ToolContext
from ringfence.runtime.policy import Policy
from ringfence.runtime.tool import Tool
from ringfence.runtime.tool_executor import ToolCallResult, ToolExecutor
from ringfence.session.session import Session
from ringfence.session.tool_result import ToolResult

TOOL_NAME = "contract_write"


@dataclass(frozen=True)
class WriteParams:
    path: str
    text: str


def write(params: WriteParams, *, context: ToolContext) -> ToolResult[None]:
    """Replace a file."""
    assert context.filesystem is not None
    context.filesystem.write(params.path, params.text)
    return ToolResult.ok(None, "written")


_WRITE = Tool[WriteParams, None](
    name=TOOL_NAME, description="Replace a file.", handler=write, writes=lambda params: (params.path,)
)


class PolicyContract:
    """Subclass it in a test, as ``class TestMyPolicy(PolicyContract)``, with `policy`, `allowed` and `denied`.

    Each write is a path and the new text of its file. It is a call of its own on the files of `files`.
    """

    files: Mapping[str, str] = {}
    """The text of each file before a call."""

    def policy(self) -> Policy:
        raise NotImplementedError

    def allowed(self) -> Sequence[tuple[str, str]]:
        """Writes that the policy allows."""
        raise NotImplementedError

    def denied(self) -> Sequence[tuple[str, str]]:
        """Writes that the policy denies."""
        raise NotImplementedError

    def written(self, path: str, text: str) -> tuple[Receipt, Mapping[str, str]]:
        """Write a file. Return the receipt, and the files afterwards."""
        session, files = Session(), InMemoryFilesystem()
        for name, content in self.files.items():
            files.write(name, content)
        section = MarkdownSection(title="Write", key="write", template="Write files.", tools=[_WRITE])
        prompt = Prompt[None](ns="contract", key="policy", sections=[section], policies=[self.policy()])
        bound = prompt.bind(resources={Filesystem: files})
        arguments = {"path": path, "text": text}
        with bound.resources:
            receipt = ToolExecutor(prompt=bound, session=session).execute(TOOL_NAME, arguments, call_id="1").receipt
        found = [match.path for match in files.glob("**") if match.is_file]
        return receipt, {name: files.read(name).content for name in found}

    def test_what_is_allowed_is_committed(self) -> None:
        for path, text in self.allowed():
            receipt, files = self.written(path, text)
            assert receipt.outcome == "committed", f"{path}: {receipt.message}"
            assert files == {**self.files, path: text}

    def test_what_is_denied_changes_nothing_and_says_which_policy_and_why(self) -> None:
        for path, text in self.denied():
            receipt, files = self.written(path, text)
            assert receipt.outcome == "denied", f"{path}: {receipt.message}"
            assert files == self.files
            assert f"the policy {self.policy().name}: " in receipt.message
            assert "no reason given" not in receipt.message

    def test_one_policy_serves_many_prompts(self) -> None:
        one = self.policy()
        for _ in range(2):
            Prompt[None](
                ns="contract",
                key="shared",
                sections=[MarkdownSection(title="Write", key="write", template="Write files.", tools=[_WRITE])],
                policies=[one],
            )


class SectionContract:
    """Subclass it in a test, as ``class TestMySection(SectionContract)``, with `section`."""

    def section(self, session: Session) -> Section[Any]:
        raise NotImplementedError

    def opened(self) -> Prompt[None]:
        """A prompt that has only the section, on a filesystem without files."""
        prompt = Prompt[None](ns="contract", key="section", sections=[self.section(Session())])
        return prompt.bind(resources={Filesystem: InMemoryFilesystem()})

    def called(self, name: str, arguments: Any) -> ToolCallResult:
        session = Session()
        prompt = Prompt[None](ns="contract", key="section", sections=[self.section(session)])
        bound = prompt.bind(resources={Filesystem: InMemoryFilesystem()})
        with bound.resources:
            return ToolExecutor(prompt=bound, session=session).execute(name, arguments, call_id="1")

    def test_it_renders_and_each_tool_has_a_schema(self) -> None:
        with (prompt := self.opened()).resources:
            rendered = prompt.render()
            for tool in rendered.tools:
                assert tool.description
                assert tool_schema(tool, rendered).parameters["type"] == "object"

    def test_it_renders_the_same_for_each_session(self) -> None:
        texts = list[str]()
        for _ in range(2):
            with (prompt := self.opened()).resources:
                texts.append(prompt.render().text)
        assert texts[0] == texts[1]

    def test_a_malformed_call_is_answered(self) -> None:
        with (prompt := self.opened()).resources:
            names = [tool.name for tool in prompt.render().tools]
        for name in names:
            for arguments in ("{", {"no_such_argument": 1}):
                ended = self.called(name, arguments)
                assert not ended.result.success
                assert ended.text
