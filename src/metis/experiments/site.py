"""What a site brings: one Python file with its network and its data, or a built-in data set and network.

A site file has plain names. `network` and `training_data` must be there; their argument is the learner's name, so
that one file can serve all sites, in a deployment and in a rehearsal by `metis simulate`.

    def network() -> torch.nn.Module
    def training_data(site: str)      a pair of arrays (inputs, targets), a map-style dataset of torch, or Examples
    def evaluation_data(site: str)    likewise, or None: what the site measures community models on
    def test_data()                   likewise: held-out data of the controller
    task = "classification"           or "regression"
    def loss(outputs, targets)        instead of cross-entropy or mean squared error; a mean over the batch
    metrics = {"auc": auc}            instead of accuracy or mae; each takes (outputs, targets), a mean over the batch
    metric = "auc"                    the one that runs are judged by
    higher_is_better = True
    def augment(inputs, generator)    the inputs of a training batch, changed at random

Which file it is comes from the command line or the experiment's file of whoever operates this machine, never from
the network.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from metis.core.model import Layout, Model
from metis.core.policy import Policy
from metis.errors import ConfigError, DataError, told
from metis.experiments.compose import policy_and_solver
from metis.experiments.config.load import METRICS, ExperimentConfig, LearnerGroup, did_you_mean, resolve_config
from metis.experiments.data import Assignment
from metis.experiments.learners import check_traces
from metis.experiments.setup import TrainingSetup, build_training_setup

if TYPE_CHECKING:
    from metis.learning import Batch, Engine, Examples, Learner

_FUNCTIONS = {"network": 0, "training_data": 1, "evaluation_data": 1, "test_data": 0, "loss": 2, "augment": 2}
_ARGUMENTS = {0: "", 1: "site", 2: "outputs, targets"}
_LOWER_IS_BETTER = ("loss", "mae", "mse", "rmse")
_MOST_CLASSES = 100  # that a report can show


@dataclass(frozen=True)
class Site:
    """The names of a site file that Metis looks at."""

    path: Path
    network: Callable[[], Any]
    training_data: Callable[[str], Any]
    evaluation_data: Callable[[str], Any] | None = None
    test_data: Callable[[], Any] | None = None
    task: Literal["classification", "regression"] | None = None
    loss: Callable[..., Any] | None = None
    metrics: Mapping[str, Callable[..., Any]] | None = None
    metric: str | None = None
    higher_is_better: bool | None = None
    augment: Callable[..., Any] | None = None


# --- loading ------------------------------------------------------------------------------------


def load_site(path: Path | str) -> Site:
    """Run a site file and take what it defines; whatever is wrong in it is told with its line."""
    path = Path(path).expanduser().resolve()
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"there is no site file {path}") from None
    except OSError as problem:
        raise ConfigError(f"the site file {path} cannot be read: {problem.strerror}") from None
    return _load(path, text)


@functools.lru_cache(maxsize=8)
def _load(path: Path, text: bytes) -> Site:
    """Once for each content of the file."""
    if path.suffix != ".py":
        raise ConfigError(f"the site file {path.name} must be a Python file, whose name ends in .py")
    name = f"metis_site_{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "it ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and the like look their module up
    try:
        with _on_the_path(path.parent):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        raise ConfigError(f"the site file cannot be used: {told(problem)}") from problem
    found = {name: getattr(module, name) for name in _known() if getattr(module, name, None) is not None}
    for required in ("network", "training_data"):
        if required not in found:
            raise ConfigError(
                f"{path.name} has no {required}; write: def {required}({_ARGUMENTS[_FUNCTIONS[required]]})"
            )
    for function, arguments in _FUNCTIONS.items():
        if function in found:
            _check_function(path, function, found[function], arguments)
    _check_values(path, found)
    return Site(path=path, **found)


def _known() -> list[str]:
    return [name for name in Site.__dataclass_fields__ if name != "path"]


@contextlib.contextmanager
def _on_the_path(folder: Path) -> Iterator[None]:
    """Let the file import its neighbours."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def _check_function(path: Path, name: str, function: Any, arguments: int) -> None:
    wanted = "inputs, generator" if name == "augment" else _ARGUMENTS[arguments]
    hint = f"write: def {name}({wanted})"
    if not callable(function) or (hasattr(function, "state_dict") and name == "network" and not _is_class(function)):
        raise ConfigError(f"{path.name}: {name} is no function; {hint}")
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError:
        line = getattr(getattr(function, "__code__", None), "co_firstlineno", None)
        place = f"{path.name}:{line}" if line else path.name
        raise ConfigError(f"{place}: {name} takes other arguments than Metis gives it; {hint}") from None
    except ValueError:  # of a builtin, whose signature is not known
        return


