"""`metis status`: a running federation seen from another terminal, or what is known of one that does not run."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from metis.cli.output import add, print_json, stdout
from metis.cli.rounds import RoundOption, RoundsOption, SiteOption, by_number, lasting, round_report_of, show_rounds
from metis.errors import ConfigError
from metis.text import number, percent, plural, printable, size

RUNNING, SILENT, NOT_RUNNING, DISK_FULL = 0, 1, 3, 4

Document = dict[str, Any]
_LEARNER_STYLES = {
    "training": "green", "late": "yellow", "disconnected": "red", "set aside": "red", "away": "dim",
}  # fmt: skip
_STYLES = {"running": "green", "paused": "yellow", "stopping": "yellow", "not running": "yellow"}


def register(app: typer.Typer) -> None:
    add(
        app,
        status,
        "metis status state",
        "metis status state --watch 2",
        "metis status --http 127.0.0.1:9464 --json",
        "metis status state --round 17",
    )


def status(
    folder: Annotated[
        Path | None, typer.Argument(metavar="STATE_DIR", help="State folder of the controller, on its machine.")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            "--http", metavar="HOST:PORT", help="Instead of the folder: the address at which it serves its status."
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="File with the token, if the status address needs one."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the status as JSON; with --watch one document per line.")
    ] = False,
    watch: Annotated[
        float | None,
        typer.Option("--watch", metavar="SECONDS", min=0.1, help="Refresh this often, until the run has ended."),
    ] = None,
    round_: RoundOption = None,
    rounds: RoundsOption = False,
    site: SiteOption = None,
) -> None:
    """Show a running federation: its learners and their states, the quality of the model, and the costs so far.

    With --round, --rounds or --site: why rounds lasted as long as they did, of any run, also a simulated one.
    Exit codes: 0 a controller is running, 1 it is running but does not answer, 3 none is running, 4 it is running but
    its disk is full, so that the federation is on hold.
    """
    from metis.deployment.controller.status import read_token

    if round_ is not None or rounds or site is not None:
        if folder is None:
            raise ConfigError("rounds are read from the folder of a run, or asked for with: metis admin ... status")
        show_rounds(round_report_of(folder, round_, site), as_json)
        return
    if (folder is None) == (http is None):
        raise ConfigError("name either the state folder of a controller or its status address: --http HOST:PORT")
    token = None if token_file is None else read_token(token_file)

    def look() -> View:
        return _at_folder(folder, token) if folder is not None else _at_address(str(http), token)

    view = look()
    if watch is not None:
        view = watch_views(look, view, watch, as_json)
    elif as_json:
        print_json(view.document)
    else:
        show_view(view, stdout())
    if view.code:
        raise typer.Exit(view.code)


class View:
    """One look at a federation: the document, a sentence if it is not running normally, and the exit code."""

    def __init__(self, document: Document, code: int = RUNNING, sentence: str = "") -> None:
        self.document, self.code, self.sentence = document, code, sentence

    @property
    def ended(self) -> bool:
        return self.document.get("state") == "finished"

    @property
    def tabular(self) -> bool:
        return self.code in (RUNNING, DISK_FULL) and "learners" in self.document

    def shown(self, width: int, height: int | None = None) -> RenderableType:
        if self.tabular:
            return federation_view(self.document, width, height)
        return Text(printable(self.sentence))


# --- finding it -------------------------------------------------------------------------------------


def _at_address(address: str, token: str | None) -> View:
    from metis.deployment.controller.status import Unanswered, fetch

    try:
        return _running({}, fetch(address, token))
    except Unanswered as problem:
        return View({"running": False, "reason": str(problem)}, NOT_RUNNING, f"no controller answers: {problem}")


def _running(about: Document, document: Document) -> View:
    full = document.get("disk", {}).get("full")  # missing from an older controller
    return View({"running": True, **about, **document}, DISK_FULL if full else RUNNING)


def _at_folder(folder: Path, token: str | None) -> View:
    from metis.deployment.controller.announcement import find, in_use
    from metis.deployment.controller.status import Unanswered, fetch

    if not (folder / "controller.db").is_file():
        raise ConfigError(_no_state(folder))
    found = find(folder)
    if found is not None and not found.gone:
        who = f"process {found.pid} on {found.host} since {_local(found.started)}"
        about = {"running": True, "run": found.run, "pid": found.pid, "listen": found.listen, "http": found.http}
        if found.http is None:
            return View(
                about, RUNNING, f"a controller is running on {folder} ({who}), but serves no status: --http was ''"
            )
        try:
            document = fetch(found.http, token)
            if document["run"] == found.run:
                return _running(about, document)
            problem = f"{found.http} serves the status of run {document['run']}"
        except Unanswered as unanswered:
            problem = str(unanswered)
        about["reason"] = problem
        return View(about, SILENT, f"the controller on {folder} ({who}) does not answer: {problem}")
    starting = f"a controller has just started on {folder} and is preparing; try again in a moment"
    try:
        if not in_use(folder):
            return _not_running(folder, killed=found is not None)
    except ConfigError:
        if not in_use(folder):  # else one has just begun to write what was being read
            raise
    return View({"running": True, "state": "starting"}, RUNNING, starting)


def _no_state(folder: Path) -> str:
    if not folder.exists():
        return (
            f"there is no folder {folder}; a controller makes one with: metis controller FILE --state {_quoted(folder)}"
        )
    if (folder / "events.jsonl").is_file():
        return f"{folder} holds a run, not the state of a controller; see it with: metis report {_quoted(folder)}"
    return f"{folder} is not the state folder of a controller: it has no controller.db"


def _not_running(folder: Path, *, killed: bool) -> View:
    """One sentence about what the journal knows, and how to resume."""
    from metis.deployment.controller.status import recall

    document = {"running": False, **recall(folder)}
    learners, latest, metric = document["learners"], document["latest"], document["metric"]
    far = f"{lasting(document['seconds'])} of the run, community model {document['version']}"
    far += f", {plural(document['update_requests'], 'update')} of {plural(len(learners), 'learner')}"
    if latest is not None and latest.get(metric) is not None:
        far += f", {metric} {latest[metric]:.3f}"
        if document["best"] is not None:
            far += f" (best {document['best'][metric]:.3f})"
    sentence = f"no controller is running on {folder}"
    if document["state"] == "finished":
        sentence += f"; the federation has ended: {document['finish_reason']} ({far}). "
        return View(document, NOT_RUNNING, sentence + f"See it with: metis report {_quoted(folder / 'run')}")
    sentence += "; the last one was killed" if killed else ""
    sentence += f". {document['policy']} had reached {far}" if document["policy"] else ". Its run has not begun"
    return View(document, NOT_RUNNING, f"{sentence}. Resume with: metis controller FILE --state {_quoted(folder)}")


# --- showing it -------------------------------------------------------------------------------------


def federation_view(document: Mapping[str, Any], width: int, height: int | None = None) -> Group:
    """Head lines and a row for each learner; if not all fit the height, those that need attention come first."""
    head = _head(document)
    learners: Sequence[Mapping[str, Any]] = document["learners"]
    if not learners:
        return Group(*head, Text("\nno learner has joined yet", style="dim"))
    left = 0
    if height is not None:
        lines = sum(len(line.wrap(Console(width=width), width)) for line in head)
        room = max(3, height - lines - 5)  # an empty line, the heading, its rule, the last line and the cursor's
        if len(learners) > room:
            order = {"set aside": 0, "late": 1, "disconnected": 1, "away": 2}
            learners = sorted(
                learners, key=lambda learner: (order.get(learner["state"], 3), by_number(learner["name"]))
            )
            learners, left = learners[:room], len(learners) - room
    more = [Text(f"and {plural(left, 'more learner')}", style="dim")] if left else []
    return Group(*head, Text(), learner_table(learners, width), *more)


def _period_lines(document: Mapping[str, Any]) -> list[Text]:
    """Why periods have changed, the latest changes; a policy that does not explain itself has none."""
    changes = document.get("period_changes", ())  # missing from an older controller
    return [
        Text(f"{'periods, ' if not index else '         '}at {lasting(change['at'])}: {printable(change['text'])}")
        for index, change in enumerate(changes)
    ]


def _head(document: Mapping[str, Any]) -> list[Text]:
    learners, costs = document["learners"], document["costs"]
    state = str(document["state"])
    first = Text.assemble((printable(document["policy"]), "bold"), "  ", (state, _STYLES.get(state, "bold")))
    if awaited := document.get("awaited"):  # missing from an older controller
        names = ", ".join(map(printable, awaited["learners"]))
        first.append(f"{f', {names},' if names else ''} for {lasting(awaited['seconds'])}: ")
        first.append(printable(awaited["reason"]))
    elif state == "waiting for learners":
        first.append(f", {len(learners)} of {document['expected']} have joined")
    elif state == "finished" and document["finish_reason"]:
        first.append(f": {printable(document['finish_reason'])}")
    else:
        if document.get("on_hold"):
            first.append(" by an administrator")
        away = sum(not learner["connected"] for learner in learners)
        first.append(f", {len(learners) - away} of {plural(len(learners), 'learner')} connected")
    second = Text(f"community model {document['version']}, {document['steps']:,} steps, at ")
    second.append(f"{lasting(document['seconds'])} of the run")
    if document["deadline"] is not None and state == "running":
        second.append(f"; next deadline in {lasting(max(0.0, document['deadline'] - document['seconds']))}")
    if document.get("period") is not None and state == "running":
        bound = f", by {document['period_bounded_by']}" if document.get("period_bounded_by") else ""
        second.append(f"; periods of {lasting(document['period'])}{bound}")
        if document.get("period_reason"):
            second.append(f": {printable(document['period_reason'])}")
        if document.get("not_awaited"):
            second.append(f"; not waited for: {', '.join(map(printable, document['not_awaited']))}")
    disk = document.get("disk", {})  # missing from an older controller
    lines = [first, second, *_period_lines(document), *_end_line(document), _metric_line(document)]
    if disk.get("sentence"):
        lines.insert(0, Text(printable(disk["sentence"]), style="bold red" if disk["full"] else "yellow"))
    present = costs["idle_time"] + costs["cumulative_time"] + costs["transfer_time"]
    energy = costs["energy"]
    lines.append(
        Text(
            f"costs: training {lasting(costs['cumulative_time'])}, idle {_share(costs['idle_time'], present)}, "
            f"{plural(costs['update_requests'], 'update')}, {costs['refused_updates']:,} refused"
        )
    )
    lines.append(
        Text(
            f"energy: equation {number(energy['equation'])}, active {number(energy['active'])}, with idle "
            f"{number(energy['idle_charged'])}"
        )
    )
    exchanged, used = size(costs["bytes_exchanged"]), size(document["disk_bytes"])
    again = f"; controller started {document['start']:,} times" if document["start"] > 1 else ""
    lines.append(Text(f"data: {exchanged} of models exchanged, {used} on disk{again}"))
    left = document.get("compression_error")  # missing from an older controller
    if left is not None:
        lines.append(Text(f"compressed updates: {100 * left:.2g} % of one is left for the next, on average"))
    if document["refused_calls"]:
        calls = ", ".join(f"{count:,} {code}" for code, count in sorted(document["refused_calls"].items()))
        lines.append(Text(f"calls refused since the start: {calls}", style="yellow"))
    return lines


def _end_line(document: Mapping[str, Any]) -> list[Text]:
    """When it ends, and how far that is; nothing from an older controller."""
    stop, left = document.get("stop"), document.get("left")
    if stop is None or left is None:
        return []
    words = {"rounds": "rounds", "update_requests": "update requests", "steps": "steps"}
    limits = [f"{stop[name]:,} {word} ({left[name]:,} left)" for name, word in words.items() if stop[name] is not None]
    if stop["seconds"] is not None:
        limits.append(f"{lasting(stop['seconds'])} of the run ({lasting(left['seconds'])} left)")
    if stop["target"] is not None:
        limits.append(f"{printable(stop['target']['metric'])} {stop['target']['value']:g}")
    if (patience := stop.get("patience")) is not None:
        limits.append(f"{patience['evaluations']} evaluations without a better {printable(patience['metric'])}")
    about = f"; about {lasting(left['about_seconds'])} more" if "about_seconds" in left else ""
    return [Text(f"ends at {' or '.join(limits) or 'nothing: somebody must stop it'}{about}")]


def _metric_line(document: Mapping[str, Any]) -> Text:
    metric, latest, target = document["metric"], document["latest"], document["target"]
    line = Text(f"{metric} ")
    value = None if latest is None else latest.get(metric)
    if value is None:
        line.append("not measured yet")
    else:
        line.append(f"{value:.4f}", style="bold")
        line.append(f" (model {latest['version']})")
    best = document.get("best") or {"version": document["best_version"]}
    if best.get(metric) is not None:
        line.append(f", best {best[metric]:.4f} (model {best['version']})")
    elif best["version"] is not None:
        line.append(f", best is model {best['version']}")
    if target is not None:
        line.append(f", target {target:g}")
    others = [
        f"{printable(name)} {other:.4f}"
        for name, other in (latest or {}).items()
        if name not in ("version", "at", metric) and other is not None
    ]
    if others:
        line.append(f"  [{', '.join(others)}]", style="dim")
    return line


def learner_table(learners: Sequence[Mapping[str, Any]], width: int) -> Table:
    """A row for each learner, by name; columns that do not fit a narrow terminal are left out, not cut."""
    learners = sorted(learners, key=lambda learner: by_number(learner["name"]))
    names = [printable(learner["name"]) for learner in learners]
    shown = dict(_COLUMNS)
    if all(learner.get("steps_left") is None for learner in learners):
        del shown["privacy left"]
    columns = {heading: [show(learner) for learner in learners] for heading, show in shown.items()}
    for heading in _DISPENSABLE:
        if _room_for_names(columns, width) < min(_NAME, max(map(len, names))):
            del columns[heading]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    room = max(_NAME, _room_for_names(columns, width))
    table.add_column("learner", no_wrap=True, overflow="ellipsis", max_width=room)
    for heading in columns:
        table.add_column(heading, justify="left" if heading == "state" else "right", no_wrap=True)
    for name, *cells in zip(names, *columns.values(), strict=True):
        style = _LEARNER_STYLES.get(cells[0], "")
        table.add_row(Text(name), Text(cells[0], style=style), *map(Text, cells[1:]))
    return table


def _room_for_names(columns: Mapping[str, Sequence[str]], width: int) -> int:
    return width - 2 - sum(max(map(len, [heading, *cells])) + 2 for heading, cells in columns.items())


def _idle(learner: Mapping[str, Any]) -> str:
    return _share(learner["idle"], learner["active"] + learner["idle"] + learner["transfer"])


def _progress(learner: Mapping[str, Any]) -> str:
    if learner["task"] is None:
        return "–"
    budget = learner["budget_steps"]
    return f"{learner['steps_of_task']:,}" + ("" if budget is None else f"/{budget:,}")


def _private(learner: Mapping[str, Any]) -> str:
    left, rounds = learner.get("steps_left"), learner.get("rounds_left")
    if left is None:
        return "–"
    return f"{left:,} steps" if rounds is None else f"{left:,} steps, {rounds:,} rounds"


_NAME = 12  # letters of a name that must be seen
_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "state": lambda learner: printable(learner["state"]),
    "connected": lambda learner: "yes" if learner["connected"] else "no",
    "examples": lambda learner: f"{learner['examples']:,}",
    "s/batch": lambda learner: number(learner["time_per_batch"]),
    "task": _progress,
    "privacy left": _private,
    "updates": lambda learner: f"{learner['updates']:,}",
    "refused": lambda learner: f"{learner['refused']:,}",
    "idle": _idle,
    "heard": lambda learner: "–" if learner["silent_seconds"] is None else lasting(learner["silent_seconds"]),
}
_DISPENSABLE = ("connected", "examples", "heard", "refused")  # the state says much of the first


def _share(part: float, whole: float) -> str:
    return percent(part / whole) if whole > 0 else "–"


def _local(moment: str) -> str:
    try:
        return f"{datetime.fromisoformat(moment).astimezone():%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return moment


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


# --- watching --------------------------------------------------------------------------------


def watch_views(look: Callable[[], View], view: View, seconds: float, as_json: bool) -> View:
    """Until the federation has ended or the user interrupts; a controller that is being restarted is waited for."""
    console = stdout()
    live = None if as_json or not console.is_terminal else Live(console=console, screen=True, auto_refresh=False)
    try:
        if live is not None:
            live.start()
        while True:
            if live is not None:
                live.update(view.shown(console.width, console.height), refresh=True)
            elif as_json:
                sys.stdout.write(json.dumps(view.document, ensure_ascii=False) + "\n")
                sys.stdout.flush()
            else:
                show_view(view, console)
                console.print()
            if view.ended:
                break
            time.sleep(seconds)
            view = look()
    except KeyboardInterrupt:
        pass
    finally:
        if live is not None:
            live.stop()
            show_view(view, console)
    return view


def show_view(view: View, console: Console) -> None:
    # A sentence is folded by the terminal, so that it can be copied and searched as one.
    console.print(view.shown(console.width), soft_wrap=not view.tabular)
