"""The section that gives a model a workspace of files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any, Self

from ringfence.errors import PromptValidationError, SectionPath, SectionVisibility
from ringfence.escapes import escape_path
from ringfence.filesystem.memory import InMemoryFilesystem
from ringfence.filesystem.protocol import Filesystem
from ringfence.policies.read_before_write import ReadBeforeWritePolicy
from ringfence.prompt.section import Section
from ringfence.resources import Binding, ResourceRegistry
from ringfence.runtime.policy import BasePolicy, Policy
from ringfence.runtime.tool import Tool
from ringfence.session.session import Session
from ringfence_tools.expected_hash import ExpectedHashPolicy, expecting
from ringfence_tools.files import file_tools
from ringfence_tools.mounts import HostMount, HostMountPreview, mount_all
from ringfence_tools.printable import plural

MAX_SHOWN_ENTRIES = 20
"""Of one mount, in the section's text."""

INTRODUCTION = "You work on a tree of files through these tools. Paths are relative to its root."
FINDING = "Find out what is there with `ls`, `glob` and `grep`; read what matters with `read_file`."
READING_FIRST = (
    "Read a file before you change, move or remove it, all of it before you replace it, and again when somebody else "
    "has changed it. What you wrote yourself you need not read."
)
CHANGING = (
    "`edit_file` replaces one exact text, `apply_patch` takes a unified diff over any number of files: quote lines as "
    "they are, without their numbers. `write_file` makes a new file, or replaces all of one."
)
FAILING = "A call that fails has changed nothing: what it says is how to get it right."


class VfsToolsSection(Section[None]):
    """Tools to list, read, search, write, edit, patch, move and remove files.

    The tools work on ``filesystem``. Without it, the section makes a filesystem in memory and copies ``mounts`` into
    it once. This filesystem is the `Filesystem` resource of every prompt that has the section.

    Git's own data and files of secrets can be changed like all others, unless a `ProtectedFilesPolicy` denies it.
    """

    def __init__(
        self,
        *,
        session: Session,
        mounts: Sequence[HostMount] = (),
        filesystem: Filesystem | None = None,
        allowed_host_roots: Iterable[str | PathLike[str]] | None = None,
        policies: Sequence[Policy] | None = None,
        mount_point: str | None = None,
        shared_session: bool = False,
        accepts_overrides: bool = False,
    ) -> None:
        """
        Args:
            allowed_host_roots: the directories (and URLs) below which mounts have to be; None allows what they name.
            policies: what governs the tools; left out, `ReadBeforeWritePolicy`.
            shared_session: whether callers share the session who cannot be told apart. Left out policies are then
                `ExpectedHashPolicy`, and the tools take the hash that it asks for.
            mount_point: a prefix such as "/workspace" under which a model may name the root, besides relative paths;
                left out, where the filesystem is on disk.
            accepts_overrides: whether the texts of the section and its tools may be replaced from outside.

        Raises:
            PromptValidationError: there are mounts, but ``filesystem`` is not in memory.
            ToolValidationError: a mount cannot be made.
        """
        if isinstance(filesystem, str) or hasattr(filesystem, "filesystem"):
            raise TypeError(f"filesystem is a Filesystem, such as Workspace.open(path).filesystem, not {filesystem!r}")
        self.session = session
        self.filesystem: Filesystem = InMemoryFilesystem() if filesystem is None else filesystem
        self.mounts: tuple[HostMountPreview, ...] = ()
        """The records of the mounts."""
        if mounts:
            if not isinstance(self.filesystem, InMemoryFilesystem):
                raise PromptValidationError(
                    f"mounts are copied into a filesystem in memory, not into {self.filesystem!r}: leave out one"
                )
            self.mounts = mount_all(self.filesystem, mounts, allowed_host_roots)
        tools, policy = governed_tools(mount_point, accepts_overrides, shared_session)
        super().__init__(
            title="Virtual filesystem",
            key="vfs.tools",
            tools=tools,
            policies=(policy,) if policies is None else policies,
            accepts_overrides=accepts_overrides,
        )

    def resources(self) -> ResourceRegistry:
        return ResourceRegistry.of(Binding.instance(Filesystem, self.filesystem))

    def render_body(
        self, params: None, *, visibility: SectionVisibility, path: SectionPath, session: Session | None
    ) -> str:
        governed = any(isinstance(policy, ReadBeforeWritePolicy) for policy in self.policies())
        rules = [FINDING, *([READING_FIRST] if governed else []), CHANGING, FAILING]
        text = "\n".join((INTRODUCTION, "", *(f"- {rule}" for rule in rules)))
        if not self.mounts:
            return text
        return "\n".join((text, "", "What is there at the start:", "", *map(_describe_mount, self.mounts)))

    def clone(self, **changes: Any) -> Self:
        """Return a copy of the section over the same files. ``session`` and ``filesystem`` may be replaced."""
        twin = super().clone(**changes)
        twin.session = changes.get("session", self.session)
        twin.filesystem = changes.get("filesystem", self.filesystem)
        if twin.filesystem is not self.filesystem:
            twin.mounts = ()
        return twin


def governed_tools(
    mount_point: str | None, accepts_overrides: bool, shared_session: bool
) -> tuple[tuple[Tool[Any, Any], ...], BasePolicy]:
    """The file tools, and the policy that keeps a caller from overwriting what it does not know."""
    tools = file_tools(mount_point=mount_point, accepts_overrides=accepts_overrides)
    if shared_session:
        return expecting(tools, mount_point), ExpectedHashPolicy(mount_point)
    return tools, ReadBeforeWritePolicy(mount_point=mount_point)


def _describe_mount(mount: HostMountPreview) -> str:
    place = f"/{escape_path(mount.mount_path)}"
    if not mount.is_directory:
        return f"- `{place}`, a file"
    names = [f"`{escape_path(name)}`" for name in mount.entries[:MAX_SHOWN_ENTRIES]]
    if len(mount.entries) > MAX_SHOWN_ENTRIES:
        names.append(f"and {len(mount.entries) - MAX_SHOWN_ENTRIES:,} more")
    return f"- `{place}`, {plural(mount.files, 'file')} in all: {', '.join(names) or 'nothing'}"
