"""Brain volumes: a user's own folder of scans, and synthetic phantoms that show the 5-CNN without any.

The scans of UK Biobank, on which the paper trains, cannot be published. nibabel reads the user's (the extra
`mri`); the phantoms need nothing but a seed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.data.dataset import Dataset
from metis.data.tables import hold_out, numeric_columns, read_table
from metis.errors import DataError, needs_package

YOUNGEST, OLDEST = 45.0, 80.0  # of the phantoms, as in UK Biobank
MEAN_AGE, AGE_DEVIATION = 62.68, 7.5

_CHUNK = 1 << 20  # voxels made at once, to use little memory


# --- a user's own scans ---------------------------------------------------------------------------


class NiftiVolumes:
    """Scans and ages as a map-style dataset; a scan is read from its file each time it is asked for.

    An item is (volume, age): float32 of shape (1, depth, height, width), and a float32. `downsample` = 2 takes the
    mean of 2x2x2 voxels; with `standardize` each volume has mean 0 and deviation 1. Voxels that are no number
    become 0. All scans must have one shape, as they have after registration to a template.
    """

    def __init__(
        self, paths: Sequence[Path | str], ages: NDArray[Any], *, downsample: int = 1, standardize: bool = True
    ) -> None:
        if len(paths) != len(ages):
            raise DataError(f"there are {len(paths)} volumes but {len(ages)} ages")
        if len(paths) == 0:
            raise DataError("there are no volumes")
        if downsample < 1:
            raise DataError(f"downsample is {downsample}; it must be at least 1")
        self.paths = tuple(Path(path) for path in paths)
        self.targets = np.asarray(ages, np.float32)
        self.downsample, self.standardize = downsample, standardize
        self.scan_shape = _shape(self.paths[0], _open(self.paths[0]))
        if min(self.scan_shape) < downsample:
            raise DataError(f"{self.paths[0]} has {self.scan_shape} voxels, too few to downsample by {downsample}")

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        """The shape of one example as the network sees it."""
        depth, height, width = (side // self.downsample for side in self.scan_shape)
        return 1, depth, height, width

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], np.float32]:
        path = self.paths[index]
        image = _open(path)
        shape = _shape(path, image)
        if shape != self.scan_shape:
            raise DataError(
                f"{path} has {shape} voxels, but {self.paths[0].name} has {self.scan_shape}; "
                "register all volumes to one template first"
            )
        try:
            volume = np.asarray(image.dataobj, np.float32).reshape(shape)
        except (OSError, EOFError, ValueError, TypeError, zlib.error) as problem:
            raise DataError(f"{path} cannot be read: {problem}") from problem
        volume = _downsampled(np.nan_to_num(volume, nan=0.0, posinf=0.0, neginf=0.0), self.downsample)
        if self.standardize:
            volume = (volume - volume.mean()) / (volume.std() or 1.0)
        return volume[None].astype(np.float32), self.targets[index]


@dataclass(frozen=True)
class VolumeFolder:
    """A user's scans, divided into training and test; `silos` as in a `Dataset`."""

    train: NiftiVolumes
    test: NiftiVolumes
    silos: NDArray[np.str_]
    note: str


def load_volumes(
    folder: Path | str, table: str = "ages.csv", *, downsample: int = 1, standardize: bool = True
) -> VolumeFolder:
    """The scans that a CSV file in the folder lists; nothing but the shape of the first is read yet.

    Its columns are `file` (a path within the folder, .nii or .nii.gz) and `age`, and if wanted `site` (who holds
    it) and `split` (train or test). Without `split` one in five of each site is for the test, always the same ones.
    """
    folder = Path(folder).expanduser()
    columns = read_table(folder / table, ["file", "age"])
    ages = numeric_columns(folder / table, columns, ["age"])["age"].astype(np.float32)
    paths = [folder / name for name in columns["file"]]
    lost = [path for path in paths if not path.is_file()]
    if lost:
        raise DataError(
            f"{folder / table} lists {len(paths)} volumes, but {len(lost)} are not there, such as {lost[0]}"
        )
    sites = np.asarray(columns.get("site", [""] * len(paths)))
    if "split" in columns:
        split = np.asarray(columns["split"])
        unknown = sorted(set(columns["split"]) - {"train", "test"})
        if unknown:
            raise DataError(f"{folder / table}: the column 'split' has '{unknown[0]}'; allowed: train, test")
        train, test = np.flatnonzero(split == "train"), np.flatnonzero(split == "test")
    else:
        train, test = hold_out(sites, ages)
    if len(train) == 0 or len(test) == 0:
        raise DataError(f"{folder / table} gives {len(train)} volumes for training and {len(test)} for the test")
    options: dict[str, Any] = {"downsample": downsample, "standardize": standardize}
    return VolumeFolder(
        train=NiftiVolumes([paths[i] for i in train], ages[train], **options),
        test=NiftiVolumes([paths[i] for i in test], ages[test], **options),
        silos=sites[train] if "site" in columns else np.empty(0, np.str_),
        note=f"Brain age from {len(paths):,} volumes of {folder.name}, the user's own.",
    )


