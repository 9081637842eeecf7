"""What every engine must do: the same suite for torch, JAX, scikit-learn and the engine of the example plugin."""

from __future__ import annotations

import importlib.util
import itertools
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metis
from learning.engine_networks import (
    CLASSES,
    FEATURES,
    adam_mlp,
    functions,
    hinge,
    linen_normalised,
    normalised,
    torch_normalised,
)
from metis.core.model import Model
from metis.core.solvers import Solver
from metis.errors import ConfigError, MetisError
from metis.learning import ENGINES, ArrayExamples, Engine, EngineJob, Learner
from metis.learning.solvers import Optax, Own
from metis.learning.sums import value_of

EXAMPLES = 240
PLUGIN = Path(__file__).parents[2] / "examples" / "plugin" / "src"


@dataclass(frozen=True)
class Case:
    """An engine, a network of it, and a solver."""

    engine: str
    network: str | Callable[..., Any]
    solver: Solver
    packages: tuple[str, ...] = ()
    task: str = "classification"
    random: bool = False  # whether training draws random numbers
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, **more: Any) -> Engine:
        for package in self.packages:
            pytest.importorskip(package)
        if self.engine == "softmax":
            self._load_plugin()
        named: dict[str, Any] = {"network_name": self.network} if isinstance(self.network, str) else {}
        if not named:
            named = {"network": self.network}
        return ENGINES.named(self.engine)(
            EngineJob(
                self.task,  # type: ignore[arg-type]
                **named,
                network_options=self.options,
                input_shape=(FEATURES,),
                outputs=CLASSES if self.task == "classification" else 1,
                **more,
            )
        )

    @staticmethod
    def _load_plugin() -> None:
        if "softmax" not in ENGINES.registered:
            path = next(PLUGIN.rglob("softmax*.py"), None) or next(
                file for file in PLUGIN.rglob("*.py") if "SoftmaxEngine" in file.read_text("utf-8")
            )
            spec = importlib.util.spec_from_file_location("metis_example_engine", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # so that its classes can be pickled
            spec.loader.exec_module(module)

    @property
    def examples(self) -> ArrayExamples:
        rng = np.random.default_rng(5)
        x = rng.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
        scores = x @ rng.normal(size=(FEATURES, CLASSES))
        if self.task == "regression":
            return ArrayExamples(x, scores[:, 0].astype(np.float32))
        return ArrayExamples(x, scores.argmax(1))

    def learner(self, solver: Solver | None = None, index: int = 0) -> Learner:
        examples = self.examples
        return Learner("north", index, examples, np.arange(len(examples)), 16, solver or self.solver, seed=3)


SGD, MOMENTUM = metis.VanillaSGD(0.1), metis.MomentumSGD(0.05, keep_momentum=True)
JAX, SKLEARN = ("jax", "flax", "optax"), ("sklearn",)
CASES = {
    "torch mlp": Case("torch", "mlp", SGD),
    "torch dropout": Case("torch", torch_normalised, MOMENTUM, random=True),
    "torch regression": Case("torch", "mlp", SGD, task="regression"),
    "jax mlp": Case("jax", "mlp", SGD, JAX),
    "jax dropout": Case("jax", "mlp", metis.Adam(0.01), JAX, random=True, options={"dropout": 0.3}),
    "jax logistic": Case("jax", "logistic", MOMENTUM, JAX),
    "jax functions": Case("jax", functions, metis.FedProx(0.1, 0.01), JAX),
    "jax nnx": Case("jax", normalised, SGD, JAX, random=True),
    "jax linen": Case("jax", linen_normalised, metis.AdamW(0.01, keep_state=True), JAX, random=True),
    "jax optax": Case("jax", "mlp", Optax("adamw", 0.01, {"weight_decay": 0.01}, keep_state=True), JAX),
    "jax regression": Case("jax", "mlp", SGD, JAX, task="regression"),
    "sklearn sgd": Case("sklearn", "sgd", Own(), SKLEARN, random=True),
    "sklearn schedule": Case(
        "sklearn", "sgd", Own(keep_state=True), SKLEARN, random=True, options={"learning_rate": "optimal"}
    ),
    "sklearn hinge": Case("sklearn", hinge, Own(), SKLEARN, random=True),
    "sklearn mlp": Case("sklearn", "mlp", Own(), SKLEARN, random=True),
    "sklearn adam": Case("sklearn", adam_mlp, Own(), SKLEARN, random=True),
    "sklearn logistic": Case("sklearn", "logistic", Own(), SKLEARN),
    "sklearn regression": Case("sklearn", "sgd", Own(), SKLEARN, task="regression", random=True),
    "sklearn mlp regression": Case(
        "sklearn", "mlp", Own(), SKLEARN, task="regression", random=True, options={"learning_rate_init": 0.01}
    ),
    "plugin softmax": Case("softmax", "", SGD),
}


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    for package in found.packages:
        pytest.importorskip(package)
    return found


def same(one: Model, other: Model) -> bool:
    return one.sha256() == other.sha256()


# --- the contract ---------------------------------------------------------------------------------------


def test_the_initial_model_is_that_of_the_seed(case: Case) -> None:
    """The same in every process; the layout is known without it."""
    engine, other = case.make(), case.make()
    model = engine.initial_model(4)
    assert model.layout == engine.layout == other.layout
    assert same(model, engine.initial_model(4)) and same(model, other.initial_model(4))
    assert np.isfinite(model.vector).all() and model.vector.dtype == np.float32


def test_training_learns(case: Case) -> None:
    """From the community model on, which it leaves as it was."""
    engine, learner = case.make(), case.learner()
    start = engine.initial_model(0)
    kept = start.vector.copy()
    trained = learner.train(engine, start, 1, 90)
    assert (start.vector == kept).all()
    assert trained.steps == 90 and math.isfinite(trained.loss)
    before, after = (engine.evaluate(model, case.examples)["loss"] for model in (start, trained.model))
    assert after < 0.6 * before or (case.network is hinge and after < before)


def test_it_keeps_nothing_between_calls(case: Case) -> None:
    """Learners share an engine: what another trained or measured in between changes nothing, to the bit."""
    engine, learner, other = case.make(), case.learner(), case.learner(index=1)
    start = engine.initial_model(0)
    first = learner.train(engine, start, 1, 7)
    between = other.train(engine, first.model, 3, 5)
    engine.evaluate(between.model, case.examples)
    again = learner.train(engine, start, 1, 7)
    assert same(first.model, again.model) and first.loss == again.loss
    assert {name: array.tolist() for name, array in first.memory.items()} == {
        name: array.tolist() for name, array in again.memory.items()
    }
    assert same(first.model, learner.train(case.make(), start, 1, 7).model)


def test_it_asks_for_a_batch_when_the_last_one_is_done(case: Case) -> None:
    """Budgets end, and clocks stop, where the next batch is asked for; so no batch is fetched ahead."""
    engine, learner = case.make(), case.learner()
    given, model = 0, engine.initial_model(0)

    def batches() -> Iterator[Any]:
        nonlocal given
        for batch in itertools.islice(learner.batches(1), 3):
            given += 1
            yield batch

    assert engine.train(model, batches(), case.solver).steps == given == 3
    lazily = iter(learner.batches(1))
    assert engine.train(model, itertools.islice(lazily, 2), case.solver).steps == 2
    rest = next(lazily)
    assert [np.asarray(part).tolist() for part in rest] == [
        np.asarray(part).tolist() for part in next(itertools.islice(learner.batches(1), 2, None))
    ]


def test_random_numbers_come_from_the_seed(case: Case) -> None:
    """Dropout and the like: of the task's seed and of nothing else."""
    engine, learner = case.make(), case.learner()
    model = engine.initial_model(0)

    def trained(seed: int) -> Model:
        return engine.train(model, itertools.islice(learner.batches(1), 6), case.solver, seed=seed).model

    assert same(trained(2**62 + 5), trained(2**62 + 5))
    if case.random:
        assert not same(trained(5), trained(6))
    else:
        assert same(trained(5), trained(6))


def test_what_is_kept_between_tasks_is_in_the_memory(case: Case) -> None:
    """Memory goes out with a task and comes in with the next; without it a task starts again."""
    engine, learner = case.make(), case.learner()
    first = learner.train(engine, engine.initial_model(0), 1, 5)
    assert bool(first.memory) == case.solver.keeps_memory
    if case.solver.keeps_memory:
        copied = pickle.loads(pickle.dumps(first.memory))
        with_memory = learner.train(engine, first.model, 2, 5, first.memory)
        assert same(with_memory.model, learner.train(case.make(), first.model, 2, 5, copied).model)
        assert not same(with_memory.model, learner.train(engine, first.model, 2, 5).model)


def test_evaluation_is_over_examples(case: Case) -> None:
    """Each example counts once, however many there are, and sums behind a value give the value."""
    engine, examples = case.make(), case.examples
    model = case.learner().train(engine, engine.initial_model(0), 1, 20).model
    found = engine.evaluate(model, examples)
    assert set(found) >= {"loss", "accuracy" if case.task == "classification" else "mae"}
    assert found == engine.evaluate(model, examples)
    if hasattr(engine, "evaluate_with_sums"):
        values, sums = engine.evaluate_with_sums(model, examples)
        assert values == found and "loss" in sums
        for name, behind in sums.items():
            assert value_of(behind) == pytest.approx(values[name])


def test_another_process_makes_the_same_engine(case: Case) -> None:
    """Workers of a pool get it pickled."""
    if case.engine == "softmax":
        pytest.skip("a plugin's engine is pickled as it is")
    engine = case.make()
    copied = pickle.loads(pickle.dumps(engine))
    start = engine.initial_model(0)
    one, other = (case.learner().train(each, start, 1, 4).model for each in (engine, copied))
    assert same(one, other)


POLICIES = {"semisync": lambda: metis.semisync_fedavg(1), "fedrec": lambda: metis.fedrec(local_epochs=1)}
WHOLE_RUNS = [
    ("torch dropout", "semisync"),
    ("torch dropout", "fedrec"),
    ("sklearn schedule", "semisync"),
    ("sklearn logistic", "fedrec"),
    pytest.param("jax nnx", "fedrec", marks=pytest.mark.slow),
    pytest.param("jax optax", "semisync", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "policy"), WHOLE_RUNS)
def test_runs_are_the_same_for_any_number_of_workers_and_after_a_resume(name: str, policy: str, tmp_path: Path) -> None:
    """To the bit: inline, in two processes, and interrupted in the middle."""
    case = CASES[name]

    def federation() -> metis.Federation:
        learners = [
            metis.SimulatedLearner("fast", np.arange(0, 120), batch_size=16, speed=metis.Speed(0.02)),
            metis.SimulatedLearner("slow", np.arange(120, 240), batch_size=16, speed=metis.Speed(0.1)),
        ]
        return metis.Federation(
            engine=case.make(), train=case.examples, test=case.examples, learners=learners, solver=case.solver, seed=2
        )

    def sha256(**options: Any) -> str:
        run = federation().simulate(POLICIES[policy](), **options)
        assert run.community_model is not None
        return run.community_model.sha256()

    whole = sha256(update_requests=14)
    assert sha256(update_requests=14, workers=2) == whole
    with pytest.raises(_Enough):
        sha256(update_requests=14, out=tmp_path, checkpoint_every=0, watch=_stop_in_the_middle)
    assert sha256(update_requests=14, out=tmp_path, resume=True) == whole


class _Enough(Exception):
    pass


def _stop_in_the_middle(fold: Any) -> None:
    if fold.version == 3:
        raise _Enough


# --- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "job", "sentence"),
    [
        ("jax", {"precision": "bf16"}, "precision is 'bf16', which the engine 'jax' does not have"),
        ("jax", {"dtype": "float16"}, "dtype is 'float16'"),
        ("jax", {"parameters": {"local": ["x"]}}, "parameters is"),
        ("jax", {"device": "tpu:9"}, "device 'tpu:9' cannot be used"),
        ("jax", {"network": lambda: 3}, "network must return a module of flax.nnx"),
        ("sklearn", {"loss": abs}, "loss is"),
        ("sklearn", {"network": lambda: 3}, "network must return \\(estimator, features, outputs\\)"),
        ("sklearn", {"network": lambda: (3, 4, 5)}, "network must return an estimator of scikit-learn, not 3"),
    ],
)
def test_what_it_cannot_do_is_refused_in_a_sentence(engine: str, job: dict[str, Any], sentence: str) -> None:
    pytest.importorskip(engine)
    given: dict[str, Any] = {"network_name": "mlp", "input_shape": (4,), "outputs": 2, **job}
    with pytest.raises(ConfigError, match=sentence):
        ENGINES.named(engine)(EngineJob(**given))


