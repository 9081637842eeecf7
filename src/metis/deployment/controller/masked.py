"""The part of the controller process that serves masked rounds; where nothing is masked it does nothing."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

from metis.core.events import Event, LearnerId, MembersAwaited, RoundAbandoned
from metis.core.model import Layout
from metis.deployment.controller.openings import MaskedRound
from metis.deployment.controller.sessions import Sessions
from metis.deployment.controller.settings import FederationPlan, Report
from metis.deployment.controller.state import State
from metis.deployment.controller.sums import Sums
from metis.deployment.controller.writer import Outcome, Writer
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.secure import settings_hash
from metis.errors import ConfigError
from metis.privacy.keys import Peers

_DISK_FULL_PAUSE = 0.5  # seconds until an event is journaled on a full disk again


class MaskedService(ABC):
    """Between the streams of the learners, the writer and `Sums`."""

    layout: Layout
    _sessions: Sessions
    _writer: Writer
    _report: Report

    @abstractmethod
    def disk_full(self, reason: str) -> None: ...

    @abstractmethod
    def failed(self, problem: BaseException) -> None: ...

    @abstractmethod
    def _spawn(self, work: Coroutine[Any, Any, None]) -> None: ...

    def _make_sums(
        self, plan: FederationPlan, state: State, peers: Peers | None, report: Report, recovered: MaskedRound | None
    ) -> None:
        self._sums: Sums | None = None
        self._recovered_round = recovered
        if plan.secure_sum is None:
            return
        if peers is None:
            raise ConfigError("secure_sum needs certificates, which sign what members agree on: give --identity DIR")
        assert plan.setting.update_bytes is not None, "updates are masked"
        self._sums = Sums(
            state, self.layout, plan.setting.update_bytes, settings_hash(plan.learner_settings), peers, report,
            self._sessions.secure, self._sessions.offer, plan.deployment.lease,
        )  # fmt: skip
        if plan.deployment.evaluate_at_learners:
            report(
                "warning",
                "local models are masked, but the metrics of sites with evaluation data are not: this controller reads "
                "each site's own; a site keeps them back with report_metrics = false in its policy, all with "
                "deployment.evaluate_at_learners = false",
            )
        self._sums.post, self._sums.disk_full, self._sums.failed = self._post_sum, self.disk_full, self.failed
        self._sessions.opening_of = self._sums.opening_of

    def _serve_sums(self) -> None:
        if self._sums is not None:
            self._spawn(self._sums.run())
            self._sums.applied(self._recovered_round)

    def _sums_applied(self, outcome: Outcome) -> None:
        for action in outcome.actions:
            if isinstance(action, RoundAbandoned):
                text = f"the masked round on community model {action.version} begins again: {action.reason}"
                self._report("warning", text)
            elif isinstance(action, MembersAwaited) and action.reason:
                names = ", ".join(f"'{learner}'" for learner in action.learners)
                self._report("warning", f"waiting for {names or 'more learners'}: {action.reason}")
            elif isinstance(action, MembersAwaited):
                self._report("info", "enough learners for a masked sum are there again: the federation goes on")
        if self._sums is not None:
            self._sums.applied(outcome.masked)
            if outcome.entry.record.get("event") == "learner_joined":  # a member of a closed round may be back
                self._sums.back(outcome.entry.record["learner"])

    def _hear_sums(self, learner: LearnerId, message: pb.SecureSum) -> None:
        if self._sums is not None:
            self._sums.hear(learner, message)

    def _back_to_sums(self, learner: LearnerId) -> None:
        if self._sums is not None:
            self._sums.back(learner)

    def _post_sum(self, event: Event, content: memoryview | None) -> None:
        """Let happen what a masked round has come to; on a full disk again and again."""

        def again() -> None:
            asyncio.get_running_loop().call_later(_DISK_FULL_PAUSE, self._post_sum, event, content)

        if content is None:
            self._writer.post(event, again)
        else:
            self._writer.submit(lambda: self._writer.open_sum(event, content), again)
