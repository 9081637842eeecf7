"""Whether the dashboard holds 1,000 learners and 10,000 events a minute, and what it costs a simulation.

    python benchmarks/dashboard.py [--seconds 60] [--learners 1000] [--events 10000] [--only page|overhead] [--quick]

Page: events of a run are written as they would come, while a headless Chromium shows the page, and its timeline is
zoomed and its table sorted and scrolled meanwhile. It shows the tasks of the page's main thread over 50 ms (those that
a person could notice), the longest frame, and the memory of the page before and after. It needs playwright and Chromium
(METIS_CHROMIUM, or one that is found).

Overhead: the same simulation with and without the dashboard and a reader, by turns; the best of each counts, because
noise of a shared machine only ever adds. The dashboard's own CPU time, in its own process, is what a run would lose if
there were no free core at all; most of it is for starting, so its share falls with the length of the run.
"""

from __future__ import annotations

import heapq
import importlib.util
import json
import os
import random
import resource
import shutil
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from _bench import Report, arguments, report

from metis.core.costs import Power
from metis.runs.setting import LearnerInfo, Setting

BATCHES = 40


def setting(learners: int) -> Setting:
    """A federation of fast and slow learners that nobody trains."""
    chance = random.Random(1990)
    return Setting(
        policy="fedrec",
        label="FedRec",
        seed=1990,
        learners=tuple(
            LearnerInfo(f"site-{k + 1:04}", chance.randint(200, 2000), 50, 0.0, Power(2.0 if k % 2 else 1.0, 0.5))
            for k in range(learners)
        ),
        model_bytes=4_000_000,
        fills_the_period=False,
        metric="accuracy",
    )


def asynchronous_run(learners: int, events_a_second: float) -> Iterator[tuple[float, str]]:
    """Lines of an asynchronous run, each with its second: four events an update, one in 200 updates refused."""
    chance = random.Random(7)
    mean = 4 * learners / events_a_second  # seconds of a task that give this rate
    names = [learner.name for learner in setting(learners).learners]
    pace = [mean * chance.choice((0.5, 1.0, 1.5)) for _ in names]

    def line(at: float, **record: object) -> tuple[float, str]:
        return at, json.dumps({"at": at, **record}) + "\n"

    yield line(0.0, event="evaluated", version=0, metrics={"accuracy": 0.1})
    for name in names:
        yield line(0.0, event="learner_joined", learner=name, examples=1000, batch_size=50)
    due: list[tuple[float, int, int, float]] = []
    task = version = 0
    for k, name in enumerate(names):
        yield line(0.0, action="send_task", learner=name, task=task, based_on=[0, 0], steps=BATCHES, seconds=None)
        heapq.heappush(due, (pace[k] * chance.uniform(0.05, 1.0), k, task, 0.0))
        task += 1
    while True:
        at, k, number, sent = heapq.heappop(due)
        name, spent = names[k], 0.95 * (at - sent)
        claims = {"steps": BATCHES, "seconds": spent, "time_per_batch": spent / BATCHES, "loss": 0.5}
        yield line(at, event="update_request", learner=name, task=number, **claims)
        if chance.random() < 0.005:
            yield line(at, action="update_refused", learner=name, task=number, kind="invalid", reason="it holds NaN")
        else:
            yield line(at, action="update_committed", learner=name, task=number, contribution_value=40.0)
            version += 1
            yield line(at, action="community_published", version=version, steps=40 * version, contributors=len(names))
            if version % 50 == 0:
                yield line(at, event="evaluated", version=version, metrics={"accuracy": 1 - 0.9 * 0.999**version})
        stamp = [version, BATCHES * version]
        yield line(at, action="send_task", learner=name, task=task, based_on=stamp, steps=BATCHES, seconds=None)
        heapq.heappush(due, (at + pace[k] * chance.uniform(0.8, 1.2), k, task, at))
        task += 1


