"""Try the faults of the fault matrix on real processes, and print what should come of each and what came of it.

    make chaos                                     # all rows; the better part of an hour
    make chaos ARGS='5 17 27'                      # some of them
    make chaos ARGS='1 --times 300'                # more often
    python tests/deployment/chaos/run.py --list

One line a row: number, fault, how often it was tried, what is expected, what was seen, and `ok` or `WRONG`. A row that
this machine cannot run (no strace, no libfaketime) says so. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))

from deployment.chaos import (
    administration,
    clocks,
    crowds,
    disks,
    identities,
    kills,
    learners,
    mistakes,
    networks,
    stops,
    wires,
)
from deployment.chaos.harness import Outcome


@dataclass(frozen=True)
class Row:
    """One fault of the matrix, and how often it is tried unless somebody says otherwise."""

    name: str
    run: Callable[[Path, int], Outcome]
    times: int

    @property
    def fault(self) -> str:
        return " ".join((self.run.__doc__ or "").split())


ROWS = [
    Row("1", kills.row_01, 60),
    Row("1a", kills.crash_points, 1000),  # all there are
    Row("1b", kills.power_losses, 40),  # all there are
    Row("2", wires.row_of(2), 5),
    Row("3", wires.row_of(3), 1),
    Row("4", wires.row_of(4), 2),
    Row("5", learners.row_05, 4),
    Row("6", wires.row_of(6), 3),
    Row("7", wires.row_of(7), 3),
    Row("8", wires.row_of(8), 3),
    Row("9", wires.row_of(9), 2),
    Row("10", wires.row_of(10), 3),
    Row("11", wires.row_of(11), 2),
    Row("12", wires.row_of(12), 3),
    Row("13", wires.row_of(13), 2),
    Row("14", wires.row_14, 10),
    Row("15", networks.row_15, 2),
    Row("16", networks.row_16, 1),
    Row("17", learners.row_17, 3),
    Row("18", stops.row_18, 4),
    Row("19", networks.row_19, 9),
    Row("20", networks.row_20, 3),
    Row("22", clocks.row_22, 3),
    Row("23", disks.row_23, 2),
    Row("24", kills.row_24, 24),
    Row("25", disks.row_25, 100),
    Row("26", disks.row_26, 2),
    Row("27", identities.row_27, 1),
    Row("28", identities.row_28, 2),
    Row("29", wires.row_of(29), 3),
    Row("30", crowds.row_30, 2),
    Row("31", wires.row_of(31), 2),
    Row("32", wires.row_of(32), 1),
    Row("33", learners.row_33, 1),
    Row("34", learners.row_34, 3),
    Row("35", stops.row_35, 4),
    Row("38", stops.row_38, 3),
    Row("39", stops.row_39, 2),
    Row("40", mistakes.row_40, 2),
    Row("41", wires.row_of(41), 1),
    Row("42", wires.row_of(42), 1),
    Row("43", wires.row_of(43), 2),
    Row("44", administration.row_44, 4),
    Row("45", administration.row_45, 4),
    Row("46", administration.row_46, 2),
    Row("47", administration.row_47, 4),
    Row("48", administration.row_48, 12),
]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def attempt(row: Row, times: int) -> tuple[Outcome, float]:
    """One row in a folder of its own, which stays if something was wrong; and how long it took."""
    folder = Path(tempfile.mkdtemp(prefix=f"metis-chaos-{row.name}-"))
    began = time.monotonic()
    try:
        outcome = row.run(folder, times)
    except Exception as problem:
        outcome = Outcome("that the row comes to its end", f"{type(problem).__name__}: {problem}", 0, False)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if outcome.ok:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        say(f"row {row.name}: what was left is in {folder}")
    return outcome, time.monotonic() - began


HEAD = ("row", "fault", "tried", "expected", "seen", "")


def lines_of(done: Sequence[tuple[Row, Outcome]], *, markdown: bool) -> Iterable[str]:
    """The table, a line a row."""
    cells = [
        (row.name, row.fault, str(outcome.tried), outcome.expected, " ".join(outcome.seen.split()), outcome.verdict)
        for row, outcome in done
    ]
    if markdown:
        yield f"| {' | '.join(HEAD)} |"
        yield "|---|---|---:|---|---|---|"
        yield from (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells)
        return
    widths = [max(map(len, column)) for column in zip(HEAD, *cells, strict=True)]
    widths[4] = min(widths[4], 140)  # what went wrong may be longer
    for row in (HEAD, *cells):
        shown = [cell.rjust(width) if column == 2 else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        yield "  ".join(shown).rstrip()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="numbers of rows; all if none is given")
    parser.add_argument("--times", type=int, help="how often, or how much, each row is tried (see --list)")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(words)
    known = {row.name: row for row in ROWS}
    if unknown := [name for name in options.rows if name not in known]:
        parser.error(f"there is no row {unknown[0]}; there are {', '.join(known)}")
    if options.times is not None and options.times < 1:
        parser.error(f"--times is {options.times}; it must be 1 or more")
    chosen = [row for row in ROWS if not options.rows or row.name in options.rows]
    if options.list:
        for row in chosen:
            print(f"{row.name:>3}  {row.times:>4} times  {row.fault}")
        return 0
    began, done = time.monotonic(), list[tuple[Row, Outcome]]()
    try:
        for row in chosen:
            times = options.times or row.times
            say(f"row {row.name}: {row.fault} (--times {times})")
            outcome, seconds = attempt(row, times)
            done.append((row, outcome))
            say(f"row {row.name}: {outcome.verdict} after {seconds:.0f} s ({len(done)} of {len(chosen)})")
    except KeyboardInterrupt:
        say("interrupted; this is what was tried")
    if done:
        print(*lines_of(done, markdown=options.markdown), sep="\n")
    verdicts = [outcome.verdict for _, outcome in done]
    counts = {verdict: verdicts.count(verdict) for verdict in ("ok", "WRONG", "not run")}
    minutes = (time.monotonic() - began) / 60
    print(f"\n{counts['ok']} ok, {counts['WRONG']} wrong, {counts['not run']} not run, in {minutes:.1f} minutes")
    if len(done) < len(chosen):
        return 130
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
