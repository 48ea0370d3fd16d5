"""The image of a project: what its locks name is fetched, checked and installed, and its tests run without a network.

An index and a registry of the test's own serve the packages, so that every answer of them can be an attack.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import json
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from command_line import ringfence_text, served_once

from ringfence_sandbox import PodmanSandbox, SandboxUnavailableError, build_project_image, describe_stale_image
from ringfence_sandbox.container.podman_connection import Connection
from ringfence_sandbox.project.project_image import remembered_image


class Index(http.server.ThreadingHTTPServer):
    """A simple index and an npm registry, over HTTP on this machine alone."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

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
        content = self.server.files.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with Index() as served:
        monkeypatch.setenv("PIP_INDEX_URL", f"{served.url}/simple")
        monkeypatch.setenv("npm_config_registry", served.url)
        yield served
        served.shutdown()


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, podman: Connection, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is remembered, and which images are there, is of one test."""
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("CONTAINER_HOST", podman.url)
    yield
    for record in (tmp_path / "state/images").glob("*.json"):
        image = json.loads(record.read_bytes())["image"]
        if podman.client.images.exists(image):
            podman.client.images.remove(image)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    place.mkdir()
    return place


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


def built(project: Path, **options: str) -> list[str]:
    """Build, and what was said meanwhile."""
    said: list[str] = []
    build_project_image(project, progress=said.append, **options)  # pyright: ignore[reportArgumentType]
    return said


def in_project(project: Path, command: str) -> str:
    """What a command in the project's container prints, if it ends well."""
    with PodmanSandbox(project) as sandbox:
        done = sandbox.run(command, timeout_seconds=60)
    assert done.exit_code == 0, done
    return done.stdout


# -- what works


def test_a_python_project_with_a_compiled_wheel_runs_its_tests(project: Path, podman: Connection) -> None:
    # From the index that pip has here, as a user's lock has it: compiled packages come from nowhere else.
    write(
        project,
        {
            "pyproject.toml": '[project]\nname = "tiny-app"\nversion = "0.3.0"\nrequires-python = ">=3.11"\n'
            'dependencies = ["markupsafe>=2.1"]\n[project.scripts]\ntiny = "tiny:main"\n'
            '[dependency-groups]\ndev = ["pytest>=8", "colorama; sys_platform == \'win32\'"]\n',
            "src/tiny.py": "from markupsafe import _speedups, escape\n\ndef main():\n    print(escape('<tiny>'))\n",
            "tests/test_tiny.py": "import importlib.metadata\nimport tiny\n\ndef test_tiny(capsys):\n    tiny.main()\n"
            "    assert capsys.readouterr().out == '&lt;tiny&gt;\\n'\n"
            "    assert importlib.metadata.version('tiny-app') == '0.3.0'\n"
            "    assert tiny._speedups.__file__.endswith('.so')\n",
        },
    )
    lock(project, "uv", "lock", "--quiet")
    done = ringfence_text("sandbox", "build", project)
    assert done.returncode == 0, done
    assert done.stdout.startswith("localhost/ringfence-project:")
    assert "fetched " in done.stderr
    assert "Python packages" in done.stderr
    command = "tiny && python3 -m pytest -q && pytest -q -p no:cacheprovider > result.txt"
    assert run_in(project, command).returncode == 0
    assert "1 passed" in (project / "result.txt").read_text()
    labels = podman.client.images.get(done.stdout.strip()).labels
    assert labels["io.ringfence.project"] == str(project)


def lock(project: Path, *command: str) -> None:
    subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=120)


