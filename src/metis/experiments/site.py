"""A site file: a Python file with the network and the data of a site.

`network` and `training_data` are required. The argument of the data functions is the learner's name, so that one file
can serve all sites, in a deployment and in a rehearsal by `metis simulate`.

    def network() -> torch.nn.Module
    def training_data(site: str)      a pair of arrays (inputs, targets), a map-style dataset of torch, or Examples
    def evaluation_data(site: str)    likewise, or None: what the site measures community models on
    def test_data()                   likewise: held-out data of the controller
    def validation_data()             likewise: by which the controller chooses the best model and ends early
    task = "classification"           or "regression"
    def loss(outputs, targets)        instead of cross-entropy or mean squared error; a mean over the batch
    def step(module, batch)           instead of a forward pass and the loss: returns the loss
    def collate(items)                a batch of a list of items, where torch's own rule does not do
    metrics = ["auc", "f1"]           instead of accuracy or mae: names, or {"name": function of outputs and targets}
    metric = "auc"                    the one that runs are judged by
    higher_is_better = True
    def augment(inputs, generator)    the inputs of a training batch, changed at random

The path of the file comes from the command line or the experiment's file on this machine, never from the network.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from metis.errors import ConfigError, DataError, described
from metis.experiments.bridges import bridged_site, is_bridge, title_of
from metis.experiments.config.load import METRICS, ExperimentConfig, LearnerGroup
from metis.experiments.data import Assignment
from metis.experiments.learners import check_traces
from metis.experiments.setup import TrainingSetup
from metis.learning.engine import makes_batches

if TYPE_CHECKING:
    from metis.learning import Batch, Examples
    from metis.learning.engine import EngineKind

_FUNCTIONS = {
    "network": 0,
    "training_data": 1,
    "evaluation_data": 1,
    "test_data": 0,
    "validation_data": 0,
    "loss": 2,
    "step": 2,
    "collate": 1,
    "augment": 2,
}
_ARGUMENTS = {0: "", 1: "site", 2: "outputs, targets"}
_OTHER_ARGUMENTS = {"augment": "inputs, generator", "step": "module, batch", "collate": "items"}
_LOWER_IS_BETTER = ("loss", "mae", "mse", "rmse")
_MAX_CLASSES = 100  # that a report can show


@dataclass(frozen=True)
class Site:
    """The names of a site file that Metis uses."""

    path: Path
    network: Callable[[], Any]
    training_data: Callable[[str], Any]
    evaluation_data: Callable[[str], Any] | None = None
    test_data: Callable[[], Any] | None = None
    validation_data: Callable[[], Any] | None = None
    task: Literal["classification", "regression"] | None = None
    loss: Callable[..., Any] | None = None
    step: Callable[..., Any] | None = None
    collate: Callable[..., Any] | None = None
    metrics: Mapping[str, Any] | Sequence[str] | None = None
    metric: str | None = None
    higher_is_better: bool | None = None
    augment: Callable[..., Any] | None = None
    # Of clients of other systems, which train and measure in their own way:
    engine: EngineKind | None = None
    measure: Callable[[str], Sequence[str]] | None = None  # the names of what a site measures

    @property
    def title(self) -> str:
        """How messages and reports call it."""
        return title_of(self.path)


# --- loading ------------------------------------------------------------------------------------


def load_site(path: Path | str) -> Site:
    """Run a site file and take what it defines; an error in it is reported with its line."""
    if is_bridge(path):
        return bridged_site(Path(path))
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
        raise ConfigError(f"the site file cannot be used: {described(problem)}") from problem
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
    return [name for name in Site.__dataclass_fields__ if name not in ("path", "engine", "measure")]


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
    wanted = _OTHER_ARGUMENTS.get(name, _ARGUMENTS[arguments])
    hint = f"write: def {name}({wanted})"
    if not callable(function) or (hasattr(function, "state_dict") and name == "network" and not _is_class(function)):
        raise ConfigError(f"{path.name}: {name} is not a function; {hint}")
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError:
        line = getattr(getattr(function, "__code__", None), "co_firstlineno", None)
        where = f"{path.name}:{line}" if line else path.name
        raise ConfigError(f"{where}: {name} does not take the arguments that Metis passes; {hint}") from None
    except ValueError:  # the signature of a builtin is not known
        return


def _is_class(thing: Any) -> bool:
    return isinstance(thing, type)


def _check_values(path: Path, found: Mapping[str, Any]) -> None:
    task = found.get("task")
    if task is not None and task not in METRICS:
        raise ConfigError(f"{path.name}: task is {task!r}; allowed: {', '.join(METRICS)}")
    metrics = found.get("metrics")
    if metrics is not None:
        if not isinstance(metrics, (Mapping, list, tuple)) or not all(isinstance(name, str) for name in metrics):
            raise ConfigError(
                f"{path.name}: metrics must be a list of names or a dictionary of names and functions, as in "
                'metrics = {"auc": auc} with def auc(outputs, targets)'
            )
        if "loss" in metrics:
            raise ConfigError(
                f"{path.name}: metrics has 'loss', which is always measured; define the function loss instead"
            )
    for name, kind, words in (("metric", str, "a string"), ("higher_is_better", bool, "True or False")):
        if name in found and not isinstance(found[name], kind):
            raise ConfigError(f"{path.name}: {name} is {found[name]!r}; it must be {words}")


def _call(site: Site, name: str, *arguments: Any) -> Any:
    """Call a function of the site file; its exception becomes a ConfigError with its line."""
    try:
        with _on_the_path(site.path.parent) if site.engine is None else contextlib.nullcontext():
            return getattr(site, name)(*arguments)
    except ConfigError:
        raise
    except (Exception, SystemExit) as problem:
        raise ConfigError(f"{_shown(site.path, name, arguments)} failed: {described(problem)}") from problem


def _shown(path: Path, name: str, arguments: Sequence[str]) -> str:
    if is_bridge(path):  # its functions are not the user's
        return title_of(path)
    return f"{title_of(path)}: {name}({', '.join(map(repr, arguments))})"


class SiteFunction:
    """A function of a site file that can be sent to another process, as the path of the file."""

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

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function itself, for those who look at its parameters."""
        found = getattr(load_site(self._path), self._name)
        function: Callable[..., Any] = found if self._key is None else found[self._key]
        return function

    def __repr__(self) -> str:
        return f"{title_of(self._path)}:{self._name}" + ("" if self._key is None else f"[{self._key}]")


