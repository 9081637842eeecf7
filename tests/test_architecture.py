"""The dependency rule, read from the source text: nothing is imported to check it.

cli -> planning, reproduction -> experiments, reporting -> simulation, deployment -> runs, learning, data, kernels,
privacy -> core -> numpy
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
MODULES = sorted((SOURCE / "metis").rglob("*.py"))

# A part may import the parts named here and itself. Siblings are missing from each other's sets on purpose.
_BASE = {"errors", "registry", "files", "net", "system", "text"}
_SILO = _BASE | {"core"}
_RUN = _SILO | {"data", "kernels", "learning", "privacy", "runs"}
_USE = _RUN | {"simulation", "deployment", "flower", "nvflare"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "text": set(),
    "files": {"errors", "system"},
    "system": set(),
    "net": {"errors"},
    "registry": {"errors", "plugins"},  # plugins only when a name is looked up
    "plugins": {"errors", "registry"},
    "core": {"errors", "registry"},
    "data": _SILO,
    "kernels": _SILO,
    "learning": _SILO | {"privacy"},
    "privacy": _SILO,
    "runs": _SILO,
    "simulation": _RUN,
    "deployment": _RUN,
    "flower": _RUN,  # a third runtime of the core, and an engine
    "nvflare": _RUN,  # an engine
    "experiments": _USE,
    "reporting": _USE,
    "planning": _USE | {"experiments"},
    "reproduction": _USE | {"experiments", "reporting"},
    "cli": _USE | {"experiments", "reporting", "planning", "reproduction", "metis"},
    "__main__": {"cli"},
    "metis": _USE | {"experiments", "reporting"},  # the public names in __init__.py
}

CORE_STANDARD_LIBRARY = {
    "__future__", "abc", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq",
    "itertools", "json", "math", "operator", "types", "typing",
}  # fmt: skip

# Every third-party package and its home (None: anywhere outside core). What is not listed is not a dependency.
HOMES: dict[str, set[str] | None] = {
    "numpy": None,
    "safetensors": None,
    "tomli": None,
    "tomlkit": None,
    "pandas": None,
    "pyarrow": {"reporting"},
    "torch": {"learning"},
    "jax": {"learning"},
    "flax": {"learning"},
    "optax": {"learning"},
    "sklearn": {"learning"},
    "threadpoolctl": {"learning"},  # comes with scikit-learn
    "numba": {"kernels"},
    "ray": {"simulation"},
    "flwr": {"flower"},
    "nvflare": {"nvflare"},
    "grpc": {"deployment"},
    "google": {"deployment"},  # protobuf
    "cryptography": {"deployment", "privacy"},
    "tenseal": {"privacy"},
    "prometheus_client": {"deployment"},
    "pydantic": {"experiments", "reproduction"},
    "pydantic_core": {"experiments"},
    "dp_accounting": {"privacy"},
    "pooch": {"data"},
    "requests": {"data"},  # comes with pooch, whose errors it raises
    "nibabel": {"data"},
    "optuna": {"experiments"},
    "markupsafe": {"reporting", "reproduction"},  # comes with jinja2
    "matplotlib": {"reporting", "reproduction"},
    "jinja2": {"reporting", "reproduction"},
    "starlette": {"reporting", "deployment"},
    "uvicorn": {"reporting", "deployment"},
    "tensorboard": {"reporting"},
    "mlflow": {"reporting"},
    "onnx": {"reporting"},
    "onnxruntime": {"learning"},
    "wandb": {"reporting"},
    "rich": {"reporting", "reproduction", "cli"},
    "typer": {"cli"},
    "click": {"cli"},
}

# `sys.modules` reaches a module that the rule does not let one import; what it is needed for otherwise:
MAY_USE_LOADED_MODULES = {
    "metis.experiments.site",  # puts a site file there, where dataclasses look for it
    "metis.nvflare.script",  # makes NVFlare forget the trainer of the last task
    "metis.simulation.pools.ray",  # sends all site files to the workers
}

UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FORBIDDEN_NAMES = {"torch.load", "yaml.load", "numpy.load:allow_pickle", "builtins.eval", "builtins.exec"}
IMPURE_BUILTINS = {"open", "print", "input", "breakpoint"}
IMPURE_NUMPY = {
    "random",
    "load",
    "save",
    "savez",
    "savez_compressed",
    "memmap",
    "fromfile",
    "loadtxt",
    "savetxt",
}


def part_of(module: str) -> str:
    """The part of Metis that a dotted name belongs to: 'core', 'cli', ... or 'metis', the package itself."""
    names = module.split(".")
    if len(names) == 1:
        return "metis"
    return names[1]


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, wherever it stands, also by importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - (node.level - 1)]
                base = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of every name and attribute used, with `import numpy as np` seen through."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                known[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def full_name(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return known.get(node.id, f"builtins.{node.id}")
        if isinstance(node, ast.Attribute):
            owner = full_name(node.value)
            return f"{owner}.{node.attr}" if owner else None
        return None

    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = full_name(node)
            if name:
                yield node.lineno, name
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield node.value.lineno, "numpy.load:allow_pickle"


def import_violations(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Imports that go against the layers or leave a package's home."""
    part = part_of(module)
    for line, imported in imports(tree, module, is_package):
        top = imported.split(".")[0]
        if top == "metis":
            if imported == "metis.__version__" and part != "core":
                continue
            target = part_of(imported)
            if target not in MAY_IMPORT:  # `from metis import fedrec`: a public name, not a part
                target = "metis"
            if target != part and target not in MAY_IMPORT.get(part, set()):
                yield line, f"{part} may not import {target} ({imported})"
        elif top in UNPICKLERS:
            yield line, f"{top} can run code that is hidden in data"
        elif top in sys.stdlib_module_names:
            if part == "core" and top not in CORE_STANDARD_LIBRARY:
                yield line, f"core is pure and may not import {top}"
        elif top == "tomllib":
            continue  # standard library from 3.11 on
        elif top not in HOMES:
            yield line, f"{top} is not a dependency of Metis"
        elif part == "core" and top != "numpy":
            yield line, f"core may import numpy only, not {top}"
        else:
            home = HOMES[top]
            if home is not None and part not in home:
                yield line, f"{top} is imported only in {', '.join(sorted(home))}, not in {part}"


