"""One TOML file describes an experiment; it is checked whole before anything starts.

The tables and keys are the fields of the classes below. Two tables are open: `[[policy]]` takes the
parameters of the policy that it names, `[network]` the options of the network that it names; both are checked
against the signature of the function in question, so that a typo never becomes a default.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import tomlkit
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, create_model

from metis.core import policies
from metis.core.community import MemoryStore
from metis.core.model import Model
from metis.core.policies import Policy
from metis.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

POLICIES: dict[str, Callable[..., Policy]] = {
    "sync_fedavg": policies.sync_fedavg,
    "semisync_fedavg": policies.semisync_fedavg,
    "async_fedavg": policies.async_fedavg,
    "fedrec": policies.fedrec,
    "fedasync": policies.fedasync,
    "fedbuff": policies.fedbuff,
}

# What each task's evaluation measures; the first is the default. The sign says which way is better.
METRICS: dict[str, dict[str, bool]] = {
    "classification": {"accuracy": True, "loss": False},
    "regression": {"mae": False, "loss": False},
}

# Which settings a solver has beside the learning rate and the weight decay.
SOLVER_SETTINGS: dict[str, frozenset[str]] = {
    "vanilla": frozenset(),
    "momentum": frozenset({"momentum", "keep_momentum"}),
    "fedprox": frozenset({"proximal_term", "momentum", "keep_momentum"}),
}

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[FiniteFloat, Field(gt=0)]
NotNegative = Annotated[FiniteFloat, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class Table(BaseModel):
    """A table whose keys are all known."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class OpenTable(BaseModel):
    """A table that also takes the parameters of whatever its `name` names."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters beside the keys that every such table has."""
        return dict(self.model_extra or {})


class Operation(OpenTable):
    """One step of an augmentation."""

    name: Literal["random_crop", "horizontal_flip", "standardize"]


class DataConfig(Table):
    """Which examples there are."""

    dataset: str = Field(default="digits", description="name of a data set; `metis data list` shows them")
    folder: str | None = Field(default=None, description="folder with NAME.npz; else METIS_DATA, the cache, a download")
    train_examples: Count | None = Field(default=None, description="use this many training examples, drawn at random")
    test_examples: Count | None = Field(
        default=None, description="evaluate on this many test examples, drawn at random"
    )
    smallest_site: Count | None = Field(
        default=None, description="merge sites of fewer people, for the sets that come from several sites"
    )
    normalise: bool = Field(
        default=True, description="to mean 0 and standard deviation 1 a channel, as measured in training"
    )
    augment: list[Operation] = Field(default=[], description="batched operations on the training images, in this order")


class PartitionConfig(Table):
    """Who holds how much of what."""

    sizes: Literal["uniform", "skewed", "power_law", "zipf", "explicit", "natural"] = Field(
        default="uniform", description="natural: one learner for each silo that the data set names"
    )
    exponent: Positive | None = Field(
        default=None, description="of power_law (exponent^-rank) or zipf (rank^-exponent); 1.5"
    )
    explicit: list[Count] | None = Field(default=None, description="examples of each learner, for sizes = 'explicit'")
    classes: Literal["iid", "non_iid", "dirichlet", "target_ranges"] = "iid"
    classes_per_learner: Count | list[Count] | None = Field(
        default=None, description="x of Non-IID(x), or one for each learner"
    )
    alpha: Positive | None = Field(default=None, description="of Dirichlet(alpha): small is few classes a learner")
    assignment: Literal["alternate", "in_order"] = Field(
        default="alternate",
        description="largest share to the first group, next to the second, and so on; or group by group",
    )


class AvailabilityConfig(Table):
    """When the learners of a group are there."""

    kind: Literal["always", "random", "trace"] = "always"
    mean_present: Positive | None = Field(default=None, description="seconds, for kind = 'random'")
    mean_away: Positive | None = Field(default=None, description="seconds, for kind = 'random'")
    file: str | None = Field(
        default=None, description="CSV with columns leaves,back and optionally learner, for kind = 'trace'"
    )


class LinkConfig(Table):
    """How far the learners of a group are from the controller."""

    latency: Seconds = Field(default=0.0, description="seconds, one way")
    upload_mbps: Positive | None = Field(
        default=None, description="megabits a second; without it transfers take no time"
    )
    download_mbps: Positive | None = Field(default=None, description="megabits a second")


