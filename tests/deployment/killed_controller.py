"""A controller that is killed between the commit and the receipt.

    python killed_controller.py FOLDER UPDATES

Prints its address, and ends itself with SIGKILL as soon as that many updates are durable.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from deployment.federations import served
from metis.core import policies
from metis.core.stop import StopRule
from metis.deployment.controller import writer
from metis.deployment.controller.journal import Entry
from metis.deployment.controller.settings import DeploymentSettings
from metis.deployment.controller.state import State

POLICY, STOP = policies.sync_fedavg(1), StopRule(rounds=4)
TERMS = DeploymentSettings(expected=3, minimum=1, lease=20, heartbeat=0.5, linger=1)


def kill_after(updates: int) -> None:
    """Put the kill right behind the commit of the journal, of one update at a time."""
    journaled, durable = State._journaled, 0

    def note_and_die(self: State, entries: Sequence[Entry]) -> None:
        nonlocal durable
        journaled(self, entries)
        durable += sum(entry.update is not None for entry in entries)
        if durable == updates:
            os.kill(os.getpid(), signal.SIGKILL)

    State._journaled = note_and_die  # type: ignore[method-assign]
    writer._MAX_TOGETHER = 1


async def main(folder: Path) -> None:
    async with served(folder, POLICY, STOP, terms=TERMS) as here:
        print(here.address, flush=True)
        await here.serving


if __name__ == "__main__":
    kill_after(int(sys.argv[2]))
    asyncio.run(main(Path(sys.argv[1])))