def run_in(project: Path, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A run whose agent calls one command."""
    script = project.parent / "script.jsonl"
    call = {"name": "shell_execute", "arguments": {"command": command}}
    script.write_text(f"{json.dumps({'tool_calls': [call]})}\n{json.dumps({'text': 'done'})}\n")
    model = ("--model", f"script:{script}", "--task", "test")
    return ringfence_text("run", project, "--workspace", "podman", *model, *options)


NPM = {
    "package.json": json.dumps(
        {
            "name": "tiny",
            "version": "1.0.0",
            "scripts": {"test": "greet && node --test"},
            "dependencies": {"@tiny/greeting": "1.0.0"},
            "workspaces": ["packages/*"],
        }
    ),
    "packages/own/package.json": json.dumps({"name": "own", "version": "1.0.0"}),
    "packages/own/index.js": "module.exports = 'the workspace';\n",
    "tiny.test.js": "const assert = require('node:assert');\n"
    "require('node:test')('greets', () => {\n"
    "  assert.equal(require('@tiny/greeting'), 'hello, built here');\n"
    "  assert.equal(require('own'), 'the workspace');\n"
    "});\n",
}


def npm_lock(project: Path, packages: Mapping[str, Mapping[str, object]]) -> None:
    own = json.loads((project / "package.json").read_text())
    content = {"name": own["name"], "version": "1.0.0", "lockfileVersion": 3, "requires": True}
    write(project, {"package-lock.json": json.dumps({**content, "packages": {"": own, **packages}})})


def add_greeting(index: Index, install: str = "node build.js") -> dict[str, object]:
    """Serve a package with a program and an install script; its entry in a lock."""
    about = {
        "name": "@tiny/greeting",
        "version": "1.0.0",
        "bin": {"greet": "greet.js"},
        "scripts": {"install": install},
    }
    content = tarball(
        "package",
        {
            "package.json": json.dumps(about),
            "build.js": "require('fs').writeFileSync('built.js', 'module.exports = \"built here\"');\n",
            "index.js": "module.exports = 'hello, ' + require('./built.js');\n",
            "greet.js": "#!/usr/bin/env node\nconsole.log(require('./index.js'));\n",
        },
    )
    index.files["/@tiny/greeting/-/greeting-1.0.0.tgz"] = content
    digest = base64.b64encode(hashlib.sha512(content).digest()).decode()
    return {"version": "1.0.0", "integrity": f"sha512-{digest}", "hasInstallScript": True, "bin": {"greet": "greet.js"}}


def greeting_lock(project: Path, entry: Mapping[str, object]) -> None:
    links = {"node_modules/own": {"resolved": "packages/own", "link": True}, "packages/own": {"version": "1.0.0"}}
    npm_lock(project, {"node_modules/@tiny/greeting": entry, **links})


def test_an_npm_project_runs_its_tests(project: Path, index: Index) -> None:
    write(project, NPM)
    greeting_lock(project, add_greeting(index))
    assert "fetched 1 of 1 npm packages, 0.0 MB" in built(project)
    assert "# pass 1" in in_project(project, "npm test")
    assert not (project / "node_modules").exists()
    run = run_in(project, "npm test > result.txt")
    assert run.returncode == 0, run
    assert "hello, built here" in (project / "result.txt").read_text()


def test_an_install_script_that_needs_a_network_is_named(project: Path, index: Index) -> None:
    write(project, NPM)
    greeting_lock(project, add_greeting(index, f"node -e \"fetch('{index.url}/stolen').then(() => 0)\""))
    said = built(project)
    assert "note: an install script failed: it has no network here" in said
    assert "/stolen" not in index.asked


PYTHON = {"test_it.py": "import tiny_dep\n\ndef test_it():\n    assert tiny_dep.value == 1\n"}


def test_requirements_with_hashes_are_installed(project: Path, index: Index) -> None:
    name, content = wheel("tiny_dep", {"tiny_dep.py": "value = 1\n"})
    wrong, _ = wheel("tiny_dep", {}, "cp27-cp27m-win32")
    digest, other = index.add_python(name, content), index.add_python(wrong, b"not for this Python")
    write(
        project,
        {
            **PYTHON,
            "requirements.txt": "# made by a tool\n--index-url https://example.invalid/simple\n"
            f"tiny-dep==1.0 ; python_version >= '3' \\\n    --hash={digest} \\\n    --hash={other}\n    # via nobody\n"
            f"nothing==2 ; sys_platform == 'win32' --hash={digest}\n",
        },
    )
    said = built(project)
    assert "note: requirements.txt: --index-url is not honoured" in said
    assert "1 passed" in in_project(project, "python3 -m pytest -q")
    assert index.asked == ["/simple/tiny-dep/", f"/simple/tiny-dep/{name}"]


SETUP = """
import pathlib, setuptools, socket
try: socket.create_connection(("127.0.0.1", {port}), 2).close(); reached = True
except OSError: reached = False
for place in ({host!r}, "/workspace/written", "/etc/written"):
    try: pathlib.Path(place).parent.mkdir(parents=True, exist_ok=True); pathlib.Path(place).write_text("x")
    except OSError: pass
pathlib.Path("tiny_source.py").write_text(f"reached = {{reached}}\\n")
setuptools.setup(name="tiny_source", version="1.0", py_modules=["tiny_source"])
"""


def test_a_source_is_built_in_the_container_alone(project: Path, index: Index, tmp_path: Path) -> None:
    stolen = tmp_path / "stolen"
    content = tarball(
        "tiny_source-1.0",
        {
            "setup.py": SETUP.format(port=index.server_port, host=str(stolen)),
            "PKG-INFO": "Metadata-Version: 2.1\nName: tiny_source\nVersion: 1.0\n",
        },
    )
    digest = index.add_python("tiny_source-1.0.tar.gz", content)
    write(project, {"requirements.txt": f"tiny-source==1.0 --hash={digest}\n"})
    built(project)
    assert in_project(project, "python3 -c 'import tiny_source; print(tiny_source.reached)'") == "False\n"
    assert not stolen.exists()
    assert sorted(path.name for path in project.iterdir()) == ["requirements.txt"]


# -- what is remembered


def test_the_image_is_remembered_until_it_is_built_anew(project: Path, index: Index, podman: Connection) -> None:
    name, content = wheel("tiny_dep", {"tiny_dep.py": "value = 1\n"})
    digest = index.add_python(name, content)
    write(project, {**PYTHON, "requirements.txt": f"tiny-dep==1.0 --hash={digest}\n"})
    built(project)
    link = project.with_name("link")
    link.symlink_to(project)
    first = remembered_image(link)
    assert first is not None
    assert describe_stale_image(link) is None
    other = wheel("tiny_dep", {"tiny_dep.py": "value = 2\n"}, version="2.0")
    write(project, {"requirements.txt": f"tiny-dep==2.0 --hash={index.add_python(*other)}\n"})
    stale = run_in(link, "python3 -m pytest -q")
    assert stale.returncode == 0
    assert "requirements.txt changed since the image of" in stale.stderr
    assert f"`ringfence sandbox build {project}` builds it anew" in stale.stderr
    served = served_once(link, "--workspace", "podman")
    assert b"changed since the image of" in served.stderr
    assert b'"isError":true' not in served.stdout
    named = run_in(project, "python3 -c 'import tiny_dep'", "--image", "localhost/ringfence-nothing:1")
    assert (named.returncode, "changed since" in named.stderr) == (4, False)
    built(link)
    second = remembered_image(project)
    assert second is not None
    assert not podman.client.images.exists(first.image)
    assert in_project(project, "python3 -c 'import tiny_dep; print(tiny_dep.value)'") == "2\n"
    podman.client.images.remove(second.image)
    gone = run_in(project, "true")
    assert gone.returncode == 4
    assert f"is gone: `ringfence sandbox build {project}`" in gone.stderr


def test_without_a_lock_it_says_how_to_make_one(project: Path) -> None:
    write(project, {"requirements.txt": "tiny-dep==1.0\n"})
    done = ringfence_text("sandbox", "build", project)
    assert done.returncode == 4
    assert "no requirements.txt with hashes" in done.stderr
    assert "`uv lock`" in done.stderr
    assert "`npm install --package-lock-only`" in done.stderr


# -- devcontainers and Containerfiles


def test_a_devcontainer_is_honoured_as_far_as_it_goes(project: Path, podman: Connection) -> None:
    base = next(
        tag
        for tag in podman.client.images.list()
        for tag in tag.tags
        if "ringfence-python" in tag and "base" not in tag
    )
    write(
        project,
        {
            "value": "1\n",
            ".dockerignore": "ignored\n",
            "ignored": "x\n",
            ".devcontainer/Containerfile": "ARG BASE\nFROM ${BASE}\nRUN echo made > /made\nCOPY . /copied\n",
            ".devcontainer/devcontainer.json": f"""{{
                // a comment, with a "string" in it
                "name": "tiny", /* and
                another */ "build": {{"dockerfile": "Containerfile", "context": "..", "args": {{"BASE": "{base}"}},}},
                "features": {{"ghcr.io/x/y:1": {{}}}}, "forwardPorts": [8000], "url": "not // a comment",
                "postCreateCommand": "cp value /from-value && touch written && curl --max-time 2 http://127.0.0.1:1",
            }}""",
        },
    )
    said = built(project)
    assert "note: .devcontainer/devcontainer.json: not honoured: features, forwardPorts, url" in said
    assert any("note: postCreateCommand failed (exit code" in line for line in said)
    assert in_project(project, "cat /made /from-value && ls /copied") == "made\n1\nvalue\n"
    assert not (project / "written").exists()
    assert describe_stale_image(project) is None
    write(project, {".devcontainer/Containerfile": "FROM nothing\n"})
    assert ".devcontainer/Containerfile changed" in (describe_stale_image(project) or "")


def test_a_containerfile_can_be_named_and_has_no_network(project: Path, podman: Connection) -> None:
    base = next(
        tag
        for tag in podman.client.images.list()
        for tag in tag.tags
        if "ringfence-python" in tag and "base" not in tag
    )
    write(project, {"Containerfile": f"FROM {base}\nRUN echo made > /made\n"})
    built(project, containerfile="Containerfile")
    assert in_project(project, "cat /made") == "made\n"
    write(project, {"Containerfile": f"FROM {base}\nRUN cat /sys/class/net/*/address; echo told; false\n"})
    with pytest.raises(SandboxUnavailableError, match="built without a network") as refused:
        built(project, containerfile="Containerfile")
    assert "told" in str(refused.value)
    assert "00:00:00:00:00:00\n" in str(refused.value)


# -- attacks on what is fetched


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        ("tiny-dep==1.0 --hash=sha256:" + "0" * 64, "which the lock does not name"),
        ("tiny-dep==1.0", "no hash"),
        ("../../etc/passwd==1.0 --hash=sha256:" + "0" * 64, "requirements.txt: "),
        ("tiny-dep @ file:///etc/passwd --hash=sha256:" + "0" * 64, "neither a wheel"),
        ("tiny-dep @ file:///tmp/tiny_dep-1.0-py3-none-any.whl --hash=sha256:" + "0" * 64, "only https is fetched"),
        (
            "tiny-dep @ http://127.0.0.2:1/tiny_dep-1.0-py3-none-any.whl --hash=sha256:" + "0" * 64,
            "only https is fetched",
        ),
        ("-r ../requirements.txt", "no file of hashes beside it"),
        ("tiny-dep>=1.0 --hash=sha256:" + "0" * 64, "it names no version"),
        ("tiny-dep==1.0 --hash=md5:" + "0" * 32, "no hash that is known"),
    ],
)
def test_requirements_that_are_no_lock_are_refused(project: Path, index: Index, requirement: str, message: str) -> None:
    index.add_python(*wheel("tiny_dep", {"tiny_dep.py": "value = 1\n"}))
    write(project, {"requirements.txt": f"{requirement}\n# --hash=\n"})
    with pytest.raises(SandboxUnavailableError, match=message):
        built(project)
    assert remembered_image(project) is None


UV_LOCK = """version = 1
requires-python = ">=3.9"
[[package]]
name = "tiny"
version = "1.0"
source = {{ editable = {own} }}
dependencies = [{{ name = {name} }}]
[[package]]
name = {name}
version = "1.0"
source = {source}
wheels = [{{ url = {url}, hash = {digest} }}]
"""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"digest": "sha256:" + "0" * 64}, "which the lock does not name"),
        ({"digest": "md5:" + "0" * 32}, "no hash that is known"),
        ({"name": "../tiny-dep"}, "uv.lock is malformed"),
        ({"own": "../other"}, "not a path inside of the project"),
        ({"own": "/etc"}, "not a path inside of the project"),
        ({"source": {"git": "https://example.invalid/x"}}, "only files of an index or at a URL"),
        ({"url": "file:///tmp/tiny_dep-1.0-py3-none-any.whl"}, "only https is fetched"),
        ({"url": "http://127.0.0.2:1/tiny_dep-1.0-py3-none-any.whl"}, "only https is fetched"),
        ({"url": "http://127.0.0.2:1/..%2F..%2Ftiny_dep-1.0-py3-none-any.whl"}, "neither a wheel"),
    ],
)
def test_a_lock_that_leads_elsewhere_is_refused(
    project: Path, index: Index, changed: Mapping[str, object], message: str
) -> None:
    name, content = wheel("tiny_dep", {"tiny_dep.py": "value = 1\n"})
    index.files[f"/{name}"] = content
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    usual = {"own": ".", "name": "tiny-dep", "url": f"{index.url}/{name}", "source": {"url": f"{index.url}/{name}"}}
    values = {**usual, "digest": digest}
    write(project, {"uv.lock": UV_LOCK.format(**{key: toml(value) for key, value in {**values, **changed}.items()})})
    with pytest.raises(SandboxUnavailableError, match=message):
        built(project)
    assert remembered_image(project) is None


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + "}"  # pyright: ignore[reportUnknownVariableType]
    return json.dumps(value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"integrity": "sha512-" + "A" * 86 + "=="}, "which the lock does not name"),
        ({"integrity": None}, "has no hash"),
        ({"resolved": "git+ssh://git@example.invalid/x.git#1"}, "only files of a registry are fetched"),
        ({"resolved": "file:../../etc/passwd"}, "only files of a registry are fetched"),
        ({"resolved": "http://127.0.0.2:1/x.tgz"}, "only https is fetched"),
        ({"name": "../../etc"}, "no package of a registry"),
        ({"version": "1.0.0/../../x"}, "no package of a registry"),
    ],
)
def test_an_npm_lock_that_leads_elsewhere_is_refused(
    project: Path, index: Index, changed: Mapping[str, object], message: str
) -> None:
    write(project, NPM)
    entry = {**add_greeting(index), **changed}
    greeting_lock(project, {key: value for key, value in entry.items() if value is not None})
    with pytest.raises(SandboxUnavailableError, match=message):
        built(project)


@pytest.mark.parametrize("place", ["../outside", "node_modules/../../outside", "/etc"])
def test_an_npm_lock_has_no_place_outside(project: Path, index: Index, place: str) -> None:
    write(project, NPM)
    npm_lock(project, {place: add_greeting(index)})
    with pytest.raises(SandboxUnavailableError, match="not a path inside of the project"):
        built(project)


def test_a_lock_that_is_a_link_is_not_followed(project: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("secret --hash=\n")
    (project / "uv.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SandboxUnavailableError, match="Symbolic links are not followed"):
        built(project)


def test_an_index_that_answers_without_end_is_cut_off(
    project: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence_sandbox.project.artefacts._MOST_INDEX_BYTES", 1 << 20)
    index.files["/simple/tiny-dep/"] = b"<a>" * (1 << 20)
    write(project, {"requirements.txt": f"tiny-dep==1.0 --hash=sha256:{'0' * 64}\n"})
    with pytest.raises(SandboxUnavailableError, match="its answer has more than 1 MiB"):
        built(project)


def test_a_wheel_with_paths_that_lead_out_changes_nothing_here(project: Path, index: Index, tmp_path: Path) -> None:
    name, content = wheel("tiny_dep", {f"../../../../../../..{tmp_path}/stolen": "x", "tiny_dep.py": "value = 1\n"})
    digest = index.add_python(name, content)
    write(project, {"requirements.txt": f"tiny-dep==1.0 --hash={digest}\n"})
    with pytest.raises(SandboxUnavailableError, match="cannot be built"):
        built(project)
    assert not (tmp_path / "stolen").exists()
