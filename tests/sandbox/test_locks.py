"""Locks: what they name is fetched for one Python or Node.js and checked. What leads elsewhere is refused.

No container is needed for that: nothing of a package runs.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from package_index import Index, npm_lock, tarball, wheel, write
from packaging.markers import default_environment
from packaging.tags import sys_tags

from ringfence_sandbox.project.fetching import Artefact, Fetcher, Registries, configured
from ringfence_sandbox.project.npm_lock import npm_project
from ringfence_sandbox.project.project_files import NPM_LOCK, UV_LOCK, LockError, locks
from ringfence_sandbox.project.python_locks import Pin, artefacts_of, own_packages, requirement_pins, uv_pins
from ringfence_sandbox.project.target import NodeTarget, PythonTarget

ENVIRONMENT = {name: str(value) for name, value in default_environment().items()}
PYTHON = PythonTarget([str(tag) for tag in sys_tags()], ENVIRONMENT, "https://index.invalid/simple")
NODE = NodeTarget("linux", "x64", "glibc", "https://registry.invalid/")


@pytest.fixture
def index() -> Iterator[Index]:
    with Index() as served:
        yield served
        served.shutdown()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    place.mkdir()
    return place


def pins_of(project: Path, target: PythonTarget = PYTHON) -> list[Pin]:
    names = locks(str(project))
    if names == [UV_LOCK]:
        return list(uv_pins(str(project), target)[0])
    return list(requirement_pins(str(project), names, target)[0])


def fetched(project: Path, index: Index) -> dict[str, bytes]:
    """The files that the project's lock names, by name; nothing else may be left in their directory."""
    registries = Registries(python=f"{index.url}/simple", npm=index.url)
    said: list[str] = []
    fetcher, place = Fetcher(registries, said.append), project.parent / "fetched"
    artefacts: list[Artefact]
    if locks(str(project)) == [NPM_LOCK]:
        artefacts = list(npm_project(str(project), NODE, registries).artefacts)
    else:
        artefacts = list(artefacts_of(pins_of(project), PYTHON, registries, fetcher))
    try:
        fetcher.fetch_all(artefacts, place, "packages")
    finally:
        found = {path.name: path.read_bytes() for path in place.glob("*")}
        assert set(found) <= {artefact.filename for artefact in artefacts}
    return found


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


NOTHING = f"sha256:{'0' * 64}"


# -- what is chosen


UV = """version = 1
requires-python = ">=3.9"
[[package]]
name = "app"
version = "1.0"
source = { virtual = "." }
dependencies = [
    { name = "one", extra = ["more"] },
    { name = "windows", marker = "sys_platform == 'win32'" },
    { name = "forked", version = "1.0", source = { registry = "x" }, marker = "python_full_version < '3.5'" },
    { name = "forked", version = "2.0", source = { registry = "x" }, marker = "python_full_version >= '3.5'" },
    { name = "member" },
]
[package.optional-dependencies]
extra = [{ name = "of-extra" }]
[package.dev-dependencies]
dev = [{ name = "of-dev" }]
lint = [{ name = "of-lint" }]
[[package]]
name = "one"
version = "1.0"
source = { registry = "x" }
dependencies = [{ name = "below" }]
[package.optional-dependencies]
more = [{ name = "of-more" }, { name = "one" }]
[[package]]
name = "forked"
version = "1.0"
source = { registry = "x" }
[[package]]
name = "forked"
version = "2.0"
source = { registry = "x" }
[[package]]
name = "member"
version = "0.1"
source = { editable = "packages/member" }
dependencies = [{ name = "of-member" }]
"""
PACKAGES = ("windows", "of-extra", "of-dev", "of-lint", "below", "of-more", "of-member")


def uv_lock(head: str = "") -> str:
    packages = (f'[[package]]\nname = "{name}"\nversion = "1.0"\nsource = {{ registry = "x" }}\n' for name in PACKAGES)
    return head + UV + "".join(packages)


def test_of_a_uv_lock_all_that_holds_here_is_installed(project: Path) -> None:
    write(project, {"uv.lock": uv_lock()})
    pins, own = uv_pins(str(project), PYTHON)
    assert sorted(map(str, pins)) == [
        "below 1.0",
        "forked 2.0",
        "of-dev 1.0",
        "of-extra 1.0",
        "of-lint 1.0",
        "of-member 1.0",
        "of-more 1.0",
        "one 1.0",
    ]
    assert own == ["", "packages/member"]


def test_of_a_uv_lock_with_conflicts_what_can_be_together_is_installed(project: Path) -> None:
    write(project, {"uv.lock": uv_lock('conflicts = [[{ package = "app", extra = "extra" }]]\n')})
    assert {"of-dev 1.0", "of-extra 1.0", "of-lint 1.0"} & set(map(str, pins_of(project))) == {"of-dev 1.0"}


