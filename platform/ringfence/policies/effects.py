"""Policies on effects: what a call has changed, before the commit."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ringfence.errors import PromptValidationError
from ringfence.escapes import escape_path
from ringfence.filesystem.diff import moved
from ringfence.filesystem.hidden import NO_SECRETS, SECRETS, HidesFiles
from ringfence.filesystem.path_patterns import covering, covering_any_case, each_name, folded
from ringfence.filesystem.paths import GIT_ADVICE, directories_above, is_dotgit
from ringfence.filesystem.search import compiled_glob
from ringfence.participants import Change, FileVersion
from ringfence.runtime.policy import (
    ALLOW,
    BasePolicy,
    Hook,
    PathHashes,
    PolicyDecision,
    PolicyState,
    check_names,
    known_hashes,
    policy_state,
    refuse_unknown,
)
from ringfence.secrets import Secrets

if TYPE_CHECKING:
    from ringfence.runtime.context import ToolContext
    from ringfence.runtime.tool import Tool
    from ringfence.session.tool_result import ToolResult


_GIT_SETTINGS = frozenset(
    {"hooks", "config", "config.worktree", "alternates", "commondir", "gitdir", "attributes", "exclude"}
)
"""Names in git's own data of what can have git run programs, read other directories, or hide files from people."""


class PathPolicy(BasePolicy):
    """Calls can change only paths that match ``allow``, and no path that matches ``deny``.

    Patterns are globs: ``*`` stays within a name, ``**`` stands for any directories. One without a ``/`` is for names
    at any depth, one with a ``/`` (``/src``, ``docs/*.md``) for paths from the root. What matches takes along all that
    is below it. For ``deny`` neither case nor the way in which accents are encoded counts.
    """

    name = "paths"

    def __init__(self, *, allow: Iterable[str] | None = None, deny: Iterable[str] = ()) -> None:
        """An ``allow`` of None allows all paths that are not denied. An empty one allows no path.

        Raises PromptValidationError for a bad pattern, and for arguments that deny nothing.
        """
        self.allow = None if allow is None else tuple(sorted(check_names(allow)))
        self.deny = tuple(sorted(check_names(deny)))
        if self.allow is None and not self.deny:
            raise PromptValidationError("a PathPolicy denies something: give allow=['/src/**'], say, or deny=['docs']")
        self._allowed = covering(self.allow or ())
        self._denied = covering_any_case(self.deny)
        self._above_denied = {above for pattern in self.deny for above in _fixed_above(folded(pattern))}

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        for change in changes:
            if self._denied(change.path):
                return PolicyDecision.deny(f"{_named(change)} must not be {change.kind}")
            is_link = change.after is not None and change.after.kind == "symlink"
            if is_link and folded(change.path) in self._above_denied:
                return PolicyDecision.deny(
                    f"{escape_path(change.path)} must not become a link: what is below is denied"
                )
        if self.allow is None:
            return ALLOW
        allowed = {change.path for change in changes if self._allowed(change.path)}
        # A directory may come into being on the way to what is allowed.
        on_the_way = {above for path in allowed for above in directories_above(path)}
        # A file before the directory that was made for it, which nobody has asked for.
        for change in sorted(changes, key=lambda one: _is_directory(one.after)):
            is_made = change.before is None and _is_directory(change.after)
            if change.path not in allowed and not (is_made and change.path in on_the_way):
                return PolicyDecision.deny(f"{_named(change)} is not among what may be changed")
        return ALLOW


class ProtectedFilesPolicy(BasePolicy):
    """Calls cannot change git's own data, the workflows of a forge, and the usual files with secrets."""

    name = "protected_files"

    def __init__(self, *, allow_git: bool = False) -> None:
        """With ``allow_git``, opaque tools can commit, stash and check out. Hooks and settings stay protected."""
        self._allow_git = allow_git
        self._workflows = PathPolicy(deny=[".github/workflows"])
        self._secret = each_name(SECRETS, besides=NO_SECRETS)

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        for change in changes:
            if (refusal := git_refusal(change, allow_git=self._allow_git and tool.opaque)) is not None:
                return PolicyDecision.deny(refusal)
            if self._secret(folded(change.path)):
                return PolicyDecision.deny(f"{escape_path(change.path)} is where secrets are kept")
        return self._workflows.check_effects(tool, params, changes, context=context)


