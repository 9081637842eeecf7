"""A controller and four learners as real processes with mutual TLS; one learner and the controller are killed.

    make demo-deploy

Everything happens through the commands that an administrator would type; the processes that are killed with
SIGKILL are started again with the same command, and the federation ends as if nothing had happened.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/deploy")
METIS = [sys.executable, "-m", "metis.cli.app"]
PACES = {"lyon": 0.02, "turin": 0.02, "oslo": 0.1, "porto": 0.1}  # seconds a batch: two fast sites, two slow ones


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as probe:
        return int(probe.getsockname()[1])


PORT = free_port()


def say(text: str) -> None:
    print(f"-- {text}", flush=True)


def metis(*words: object) -> None:
    """Run one command to its end; its own words tell what went wrong."""
    done = subprocess.run([*METIS, *map(str, words)], check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def start(log: str, *words: object) -> subprocess.Popen[bytes]:
    with (FOLDER / f"{log}.log").open("ab") as file:
        return subprocess.Popen([*METIS, *map(str, words)], stdout=file, stderr=file)


def start_controller() -> subprocess.Popen[bytes]:
    return start(
        "controller", "controller", HERE / "deployment.toml", "--state", FOLDER / "state",
        "--identity", FOLDER / "kits" / "controller", "--listen", f"localhost:{PORT}", "--http", "127.0.0.1:0",
    )  # fmt: skip


def start_learner(name: str) -> subprocess.Popen[bytes]:
    return start(
        name, "learner", "--controller", f"localhost:{PORT}", "--identity", FOLDER / "kits" / name,
        "--work", FOLDER / "work" / name, "--out", FOLDER / "work" / name, "--pace", PACES[name],
    )  # fmt: skip


def status() -> dict[str, object]:
    done = subprocess.run(
        [*METIS, "status", str(FOLDER / "state"), "--json"], check=False, capture_output=True, text=True
    )
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return {}


def wait_for_version(version: int, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    while int(str(status().get("version") or 0)) < version:
        for name, process in processes.items():
            if process.poll() is not None:
                sys.exit(f"{name} has ended early: {(FOLDER / f'{name}.log').read_text()[-500:]}")
        time.sleep(0.3)


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    say("certificates: an authority, a controller, four sites")
    metis("certificates", "init", FOLDER / "ca", "--name", "Demo consortium")
    metis(
        "certificates", "issue", "controller", "--ca", FOLDER / "ca", "--role", "controller",
        "--host", "localhost", "--out", FOLDER / "kits" / "controller",
    )  # fmt: skip
    for name in PACES:
        metis(
            "certificates", "issue", name, "--ca", FOLDER / "ca", "--role", "learner", "--out", FOLDER / "kits" / name
        )

    say(f"starting the controller and {len(PACES)} learners; logs are in {FOLDER}")
    controller = start_controller()
    learners = {name: start_learner(name) for name in PACES}
    try:
        wait_for_version(3, {"controller": controller, **learners})
        say("round 3: killing learner oslo with SIGKILL, in the middle of its training")
        learners["oslo"].send_signal(signal.SIGKILL)
        learners["oslo"].wait()
        time.sleep(1)
        say("starting oslo again with the same command")
        learners["oslo"] = start_learner("oslo")
        wait_for_version(6, {"controller": controller, **learners})
        say("round 6: killing the controller with SIGKILL")
        controller.send_signal(signal.SIGKILL)
        controller.wait()
        time.sleep(1)
        say("starting the controller again with the same command; the learners come back by themselves")
        controller = start_controller()
        code = controller.wait(300)
        codes = {name: process.wait(60) for name, process in learners.items()}
    finally:
        for process in (controller, *learners.values()):
            if process.poll() is None:
                process.kill()
    print((FOLDER / "controller.log").read_text()[-2500:])
    say(f"exit codes: controller {code}, " + ", ".join(f"{name} {ended}" for name, ended in codes.items()))
    if code or any(codes.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