class LearnerGroup(Table):
    """Learners that are alike."""

    name: str = Field(min_length=1, description="the learners are called name-1, name-2, ...")
    count: Count = 1
    batch_size: Count
    time_per_batch: Positive | None = Field(default=None, description="seconds")
    jitter: NotNegative = Field(default=0.0, description="standard deviation of the logarithm of a batch's time")
    drift: list[Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]] = Field(
        default=[], description="[[second, factor], ...]: from then on a batch takes factor times as long"
    )
    speed_trace: str | None = Field(
        default=None, description="CSV with columns at,time_per_batch and optionally learner"
    )
    availability: AvailabilityConfig = AvailabilityConfig()
    network: LinkConfig = LinkConfig()
    epsilon: NotNegative | None = Field(
        default=None, description="relative power while training (the paper: GPU 2, CPU 1)"
    )
    idle_epsilon: NotNegative | None = Field(
        default=None, description="relative power while idle; without it as while training"
    )
    watts: NotNegative | None = Field(default=None, description="power while training, instead of epsilon")
    idle_watts: NotNegative | None = Field(default=None, description="power while idle")


class NetworkConfig(OpenTable):
    """What is trained: a network by name, with its own options beside the name."""

    name: str = "mlp"


class SolverConfig(Table):
    """How one gradient changes the weights; what is not given comes from [training]."""

    solver: Literal["vanilla", "momentum", "fedprox"] | None = None
    learning_rate: Positive | None = None
    momentum: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = None
    keep_momentum: bool | None = Field(default=None, description="whether the momentum outlives a task (R5)")
    proximal_term: NotNegative | None = Field(default=None, description="mu of FedProx")
    weight_decay: NotNegative | None = None


class TrainingConfig(Table):
    """How learners train; the policies may differ in the solver."""

    solver: Literal["vanilla", "momentum", "fedprox"] = "vanilla"
    learning_rate: Positive = 0.05
    momentum: Annotated[FiniteFloat, Field(ge=0, lt=1)] | None = Field(
        default=None, description="gamma; 0.9 if not given"
    )
    keep_momentum: bool | None = Field(default=None, description="whether the momentum outlives a task (R5); false")
    proximal_term: NotNegative | None = Field(default=None, description="mu of FedProx; 0.001 if not given")
    weight_decay: NotNegative = 0.0
    task: Literal["classification", "regression"] | None = Field(
        default=None, description="if not that of the data set"
    )
    device: str = "cpu"
    dtype: Literal["float32", "float64", "float16", "bfloat16"] = "float32"
    threads: Count = Field(default=1, description="torch threads of each process")
    buffers: Literal["average", "local"] = Field(
        default="average", description="BatchNorm statistics: mixed or kept (R10)"
    )


class PolicyConfig(OpenTable):
    """A policy by name, with its own parameters beside the name."""

    name: str
    label: str | None = Field(default=None, min_length=1, description="how tables and figures call it")
    training: SolverConfig = Field(default=SolverConfig(), description="solver settings of this policy only")


class StopConfig(Table):
    """The run ends at whichever comes first."""

    rounds: Count | None = Field(default=None, description="published community models")
    seconds: Positive | None = Field(default=None, description="of virtual time")
    update_requests: Count | None = None
    steps: Count | None = Field(default=None, description="local steps of all learners together")
    at_target: bool = Field(default=False, description="stop as soon as evaluation.target is reached")


class EvaluationConfig(Table):
    """How the community model is judged, on the test examples and outside virtual time."""

    metric: str | None = Field(default=None, description="accuracy or loss; for a regression mae or loss")
    target: FiniteFloat | None = Field(default=None, description="the value of the metric that costs are compared at")
    every_seconds: Seconds = Field(default=0.0, description="of virtual time; 0 is every published community model")


class RunConfig(Table):
    """How it is run; apart from `refusals_allowed` none of it changes the result."""

    workers: Annotated[int, Field(ge=0)] = Field(default=0, description="processes that train; 0 trains in this one")
    store: Literal["memory", "disk"] = Field(default="memory", description="where the learners' latest models are kept")
    refusals_allowed: Annotated[int, Field(ge=0)] = Field(
        default=3, description="refused updates in a row after which a learner is set aside"
    )
    checkpoint_every: Positive = Field(default=60.0, description="seconds of real time between checkpoints")


