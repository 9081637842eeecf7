"""One TOML file describes an experiment; it is checked whole before anything starts.

`schema.py` has the tables and keys, `tables.py` the keys next to a name, `checks.py` what must fit together,
`errors.py` the sentences, `complete.py` the defaults. A typo never becomes a default.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from metis.core.layers import LAYERS
from metis.core.policies import POLICIES
from metis.errors import ConfigError
from metis.experiments.config.checks import check_files, check_policies, check_site, cross_check, network_parameters
from metis.experiments.config.complete import completed, labelled, slug
from metis.experiments.config.errors import ConfigErrors, did_you_mean, shown, table_at
from metis.experiments.config.kinds import Table
from metis.experiments.config.schema import (
    METRICS,
    ExperimentConfig,
    FaultsConfig,
    LearnerGroup,
    Operation,
    PolicyConfig,
    SolverConfig,
    TrainingConfig,
    task_of,
)
from metis.experiments.config.tables import (
    OPERATIONS,
    check_open_tables,
    layer_model,
    operation_model,
    solver_model,
    table_model,
)
from metis.learning.engine import SOLVERS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "METRICS",
    "ExperimentConfig",
    "FaultsConfig",
    "LearnerGroup",
    "Operation",
    "PolicyConfig",
    "SolverConfig",
    "Table",
    "TrainingConfig",
    "config_schema",
    "did_you_mean",
    "load_config",
    "network_parameters",
    "read_toml",
    "resolve_config",
    "slug",
    "task_of",
]


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """The file, changed by `key.path=value` overrides, checked and completed; an error lists all mistakes."""
    path = Path(path)
    return resolve_config(read_toml(path), path.name, overrides, folder=path.parent)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file as they stand."""
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text("utf-8-sig"))
        return tables
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}; write an example with: metis init {path}") from None
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path.name}: not a text file in UTF-8 ({problem.reason})") from None
    except tomllib.TOMLDecodeError as problem:
        message, position = _split_position(str(problem))
        raise ConfigError(f"{path.name}: {position}{message}") from None
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {problem.strerror}") from None


def resolve_config(
    content: Mapping[str, Any],
    source: str,
    overrides: Sequence[str] = (),
    *,
    folder: Path | None = None,
    elsewhere: bool = False,
) -> ExperimentConfig:
    """What these tables say; `source` names them in errors, the paths in them are relative to `folder`.

    Tables that come from another machine speak of its files and processors: `elsewhere` leaves those unchecked.
    """
    raw = cast("dict[str, Any]", _copied(content))
    errors = ConfigErrors(source)
    for override in overrides:
        errors.overridden[_apply_override(raw, override)] = getattr(override, "option", "--set")
    errors.single_policy = isinstance(raw.get("policy"), dict)
    if errors.single_policy:
        raw["policy"] = [raw["policy"]]
    _expand_operations(raw)
    _count_names(raw)
    check_site(raw, errors)
    check_open_tables(raw, errors)
    try:
        config = ExperimentConfig.model_validate(raw)
    except ValidationError as problem:
        errors.add_validation(problem, raw, ExperimentConfig)
        raise errors.error() from None
    cross_check(config, errors, elsewhere=elsewhere)
    check_policies(config, errors)
    errors.raise_if_any()
    config = completed(config, folder)
    if not elsewhere:
        check_files(config, errors)
    errors.raise_if_any()
    config = labelled(config, errors)
    errors.raise_if_any()
    return config


def _split_position(message: str) -> tuple[str, str]:
    found = re.search(r"\s*\(at (line \d+, column \d+|end of document)\)", message)
    if not found:
        return message, ""
    text = message[: found.start()]
    return text[:1].lower() + text[1:], f"{found.group(1)}: "


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, (list, tuple)) else value


def _expand_operations(raw: dict[str, Any]) -> None:
    """ "horizontal_flip" is short for {name = "horizontal_flip"}."""
    data = raw.get("data")
    if isinstance(data, dict) and isinstance(data.get("augment"), list):
        data["augment"] = [{"name": item} if isinstance(item, str) else item for item in data["augment"]]


def _count_names(raw: dict[str, Any]) -> None:
    """A group that names its learners has as many as it names."""
    groups = raw.get("learners")
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, dict) and isinstance(group.get("names"), list) and group["names"]:
            group.setdefault("count", len(group["names"]))


def _apply_override(raw: dict[str, Any], override: str) -> str:
    """Change one value; return its path, or that of the first table that was made for it."""
    path, equals, text = override.partition("=")
    path = path.strip()
    names = path.split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set {override}: write key.path=value, as in learners.0.count=3")
    target: Any = raw
    made: str | None = None
    for depth, name in enumerate(names):
        last = depth == len(names) - 1
        here = ".".join(names[:depth])
        if isinstance(target, list):
            if not (name.isdecimal() and int(name) < len(target)):
                known = f"0 to {len(target) - 1}" if len(target) > 1 else "0"
                raise ConfigError(
                    f"--set {path}: {here} is a list, so its entries are numbered {known}, as in "
                    f"{'.'.join([here, *_numbered(names, depth, target)])}"
                )
            key: Any = int(name)
        elif isinstance(target, dict):
            key = name
        else:
            raise ConfigError(f"--set {path}: {here} is {shown(target)}, so it has no keys")
        if last:
            target[key] = _toml_value(text.strip())
            if path in ("policy", "network") and isinstance(target[key], str):
                raise ConfigError(f"--set {path}: is a table; write {path}.name={text.strip()}")
        else:
            if isinstance(target, dict) and key not in target:
                made = made or ".".join(names[: depth + 1])
                target[key] = {}
            target = target[key]
    return made or path


def _numbered(names: Sequence[str], depth: int, entries: Sequence[Any]) -> list[str]:
    """The rest of a path into a list, as it should be: a number before the key of an entry, or in place of a name."""
    name, *rest = names[depth:]
    called = [str(k) for k, entry in enumerate(entries) if isinstance(entry, dict) and entry.get("name") == name]
    is_key = not rest or name in table_at(ExperimentConfig, names[:depth]) or name in LAYERS
    if is_key and not called and not name.isdecimal():
        return ["0", name, *rest]
    return [called[0] if called else "0", *rest]


def _toml_value(text: str) -> Any:
    """The value in TOML's syntax, or the text itself: `--set policy.name=fedrec` needs no quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def config_schema() -> dict[str, Any]:
    """The JSON schema of the file; under `policies`, `layers`, `solvers` and `operations` those of the
    keys next to a name."""
    schema = ExperimentConfig.model_json_schema()
    schema["policies"] = {name: table_model(function).model_json_schema() for name, function in POLICIES.items()}
    schema["layers"] = {
        key: {choice: layer_model(layer).model_json_schema() for choice, layer in kind.classes.items()}
        for key, kind in LAYERS.items()
        if kind.in_files
    }
    schema["solvers"] = {name: solver_model(name).model_json_schema() for name in SOLVERS}
    schema["operations"] = {name: operation_model(name).model_json_schema() for name in OPERATIONS}
    return schema
