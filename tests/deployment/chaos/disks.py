"""The controller's disk is full, its files are damaged, or another version has made them."""

from __future__ import annotations

import contextlib
import resource
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployment.chaos.harness import Crowd, Federation, Outcome, Tally, fill, metis, recompute, small_disk, until
from metis.core.events import Action, Event
from metis.core.model import Layout
from metis.deployment.controller.durable import DurableController, initial_model
from metis.deployment.controller.state import State
from metis.errors import MetisError
from metis.experiments.config.load import load_config
from metis.experiments.deploy import make_plan
from metis.runs.trace import to_line

# --- row 23 -----------------------------------------------------------------------------------------


def row_23(tmp: Path, times: int) -> Outcome:
    """controller: its disk is full, then has room again"""
    tally, refused = Tally(), 0
    for number in range(times):
        for policy in ("asynchronous", "synchronous")[: 1 + (times > 1)]:
            with _scarce_disk(tmp / f"{policy}-{number}", policy) as (here, crowd, starve):
                here.start()
                here.advance(3)
                tally.tried += 1
                refused += _starve(tally, here, crowd, starve)
                here.advance(4)
                here.finish()
                crowd.join()
                tally.problems += recompute(here, crowd).problems
    return tally.outcome(
        "RESOURCE_EXHAUSTED, nothing acknowledged, the status says it is full; goes on by itself when there is room",
        f"{tally.tried} times full, {refused} uploads refused so, 0 acknowledged meanwhile, models equal in the end",
    )


def _starve(tally: Tally, here: Federation, crowd: Crowd, starve: Callable[[], Callable[[], None]]) -> int:
    """Take the room away for some seconds; returns how many uploads were refused for that."""
    controller = here.controller
    assert controller is not None
    before = crowd.codes["RESOURCE_EXHAUSTED"]
    feed = starve()
    try:
        until(lambda: crowd.codes["RESOURCE_EXHAUSTED"] > before, "an upload is refused")
        time.sleep(1)  # what was on its way has come
        acknowledged = crowd.acknowledged
        disks = []
        for _ in range(3):
            time.sleep(1)
            disks.append(here.status()["disk"])
        tally.check(any(disk["full"] for disk in disks), f"the status does not say that the disk is full: {disks}")
        tally.check(controller.code is None, f"a full disk ended it with {controller.code}: {controller.text()[-400:]}")
        tally.check(
            crowd.acknowledged == acknowledged, f"{crowd.acknowledged - acknowledged} acknowledged on a full disk"
        )
        tally.check("Traceback" not in controller.text(), f"a traceback: {controller.text()[-400:]}")
        other = sorted(code for code in crowd.codes if code not in ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "ABORTED"))
        tally.check(not other, f"uploads were refused otherwise: {other}")
    finally:
        feed()
    return crowd.codes["RESOURCE_EXHAUSTED"] - before


@contextlib.contextmanager
def _scarce_disk(folder: Path, policy: str) -> Iterator[tuple[Federation, Crowd, Callable[[], Callable[[], None]]]]:
    """A federation whose disk can be filled: a tmpfs of its own, or a limit on the size of its files."""
    folder.mkdir(parents=True)
    with small_disk(folder / "disk", "24m") as mounted:
        state = folder / "disk" / "state" if mounted else None
        with Federation(folder, policy=policy, numbers=50_000, state=state) as here, Crowd(here) as crowd:

            def starve() -> Callable[[], None]:
                if mounted:
                    return fill(folder / "disk").unlink
                assert here.controller is not None
                pid = here.controller.pid
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
                unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
                return lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited) and None

            yield here, crowd, starve


# --- row 25 -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """One fault in one file of a state folder."""

    file: str
    kind: str  # flip, truncate, missing
    offset: int = 0

    def inflict(self, folder: Path) -> None:
        path = folder / self.file
        match self.kind:
            case "flip":
                data = bytearray(path.read_bytes())
                data[self.offset] ^= 1 << (self.offset % 8)
                path.write_bytes(data)
            case "truncate":
                with path.open("rb+") as file:
                    file.truncate(self.offset)
            case _:
                path.unlink()


