"""A whole small federation in one process, for tests that watch, stop and kill it from outside.

    python watched_controller.py FOLDER LEARNERS ROUNDS HTTP

It prints one line when all learners have joined, and drains at SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from deployment.federations import served
from metis.core import policies
from metis.core.stop import StopRule
from metis.deployment.controller.announcement import announce, withdraw
from metis.deployment.controller.settings import DeploymentSettings
from metis.deployment.controller.state import State
from metis.deployment.controller.status_server import StatusServer

FACTS = {
    "experiment": {"policy": [{"name": "sync_fedavg", "label": "SyncFedAvg"}], "evaluation": {"target": 0.95}},
    "metric": "accuracy",
    "higher_is_better": True,
}


class Evaluator:
    """Every model is better than the one before."""

    seen = 0

    async def evaluate(self, model: Path) -> dict[str, float]:
        Evaluator.seen += 1
        return {"accuracy": 1 - 1 / (1 + Evaluator.seen), "loss": 1 / Evaluator.seen}


async def main(folder: Path, learners: int, rounds: int, http: str) -> None:
    with State.open(folder, "process") as state:
        if state.facts() is None:
            state.begin(FACTS)
    terms = DeploymentSettings(expected=learners, minimum=1, lease=20, heartbeat=0.5, linger=1)
    policy, stop = policies.sync_fedavg(1), StopRule(rounds=rounds)
    async with served(folder, policy, stop, terms=terms, evaluator=Evaluator()) as federation:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, federation.process.drain, "asked to stop")
        status = StatusServer(http, federation.process.status, loop) if http else None
        announce(folder, listen=federation.address, http=status.address if status else None, run=federation.state.run)
        tasks = [asyncio.create_task(learner.run()) for learner in federation.learners(learners, lambda _: 0.005)]
        while not federation.serving.done() and len((await federation.process.status())["learners"]) < learners:
            await asyncio.sleep(0.02)
        print("ready", status.address if status else "", flush=True)
        await federation.serving
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        withdraw(folder)
        if status is not None:
            status.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
