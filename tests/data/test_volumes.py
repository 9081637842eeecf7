"""Brain volumes: folders of NIfTI files that the tests make, and phantoms."""

import numpy as np
import pytest

from metis.core.solvers import VanillaSGD
from metis.data import NiftiVolumes, brain_phantoms, find_dataset, load_dataset, load_volumes, natural
from metis.errors import DataError

nibabel = pytest.importorskip("nibabel")


def write_volume(path, voxels):
    nibabel.save(nibabel.Nifti1Image(np.asarray(voxels), np.eye(4)), path)
    return path


@pytest.fixture
def scans(tmp_path):
    """Ten scans of 8x9x10 voxels from two sites, with a table of ages."""
    rng = np.random.default_rng(0)
    lines = ["file,age,site"]
    for number in range(10):
        name = f"scan{number}.nii.gz" if number % 2 else f"scan{number}.nii"
        write_volume(tmp_path / name, rng.normal(100, 20, (8, 9, 10)).astype(np.float32))
        lines.append(f"{name},{50 + number},{'north' if number < 5 else 'south'}")
    (tmp_path / "ages.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


# --- a user's own scans ---------------------------------------------------------------------------


def test_a_folder_becomes_training_and_test_examples(scans):
    """One in five of each site is for the test; a silo for each training scan."""
    folder = load_volumes(scans)
    assert (len(folder.train), len(folder.test)) == (8, 2)
    ages = np.concatenate([folder.train.targets, folder.test.targets])
    assert np.array_equal(np.sort(ages), np.arange(50, 60))
    parts, names = natural(folder.silos)
    assert (names, [len(part) for part in parts]) == (["north", "south"], [4, 4])
    assert "10 volumes" in folder.note


def test_a_volume_is_one_channel_of_standardized_voxels(scans):
    """As the 5-CNN takes it, with the age of its own file."""
    volumes = load_volumes(scans).train
    volume, age = volumes[3]
    assert volume.shape == volumes.input_shape == (1, 8, 9, 10)
    assert volume.dtype == age.dtype == np.float32
    assert volume.mean() == pytest.approx(0, abs=1e-5)
    assert volume.std() == pytest.approx(1, abs=1e-5)
    assert volumes.paths[3].name.startswith(f"scan{int(age) - 50}.nii")
    raw = nibabel.load(volumes.paths[3]).get_fdata()
    np.testing.assert_allclose(volume[0], (raw - raw.mean()) / raw.std(), rtol=1e-4, atol=1e-5)


def test_downsampling_takes_the_mean_of_cubes(tmp_path):
    """Of 4x4x5 voxels by 2: 2x2x2 cubes, the fifth layer is cut off."""
    voxels = np.arange(4 * 4 * 5, dtype=np.float32).reshape(4, 4, 5)
    path = write_volume(tmp_path / "a.nii", voxels)
    volumes = NiftiVolumes([path], np.array([60.0]), downsample=2, standardize=False)
    volume, _ = volumes[0]
    assert volume.shape == volumes.input_shape == (1, 2, 2, 2)
    assert volume[0, 0, 1, 1] == voxels[0:2, 2:4, 2:4].mean()
    with pytest.raises(DataError, match="too few to downsample by 9"):
        NiftiVolumes([path], np.array([60.0]), downsample=9)


def test_the_users_own_split_is_kept(scans):
    """A column 'split' decides; other words in it are refused."""
    table = scans / "ages.csv"
    rows = table.read_text().splitlines()
    own = [rows[0] + ",split", *(f"{row},{'test' if k < 7 else 'train'}" for k, row in enumerate(rows[1:]))]
    table.write_text("\n".join(own))
    folder = load_volumes(scans)
    assert folder.train.targets.tolist() == [57, 58, 59]
    table.write_text("\n".join(own).replace("test", "validation"))
    with pytest.raises(DataError, match="the column 'split' has 'validation'; allowed: train, test"):
        load_volumes(scans)


def test_scaling_and_gaps_of_a_file_are_applied(tmp_path):
    """Whole numbers with a slope in the header; NaN outside the brain becomes 0; a fourth axis of 1 is dropped."""
    image = nibabel.Nifti1Image(np.full((4, 4, 4), 10, np.int16), np.eye(4))
    image.header.set_slope_inter(0.5, 1.0)
    nibabel.save(image, tmp_path / "scaled.nii")
    scaled, _ = NiftiVolumes([tmp_path / "scaled.nii"], np.array([50.0]), standardize=False)[0]
    assert np.all(scaled == 10 * 0.5 + 1.0)
    voxels = np.ones((4, 4, 4, 1), np.float32)
    voxels[0] = np.nan
    gaps, _ = NiftiVolumes([write_volume(tmp_path / "gaps.nii", voxels)], np.array([50.0]), standardize=False)[0]
    assert gaps.shape == (1, 4, 4, 4)
    assert np.all(gaps[0, 0] == 0) and np.all(gaps[0, 1:] == 1)


def test_faults_of_a_folder_are_named(scans):
    """A file that is missing, damaged or of another shape is an error that gives its name."""
    (scans / "scan3.nii.gz").unlink()
    with pytest.raises(DataError, match=r"lists 10 volumes, but 1 are not there, such as .*scan3\.nii\.gz"):
        load_volumes(scans)
    write_volume(scans / "scan3.nii.gz", np.zeros((8, 9, 11), np.float32))
    odd = NiftiVolumes([scans / "scan0.nii", scans / "scan3.nii.gz"], np.array([1.0, 2.0]))
    with pytest.raises(DataError, match=r"scan3\.nii\.gz has \(8, 9, 11\) voxels, but scan0\.nii has \(8, 9, 10\)"):
        odd[1]
    (scans / "scan3.nii.gz").write_bytes(b"not a volume")
    with pytest.raises(DataError, match=r"scan3\.nii\.gz cannot be read"):
        odd[1]
    whole = (scans / "scan0.nii").read_bytes()
    (scans / "scan0.nii").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"scan0\.nii cannot be read"):
        odd[0]
    write_volume(scans / "series.nii", np.zeros((4, 4, 4, 2), np.float32))
    with pytest.raises(DataError, match="a brain volume has three axes"):
        NiftiVolumes([scans / "series.nii"], np.array([1.0]))


