"""`metis report`: finished runs as a page, as text, as tables for other programs, as pictures."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from metis.errors import ConfigError

if TYPE_CHECKING:
    from metis.runs.run import Run

COMPARISON = "comparison.json"
FORMATS = ("html", "md", "csv", "parquet", "png")
EXAMPLES = (
    "[bold]metis report runs/demo[/]\n\n"
    "[bold]metis report runs/a runs/b --out runs/both --format html,md,csv[/]\n\n"
    "[bold]metis report state --format parquet[/]"
)


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Directories of runs, of comparisons, or the state of a controller."),
    ],
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write there, and only there.")] = None,
    format_: Annotated[
        list[str],
        typer.Option(
            "--format",
            metavar="|".join(FORMATS),
            help="html one page with everything, md the same tables as text, csv and parquet tidy tables, png the "
            "figures. May be repeated, or several with commas.",
        ),
    ] = ["html"],  # noqa: B006  # typer wants a list
) -> None:
    """Tell what finished runs brought and cost: draws the figures and the report anew.

    Several runs are compared. The tables are history (one row an evaluation), learners (one row a learner) and costs
    (one row a policy, until the target and at the end).
    """
    formats = _formats(format_)
    places = [place for folder in folders for place in run_folders(folder)]
    if not places:
        raise ConfigError(f"{folders[0]} holds no run that has ended; go on with: metis resume {folders[0]}")
    from metis.runs.run import Run

    runs = [Run.load(place) for place in places]
    target = out
    if target is None:
        alone = len(folders) == 1
        target = (places[0] if len(places) == 1 else folders[0]) if alone else folders[0].parent
    written = write(runs, target, title_of(runs, target), formats, everywhere=out is None)
    console = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 140)
    for path in written:
        console.print(f"{'report' if path.stem == 'report' else path.stem} in {path}", soft_wrap=True, markup=False)


def _formats(given: Sequence[str]) -> list[str]:
    from metis.experiments.config.errors import did_you_mean

    named = [name.strip().lower() for text in given for name in text.split(",") if name.strip()]
    for name in named:
        if name not in FORMATS:
            raise ConfigError(f"--format is '{name}'; {did_you_mean(name, FORMATS)}")
    if "parquet" in named:
        from metis.reporting.tables import check_parquet

        check_parquet()
    return list(dict.fromkeys(named)) or ["html"]


def check_folder(folder: Path) -> None:
    """Refuse what is no directory."""
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; give the directory of a run")
    if not folder.is_dir():
        again = shlex.quote(str(folder))
        raise ConfigError(f"there is no directory {folder}; make a run with: metis simulate FILE --out {again}")


def run_folders(folder: Path) -> list[Path]:
    """The directories of the finished runs that a directory stands for."""
    check_folder(folder)
    if (folder / COMPARISON).is_file():
        return [place for name in planned(folder) if ((place := folder / name) / "summary.json").exists()]
    if (folder / "controller.db").is_file():
        if not (folder / "run" / "summary.json").is_file():
            raise ConfigError(
                f"the federation of {folder} has not ended; look at it with: metis status {shlex.quote(str(folder))}"
            )
        return [folder / "run"]
    return [folder]


def planned(folder: Path) -> list[str]:
    """The runs of a comparison, as they were planned."""
    try:
        return [str(name) for name in json.loads((folder / COMPARISON).read_text("utf-8"))["runs"]]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{folder / COMPARISON} does not list the runs of a comparison") from None


def title_of(runs: Sequence[Run], folder: Path) -> str:
    """What a report is called: the folder of a comparison, the policy and the data of a single run."""
    if len(runs) > 1:
        return folder.resolve().name
    return f"{runs[0].policy} on {runs[0].setting.facts.get('dataset', 'its data')}"


def write(
    runs: Sequence[Run], folder: Path, title: str, formats: Sequence[str] = ("html",), *, everywhere: bool = True
) -> list[Path]:
    """Write these formats, and figures beside a page or a text; with `everywhere` also into each run's own folder.

    Gives the files that somebody would open first.
    """
    from metis.reporting.figures import save_comparison_figures, save_run_figures
    from metis.reporting.report import comparable, write_markdown, write_report
    from metis.reporting.tables import write_tables

    single, runs = runs, comparable(runs)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; choose another --out")
    written: list[Path] = []
    pictures: list[Path] = []
    if {"html", "md", "png"} & set(formats):
        suffixes = ("png", "svg") if "html" in formats else ("png",)
        if len(runs) == 1:
            pictures = save_run_figures(runs[0], folder, suffixes)
        else:
            pictures = save_comparison_figures(runs, folder, suffixes)
            for run in single if everywhere else ():
                if run.folder is not None:
                    save_run_figures(run, run.folder, suffixes)
        pictures = [path for path in pictures if path.suffix == ".png"]
    for name in formats:
        if name == "html":
            written.append(write_report(runs, folder, title))
        elif name == "md":
            written.append(write_markdown(runs, folder, title, pictures))
        elif name == "png":
            written += pictures
        else:
            written += write_tables(runs, folder, name)
    return written
