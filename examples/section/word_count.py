"""A section of your own, with a tool.

    ringfence run DIR --task "..." --model ... --section word_count.py:section

A section brings instructions and tools. A tool has a dataclass for its params and one for its result. Its handler works
on the files through `context.filesystem`, so that its changes are part of the call's transaction.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ringfence import MarkdownSection, Session, Tool, ToolContext, ToolResult


@dataclass(frozen=True, slots=True)
class CountParams:
    path: str = field(metadata={"description": "The file to count."})


@dataclass(frozen=True, slots=True)
class Count:
    words: int

    def render(self) -> str:
        return f"{self.words} words"


def count_words(params: CountParams, *, context: ToolContext) -> ToolResult[Count]:
    assert context.filesystem is not None
    found = Count(len(context.filesystem.read(params.path).content.split()))
    return ToolResult.ok(found, f"{params.path}: {found.render()}")


def section(session: Session) -> MarkdownSection:
    tool = Tool[CountParams, Count](
        name="count_words",
        description="Count the words of a file of the workspace.",
        handler=count_words,
        read_only=True,
    )
    return MarkdownSection(title="Words", key="words", template="Say how many words a file has.", tools=[tool])
