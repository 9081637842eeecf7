"""A learner as a process of its own, so that it can be killed: `metis learner` without its command line.

python lone_learner.py ADDRESS WORK_FOLDER PACE
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from metis.deployment.learner.process import LearnerProcess

LIGHT = [sys.executable, str(Path(__file__).with_name("light_trainer.py"))]


def report(kind: str, text: str) -> None:
    print(json.dumps({"kind": kind, "text": text}), flush=True)


async def main(address: str, folder: Path, pace: float) -> int:
    return await LearnerProcess(address, work=folder, child=LIGHT, report=report, name="zurich", pace=pace).run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))))