class Writer(threading.Thread):
    """Writes the lines of a run when they are due; what was before `begin` at once."""

    def __init__(self, path: Path, learners: int, events_a_second: float, begin: float) -> None:
        super().__init__(daemon=True)
        self._path, self._lines, self._begin = path, asynchronous_run(learners, events_a_second), begin
        self.written, self.stopped = 0, threading.Event()
        self.caught_up = threading.Event()

    def run(self) -> None:
        start = None
        with self._path.open("w", buffering=1) as file:
            for at, line in self._lines:
                if at > self._begin:
                    if start is None:
                        file.flush()
                        self.caught_up.set()
                        start, self.written = time.monotonic(), 0
                    wait = at - self._begin - (time.monotonic() - start)
                    if wait > 0 and self.stopped.wait(wait):
                        return
                file.write(line)
                self.written += 1


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("METIS_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


class Trace:
    """What the main thread of the page did, as Chromium itself records it.

    A task is measured in its own processor time: on a machine with other work, the time on the clock says how long the
    page was kept from running, and nothing of the page.
    """

    def __init__(self, recorded: bytes) -> None:
        events = json.loads(recorded)["traceEvents"]
        main = {
            (event["pid"], event["tid"])
            for event in events
            if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
        }
        done = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) in main]
        self.tasks = sorted(event["tdur"] / 1e3 for event in done if event["name"] == "RunTask" and "tdur" in event)
        self.frames = sorted(event.get("tdur", 0) / 1e3 for event in done if event["name"] == "FireAnimationFrame")
        self.on_the_clock = max((event["dur"] / 1e3 for event in done if event["name"] == "RunTask"), default=0.0)

    def rows(self, lasted: float) -> list[list[str]]:
        longest = [round(task) for task in self.tasks[:-6:-1]]
        return [
            ["tasks of more than 50 ms", f"{sum(task > 50 for task in self.tasks)}; the longest {longest} ms"],
            ["longest frame", f"{max(self.frames, default=0):.0f} ms of {len(self.frames)}"],
            ["main thread busy", f"{sum(self.tasks) / lasted / 10:.1f} %"],
            ["longest task on the clock", f"{self.on_the_clock:.0f} ms (with the other work of this machine)"],
        ]


_CATEGORIES = ["devtools.timeline", "disabled-by-default-devtools.timeline"]


def measure_page(sheet: Report, learners: int, events_a_minute: float, seconds: float) -> None:
    program = chromium()
    if program is None or importlib.util.find_spec("playwright") is None:
        sheet.say("Page not measured: it needs playwright, and Chromium (name one in METIS_CHROMIUM).")
        return
    from playwright.sync_api import sync_playwright

    from metis.reporting.dashboard.listening import bind
    from metis.reporting.dashboard.server import DashboardServer

    with tempfile.TemporaryDirectory() as folder:
        setting(learners).save(Path(folder))
        # Ten minutes are there already, as if somebody opened the page of a run on its way.
        writer = Writer(Path(folder) / "events.jsonl", learners, events_a_minute / 60, begin=600.0)
        writer.start()
        writer.caught_up.wait()
        with DashboardServer(Path(folder), bind("127.0.0.1:0")) as server, sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            browser.start_tracing(page=page, categories=_CATEGORIES)
            begun = time.monotonic()
            page.goto(server.url)
            page.locator("#shown", has_text=f"{learners} learners").wait_for(timeout=120_000)
            page.wait_for_timeout(3000)
            opening = Trace(browser.stop_tracing()).rows(time.monotonic() - begun)
            sheet.table([[f"opening the page of {learners} learners after ten minutes", ""], *opening])
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable")

            def megabytes() -> float:
                session.send("HeapProfiler.collectGarbage")
                figures = session.send("Performance.getMetrics")["metrics"]
                return next(row["value"] for row in figures if row["name"] == "JSHeapUsedSize") / 1e6

            before, written = megabytes(), writer.written
            browser.start_tracing(page=page, categories=_CATEGORIES)
            begun = time.monotonic()
            while time.monotonic() - begun < seconds:
                page.get_by_role("button", name="Zoom in").click()
                page.locator("#columns").get_by_role("button", name="Energy").first.click()
                page.evaluate("() => { document.querySelector('#scroll').scrollTop += 700; }")
                page.wait_for_timeout(1500)
                page.get_by_role("button", name="Taller rows").click()
                page.wait_for_timeout(1500)
                page.get_by_role("button", name="Shorter rows").click()
                page.get_by_role("button", name="Whole run").click()
                page.wait_for_timeout(2000)
            lasted = time.monotonic() - begun
            trace = Trace(browser.stop_tracing())
            rate = 60 * (writer.written - written) / lasted
            what = (
                f"{learners} learners, {rate:,.0f} events a minute for {lasted:.0f} s, while somebody zooms and sorts"
            )
            heap = ["heap of the page, before, after", f"{before:.1f} MB, {megabytes():.1f} MB"]
            sheet.table([[what, ""], *trace.rows(lasted), heap])
            longest = trace.tasks[-1]
            sheet.goal(f"longest task of the page, {learners} learners", "100 ms", f"{longest:.0f} ms", longest <= 100)
            sheet.figures["page"] = {"tasks_ms": trace.tasks[-20:], "busy": sum(trace.tasks) / lasted / 1000}
            browser.close()
        writer.stopped.set()


