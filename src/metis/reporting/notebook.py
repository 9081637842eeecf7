"""How results are shown in a notebook: a small table and the curves, in self-contained HTML."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis.errors import ConfigError
from metis.files import write_text
from metis.reporting import figures, paper, style, summaries
from metis.reporting.cost_tables import Row, cost_tables
from metis.reporting.findings import comparable, energy_unit, findings
from metis.reporting.markdown import MARKDOWN
from metis.reporting.report import REPORT, write_report
from metis.reporting.tables import cost_rows, write_tables
from metis.runs.run import Run, data_frame
from metis.runs.seeds import has_seeds, summarise
from metis.text import metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PIXELS_PER_INCH = 90  # a notebook stores its pictures
_COLUMNS = ("iterations", "PT (s)", "CT (s)", "CC")
_ENERGIES = ("equation", "active", "+ idle")


class Comparison:
    """Runs side by side, as in the paper's tables: the costs of each, against the first.

        metis.Comparison([federation.simulate(policy, seconds=60, target=0.9) for policy in policies])

    Compare what has the same data, the same start and the same budget: the runs of one `Federation`. Where the runs
    have several seeds, which `federation.compare(policies, seeds=5)` makes, everything is shown as mean and standard
    deviation over them.

    - `runs`: finished runs; the first is the one that the others are compared with.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        if not runs:
            raise ConfigError("a comparison needs at least one run")
        self.runs = comparable(runs)

    @property
    def several(self) -> bool:
        """Whether there are several seeds."""
        return has_seeds(self.runs)

    def to_records(self) -> list[dict[str, Any]]:
        """One plain row per run until the target, if there is one, and one at the end."""
        return cost_rows(self.runs)

    def to_pandas(self) -> Any:
        """The same as a pandas table; needs the extra `tables`."""
        return data_frame(self.to_records())

    def summary(self) -> list[dict[str, Any]]:
        """One row per policy: mean, deviation, 95 % bootstrap interval, factors and wins of every cost and metric."""
        return summarise(self.runs)

    def plot(self, path: str | Path | None = None) -> Figure:
        """The metric over time and over update requests, with bands over the seeds; saved to a `path` if given."""
        return figures.drawn(paper.seed_curves if self.several else figures.curves_figure, self.runs, path)

    def latex(self) -> str:
        """The table of a paper, for the package booktabs."""
        return paper.latex(paper.paper_table(self.runs))

    def markdown(self) -> str:
        """The same table as Markdown."""
        return paper.markdown(paper.paper_table(self.runs))

    def plot_timelines(self, path: str | Path | None = None) -> Figure:
        """Which learners trained and which waited in the first rounds of each policy; saved if a `path` is given."""
        return figures.draw_timelines(self.runs, path)

    def report(self, folder: str | Path, title: str = "Comparison") -> Path:
        """Write `report.html` to `folder`, one page with all tables and figures, under `title`; returns its path."""
        if not self.several:
            return write_report(self.runs, Path(folder), title)
        write_text(Path(folder) / REPORT, _document(title, self._repr_html_()))
        return Path(folder) / REPORT

    def save(
        self, folder: str | Path, formats: Sequence[str] | str = ("html", "md", "csv", "latex", "pdf", "svg"),
        title: str = "Comparison",
    ) -> list[Path]:  # fmt: skip
        """Write the results to `folder`; returns the paths.

        - `formats`: a list, or with commas, of html, md, csv, parquet, latex, and pdf, svg or png figures.
        - `title`: of the page and of the Markdown.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        written: list[Path] = []
        for name in formats.split(",") if isinstance(formats, str) else formats:
            if name == "html":
                written.append(self.report(folder, title))
            elif name == "md":
                words = "".join(f"- {sentence}\n" for sentence in paper.findings(self.runs))
                write_text(folder / MARKDOWN, f"# {title}\n\n{words}\n{self.markdown()}")
                written.append(folder / MARKDOWN)
            elif name in ("csv", "parquet"):
                written += write_tables(self.runs, folder, name)
                written += paper.write_paper(self.runs, folder, ["csv"]) if name == "csv" else []
            elif name in ("latex", "pdf", "svg", "png"):
                written += paper.write_paper(self.runs, folder, [name])
            else:
                raise ConfigError(f"there is no format '{name}'; allowed: html, md, csv, parquet, latex, pdf, svg, png")
        return written

    def __repr__(self) -> str:
        table = paper.paper_table(self.runs)
        rows = [["", *table.headings]]
        rows += [[policy, *map(paper.shown, cells)] for policy, cells in zip(table.policies, table.rows, strict=True)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            )
            for row in rows
        ]
        return "\n".join([*lines, table.caption])

    def _repr_html_(self) -> str:
        if self.several:
            return _seeds_html(self.runs)
        names = summaries.labels(self.runs)
        table = cost_tables(self.runs, names)[0]
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in findings(self.runs, names))
        rows = [(row.label, row) for row in table["rows"]]
        note = ""
        if table["first"]:
            note = f"× is the cost of {table['first']} divided by that of the row: above 1 is cheaper."
        return _page(self.runs, table["caption"], rows, f"<ul>{items}</ul>", note)


def _seeds_html(runs: list[Run]) -> str:
    """The table over the seeds, what came out in words, the curves with their bands, and every run."""
    table = paper.paper_table(runs)

    def row(policy: str, cells: Sequence[paper.Cell]) -> str:
        texts = [escape(paper.shown(cell)) for cell in cells]
        shown = [f"<strong>{text}</strong>" if cell.best else text for cell, text in zip(cells, texts, strict=True)]
        return f'<tr><th scope="row">{escape(policy)}</th>{"".join(f"<td>{text}</td>" for text in shown)}</tr>'

    single = [
        [
            run.policy,
            str(run.setting.seed),
            metric(run.final_metric),
            str(run.rounds),
            run.community_model.sha256()[:16],
        ]
        for run in runs
    ]
    heads = ("policy", "seed", f"final {runs[0].setting.metric}", "community models", "SHA-256 of the model")
    lines = [
        "<table><thead><tr><th></th>",
        *(f'<th scope="col">{escape(heading)}</th>' for heading in table.headings),
        "</tr></thead><tbody>",
        *(row(policy, cells) for policy, cells in zip(table.policies, table.rows, strict=True)),
        f"</tbody></table><p><small>{escape(table.caption)}</small></p><ul>",
        *(f"<li>{escape(sentence)}</li>" for sentence in paper.findings(runs)),
        "</ul>",
        _picture(paper.seed_curves(runs), f"Curves of {runs[0].setting.metric}, mean and deviation over the seeds"),
        "<details><summary>every run</summary><table><thead><tr>",
        *(f'<th scope="col">{escape(head)}</th>' for head in heads),
        "</tr></thead><tbody>",
        *(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>" for texts in single),
        "</tbody></table></details>",
    ]
    return f"<div>{''.join(lines)}</div>"


def _document(title: str, content: str) -> str:
    """A page of its own, with nothing to fetch."""
    style = (
        "body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem } "
        "table { border-collapse: collapse } th, td { padding: .25rem .7rem; text-align: right } "
        "th:first-child, td:first-child { text-align: left } thead tr { border-bottom: 1px solid #5a626b } "
        "tbody tr + tr { border-top: 1px solid #dfe2e6 }"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{style}</style></head><body><h1>{escape(title)}</h1>{content}</body></html>\n"
    )


def run_html(run: Run) -> str:
    """The costs of one run, until the target and at the end, and its curves."""
    tables = cost_tables([run], [run.policy])
    target = run.setting.target
    whens = ["at the end"] if target is None else [f"until {target.metric} {target.value:g}", "at the end"]
    rows = [(when, table["rows"][0]) for when, table in zip(whens, tables, strict=True)]
    return _page([run], f"{run.policy}: {run.finish_reason}", rows, "", "")


def _page(runs: list[Run], caption: str, rows: Sequence[tuple[str, Row]], words: str, note: str) -> str:
    measured, unit = escape(runs[0].setting.metric), energy_unit(runs[0])
    headings = [
        *_COLUMNS,
        *(f"EC {kind} ({unit})".replace("ε s", "ε\u00a0s") for kind in _ENERGIES),
        "idle share",
        f"{measured}, final",
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
    with style.house_style(), style.any_alphabet():
        figure.savefig(buffer, format="png", dpi=_PIXELS_PER_INCH)
    return (
        f'<img alt="{escape(words)}" style="max-width: 100%; background: white" '
        f'src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
    )
