"""Tables of several sites: the real ones where they are at hand, and what a loader makes of any."""

import csv

import numpy as np
import pytest

from metis.data import DATASETS, Dataset, fetch_dataset, find_dataset, load_dataset, natural
from metis.data.tables import fcon1000_brain_age, heart_disease, hold_out, ixi_brain_age, standardized
from metis.errors import DataError


@pytest.fixture
def real(data_folder):
    """A loader of real tables that skips the test where the file is missing."""

    def load(name, **options):
        if not (data_folder / f"{name}.csv").is_file():
            pytest.skip(f"there is no {name}.csv in {data_folder}")
        return load_dataset(name, data_folder, **options)

    return load


def write_table(path, columns):
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def brain_table(folder, people_by_site, features=3, seed=0):
    """A table in the form of FCON1000: thicknesses that fall with age, and one feature that never changes."""
    rng = np.random.default_rng(seed)
    sites = np.repeat(list(people_by_site), list(people_by_site.values()))
    ages = rng.uniform(20, 80, len(sites))
    columns = {"sub_id": [f"sub{i}" for i in range(len(sites))], "age": ages, "sex": rng.integers(0, 2, len(sites))}
    columns |= {f"thickness{k}": 4 - ages / 40 + rng.normal(0, 0.1, len(sites)) for k in range(features)}
    columns |= {"constant": np.full(len(sites), 0.1), "site": sites}
    return write_table(folder / "fcon1000_brain_age.csv", columns)


# --- the real tables ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "people", "features", "sites"),
    [("fcon1000_brain_age", 1078, 218, 23), ("ixi_brain_age", 556, 70, 3), ("heart_disease", 920, 22, 4)],
)
def test_a_real_table_is_whole(real, name, people, features, sites):
    """All people are in training or test, one in five in the latter, and the registry says how many."""
    dataset = real(name)
    source = DATASETS[name]
    assert len(dataset.x_train) + len(dataset.x_test) == people
    assert (len(dataset.y_train), len(dataset.y_test)) == (source.train, source.test)
    assert len(dataset.y_test) == pytest.approx(people / 5, abs=sites)
    assert dataset.x_train.shape[1:] == source.shape == (features,)
    assert dataset.x_train.dtype == dataset.x_test.dtype == np.float32
    assert len(np.unique(dataset.silos)) == sites
    assert dataset.task == source.task
    assert np.isfinite(dataset.x_train).all() and np.isfinite(dataset.x_test).all()
    assert f"{people:,}" in dataset.note and "CC BY" in dataset.note


@pytest.mark.parametrize(("name", "youngest", "oldest"), [("fcon1000_brain_age", 7, 86), ("ixi_brain_age", 19, 87)])
def test_brain_ages_are_years(real, name, youngest, oldest):
    """Targets of a regression, float32, and features with mean 0 and deviation 1 (or 0 where constant)."""
    dataset = real(name)
    assert dataset.y_train.dtype == np.float32
    assert dataset.classes == 0
    assert youngest < min(dataset.y_train.min(), dataset.y_test.min())
    assert max(dataset.y_train.max(), dataset.y_test.max()) < oldest
    np.testing.assert_allclose(dataset.x_train.mean(axis=0), 0, atol=1e-4)
    deviations = dataset.x_train.std(axis=0, dtype=np.float64)
    np.testing.assert_allclose(deviations[deviations > 0], 1, rtol=1e-4)
    assert (deviations == 0).sum() == (4 if name == "fcon1000_brain_age" else 0)  # four measures nobody has


def test_brain_age_can_be_learned_from_the_table(real):
    """Ridge regression on the training people beats guessing their mean age by far on the others."""
    dataset = real("fcon1000_brain_age")
    x, y = dataset.x_train.astype(np.float64), dataset.y_train.astype(np.float64)
    weights = np.linalg.solve(x.T @ x + 300 * np.eye(x.shape[1]), x.T @ (y - y.mean()))
    error = np.abs(dataset.x_test @ weights + y.mean() - dataset.y_test).mean()
    assert error < 0.65 * np.abs(dataset.y_test - y.mean()).mean()