class ExperimentConfig(Table):
    """Everything that one file says."""

    seed: Annotated[int, Field(ge=0)] = 1990
    data: DataConfig = DataConfig()
    partition: PartitionConfig = PartitionConfig()
    learners: list[LearnerGroup] = Field(min_length=1)
    network: NetworkConfig = NetworkConfig()
    training: TrainingConfig = TrainingConfig()
    policy: list[PolicyConfig] = Field(min_length=1)
    stop: StopConfig = StopConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()

    @property
    def learner_count(self) -> int:
        return sum(group.count for group in self.learners)

    def to_dict(self) -> dict[str, Any]:
        """Plain values without what was left open: the content of a TOML file."""
        return cast("dict[str, Any]", _without_nones(self.model_dump()))

    def to_toml(self) -> str:
        """A TOML file that loads to the same configuration."""
        return tomlkit.dumps(self.to_dict())


def task_of(config: ExperimentConfig) -> Literal["classification", "regression"]:
    """Classification or regression: as the file says, else as the data set is."""
    from metis.data.datasets import DATASETS

    if config.training.task is not None:
        return config.training.task
    return DATASETS[config.data.dataset].task if config.data.dataset in DATASETS else "classification"


def config_schema() -> dict[str, Any]:
    """The JSON schema of the file, and under `policies` that of each policy's parameters."""
    schema = ExperimentConfig.model_json_schema()
    schema["policies"] = {name: signature_model(function).model_json_schema() for name, function in POLICIES.items()}
    return schema


# --- loading ----------------------------------------------------------------------------------


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """The file, changed by `key.path=value` overrides, checked and completed; an error lists all faults."""
    path = Path(path)
    return resolve_config(read_toml(path), path.name, overrides, folder=path.parent)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file as they stand."""
    try:
        return cast("dict[str, Any]", tomllib.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}; write an example with: metis init {path}") from None
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path.name}: not a text file in UTF-8 ({problem.reason})") from None
    except tomllib.TOMLDecodeError as problem:
        message, place = _split_place(str(problem))
        raise ConfigError(f"{path.name}: {place}{message}") from None
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {problem.strerror}") from None


def resolve_config(
    content: Mapping[str, Any], source: str, overrides: Sequence[str] = (), *, folder: Path | None = None
) -> ExperimentConfig:
    """What these tables say; `source` names them in errors, the paths in them are relative to `folder`."""
    raw = cast("dict[str, Any]", _copied(content))
    complaints = _Complaints(source)
    for override in overrides:
        complaints.overridden.append(_apply_override(raw, override))
    complaints.single_policy = isinstance(raw.get("policy"), dict)
    if complaints.single_policy:
        raw["policy"] = [raw["policy"]]
    _expand_operations(raw)
    try:
        config = ExperimentConfig.model_validate(raw)
    except ValidationError as problem:
        complaints.add_validation(problem, raw, ExperimentConfig)
        _check_open_tables(raw, complaints)
        raise complaints.error() from None
    _check_open_tables(raw, complaints)
    _cross_check(config, complaints)
    _check_policies(config, complaints)
    complaints.raise_if_any()
    config = _completed(config, folder)
    _check_files(config, complaints)
    complaints.raise_if_any()
    config = _labelled(config, complaints)
    complaints.raise_if_any()
    return config


def _split_place(message: str) -> tuple[str, str]:
    found = re.search(r"\s*\(at (line \d+, column \d+|end of document)\)", message)
    if not found:
        return message, ""
    text = message[: found.start()]
    return text[:1].lower() + text[1:], f"{found.group(1)}: "


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, (list, tuple)) else value


def _without_nones(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nones(item) for key, item in value.items() if item is not None}
    return [_without_nones(item) for item in value] if isinstance(value, (list, tuple)) else value


def _expand_operations(raw: dict[str, Any]) -> None:
    """ "horizontal_flip" is short for {name = "horizontal_flip"}."""
    data = raw.get("data")
    if isinstance(data, dict) and isinstance(data.get("augment"), list):
        data["augment"] = [{"name": item} if isinstance(item, str) else item for item in data["augment"]]


def _apply_override(raw: dict[str, Any], override: str) -> str:
    """Change one value; return its path."""
    path, equals, text = override.partition("=")
    path = path.strip()
    names = path.split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set {override}: write key.path=value, as in learners.0.count=3")
    place: Any = raw
    for depth, name in enumerate(names):
        last = depth == len(names) - 1
        here = ".".join(names[:depth])
        if isinstance(place, list):
            if not (name.isdecimal() and int(name) < len(place)):
                known = f"0 to {len(place) - 1}" if len(place) > 1 else "0"
                raise ConfigError(
                    f"--set {path}: {here} is a list, so its entries are numbered {known}, as in "
                    f"{'.'.join([here, '0', *names[depth + name.isdecimal() :]])}"
                )
            key: Any = int(name)
        elif isinstance(place, dict):
            key = name
        else:
            raise ConfigError(f"--set {path}: {here} is {_shown(place)}, so it has no keys")
        if last:
            place[key] = _toml_value(text.strip())
        else:
            place = place.setdefault(key, {}) if isinstance(place, dict) else place[key]
    return path


def _toml_value(text: str) -> Any:
    """The value in TOML's syntax, or the text itself: `--set policy.name=fedrec` needs no quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


