"""A real Flower federation on loopback: a SuperLink, SuperNodes, and the app of flower_app.py, started by `flwr run`.

Everything is as it comes: app processes by isolation "subprocess", which is the default, no TLS.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from simple import spec

PROJECT = """
[project]
name = "exchange"
version = "1.0.0"
description = "A benchmark"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "benchmark"

[tool.flwr.app.components]
serverapp = "flower_app:server"
clientapp = "flower_app:client"

[tool.flwr.app.config]
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def main() -> None:
    asked, answer = spec(), Path(sys.argv[2])
    app = Path("app").resolve()
    app.mkdir()
    (app / "pyproject.toml").write_text(PROJECT, "utf-8")
    shutil.copy(Path(__file__).with_name("flower_app.py"), app)
    port = free_port()
    home = Path(os.environ["FLWR_HOME"])
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "bench"\n\n[superlink.bench]\naddress = "127.0.0.1:{port}"\ninsecure = true\n', "utf-8"
    )
    os.environ["METIS_BENCHMARK_SPEC"], os.environ["METIS_BENCHMARK_ANSWER"] = sys.argv[1], str(answer)
    plain = ["--insecure"]
    started = [
        subprocess.Popen(
            [
                "flower-superlink",
                *plain,
                "--disable-runtime-dependency-installation",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ]
        )
    ]
    deadline = time.monotonic() + asked.get("timeout", 500)
    while socket.socket().connect_ex(("127.0.0.1", port)):
        if started[0].poll() is not None or time.monotonic() > deadline:
            sys.exit("the SuperLink did not start")
        time.sleep(0.2)
    for place in range(asked["learners"]):
        started.append(
            subprocess.Popen(
                [
                    *("flower-supernode", *plain, "--superlink", f"127.0.0.1:{port}", "--port", str(free_port())),
                    *("--node-config", f"partition-id={place} num-partitions={asked['learners']}"),
                ]
            )
        )
    subprocess.run(["flwr", "run", str(app), "bench"], check=True)
    while not answer.exists() and time.monotonic() < deadline:
        if any(process.poll() is not None for process in started):
            sys.exit("a SuperLink or SuperNode has ended")
        time.sleep(0.2)
    for process in started:
        process.kill()
    if not answer.exists():
        sys.exit("no answer in time")


if __name__ == "__main__":
    main()
