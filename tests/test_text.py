"""The formatting that every message, table and page shares."""

from __future__ import annotations

import json
import math

import pytest

from metis import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"), (0, "0"), (3.0, "3"), (-3.0, "-3"), (0.012345, "0.0123"), (1.2345, "1.23"), (12.345, "12.3"),
        (123.45, "123.5"), (1234.5, "1,234"), (1e7, "10,000,000"), (2.0000000001, "2"), (1e-7, "1e-07"),
        (88.03, "88"), (math.nan, "not a number"), (math.inf, "infinite"),
    ],
)  # fmt: skip
def test_number(value: float | None, shown: str) -> None:
    assert text.number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.5, "0.5"), (99_999, "99,999"), (123_456, "123 k"), (12_345_678, "12.3 M"), (5e9, "5 G"), (5e13, "5e+04")],
)
def test_short_number_has_at_most_six_characters(value: float, shown: str) -> None:
    assert text.short_number(value) == shown and len(shown) <= 6


def test_metric() -> None:
    assert [text.metric(value) for value in (None, 0.97125, 23.456789, math.nan)] == [
        "–",
        "0.9712",
        "23.457",
        "not a number",
    ]
    assert text.metric(0.97125, 3) == "0.971"


def test_factor_and_percent() -> None:
    assert [text.factor(value) for value in (None, 0.5, 1.234, 12.34, 1250)] == [
        "", "×0.50", "×1.23", "×12.3", "×1,250",
    ]  # fmt: skip
    assert [text.percent(share) for share in (0, 0.0004, 0.0123, 0.0999, 0.5, 1)] == [
        "0 %", "0 %", "1.2 %", "10 %", "50 %", "100 %",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "exact", "about"),
    [
        (0.0, "0 s", "0 s"), (0.0031, "3.1 ms", "0 s"), (0.25, "0.25 s", "0 s"), (48.0, "48 s", "48 s"),
        (725.0, "12.1 min", "12 min"), (11160.0, "3.1 h", "3.1 h"),
    ],
)  # fmt: skip
def test_times(value: float, exact: str, about: str) -> None:
    assert (text.seconds(value), text.about(value)) == (exact, about)


def test_an_unknown_time() -> None:
    assert text.seconds(math.nan) == "–"


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999.7, "1 kB"), (1536, "1.54 kB"), (3.4e9, "3.4 GB"), (1e12, "1 TB"), (1e16, "10,000 TB")],
)  # fmt: skip
def test_size(count: float, shown: str) -> None:
    assert text.size(count) == shown


def test_words() -> None:
    assert [text.plural(count, "learner") for count in (0, 1, 1200)] == ["0 learners", "1 learner", "1,200 learners"]
    assert text.plural(2, "policy", "policies") == "2 policies"
    assert [text.listed(["a", "b", "c"][:count]) for count in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert text.listed(["a", "b", "c", "d"], max_words=3) == "a, b, c and d"  # one more is shorter named than counted
    assert text.listed(["a", "b", "c", "d", "e"], max_words=3) == "a, b, c and 2 others"
    assert text.printable("a\x1b[31mb") == "a�[31mb"


def test_json_is_strict() -> None:
    document = {"a": math.nan, "b": [math.inf, (1, 2.5)], 3: {"c": "ä"}}
    assert json.loads(text.json_text(document)) == {"a": None, "b": [None, [1, 2.5]], "3": {"c": "ä"}}
    assert "ä" in text.json_text(document, indent=None)


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        ([(90.24, 11.3), (40.0, 5.6), (43.81, 1.9)], ["90 ± 11", "40 ± 6", "44 ± 2"]),
        ([(0.9411, 0.0036), (0.96, 0.011), (0.95, 0.0)], ["0.941 ± 0.004", "0.960 ± 0.011", "0.950 ± 0.000"]),
        ([(1234.5, 56.2), (41.3, 0.23), (None, None)], ["1,234.5 ± 56.2", "41.3 ± 0.2", "–"]),
        ([(0.91234, None), (0.5, None)], ["0.9123", "0.5000"]),
        ([(12.345, None), (3.0, None)], ["12.3", "3.0"]),
        ([(44.0, None), (671.0, None)], ["44", "671"]),
        ([(1234.56, None), (7.5, None)], ["1,235", "8"]),
    ],
)
def test_a_column_has_the_same_decimals_in_all_rows(
    column: list[tuple[float | None, float | None]], shown: list[str]
) -> None:
    """Two digits of the largest deviation and at least one of every other."""
    decimals = text.decimals_of(column)
    assert [text.plus_minus(mean, deviation, decimals=decimals) for mean, deviation in column] == shown


def test_a_mean_alone_has_two_digits_of_its_deviation() -> None:
    assert text.plus_minus(41.31, 2.22) == "41.3 ± 2.2"
    assert text.plus_minus(1234.0, 56.0) == "1,234 ± 56"
    assert text.plus_minus(None, None) == "–"
    assert text.plus_minus(math.nan, None) == "not a number"
