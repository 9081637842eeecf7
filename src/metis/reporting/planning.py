"""What a terminal shows of a plan and of a replay: tables of at most a hundred columns, and sentences.

Both are made from the JSON documents that the commands print, so that they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from metis.text import number, percent, seconds, short_number, size

WIDTH = 100
_MAX_ROWS = 24  # of a table with a row per learner
_JUDGED = {"sensible": ("✓", "green"), "too small": ("low", "yellow"), "too large": ("high", "yellow")}

Row = Mapping[str, Any]


def plan_view(plan: Row, width: int = WIDTH) -> Group:
    """All of a plan: learners, policies, what each learner does under each, and advice."""
    title = f"Learners of {plan['file']}; a model has {size(plan['model_bytes'])}"  # may be wider than its table
    parts: list[RenderableType] = [Text(title, style="bold"), _learners(plan), ""]
    parts += [*_policies(plan, width), Text(_legend(plan), style="dim"), ""]
    for title, show in (
        ("B_k: batches between two mixings", lambda row: number(row["steps"])),
        ("Local epochs between two mixings", lambda row: number(row["local_epochs"])),
        ("Idle share of the time", lambda row: percent(row["idle_share"])),
    ):
        parts += [*_matrix(plan, title, show, width), ""]
    if "privacy" in plan:
        parts += [_privacy(plan["privacy"]), ""]
    parts += _advice(plan)
    return Group(*parts)


def _privacy(privacy: Row) -> Group:
    """What each policy spends of each site's budget, if nothing limited its steps."""
    rounds = privacy["rounds"]
    ends = "at the end" if rounds is None else f"after {rounds} rounds"
    columns: list[_Column] = [
        ("policy", lambda row: Text(row["label"])),
        ("learner", lambda row: Text(row["learner"])),
        ("batches\nper round", lambda row: number(row["steps_per_round"])),
        (f"epsilon\n{ends}", lambda row: "–" if row["epsilon"] is None else f"{row['epsilon']:.3g}"),
        ("budget", lambda row: "–" if row["budget"] is None else number(row["budget"])),
        (
            "rounds until\nit is spent",
            lambda row: "–" if row["rounds_until_spent"] is None else number(row["rounds_until_spent"]),
        ),
    ]
    rows = [{"label": policy["label"], **row} for policy in privacy["policies"] for row in policy["learners"]]
    parts: list[RenderableType] = [_costs("Privacy, if nothing limited the batches", columns, rows)]
    if privacy["lambda_of_slowest"] is not None:
        text = f"With λ = {privacy['lambda_of_slowest']:.3g} the slowest learner spends exactly its budget. "
        parts.append(Text(text + "A run limits each site to its budget, whatever λ is.", style="dim"))
    return Group(*parts)


def _table(title: str) -> Table:
    return Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )


def _learners(plan: Row) -> Table:
    table = _table("")
    table.add_column("learner", overflow="fold", max_width=30)
    for heading in (
        "examples",
        "batch\nsize",
        "batches\nper epoch",
        "time\nper batch",
        "time\nper epoch",
        "exchange",
        "power",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in _grouped(plan["learners"], _without_name):
        if row is None:
            table.add_row(Text(name, style="dim"), *[""] * 7)
            continue
        active, idle, unit = row["power"]
        power = f"{number(active)}{'' if idle is None else f' / {number(idle)}'} {'W' if unit == 'watt' else 'ε'}"
        table.add_row(
            Text(name),
            f"{row['examples']:,}",
            number(row["batch_size"]),
            number(row["batches_per_epoch"]),
            seconds(row["time_per_batch"]),
            seconds(row["epoch_seconds"]),
            seconds(row["exchange_seconds"]),
            power,
        )
    return table


_Column = tuple[str, Callable[[Row], "str | Text"]]


def _apart(
    title: str, first: _Column, work: Sequence[_Column], energy: Sequence[_Column], rows: Sequence[Row], width: int
) -> list[RenderableType]:
    """One table, or a second one for the energy where it would be too wide."""
    whole = _costs(title, [first, *work, *energy], rows)
    if _width(whole) <= width:
        return [whole]
    return [_costs(title, [first, *work], rows), "", _costs("", [first, *energy], rows)]


def _costs(title: str, columns: Sequence[_Column], rows: Sequence[Row]) -> Table:
    table = _table(title)
    for column, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(show(row) for _, show in columns))
    return table


def _energies(unit: str, key: str) -> list[_Column]:
    unit = "Wh" if unit == "watt hour" else "ε s"
    return [
        (f"{unit}\nequation", lambda row: short_number(row[key]["equation"])),
        (f"{unit}\nactive", lambda row: short_number(row[key]["active"])),
        (f"{unit}\n+ idle", lambda row: short_number(row[key]["idle_charged"])),
    ]