def test_estimators_that_cannot_be_averaged_are_refused() -> None:
    """Each with what is missing."""
    pytest.importorskip("sklearn")
    from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression, SGDClassifier
    from sklearn.naive_bayes import GaussianNB

    for estimator, sentence in (
        (RandomForestClassifier(), "RandomForestClassifier has no partial_fit"),
        (GradientBoostingClassifier(warm_start=True), "no coefficients that could be averaged"),
        (GaussianNB(), "no coefficients that could be averaged"),
        (LogisticRegression(), "needs warm_start=True"),
        (LogisticRegression(warm_start=True, solver="liblinear"), "every solver but liblinear"),
        (SGDClassifier(average=True), "average=True"),
    ):
        job = EngineJob(network=lambda estimator=estimator: (estimator, 4, 2))
        with pytest.raises(ConfigError, match=sentence):
            ENGINES.named("sklearn")(job)


def test_a_solver_that_an_engine_would_ignore_is_refused() -> None:
    pytest.importorskip("sklearn")
    engine: Any = CASES["sklearn sgd"].make()
    with pytest.raises(ConfigError, match="would ignore VanillaSGD; write: solver = 'own'"):
        engine.check_solver(SGD)
    mlp: Any = CASES["sklearn mlp"].make()
    with pytest.raises(ConfigError, match="no state to keep"):
        mlp.check_solver(Own(keep_state=True))
    for asked in (lambda: Own().with_rate(0.5), lambda: Own().with_pull(0.1)):
        with pytest.raises(ConfigError, match="own rule"):
            asked()
    with pytest.raises(ConfigError, match="engine = 'jax'"):
        CASES["torch mlp"].learner(Optax()).train(
            CASES["torch mlp"].make(), CASES["torch mlp"].make().initial_model(0), 0, 1
        )