@pytest.mark.parametrize(
    ("needed", "advice"),
    [
        (">=3.12", "`podman pull {}:3.13-slim`, then `ringfence sandbox build DIR --image {}:3.13-slim`"),
        (">=3.10, <3.13", "`podman pull {}:3.12-slim`"),
        ("==3.10.*", "`podman pull {}:3.10-slim`"),
        (">=4.0", "`ringfence sandbox build DIR --image NAME`"),
    ],
)
def test_a_uv_lock_for_another_python_is_refused_with_an_image_that_has_it(
    project: Path, needed: str, advice: str
) -> None:
    other = replace(PYTHON, environment={**ENVIRONMENT, "python_full_version": "3.9.2"})
    write(project, {"uv.lock": uv_lock().replace(">=3.9", needed)})
    with pytest.raises(LockError) as refused:
        pins_of(project, other)
    assert str(refused.value).startswith(f"uv.lock is for Python {needed}, and the image has Python 3.9.2")
    assert advice.format(*["docker.io/library/python"] * 2) in str(refused.value)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"requirements.txt": ""}, ["requirements.txt"]),
        ({"requirements.txt": "# made by a tool\n\n  # with nothing\n"}, ["requirements.txt"]),
        ({"requirements.txt": "# nothing\n", "requirements-dev.txt": "one\n"}, []),
        ({"requirements.txt": "# nothing\n", "requirements-dev.txt": "a==1 --hash=x\n"}, ["requirements-dev.txt"]),
        ({"requirements.txt": "# nothing\n", "uv.lock": ""}, ["uv.lock"]),
        ({"requirements.txt": "one\n"}, []),
        ({"requirements.txt": "-e .\n"}, []),
    ],
)
def test_requirements_that_name_nothing_are_a_lock(project: Path, files: Mapping[str, str], found: list[str]) -> None:
    write(project, files)
    assert list(locks(str(project))) == found


def test_the_best_wheel_is_chosen_and_a_source_where_there_is_none(project: Path, index: Index) -> None:
    files = {
        "any": wheel("two", {}),
        "best": wheel("two", {}, PYTHON.tags[0]),
        "other": wheel("two", {}, "cp27-none-win32"),
    }
    hashes = [index.add_python(*file) for file in files.values()]
    source = index.add_python("three-1.0.tar.gz", b"three")
    lines = [f"two==1.0 {' '.join(f'--hash={one}' for one in hashes)}", f"three==1.0 --hash={source}"]
    write(project, {"requirements.txt": "\n".join(lines)})
    assert fetched(project, index) == {files["best"][0]: files["best"][1], "three-1.0.tar.gz": b"three"}


def test_of_npm_packages_for_other_platforms_are_left_out(project: Path, index: Index) -> None:
    packages = {
        "linux": {"optional": True, "os": ["linux"], "cpu": ["x64"], "libc": ["glibc"]},
        "musl": {"optional": True, "libc": ["musl"]},
        "not-linux": {"optional": True, "os": ["!linux"]},
        "not-windows": {"optional": True, "os": ["!win32"]},
        "bundled": {"inBundle": True},
    }
    entries: dict[str, dict[str, object]] = {}
    for name, about in packages.items():
        content = tarball("package", {"package.json": json.dumps({"name": name, "version": "1.0.0"})})
        index.files[f"/{name}/-/{name}-1.0.0.tgz"] = content
        digest = base64.b64encode(hashlib.sha512(content).digest()).decode()
        entries[f"node_modules/{name}"] = {"version": "1.0.0", "integrity": f"sha512-{digest}", **about}
    write(project, {"package.json": '{"name": "app", "version": "1.0.0"}'})
    npm_lock(project, entries)
    fetched(project, index)
    assert sorted(index.asked) == ["/linux/-/linux-1.0.0.tgz", "/not-windows/-/not-windows-1.0.0.tgz"]


