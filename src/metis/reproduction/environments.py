"""The paper's experiments: one file for each environment, one cell of a table for each of its policies.

A file has the tables of `metis simulate` and four more: [paper] names the experiment of the paper, `published` in a
policy has the numbers that the paper reports, and [small] and [decisive] have the values that these scales change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field, ValidationError

from metis.errors import ConfigError
from metis.experiments.config.load import (
    ExperimentConfig,
    PolicyConfig,
    Table,
    did_you_mean,
    load_config,
    read_toml,
    resolve_config,
    slug,
)

Scale = Literal["small", "decisive", "paper"]
SCALES: tuple[Scale, ...] = ("small", "decisive", "paper")
Timings = Literal["nominal", "published"]
TIMINGS: tuple[Timings, ...] = ("nominal", "published")
TIMED = "-published-timings"  # follows the name of an environment whose rows have times of their own


class Published(Table):
    """The numbers that the paper reports for a policy, in its own units; `energy` is its column EC."""

    reached: bool = True
    iterations: int | None = None
    fast: int | None = None  # iterations of the fast learners
    slow: int | None = None
    parallel_time: float | None = None
    cumulative_time: float | None = None
    fast_time: float | None = None  # cumulative time of the fast learners
    slow_time: float | None = None
    communication_cost: int | None = None
    energy: float | None = None


class Paper(Table):
    """The experiment of the paper that a file is."""

    title: str
    domain: str
    cluster: Literal["homogeneous", "heterogeneous"]
    distribution: str
    results: list[str]
    note: str  # the data and network, and what they stand in for


class Plan(Table):
    """What [decisive] has besides changed values: how often, how far and until which accuracy policies are compared."""

    seeds: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    # Virtual seconds: every policy is run until the first, then every policy until the second, and so on to the end.
    stages: list[Annotated[float, Field(gt=0)]] = Field(default_factory=list)
    # How long Sync with momentum took in the paper, at its nominal times per batch: Sync is run that far first.
    sync_seconds: Annotated[float, Field(gt=0)] | None = None
    step_seconds: Annotated[float, Field(gt=0)] = 0.014  # of one core, measured: to say how long the rest will take
    target_fixed: bool = True  # false: Sync has yet to be run and the target to be written into the file
    # A second one, below or above the target proper: what it would say is reported beside the verdicts.
    low_target: float | None = None
    high_target: float | None = None
    # With the first seed every policy is run as far, even if it is at its target before: accuracies are compared there.
    final_seconds: Annotated[float, Field(gt=0)] | None = None

    @property
    def other_target(self) -> float | None:
        """The second target, if there is one."""
        return self.high_target if self.low_target is None else self.low_target


class Reference(Table):
    """Training without a federation: [centralized] on all examples, [alone] on the examples of each learner."""

    epochs: Annotated[int, Field(ge=1)]


Role = Literal["policy", "centralized", "alone"]


@dataclass(frozen=True)
class Cell:
    """One policy in one environment at one scale, or a reference without a federation."""

    environment: Environment
    config: ExperimentConfig  # with this policy only
    published: Published | None = None
    role: Role = "policy"
    only: int | None = None  # the index of the only learner that trains

    @property
    def policy(self) -> PolicyConfig:
        return self.config.policy[0]

    @property
    def label(self) -> str:
        return self.policy.label or self.policy.name

    @property
    def least_seconds(self) -> float:
        """How far it is run, even if it reaches its target before."""
        plan = self.environment.plan
        first = plan is not None and self.role == "policy" and self.config.seed == plan.seeds[0]
        return (plan.final_seconds or 0.0) if plan is not None and first else 0.0

    @property
    def key(self) -> tuple[str, str]:
        """The same for every seed."""
        return self.environment.name.partition("/")[0], self.label

    @property
    def name(self) -> str:
        """Environment and policy, as the folder of the run is called."""
        last = slug(self.label) if self.only is None else f"alone-{self.only + 1}"
        return f"{self.environment.name}/{last}"


@dataclass(frozen=True)
class Environment:
    """One federation of the paper with all policies that it compares in it."""

    name: str
    scale: Scale
    paper: Paper
    config: ExperimentConfig
    published: tuple[Published | None, ...]  # of each policy
    references: dict[Role, ExperimentConfig] = field(default_factory=dict)
    paper_target: float | None = None  # at the paper's scale
    plan: Plan | None = None
    timings: Timings = "nominal"

    def seeded(self) -> tuple[Environment, ...]:
        """The same environment with each seed of its plan; this one is the first."""
        return (self, *self._other_seeds)

    @cached_property
    def _other_seeds(self) -> tuple[Environment, ...]:
        others = [] if self.plan is None or "/" in self.name else self.plan.seeds[1:]
        return tuple(self._with_seed(seed) for seed in others)

    def _with_seed(self, seed: int) -> Environment:
        changed = {role: varied(config, seed=seed) for role, config in self.references.items()}
        name = f"{self.name}/seed-{seed}"
        return replace(self, name=name, config=varied(self.config, seed=seed), references=changed)

    def at_other_target(self) -> Environment | None:
        """The same runs, judged by the second target; None if there is none."""
        target = None if self.plan is None else self.plan.other_target
        if target is None:
            return None
        # Copied, not read again: a default that comes back as another type would make them other runs.
        judged = self.config.evaluation.model_copy(update={"target": target})
        return replace(self, config=self.config.model_copy(update={"evaluation": judged}))

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """One for each policy, in the order of the file."""
        from metis.reproduction.timings import timed

        return tuple(
            timed(Cell(self, self.config.model_copy(update={"policy": [policy]}), published), self.timings)
            for policy, published in zip(self.config.policy, self.published, strict=True)
        )

    @cached_property
    def centralized(self) -> tuple[Cell, ...]:
        """The model trained on all examples, if the file asks for it."""
        config = self.references.get("centralized")
        return () if config is None else (Cell(self, config, role="centralized"),)

    @cached_property
    def alone(self) -> tuple[Cell, ...]:
        """Each learner alone, if the file asks for it."""
        config = self.references.get("alone")
        return (
            ()
            if config is None
            else tuple(Cell(self, config, role="alone", only=index) for index in range(config.learner_count))
        )

    def needed_for(self, results: Collection[str]) -> tuple[Cell, ...]:
        """The cells that these results of the paper are made of."""
        wanted = set(results) & set(self.paper.results) - {"figure5", "figure6"}  # those show data only
        if not wanted:
            return ()
        return (*self.cells, *self.centralized, *(self.alone if "figure12" in wanted else ()))


def environments_folder() -> Path:
    """The folder of the files: in the installed package, or in the checkout that it runs from."""
    here = Path(__file__).resolve()
    for folder in (here.parents[1] / "paper", here.parents[3] / "experiments"):
        if folder.is_dir():
            return folder
    raise ConfigError("the experiments of the paper are not installed with this package")


def results_folder() -> Path:
    """The folder of the curves that are kept with the files."""
    return environments_folder() / "results"


def load_environments(
    scale: Scale,
    overrides: Sequence[str] = (),
    *,
    results: Collection[str] | None = None,
    folder: Path | None = None,
    timings: Timings = "nominal",
) -> dict[str, Environment]:
    """The environments by the names of their files, at one scale, in the order of the paper.

    With `results` only those that the results are made of, changed by `key.path=value` overrides. With the timings of
    the published rows, each policy has learners of its own speed; such runs are kept apart.
    """
    folder = environments_folder() if folder is None else folder
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise ConfigError(f"{folder} has no experiments")
    if results is not None:
        files = [file for file in files if set(results) & set(_paper_of(read_toml(file), file.name).results)]
    if scale == "decisive":
        files = [file for file in files if "decisive" in read_toml(file)]
    found = [load_environment(file, scale, overrides) for file in files]
    if timings == "published":
        found = [replace(one, name=f"{one.name}{TIMED}", timings=timings) for one in found]
    return {environment.name: environment for environment in sorted(found, key=_order)}


def _order(environment: Environment) -> tuple[int, int, str]:
    domains = ("CIFAR-10", "CIFAR-100", "ExtendedMNIST", "BrainAge")
    sizes = ("Uniform", "Skewed", "Power Law")
    paper = environment.paper
    return (
        domains.index(paper.domain) if paper.domain in domains else len(domains),
        next((index for index, name in enumerate(sizes) if paper.distribution.startswith(name)), len(sizes)),
        environment.name,
    )


def _paper_of(content: Mapping[str, Any], source: str) -> Paper:
    if not isinstance(content.get("paper"), dict):
        raise ConfigError(f"{source}: paper: missing; name the experiment of the paper in a table [paper]")
    return cast("Paper", checked(Paper, content["paper"], source, "paper"))


def load_experiment(file: Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """An experiment's file; one of the paper's at the paper's scale, without the tables that only `reproduce` reads."""
    if "paper" in read_toml(file):
        return load_environment(file, "paper", overrides).config
    return load_config(file, overrides)


