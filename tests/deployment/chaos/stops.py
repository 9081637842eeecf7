"""The controller is stopped, drained, upgraded and started twice; all learners vanish at once."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from deployment.chaos.harness import Crowd, Federation, Outcome, Process, Tally, events, metis, recompute, until


def row_18(tmp: Path, times: int) -> Outcome:
    """controller: SIGSTOP for longer than the lease, then SIGCONT"""
    tally, longest = Tally(), 0.0
    deployment = "lease = 4\nheartbeat = 1\n"
    with Federation(tmp, policy="semi-synchronous", numbers=2000, deployment=deployment) as here:
        controller = here.start()
        with Crowd(here, pace=0.03) as crowd:
            here.advance(3)
            for seconds in (3.5, 6.0, 4.5, 20.0)[:times]:
                tally.tried += 1
                moment, before = float(here.status()["seconds"]), len(events(here, "learner_left"))
                controller.signal(signal.SIGSTOP)
                time.sleep(seconds)
                controller.signal(signal.SIGCONT)
                longest = max(longest, seconds)
                passed = float(here.status()["seconds"]) - moment
                tally.check(passed < max(2.0, seconds - 1.5), f"the run's clock went on for {passed:.1f} s")
                here.advance(3)
                gone = {event["learner"] for event in events(here, "learner_left")[before:]}
                tally.check(not gone, f"{seconds:g} s: declared dead: {', '.join(sorted(gone))}")
            here.finish()
            crowd.join()
            tally.problems += recompute(here, crowd).problems
    return tally.outcome(
        "nobody declared dead; the run's clock stood still; learners go on by themselves",
        f"{tally.tried} stops of up to {longest:g} s with a lease of 4 s, 0 deaths",
    )


def row_35(tmp: Path, times: int) -> Outcome:
    """all learners vanish without a word, the controller too, and come back"""
    tally = Tally()
    resumed: list[float] = []
    with Federation(tmp, policy="semi-synchronous", numbers=2000, deployment="lease = 3\nheartbeat = 0.5\n") as here:
        controller = here.start()
        with Crowd(here, pace=0.03) as crowd:
            for number in range(times):
                here.advance(2)
                tally.tried += 1
                crowd.go()
                until(lambda: here.status()["state"] == "paused", "the federation pauses")
                version = here.version()
                time.sleep(1)
                tally.check(here.version() == version, "models were published without learners")
                if number % 2:
                    controller.kill()
                    controller = here.start()
                    tally.check(here.status()["state"] == "paused", "after a restart it does not pause any more")
                crowd.come()
                resumed.append(here.advance(1))
            here.finish()
            crowd.join()
            tally.problems += recompute(here, crowd).problems
    return tally.outcome(
        "PAUSED, state kept; goes on when they are back",
        f"{tally.tried} times paused, next model {max(resumed, default=0):.1f} s after they came back at the latest",
    )


def row_38(tmp: Path, times: int) -> Outcome:
    """controller: SIGTERM, SIGTERM twice, restarted as for an upgrade while real learners train"""
    tally, drained = Tally(), 0.0
    with Federation(tmp, ("a", "b"), policy="asynchronous", batch_size=10) as here:
        controller = here.start()
        with here.learner("a", "--pace", 0.4) as first, here.learner("b", "--pace", 0.7) as second:
            for number in range(times):
                for learner in (first, second):
                    learner.wait_for("handed in", 2 * number + 1)
                tally.tried += 1
                time.sleep(0.5)  # both have several batches behind them
                began = time.monotonic()
                controller.signal(signal.SIGTERM)
                if number % 3 == 2:
                    controller.signal(signal.SIGTERM)
                code = controller.wait(30)
                drained = max(drained, time.monotonic() - began)
                tally.check(code in ((0,) if number % 3 != 2 else (0, 130)), f"SIGTERM ended it with {code}")
                controller = here.start()
            for learner in (first, second):
                learner.wait_for("handed in", 2 * times + 2)
            for name, learner in (("a", first), ("b", second)):
                _no_step_lost(tally, here, name, learner)
    return tally.outcome(
        "drains, exit code 0; learners train on and hand in; no step lost, no task trained twice",
        f"{tally.tried} restarts, each drained in {drained:.1f} s at most, every step of every task committed once",
    )


def _no_step_lost(tally: Tally, here: Federation, name: str, learner: Process) -> None:
    """What the learner trained is what the controller counted, task by task."""
    trained = [line.split()[1].strip(":") for line in learner.printed("trained")]
    tally.check(len(trained) == len(set(trained)), f"'{name}' trained a task twice: {trained}")
    tally.check(not learner.printed("failed"), f"'{name}' lost work: {learner.printed('failed')}")
    handed = [line.split()[1].strip(":") for line in learner.printed("handed_in")]
    counted = {str(event["task"]): event["steps"] for event in events(here, "update_request", name)}
    missing = [task for task in handed if task not in counted]
    tally.check(not missing, f"'{name}' handed in {missing}, which do not count")
    steps = {line.split()[1].strip(":"): int(line.split()[3]) for line in learner.printed("trained")}
    wrong = [task for task in handed if counted.get(task) != steps.get(task)]
    tally.check(not wrong, f"'{name}': the steps of {wrong} are not those that were trained")
    sent = [event["task"] for event in events(here, "send_task", name)]
    tally.check(len(sent) <= len(trained) + 1, f"'{name}' was sent {len(sent)} tasks and trained {len(trained)}")


def row_39(tmp: Path, times: int) -> Outcome:
    """two controllers on one state folder, and on one port"""
    tally, message = Tally(), ""
    other = Federation(tmp / "other", numbers=2000)
    with Federation(tmp, numbers=2000) as here:
        first = here.start()
        with Crowd(here) as crowd:
            for _ in range(times):
                tally.tried += 2
                second = metis(*here.command("--listen", "127.0.0.1:0", "--http", ""), cwd=here.folder)
                _refused(tally, second.returncode, second.stdout + second.stderr, f"process id {first.pid}")
                message = second.stderr.strip().replace(f"{tmp}/", "")
                port = metis(*other.command("--listen", here.address, "--http", ""), cwd=here.folder)
                _refused(tally, port.returncode, port.stdout + port.stderr, "in use")
            here.advance(2)
            tally.check(first.code is None, f"the first one ended with {first.code}")
            here.finish()
            crowd.join()
            tally.problems += recompute(here, crowd).problems
    return tally.outcome(
        "the second refuses at once and names the first, which is not disturbed", f"exit 2: {message[:90]}"
    )


def _refused(tally: Tally, code: int, text: str, words: str) -> None:
    tally.check(code == 2, f"it ended with {code}: {text[-300:]}")
    tally.check(words in text, f"it does not say '{words}': {text[-300:]}")
    tally.check("Traceback" not in text, f"a traceback: {text[-300:]}")