def measure_overhead(sheet: Report, repeats: int, rounds: int) -> None:
    import metis
    from metis.learning import mlp
    from metis.reporting.dashboard.listening import DashboardProcess, bind

    digits = metis.load_dataset("digits")
    x, y = digits.x_train.astype("float32") / 16, digits.y_train
    federation = metis.Federation(
        network=lambda: mlp((8, 8), 10, hidden=(256, 256)),
        train=(x, y),
        test=(digits.x_test.astype("float32") / 16, digits.y_test),
        learners=[
            metis.SimulatedLearner(f"learner-{k}", range_of(k, len(y)), 20, metis.Speed(0.3 if k % 2 else 0.03))
            for k in range(10)
        ],
        solver=metis.MomentumSGD(0.02, 0.9),
    )

    def children() -> float:
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        return spent.ru_utime + spent.ru_stime

    def simulate(folder: Path, looked_at: bool) -> tuple[float, float, float]:
        """Wall time, CPU time of the simulation, CPU time of the dashboard."""
        before = children()
        wall, cpu = time.perf_counter(), time.process_time()
        if looked_at:
            dashboard = DashboardProcess(folder, bind("127.0.0.1:0"))
            reader = Reader(dashboard.url)
        federation.simulate(metis.semisync_fedavg(2), rounds=rounds, out=folder)
        if looked_at:
            dashboard.end()
        spent = time.perf_counter() - wall, time.process_time() - cpu
        if looked_at:
            dashboard.close()
            reader.join()
            assert reader.received > 1, "nobody has read the stream"
        return *spent, children() - before

    with tempfile.TemporaryDirectory() as folder:
        starting = []
        for _ in range(3):
            before = children()
            DashboardProcess(Path(folder), bind("127.0.0.1:0")).close()
            starting.append(children() - before)
        simulate(Path(folder) / "warm", False)
        times: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
        for number in range(repeats):
            for looked_at in (False, True):
                times[looked_at].append(simulate(Path(folder) / f"{number}-{looked_at}", looked_at))
    without, beside = ([min(column) for column in zip(*times[key], strict=True)] for key in (False, True))
    sheet.table(
        [
            [f"a simulation of {without[0]:.1f} s, best of {repeats}, with the dashboard and a reader / without", ""],
            ["wall time", f"{beside[0] / without[0]:.4f}"],
            ["CPU time of the simulation", f"{beside[1] / without[1]:.4f}"],
            ["CPU time of the dashboard", f"{100 * beside[2] / without[1]:.1f} % of that, {beside[2]:.2f} s"],
            [
                "of which to start",
                f"{min(starting):.2f} s; for the rest of the run "
                f"{100 * max(0.0, beside[2] - min(starting)) / without[1]:.1f} %",
            ],
        ]
    )
    ratio = beside[0] / without[0]
    sheet.goal("a simulation with the dashboard / without, wall time", "at most 1.01", f"{ratio:.4f}", ratio <= 1.01)
    sheet.figures["overhead"] = {"seconds": times[False], "with_dashboard": times[True], "starting": starting}


def range_of(k: int, examples: int):
    import numpy as np

    return np.arange(k * examples // 10, (k + 1) * examples // 10)


class Reader(threading.Thread):
    """A page without a screen: reads the stream and counts what comes."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self.received = url, 0
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(f"{self._url}events") as stream:
            for line in stream:
                self.received += line.startswith(b"data:")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--learners", type=int, default=1000)
    parser.add_argument("--events", type=float, default=10_000, help="a minute")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60, help="of the simulation beside which it runs")
    parser.add_argument("--only", choices=("page", "overhead"))
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.learners, options.events, options.repeats, options.rounds = 5.0, 200, 600.0, 1, 5
    with report(options, __doc__) as sheet:
        if options.only != "overhead":
            measure_page(sheet, options.learners, options.events, options.seconds)
        if options.only != "page":
            measure_overhead(sheet, options.repeats, options.rounds)


if __name__ == "__main__":
    main()