def load_environment(file: Path, scale: Scale, overrides: Sequence[str] = ()) -> Environment:
    """One file at one scale, checked whole."""
    content = read_toml(file)
    source = f"{file.name} ({scale})"
    changes = {name: content.pop(name, {}) for name in SCALES if name != "paper"}
    target = content.get("evaluation", {}).get("target")
    plan = _plan_of(changes["decisive"], file.name) if scale == "decisive" else None
    if scale != "paper":
        content = merged(content, changes[scale])
    paper = _paper_of(content, file.name)
    del content["paper"]
    epochs = {
        role: checked(Reference, content.pop(role), file.name, role).epochs
        for role in ("centralized", "alone")
        if role in content
    }
    policies = content.get("policy")
    published = []
    for index, policy in enumerate(policies if isinstance(policies, list) else []):
        given = policy.pop("published", None)
        published.append(None if given is None else checked(Published, given, file.name, f"policy.{index}.published"))
    if plan is not None:
        content["seed"] = plan.seeds[0]
        if not plan.target_fixed:  # the target is what Sync has at its end, not what it passes on the way
            content["stop"]["at_target"] = False
    config = resolve_config(content, source, overrides, folder=file.parent)
    references: dict[Role, ExperimentConfig] = {}
    for role, passes in epochs.items():
        references[role] = _reference(config, role, passes)
    return Environment(file.stem, scale, paper, config, tuple(published), references, target, plan)