def _is_class(thing: Any) -> bool:
    return isinstance(thing, type)


def _check_values(path: Path, found: Mapping[str, Any]) -> None:
    task = found.get("task")
    if task is not None and task not in METRICS:
        raise ConfigError(f"{path.name}: task is {task!r}; allowed: {', '.join(METRICS)}")
    metrics = found.get("metrics")
    if metrics is not None:
        if not isinstance(metrics, Mapping) or not all(
            isinstance(name, str) and callable(measure) for name, measure in metrics.items()
        ):
            raise ConfigError(
                f"{path.name}: metrics must be a dictionary of names and functions, as in "
                'metrics = {"auc": auc} with def auc(outputs, targets)'
            )
        if "loss" in metrics:
            raise ConfigError(f"{path.name}: metrics has 'loss', which is always measured; write def loss instead")
    for name, kind, words in (("metric", str, "a text"), ("higher_is_better", bool, "True or False")):
        if name in found and not isinstance(found[name], kind):
            raise ConfigError(f"{path.name}: {name} is {found[name]!r}; it must be {words}")


def _call(site: Site, name: str, *arguments: Any) -> Any:
    """What a function of the site file gives; its exception becomes a sentence with its line."""
    try:
        with _on_the_path(site.path.parent):
            return getattr(site, name)(*arguments)
    except ConfigError:
        raise
    except (Exception, SystemExit) as problem:
        raise ConfigError(f"{_shown(site.path, name, arguments)} failed: {told(problem)}") from problem


def _shown(path: Path, name: str, arguments: Sequence[str]) -> str:
    return f"{path.name}: {name}({', '.join(map(repr, arguments))})"


class SiteFunction:
    """A function of a site file that another process can have too: it travels as the file's path."""

    def __init__(self, path: Path, name: str, key: str | None = None) -> None:
        self._path, self._name, self._key = path, name, key
        self._function: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self._function is None:
            site = load_site(self._path)
            if self._name == "network":
                self._function = functools.partial(_call, site, "network")
            else:
                found = getattr(site, self._name)
                self._function = found if self._key is None else found[self._key]
        assert self._function is not None
        return self._function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return SiteFunction, (self._path, self._name, self._key)

    def __repr__(self) -> str:
        return f"{self._path.name}:{self._name}" + ("" if self._key is None else f"[{self._key}]")


class SiteExamples:
    """Examples that a function of a site file gives; another process calls the function for itself."""

    def __init__(self, path: Path, name: str, arguments: tuple[str, ...], source: Any) -> None:
        from metis.learning import as_examples

        self._origin = (path, name, *arguments)
        self.labels: NDArray[np.int64] | None = None
        if isinstance(source, (tuple, list)) and len(source) == 2:
            inputs, targets = source[0], _whole_as_int64(source[1])
            source = (inputs, targets)
            if getattr(targets, "ndim", 0) == 1 and np.asarray(targets).dtype == np.int64:
                self.labels = np.asarray(targets)
        try:
            self._examples = as_examples(source)
        except ConfigError as problem:
            raise DataError(f"{_shown(path, name, arguments)}: {problem}") from problem
        if len(self._examples) == 0:
            raise DataError(f"{_shown(path, name, arguments)} gives no examples; there must be at least one")

    def __len__(self) -> int:
        return len(self._examples)

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        return self._examples.batch(indices)

    def __reduce__(self) -> tuple[Any, ...]:
        return _examples, self._origin


def _examples(path: Path, name: str, *arguments: str) -> SiteExamples:
    source = _call(load_site(path), name, *arguments)
    if source is None:
        raise DataError(
            f"{_shown(path, name, arguments)} gives None; it must give a pair of arrays (inputs, targets), "
            "a map-style dataset or examples"
        )
    return SiteExamples(path, name, arguments, source)


def examples_of(site: Site, learner: str) -> int:
    """How many training examples the file gives to this learner."""
    return len(_examples(site.path, "training_data", learner))


def _optional_examples(site: Site, name: str, *arguments: str) -> SiteExamples | None:
    """None where the file has no such function, or the function gives None."""
    if getattr(site, name) is None:
        return None
    source = _call(site, name, *arguments)
    return None if source is None else SiteExamples(site.path, name, arguments, source)