def git_refusal(change: Change, *, allow_git: bool = False) -> str | None:
    """Return why a call must not change git's own data; None for other paths.

    With ``allow_git``, it may change what commits, stashes and checkouts change: no hook, no setting, and no link.
    """
    names = change.path.split("/")
    at = next((place for place, name in enumerate(names) if is_dotgit(os.fsencode(name))), None)
    if at is None:
        return None
    named, below = escape_path(change.path), [folded(name) for name in names[at + 1 :]]
    if not allow_git:
        return f"{named} is git's own data: {GIT_ADVICE}"
    is_link = any(version is not None and version.kind == "symlink" for version in (change.before, change.after))
    is_name = below[:1] in (["refs"], ["logs"])  # of a branch, which may be called "config"
    if not below or is_link or (not is_name and not _GIT_SETTINGS.isdisjoint(below)):
        return f"{named} is git's own data, and can name programs that git runs: only people change it"
    return None


class HiddenFilesPolicy(BasePolicy):
    """Calls cannot change the hidden files of the workspace, nor make a file that would be hidden.

    The filesystem is what hides files from tools and commands: ``Workspace.open(path, hide=HiddenFiles())``. Where it
    hides nothing, every call is denied. What matches ``allow``, globs as of `PathPolicy`, may be changed and made.
    Without ``deny_new`` every file may be made.
    """

    name = "hidden_files"

    def __init__(self, *, allow: Iterable[str] = (), deny_new: bool = True) -> None:
        """Raises PromptValidationError for a bad pattern."""
        self.allow = tuple(sorted(check_names(allow)))
        self.deny_new = deny_new
        self._allowed = covering(self.allow)

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        filesystem = context.filesystem
        if filesystem is None or (isinstance(filesystem, HidesFiles) and filesystem.hidden is not None):
            return ALLOW
        return PolicyDecision.deny("the filesystem hides no files: open it with hide=HiddenFiles()")

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        filesystem = context.filesystem
        if isinstance(filesystem, HidesFiles):
            for change in changes:
                if change.before is None and not self.deny_new:
                    continue
                if filesystem.hides(change.path) and not self._allowed(change.path):
                    # It was there while the call ran, which may have read it.
                    if context.session.secrets is None:
                        context.session.secrets = Secrets()
                    context.session.secrets.add_hidden(filesystem, late=True)
                    return PolicyDecision.deny(f"{_named(change)} is hidden, so it must not be {change.kind}")
        return ALLOW


class DeletionLimitPolicy(BasePolicy):
    """A session removes at most ``max_files`` files that it did not make itself.

    A file that is emptied, or replaced by something else than a file, counts as removed. A file that is moved to a new
    path does not. One that is moved over another file does. A file that comes back under its path counts no longer.
    Policies of one name share the count, and each has its limit.
    """

    name = "deletion_limit"

    def __init__(self, *, max_files: int) -> None:
        """Raises PromptValidationError for less than 0."""
        if max_files < 0:
            raise PromptValidationError(f"max_files is a number of files, 0 or more, not {max_files!r}")
        self.max_files = max_files

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        removed = _removed(self._after(changes, context))
        if len(removed) <= max(self.max_files, len(_removed(self._known(context)))):
            return ALLOW
        files = "1 file" if len(removed) == 1 else f"{len(removed)} files"
        more = f" and {len(removed) - 5} more" if len(removed) > 5 else ""
        return PolicyDecision.deny(
            f"that makes {files} removed in this session, {self.max_files} are allowed: "
            f"{', '.join(map(escape_path, removed[:5]))}{more}"
        )

    def on_result(self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext) -> None:
        changes = changes_of(context)
        if (changes or _made_calls(context)) and self._is_first_of_name(tool, context):
            state, known = policy_state(context, self.name, context.prompt.scope), self._after(changes, context)
            if known != state.invoked_keys:
                context.session[PolicyState].replace_item(state, replace(state, invoked_keys=known))

    def _is_first_of_name(self, tool: Tool[Any, Any], context: ToolContext) -> bool:
        """Whether this is the first policy of its name. A second count would take its own files for others'."""
        observers = context.prompt.result_policies(tool.name)
        return next(one for one in observers if isinstance(one, DeletionLimitPolicy) and one.name == self.name) is self

    def _known(self, context: ToolContext) -> PathHashes:
        """The paths that counted before the call: each is "removed", or "made" by the session.

        What inner calls counted is left out, since the outer call's changes contain theirs.
        """
        return known_hashes(policy_state(context, self.name, context.prompt.scope, before=_made_calls(context)))

    def _after(self, changes: Sequence[Change], context: ToolContext) -> PathHashes:
        """The paths that count when these changes are kept."""
        known, news = self._known(context), dict[str, str | None]()
        moves = moved(changes)
        sources = {source.path for source in moves.values()}
        for change in changes:
            is_made = known.of(change.path) == "made"
            if change.before is not None and _lost(change.before, change.after):
                if is_made and change.after is None:
                    news[change.path] = None
                elif not is_made and change.path not in sources:
                    news[change.path] = "removed"
            elif change.after is not None and _lost(change.after, change.before):
                source = moves.get(change.path)
                if known.of(change.path) == "removed":  # it came back
                    news[change.path] = None
                elif change.before is None and (source is None or known.of(source.path) == "made"):
                    news[change.path] = "made"
        return known.updated(news)


