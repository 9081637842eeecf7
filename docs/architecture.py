"""Writes the generated parts of docs/architecture.md and its picture from the code that they describe.

    python docs/architecture.py

The tree comes from the modules' docstrings and the dependency rule from tests/test_architecture.py. Each step of the
walk is looked up by the name of the function that performs it; a step whose function is gone is an error.
"""

from __future__ import annotations

import ast
import html
import importlib.util
import re
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "images" / "dependencies.svg"
SOURCE = ROOT / "src" / "metis"
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
GENERATED_CODE = {"wire_pb2.py"}

# What happens to one update request: the step, what performs it in a simulation, and what in a deployment (None: the
# same). Several names, separated by commas, take part one after the other.
WALK: list[tuple[str, str, str | None]] = [
    ("The controller answers an event with a task: a community model and a budget", "Controller.handle", None),
    (
        "The task goes to the learner",
        "Simulator._send",
        "Sessions.offer, Service.attend, Tasks.take",
    ),
    ("Training gets a process", "InlinePool.train, ProcessPool", "Child.call, _Trainer.answer"),
    ("The learner trains until its budget ends", "Learner.train", None),
    ("The local model travels back", "Simulator._arrive", "Uploads.upload, UploadReceiver.receive"),
    ("It is checked before it counts", "Learner.checked", "NumberCheck, claim_problem"),
    (
        "The event is written to disk before it has an effect",
        "",
        "Writer.submit, DurableController.apply, State.append",
    ),
    ("The controller handles the update request", "Controller.handle", None),
    ("The contribution value weights the model", "ContributionValue", None),
    ("Mixing takes the model in", "Community", None),
    ("The protocol decides who trains next, and for how long", "CommunicationProtocol", None),
    ("A new community model is evaluated", "Simulator._published", "Evaluations.published"),
    ("Event and actions are recorded, one JSON object per line", "to_line", None),
    ("Costs are computed from the record", "CostLedger.record", None),
]


class Fault(Exception):
    """The code no longer has what the page describes."""


def updated(text: str) -> str:
    """The page with its generated parts written again."""
    parts = {"tree": tree, "files": files, "walk": walk, "rule": rule}
    return PART.sub(lambda match: f"{match[1]}{parts[match[2]]()}\n{match[3]}", text)


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- the tree ---------------------------------------------------------------------------------


@cache
def module(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def described(path: Path) -> str:
    """The first sentence of a module's docstring."""
    words = ast.get_docstring(module(path))
    if not words:
        raise Fault(f"{path.relative_to(ROOT)} has no docstring")
    return " ".join(words.split("\n\n")[0].split()).rstrip(".").replace(" | ", "`, `").replace(" ...`", "`")


def modules() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if path.name not in GENERATED_CODE]


def tree() -> str:
    """The folders, one line each."""
    folders = [path.parent for path in modules() if path.name == "__init__.py" and path.parent != SOURCE]
    names = {folder: "  " * len(folder.relative_to(SOURCE).parts) + folder.name + "/" for folder in folders}
    width = max(map(len, names.values())) + 2
    lines = []
    for folder in folders:
        words = textwrap.wrap(described(folder / "__init__.py"), 92 - width)
        lines += [f"{name:{width}}{line}" for name, line in zip_longest([names[folder]], words, fillvalue="")]
    return "\n".join(["```text", "src/metis/", *lines, "```"])


def files() -> str:
    """Every module, by folder."""
    parts = []
    for folder in sorted({path.parent for path in modules()}):
        name = folder.relative_to(SOURCE.parent).as_posix()
        inside = [path for path in modules() if path.parent == folder and path.name != "__init__.py"]
        rows = [[f"`{path.name}`", described(path)] for path in inside]
        if rows:
            parts += [f"### {name}/", table(["file", "what it holds"], rows)]
    return "\n" + "\n\n".join(parts) + "\n"


# --- the walk ---------------------------------------------------------------------------------


@cache
def definitions() -> Mapping[str, list[Path]]:
    """Where each class, function and method is defined, by name."""
    found: dict[str, list[Path]] = {}

    def collect(nodes: list[ast.stmt], prefix: str, path: Path) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                found.setdefault(prefix + node.name, []).append(path)
                collect(node.body, f"{prefix}{node.name}.", path)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.setdefault(prefix + node.name, []).append(path)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and not prefix:
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                found.setdefault(ast.unparse(target), []).append(path)

    for path in modules():
        collect(module(path).body, "", path)
    return found


