"""One simulated run from its start or its checkpoint to its end."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from metis.core.controller import Controller
from metis.core.events import Action, Event
from metis.core.mixing import MemoryStore, ModelStore
from metis.core.model import Model
from metis.core.policy import Policy
from metis.core.stop import StopRule, Target
from metis.errors import ConfigError, DataError, InternalError, LearnerError
from metis.experiments.private import limits
from metis.kernels import use_all_processors
from metis.learning.engine import trainable_of
from metis.runs.checkpoint import CHECKPOINT, Checkpoint
from metis.runs.folds import RunFold
from metis.runs.run import BEST, COMMUNITY, SUMMARY, Run
from metis.runs.storage import DiskStore
from metis.runs.trace import EVENTS, measures_of, to_line, without_weights
from metis.simulation.interrupt import Interrupts
from metis.simulation.pools.local import Workplace, make_pool
from metis.simulation.pools.recorded import RecordedPool
from metis.simulation.pools.settings import PoolSettings
from metis.simulation.simulator import Machine, Simulator, present_at_start
from metis.simulation.weights import restore_weights, weights_of

if TYPE_CHECKING:
    from metis.experiments.federation import Federation

Watch: TypeAlias = Callable[[RunFold], None]


class Session:
    """A run in progress: the simulator, the trace it writes and the checkpoints it leaves."""

    def __init__(
        self,
        federation: Federation,
        policy: Policy,
        stop: StopRule,
        target: Target | None,
        out: Path | None,
        workplace: Workplace,
        *,
        pool_settings: PoolSettings,
        disk: bool,
        refusals_allowed: int,
        evaluate_every: float,
        checkpoint_every: float,
    ) -> None:
        self._federation, self.policy, self.stop = federation, policy, stop
        self._target = target
        self._out, self._workplace, self._pool_settings, self._disk = out, workplace, pool_settings, disk
        self._refusals_allowed = refusals_allowed
        self._evaluate_every, self._checkpoint_every = evaluate_every, checkpoint_every
        self.watch: Watch | None = None
        network = federation.started(workplace.engine.initial_model(federation.seed))
        self._initial_model = policy.extend_model(network, trainable_of(workplace.engine))
        self._setting = federation.setting(policy, target, self._initial_model)
        self._fold = RunFold(self._setting)
        self._events: list[tuple[float, Event | Action]] = []
        self._lines = 0
        self._file: Any = None
        self._wall_before = 0.0
        self._wall_start = self._last_checkpoint = time.perf_counter()

    # --- start and resume -----------------------------------------------------------------------

    def run(self) -> Run:
        if self._out is not None:
            self._out.mkdir(parents=True, exist_ok=True)
            for name in (CHECKPOINT, SUMMARY, COMMUNITY, BEST):  # what an earlier run left would not fit these events
                (self._out / name).unlink(missing_ok=True)
            self._setting.save(self._out)
            self._file = (self._out / EVENTS).open("w", encoding="utf-8", buffering=1)
        use_all_processors()
        with closing(make_pool(self._workplace, self._pool_settings)) as pool:
            return self._go(self._simulator(self._initial_model, pool, self._store()))

    def resume(self) -> Run:
        if self._out is None:
            raise ConfigError("to resume, give the directory of the run as out=...")
        checkpoint = Checkpoint.load(self._out, self._identity)
        simulator = self._replay(checkpoint.recorded(self._out))
        self._setting.save(self._out)
        self._wall_before = checkpoint.wall_seconds
        use_all_processors()
        with closing(make_pool(self._workplace, self._pool_settings)) as pool:
            restore_weights(simulator, self._initial_model, checkpoint.arrays, pool, self._store())
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

    @property
    def identity(self) -> dict[str, str]:
        """A digest of each thing that decides the result."""
        return {**self._identity, "end": repr((self.stop, self._target))}

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
                *([] if setup.poison is None else [setup.poison]),
            )
            for setup in federation.learners
        ]
        parts: dict[str, Any] = {
            "policy": (self.policy.identity, self._refusals_allowed),
            "network or seed": (federation.seed, self._initial_model.sha256()),
            "solver": self._workplace.learners[0].solver,
            "augmentation": federation.augment,
            "way of training (batched)": self._pool_settings.batched > 1,
            "division of the data or other learners": learners,
            "way of evaluating": (
                self._evaluate_every,
                *(None if held is None else len(held) for held in (federation.test, federation.validation)),
                {name: hashlib.sha256(own.data).hexdigest() for name, own in federation.sites.items()},
            ),
            "faults of the controller": federation.faults,
        }
        if any(setup.privacy is not None for setup in federation.learners):
            parts["privacy"] = [setup.privacy for setup in federation.learners]
        # The address of an object in memory is not part of what it is.
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
                *limits(learner),
            )
            for learner in self._federation.learners
        ]

    def _simulator(self, initial_model: Model, pool: Any, store: ModelStore) -> Simulator:
        seed = self._federation.seed
        controller = Controller(
            self.policy,
            initial_model,
            stop=self.stop,
            learners_expected=present_at_start(self._machines, seed),
            refusals_allowed=self._refusals_allowed,
            store=store,
            models_checked=True,  # by `Learner.train`, which hands in no other
            exchange_bytes=self._setting.exchange_bytes,  # also of a replay, which has no weights
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
            personal=bool(self._workplace.test_of_each),
            best_version=lambda: None if self._fold.best is None else self._fold.best.version,
            faults=self._federation.faults,
        )

    def _record(self, now: float, item: Event | Action) -> None:
        self._fold.record(now, item)
        self._lines += 1
        self._events.append((now, without_weights(item)))
        if self._file is not None:
            self._file.write(to_line(now, item) + "\n")

    def _go(self, simulator: Simulator) -> Run:
        def after_each() -> None:
            if self.watch is not None:
                self.watch(self._fold)
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
            best = None if simulator.best_model is None else simulator.best_model.network
            run = Run(self._setting, self._events, model, self._wall(), best=best, folded=self._fold)
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
        Checkpoint(weights_of(simulator), self._lines, self._wall()).save(self._out, self._identity)
        self._last_checkpoint = time.perf_counter()
