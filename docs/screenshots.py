"""Takes the screenshots of the dashboard and the report in docs/images from a real run of examples/demo.toml.

    python docs/screenshots.py [--runs DIR]

The first two policies of the file, Sync and SemiSync, are run into DIR (runs/screenshots/demo by default; what is
there is used again), and a headless Chromium (METIS_CHROMIUM, or one that is found) looks at them. It needs the extra
`dashboard`, and playwright.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomlkit
from PIL import Image
from playwright.sync_api import sync_playwright

from metis.reporting.dashboard.listening import bind
from metis.reporting.dashboard.server import DashboardServer

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"


def two_policies(folder: Path) -> None:
    """The demo, but Sync and SemiSync only: two timelines, one under the other."""
    demo = tomlkit.parse((ROOT / "examples" / "demo.toml").read_text("utf-8"))
    demo["policy"] = [demo["policy"][0], demo["policy"][1]]
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "demo.toml"
        file.write_text(tomlkit.dumps(demo), encoding="utf-8")
        subprocess.run([sys.executable, "-m", "metis.cli.app", "compare", str(file), "--out", str(folder)], check=True)


def look(browser: Any, url: str, name: str, width: int, theme: str, *, section: str | None = None) -> None:
    """One picture of the page, or of one of its sections."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    page.goto(url)
    page.locator("#shown", has_text="10 learners").wait_for()
    page.locator("#energy-2 canvas").wait_for()
    page.wait_for_timeout(1500)  # until everything that is drawn once a second is drawn
    path = IMAGES / f"dashboard-{name}.png"
    if section is None:
        page.screenshot(path=path, full_page=True)
    else:
        page.locator("section", has=page.locator(section)).screenshot(path=path)
    page.close()
    reduce(path)


def look_at_report(browser: Any, report: Path, theme: str) -> None:
    """The first screens of the report, from its findings to the curves."""
    page = browser.new_page(viewport={"width": 1100, "height": 900}, color_scheme=theme)
    page.goto(report.resolve().as_uri())
    path = IMAGES / f"report-{theme}.png"
    bottom = page.locator("section", has=page.locator("#curves")).bounding_box()
    page.screenshot(
        path=path, full_page=True, clip={"x": 0, "y": 0, "width": 1100, "height": bottom["y"] + bottom["height"] + 12}
    )
    page.close()
    reduce(path)


def reduce(path: Path) -> None:
    # A palette suffices for a page with few colors, and takes a third of the space.
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1000} kB")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--runs", type=Path, default=ROOT / "runs" / "screenshots" / "demo")
    folder = arguments.parse_args().runs
    program = os.environ.get("METIS_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("there is no Chromium; name one in METIS_CHROMIUM")
    if not (folder / "report.html").is_file():
        two_policies(folder)
    IMAGES.mkdir(parents=True, exist_ok=True)
    with DashboardServer(folder, bind("127.0.0.1:0")) as server, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        look(browser, server.url, "light", 1280, "light")
        look(browser, server.url, "dark", 1280, "dark")
        look(browser, server.url, "narrow", 700, "light")
        look(browser, server.url, "timeline", 1280, "light", section="#timelines")
        look_at_report(browser, folder / "report.html", "light")
        look_at_report(browser, folder / "report.html", "dark")
        browser.close()


if __name__ == "__main__":
    main()