# --- complaints -------------------------------------------------------------------------------

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text in quotes",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "finite_number": "a finite number",
}
_LIMITS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


# The symbols of the paper and of other programs, for what is called by its full name here.
_ALSO_CALLED = {
    "lambda": "slowest_learner_epochs",
    "epochs": "local_epochs",
    "lr": "learning_rate",
    "eta": "learning_rate",
    "gamma": "momentum",
    "mu": "proximal_term",
    "rho": "regularization",
    "beta": "batch_size",
    "normalize": "normalise",
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant."""
    known = list(known)
    if _ALSO_CALLED.get(name.lower()) in known:
        return _ALSO_CALLED[name.lower()]

    def likeness(item: str) -> float:
        whole = difflib.SequenceMatcher(None, name.lower(), item.lower()).ratio()
        # "semisink" for "semisync_fedavg", "flip" for "horizontal_flip": a part that is nearly right.
        parts = (item[: len(name)], item[-len(name) :]) if len(name) > 2 else ()
        return max(
            [whole, *(0.9 * difflib.SequenceMatcher(None, name.lower(), part.lower()).ratio() for part in parts)]
        )

    best = max(known, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.6 else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest known name as a question, or the list of all."""
    known = list(known)
    guess = nearest(name, known)
    return f"did you mean '{guess}'?" if guess else f"known are {', '.join(known)}" if known else "it takes none"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list" if len(value) > 6 or any(isinstance(item, (dict, list)) for item in value) else str(value)
    return f"'{value}'" if isinstance(value, str) else str(value)


class _Complaints:
    """Everything that is wrong with one file, one line each."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.single_policy = False
        self.overridden: list[str] = []
        self.lines: list[str] = []

    def add(self, path: Sequence[str | int], message: str) -> None:
        if self.single_policy and list(path[:2]) == ["policy", 0]:
            path = ["policy", *path[2:]]
        name = ".".join(str(part) for part in path)
        by_hand = any(name == key or name.startswith(f"{key}.") for key in self.overridden)
        line = f"--set {name}: {message}" if by_hand else f"{self.source}: {name}: {message}"
        if line not in self.lines:
            self.lines.append(line)

    def add_validation(
        self, problem: ValidationError, raw: Any, model: type[BaseModel], prefix: Sequence[str | int] = ()
    ) -> None:
        """Pydantic's findings in our words; several about one place (a union) become one."""
        expected: dict[tuple[str | int, ...], list[str]] = {}
        given: dict[tuple[str | int, ...], Any] = {}
        for found in problem.errors(include_url=False):
            kind, context = found["type"], found.get("ctx", {})
            path = _place(found["loc"], raw, keep_last=kind in ("missing", "extra_forbidden"))
            if kind == "extra_forbidden":
                self.add(
                    [*prefix, *path],
                    f"unknown key; {did_you_mean(str(path[-1]), _fields_at(model, path[:-1]))}",
                )
            elif kind == "missing":
                self.add([*prefix, *path], f"missing; {_missing_hint(path)}")
            elif kind in ("too_short", "string_too_short", "too_long"):
                self.add([*prefix, *path], _length_hint(path, context, found["input"]))
            elif kind == "literal_error":
                known = re.findall(r"'([^']*)'", context["expected"])
                tail = f"; {did_you_mean(found['input'], known)}" if isinstance(found["input"], str) else ""
                tail = tail if "did you mean" in tail else ""
                self.add([*prefix, *path], f"is {_shown(found['input'])}, must be one of {', '.join(known)}{tail}")
            else:
                text = _EXPECTED.get(kind)
                if kind in _LIMITS:
                    words, key = _LIMITS[kind]
                    text = f"{words} {context[key]:g}"
                expected.setdefault(tuple(path), []).append(text or found["msg"])
                given[tuple(path)] = found["input"]
        for place, texts in expected.items():
            unique = list(dict.fromkeys(texts))
            # Of a union the branch that came closest counts: not "a whole number" for an entry of a list.
            if any(other[: len(place)] == place and other != place for other in expected):
                continue
            hint = ": write [[learners]], with two brackets" if list(place) == ["learners"] else ""
            self.add([*prefix, *place], f"is {_shown(given[place])}, must be {' or '.join(unique)}{hint}")

    def error(self) -> ConfigError:
        return ConfigError("\n".join(self.lines))

    def raise_if_any(self) -> None:
        if self.lines:
            raise self.error()


def _place(location: Sequence[str | int], raw: Any, *, keep_last: bool) -> list[str | int]:
    """Pydantic's location without the names of union branches, which are not in the file."""
    path: list[str | int] = []
    here = raw
    for depth, part in enumerate(location):
        if (isinstance(here, dict) and part in here) or (isinstance(here, list) and isinstance(part, int)):
            here = cast("Any", here)[part]
            path.append(part)
        elif keep_last and depth == len(location) - 1:
            path.append(part)
    return path


def _fields_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """The keys that the table at this path has."""
    current: Any = model
    for part in path:
        if isinstance(part, int):
            continue
        current = _model_in(current.model_fields[part].annotation) if part in current.model_fields else None
        if current is None:
            return []
    return list(current.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for item in typing.get_args(annotation) if (found := _model_in(item)) is not None), None)


