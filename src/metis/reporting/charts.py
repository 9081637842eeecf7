"""The charts of a report, each with a description in words and a sentence that explains it."""

from __future__ import annotations

from dataclasses import dataclass

from metis.reporting import cost_tables, figures, summaries
from metis.runs.folds import Span
from metis.runs.run import Run
from metis.text import listed, metric, number, percent, plural


@dataclass(frozen=True)
class Chart:
    """A picture, a description of it in words, and one sentence that explains it."""

    svg: str
    words: str
    caption: str = ""
    title: str = ""
    colour: int = 0
    size: str = "full"


def titled(name: str) -> str:
    """The name of a metric as a title; the usual abbreviations in capitals."""
    return name.upper() if name in ("mae", "mse", "rmse", "auc") else name[:1].upper() + name[1:]


def curves(runs: list[Run], names: list[str]) -> list[Chart]:
    setting = runs[0].setting
    better = "higher" if setting.higher_is_better else "lower"
    smooth = " Thin lines are single evaluations, thick ones their running median." if summaries.smoothed(runs) else ""
    values = []
    for run, name in zip(runs, names, strict=True):
        values.append(f"{name} {metric(run.final_metric)} at the end, {metric(run.best_metric)} at best")
    over_time = (
        f"How good the community model is ({better} is better) against the time that has passed: "
        f"the further left a curve reaches a value, the faster the policy.{smooth}"
    )
    over_requests = (
        "The same against the number of local models handed in, which is what communication costs: "
        "further to the left is less traffic."
    )
    words = f"Line chart of {setting.metric} over {{}}. {'; '.join(values)}."
    return [
        Chart(
            figures.curve_svg(runs, "parallel_time", "curve-time"),
            words.format("parallel time in seconds"),
            over_time,
            f"{titled(setting.metric)} over parallel time",
        ),
        Chart(
            figures.curve_svg(runs, "update_requests", "curve-requests"),
            words.format("update requests"),
            over_requests,
            f"{titled(setting.metric)} over update requests",
        ),
    ]


def _shares_in_words(run: Run) -> str:
    return ", ".join(
        f"{kind} {percent(share)}" for kind, share in summaries.shares(run.costs).items() if share > summaries.NOTHING
    )


def policies(runs: list[Run], names: list[str]) -> Chart:
    values = "; ".join(f"{name}: {_shares_in_words(run)}" for run, name in zip(runs, names, strict=True))
    return Chart(
        figures.policies_svg(runs, "policies"),
        f"Bar chart of how all learners together spent their time. {values}.",
        "How all learners together spent their time: training, or waiting for others.",
    )


def _alike(runs: list[Run], names: list[str]) -> list[tuple[Run, str, int]]:
    """Runs in which every learner did the same at the same time, as under all asynchronous policies, are drawn once."""
    groups: list[tuple[Run, list[Span], list[str], int]] = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        spans = run.spans()
        for group in groups:
            if group[1] == spans:
                group[2].append(name)
                break
        else:
            groups.append((run, spans, [name], cost_tables.colour(index)))
    return [(run, listed(sharing), colour) for run, _, sharing, colour in groups]


def bars(runs: list[Run], names: list[str]) -> list[Chart]:
    until = max(run.costs.parallel_time for run in runs)
    return [
        Chart(
            figures.active_idle_svg(run, until, f"bars-{index}"),
            f"Bar chart of how each learner spent its time under {name}. Together: {_shares_in_words(run)}.",
            title=f"{name}: {percent(summaries.shares(run.costs)['idle'])} idle",
            colour=colour,
        )
        for index, (run, name, colour) in enumerate(_alike(runs, names))
    ]


def timelines(runs: list[Run], names: list[str], until: float) -> list[Chart]:
    charts = []
    for index, (run, name, colour) in enumerate(_alike(runs, names)):
        remarks = []
        if not summaries.rows_drawn(run, until):
            remarks.append("There are too many learners for a row each: this is the share of learners in each state.")
        if summaries.versions_drawn(run, until):
            remarks.append("Each vertical line is a new community model.")
        elif run.rounds:
            remarks.append(
                "New community models are too frequent to draw a line for each; "
                "a gap in a bar is where a learner handed in its model and got the next one."
                if summaries.rows_drawn(run, until)
                else "New community models are too frequent to draw a line for each."
            )
        charts.append(
            Chart(
                figures.timeline_svg(run, until, f"timeline-{index}"),
                f"Timeline of {plural(len(run.setting.learners), 'learner')} under {name} over the first "
                f"{number(until)} seconds. Over the whole run: {_shares_in_words(run)}.",
                " ".join(remarks),
                name,
                colour,
            )
        )
    return charts


def window(runs: list[Run], until: float) -> str:
    """Which part of the runs the timelines show."""
    end = max(run.costs.parallel_time for run in runs)
    return f"the first {number(until)} s of {number(end)} s" if until < end else f"all {number(end)} s"


def distribution(run: Run) -> Chart:
    learners = run.setting.learners
    classes = any(learner.class_counts for learner in learners)
    values = []
    for learner in learners[:10]:
        held = sum(count > 0 for count in learner.class_counts)
        values.append(f"{learner.name} {learner.examples:,}" + (f" of {held} classes" if classes else ""))
    more = f" and {len(learners) - 10:,} more learners" if len(learners) > 10 else ""
    return Chart(
        figures.distribution_svg(run, "data"),
        f"Bar chart of training examples by learner{' and class' if classes else ''}: {', '.join(values)}{more}.",
        "How many training examples each learner has"
        + (
            ", and of which classes: the more the columns differ, the harder the federation is to train."
            if classes
            else "."
        ),
        size="full" if summaries.wide(run) else "medium",
    )
