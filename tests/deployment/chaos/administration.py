"""An administrator changes members, pauses, extends and rolls back, while processes are killed in between."""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

from deployment.chaos.harness import (
    METIS,
    Crowd,
    Federation,
    Outcome,
    Tally,
    environment,
    events,
    journal,
    metis,
    recompute,
    until,
)
from metis.deployment.controller.audit import AUDIT, read_audit

LIGHT: dict[str, Any] = {"policy": "semi-synchronous", "numbers": 2000}


def admin(here: Federation, *words: object) -> dict[str, Any]:
    """What an administrator's command answers; one that is refused is a mistake of the row."""
    found = metis("admin", "--controller", here.address, "--insecure", *words, "--json", cwd=here.folder)
    assert found.returncode == 0, found.stderr
    return dict(json.loads(found.stdout))


def members(here: Federation, *words: object) -> dict[str, Any]:
    found = metis("members", *words, "--controller", here.address, "--insecure", "--json", cwd=here.folder)
    assert found.returncode == 0, found.stderr
    return dict(json.loads(found.stdout))


def audited(here: Federation, tally: Tally) -> int:
    """How many lines the audit log has; its chain must be whole."""
    lines = list(read_audit(here.state / AUDIT))
    for line in lines:
        tally.check(line.problem is None, f"line {line.number} of the audit log is broken: {line.problem}")
    return len(lines)


def row_44(tmp: Path, times: int) -> Outcome:
    """members are removed and added while learners train, and the controller is killed in between"""
    tally, lines = Tally(), 0
    with Federation(tmp, **LIGHT) as here:
        controller = here.start()
        with Crowd(here, pace=0.03) as crowd:
            here.advance(2)
            for number in range(times):
                tally.tried += 1
                name = here.names[number % len(here.names)]
                removed = len(events(here, "member_removed"))
                members(here, "remove", name, *(["--withdraw"] if number % 2 else []))
                tally.check(
                    len(events(here, "member_removed")) == removed + 1, f"'{name}' is not removed in the journal"
                )
                if number % 2:
                    controller.kill()
                    controller = here.start()
                listed = members(here, "list")
                tally.check(listed["removed"] == [name], f"after removing '{name}' {listed['removed']} are removed")
                here.advance(2)
                trained = [event["learner"] for event in events(here, "update_request")[-4:]]
                tally.check(name not in trained, f"'{name}' trained after it was removed")
                members(here, "add", name)
                gone = next(learner for learner in crowd.learners if learner.name == name)
                until(lambda gone=gone: gone.farewell is not None or gone.refused is not None, "it was sent away")
                gone.farewell = gone.refused = None
                crowd.come_back(name)
                joined = len(events(here, "learner_joined", name))
                until(
                    lambda name=name, joined=joined: len(events(here, "learner_joined", name)) >= joined, "it is back"
                )
                here.advance(2)
            lines = audited(here, tally)
            here.finish()
            crowd.join()
            tally.problems += recompute(here, crowd).problems
    return tally.outcome(
        "a removed one trains no more, one that is added again does; both outlive a kill; every model is what the "
        "journal says",
        f"{tally.tried} members removed and added again, {lines} audited lines, chain whole",
    )


def row_45(tmp: Path, times: int) -> Outcome:
    """the federation is paused and resumed, and the controller is killed in the pause"""
    tally = Tally()
    with Federation(tmp, **LIGHT) as here:
        controller = here.start()
        with Crowd(here, pace=0.03) as crowd:
            for number in range(times):
                here.advance(2)
                tally.tried += 1
                admin(here, "pause")
                until(lambda: all(row["task"] is None for row in here.status()["learners"]), "open tasks have ended")
                before = here.status()
                if number % 2:
                    controller.kill()
                    controller = here.start()
                time.sleep(1.0)
                after = here.status()
                tally.check(after["state"] == "paused", f"it is {after['state']} and not paused")
                tally.check(after["version"] == before["version"], "a model was published in the pause")
                passed = after["seconds"] - before["seconds"]
                tally.check(abs(passed) < 0.2, f"the run's clock went on for {passed:.2f} s")
                admin(here, "resume")
            here.advance(2)
            audited(here, tally)
            here.finish()
            crowd.join()
            tally.problems += recompute(here, crowd).problems
    return tally.outcome(
        "no task and no model in a pause, the run's clock stands still, also over a kill; what was trained counts",
        f"{tally.tried} pauses",
    )