def test_heart_disease_is_num_above_zero(real):
    """509 of 920 patients; 93 % of Zurich and Basel, 36 % of Budapest."""
    dataset = real("heart_disease")
    assert dataset.class_names == ("no disease", "disease")
    assert dataset.classes == 2
    assert dataset.y_train.sum() + dataset.y_test.sum() == 509
    ill = {name: dataset.y_train[part].mean() for part, name in zip(*natural(dataset.silos), strict=True)}
    assert ill["switzerland"] == pytest.approx(0.935, abs=0.01)
    assert ill["hungarian"] == pytest.approx(0.361, abs=0.01)


def test_small_sites_are_merged_or_left_out(real):
    """Leiden's 12, Munich's 15 and Pittsburgh's 3 people become one silo, or none."""
    merged = real("fcon1000_brain_age", smallest_site=16, small_sites="merge")
    left_out = real("fcon1000_brain_age", smallest_site=16, small_sites="leave_out")
    small = {"Leiden_2180", "Munchen", "Pittsburgh"}
    assert not small & set(merged.silos) and not small & set(left_out.silos)
    assert len(merged.x_train) + len(merged.x_test) == 1078
    assert len(left_out.x_train) + len(left_out.x_test) == 1078 - 12 - 15 - 3
    assert len(np.unique(merged.silos)) == 23 - 3 + 1
    assert "others" in merged.silos and "others" not in left_out.silos


# --- any table ------------------------------------------------------------------------------------


def test_the_split_is_the_same_every_time_and_fair_to_every_site(tmp_path):
    """Each site gives a fifth of its people to the test, spread over its ages."""
    path = brain_table(tmp_path, {"a": 50, "b": 25, "c": 5})
    dataset, again = fcon1000_brain_age(path), fcon1000_brain_age(path)
    assert np.array_equal(dataset.x_test, again.x_test)
    _, counts = np.unique(dataset.silos, return_counts=True)
    assert counts.tolist() == [40, 20, 4]
    sites, targets = np.repeat(["a", "b"], 50), np.tile(np.arange(50.0), 2)
    train, test = hold_out(sites, targets)
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(100))
    for site in ("a", "b"):
        tested = np.sort(targets[test][sites[test] == site])
        assert np.array_equal(tested // 5, np.arange(10))  # one of every five ages in a row


def test_standardization_looks_at_the_training_examples_only():
    """Test values far off do not move the mean; a constant feature becomes 0 and not NaN."""
    features = np.array([[1.0, 0.1], [3.0, 0.1], [1000.0, 0.2]])
    scaled = standardized(features, np.array([0, 1]))
    assert scaled.tolist() == [[-1.0, 0.0], [1.0, 0.0], [998.0, 0.0]]


def test_a_single_small_site_is_merged_with_the_next(tmp_path):
    """One site of 3 alone would still be too small, so the next smallest joins it."""
    path = brain_table(tmp_path, {"large": 40, "middle": 20, "tiny": 3})
    dataset = fcon1000_brain_age(path, smallest_site=10)
    assert set(dataset.silos) == {"large", "others"}
    with pytest.raises(DataError, match="smallest_site is 99, but the largest site has 40 people"):
        fcon1000_brain_age(path, smallest_site=99, small_sites="leave_out")
    with pytest.raises(DataError, match="small_sites is 'drop'; allowed: merge, leave_out"):
        fcon1000_brain_age(path, small_sites="drop")


def test_gaps_of_heart_disease_take_the_training_median(tmp_path):
    """Numbers and flags their median, kinds all zeros; a cholesterol of 0 was never measured."""
    rng = np.random.default_rng(0)
    count = 40
    columns = {
        "hospital": ["cleveland"] * 20 + ["va"] * 20,
        "age": rng.integers(30, 70, count), "sex": rng.integers(0, 2, count), "cp": rng.integers(1, 5, count),
        "trestbps": rng.integers(100, 160, count), "chol": ["0"] * 20 + ["250"] * 20, "fbs": [""] * 39 + ["1"],
        "restecg": rng.integers(0, 3, count), "thalach": rng.integers(90, 180, count), "exang": [0] * count,
        "oldpeak": rng.uniform(0, 4, count), "slope": [""] * count, "ca": [""] * count, "thal": [7] * count,
        "num": rng.integers(0, 5, count),
    }  # fmt: skip
    dataset = heart_disease(write_table(tmp_path / "heart_disease.csv", columns))
    x = np.concatenate([dataset.x_train, dataset.x_test])
    chol, ca, fbs = x[:, 2], x[:, 5], x[:, 7]
    assert np.all(chol == 0) and np.all(ca == 0)  # after imputation the same for all, hence 0 when standardized
    assert set(fbs.tolist()) == {0.0, 1.0} or set(fbs.tolist()) == {1.0}
    slope, thal = x[:, -6:-3], x[:, -3:]
    assert np.all(slope == 0)
    assert np.all(thal == [0, 0, 1])
    assert np.array_equal(x[:, 9:13].sum(axis=1), np.ones(count))  # each patient has one kind of chest pain


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "needs the columns sub_id, site, age, sex; there is no"),
        ("sub_id,site,age\n1,a,3\n", "there is no sex"),
        ("sub_id,site,age,sex,x\n", "has a first line with names but no rows"),
        ("sub_id,site,age,sex,x\n1,a,30,1\n", "row 2 has 4 values, but there are 5 columns"),
        ("sub_id,site,age,sex,x\n1,a,30,1,2\n2,a,old,1,2\n", "row 3 has 'old' in the column 'age'"),
        ("sub_id,site,age,sex,x\n1,a,30,1,\n", "row 2 has '' in the column 'x', which must be a number"),
        ("sub_id,site,age,sex,x\n1,a,inf,1,2\n", "row 2 has 'inf' in the column 'age'"),
    ],
)
def test_a_damaged_table_is_refused_with_the_place(tmp_path, content, complaint):
    """The error names the file, the row and the column."""
    path = tmp_path / "fcon1000_brain_age.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=r"fcon1000_brain_age\.csv") as error:
        fcon1000_brain_age(path)
    assert complaint in str(error.value)


