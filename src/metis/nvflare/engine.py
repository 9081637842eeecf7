"""The engine whose network is a script of NVFlare's Client API: it trains by running the script.

A learner's batches are turns here: what the script trains on is its own. A turn is one step of the script's optimizer
where its loop can be bounded (`metis.learning.torch.foreign`), and one `send` of the script where it cannot: then it
gets its own model back until the budget ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from metis.core.layers import Memory
from metis.core.model import Layout, Model
from metis.core.solvers import Solver
from metis.errors import ConfigError, DataError, described
from metis.learning.clients import ClientExamples, check_left_to_client, layout_of, measured_by_clients
from metis.learning.engine import EngineJob, Examples, Trained
from metis.nvflare.source import NVFlareSource, require_nvflare

_ROUNDS = "nvflare_rounds"  # what a learner remembers: how many models its script has received
_PER_ROUND = "NUM_STEPS_CURRENT_ROUND"  # in the meta of what a script sends

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class ScriptFacts:
    """What a first run of the script showed."""

    examples: int  # of its training data, as its loader has them; else steps of a round, by its own word
    batch_size: int
    unit: Literal["step", "call"]
    metrics: dict[str, float]  # that it measures of a model which it receives


class NVFlareClient:
    """A script, and the model that it starts from; each learner is a site of its own to it."""

    def __init__(self, source: NVFlareSource) -> None:
        require_nvflare()
        self.source = source
        self._facts: dict[str, ScriptFacts] = {}

    @cached_property
    def tensors(self) -> bool:
        """Whether the script gets torch's tensors, as it does where its network is a module; else numpy's arrays."""
        return self._made(0)[1]

    def arrays(self, seed: int) -> Arrays:
        """The initial model, drawn with this seed."""
        return self._made(seed)[0]

    def _made(self, seed: int) -> tuple[Arrays, bool]:
        from metis.learning.torch.foreign import seeded

        source = self.source
        if source.network is None:
            if source.start is None:
                raise ConfigError(
                    f"{source.title} does not say what model it starts with; name what makes it, as a recipe does: "
                    "network = 'model.py:Net' in [site], or give training.initial_model"
                )
            from safetensors.numpy import load_file

            return dict(load_file(source.start)), False
        with seeded(seed):
            made = _make(source.network, Path(source.script).parent)
        if hasattr(made, "state_dict"):
            from metis.learning.torch.flat import to_numpy

            return {name: to_numpy(tensor) for name, tensor in made.state_dict().items()}, True
        if isinstance(made, dict):
            tensors = any(hasattr(value, "detach") for value in made.values())
            return {str(name): np.array(value) for name, value in made.items()}, tensors
        raise ConfigError(
            f"network = '{source.network}' makes a {type(made).__name__}; it must make a torch module or a dictionary "
            "of arrays"
        )

    def run(self, task: str, learner: str, model: Model, number: int, budget: dict[str, Any], again: Any) -> None:
        """The script from its start to its end; `again` is called with what it sends, and says whether it goes on."""
        from metis.nvflare.script import MetisClientAPI, run_script

        if not Path(self.source.script).is_file():
            raise ConfigError(f"there is no file {self.source.script} with a script of NVFlare")
        api = MetisClientAPI(learner, task, self.tensors, number, budget, again)
        api.offer({name: np.asarray(array) for name, array in model.tensors().items()})
        run_script(Path(self.source.script), self.source.args, api, learner)

    def facts(self, learner: str, layout: Layout) -> ScriptFacts:
        """From a run that ends after one step, or with what it sends first; its model is thrown away."""
        if learner not in self._facts:
            self._facts[learner] = self._probe(learner, layout)
        return self._facts[learner]

    def _probe(self, learner: str, layout: Layout) -> ScriptFacts:
        from metis.learning.torch.foreign import bounded, seeded
        from metis.nvflare.script import SECONDS, STEPS, TRAIN, Sent

        sent: list[Sent] = []

        def first(what: Sent) -> bool:
            sent.append(what)
            return False

        model = Model.from_tensors(self.arrays(0), layout)
        with seeded(0), bounded(iter(())) as bound:
            self.run(TRAIN, learner, model, 0, {STEPS: 1, SECONDS: math.inf}, first)
        self._checked(learner, sent, layout)
        stepwise = bound.holds and bound.steps == 1
        if self.source.unit == "step" and not stepwise:
            raise ConfigError(
                f"unit is 'step', but {self.source.title} made {bound.steps} steps of a torch optimizer when it was "
                "given one; leave it out, or use 'call'"
            )
        metrics = metrics_of(sent[0].metrics)
        if stepwise and self.source.unit != "call":
            size = max(1, bound.batch_size)
            return ScriptFacts(max(1, bound.epoch_steps) * size, size, "step", metrics)
        steps = sent[0].meta.get(_PER_ROUND, 1)
        examples = max(1, int(steps)) if isinstance(steps, (int, float)) and math.isfinite(steps) else 1
        return ScriptFacts(examples, examples, "call", metrics)

    def _checked(self, learner: str, sent: list[Any], layout: Layout) -> Model:
        if not sent or sent[-1].arrays is None:
            raise DataError(f"{self.source.title} of '{learner}' came to its end without sending a model")
        try:
            return Model.from_tensors(sent[-1].arrays, layout)
        except ValueError as problem:
            raise DataError(
                f"{self.source.title} of '{learner}' sent another model than it was given: {problem}"
            ) from None

    def train(
        self, learner: str, model: Model, number: int, turns: Iterator[Any], budget: dict[str, Any], seed: int
    ) -> tuple[Model, int, float]:
        """The trained model, how many turns it took, and the loss by the script's own word."""
        from metis.learning.torch.foreign import Bound, bounded, seeded
        from metis.nvflare.script import TRAIN, Sent

        layout, unit = model.layout, self.facts(learner, model.layout).unit
        sent: list[Sent] = []
        calls = 0

        def called(what: Sent) -> bool:
            nonlocal calls
            sent.append(what)
            if unit == "step":
                return not bound.ended  # it has made fewer steps than it was given: one pass more
            calls += 1
            return next(turns, None) is not None

        with seeded(seed), contextlib.ExitStack() as stack:
            bound = Bound(turns) if unit == "call" else stack.enter_context(bounded(turns))
            self.run(TRAIN, learner, model, number, budget, called)
            if bound.problem is not None:
                raise bound.problem
        trained = self._checked(learner, sent, layout)
        steps = bound.steps if unit == "step" else calls
        if steps == 0:
            raise DataError(f"{self.source.title} of '{learner}' sent a model without having made a step")
        losses = [metrics_of(each.metrics).get("loss", math.nan) for each in sent]
        return trained, steps, next((loss for loss in reversed(losses) if math.isfinite(loss)), 0.0)

    def evaluate(self, learner: str, model: Model, number: int) -> dict[str, float]:
        """What the script measures of this model: its answer to the task of evaluation, or with a step of training."""
        from metis.learning.torch.foreign import bounded, seeded
        from metis.nvflare.script import EVALUATE, Sent

        sent: list[Sent] = []

        def first(what: Sent) -> bool:
            sent.append(what)
            return False

        with seeded(0), bounded(iter(())):
            self.run(EVALUATE, learner, model, number, {}, first)
        if not sent:
            raise DataError(f"{self.source.title} of '{learner}' came to its end without sending metrics")
        return metrics_of(sent[0].metrics)


