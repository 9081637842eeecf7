"""Training with scikit-learn: the coefficients of an estimator are the model, and a batch is one call of it.

`network()` of a site returns `(estimator, features, outputs)`: an estimator that is not fitted, how many numbers an
example has, and how many classes there are (1 for a regression), because every site must know the shapes alike.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, SGDClassifier, SGDRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from threadpoolctl import threadpool_limits

from metis.core.layers import Memory
from metis.core.model import Layout, Model, TensorSpec
from metis.core.solvers import Solver
from metis.errors import ConfigError
from metis.learning.arrays import Array, ArrayEngine, arrays_of
from metis.learning.engine import Batch, EngineJob, Trained
from metis.learning.solvers import check_own

_SMALLEST = 1e-12  # of a probability, whose logarithm is an output
_STILL = 1e-30  # a learning rate that changes no number of 32 bits


class SklearnEngine(ArrayEngine):
    """Trains estimators with `partial_fit`, or with `fit` and `warm_start`: linear models and MLPs."""

    name = "sklearn"
    refused = (*ArrayEngine.refused, "loss", "clip_norm", "accumulate", "buffers", "device")

    def __init__(self, job: EngineJob) -> None:
        super().__init__(job)
        if job.network is None:
            made = networks()[job.network_name](job.input_shape, job.outputs, **job.network_options)
        else:
            made = job.network()
        try:
            self._estimator, features, outputs = made
        except (TypeError, ValueError):
            raise ConfigError(
                "network must return (estimator, features, outputs), as in SGDClassifier(loss='log_loss'), 30, 2"
            ) from None
        self._check()
        self._inputs = np.zeros((max(1, outputs), features), np.float32)  # one example of each class
        self._classes = np.arange(outputs)
        try:
            started = self._started(0)
        except ValueError as problem:
            raise ConfigError(f"{type(self._estimator).__name__} cannot be used: {problem}") from problem
        self._layers = hasattr(started, "coefs_")
        self._layout = Layout(tuple(TensorSpec(name, array.shape) for name, array in self._tensors(started).items()))

    def _check(self) -> None:
        estimator, name = self._estimator, type(self._estimator).__name__
        settings = estimator.get_params() if hasattr(estimator, "get_params") else None
        if settings is None or isinstance(estimator, type):
            raise ConfigError(f"network must return an estimator of scikit-learn, not {estimator!r}")
        if not hasattr(estimator, "partial_fit") and not settings.get("warm_start"):
            raise ConfigError(f"{name} has no partial_fit; an estimator without it needs warm_start=True")
        for setting in ("average", "early_stopping"):
            if settings.get(setting):
                raise ConfigError(f"{name} has {setting}={settings[setting]!r}, which needs more than its coefficients")
        if isinstance(estimator, LogisticRegression) and settings["solver"] == "liblinear":
            raise ConfigError("LogisticRegression starts from the community model with every solver but liblinear")
        if hasattr(estimator, "predict_proba") != (not self._regression) and hasattr(estimator, "predict_proba"):
            raise ConfigError(f"{name} is a classifier, but the task is a regression")

    def initial_model(self, seed: int) -> Model:
        return Model.from_tensors(self._tensors(self._started(seed)), self._layout)

    def train(
        self,
        community_model: Model,
        batches: Iterable[Batch],
        solver: Solver,
        memory: Memory | None = None,
        seed: int = 0,
    ) -> Trained:
        self.check_solver(solver)
        with self._quietly():
            estimator = self._loaded(community_model, seed)
            if solver.keeps_memory and "t" in (memory or {}):
                estimator.t_ = float((memory or {})["t"])
            steps, examples, total = 0, 0, 0.0
            for batch in batches:
                inputs, targets = self._read(batch)
                total += self.loss_of(self._scores(estimator, inputs), targets) * len(inputs)
                self._fit(estimator, inputs, targets)
                steps, examples = steps + 1, examples + len(inputs)
            model = Model.from_tensors(self._tensors(estimator), self._layout)
        kept = {"t": np.asarray(estimator.t_, np.float64)} if solver.keeps_memory else {}
        return Trained(model, steps, total / (examples or math.nan), kept)

    def check_solver(self, solver: Solver) -> None:
        """Refuse a solver: the estimator has a rule of its own."""
        check_own(self.name, solver)
        if solver.keeps_memory and (self._layers or not hasattr(self._estimator, "power_t")):
            raise ConfigError(
                f"{type(self._estimator).__name__} has no state to keep between tasks; leave keep_state out"
            )

    def predictor(self, model: Model, memory: Memory) -> Callable[[Array], Array]:
        with self._quietly():
            estimator = self._loaded(model, 0)

        def predict(inputs: Array) -> Array:
            with self._quietly():
                return self._scores(estimator, inputs.reshape(len(inputs), -1))

        return predict

    def loss_of(self, outputs: Array, targets: Array) -> float:
        if self._regression:
            return float(((outputs - targets) ** 2).mean())
        if outputs.shape[1] == 1:  # of the second of two classes
            outputs = np.concatenate([np.zeros_like(outputs), outputs], axis=1)
        largest = outputs.max(axis=1, keepdims=True)
        logarithms = outputs - largest - np.log(np.exp(outputs - largest).sum(axis=1, keepdims=True))
        return float(-logarithms[np.arange(len(targets)), targets].mean())

    # --- the estimator ------------------------------------------------------------------------

    def _quietly(self) -> Any:
        """With the threads of the job, and without a warning that a step has not converged."""
        return _Quiet(self._job.threads)

    def _read(self, batch: Batch) -> tuple[Array, Array]:
        inputs, targets = arrays_of(batch)
        flat = inputs.reshape(len(inputs), -1)
        if flat.shape[1] != self._inputs.shape[1]:
            raise ConfigError(f"examples have {flat.shape[1]} numbers; the estimator is for {self._inputs.shape[1]}")
        targets = self.fitted(targets, (len(targets),))
        if not self._regression and (targets.min() < 0 or targets.max() >= len(self._classes)):
            raise ConfigError(f"a label is not among the {len(self._classes)} classes of the estimator")
        return flat, targets

    def _started(self, seed: int) -> Any:
        """An estimator with its own initial coefficients: fitted to examples of zeros, by steps that change nothing."""
        estimator = clone(self._estimator)
        settings = estimator.get_params()
        given: dict[str, Any] = {"random_state": seed & 0x7FFFFFFF} if "random_state" in settings else {}
        if "learning_rate_init" in settings:
            given["learning_rate_init"] = _STILL
        estimator.set_params(**given)
        targets = np.zeros(len(self._inputs)) if self._regression else self._classes
        with self._quietly():
            if hasattr(estimator, "partial_fit"):
                classes = {} if self._regression else {"classes": self._classes}
                estimator.partial_fit(self._inputs, targets, **classes)
            else:
                estimator.fit(self._inputs, targets)
        if not hasattr(estimator, "coefs_"):
            if not hasattr(estimator, "coef_"):
                raise ConfigError(f"{type(estimator).__name__} has no coefficients that could be averaged")
            for array in self._tensors(estimator).values():
                array[...] = 0.0  # where linear models start
        if "learning_rate_init" in settings:
            estimator.set_params(learning_rate_init=settings["learning_rate_init"])
        return estimator

    def _loaded(self, model: Model, seed: int) -> Any:
        estimator = self._started(seed)
        for name, array in self._tensors(estimator).items():
            array[...] = model.tensors()[name]
        if hasattr(estimator, "_optimizer"):
            del estimator._optimizer  # it starts again with these coefficients
        if hasattr(estimator, "power_t") and hasattr(estimator, "t_"):
            estimator.t_ = 1.0  # of the learning rate's schedule
        return estimator

    @staticmethod
    def _tensors(estimator: Any) -> dict[str, Array]:
        if hasattr(estimator, "coefs_"):
            return {
                f"{name}.{index}": array
                for name in ("coefs_", "intercepts_")
                for index, array in enumerate(getattr(estimator, name))
            }
        return {"coef_": estimator.coef_, "intercept_": np.atleast_1d(estimator.intercept_)}

    def _fit(self, estimator: Any, inputs: Array, targets: Array) -> None:
        if hasattr(estimator, "partial_fit"):
            estimator.partial_fit(inputs, targets)
            return
        weight: dict[str, Array] = {}
        if not self._regression:  # every class is there, though a batch may lack some: with no weight
            inputs, targets = np.concatenate([inputs, self._inputs]), np.concatenate([targets, self._classes])
            weight["sample_weight"] = np.ones(len(targets))
            weight["sample_weight"][-len(self._classes) :] = 0
        estimator.fit(inputs, targets, **weight)

    def _scores(self, estimator: Any, inputs: Array) -> Array:
        if self._regression:
            return np.asarray(estimator.predict(inputs), np.float32).reshape(len(inputs))
        if hasattr(estimator, "predict_proba"):
            probabilities = np.maximum(estimator.predict_proba(inputs), _SMALLEST)
            return np.asarray(np.log(probabilities), np.float32)
        scores = np.asarray(estimator.decision_function(inputs), np.float32)
        return scores.reshape(len(inputs), -1)


class _Quiet:
    def __init__(self, threads: int) -> None:
        self._limits, self._warnings = threadpool_limits(threads), warnings.catch_warnings()

    def __enter__(self) -> None:
        self._warnings.__enter__()
        warnings.simplefilter("ignore", ConvergenceWarning)

    def __exit__(self, *problem: Any) -> None:
        self._warnings.__exit__(*problem)
        self._limits.restore_original_limits()


# --- by name ------------------------------------------------------------------------------------


def logistic(input_shape: Sequence[int], outputs: int, max_iter: int = 1, C: float = 1.0) -> Any:
    """LogisticRegression with warm start: each batch is fitted by a few iterations of L-BFGS."""
    if outputs < 2:
        raise ConfigError("logistic regression is for classes; use the network 'sgd' or 'mlp' for a regression")
    return LogisticRegression(C=C, max_iter=max_iter, warm_start=True), math.prod(input_shape), outputs


def sgd(
    input_shape: Sequence[int],
    outputs: int,
    loss: str = "",
    alpha: float = 1e-4,
    learning_rate: str = "constant",
    eta0: float = 0.01,
) -> Any:
    """SGDClassifier, with the logistic loss unless another is named, or SGDRegressor."""
    kind = SGDRegressor if outputs == 1 else SGDClassifier
    loss = loss or ("squared_error" if outputs == 1 else "log_loss")
    estimator = kind(loss=loss, alpha=alpha, learning_rate=learning_rate, eta0=eta0)
    return estimator, math.prod(input_shape), outputs


def mlp(
    input_shape: Sequence[int],
    outputs: int,
    hidden: Sequence[int] = (64,),
    solver: str = "sgd",
    learning_rate_init: float = 0.05,
    alpha: float = 1e-4,
) -> Any:
    """MLPClassifier or MLPRegressor; `solver` is sgd or adam."""
    kind = MLPRegressor if outputs == 1 else MLPClassifier
    estimator = kind(
        hidden_layer_sizes=tuple(hidden), solver=solver, learning_rate_init=learning_rate_init, alpha=alpha
    )
    return estimator, math.prod(input_shape), outputs


def networks() -> dict[str, Callable[..., Any]]:
    """Estimators by name."""
    return {"mlp": mlp, "sgd": sgd, "logistic": logistic}
