"""A controller that is killed between the commit and the receipt.

    python killed_controller.py FOLDER UPDATES

Prints its address, and ends itself with SIGKILL as soon as that many updates are durable.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from deployment.federations import served
from metis.core import policies
from metis.core.stop import StopRule
from metis.deployment.controller.settings import DeploymentSettings
from metis.deployment.controller.state import State

POLICY, STOP = policies.sync_fedavg(1), StopRule(rounds=4)
TERMS = DeploymentSettings(expected=3, minimum=1, lease=20, heartbeat=0.5, linger=1)


def kill_after(updates: int) -> None:
    """Put the kill right behind the append of the journal."""
    append, durable = State.append, 0

    def append_and_die(self: State, at: float, record: dict[str, Any], **options: Any) -> int:
        nonlocal durable
        seq = append(self, at, record, **options)
        durable += options.get("update") is not None
        if durable == updates:
            os.kill(os.getpid(), signal.SIGKILL)
        return seq

    State.append = append_and_die  # type: ignore[method-assign]


async def main(folder: Path) -> None:
    async with served(folder, POLICY, STOP, terms=TERMS) as here:
        print(here.address, flush=True)
        await here.serving


if __name__ == "__main__":
    kill_after(int(sys.argv[2]))
    asyncio.run(main(Path(sys.argv[1])))
