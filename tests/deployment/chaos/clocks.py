"""Clocks that are wrong: by a day, by decades, and set while a round is open."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

from deployment.chaos.harness import Crowd, Federation, Outcome, Process, Tally, events, metis, recompute
from deployment.consortium import DAY, Consortium
from metis.deployment.security.identity import now_utc

_FOLDERS = ("/usr/lib/*/faketime", "/usr/lib/faketime", "/usr/lib64/faketime", "/usr/local/lib/faketime")


class Wall:
    """The time of day of one process, as it may be set by hand: an offset, or a moment. Other clocks are right."""

    def __init__(self, file: Path, time_of_day: str) -> None:
        self._file = file
        self.set(time_of_day)

    def set(self, time_of_day: str) -> None:
        self._file.write_text(time_of_day + "\n")

    @property
    def environment(self) -> dict[str, str]:
        library = _library()
        assert library is not None
        return {
            "LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(self._file), "FAKETIME_CACHE_DURATION": "1",
            "DONT_FAKE_MONOTONIC": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1",
        }  # fmt: skip


def _library() -> Path | None:
    found = [path for folder in _FOLDERS for path in Path("/").glob(f"{folder[1:]}/libfaketimeMT.so.1")]
    return found[0] if found else None


def problem() -> str | None:
    """Why no process can be given another time here; None if it can."""
    if _library() is None:
        return "libfaketime is not installed"
    program = "import time; print(time.time() < 10**8 < time.monotonic() + 10**9)"
    with_time = {"LD_PRELOAD": str(_library()), "FAKETIME": "@1971-01-01 00:00:00", "DONT_FAKE_MONOTONIC": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=with_time)
    return None if done.stdout.strip() == "True" else f"libfaketime does not work here: {done.stderr.strip()[:100]}"


def row_22(tmp: Path, times: int) -> Outcome:
    """clocks: a day off, in 1970, set while a round is open"""
    expected = (
        "order by journal and monotonic clock: nobody dead, no time lost or won; certificates: the clock is named"
    )
    if (why := problem()) is not None:
        return Outcome.not_tried(expected, why)
    tally = Tally()
    _controller_is_set(tally, tmp, times)
    if times > 1:  # with torch
        _learners_are_off(tally, tmp)
    message = _certificates(tally, tmp)
    return tally.outcome(expected, f"{tally.tried} clocks off or set, 0 wrong decisions; {message}")


def _course_is_sound(tally: Tally, here: Federation, elapsed: float) -> None:
    """The run's clock went forward only, and not further than the real one."""
    moments = [event["at"] for kind in ("update_request", "send_task") for event in events(here, kind)]
    ordered = [event["at"] for event in events(here, "update_request")]
    tally.check(ordered == sorted(ordered), "the run's clock went back")
    tally.check(moments and max(moments) <= elapsed, f"the run's clock came to {max(moments):.0f} s in {elapsed:.0f} s")
    left = {event["learner"] for event in events(here, "learner_left")}
    tally.check(not left, f"declared dead: {', '.join(sorted(left))}")


def _controller_is_set(tally: Tally, tmp: Path, times: int) -> None:
    """The controller's time of day jumps while rounds are open and while it is down; truth is a run without clocks."""
    began = time.monotonic()
    settings = [("+1d", "-1d"), ("-2y", "@1970-01-02 00:00:00"), ("+10y", "+0")]
    with Federation(tmp / "set", policy="semi-synchronous", numbers=2000) as here:
        wall = Wall(tmp / "controller-clock", "+0")
        controller = here.start(**wall.environment)
        with Crowd(here, pace=0.02) as crowd:
            here.advance(2)
            for running, stopped in settings[:times]:
                tally.tried += 2
                wall.set(running)
                time.sleep(1.2)  # it looks once a second
                here.advance(2)
                controller.kill()
                wall.set(stopped)
                controller = here.start(**wall.environment)
                here.advance(2)
            text = (here.folder / "controller.log").read_text()
            off = [float(at) for at in re.findall(r'^{"at": ([\d.]+)', text, re.MULTILINE)]
            tally.check(max(off) - min(off) > 0.9 * 86400, "nothing was wrong with the controller's clock")
            tally.check("Traceback" not in text, f"a traceback: {text[-400:]}")
            here.finish()
            crowd.join()
            tally.problems += recompute(here, crowd).problems
            _course_is_sound(tally, here, time.monotonic() - began)


