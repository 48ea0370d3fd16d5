"""The files of the workspace as resources that a client can list and attach."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Iterator
from itertools import islice
from urllib.parse import quote, unquote_to_bytes

from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    BlobResourceContents,
    ListResourcesResult,
    ReadResourceResult,
    Resource,
    ResourceTemplate,
    TextResourceContents,
)

from ringfence.filesystem.paths import escape_path, path_message
from ringfence.filesystem.protocol import FileEntry, Filesystem
from ringfence_tools.run_workspace import is_git_data

SCHEME = "workspace:///"
PAGE = 200
"""Resources in one answer."""
MAX_BYTES = 1 << 20
"""Of one resource. What is larger is read in parts, with `read_file`."""
TEMPLATE = ResourceTemplate(
    uri_template=f"{SCHEME}{{+path}}", name="file", description="A file of the workspace, by its path from the root."
)


def listed(filesystem: Filesystem, cursor: str | None) -> ListResourcesResult:
    """A page of files; the cursor is the address of the last one of the page before."""
    after = path_of(cursor) if cursor else ""
    found = list(islice(files_after(filesystem, after), PAGE + 1))
    page = found[:PAGE]
    return ListResourcesResult(
        resources=[
            Resource(
                uri=address(file.path), name=escape_path(file.path), size=file.size_bytes, mime_type=_kind(file.path)
            )
            for file in page
        ],
        next_cursor=address(page[-1].path) if len(found) > PAGE else None,
    )


def read(filesystem: Filesystem, uri: str) -> ReadResourceResult:
    """All of one file. MCPError where there is none, or it is too large."""
    path = path_of(uri)
    try:
        size = filesystem.stat(path).size_bytes
        if size > MAX_BYTES:
            said = f"{_named(path)} has {size:,} bytes, a resource at most {MAX_BYTES:,}: use read_file with offset"
            raise MCPError(code=INVALID_PARAMS, message=said)
        content = filesystem.read_bytes(path, limit=MAX_BYTES).content
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise MCPError(code=INVALID_PARAMS, message=path_message(_named(path), said, " cannot be read: ")) from None
    try:
        text = content.decode()
    except UnicodeDecodeError:
        data = base64.b64encode(content).decode()
        return ReadResourceResult(contents=[BlobResourceContents(uri=uri, mime_type=_kind(path), blob=data)])
    return ReadResourceResult(contents=[TextResourceContents(uri=uri, mime_type=_kind(path), text=text)])


def address(path: str) -> str:
    return SCHEME + quote(path.encode("utf-8", "surrogateescape"))


def path_of(uri: str) -> str:
    """MCPError for an address that is none of ours."""
    if not uri.startswith(SCHEME):
        raise MCPError(code=INVALID_PARAMS, message=f"the address of a file begins with {SCHEME}")
    return unquote_to_bytes(uri[len(SCHEME) :]).decode("utf-8", "surrogateescape")


def files_after(filesystem: Filesystem, after: str) -> Iterator[FileEntry]:
    """The regular files in the order of their paths, from the first after `after`; without git's own data. Looks only
    into directories that may have any."""
    pending = [_entries(filesystem, "", after.split("/"))]
    while pending:
        found = next(pending[-1], None)
        if found is None:
            pending.pop()
            continue
        entry, rest = found
        if entry.is_directory:
            pending.append(_entries(filesystem, entry.path, rest))
        else:
            yield entry


def _entries(filesystem: Filesystem, path: str, after: list[str]) -> Iterator[tuple[FileEntry, list[str]]]:
    """The files and directories in one directory that are after `after` or may have such; with what that leaves for
    what is in them."""
    first = after[0] if after else ""
    try:
        entries = sorted(filesystem.list(path), key=lambda entry: entry.name)
    except OSError:  # gone meanwhile, or not ours to read
        return
    for entry in entries:
        if entry.is_symlink or is_git_data(entry.name) or entry.name < first:
            continue
        if entry.name > first:
            yield entry, []
        elif entry.is_directory:
            yield entry, after[1:]


def _named(path: str) -> str:
    """As much of it as tells people which one."""
    name = escape_path(path) or "the root of the workspace"
    return name if len(name) <= 300 else f"{name[:300]}..."


def _kind(path: str) -> str:
    return mimetypes.guess_type(path)[0] or "text/plain"
