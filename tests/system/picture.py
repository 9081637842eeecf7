"""A picture of one seed: a lane for each process, its lives and tasks, messages between the lanes, and the faults."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten

from metis.reporting.style import blank_figure, house_style
from system.federation import CONTROLLER, LEARNERS, Federation

_LIFE, _TASK, _MESSAGE, _FAULT, _MODEL, _COMMAND = (
    "#d9dee5", "#4c78a8", "#9aa4b1", "#d62728", "#2ca02c", "#8a5a00"
)  # fmt: skip


def save_picture(federation: Federation, path: Path) -> None:
    """Draw what a traced federation recorded, from its start to its end or to what was violated."""
    lanes = {name: index for index, name in enumerate((CONTROLLER, *LEARNERS))}
    events, end = federation.events, federation.loop.now
    if federation.violation_at is not None:
        end = min(end, federation.violation_at + 1.0)
    with house_style():
        figure = blank_figure(12.0, 4.5)
        axes = figure.add_subplot()
        alive: dict[str, float] = {}
        tasks: dict[str, float] = {}
        for at, boot, kind, text in events:
            name = boot.partition(".")[0]
            lane = lanes.get(name)
            match kind:
                case "start" if lane is not None:
                    alive[name] = at
                case "killed" | "end":
                    gone = text.partition(".")[0] if kind == "killed" else name
                    if gone in alive:
                        axes.broken_barh(
                            [(alive[gone], at - alive.pop(gone))], (lanes[gone] - 0.3, 0.6), color=_LIFE, zorder=1
                        )
                    if kind == "killed":
                        axes.plot(at, lanes[gone], "x", color=_FAULT, markersize=9, markeredgewidth=2)
                case "says" if text.startswith("task:") and lane is not None:
                    tasks[name] = at
                case "says" if text.startswith(("trained:", "failed:")) and name in tasks and lane is not None:
                    axes.broken_barh([(tasks[name], at - tasks.pop(name))], (lane - 0.16, 0.32), color=_TASK, zorder=2)
                case "says" if text.startswith("handed_in:") and lane is not None:
                    axes.annotate(
                        "",
                        (at, lanes[CONTROLLER] + 0.3),
                        (at, lane - 0.2),
                        arrowprops={"arrowstyle": "->", "color": _MESSAGE},
                    )
                case "says" if text.startswith("round:"):
                    axes.plot(at, lanes[CONTROLLER], "|", color=_MODEL, markersize=16, markeredgewidth=2)
                case "fault":
                    color = _COMMAND if text.startswith("command") else _FAULT
                    axes.axvline(at, color=color, linewidth=0.8, linestyle=(0, (3, 2)))
                    axes.text(at, -0.62, text, color=color, fontsize=7, rotation=35, ha="left", va="bottom")
                case "VIOLATED":
                    axes.axvline(at, color=_FAULT, linewidth=2)
                    axes.set_title(shorten(text, 140), color=_FAULT, fontsize=9, loc="left", pad=60)
        for name, since in alive.items():
            axes.broken_barh([(since, end - since)], (lanes[name] - 0.3, 0.6), color=_LIFE, zorder=1)
        axes.set_yticks(list(lanes.values()), ["controller", *LEARNERS])
        axes.set_xlim(0, max(1.0, end))
        axes.set_ylim(len(lanes) - 0.4, -0.6)
        axes.set_xlabel(f"seconds of virtual time; seed {federation.seed}, {federation.policy_name}")
        figure.savefig(path, bbox_inches="tight")
