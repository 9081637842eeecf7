"""A bad network between real learners and the controller: parted, half open, slow."""

from __future__ import annotations

import time
from pathlib import Path

from deployment.chaos.harness import Crowd, Federation, Outcome, Process, Tally, events, percentile, until
from deployment.proxy import Proxy

LARGE = """
def network():
    return nn.Sequential(nn.Linear(20, 2000), nn.Linear(2000, 100), nn.Linear(100, 5))
"""  # about 1 MB: it takes a while on a slow line


def _counted(here: Federation, name: str) -> int:
    return len(events(here, "update_committed", name))


def row_19(tmp: Path, times: int) -> Outcome:
    """network: parted in each phase, one way and both, for less and for more than the lease"""
    tally = Tally()
    recovery: list[float] = []
    cases = [
        ("training", True, True, 2.0), ("upload", True, True, 8.0), ("download", True, True, 8.0),
        ("training", True, False, 8.0), ("training", False, True, 8.0), ("upload", False, True, 8.0),
        ("upload", True, True, 25.0), ("training", True, True, 25.0), ("download", True, False, 25.0),
    ]  # fmt: skip
    with Federation(
        tmp, ("a", "b"), policy="asynchronous", site=LARGE, deployment="lease = 5\nheartbeat = 0.5\n"
    ) as here:
        here.start()
        with (
            Proxy(here.address) as proxy,
            here.learner("a", "--pace", 0.3, address=proxy.address) as far,
            here.learner("b", "--pace", 0.3),
        ):
            far.wait_for("handed in")
            for phase, up, down, seconds in cases[:times]:
                tally.tried += 1
                _reach(phase, proxy, far)
                proxy.partition(up=up, down=down)
                others = _counted(here, "b")
                time.sleep(seconds)
                what = f"{phase}, {'both directions' if up and down else 'up' if up else 'down'}, {seconds:g} s"
                tally.check(seconds < 5 or _counted(here, "b") > others, f"{what}: the other learner stood still")
                counted = _counted(here, "a")
                proxy.heal()
                recovery.append(until(lambda: _counted(here, "a") > counted, f"{what}: its updates count"))  # noqa: B023
                tally.check(far.code is None, f"{what}: the learner ended with {far.code}")
            left = len(events(here, "learner_left", "a"))
            # Without a way down soon nothing comes up either: the controller's flow control is not heard.
            long = sum(seconds > 5 for *_, seconds in cases[:times])
            tally.check(
                left <= long, f"it left {left} times, but its line was cut for longer than its lease {long} times"
            )
            tally.check(not events(here, "learner_left", "b"), "the other learner was declared dead")
            lost = [
                line for line in far.printed("failed") if "has no task that is based on" not in line
            ]  # void meanwhile
            tally.check(not lost, f"work was lost: {lost}")
    return tally.outcome(
        "heals by itself, in every phase and direction; others go on",
        f"{tally.tried} cuts of 2 to 25 s, next update counted {percentile(recovery, 0.5):.1f} s after healing (p50), "
        f"{max(recovery, default=0):.1f} s at most",
    )


def _reach(phase: str, proxy: Proxy, learner: Process) -> None:
    """Wait for the learner to be in the middle of training, of sending its model, or of fetching one."""
    if phase == "training":
        until(lambda: len(learner.printed("task")) > len(learner.printed("trained")), "it trains")
        time.sleep(0.3)
        return
    way = proxy.up if phase == "upload" else proxy.down
    way.rate, seen = 200_000, way.bytes
    until(lambda: way.bytes > seen + 200_000, f"it is in the middle of its {phase}")


