"""Any optimizer of torch as a local solver, with options by parameter, a schedule over local steps, and its state."""

from __future__ import annotations

import copy
import fnmatch
import functools
import inspect
import math
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from metis.core.layers import Layer, Memory
from metis.core.solvers import KeepState, LearningRate, Solver, SolverFacts, add_scaled
from metis.errors import ArgumentError, ConfigError
from metis.learning.torch.flat import to_numpy
from metis.learning.torch.sharing import own_name
from metis.registry import Setting, did_you_mean

Scheduler: TypeAlias = Callable[[Optimizer], LRScheduler]

_STATE, _NUMBER, _STEPS = "optimizer/state/", "optimizer/number/", "optimizer/steps"  # in a learner's memory


@dataclass(frozen=True, init=False, repr=False)
class TorchOptimizer(Solver):
    """`TorchOptimizer(torch.optim.AdamW, lr=0.001)`: any optimizer class of torch, with its own options.

    - `optimizer`: the class.
    - `groups`: other options for parameters whose names match, as `[{"parameters": ["*.bias"], "weight_decay": 0}]`;
      the first match counts.
    - `scheduler`: takes the optimizer and returns a schedule of torch over the local steps of a task.
    - `keep_state`: whether the optimizer's state outlives a task, in the learner's memory; a schedule then goes on too.
    - `options`: those of the optimizer, such as `lr`.
    """

    optimizer: type[Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Mapping[str, Any]] = ()
    scheduler: Scheduler | None = None
    keep_state: bool = False
    proximal_term: float = 0.0
    rate: float = 1.0

    title: ClassVar[str] = ""

    def __init__(
        self,
        optimizer: Any,
        *,
        groups: Sequence[Mapping[str, Any]] = (),
        scheduler: Scheduler | Mapping[str, Any] | None = None,
        keep_state: bool = False,
        **options: Any,
    ) -> None:
        if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
            raise ArgumentError(f"optimizer is {optimizer!r}; give a class such as torch.optim.AdamW", "optimizer")
        name = optimizer.__name__
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ArgumentError(f"{name} measures the loss several times in a step, which a solver cannot", "optimizer")
        if scheduler is not None and not callable(scheduler):
            scheduler = _named_scheduler(scheduler)
        known = [option for option in inspect.signature(optimizer).parameters if option not in ("self", "params")]
        for given in (options, *(_group_options(name, group) for group in groups)):
            for option in given:
                if option not in known:
                    raise ArgumentError(f"{option} is not an option of {name}; {did_you_mean(option, known)}", option)
        for attribute, value in (
            ("optimizer", optimizer),
            ("options", options),
            ("groups", tuple(groups)),
            ("scheduler", scheduler),
            ("keep_state", keep_state),
            ("proximal_term", 0.0),
            ("rate", 1.0),
        ):
            object.__setattr__(self, attribute, value)
        self._try(name)

    def _try(self, name: str) -> None:
        """Let torch check the values."""
        matrices = {str(number): torch.nn.Parameter(torch.zeros(2, 2)) for number in range(len(self.groups) + 1)}
        try:
            groups = [
                {"params": [matrices[str(number)]], **_group_options(name, group)}
                for number, group in enumerate(self.groups)
            ]
            optimizer = self.optimizer([{"params": [matrices[str(len(groups))]]}, *groups], **self.options)
            if self.scheduler is not None:
                scheduler: Any = self.scheduler(optimizer)
                if not isinstance(scheduler, LRScheduler) or "metrics" in inspect.signature(scheduler.step).parameters:
                    raise ArgumentError(
                        f"scheduler made a {type(scheduler).__name__}; it must make a schedule of torch over steps",
                        "scheduler",
                    )
        except ArgumentError:
            raise
        except Exception as problem:
            raise ArgumentError(f"{name} refuses its options: {str(problem).splitlines()[0]}") from problem

    def __repr__(self) -> str:
        parts = {**self.options, "groups": self.groups, "scheduler": self.scheduler, "keep_state": self.keep_state}
        shown = "".join(f", {key}={value!r}" for key, value in parts.items() if value not in ((), None, False))
        factors = f" x {self.rate:g}, pull {self.proximal_term:g}" if (self.rate, self.proximal_term) != (1, 0) else ""
        return f"TorchOptimizer({self.optimizer.__name__}{shown}){factors}"

    @property
    def keeps_memory(self) -> bool:
        return self.keep_state

    def step(self, weights: Any, gradient: Any, memory: Any, community: Any) -> None:
        raise ConfigError(f"{self.optimizer.__name__} is an optimizer of torch: it needs engine = 'torch'")

    def with_rate(self, factor: float) -> Solver:
        if "lr" not in inspect.signature(self.optimizer).parameters:
            raise ConfigError(f"{self.optimizer.__name__} has no lr, so no schedule can change it")
        return self._with(rate=self.rate * factor)

    def with_pull(self, proximal_term: float) -> Solver:
        return self._with(proximal_term=self.proximal_term + proximal_term)

    def _with(self, **changes: float) -> TorchOptimizer:
        changed = copy.copy(self)
        for name, value in changes.items():
            object.__setattr__(changed, name, value)
        return changed

    @property
    def facts(self) -> SolverFacts:
        options = {**_defaults(self.optimizer), **self.options}
        plain = not (options.get("nesterov") or options.get("dampening") or options.get("maximize"))
        if self.optimizer is not torch.optim.SGD or not plain or self.groups or self.scheduler is not None:
            return SolverFacts(adaptive=self.optimizer.__name__)
        momentum = 0.0 if self.keep_state else float(options["momentum"])
        return SolverFacts(momentum, float(options["lr"]) * self.rate * self.proximal_term)

    def divided(self, names: Iterable[str]) -> list[tuple[list[str], dict[str, Any]]]:
        """Which parameters have which options; those without options of their own come first."""
        names = list(names)
        rest, divided = dict.fromkeys(names), []
        for group in self.groups:
            patterns = group["parameters"]
            for pattern in [patterns] if isinstance(patterns, str) else patterns:
                if not any(_matches(name, pattern) for name in names):
                    raise ConfigError(no_match(pattern, "groups", names))
            patterns = [patterns] if isinstance(patterns, str) else patterns
            own = [name for name in rest if any(_matches(name, pattern) for pattern in patterns)]
            for name in own:
                del rest[name]
            divided.append((own, _group_options(self.optimizer.__name__, group)))
        return [(list(rest), {}), *divided]