def damages(folder: Path, offsets: int) -> list[Damage]:
    """This many offsets in every file, spread evenly."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_file() or path.name == "LOCK" or name.startswith("run/"):
            continue  # made again at every start
        size = path.stat().st_size
        positions = sorted({i * size // offsets for i in range(offsets)}) if size else []
        found += [Damage(name, kind, position) for kind in ("flip", "truncate") for position in positions]
        found.append(Damage(name, "missing"))
    return found


def row_25(tmp: Path, times: int) -> Outcome:
    """state folder: files flipped, truncated, missing"""
    tally, ends = Tally(), Counter[str]()
    with Federation(tmp, numbers=400, policy="asynchronous") as here, Crowd(here) as crowd:
        controller = here.start()
        here.advance(40)
        controller.kill()
        crowd.go()
        whole = tmp / "whole"
        shutil.copytree(here.state, whole)
        truth = _look(here, whole, tmp / "look")
        assert isinstance(truth, tuple), truth
        tried = damages(whole, times)
        for damage in tried:
            tally.tried += 1
            copy = tmp / "copy"
            shutil.copytree(whole, copy)
            damage.inflict(copy)
            found = _look(here, copy, None)
            shutil.rmtree(copy)
            if isinstance(found, tuple):
                tally.check(found == truth, f"{damage}: a silent wrong start")
                ends["recovered"] += 1
            else:
                tally.check(damage.file.split("/")[-1].removesuffix("-wal") in found, f"{damage}: {found}")
                ends["refused"] += 1
        # And as an administrator meets it.
        for damage in tried[:: max(1, len(tried) // max(3, times // 5))]:
            _through_the_command(tally, here, whole, damage)
    return tally.outcome(
        "recovers to the same bits, or refuses with a sentence that names the file; never a silent wrong start",
        f"{ends['recovered']} recovered to the same bits, {ends['refused']} refused naming the file, 0 wrong starts",
    )


def _look(here: Federation, folder: Path, copy: Path | None) -> tuple[Any, ...] | str:
    """What a controller that starts on this folder would be, bit for bit; or the sentence with which it refuses."""
    if copy is not None:
        shutil.copytree(folder, copy)
        folder = copy
    lines: list[str] = []

    def note(now: float, item: Event | Action) -> None:
        lines.append(to_line(now, item))

    try:
        with State.open(folder, "process") as state:
            facts = state.facts()
            if facts is None:
                return ("nothing",)
            layout = Layout.from_json(facts["layout"])
            initial = initial_model(state, facts["initial"], layout)
            plan = make_plan(load_config(here.file, []), initial, facts["metric"], facts["higher_is_better"])
            durable = DurableController(plan.make, initial, state, note)
            community = durable.controller.community
            arrays = {name: array.tobytes() for name, array in sorted(community.arrays().items())}
            roster = [(record.learner, record.task) for record in durable.controller.roster]
            return (lines, community.model.sha256(), dict(durable.hashes), arrays, roster, durable.now)
    except MetisError as problem:
        return str(problem)


def _through_the_command(tally: Tally, here: Federation, whole: Path, damage: Damage) -> None:
    """`metis controller` on the damaged folder: it serves, or one sentence and exit code 2."""
    tally.tried += 1
    shutil.rmtree(here.state)
    shutil.copytree(whole, here.state)
    damage.inflict(here.state)
    controller = here.start(listening=False)
    until(lambda: controller.code is not None or "listening on" in controller.text(), f"{damage}: it serves or refuses")
    text = controller.text()
    tally.check("Traceback" not in text, f"{damage}: a traceback: {text[-500:]}")
    if controller.code is not None:
        errors = [line for line in text.splitlines() if line.startswith("error:")]
        tally.check(controller.code == 2 and len(errors) == 1, f"{damage}: exit {controller.code}: {text[-500:]}")
    controller.kill()


# --- row 26 -----------------------------------------------------------------------------------------


def row_26(tmp: Path, times: int) -> Outcome:
    """state folder: made by an older, a newer, another program"""
    tally, message = Tally(), ""
    with Federation(tmp, numbers=400) as here, Crowd(here) as crowd:
        controller = here.start()
        here.advance(3)
        controller.kill()
        crowd.go()
        for change, words in (
            ("PRAGMA user_version=0", "an older version"),
            ("PRAGMA user_version=99", "a newer version"),
            ("PRAGMA application_id=7", "is not the journal of a controller"),
            ("ALTER TABLE journal ADD COLUMN more TEXT", "its tables are not those that were made"),
        )[: 2 + times]:
            tally.tried += 1
            copy = tmp / "copy"
            shutil.copytree(here.state, copy)
            with contextlib.closing(sqlite3.connect(copy / "controller.db", isolation_level=None)) as db:
                db.execute(change)
            before = _digest(copy)
            done = metis(*_elsewhere(here, copy), cwd=tmp)
            text = done.stdout + done.stderr
            tally.check(done.returncode == 2, f"{change}: exit code {done.returncode}")
            tally.check(words in text and "controller.db" in text, f"{change}: {text[-300:]}")
            tally.check("Traceback" not in text, f"{change}: a traceback")
            tally.check(_digest(copy) == before, f"{change}: the refused folder was changed")
            message = text.strip().replace(f"{copy}/", "")
            shutil.rmtree(copy)
    return tally.outcome("refuses with a sentence, and changes nothing", f"exit 2: {message[:90]}")


def _elsewhere(here: Federation, folder: Path) -> list[object]:
    words = here.command()
    words[words.index(here.state)] = folder
    return words


def _digest(folder: Path) -> dict[str, bytes]:
    """What must not change: the rows of the journal and the models; SQLite's own files may be tidied."""
    with contextlib.closing(sqlite3.connect(folder / "controller.db")) as db:
        rows = repr(db.execute("SELECT seq, at, record, task, blob, seal FROM journal").fetchall()).encode()
    blobs = {path.name: path.read_bytes() for path in (folder / "blobs").iterdir()}
    return {"journal": rows, **blobs}
