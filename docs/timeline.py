"""Draws docs/images/timeline.svg: the same learners for the same minute, synchronous and semi-synchronous.

    python docs/timeline.py

Both runs are real ones of examples/demo.toml, trained in virtual time. Colours are chosen to be read on white and on
black alike, because a page may be either.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from metis.core.events import CommunityPublished
from metis.experiments.build import build_federation, build_policies
from metis.experiments.config.load import load_config
from metis.runs.run import Run

ROOT = Path(__file__).parent.parent
FILE, PICTURE = ROOT / "examples" / "demo.toml", ROOT / "docs" / "images" / "timeline.svg"
SECONDS = 100.0
LEFT, WIDTH, ROW, BAR, HEAD, GAP = 62, 730, 15, 10, 38, 34
TEXT, TRAINING, WAITING, MIXING = "#808080", "#3f7fd0", "#a0a0a0", "#d0503c"


def at(second: float) -> float:
    return LEFT + second / SECONDS * WIDTH


def panel(run: Run, title: str, top: float) -> tuple[list[str], float]:
    """The panel of one policy, one row per learner, and the position where the next panel begins."""
    costs = run.costs
    idle = costs.idle_time / sum(costs.parallel_time - learner.away for learner in costs.by_learner.values())
    said = f"waiting {idle:.0%} of the time, {run.rounds} community models, accuracy {run.final_metric:.2f}"
    lines = [
        f'<text x="{LEFT}" y="{top + 14:g}" font-weight="600">{escape(title)}</text>',
        f'<text x="{LEFT + WIDTH}" y="{top + 14:g}" text-anchor="end">{escape(said)}</text>',
    ]
    names = [learner.name for learner in run.setting.learners]
    rows = {name: top + HEAD - 12 + ROW * number for number, name in enumerate(names)}
    bottom = top + HEAD - 12 + ROW * len(names)
    for name, y in rows.items():
        lines.append(f'<text x="{LEFT - 8}" y="{y + BAR - 1:g}" text-anchor="end">{escape(name)}</text>')
    bars: dict[str, list[str]] = {"training": [], "idle": []}
    for span in run.spans():
        if span.kind in bars and span.start < SECONDS:
            start, end = at(span.start), at(min(span.end, SECONDS))
            # A small gap between two tasks, so that they can be counted.
            bars[span.kind].append(
                f"M{start:.1f} {rows[span.learner]:g}h{max(0.3, end - start - 0.6):.1f}v{BAR}H{start:.1f}z"
            )
    lines.append(f'<path d="{"".join(bars["training"])}" fill="{TRAINING}"/>')
    lines.append(f'<path d="{"".join(bars["idle"])}" fill="{WAITING}" fill-opacity="0.28"/>')
    mixings = [now for now, item in run.events if isinstance(item, CommunityPublished) and 0 < now < SECONDS]
    ticks = "".join(f"M{at(now):.1f} {top + HEAD - 16:g}V{bottom:g}" for now in mixings)
    lines.append(f'<path d="{ticks}" stroke="{MIXING}" stroke-width="1.2"/>')
    return lines, bottom + GAP


def draw(sync: Run, semi: Run) -> str:
    first, middle = panel(sync, "Synchronous: everybody the same work", 4)
    second, bottom = panel(semi, "Semi-synchronous: everybody the same time", middle - 8)
    axis = bottom - GAP + 4
    marks = []
    for second_ in range(0, int(SECONDS) + 1, 20):
        marks.append(f'<text x="{at(second_):g}" y="{axis + 14:g}" text-anchor="middle">{second_} s</text>')
    key, y = [], axis + 38
    for x, colour, opacity, word in (
        (LEFT, TRAINING, 1, "training"),
        (LEFT + 90, WAITING, 0.28, "waiting for others"),
    ):
        key.append(f'<path d="M{x} {y - 9:g}h22v{BAR}h-22z" fill="{colour}" fill-opacity="{opacity}"/>')
        key.append(f'<text x="{x + 28}" y="{y:g}">{word}</text>')
    key.append(f'<path d="M{LEFT + 250} {y - 11:g}v14" stroke="{MIXING}" stroke-width="1.2"/>')
    key.append(f'<text x="{LEFT + 258}" y="{y:g}">models are mixed: a new community model</text>')
    words = (
        "Ten learners, five of them ten times slower. Synchronous: the fast ones train briefly and wait for the "
        "slowest in every round. Semi-synchronous: all train until the same moment, nobody waits."
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 18} {y + 10:g}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="11.5" fill="{TEXT}">',
            f"<title>{escape(words)}</title>",
            *first,
            *second,
            *marks,
            *key,
            "</svg>\n",
        ]
    )


def main() -> None:
    config = load_config(FILE)
    federation = build_federation(config, source=FILE.name)
    runs = []
    for policy, solver in build_policies(config)[:2]:
        runs.append(federation.simulate(policy, seconds=SECONDS, solver=solver, workers=0))
        print(runs[-1])
    PICTURE.write_text(draw(*runs), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
