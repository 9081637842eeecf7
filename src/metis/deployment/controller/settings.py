"""What a controller process is given to run: the federation's plan and how learners are treated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from metis.core.controller import Controller
from metis.core.costs import Power
from metis.core.events import LearnerId
from metis.core.layers import Layer, SecureSum
from metis.core.mixing import ModelStore
from metis.core.model import Model
from metis.core.policy import Policy
from metis.core.stop import StopRule
from metis.deployment.controller.durable import KEEP_MODELS, MakeController
from metis.deployment.controller.steps import Guard
from metis.errors import ConfigError
from metis.privacy.encrypted import EncryptedUpdates
from metis.runs.setting import Setting

Report = Callable[[str, str], None]  # kind ("info", "warning", "round", ...), sentence


@dataclass(frozen=True)
class NotifySettings:
    """Who hears of what an operator should know; the table [deployment.notify] of a file."""

    command: tuple[str, ...] = ()
    webhook: str | None = None
    events: tuple[str, ...] = ()
    away_after: float = 3600.0  # seconds after which a learner that is not connected counts as away


@dataclass(frozen=True)
class DeploymentSettings:
    """How the controller treats its learners; the table [deployment] of a file."""

    expected: int = 1  # learners to wait for before the first round
    minimum: int = 1  # enough to begin with after `wait_seconds`; with fewer the federation pauses
    wait_seconds: float = math.inf
    lease: float = 30.0  # seconds of silence after which a learner has left
    heartbeat: float = 5.0
    largest_number: float = 1e10  # an update with a larger weight is refused
    max_examples: int = 10**9
    evaluate_every: float = 0.0
    evaluate_at_learners: bool = False
    evaluation_wait: float = 60.0  # seconds from the first report of a model on in which other sites are waited for
    evaluation_sites: int = 2  # whose reports make a federated value; 1 in a federation of one
    target_share: float = 0.5  # of the members whose reports can end the federation at its target
    step_guard: Guard = "off"  # what becomes of an update that goes too far
    step_limit: float = 10.0  # times what is usual; farther is too far
    keep_models: int = KEEP_MODELS  # newest community models that a rollback can lead back to
    linger: float = 30.0  # seconds at the end in which learners may fetch the final model
    notify: NotifySettings = field(default_factory=NotifySettings)

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.expected:
            raise ConfigError(
                f"deployment.minimum is {self.minimum}, but must be between 1 and {self.expected}, the number of "
                "expected learners"
            )
        if self.lease < 2 * self.heartbeat:
            raise ConfigError(
                f"deployment.lease is {self.lease:g} s, but must be at least twice deployment.heartbeat, "
                f"{self.heartbeat:g} s"
            )


@dataclass(frozen=True)
class FederationPlan:
    """What is to be run: made from the configuration file, and the same after a restart."""

    make: MakeController
    initial_model: Model
    learner_settings: str  # JSON that is sent to the learners; opaque here
    setting: Setting  # folds the events into a run; lists learners as far as they are known
    members: Mapping[LearnerId, Power] | None  # who may join, in order; None for everybody with a certificate
    deployment: DeploymentSettings = field(default_factory=DeploymentSettings)
    wire: Layer | None = None  # the layer that encodes updates, if models do not travel as they are
    metrics: tuple[str, ...] = ()  # names that learners may report; a site's own names stay there
    max_examples: Mapping[LearnerId, int] = field(default_factory=dict)  # of those whose number the file limits
    began_with: StopRule = field(default_factory=StopRule)  # the stop rule of `make`
    stop: StopRule | None = None  # of the file as it is now; None: as it was
    secure_sum: SecureSum | None = None  # the layer that masks updates, if there is one
    encrypted: EncryptedUpdates | None = None  # checks updates that nobody here can read, if they are
    settings_of_added: Callable[[LearnerId], str] | None = (
        None  # instead of `learner_settings`; None: none can be added
    )


class Evaluator(Protocol):
    """Measures a community model on the controller's held-out examples, outside this process."""

    async def evaluate(self, model: Path) -> dict[str, float]: ...


def make_core(
    policy: Policy,
    stop: StopRule,
    settings: DeploymentSettings,
    refusals_allowed: int,
    exchange_bytes: int | None = None,
) -> MakeController:
    """A factory of the core controller for this federation, also of one without weights that is used for a replay.

    `exchange_bytes` are those of an update request; without it, those of the model that a controller begins with.
    """

    def make(model: Model, store: ModelStore) -> Controller:
        return Controller(
            policy,
            model,
            stop=stop,
            learners_expected=settings.expected,
            quorum=settings.minimum,
            refusals_allowed=refusals_allowed,
            store=store,
            models_checked=True,  # as they came over the wire; checking again would map every file once more
            exchange_bytes=exchange_bytes,
        )

    return make
