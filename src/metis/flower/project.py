"""A Flower project: which apps it has, how they are configured, and where they are loaded from."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

from metis.errors import ConfigError, described, needs_package

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OLDEST, NEWEST = (1, 27), (1, 41)  # releases that the tests were run with
_PREFIX = "flower:"
_NAMES = ("client_app", "app")

Scalar = bool | int | float | str


def require_flower() -> None:
    """Refuse a missing package and releases that are too old, each in one sentence."""
    try:
        version = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(needs_package("a Flower app", "flwr", "flower")) from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise ConfigError(f"flwr {version} is installed, and Metis works with {wanted} and later: pip install -U flwr")


@dataclass(frozen=True)
class FlowerSource:
    """What a file or the command line says of a Flower app; it can be sent to another process as one string."""

    app: str  # a folder with pyproject.toml, a Python file or a module, and perhaps :NAME
    learners: tuple[str, ...] = ()  # whose index is the partition
    node_config: tuple[tuple[str, Scalar], ...] = ()
    run_config: tuple[tuple[str, Scalar], ...] = ()
    unit: Literal["step", "call"] | None = None
    start: str | None = None  # a file with the initial model

    @staticmethod
    def is_spec(text: str | Path) -> bool:
        return str(text).startswith(_PREFIX)

    @property
    def spec(self) -> str:
        """The whole as one string without slashes, which a path to a file never is."""
        return _PREFIX + quote(json.dumps(asdict(self), separators=(",", ":")), safe="")

    @staticmethod
    def of(spec: str | Path) -> FlowerSource:
        table = json.loads(unquote(str(spec).removeprefix(_PREFIX)))
        pairs = {name: tuple((key, value) for key, value in table[name]) for name in ("node_config", "run_config")}
        return FlowerSource(**{**table, "learners": tuple(table["learners"]), **pairs})

    @property
    def title(self) -> str:
        """For messages."""
        return f"the Flower app {Path(self.app.partition(':')[0]).name}"

    def node(self, learner: str) -> dict[str, Scalar]:
        """The node's configuration as a SuperNode would have it."""
        own: dict[str, Scalar] = {}
        given = dict(self.node_config)
        if learner in self.learners:
            own = {"partition-id": self.learners.index(learner), "num-partitions": len(self.learners)}
            for key, value in given.items():
                if isinstance(value, str):
                    value = value.replace("{partition}", str(own["partition-id"]))
                    given[key] = value.replace("{learner}", learner)
        return {**own, **given}


def with_settings(
    source: FlowerSource,
    learners: Sequence[str],
    node_config: Mapping[str, Scalar],
    run_config: Mapping[str, Scalar],
    unit: Literal["step", "call"] | None,
    start: str | None,
) -> FlowerSource:
    """With what the federation's file says; what the site itself says of its node comes first."""
    nodes = {**node_config, **dict(source.node_config)}
    return replace(
        source,
        learners=tuple(learners),
        node_config=tuple(nodes.items()),
        run_config=tuple(run_config.items()),
        unit=source.unit or unit,
        start=source.start or start,
    )


def parse_node_config(text: str) -> dict[str, Scalar]:
    """`partition-id=0 data-path="/data"`, as flower-supernode --node-config takes it."""
    lines = re.sub(r"""\s+(?=[\w.-]+\s*=)""", "\n", text.strip())
    lines = re.sub(r"(?m)^([\w.-]+)\s*=", r'"\1" =', lines)
    try:
        found = tomllib.loads(lines)
    except tomllib.TOMLDecodeError:
        raise ConfigError(
            f"--node-config is {text!r}; write it as for flower-supernode: 'partition-id=0 data-path=\"/data\"'"
        ) from None
    for key, value in found.items():
        if not isinstance(value, (bool, int, float, str)):
            raise ConfigError(f"--node-config: {key} is {value!r}; allowed: numbers, strings, true and false")
    return found


@dataclass(frozen=True)
class FlowerProject:
    """The apps of a project, imported, and the configuration of its runs."""

    name: str
    client_app: Any
    server_app: Any | None
    run_config: dict[str, Scalar]