def _width(table: Table) -> int:
    return Console(width=1000).measure(table).maximum


def _policies(plan: Row, width: int) -> list[RenderableType]:
    work: list[_Column] = [
        ("round", lambda row: "–" if row["round_seconds"] is None else seconds(row["round_seconds"])),
        ("idle", lambda row: percent(row["idle_share"])),
        ("trans-\nfer", lambda row: percent(row["transfer_share"])),
        ("update\nrequests", lambda row: number(row["update_requests_per_hour"])),
        ("bytes", lambda row: size(row["bytes_per_hour"])),
        ("local\nepochs", lambda row: number(row["mean_local_epochs"])),
        ("λ", lambda row: Text(*_JUDGED.get(row["lambda_is"], ("", "")))),
    ]
    title = "Policies, in the steady state; requests, bytes and energy per hour"
    energy = _energies(plan["energy_unit"], "energy_per_hour")
    return _apart(title, ("policy", lambda row: Text(row["label"])), work, energy, plan["policies"], width)


def _legend(plan: Row) -> str:
    lines = ["Local epochs between two mixings are averaged by the weight of each model in the mixture."]
    for row in plan["policies"]:
        if (period := row["period"]) is not None:
            text = f"{row['label']} chooses periods of {seconds(period['seconds'])}: {period['reason']}."
            if period["not_awaited"]:
                text += f" Not waited for, because a batch takes too long: {', '.join(period['not_awaited'])}."
            text += (
                f" A probe of {seconds(row['first_round_seconds'])} comes first." if row["first_round_seconds"] else ""
            )
            lines.append(text)
    cold = {row["first_round_seconds"] for row in plan["policies"] if row["period"] is None} - {None}
    if cold:
        lines.append(f"The cold start, one epoch at every learner, comes first and takes {seconds(max(cold))}.")
    if any(row["protocol"] == "asynchronous" for row in plan["policies"]):
        lines.append("All asynchronous policies ask for the same work; they differ in how they mix.")
    return "\n".join(lines)


def _matrix(plan: Row, title: str, show: Callable[[Row], str], width: int) -> list[RenderableType]:
    """A row per learner, a column per policy; several tables if one would be too wide."""
    policies = plan["policies"]
    rows = [
        {"name": row["name"], "batches": row["batches_per_epoch"], "cells": cells}
        for row, *cells in zip(
            plan["learners"], *([show(found) for found in policy["learners"]] for policy in policies), strict=True
        )
    ]
    grouped = _grouped(rows, lambda row: (tuple(row["cells"]), row["batches"]))
    tables: list[RenderableType] = []
    first = 0
    while first < len(policies):
        count = len(policies) - first
        table = _some_columns(title, grouped, policies, first, count)
        while count > 1 and _width(table) > width:
            count -= 1
            table = _some_columns(title, grouped, policies, first, count)
        tables.append(table)
        first, title = first + count, ""
    return tables


def _some_columns(
    title: str, rows: Sequence[tuple[str, Any]], policies: Sequence[Row], first: int, count: int
) -> Table:
    table = _table(title)
    table.add_column("learner", overflow="fold", max_width=30)
    for policy in policies[first : first + count]:
        lam = policy["slowest_learner_epochs"]
        heading = policy["label"].replace(" ", "\n", 1) if lam is None else f"SemiSync\nλ = {lam:g}"
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for name, row in rows:
        cells = [""] * count if row is None else row["cells"][first : first + count]
        table.add_row(Text(name, style="dim" if row is None else ""), *cells)
    return table


def _grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> list[tuple[str, Row | None]]:
    """Equal rows are merged; of very many, the first and the last are shown."""
    alike: dict[Any, list[Row]] = {}
    for row in rows:
        alike.setdefault(repr(key(row)), []).append(row)
    merged: list[tuple[str, Row | None]] = []
    for same in alike.values():
        name = str(same[0]["name"])
        merged.append((name if len(same) == 1 else f"{name} and {len(same) - 1} alike", same[0]))
    if len(merged) <= _MAX_ROWS:
        return merged
    half = _MAX_ROWS // 2
    between = f"... {len(merged) - 2 * half} more: --json has all"
    return [*merged[:half], (between, None), *merged[-half:]]


def _without_name(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("name", "timing")}