def _missing_hint(path: Sequence[str | int]) -> str:
    hints = {
        "learners": "say who learns, in at least one table [[learners]]",
        "policy": f"choose one of {', '.join(POLICIES)} in a table [policy]",
        "batch_size": "say how many examples a batch has, as in batch_size = 100",
    }
    return hints.get(str(path[-1]), "it must be given")


def _length_hint(path: Sequence[str | int], context: Mapping[str, Any], value: Any) -> str:
    if "drift" in path:
        return f"is {_shown(value)}, must be a pair [second, factor]"
    if path and path[0] in ("learners", "policy") and len(path) == 1:
        return f"is empty; {_missing_hint(path)}"
    return f"is {_shown(value)}, must have at least {context.get('min_length', 1)} entry"


# --- names that are looked up -----------------------------------------------------------------


def signature_model(function: Callable[..., Any], skip: int = 0) -> type[BaseModel]:
    """A strict table whose keys are the parameters of a function, after the first `skip`."""
    hints = typing.get_type_hints(function)
    fields: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(function).parameters.items())[skip:]:
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        annotation = hints.get(name, Any)
        if typing.get_origin(annotation) in (Sequence, tuple):  # TOML has lists
            annotation = list[typing.get_args(annotation)[0]]  # type: ignore[misc]
            default = list(default) if isinstance(default, tuple) else default
        fields[name] = (annotation, default)
    return create_model(function.__name__, __base__=Table, **fields)


def check_parameters(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    complaints: _Complaints,
    path: Sequence[str | int],
    skip: int = 0,
) -> dict[str, Any]:
    """All parameters of a function with the defaults filled in; what is wrong goes to the complaints."""
    model = signature_model(function, skip)
    try:
        return model.model_validate(dict(given)).model_dump()
    except ValidationError as problem:
        complaints.add_validation(problem, dict(given), model, path)
        return {}


def network_parameters(
    config: ExperimentConfig, networks: Mapping[str, Callable[..., Any]], source: str
) -> dict[str, Any]:
    """The options of the network, checked against the function that makes it."""
    complaints = _Complaints(source)
    name = config.network.name
    if name not in networks:
        complaints.add(["network", "name"], f"there is no network '{name}'; {did_you_mean(name, networks)}")
        raise complaints.error()
    options = check_parameters(networks[name], config.network.parameters, complaints, ["network"], skip=2)
    complaints.raise_if_any()
    return options


_OPERATIONS: dict[str, dict[str, Any]] = {
    "random_crop": {"size": (Count, ...), "padding": (Annotated[int, Field(ge=0)], 0)},
    "horizontal_flip": {"probability": (Annotated[float, Field(ge=0, le=1)], 0.5)},
    "standardize": {},
}


