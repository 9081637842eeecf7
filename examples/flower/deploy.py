"""A whole Flower deployment on this machine: a SuperLink, two SuperNodes, one of them ten times slower, and this app.

    python examples/flower/deploy.py

Everything that Flower writes goes to a temporary folder.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

APP = Path(__file__).parent
BIN = Path(sys.executable).parent
SECONDS_PER_BATCH = (0.01, 0.1)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def listening(host: str, port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex((host, port)) == 0


def main(app: Path = APP) -> int:
    link, *nodes = (f"127.0.0.1:{port}" for port in free_ports(1 + len(SECONDS_PER_BATCH)))
    with tempfile.TemporaryDirectory(prefix="metis-flower-") as folder:
        environment = {
            **os.environ,
            "FLWR_HOME": folder,
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        # One connection for Flower's command line, which looks for it here.
        connection = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{link}"\ninsecure = true\n'
        Path(folder, "config.toml").write_text(connection, encoding="utf-8")

        def start(*command: str, log: str) -> subprocess.Popen[bytes]:
            with Path(folder, log).open("wb") as output:
                return subprocess.Popen(
                    [str(BIN / command[0]), *command[1:]],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # it starts processes of its own, which end with it
                )

        host, port = link.split(":")
        install = "--disable-runtime-dependency-installation"
        running = [start("flower-superlink", "--insecure", install, "--host", host, "--port", port, log="link.log")]
        while not listening(host, int(port)):
            time.sleep(0.2)
        for number, (address, slow) in enumerate(zip(nodes, SECONDS_PER_BATCH, strict=True)):
            config = f"partition-id={number} num-partitions={len(nodes)} seconds-per-batch={slow}"
            host, port = address.split(":")
            running.append(
                start("flower-supernode", "--insecure", "--superlink", link, "--host", host, "--port", port,
                      "--node-config", config, log=f"node-{number}.log")
            )  # fmt: skip
        try:
            command = [str(BIN / "flwr"), "run", str(app), "here", "--stream"]
            return subprocess.run(command, env=environment, check=False).returncode
        finally:
            for process in running:
                os.killpg(process.pid, signal.SIGKILL)
            for process in running:
                process.wait()
            if "--logs" in sys.argv:
                for log in sorted(Path(folder).glob("*.log")):
                    print(f"== {log.name}\n{log.read_text(encoding='utf-8', errors='replace')}")


if __name__ == "__main__":
    sys.exit(main())
