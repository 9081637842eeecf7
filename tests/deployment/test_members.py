"""Members of a federation whose controller does not run, by the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from metis.cli.app import app
from metis.deployment.controller.audit import AUDIT, read_audit
from metis.deployment.controller.members import Members
from metis.deployment.controller.state import State


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The state of a run that has begun."""
    return begun(tmp_path / "state", {"file": "site.py"})


def begun(folder: Path, site: dict[str, str] | None) -> Path:
    learners = [{"name": "all", "names": ["a", "b"], "count": 2}, {"name": "c", "count": 1}]
    with State.open(folder, "process") as state:
        state.begin({"experiment": {"learners": learners, "site": site}})
        state.append(3.0, {"at": 3.0, "event": "learner_joined", "learner": "a", "examples": 1, "batch_size": 1})
    return folder


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["members", *map(str, words)])
    return result.exit_code, result.stdout + result.stderr


def listed(folder: Path) -> dict[str, Any]:
    code, text = run("list", "--state", folder, "--json")
    assert code == 0
    return dict(json.loads(text))


def test_they_are_journaled_and_audited(folder: Path) -> None:
    """As the running controller would journal them, at the time of the latest event; the next start replays them."""
    assert run("add", "d", "--state", folder, "--watts", 300) == (0, "'d' was added; the next start counts it\n")
    assert run("add", "d", "--state", folder) == (0, "'d' is a member already\n")
    assert run("remove", "b", "--state", folder, "--withdraw")[0] == 0
    assert run("remove", "b", "--state", folder) == (0, "'b' is not a member\n")
    code, text = run("remove", "hospital", "--state", folder)
    assert code != 0 and "there is no member 'hospital'; the members are a, c-1, d" in " ".join(text.split())

    found = listed(folder)
    assert [member["name"] for member in found["members"]] == ["a", "c-1", "d"] and found["removed"] == ["b"]
    with State.open(folder, "process") as state:
        added, removed = [entry.record for entry in state.entries()][1:]
    assert added == {"at": 3.0, "event": "member_added", "learner": "d", "active": 300.0, "idle": None, "unit": "watt"}
    assert removed == {"at": 3.0, "event": "member_removed", "learner": "b", "withdraw": True}
    assert [line.record["kind"] for line in read_audit(folder / AUDIT)] == ["member_added", "member_removed"]


def test_a_folder_in_use_is_left_alone(folder: Path) -> None:
    """A running controller is asked over the wire instead; listing works all the same."""
    with State.open(folder, "process"):
        code, text = run("add", "d", "--state", folder)
        assert code == 2 and "is in use by a controller" in text
        assert len(listed(folder)["members"]) == 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("add", "d"), "name either a running controller, --controller HOST:PORT, or the folder of a stopped one"),
        (("add", "../d", "--state", "FOLDER"), "'../d' is not a valid name"),
        (("add", "d", "--state", "nowhere"), "nowhere is not the state folder of a controller"),
        (("list", "--state", "nowhere"), "nowhere is not the state folder of a controller"),
        (("list", "--controller", "127.0.0.1:1"), "give your certificate, --identity KIT, or --insecure"),
        (("list", "--controller", "127.0.0.1:1", "--insecure"), "127.0.0.1:1"),
        (("list", "--controller", "example.org:7443", "--insecure"), "--insecure works on one machine only"),
    ],
)
def test_mistakes_get_one_sentence(folder: Path, words: tuple[str, ...], sentence: str) -> None:
    code, text = run(*(str(folder) if word == "FOLDER" else word for word in words))
    assert code == 2 and sentence in text and "Traceback" not in text


def test_a_data_set_that_is_divided_among_all_cannot_have_one_more(tmp_path: Path) -> None:
    """But a learner of the file comes back."""
    folder = begun(tmp_path / "state", None)
    code, text = run("add", "d", "--state", folder)
    assert code == 2 and "divides a built-in data set" in text
    run("remove", "b", "--state", folder)
    assert run("add", "b", "--state", folder)[0] == 0


def test_indices_are_never_reused() -> None:
    """With the seed they decide a learner's random draws."""
    members = Members(("a", "b"), {"c": True, "a": False}, ("a",))
    assert [members.index(name) for name in ("a", "b", "c", "d")] == [0, 1, 2, 3]
    assert "a" not in members and members.names == ["b", "c"] and members.removed("a")
    everybody = Members(None, {"x": False}, ())
    assert "anyone" in everybody and "x" not in everybody


def test_a_proxy_can_be_named(tmp_path: Path) -> None:
    """For every command that dials the controller, in front of and behind which there may be one."""
    at = ("--controller", "127.0.0.1:1", "--insecure", "--proxy", "https://proxy.example.org:3128")
    texts = [run("list", *at)[1], CliRunner().invoke(app, ["admin", *at, "status"]).output]
    for text in texts:
        assert "the proxy must speak plain HTTP" in " ".join(text.split())