def test_what_a_user_configured_is_read_and_what_the_project_says_is_not(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            ".config/pip/pip.conf": "[global]\nindex-url = https://user:word@mirror.invalid/simple/\n",
            ".npmrc": "audit=false\nregistry = https://npm.invalid/\n@own:registry=https://own.invalid/x/\n",
            "pip.conf": "[global]\nextra-index-url = file:///etc https://extra.invalid/simple\ncert = /x\n",
        },
    )
    found = configured({"HOME": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")})
    main, extra = "https://user:word@mirror.invalid/simple", "https://extra.invalid/simple"
    assert (found.python, found.python_extra) == (main, [extra])
    assert found.npm == "https://npm.invalid"
    assert configured({"HOME": str(tmp_path), "PIP_INDEX_URL": "https://other.invalid/s"}).python.startswith(
        "https://other"
    )


def test_a_password_is_sent_and_not_shown(project: Path, index: Index) -> None:
    with_password = index.url.replace("//", "//user:word@")
    fetcher = Fetcher(Registries(python=with_password), lambda line: None)
    with pytest.raises(LockError) as refused:
        fetcher.fetch_all([Artefact("x 1", frozenset([NOTHING]), [f"{with_password}/x"], "x")], project, "packages")
    assert "word" not in str(refused.value)
    assert index.authorized == [f"Basic {base64.b64encode(b'user:word').decode()}"]


@pytest.mark.parametrize(
    ("files", "paths"),
    [
        ({}, ["/workspace"]),
        ({"src/x.py": ""}, ["/workspace/src"]),
        ({"pyproject.toml": "not toml ["}, ["/workspace"]),
        ({"pyproject.toml": '[project]\nname = "../x"\n'}, ["/workspace"]),
    ],
)
def test_a_projects_own_packages_are_found_in_the_workspace(
    project: Path, files: Mapping[str, str], paths: list[str]
) -> None:
    write(project, files)
    found = own_packages(str(project), [""])
    assert found["site/ringfence_workspace.pth"].splitlines() == paths
    assert list(found) == ["site/ringfence_workspace.pth"]


def test_metadata_of_a_project_is_what_its_names_allow(project: Path) -> None:
    text = """[project]
name = "My.App"
version = "1.0"
scripts = { good = "a.b:c.d", "../evil" = "a:b", ".." = "a:b", code = "os; import os:x", lines = "a:b\\nimport os" }
"""
    write(project, {"pyproject.toml": text, "packages/one/pyproject.toml": '[project]\nname = "one"\nversion = "2"\n'})
    found = own_packages(str(project), ["", "packages/one"])
    assert sorted(name for name in found if "METADATA" in name or "scripts/" in name) == [
        "scripts/good",
        "site/my_app-1.0.dist-info/METADATA",
        "site/one-2.dist-info/METADATA",
    ]
    assert found["site/my_app-1.0.dist-info/entry_points.txt"] == "[console_scripts]\ngood = a.b:c.d\n.. = a:b\n"
    assert "from a.b import c\n" in found["scripts/good"]
    assert found["site/ringfence_workspace.pth"].splitlines() == ["/workspace", "/workspace/packages/one"]


# -- attacks


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
    with pytest.raises(LockError, match=message):
        fetched(project, index)


ONE_PACKAGE = """version = 1
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
        ({"digest": NOTHING}, "which the lock does not name"),
        ({"digest": "md5:" + "0" * 32}, "no hash that is known"),
        ({"name": "../tiny-dep"}, "uv.lock is malformed"),
        ({"own": "../other"}, "not a path inside of the project"),
        ({"own": "/etc"}, "not a path inside of the project"),
        ({"source": {"git": "https://example.invalid/x"}}, "only files of an index or at a URL"),
        ({"url": "file:///tmp/tiny_dep-1.0-py3-none-any.whl"}, "only https is fetched"),
        ({"url": "http://127.0.0.2:1/tiny_dep-1.0-py3-none-any.whl"}, "only https is fetched"),
        ({"url": "https://127.0.0.2:1/a b/tiny_dep-1.0-py3-none-any.whl"}, "cannot be fetched: "),
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
    write(
        project, {"uv.lock": ONE_PACKAGE.format(**{key: toml(value) for key, value in {**values, **changed}.items()})}
    )
    with pytest.raises(LockError, match=message):
        fetched(project, index)


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
    content = tarball("package", {"package.json": "{}"})
    index.files["/x/-/x-1.0.0.tgz"] = content
    digest = base64.b64encode(hashlib.sha512(content).digest()).decode()
    entry = {"version": "1.0.0", "integrity": f"sha512-{digest}", **changed}
    write(project, {"package.json": '{"name": "app", "version": "1.0.0"}'})
    npm_lock(project, {"node_modules/x": {key: value for key, value in entry.items() if value is not None}})
    with pytest.raises(LockError, match=message):
        fetched(project, index)


@pytest.mark.parametrize("place", ["../outside", "node_modules/../../outside", "/etc"])
def test_an_npm_lock_has_no_place_outside(project: Path, index: Index, place: str) -> None:
    write(project, {"package.json": '{"name": "app", "version": "1.0.0"}'})
    npm_lock(project, {place: {"version": "1.0.0", "integrity": "sha512-AA=="}})
    with pytest.raises(LockError, match="not a path inside of the project"):
        fetched(project, index)


def test_a_lock_that_is_a_link_is_not_followed(project: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("secret --hash=\n")
    (project / "uv.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LockError, match="Symbolic links are not followed"):
        pins_of(project)


def test_an_index_that_answers_without_end_is_cut_off(
    project: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence_sandbox.project.fetching._MOST_INDEX_BYTES", 1 << 20)
    index.files["/simple/tiny-dep/"] = b"<a>" * (1 << 20)
    write(project, {"requirements.txt": f"tiny-dep==1.0 --hash=sha256:{'0' * 64}\n"})
    with pytest.raises(LockError, match="its answer has more than 1 MiB"):
        fetched(project, index)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "http://127.0.0.2:1/simple/tiny-dep/", "ftp://127.0.0.2/"])
def test_a_redirect_leads_nowhere_that_a_lock_may_not(project: Path, index: Index, target: str) -> None:
    index.redirects["/simple/tiny-dep/"] = target
    write(project, {"requirements.txt": f"tiny-dep==1.0 --hash={NOTHING}\n"})
    with pytest.raises(LockError, match="only https is fetched|is not allowed"):
        fetched(project, index)