def _check_open_tables(raw: dict[str, Any], complaints: _Complaints) -> None:
    """The parameters of policies and operations, in the file's own terms so that every error has its path."""
    listed = raw.get("policy")
    for place, entry in enumerate(listed if isinstance(listed, list) else []):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            continue
        name = entry["name"]
        if name not in POLICIES:
            complaints.add(["policy", place, "name"], f"there is no policy '{name}'; {did_you_mean(name, POLICIES)}")
            continue
        given = {key: value for key, value in entry.items() if key not in PolicyConfig.model_fields}
        check_parameters(POLICIES[name], given, complaints, ["policy", place])
    data = raw.get("data")
    augment = data.get("augment") if isinstance(data, dict) else None
    for place, entry in enumerate(augment if isinstance(augment, list) else []):
        if isinstance(entry, dict) and entry.get("name") in _OPERATIONS:
            model: type[BaseModel] = create_model("operation", __base__=Table, **_OPERATIONS[entry["name"]])
            given = {key: value for key, value in entry.items() if key != "name"}
            try:
                model.model_validate(given)
            except ValidationError as problem:
                complaints.add_validation(problem, given, model, ["data", "augment", place])


# --- what depends on several keys -------------------------------------------------------------


def _cross_check(config: ExperimentConfig, complaints: _Complaints) -> None:
    from metis.data.datasets import DATASETS

    if config.data.dataset in DATASETS:
        source = DATASETS[config.data.dataset]
        _check_examples(config, source.train, source.test, complaints)
        if config.data.smallest_site is not None and "smallest_site" not in source.options:
            complaints.add(["data", "smallest_site"], f"is given, but {source.name} names no sites")
    else:
        name = config.data.dataset
        complaints.add(["data", "dataset"], f"there is no data set '{name}'; {did_you_mean(name, DATASETS)}")
    _check_partition(config, complaints)
    _check_learners(config, complaints)
    _check_solvers(config, complaints)
    _check_stop(config, complaints)


def _check_examples(config: ExperimentConfig, train: int, test: int, complaints: _Complaints) -> None:
    for key, there_are in (("train_examples", train), ("test_examples", test)):
        wanted = getattr(config.data, key)
        if wanted is not None and wanted > there_are:
            complaints.add(["data", key], f"is {wanted}, but {config.data.dataset} has {there_are:,}")
    examples = min(train, config.data.train_examples or train)
    if config.learner_count > examples:
        complaints.add(
            ["learners"],
            f"are {config.learner_count:,}, but there are {examples:,} examples: each needs at least one",
        )
    if config.partition.explicit is not None and sum(config.partition.explicit) > examples:
        complaints.add(
            ["partition", "explicit"],
            f"adds up to {sum(config.partition.explicit):,}, but there are {examples:,} examples",
        )


def _check_partition(config: ExperimentConfig, complaints: _Complaints) -> None:
    partition, learners = config.partition, config.learner_count
    if partition.sizes == "natural" and partition.classes != "iid":
        complaints.add(["partition", "classes"], "is given, but sizes = 'natural' keeps what each silo holds")
    needs = {
        "exponent": ("sizes", ("power_law", "zipf"), False),
        "explicit": ("sizes", ("explicit",), True),
        "classes_per_learner": ("classes", ("non_iid",), True),
        "alpha": ("classes", ("dirichlet",), True),
    }
    for key, (chooser, choices, required) in needs.items():
        choice, given = getattr(partition, chooser), getattr(partition, key) is not None
        if given and choice not in choices:
            complaints.add(
                ["partition", key],
                f"is given, but {chooser} = '{choice}' does not use it; {' or '.join(choices)} would",
            )
        if required and not given and choice in choices:
            complaints.add(["partition", key], f"missing; {chooser} = '{choice}' needs it")
    for key in ("explicit", "classes_per_learner"):
        listed = getattr(partition, key)
        if isinstance(listed, list) and len(listed) != learners:
            complaints.add(
                ["partition", key],
                f"has {len(listed)} entries, must have one for each of the {learners} learners",
            )


def _check_learners(config: ExperimentConfig, complaints: _Complaints) -> None:
    names = [group.name for group in config.learners]
    for place, group in enumerate(config.learners):
        at: list[str | int] = ["learners", place]
        if names.index(group.name) != place:
            complaints.add([*at, "name"], f"is '{group.name}', which another group is called already")
        if group.time_per_batch is None and group.speed_trace is None:
            complaints.add([*at, "time_per_batch"], "missing; give it in seconds, or a speed_trace")
        if group.speed_trace is not None and (group.time_per_batch is not None or group.drift):
            both = "drift" if group.drift else "time_per_batch"
            complaints.add([*at, "speed_trace"], f"is given together with {both}; the trace says it all")
        if any(factor <= 0 for _, factor in group.drift):
            complaints.add([*at, "drift"], "has a factor that is not greater than 0")
        if [at_second for at_second, _ in group.drift] != sorted(at_second for at_second, _ in group.drift):
            complaints.add([*at, "drift"], "must be in order of time")
        _check_availability(group.availability, [*at, "availability"], complaints)
        for key, needed in (("idle_watts", "watts"), ("idle_epsilon", "epsilon")):
            if getattr(group, key) is not None and getattr(group, needed) is None:
                complaints.add([*at, key], f"is given without {needed}")
    relative = [group.name for group in config.learners if group.watts is None]
    if len(relative) != len(config.learners):
        for place, group in enumerate(config.learners):
            if group.watts is None:
                complaints.add(
                    ["learners", place, "watts"],
                    "missing; other learners have watts, and watts and epsilon cannot be added up",
                )
            elif group.epsilon is not None:
                complaints.add(["learners", place, "epsilon"], "is given together with watts; keep one of them")


