"""How every figure looks: colours, lines, fonts, files, and SVG for a page.

Nothing here touches matplotlib's global state: figures are made without pyplot, in a style of their own, and the same
run always gives the same SVG, byte for byte. Colours of an SVG for a page are CSS variables that default to the printed
colour, so that a page can have a dark mode.
"""

from __future__ import annotations

import functools
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from metis.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Over: TypeAlias = Literal["parallel_time", "update_requests"]
Kind: TypeAlias = Literal["training", "transfer", "idle", "away"]
# Okabe and Ito's colours, which people with any kind of colour vision can distinguish; without the yellow, which is
# lost on paper. Line styles and markers differ too, with other periods, so that no two of 28 curves look alike.
POLICY_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d")
_DASHES: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (1.5, 1.2)))
_MARKERS = "osD^vPX<>"
# Paul Tol's muted scheme: ten classes that stay distinct side by side.
CLASS_COLOURS = (
    "#332288", "#88ccee", "#44aa99", "#117733", "#999933", "#ddcc77", "#cc6677", "#882255", "#aa4499", "#bbbbbb",
)  # fmt: skip
# Dark for work, pale for waiting: the difference survives a black and white printer.
KIND_COLOURS: dict[Kind, str] = {
    "training": "#0a5c94",
    "transfer": "#e8a317",
    "idle": "#f6cdb4",
    "away": "#ececec",
}
KIND_WORDS: dict[Kind, str] = {"training": "training", "transfer": "transfer", "idle": "idle", "away": "away"}
INK, MUTED, GRID, PAPER, _HATCH = "#1c2126", "#5a626b", "#dfe2e6", "#fefefe", "#cf6f3c"
# What a page may restyle: printed colour -> CSS variable.
CSS_VARIABLES: dict[str, str] = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    PAPER: "--paper",
    _HATCH: "--hatch",
    **{colour: f"--{kind}" for kind, colour in KIND_COLOURS.items()},
    **{colour: f"--policy-{index}" for index, colour in enumerate(POLICY_COLOURS, 1)},
    **{colour: f"--class-{index}" for index, colour in enumerate(CLASS_COLOURS, 1)},
}
FORMATS = ("png", "svg", "pdf")
_STYLE: dict[str, Any] = {
    "figure.facecolor": "white",
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 7,
    "axes.labelsize": 10,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "hatch.linewidth": 0.7,
    "savefig.dpi": 160,
    "svg.hashsalt": "metis",  # otherwise the ids in an SVG are random
}


def check_format(path: Path) -> None:
    if path.suffix.lower().lstrip(".") not in FORMATS:
        allowed = ", ".join(f".{name}" for name in FORMATS)
        raise ConfigError(f"{path}: a figure is written as one of {allowed}; name the file accordingly")


def save_both(figure: Figure, folder: Path, name: str, suffixes: Sequence[str] = ("png", "svg")) -> list[Path]:
    paths = [folder / f"{name}.{suffix}" for suffix in suffixes]
    for path in paths:
        save(figure, path)
        figure.set_layout_engine("none")  # laid out once is enough
    return paths


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A creation date would make every file different.
    undated: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with any_alphabet():
        figure.savefig(path, metadata=undated.get(path.suffix.lower()))


@contextmanager
def house_style(changed: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Our style on matplotlib's defaults: a user's own settings do not change what a report looks like."""
    from matplotlib import style

    with style.context(["default", {**_STYLE, **(changed or {})}]):
        yield


@contextmanager
def any_alphabet() -> Iterator[None]:
    """Without matplotlib's warnings for each letter that the font lacks; it draws a box instead."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


@functools.cache
def _figure_class() -> type[Figure]:
    from matplotlib.figure import Figure

    class Drawing(Figure):
        """A figure that a notebook can show without pyplot."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            with house_style(), any_alphabet():
                self.savefig(buffer, format="png", dpi=110)  # a notebook stores its pictures
            return buffer.getvalue()

    return Drawing


def blank_figure(width: float, height: float) -> Figure:
    return _figure_class()(figsize=(width, height), layout="constrained")


def inline_svg(figure: Figure, identity: str) -> str:
    """SVG for use inside HTML: with unique ids, text as text, and colours that the page can change."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}), any_alphabet():
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", text)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'\bid="', f'id="{identity}-', text)
    text = text.replace("url(#", f"url(#{identity}-").replace('href="#', f'href="#{identity}-')
    text = re.sub(r' fill="(#[0-9a-f]{6})"', r' style="fill: \1"', text)  # an attribute cannot hold a variable
    text = re.sub(r": (#[0-9a-f]{6})\b", _themed, text)
    width, height = (72 * inches for inches in figure.get_size_inches())
    return re.sub(r"<svg[^>]*>", f'<svg viewBox="0 0 {width:g} {height:g}" aria-hidden="true">', text, count=1)


def _themed(match: re.Match[str]) -> str:
    colour = match.group(1)
    variable = CSS_VARIABLES.get(colour)
    return match.group() if variable is None else f": var({variable}, {colour})"


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    handles, names = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=columns, handlelength=3.2, columnspacing=1.8)


def line_look(index: int) -> dict[str, Any]:
    """The colour, dashes and marker of the policy with this index."""
    return {
        "color": POLICY_COLOURS[index % len(POLICY_COLOURS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markeredgecolor": PAPER,
        "markeredgewidth": 0.6,
    }


def fill(kind: Kind, *, hatched: bool = True) -> dict[str, Any]:
    """How one kind of time looks; hatching distinguishes idle without colour."""
    look: dict[str, Any] = {"facecolor": KIND_COLOURS[kind], "edgecolor": PAPER, "linewidth": 0.4}
    if not hatched:
        return {"facecolor": KIND_COLOURS[kind], "edgecolor": "none", "linewidth": 0}
    if kind == "idle":
        look |= {"hatch": "////", "edgecolor": _HATCH, "linewidth": 0.0}
    return look


def label_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), list(names))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")


def thousands(value: float, position: float) -> str:
    return f"{value:,.10g}"


def say(axes: Axes, words: str) -> None:
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=MUTED)
