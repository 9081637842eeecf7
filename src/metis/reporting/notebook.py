"""How results are shown in a notebook: a small table and the curves, in self-contained HTML."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis.errors import ConfigError
from metis.reporting import figures
from metis.reporting.cost_tables import Row, cost_tables
from metis.reporting.findings import comparable, energy_unit, findings
from metis.reporting.report import write_report
from metis.reporting.tables import cost_rows
from metis.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PIXELS_PER_INCH = 90  # a notebook stores its pictures
_COLUMNS = ("iterations", "PT (s)", "CT (s)", "CC")
_ENERGIES = ("equation", "active", "+ idle")


class Comparison:
    """Runs side by side, as in the paper's tables: the costs of each, against the first.

        metis.Comparison([federation.simulate(policy, seconds=60, target=0.9) for policy in policies])

    Compare what has the same data, the same start and the same budget: the runs of one `Federation`.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        if not runs:
            raise ConfigError("a comparison needs at least one run")
        self.runs = comparable(runs)

    def to_records(self) -> list[dict[str, Any]]:
        """One plain row per policy until the target, if there is one, and one at the end."""
        return cost_rows(self.runs)

    def to_pandas(self) -> Any:
        """The same as a pandas table; needs the extra `tables`."""
        import pandas

        return pandas.DataFrame(self.to_records())

    def plot(self, path: str | Path | None = None) -> Figure:
        """The metric over parallel time and over update requests; saved if a path is given."""
        return figures.draw(self.runs, path)

    def plot_timelines(self, path: str | Path | None = None) -> Figure:
        """Which learners trained and which waited in the first few rounds of each policy; saved if a path is given."""
        return figures.draw_timelines(self.runs, path)

    def report(self, folder: str | Path, title: str = "Comparison") -> Path:
        """Write `report.html`, one page with all tables and figures; returns its path."""
        return write_report(self.runs, Path(folder), title)

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(figures.labels(self.runs))}>"

    def _repr_html_(self) -> str:
        names = figures.labels(self.runs)
        table = cost_tables(self.runs, names)[0]
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in findings(self.runs, names))
        rows = [(row.label, row) for row in table["rows"]]
        note = ""
        if table["first"]:
            note = f"× is the cost of {table['first']} divided by that of the row: above 1 is cheaper."
        return _page(self.runs, table["caption"], rows, f"<ul>{items}</ul>", note)


def run_html(run: Run) -> str:
    """The costs of one run, until the target and at the end, and its curves."""
    tables = cost_tables([run], [run.policy])
    target = run.setting.target
    whens = ["at the end"] if target is None else [f"until {target.metric} {target.value:g}", "at the end"]
    rows = [(when, table["rows"][0]) for when, table in zip(whens, tables, strict=True)]
    return _page([run], f"{run.policy}: {run.finish_reason}", rows, "", "")


def _page(runs: list[Run], caption: str, rows: Sequence[tuple[str, Row]], words: str, note: str) -> str:
    metric, unit = escape(runs[0].setting.metric), energy_unit(runs[0])
    headings = [
        *_COLUMNS,
        *(f"EC {kind} ({unit})".replace("ε s", "ε\u00a0s") for kind in _ENERGIES),
        "idle share",
        f"{metric}, final",
        "best",
    ]
    legend = "PT parallel time, CT cumulative time, CC update requests, EC energy by three definitions."
    lines = [
        f"<p><strong>{escape(caption)}</strong></p>",
        "<table><thead><tr><th></th>",
        *(f'<th scope="col">{heading}</th>' for heading in headings),
        "</tr></thead><tbody>",
        *(_row(name, row, len(headings)) for name, row in rows),
        f"</tbody></table><p><small>{legend} {escape(note)}</small></p>{words}",
    ]
    if any(run.history for run in runs):
        lines.append(_picture(figures.draw(runs), f"Curves of {runs[0].setting.metric}"))
    return f"<div>{''.join(lines)}</div>"


def _row(name: str, row: Row, columns: int) -> str:
    cells = []
    if row.note:
        cells.append(f'<td colspan="{columns - len(row.cells)}">{escape(row.note)}</td>')
    for cell in row.cells:
        value = f"<strong>{escape(cell.value)}</strong>" if cell.best else escape(cell.value)
        cells.append(f"<td>{value}{f'<br><small>{cell.factor}</small>' if cell.factor else ''}</td>")
    return f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>'


def _picture(figure: Figure, words: str) -> str:
    """As PNG: several SVGs on one page would share their ids, and some viewers of notebooks drop them."""
    buffer = io.BytesIO()
    with figures.house_style(), figures.any_alphabet():
        figure.savefig(buffer, format="png", dpi=_PIXELS_PER_INCH)
    return (
        f'<img alt="{escape(words)}" style="max-width: 100%; background: white" '
        f'src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
    )