def _removed(known: PathHashes) -> list[str]:
    return sorted(path for path, status in known if status == "removed")


class RequireCleanTestsPolicy(BasePolicy):
    """Certain tools run, and certain files change, only when the tests have passed since the last change of a file.

    The tests have passed when ``test_tool`` succeeded (with an exit code of 0, where its result has one), and ran one
    of the commands that are named, if any are. The policy observes the calls of all tools, but governs only those of
    its section: bind it to the prompt where files have to wait. The changes of a call count as later than tests that
    its inner calls ran.
    """

    name = "require_clean_tests"
    observes_all_tools = True

    def __init__(
        self,
        test_tool: str,
        *,
        command: str | Iterable[str] = (),
        before: Iterable[str] = (),
        paths: Iterable[str] = (),
    ) -> None:
        """``before`` names the tools, and ``paths`` the files (patterns as in `PathPolicy`) that have to wait.

        Args:
            command: globs for the command that counts as the tests, of a tool that runs any: all of its words, such as
                ``pytest -q``, or ``pytest*`` for ``pytest`` with any further words but options. An option counts only
                if it is named. The command counts alone, in the root, without variables of its own or of earlier
                commands: with others, pipes, redirections or expansions it does not. A glob for the shell is such an
                expansion, unless it is quoted or named.

        Raises:
            PromptValidationError: nothing has to wait, or the test tool has to wait for itself.
        """
        self.command = (command,) if isinstance(command, str) else tuple(command)
        if not all(command.strip() for command in self.command):
            raise PromptValidationError(f"{self.name}: a command that counts as the tests has words")
        self.test_tool = test_tool
        self.before = check_names(before)
        self.paths = tuple(sorted(check_names(paths)))
        self._waiting = covering_any_case(self.paths)
        if not (self.before or self.paths):
            raise PromptValidationError(f"{self.name} needs tools (before=) or files (paths=) that have to wait")
        if test_tool in self.before:
            raise PromptValidationError(f"{test_tool} would wait for itself", placeholder=test_tool)

    def applies_to(self, tool: Tool[Any, Any], hook: Hook) -> bool:
        return hook != "check" or tool.name in self.before

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        return self._decision(tool.name, context) if tool.name in self.before else ALLOW

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        for change in changes:
            if self._waiting(change.path):
                return self._decision(escape_path(change.path), context)
        return ALLOW

    def on_result(self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext) -> None:
        if tool.name == self.test_tool and (not self.command or runs(params, self.command, result.value)):
            clean = result.success and getattr(result.value, "exit_code", 0) == 0
        elif changes_of(context):
            clean = False
        else:
            return
        state = policy_state(context, self.name, self._scope(context))
        passed = frozenset({self.test_tool} if clean else ())
        if passed != state.invoked_tools:
            context.session[PolicyState].replace_item(state, replace(state, invoked_tools=passed))

    def validate(self, tool_names: frozenset[str]) -> None:
        refuse_unknown(self.name, {self.test_tool, *self.before} - tool_names, tool_names)

    def _scope(self, context: ToolContext) -> str:
        """A scope of its own for each definition of the tests."""
        return "#".join((context.prompt.scope, self.test_tool, *self.command))

    def _decision(self, what: str, context: ToolContext) -> PolicyDecision:
        if self.test_tool in policy_state(context, self.name, self._scope(context)).invoked_tools:
            return ALLOW
        named = " or ".join(map(repr, self.command))
        alone = (
            f" with {named}, alone, in the root, with no other option or variable and no shell glob," if named else ""
        )
        return PolicyDecision.deny(
            f"{what} has to wait: run {self.test_tool}{alone} first, it has not passed since a change"
        )


def changes_of(context: ToolContext) -> list[Change]:
    """The changes of the call in all filesystems."""
    return [] if context.call is None else [change for changes in context.call.changes.values() for change in changes]


