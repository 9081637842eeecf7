"""The systemd units and the container files: what can be checked, and run, without systemd and Docker."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("cryptography")
pytest.importorskip("grpc")

from metis.cli.app import app

ROOT = Path(__file__).parent.parent
SYSTEMD, DOCKER = ROOT / "packaging" / "systemd", ROOT / "packaging" / "docker"
UNITS = {"metis-controller.service": "metis-controller.service", "metis-learner@.service": "metis-learner@oslo.service"}
RESTRICTED = ROOT / "tests" / "deployment" / "restricted.py"
METIS = "/opt/metis/bin/metis"

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")


def options_of(command: str) -> set[str]:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    assert done.exit_code == 0, done.output
    return set(re.findall(r"--[a-z][a-z-]+", done.output))


def check_command(words: list[str]) -> None:
    """A command of metis that exists, with options that it has."""
    command, *rest = words
    wrong = {word for word in rest if word.startswith("--")} - options_of(command)
    assert not wrong, f"metis {command} has no {wrong}"


# --- systemd ------------------------------------------------------------------------------------------


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with an executable that is there."""
    for name in UNITS:
        (tmp_path / name).write_text((SYSTEMD / name).read_text().replace(METIS, "/bin/true"))
    return tmp_path


@needs_systemd
@pytest.mark.parametrize("name", UNITS.values())
def test_units_are_valid(units: Path, name: str) -> None:
    """`systemd-analyze verify` finds nothing."""
    done = subprocess.run(["systemd-analyze", "verify", units / name], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_units_are_hardened(units: Path, name: str) -> None:
    """`systemd-analyze security` rates the exposure below 1.8 of 10; both are 1.5 or less."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=18", "--no-pager", units / name],
        capture_output=True,
        text=True,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd is too old to examine a file")
    assert done.returncode == 0, done.stdout[-600:] + done.stderr


@pytest.mark.parametrize("name", UNITS)
def test_units_run_commands_that_exist(name: str) -> None:
    """And do not restart what a person has to fix."""
    lines = dict(line.split("=", 1) for line in (SYSTEMD / name).read_text().splitlines() if re.match(r"\w+=", line))
    executable, *words = shlex.split(lines["ExecStart"])
    assert executable == METIS
    check_command(words)
    assert (lines["Restart"], lines["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert float(lines["TimeoutStopSec"]) >= 60


# --- containers -----------------------------------------------------------------------------------------


def copied_names() -> list[str]:
    """What the image is built from."""
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    copies = (line.split()[1:-1] for line in lines if line.startswith("COPY") and "--from" not in line)
    return [name for names in copies for name in names]


@pytest.mark.slow
def test_what_the_image_gets_is_enough_to_build_from(tmp_path: Path) -> None:
    """A wheel is made of the copied files alone."""
    pytest.importorskip("hatchling")
    for name in copied_names():
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=tmp_path, check=True, timeout=600)
    assert list((tmp_path / "dist").glob("*.whl"))


def test_the_dockerfile() -> None:
    """Not root, the torch of the constraints from the index of CPU wheels, a health check, and files that exist."""
    text = (DOCKER / "Dockerfile").read_text()
    steps = re.sub(r"\\\n", " ", text).splitlines()
    assert [line.split()[1] for line in steps if line.startswith("USER")] == ["10001:10001"]
    assert steps.index("USER 10001:10001") > max(i for i, line in enumerate(steps) if line.startswith("RUN"))
    assert "whl/cpu" in text and "grep '^torch==' constraints.txt" in text
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.M)
    for name in copied_names():
        assert (ROOT / name).exists(), name
        assert f"!{name}" in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines(), name
    (health,) = [line for line in steps if line.startswith("HEALTHCHECK")]
    program = json.loads(health.partition("CMD ")[2])
    assert program[:2] == ["python", "-c"] and "/healthz" in program[2]
    compile(program[2], "HEALTHCHECK", "exec")
    assert 'ENTRYPOINT ["metis"]' in steps


def compose() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return dict(yaml.safe_load((DOCKER / "compose.yml").read_text()))


def test_the_compose_file() -> None:
    """A controller and two learners, confined; every volume, file and command is there."""
    document = compose()
    services = document["services"]
    assert set(services) == {"certificates", "controller", "hospital-a", "hospital-b"}
    for name, service in services.items():
        build = service["build"]
        assert (DOCKER / build["context"] / build["dockerfile"]).resolve() == DOCKER / "Dockerfile"
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in document["volumes"], volume
        if name == "certificates":
            for line in service["command"][0].splitlines():
                words = shlex.split(line.partition("||")[2])
                assert words[:2] == ["metis", "certificates"]
        else:
            check_command(service["command"])
    names = [
        service["command"][4].rpartition("/")[2] for key, service in services.items() if key.startswith("hospital")
    ]
    assert f"names = {json.dumps(names)}" in (DOCKER / "federation.toml").read_text()


@pytest.mark.slow
def test_the_federation_of_the_compose_file_under_the_filter_of_the_units(tmp_path: Path) -> None:
    """Its commands as processes: they make certificates, train with torch and end, restricted as systemd would."""
    services = compose()["services"]
    filtered = shutil.which("systemd-analyze") is not None and _can_filter()
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "metis"

    def restricted_by(unit: str) -> str:
        prefix = [sys.executable, str(RESTRICTED), str(SYSTEMD / unit)] if filtered else []
        return shlex.join([*prefix, sys.executable, "-m", "metis.cli.app"])

    wrapper.write_text(f'#!/bin/sh\nexec {restricted_by("metis-controller.service")} "$@"\n')
    wrapper.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def here(word: str, work: str = "work") -> str:
        word = re.sub(r"^/work$", str(tmp_path / work), word)
        word = word.replace("/certificates", str(tmp_path / "certificates")).replace("/state", str(tmp_path / "state"))
        return str(DOCKER / "federation.toml") if word == "/federation.toml" else word

    script = here(services["certificates"]["command"][0])
    (tmp_path / "certificates").mkdir()
    subprocess.run([*services["certificates"]["entrypoint"], script], check=True, env=environment, timeout=600)

    command = [here(word) for word in services["controller"]["command"]]
    more = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--set", "stop.rounds=2"]
    processes = [subprocess.Popen(["metis", *command, *more], env=environment, executable=wrapper)]
    try:
        announced = tmp_path / "state" / "controller.json"
        while not announced.exists():
            assert processes[0].poll() is None, "the controller has ended"
            time.sleep(0.1)
        port = json.loads(announced.read_text())["listen"].rpartition(":")[2]
        wrapper.write_text(f'#!/bin/sh\nexec {restricted_by("metis-learner@.service")} "$@"\n')
        for name in ("hospital-a", "hospital-b"):
            words = [here(word, f"work-{name}") for word in services[name]["command"]]
            words[words.index("controller:7443")] = f"localhost:{port}"
            processes.append(subprocess.Popen(["metis", *words], env=environment, executable=wrapper))
        assert [process.wait(timeout=600) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for folder in (tmp_path / "state" / "run", tmp_path / "work-hospital-a", tmp_path / "work-hospital-b"):
        assert (folder / "community.safetensors").is_file()


def _can_filter() -> bool:
    """Whether libseccomp is here and this kernel takes a filter."""
    unit = str(SYSTEMD / "metis-controller.service")
    done = subprocess.run([sys.executable, str(RESTRICTED), unit, "true"], capture_output=True)
    return done.returncode == 0


@needs_systemd
def test_the_filter_forbids_something() -> None:
    """Else the test above would prove nothing: a call outside of it, ptrace, is refused."""
    if not _can_filter():
        pytest.skip("a filter of system calls cannot be loaded here")
    unit = str(SYSTEMD / "metis-learner@.service")
    program = "import ctypes; print(ctypes.CDLL(None).ptrace(0, 0, 0, 0))"
    without = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if without.stdout != "0\n":
        pytest.skip("ptrace is forbidden here anyway")
    done = subprocess.run(
        [sys.executable, str(RESTRICTED), unit, sys.executable, "-c", program], capture_output=True, text=True
    )
    assert done.stdout == "-1\n"