def read_pyproject(path: Path) -> dict[str, Any]:
    """The project's table of Flower: `components` and `config`, the latter with its keys joined by dots."""
    file = path / "pyproject.toml" if path.is_dir() else path
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {file}; a Flower project has a pyproject.toml") from None
    except tomllib.TOMLDecodeError as problem:
        if file.name != "pyproject.toml":
            raise ConfigError(f"{file} is not the pyproject.toml of a Flower project") from None
        raise ConfigError(f"{file}: {problem}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{file} cannot be read: {problem}") from None
    app = table.get("tool", {}).get("flwr", {}).get("app", {})
    components = app.get("components", {})
    if not isinstance(components.get("clientapp"), str):
        raise ConfigError(f"{file} names no ClientApp: [tool.flwr.app.components] has no clientapp")
    federations = table.get("tool", {}).get("flwr", {}).get("federations", {})
    nodes = [value for key, value in flat(federations).items() if key.endswith("num-supernodes")]
    return {
        "name": table.get("project", {}).get("name", file.parent.name),
        "nodes": max((number for number in nodes if isinstance(number, int)), default=0),
        "components": components,
        "config": flat(app.get("config", {})),
    }


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Nested tables as Flower flattens them: [config.train] lr is train.lr."""
    found: dict[str, Scalar] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def load_project(source: FlowerSource) -> FlowerProject:
    """Import what the source names."""
    require_flower()
    importlib.import_module("flwr.app")
    # Flower reports every deprecation and every round; what a user must know comes from Metis.
    logging.getLogger("flwr").setLevel(logging.ERROR)
    place, _, name = source.app.partition(":")
    path = Path(place).expanduser()
    if path.is_dir() or path.name == "pyproject.toml":
        return _from_folder(source, path if path.is_dir() else path.parent, name)
    if path.suffix == ".py":
        if not path.is_file():
            raise ConfigError(f"there is no file {path} with a Flower ClientApp")
        _on_the_path(path.parent)
        module = path.stem
    elif re.fullmatch(r"[A-Za-z_][\w.]*", place):
        _on_the_path(Path.cwd())
        module = place
    else:
        raise ConfigError(
            f"there is no Flower project {place}: give its folder, its pyproject.toml, a Python file or a module, "
            "with :NAME for the ClientApp in it"
        )
    return FlowerProject(place, _client_app(module, name), None, dict(source.run_config))


def _from_folder(source: FlowerSource, folder: Path, name: str) -> FlowerProject:
    table = read_pyproject(folder)
    known: dict[str, Scalar] = table["config"]
    for key in dict(source.run_config):
        if key not in known:
            raise ConfigError(
                f"run_config has '{key}', which [tool.flwr.app.config] of {source.title} has not; it has "
                f"{', '.join(known) or 'no keys'}"
            )
    _on_the_path(folder)
    module, _, attribute = table["components"]["clientapp"].partition(":")
    client_app = _client_app(module, name or attribute)
    server = table["components"].get("serverapp")
    server_app = None
    if isinstance(server, str):
        module, _, attribute = server.partition(":")
        server_app = _attribute(module, attribute, "ServerApp")
    return FlowerProject(table["name"], client_app, server_app, {**known, **dict(source.run_config)})


def _on_the_path(folder: Path) -> None:
    """For good, since apps also import when they are called."""
    text = str(folder.resolve())
    if text not in sys.path:
        sys.path.insert(0, text)


def _client_app(module: str, name: str) -> Any:
    if name:
        return _attribute(module, name, "ClientApp")
    loaded = _import(module)
    for candidate in _NAMES:
        if callable(getattr(loaded, candidate, None)):
            return getattr(loaded, candidate)
    raise ConfigError(f"{module} has neither {' nor '.join(_NAMES)}; name its ClientApp: {module}:NAME")


def _attribute(module: str, name: str, kind: str) -> Any:
    found = getattr(_import(module), name, None)
    if not callable(found):
        raise ConfigError(f"{module} has no {kind} '{name}'")
    return found


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as problem:
        raise ConfigError(f"the Flower app {module} cannot be imported: {described(problem)}") from problem


def federation_file(pyproject: Path, target: Path) -> str:
    """The text of a federation's file for this project, with what its own configuration says."""
    table = read_pyproject(pyproject)
    folder = (pyproject if pyproject.is_dir() else pyproject.parent).resolve()
    try:
        where = folder.relative_to(target.resolve().parent).as_posix()
    except ValueError:
        where = str(folder)
    config: dict[str, Scalar] = table["config"]
    rounds = next((value for key, value in config.items() if "rounds" in key and isinstance(value, int)), 10)
    epochs = next((value for key, value in config.items() if "epochs" in key and isinstance(value, int)), 1)
    settings = "\n".join(f"# {json.dumps(key)} = {json.dumps(value)}" for key, value in config.items())
    return _FILE.format(
        name=table["name"],
        file=target.name,
        app=json.dumps(where),
        settings=settings or "# the app has no settings",
        count=max(1, table["nodes"] - 1) if table["nodes"] else 2,
        rounds=rounds,
        epochs=epochs,
    )


_FILE = """\
# The Flower app {name} as a federation of Metis; its code stays as it is.
#
#   metis compare {file}                    # all policies below in virtual time
#   metis controller {file} --policy semisync_fedavg --state state ...     # a real federation, and at each site:
#   metis learner --flower APP --controller HOST:PORT ...

[site]
flower = {app}

# The app's own configuration, [tool.flwr.app.config]; take the mark off what you want to change.
[site.run_config]
{settings}

# As in Flower, the first learner has partition-id 0, and num-partitions is their number. A batch is a step of the
# client's optimizer where its loop over a DataLoader can be bounded, and otherwise a whole call of the client: give
# what it takes on each kind of machine, which metis probe {file} measures on yours.
[[learners]]
name = "site"
count = {count}
time_per_batch = 0.1

[[learners]]
name = "slow-site"
count = 1
time_per_batch = 1.0

# What Flower's FedAvg does: everybody trains as long as the app does in a round, and waits for the slowest.
[[policy]]
name = "sync_fedavg"
local_epochs = {epochs}

# Nobody waits: until the slowest has done an epoch, the others go on training.
[[policy]]
name = "semisync_fedavg"
slowest_learner_epochs = 1

[stop]
rounds = {rounds}
"""
