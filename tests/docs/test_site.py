"""What the site is built from has each page, and a dead link or something loaded from elsewhere fails its build."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from pages import DOCS, PROJECT


def site(step: str, place: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PROJECT / "docs" / "site.py", step, place]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_each_page_is_in_the_navigation_and_in_the_text_for_models(tmp_path: Path) -> None:
    assert site("prepare", tmp_path).returncode == 0
    written = {path.relative_to(PROJECT).as_posix() for path in DOCS.rglob("*.md")} - {"docs/index.md"}
    for_models = (tmp_path / "pages" / "llms.txt").read_text()
    assert written - set(re.findall(r"\]\(([^)]+)\): \S", for_models)) == set()
    configuration = (tmp_path / "zensical.toml").read_text()
    assert written - set(re.findall(r'"([\w/.-]+\.md)"', configuration)) == set()
    project = tomllib.loads(configuration)["project"]
    assert project["theme"]["font"] is False
    assert all((tmp_path / "pages" / path).is_file() for path in written)


def built(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Finish a site whose first page, and whose text for models, have this body."""
    for folder in ("pages", "site", "site/other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pages" / "index.md").write_text("# One\n")
    (tmp_path / "site" / "index.html").write_text(f'<html><h1 id="one">One</h1>{body}</html>')
    (tmp_path / "site" / "other" / "index.html").write_text('<html><h1 id="two">Two</h1></html>')
    (tmp_path / "site" / "llms.txt").write_text("- [One](index.md): it is one.\n")
    return site("finish", tmp_path)


def test_a_site_whose_links_lead_somewhere_gets_the_markdown_of_its_pages(tmp_path: Path) -> None:
    links = '<a href="other/#two"></a><a href="#one"></a><a href="https://elsewhere"></a><a href="/index.html"></a>'
    done = built(tmp_path, links)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "site" / "index.md").read_text() == "# One\n"


def test_a_dead_link_and_a_script_from_elsewhere_are_named(tmp_path: Path) -> None:
    links = '<a href="gone/"></a><a href="other/#three"></a><script src="https://elsewhere/x.js"></script>'
    done = built(tmp_path, f'{links}<link rel="stylesheet" href="//elsewhere/x.css"><img src="gone.png">')
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "index.html loads //elsewhere/x.css",
        "index.html loads https://elsewhere/x.js",
        "index.html: gone.png leads nowhere",
        "index.html: gone/ leads nowhere",
        "index.html: other/#three names nothing there",
    ]