def _check_availability(availability: AvailabilityConfig, at: list[str | int], complaints: _Complaints) -> None:
    wanted = {"always": set[str](), "random": {"mean_present", "mean_away"}, "trace": {"file"}}[availability.kind]
    for key in ("mean_present", "mean_away", "file"):
        given = getattr(availability, key) is not None
        if given and key not in wanted:
            complaints.add([*at, key], f"is given, but kind = '{availability.kind}' does not use it")
        if not given and key in wanted:
            complaints.add([*at, key], f"missing; kind = '{availability.kind}' needs it")


def _check_solvers(config: ExperimentConfig, complaints: _Complaints) -> None:
    settings = ("momentum", "keep_momentum", "proximal_term")
    used = set(SOLVER_SETTINGS[config.training.solver])
    for place, policy in enumerate(config.policy):
        solver = _solver_of(policy, config.training)
        used |= _inherited(policy, config.training)
        for key in settings:
            if getattr(policy.training, key) is not None and key not in SOLVER_SETTINGS[solver]:
                complaints.add(["policy", place, "training", key], _unused(key, solver))
    for key in settings:
        if getattr(config.training, key) is not None and key not in used:
            complaints.add(["training", key], _unused(key, config.training.solver))


def _unused(key: str, solver: str) -> str:
    takers = [f"'{name}'" for name, settings in SOLVER_SETTINGS.items() if key in settings]
    return f"is given, but solver = '{solver}' does not use it; {' and '.join(takers)} would"


def _check_stop(config: ExperimentConfig, complaints: _Complaints) -> None:
    stop, evaluation = config.stop, config.evaluation
    if (stop.rounds, stop.seconds, stop.update_requests, stop.steps) == (None,) * 4:
        alone = "at_target alone may never come true; " if stop.at_target else ""
        complaints.add(["stop"], f"{alone}the run would not end; give rounds, seconds, update_requests or steps")
    if stop.at_target and evaluation.target is None:
        complaints.add(["evaluation", "target"], "missing; stop.at_target needs it")
    task = task_of(config)
    if evaluation.metric is not None and evaluation.metric not in METRICS[task]:
        known = METRICS[task]
        complaints.add(
            ["evaluation", "metric"],
            f"is '{evaluation.metric}', must be one of {', '.join(known)} for {task}",
        )
    metric, target = evaluation.metric or next(iter(METRICS[task])), evaluation.target
    if target is not None and metric == "accuracy" and not 0 < target <= 1:
        complaints.add(["evaluation", "target"], f"is {target:g}, an accuracy lies between 0 and 1")


def _check_policies(config: ExperimentConfig, complaints: _Complaints) -> None:
    """The policies themselves know which values are impossible (lambda = 0)."""
    for place, policy in enumerate(config.policy):
        try:
            known = signature_model(POLICIES[policy.name]).model_validate(policy.parameters)
            made = POLICIES[policy.name](**known.model_dump())
            made.community(Model.empty(), MemoryStore())
        except (KeyError, ValidationError):
            continue  # its name or its keys have been complained about
        except ValueError as problem:
            text = str(problem)
            key = next((name for name in policy.parameters if text.startswith(name)), None)
            path: list[str | int] = ["policy", place, *([key] if key else [])]
            # "slowest_learner_epochs (lambda) must be ...": the path has said the name, the symbol may stay.
            complaints.add(path, re.sub(r"^\w+\s*\(?(\w+)\)?", r"\1", text) if key else text)


def _check_files(config: ExperimentConfig, complaints: _Complaints) -> None:
    for place, group in enumerate(config.learners):
        at: list[str | int] = ["learners", place]
        for path, file in (
            ([*at, "speed_trace"], group.speed_trace),
            ([*at, "availability", "file"], group.availability.file),
        ):
            if file is not None and not Path(file).is_file():
                complaints.add(path, f"there is no file {file}")
    if config.data.folder is not None and not Path(config.data.folder).is_dir():
        complaints.add(["data", "folder"], f"there is no folder {config.data.folder}")