def _plan_of(changes: dict[str, Any], source: str) -> Plan:
    """The plan of [decisive], taken out of the values that it changes."""
    if not changes:
        raise ConfigError(f"{source}: decisive: missing; the file has no table [decisive]")
    own = {key: changes.pop(key) for key in tuple(changes) if key in Plan.model_fields}
    return cast("Plan", checked(Plan, own, source, "decisive"))


def _reference(config: ExperimentConfig, role: Role, epochs: int) -> ExperimentConfig:
    """One learner that publishes after every epoch; the solver is that of the environment's first policy."""
    label = "Centralized" if role == "centralized" else "Alone"
    content = config.to_dict()
    first = content["policy"][0]
    content["policy"] = [{"name": "sync_fedavg", "label": label, "local_epochs": 1.0, "training": first["training"]}]
    content["stop"] = {"rounds": epochs}
    content["evaluation"]["every_seconds"] = 0.0
    if role == "centralized":
        content["partition"] = {}
        content["learners"] = [{**content["learners"][0], "name": "centralized", "count": 1}]
    return resolve_config(content, f"{role} reference")


def merged(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with these changes; a list is replaced as a whole."""
    result = dict(content)
    for key, value in changes.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


def varied(config: ExperimentConfig, **tables: Any) -> ExperimentConfig:
    """The configuration with some tables replaced."""
    return resolve_config({**config.to_dict(), **tables}, "a variation")


def checked(model: Any, given: Any, source: str, path: str) -> Any:
    """A table of the file as this model; a ConfigError lists what is wrong with it."""
    try:
        return model.model_validate(given)
    except ValidationError as problem:
        lines = [_config_error(model, found, f"{source}: {path}") for found in problem.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from None


def _config_error(model: type[BaseModel], found: Any, source: str) -> str:
    key = ".".join(str(part) for part in found["loc"])
    if found["type"] == "extra_forbidden":
        return f"{source}.{key}: unknown key; {did_you_mean(key, model.model_fields)}"
    return f"{source}.{key}: {found['msg'][:1].lower()}{found['msg'][1:]}"