def test_optax_is_checked() -> None:
    pytest.importorskip("optax")
    engine: Any = CASES["jax mlp"].make()
    with pytest.raises(MetisError, match="optax has no optimizer 'adm'"):
        engine.check_solver(Optax("adm"))
    with pytest.raises(MetisError, match="refuses its options"):
        engine.check_solver(Optax("adam", options={"colour": 1}))
    with pytest.raises(ConfigError, match="takes solver = 'optax'"):
        import torch

        engine.check_solver(metis.TorchOptimizer(torch.optim.SGD, lr=0.1))


def test_jax_and_torch_make_the_same_steps() -> None:
    """The same weights, batches and solver: equal to rounding, with clipping and accumulation too."""
    pytest.importorskip("jax")
    case, other = CASES["torch mlp"], CASES["jax mlp"]
    options: dict[str, Any] = {"clip_norm": 0.5, "accumulate": 2}
    torch_engine, jax_engine = case.make(**options), other.make(**options)
    model = torch_engine.initial_model(1)
    arrays = model.tensors()
    pairs = {
        "Dense_0.kernel": "1.weight",
        "Dense_0.bias": "1.bias",
        "Dense_1.kernel": "3.weight",
        "Dense_1.bias": "3.bias",
    }
    twin = Model.from_tensors({name: arrays[there].T for name, there in pairs.items()}, jax_engine.layout)
    solver = metis.MomentumSGD(0.1)
    one = case.learner(solver).train(torch_engine, model, 1, 9)
    two = case.learner(solver).train(jax_engine, twin, 1, 9)
    assert two.loss == pytest.approx(one.loss, rel=1e-5)
    for name, there in pairs.items():
        np.testing.assert_allclose(two.model.tensors()[name], one.model.tensors()[there].T, atol=1e-5)
    found, expected = jax_engine.evaluate(two.model, case.examples), torch_engine.evaluate(one.model, case.examples)
    assert found == pytest.approx(expected, rel=1e-4)
