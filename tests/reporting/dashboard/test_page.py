"""The page itself in a headless Chromium, with real clicks and keys."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright", reason="playwright is not installed")

from playwright import sync_api as playwright

from metis.core.events import LearnerLeft, UpdateCommitted, UpdateRefused
from metis.reporting.dashboard import server as server_module
from metis.reporting.dashboard.listening import bind
from metis.reporting.dashboard.server import STATIC, DashboardServer
from reporting.dashboard.pages import append, finished, joined, rounds, sent, update, write_run, written_setting

CHROMIUM = os.environ.get("METIS_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; name one in METIS_CHROMIUM"),
]
NAMES = ("fast-1", "fast-2", "slow-1")
expect = playwright.expect
expect.set_options(timeout=30_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "TICK", 0.05)
    monkeypatch.setattr(server_module, "_SEARCH", 0.05)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that is on its way."""
    write_run(tmp_path / "sync", [*joined(NAMES), *rounds(4, NAMES)], written_setting(NAMES))
    return tmp_path


@pytest.fixture
def served(folder: Path) -> Iterator[DashboardServer]:
    with DashboardServer(folder, bind("127.0.0.1:0")) as server:
        yield server


class Visit:
    """A visitor: the page, and all that it asked for and complained about."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.asked: list[str] = []
        self.errors: list[str] = []
        self.context.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.goto(url)

    def window(self) -> tuple[float, float]:
        """The seconds that the timeline shows."""
        lanes = self.page.locator("#timelines")
        return float(lanes.get_attribute("data-from")), float(lanes.get_attribute("data-to"))

    def settled(self, wanted: Any) -> tuple[float, float]:
        """The seconds that it shows once they are as wanted."""
        for _ in range(300):
            if wanted(*self.window()):
                return self.window()
            self.page.wait_for_timeout(50)
        raise AssertionError(f"the timeline shows {self.window()}")

    def column(self, number: int) -> list[str]:
        """What stands in one column of the table, as it is shown."""
        return [
            cell.strip() for cell in self.page.locator(f"#rows tr:not(.space) > :nth-child({number})").all_inner_texts()
        ]


@pytest.fixture
def visit(browser: Any, served: DashboardServer) -> Iterator[Visit]:
    made = Visit(browser, served.url)
    expect(made.page.locator("#connection")).to_have_text("live")
    expect(made.page.locator("#shown")).to_have_text("3 learners")
    yield made
    made.context.close()
    assert made.errors == []


# --- what is there ----------------------------------------------------------------------------------


def test_it_loads_without_asking_anybody_else(visit: Visit, served: DashboardServer, folder: Path) -> None:
    """Offline: every request goes to the server of the page; curves and timeline are drawn."""
    page = visit.page
    expect(page.locator("h1")).to_have_text(folder.name)
    expect(page.locator(".card h3")).to_have_text("Sync")
    expect(page.locator(".card .metric")).to_contain_text("0.875")
    expect(page.locator("#problems")).to_have_text("No problems.")
    for chart in ("metric-time", "metric-requests", "energy-0", "energy-1", "energy-2"):
        expect(page.locator(f"#{chart} canvas")).to_be_visible()
    assert visit.asked and all(url.startswith((served.url, "data:")) for url in visit.asked)
    drawn = page.evaluate(
        "() => { const c = document.querySelector('.lane canvas'); const data = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; return new Set(new Uint32Array(data.buffer)).size; }"
    )
    assert drawn > 3  # training, idle, lines and paper


def test_the_share_of_waiting_is_told_in_words(visit: Visit) -> None:
    """Of three learners one trains 1 of 3 seconds, one 2 and one 3: a third of all time is idle."""
    expect(visit.page.locator(".lane figcaption")).to_have_text("Sync: training 67 %, idle 33 % of the learners' time")


def test_curves_and_cards_grow_with_the_run(visit: Visit, folder: Path) -> None:
    page = visit.page
    append(folder / "sync" / "events.jsonl", rounds(4, NAMES, start=12.0, first=4))
    expect(page.locator(".card .metric")).to_contain_text("0.938")
    expect(page.locator(".card")).to_contain_text("24 s")
    expect(page.locator("#metric-time")).to_have_attribute(
        "aria-label", "Sync: accuracy 0.938 at 24 s after 24 update requests"
    )
    append(folder / "sync" / "events.jsonl", [finished(24.0)])
    expect(page.locator(".card .state")).to_have_text("ended: all rounds are done")


def test_a_refused_update_is_told_in_words_and_taken_back(visit: Visit, folder: Path) -> None:
    """Without reloading, in a region that a screen reader reads out; gone with the next update that counts."""
    page, path = visit.page, folder / "sync" / "events.jsonl"
    refused = UpdateRefused("slow-1", 12, "invalid", "its local model holds NaN in 'fc1.weight'")
    append(path, [sent(12.0, "slow-1", 12, 4), update(15.0, "slow-1", 12, 3.0), (15.0, refused)])
    problem = page.get_by_role("listitem").filter(has_text="refused")
    expect(problem).to_have_text(
        "An update from 'slow-1' was refused at 15.0 s: its local model holds NaN in 'fc1.weight'."
    )
    expect(page.locator("#problems")).to_have_attribute("aria-live", "polite")
    cell = page.locator("#rows tr", has_text="slow-1").locator("td.refused")
    expect(cell).to_have_text("1")
    page.set_viewport_size({"width": 700, "height": 900})
    box = cell.bounding_box()  # to see it, nobody has to scroll to the right
    assert box is not None and box["x"] + box["width"] <= 700

    append(
        path, [sent(15.0, "slow-1", 13, 4), update(18.0, "slow-1", 13, 3.0), (18.0, UpdateCommitted("slow-1", 13, 9.0))]
    )
    expect(page.locator("#problems")).to_have_text("No problems.")


def test_a_name_cannot_smuggle_in_markup(browser: Any, tmp_path: Path) -> None:
    """What comes over the network is text and nothing else."""
    evil = "<img src=x onerror=alert(1)>"
    setting = written_setting((evil,), label=f"{evil} policy")
    write_run(tmp_path / evil.replace("/", ""), [*joined((evil,)), (1.0, LearnerLeft(evil))], setting)
    with DashboardServer(tmp_path, bind("127.0.0.1:0")) as server:
        visit = Visit(browser, server.url)
        expect(visit.page.locator("#problems")).to_contain_text(f"'{evil}' has been away since 1.0 s.")
        expect(visit.page.locator("#rows th")).to_have_text(evil)
        assert visit.page.locator("img").count() == 0
        visit.context.close()


# --- what one can do --------------------------------------------------------------------------------


def test_the_theme_can_be_chosen_and_is_remembered(visit: Visit) -> None:
    """First the system's, then light, then dark."""
    page = visit.page
    button = page.get_by_role("button", name="Theme")
    background = "() => getComputedStyle(document.body).backgroundColor"
    expect(button).to_have_text("Theme: system")
    light = page.evaluate(background)
    button.click()
    expect(button).to_have_text("Theme: light")
    assert page.evaluate(background) == light
    button.click()
    expect(button).to_have_text("Theme: dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert page.evaluate(background) != light
    page.reload()
    expect(button).to_have_text("Theme: dark")
    assert page.evaluate(background) != light


def test_the_systems_theme_is_the_first(browser: Any, served: DashboardServer) -> None:
    visit = Visit(browser, served.url, color_scheme="dark")
    expect(visit.page.locator("html")).to_have_attribute("data-theme", "dark")
    visit.page.emulate_media(color_scheme="light")
    expect(visit.page.locator("html")).to_have_attribute("data-theme", "light")
    visit.context.close()


def test_the_table_sorts_and_finds(visit: Visit) -> None:
    """A second click turns the order; it is announced to assistive technology."""
    page = visit.page
    assert visit.column(1) == list(NAMES)
    heading = page.get_by_role("columnheader", name="Time per batch")
    heading.get_by_role("button").click()
    expect(heading).to_have_attribute("aria-sort", "descending")
    expect(page.locator("#rows tr:not(.space) th").first).to_have_text("slow-1")
    assert visit.column(6) == ["300 ms", "200 ms", "100 ms"]
    heading.get_by_role("button").click()
    expect(heading).to_have_attribute("aria-sort", "ascending")
    expect(page.locator("#rows tr:not(.space) th").first).to_have_text("fast-1")

    page.get_by_role("searchbox", name="Find").fill("slow")
    expect(page.locator("#shown")).to_have_text("1 of 3 learners")
    assert visit.column(1) == ["slow-1"]


def test_the_energy_can_be_one_of_three(visit: Visit) -> None:
    """The idle learner costs nothing in active time, and a quarter of the power in the third definition."""
    page = visit.page
    assert visit.column(11) == ["8", "16", "24"]
    page.get_by_role("combobox", name="Energy").select_option("idle_charged")
    expect(page.locator("#rows tr:not(.space)").first.locator("td").nth(9)).to_have_text("12")


def test_the_timeline_zooms_by_buttons_mouse_and_wheel(visit: Visit) -> None:
    """And back to the whole run."""
    page = visit.page
    assert visit.settled(lambda start, end: end == 12.0)[0] == 0.0
    page.get_by_role("button", name="Zoom in").click()
    visit.settled(lambda start, end: end - start == pytest.approx(6.0))
    expect(page.locator("#window")).to_contain_text("showing 3 s to 9 s")
    page.get_by_role("button", name="Later").click()
    visit.settled(lambda start, end: start == pytest.approx(4.5))

    plot = page.locator(".lane .plot")
    box = plot.bounding_box()
    middle, y = box["x"] + box["width"] / 2, box["y"] + 30
    page.mouse.move(middle, y)
    page.mouse.down()
    page.mouse.move(middle + 200, y, steps=5)
    page.mouse.up()
    visit.settled(lambda start, end: start < 4.0 and end - start == pytest.approx(6.0))
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    visit.settled(lambda start, end: end - start == pytest.approx(4.8))
    plot.dblclick(position={"x": box["width"] / 2, "y": 40})
    visit.settled(lambda start, end: end - start == pytest.approx(2.4))
    whole = page.get_by_role("button", name="Whole run")
    expect(whole).to_have_attribute("aria-pressed", "false")
    whole.click()
    expect(whole).to_have_attribute("aria-pressed", "true")
    visit.settled(lambda start, end: (start, end) == (0.0, 12.0))


def test_the_timeline_follows_the_end(visit: Visit, folder: Path) -> None:
    page = visit.page
    visit.settled(lambda start, end: end == 12.0)
    page.get_by_role("button", name="Zoom in").click()
    page.get_by_role("button", name="Follow the end").click()
    visit.settled(lambda start, end: (start, end) == (pytest.approx(6.0), pytest.approx(12.0)))
    append(folder / "sync" / "events.jsonl", rounds(1, NAMES, start=12.0, first=4))
    visit.settled(lambda start, end: (start, end) == (pytest.approx(9.0), pytest.approx(15.0)))


def test_pointing_at_a_bar_tells_what_it_is(visit: Visit) -> None:
    page = visit.page
    plot = page.locator(".lane .plot")
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 15 + 9)
    expect(page.locator("#tip")).to_have_text(re.compile(r"fast-1: idle from 10 s to 12 s \(2 s\)"))