def _made_calls(context: ToolContext) -> bool:
    return context.call is not None and bool(context.call.inner)


def _fixed_above(pattern: str) -> list[str]:
    """The directories that every match is below of."""
    if "/" not in pattern:
        return []
    fixed = compiled_glob(pattern).fixed
    return ["/".join(fixed[:depth]) for depth in range(1, len(fixed) + 1)]


def _named(change: Change) -> str:
    return escape_path(change.path) or "the root"


def _is_directory(version: FileVersion | None) -> bool:
    return version is not None and version.kind == "directory"


def _lost(version: FileVersion, other: FileVersion | None) -> bool:
    """Whether a file or a link is there at one moment, and not, or emptied, at the other."""
    if version.kind == "directory":
        return False
    return other is None or other.kind != version.kind or (version.size > 0 and other.size == 0)


# Other commands beside it, redirections, expansions, comments: also where they are quoted, `argv` is there for that.
# And what parts words for some programs alone.
_MORE_THAN_WORDS = re.compile(r"[|&;<>()$`\\#]|[^\S \t]")
# What makes another command of the same program: an option, a file of options, a variable of `make`. The "=" of the
# parameters of one test stands behind a "[".
_OPTION = re.compile(r"[-@]|[^=\[]*=")
_RAW_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""")
_QUOTED = re.compile(r"""(?:"[^"]*"|'[^']*')""")
# A shell puts other words in place of a word with one of these: the names of files, which may be those of options.
_PATTERN = re.compile(r"[*?\[{~]")
_GLOB = re.compile(r"[*?\[]")


def runs(params: Any, patterns: Sequence[str], value: object = None) -> bool:
    """Whether a tool's parameters ask for a command that matches one of these globs.

    The parameters have a text for a shell, ``command``, or words, ``argv``; of both, the words with a blank between
    them have to match as a whole. A text has to be one command of plain and quoted words. A word that a shell expands,
    such as ``*`` or ``{a,b}``, is none, unless the glob has the same word. The command has to run in the root with
    nothing in its environment and nothing to read: ``cwd``, ``env`` and ``stdin`` make another command of it, and
    so does, in the result's ``value``, that it ``began_in`` another directory, where the one before it had ended, or
    with ``kept_variables`` of earlier commands.
    """
    given = {name: getattr(params, name, None) for name in ("command", "argv", "cwd", "env", "stdin")}
    words = _words(given["command"], given["argv"])
    if not words or "=" in words[0] or words[0] == "!" or getattr(value, "kept_variables", ()):
        return False
    directories = given["cwd"], getattr(value, "began_in", None)
    if given["env"] or given["stdin"] or any(place not in (None, "", ".") for place in directories):
        return False
    expanded = _expanded(given["command"], words)
    return any(_fits(words, expanded, pattern) for pattern in patterns)


def _fits(words: Sequence[str], expanded: Iterable[str], pattern: str) -> bool:
    """Whether words match a glob. ``*`` stands neither for an option nor, at the end, for the rest of a name.

    ``pytest --collect-only`` ends with 0 and runs no test, and each runner has options of that kind. A shell makes one
    of ``?-co``, too. So ``expanded`` words have to be words of the glob, and not ones that stand for any option.
    """
    if any(word not in pattern.split() or word.startswith(("*", "?", "[")) for word in expanded):
        return False
    named = [word.rstrip("*") for word in pattern.split()]
    if named[0] and not _GLOB.search(named[0]) and words[0] != named[0]:
        return False
    if any(_OPTION.match(word) and word not in named for word in words[1:]):
        return False
    text, before = " ".join(words), pattern.rstrip("*")
    if before == pattern or not re.search(r"[\w-]\Z", before):
        return fnmatchcase(text, pattern)
    return fnmatchcase(text, before) or fnmatchcase(text, f"{before}[!A-Za-z0-9_-]*")


def _words(command: object, argv: Any) -> Sequence[str]:
    if command is None:
        return [str(word) for word in argv or ()]
    if argv or not isinstance(command, str) or _MORE_THAN_WORDS.search(command):
        return ()
    try:
        return shlex.split(command)
    except ValueError:  # a quotation without an end
        return ()


def _expanded(command: object, words: Sequence[str]) -> list[str]:
    """Return the words of a text that a shell expands."""
    if not isinstance(command, str):
        return []
    raw = _RAW_WORD.findall(command)
    return [word for word, its in zip(words, raw, strict=True) if _PATTERN.search(_QUOTED.sub("", its))]
