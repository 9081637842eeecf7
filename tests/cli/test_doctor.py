"""`metis doctor` at both ends: what it finds with real certificates, a real server, disk and trainer."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("cryptography")
pytest.importorskip("grpc")

from deployment.consortium import DAY, Consortium, serving
from deployment.tiny import write_site
from metis.cli.app import app
from metis.deployment import doctor
from metis.deployment.doctor import Finding, examine
from metis.deployment.security.identity import now_utc

FEDERATION = """
policy.name = "sync_fedavg"
stop.rounds = 1
site.file = "site.py"
deployment.listen = "127.0.0.1:{port}"
[[learners]]
name = "hospitals"
names = ["a", "b"]
batch_size = 8
time_per_batch = 0.01
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("https_proxy", "http_proxy", "grpc_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without asking torch for devices, which takes seconds."""
    monkeypatch.setattr(doctor, "check_device", lambda device: Finding("device", "ok", "not asked in this test"))


def metis(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def findings(result: Result) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(result.stdout)["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return found


@pytest.mark.slow
def test_a_site_where_all_is_well(workplace: Path) -> None:
    """A controller that takes our certificate, a disk, a device, and one batch of the site's own code."""
    consortium = Consortium(workplace)
    main, kit = consortium.controller(), consortium.kit("a")
    write_site(workplace)

    async def story() -> Result:
        async with serving(main) as port:
            return await asyncio.to_thread(
                metis, "--controller", f"localhost:{port}", "--identity", str(kit.folder), "--site", "site.py", "--json"
            )

    result = asyncio.run(story())
    assert result.exit_code == 0, result.output
    found = findings(result)
    assert found["controller"][0]["text"].startswith("localhost:")
    assert "and accepts our certificate, in " in found["controller"][0]["text"]
    assert "learner 'a', valid until" in found["certificate"][0]["text"]
    assert found["trial"][0]["text"].startswith("one batch of 16 in ") and "a model has" in found["trial"][0]["text"]
    assert [finding["level"] for finding in found["bandwidth"]] == ["unknown"]
    assert {path.name for path in workplace.iterdir()} == {"ca", "main", "a", "site.py"}, "nothing is left behind"


@pytest.mark.usefixtures("quick")
def test_one_problem_does_not_hide_another(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expired certificate, an unknown host, a proxy with a password: each has its line, and the code is 1."""
    consortium = Consortium(workplace)
    kit = consortium.kit("a", days=10, made=now_utc() - 30 * DAY)
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy.invalid:3128")
    result = metis("--controller", "no-such-host.invalid:7443", "--identity", str(kit.folder), "--json")
    assert result.exit_code == 1
    found = findings(result)
    assert "expired on" in found["certificate"][0]["text"] and found["certificate"][0]["level"] == "problem"
    assert "the proxy proxy.invalid:3128 (from https_proxy)" in found["proxy"][0]["text"]
    assert "the proxy resolves no-such-host.invalid" in found["name"][0]["text"] and "secret" not in result.output
    assert found["controller"][0]["level"] == "problem"
    assert {"versions", "clock", "disk", "memory", "open files", "device"} <= found.keys()


@pytest.mark.usefixtures("quick")
def test_a_certificate_that_ends_soon_is_a_warning(workplace: Path) -> None:
    """With what to do; a warning alone does not fail."""
    kit = Consortium(workplace).kit("a", days=40, made=now_utc() - 30 * DAY)
    warned = list(examine([("certificate", lambda: doctor.check_certificate(kit.folder, "learner"))]))
    assert [finding.level for finding in warned] == ["ok", "warning", "unknown"]
    assert warned[1].text.startswith("the certificate of learner 'a' expires in ")
    assert warned[1].advice == "metis certificates renew a, at the CA"


@pytest.mark.slow
def test_a_controller(workplace: Path) -> None:
    """Its file, its certificate and list, its port and its held-out data; the port may be taken."""
    consortium = Consortium(workplace)
    main = consortium.controller()
    write_site(workplace, "def test_data():\n    return training_data('a')\n")
    Path("federation.toml").write_text(FEDERATION.format(port=0))
    result = metis("federation.toml", "--identity", str(main.folder), "--json")
    assert result.exit_code == 0, result.output
    found = findings(result)
    assert "federation of 2 learners" in found["file"][0]["text"]
    assert [finding["text"] for finding in found["certificate"][1:]] == ["revoked.pem is in order"]
    assert "127.0.0.1:0 is free" in found["port"][0]["text"]
    assert found["trial"][0]["text"].startswith("one evaluation in ")


@pytest.mark.usefixtures("quick")
def test_a_port_that_is_taken_and_code_that_fails(workplace: Path) -> None:
    """In a terminal each is one line, with what to do."""
    Path("site.py").write_text("raise RuntimeError('broken here')\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        Path("federation.toml").write_text(FEDERATION.format(port=taken.getsockname()[1]))
        result = metis("federation.toml")
    assert result.exit_code == 1
    lines = {line.split()[1]: line for line in result.stdout.splitlines()}
    assert lines["port"].startswith("problem  port") and "the port is in use" in lines["port"]
    assert (
        lines["code"].startswith("problem  code")
        and "broken here" in lines["code"]
        and "→ fix the site" in lines["code"]
    )


def test_an_error_in_a_check_is_a_finding() -> None:
    """And the next check runs."""

    def broken() -> Finding:
        raise ZeroDivisionError("oh")

    found = list(examine([("first", broken), ("second", lambda: Finding("second", "ok", "fine"))]))
    assert [finding.level for finding in found] == ["problem", "ok"]
    assert found[0].text.startswith("could not be checked: ") and "ZeroDivisionError: oh" in found[0].text


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc is one, also for root."""
    room, written = doctor.check_disk(Path("/proc/metis"), "the work folder")
    assert "the work folder /proc/metis" in room.text
    assert written.level == "problem" and written.text.startswith("/proc cannot be written: ")


def test_one_end_at_a_time() -> None:
    """Neither or both is a mistake."""
    for arguments in ((), ("federation.toml", "--controller", "localhost:7443")):
        result = metis(*arguments)
        assert result.exit_code == 2 and "give FILE to examine a controller, or --controller" in result.output
