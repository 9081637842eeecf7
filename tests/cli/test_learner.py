"""`metis learner` as a site's administrator uses it: what it refuses, what it prints and returns."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("cryptography")
pytest.importorskip("grpc")

import metis
from deployment.consortium import DAY, Consortium
from deployment.scripted_controller import ScriptedController
from deployment.tiny import settings, write_site
from metis.cli.app import app
from metis.deployment.learner.outgoing import FIELDS
from metis.deployment.security.identity import now_utc, server_credentials
from metis.deployment.wire import wire_pb2 as pb


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--controller nowhere --insecure --name a", "'nowhere' is not a valid address; write HOST:PORT, as in "
         "federation.example.org:7443"),
        ("--controller localhost:99999 --insecure --name a", "'localhost:99999' is not a valid address; write "
         "HOST:PORT, as in federation.example.org:7443"),
        ("--controller localhost:1", "a learner needs its certificate: --identity DIR (made by metis certificates "
         "issue), or --insecure --name NAME for a controller on this machine"),
        ("--controller localhost:1 --insecure", "with --insecure there is no certificate with the name of this "
         "learner: give --name NAME"),
        ("--controller example.org:7443 --insecure --name a", "--insecure is only for a controller on this "
         "machine, and example.org is another one; give --identity DIR, or dial 127.0.0.1:7443"),
        ("--controller localhost:1 --insecure --name a --identity kit", "--insecure and --identity exclude each "
         "other: with a certificate the connection is always encrypted"),
        ("--controller localhost:1 --insecure --name a --site nowhere.py", "there is no site file nowhere.py"),
        ("--controller localhost:1 --insecure --name a --pace -1", "--pace is -1; it must be 0 seconds or more"),
        ("--controller localhost:1 --identity kit", "there is no kit kit; it is a folder with ca.pem, certificate.pem "
         "and key.pem"),
        ("--insecure --name a", "give --controller HOST:PORT, where the controller listens"),
        ("--dry-run", "a dry run needs this site's network and data: give --site FILE, --federation FILE, or both"),
        ("--controller localhost:1 --federation f.toml", "--federation is for --dry-run; otherwise the controller "
         "sends what is in that file"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_exit_code_2(line: str, sentence: str) -> None:
    """Before anything is dialled or written."""
    done = CliRunner().invoke(app, ["learner", *shlex.split(line)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"error: {sentence}\n"
    assert not list(Path().iterdir())


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC is not part of a plain installation."""
    for name in [name for name in sys.modules if name.startswith(("metis.deployment", "grpc"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    done = CliRunner().invoke(app, ["learner", "--controller", "localhost:1", "--insecure", "--name", "a"])
    assert done.exit_code == 2
    assert done.stderr == (
        "error: a real federation needs the package grpc; in your clone of Metis run: pip install '.[deploy]'\n"
    )


def test_a_kit_must_be_a_learners_and_in_date(tmp_path: Path) -> None:
    """And the name is the certificate's; nobody can choose another one."""
    consortium = Consortium(tmp_path / "consortium")
    consortium.controller()
    consortium.kit("zurich")
    consortium.kit("late", days=30, made=now_utc() - 60 * DAY)

    def refused(*more: str) -> str:
        done = CliRunner().invoke(app, ["learner", "--controller", "localhost:1", *more])
        assert done.exit_code == 2
        return done.stderr

    assert "belongs to controller 'main', but this is a learner" in refused("--identity", "consortium/main")
    assert "the certificate of learner 'late' expired on " in refused("--identity", "consortium/late")
    named = refused("--identity", "consortium/zurich", "--name", "basel")
    assert "--name is 'basel', but the certificate in consortium/zurich belongs to 'zurich'; leave --name out" in named


def test_impossible_peers_are_found_before_anything_is_dialled(tmp_path: Path) -> None:
    """In one sentence, by the learner and by its dry run."""
    consortium, site = Consortium(tmp_path / "consortium"), write_site(tmp_path)
    kit = consortium.kit("zurich")
    few = "peers names 3 learners; with colluders = 0 a masked sum needs 4 or more, this site included"
    others = "the site policy names peers (a, b, c, d) without this site, 'zurich'"
    for peers, said in ('["zurich", "a", "b"]', f"site-policy.toml: {few}"), ('["a", "b", "c", "d"]', others):
        (kit.folder / "site-policy.toml").write_text(f"peers = {peers}\n")
        for options in (["--controller", "localhost:1"], ["--dry-run"]):
            done = CliRunner().invoke(app, ["learner", *options, "--identity", str(kit.folder), "--site", str(site)])
            assert (done.exit_code, done.stderr) == (2, f"error: {said}\n")


async def _run(*arguments: str) -> tuple[int, str, str]:
    home = str(Path(metis.__file__).resolve().parents[1])  # the working directory is another one than pytest's
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "metis.cli.app", "learner", *arguments, env={**os.environ, "PYTHONPATH": home},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stdout.decode(), stderr.decode()


def _with_controller(folder: Path, story: Callable[[ScriptedController], Coroutine[Any, Any, None]]) -> None:
    site = write_site(folder)
    controller = ScriptedController(site, settings(site), folder)
    asyncio.run(story(controller))


def test_a_learner_is_known_by_its_certificate(tmp_path: Path) -> None:
    """mTLS on both sides; lines have the time of day, the work folder the learner's name."""
    consortium = Consortium(tmp_path / "consortium")
    kit = consortium.kit("zurich")

    async def story(controller: ScriptedController) -> None:
        controller.credentials = server_credentials(consortium.controller())
        async with controller:
            running = asyncio.ensure_future(
                _run("--controller", controller.address, "--identity", str(kit.folder), "--site", "site.py")
            )
            stream = await controller.welcomed()
            assert stream.name == "zurich"
            await stream.beats(1)
            stream.send(farewell=pb.Farewell(kind=pb.Farewell.REFUSED, reason="the federation is full"))
            code, stdout, stderr = await running
        assert (code, stdout) == (2, "")
        lines = [line for line in stderr.splitlines() if "prepar" not in line]
        assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines] == [
            f"connected to {controller.address} as 'zurich', run run-1",
            "error: the controller refuses this learner: the federation is full",
        ]
        assert (tmp_path / "learner-zurich" / "membership.json").exists()

    _with_controller(tmp_path, story)


def test_the_wrong_authority_is_named_before_anything_is_sent(tmp_path: Path) -> None:
    """Where gRPC would say "Socket closed" for ever."""
    theirs, ours = Consortium(tmp_path / "theirs", "Theirs"), Consortium(tmp_path / "ours")
    kit = ours.kit("zurich")

    async def story(controller: ScriptedController) -> None:
        controller.credentials = server_credentials(theirs.controller())
        async with controller:
            code, stdout, _ = await _run("--controller", controller.address, "--identity", str(kit.folder), "--json")
        assert code == 2
        assert "is not signed by our CA: it is signed by 'Theirs', but the CA of this kit is 'Ours'" in stdout
        assert controller.streams.empty()

    _with_controller(tmp_path, story)


def test_a_dry_run_shows_every_field_and_dials_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the values that this site would send, as coarse as its policy says; nothing is written either."""
    import grpc

    def dial(*_: object, **__: object) -> None:
        raise AssertionError("a dry run dials nobody")

    monkeypatch.setattr(grpc.aio, "insecure_channel", dial)
    monkeypatch.setattr(grpc.aio, "secure_channel", dial)
    site = write_site(tmp_path)
    (tmp_path / "rules.toml").write_text("metric_decimals = 1\n")
    before = sorted(tmp_path.iterdir())
    done = CliRunner().invoke(app, ["learner", "--dry-run", "--site", str(site), "--policy", "rules.toml", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    fields = {row["field"]: row["value"] for row in document["fields"]}
    assert (document["sent"], document["policy"]["rules"]) == (False, {"metric_decimals": 1})
    assert fields.keys() == FIELDS.keys()
    assert (fields["Ready.examples"], fields["UploadHeader.steps"], fields["Hello.run"]) == (40, 1, None)
    assert fields["UploadHeader.loss"] == round(fields["UploadHeader.loss"], 1)
    assert all(value == round(value, 1) for value in fields["Evaluation.metrics"].values())
    assert fields["Evaluation.sums"] is None, "sums are exact: they stay where metrics are rounded"
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "__pycache__"] == before
    assert document["refused"] == [] and not document["masked"]
    done = CliRunner().invoke(app, ["learner", "--dry-run", "--site", str(site), "--json"])
    fields = {row["field"]: row["value"] for row in json.loads(done.stdout)["fields"]}
    total, examples = fields["Evaluation.sums"]["loss"]
    assert (total / examples, examples) == (fields["Evaluation.metrics"]["loss"], fields["Evaluation.examples"])


_MASKED = """
[site]
file = "site.py"
[[learners]]
name = "all"
names = ["a", "b", "c", "d"]
batch_size = 10
time_per_batch = 0.1
[policy]
name = "sync_fedavg"
local_epochs = 1
[stop]
rounds = 3
"""


@pytest.mark.parametrize(
    ("masks", "rules", "refused"),
    [
        ("", 'peers = ["a", "b", "c", "d"]', "its model would not be masked, and this site wants a sum with peers"),
        ("", "min_masked_members = 4", "wants a sum with 4 members (min_masked_members)"),
        ("[policy.secure_sum]", "", "does not name the learners to take part with (peers)"),
        ("[policy.secure_sum]", 'peers = ["a", "b", "c", "e"]', "d is not among the peers of this policy"),
        ("[policy.secure_sum]", 'peers = ["a", "b", "c", "d", "e"]\nmin_masked_members = 5', "this site wants 5"),
        ("[policy.secure_sum]", 'peers = ["a", "b", "c", "d"]\nmin_masked_members = 4', ""),
    ],
)
def test_a_dry_run_knows_what_the_policy_would_refuse(tmp_path: Path, masks: str, rules: str, refused: str) -> None:
    """Before anything is dialled: a sum that is not masked, with strangers, or with too few members."""
    from metis.cli.dry_run import refusals
    from metis.deployment.learner.site_policy import PolicyFile
    from metis.experiments.config.load import load_config

    write_site(tmp_path)
    (tmp_path / "federation.toml").write_text(_MASKED.replace("[stop]", f"{masks}\n[stop]"))
    (tmp_path / "rules.toml").write_text(rules + "\n")
    found = refusals(load_config(tmp_path / "federation.toml", []), PolicyFile(tmp_path / "rules.toml").read())
    assert bool(found) == bool(refused) and refused in " ".join(found)


def test_a_dry_run_of_a_masked_round_with_noise_and_a_budget(tmp_path: Path) -> None:
    """No loss, no evaluation, the steps that the budget allows; what would be refused is said in a sentence."""
    pytest.importorskip("dp_accounting")
    site = write_site(tmp_path)
    (tmp_path / "federation.toml").write_text(_MASKED.replace("[stop]", "[policy.secure_sum]\n[stop]"))
    (tmp_path / "rules.toml").write_text('peers = ["a", "b", "c", "e"]\nprivacy = { noise = 1.0, budget = 8.0 }\n')
    options = ["--site", str(site), "--policy", "rules.toml", "--federation", "federation.toml", "--name", "a"]
    done = CliRunner().invoke(app, ["learner", "--dry-run", *options, "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    fields = {row["field"]: row["value"] for row in document["fields"]}
    assert document["masked"] and document["refused"] == ["d is not among the peers of this policy"]
    assert fields["Ready.steps_left"] > 0 and fields["Evaluation.metrics"] is None
    assert fields["UploadHeader.loss"] is None or math.isnan(fields["UploadHeader.loss"])
