"""The documentation works: its Python runs, its files load, its commands and their options exist."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import io
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args

import pytest
import typer
from typer.testing import CliRunner

import metis
from metis.cli import app as cli
from metis.core.layers import LAYERS, Layer, Need
from metis.core.policies import POLICIES
from metis.core.protocols import BaseProtocol, CommunicationProtocol
from metis.core.solvers import SOLVERS
from metis.data.datasets import DATASETS
from metis.experiments.config.load import config_schema, load_config, read_toml, resolve_config
from metis.learning import ENGINES, NETWORKS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
READ = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("*/README.md")]
# What a page builds on, and which of its commands are run before its Python.
BUILDS_ON = {"report.md": "quickstart.md"}
RUN = {"quickstart.md": "metis ", "bring.md": "metis ", "deploy.md": "metis simulate"}


class Block(NamedTuple):
    language: str
    title: str | None
    text: str


def blocks(path: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a page in these languages."""
    found = re.finditer(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', path.read_text("utf-8"), re.M | re.S)
    return [Block(*match.groups()) for match in found if match[1] in languages]


def named(paths: list[Path]) -> Any:
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.relative_to(ROOT).as_posix())


def write_files(path: Path, folder: Path) -> None:
    """Write the files that a page contains in full; their names are the titles of the blocks."""
    for block in blocks(path, "python", "toml"):
        if block.title is not None:
            (folder / block.title).write_text(block.text, encoding="utf-8")


# --- Python -----------------------------------------------------------------------------------


def execute(path: Path, names: dict[str, Any], folder: Path) -> None:
    if path.name in BUILDS_ON:
        execute(DOCS / BUILDS_ON[path.name], names, folder)
    write_files(path, folder)
    for line in commands(path):
        if line.startswith(RUN.get(path.name, "no command")):
            result = CliRunner().invoke(cli.app, shlex.split(line)[1:])
            assert result.exit_code == 0, f"{line}: {result.output}"
    if path.name == "deploy.md":  # the rehearsal stands in for a real federation
        shutil.copytree(folder / "runs" / "federation-semisync-lambda-2", folder / "state" / "run")
    for block in blocks(path, "python"):
        exec(compile(block.text, path.name, "exec"), names)


@pytest.mark.slow
@named([path for path in [*PAGES, ROOT / "README.md"] if blocks(path, "python")])
def test_the_python_of_a_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom, as one program, in an empty folder."""
    if path.name == "report.md":
        pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    name = f"page_{path.stem}"
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    for registry in (
        POLICIES,
        SOLVERS,
        LAYERS,
        NETWORKS,
        DATASETS,
        ENGINES,
    ):  # what a page registers is gone afterwards
        monkeypatch.setattr(registry, "_definitions", dict(registry.items()))
    with contextlib.redirect_stdout(io.StringIO()):
        execute(path, vars(module), tmp_path)


# --- files ------------------------------------------------------------------------------------


# extend.md loads its file itself, after its Python has registered what the file names.
@named([path for path in READ if blocks(path, "toml") and path.name != "extend.md"])
def test_the_files_of_a_page_load(path: Path, tmp_path: Path) -> None:
    """Complete files as they are; partial ones replace tables of the example that `metis init` writes."""
    write_files(path, tmp_path)
    example = Path(metis.__file__).parent / "experiments" / "example.toml"
    for number, block in enumerate(blocks(path, "toml")):
        file = tmp_path / (block.title or f"{number}.toml")
        file.write_text(block.text, encoding="utf-8")
        content = read_toml(file)
        if {"learners", "policy"} <= content.keys():
            load_config(file)
        else:
            resolve_config({**read_toml(example), **content}, path.name)


# --- commands ---------------------------------------------------------------------------------


def commands(path: Path) -> list[str]:
    """The lines of a page that call metis, without comments, pipes and redirections."""
    text = path.read_text("utf-8")
    lines = [line for block in blocks(path, "sh") for line in block.text.splitlines()]
    lines += re.findall(r"^    (metis .*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return [part.strip() for line in lines for part in calls(line) if part.strip().startswith("metis ")]


def calls(line: str) -> Iterator[str]:
    without_comment = re.sub(r"\s#.*", "", line)
    for part in re.split(r"&&|\|(?!\w)", without_comment):
        yield re.sub(r"\s\d?>.*", "", part)


@functools.cache
def root() -> Any:
    return typer.main.get_command(cli.app)


def found_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that these words name, and what is left of them."""
    command = root()
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"{words[0]} is not a command"
        command, words = command.commands[words[0]], words[1:]
    return command, words


