"""A federation without its policy: a network, data divided over learners, and how they train."""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from metis.core.controller import Controller
from metis.core.costs import Power
from metis.core.events import Action, Event, LearnerId
from metis.core.layers import Layer
from metis.core.mixing import MemoryStore, ModelStore
from metis.core.model import Model
from metis.core.policy import Policy
from metis.core.solvers import Solver
from metis.core.stop import StopRule, Target
from metis.errors import ConfigError, DataError, InternalError, LearnerError
from metis.kernels import use_all_processors
from metis.learning import Augmentation, Engine, Learner, TorchEngine, as_examples
from metis.learning.engine import trainable_of
from metis.runs.checkpoint import CHECKPOINT, Checkpoint
from metis.runs.folds import RunFold
from metis.runs.run import COMMUNITY, SUMMARY, Run
from metis.runs.setting import LearnerInfo, Setting
from metis.runs.storage import DiskStore
from metis.runs.trace import EVENTS, measures_of, to_line, without_weights
from metis.simulation.availability import Always, Availability
from metis.simulation.interrupt import Interrupts
from metis.simulation.link import Link
from metis.simulation.pools.local import Workplace, make_pool
from metis.simulation.pools.recorded import RecordedPool
from metis.simulation.pools.settings import PoolSettings
from metis.simulation.simulator import Machine, Simulator, present_at_start
from metis.simulation.speed import Speed

Watch = Callable[[RunFold], None]


@dataclass(frozen=True)
class SimulatedLearner:
    """One silo: which of the training examples it holds, and what kind of machine it has."""

    name: LearnerId
    indices: NDArray[np.int64]
    batch_size: int
    speed: Speed
    availability: Availability = field(default_factory=Always)
    link: Link = field(default_factory=Link)
    power: Power = field(default_factory=Power)


def _whole(name: str, value: Any) -> None:
    if not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} must be a whole number, 0 or more, not {value!r}")


class Federation:
    """Everything but the policy, so that policies can be compared on the same data and the same start.

    `network` makes a torch module; `train` and `test` are pairs of arrays, map-style datasets of torch, or
    `Examples`; `learners` say who holds which of the training examples.
    """

    def __init__(
        self,
        *,
        network: Callable[[], Any],
        train: Any,
        test: Any = None,
        learners: Sequence[SimulatedLearner],
        solver: Solver,
        task: Literal["classification", "regression"] = "classification",
        metric: str | None = None,
        higher_is_better: bool | None = None,
        augment: Augmentation | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        buffers: Literal["average", "local"] = "average",
        seed: int = 1990,
        class_counts: NDArray[np.int64] | None = None,
        class_names: Sequence[str] = (),
        facts: dict[str, Any] | None = None,
        engine: Engine | None = None,
    ) -> None:
        names = [learner.name for learner in learners]
        if not names:
            raise ConfigError("a federation needs at least one learner")
        if len({learner.power.unit for learner in learners}) > 1:
            raise ConfigError("the power of all learners must be in one unit: epsilon or watt")
        _whole("seed", seed)
        if len(set(names)) != len(names):
            raise ConfigError(f"learners need different names; given: {', '.join(names)}")
        self.engine = engine or TorchEngine(network, task, device=device, dtype=dtype, threads=threads, buffers=buffers)
        self.train = as_examples(train)
        self.test = None if test is None else as_examples(test)
        self.threads = threads
        self.learners = tuple(learners)
        self.solver = solver
        self.augment = augment
        self.seed = seed
        self.metric = metric or ("accuracy" if task == "classification" else "mae")
        self.higher_is_better = (
            self.metric not in ("loss", "mae", "mse", "rmse") if higher_is_better is None else higher_is_better
        )
        measured = getattr(self.engine, "metrics", None)
        if measured is not None and self.metric not in measured:
            raise ConfigError(f"metric is '{self.metric}'; an evaluation measures {', '.join(measured)}")
        self.class_counts = class_counts
        self.class_names = tuple(class_names)
        self.facts = facts or {}
        self._learners(solver)  # what is wrong with the data shows here, before anything starts

    def _learners(self, solver: Solver, layers: tuple[Layer, ...] = ()) -> list[Learner]:
        return [
            Learner(
                setup.name,
                index,
                self.train,
                setup.indices,
                setup.batch_size,
                solver,
                self.seed,
                self.augment,
                layers=layers,
            )
            for index, setup in enumerate(self.learners)
        ]

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
        watch: Watch | None = None,
    ) -> Run:
        """Run a policy in virtual time; the same seed gives the same bits for any pool and number of workers.

        Give a `StopRule`, or `rounds`, `seconds`, `update_requests`, `steps` by name. `target` is only reported; to
        stop there, put it in the stop rule. With `out`, events are written as they come (an earlier run there is
        overwritten) and a run that was cut off goes on with `resume=True`. Learners train in this process without
        `workers`, in so many processes with them, or on a Ray cluster: `pool="ray"`, with 0 workers as many as fit.
        With `batched` up to that many small learners without convolutions are trained as one computation: faster, but
        the last bits may differ from those of each alone.
        """
        if not isinstance(policy, Policy):
            raise ConfigError(f"policy must be a Policy such as metis.fedrec(), not {policy!r}")
        limits = (rounds, seconds, update_requests, steps)
        if stop is not None and limits != (None,) * len(limits):
            raise ConfigError("give either a StopRule or rounds, seconds, update_requests, steps by name, not both")
        try:
            stop = stop or StopRule(rounds, seconds, update_requests, steps=steps)
        except ValueError as problem:
            raise ConfigError(str(problem)) from None
        if stop == StopRule():
            raise ConfigError("a run needs an end: give rounds, seconds, update_requests, steps or a StopRule")
        if store not in ("memory", "disk"):
            raise ConfigError(f"store is '{store}'; allowed: memory, disk")
        if not 0 <= evaluate_every < math.inf:
            raise ConfigError(f"evaluate_every must be 0 seconds or more, not {evaluate_every}")
        _whole("refusals_allowed", refusals_allowed)
        if out is not None and Path(out).exists() and not Path(out).is_dir():
            raise ConfigError(f"out is {out}, which is a file; give a directory")
        _whole("workers", workers)
        _whole("batched", batched)
        places = PoolSettings(pool, workers, self.threads, ray_address, gpus_per_learner, batched)
        if store == "disk" and out is None:
            raise ConfigError("the disk store needs a directory: give out=...")
        goal = stop.target
        if goal is None and target is not None:
            goal = Target(self.metric, target, self.higher_is_better)
        if goal is not None and self.test is None:
            raise ConfigError("a target needs held-out examples to be measured on: give test=...")
        policy, solver = policy.for_solver(solver or self.solver)
        session = _Session(
            self,
            policy,
            stop,
            goal,
            None if out is None else Path(out),
            Workplace(
                self.engine,
                self._learners(solver, policy.learner_layers),
                self.test,
                policy.extend_layout(self.engine.layout, trainable_of(self.engine)),
            ),
            places=places,
            disk=store == "disk",
            refusals_allowed=refusals_allowed,
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            watch=watch,
        )
        return session.resume() if resume else session.run()

    def setting(self, policy: Policy, target: Target | None, travels: Model | None = None) -> Setting:
        """What folds the events of a run into a result; `travels` is a model as it is sent, if not the network."""
        travels = travels or self.initial_model
        learners = [
            LearnerInfo(
                setup.name,
                len(setup.indices),
                setup.batch_size,
                setup.speed.time_per_batch,
                setup.power,
                () if self.class_counts is None else tuple(int(n) for n in self.class_counts[index]),
            )
            for index, setup in enumerate(self.learners)
        ]
        return Setting.of(
            policy,
            travels,
            learners,
            seed=self.seed,
            metric=self.metric,
            higher_is_better=self.higher_is_better,
            target=target,
            class_names=self.class_names,
            facts=self.facts,
        )

    @property
    def initial_model(self) -> Model:
        """Where every policy starts from."""
        return self.engine.initial_model(self.seed)