def located(names: str) -> str:
    """The file of each name: `path: name`."""
    cells = []
    for name in filter(None, names.split(", ")):
        places = definitions().get(name, [])
        if len(places) != 1:
            where = ", ".join(str(path.relative_to(ROOT)) for path in places) or "nowhere"
            raise Fault(f"the walk in docs/architecture.py names {name}, which is defined {where}")
        cells.append(f"`{places[0].relative_to(SOURCE).as_posix()}`: `{name}`")
    return "<br>".join(cells) or "–"


def walk() -> str:
    rows = []
    for number, (step, simulated, deployed) in enumerate(WALK, 1):
        cells = [located(simulated), "the same" if deployed is None else located(deployed)]
        rows.append([str(number), step, *cells])
    return table(["", "step", "in a simulation", "in a deployment"], rows)


# --- the dependency rule ----------------------------------------------------------------------


@cache
def rules() -> tuple[dict[str, set[str]], dict[str, set[str] | None]]:
    """What each part may import of Metis, and where each third-party package may be imported."""
    spec = importlib.util.spec_from_file_location("dependency_rule", ROOT / "tests" / "test_architecture.py")
    assert spec is not None and spec.loader is not None
    checked = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checked)
    return checked.MAY_IMPORT, checked.HOMES


def rule() -> str:
    """A row for each part, from the top to the bottom."""
    may_import, homes = rules()
    rows = []
    for part in sorted(may_import, key=lambda part: (-level(part), part)):
        packages = sorted(package for package, home in homes.items() if home is not None and part in home)
        name = f"`{part}/`" if (SOURCE / part).is_dir() else "`__init__.py`" if part == "metis" else f"`{part}.py`"
        allowed = sorted(may_import[part] - {part}, key=lambda other: (-level(other), other))
        rows.append([name, ", ".join(allowed) or "nothing", ", ".join(packages) or ""])
    shared = sorted(package for package, home in homes.items() if home is None)
    return table(["part", "may import from Metis", "third-party packages"], rows) + (
        "\n\nA third-party package is imported only in the parts that list it. Besides these, any part may import "
        f"{', '.join(shared)}; `core` may import numpy only."
    )


@cache
def level(part: str) -> int:
    """How many parts lie below this one in the longest chain of imports; two that import each other are level."""
    may_import, _ = rules()
    below = {other for other in may_import[part] if part not in may_import[other] and other != part}
    return 1 + max((level(other) for other in below), default=-1)


def picture() -> str:
    """The folders in rows, an arrow from each to those right below it that it may import."""
    may_import, _ = rules()
    folders = {part: allowed for part, allowed in may_import.items() if (SOURCE / part).is_dir()}
    levels = sorted({level(part) for part in folders}, reverse=True)
    width, high, wide, gap = 720, 30, 118, 64
    boxes = {}
    for row, here in enumerate(levels):
        names = sorted(part for part in folders if level(part) == here)
        for column, part in enumerate(names):
            boxes[part] = (width * (column + 1) / (len(names) + 1), 16 + row * gap)
    lines, shapes = [], []
    for part, allowed in folders.items():
        below = {other for other in allowed if other in folders and other != part}
        direct = below - {far for near in below for far in folders[near]}
        x, y = boxes[part]
        for other in sorted(direct):
            right, down = boxes[other]
            lines.append(f'<path d="M{x:g} {y + high:g}L{right:g} {down - 5:g}" marker-end="url(#arrow)"/>')
        shapes.append(f'<rect x="{x - wide / 2:g}" y="{y:g}" width="{wide}" height="{high}" rx="4"/>')
        shapes.append(f'<text x="{x:g}" y="{y + 20:g}">{html.escape(part)}</text>')
    height = 16 + (len(levels) - 1) * gap + high + 16
    chain = "; ".join(f"{part} may import {', '.join(sorted(set(folders[part]) & set(folders)))}" for part in folders)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="14" text-anchor="middle">',
        f"<title>The dependency rule: {html.escape(chain)}</title>",
        '<defs><marker id="arrow" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L6 3L0 6z" fill="#8a8f98"/></marker></defs>',
        f'<g stroke="#8a8f98" fill="none">{"".join(lines)}</g>',
        f'<g fill="#3b5b92">{"".join(shape for shape in shapes if shape.startswith("<rect"))}</g>',
        f'<g fill="#ffffff">{"".join(shape for shape in shapes if shape.startswith("<text"))}</g>',
        "</svg>",
        "",
    ])  # fmt: skip


def write() -> None:
    """Bring the page and its picture up to date."""
    PAGE.write_text(updated(PAGE.read_text("utf-8")), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    write()