@named([path for path in READ if commands(path)])
def test_every_command_of_a_page_exists(path: Path) -> None:
    """With these options and arguments; it is parsed, not run."""
    for line in commands(path):
        command, words = found_command(shlex.split(line)[1:])
        if not hasattr(command, "commands"):
            command.make_context(line, words)


@named(READ)
def test_every_command_within_a_sentence_exists(path: Path) -> None:
    """It may omit arguments, but not name an option that does not exist."""
    for line in re.findall(r"`(metis [a-z][^`]*)`", path.read_text("utf-8")):
        command, words = found_command(line.split()[1:])
        options = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
        given = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
        assert set(given) <= options, line


@named(READ)
def test_every_target_of_make_exists(path: Path) -> None:
    """`make NAME` on a page is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    text = path.read_text("utf-8")
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M)) <= targets


@named(READ)
def test_every_module_of_a_page_exists(path: Path) -> None:
    """`core/timing.py: steps_within` on a page is a file of the package that has this name in it."""
    for file, name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)(?:: (\w+))?`", path.read_text("utf-8")):
        folders = (ROOT, path.parent, ROOT / "src", ROOT / "src" / "metis")
        found = [folder / file for folder in folders if (folder / file).is_file()]
        assert found and name in found[0].read_text("utf-8"), f"{file}: {name}"


# --- the site ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def build() -> Iterator[ModuleType]:
    """docs/build.py, which imports modules next to it."""
    sys.path.insert(0, str(DOCS))
    try:
        spec = importlib.util.spec_from_file_location("documentation_build", DOCS / "build.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(DOCS))


def test_the_reference_names_everything(build: ModuleType, tmp_path: Path) -> None:
    """Every public name, key, parameter and command is listed, and the examples of the commands exist."""
    pages = build.reference.pages()
    python, keys = pages["reference/python.md"], pages["reference/configuration.md"]
    for name in metis.__all__:
        assert f"### {name}\n" in python or name in ("__version__", "MetisError"), name
    schema = config_schema()
    layers = [rules for choices in schema["layers"].values() for rules in choices.values()]
    named = [rules for kind in ("$defs", "policies", "solvers", "operations") for rules in schema[kind].values()]
    for rules in [*layers, *named]:
        for key, rule in rules["properties"].items():
            assert f"| `{key}` |" in keys or f".{key}\n" in keys, key
            assert "$ref" in rule or rule["description"] in keys, key
    file = tmp_path / "commands.md"
    file.write_text(pages["reference/commands.md"], encoding="utf-8")
    listed = root().commands
    assert all(f"## metis {name}\n" in file.read_text("utf-8") for name in listed)
    assert len(commands(file)) > len(listed)
    test_every_command_of_a_page_exists(file)


def test_the_page_on_architecture_is_up_to_date(build: ModuleType) -> None:
    """Its tree, its walk, its dependency rule and its picture are those of the code."""
    architecture = build.architecture
    again = "run: python docs/architecture.py"
    assert architecture.PAGE.read_text("utf-8") == architecture.updated(architecture.PAGE.read_text("utf-8")), again
    assert architecture.PICTURE.read_text("utf-8") == architecture.picture(), again


def test_the_messages_of_the_deployment_page_are_those_of_the_code() -> None:
    """What the table of messages quotes is printed by a check of certificates, apart from names and dates."""
    text = (DOCS / "deploy.md").read_text("utf-8").partition("| message | what to do |")[2].partition("\n\n")[0]
    sources = (ROOT / "src" / "metis" / "deployment").rglob("*.py")
    code = re.sub(r'"\s+f?"', "", " ".join(path.read_text("utf-8") for path in sources))
    quoted = [quote for row in text.splitlines()[2:] for quote in re.findall("`([^`]+)`", row.split("|")[1])]
    assert len(quoted) > 8
    for quote in quoted:
        for piece in re.split(r"…(?:/ca\.pem)?|DATE|HOST:PORT|HOST|\b[AB]\b|\d+ days|\w+\.pem|: ", quote):
            assert piece.strip(" ',") in code, f"{quote}: {piece}"


def documented_calls() -> Iterator[Any]:
    """Everything that `metis` exports and can be called, and the methods of what users work with."""
    for name in sorted(metis.__all__):
        thing = getattr(metis, name)
        if not callable(thing) or (isinstance(thing, type) and issubclass(thing, Exception)):
            continue
        yield pytest.param(thing, thing.__doc__, id=name)
        for key in vars(thing) if name in ("Comparison", "Federation", "Run") else ():
            method = getattr(thing, key)
            if not key.startswith("_") and inspect.isroutine(method):
                words = method.__doc__ if key != "session" else f"{method.__doc__} {thing.simulate.__doc__}"
                yield pytest.param(method, words, id=f"{name}.{key}")


@pytest.mark.parametrize(("call", "words"), list(documented_calls()))
def test_a_docstring_names_every_parameter(call: Any, words: str | None) -> None:
    """help() explains what each argument of a public name is, as `name` in its docstring."""
    given = [name for name in inspect.signature(call).parameters if name != "self"]
    assert [name for name in given if f"`{name}`" not in (words or "")] == []


def test_settings_are_described_once() -> None:
    """A docstring gets the settings from their annotations, however often the name is used."""
    for _ in range(2):
        assert (metis.FedAvgM.__doc__ or "").count("- `momentum`: ") == 1
    assert "- `beta1`: how slowly a running mean forgets; 0.9 by default." in (metis.AdamW.__doc__ or "")


def test_the_lines_that_an_extension_takes_are_counted() -> None:
    """Each row of the table in CONTRIBUTING.md links a file of the example package and has its number of lines."""
    rows = re.findall(r"\]\((examples/plugin/\S+\.py)\) \| (\d+) \|", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert len(rows) == 5
    for file, lines in rows:
        assert len((ROOT / file).read_text("utf-8").splitlines()) == int(lines), file


def test_the_table_of_policies_lists_their_parameters() -> None:
    """Each row of docs/protocols.md has every parameter of its policy, and no other."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", (DOCS / "protocols.md").read_text("utf-8"), re.M)
    listed = {policy: set(re.findall(r"`(\w+)`", parameters)) for policy, parameters in rows}
    for policy, rules in config_schema()["policies"].items():
        assert listed[policy] == set(rules["properties"]), policy


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table of docs/extend.md with this heading."""
    table = (DOCS / "extend.md").read_text("utf-8").partition(f"| {heading} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


def signature(name: str, method: Any) -> str:
    call = inspect.signature(method)
    return f"{name}({', '.join(list(call.parameters)[1:])}) -> {call.return_annotation}"


def test_the_members_of_a_protocol_are_listed_with_their_defaults() -> None:
    """Each member of the interface; what changes periods stands with `has_period`."""
    rows = {
        member.strip("`"): (meaning, default.strip("`")) for member, meaning, default in rows_of("member of a protocol")
    }
    members = {*CommunicationProtocol.__annotations__, *vars(CommunicationProtocol)}
    names = {name for name in members if not name.startswith("_")} - {"paced", "at_least", "probing", "accepting_late"}
    assert {row.partition("(")[0] for row in rows} == names
    for member in ("paced(pacing)", "at_least(setting, floor)", "probing(probe)", "accepting_late(lateness)"):
        assert member in rows["has_period"][0]
    for name in ("ready", "tasks"):
        assert rows[signature(name, getattr(CommunicationProtocol, name))][1] == "required"
    assert rows[signature("joining", CommunicationProtocol.joining)][1] == str(BaseProtocol().joining((), 0.0))
    assert rows["begun()"][1] == str(BaseProtocol().begun())
    for name in names - {"ready", "tasks", "joining", "begun"}:
        assert rows[name][1].removeprefix("math.") == str(getattr(BaseProtocol(), name)), name


def test_the_hooks_of_a_layer_are_listed_with_their_signatures() -> None:
    """In the order of the code."""
    hooks = {name: value for name, value in vars(Layer).items() if inspect.isfunction(value) and name[0] != "_"}
    listed = [hook.strip("`") for _, hook, _ in rows_of("when | hook | returns")]
    assert listed == [signature(name, hook) for name, hook in hooks.items()]


def test_the_layers_of_metis_are_listed_with_their_order() -> None:
    """And with what they need and take; the possible needs are all explained."""

    def words(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in sorted(names))

    classes = [layer for kind in LAYERS.values() for layer in kind.classes.values()]
    own = [layer for layer in classes if layer.__module__.startswith("metis.core.")]
    expected = {(layer.order, layer.key, words(layer.needs), words(layer.takes)) for layer in own}
    assert rows_of("order | key | needs | takes") == [
        [str(order), f"`{key}`", needs, takes] for order, key, needs, takes in sorted(expected)
    ]
    assert [row[0].strip("`") for row in rows_of("need")] == list(get_args(Need))


def test_the_attributes_of_the_arguments_exist() -> None:
    """What docs/extend.md says that a record, a roster or a task has."""
    for path, attributes in rows_of("class"):
        module, _, name = path.strip("`").rpartition(".")
        offered = getattr(importlib.import_module(module), name)
        known = {*dir(offered), *getattr(offered, "__dataclass_fields__", ())}
        listed = set(re.findall(r"`(\w+)`", attributes)) - {"None"}
        assert listed and listed <= known, f"{path}: {listed - known}"


def test_links_are_moved_with_their_pages(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link works in the repository and in the site; one that leads nowhere is reported."""
    monkeypatch.setattr(build, "STAGED", tmp_path)

    def moved(text: str, source: str) -> str:
        return str(build.relinked(text, ROOT / source, {"reference/python.md": ""}))

    assert moved("[a](../benchmarks/README.md#x) [b](why.md)", "docs/faq.md") == "[a](benchmarks.md#x) [b](why.md)"
    assert moved("[a](docs/extend.md)", "CONTRIBUTING.md") == "[a](extend.md)"
    assert moved("[a](../why.md)", "docs/notebooks/quickstart.ipynb") == "[a](why.md)"
    assert moved("[a](reference/python.md) [b](https://a.b/c)", "docs/faq.md").count("(") == 2
    assert moved("```\n[a](nowhere)\n```\n", "docs/faq.md") == "```\n[a](nowhere)\n```\n"
    assert moved("![a](../examples/demo.toml)", "docs/faq.md") == "![a](files/examples/demo.toml)"
    assert (tmp_path / "files" / "examples" / "demo.toml").is_file()
    with pytest.raises(build.Fault, match=r"docs/faq.md: nowhere.md does not exist"):
        moved("[a](nowhere.md)", "docs/faq.md")


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="b.html#there">', None),
        ('<a href="https://example.org/">', None),
        ('<img src="data:image/png;base64,AA">', None),
        ("<p>A dash - in a line</p>", None),
        ('<a href="b.html#here">', "a.html: b.html#here does not exist"),
        ('<a href="c.html">', "a.html: c.html does not exist"),
        ('<img src="c.png">', "a.html: c.png does not exist"),
        ('<script src="https://example.org/x.js">', "a.html: loads the external resource https://example.org/x.js"),
        ("<p>So:\n- one</p>", "a.html: a list or table that became text: '- one'"),
    ],
)
def test_what_a_reader_would_stumble_over_is_found(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, fault: str | None
) -> None:
    """In the built pages."""
    monkeypatch.setattr(build, "SITE", tmp_path)
    (tmp_path / "a.html").write_text(body, encoding="utf-8")
    (tmp_path / "b.html").write_text('<h1 id="there">', encoding="utf-8")
    assert build.faults() == ([] if fault is None else [fault])


def test_the_navigation_has_every_page_once(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing page is left out; a page that is not listed is added at the end, under its heading."""
    monkeypatch.setattr(build, "BUILD", tmp_path)
    monkeypatch.setattr(build, "STAGED", tmp_path)
    for page in ("index.md", "extra.md"):
        (tmp_path / page).write_text("# A page\n\nWords.\n", encoding="utf-8")
    build.configure({"index.md", "extra.md"})
    nav = read_toml(tmp_path / "zensical.toml")["project"]["nav"]
    assert [entry for entry in nav if isinstance(next(iter(entry.values())), str)] == [
        {"Metis": "index.md"},
        {"A page": "extra.md"},
    ]
