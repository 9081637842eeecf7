"""Data sets by name: one loader that looks in the user's folder, then in the cache, then downloads.

Images are kept as one plain npz file for each set (x_train, y_train, x_test, y_test), read without pickle; the
tables of several sites are CSV files (see tables.py). The small `digits` set comes with the package and the brain
phantoms are made from a seed, so that everything runs without a network.
"""

from __future__ import annotations

import gzip
import inspect
import os
import string
import struct
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from metis.data import tables, volumes
from metis.data.dataset import Dataset, Task
from metis.errors import DataError
from metis.registry import Registry, did_you_mean

__all__ = [
    "DATASETS",
    "Dataset",
    "DatasetSource",
    "RemoteFile",
    "fetch_dataset",
    "find_dataset",
    "load_dataset",
]

Arrays = dict[str, NDArray[Any]]

_BUNDLED = Path(__file__).with_name("digits.npz")
_NO_POOCH = "the package 'pooch' is not installed"
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    struct.error,
    zlib.error,
    tarfile.TarError,
    zipfile.BadZipFile,
)


@dataclass(frozen=True)
class RemoteFile:
    """One original file: the addresses that serve it, in the order to try, and its published MD5 checksum."""

    name: str
    urls: tuple[str, ...]
    md5: str


@dataclass(frozen=True)
class DatasetSource:
    """What is known of a data set before it is loaded, and how it is had: from files, a table or a seed."""

    name: str
    title: str
    shape: tuple[int, ...]
    class_names: tuple[str, ...]
    train: int
    test: int
    files: tuple[RemoteFile, ...] = ()
    convert: Callable[[Mapping[str, Path]], Arrays] | None = None
    task: Task = "classification"
    read: Callable[..., Dataset] | None = None  # a CSV file that cannot be downloaded; more arguments are options
    generate: Callable[..., Dataset] | None = None  # from a seed; the arguments are options
    origin: str = ""  # where a file that cannot be downloaded comes from

    @property
    def bundled(self) -> bool:
        """Whether the set comes with the package, or is made by it, and never needs a download."""
        return not self.files and self.read is None

    @property
    def file(self) -> str:
        """The name of its file in the user's folder."""
        return f"{self.name}.npz" if self.read is None else f"{self.name}.csv"

    @property
    def options(self) -> tuple[str, ...]:
        """What `load_dataset` can be told about this set, by name."""
        function = self.generate or self.read
        if function is None:
            return ()
        kinds = inspect.signature(function).parameters.values()
        return tuple(parameter.name for parameter in kinds if parameter.kind is parameter.KEYWORD_ONLY)


DATASETS: Registry[DatasetSource] = Registry("data set", "metis.datasets")


# --- the interface --------------------------------------------------------------------------------


def load_dataset(
    name: str, folder: Path | str | None = None, *, download: bool = True, progress: bool = False, **options: Any
) -> Dataset:
    """Load a data set from `folder` (or else METIS_DATA), the cache, or its home page, in this order.

    A download goes to the cache; the user's folder is only read. Some sets have options, which their source names.
    """
    source = _source(name)
    for option in options:
        if option not in source.options:
            known = f"its options are {', '.join(source.options)}" if source.options else "it has none"
            raise DataError(f"data set '{name}' has no option '{option}'; {known}")
    if source.generate is not None:
        return source.generate(**options)
    path = find_dataset(name, folder)
    if path is None:
        if not download or source.read is not None:
            raise DataError(f"data set '{name}' {_missing(name, folder)}; {_remedy(name)}")
        try:
            path = fetch_dataset(name, progress=progress)
        except DataError as error:
            # Same fault, but said with the places that were searched before.
            reason = error.__cause__ if isinstance(error.__cause__, _DownloadFailed) else error
            raise DataError(
                f"data set '{name}' {_missing(name, folder)} and could not be downloaded ({reason}); {_remedy(name)}"
            ) from error
    return _read(source, path) if source.read is None else source.read(path, **options)


def find_dataset(name: str, folder: Path | str | None = None) -> Path | None:
    """Where the file of a data set is (`folder` or else METIS_DATA, then the cache), or None.

    A set that comes with the package is always there; for one made from a seed it is the module that makes it.
    """
    source = _source(name)
    if source.bundled:
        return _BUNDLED if source.generate is None else Path(volumes.__file__)
    for place in (_user_folder(folder), _cache_folder()):
        if place is not None and (place / source.file).is_file():
            return place / source.file
    return None


