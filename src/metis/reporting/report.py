"""One self-contained page about a run or a comparison of runs: nothing to install, nothing to fetch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metis.errors import ConfigError
from metis.files import write_text
from metis.reporting import charts, spending, style, summaries
from metis.reporting.cost_tables import cost_tables, learner_sections, privacy_sections, refusal_sections
from metis.reporting.findings import energy_unit, findings, lead
from metis.reporting.provenance import configuration_file, configurations, facts, provenance, repeating, versions
from metis.reporting.tradeoff import period_charts, tradeoff_chart
from metis.runs.run import Run

REPORT = "report.html"


def write_report(runs: Sequence[Run], folder: Path, title: str, command: str | None = None) -> Path:
    """Write `report.html` for one run or several, with tables, figures and how to repeat it; returns its path."""
    if not runs:
        raise ConfigError("a report needs at least one run")
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("metis.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = Markup  # only for our own figures; their texts are escaped
    page = environment.get_template("report.html.jinja").render(_contents(list(runs), folder, title, command))
    write_text(folder / REPORT, page)
    return folder / REPORT


def _contents(runs: list[Run], folder: Path, title: str, command: str | None) -> dict[str, Any]:
    names = summaries.labels(runs)
    window = summaries.timeline_window(runs)
    files = [configuration_file(run, folder) for run in runs]
    return {
        "title": title,
        "lead": lead(runs),
        "findings": findings(runs, names),
        "costs": cost_tables(runs, names),
        "metric": charts.titled(runs[0].setting.metric),
        "unit": energy_unit(runs[0]),
        "relative": energy_unit(runs[0]) != "J",
        "curves": charts.curves(runs, names),
        "tradeoff": tradeoff_chart(runs),
        "periods": period_charts(runs, names),
        "policies": charts.policies(runs, names),
        "bars": charts.bars(runs, names),
        "timelines": charts.timelines(runs, names, window),
        "window": charts.window(runs, window),
        "hatched": len(runs[0].setting.learners) <= summaries.MAX_ROWS,
        "rows": all(summaries.rows_drawn(run, window) for run in runs),
        "kinds": [
            kind
            for kind in style.KIND_COLOURS
            if any(summaries.shares(run.costs)[kind] > summaries.NOTHING for run in runs)
        ],
        "distribution": charts.distribution(runs[0]),
        "learners": learner_sections(runs, names),
        "privacy": privacy_sections(runs, names),
        "privacy_headings": spending.HEADINGS,
        "refusals": refusal_sections(runs, names),
        "facts": facts(runs[0]),
        "provenance": provenance(runs, names),
        "versions": versions(runs[0]),
        "configurations": configurations(files, names),
        "command": repeating(runs, files, folder) if command is None else command,
        "exactly": not any(run.setting.real_time for run in runs),
        "several": len(runs) > 1,
    }
