"""A policy, a layer and a solver that are defined here only: a file names them as it names those of Metis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

import metis
from metis.core.contribution import dataset_size
from metis.core.layers import LAYERS, Layer
from metis.core.mixing import FullPass
from metis.core.policies import POLICIES
from metis.core.policy import Policy
from metis.core.protocols import Synchronous
from metis.core.schedules import Moment
from metis.core.solvers import SOLVERS, Array, LearningRate, Solver
from metis.errors import ConfigError
from metis.experiments.build import build_federation, build_stop
from metis.experiments.compose import policy_and_solver
from metis.experiments.config.load import ExperimentConfig, config_schema, load_config, resolve_config
from metis.experiments.example import definitions, example
from metis.registry import Setting, check_settings


def patient(passes: Annotated[float, Setting("local epochs of everybody", gt=0, le=50)] = 3.0) -> Policy:
    """Everybody trains a few epochs."""
    return Policy("patient", Synchronous(passes), dataset_size, FullPass, label="Patient")


@dataclass(frozen=True)
class SignSGD(Solver):
    """w -= eta sign(grad), after a warm-up."""

    learning_rate: LearningRate = 0.004
    threshold: Annotated[float, Setting("smaller gradients do not count", ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        check_settings(self)

    def step(self, weights: Array, gradient: Array, memory: Array | None, community: Array) -> None:
        gradient[abs(gradient) < self.threshold] = 0
        weights -= self.learning_rate * (gradient > 0) - self.learning_rate * (gradient < 0)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Registered as the module of a package would do it, and forgotten after the test."""
    POLICIES.add("patient", patient)
    SOLVERS.add("sign_sgd", SignSGD)

    @dataclass(frozen=True)
    class Slower(Layer, key="slower", order=36, needs={"rounds": "counts rounds, and {policy} has none"}):
        """A smaller learning rate in every round."""

        factor: Annotated[float, Setting("of the learning rate, from one round to the next", gt=0, le=1)] = 0.5
        kind: Annotated[str, Setting("a note for people")] = ""

        def relabel(self, label: str) -> str:
            return f"{label}, slower"

        def scale_rate(self, moment: Moment) -> float:
            return self.factor**moment.rounds

    yield
    for registry, name in ((POLICIES, "patient"), (SOLVERS, "sign_sgd"), (LAYERS, "slower")):
        del registry[name]


def resolved(*overrides: str, **policy: Any) -> ExperimentConfig:
    content = {
        "data": {"dataset": "digits", "train_examples": 100, "test_examples": 50},
        "learners": [{"name": "all", "count": 2, "batch_size": 20, "time_per_batch": 0.1}],
        "training": {"solver": "sign_sgd"},
        "policy": {"name": "patient", "slower": {}, **policy},
        "stop": {"rounds": 2},
    }
    return resolve_config(content, "own.toml", overrides)