def _learners_are_off(tally: Tally, tmp: Path) -> None:
    """Real learners of a day before, a day after and 1970; one is set right, and one wrong, while they train."""
    began = time.monotonic()
    clocks = {"before": "-1d", "after": "+1d", "old": "@1970-01-02 00:00:00"}
    with Federation(tmp / "off", tuple(clocks), policy="semi-synchronous") as here:
        here.start()
        walls = {name: Wall(tmp / f"{name}-clock", offset) for name, offset in clocks.items()}
        running: dict[str, Process] = {}
        try:
            for name, wall in walls.items():
                tally.tried += 1
                running[name] = here.learner(name, "--pace", 0.03, **wall.environment)
            for learner in running.values():
                learner.wait_for("handed in")
            here.advance(2)
            for name, offset in (("before", "+0"), ("after", "-1d")):
                tally.tried += 1
                walls[name].set(offset)
            time.sleep(1.2)
            counted = {name: len(events(here, "update_committed", name)) for name in clocks}
            here.advance(3)
            for name, learner in running.items():
                tally.check(learner.code is None, f"'{name}' ended with {learner.code}")
                tally.check(len(events(here, "update_committed", name)) > counted[name], f"'{name}' does not count")
                warnings = [
                    line for line in learner.printed("warning") if "the clock of this machine is off by" in line
                ]
                tally.check(len(warnings) == 1, f"'{name}' was warned {len(warnings)} times that its clock is off")
                tally.check(
                    any(f"the clock of '{name}' differs by" in line for line in here.warnings()),
                    f"the clock of '{name}' is not named",
                )
        finally:
            for learner in running.values():
                learner.__exit__()
        _course_is_sound(tally, here, time.monotonic() - began)


def _certificates(tally: Tally, tmp: Path) -> str:
    """A clock beyond a certificate's dates is named with both dates, at once and on both sides."""
    ours = Consortium(tmp / "consortium")
    made = now_utc() - 100 * DAY
    learner, main = ours.kit("north", made=made), ours.controller(made=made)
    here = Federation(tmp / "dates", ("north",), numbers=400, identity=main.folder)
    message = ""
    for offset, words, date in (
        ("@1970-01-02 00:00:00", "is not valid before", made),
        ("-101d", "is not valid before", made),
        ("+3y", "expired on", learner.not_after),
    ):
        wall = Wall(tmp / "clock", offset)
        for command in (
            ["learner", "--controller", here.address, "--identity", learner.folder, "--work", tmp / "work"],
            here.command(),
        ):
            tally.tried += 1
            done = metis(*command, cwd=tmp, **wall.environment)
            text = done.stdout + done.stderr
            tally.check(done.returncode == 2, f"{offset}: {command[0]} ended with {done.returncode}: {text[-300:]}")
            shown = f"{words} {date.astimezone(timezone.utc):%Y-%m-%d}" if words == "expired on" else words
            for needed in (shown, "this machine's clock says", "1970" if "1970" in offset else str(_year(offset))):
                tally.check(needed in text, f"{offset}: {command[0]} does not say '{needed}': {text[-300:]}")
            message = text.strip().splitlines()[0] if text.strip() else ""
    return f"exit 2: …{message.partition('the certificate of ')[2][:70]}"


def _year(offset: str) -> int:
    return (datetime.now(timezone.utc) + {"-101d": -101, "+3y": 3 * 365}[offset] * DAY).year