class SiteExamples:
    """Examples that a function of a site file returns; another process calls the function itself."""

    def __init__(self, path: Path, name: str, arguments: tuple[str, ...], source: Any) -> None:
        self._origin = (path, name, *arguments)
        self.labels: NDArray[np.int64] | None = None
        collate = load_site(path).collate
        if collate is None and isinstance(source, (tuple, list)) and len(source) == 2:
            inputs, targets = source[0], _whole_as_int64(source[1])
            source = (inputs, targets)
            if getattr(targets, "ndim", 0) == 1 and np.asarray(targets).dtype == np.int64:
                self.labels = np.asarray(targets)
        if makes_batches(source):  # examples already; a site whose engine is not torch need not import it
            self._examples: Examples = source
        else:
            from metis.learning import as_examples

            try:
                self._examples = as_examples(source, collate)
            except ConfigError as problem:
                raise DataError(f"{_shown(path, name, arguments)}: {problem}") from problem
        if len(self._examples) == 0:
            raise DataError(f"{_shown(path, name, arguments)} returns no examples; at least one is needed")

    def __len__(self) -> int:
        return len(self._examples)

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        return self._examples.batch(indices)

    def __getattr__(self, name: str) -> Any:
        if (
            name in ("items", "collate", "stream", "batch_size") and "_examples" in self.__dict__
        ):  # where the examples are items of a dataset
            return getattr(self._examples, name)
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return site_examples, self._origin


def site_examples(path: Path, name: str, *arguments: str) -> SiteExamples:
    """The examples that a function of the site file returns for these arguments."""
    source = _call(load_site(path), name, *arguments)
    if source is None:
        raise DataError(
            f"{_shown(path, name, arguments)} returns None; it must return a pair of arrays (inputs, targets), "
            "a map-style dataset or examples"
        )
    return SiteExamples(path, name, arguments, source)


def examples_of(site: Site, learner: str) -> int:
    """How many training examples the file has for this learner."""
    return len(site_examples(site.path, "training_data", learner))


def optional_examples(site: Site, name: str, *arguments: str) -> SiteExamples | None:
    """None if the file does not have this function, or the function returns None."""
    if getattr(site, name) is None:
        return None
    source = _call(site, name, *arguments)
    return None if source is None else SiteExamples(site.path, name, arguments, source)


def _whole_as_int64(targets: Any) -> Any:
    """Labels of any integer type as torch's losses need them; other targets unchanged."""
    if hasattr(targets, "is_floating_point"):  # a tensor
        return targets if targets.is_floating_point() else targets.long()
    array = np.asarray(targets)
    return array.astype(np.int64) if array.dtype.kind in "iub" else array


# --- an experiment with a site file -----------------------------------------------------------------