def fetch_dataset(name: str, folder: Path | str | None = None, progress: bool = True) -> Path:
    """Download a data set into `folder` (or else the cache), check it, and convert it to one npz file.

    The file appears only when it is complete; a failed or interrupted download leaves nothing behind.
    """
    source = _source(name)
    present = find_dataset(name, folder) if source.bundled else None
    if present is not None:
        return present
    if source.read is not None:
        raise DataError(f"data set '{name}' cannot be downloaded; {_remedy(name)}")
    target = Path(folder).expanduser() if folder is not None else _cache_folder()
    if target is None:
        raise _failure(source, _DownloadFailed(_NO_POOCH))
    final = target / f"{name}.npz"
    is_new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        # Inside the target folder, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target) as scratch:
            files = {remote.name: _download(remote, Path(scratch), progress) for remote in source.files}
            partial = Path(scratch) / f"{name}.npz"
            arrays = _convert(source, files)
            np.savez(
                partial,
                x_train=arrays["x_train"],
                y_train=arrays["y_train"],
                x_test=arrays["x_test"],
                y_test=arrays["y_test"],
            )
            _read(source, partial)
            partial.replace(final)
    except BaseException as error:
        if is_new:
            with suppress(OSError):
                target.rmdir()
        if isinstance(error, _DownloadFailed):
            raise _failure(source, error) from error
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise DataError(f"data set '{name}' could not be stored in {target}: {reason}") from error
        raise
    return final


# --- places ---------------------------------------------------------------------------------------


def _source(name: str) -> DatasetSource:
    if name not in DATASETS:
        raise DataError(f"there is no data set '{name}'; {did_you_mean(name.lower().replace('-', '_'), DATASETS)}")
    return DATASETS[name]


def _user_folder(folder: Path | str | None) -> Path | None:
    if folder is not None:
        return Path(folder).expanduser()
    named = os.environ.get("METIS_DATA", "")
    return Path(named).expanduser() if named else None


def _cache_folder() -> Path | None:
    try:
        import pooch
    except ImportError:
        return None
    return Path(pooch.os_cache("metis"))


def _missing(name: str, folder: Path | str | None) -> str:
    place = _user_folder(folder)
    return f"is not in {place} nor in the cache" if place is not None else "is not in the cache"


def _remedy(name: str) -> str:
    source = DATASETS[name]
    origin = f"; it comes from {source.origin}" if source.origin else ""
    return f"put {source.file} in a folder and name that with METIS_DATA or data.folder{origin}"


# --- downloads ------------------------------------------------------------------------------------


class _DownloadFailed(Exception):
    """The reason, in a few words, why the original files could not be had."""


def _failure(source: DatasetSource, reason: _DownloadFailed) -> DataError:
    return DataError(f"data set '{source.name}' could not be downloaded ({reason}); {_remedy(source.name)}")


def _download(remote: RemoteFile, folder: Path, progress: bool) -> Path:
    """Fetch one file from the first address that gives the right bytes."""
    try:
        import pooch
        import requests
    except ImportError as error:
        raise _DownloadFailed(_NO_POOCH) from error
    path = folder / remote.name
    reasons = []
    for url in remote.urls:
        host = urlsplit(url).hostname
        meter = _Meter(remote.name) if progress else False
        try:
            pooch.HTTPDownloader(progressbar=meter, chunk_size=1 << 16, timeout=30)(url, str(path), None)
        except requests.HTTPError as error:
            status = error.response.status_code if error.response is not None else "an error"
            reasons.append(f"{host} answered {status}")
            continue
        except requests.Timeout:
            reasons.append(f"{host} did not answer in time")
            continue
        except requests.ConnectionError:
            reasons.append(f"no connection to {host}")
            continue
        except requests.RequestException:
            reasons.append(f"the connection to {host} broke off")
            continue
        md5 = pooch.file_hash(str(path), alg="md5")
        if md5 == remote.md5:
            return path
        reasons.append(f"{remote.name} from {host} has the MD5 checksum {md5} and not {remote.md5}")
    raise _DownloadFailed(", ".join(reasons))