def _matches(name: str, pattern: str) -> bool:
    """Options for a parameter are also those of the personal one beside it."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(own_name(name), pattern)


def no_match(pattern: str, where: str, names: Sequence[str]) -> str:
    """The sentence for a pattern that matches no parameter."""
    shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    return f"{where}: the pattern '{pattern}' matches no parameter of the network, which has {shown}"


def _group_options(name: str, group: Any) -> dict[str, Any]:
    patterns = group.get("parameters") if isinstance(group, Mapping) else None
    texts = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, str) for text in texts):
        raise ArgumentError(
            "groups must be a list of tables, each with the key parameters: patterns such as '*.bias'", "groups"
        )
    renamed = {"learning_rate": "lr"}
    return {renamed.get(key, key): _as_tuple(value) for key, value in group.items() if key != "parameters"}


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _named_scheduler(table: Any) -> Scheduler:
    known = {
        name: kind
        for name, kind in vars(torch.optim.lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, LRScheduler) and kind is not LRScheduler
    }
    name = table.get("name") if isinstance(table, Mapping) else None
    if name not in known:
        hint = f"there is no '{name}'; {did_you_mean(str(name), known)}" if name else "it needs the key name"
        raise ArgumentError(f"scheduler must be a table with a schedule of torch by name; {hint}", "scheduler")
    options = {key: value for key, value in table.items() if key != "name"}
    allowed = [option for option in inspect.signature(known[name]).parameters if option != "optimizer"]
    for option in options:
        if option not in allowed:
            raise ArgumentError(
                f"scheduler: {option} is not an option of {name}; {did_you_mean(option, allowed)}", "scheduler"
            )
    return functools.partial(cast("Callable[..., LRScheduler]", known[name]), **options)


def _defaults(optimizer: type[Optimizer]) -> dict[str, Any]:
    parameters = inspect.signature(optimizer).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


# --- one task -----------------------------------------------------------------------------------


class Steps(typing.Protocol):
    """A solver at work on one task."""

    def step(self) -> None:
        """Change the weights by the gradient."""

    def kept(self) -> Memory:
        """What the learner remembers of the solver."""


class FlatSteps:
    """A rule of the core on the flat tensors."""

    def __init__(
        self, solver: Solver, weights: Tensor, gradient: Tensor, community: Tensor, remembered: Memory
    ) -> None:
        self._solver, self._weights, self._gradient, self._community = solver, weights, gradient, community
        self._memory = solver.start(weights)
        if solver.keeps_memory and self._memory is not None and "solver" in remembered:
            self._memory.copy_(torch.tensor(remembered["solver"]))

    def step(self) -> None:
        self._solver.step(self._weights, self._gradient, self._memory, self._community)

    def kept(self) -> Memory:
        kept = self._solver.keeps_memory and self._memory is not None
        return {"solver": to_numpy(cast("Tensor", self._memory)).copy()} if kept else {}


class OptimizerSteps:
    """An optimizer of torch on the parameters, whose values and gradients are views into the flat tensors."""

    def __init__(
        self,
        solver: TorchOptimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        weights: Tensor,
        gradient: Tensor,
        community: Tensor,
        remembered: Memory,
    ) -> None:
        self._solver, self._weights, self._gradient, self._community = solver, weights, gradient, community
        groups = [(names, options) for names, options in solver.divided(parameters) if names]
        self._names = [name for names, _ in groups for name in names]
        self._optimizer = solver.optimizer(
            [{"params": [parameters[name] for name in names], **options} for names, options in groups],
            **solver.options,
        )
        if solver.rate != 1:
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] * solver.rate
        self._steps = int(remembered[_STEPS]) if solver.keep_state and _STEPS in remembered else 0
        if self._steps:
            self._restore(remembered)
        self._scheduler = None if solver.scheduler is None else solver.scheduler(self._optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the schedule moves before the optimizer does
            for _ in range(self._steps if self._scheduler is not None else 0):
                cast("LRScheduler", self._scheduler).step()

    def step(self) -> None:
        pull = self._solver.proximal_term
        if pull:
            add_scaled(self._gradient, self._weights, pull)
            add_scaled(self._gradient, self._community, -pull)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._steps += 1

    def kept(self) -> Memory:
        if not self._solver.keep_state:
            return {}
        kept: Memory = {_STEPS: np.array(self._steps)}
        for index, state in self._optimizer.state_dict()["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    kept[f"{_STATE}{self._names[index]}/{key}"] = to_numpy(value).copy()
                elif isinstance(value, (int, float)):
                    kept[f"{_NUMBER}{self._names[index]}/{key}"] = np.array(value)
                elif value is not None:
                    raise ConfigError(
                        f"{self._solver.optimizer.__name__} keeps a {type(value).__name__} in its state, so "
                        "keep_state is not possible"
                    )
        return kept

    def _restore(self, remembered: Memory) -> None:
        index = {name: number for number, name in enumerate(self._names)}
        states: dict[int, dict[str, Any]] = {}
        for key, array in remembered.items():
            for prefix, value in ((_STATE, torch.tensor), (_NUMBER, np.ndarray.item)):
                name, _, entry = key.removeprefix(prefix).rpartition("/")
                if key.startswith(prefix) and name in index:
                    states.setdefault(index[name], {})[entry] = cast("Any", value)(array)
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": states, "param_groups": groups})


# --- by name ------------------------------------------------------------------------------------


@functools.cache
def solvers_by_name() -> Mapping[str, type[Solver]]:
    """The optimizers of torch as files name them; `learning_rate` stands for lr."""
    return {
        name: cast("type[Solver]", _definition(kind))
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }


def _definition(optimizer: type[Optimizer]) -> Callable[..., TorchOptimizer]:
    """A function whose parameters are the settings of this optimizer in a file."""

    def build(
        *,
        learning_rate: float | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        scheduler: Mapping[str, Any] | None = None,
        keep_state: bool = False,
        **options: Any,
    ) -> TorchOptimizer:
        given = {key: _as_tuple(value) for key, value in options.items()}
        if learning_rate is not None:
            given["lr"] = learning_rate
        return TorchOptimizer(optimizer, groups=groups, scheduler=scheduler, keep_state=keep_state, **given)

    annotations: dict[str, Any] = {}
    parameters = []
    for name, default in _defaults(optimizer).items():
        key = "learning_rate" if name == "lr" else name
        annotations[key] = LearningRate if name == "lr" else _kind(default)
        parameters.append(inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default))
    for name, kind, default in (
        ("groups", typing.Annotated[list[dict[str, Any]], Setting("other options for some parameters")], ()),
        ("scheduler", typing.Annotated[dict[str, Any] | None, Setting("of torch, over local steps")], None),
        ("keep_state", KeepState, False),
    ):
        annotations[name] = kind
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
    definition: Any = build
    definition.__name__ = definition.__qualname__ = definition.title = optimizer.__name__
    definition.__doc__ = f"torch.optim.{optimizer.__name__}."
    definition.__annotations__, definition.__signature__ = annotations, inspect.Signature(parameters)
    layers: tuple[Layer, ...] = ()
    definition.inherits, definition.layers = frozenset(), layers
    return build


def _kind(default: Any) -> Any:
    """The type of an option in a file, from its default."""
    if isinstance(default, bool):
        return bool
    if isinstance(default, (int, float)):
        return float
    if isinstance(default, tuple):
        # Adafactor has a None among the defaults of a pair.
        return list[float] if all(isinstance(item, (int, float)) for item in default) else list[float | None]
    return Any


def clip(gradient: Tensor, largest: float) -> None:
    """Shorten the gradient to this norm if it is longer, as `clip_grad_norm_` does."""
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float32 if gradient.element_size() < 4 else None)
    gradient.mul_(torch.clamp(largest / (norm + 1e-6), max=1.0).to(gradient.dtype))


def check_clip(clip_norm: float | None, accumulate: Any) -> None:
    """Refuse impossible values."""
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise ArgumentError(f"clip_norm is {clip_norm}; it must be finite and greater than 0", "clip_norm")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ArgumentError(f"accumulate is {accumulate!r}; it must be a whole number, at least 1", "accumulate")