def _open(path: Path) -> Any:
    try:
        import nibabel
    except ImportError as problem:
        raise DataError(needs_package("reading brain volumes", "nibabel", "mri")) from problem
    try:
        return nibabel.load(path)  # type: ignore[attr-defined,unused-ignore]  # not in its list of public names
    except (OSError, EOFError, zlib.error, nibabel.filebasedimages.ImageFileError) as problem:
        raise DataError(f"{path} cannot be read as a brain volume: {problem}") from problem


def _shape(path: Path, image: Any) -> tuple[int, int, int]:
    shape = tuple(int(side) for side in image.shape)
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if len(shape) != 3:
        raise DataError(f"{path} has the shape {shape}; a brain volume has three axes")
    return shape[0], shape[1], shape[2]


def _downsampled(volume: NDArray[np.float32], by: int) -> NDArray[np.float32]:
    """The mean of each cube of by x by x by voxels; the remainder is cut off on both sides alike."""
    if by == 1:
        return volume
    counts = [side // by for side in volume.shape]
    starts = [(side - count * by) // 2 for side, count in zip(volume.shape, counts, strict=True)]
    whole = volume[tuple(slice(start, start + count * by) for start, count in zip(starts, counts, strict=True))]
    depth, height, width = counts
    means: NDArray[np.float32] = whole.reshape(depth, by, height, by, width, by).mean(axis=(1, 3, 5))
    return means


# --- phantoms -------------------------------------------------------------------------------------


def phantom_dataset(*, train: int = 800, test: int = 200, side: int = 24, seed: int = 1990) -> Dataset:
    """Synthetic brains as a data set: an age from a volume of side x side x side voxels."""
    if train < 1 or test < 1:
        raise DataError(f"train is {train} and test is {test}; each must be at least 1")
    volumes, ages = brain_phantoms(train + test, side, seed)
    return Dataset(
        "brain_phantoms",
        volumes[:train], ages[:train], volumes[train:], ages[train:],
        task="regression",
        note=f"Synthetic: {train + test:,} brain phantoms drawn from seed {seed}, not people. Ventricles grow and the "
        "cortex thins with age.",
    )  # fmt: skip


def brain_phantoms(count: int, side: int = 24, seed: int = 1990) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Synthetic T1 volumes (count, 1, side, side, side) and their ages, 45 to 80, the same for the same seed.

    With age the ventricles grow, the cortex thins and the brain draws back from the skull; each person is ahead of
    or behind the age in each of the three, and differs in head size, pose, folds, scanner gain and noise.
    """
    if count < 1 or side < 8:
        raise DataError(f"brain_phantoms({count}, side={side}): count must be at least 1, side at least 8")
    rng = np.random.default_rng(seed)
    ages = _draw_ages(count, rng)
    volumes = np.empty((count, 1, side, side, side), np.uint8)
    step = max(1, _CHUNK // side**3)
    for start in range(0, count, step):
        chunk = ages[start : start + step]
        volumes[start : start + step, 0] = _draw_phantoms(chunk, side, rng)
    return volumes, ages


def _draw_ages(count: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Normal, cut at the youngest and the oldest."""
    ages = rng.normal(MEAN_AGE, AGE_DEVIATION, count)
    while (outside := np.flatnonzero((ages < YOUNGEST) | (ages > OLDEST))).size:
        ages[outside] = rng.normal(MEAN_AGE, AGE_DEVIATION, outside.size)
    return ages.astype(np.float32)


def _draw_phantoms(ages: NDArray[np.float32], side: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    people = len(ages)

    def varied(mean: float, deviation: float, *axes: int) -> NDArray[np.float32]:
        return rng.normal(mean, deviation, (people, *(axes or (1,)))).astype(np.float32)

    # 0 at 45 years, 1 at 80: how far each of the three signs of age has come in this person.
    years = ((ages - YOUNGEST) / (OLDEST - YOUNGEST))[:, None]
    widening, thinning, shrinking = (years + varied(0, deviation) for deviation in (0.15, 0.15, 0.2))

    # Voxels in the coordinates of each head: a unit ball, turned and moved a little.
    centres = (np.arange(side, dtype=np.float32) + 0.5) * 2 / side - 1
    grid = np.stack(np.meshgrid(centres, centres, centres, indexing="ij")).reshape(3, -1)
    radii = np.array([0.70, 0.86, 0.68], np.float32) * varied(1, 0.03) * varied(1, 0.015, 3)
    placed = (_rotations(varied(0, 0.06, 3)) @ grid + varied(0, 0.02, 3)[:, :, None]) / radii[:, :, None]
    voxel = np.float32(2 / side) / radii.mean(axis=1, keepdims=True)

    def inside(depth: NDArray[np.float32]) -> NDArray[np.float32]:
        """The part of a voxel that lies inside a surface, from its depth under it."""
        part: NDArray[np.float32] = np.clip(depth / voxel + 0.5, 0, 1)
        return part

    distance = _length(placed)
    waves = np.sin(placed * varied(14, 1, 3)[:, :, None] + varied(0, 3, 3)[:, :, None])
    surface = (0.97 - 0.06 * shrinking) * (1 + 0.025 * waves.prod(axis=1))
    cortex = 0.24 - 0.09 * thinning
    skull, brain, white = (inside(depth - distance) for depth in (np.float32(1), surface, surface - cortex))
    size = (0.8 + 0.8 * widening) * varied(1, 0.05)
    ventricles = np.zeros_like(distance)
    for offset in (-0.17, 0.17):
        axes = np.array([0.10, 0.34, 0.15], np.float32) * size.clip(0.2)[:, :, None]
        centre = np.array([offset, 0.0, 0.08], np.float32)[None, :, None]
        # Near its surface the depth under an ellipsoid is about its smallest radius times 1 - |x / axes|.
        depth = axes[..., 0] * (1 - _length((placed - centre) / axes.transpose(0, 2, 1)))
        ventricles = np.maximum(ventricles, inside(depth))

    fluid, grey, light = 0.18, 0.55, 0.85  # what T1 makes of cerebrospinal fluid, grey and white matter
    image = fluid * skull + (grey - fluid) * brain + (light - grey) * white
    image += ventricles * (fluid * skull - image)
    # The coil's uneven field and gain, then noise; like a magnitude image it has no negative values.
    image *= varied(1, 0.05) * (1 + np.einsum("pa,pav->pv", varied(0, 0.04, 3), placed))
    image += np.float32(0.03) * rng.standard_normal(image.shape, np.float32)
    levels: NDArray[np.uint8] = np.rint(255 * np.abs(image).clip(0, 1)).astype(np.uint8)
    return levels.reshape(people, side, side, side)


def _length(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of vectors along the middle axis; several times as fast as numpy's own."""
    lengths: NDArray[np.float32] = np.sqrt(np.einsum("pav,pav->pv", vectors, vectors))
    return lengths


def _rotations(angles: NDArray[np.float32]) -> NDArray[np.float32]:
    """Turned about each axis in turn by the three small angles (radians) of each person."""
    turned = np.broadcast_to(np.eye(3, dtype=np.float32), (len(angles), 3, 3))
    for axis in range(3):
        first, second = [other for other in range(3) if other != axis]
        turn = np.tile(np.eye(3, dtype=np.float32), (len(angles), 1, 1))
        cosine, sine = np.cos(angles[:, axis]), np.sin(angles[:, axis])
        turn[:, first, first] = turn[:, second, second] = cosine
        turn[:, first, second], turn[:, second, first] = -sine, sine
        turned = turn @ turned
    return turned