def _whole_as_int64(targets: Any) -> Any:
    """Labels of any integer type as torch's losses want them; other targets as they are."""
    if hasattr(targets, "is_floating_point"):  # a tensor
        return targets if targets.is_floating_point() else targets.long()
    array = np.asarray(targets)
    return array.astype(np.int64) if array.dtype.kind in "iub" else array


# --- an experiment with a site file -----------------------------------------------------------------


def settled(config: ExperimentConfig, site: Site) -> ExperimentConfig:
    """The configuration with what only the site file could say: task, metric, and which way is better."""
    task, asked = site.task or config.training.task or "classification", config.training.task
    if asked is not None and asked != task:
        raise ConfigError(f"{site.path.name} says task = '{task}', the experiment says training.task = '{asked}'")
    evaluation = config.evaluation
    known = list(METRICS[task]) if site.metrics is None else ["loss", *site.metrics]
    metric = evaluation.metric or site.metric or next((name for name in known if name != "loss"), "loss")
    if metric not in known:
        raise ConfigError(f"metric is '{metric}'; {site.path.name} measures {', '.join(known)}")
    higher = evaluation.higher_is_better
    if higher is None:
        higher = site.higher_is_better if metric == (site.metric or metric) else None
    if higher is None:
        higher = metric not in _LOWER_IS_BETTER
    return config.model_copy(
        update={
            "training": config.training.model_copy(update={"task": task}),
            "evaluation": evaluation.model_copy(update={"metric": metric, "higher_is_better": higher}),
        }
    )


def rehearsal(config: ExperimentConfig, site: Site) -> TrainingSetup:
    """All sites of the experiment on one machine, each with the data that the file gives for its name."""
    from metis.learning import JoinedExamples

    config = settled(config, site)
    names = [(name, group) for group in config.learners for name in group.learner_names]
    silos = [_examples(site.path, "training_data", name) for name, _ in names]
    train = JoinedExamples(silos)
    assignments = [Assignment(name, group, train.indices(place)) for place, (name, group) in enumerate(names)]
    check_traces(names)
    test: Examples | None = _optional_examples(site, "test_data")
    if test is None:
        # Each example counts once, as when the sites measure and the controller weighs by their examples.
        measured = [_optional_examples(site, "evaluation_data", name) for name, _ in names]
        held_out = [examples for examples in measured if examples is not None]
        test = JoinedExamples(held_out) if held_out else None
    counts = _class_counts([silo.labels for silo in silos])
    return _setup(
        config,
        site,
        train=train,
        test=test,
        assignments=assignments,
        class_counts=counts,
        class_names=() if counts is None else [str(label) for label in range(counts.shape[1])],
        facts={
            "dataset": site.path.name,
            "train_examples": len(train),
            "test_examples": 0 if test is None else len(test),
            "partition": "what each site holds",
            "network": site.path.name,
        },
    )


def _setup(config: ExperimentConfig, site: Site, **parts: Any) -> TrainingSetup:
    """The network and measures of the site file, with these data."""
    path, evaluation = site.path, config.evaluation
    return TrainingSetup(
        network=SiteFunction(path, "network"),
        task=config.training.task or "classification",
        metric=evaluation.metric,
        higher_is_better=evaluation.higher_is_better,
        loss=None if site.loss is None else SiteFunction(path, "loss"),
        metrics=None if site.metrics is None else {name: SiteFunction(path, "metrics", name) for name in site.metrics},
        augment=None if site.augment is None else SiteFunction(path, "augment"),
        **parts,
    )


def _class_counts(labels: Sequence[NDArray[np.int64] | None]) -> NDArray[np.int64] | None:
    """Examples of each class (column) that each site (row) holds, if they are few enough to be shown."""
    known = [row for row in labels if row is not None]
    if len(known) != len(labels) or min(int(row.min()) for row in known) < 0:
        return None
    classes = 1 + max(int(row.max()) for row in known)
    if classes > _MOST_CLASSES:
        return None
    return np.stack([np.bincount(row, minlength=classes) for row in known]).astype(np.int64)


# --- one machine of a deployment --------------------------------------------------------------------


@dataclass(frozen=True)
class Silo:
    """What the training process of one learner works with; the controller's has no learner."""

    engine: Engine
    policy: Policy
    learner: Learner | None
    evaluation: Examples | None
    metric: str
    higher_is_better: bool
    seed: int

    @property
    def layout(self) -> Layout:
        """Of every model that travels."""
        return self.policy.extend_layout(self.engine.layout, _trainable(self.engine))

    def initial_model(self, seed: int) -> Model:
        """Where the federation starts from, as it travels."""
        return self.policy.extend_model(self.engine.initial_model(seed), _trainable(self.engine))