def test_ages_that_are_no_numbers_are_refused(scans):
    """With the row of the table."""
    table = scans / "ages.csv"
    table.write_text(table.read_text().replace("scan2.nii,52", "scan2.nii,"))
    with pytest.raises(DataError, match="row 4 has '' in the column 'age'"):
        load_volumes(scans)
    with pytest.raises(DataError, match=r"none\.csv"):
        load_volumes(scans, "none.csv")


def test_a_folder_feeds_the_5_cnn(scans):
    """From files to a trained local model: lazily read, collated, one step a volume as in the paper."""
    learning = pytest.importorskip("metis.learning")
    folder = load_volumes(scans, downsample=2)
    engine = learning.TorchEngine(
        lambda: learning.brain_age_cnn3d(folder.train.input_shape, width=2), task="regression"
    )
    examples = learning.as_examples(folder.train)
    learner = learning.Learner("north", 0, examples, np.arange(4), 1, VanillaSGD(1e-4), seed=1990)
    start = engine.initial_model(1990)
    trained = learner.train(engine, start, 0, steps=4)
    assert trained.steps == 4
    assert not np.array_equal(trained.model.vector, start.vector)
    assert engine.evaluate(trained.model, learning.as_examples(folder.test))["mae"] < 62.68 - 50 + 1


# --- phantoms -------------------------------------------------------------------------------------


def test_phantoms_are_the_same_for_the_same_seed():
    """And others for another."""
    volumes, ages = brain_phantoms(6, side=16, seed=3)
    again, same_ages = brain_phantoms(6, side=16, seed=3)
    other, _ = brain_phantoms(6, side=16, seed=4)
    assert volumes.shape == (6, 1, 16, 16, 16)
    assert (volumes.dtype, ages.dtype) == (np.uint8, np.float32)
    assert np.array_equal(volumes, again) and np.array_equal(ages, same_ages)
    assert not np.array_equal(volumes, other)


def test_phantoms_have_the_ages_of_uk_biobank():
    """45 to 80 years, around 62.7."""
    _, ages = brain_phantoms(2000, side=8, seed=0)
    assert 45 <= ages.min() < 50 and 75 < ages.max() <= 80
    assert ages.mean() == pytest.approx(62.5, abs=0.7)


def test_phantoms_show_their_age():
    """Fluid in the middle of the head grows with age, and the grey layer gets thinner."""
    volumes, ages = brain_phantoms(300, side=24, seed=0)
    middle = volumes[:, 0, 7:17, 6:18, 8:17].reshape(300, -1)
    fluid = (middle < 80).mean(axis=1)
    assert np.corrcoef(ages, fluid)[0, 1] > 0.6
    head = volumes[:, 0].reshape(300, -1)
    grey = ((head > 115) & (head < 165)).sum(axis=1) / (head > 25).sum(axis=1)
    assert np.corrcoef(ages, grey)[0, 1] < -0.4


def test_no_two_people_are_alike():
    """At the same age: other heads, other ventricles, other noise."""
    volumes, _ = brain_phantoms(20, side=16, seed=0)
    head_sizes = (volumes > 25).sum(axis=(1, 2, 3, 4))
    assert len(np.unique(head_sizes)) > 15
    background = volumes[:, 0, 0, 0, :]
    assert background.max() < 60 and background.std() > 0


def test_phantoms_are_a_data_set_that_says_it_is_synthetic():
    """Found without any file; its options are the numbers, the side and the seed."""
    dataset = load_dataset("brain_phantoms", train=12, test=4, side=8, seed=5)
    assert dataset.x_train.shape == (12, 1, 8, 8, 8) and dataset.x_test.shape == (4, 1, 8, 8, 8)
    assert (dataset.task, dataset.classes, len(dataset.silos)) == ("regression", 0, 0)
    assert dataset.note.startswith("Synthetic") and "seed 5" in dataset.note
    assert find_dataset("brain_phantoms") is not None


@pytest.mark.parametrize("options", [{"train": 0}, {"side": 4}])
def test_phantoms_that_cannot_be_are_refused(options):
    """No people, or too few voxels to show a brain."""
    with pytest.raises(DataError, match=r"at least [18]"):
        load_dataset("brain_phantoms", **options)