def row_46(tmp: Path, times: int) -> Outcome:
    """a federation that has ended is extended, by its file and by an administrator"""
    tally = Tally()
    with Federation(tmp, **LIGHT) as here:
        here.start()
        with Crowd(here, pace=0.01) as crowd:
            here.advance(2)
            for _ in range(times):
                tally.tried += 1
                here.finish(1)
                crowd.join()
                for learner in crowd.learners:
                    learner.farewell = None
                crowd.go()
                crowd.come()
                ended = here.rounds
                here.start("--set", f"stop.rounds={ended + 1000}")
                admin(here, "extend", "--rounds", ended + 2000)
                here.advance(2)
                stop = here.status()["stop"]["rounds"]
                tally.check(stop == ended + 2000, f"the rule says {stop} rounds")
                here.rounds = ended + 2000
            audited(here, tally)
            here.finish()
            crowd.join()
            tally.problems += recompute(here, crowd).problems
    return tally.outcome(
        "it goes on where it ended, with the same learners; every model is what the journal says",
        f"{tally.tried} times ended and extended",
    )


def row_47(tmp: Path, times: int) -> Outcome:
    """the federation is rolled back to a version that the controller has kept, and killed afterwards"""
    tally, reached = Tally(), []
    with Federation(tmp, **LIGHT) as here:
        controller = here.start()
        with Crowd(here, pace=0.03) as crowd:
            for number in range(times):
                here.advance(3)
                tally.tried += 1
                admin(here, "pause")
                kept = [version for version in admin(here, "rollback")["kept"] if version < here.status()["version"]]
                tally.check(kept, "no earlier version is kept")
                chosen = random.Random(number).choice(kept)
                now = admin(here, "rollback", "--to", chosen, "--yes")["version"]
                if number % 2:
                    controller.kill()
                    controller = here.start()
                hashes = {entry["published"]: entry["sha256"] for entry in journal(here) if "published" in entry}
                old = admin(here, "model", "--version", now, "--out", here.folder / "now.safetensors")["sha256"]
                tally.check(hashes.get(now) == old, f"version {now} is served with another hash than the journal's")
                before = hashes.get(chosen, old) if chosen else old
                tally.check(old == before, f"version {now} is not the model {chosen} that was chosen")
                reached.append(f"{chosen} as {now}")
                admin(here, "resume")
            here.advance(2)
            audited(here, tally)
            here.finish()
            crowd.join()
            tally.problems += recompute(here, crowd).problems
    return tally.outcome(
        "the chosen model again, bit for bit, under a new number, also after a kill; the federation goes on from it",
        f"rolled back {tally.tried} times: {', '.join(reached)}",
    )


COMMANDS = (
    ("pause",), ("resume",), ("extend", "--rounds", "2000000"), ("extend", "--steps", "1000000000"),
)  # fmt: skip


def row_48(tmp: Path, times: int) -> Outcome:
    """the controller is killed in the middle of an administrator's command"""
    tally, answered = Tally(), 0
    chance = random.Random(48)
    with Federation(tmp, **LIGHT) as here:
        controller = here.start()
        with Crowd(here, pace=0.03) as crowd:
            here.advance(2)
            for number in range(times):
                tally.tried += 1
                words = COMMANDS[number % len(COMMANDS)]
                process = subprocess.Popen(
                    [*METIS, "admin", "--controller", here.address, "--insecure", *words],
                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment(), cwd=here.folder,
                )  # fmt: skip
                time.sleep(chance.uniform(0.2, 0.9))
                controller.kill()
                said = process.communicate(timeout=600)[0]
                controller = here.start()
                status = here.status()
                if process.returncode == 0:
                    answered += 1
                    if words[0] == "extend":
                        done = status["stop"][words[1].removeprefix("--")] == int(words[2])
                    else:
                        done = status["on_hold"] == (words[0] == "pause")
                    tally.check(done, f"'{' '.join(words)}' was answered with '{said.strip()}' and is lost")
            admin(here, "resume")
            audited(here, tally)
            here.finish()
            crowd.join()
            tally.problems += recompute(here, crowd).problems
    return tally.outcome(
        "what was answered has happened, what was not happened wholly or not at all; the audit log continues",
        f"{tally.tried} kills, {answered} commands were answered before",
    )
