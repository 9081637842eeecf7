"""Numbers, times, sizes and lists as people read them; every message, table and page formats them here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MISSING = "–"
_UNITS = ("B", "kB", "MB", "GB")


def number(value: float | None) -> str:
    """Three significant digits, four from a hundred on, thousands separated; almost whole is shown as whole."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    if abs(value) >= 1000 or math.isclose(value, round(value), rel_tol=1e-6):
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def short_number(value: float) -> str:
    """At most six characters: large numbers in thousands (k), millions (M) or billions (G)."""
    if abs(value) < 99_999.5:
        return number(value)
    for unit in ("k", "M", "G"):
        value /= 1000
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value:.3g}"


def metric(value: float | None, decimals: int = 4) -> str:
    """The value of a metric: this many decimals, or five digits where it is large."""
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{value:.{decimals}f}" if abs(value) < 10 else f"{value:,.5g}"


def plus_minus(mean: float | None, deviation: float | None, sign: str = "±", decimals: int | None = None) -> str:
    """A mean and its deviation with so many decimals, else to the deviation's second digit: 41.3 ± 2.2, 1,234 ± 56."""
    if mean is None or not math.isfinite(mean):
        return number(mean)
    if decimals is None:
        decimals = decimals_of([(mean, deviation)])
    shown = f"{mean:,.{decimals}f}"
    return f"{shown} {sign} {deviation:,.{decimals}f}" if deviation is not None and deviation >= 0 else shown


def decimals_of(column: Sequence[tuple[float | None, float | None]]) -> int:
    """The decimals of a column of means and deviations: two digits of the largest deviation, one of every other."""
    means = [mean for mean, _ in column if mean is not None and math.isfinite(mean)]
    deviations = [deviation for _, deviation in column if deviation and math.isfinite(deviation)]
    if deviations:
        digits = (1 - math.floor(math.log10(max(deviations))), -math.floor(math.log10(min(deviations))))
        return min(4, max(0, *digits))
    if all(math.isclose(mean, round(mean), rel_tol=1e-6) for mean in means):
        return 0
    largest = max(map(abs, means))
    return 4 if largest < 1 else max(0, 2 - math.floor(math.log10(largest)))


def factor(value: float | None) -> str:
    """How many times as much: ×1.25, ×12.3, ×250; empty if unknown."""
    if value is None:
        return ""
    return f"×{value:.2f}" if value < 10 else f"×{value:.1f}" if value < 100 else f"×{value:,.0f}"


def percent(share: float) -> str:
    """A share of 1 in percent; a small one with a decimal."""
    return f"{100 * share:.1f} %" if 0.0005 <= share < 0.0995 else f"{100 * share:.0f} %"


def seconds(value: float) -> str:
    """A time in the unit that suits it, with three digits: 3 ms, 4.12 s, 12.5 min, 3.1 h."""
    if math.isnan(value):
        return MISSING
    if 0 < value < 0.1:
        return f"{value * 1000:.3g} ms"
    if value < 90:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 5400 else f"{value / 3600:.3g} h"


def about(value: float) -> str:
    """A time that is only estimated: 48 s, 12 min, 3.1 h."""
    if value < 90:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"


def size(count: float) -> str:
    """A number of bytes in decimal units: 812 B, 1.5 kB, 3.4 GB."""
    for unit in _UNITS:
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 999.5 else f"{count:,.0f} TB"


def plural(count: int, noun: str, several: str | None = None) -> str:
    """A number with its noun: 1 learner, 2 learners, 2 policies."""
    return f"{count:,} {noun if count == 1 else several or f'{noun}s'}"


def listed(words: Sequence[str], max_words: int | None = None) -> str:
    """a, b and c; beyond `max_words` the others are counted: a, b, c and 4 others."""
    if max_words is not None and len(words) > max_words + 1:
        return f"{', '.join(words[:max_words])} and {len(words) - max_words} others"
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def printable(text: object, longest: int | None = None) -> str:
    """Text for a terminal, a log or an XML file, cut where it is longer than that.

    What could forge a line or hide a part of it is replaced: control and escape characters, ends of lines, characters
    without width and those that change the direction of reading.
    """
    whole = str(text)
    if longest is not None and len(whole) > longest:
        whole = whole[: longest - 4] + " ..."
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in whole)


def json_text(document: Any, indent: int | None = 2, default: Callable[[Any], Any] | None = None) -> str:
    """Strict JSON: infinities and not-a-numbers, which JSON does not have, become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(plain(document), indent=indent, ensure_ascii=False, default=default)
