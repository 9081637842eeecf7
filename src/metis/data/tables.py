"""Tables of measures from several real sites: federations as they are found, one silo for each site.

Each loader reads one CSV file. Which people are held out for the test is fixed: in every site one in five,
spread over its ages or classes. Features are standardized with mean and deviation of all training examples.
(Not site by site: that would take away how the sites differ, and with it much of the age, which differs most
between sites. A federation can have these statistics from sums that the sites share.)
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from metis.data.dataset import Dataset
from metis.errors import DataError

SmallSites = Literal["merge", "leave_out"]
Table = dict[str, list[str]]
Floats = NDArray[np.float64]
Names = NDArray[np.str_]

_SPLIT_SEED = 1990
_TEST_SHARE = 5  # one in five
_MERGED = "others"

_FCON1000_NOTE = (
    "Brain age from FreeSurfer measures of the 1000 Functional Connectomes Project (Biswal et al., PNAS 107(10), "
    "2010), as in PCNtoolkit-demo (Rutherford et al., Nature Protocols 17, 2022): {people} people, {sites} sites. "
    "For non-commercial use with attribution (CC BY-NC)."
)
_IXI_NOTE = (
    "Brain age from FreeSurfer cortical thickness of the IXI study (brain-development.org, Imperial College London): "
    "{people} people, {sites} hospitals. CC BY-SA 3.0."
)
_HEART_NOTE = (
    "Heart Disease (UCI, doi 10.24432/C52P4X): {people} patients, {sites} hospitals. Collected by A. Janosi "
    "(Hungarian Institute of Cardiology, Budapest), W. Steinbrunn (University Hospital, Zurich), M. Pfisterer "
    "(University Hospital, Basel), R. Detrano (V.A. Medical Center, Long Beach, and Cleveland Clinic Foundation). "
    "CC BY 4.0."
)

_HEART_NUMBERS = ("age", "trestbps", "chol", "thalach", "oldpeak", "ca")
_HEART_FLAGS = ("sex", "fbs", "exang")
_HEART_KINDS: dict[str, tuple[int, ...]] = {
    "cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "slope": (1, 2, 3), "thal": (3, 6, 7),
}  # fmt: skip


def fcon1000_brain_age(path: Path, *, smallest_site: int = 1, small_sites: SmallSites = "merge") -> Dataset:
    """Ages from 218 MRI measures at 23 sites; sites of fewer people than `smallest_site` are merged or left out."""
    table = read_table(path, ["sub_id", "site", "age", "sex"])
    features = [column for column in table if column not in ("sub_id", "site", "age", "sex")]
    return _brain_age("fcon1000_brain_age", path, table, features, "site", smallest_site, small_sites, _FCON1000_NOTE)


def ixi_brain_age(path: Path, *, smallest_site: int = 1, small_sites: SmallSites = "merge") -> Dataset:
    """Ages from 70 cortical thicknesses at 3 hospitals; those below `smallest_site` are merged or left out."""
    table = read_table(path, ["participant_id", "hospital", "age", "sex"])
    features = [column for column in table if column not in ("participant_id", "hospital", "age", "sex")]
    return _brain_age("ixi_brain_age", path, table, features, "hospital", smallest_site, small_sites, _IXI_NOTE)


def heart_disease(path: Path, *, smallest_site: int = 1, small_sites: SmallSites = "merge") -> Dataset:
    """Whether a patient of one of 4 hospitals has a heart disease (num > 0), from 22 features.

    Six numbers and three flags, where a gap takes the median of the training examples, and four attributes of
    several kinds, one feature a kind, where a gap is all zeros. A blood pressure or cholesterol of 0 is a gap.
    """
    numbers = [*_HEART_NUMBERS, *_HEART_FLAGS]
    table = read_table(path, ["hospital", *numbers, *_HEART_KINDS, "num"])
    values = numeric_columns(path, table, [*numbers, *_HEART_KINDS, "num"], gaps=True)
    diagnosis = values.pop("num")
    if np.isnan(diagnosis).any():
        raise DataError(f"{path}: the column 'num' must have a value in every row")
    for column in ("trestbps", "chol"):
        values[column][values[column] == 0] = math.nan
    measured = np.column_stack([values[column] for column in numbers])
    kinds = np.column_stack([values[column] == kind for column, known in _HEART_KINDS.items() for kind in known])
    labels = (diagnosis > 0).astype(np.int64)
    sites, kept = _with_large_sites(np.asarray(table["hospital"]), smallest_site, small_sites)
    measured, kinds, labels = measured[kept], kinds[kept], labels[kept]
    train, test = hold_out(sites, labels)
    medians = [
        np.median(column[~np.isnan(column)]) if not np.isnan(column).all() else 0.0 for column in measured[train].T
    ]
    measured = np.where(np.isnan(measured), medians, measured)
    # Flags and kinds stay 0 or 1, where they can be read.
    scaled = standardized(measured[:, : len(_HEART_NUMBERS)], train)
    x = np.column_stack([scaled, measured[:, len(_HEART_NUMBERS) :], kinds]).astype(np.float32)
    return Dataset(
        "heart_disease",
        x[train], labels[train], x[test], labels[test],
        class_names=("no disease", "disease"),
        note=_HEART_NOTE.format(people=f"{len(x):,}", sites=len(np.unique(sites))),
        silos=sites[train],
    )  # fmt: skip


def _brain_age(
    name: str,
    path: Path,
    table: Table,
    features: Sequence[str],
    site_column: str,
    smallest_site: int,
    small_sites: SmallSites,
    note: str,
) -> Dataset:
    values = numeric_columns(path, table, ["age", *features])
    sites, kept = _with_large_sites(np.asarray(table[site_column]), smallest_site, small_sites)
    ages = values["age"][kept].astype(np.float32)
    train, test = hold_out(sites, ages)
    x = standardized(np.column_stack([values[column] for column in features])[kept], train).astype(np.float32)
    return Dataset(
        name,
        x[train], ages[train], x[test], ages[test],
        task="regression",
        note=note.format(people=f"{len(x):,}", sites=len(np.unique(sites))),
        silos=sites[train],
    )  # fmt: skip


# --- what every table needs -----------------------------------------------------------------------


def read_table(path: Path, required: Sequence[str]) -> Table:
    """The columns of a CSV file as text, by their names in its first line; `required` ones must be there."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream)
            names = next(reader, [])
            rows = [row for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise DataError(f"{path} cannot be read as a CSV file: {problem}") from problem
    missing = [name for name in required if name not in names]
    if missing:
        raise DataError(f"{path} needs the columns {', '.join(required)}; there is no {', '.join(missing)}")
    if not rows:
        raise DataError(f"{path} has a first line with names but no rows")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise DataError(f"{path}: row {number} has {len(row)} values, but there are {len(names)} columns")
    return {name: [row[column].strip() for row in rows] for column, name in enumerate(names)}


def numeric_columns(
    path: Path, table: Mapping[str, Sequence[str]], columns: Sequence[str], gaps: bool = False
) -> dict[str, Floats]:
    """These columns as numbers; an empty value is NaN if gaps are allowed, and otherwise a DataError."""
    numbers = {}
    for column in columns:
        try:
            values = np.array([float(text) if text or not gaps else math.nan for text in table[column]])
        except ValueError:
            values = np.array([math.inf])
        if np.isinf(values).any() or (not gaps and np.isnan(values).any()):
            row, text = next(
                (row, text) for row, text in enumerate(table[column], start=2) if not _is_number(text, gaps)
            )
            raise DataError(f"{path}: row {row} has '{text}' in the column '{column}', which must be a number")
        numbers[column] = values
    return numbers


def hold_out(sites: Names, targets: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of the training and of the test examples, the same every time.

    Of each site's examples, in the order of their targets, one of every five in a row is for the test.
    """
    rng = np.random.default_rng(_SPLIT_SEED)
    tested: list[int] = []
    for site in np.unique(sites):
        members = rng.permutation(np.flatnonzero(sites == site))
        members = members[np.argsort(targets[members], kind="stable")]
        for start in range(0, len(members), _TEST_SHARE):
            # In a last row of fewer than five the draw may hit none of them, so that small sites keep the share.
            drawn = start + int(rng.integers(_TEST_SHARE))
            if drawn < len(members):
                tested.append(int(members[drawn]))
    is_test = np.zeros(len(sites), np.bool_)
    is_test[tested] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def standardized(features: Floats, train: NDArray[np.int64]) -> Floats:
    """Mean 0 and deviation 1 over the training examples; a feature that is constant there becomes 0."""
    mean, deviation = features[train].mean(axis=0), features[train].std(axis=0)
    varies = deviation > 1e-12 * np.maximum(1, np.abs(mean))
    scaled: Floats = np.where(varies, (features - mean) / np.where(varies, deviation, 1.0), 0.0)
    return scaled


def _is_number(text: str, gaps: bool) -> bool:
    try:
        return math.isfinite(float(text)) if text else gaps
    except ValueError:
        return False


def _with_large_sites(sites: Names, smallest: int, small_sites: str) -> tuple[Names, NDArray[np.int64]]:
    """The site of each person who is kept, and the numbers of those people."""
    if small_sites not in ("merge", "leave_out"):
        raise DataError(f"small_sites is '{small_sites}'; allowed: merge, leave_out")
    names, counts = np.unique(sites, return_counts=True)
    ascending = np.argsort(counts, kind="stable")
    few = int((counts < smallest).sum())
    if small_sites == "leave_out":
        kept = np.flatnonzero(np.isin(sites, names[ascending[few:]]))
        if len(kept) == 0:
            raise DataError(f"smallest_site is {smallest}, but the largest site has {counts.max()} people")
        return sites[kept], kept
    # If the small ones together are still too few, the next smallest joins them.
    while few and counts[ascending[:few]].sum() < smallest and few < len(names):
        few += 1
    merged = np.where(np.isin(sites, names[ascending[:few]]), _MERGED, sites)
    return merged, np.arange(len(sites))