def use_violations(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """Names that nobody may use, and those that are not pure and so may not be used in core."""
    safe = {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(given.arg == "weights_only" and ast.unparse(given.value) == "True" for given in node.keywords)
    }
    for line, name in uses(tree):
        if name == "torch.load" and line in safe:
            continue  # tensors only
        if name in FORBIDDEN_NAMES:
            yield line, f"{name.removeprefix('builtins.')} can run code that is hidden in data"
        if name == "sys.modules" and module not in MAY_USE_LOADED_MODULES:
            yield line, "sys.modules goes around the dependency rule; import what is needed"
        if part_of(module) == "core":
            owner, _, rest = name.partition(".")
            if owner == "builtins" and rest in IMPURE_BUILTINS:
                yield line, f"core is pure and may not use {rest}"
            if owner == "numpy" and rest in IMPURE_NUMPY:
                yield line, f"core is pure and may not use numpy.{rest}"
    if part_of(module) == "core":
        for line, imported in imports(tree, module, is_package=False):
            if imported.startswith("numpy.") and imported.split(".")[1] in IMPURE_NUMPY:
                yield line, f"core is pure and may not use {imported}"


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """All that is wrong with one module's text, as 'module:line: reason'."""
    tree = ast.parse(source)
    found = {*import_violations(tree, module, is_package), *use_violations(tree, module)}
    if part_of(module) not in MAY_IMPORT:
        found.add((1, f"{part_of(module)} is not in any layer; add it in tests/test_architecture.py"))
    return [f"{module}:{line}: {reason}" for line, reason in sorted(found)]


def name_of(path: Path) -> tuple[str, bool]:
    names = list(path.relative_to(SOURCE).with_suffix("").parts)
    is_package = names[-1] == "__init__"
    return ".".join(names[:-1] if is_package else names), is_package


def test_there_is_something_to_check() -> None:
    """The checks below look at the real package, with its command line and its core."""
    names = {name_of(path)[0] for path in MODULES}
    assert {"metis", "metis.cli.app", "metis.core.model"} <= names


def test_every_module_keeps_to_the_dependency_rule() -> None:
    """Layers, homes of third-party packages, purity of core, nothing unpickled or evaluated."""
    found = [line for path in MODULES for line in violations(path.read_text("utf-8"), *name_of(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_every_module_is_python_3_10(path: Path) -> None:
    """No syntax that the oldest supported Python does not know."""
    ast.parse(path.read_text("utf-8"), filename=str(path), feature_version=(3, 10))


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("metis.core.x", "import time", "core is pure and may not import time"),
        ("metis.core.x", "from random import random", "core is pure and may not import random"),
        ("metis.core.x", "import torch", "core may import numpy only, not torch"),
        ("metis.core.x", "import numpy as np\nnp.random.default_rng(0)", "may not use numpy.random"),
        ("metis.core.x", "from numpy import random", "core is pure and may not use numpy.random"),
        ("metis.core.x", "from numpy.random import default_rng", "may not use numpy.random.default_rng"),
        ("metis.core.x", "import numpy\nnumpy.memmap('f')", "core is pure and may not use numpy.memmap"),
        ("metis.core.x", "def f():\n    print(1)", "core is pure and may not use print"),
        ("metis.core.x", "with open('f') as f: pass", "core is pure and may not use open"),
        ("metis.core.x", "from metis.learning import solvers", "core may not import learning"),
        ("metis.core.x", "def f():\n    import metis.simulation.speed", "core may not import simulation"),
        ("metis.core.protocols.x", "from ...data import partition", "core may not import data"),
        ("metis.data.x", "from metis.learning.engine import Engine", "data may not import learning"),
        ("metis.learning.x", "from metis import data", "learning may not import data"),
        ("metis.learning.x", "from metis import fedrec", "learning may not import metis"),
        ("metis.runs.storage", "from metis.learning import engine", "runs may not import learning"),
        ("metis.simulation.x", "from metis.experiments import config", "may not import experiments"),
        ("metis.experiments.x", "from metis.reporting import figures", "may not import reporting"),
        ("metis.reporting.x", "from metis.experiments import config", "reporting may not import experiments"),
        ("metis.reporting.x", "from metis.cli.app import app", "reporting may not import cli"),
        ("metis.errors", "from metis.core import model", "errors may not import core"),
        ("metis.core.x", "from metis.files import sync", "core may not import files"),
        ("metis.net", "from metis.files import sync", "net may not import files"),
        ("metis.simulation.x", "import torch.nn as nn", "torch is imported only in learning"),
        ("metis.cli.app", "import importlib\nimportlib.import_module('torch')", "torch is imported only in"),
        ("metis.learning.x", "from pydantic import BaseModel", "pydantic is imported only in experiments"),
        ("metis.simulation.x", "import grpc", "grpc is imported only in deployment"),
        ("metis.deployment.x", "from metis.simulation import speed", "deployment may not import simulation"),
        ("metis.learning.x", "import pooch", "pooch is imported only in data"),
        ("metis.learning.x", "import nibabel", "nibabel is imported only in data"),
        ("metis.experiments.x", "import matplotlib.pyplot as plt", "matplotlib is imported only in"),
        ("metis.experiments.x", "import typer", "typer is imported only in cli"),
        ("metis.experiments.x", "import ray", "ray is imported only in simulation"),
        ("metis.simulation.x", "import pickle", "pickle can run code"),
        ("metis.learning.x", "import torch\ntorch.load('f')", "torch.load can run code"),
        ("metis.learning.x", "from torch import load\nload('f')", "torch.load can run code"),
        ("metis.learning.x", "import torch\ntorch.load('f', weights_only=False)", "torch.load can run code"),
        ("metis.data.x", "import numpy as np\nnp.load('f', allow_pickle=True)", "allow_pickle can run code"),
        ("metis.cli.app", "eval('1')", "eval can run code"),
        ("metis.cli.app", "exec('1')", "exec can run code"),
        ("metis.cli.app", "import sys\nsys.modules['metis']", "sys.modules goes around the dependency rule"),
        ("metis.runs.x", "from sys import modules\nmodules['metis']", "sys.modules goes around the dependency rule"),
        ("metis.core.x", "from metis import __version__", "core may not import metis"),
        ("metis.helpers", "x = 1", "helpers is not in any layer"),
    ],
)  # fmt: skip
def test_the_checker_finds_a_violation(module: str, source: str, reason: str) -> None:
    """Each rule is broken on purpose, and exactly that is reported."""
    found = violations(source, module)
    assert found and all(reason in line for line in found), found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("metis.core.x", "import math\nimport numpy as np\nfrom numpy.typing import NDArray\nnp.zeros(3)"),
        ("metis.core.x", "from metis.errors import InternalError\nfrom metis.core.model import Model"),
        ("metis.core.x", "class Log:\n    def print(self): ...\nLog().print()"),
        ("metis.learning.x", "import torch\nfrom metis.core import model\ntorch.nn.Linear(1, 1).eval()"),
        ("metis.data.x", "import numpy as np\nnp.load('f', allow_pickle=False)\nnp.random.default_rng(0)"),
        ("metis.simulation.x", "import heapq\nfrom metis.learning import learner\nimport metis.data"),
        ("metis.simulation.x", "from metis.runs import storage"),
        ("metis.cli.app", "import typer\nfrom metis.experiments import config\nfrom metis import fedrec, errors"),
        ("metis.cli.data", "import typer\nfrom metis.cli.app import app"),
        ("metis.experiments.x", "import tomllib\nimport pydantic"),
        ("metis.experiments.site", "import sys\nsys.modules['site'] = None"),
        ("metis.experiments.x", "from metis import __version__"),
    ],
)  # fmt: skip
def test_the_checker_lets_the_rest_pass(module: str, source: str) -> None:
    """What the rule allows is not reported."""
    assert violations(source, module) == []


