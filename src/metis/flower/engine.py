"""The engine whose network is a Flower ClientApp: it trains by calling the client, and stays out of its way.

A learner's batches are turns here: what the client trains on is the client's. A turn is one step of the client's
optimizer where its loop can be bounded (`metis.learning.torch.foreign`), one call of the client where it cannot, and
one step by the client's own count where the client knows of budgets (`metis-steps`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from metis.core.layers import Memory
from metis.core.model import Layout, Model
from metis.core.solvers import Solver
from metis.errors import ClientFailed, ConfigError, MetisError, described
from metis.flower.project import FlowerProject, FlowerSource, load_project, require_flower
from metis.learning.clients import ClientExamples, Turn, check_left_to_client, layout_of, measured_by_clients
from metis.learning.engine import EngineJob, Examples, Trained

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict

    from metis.flower.opening import Opening

_STATE, _CALLS = "flower_state", "flower_calls"  # what a learner remembers of its client
Unit = Literal["step", "call", "own"]


@dataclass(frozen=True)
class ClientFacts:
    """What the first call of a client showed."""

    examples: int  # of its data, by its own word
    batch_size: int  # so that an epoch has as many turns as it should
    unit: Unit


class FlowerClient:
    """The nodes of a run: each learner is one, with its own partition and context."""

    def __init__(self, source: FlowerSource) -> None:
        self.source = source
        self._openings: dict[int, Opening] = {}
        self._facts: dict[str, ClientFacts] = {}
        self._measured: dict[str, tuple[dict[str, float], int]] = {}

    @cached_property
    def project(self) -> FlowerProject:
        return load_project(self.source)

    def opening(self, seed: int = 0) -> Opening:
        """How the run begins; the ServerApp draws with this seed."""
        require_flower()
        from metis.flower.opening import open_run
        from metis.learning.torch.foreign import seeded

        if seed not in self._openings:
            project = self.project
            with seeded(seed):
                self._openings[seed] = open_run(project, self.source)
        return self._openings[seed]

    def arrays(self, seed: int = 0) -> dict[str, NDArray[Any]]:
        """The initial model."""
        arrays = self.opening(seed).arrays
        if arrays is None:
            raise ConfigError(
                f"{self.source.title} has no ServerApp that says what model it starts with; name its pyproject.toml, "
                "or give the weights as a safetensors file: training.initial_model, at a site --start FILE"
            )
        return arrays

    def call(self, kind: str, learner: str, model: Model, state: RecordDict, config: dict[str, Any]) -> Message:
        """One message to this learner's client, and its reply."""
        from flwr.app import Message

        from metis.flower.opening import context_of
        from metis.flower.records import content_with

        number = 1 + (self.source.learners.index(learner) if learner in self.source.learners else 0)
        context = context_of(self.project, number + 1, self.source.node(learner), state)
        content = content_with(self.opening().contents[kind], model, config)
        message = Message(content, dst_node_id=number + 1, message_type=kind)
        try:
            reply = self.project.client_app(message, context)
        except MetisError:
            raise
        except (Exception, SystemExit) as problem:
            raise ClientFailed(f"the Flower client of '{learner}' failed: {described(problem)}") from problem
        if not hasattr(reply, "has_content") or not reply.has_content():
            said = getattr(getattr(reply, "error", None), "reason", "nothing")
            raise ClientFailed(f"the Flower client of '{learner}' did not answer: {said}")
        return reply

    def facts(self, learner: str, layout: Layout) -> ClientFacts:
        """From one step, or from one call where steps cannot be bounded; the model of it is thrown away."""
        if learner not in self._facts:
            self._facts[learner] = self._probe(learner, layout)
        return self._facts[learner]

    def _probe(self, learner: str, layout: Layout) -> ClientFacts:
        from flwr.app import RecordDict

        from metis.flower.records import ROUND, SECONDS, STEPS, examples_of, model_of, numbers_of
        from metis.learning.torch.foreign import bounded, seeded

        model = Model.from_tensors(self.arrays(), layout)
        config = {ROUND: 1, STEPS: 1, SECONDS: math.inf}
        with seeded(0), bounded(iter(())) as bound:
            reply = self.call("train", learner, model, RecordDict(), config)
        model_of(reply.content, layout)
        numbers = numbers_of(reply)
        examples = examples_of(numbers)
        if examples == 0:
            raise ClientFailed(
                f"the Flower client of '{learner}' does not say how many examples it has: num-examples in its metrics"
            )
        if STEPS in numbers:
            return ClientFacts(examples, max(1, bound.batch_size), "own")
        if self.source.unit == "step" and not (bound.holds and bound.steps == 1):
            raise ConfigError(
                f"unit is 'step', but the Flower client of '{learner}' made {bound.steps} steps of a torch optimizer "
                "when it was given one; leave it out, or use 'call'"
            )
        if self.source.unit != "call" and bound.holds and bound.steps == 1:
            size, steps = bound.batch_size, bound.epoch_steps
            if steps and (not size or math.ceil(examples / size) != steps):
                size = math.ceil(examples / steps)  # it counts its examples in its own way; an epoch is an epoch
            return ClientFacts(examples, max(1, size), "step")
        return ClientFacts(examples, examples, "call")

    def measured(self, learner: str) -> tuple[dict[str, float], int]:
        """What this client measures of the initial model, and on how many examples; nothing if it has no evaluate."""
        if learner not in self._measured:
            model = Model.from_tensors(self.arrays(), _layout(self))
            self._measured[learner] = self.evaluate(learner, model, None) or ({}, 0)
        return self._measured[learner]

    def evaluate(self, learner: str, model: Model, memory: Memory | None) -> tuple[dict[str, float], int] | None:
        """Metrics and the number of examples behind them; None if the client has no evaluate."""
        from metis.flower.records import ROUND, examples_of, metrics_of, numbers_of
        from metis.learning.torch.foreign import seeded

        registered = getattr(self.project.client_app, "_registered_funcs", {})
        if registered and not any(name.startswith("evaluate.") for name in registered):
            return None
        state, calls = _remembered(memory)
        with seeded(0):
            reply = self.call("evaluate", learner, model, state, {ROUND: max(1, calls)})
        numbers = numbers_of(reply)
        metrics = metrics_of(numbers)
        return (metrics, max(1, examples_of(numbers))) if metrics else None


