"""What a finished federation leaves in its run folder."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

from metis.core.costs import Power
from metis.core.model import Model
from metis.deployment.controller.document import CoreStatus, core_status
from metis.deployment.controller.settings import FederationPlan
from metis.deployment.controller.view import View
from metis.deployment.controller.writer import Writer
from metis.deployment.storage import storage
from metis.deployment.wire.models import read_model
from metis.runs.run import Run
from metis.runs.setting import LearnerInfo
from metis.runs.trace import EVENTS, read_trace


async def save_results(writer: Writer, view: View, plan: FederationPlan, folder: Path) -> Run:
    """Write the run and the best community model, and return the run."""

    def final() -> tuple[CoreStatus, Model, float]:
        """In the writer."""
        writer.flush_trace()
        controller = writer.controller
        return core_status(controller), controller.community.model.network, writer.durable.now

    core, model, seconds = await writer.ask(final)
    best = view.best_version
    paths = await writer.pin(set() if best is None else {best})
    return await asyncio.to_thread(_save, plan, core, model, seconds, folder, best, paths)


def _save(
    plan: FederationPlan,
    core: CoreStatus,
    model: Model,
    seconds: float,
    folder: Path,
    best: int | None,
    paths: dict[int, Path],
) -> Run:
    powers = plan.members or {}
    learners = tuple(
        LearnerInfo(
            row.learner,
            row.examples,
            row.batch_size,
            row.time_per_batch or math.nan,
            powers.get(row.learner, Power()),
        )
        for row in core.roster
    )
    kept = None
    if best is not None and best in paths:
        kept = read_model(paths[best], plan.initial_model.layout).network
    setting = replace(plan.setting, learners=learners)
    run = Run(setting, list(read_trace(folder / EVENTS)), model, seconds, best=kept)
    run.save(folder, storage().save_model)
    return run
