"""`metis certificates` as an administrator uses it: what it prints, writes and returns."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("cryptography")
pytest.importorskip("grpc")

from metis.cli.app import app


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def metis(line: str) -> Result:
    return CliRunner().invoke(app, ["certificates", *shlex.split(line)])


def done(line: str) -> str:
    """What a command that succeeds prints; nothing else goes to stderr."""
    result = metis(line)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(line: str) -> str:
    """The one line of a command that is the user's mistake."""
    result = metis(line)
    assert result.exit_code == 2 and result.stdout == "", result.output
    (text,) = result.stderr.splitlines()
    assert text.startswith("error: ")
    return text.removeprefix("error: ")


def held(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture
def ca() -> None:
    done("init ca --name 'Heart consortium'")


@pytest.mark.usefixtures("ca")
def test_from_nothing_to_kits(workplace: Path) -> None:
    """The commands of the documentation, in their order."""
    assert held("ca") == ["ca-key.pem", "ca.pem", "issued.json", "revoked.pem"]
    done("issue main --role controller --host localhost --host 127.0.0.1")
    output = done("issue hospital-a --days 90 --out kits/a")
    assert "learner 'hospital-a': certificate " in output and "wrote the kit kits/a" in output
    assert held("main") == ["ca.pem", "certificate.pem", "key.pem", "revoked.pem"]
    assert held("kits/a") == ["ca.pem", "certificate.pem", "key.pem"]
    output = done("check main --role controller")
    assert "main is valid: controller 'main'" in output and "to be dialled as localhost, 127.0.0.1" in output
    assert "kits/a is valid: learner 'hospital-a'" in done("check kits/a")


def test_the_ca_and_a_kit_show_the_same_fingerprint() -> None:
    (mark,) = [line.split()[6].rstrip(":") for line in done("init ca").splitlines() if "fingerprint" in line]
    done("issue a")
    assert f"the fingerprint of the CA is {mark}" in done("check a")
    assert json.loads(done("check a --json"))["ca"] == mark


@pytest.mark.usefixtures("ca")
def test_nothing_is_overwritten() -> None:
    done("issue a")
    key = Path("a/key.pem").read_bytes()
    assert "already contains a CA" in refused("init ca")
    assert "a already contains a kit (key.pem, certificate.pem)" in refused("issue a")
    assert "already has a certificate" in refused("issue a --out elsewhere")
    assert "already contains a kit" in refused("request a")
    assert "ca contains a CA; choose another --out" in refused("issue b --out ca --force")
    Path("file").touch()
    assert "file is a file" in refused("issue b --out file")
    assert Path("a/key.pem").read_bytes() == key
    done("issue a --force")
    assert Path("a/key.pem").read_bytes() != key
    done("check a")


@pytest.mark.usefixtures("ca")
def test_mistakes_are_told_in_a_line() -> None:
    assert "'a b' is not a valid name" in refused("issue 'a b'")
    assert "needs the names or addresses" in refused("issue main --role controller")
    assert "a learner is not dialled" in refused("issue a --host localhost")
    assert "elsewhere does not contain a CA" in refused("list --ca elsewhere")
    assert "has not issued anything to 'a', nor to anybody else" in refused("renew a")
    assert "has not issued anything to 'a'" in refused("revoke a")
    assert "there is no kit nowhere" in refused("check nowhere")
    assert "request.csr is missing" in refused("issue a --request request.csr")
    done("issue a")
    assert "but this is a controller" in refused("check a --role controller")
    assert "'somewhere' is not a valid address; write HOST:PORT" in refused("check a --controller somewhere")
    assert "is not a valid address; write HOST:PORT" in refused("check a --controller host:99999")
    assert metis("issue a --role king").exit_code == 2
    assert metis("issue a --days 0").exit_code == 2


@pytest.mark.usefixtures("ca")
def test_a_key_that_never_leaves_its_site(workplace: Path) -> None:
    """request at the site, issue --request at the CA, two files back; both see the same fingerprint."""
    asked = done("request hospital-b --out site")
    assert "waits for its certificate" in refused("check site")
    assert "asks for the name hospital-b, not for hospital-c" in refused("issue hospital-c --request site/request.csr")
    signed = done("issue hospital-b --request site/request.csr --out back")
    mark = asked.split("made the key ")[1].split()[0]
    assert f"signed the site's key {mark}:" in signed
    assert held("back") == ["ca.pem", "certificate.pem"]
    for name in ("ca.pem", "certificate.pem"):
        Path("site", name).write_bytes(Path("back", name).read_bytes())
    assert "site is valid: learner 'hospital-b'" in done("check site --role learner")
    output = done("renew hospital-b --out next")
    assert "send next/certificate.pem to the site" in output
    Path("site/certificate.pem").write_bytes(Path("next/certificate.pem").read_bytes())
    done("check site")


@pytest.mark.usefixtures("ca")
def test_a_request_for_a_kit_that_was_there_leaves_no_old_key() -> None:
    done("issue a")
    done("request a --out site")
    assert "send a/ca.pem and a/certificate.pem" in done("issue a --request site/request.csr --out a --force")
    assert held("a") == ["ca.pem", "certificate.pem"]


@pytest.mark.usefixtures("ca")
def test_a_request_made_on_the_machine_of_the_ca_keeps_its_key() -> None:
    """The folder of the request and of the kit are one by default."""
    done("request a")
    key = Path("a/key.pem").read_bytes()
    assert "the kit a is complete" in done("issue a --request a/request.csr")
    assert Path("a/key.pem").read_bytes() == key
    done("check a")


@pytest.mark.usefixtures("ca")
def test_renewing_in_place() -> None:
    done("issue a --days 5")
    key = Path("a/key.pem").read_bytes()
    first = json.loads(done("check a --json"))
    assert ["expires in 4 days" in line for line in first["warnings"]] == [True]
    result = metis("check a")
    assert result.exit_code == 0 and result.stderr.startswith("note: the certificate of learner 'a' expires in 4 days")
    assert "replaced a/certificate.pem; the key is the same" in done("renew a")
    second = json.loads(done("check a --json"))
    assert second["serial"] != first["serial"] and second["warnings"] == []
    assert Path("a/key.pem").read_bytes() == key
    done("issue b")
    assert "b/key.pem is not the key of 'a'" in refused("renew a --out b")
    assert "ca contains a CA" in refused("renew a --out ca")


@pytest.mark.usefixtures("ca")
def test_revoking_says_what_is_left_to_do() -> None:
    done("issue main --role controller --host localhost")
    done("issue a")
    output = done("revoke a")
    assert "revoked 'a': 1 certificate (" in output and "now copy ca/revoked.pem into the controller's kit" in output
    assert "is the kit of learner 'a', not of a controller" in refused("revoke a --kit a")
    output = done("revoke a --kit main")
    assert "'a' was already revoked" in output and "wrote main/revoked.pem" in output
    assert Path("main/revoked.pem").read_bytes() == Path("ca/revoked.pem").read_bytes()
    assert "was revoked on" in refused("renew a")
    done("revoke main --kit main")
    assert "main: certificate" in refused("check main") and "was revoked on" in refused("check main")


@pytest.mark.usefixtures("ca")
def test_the_list() -> None:
    done("issue b --days 5")
    done("issue a")
    done("renew b")
    done("revoke a")
    rows = json.loads(done("list --json"))
    assert [(row["name"], row["role"], row["state"]) for row in rows] == [
        ("a", "learner", "revoked"),
        ("b", "learner", "replaced"),
        ("b", "learner", "valid"),
    ]
    assert set(rows[0]) == {"name", "role", "serial", "valid_until", "state", "hosts", "issued", "revoked"}
    table = done("list")
    assert rows[0]["serial"] in table and f"revoked on {rows[0]['revoked'][:10]}" in table


@pytest.mark.usefixtures("ca")
def test_checking_the_way_to_a_controller() -> None:
    """The same words that a learner would say, without starting one."""
    from deployment.consortium import serving
    from metis.deployment.security.identity import load_kit

    done("issue main --role controller --host 127.0.0.1")
    done("issue a")

    async def play() -> tuple[Result, Result, int]:
        async with serving(load_kit("main")) as port:
            good = await asyncio.to_thread(metis, f"check a --controller 127.0.0.1:{port}")
            bad = await asyncio.to_thread(metis, f"check a --controller localhost:{port}")
            return good, bad, port

    good, bad, port = asyncio.run(play())
    assert good.exit_code == 0, good.output
    assert f"the controller at 127.0.0.1:{port} and this kit accept each other" in good.stdout
    assert bad.exit_code == 2 and "is not for localhost but for 127.0.0.1;" in bad.stderr
    assert "nothing listens at 127.0.0.1" in refused(f"check a --controller 127.0.0.1:{port}")


def test_it_works_as_a_program_and_says_what_is_missing(workplace: Path) -> None:
    """`python -m metis.cli.app`, and a machine where the extra packages were not installed."""
    folder, root = str(workplace / "ca"), Path(__file__).parents[2]
    command = [sys.executable, "-m", "metis.cli.app", "certificates", "init", folder]
    made = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert made.returncode == 0 and f"made the CA 'Metis federation' in {folder}" in made.stdout, made.stderr
    program = (
        "import sys\nsys.modules['cryptography'] = None\n"
        "from metis.cli.app import main\nsys.argv = ['metis', 'certificates', 'list']\nmain()"
    )
    bare = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root)
    assert bare.returncode == 2, bare.stderr
    assert "a real federation needs the package cryptography; in your clone of Metis run:" in bare.stderr
