"""What an administrator may get wrong: reported in one sentence with the remedy, before anything is begun."""

from __future__ import annotations

import re
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

from deployment.chaos.harness import Federation, Outcome, Tally, events, metis

OTHER_NETWORK = "\ndef network():\n    return nn.Linear(20, 7)\n"
# What is changed in the file or the command, and what the message must contain.
MISTAKES: list[tuple[str, list[str], tuple[str, ...]]] = [
    ("lambda = 0", ["--set", "policy.slowest_learner_epochs=0"], ("is 0, must be greater than 0",)),
    ("minimum > learners", ["--set", "deployment.minimum=5"], ("deployment.minimum is 5", "must be between 1 and 2")),
    ("unknown key", ["--set", "deployment.minimun=1"], ("unknown key", "did you mean 'minimum'")),
    ("unknown policy", ["--set", "policy.name=semisinc_fedavg"], ("no policy", "did you mean 'semisync_fedavg'")),
    ("no site file", ["--set", "site.file=nowhere.py"], ("there is no file", "nowhere.py")),
    ("no file", [], ("there is no file missing.toml", "metis init")),
    ("lease < heartbeat", ["--set", "deployment.lease=0.6"], ("deployment.lease is 0.6 s", "at least twice")),
    ("name for no certificate", [], ("'north east' is not a valid name", "allowed are")),
    ("two of a name", [], ("'a', which another learner is called already",)),
    ("no end", [], ("the run would not end", "give rounds")),
    ("no TOML", [], ("damaged.toml",)),
    ("no network in the site file", ["--set", "site.file=empty.py"], ("has no network", "def network()")),
    ("site file with an error", ["--set", "site.file=broken.py"], ("broken.py:2", "no_such_thing")),
    ("port in use", [], ("the port is in use",)),
    ("status port in use", [], ("the port is in use",)),
    ("not an address", ["--listen", "here"], ("'here' is not a valid address", "HOST:PORT")),
    ("open to others without certificates", ["--listen", "0.0.0.0:0"], ("--insecure works on one machine only",)),
    ("state folder is a file", [], ("cannot be opened",)),
    (
        "another file for a run that was begun",
        ["--set", "training.learning_rate=0.5"],
        ("another [policy]", "learning_rate was 0.0001, is 0.5"),
    ),
]
QUICK = ("lambda = 0", "minimum > learners", "unknown key", "port in use")


def row_40(tmp: Path, times: int) -> Outcome:
    """administrator: wrong model, unknown keys, lambda = 0, minimum > learners, port in use, ..."""
    tally, longest = Tally(), 0.0
    chosen = [mistake for mistake in MISTAKES if times > 1 or mistake[0] in QUICK]
    for what, extra, words in chosen:
        tally.tried += 1
        here = Federation(tmp / re.sub(r"\W+", "-", what), ("a", "b"), policy="semi-synchronous")
        command, undo = _made(what, here)
        began = time.monotonic()
        done = metis(*command, *extra, cwd=here.folder)
        longest = max(longest, time.monotonic() - began)
        undo()
        text = done.stdout + done.stderr
        errors = [line for line in text.splitlines() if line.startswith("error:")]
        tally.check(done.returncode == 2 and len(errors) == 1, f"{what}: exit {done.returncode}: {text[-300:]}")
        for needed in words:
            tally.check(needed in text, f"{what}: it does not say '{needed}': {text[-300:]}")
        tally.check("Traceback" not in text, f"{what}: a traceback")
        if what != "another file for a run that was begun":
            tally.check(not (here.state / "run").exists(), f"{what}: a run was begun")
    if times > 1:
        _wrong_model(tally, tmp / "model")
    return tally.outcome(
        "refuses before the start, exit 2, one sentence with the remedy; nothing is begun",
        f"{tally.tried} mistakes refused so, each in {longest:.1f} s at most (start of the process included)",
    )


def _made(what: str, here: Federation) -> tuple[list[object], Callable[[], object]]:
    """The command with this mistake, and what ends whatever was needed for it."""
    command = here.command()
    file = here.file.read_text()
    match what:
        case "no file":
            command[1] = "missing.toml"
        case "no TOML":
            (here.folder / "damaged.toml").write_text("[policy\n")
            command[1] = "damaged.toml"
        case "name for no certificate":
            here.file.write_text(file.replace('"b"', '"north east"'))
        case "two of a name":
            here.file.write_text(file.replace('"b"', '"a"'))
        case "no end":
            here.file.write_text(file.replace("rounds = 1000000", ""))
        case "no network in the site file":
            (here.folder / "empty.py").write_text("def netwrk():\n    return None\n")
        case "site file with an error":
            (here.folder / "broken.py").write_text("import os\nimport no_such_thing\n")
        case "state folder is a file":
            here.state.write_text("")
        case "port in use" | "status port in use":
            taken = socket.create_server(("127.0.0.1", here.port if what == "port in use" else here.http_port))
            return command, taken.close
        case "another file for a run that was begun":
            here._begin(106)
    return command, lambda: None


def _wrong_model(tally: Tally, folder: Path) -> None:
    """A site with another network reads which tensor differs; the federation goes on without it."""
    tally.tried += 1
    soon = "lease = 20\nheartbeat = 0.5\nwait_seconds = 1\n"
    with Federation(folder, ("a", "b"), policy="asynchronous", deployment=soon) as here:
        here.start()
        with here.learner("a", "--pace", 0.05) as right:
            other = folder / "other"
            other.mkdir()
            shutil.copy(folder / "site.py", other / "site.py")
            with (other / "site.py").open("a") as file:
                file.write(OTHER_NETWORK)
            with here.learner("b", "--site", other / "site.py") as wrong:
                code = wrong.wait()
                text = wrong.text()
                tally.check(code == 2, f"a learner with another network ended with {code}: {text[-300:]}")
                tally.check("weight" in text and "Traceback" not in text, f"it says {text[-300:]}")
            right.wait_for("handed in", 2)
            tally.check(not events(here, "learner_joined", "b"), "a learner with another network has joined")
