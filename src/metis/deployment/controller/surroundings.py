"""What surrounds a federation: the disk of its state folder, those who are not let in, and whom to notify."""

from __future__ import annotations

import asyncio
import math

from metis.core.mixing.secure import fewest_members
from metis.deployment.controller.alerts import Alerts, Certificates
from metis.deployment.controller.notify import Notifier
from metis.deployment.controller.sessions import Sessions
from metis.deployment.controller.settings import FederationPlan, Report
from metis.deployment.controller.space import DiskSpace
from metis.deployment.controller.state import State
from metis.deployment.controller.strangers import RefusedCalls
from metis.deployment.controller.view import View
from metis.deployment.wire.models import model_bytes
from metis.system import monotonic

_LOOK_SECONDS = 1.0
_WARN_AGAIN = 30.0  # seconds between two warnings of a full disk


class Surroundings:
    """Looks around once a second, reports what has changed, and notifies of it."""

    def __init__(self, plan: FederationPlan, state: State, report: Report, certificates: Certificates) -> None:
        self._report, settings, masks = report, plan.deployment, plan.secure_sum
        self.disk = DiskSpace(state.folder, model_bytes(plan.initial_model.layout))
        self.refused_calls = RefusedCalls(lambda text: report("warning", text))
        about = {"run": state.run, "policy": plan.setting.label, "state": str(state.folder)}
        self.notifier = Notifier(settings.notify, state.folder, about, report)
        self._alerts = Alerts(
            self.notifier,
            self.disk,
            away_after=settings.notify.away_after,
            minimum=max(settings.minimum, 0 if masks is None else fewest_members(masks.colluders)),
            certificates=certificates,
        )
        self._reported = (False, False)  # full, nearly full
        self._warned_at = -math.inf

    async def watch(self, view: View, sessions: Sessions) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.to_thread(self.disk.look)  # a disk that hangs does not stop the event loop
            self._report_disk()
            self.refused_calls.report_due()
            self._alerts.look(view.standing, sessions.known, sessions.open)
            await asyncio.sleep(_LOOK_SECONDS)

    def disk_full(self, reason: str) -> None:
        """A write found no room."""
        self.disk.refused(reason)
        if monotonic() - self._warned_at > _WARN_AGAIN:
            self._warned_at = monotonic()
            self._reported = (False, False)
        self._report_disk()

    def _report_disk(self) -> None:
        nearly_full = self.disk.nearly_full and not self.disk.full
        before, self._reported = self._reported, (self.disk.full, nearly_full)
        if before[0] and not self.disk.full:
            self._report("info", "the disk has room again: the federation continues")
        if self.disk.sentence and before != self._reported:
            self._report("warning", self.disk.sentence)

    async def close(self) -> None:
        """Deliver what waits to be notified."""
        await asyncio.to_thread(self.notifier.close)
