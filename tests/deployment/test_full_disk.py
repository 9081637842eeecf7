"""A real controller on a small disk of its own: that it is nearly full or full is seen by everybody who asks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from deployment.test_status import CONTROLLER, Reply, ask
from metis.cli.app import app
from metis.deployment.controller.space import DiskSpace

MEGABYTE = 1 << 20


class SmallDisk:
    """A controller whose state folder is on a disk of 16 MB, which a shell in its mount namespace fills."""

    def __init__(self, disk: Path) -> None:
        disk.mkdir()
        mount = f"mount -t tmpfs -o size=16m tmpfs {disk}"
        if (
            shutil.which("unshare") is None
            or subprocess.run(["unshare", "-rm", "sh", "-c", mount], stderr=-3).returncode
        ):
            pytest.skip("a small disk cannot be mounted here")
        self._ballast = disk / "ballast"
        controller = f"{sys.executable} {CONTROLLER} {disk}/state 2 1000000 127.0.0.1:0"
        commands = (
            f'{mount} && {{ {controller} < /dev/null & }}; while read -r line; do eval "$line"; done; kill $!; wait $!'
        )
        self._process = subprocess.Popen(
            ["unshare", "-rm", "sh", "-c", commands], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().split()[1]

    def leave(self, megabytes: float) -> None:
        """Have a file on the disk so large that about this much is free."""
        size = 16 * MEGABYTE if megabytes == 0 else int((16 - megabytes) * MEGABYTE)
        self._do(f"rm -f {self._ballast}; head -c {size} /dev/zero > {self._ballast} 2> /dev/null")

    def make_room(self) -> None:
        self._do(f"rm -f {self._ballast}")

    def _do(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.communicate(timeout=600)

    def until(self, path: str, fits: Callable[[Reply], bool]) -> Reply:
        """The first answer that fits."""
        end = time.monotonic() + 300
        while not fits(reply := ask(self.address, path)):
            assert time.monotonic() < end, reply
            time.sleep(0.05)
        return reply


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk")
    yield disk
    disk.close()


def gauge(text: str, name: str) -> float:
    (family,) = (found for found in text_string_to_metric_families(text) if found.name == name)
    return family.samples[0].value


@pytest.mark.slow
def test_a_full_disk_is_seen_by_everybody_who_asks(small_disk: SmallDisk) -> None:
    """Health, readiness, status, its exit code and metrics show it, and before that that it is nearly full."""
    runner = CliRunner()
    assert small_disk.until("/healthz", lambda reply: reply.text == "ok\n").code == 200

    small_disk.leave(0.5)  # of 16: less than 5 %
    reply = small_disk.until("/healthz", lambda reply: reply.text != "ok\n")
    assert (reply.code, reply.text[:3]) in ((200, "ok\n"), (503, "the")), "and it may get full by itself"
    assert "nearly full" in reply.text or "is full since" in reply.text

    small_disk.leave(0)
    reply = small_disk.until("/healthz", lambda reply: reply.code == 503)
    assert "is full since" in reply.text and "on hold until there is space (no room to write " in reply.text
    ready = small_disk.until("/readyz", lambda reply: reply.code == 503)
    assert "is full since" in ready.text
    disk = json.loads(ask(small_disk.address, "/status").text)["disk"]
    assert disk["full"] and disk["since"] is not None and disk["free_bytes"] < MEGABYTE
    metrics = ask(small_disk.address, "/metrics").text
    assert gauge(metrics, "metis_disk_full") == 1 and gauge(metrics, "metis_disk_free_bytes") < MEGABYTE
    shown = runner.invoke(app, ["status", "--http", small_disk.address])
    assert shown.exit_code == 4 and "is full since" in shown.output.splitlines()[0]

    small_disk.make_room()
    version = json.loads(small_disk.until("/status", lambda reply: reply.code == 200).text)["version"]
    small_disk.until("/healthz", lambda reply: (reply.code, reply.text) == (200, "ok\n"))
    small_disk.until("/readyz", lambda reply: reply.code == 200)
    small_disk.until("/status", lambda reply: json.loads(reply.text)["version"] > version)
    assert runner.invoke(app, ["status", "--http", small_disk.address]).exit_code == 0
    assert gauge(ask(small_disk.address, "/metrics").text, "metis_disk_full") == 0


def test_a_full_disk_stays_full_until_a_model_fits(tmp_path: Path) -> None:
    """Free bytes of the file system are not enough: the room is tried, and the trial leaves nothing behind."""
    too_large = 1 << 62  # no file can have so many bytes
    space = DiskSpace(tmp_path, too_large)
    assert not space.full
    space.refused("no room to write x: No space left on device")
    space.look()
    assert space.full and "(no room to write x: No space left on device)" in space.sentence
    assert list(tmp_path.iterdir()) == []

    small = DiskSpace(tmp_path, 1000)
    small.refused("no room")
    small.look()
    assert not small.full and small.document()["since"] is None
    assert list(tmp_path.iterdir()) == []


def test_a_disk_is_nearly_full_when_few_models_fit(tmp_path: Path) -> None:
    """Whatever its size is; it is not when there is more room than that."""
    free = os.statvfs(tmp_path)
    room = free.f_bavail * free.f_frsize
    assert DiskSpace(tmp_path, room // 2).nearly_full
    assert "is nearly full" in DiskSpace(tmp_path, room // 2).sentence
    if room > 0.2 * free.f_blocks * free.f_frsize:
        assert not DiskSpace(tmp_path, 1000).nearly_full