def _trainable(engine: Engine) -> int:
    from metis.learning.engine import trainable_of

    return trainable_of(engine)


def read_settings(settings: Any) -> tuple[ExperimentConfig, int]:
    """The experiment and the number of its policy, out of what the controller sent; all of it is checked."""
    source = "the controller's settings"
    if not isinstance(settings, Mapping) or settings.keys() != {"experiment", "policy"}:
        raise ConfigError(f"{source} are not understood: they must have the keys experiment and policy")
    experiment, policy = settings["experiment"], settings["policy"]
    if not isinstance(experiment, Mapping):
        raise ConfigError(f"{source} are not understood: experiment must be a table")
    try:
        config = resolve_config(experiment, source, elsewhere=True)
    except ConfigError as problem:
        raise ConfigError("; ".join(str(problem).splitlines())) from None
    if type(policy) is not int or not 0 <= policy < len(config.policy):
        raise ConfigError(f"{source} are not understood: policy is {policy!r}, there are {len(config.policy)}")
    # Files and processors are of this machine: the data set is where this machine has it.
    data = config.data.model_copy(update={"folder": None})
    threads = min(config.training.threads, os.cpu_count() or 1)
    training = config.training.model_copy(update={"threads": threads})
    return config.model_copy(update={"data": data, "training": training}), policy


def build_silo(
    settings: Mapping[str, Any], site_file: Path | None, name: str, index: int, device: str | None = None
) -> Silo:
    """What the learner of this name trains with: its own site file, or its share of the built-in data set."""
    from metis.learning import Learner

    config, number = read_settings(settings)
    policy, solver = policy_and_solver(config.policy[number])
    if site_file is None:
        _refuse_without_site(config)
        setup = build_training_setup(config)
        assignment = next((assignment for assignment in setup.assignments if assignment.name == name), None)
        if assignment is None:
            names = [assignment.name for assignment in setup.assignments]
            raise ConfigError(
                f"the experiment has no learner '{name}' to hold a part of {config.data.dataset}; "
                f"its learners are {', '.join(names)}"
            )
        evaluation: Examples | None = None
        group, examples, indices = assignment.group, setup.train, assignment.indices
    else:
        site = load_site(site_file)
        config = settled(config, site)
        group = _group_of(config, name)
        examples = _examples(site.path, "training_data", name)
        indices = np.arange(len(examples), dtype=np.int64)
        evaluation = _optional_examples(site, "evaluation_data", name)
        setup = _setup(config, site, train=examples, test=None, assignments=())
    learner = Learner(
        name,
        index,
        examples,
        indices,
        group.batch_size,
        solver,
        config.seed,
        setup.augment,
        layers=policy.learner_layers,
    )
    return _silo(config, setup, policy, learner, evaluation, device)


def build_controller_side(settings: Mapping[str, Any], site_file: Path | None, device: str | None = None) -> Silo:
    """What the controller makes the initial model with and, if it has held-out data, measures models on."""
    config, number = read_settings(settings)
    if site_file is None:
        _refuse_without_site(config)
        setup = build_training_setup(config)
    else:
        site = load_site(site_file)
        config = settled(config, site)
        setup = _setup(config, site, train=None, test=_optional_examples(site, "test_data"), assignments=())
    policy, _ = policy_and_solver(config.policy[number])
    return _silo(config, setup, policy, None, setup.test, device)


def _silo(
    config: ExperimentConfig,
    setup: TrainingSetup,
    policy: Policy,
    learner: Learner | None,
    evaluation: Examples | None,
    device: str | None,
) -> Silo:
    metric = cast("str", config.evaluation.metric)
    higher = config.evaluation.higher_is_better
    if higher is None:
        higher = METRICS[setup.task].get(metric, True)
    return Silo(setup.engine(config.training, device), policy, learner, evaluation, metric, higher, config.seed)


def _refuse_without_site(config: ExperimentConfig) -> None:
    if config.site is not None:
        raise ConfigError("the sites of this federation bring their own network and data: give --site FILE")


def _group_of(config: ExperimentConfig, name: str) -> LearnerGroup:
    """The group of [[learners]] that this learner belongs to; if there is only one, everybody does."""
    for group in config.learners:
        if name in group.learner_names or len(config.learners) == 1:
            return group
    names = [name for group in config.learners for name in group.learner_names]
    raise ConfigError(f"the experiment's [[learners]] have no '{name}'; {did_you_mean(name, names)}")