class _Meter:
    """One line on standard error that shows how far a download is; pooch calls it like a tqdm bar."""

    def __init__(self, name: str) -> None:
        self.name, self.total, self.done, self.shown = name, 0, 0, -1

    def update(self, size: int) -> None:
        self.done += size
        percent = min(100, 100 * self.done // self.total) if self.total else 0
        if percent != self.shown and sys.stderr.isatty():
            self.shown = percent
            sys.stderr.write(f"\r{self.name}  {percent} % of {self.total / 1e6:.0f} MB ")
            sys.stderr.flush()

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        start = "\r" if sys.stderr.isatty() else ""
        sys.stderr.write(f"{start}{self.name}  {self.done / 1e6:.1f} MB downloaded\n")


# --- formats --------------------------------------------------------------------------------------


def _convert(source: DatasetSource, files: Mapping[str, Path]) -> Arrays:
    assert source.convert is not None
    try:
        return source.convert(files)
    except _DAMAGE as error:
        raise DataError(f"data set '{source.name}' was downloaded but could not be read: {error}") from error


def _read(source: DatasetSource, path: Path) -> Dataset:
    """The arrays of an npz file, checked; a part of a set is accepted and noted."""
    try:
        # Opened here, because numpy leaves a file that turns out to be no archive open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in _ARRAYS}
    except KeyError as error:
        raise DataError(f"{path} is not a data set: it needs the arrays {', '.join(_ARRAYS)}") from error
    except (*_DAMAGE, TypeError) as error:  # TypeError: a single array, which is no archive
        raise DataError(f"{path} cannot be read as an npz file ({error}); delete it to download it anew") from error
    for split in ("train", "test"):
        x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
        if x.dtype != np.uint8 or x.shape[1:] != source.shape:
            raise DataError(
                f"{path}: x_{split} has the shape {x.shape} and dtype {x.dtype}; "
                f"'{source.name}' needs {('n', *source.shape)} of uint8".replace("'n'", "n")
            )
        if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
            raise DataError(
                f"{path}: y_{split} must hold one whole number for each example, not {y.shape} of {y.dtype}"
            )
        if len(y) and not 0 <= y.min() <= y.max() < len(source.class_names):
            raise DataError(
                f"{path}: y_{split} has labels from {y.min()} to {y.max()}; "
                f"'{source.name}' has 0 to {len(source.class_names) - 1}"
            )
        arrays[f"y_{split}"] = y.astype(np.int64)
    train, test = len(arrays["y_train"]), len(arrays["y_test"])
    note = ""
    if (train, test) != (source.train, source.test):
        note = f"{train:,} of {source.train:,} training and {test:,} of {source.test:,} test examples"
    return Dataset(source.name, **arrays, class_names=source.class_names, note=note)


def _cifar10(files: Mapping[str, Path]) -> Arrays:
    archive = files["cifar-10-binary.tar.gz"]
    members = [f"cifar-10-batches-bin/data_batch_{batch}.bin" for batch in range(1, 6)]
    return _cifar(archive, members, "cifar-10-batches-bin/test_batch.bin", label_bytes=1)


def _cifar100(files: Mapping[str, Path]) -> Arrays:
    archive = files["cifar-100-binary.tar.gz"]
    # Two label bytes, the coarse class and then the fine one, which is the label.
    return _cifar(archive, ["cifar-100-binary/train.bin"], "cifar-100-binary/test.bin", label_bytes=2)


def _cifar(archive: Path, train: list[str], test: str, label_bytes: int) -> Arrays:
    """A record is its label bytes and then the red, green and blue planes of 32 x 32."""
    blocks = {}
    with tarfile.open(archive) as tar:
        # Members are read, never unpacked, so that no path in the archive is trusted.
        for member in [*train, test]:
            stream = tar.extractfile(member)
            if stream is None:
                raise ValueError(f"{member} is not a file")
            blocks[member] = np.frombuffer(stream.read(), np.uint8).reshape(-1, label_bytes + 3 * 32 * 32)
    arrays = {}
    for split, members in (("train", train), ("test", [test])):
        records = np.concatenate([blocks[member] for member in members])
        planes = records[:, label_bytes:].reshape(-1, 3, 32, 32)
        arrays[f"x_{split}"] = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        arrays[f"y_{split}"] = records[:, label_bytes - 1].astype(np.int64)
    return arrays


def _mnist(files: Mapping[str, Path]) -> Arrays:
    arrays = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        for key, kind in (("x", "images-idx3"), ("y", "labels-idx1")):
            with gzip.open(files[f"{prefix}-{kind}-ubyte.gz"]) as stream:
                arrays[f"{key}_{split}"] = _idx(stream)
    return _with_long_labels(arrays)


def _emnist(files: Mapping[str, Path]) -> Arrays:
    arrays = {}
    with zipfile.ZipFile(files["gzip.zip"]) as archive:
        for split in ("train", "test"):
            for key, kind in (("x", "images-idx3"), ("y", "labels-idx1")):
                member = f"gzip/emnist-byclass-{split}-{kind}-ubyte.gz"
                with archive.open(member) as packed, gzip.open(packed) as stream:
                    arrays[f"{key}_{split}"] = _idx(stream)
            # EMNIST stores its images column by column; turned, they stand upright like those of MNIST.
            arrays[f"x_{split}"] = np.ascontiguousarray(arrays[f"x_{split}"].transpose(0, 2, 1))
    return _with_long_labels(arrays)


def _idx(stream: IO[bytes] | gzip.GzipFile) -> NDArray[np.uint8]:
    """An IDX file of bytes: 0, 0, 8, the number of axes, their lengths (big endian), the values."""
    zero, kind, axes = struct.unpack(">HBB", stream.read(4))
    if (zero, kind) != (0, 8):
        raise ValueError("not an IDX file of unsigned bytes")
    shape = struct.unpack(f">{axes}I", stream.read(4 * axes))
    return np.frombuffer(stream.read(), np.uint8).reshape(shape)


def _with_long_labels(arrays: Arrays) -> Arrays:
    return {key: array.astype(np.int64) if key.startswith("y_") else array for key, array in arrays.items()}


# --- the data sets --------------------------------------------------------------------------------


def _idx_files(md5_by_name: Mapping[str, str], *homes: str) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(name, tuple(home + name for home in homes), md5) for name, md5 in md5_by_name.items())


