"""Builds the documentation site in build/site; warnings, dead links and external resources are errors.

    python docs/build.py

Pages are the Markdown files of docs, some of the repository's own, the notebook, and the reference, which is generated
from docstrings, the configuration's schema and the commands. docs/architecture.md is brought up to date with the code
first. The pages are gathered in build/docs. Links are written for the repository, and rewritten where a page has a
different path in the site.
"""

from __future__ import annotations

import base64
import html.parser
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import architecture
import reference
import tomlkit

ROOT = Path(__file__).parent.parent
DOCS, BUILD = ROOT / "docs", ROOT / "build"
STAGED, SITE = BUILD / "docs", BUILD / "site"
NOTEBOOK = DOCS / "notebooks" / "quickstart.ipynb"
RESULTS = "benchmarks/RESULTS.md"
ELSEWHERE = {  # files of the repository that are pages of the site
    "experiments/README.md": "paper.md",
    "experiments/adaptive/README.md": "adaptive.md",
    "experiments/no-tuning/README.md": "no-tuning-study.md",
    "benchmarks/README.md": "benchmarks.md",
    RESULTS: "results.md",
    "examples/plugin/README.md": "plugin.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/notebooks/quickstart.ipynb": "notebook.md",
}
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
FENCE = re.compile(r"^(```+)[^\n]*\n.*?^\1$", re.MULTILINE | re.DOTALL)


class Fault(Exception):
    """What is wrong with the documentation, one line per fault."""


# --- gathering --------------------------------------------------------------------------------


def page_of(path: Path) -> str:
    """The path in the site of a file in the repository."""
    place = path.relative_to(ROOT).as_posix()
    return ELSEWHERE.get(place) or (place.removeprefix("docs/") if path.is_relative_to(DOCS) else f"files/{place}")


def gather() -> None:
    """Put all pages and their images into build/docs."""
    shutil.rmtree(STAGED, ignore_errors=True)
    architecture.write()
    sources = sorted(DOCS.glob("*.md")) + [ROOT / place for place in ELSEWHERE if place.endswith(".md")]
    made = reference.pages()
    if not (ROOT / RESULTS).is_file():  # `make bench` writes it
        sources.remove(ROOT / RESULTS)
        made[page_of(ROOT / RESULTS)] = "# Results\n\nNothing has been measured yet: `make bench` writes this page.\n"
    for source in sources:
        write(page_of(source), relinked(source.read_text("utf-8"), source, made))
    write(page_of(NOTEBOOK), relinked(notebook(NOTEBOOK), NOTEBOOK, made))
    for place, text in made.items():
        write(place, text)
    for folder in ("javascripts", "stylesheets"):
        shutil.copytree(DOCS / folder, STAGED / folder)
    configure({path.relative_to(STAGED).as_posix() for path in STAGED.rglob("*.md")})


def configure(pages: set[str]) -> None:
    """Write build/zensical.toml: the one in the root, with every existing page exactly once."""
    content = tomlkit.parse((ROOT / "zensical.toml").read_text("utf-8")).unwrap()
    project, named = content["project"], set()

    def existing(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        kept = []
        for title, place in (item for entry in entries for item in entry.items()):
            if isinstance(place, list):
                kept.append({title: existing(place)})
            elif place in pages:
                named.add(place)
                kept.append({title: place})
        return kept

    project["nav"] = existing(project["nav"])
    project["nav"] += [{title_of(place): place} for place in sorted(pages - named)]
    (BUILD / "zensical.toml").write_text(tomlkit.dumps(content), encoding="utf-8")


def title_of(place: str) -> str:
    return (STAGED / place).read_text("utf-8").partition("\n")[0].lstrip("# ")


def write(place: str, text: str) -> None:
    path = STAGED / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def relinked(text: str, source: Path, made: dict[str, str]) -> str:
    """A page with its links rewritten for the site; linked files are copied there."""
    here = posixpath.dirname(page_of(source))

    def moved(match: re.Match[str]) -> str:
        link = match[0]
        address, hash_, anchor = link.partition("#")
        if not address or urlsplit(link).scheme:
            return link
        target = Path(os.path.normpath(source.parent / unquote(address)))
        place = page_of(target)
        if place not in made and not (STAGED / place).is_file():
            if not target.is_file():
                raise Fault(f"{source.relative_to(ROOT)}: {address} does not exist")
            if not place.endswith(".md"):
                (STAGED / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(target, STAGED / place)
        return posixpath.relpath(place, here or ".") + hash_ + anchor

    parts, end = [], 0
    for fence in FENCE.finditer(text):  # code is left alone
        parts += [LINK.sub(moved, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(moved, text[end:])])


def notebook(path: Path) -> str:
    """An executed notebook as a Markdown page."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for number, output in enumerate(cell["outputs"]):
            shown = {kind: "".join(content) for kind, content in output.get("data", {}).items()}
            if "text/html" in shown:  # Markdown would end it at an empty line and interpret its symbols
                page = "".join(line.strip() + "\n" for line in shown["text/html"].splitlines() if line.strip())
                parts.append(f'<div class="shown">\n{page}</div>')
            elif "image/png" in shown:
                name = f"{path.stem}-{cell['execution_count']}-{number}.png"
                (STAGED / "notebooks").mkdir(parents=True, exist_ok=True)
                (STAGED / "notebooks" / name).write_bytes(base64.b64decode(shown["image/png"]))
                parts.append(f"![The output of this cell]({name})")
            else:
                text = shown.get("text/plain") or "".join(output.get("text", ""))
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


# --- checking the built site -----------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """The links, resources and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.clumsy: list[str] = []
        self._paragraph = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self._paragraph = tag == "p" or (self._paragraph and tag in ("a", "code", "em", "strong"))
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" or (tag == "link" and given.get("rel") in ("canonical", "prev", "next")):
            self.links += [given["href"]] if "href" in given else []
        else:
            self.loaded += [given[name] for name in ("src", "href", "srcset", "data") if given.get(name)]

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self._paragraph = False

    def handle_data(self, data: str) -> None:
        """Find lists and tables that became running text because there is no empty line before them."""
        if self._paragraph:
            self.clumsy += re.findall(r"(?:^|\n)((?:[-*] |\d+\. |\||#+ |```).{0,40})", data)


def faults() -> list[str]:
    """Everything in the built site that a reader would stumble over."""
    pages = {path: Page(path.read_text("utf-8")) for path in SITE.rglob("*.html")}
    found = []
    for path, page in pages.items():
        name = path.relative_to(SITE).as_posix()
        found += [f"{name}: a list or table that became text: {text!r}" for text in page.clumsy]
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    found.append(f"{name}: loads the external resource {link}")
                continue
            base = SITE if parts.path.startswith("/") else path.parent
            target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else {parts.fragment}
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                found.append(f"{name}: {link} does not exist")
    return sorted(set(found))


def main() -> None:
    try:
        gather()
        shutil.rmtree(SITE, ignore_errors=True)
        program = Path(sys.executable).with_name("zensical")
        built = subprocess.run(
            [program, "build", "--strict", "--clean"], cwd=BUILD, capture_output=True, text=True, check=False
        )
        if built.returncode:
            raise Fault(built.stdout + built.stderr)
        if found := faults():
            raise Fault("\n".join(found))
    except (Fault, architecture.Fault) as fault:
        sys.exit(f"{fault}\nerror: the documentation was not built")
    print(f"{len(list(SITE.rglob('*.html')))} pages in {(SITE / 'index.html').relative_to(ROOT)}")


if __name__ == "__main__":
    main()
