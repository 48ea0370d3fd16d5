"""Examples of whole tasks: an objective, the calls that reach it, and the outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ringfence.errors import PromptValidationError, SectionPath, SectionVisibility
from ringfence.prompt.rendering import fence, format_call
from ringfence.prompt.section import MarkdownSection, Section
from ringfence.prompt.structured_output import StructuredOutput
from ringfence.prompt.tool import Tool, ToolExample
from ringfence.runtime.tool_result import render_value

if TYPE_CHECKING:
    from ringfence.runtime.session import Session

MAX_OBJECTIVE_CHARACTERS = 500
MAX_TITLE_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class TaskStep:
    """One call of a task: the tool, and the call as an example of it."""

    tool_name: str
    example: ToolExample[Any, Any]


class TaskExample(Section[None]):
    """A task worth imitating, with the prompt's tools and an outcome of the prompt's output type."""

    def __init__(
        self, *, key: str, objective: str, outcome: Any, steps: Sequence[TaskStep], title: str | None = None
    ) -> None:
        """``outcome`` is a text where the prompt's answer is one, else an instance of the output type, or several.

        Raises:
            PromptValidationError: an objective that is not 1 to 500 printable ASCII characters, or no steps.
        """
        self.objective = objective.strip()
        is_line = self.objective.isascii() and self.objective.isprintable()
        if not is_line or not 1 <= len(self.objective) <= MAX_OBJECTIVE_CHARACTERS:
            raise PromptValidationError(
                f"an objective is 1 to {MAX_OBJECTIVE_CHARACTERS} printable ASCII characters, not {objective!r}",
                placeholder="objective",
            )
        self.outcome = outcome
        self.steps = tuple(steps)
        if not self.steps:
            raise PromptValidationError(f"the task example {key!r} has no steps", placeholder="steps")
        if title is None:
            short = self.objective[:MAX_TITLE_CHARACTERS].rstrip()
            title = short if short == self.objective else f"{short}..."
        super().__init__(title=title, key=key)

    def render_body(
        self, params: None, *, visibility: SectionVisibility, path: SectionPath, session: Session | None
    ) -> str:
        lines = [f"Objective: {self.objective}", "", "Steps:", ""]
        for number, step in enumerate(self.steps, 1):
            lines.append(f"{number}. `{step.tool_name}`: {step.example.description}")
            lines += format_call(step.example, indent="   ")
        outcome = self.outcome if isinstance(self.outcome, str) else fence(render_value(self.outcome), "json")
        return "\n".join([*lines, "", "Outcome:", "", outcome])

    def check(self, tools: Mapping[str, Tool[Any, Any]], output: StructuredOutput | None, path: SectionPath) -> None:
        """Raises PromptValidationError where a step or the outcome does not fit the prompt."""
        for step in self.steps:
            if step.tool_name not in tools:
                self._refuse(f"there is no tool {step.tool_name!r}", path, step.tool_name)
            try:
                tools[step.tool_name].check_example(step.example)
            except PromptValidationError as error:
                self._refuse(str(error), path, step.tool_name)
        outcome, kind = self.outcome, str if output is None else output.dataclass_type
        if output is None or output.container == "object":
            fits, wanted = type(outcome) is kind, f"a {kind.__name__}"
        else:
            fits = type(outcome) in (list, tuple) and all(type(item) is kind for item in outcome)
            wanted = f"a list of {kind.__name__}"
        if not fits:
            self._refuse(f"its outcome is not {wanted}, which is what the prompt answers", path, "outcome")

    def _refuse(self, message: str, path: SectionPath, placeholder: str) -> NoReturn:
        message = f"the task example {'.'.join(path)}: {message}"
        raise PromptValidationError(message, section_path=path, placeholder=placeholder)


class TaskExamplesSection(MarkdownSection[None]):
    """Holds task examples, each a section below it."""

    def __init__(
        self, *, examples: Sequence[TaskExample], title: str = "Task examples", key: str = "task-examples"
    ) -> None:
        """Raises PromptValidationError for no examples."""
        if not examples:
            raise PromptValidationError(f"the section {key!r} has no task examples", placeholder="examples")
        super().__init__(title=title, key=key, template="", children=examples, accepts_overrides=False)
