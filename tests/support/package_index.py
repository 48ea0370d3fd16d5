"""A package index and an npm registry of a test's own, and packages for them: every answer can be an attack."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path


class Index(http.server.ThreadingHTTPServer):
    """A simple index and an npm registry, over HTTP on this machine alone."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.asked: list[str] = []
        self.authorized: list[str] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add_python(self, filename: str, content: bytes) -> str:
        """Serve a file of a package. Its hash."""
        name = filename.partition("-")[0].replace("_", "-").lower()
        self.files[f"/simple/{name}/{filename}"] = content
        page = self.files.get(f"/simple/{name}/", b"") + f'<a href="{filename}">{filename}</a>\n'.encode()
        self.files[f"/simple/{name}/"] = page
        return f"sha256:{hashlib.sha256(content).hexdigest()}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Index  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if authorization := self.headers.get("Authorization"):
            self.server.authorized.append(authorization)
        if (elsewhere := self.server.redirects.get(self.path)) is not None:
            self.send_response(302)
            self.send_header("Location", elsewhere)
            self.end_headers()
            return
        content = self.server.files.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def wheel(name: str, files: Mapping[str, str], tag: str = "py3-none-any", version: str = "1.0") -> tuple[str, bytes]:
    packed, info = io.BytesIO(), f"{name}-{version}.dist-info"
    with zipfile.ZipFile(packed, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/METADATA"]))
    return f"{name}-{version}-{tag}.whl", packed.getvalue()


def tarball(top: str, files: Mapping[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path, content in files.items():
            info = tarfile.TarInfo(f"{top}/{path}")
            info.size = len(content.encode())
            archive.addfile(info, io.BytesIO(content.encode()))
    return packed.getvalue()


def npm_lock(project: Path, packages: Mapping[str, Mapping[str, object]]) -> None:
    own = json.loads((project / "package.json").read_text())
    content = {"name": own["name"], "version": "1.0.0", "lockfileVersion": 3, "requires": True}
    write(project, {"package-lock.json": json.dumps({**content, "packages": {"": own, **packages}})})