def _advice(plan: Row) -> list[RenderableType]:
    parts: list[RenderableType] = []
    sensible = plan["lambda"]
    if sensible is not None:
        tried = [row["slowest_learner_epochs"] for row in plan["policies"] if row["lambda_is"] == "sensible"]
        text = Text("Sensible λ: ", style="bold")
        low, high = sensible["lowest"], sensible["highest"]  # None: no lambda is too large
        if high is not None and low > high:
            text.append("none. ", style="bold yellow")
        elif not tried:
            upward = "on" if high is None else f"to {high:.2g}"
            text.append(f"none of these; from {low:.2g} {upward}. ", style="bold yellow")
        else:
            text.append(f"{', '.join(f'{value:g}' for value in tried)}. ", style="bold green")
        text.append(sensible["why"])
        parts.append(text)
    parts += [Text.assemble(("warning: ", "yellow"), line) for line in plan["warnings"]]
    parts += [Text.assemble(("note: ", "dim"), line) for line in plan["notes"]]
    parts.append(
        Text.assemble(("note: ", "dim"), "Accuracy is not predicted: what a policy learns depends on data and network.")
    )
    return parts


# --- replay ----------------------------------------------------------------------------------------


def replay_view(comparison: Row, width: int = WIDTH) -> Group:
    """The recorded run and what other policies would have cost in the same time."""
    rows = [comparison["recorded"], *comparison["what_if"]]

    def name(row: Row) -> Text:
        recorded = row is comparison["recorded"]
        text = Text(row["label"], style="bold" if recorded else "")
        return text.append("\nrecorded" if recorded else "\nwhat if", style="dim")

    work: list[_Column] = [
        ("rounds", lambda row: number(row["rounds"])),
        ("update\nrequests", lambda row: number(row["update_requests"])),
        ("refused", lambda row: number(row["refused_updates"])),
        ("bytes", lambda row: "–" if row["bytes_exchanged"] is None else size(row["bytes_exchanged"])),
        ("steps", lambda row: short_number(row["steps"])),
        ("idle", lambda row: percent(row["idle_share"])),
        ("trans-\nfer", lambda row: percent(row["transfer_share"])),
    ]
    title = f"{comparison['directory']}: the same {seconds(comparison['seconds'])}, the same learners"
    parts = [*_apart(title, ("policy", name), work, _energies(comparison["energy_unit"], "energy"), rows, width), ""]
    parts += [_replayed_learners(rows, first) for first in range(1, len(rows), 2)]
    if comparison["recorded_course_reproduced"] is True:
        parts.append(Text("The recorded policy gave the recorded tasks and versions again.", style="green"))
    elif comparison["recorded_course_reproduced"] is False:
        parts.append(
            Text.assemble(
                ("warning: ", "yellow"),
                "the recorded policy does not give the recorded trace again: something that the events do not record "
                "influenced it, so take the other rows with caution.",
            )
        )
    parts += [Text.assemble(("note: ", "dim"), line) for line in comparison["notes"]]
    parts.append(
        Text.assemble(
            ("note: ", "dim"),
            ("Accuracy is not predicted", "bold"),
            ": no weights are trained here; times, traffic and energy are what the recorded timings give.",
        )
    )
    return Group(*parts)


def _replayed_learners(rows: Sequence[Row], first: int) -> Table:
    """How each learner spent its time, recorded and under up to two other policies."""
    shown = [rows[0], *rows[first : first + 2]]
    table = _table("Learners: local epochs per task, and idle share")
    table.add_column("learner", overflow="fold", max_width=24)
    for column, row in enumerate(shown):
        name = "recorded" if column == 0 else row["label"]
        table.add_column(Text(f"{name}\nepochs"), justify="right")
        table.add_column(Text("idle"), justify="right")
    lines = [
        {"name": learner["learner"], "cells": [cell for row in shown for cell in _spent(row["learners"][index])]}
        for index, learner in enumerate(rows[0]["learners"])
    ]
    for name, line in _grouped(lines, lambda line: line["cells"]):
        table.add_row(Text(name, style="dim" if line is None else ""), *([] if line is None else line["cells"]))
    return table


def _spent(learner: Row) -> tuple[str, str]:
    there = learner["active"] + learner["transfer"] + learner["idle"]
    epochs = learner["local_epochs"]
    return "–" if epochs is None else number(epochs), percent(learner["idle"] / there if there else 0.0)


def probe_table(probe: Row) -> Table:
    """The measurements of a probe."""
    table = _table(f"{probe['learner']}: {probe['batches']} batches timed on {probe['device']}")
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in (
        ("time per batch", seconds(probe["time_per_batch"])),
        ("fastest, slowest", f"{seconds(probe['fastest'])}, {seconds(probe['slowest'])}"),
        ("examples", f"{probe['examples']:,}"),
        ("batch size", number(probe["batch_size"])),
        ("batches per epoch", number(probe["batches_per_epoch"])),
        ("time per epoch", seconds(probe["batches_per_epoch"] * probe["time_per_batch"])),
        ("parameters", f"{probe['parameters']:,}"),
        ("size of a model", size(probe["model_bytes"])),
    ):
        table.add_row(name, value)
    return table
