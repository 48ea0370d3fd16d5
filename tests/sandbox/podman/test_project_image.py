"""The image of a project: what its locks name is fetched, checked and installed, and its tests run without a network.

An index and a registry of the test's own serve the packages, so that every answer of them can be an attack.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from command_line import ringfence_text, served_once
from package_index import Index, npm_lock, tarball, wheel, write
from podman_parts import PROJECT_LABEL, PodmanConnection, image_of, remembered_image

from ringfence_batch import Batch, BatchTask
from ringfence_batch.check import describe_stale_images
from ringfence_sandbox import PodmanSandbox, SandboxUnavailableError, build_project_image, describe_stale_image


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with Index() as served:
        monkeypatch.setenv("PIP_INDEX_URL", f"{served.url}/simple")
        monkeypatch.setenv("npm_config_registry", served.url)
        yield served
        served.shutdown()


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, podman: PodmanConnection, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is remembered, and which images are there, is of one test."""
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("CONTAINER_HOST", podman.url)
    yield
    label = f"{PROJECT_LABEL}={tmp_path / 'project'}"
    while images := podman.client.images.list(filters={"label": label}):  # one that others begin with goes after them
        for image in images:
            podman.client.images.remove(image.id, force=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    place.mkdir()
    return place


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


def test_a_python_project_with_a_compiled_wheel_runs_its_tests(project: Path, podman: PodmanConnection) -> None:
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
    lock(project, str(Path(sys.executable).with_name("uv")), "lock", "--quiet")
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
    return {
        "version": "1.0.0",
        "integrity": f"sha512-{digest}",
        "hasInstallScript": True,
        "bin": {"greet": "greet.js"},
        "deprecated": "use another",
    }


def greeting_lock(project: Path, entry: Mapping[str, object]) -> None:
    links = {"node_modules/own": {"resolved": "packages/own", "link": True}, "packages/own": {"version": "1.0.0"}}
    npm_lock(project, {"node_modules/@tiny/greeting": entry, **links})


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


def test_an_npm_project_runs_its_tests_and_a_source_is_built_in_the_container_alone(
    project: Path, index: Index, tmp_path: Path
) -> None:
    write(project, NPM)
    greeting_lock(project, add_greeting(index))
    stolen, content = tmp_path / "stolen", SETUP.format(port=index.server_port, host=str(tmp_path / "stolen"))
    about = "Metadata-Version: 2.1\nName: tiny_source\nVersion: 1.0\n"
    packed = tarball("tiny_source-1.0", {"setup.py": content, "PKG-INFO": about})
    digest = index.add_python("tiny_source-1.0.tar.gz", packed)
    write(project, {"requirements.txt": f"tiny-source==1.0 --hash={digest}\n"})
    before = sorted(project.rglob("*"))
    said = built(project)
    assert "fetched 1 of 1 npm packages, 0.0 MB" in said
    assert [line for line in said if "npm" in line and not re.match(r"fetch(ed|ing) ", line)] == []
    assert sorted(project.rglob("*")) == before
    assert not stolen.exists()
    run = run_in(
        project, "npm test > result.txt && python3 -c 'import tiny_source; print(tiny_source.reached)' > reached.txt"
    )
    assert run.returncode == 0, run
    result = (project / "result.txt").read_text()
    assert "hello, built here" in result
    assert "# pass 1" in result
    assert (project / "reached.txt").read_text() == "False\n"


@pytest.mark.prove
def test_an_install_script_that_needs_a_network_is_named(project: Path, index: Index) -> None:
    write(project, NPM)
    greeting_lock(project, add_greeting(index, f"node -e \"fetch('{index.url}/stolen').then(() => 0)\""))
    said = built(project)
    assert "note: an install script failed: it has no network here" in said
    assert "/stolen" not in index.asked


PYTHON = {"test_it.py": "import tiny_dep\n\ndef test_it():\n    assert tiny_dep.value == 1\n"}


WITHOUT_DEPENDENCIES = {
    "uv.lock": 'version = 1\nrequires-python = ">=3.9"\n[[package]]\nname = "tiny"\nversion = "1.0"\n'
    'source = { virtual = "." }\ndependencies = [{ name = "other", marker = "sys_platform == \'win32\'" }]\n',
    "requirements.txt": f"other==1.0 ; sys_platform == 'win32' --hash=sha256:{'0' * 64}\n",
    "requirements-empty.txt": "# nothing\n",
    ".devcontainer.json": "{}",
    "package-lock.json": '{"name": "tiny", "version": "1.0.0", "lockfileVersion": 3, "packages": {"": {}}}',
}


@pytest.mark.parametrize(
    "name",
    [
        "uv.lock",
        *(pytest.param(name, marks=pytest.mark.prove) for name in [*WITHOUT_DEPENDENCIES][1:]),
    ],
)
def test_a_project_that_installs_nothing_here_has_an_image(project: Path, index: Index, name: str) -> None:
    about = {
        "pyproject.toml": '[project]\nname = "tiny"\nversion = "1.0"\nscripts.tiny = "tiny:main"\n',
        "src/tiny.py": "def main():\n    print('tiny')\n",
    }
    python = "json" not in name
    write(project, {name: WITHOUT_DEPENDENCIES[name], **(about if python else {"package.json": "{}"})})
    built(project)
    assert index.asked == []
    command = "tiny && python3 -c 'import tiny; tiny.main()'" if python else "echo tiny; echo tiny"
    assert in_project(project, command) == "tiny\ntiny\n"


@pytest.mark.prove
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


# -- what is remembered


@pytest.mark.prove
def test_the_image_is_remembered_until_it_is_built_anew(project: Path, index: Index, podman: PodmanConnection) -> None:
    name, content = wheel("tiny_dep", {"tiny_dep.py": "value = 1\n"})
    digest = index.add_python(name, content)
    write(project, {**PYTHON, "requirements.txt": f"tiny-dep==1.0 --hash={digest}\n"})
    built(project)
    link = project.with_name("link")
    link.symlink_to(project)
    first = remembered_image(link)
    assert first is not None
    first_id = podman.client.images.get(first.image).id
    built(project)
    assert not podman.client.images.exists(first_id)
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


@pytest.mark.parametrize("name", ["uv.lock", "requirements.txt", "package-lock.json", ".devcontainer.json"])
def test_a_lock_without_an_image_is_named(project: Path, name: str) -> None:
    assert describe_stale_image(project) is None
    write(project, {name: WITHOUT_DEPENDENCIES[name], "pyproject.toml": ""})
    link = project.with_name("link")
    link.symlink_to(project)
    line = f"no image has what {name} of {project} names: `ringfence sandbox build {project}` builds one"
    assert describe_stale_image(link) == line


@pytest.mark.prove
def test_run_and_serve_name_a_lock_without_an_image(project: Path) -> None:
    write(project, {"uv.lock": WITHOUT_DEPENDENCIES["uv.lock"]})
    line = f"ringfence: no image has what uv.lock of {project} names: `ringfence sandbox build {project}` builds one"
    assert line in " ".join(run_in(project, "true").stderr.split())
    assert line in " ".join(served_once(project, "--workspace", "podman").stderr.decode().split())
    assert "no image has" not in run_in(project, "true", "--image", "localhost/ringfence-nothing:1").stderr


def test_without_a_lock_it_says_how_to_make_one(project: Path) -> None:
    write(project, {"requirements.txt": "tiny-dep==1.0\n"})
    done = ringfence_text("sandbox", "build", project)
    assert done.returncode == 4
    assert "no requirements.txt with hashes" in done.stderr
    said = " ".join(done.stderr.split())
    assert "`uv pip compile requirements.txt --generate-hashes -o requirements-lock.txt`" in said
    assert "pyproject.toml" not in said
    assert "npm" not in said.partition("Make a lock")[2]
    write(project, {"pyproject.toml": "", "package.json": "{}"})
    done = ringfence_text("sandbox", "build", project)
    assert "`uv lock`" in done.stderr
    assert "-o requirements.txt" not in done.stderr, "it would overwrite the user's own"
    assert "`npm install --package-lock-only`" in done.stderr


@pytest.mark.parametrize(
    ("name", "beside", "command"),
    [
        ("poetry.lock", "pyproject.toml", "`poetry export --all-extras --all-groups -o requirements-lock.txt`"),
        ("poetry.lock", "requirements.txt", "`poetry self add poetry-plugin-export`, then"),
        ("pdm.lock", "pyproject.toml", "`pdm export -G :all -o requirements-lock.txt`"),
        ("pnpm-lock.yaml", "package.json", "`rm -rf node_modules`, which npm misreads, then `npm install"),
        ("yarn.lock", "package.json", "Make a lock and build again: `npm install --package-lock-only`."),
    ],
)
def test_another_tool_s_lock_is_named_with_the_command_that_works(
    project: Path, name: str, beside: str, command: str
) -> None:
    write(project, {name: "", beside: "one\n"})
    with pytest.raises(SandboxUnavailableError) as refused:
        built(project)
    assert command in str(refused.value)
    assert "`uv" not in str(refused.value)


# -- devcontainers and Containerfiles


def test_a_devcontainer_is_honoured_as_far_as_it_goes(project: Path, podman: PodmanConnection) -> None:
    base = image_of(podman, "python")
    write(
        project,
        {
            "value": "1\n",
            ".dockerignore": "ignored\n",
            "ignored": "x\n",
            ".devcontainer/Containerfile": f"FROM {base}\nRUN echo made > /made\nCOPY . /copied\n",
            ".devcontainer/devcontainer.json": """{
                // a comment, with a "string" in it
                "name": "tiny", /* and
                another */ "build": {"dockerfile": "Containerfile", "context": "..", "target": "x"},
                "features": {"ghcr.io/x/y:1": {}}, "forwardPorts": [8000], "url": "not // a comment",
                "postCreateCommand": "cp value /from-value && touch written && curl --max-time 2 http://127.0.0.1:1",
            }""",
        },
    )
    said = built(project)
    assert "note: .devcontainer/devcontainer.json: not honoured: features, forwardPorts, url, build.target" in said
    assert any("note: postCreateCommand failed (exit code" in line for line in said)
    assert in_project(project, "cat /made /from-value && ls /copied") == "made\n1\nvalue\n"
    assert not (project / "written").exists()
    assert describe_stale_image(project) is None
    write(project, {".devcontainer/Containerfile": "FROM nothing\n"})
    assert ".devcontainer/Containerfile changed" in (describe_stale_image(project) or "")


@pytest.mark.prove
def test_an_image_has_nothing_that_is_hidden(project: Path, podman: PodmanConnection) -> None:
    base = image_of(podman, "python")
    command = "cp -a . /tried; ls -A | xargs > /seen"
    write(
        project,
        {
            ".env": "TOKEN=hidden-value\n",
            ".env.example": "TOKEN=\n",
            "deep/own.key": "-----BEGIN PRIVATE KEY-----\n",
            "Containerfile": f"FROM {base}\nCOPY . /copied\n",
            ".devcontainer.json": json.dumps(
                {"build": {"dockerfile": "Containerfile"}, "postCreateCommand": command},
            ),
        },
    )
    (project / "linked").hardlink_to(project / ".env")
    assert "note: not in the build, since hidden: .env, deep/own.key, linked" in built(project)
    seen = in_project(project, "grep -rl hidden-value /copied /tried; find /copied /tried -name '*.key'; cat /seen")
    assert ".env.example" in seen
    assert ".env " not in seen
    assert "/" not in seen


@pytest.mark.prove
def test_a_containerfile_can_be_named_and_has_no_network(project: Path, podman: PodmanConnection) -> None:
    base = image_of(podman, "python")
    write(project, {"Containerfile": f"FROM {base}\nRUN ls /sys/class/net > /made\n"})
    built(project, containerfile="Containerfile")
    assert in_project(project, "cat /made") == "lo\n"
    write(project, {"Containerfile": f"FROM {base}\nRUN echo told; false\n"})
    with pytest.raises(SandboxUnavailableError, match="built without a network") as refused:
        built(project, containerfile="Containerfile")
    assert "told" in str(refused.value)


@pytest.mark.prove
@pytest.mark.parametrize(
    "line",
    [
        "ADD {url} /made",
        "ARG U={url}\nadd $U /made",
        'ADD ["{escaped}", "/made"]',
        "AD\\\nD \\\n# why\n{url} /made",
        "# escape=`\nFROM {base}\nAD`\nD {url} /made",
        "ONBUILD ADD --chown=1 {url} /made",
    ],
)
def test_a_containerfile_fetches_nothing_from_the_network_of_the_host(
    project: Path, index: Index, podman: PodmanConnection, line: str
) -> None:
    base, url = image_of(podman, "python"), f"{index.url}/simple"
    head = "" if line.startswith("# escape") else "FROM {base}\n"
    text = (head + line + "\n").format(base=base, url=url, escaped=url.replace("/", r"\u002f"))
    write(project, {"Containerfile": text})
    with pytest.raises(SandboxUnavailableError, match="may fetch something"):
        built(project, containerfile="Containerfile")
    assert index.asked == []


@pytest.mark.prove
def test_a_wheel_with_paths_that_lead_out_changes_nothing_here(project: Path, index: Index, tmp_path: Path) -> None:
    name, content = wheel("tiny_dep", {f"../../../../../../..{tmp_path}/stolen": "x", "tiny_dep.py": "value = 1\n"})
    digest = index.add_python(name, content)
    write(project, {"requirements.txt": f"tiny-dep==1.0 --hash={digest}\n"})
    with pytest.raises(SandboxUnavailableError, match="cannot be built"):
        built(project)
    assert not (tmp_path / "stolen").exists()


def test_a_batch_uses_the_image_of_its_source_and_says_when_that_is_gone(
    project: Path, tmp_path: Path, podman: PodmanConnection
) -> None:
    base = image_of(podman, "python")
    write(project, {"Containerfile": f"FROM {base}\nRUN echo made > /made\n"})
    built(project, containerfile="Containerfile")
    (tmp_path / "m.jsonl").write_text('{"text": "Done."}\n')
    task = BatchTask("a", str(project), "x", f"script:{tmp_path}/m.jsonl", kind="podman", checks=("grep made /made",))
    batch = Batch([task], out=tmp_path / "out", retries=0)
    batch.run(jobs=1)
    result = batch.ledger.result("a")
    assert result is not None
    assert (result.outcome, result.cause) == ("done", "")
    assert describe_stale_images([task]) == []
    write(project, {"Containerfile": "FROM nothing\n"})
    assert "Containerfile changed" in describe_stale_images([task])[0]
    remembered = remembered_image(project)
    assert remembered is not None
    podman.client.images.remove(remembered.image, force=True)
    batch.ledger.requeue("a")
    batch.run(jobs=1)
    result = batch.ledger.result("a")
    assert result is not None
    assert result.outcome == "infra-failed"
    assert f"`ringfence sandbox build {project}`" in result.cause