def test_a_table_that_is_no_text_is_refused(tmp_path):
    """Bytes that are no UTF-8 are an error of the data, not of the program."""
    path = tmp_path / "ixi_brain_age.csv"
    path.write_bytes(b"\xff\xfe\x00age")
    with pytest.raises(DataError, match="cannot be read as a CSV file"):
        ixi_brain_age(path)


# --- the registry ---------------------------------------------------------------------------------


def test_tables_are_found_by_name_in_the_users_folder(tmp_path):
    """Like the image sets, but as CSV; options go to the loader."""
    brain_table(tmp_path, {"a": 20, "b": 10})
    assert find_dataset("fcon1000_brain_age", tmp_path) == tmp_path / "fcon1000_brain_age.csv"
    dataset = load_dataset("fcon1000_brain_age", tmp_path, smallest_site=15, small_sites="leave_out")
    assert set(dataset.silos) == {"a"}


def test_a_missing_table_says_where_it_comes_from(tmp_path, monkeypatch):
    """It cannot be downloaded, so the error says what to put where."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"put heart_disease\.csv in a folder .* it comes from .*UCI"):
        load_dataset("heart_disease", tmp_path)
    with pytest.raises(DataError, match=r"'heart_disease' cannot be downloaded; put heart_disease\.csv in a folder"):
        fetch_dataset("heart_disease", tmp_path)


def test_options_that_a_data_set_does_not_have_are_refused():
    """With those that it has."""
    with pytest.raises(DataError, match="data set 'digits' has no option 'side'; it has none"):
        load_dataset("digits", side=8)
    with pytest.raises(DataError, match="no option 'sites'; its options are smallest_site, small_sites"):
        load_dataset("ixi_brain_age", sites=2)


def test_silos_are_one_for_each_training_example():
    """A data set that names fewer is refused."""
    with pytest.raises(DataError, match="names the silos of 1 examples but has 2"):
        Dataset("x", np.zeros((2, 1)), np.zeros(2), np.zeros((1, 1)), np.zeros(1), silos=np.array(["a"]))


# --- natural partitions ---------------------------------------------------------------------------


def test_natural_gives_each_silo_its_examples():
    """Largest first, ties by name; disjoint and complete."""
    parts, names = natural(np.array(["b", "a", "c", "b", "a", "b"]))
    assert names == ["b", "a", "c"]
    assert [part.tolist() for part in parts] == [[0, 3, 5], [1, 4], [2]]
    assert all(part.dtype == np.int64 for part in parts)


def test_natural_needs_silos():
    """A data set from one site has no natural division."""
    with pytest.raises(DataError, match="this data set names none"):
        natural(load_dataset("digits").silos)
