"""`metis data list | fetch | show`: the data sets, and how one is divided over learners."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from metis.cli.options import FileArgument, JsonOption, SetOption
from metis.cli.output import add, print_json, say, stdout


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Data sets: list them, download them, show how one is divided.")
    add(group, list_)
    add(group, fetch, "metis data fetch cifar10 --folder data")
    add(group, show, "metis data show first.toml --set partition.sizes=power_law")
    app.add_typer(group, name="data")


def list_(as_json: JsonOption = False) -> None:
    """List the data sets that a file can name, and where they are stored."""
    from metis.data.datasets import DATASETS, find_dataset
    from metis.reporting.console import plain_table

    rows = []
    for name, source in DATASETS.items():
        path = find_dataset(name)
        rows.append(
            {
                "name": name,
                "title": source.title,
                "shape": "x".join(map(str, source.shape)),
                "task": source.task,
                "classes": len(source.class_names),
                "train": source.train,
                "test": source.test,
                "bundled": source.bundled,
                "file": None if path is None else str(path),
            }
        )
    if as_json:
        print_json(rows)
        return
    cells = [
        [
            str(row["name"]),
            str(row["title"]),
            str(row["shape"]),
            "regression" if row["task"] == "regression" else str(row["classes"]),
            f"{row['train']:,}",
            f"{row['test']:,}",
            "in the package" if row["bundled"] else str(row["file"] or f"metis data fetch {row['name']}"),
        ]
        for row in rows
    ]
    headings = ["name", "description", "example", "classes", "train", "test", "location"]
    stdout().print(plain_table("Data sets", headings, cells))


def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of [bold]metis data list[/].")],
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Directory to store it in; by default the cache.")
    ] = None,
) -> None:
    """Download a data set, verify it, and store it as one npz file."""
    from metis.data.datasets import fetch_dataset, find_dataset

    path = find_dataset(name, folder)
    if path is not None:
        say(f"{name} is already there: {path}")
        return
    say(f"{name} is in {fetch_dataset(name, folder, progress=sys.stderr.isatty())}")


def show(
    file: FileArgument,
    set_: SetOption = [],  # noqa: B006  # typer wants a list
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The figure, a png, svg or pdf file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how many examples of each class, or of each range of the target, every learner has.

    As a table and as a figure, as in the paper's Figure 5.
    """
    from metis.experiments.data import divide
    from metis.reporting.console import partition_table
    from metis.reporting.figures import partition_figure
    from metis.reproduction.environments import load_experiment

    config = load_experiment(file, set_)
    division = divide(config, progress=not as_json)
    names = [assignment.name for assignment in division.assignments]
    document: dict[str, Any] = {"dataset": config.data.dataset}
    ranges = division.dataset.task == "regression"
    if ranges:
        counts, edges = division.counts_by_range()
        labels = [f"{low:.3g} to {high:.3g}" for low, high in itertools.pairwise(edges)]
        document |= {"ranges": labels, "edges": edges.tolist()}
    else:
        counts, labels = division.counts, [str(name) for name in division.dataset.class_names]
        document["classes"] = labels
    if as_json:
        print_json({**document, "learners": names, "counts": counts.tolist()})
    else:
        console = stdout()
        console.print(partition_table(counts, names, labels, console.width, ranges=ranges))
    picture = out or Path("runs") / f"{file.stem}-partition.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    partition_figure(counts, names, labels, picture, "range of the target" if ranges else "class")
    if not as_json:
        say(f"figure in {picture}")