# --- completing -------------------------------------------------------------------------------


def _solver_of(policy: PolicyConfig, training: TrainingConfig) -> str:
    return policy.training.solver or training.solver


def _inherited(policy: PolicyConfig, training: TrainingConfig) -> frozenset[str]:
    """Which settings of [training] a policy's solver takes over; the rest was meant for other solvers."""
    solver = _solver_of(policy, training)
    if solver == "fedprox" and training.solver != "fedprox":
        return frozenset({"proximal_term"})  # the paper's FedProx has no momentum
    return SOLVER_SETTINGS[solver]


def _solver_settings(policy: PolicyConfig, training: TrainingConfig) -> SolverConfig:
    """What the policy says, else what [training] says, else the default; only what the solver uses."""
    solver = _solver_of(policy, training)
    values: dict[str, Any] = {
        "momentum": 0.9 if solver == "momentum" else 0.0,
        "keep_momentum": False,
        "proximal_term": 0.001,
    }
    for key in ("learning_rate", "weight_decay", *_inherited(policy, training)):
        if getattr(training, key) is not None:
            values[key] = getattr(training, key)
    values |= policy.training.model_dump(exclude_none=True)
    kept = {"learning_rate", "weight_decay", *SOLVER_SETTINGS[solver]}
    return SolverConfig(solver=cast("Any", solver), **{key: value for key, value in values.items() if key in kept})


def _completed(config: ExperimentConfig, folder: Path | None) -> ExperimentConfig:
    """Every default written out, files by their full path: the same run wherever the file is moved."""
    training = config.training
    chosen = [
        PolicyConfig(
            name=policy.name,
            label=policy.label,
            training=_solver_settings(policy, training),
            **signature_model(POLICIES[policy.name]).model_validate(policy.parameters).model_dump(),
        )
        for policy in config.policy
    ]
    task = task_of(config)
    evaluation = config.evaluation.model_copy(update={"metric": config.evaluation.metric or next(iter(METRICS[task]))})
    learners = [
        group.model_copy(
            update={
                "speed_trace": _absolute(group.speed_trace, folder),
                "availability": group.availability.model_copy(
                    update={"file": _absolute(group.availability.file, folder)}
                ),
            }
        )
        for group in config.learners
    ]
    data = config.data.model_copy(update={"folder": _absolute(config.data.folder, folder)})
    # Each policy has its solver's settings by now; a policy taken out alone must not leave settings that none uses.
    training = training.model_copy(update={"momentum": None, "keep_momentum": None, "proximal_term": None})
    return config.model_copy(
        update={
            "policy": chosen,
            "training": training,
            "evaluation": evaluation,
            "learners": learners,
            "data": data,
        }
    )


def _labelled(config: ExperimentConfig, complaints: _Complaints) -> ExperimentConfig:
    """A name of its own for each policy: the policy's, with the solver's where two would be equal."""
    labels = [policy.label or POLICIES[policy.name](**policy.parameters).label for policy in config.policy]
    solvers = {"vanilla": "Vanilla", "momentum": "Momentum", "fedprox": "FedProx"}
    equal = [label for label in labels if labels.count(label) > 1]
    labels = [
        f"{label} w/ {solvers[str(policy.training.solver)]}" if label in equal and not policy.label else label
        for label, policy in zip(labels, config.policy, strict=True)
    ]
    seen: dict[str, int] = {}
    for place, label in enumerate(labels):
        first = seen.setdefault(slug(label), place)
        if first != place:
            complaints.add(
                ["policy", place, "label"],
                f"would be '{label}', as that of policy.{first}; give each a label of its own",
            )
    chosen = [policy.model_copy(update={"label": label}) for label, policy in zip(labels, config.policy, strict=True)]
    return config.model_copy(update={"policy": chosen})


def slug(label: str) -> str:
    """A label as the name of a folder: SemiSync (λ=2) is semisync-lambda-2."""
    plain = label.replace("λ", "lambda ").lower()
    return re.sub(r"[^a-z0-9.]+", "-", plain).strip("-.") or "policy"


def _absolute(file: str | None, folder: Path | None) -> str | None:
    if file is None:
        return None
    path = Path(file).expanduser()
    return str((folder / path if folder is not None else path).resolve())
