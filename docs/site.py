"""The site of the pages: `make site` builds it in build/site from the pages as they are, with zensical.

`site.py prepare DIR` writes DIR/pages, llms.txt among them, and the configuration. After zensical has run there,
`site.py finish DIR` puts the Markdown of each page beside it. It ends with 1 if a link leads nowhere or a page loads
anything from elsewhere.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

PROJECT = Path(__file__).resolve().parents[1]
ROOT_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE")
FOLDERS = ("docs", "examples")
NOT_PUBLISHED = shutil.ignore_patterns("__pycache__", "site.py", "generate.py", "run_picture.py")
EXTENSIONS = (
    "admonition",
    "attr_list",
    "tables",
    "pymdownx.highlight",
    "pymdownx.inlinehilite",
    "pymdownx.superfences",
)
FEATURES = ("navigation.indexes", "navigation.footer", "navigation.sections", "navigation.top", "content.code.copy")
LOADING = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("object", "data")}


def groups() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The groups of pages in the index: the heading of each, with the title and the path of its pages."""
    heading, found = "", dict[str, str]()
    for line in [*(PROJECT / "docs/index.md").read_text(encoding="utf-8").splitlines(), "****"]:
        if line.startswith("**"):
            if found:
                yield heading, [(title, path) for path, title in found.items()]
            heading, found = line.strip("*"), {}
        for title, link in re.findall(r"\[([^]]+)\]\(([^)#]+\.md)", line):
            path = (PROJECT / "docs" / link).resolve().relative_to(PROJECT).as_posix()
            found.setdefault(path, title)


def first_sentence(path: str) -> str:
    """The first sentence of a page, without its marks."""
    text = re.sub(r"^(```.*?^```|#.*?$|!\[.*?$|<!--.*?-->)", "", read(path), flags=re.MULTILINE | re.DOTALL)
    paragraph = next((" ".join(part.split()) for part in text.split("\n\n") if re.match(r"\s*[\w`*\[]", part)), "")
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph).replace("**", "")
    return re.split(r"(?<=[.:])\s", plain, maxsplit=1)[0].rstrip(":.") + "."


def read(path: str) -> str:
    return (PROJECT / path).read_text(encoding="utf-8")


def llms_text() -> str:
    """What llms.txt says: each page with its Markdown and its first sentence."""
    lines = ["# ringfence", "", f"> {first_sentence('README.md')} Every tool call is a transaction.", ""]
    for heading, pages in groups():
        lines += [f"## {heading}", ""]
        lines += [f"- [{title}]({path}): {first_sentence(path)}" for title, path in pages]
        lines.append("")
    lines += [
        "## Optional",
        "",
        "- [Overview](README.md)",
        "- [Security](SECURITY.md)",
        "- [Changes](CHANGELOG.md)",
        "",
    ]
    return "\n".join(lines)


def configuration() -> str:
    """The configuration of zensical. A basic string of TOML is written as one of JSON."""

    def entry(title: str, value: str) -> str:
        return f"{{{json.dumps(title)} = {value}}}"

    parts = [entry("ringfence", json.dumps("index.md"))]
    for heading, pages in groups():
        inner = ", ".join(entry(title, json.dumps(path)) for title, path in pages)
        parts.append(entry(heading, f"[{inner}]"))
    parts.append(
        entry(
            "Project",
            "["
            + ", ".join(entry(*one) for one in (("Security", '"SECURITY.md"'), ("Changes", '"CHANGELOG.md"')))
            + "]",
        )
    )
    lines = [
        "[project]",
        'site_name = "ringfence"',
        'site_description = "Coding agents that change a repository safely: every tool call is a transaction."',
        'docs_dir = "pages"',
        'site_dir = "site"',
        "use_directory_urls = true",
        f"nav = [{', '.join(parts)}]",
        "",
        "[project.theme]",
        "font = false",
        f"features = {json.dumps(FEATURES)}",
        "",
        *palette("(prefers-color-scheme: light)", "default", "lucide/sun", "Dark colours"),
        *palette("(prefers-color-scheme: dark)", "slate", "lucide/moon", "Light colours"),
        *(f"[project.markdown_extensions.{name}]\n" for name in EXTENSIONS),
        "[project.markdown_extensions.toc]",
        "permalink = true",
    ]
    return "\n".join(lines) + "\n"


def palette(media: str, scheme: str, icon: str, name: str) -> Sequence[str]:
    return (
        "[[project.theme.palette]]",
        f"media = {json.dumps(media)}",
        f"scheme = {json.dumps(scheme)}",
        f"toggle.icon = {json.dumps(icon)}",
        f"toggle.name = {json.dumps(name)}",
        "",
    )


def prepare(place: Path) -> None:
    """Write what the site is built from. The pages are laid out as in the repository, so that their links hold."""
    pages = place / "pages"
    if pages.exists():
        shutil.rmtree(pages)
    pages.mkdir(parents=True)
    for folder in FOLDERS:
        shutil.copytree(PROJECT / folder, pages / folder, ignore=NOT_PUBLISHED)
    for name in ROOT_PAGES:
        shutil.copy(PROJECT / name, pages)
    (pages / "README.md").rename(pages / "index.md")
    for page in pages.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        named = re.sub(r"\]\(((?:\.\./)*)README\.md", r"](\1index.md", text)
        if named != text:
            page.write_text(named, encoding="utf-8")
    (pages / "llms.txt").write_text(llms_text(), encoding="utf-8")
    (place / "zensical.toml").write_text(configuration(), encoding="utf-8")


class Links(HTMLParser):
    """What a page links to and loads, and the names in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.leads: set[str] = set()
        self.loads: set[str] = set()
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        self.loads |= {value for name, value in given.items() if (tag, name) in LOADING}
        if "href" in given:
            (self.leads if tag == "a" else self.loads if tag == "link" else set[str]()).add(given["href"])


def problems(site: Path) -> list[str]:
    """What is wrong with a built site: links that lead nowhere, and what is loaded from elsewhere."""
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found: list[str] = []
    for path, links in pages.items():
        name = path.relative_to(site).as_posix()
        found += [f"{name} loads {one}" for one in sorted(links.loads) if urlsplit(one).netloc]
        for link in sorted(links.leads | links.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or name == "404.html":  # a server shows 404.html anywhere
                continue
            target = (
                site / parts.path.lstrip("/") if parts.path.startswith("/") else path.parent / unquote(parts.path)
            ).resolve()
            target = path if not parts.path else target / "index.html" if target.is_dir() else target
            if not target.is_file():
                found.append(f"{name}: {link} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].names:
                found.append(f"{name}: {link} names nothing there")
    return found


def finish(place: Path) -> list[str]:
    """Put the Markdown of each page beside it. Return what is wrong with the site."""
    pages, site = place / "pages", place / "site"
    for page in pages.rglob("*.md"):
        (target := site / page.relative_to(pages)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, target)
    shutil.copy(pages / "index.md", site / "README.md")
    named = re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text(encoding="utf-8"))
    return [f"llms.txt: {name} is not there" for name in named if not (site / name).is_file()] + problems(site)


def main(step: str, place: str) -> int:
    if step == "prepare":
        prepare(Path(place))
        return 0
    found = finish(Path(place))
    sys.stderr.write("".join(f"{one}\n" for one in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
