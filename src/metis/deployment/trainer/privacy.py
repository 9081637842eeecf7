"""The records of a site that protects them: settings, ledger and noise, where they are trained on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis.core.events import Budget
from metis.errors import ConfigError
from metis.privacy.ledger import Ledger
from metis.privacy.records import Privacy

if TYPE_CHECKING:
    from metis.learning import Engine, Learner


class PrivacyGuard:
    """Reserves what a learner is about to spend; a learner that protects its records trains through it only."""

    def __init__(self, learner: Learner, privacy: Privacy, ledger: Ledger, run: str) -> None:
        self._learner, self._privacy, self._ledger, self._run = learner, privacy, ledger, run

    @classmethod
    def of(cls, learner: Learner, engine: Engine, site: Mapping[str, Any], processes: int) -> PrivacyGuard | None:
        """For a learner whose site or federation wants it; None if neither does.

        `site` has the settings of the site policy (`settings`), and where its ledger is.
        """
        own = site.get("settings")
        demanded = None if own is None else Privacy(**own)
        privacy = getattr(learner, "privacy", None)  # another engine may have learners of its own
        if demanded is not None:
            privacy = demanded if privacy is None else demanded.strictest(privacy)
        if privacy is None:
            return None
        check = getattr(engine, "check_private", None)
        if check is None or processes > 1:
            raise ConfigError("privacy needs the engine 'torch' and one training process")
        check()
        if "ledger" not in site:
            raise ConfigError("records cannot be protected without a folder for the ledger of what is spent")
        witness = Path(site["witness"]) if site.get("witness") else None
        ledger = Ledger(Path(site["ledger"]), site.get("data") or learner.name, witness)
        learner.privacy, learner.system_noise = privacy, True
        return cls(learner, privacy, ledger, str(site.get("run") or ""))

    def facts(self) -> dict[str, Any]:
        """What the learner's process must know."""
        left = self._ledger.steps_left(self._privacy, self._learner.sampling_rate, self._run)
        spent = self._ledger.epsilon(self._privacy.delta)
        return {
            "private": True,
            "steps_left": left,
            "larger_batches": self._privacy.larger_batches,
            "noise": self._privacy.noise,
            "budget": self._privacy.budget,
            "delta": self._privacy.delta,
            "epsilon_spent": spent,
        }

    def reserve(self, task: int, budget: Budget) -> None:
        """Before the first step of a task; raises `BudgetSpent`."""
        if budget.steps is None:
            raise ConfigError(
                "a task without a number of steps cannot be reserved: privacy excludes budget = 'deadline'"
            )
        self._learner.privacy = self._ledger.reserve(
            self._privacy, self._learner.sampling_rate, self._run, task, budget.steps, budget.batches_per_step
        )