_CIFAR_HOME = "https://www.cs.toronto.edu/~kriz/"

_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"

_CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
    camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
    dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
    leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
    otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
    road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
    sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
"""

_FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip

for _known in (
    DatasetSource(
        name="digits",
        title="Optical Recognition of Handwritten Digits (UCI), as in scikit-learn; in the package",
        shape=(8, 8),
        class_names=tuple(string.digits),
        train=1437,
        test=360,
    ),
    DatasetSource(
        name="cifar10",
        title="CIFAR-10",
        shape=(32, 32, 3),
        class_names=tuple(_CIFAR10_CLASSES.split()),
        train=50_000,
        test=10_000,
        files=(
            RemoteFile(
                "cifar-10-binary.tar.gz",
                (_CIFAR_HOME + "cifar-10-binary.tar.gz",),
                "c32a1d4ab5d03f1284b67883e8d87530",
            ),
        ),
        convert=_cifar10,
    ),
    DatasetSource(
        name="cifar100",
        title="CIFAR-100, the 100 fine classes",
        shape=(32, 32, 3),
        class_names=tuple(_CIFAR100_CLASSES.split()),
        train=50_000,
        test=10_000,
        files=(
            RemoteFile(
                "cifar-100-binary.tar.gz",
                (_CIFAR_HOME + "cifar-100-binary.tar.gz",),
                "03b5dce01913d631647c71ecec9e9cb8",
            ),
        ),
        convert=_cifar100,
    ),
    DatasetSource(
        name="mnist",
        title="MNIST",
        shape=(28, 28),
        class_names=tuple(string.digits),
        train=60_000,
        test=10_000,
        files=_idx_files(
            {
                "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
                "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
                "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
            },
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        convert=_mnist,
    ),
    DatasetSource(
        name="fashion_mnist",
        title="Fashion-MNIST",
        shape=(28, 28),
        class_names=_FASHION_CLASSES,
        train=60_000,
        test=10_000,
        files=_idx_files(
            {
                "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
                "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
                "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
            },
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        convert=_mnist,
    ),
    DatasetSource(
        name="emnist",
        title="EMNIST By Class (digits, capital and small letters)",
        shape=(28, 28),
        class_names=tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
        train=697_932,
        test=116_323,
        files=(
            RemoteFile(
                "gzip.zip",
                (
                    "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                    "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",
                ),
                "58c8d27c78d21e728a6bc7b3cc06412e",
            ),
        ),
        convert=_emnist,
    ),
    DatasetSource(
        name="fcon1000_brain_age",
        title="Brain age from MRI measures, 1000 Functional Connectomes Project (23 sites)",
        shape=(218,),
        class_names=(),
        train=860,
        test=218,
        task="regression",
        read=tables.fcon1000_brain_age,
        origin="data/fcon1000.csv of github.com/predictive-clinical-neuroscience/PCNtoolkit-demo, unchanged",
    ),
    DatasetSource(
        name="ixi_brain_age",
        title="Brain age from cortical thickness, IXI (3 hospitals)",
        shape=(70,),
        class_names=(),
        train=444,
        test=112,
        task="regression",
        read=tables.ixi_brain_age,
        origin="IXI_aparc_thickness.csv of that PCNtoolkit-demo, with IXI.xls of brain-development.org",
    ),
    DatasetSource(
        name="heart_disease",
        title="Heart Disease (UCI; 4 hospitals)",
        shape=(22,),
        class_names=("no disease", "disease"),
        train=736,
        test=184,
        read=tables.heart_disease,
        origin="the four processed.*.data of UCI (doi 10.24432/C52P4X) with a column hospital in front",
    ),
    DatasetSource(
        name="brain_phantoms",
        title="Synthetic 3D brain phantoms with ages; made from a seed",
        shape=(1, 24, 24, 24),
        class_names=(),
        train=800,
        test=200,
        task="regression",
        generate=volumes.phantom_dataset,
    ),
):
    DATASETS.add(_known.name, _known)