def test_relative_imports_are_resolved_from_a_package_too() -> None:
    """In `core/protocols/__init__.py` three dots are the package metis, as they are in a module next to it."""
    assert violations("from ...learning import solvers", "metis.core.protocols.x")
    assert violations("from ...learning import solvers", "metis.core.protocols", is_package=True)
    assert not violations("from ..model import Model", "metis.core.protocols", is_package=True)


# --- sizes ------------------------------------------------------------------------------------

MAX_LINES, MAX_LINES_OF_A_CLASS = 500, 350
GENERATED = {"metis.deployment.wire.wire_pb2"}


def sizes(source: str, module: str) -> Iterator[tuple[str, int, int]]:
    """Name, lines, and lines allowed of a module and of each of its classes."""
    yield module, len(source.splitlines()), MAX_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            name, first = f"{module}.{node.name}", min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
            yield name, (node.end_lineno or first) - first + 1, MAX_LINES_OF_A_CLASS


def test_modules_and_classes_stay_small_enough_to_have_one_idea() -> None:
    """A module of 500 lines or a class of 350 has more than one."""
    found = [
        f"{name} has {lines} lines; {allowed} are allowed"
        for path in MODULES
        if (module := name_of(path)[0]) not in GENERATED
        for name, lines, allowed in sizes(path.read_text("utf-8"), module)
        if lines > allowed
    ]
    assert not found, "\n".join(found)


def test_the_size_of_a_class_includes_its_decorators() -> None:
    source = "import a\n\n@a.b\n@a.c\nclass X:\n    x = 1\n"
    assert list(sizes(source, "metis.x")) == [("metis.x", 6, MAX_LINES), ("metis.x.X", 4, MAX_LINES_OF_A_CLASS)]


HEAVY = (
    "torch", "matplotlib", "pandas", "pyarrow", "grpc", "cryptography", "starlette", "uvicorn", "tensorboard", "mlflow",
    "wandb",
)  # fmt: skip


@pytest.mark.parametrize(
    "program",
    [
        "import metis",
        "import sys\nfrom metis.cli.app import main\nsys.argv = ['metis', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code",
    ],
    ids=["import metis", "metis --help"],
)
def test_starting_up_loads_nothing_heavy(program: str) -> None:
    """Neither `import metis` nor `metis --help` waits for torch, matplotlib or pandas."""
    report = f"\nimport sys\nprint('loaded:', *[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program + report], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["loaded:"]