class _Session:
    """One run on its way: the simulator, the trace it writes and the checkpoints it leaves."""

    def __init__(
        self,
        federation: Federation,
        policy: Policy,
        stop: StopRule,
        target: Target | None,
        out: Path | None,
        workplace: Workplace,
        *,
        places: PoolSettings,
        disk: bool,
        refusals_allowed: int,
        evaluate_every: float,
        checkpoint_every: float,
        watch: Watch | None,
    ) -> None:
        self._federation, self._policy, self._stop = federation, policy, stop
        self._out, self._workplace, self._places, self._disk = out, workplace, places, disk
        self._refusals_allowed = refusals_allowed
        self._evaluate_every, self._checkpoint_every = evaluate_every, checkpoint_every
        self._watch = watch
        network = workplace.engine.initial_model(federation.seed)
        self._initial_model = policy.extend_model(network, trainable_of(workplace.engine))
        self._setting = federation.setting(policy, target, self._initial_model)
        self._fold = RunFold(self._setting)
        self._events: list[tuple[float, Event | Action]] = []
        self._lines = 0
        self._file: Any = None
        self._wall_before = 0.0
        self._wall_start = self._last_checkpoint = time.perf_counter()

    # --- the two ways in ------------------------------------------------------------------------

    def run(self) -> Run:
        if self._out is not None:
            self._out.mkdir(parents=True, exist_ok=True)
            for name in (CHECKPOINT, SUMMARY, COMMUNITY):  # what an earlier run left would not fit these events
                (self._out / name).unlink(missing_ok=True)
            self._setting.save(self._out)
            self._file = (self._out / EVENTS).open("w", encoding="utf-8", buffering=1)
        use_all_processors()
        with closing(make_pool(self._workplace, self._places)) as pool:
            return self._go(self._simulator(self._initial_model, pool, self._store()))

    def resume(self) -> Run:
        if self._out is None:
            raise ConfigError("to resume, give the directory of the run as out=...")
        checkpoint = Checkpoint.load(self._out, self._identity)
        simulator = self._replay(checkpoint.recorded(self._out))
        self._setting.save(self._out)
        self._wall_before = checkpoint.wall_seconds
        use_all_processors()
        with closing(make_pool(self._workplace, self._places)) as pool:
            simulator.load_arrays(self._initial_model, checkpoint.arrays, pool, self._store())
            checkpoint.cut(self._out)
            self._file = (self._out / EVENTS).open("a", encoding="utf-8", buffering=1)
            return self._go(simulator)

    def _replay(self, recorded: list[tuple[float, Event | Action]]) -> Simulator:
        """The simulator as it was after these events, but for the weights; those are in the checkpoint."""
        simulator = self._simulator(Model.empty(), RecordedPool(recorded), MemoryStore())
        simulator.controller.measures = measures_of(recorded)
        try:
            simulator.start()
            while self._lines < len(recorded) and not simulator.finished and simulator.step(Interrupts()):
                pass
        except (LearnerError, InternalError):  # an event that the recorded ones do not allow
            self._events.clear()
        if [to_line(*event) for event in self._events] != [to_line(*event) for event in recorded]:
            raise DataError(
                f"{self._out} cannot be resumed: its events do not come out again; either {EVENTS} was changed, "
                "or the run has passed the end that is asked for now"
            )
        return simulator

    @cached_property
    def _identity(self) -> dict[str, str]:
        """A digest of each thing that must stay the same for a run to go on; its end and its workers may change."""
        federation = self._federation
        learners = [
            (
                setup.name,
                hashlib.sha256(np.ascontiguousarray(setup.indices, np.int64).data).hexdigest(),
                int(setup.batch_size),
                setup.speed,
                setup.availability,
                setup.link,
            )
            for setup in federation.learners
        ]
        parts = {
            "policy": (self._policy.identity, self._refusals_allowed),
            "network or seed": (federation.seed, self._initial_model.sha256()),
            "solver": self._workplace.learners[0].solver,
            "augmentation": federation.augment,
            "way of training (batched)": self._places.batched > 1,
            "division of the data or other learners": learners,
            "way of evaluating": (self._evaluate_every, None if federation.test is None else len(federation.test)),
        }
        # Where an object lies in memory is no part of what it is.
        return {
            part: hashlib.sha256(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)).encode()).hexdigest()
            for part, value in parts.items()
        }

    # --- parts ----------------------------------------------------------------------------------

    def _store(self) -> ModelStore:
        if self._disk:
            assert self._out is not None
            return DiskStore(self._out / "models")
        return MemoryStore()

    @cached_property
    def _machines(self) -> list[Machine]:
        return [
            Machine(
                learner.name,
                len(learner.indices),
                learner.batch_size,
                learner.speed,
                learner.availability,
                learner.link,
            )
            for learner in self._federation.learners
        ]

    def _simulator(self, initial_model: Model, pool: Any, store: ModelStore) -> Simulator:
        seed = self._federation.seed
        controller = Controller(
            self._policy,
            initial_model,
            stop=self._stop,
            learners_expected=present_at_start(self._machines, seed),
            refusals_allowed=self._refusals_allowed,
            store=store,
            models_checked=True,  # by `Learner.train`, which hands in no other
        )
        return Simulator(
            controller,
            self._machines,
            pool,
            self._record,
            seed=seed,
            evaluate=self._federation.test is not None,
            evaluate_every=self._evaluate_every,
            model_bytes=self._setting.model_bytes,
            update_bytes=self._setting.update_bytes,
            versions=DiskStore(self._out / "versions") if self._disk and self._out is not None else None,
        )

    def _record(self, now: float, item: Event | Action) -> None:
        self._fold.record(now, item)
        self._lines += 1
        self._events.append((now, without_weights(item)))
        if self._file is not None:
            self._file.write(to_line(now, item) + "\n")

    def _go(self, simulator: Simulator) -> Run:
        def after_each() -> None:
            if self._watch is not None:
                self._watch(self._fold)
            if self._out is not None and time.perf_counter() - self._last_checkpoint >= self._checkpoint_every:
                self._checkpoint(simulator)

        def on_interrupt() -> None:
            if self._out is not None:
                self._checkpoint(simulator)

        with Interrupts():  # around the simulator's own: what it leaves behind is saved before anybody may go
            try:
                simulator.run(after_each, on_interrupt)
            finally:
                if self._file is not None:
                    self._file.close()
            model = simulator.controller.community.model.network
            run = Run(self._setting, self._events, model, self._wall(), folded=self._fold)
            if self._out is not None:
                run.save(self._out)
                if run.finish_reason != "interrupted":
                    (self._out / CHECKPOINT).unlink(missing_ok=True)
        return run

    def _wall(self) -> float:
        return self._wall_before + time.perf_counter() - self._wall_start

    def _checkpoint(self, simulator: Simulator) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        assert self._out is not None
        Checkpoint(simulator.arrays(), self._lines, self._wall()).save(self._out, self._identity)
        self._last_checkpoint = time.perf_counter()
