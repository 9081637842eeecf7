"""Other systems, each in a virtual environment of its own, driven by a script of its own under benchmarks/peers.

    python benchmarks/_peers.py [NAME ...]    makes the environments (they are made on first use anyway)

An environment is made once from peers/NAME.txt, which pins the torch of constraints.txt too, and anew if that changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _bench import HERE, ROOT

SCRIPTS = HERE / "peers"
CACHE = ROOT / ".cache" / "peers"
NAMES = ("flower", "nvflare", "pfl", "fedjax")


class Unavailable(Exception):
    """A peer that cannot be measured here, with the reason."""


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment, which is made if need be."""
    home, wanted = CACHE / peer, (SCRIPTS / f"{peer}.txt").read_text("utf-8")
    python, stamp = home / "bin" / "python", home / "requirements"
    if python.exists() and stamp.exists() and stamp.read_text("utf-8") == wanted:
        return python
    print(f"making the environment of {peer} in {home}", file=sys.stderr, flush=True)
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "-qq", "install"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(home)],
        [*install, "-r", str(SCRIPTS / f"{peer}.txt")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
            raise Unavailable(f"{peer} cannot be installed: {last[-1] if last else done.returncode}")
    stamp.write_text(wanted, "utf-8")
    return python


def version_of(peer: str) -> str:
    """As its requirements file pins it."""
    lines = (SCRIPTS / f"{peer}.txt").read_text("utf-8").splitlines()
    return next(line for line in lines if line and not line.startswith("#")).replace("==", " ")


def ask(
    peer: str, script: str, spec: Mapping[str, Any], *, timeout: float = 600, settings: Mapping[str, str] | None = None
) -> Any:
    """What the peer's script has measured; raises Unavailable if it cannot."""
    python = python_of(peer)
    with tempfile.TemporaryDirectory(prefix=f"{peer}-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        environment = {
            **os.environ,
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(SCRIPTS),
            "OMP_NUM_THREADS": "1",
            "FLWR_HOME": folder,
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",  # its workers would stand behind everything else on a busy machine
            **(settings or {}),
        }
        command = [str(python), str(SCRIPTS / f"{script}.py"), json.dumps(dict(spec)), str(answer)]
        with log.open("w") as file:
            # A session of its own, so that whatever it has started can be ended with it.
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise Unavailable(f"{peer}: no answer within {timeout:.0f} s") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not answer.exists():
            lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
            if "METIS_BENCHMARK_LOG" in os.environ:
                Path(os.environ["METIS_BENCHMARK_LOG"]).write_text("\n".join(lines), "utf-8")
            raise Unavailable(f"{peer} failed: {lines[-1][:200] if lines else process.returncode}")
        return json.loads(answer.read_text("utf-8"))


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        try:
            print(name, python_of(name))
        except Unavailable as problem:
            print(problem)