def test_a_file_names_them_and_they_run() -> None:
    """Defaults come from the definitions, the solver's own learning rate included, and are written out."""
    config = resolved()
    (table,) = config.policy
    assert table.label == "Patient, slower"
    assert (table.parameters, table.layers) == ({"passes": 3.0}, {"slower": {"factor": 0.5, "kind": ""}})
    policy, solver = policy_and_solver(table)
    assert solver == SignSGD(0.004)
    assert resolve_config(config.to_dict(), "again.toml") == config
    federation = build_federation(config)
    run = federation.simulate(policy, build_stop(config), solver=solver)
    assert run.rounds == 2
    assert run.community_model.sha256() != federation.initial_model.sha256()
    assert isinstance(policy, metis.Policy)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.name=patent", "policy.name: there is no policy 'patent'; did you mean 'patient'?"),
        ("policy.pases=1", "policy.pases: unknown key; did you mean 'passes'?"),
        ("policy.passes=51", "policy.passes: is 51, must be at most 50"),
        ("policy.slowr={}", "policy.slowr: unknown key; did you mean 'slower'?"),
        ("policy.slower=1", "policy.slower: is 1, must be a table"),
        ("policy.slower.factr=1", "policy.slower.factr: unknown key; did you mean 'factor'?"),
        ("policy.slower.factor=0", "policy.slower.factor: is 0, must be greater than 0"),
        ("policy.slower.factor=inf", "policy.slower.factor: is inf, must be a finite number"),
        ("training.solver=signsgd", "training.solver: there is no solver 'signsgd'; did you mean 'sign_sgd'?"),
        ("training.treshold=0", "training.treshold: unknown key; did you mean 'threshold'?"),
        ("training.threshold=1", "training.threshold: is 1, must be less than 1"),
        ("policy.training.threshold=x", "policy.training.threshold: is 'x', must be a number"),
        ("training.weight_decay=0.1", "training.weight_decay: is given, but solver = 'sign_sgd' does not use it; "
         "'vanilla', 'momentum', 'fedprox', 'adam', 'adamw' and 'scaffold' would"),
    ],
)  # fmt: skip
def test_typos_and_limits_are_checked_by_the_definition(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(override)
    assert str(caught.value) == f"--set {message}"


def test_a_solver_without_the_decorator_has_no_settings() -> None:
    """That is the fault, not the key of a setting."""

    class Plain(Solver):
        learning_rate: LearningRate = 0.004

    SOLVERS["sign_sgd"] = Plain
    with pytest.raises(ConfigError) as caught:
        resolved("training.learning_rate=0.1")
    assert (
        str(caught.value) == "own.toml: training.solver: the class of 'sign_sgd' must be a @dataclass, for its settings"
    )


def test_a_policy_function_returns_a_policy() -> None:
    """A forgotten return is refused while the file is checked."""
    POLICIES["patient"] = lambda: None  # type: ignore[assignment,return-value]
    with pytest.raises(
        ConfigError, match=r"^the function of the policy 'patient' returned None; it must return a Policy$"
    ):
        resolved()


def test_what_a_layer_needs_is_checked() -> None:
    with pytest.raises(ConfigError) as caught:
        resolved("policy.name=fedrec")
    assert str(caught.value) == "own.toml: policy.slower: counts rounds, and fedrec has none"


def test_schema_list_and_example_have_them() -> None:
    """The reference, `metis init --list` and `metis init --policy` come from the same definitions."""
    schema = config_schema()
    assert schema["policies"]["patient"]["properties"]["passes"]["description"] == "local epochs of everybody"
    assert schema["layers"]["slower"][""]["properties"]["factor"]["maximum"] == 1
    assert schema["solvers"]["sign_sgd"]["properties"]["threshold"]["default"] == 0.0
    listed = definitions()
    assert listed["policies"]["patient"] == "Everybody trains a few epochs."
    assert listed["layers"]["slower"] == "A smaller learning rate in every round."
    text = example("own.toml", "patient", "sign_sgd")
    assert "# passes = 3.0                  # local epochs of everybody; greater than 0 and at most 50\n" in text
    assert "# threshold = 0.0 " in text


@pytest.mark.parametrize("solver", [*SOLVERS.elsewhere(), "vanilla"])
def test_the_example_runs_with_a_solver_or_refuses_it(solver: str, tmp_path: Path) -> None:
    """Each one that a file can name is tried; those that need something else are refused in one sentence."""
    try:
        text = example("own.toml", solver=solver)
    except ConfigError as refusal:
        assert str(refusal).startswith(f"the example cannot be trained with the solver '{solver}': it ")
        assert solver in ("own", "optax", "LBFGS", "Muon", "SparseAdam")
        return
    (tmp_path / "own.toml").write_text(text, "utf-8")
    config = load_config(tmp_path / "own.toml", ["stop.update_requests=2", "data.train_examples=240"])
    (tmp_path / "written.toml").write_text(config.to_toml(), "utf-8")
    assert load_config(tmp_path / "written.toml") == config
    policy, local_solver = policy_and_solver(config.policy[0])
    run = build_federation(config).simulate(policy, build_stop(config), solver=local_solver, progress=False)
    assert run.costs.update_requests >= 2