def row_20(tmp: Path, times: int) -> Outcome:
    """network: half-open connections, the other end has vanished without a word"""
    tally = Tally()
    found: list[float] = []
    with Federation(tmp, ("a", "b"), policy="asynchronous", deployment="lease = 30\nheartbeat = 1\n") as here:
        here.start()
        with (
            Proxy(here.address) as proxy,
            here.learner("a", "--pace", 0.3, address=proxy.address) as far,
            here.learner("b", "--pace", 0.3),
        ):
            far.wait_for("handed in")
            for number in range(times):
                tally.tried += 1
                connected, counted = len(far.printed("connected")), _counted(here, "a")
                time.sleep(0.4 * number)
                proxy.vanish()
                found.append(until(lambda: len(far.printed("connected")) > connected, "the learner notices"))  # noqa: B023
                until(lambda: _counted(here, "a") > counted, "its updates count")  # noqa: B023
            tally.check(not events(here, "learner_left"), "a learner that came back in time was declared dead")
            # And one that never comes back: the controller must notice by itself.
            tally.tried += 1
            proxy.partition()
            far.kill()
            gone = until(lambda: events(here, "learner_left", "a"), "the controller notices")
    return tally.outcome(
        "found in about 30 s; the learner dials again and goes on; one that is gone loses its lease",
        f"found after {max(found, default=0):.1f} s at most; a vanished learner left {gone:.0f} s later (lease 30 s)",
    )


def row_15(tmp: Path, times: int) -> Outcome:
    """network: slow-loris, uploads that trickle"""
    tally = Tally()
    names = (*(f"slow{i}" for i in range(2 * times)), "l0", "l1")
    with Federation(tmp, names, policy="asynchronous", numbers=300_000) as here:
        here.start()
        with Proxy(here.address) as proxy:
            honest = Crowd(here, only=("l0", "l1"))
            slow = Crowd(here, address=proxy.address, only=names[:-2])
            with honest, slow:
                here.advance(4 * len(names))  # all have joined and work
                speed = 10 / here.advance(10)
                proxy.up.rate = 500.0
                tally.tried = len(names) - 2
                time.sleep(2)
                before = sum(len(learner.receipts) for learner in honest.learners)
                began = time.monotonic()
                # The controller ends the call, or sooner its learner, whose heartbeats wait on the same line.
                for name, learner in zip(names, slow.learners, strict=False):
                    until(
                        lambda name=name, learner=learner: (
                            learner.codes["DEADLINE_EXCEEDED"] or events(here, "learner_left", name)
                        ),
                        f"the slot of {name} is released",
                    )
                seconds = time.monotonic() - began
                rate = (sum(len(learner.receipts) for learner in honest.learners) - before) / seconds
                proxy.heal()
                tally.check(rate > 0.3 * speed * 2 / len(names), f"the honest came to {rate:.1f} updates a second only")
                here.advance(5)
    return tally.outcome(
        "an upload without progress is ended after 60 s; others at full speed",
        f"{tally.tried} uploads at 500 bytes/s together ended within {seconds:.0f} s; honest learners "
        f"{rate:.1f} updates/s meanwhile, {speed:.1f} of all before",
    )


def row_16(tmp: Path, times: int) -> Outcome:
    """network: a slow site that makes progress, 1 Mbit/s"""
    tally = Tally()
    site = LARGE.replace("2000", "10000").replace("100)", "50)").replace("100,", "50,")  # 2.8 MB
    with Federation(
        tmp, ("a", "b"), policy="asynchronous", site=site, deployment="lease = 15\nheartbeat = 1\n"
    ) as here:
        here.start()
        with (
            Proxy(here.address) as proxy,
            here.learner("a", "--pace", 0.3, address=proxy.address) as far,
            here.learner("b", "--pace", 0.3),
        ):
            far.wait_for("handed in")
            proxy.up.rate = proxy.down.rate = 125_000.0
            began, counted = time.monotonic(), _counted(here, "a")
            until(lambda: _counted(here, "a") > counted + 1 + times, "its updates count", seconds=240 + 90 * times)
            seconds = (time.monotonic() - began) / (2 + times)
            tally.tried = 2 + times
            tally.check(not events(here, "learner_left"), "a slow learner was declared dead")
            lost = len(far.printed("connected")) - 1
            tally.check(not lost, f"its connection was lost {lost} times")
    return tally.outcome(
        "not ended, not declared dead",
        f"{tally.tried} updates of 2.8 MB in both directions in {seconds:.0f} s each, lease 15 s, connection kept",
    )
