"""A federation without its policy: a network, data divided over learners, and how they train."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from metis.core.costs import Power
from metis.core.events import LearnerId
from metis.core.layers import Layer
from metis.core.model import Model
from metis.core.policy import Policy
from metis.core.solvers import Solver
from metis.core.stop import Patience, StopRule, Target
from metis.errors import ArgumentError, ConfigError
from metis.experiments.arguments import check_learners, check_solver, check_target, check_whole, stop_rule
from metis.experiments.at_learners import at_learners, own_tests, setting_of
from metis.experiments.baselines import federation_of_one
from metis.experiments.private import check_privacy
from metis.experiments.ready import named_federation
from metis.experiments.session import Session, Watch
from metis.experiments.start import Start, started_from, with_kept_parts
from metis.experiments.study import compare_policies
from metis.learning import Augmentation, Engine, Learner, TorchEngine, as_examples
from metis.learning.engine import LOSSY, METRICS, measured, seeded, trainable_of
from metis.privacy.records import Privacy
from metis.runs import display
from metis.runs.at_learners import AtLearners
from metis.runs.folds import VALIDATION, RunFold
from metis.runs.run import Run
from metis.runs.setting import Setting
from metis.runs.trace import has_events
from metis.simulation.availability import Always, Availability
from metis.simulation.link import Link
from metis.simulation.outages import ControllerFaults
from metis.simulation.poisoning import Poison
from metis.simulation.pools.local import Workplace
from metis.simulation.pools.settings import PoolSettings
from metis.simulation.speed import Speed
from metis.text import plural


@dataclass(frozen=True)
class SimulatedLearner:
    """One silo: which of the training examples it holds, and what kind of machine it has.

    - `name`: different for each learner.
    - `indices`: which of the training examples it holds.
    - `batch_size`: examples in a batch.
    - `speed`: seconds for a batch, such as `metis.Speed(0.03)`.
    - `availability`: when it is there; always, unless it is given.
    - `link`: its network; without it transfers take no time.
    - `power`: what its machine draws, for the energy.
    - `test`: which of the test examples are its own.
    - `privacy`: how its records are protected; the noise of a simulation comes from its seed.
    - `poison`: an attack that it carries out.
    """

    name: LearnerId
    indices: NDArray[np.int64]
    batch_size: int
    speed: Speed
    availability: Availability = field(default_factory=Always)
    link: Link = field(default_factory=Link)
    power: Power = field(default_factory=Power)
    test: NDArray[np.int64] | None = None
    privacy: Privacy | None = None
    poison: Poison | None = None


def _span(numbers: Sequence[float]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,.6g}" if low == high else f"{low:,.6g} to {high:,.6g}"


def _both(watch: Watch | None, shown: Watch | None) -> Watch | None:
    if watch is None or shown is None:
        return watch or shown

    def call(fold: RunFold) -> None:
        watch(fold)
        shown(fold)

    return call


def _torch_engine(
    given: dict[str, Any], task: Literal["classification", "regression"], threads: int, metric: str | None
) -> Engine:
    if given["network"] is None:
        raise ArgumentError("network is missing; give a function that makes a torch module, or an engine", "network")
    if given["metrics"] is None:
        given["metrics"] = measured(task, metric if metric in METRICS[task] else None) if task in METRICS else None
    if given["dtype"] in ("float16", "bfloat16"):
        warnings.warn(f"dtype is '{given['dtype']}': {LOSSY}", UserWarning, stacklevel=4)
    return TorchEngine(
        task=task, threads=threads, **{name: value for name, value in given.items() if value is not None}
    )


def _first_metric(metrics: Mapping[str, Any] | Sequence[str] | None) -> str | None:
    return None if metrics is None else next(iter(metrics), "loss")


def _only_engine(engine: Engine, given: dict[str, Any]) -> Engine:
    """An engine knows its network and where it computes: arguments that it would ignore are refused."""
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(f"{name} is given together with an engine, which has its own; leave one out", name)
    return engine


def _test_of_each(federation: Federation) -> list[NDArray[np.int64]]:
    """Where learners keep parts for themselves: the test examples of each, all of them if it has none of its own."""
    if federation.test is None or not getattr(federation.engine, "personal", False):
        return []
    everything = np.arange(len(federation.test))
    return [everything if one.test is None else np.asarray(one.test, np.int64) for one in federation.learners]


def _check_fit(engine: Engine, policy: Policy, solver: Solver) -> None:
    """Refuse what does not fit the network, and steps whose length normalised averaging cannot know."""
    check = getattr(engine, "check_solver", None)
    if check is not None:
        check(solver)
    if any(layer.key == "nova" for layer in policy.layers) and not getattr(engine, "plain_steps", True):
        raise ConfigError("nova takes a batch for a step, which it is not with clip_norm or accumulate")


class Federation:
    """Everything but the policy, so that policies can be compared on the same data and the same start.

    - `network`: a function that makes a torch module.
    - `train`, `test`, and `validation`, to choose the best model: pairs of arrays, torch datasets, or `Examples`.
    - `learners`: who holds which of the training examples, and how fast each is.
    - `solver`: how learners train, such as `metis.MomentumSGD(learning_rate=0.05)` or a `metis.TorchOptimizer`.
    - `task`: `"classification"` or `"regression"`; chooses the loss and the metrics.
    - `metric`: what runs are compared by, else the first of `metrics`; `higher_is_better`: not for losses and errors.
    - `loss`: a function of outputs and targets; `step`: one of the module and a batch, with its own forward pass.
    - `metrics`: names, or functions by name.
    - `collate`: makes a batch of a list of items.
    - `augment`: a function of a training batch and a generator of random numbers that returns the changed batch.
    - `device`: where torch computes, such as `"cuda"`; `threads`: of torch, in each process that trains.
    - `dtype`: of the weights; `precision`: of the forward pass in training only.
    - `buffers`: BatchNorm's running statistics are averaged, or stay with the learner: `"local"`.
    - `clip_norm`: the largest norm of a step's gradient; `accumulate`: the batches of a step.
    - `parameters`: which are `federated`, `local` or `frozen`, by patterns or a function of the name.
    - `personal`: a model of its own for each learner beside the federated one: `metis.Ditto(...)`, `metis.APFL(...)`.
    - `seed`: of all chance.
    - `class_counts` at each learner, `class_names` and other `facts` by name: what reports say about the data.
    - `engine`: takes the place of all that concerns the network and how it is trained and measured.
    - `initial_model`: the weights that runs begin with: a safetensors file, a state dict that torch has saved, a folder
      of Hugging Face, a state dict, or a module.
    - `faults`: those of the controller in a rehearsal.
    """

    def __init__(
        self,
        *,
        network: Callable[[], Any] | None = None,
        train: Any,
        test: Any = None,
        validation: Any = None,
        learners: Sequence[SimulatedLearner],
        solver: Solver,
        task: Literal["classification", "regression"] = "classification",
        metric: str | None = None,
        higher_is_better: bool | None = None,
        loss: Callable[[Any, Any], Any] | None = None,
        step: Callable[[Any, Any], Any] | None = None,
        metrics: Mapping[str, Any] | Sequence[str] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        augment: Augmentation | None = None,
        device: str | None = None,
        dtype: str | None = None,
        precision: Literal["float32", "tf32", "bf16", "fp16", "auto"] | None = None,
        threads: int = 1,
        buffers: Literal["average", "local"] | None = None,
        clip_norm: float | None = None,
        accumulate: int | None = None,
        parameters: Mapping[str, Sequence[str]] | Callable[[str], str] | None = None,
        personal: Any = None,
        seed: int = 1990,
        class_counts: NDArray[np.int64] | None = None,
        class_names: Sequence[str] = (),
        facts: dict[str, Any] | None = None,
        engine: Engine | None = None,
        initial_model: Start | None = None,
        faults: ControllerFaults | None = None,
    ) -> None:
        check_learners(learners, SimulatedLearner)
        check_solver(solver)
        names = [learner.name for learner in learners]
        if len({learner.power.unit for learner in learners}) > 1:
            raise ConfigError("the power of all learners must be in one unit: epsilon or watt")
        check_whole("seed", seed)
        if len(set(names)) != len(names):
            raise ConfigError(f"learners need different names; given: {', '.join(names)}")
        own = {
            "network": network, "device": device, "dtype": dtype, "buffers": buffers, "loss": loss, "step": step,
            "metrics": metrics, "clip_norm": clip_norm, "accumulate": accumulate, "parameters": parameters,
            "precision": precision, "personal": personal,
        }  # fmt: skip
        self.engine = _torch_engine(own, task, threads, metric) if engine is None else _only_engine(engine, own)
        self.train = as_examples(train, collate)
        self.test = None if test is None else as_examples(test, collate)
        self.validation = None if validation is None else as_examples(validation, collate)
        if self.test is None:  # whatever is held out is what models are measured on
            self.test, self.validation = self.validation, None
        self.threads, self.learners = threads, tuple(learners)
        self.own_sites: dict[LearnerId, NDArray[np.int64]] | None = None  # of a federation of one: those of all
        self.solver = solver
        self.augment = augment
        self.seed = seed
        self.faults = faults or ControllerFaults()
        self._start = initial_model
        self.metric = metric or _first_metric(metrics) or ("accuracy" if task == "classification" else "mae")
        self.higher_is_better = (
            self.metric not in ("loss", "mae", "mse", "rmse") if higher_is_better is None else higher_is_better
        )
        known = getattr(self.engine, "metrics", None)
        if known is not None and self.metric not in known:
            raise ConfigError(f"metric is '{self.metric}'; an evaluation measures {', '.join(known)}")
        self.class_counts = class_counts
        self.class_names = tuple(class_names)
        self.facts = facts or {}
        self._again: Callable[[int], Federation] | None = None
        if self._start is not None:
            self.engine = with_kept_parts(self._start, self.engine, seed)
        self._learners(solver)  # finds what is wrong with the data before anything starts

    def _learners(self, solver: Solver, layers: tuple[Layer, ...] = ()) -> list[Learner]:
        return [
            Learner(
                setup.name, index,
                self.train if setup.poison is None else setup.poison.taught(self.train, setup.indices),
                setup.indices, setup.batch_size, solver, self.seed, self.augment,
                layers=layers if setup.poison is None else (setup.poison, *layers), privacy=setup.privacy,
            )
            for index, setup in enumerate(self.learners)
        ]  # fmt: skip

    def simulate(
        self,
        policy: Policy,
        stop: StopRule | None = None,
        *,
        rounds: int | None = None,
        seconds: float | None = None,
        update_requests: int | None = None,
        steps: int | None = None,
        target: float | None = None,
        patience: int | None = None,
        solver: Solver | None = None,
        evaluate_every: float = 0.0,
        workers: int = 0,
        pool: Literal["inline", "processes", "ray"] | None = None,
        ray_address: str | None = None,
        gpus_per_learner: float = 0.0,
        batched: int = 1,
        store: Literal["memory", "disk"] = "memory",
        refusals_allowed: int = 3,
        out: str | Path | None = None,
        checkpoint_every: float = 60.0,
        resume: bool = False,
        overwrite: bool = False,
        watch: Watch | None = None,
        progress: bool | None = None,
    ) -> Run:
        """Run a policy in virtual time; the same seed gives the same bits for any pool and number of workers.

        - `policy`: what is run, such as `metis.semisync_fedavg(slowest_learner_epochs=2)`.
        - `stop`, or `rounds`, `seconds`, `update_requests`, `steps` by name: the run ends at whichever comes first.
        - `target`: the value of the metric until which costs are reported; to stop there, put it in the stop rule.
        - `patience`: end after so many evaluations without a better metric; of validation examples, if there are any.
        - `solver`: instead of the federation's.
        - `evaluate_every`: seconds of virtual time between two evaluations; 0 evaluates every community model.
        - `workers`: processes that train; 0 trains in this one.
        - `pool`: `"inline"`, `"processes"`, or `"ray"` for a Ray cluster, with 0 workers in as many processes as fit;
          `ray_address` is the cluster's, `gpus_per_learner` a worker's share of a GPU.
        - `batched`: up to so many small learners without convolutions are trained as one computation: faster, but the
          last bits may differ from those of each alone.
        - `store`: where the latest models are kept, `"memory"` or `"disk"`, which needs `out`.
        - `refusals_allowed`: refused updates in a row after which a learner is set aside.
        - `out`: a directory for the events, which are written as they come, the summary and the model. One that has a
          run is refused, unless `overwrite` is true, or `resume`, which continues a run that was cut off.
        - `checkpoint_every`: seconds of real time between two checkpoints in `out`.
        - `watch`: called after every event with what is known so far.
        - `progress`: whether to show a progress bar; without it only in a terminal.
        """
        session = self.session(
            policy, stop, rounds=rounds, seconds=seconds, update_requests=update_requests, steps=steps, target=target,
            patience=patience, solver=solver, evaluate_every=evaluate_every, workers=workers, pool=pool,
            ray_address=ray_address, gpus_per_learner=gpus_per_learner, batched=batched, store=store,
            refusals_allowed=refusals_allowed, out=out, checkpoint_every=checkpoint_every,
        )  # fmt: skip
        if out is not None and not resume and not overwrite and has_events(Path(out)):
            raise ConfigError(
                f"out is {out}, which has a run; choose another directory, continue the run with resume=True, or "
                "replace it with overwrite=True"
            )
        if progress is None:
            progress = watch is None and sys.stderr.isatty()
        with display.progress(session.policy.label, session.stop) if progress else nullcontext() as shown:
            session.watch = _both(watch, shown)
            return session.resume() if resume else session.run()

    def session(
        self,
        policy: Policy,
        stop: StopRule | None = None,
        *,
        rounds: int | None = None,
        seconds: float | None = None,
        update_requests: int | None = None,
        steps: int | None = None,
        target: float | None = None,
        patience: int | None = None,
        solver: Solver | None = None,
        evaluate_every: float = 0.0,
        workers: int = 0,
        pool: Literal["inline", "processes", "ray"] | None = None,
        ray_address: str | None = None,
        gpus_per_learner: float = 0.0,
        batched: int = 1,
        store: Literal["memory", "disk"] = "memory",
        refusals_allowed: int = 3,
        out: str | Path | None = None,
        checkpoint_every: float = 60.0,
    ) -> Session:
        """A run that is checked but not started; the arguments are those of `simulate`."""
        if not isinstance(policy, Policy):
            raise ConfigError(f"policy must be a Policy such as metis.fedrec(), not {policy!r}")
        stop = stop_rule(stop, StopRule(rounds, seconds, update_requests, steps=steps))
        if store not in ("memory", "disk"):
            raise ConfigError(f"store is '{store}'; allowed: memory, disk")
        if not 0 <= evaluate_every < math.inf:
            raise ConfigError(f"evaluate_every must be 0 seconds or more, not {evaluate_every}")
        if out is not None and Path(out).exists() and not Path(out).is_dir():
            raise ConfigError(f"out is {out}, which is a file; give a directory")
        for name, value in (("workers", workers), ("batched", batched), ("refusals_allowed", refusals_allowed)):
            check_whole(name, value)
        pool_settings = PoolSettings(pool, workers, self.threads, ray_address, gpus_per_learner, batched)
        if store == "disk" and out is None:
            raise ConfigError("the disk store needs a directory: give out=...")
        goal = stop.target
        if goal is None and target is not None:
            goal = Target(self.metric, target, self.higher_is_better)
        if goal is not None:
            check_target(goal, self.engine, self.test)
        if patience is not None:
            if self.test is None:
                raise ConfigError("patience needs held-out examples to be measured on: give validation=... or test=...")
            judged = self.metric if self.validation is None else VALIDATION + self.metric
            stop = replace(stop, patience=Patience(judged, patience, self.higher_is_better))
        check_solver(solver := solver or self.solver)
        policy, solver = policy.for_solver(solver)
        _check_fit(self.engine, policy, solver)
        check_privacy(self.engine, self.learners, policy)
        who = self if policy.baseline is None else federation_of_one(self, policy.baseline)
        layout = policy.extend_layout(self.engine.layout, trainable_of(self.engine))
        workplace = Workplace(
            seeded(self.engine, self.seed), who._learners(solver, policy.learner_layers), self.test, layout,
            _test_of_each(who), self.validation, self.sites,
        )  # fmt: skip
        return Session(
            who, policy, stop, goal, None if out is None else Path(out), workplace, pool_settings=pool_settings,
            disk=store == "disk", refusals_allowed=refusals_allowed, evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
        )  # fmt: skip

    def compare(
        self,
        policies: Sequence[Policy] | Mapping[str, Policy],
        *,
        seeds: int | Sequence[int] = 1,
        workers: int | None = None,
        out: str | Path | None = None,
        **options: Any,
    ) -> Any:
        """Run several policies on this data from the same start, and return a `metis.Comparison` of them.

        - `policies`: a list, or a dict whose keys are the names in tables and figures; also the baselines
          `metis.centralized()`, all data in one place, and `metis.alone("site-1")`, one learner without the others.
        - `seeds`: how many, from the federation's on, or which; all chance comes from them.
        - `workers`: runs at the same time, each in its own process; without it one for each processor.
        - `out`: a directory for all runs. Finished ones are not repeated: the same call continues a cut one.
        - `options`: those of `simulate`, such as `seconds`, `target` and `evaluate_every`.

        The result shows itself in a terminal and in a notebook; `save(folder)` writes its tables and figures.
        """
        return display.comparison(compare_policies(self, policies, seeds, workers, out, options))

    @classmethod
    def from_dataset(
        cls,
        dataset: str,
        *,
        learners: int | None = None,
        sizes: str | Sequence[int] = "uniform",
        classes: str = "iid",
        classes_per_learner: int | None = None,
        alpha: float | None = None,
        speeds: Sequence[float] | float = (0.1,),
        batch_size: int = 20,
        network: str | Callable[[], Any] = "mlp",
        network_options: Mapping[str, Any] | None = None,
        solver: Solver | None = None,
        seed: int = 1990,
        train_examples: int | None = None,
        test_examples: int | None = None,
        validation: float | None = None,
        own_tests: bool = False,
    ) -> Federation:
        """A data set by name, divided over learners, with a network: everything but the policy.

        - `dataset`: a name that `metis data list` shows.
        - `learners`: how many; without it 10, or for `sizes="natural"` one for each silo of the data.
        - `sizes`: how much each holds: `"uniform"`, `"skewed"`, `"power_law"`, `"zipf"`, `"natural"`, or a list.
        - `classes`: which examples: `"iid"`, `"non_iid"` or `"random_classes"` with `classes_per_learner`,
          `"shards"` with `classes_per_learner` shards each, `"dirichlet"` with `alpha`, `"class_dirichlet"` with
          `alpha`, where the sizes follow from the classes, or `"target_ranges"` of a regression.
        - `speeds`: seconds for a batch; of several the learners take one in turn, the largest share first.
        - `batch_size`: examples in a batch of every learner.
        - `network`: a name with `network_options`, or a function that makes a torch module.
        - `solver`: how learners train; without it `metis.MomentumSGD(learning_rate=0.05, momentum=0.75)`.
        - `seed`: of all chance, also of the division; `compare(seeds=...)` divides again for each seed.
        - `train_examples`, `test_examples`: use only so many, drawn at random.
        - `own_tests`: whether the test examples are divided too, like the training examples: `Run.at_learners`.
        - `validation`: the share of the training examples that is held out to choose the best model by.
        """
        given = {name: value for name, value in locals().items() if name not in ("cls", "dataset")}
        federation = named_federation(dataset, **given)
        federation._again = lambda other: cls.from_dataset(dataset, **{**given, "seed": other})
        return federation

    @property
    def sites(self) -> dict[LearnerId, NDArray[np.int64]]:
        """Which test examples are whose, of the learners that have any of their own."""
        return own_tests(self)

    def evaluate_at_learners(self, model: Model) -> AtLearners:
        """What `model` is worth to each learner that has test examples of its own (`SimulatedLearner.test`)."""
        return at_learners(self, model)

    def with_seed(self, seed: int) -> Federation:
        """The same federation with another `seed`; one that was made `from_dataset` is also divided again."""
        check_whole("seed", seed)
        if self._again is not None:
            return self._again(seed)
        other = copy.copy(self)
        other.seed = seed
        return other

    def setting(self, policy: Policy, target: Target | None, travels: Model | None = None) -> Setting:
        """What folds the events of a run of `policy` into a result, with the costs until `target`.

        `travels` is a model as it is sent, if not the network.
        """
        return setting_of(self, policy, target, travels or self.initial_model)

    def __repr__(self) -> str:
        data = self.facts.get("dataset", f"{len(self.train):,} training examples")
        times = [learner.speed.time_per_batch for learner in self.learners]
        test = "nothing to evaluate on" if self.test is None else f"{len(self.test):,} test examples"
        sizes = _span([len(learner.indices) for learner in self.learners])
        return (
            f"<Federation of {plural(len(self.learners), 'learner')} on {data}, each with {sizes} examples and "
            f"{_span(times)} s a batch; {test}, {self.metric}; {type(self.solver).__name__}, seed {self.seed}>"
        )

    @property
    def initial_model(self) -> Model:
        """Where every policy starts from."""
        return self.started(self.engine.initial_model(self.seed))

    def started(self, network: Model) -> Model:
        """The `network` as runs begin with it: as initialized, or with the weights of `initial_model`."""
        return network if self._start is None else started_from(self._start, network, self.engine)
