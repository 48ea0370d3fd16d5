"""A digest: a description of the workspace that an agent or a person leaves for the next prompt."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any, Self

from ringfence.errors import SectionPath, SectionVisibility
from ringfence.prompt.section import Section, SectionOverride, expand, normalize_key
from ringfence.runtime.session import Session

logger = logging.getLogger(__name__)

DIGEST_KEY = "workspace-digest"
PLACEHOLDER = "There is no digest of the workspace yet: find out about it with the tools that you have."


@dataclass(frozen=True, slots=True)
class WorkspaceDigest:
    """A description of a workspace, in full and in short, for the section with this key."""

    section_key: str
    summary: str
    body: str


def set_workspace_digest(
    session: Session, section_key: str, body: str, *, summary: str | None = None
) -> WorkspaceDigest:
    """Store the digest for a section key and replace the one before. Raises ValueError for an invalid key."""
    key = normalize_key(section_key)
    short = summary if summary is not None else f"There is a digest of the workspace, of {len(body):,} characters."
    digest = WorkspaceDigest(key, short.strip(), body.strip())
    with session.locked():
        session[WorkspaceDigest].clear(lambda one: one.section_key == key)
        session[WorkspaceDigest].append(digest)
    return digest


def clear_workspace_digest(session: Session, section_key: str) -> None:
    """Delete the digest for a section key."""
    key = normalize_key(section_key)
    session[WorkspaceDigest].clear(lambda one: one.section_key == key)


def latest_workspace_digest(session: Session, section_key: str) -> WorkspaceDigest | None:
    """Return the digest for a section key, or None."""
    key = normalize_key(section_key)
    return next((one for one in session[WorkspaceDigest].all() if one.section_key == key), None)


class WorkspaceDigestSection(Section[None]):
    """Shows the digest of its session in short. The model can ask for the full text.

    Without a digest, the section shows a placeholder. The text of a digest comes from a model or a repository, so no
    template in it is expanded. Overrides apply only while there is no digest.
    """

    def __init__(
        self,
        *,
        session: Session,
        title: str = "Workspace digest",
        key: str = DIGEST_KEY,
        placeholder: str = PLACEHOLDER,
    ) -> None:
        self.session = session
        self.placeholder = placeholder
        super().__init__(title=title, key=key, summary="")

    def effective_visibility(self, params: None, *, session: Session | None, path: SectionPath) -> SectionVisibility:
        twin = copy.copy(self)
        twin.visibility = SectionVisibility.FULL if self._digest() is None else SectionVisibility.SUMMARY
        return super(WorkspaceDigestSection, twin).effective_visibility(params, session=session, path=path)

    def _digest(self) -> WorkspaceDigest | None:
        return latest_workspace_digest(self.session, self.key)

    def render_body(
        self, params: None, *, visibility: SectionVisibility, path: SectionPath, session: Session | None
    ) -> str:
        digest = self._digest()
        if digest is None:
            logger.warning("the session has no digest for the section %s", ".".join(path))
            return self.placeholder
        return digest.body

    def render_summary(self, params: None, *, path: SectionPath) -> str:
        digest = self._digest()
        return self.placeholder if digest is None else digest.summary

    def overridden(self, override: SectionOverride) -> Self:
        twin = copy.copy(self)
        if override.body is not None:
            twin.placeholder = expand(override.body, None, override.path)
        return twin

    def original_body_template(self) -> str | None:
        return self.placeholder.replace("$", "$$")

    def clone(self, **changes: Any) -> Self:
        """Return a copy of the section. ``session`` is the session of the copy."""
        twin = super().clone(**changes)
        twin.session = changes.get("session", self.session)
        return twin
