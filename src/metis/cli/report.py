"""`metis report`: finished runs as a page, as text, as tables for other programs, as figures."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metis.cli.output import add, say
from metis.errors import ConfigError

if TYPE_CHECKING:
    from metis.runs.run import Run

COMPARISON = "comparison.json"
FORMATS = ("html", "md", "csv", "parquet", "latex", "png", "pdf", "svg")


def register(app: typer.Typer) -> None:
    add(
        app,
        report,
        "metis report runs/demo",
        "metis report runs/a runs/b --out runs/both --format html,md,csv",
        "metis report state --format parquet",
    )


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Directories of runs, of comparisons, or state folders of controllers."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Directory to write to, and nowhere else.")
    ] = None,
    format_: Annotated[
        list[str],
        typer.Option(
            "--format",
            metavar="|".join(FORMATS),
            help="html: one page with everything; md (or markdown): the same tables as text; csv and parquet: tidy "
            "tables; png: the figures; latex, pdf and svg: a table and figures for a paper. May be repeated, or given "
            "with commas.",
        ),
    ] = ["html"],  # noqa: B006  # typer wants a list
) -> None:
    """Report what finished runs achieved and cost; draws the figures and writes the report again.

    Several runs are compared. The tables are history (one row per evaluation), learners (one row per learner) and
    costs (one row per policy, until the target and at the end).
    """
    formats = formats_named(format_)
    paths = [path for folder in folders for path in run_folders(folder)]
    if not paths:
        raise ConfigError(f"{folders[0]} contains no finished run; continue it with: metis resume {folders[0]}")
    from metis.runs.run import Run

    runs = [Run.load(path) for path in paths]
    target = out
    if target is None:
        alone = len(folders) == 1
        target = (paths[0] if len(paths) == 1 else folders[0]) if alone else folders[0].parent
    written = write(runs, target, title_of(runs, target), formats, everywhere=out is None)
    for path in written:
        say(f"{path.stem} in {path}")


def formats_named(given: Sequence[str]) -> list[str]:
    """The formats that an option lists, checked; html if it lists none."""
    from metis.experiments.config.errors import did_you_mean

    named = [name.strip().lower() for text in given for name in text.split(",") if name.strip()]
    named = ["md" if name == "markdown" else name for name in named]
    for name in named:
        if name not in FORMATS:
            raise ConfigError(f"--format is '{name}'; {did_you_mean(name, FORMATS)}")
    if "parquet" in named:
        from metis.reporting.tables import check_parquet

        check_parquet()
    return list(dict.fromkeys(named)) or ["html"]


def check_folder(folder: Path) -> None:
    """Refuse what is not a directory."""
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; give the directory of a run")
    if not folder.is_dir():
        again = shlex.quote(str(folder))
        raise ConfigError(f"there is no directory {folder}; make a run with: metis simulate FILE --out {again}")


def run_folders(folder: Path) -> list[Path]:
    """The finished runs in a directory: itself, those of a comparison, or that of a controller."""
    check_folder(folder)
    if (folder / COMPARISON).is_file():
        return [path for name in planned(folder) if ((path := folder / name) / "summary.json").exists()]
    if (folder / "controller.db").is_file():
        if not (folder / "run" / "summary.json").is_file():
            raise ConfigError(
                f"the federation in {folder} has not ended; to see it: metis status {shlex.quote(str(folder))}"
            )
        return [folder / "run"]
    return [folder]


def plan_of(folder: Path) -> dict[str, Any]:
    """What a comparison says about itself."""
    try:
        document = json.loads((folder / COMPARISON).read_text("utf-8"))
        document["runs"] = [str(name) for name in document["runs"]]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{folder / COMPARISON} does not list the runs of a comparison") from None
    return dict(document)


def planned(folder: Path) -> list[str]:
    """The names of the runs of a comparison, finished or not."""
    return list(plan_of(folder)["runs"])


def title_of(runs: Sequence[Run], folder: Path) -> str:
    """The title of a report: the folder of a comparison, or the policy and the data of a single run."""
    if len(runs) > 1:
        return folder.resolve().name
    return f"{runs[0].policy} on {runs[0].setting.facts.get('dataset', 'its data')}"


def write(
    runs: Sequence[Run], folder: Path, title: str, formats: Sequence[str] = ("html",), *, everywhere: bool = True
) -> list[Path]:
    """Write a report in these formats, with its figures; `everywhere` also draws those of each run in its own folder.

    Returns the files to open first.
    """
    from metis.reporting.figures import save_comparison_figures, save_run_figures
    from metis.reporting.findings import comparable
    from metis.reporting.markdown import write_markdown
    from metis.reporting.notebook import Comparison
    from metis.reporting.paper import write_paper
    from metis.reporting.report import write_report
    from metis.reporting.tables import write_tables
    from metis.reporting.tradeoff import save_tradeoff
    from metis.runs.seeds import has_seeds

    single, runs = runs, comparable(runs)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; choose another --out")
    if has_seeds(runs):
        return [*Comparison(runs).save(folder, formats, title), *save_tradeoff(runs, folder)]
    written: list[Path] = []
    pictures: list[Path] = []
    if {"html", "md", "png"} & set(formats):
        suffixes = ("png", "svg") if "html" in formats else ("png",)
        if len(runs) == 1:
            pictures = save_run_figures(runs[0], folder, suffixes)
        else:
            pictures = [*save_comparison_figures(runs, folder, suffixes), *save_tradeoff(runs, folder, suffixes)]
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
        elif name in ("csv", "parquet"):
            written += write_tables(runs, folder, name)
        else:
            written += write_paper(runs, folder, [name])
    return written
