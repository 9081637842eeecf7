"""A model of its own for each site: it is trained beside the federated one, measured there, and never sent.

Both are trained on the same batches by the same solver, so a batch takes about twice as long.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor, nn

from metis.errors import ConfigError
from metis.learning.torch.flat import owner
from metis.learning.torch.sharing import PERSONAL
from metis.registry import Setting, check_settings

Measured: TypeAlias = tuple[Tensor, Any, Any]  # the loss of a batch, outputs and targets
Measure: TypeAlias = Callable[[nn.Module], Measured]


class PersonalModel:
    """How a personal model is trained; subclasses are frozen dataclasses, registered under a name for files."""

    def __post_init__(self) -> None:
        check_settings(self)

    def beside(self, network: nn.Module) -> Beside:
        """The network with a personal one beside it."""
        raise NotImplementedError


def check_personal(given: PersonalModel | None) -> PersonalModel | None:
    """What was given, if it is one."""
    if given is not None and not isinstance(given, PersonalModel):
        raise ConfigError(f"personal is {given!r}; it must be metis.Ditto(...) or metis.APFL(...)")
    return given


class Beside(nn.Module):
    """A network under its own names, and beside it a copy, `personal.*`, which stays in the silo."""

    network: nn.Module
    personal: nn.Module

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        if hasattr(network, PERSONAL):
            raise ConfigError(f"the network has a part called '{PERSONAL}', which is the name of the personal model")
        own = copy.deepcopy(network)
        # What the network consists of becomes part of this module, so that it keeps its names.
        self._parameters, self._buffers = dict(network._parameters), network._buffers
        self._non_persistent_buffers_set = network._non_persistent_buffers_set
        self._modules = {**network._modules, PERSONAL: own}
        self.__dict__["network"] = network  # not as a part: its own parts are here already

    def train(self, mode: bool = True) -> Beside:
        super().train(mode)
        self.network.train(mode)
        return self

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the site uses: the outputs of its own model."""
        return self.personal(*inputs, **named)

    def pairs(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """The name, the federated and the personal one of every parameter that is trained."""
        federated = dict(self.network.named_parameters())
        for name, own in self.personal.named_parameters():
            if own.requires_grad:
                yield name, federated[name], own

    @torch.no_grad()
    def begin(self, *, first: bool) -> None:
        """A community model was received; a personal model that was never trained begins as its copy."""
        if first:
            for name, tensor in (*self.network.named_parameters(), *self.network.named_buffers()):
                owned, leaf = owner(self.personal, name)
                getattr(owned, leaf).copy_(tensor)

    def measure(self, measure: Measure) -> Measured:
        """In training what is minimised, whose value is the federated loss; else what the site's own model is worth."""
        if not self.training:
            return self.measured(measure)
        shared, outputs, targets = measure(self.network)
        own = self.own_loss(measure)
        return shared + (own - own.detach()), outputs, targets

    def measured(self, measure: Measure) -> Measured:
        """The site's own model on a batch."""
        return measure(self.personal)

    def own_loss(self, measure: Measure) -> Tensor:
        """What the personal model minimises; the federated one must get no gradient from it."""
        return self.measured(measure)[0]


# --- Ditto ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ditto(PersonalModel):
    """Ditto (Li et al. 2021): the personal model v minimises its loss + pull / 2 |v - w|², w as it was received."""

    pull: Annotated[float, Setting("lambda: 0 trains for itself, much stays at the community model", ge=0)] = 0.1

    def beside(self, network: nn.Module) -> Beside:
        return _Pulled(network, self.pull)


class _Pulled(Beside):
    def __init__(self, network: nn.Module, pull: float) -> None:
        super().__init__(network)
        self._pull, self._received = pull, dict[str, Tensor]()

    def begin(self, *, first: bool) -> None:
        super().begin(first=first)
        self._received = {name: federated.detach().clone() for name, federated, _ in self.pairs()}

    def own_loss(self, measure: Measure) -> Tensor:
        distances = [(own - self._received[name]).square().sum() for name, _, own in self.pairs()]
        return super().own_loss(measure) + self._pull / 2 * torch.stack(distances).sum()


# --- APFL -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class APFL(PersonalModel):
    """APFL (Deng et al. 2020): a site uses share v + (1 - share) w, where v is trained for this mixture."""

    share: Annotated[float, Setting("alpha: of the personal model in the mixture", ge=0, le=1)] = 0.5
    adapt: Annotated[bool, Setting("whether each site learns its own share")] = True

    def beside(self, network: nn.Module) -> Beside:
        return _Mixed(network, self.share, adapt=self.adapt)


class _Mixed(Beside):
    def __init__(self, network: nn.Module, share: float, *, adapt: bool) -> None:
        super().__init__(network)
        like = next(self.personal.parameters())
        # A part of the personal network, so that it stays in the silo as that does.
        self.personal.register_parameter(_SHARE, nn.Parameter(like.new_tensor(share), requires_grad=adapt))

    def pairs(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        federated = dict(self.network.named_parameters())
        for name, own in self.personal.named_parameters():
            if name != _SHARE and own.requires_grad:
                yield name, federated[name], own

    def measured(self, measure: Measure) -> Measured:
        share = self.personal.get_parameter(_SHARE)
        with torch.no_grad():
            share.clamp_(0, 1)
        mixed = {name: share * own + (1 - share) * federated.detach() for name, federated, own in self.pairs()}
        with _in_place_of(self.personal, mixed):
            return measure(self.personal)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.measured(lambda module: (module(*inputs, **named), None, None))[0]


_SHARE = "share_of_personal"


@contextlib.contextmanager
def _in_place_of(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """While active, the module computes with these tensors; a tied parameter is exchanged everywhere."""
    kept = {id(parameter): tensors[name] for name, parameter in module.named_parameters() if name in tensors}
    homes = [
        (part, leaf, parameter)
        for part in module.modules()
        for leaf, parameter in part._parameters.items()
        if id(parameter) in kept
    ]
    for part, leaf, parameter in homes:
        part._parameters[leaf] = kept[id(parameter)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for part, leaf, parameter in homes:
            part._parameters[leaf] = parameter


BY_NAME: Mapping[str, type[PersonalModel]] = {"ditto": Ditto, "apfl": APFL}
