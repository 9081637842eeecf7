"""Two tables of FLamby (Ogier du Terrail et al. 2022): the patients, features and splits of its benchmark."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from metis.data.tables import numeric_columns, read_table
from metis.errors import DataError

FlambyName = Literal["heart_disease", "tcga_brca"]

_HEART = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")
# FLamby draws its test patients with scikit-learn's train_test_split(random_state=43), stratified: patient i of a
# hospital, counted without those that have a gap, is one of them if bit i is set.
_HEART_TEST = {
    "cleveland": 0x27D73800471F06489219A5A80E2150180C29358003E1081203A0ADC05123B9A3CD0405012020,
    "hungarian": 0xC5D08940188205C96F4481212C8228B198961C9008AB00E11342B821D3E210088,
    "switzerland": 0x301315C61E0,
    "va": 0x1A2E5C0061120DA1D7040A6DA24001262,
}
_REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")


@dataclass(frozen=True)
class FlambyData:
    """Training and test examples with the site of each; the targets of a survival are (event, days)."""

    name: str
    x_train: NDArray[np.float32]
    y_train: NDArray[np.float32]
    sites_train: NDArray[np.str_]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.float32]
    sites_test: NDArray[np.str_]
    x_pooled: NDArray[np.float32]  # training inputs as FLamby's pooled baseline has them


def load_flamby(name: FlambyName, folder: Path | str | None = None) -> FlambyData:
    """One of the two sets, from its CSV file in `folder`, or else in the folder that METIS_DATA names."""
    if name not in ("heart_disease", "tcga_brca"):
        raise DataError(f"there is no FLamby set '{name}'; allowed: heart_disease, tcga_brca")
    where = folder or os.environ.get("METIS_DATA", "")
    path = Path(where or ".") / f"{name}.csv"
    if not path.is_file():
        raise DataError(f"FLamby's {name} needs {path.name}; put it in a folder and name that with METIS_DATA")
    x, y, sites, test, pooled = _heart_disease(path) if name == "heart_disease" else _tcga_brca(path)
    x, y, pooled = x.astype(np.float32), y.astype(np.float32), pooled.astype(np.float32)
    return FlambyData(name, x[~test], y[~test], sites[~test], x[test], y[test], sites[test], pooled[~test])


def _heart_disease(path: Path) -> tuple[NDArray[Any], ...]:
    """10 attributes as 13 features, without patients that have a gap, standardized at each hospital, or pooled."""
    table = read_table(path, ["hospital", *_HEART, "num"])
    values = numeric_columns(path, table, [*_HEART, "num"], gaps=True)
    whole = ~np.isnan(np.column_stack([values[name] for name in (*_HEART, "num")])).any(axis=1)
    hospitals = np.asarray(table["hospital"])[whole]
    columns = []
    for name in _HEART:
        if name not in ("cp", "restecg"):
            columns.append(values[name][whole])
    for name in ("cp", "restecg"):  # one feature a kind, but for the first
        columns += [values[name][whole] == kind for kind in np.unique(values[name][whole])[1:]]
    raw = np.column_stack(columns).astype(np.float64)
    x, test = raw.copy(), np.zeros(len(raw), np.bool_)
    for hospital, bits in _HEART_TEST.items():
        members = np.flatnonzero(hospitals == hospital)
        if len(members) < bits.bit_length():
            raise DataError(f"{path}: {hospital} has {len(members)} patients without a gap, fewer than FLamby's")
        test[members] = [bool(bits >> number & 1) for number in range(len(members))]
        x[members] = _standardized(raw[members], test[members])
    return x, (values["num"][whole] > 0)[:, None], hospitals, test, _standardized(raw, test)


def _standardized(x: NDArray[np.float64], test: NDArray[np.bool_]) -> NDArray[np.float64]:
    """By mean and deviation of the training examples."""
    return np.asarray((x - x[~test].mean(axis=0)) / (x[~test].std(axis=0, ddof=1) + 1e-9))


def _tcga_brca(path: Path) -> tuple[NDArray[Any], ...]:
    """39 features as they are, and whether and after how many days a patient died."""
    table = read_table(path, ["pid", "center", "split", "E", "T"])
    features = [name for name in table if name not in ("pid", "center", "split", "E", "T")]
    values = numeric_columns(path, table, [*features, "center", "E", "T"])
    sites = np.array([_REGIONS[int(center)] for center in values["center"]])
    x = np.column_stack([values[name] for name in features])
    return x, np.column_stack([values["E"], values["T"]]), sites, np.asarray(table["split"]) == "test", x