def _remembered(memory: Memory | None) -> tuple[RecordDict, int]:
    from flwr.app import RecordDict

    from metis.flower.records import state_of

    if not memory or _STATE not in memory:
        return RecordDict(), 0
    return state_of(memory[_STATE]), int(memory[_CALLS][0])


@lru_cache(maxsize=8)
def client_of(spec: str) -> FlowerClient:
    """The client of this source, once in a process."""
    return FlowerClient(FlowerSource.of(spec))


def examples_of_client(spec: str, learner: str, evaluation: bool = False) -> ClientExamples:
    """What this learner's client trains on, or what it measures on."""
    client = client_of(spec)
    if evaluation:
        count = client.measured(learner)[1]
        return ClientExamples(learner, count, count)
    facts = client.facts(learner, _layout(client))
    return ClientExamples(learner, facts.examples, facts.batch_size)


@lru_cache(maxsize=8)
def _layout(client: FlowerClient) -> Layout:
    return layout_of(client.arrays(), client.source.title)


class FlowerEngine:
    """Trains and measures by calling a ClientApp; what a client keeps is in its learner's memory."""

    def __init__(self, job: EngineJob) -> None:
        assert job.network is not None, "a Flower app comes as a site"
        made = job.network()
        assert isinstance(made, FlowerClient)
        self._client = made
        check_left_to_client(job, "the Flower client")

    @cached_property
    def layout(self) -> Layout:
        return _layout(self._client)

    def initial_model(self, seed: int) -> Model:
        return Model.from_tensors(self._client.arrays(seed), self.layout)

    def train(
        self,
        community_model: Model,
        batches: Iterable[Any],
        solver: Solver,
        memory: Memory | None = None,
        seed: int = 0,
    ) -> Trained:
        from metis.flower.records import ROUND, SECONDS, STEPS, metrics_of, model_of, numbers_of, state_bytes
        from metis.learning.torch.foreign import seeded

        turns = iter(batches)
        learner = next(turns).learner
        unit = self._client.facts(learner, self.layout).unit
        budget = getattr(batches, "budget", None)
        state, rounds = _remembered(memory)
        config: dict[str, Any] = {ROUND: rounds + 1}
        if budget is not None:
            config |= {STEPS: budget.steps or 0, SECONDS: float(budget.seconds)}
        model, steps, losses = community_model, 0, []
        with seeded(seed), _counting(unit, turns) as count:
            while not count.ended:
                try:
                    reply = self._client.call("train", learner, model, state, config)
                finally:  # whatever the client made of it
                    if count.problem is not None:
                        raise count.problem
                numbers = numbers_of(reply)
                count.called(numbers.get(STEPS))
                if count.steps == steps:
                    raise ClientFailed(f"the Flower client of '{learner}' answered without having made a step")
                model = model_of(reply.content, self.layout)
                losses.append((metrics_of(numbers).get("loss", math.nan), count.steps - steps))
                steps = count.steps
                if budget is not None and budget.steps:
                    config[STEPS] = max(1, budget.steps - steps)
        known = [(loss, weight) for loss, weight in losses if math.isfinite(loss)]
        weight = sum(weight for _, weight in known)
        loss = sum(loss * weight for loss, weight in known) / weight if weight else 0.0
        remembered: Memory = {_STATE: state_bytes(state), _CALLS: np.array([rounds + 1], np.int64)}
        return Trained(model, steps, loss, remembered, evenly=unit == "own")

    def evaluate(self, model: Model, examples: Examples, memory: Memory | None = None) -> dict[str, float]:
        def measure(turn: Turn) -> tuple[dict[str, float], int]:
            found = self._client.evaluate(turn.learner, model, memory)
            assert found is not None, "it has examples to evaluate on"
            return found

        return measured_by_clients(examples, measure)


class _Count:
    """Turns by calls of the client, or by its own count."""

    def __init__(self, turns: Iterator[Any]) -> None:
        self._turns = turns
        self.steps, self.ended = 0, False
        self.problem: BaseException | None = None

    def called(self, own: float | None) -> None:
        """After a call: it was one turn, or as many as the client says."""
        made = 1 if own is None else max(1, int(own))
        self.steps += made
        for _ in range(made):
            if next(self._turns, None) is None:
                self.ended = True
                break
        self.ended = self.ended or own is not None  # it knew the budget, so it is done


@contextlib.contextmanager
def _counting(unit: Unit, turns: Iterator[Any]) -> Iterator[Any]:
    if unit != "step":
        yield _Count(turns)
        return
    from metis.learning.torch.foreign import bounded

    with bounded(turns) as bound:
        yield bound