def test_everything_can_be_done_with_the_keyboard(visit: Visit) -> None:
    """From the top with Tab only: theme, buttons of the timeline, the timeline, the table."""
    page = visit.page

    def focused() -> str:
        return page.evaluate(
            "() => { const at = document.activeElement;"
            " return at.getAttribute('aria-label') || at.id || at.textContent; }"
        )

    def tab_to(name: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            if focused().startswith(name):
                outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
                assert outline != "none", f"one does not see that {name} has the focus"
                return
        raise AssertionError(f"Tab never reached {name}")

    page.keyboard.press("Tab")
    assert focused() == "Skip to the runs"
    tab_to("theme")
    page.keyboard.press("Enter")
    expect(page.locator("#theme")).to_have_text("Theme: light")
    tab_to("Zoom in")
    page.keyboard.press("Space")
    visit.settled(lambda start, end: end - start == pytest.approx(6.0))
    tab_to("Timeline of Sync, 3 learners")
    page.keyboard.press("+")
    visit.settled(lambda start, end: end - start == pytest.approx(3.0))
    page.keyboard.press("ArrowRight")
    visit.settled(lambda start, end: start > 4.5)
    page.keyboard.press("Home")
    visit.settled(lambda start, end: (start, end) == (0.0, 12.0))
    page.keyboard.press("ArrowDown")
    expect(page.locator("#news")).to_have_text(
        "fast-1: idle since 10 s; training 33 %, idle 67 %, transfer 0 %, away 0 % of its time"
    )
    page.keyboard.press("ArrowDown")
    expect(page.locator("#news")).to_contain_text("fast-2: idle since")
    tab_to("find")
    page.keyboard.type("fast")
    expect(page.locator("#shown")).to_have_text("2 of 3 learners")
    tab_to("Examples")
    page.keyboard.press("Enter")
    expect(page.get_by_role("columnheader", name="Examples")).to_have_attribute("aria-sort", "descending")


def test_a_screen_reader_finds_its_way(visit: Visit) -> None:
    """Landmarks, one heading of the first level, regions with names, controls with names."""
    page = visit.page
    for role in ("banner", "main", "contentinfo"):
        expect(page.get_by_role(role)).to_have_count(1)
    expect(page.get_by_role("heading", level=1)).to_have_count(1)
    for name in ("Problems", "Runs", "Timeline", "Metric of the community model", "Energy", "Learners"):
        expect(page.get_by_role("region", name=name, exact=True).first).to_be_visible()
    nameless = page.evaluate(
        "() => [...document.querySelectorAll('button, select, input')].filter((one) => !one.textContent.trim()"
        " && !one.getAttribute('aria-label') && !one.labels.length).length"
    )
    assert nameless == 0
    expect(page.locator("#table")).to_have_attribute("aria-rowcount", "4")
    assert page.locator("#rows th[scope=row]").count() == 3


# --- many learners, several runs, the end -----------------------------------------------------------


def test_a_thousand_learners(browser: Any, tmp_path: Path) -> None:
    """The page holds only the rows that can be seen; all of them can be reached; the timeline shows all at once."""
    names = [f"site-{k:04}" for k in range(1, 1001)]
    write_run(tmp_path / "large", [*joined(names), *rounds(3, names)], written_setting(names))
    with DashboardServer(tmp_path, bind("127.0.0.1:0")) as server:
        visit = Visit(browser, server.url)
        page = visit.page
        expect(page.locator("#shown")).to_have_text("1000 learners")
        assert page.locator("#rows tr").count() < 60
        page.locator("#scroll").evaluate("(box) => { box.scrollTop = box.scrollHeight; }")
        last = page.locator("#rows tr", has_text="site-1000")
        expect(last).to_be_visible()
        expect(last).to_have_attribute("aria-rowindex", "1001")
        assert page.locator(".lane canvas").bounding_box()["height"] < 500
        between = page.get_by_role("listitem").filter(has_text="mixed")
        expect(between).to_be_visible()
        page.get_by_role("button", name="Taller rows").click()
        page.get_by_role("button", name="Taller rows").click()
        expect(between).to_be_hidden()
        page.get_by_role("button", name="Shorter rows").click()
        plot = page.locator(".lane .plot")
        plot.focus()
        page.keyboard.press("PageDown")
        expect(page.locator("#news")).to_contain_text("site-0001")
        page.keyboard.press("End")
        page.keyboard.press("ArrowUp")
        visit.context.close()
        assert visit.errors == []


def test_a_long_run_takes_no_more_room_in_the_page(visit: Visit) -> None:
    """Older spans are merged, without losing a second; the newest stay as they are."""
    held = visit.page.evaluate(
        """() => {
          const track = new Track(), wanted = [0, 0, 0, 0];
          let end = 0, most = 0;
          for (let k = 0; k < 5000; k++) {
            const kind = k % 4, length = 0.25 * (1 + (k % 7));
            wanted[kind] += length; end += length;
            track.add([0, kind, end], 64);
            most = Math.max(most, track.ends.length);
          }
          const sums = [0, 0, 0, 0];
          track.kinds.forEach((kind, k) => {
            const length = track.ends[k] - (k ? track.ends[k - 1] : 0);
            if (typeof kind === 'number') sums[kind] += length; else kind.forEach((part, j) => { sums[j] += part; });
          });
          return {most, sums, wanted, last: typeof track.kinds.at(-1), end: track.end - end};
        }"""
    )
    assert held["most"] <= 64
    assert held["sums"] == pytest.approx(held["wanted"])
    assert (held["last"], held["end"]) == ("number", 0)


def test_two_runs_side_by_side(visit: Visit, folder: Path) -> None:
    """Each has its card, its timeline and its line; what is not wanted can be hidden."""
    page = visit.page
    path = write_run(
        folder / "other", joined(("north", "south")), written_setting(("north", "south"), label="SemiSync")
    )
    append(path, rounds(2, ("north", "south")))
    expect(page.locator(".card")).to_have_count(2)
    expect(page.locator(".lane")).to_have_count(2)
    expect(page.locator("#metric-time .u-legend .u-series")).to_have_count(3)
    page.get_by_role("combobox", name="Run").select_option("other")
    expect(page.locator("#shown")).to_have_text("2 learners")
    page.get_by_role("checkbox", name="show SemiSync").uncheck()
    expect(page.locator(".lane")).to_have_count(1)
    append(path, [(9.0, LearnerLeft("north"))])
    expect(page.get_by_role("listitem").filter(has_text="away since 9.0 s")).to_have_text(
        "SemiSync: 'north' has been away since 9.0 s."
    )


def test_when_the_program_has_ended_the_page_keeps_the_final_state(browser: Any, folder: Path) -> None:
    with DashboardServer(folder, bind("127.0.0.1:0")) as server:
        visit = Visit(browser, server.url)
        expect(visit.page.locator("#connection")).to_have_text("live")
        append(folder / "sync" / "events.jsonl", [finished(12.0)])
    expect(visit.page.locator("#connection")).to_have_text("the program has ended; this is the final state")
    expect(visit.page.locator(".card .state")).to_have_text("ended: all rounds are done")
    visit.page.get_by_role("button", name="Zoom in").click()
    visit.settled(lambda start, end: end - start == pytest.approx(6.0))
    visit.context.close()


def test_a_token_opens_the_page_and_leaves_the_address(browser: Any, folder: Path) -> None:
    """The stream and the assets come with the cookie."""
    with DashboardServer(folder, bind("127.0.0.1:0"), "0123456789abcdef") as server:
        stranger = Visit(browser, server.url.partition("?")[0])
        expect(stranger.page.locator("body")).to_contain_text("a token is needed")
        stranger.context.close()
        visit = Visit(browser, server.url)
        expect(visit.page.locator("#shown")).to_have_text("3 learners")
        assert "token" not in visit.page.url
        visit.context.close()
        assert visit.errors == []


def test_a_narrow_screen_needs_no_sideways_scrolling(visit: Visit) -> None:
    """Only the table scrolls, in its own box."""
    for width in (700, 360):
        visit.page.set_viewport_size({"width": width, "height": 800})
        visit.page.wait_for_timeout(300)
        assert visit.page.evaluate("() => document.documentElement.scrollWidth") <= width


# --- colours ----------------------------------------------------------------------------------------


def test_text_stands_out_from_its_paper_in_both_themes() -> None:
    """4.5 to 1 for text, 3 to 1 for lines and bars, as WCAG asks."""
    themes = re.findall(r":root[^{]*\{([^}]*)\}", (STATIC / "dashboard.css").read_text("utf-8"))[:2]
    for theme in themes:
        colour = dict(re.findall(r"--([\w-]+):\s*(#\w{6})", theme))
        for ink, paper in (
            ("ink", "card"), ("ink", "page"), ("muted", "card"), ("muted", "page"), ("bad", "bad-paper"),
            ("bad", "card"), ("warn", "warn-paper"), ("fine", "card"), ("accent", "card"),
        ):  # fmt: skip
            assert contrast(colour[ink], colour[paper]) >= 4.5, (ink, paper)
        for line in ("edge", "training", "hatch", *(f"policy-{k}" for k in range(1, 8))):
            assert contrast(colour[line], colour["card"]) >= 3, line


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