def settled(config: ExperimentConfig, site: Site) -> ExperimentConfig:
    """The configuration with what the site file adds: task, metric, and whether higher values are better."""
    task, asked = site.task or config.training.task or "classification", config.training.task
    if asked is not None and asked != task:
        raise ConfigError(f"{site.title} has task = '{task}', but the experiment has training.task = '{asked}'")
    evaluation = config.evaluation
    known = list(METRICS[task]) if site.metrics is None else ["loss", *site.metrics]
    metric = evaluation.metric or site.metric or next((name for name in known if name != "loss"), "loss")
    if metric not in known and site.measure is None:
        raise ConfigError(f"metric is '{metric}'; {site.title} measures {', '.join(known)}")
    higher = evaluation.higher_is_better
    if higher is None:
        higher = site.higher_is_better if metric == (site.metric or metric) else None
    if higher is None:
        higher = not metric.lower().endswith(_LOWER_IS_BETTER)
    return config.model_copy(
        update={
            "training": config.training.model_copy(update={"task": task}),
            "evaluation": evaluation.model_copy(update={"metric": metric, "higher_is_better": higher}),
        }
    )


def rehearsal(config: ExperimentConfig, site: Site) -> TrainingSetup:
    """All sites of the experiment on one machine, each with the data that the file has for its name."""
    from metis.learning import JoinedExamples

    config = settled(config, site)
    names = [(name, group) for group in config.learners for name in group.learner_names]
    silos = [site_examples(site.path, "training_data", name) for name, _ in names]
    names = [(name, with_batches_of(group, silo)) for (name, group), silo in zip(names, silos, strict=True)]
    config = _measured(config, site, names[0][0])
    train = JoinedExamples(silos)
    assignments = [Assignment(name, group, train.indices(index)) for index, (name, group) in enumerate(names)]
    check_traces(names)
    test: Examples | None = optional_examples(site, "test_data")
    if test is None:
        # Each example counts once, as in a deployment, where results of sites are weighted by their examples.
        measured = [optional_examples(site, "evaluation_data", name) for name, _ in names]
        held_out = [examples for examples in measured if examples is not None]
        test = JoinedExamples(held_out) if held_out else None
        if held_out:
            sizes = [0 if examples is None else len(examples) for examples in measured]
            own = [np.arange(end - size, end) for size, end in zip(sizes, np.cumsum(sizes), strict=True)]
            assignments = [replace(one, test=part) for one, part in zip(assignments, own, strict=True)]
    counts = _class_counts([silo.labels for silo in silos])
    return site_setup(
        config,
        site,
        train=train,
        test=test,
        validation=optional_examples(site, "validation_data"),
        assignments=assignments,
        class_counts=counts,
        class_names=() if counts is None else [str(label) for label in range(counts.shape[1])],
        facts={
            "dataset": site.title,
            "train_examples": len(train),
            "test_examples": 0 if test is None else len(test),
            "partition": "what each site holds",
            "network": site.title,
        },
    )


def with_batches_of(group: LearnerGroup, examples: SiteExamples) -> LearnerGroup:
    """The group with the batches of a client that makes its own; otherwise those of the file."""
    own = getattr(examples, "batch_size", None)
    return group if own is None else group.model_copy(update={"batch_size": own})


def _measured(config: ExperimentConfig, site: Site, first: str) -> ExperimentConfig:
    """With a metric that the sites really measure, where only they know which these are."""
    if site.measure is None:
        return config
    names, metric = site.measure(first), config.evaluation.metric
    if not names or metric in names:
        return config
    raise ConfigError(
        f"metric is '{metric}', but {site.title} measures {', '.join(names)}: choose one of them by evaluation.metric"
    )


def _metrics(site: Site) -> dict[str, Any] | None:
    if site.metrics is None:
        return None
    if not isinstance(site.metrics, Mapping):
        return {name: name for name in site.metrics}
    return {
        name: SiteFunction(site.path, "metrics", name) if inspect.isroutine(metric) else metric
        for name, metric in site.metrics.items()
    }


def site_setup(config: ExperimentConfig, site: Site, **parts: Any) -> TrainingSetup:
    """The network, loss and metrics of the site file, with these data."""
    path, evaluation = site.path, config.evaluation
    return TrainingSetup(
        network=SiteFunction(path, "network"),
        task=config.training.task or "classification",
        metric=evaluation.metric,
        higher_is_better=evaluation.higher_is_better,
        loss=None if site.loss is None else SiteFunction(path, "loss"),
        step=None if site.step is None else SiteFunction(path, "step"),
        metrics=_metrics(site),
        augment=None if site.augment is None else SiteFunction(path, "augment"),
        engine_kind=site.engine,
        **parts,
    )


def _class_counts(labels: Sequence[NDArray[np.int64] | None]) -> NDArray[np.int64] | None:
    """Examples by site (row) and class (column), if there are few enough classes to show."""
    known = [row for row in labels if row is not None]
    if len(known) != len(labels) or min(int(row.min()) for row in known) < 0:
        return None
    classes = 1 + max(int(row.max()) for row in known)
    if classes > _MAX_CLASSES:
        return None
    return np.stack([np.bincount(row, minlength=classes) for row in known]).astype(np.int64)
