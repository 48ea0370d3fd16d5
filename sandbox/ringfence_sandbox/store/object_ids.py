"""What git calls an object: told from its kind and its bytes, without git's own classes."""

from __future__ import annotations

import hashlib

COMMIT, TREE, BLOB = 1, 2, 3
_KINDS = {COMMIT: b"commit", TREE: b"tree", BLOB: b"blob"}
_JOINED_BYTES = 1 << 14
"""What is longer is not copied to stand behind its header."""


def object_id(type_number: int, raw: bytes) -> bytes:
    """Git's name for an object."""
    header = b"%b %d\0" % (_KINDS[type_number], len(raw))
    if len(raw) <= _JOINED_BYTES:
        return hashlib.sha1(header + raw, usedforsecurity=False).digest()
    digest = hashlib.sha1(header, usedforsecurity=False)
    digest.update(raw)
    return digest.digest()


def blob_id(content: bytes) -> str:
    """Its name for the bytes of a file, in hex."""
    return object_id(BLOB, content).hex()
