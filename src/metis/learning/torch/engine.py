"""Training with PyTorch, on parameters that are views into one flat tensor.

Loading a community model is one copy, clearing the gradients one memset, a solver step a few passes over
one vector.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from metis.core.layers import Memory
from metis.core.model import Layout, Model
from metis.core.solvers import Solver
from metis.errors import ConfigError, DataError
from metis.learning.engine import Batch, Examples, Trained, batches_of
from metis.learning.private import PrivateStep
from metis.learning.sums import Sums
from metis.learning.torch.batches import examples_in, split
from metis.learning.torch.flat import FlatNetwork, to_numpy
from metis.learning.torch.making import WithValues, make_network
from metis.learning.torch.metrics import add_batch, measures_of, shares_of, sums_of, values_of
from metis.learning.torch.objective import LOSSES, Loss, Objective, Task, TrainingStep
from metis.learning.torch.optimizers import FlatSteps, OptimizerSteps, Steps, TorchOptimizer, check_clip, clip
from metis.learning.torch.parallel import Part, Ranks
from metis.learning.torch.personal import Beside, PersonalModel, check_personal
from metis.learning.torch.precision import Precision, PrecisionName
from metis.learning.torch.private import PrivateTraining
from metis.learning.torch.sharing import Sharing
from metis.system import keep_freed_memory

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


# Layers that gain from being computed for many models at once on a processor; convolutions lose.
_SMALL = (
    nn.Linear, nn.LayerNorm, nn.Flatten, nn.Identity, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh,
    nn.Sigmoid, nn.Softplus,
)  # fmt: skip


_KEPT, _LARGEST_PIECE = 256 << 20, 32 << 20  # bytes; glibc takes no larger piece
_METRICS: dict[Task, tuple[str, ...]] = {"classification": ("accuracy",), "regression": ("mae",)}


class TorchEngine(FlatNetwork, PrivateTraining):
    """Trains any `torch.nn.Module`; `network` makes one, or is one whose weights then are the initial ones.

    With `buffers="local"` BatchNorm's running statistics stay in the silo (R10); a model evaluated without a
    learner's memory then normalizes with the statistics of the batches that it is evaluated on.
    `precision` is that of the forward pass in training; weights and evaluations are in float32.
    `personal` is how a model of its own is trained for each site beside the federated one: `Ditto` or `APFL`.
    `parameters` says by patterns or a function of the name which parameters and buffers are `federated`, which are
    `local`, trained but never sent, and which are `frozen`, neither trained nor sent.

    `loss` takes outputs and targets, or outputs and the batch if its second parameter is called `batch`; `step` takes
    the network and a batch and returns the loss, or loss, outputs and targets.
    """

    def __init__(
        self,
        network: Callable[[], nn.Module] | nn.Module,
        task: Task = "classification",
        *,
        loss: Loss | None = None,
        step: TrainingStep | None = None,
        metrics: Mapping[str, Any] | Iterable[str] | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int | None = 1,
        buffers: Literal["average", "local"] = "average",
        channels_last: bool = True,
        evaluation_batch: int = 500,
        clip_norm: float | None = None,
        accumulate: int = 1,
        parameters: Sharing | None = None,
        precision: PrecisionName = "float32",
        personal: PersonalModel | None = None,
    ) -> None:
        if task not in LOSSES:
            raise ConfigError(f"task is '{task}'; allowed: {', '.join(LOSSES)}")
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype is '{dtype}'; allowed: {', '.join(_DTYPES)}")
        if buffers not in ("average", "local"):
            raise ConfigError(f"buffers is '{buffers}'; allowed: average, local")
        if threads is not None and threads < 1:
            raise ConfigError(f"threads is {threads}; it must be at least 1, or None to leave torch's setting")
        if evaluation_batch < 1:
            raise ConfigError(f"evaluation_batch is {evaluation_batch}; it must be at least 1")
        check_clip(clip_norm, accumulate)
        self._with, self._beside = check_personal(personal), personal is not None
        self._arguments: dict[str, Any] = {
            "network": network, "task": task, "loss": loss, "step": step, "metrics": metrics, "device": device,
            "dtype": dtype, "threads": threads, "buffers": buffers, "channels_last": channels_last,
            "evaluation_batch": evaluation_batch, "clip_norm": clip_norm, "accumulate": accumulate,
            "parameters": parameters, "precision": precision, "personal": personal,
        }  # fmt: skip
        self._network = network
        self._measures = measures_of(_METRICS[task] if metrics is None else metrics, task == "regression")
        self.shares = shares_of(metrics, self._measures)
        self._dtype = _DTYPES[dtype]
        self._threads = threads
        self._local, self._sharing = buffers == "local", parameters
        self._evaluation_batch = evaluation_batch
        self._clip_norm, self._accumulate = clip_norm, accumulate
        self.ranks: Ranks | None = None  # the processes that train with this one, as one
        try:
            self._device = torch.device(device)
            torch.empty(1, device=self._device)
        except (RuntimeError, AssertionError) as problem:
            # torch appends pages of advice to its first line.
            reason = str(problem).splitlines()[0]
            raise ConfigError(f"device '{device}' cannot be used: {reason}") from problem
        self._rng_devices = [] if self._device.type == "cpu" else [self._device]
        _keep_memory(self._device)
        self._precision = Precision(precision, self._device, self._dtype)
        self._objective = Objective(task, loss, step, self._device, self._dtype, channels_last)
        self._lay_flat(self._build(seed=0))

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling the tensors would tear the views from the flat tensor; a worker process builds its own.
        return functools.partial(TorchEngine, **self._arguments), ()

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def trainable(self) -> int:
        """How many numbers of a model a solver changes; they lie first."""
        return self._weights.numel() - self._personal.numel()

    @property
    def device(self) -> str:
        """Where it trains, as in cuda:0."""
        return str(self._device)

    def on(self, device: str) -> TorchEngine:
        """The same engine on another device."""
        return TorchEngine(**self._arguments | {"device": device})

    def starting_with(self, tensors: Mapping[str, NDArray[Any]]) -> TorchEngine:
        """The same engine, whose network is made with these values."""
        return TorchEngine(**self._arguments | {"network": WithValues(self._network, tensors)})

    @property
    def precision(self) -> str:
        """As it trains; `auto` is resolved."""
        return self._precision.name

    @property
    def module(self) -> nn.Module:
        """The network with whatever weights were loaded last."""
        return self._module

    def load(self, model: Model, memory: Memory | None = None) -> nn.Module:
        """The network with these weights, until the engine is used again."""
        self._use_threads()
        self._load(model, memory or {})
        return self._module.eval()

    def initial_model(self, seed: int) -> Model:
        module = self._build(seed)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        found = {spec.name: tuple(tensors[spec.name].shape) for spec in self._layout.tensors if spec.name in tensors}
        if found != {spec.name: spec.shape for spec in self._layout.tensors}:
            raise ConfigError("the network must have the same tensors each time that it is built")
        return Model.from_tensors(
            {spec.name: to_numpy(tensors[spec.name]) for spec in self._layout.tensors}, self._layout
        )

    def train(
        self,
        community_model: Model,
        batches: Iterable[Batch | Part | PrivateStep],
        solver: Solver,
        memory: Memory | None = None,
        seed: int = 0,
    ) -> Trained:
        memory = memory or {}
        self._use_threads()
        self._load(community_model, memory)
        module, gradient = self._module.train(), self._gradient
        for layer in self._frozen_norms:
            layer.eval()
        solver_steps = self._steps_of(solver, self._community(community_model), memory)
        self._precision.start()
        steps, examples, total_loss, pending = 0, 0, 0.0, 0
        # Dropout and the like draw from torch's global generator and from no other: seed it for this task and
        # give the caller's state back afterwards.
        with (
            torch.random.fork_rng(devices=self._rng_devices, device_type=self._fork_type),
            self._together() as (ranks, part),
        ):
            self._seed(seed if ranks is None else seed + ranks.rank)
            for batch in batches:
                if isinstance(batch, PrivateStep):
                    steps += self._private_step(batch, solver_steps)
                    continue
                given = self._objective.move(batch.batch if isinstance(batch, Part) else batch)
                whole = examples_in(given, split(given)[1])
                if isinstance(batch, Part):
                    whole, part[0] = batch.whole, batch.weight
                with _without_variance(self._flat_batch_norms, whole), self._precision.lowered():
                    loss, _, _ = self._objective.measure(module, given)
                if gradient.numel():
                    if not pending:
                        gradient.zero_()
                    self._precision.backward(loss if ranks is None else loss * part[0])
                    pending += 1
                    if pending == self._accumulate:
                        self._step(solver_steps, pending)
                        pending = 0
                # Waits for the device, so that a clock around the batches measures the work and not its submission.
                batch_loss = loss.item()
                if ranks is not None:
                    batch_loss = ranks.mean(batch_loss, part[0])
                steps += 1
                examples += whole
                total_loss += batch_loss * whole
                if not math.isfinite(batch_loss):
                    break  # all later steps would be lost as well
            if pending:
                self._step(solver_steps, pending)
        kept = solver_steps.kept()
        return Trained(self._store(community_model, kept), steps, total_loss / (examples or math.nan), kept)

    def _steps_of(self, solver: Solver, community: Tensor, memory: Memory) -> Steps:
        if isinstance(solver, TorchOptimizer):
            parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
            return OptimizerSteps(solver, parameters, self._weights, self._gradient, community, memory)
        return FlatSteps(solver, self._weights, self._gradient, community, memory)

    def _step(self, steps: Steps, batches: int) -> None:
        """One step of the solver by the mean gradient of this many batches."""
        if batches > 1:
            self._gradient.div_(batches)
        if self.ranks is not None:
            self.ranks.add_up(self._gradient)
        if not self._precision.restore(self._gradient):
            return
        if self._clip_norm is not None:
            clip(self._gradient, self._clip_norm)
        steps.step()

    def check_solver(self, solver: Solver) -> None:
        """Refuse a solver whose options do not fit the network."""
        if isinstance(solver, TorchOptimizer):
            solver.divided(name for name, p in self._module.named_parameters() if p.requires_grad)
        if self.personal and any(layer.key == "control_variates" for layer in solver.layers):
            raise ConfigError("scaffold corrects every parameter that is trained, so none of them can be local")

    @property
    def plain_steps(self) -> bool:
        """Whether each batch's gradient reaches the solver as it is."""
        return self._clip_norm is None and self._accumulate == 1

    @functools.cached_property
    def trains_batched(self) -> bool:
        """Whether several models of this network can be trained as one computation that is worth it."""
        layers = [layer for layer in self._module.modules() if not any(True for _ in layer.children())]
        plain = (
            self._flat.numel() == self.trainable > 0
            and self.plain_steps
            and self._precision.plain
            and self._objective.usual
        )
        return plain and all(isinstance(layer, _SMALL) for layer in layers)

    def train_batched(self, community_model: Model, batches: Iterable[Batch], solver: Solver) -> list[Trained]:
        """Several learners that start from one model; batches have an axis of learners before that of examples."""
        self._use_threads()
        self._load(community_model, {})
        self._module.train()
        community = self._community(community_model)
        weights, memory = torch.empty(0), None
        losses: list[list[float]] = []
        examples: list[int] = []
        for batch in batches:
            inputs, targets = self._objective.move(batch)
            if not losses:
                weights = self._weights.detach().repeat(len(targets), 1)
                memory = solver.start(weights)
            gradients, loss = self._gradients(weights, inputs, targets)
            solver.step(weights, gradients, memory, community)
            losses.append(loss.tolist())
            examples.append(targets.shape[1])
        vectors = to_numpy(weights)
        return [
            Trained(
                community_model.with_vector(np.array(vector, dtype=np.float32)),
                next((step for step, loss in enumerate(own, start=1) if not math.isfinite(loss)), len(own)),
                sum(loss * count for loss, count in zip(own, examples, strict=True)) / sum(examples),
            )
            for vector, own in zip(vectors, zip(*losses, strict=True), strict=True)
        ]

    @functools.cached_property
    def _gradients(self) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        return self._objective.gradients_of_many(self._module)

    @contextlib.contextmanager
    def _together(self) -> Iterator[tuple[Ranks | None, list[float]]]:
        """The processes that train with this one, if any, and a cell for the weight of the current part."""
        part = [1.0]
        with contextlib.ExitStack() as stack:
            if self.ranks is not None:
                stack.enter_context(self.ranks.normalising(self._batch_norms, part))
            yield self.ranks, part

    @property
    def metrics(self) -> tuple[str, ...]:
        """What an evaluation measures."""
        return ("loss", *self._measures)

    def evaluate(self, model: Model, examples: Examples, memory: Memory | None = None) -> dict[str, float]:
        return self.evaluate_silos(model, examples, [(np.arange(len(examples)), memory)])

    def evaluate_with_sums(
        self, model: Model, examples: Examples, memory: Memory | None = None
    ) -> tuple[dict[str, float], dict[str, Sums]]:
        """As `evaluate`, with the sums behind those values that have them."""
        sums: dict[str, Sums] = {}
        return self.evaluate_silos(model, examples, [(np.arange(len(examples)), memory)], sums), sums

    def evaluate_silos(
        self,
        model: Model,
        examples: Examples,
        silos: Sequence[tuple[NDArray[np.int64], Memory | None]],
        sums: dict[str, Sums] | None = None,
    ) -> dict[str, float]:
        """Of all predictions together, each silo's with what it keeps for itself; fills `sums` with those behind."""
        count = sum(len(indices) for indices, _ in silos)
        if count == 0:
            raise DataError("there are no examples to evaluate on")
        self._use_threads()
        measures = self._measures.values()
        for measure in measures:
            measure.reset()
        with torch.inference_mode():
            total = sum(self._evaluate_silo(model, examples, indices, memory) for indices, memory in silos)
            values = values_of(self._measures)
            if sums is not None:
                sums |= {"loss": Sums("mean", (total, float(count))), **sums_of(self._measures)}
        for measure in measures:
            measure.reset()  # a metric of the whole set holds all outputs
        return {"loss": total / count, **values}

    def _evaluate_silo(
        self, model: Model, examples: Examples, indices: NDArray[np.int64], memory: Memory | None
    ) -> float:
        """The sum of the losses; outputs and targets go to the metrics."""
        self._load(model, memory or {})
        module = self._module.eval()
        if self._local and memory is None and len(indices) > 1:
            for layer in self._batch_norms:
                layer.train()
        total = 0.0
        # Parts of equal size: a last batch of one example would have no variance for BatchNorm to measure.
        parts = np.array_split(indices, math.ceil(len(indices) / self._evaluation_batch)) if len(indices) else []
        for part, batch in zip(parts, batches_of(examples, parts), strict=True):
            loss, outputs, targets = self._objective.measure(module, self._objective.move(batch))
            total += float(loss) * len(part)
            if self._measures and targets is None:
                raise ConfigError(self._objective.without_targets)
            add_batch(self._measures, outputs, targets, len(part))
        return total

    def _build(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=self._rng_devices, device_type=self._fork_type):
            torch.manual_seed(seed)
            module = make_network(self._network)
        module = module.to(device=self._device, dtype=self._dtype)
        return module if self._with is None else self._with.beside(module)

    def _load(self, model: Model, memory: Memory) -> None:
        super()._load(model, memory)
        if isinstance(self._module, Beside):
            self._module.begin(first="local" not in memory)

    def _seed(self, seed: int) -> None:
        """Seed torch's global generator; for the CPU only it, because `torch.manual_seed` takes long over GPUs."""
        if self._device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    @property
    def _fork_type(self) -> str:
        return "cuda" if self._device.type == "cpu" else self._device.type

    def _use_threads(self) -> None:
        if self._threads is not None and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)


def _keep_memory(device: torch.device) -> None:
    """A step frees all that it has allocated; with new pages each time the next would take up to a quarter longer."""
    if device.type == "cpu":
        keep_freed_memory(_KEPT, pieces=_LARGEST_PIECE)


@contextlib.contextmanager
def _without_variance(batch_norms: Iterable[nn.Module], examples: int) -> Iterator[None]:
    """One example alone (the short last batch of an epoch) is normalised by what was seen before."""
    alone = batch_norms if examples == 1 else []
    for layer in alone:
        layer.eval()
    try:
        yield
    finally:
        for layer in alone:
            layer.train()