def metrics_of(numbers: dict[str, float]) -> dict[str, float]:
    """The metrics that a script sends; `loss` and `accuracy` also under these names, whatever it calls them."""
    found = dict(numbers)
    for name, part in (("loss", "loss"), ("accuracy", "acc")):
        alias = next((key for key in numbers if part in key.lower()), None)
        if alias is not None:
            found.setdefault(name, numbers[alias])
    return found


def _make(network: str, folder: Path) -> Any:
    """FILE.py:NAME, or MODULE:NAME next to the script, called without arguments if it can be."""
    place, _, name = network.partition(":")
    file = folder / (place if place.endswith(".py") else f"{place.replace('.', '/')}.py")
    if not name or not file.is_file():
        raise ConfigError(f"network is '{network}', and there is no {file}; write it as in 'model.py:Net'")
    module_name = file.stem
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(f"metis_nvflare_{module_name}", file)
        assert spec is not None and spec.loader is not None, "it ends in .py"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found = getattr(module, name)
        return found() if (callable(found) and not hasattr(found, "state_dict")) or isinstance(found, type) else found
    except (Exception, SystemExit) as problem:
        raise ConfigError(f"network = '{network}' cannot be made: {described(problem)}") from problem
    finally:
        sys.path.remove(str(folder))


@lru_cache(maxsize=8)
def client_of(spec: str) -> NVFlareClient:
    """The client of this source, once in a process."""
    return NVFlareClient(NVFlareSource.of(spec))


@lru_cache(maxsize=8)
def _layout(client: NVFlareClient) -> Layout:
    return layout_of(client.arrays(0), client.source.title)


def examples_of_script(spec: str, learner: str) -> ClientExamples:
    """What this learner's script trains on."""
    client = client_of(spec)
    facts = client.facts(learner, _layout(client))
    return ClientExamples(learner, facts.examples, facts.batch_size)


def measured(spec: str, learner: str) -> tuple[str, ...]:
    """The names of what the script measures."""
    client = client_of(spec)
    return tuple(client.facts(learner, _layout(client)).metrics)


class NVFlareEngine:
    """Trains and measures by running a script, which keeps nothing from one task to the next."""

    def __init__(self, job: EngineJob) -> None:
        assert job.network is not None, "a script comes as a site"
        made = job.network()
        assert isinstance(made, NVFlareClient)
        self._client = made
        check_left_to_client(job, "the script")

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
        from metis.nvflare.script import SECONDS, STEPS

        turns = iter(batches)
        learner = next(turns).learner
        budget = getattr(batches, "budget", None)
        known = {} if budget is None else {STEPS: budget.steps or 0, SECONDS: float(budget.seconds)}
        number = _rounds(memory)
        model, steps, loss = self._client.train(learner, community_model, number, turns, known, seed)
        return Trained(model, steps, loss, {_ROUNDS: np.array([number + 1], np.int64)})

    def evaluate(self, model: Model, examples: Examples, memory: Memory | None = None) -> dict[str, float]:
        number = _rounds(memory)
        return measured_by_clients(
            examples, lambda turn: (self._client.evaluate(turn.learner, model, number), turn.examples)
        )


def _rounds(memory: Memory | None) -> int:
    return int(memory[_ROUNDS][0]) if memory and _ROUNDS in memory else 0
